"""What the hooks make of a forward pass, in the two forms that SGLang's layers have, and what they refuse."""

import resource
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tasks.common.errors import DraftlineError
from tasks.common.shard import ShardWriter, StoredShard, shard_is_done
from tasks.common.shard_layout import ShardPlan
from tasks.dump_hidden_states import hooks
from tasks.dump_hidden_states.layer_output import LayerOutput
from tasks.dump_hidden_states.recorder import Recorder
from tasks.dump_hidden_states.spool import ERROR, Destination
from tests.flows.processes import until

HIDDEN, AUX = 8, 2
# What layers return: of 0.5.16 and of 0.5.23, and what DeepSeek's do.
PAIR, TRIPLE, TRIPLE_OF_NONE = "a pair", "a pair and indices", "a pair and None"
STREAM, STREAM_AND_INDICES = "a stream", "a stream and indices"
STREAMS = (STREAM, STREAM_AND_INDICES)
INDICES = torch.zeros(1, 2, dtype=torch.int32)


class Layer(torch.nn.Module):
    """A decoder layer as a release has it: what it returns in `forward`, and how its output is had from that."""

    def __init__(self, form: str):
        super().__init__()
        self.form, self.state, self.residual = form, None, None
        if form in STREAMS:
            self.attn_boundary = SimpleNamespace(
                capture_output=lambda output, batch: ("handle", output + self.residual)
            )

    def forward(self, positions, hidden, batch):
        self.residual = torch.full_like(self.state, 0.5)
        value = self.state - self.residual
        return {
            PAIR: (value, self.residual),
            TRIPLE: (value, self.residual, INDICES),
            TRIPLE_OF_NONE: (value, self.residual, None),
            STREAM: value,
            STREAM_AND_INDICES: (value, INDICES),
        }[self.form]


class Decoder(torch.nn.Module):
    def forward(self, last, batch):
        return last


class Engine:
    """Forward passes over a shard's samples, the way a scheduler cuts and batches them."""

    def __init__(self, folder, lengths=(4, 6, 3), form: str = PAIR, is_first: bool = True, keywords: bool = False):
        generator = torch.Generator().manual_seed(0)
        rows = [
            (f"s{n}", torch.randint(50, (length,), generator=generator).tolist(), [1] * length)
            for n, length in enumerate(lengths)
        ]
        self.plan = ShardPlan.of("shard-00000", "plan", rows)
        self.folder, self.spool, self.form, self.keywords = folder / "train", folder / "spool", form, keywords
        self.folder.mkdir()
        self.spool.mkdir()
        destination = Destination(self.plan, self.folder)
        destination.put(self.spool)
        self.rids = destination.request_ids()
        self.aux = torch.randn(self.plan.tokens, AUX, HIDDEN, generator=generator)
        self.last = torch.randn(self.plan.tokens, HIDDEN, generator=generator)
        self.recorder = Recorder(self.spool, AUX, HIDDEN, "float32", is_first)
        hooks._recorders[str(self.spool)] = self.recorder
        config = {"spool": str(self.spool)}
        self.layers, self.decoder = [Layer(form) for _ in range(AUX)], Decoder()
        for slot, layer in enumerate(self.layers):
            layer.register_forward_hook(hooks.layer_hook({**config, "slot": slot}))
        self.decoder.register_forward_hook(hooks.last_hook(config))

    def run(
        self, *pieces: tuple[int, int, int], extend: bool = True, others: int = 0, shift: int = 0, skip: bool = False
    ):
        """One pass over pieces (sample, first position, tokens), behind `others` tokens of a request that is not ours.

        Args:
            shift: rows by which token ids are mixed up.
            skip: the second layer does not run.
        """
        starts = [int(self.plan.offsets[sample]) + first for sample, first, _ in pieces]
        rows = torch.cat([torch.arange(start, start + piece[2]) for start, piece in zip(starts, pieces, strict=True)])
        ids = torch.from_numpy(self.plan.input_ids).long()[rows].roll(shift)
        batch = SimpleNamespace(
            forward_mode=SimpleNamespace(is_extend=lambda: extend),
            rids=(["HEALTH_CHECK_1"] if others else []) + [self.rids[sample] for sample, _, _ in pieces],
            extend_seq_lens_cpu=([others] if others else []) + [tokens for _, _, tokens in pieces],
            input_ids=torch.cat([torch.zeros(others, dtype=torch.long), ids]),
            positions=torch.cat([torch.arange(others), *(torch.arange(f, f + t) for _, f, t in pieces)]),
            residual_stream=object() if self.form in STREAMS else None,
        )
        pad = torch.full((others, HIDDEN), 9.0)
        returned = []
        for slot, layer in enumerate(self.layers[: 1 if skip else AUX]):
            layer.state = torch.cat([pad, self.aux[rows, slot]])
            if self.keywords:
                returned.append(layer(positions=batch.positions, hidden=pad, batch=batch))
            else:
                returned.append(layer(batch.positions, pad, batch))
        self.decoder(torch.cat([pad, self.last[rows]]), batch)
        return returned

    def wait(self) -> StoredShard:
        """The shard, when it is there."""
        error = self.spool / ERROR
        until(lambda: error.exists() or shard_is_done(self.folder, "shard-00000", "plan"))
        assert not error.exists(), error.read_text()
        return StoredShard(self.folder / "shard-00000.safetensors")

    def settle(self) -> None:
        """Until no thread has anything left to do, where no shard is whole."""
        self.recorder._threads.shutdown(wait=True)

    def error(self) -> str:
        self.settle()
        assert not list(self.folder.glob("shard-*"))
        return (self.spool / ERROR).read_text()


