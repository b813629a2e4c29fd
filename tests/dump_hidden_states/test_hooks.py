"""What the hooks make of a forward pass, in the two forms that SGLang's layers have, and what they refuse."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tasks.common.errors import DraftlineError
from tasks.common.shard import ShardPlan, StoredShard, shard_is_done
from tasks.dump_hidden_states.hooks import Recorder
from tasks.dump_hidden_states.spool import ERROR, Destination

HIDDEN, AUX = 8, 2
PAIR, STREAM = "0.5.16", "0.5.23"


class Layer(torch.nn.Module):
    """A decoder layer as a release has it: what it returns in `forward`, and how its output is had from that."""

    def __init__(self, form: str, state: torch.Tensor):
        super().__init__()
        self.form, self.state, self.residual = form, state, torch.full_like(state, 0.5)
        if form == STREAM:
            self.attn_boundary = SimpleNamespace(
                capture_output=lambda output, batch: ("handle", output + self.residual)
            )

    def forward(self, positions, hidden, batch, *residual):
        return (self.state - self.residual, self.residual) if self.form == PAIR else self.state - self.residual


class Engine:
    """Forward passes over a shard's samples, the way a scheduler cuts and batches them."""

    def __init__(self, folder, lengths=(4, 6, 3), form: str = PAIR):
        generator = torch.Generator().manual_seed(0)
        rows = [
            (f"s{n}", torch.randint(50, (length,), generator=generator).tolist(), [1] * length)
            for n, length in enumerate(lengths)
        ]
        self.plan = ShardPlan.of("shard-00000", "plan", rows)
        self.folder, self.spool, self.form = folder / "train", folder / "spool", form
        self.folder.mkdir()
        self.spool.mkdir()
        destination = Destination(self.plan, self.folder)
        destination.put(self.spool)
        self.rids = destination.request_ids()
        self.aux = torch.randn(self.plan.tokens, AUX, HIDDEN, generator=generator)
        self.last = torch.randn(self.plan.tokens, HIDDEN, generator=generator)
        self.recorder = Recorder(self.spool, AUX, HIDDEN, "float32", is_first=True)

    def run(
        self, *pieces: tuple[int, int, int], extend: bool = True, others: int = 0, shift: int = 0, skip: bool = False
    ):
        """One pass over pieces (sample, first position, tokens), behind `others` tokens of a request that is not ours.

        Args:
            shift: rows by which token ids are mixed up.
            skip: the second layer's hook does not run.
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
            residual_stream=object() if self.form == STREAM else None,
        )
        pad = torch.full((others, HIDDEN), 9.0)
        returned = []
        for slot in range(AUX):
            layer = Layer(self.form, torch.cat([pad, self.aux[rows, slot]]))
            args = (batch.positions, pad, batch)
            if not (skip and slot == 1):
                returned.append(self.recorder.layer(slot)(layer, args, layer(*args)))
        self.recorder.last(
            torch.nn.Identity(), (batch.input_ids, batch.positions, batch), torch.cat([pad, self.last[rows]])
        )
        return returned

    def wait(self) -> StoredShard:
        while not shard_is_done(self.folder, "shard-00000", "plan"):
            assert not (self.spool / ERROR).exists(), (self.spool / ERROR).read_text()
        return StoredShard(self.folder / "shard-00000.safetensors")

    def settle(self) -> None:
        """Until no thread has anything left to do."""
        self.recorder._threads.shutdown(wait=True)

    def error(self) -> str:
        self.settle()
        assert not list(self.folder.glob("shard-*"))
        return (self.spool / ERROR).read_text()


@pytest.mark.parametrize("form", [PAIR, STREAM])
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


def test_a_pair_is_left_as_it_is(tmp_path):
    assert Engine(tmp_path).run((0, 0, 4)) == [None, None]


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
    while not (engine.spool / ERROR).exists():
        pass
    with pytest.raises(DraftlineError, match="rows of the batch are mixed up"):
        engine.run((2, 0, 3))


def test_cached_tokens_leave_the_shard_unfinished(tmp_path):
    engine = Engine(tmp_path)
    engine.run((0, 0, 4), (1, 2, 4), (2, 0, 3))  # the first two tokens of s1 came from the prefix cache
    engine.settle()
    assert not shard_is_done(engine.folder, "shard-00000", "plan")


def test_a_layer_whose_hook_did_not_run_is_an_error(tmp_path):
    with pytest.raises(DraftlineError, match="after 1 of 2 slots"):
        Engine(tmp_path).run((0, 0, 4), skip=True)


@pytest.mark.parametrize(
    "output", [torch.zeros(4, HIDDEN), (torch.zeros(4, HIDDEN), torch.zeros(4, 1)), (torch.zeros(4, HIDDEN),)]
)
def test_an_output_that_cannot_be_told_is_never_guessed(tmp_path, output):
    recorder = Engine(tmp_path).recorder
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_extend=lambda: True),
        rids=["states:train-shard-00000:0"],
        extend_seq_lens_cpu=[4],
    )
    with pytest.raises(DraftlineError, match=r"Identity returned .*neither SGLang 0\.5\.16's pair"):
        recorder.layer(0)(torch.nn.Identity(), (batch,), output)


def test_a_part_of_an_output_is_refused(tmp_path):
    engine = Engine(tmp_path)
    layer = Layer(PAIR, torch.zeros(4, HIDDEN))
    part, residual = layer(None, None, None)
    part._sglang_needs_allreduce_fusion = True
    batch = SimpleNamespace(
        forward_mode=SimpleNamespace(is_extend=lambda: True), rids=engine.rids[:1], extend_seq_lens_cpu=[4]
    )
    with pytest.raises(DraftlineError, match="returned a part of its output"):
        engine.recorder.layer(0)(layer, (batch,), (part, residual))


def test_a_call_without_a_batch_is_refused(tmp_path):
    with pytest.raises(DraftlineError, match=r"called with \['Tensor'\]: no ForwardBatch among them"):
        Engine(tmp_path).recorder.layer(0)(torch.nn.Identity(), (torch.zeros(2),), torch.zeros(2))


def test_only_the_first_rank_writes(tmp_path):
    engine = Engine(tmp_path, form=STREAM)
    engine.recorder = Recorder(engine.spool, AUX, HIDDEN, "float32", is_first=False)
    assert engine.run((0, 0, 4)) == ["handle", "handle"]  # it still takes part in the sum over ranks
    engine.settle()
    assert list(engine.folder.iterdir()) == []


def test_a_plan_travels_through_the_spool(tmp_path):
    engine = Engine(tmp_path)
    taken = Destination.take(engine.spool, "train-shard-00000")
    assert (taken.plan.name, taken.plan.sha256, taken.plan.ids) == ("shard-00000", "plan", ("s0", "s1", "s2"))
    assert np.array_equal(taken.plan.input_ids, engine.plan.input_ids)
    assert taken.folder == engine.folder.absolute()
