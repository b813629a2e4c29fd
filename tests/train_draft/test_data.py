"""Batches of packed samples."""

import numpy as np
import pytest
import torch

from tasks.common.contract import Contract
from tasks.common.errors import DraftlineError
from tasks.common.hidden_states import HiddenStates, Sample
from tasks.train_draft.batch import BatchForm
from tasks.train_draft.data import BatchStream, DraftData, Share, pack
from tests.stored import write_split

CONTRACT = Contract(
    architecture="LlamaForCausalLM",
    num_layers=8,
    hidden_size=4,
    vocab_size=50,
    aux_layer_ids=(1, 3),
    last_is_normed=True,
    target_sha256="t",
    tokenizer_sha256="k",
)


def make_data(
    folder, lengths: list[int], batch_tokens: int = 32, supervised: bool = True, storage_dtype: str = "float32"
) -> DraftData:
    """One sample of each length, the second half of it supervised."""
    torch.manual_seed(0)
    samples = []
    for number, tokens in enumerate(lengths):
        mask = (torch.arange(tokens) >= tokens // 2).to(torch.uint8) * int(supervised)
        ids = torch.randint(50, (tokens,), dtype=torch.int32)
        samples.append(Sample(f"s{number}", ids, mask, torch.randn(tokens, 2, 4), torch.randn(tokens, 4)))
    half = len(samples) // 2
    form = BatchForm("cpu", torch.float32, 3, torch.arange(sum(lengths)), batch_tokens)
    states = write_split(folder, CONTRACT, [samples[:half], samples[half:]], storage_dtype)
    return DraftData(states, np.arange(sum(lengths), dtype=np.int32), batch_tokens, form)


def test_an_epoch_holds_every_sample_once(tmp_path):
    data = make_data(tmp_path, [5, 9, 12, 30, 7, 7, 20])
    assert sorted(index for batch in data.epoch(0, 3) for index in batch) == list(range(7))


def test_a_batch_is_closed_before_it_would_grow_too_long(tmp_path):
    data = make_data(tmp_path, [5, 9, 12, 30, 7, 7, 20])
    for batch in data.epoch(0, 0):
        assert data.states.tokens[batch].sum() <= 32


def test_a_sample_longer_than_a_batch_is_trained_alone(tmp_path):
    assert make_data(tmp_path, [5, 90, 6]).batches(np.arange(3)) == [[0, 2], [1]]


def test_order_follows_from_seed_and_epoch(tmp_path):
    data = make_data(tmp_path, [4] * 40)
    assert data.epoch(0, 1) == data.epoch(0, 1)
    assert data.epoch(0, 1) != data.epoch(0, 2)
    assert data.epoch(0, 1) != data.epoch(1, 1)


def test_a_batch_lays_its_samples_end_to_end(tmp_path):
    data = make_data(tmp_path, [5, 9, 12])
    batch = data.read([2, 0])
    first, second = data.states.read(2), data.states.read(0)
    assert batch.samples.sample_ids == ("s2", "s0")
    assert batch.samples.bounds == ((0, 12), (12, 17))
    assert torch.equal(batch.samples.aux, torch.cat([first.aux, second.aux]).flatten(1))
    assert batch.samples.positions.tolist() == [*range(12), *range(5)]
    # The argmax is kept over the whole split, here 0, 1, 2, ...: samples start at 0, 5 and 14.
    assert batch.target_argmax.tolist() == [*range(14, 26), *range(5)]


def test_a_sample_goes_where_it_leaves_the_least_room():
    tokens = np.array([20, 25, 7, 12])
    assert pack(tokens, np.arange(4), 32) == [[0, 3], [1, 2]]


def test_batches_of_many_samples_are_nearly_full():
    tokens = np.random.default_rng(0).integers(10, 400, 5000)
    batches = pack(tokens, np.random.default_rng(1).permutation(5000), 2048)
    assert sorted(index for batch in batches for index in batch) == list(range(5000))
    assert tokens.sum() / (2048 * len(batches)) > 0.98


@pytest.mark.parametrize("workers", [0, 2])
def test_a_stream_goes_on_where_it_was_saved_within_an_epoch_and_at_its_end(tmp_path, workers):
    data = make_data(tmp_path, [5, 9, 12, 30, 7, 7, 20])
    in_epoch = len(data.epoch(3, 0))
    whole = [data.read(batch) for epoch in (0, 1, 2) for batch in data.epoch(3, epoch)]
    for saved in (1, in_epoch, in_epoch + 1):
        first = BatchStream(data, seed=3, workers=workers)
        batches = iter(first)
        for _ in range(saved):
            next(batches)
        second = BatchStream(data, seed=3, workers=workers)
        second.load_state_dict(first.state_dict())
        for expected, batch in zip(whole[saved : saved + in_epoch], second, strict=False):
            assert batch.samples.sample_ids == expected.samples.sample_ids
            assert torch.equal(batch.samples.aux, expected.samples.aux)
            assert torch.equal(batch.target_argmax, expected.target_argmax)


def sample_ids(data: DraftData, share: Share, steps: int, position: dict | None = None) -> list[list[str]]:
    """What one process reads in so many optimiser steps, and afterwards the position."""
    stream = BatchStream(data, seed=3, share=share)
    if position:
        stream.load_state_dict(position)
    batches = iter(stream)
    read = [next(batches).samples.sample_ids for _ in range(steps * share.of // share.processes)]
    return [*read, stream.state_dict()]


def test_processes_share_the_batches_of_each_step_without_overlap(tmp_path):
    data = make_data(tmp_path, [5, 9, 12, 30, 7, 7, 20, 31, 32, 29])
    *alone, position = sample_ids(data, Share(0, 1, of=4), steps=5)
    shares = [sample_ids(data, Share(rank, 2, of=4), steps=5) for rank in (0, 1)]
    assert [batches.pop() for batches in shares] == [position, position]
    assert [batch for of_both in zip(*shares, strict=True) for batch in of_both] == alone
    in_epoch = len(data.epoch(3, 0))
    assert in_epoch % 4, "else no step reaches over the end of an epoch"
    first = [name for batch in alone[:in_epoch] for name in batch]
    assert sorted(first) == sorted(data.states.ids)


def test_another_number_of_processes_goes_on_with_the_next_step(tmp_path):
    data = make_data(tmp_path, [5, 9, 12, 30, 7, 7, 20, 31, 32, 29])
    *whole, _ = sample_ids(data, Share(0, 1, of=4), steps=4)
    *_, position = sample_ids(data, Share(1, 2, of=4), steps=2)
    assert sample_ids(data, Share(0, 1, of=4), steps=2, position=position)[:-1] == whole[8:]
    assert sample_ids(data, Share(3, 4, of=4), steps=2, position=position)[:-1] == whole[11::4]


@pytest.mark.parametrize("storage_dtype", ["float32", "bfloat16", "float8"])
@pytest.mark.parametrize("workers", [0, 1])
def test_batches_are_the_numbers_that_are_stored(tmp_path, storage_dtype, workers):
    data = make_data(tmp_path, [5, 9, 12, 30], storage_dtype=storage_dtype)
    batch = next(iter(BatchStream(data, seed=0, workers=workers)))
    samples = [data.states.read(data.states.ids.index(name)) for name in batch.samples.sample_ids]
    assert batch.samples.aux.dtype == torch.float32
    assert torch.equal(batch.samples.aux, torch.cat([sample.aux for sample in samples]).flatten(1).float())
    assert torch.equal(batch.samples.last, torch.cat([sample.last for sample in samples]).float())


@pytest.mark.parametrize("workers", [0, 1])
def test_a_shard_that_cannot_be_read_is_its_sentence_whoever_reads(tmp_path, workers):
    data = make_data(tmp_path, [5, 9, 12, 30])
    data.states = HiddenStates(tmp_path)  # no shard is open
    (tmp_path / "shard-00001.safetensors").write_bytes(b"short")
    with pytest.raises(DraftlineError, match=r"^\S+shard-00001.safetensors: cannot be read \(sample s\d\): [^\n]+$"):
        list(zip(range(4), BatchStream(data, seed=0, workers=workers), strict=False))


def test_a_position_of_another_order_is_refused(tmp_path):
    stream = BatchStream(make_data(tmp_path, [5, 9]), seed=1)
    with pytest.raises(DraftlineError, match="seed 0, this one has seed 1"):
        stream.load_state_dict({"seed": 0, "epoch": 0, "batch": 1})


def test_samples_that_supervise_nothing_are_left_out(tmp_path):
    data = make_data(tmp_path, [2, 9, 12])  # of two tokens none is the third
    assert data.usable.tolist() == [1, 2]


def test_a_split_that_supervises_nothing_is_an_error(tmp_path):
    with pytest.raises(DraftlineError, match=r"none of the 2 samples .s0, s1, .* has a supervised position"):
        make_data(tmp_path, [6, 9], supervised=False)