@pytest.mark.parametrize("form", [PAIR, TRIPLE, TRIPLE_OF_NONE, STREAM, STREAM_AND_INDICES])
def test_rows_go_to_their_requests_whatever_the_batch_and_the_chunks(tmp_path, form):
    engine = Engine(tmp_path, form=form)
    engine.run((0, 0, 4), (1, 0, 2), others=3)
    engine.run((1, 2, 3))
    engine.run((2, 0, 3), (1, 5, 1))
    stored = engine.wait()
    assert torch.equal(stored.last, engine.last)
    torch.testing.assert_close(stored.aux, engine.aux)


def test_the_handle_that_a_layer_must_return_is_returned(tmp_path):
    assert Engine(tmp_path, form=STREAM).run((0, 0, 4)) == ["handle", "handle"]


def test_indices_that_a_layer_returns_are_returned_beside_the_handle(tmp_path):
    assert Engine(tmp_path, form=STREAM_AND_INDICES).run((0, 0, 4)) == [("handle", INDICES), ("handle", INDICES)]


@pytest.mark.parametrize("form", [PAIR, TRIPLE])
def test_a_pair_is_left_as_it_is(tmp_path, form):
    engine = Engine(tmp_path, form=form)
    for returned, layer in zip(engine.run((0, 0, 4)), engine.layers, strict=True):
        assert torch.equal(returned[0], layer.state - 0.5)
        assert returned[1] is layer.residual


def test_layers_called_by_keyword_are_seen_from_their_second_call_on(tmp_path):
    engine = Engine(tmp_path, keywords=True)
    ours, engine.rids[0] = engine.rids[0], "HEALTH_CHECK_1"
    engine.run((0, 0, 4))  # the server's own first request
    engine.rids[0] = ours
    engine.run((0, 0, 4), (1, 0, 6), (2, 0, 3))
    torch.testing.assert_close(engine.wait().aux, engine.aux)


def test_a_first_call_by_keyword_that_is_ours_is_not_passed_over(tmp_path):
    with pytest.raises(DraftlineError, match="after 0 of 2 slots"):
        Engine(tmp_path, keywords=True).run((0, 0, 4))


def test_decoding_and_requests_of_others_leave_no_trace(tmp_path):
    engine = Engine(tmp_path)
    engine.run((0, 0, 4), extend=False)
    engine.rids[0] = "HEALTH_CHECK_2"
    engine.run((0, 0, 4))
    engine.settle()
    assert list(engine.folder.iterdir()) == []


def test_a_request_that_is_computed_again_overwrites_itself(tmp_path):
    engine = Engine(tmp_path)
    engine.run((0, 0, 4), (1, 0, 3))
    engine.run((1, 0, 6))  # it was retracted for lack of memory
    engine.run((2, 0, 3))
    torch.testing.assert_close(engine.wait().aux, engine.aux)


def test_rows_of_other_tokens_are_refused(tmp_path):
    engine = Engine(tmp_path)
    engine.run((0, 0, 4), (1, 0, 6), shift=1)
    assert "sample s0: from position 0 on the server computed other tokens than were planned" in engine.error()


def test_what_went_wrong_in_a_thread_ends_the_server_at_its_next_pass(tmp_path):
    engine = Engine(tmp_path)
    engine.run((0, 0, 4), (1, 0, 6), shift=1)
    until((engine.spool / ERROR).exists)
    with pytest.raises(DraftlineError, match="rows of the batch are mixed up"):
        engine.run((2, 0, 3))


def test_an_error_lies_in_the_spool_whole_or_not_at_all(tmp_path):
    """The dump reads it as soon as it is there."""
    engine = Engine(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))  # bytes of a file: writing breaks off within the sentence
    try:
        engine.run((0, 0, 4))
        engine.settle()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert [path.name for path in engine.spool.iterdir()] == ["train-shard-00000"]
    with pytest.raises(OSError, match="File too large"):
        engine.run((1, 0, 6))


def test_cached_tokens_leave_the_shard_unfinished(tmp_path):
    engine = Engine(tmp_path)
    engine.run((0, 0, 4), (1, 2, 4), (2, 0, 3))  # the first two tokens of s1 came from the prefix cache
    engine.settle()
    assert not shard_is_done(engine.folder, "shard-00000", "plan")


def test_a_layer_whose_hook_did_not_run_is_an_error(tmp_path):
    with pytest.raises(DraftlineError, match="after 1 of 2 slots"):
        Engine(tmp_path).run((0, 0, 4), skip=True)


STATE = torch.zeros(4, HIDDEN)


@pytest.mark.parametrize(
    "output",
    [
        STATE,
        (STATE, torch.zeros(4, 1)),
        (STATE,),
        (STATE, None),
        (STATE, INDICES),
        (STATE, STATE, STATE),
        (STATE, STATE.int()),
    ],
)
def test_an_output_that_cannot_be_told_is_never_guessed(output):
    with pytest.raises(DraftlineError, match=r"Identity returned .*neither a pair of hidden state and residual"):
        LayerOutput.of(torch.nn.Identity(), SimpleNamespace(residual_stream=None), output)


def test_a_part_of_an_output_is_refused():
    part = STATE.clone()
    part._sglang_needs_allreduce_fusion = True
    with pytest.raises(DraftlineError, match="returned a part of its output"):
        LayerOutput.of(torch.nn.Identity(), SimpleNamespace(), (part, STATE))


def test_forms_that_change_from_layer_to_layer_are_refused(tmp_path):
    engine = Engine(tmp_path, form=STREAM)
    engine.layers[1].form = PAIR
    with pytest.raises(
        DraftlineError, match="slot 1 came as a pair of hidden state and residual, those before as a value"
    ):
        engine.run((0, 0, 4))


def test_a_call_without_a_batch_is_refused(tmp_path):
    layer = Engine(tmp_path).layers[0]
    layer.state = STATE
    layer(None, None, None)
    with pytest.raises(DraftlineError, match=r"called with \['NoneType', .*\]: no ForwardBatch among them"):
        layer(None, None, None)


def test_only_the_first_rank_writes(tmp_path):
    engine = Engine(tmp_path, form=STREAM, is_first=False)
    assert engine.run((0, 0, 4)) == ["handle", "handle"]  # it still takes part in the sum over ranks
    engine.settle()
    assert list(engine.folder.iterdir()) == []


def test_samples_that_follow_each_other_are_written_as_one(tmp_path, monkeypatch):
    written = []
    real = ShardWriter.write
    monkeypatch.setattr(
        ShardWriter, "write", lambda self, start, rows: (written.append((start, len(rows))), real(self, start, rows))
    )
    engine = Engine(tmp_path)
    engine.run((1, 2, 4), (2, 0, 3), (0, 0, 4), (1, 0, 2), others=3)
    assert torch.equal(engine.wait().last, engine.last)
    assert written == [(6, 7), (0, 6)]


def test_a_plan_travels_through_the_spool(tmp_path):
    engine = Engine(tmp_path)
    taken = Destination.take(engine.spool, "train-shard-00000")
    assert (taken.plan.name, taken.plan.sha256, taken.plan.ids) == ("shard-00000", "plan", ("s0", "s1", "s2"))
    assert np.array_equal(taken.plan.input_ids, engine.plan.input_ids)
    assert taken.folder == engine.folder.absolute()
