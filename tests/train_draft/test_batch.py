"""A batch in the form that a device computes."""

import pytest
import torch

from tasks.common import kernels
from tasks.common.hidden_states import Sample
from tasks.common.params import TrainDraft
from tasks.common.storage import StoredRows, decode
from tasks.train_draft.batch import BatchForm, StoredBatch
from tests.reference import VOCAB, make_sample


def stored(samples: list[Sample], storage_dtype: str):
    for sample in samples:
        rows = StoredRows.of(sample.aux, sample.last, storage_dtype)
        kept = Sample(sample.id, sample.input_ids, sample.loss_mask, rows.aux, rows.last)
        yield kept, rows.aux_scale, rows.last_scale


def batch_of(samples: list[Sample], storage_dtype: str = "bfloat16", batch_tokens: int = 200):
    form = BatchForm("cpu", torch.float32, 3, torch.arange(VOCAB), batch_tokens)
    tokens = sum(sample.num_tokens for sample in samples)
    return StoredBatch.of(list(stored(samples, storage_dtype)), torch.zeros(tokens), form).on("cpu", torch.float32)


@pytest.mark.parametrize("storage_dtype", ["float32", "bfloat16", "float8"])
def test_padding_is_one_more_sample_in_which_nothing_is_learnt(monkeypatch, storage_dtype):
    torch.manual_seed(0)
    samples = [make_sample("a", 4, 9), make_sample("b", 3, 7)]
    plain = batch_of(samples, storage_dtype)
    monkeypatch.setattr(kernels, "COMPILED_ON", {"cuda", "cpu"})
    padded, tokens = batch_of(samples, storage_dtype), plain.num_tokens
    assert padded.num_tokens == tokens == 23
    assert padded.samples.bounds == ((0, 13), (13, 23), (23, 256))
    assert padded.samples.sample_ids == ("a", "b")
    for name in ("input_ids", "loss_mask", "aux", "last"):
        whole = getattr(padded.samples, name)
        assert torch.equal(whole[:tokens], getattr(plain.samples, name))
        assert not whole[tokens:].any()
    assert torch.equal(padded.lessons.loss_positions, plain.lessons.loss_positions)
    assert torch.equal(padded.lessons.supervised, plain.lessons.supervised)
    assert padded.inputs.rows.count == plain.inputs.rows.count


def test_states_are_decoded_on_the_device():
    torch.manual_seed(0)
    sample = make_sample("a", 4, 9)
    rows = StoredRows.of(sample.aux, sample.last, "float8")
    batch = batch_of([sample], "float8")
    assert torch.equal(batch.samples.aux, decode(rows.aux, rows.aux_scale).flatten(1))
    assert torch.equal(batch.samples.last, decode(rows.last, rows.last_scale))


@pytest.mark.parametrize(("answer", "padded"), [(40, 256), (250, 512), (395, 512), (396, 640)])
def test_a_sample_longer_than_a_batch_is_padded_to_a_multiple(monkeypatch, answer, padded):
    """Of 200 tokens, and to whole tiles of 128."""
    monkeypatch.setattr(kernels, "COMPILED_ON", {"cuda", "cpu"})
    assert batch_of([make_sample("a", 5, answer)]).samples.num_tokens == padded


def test_bfloat16_is_computed_on_a_gpu_and_float32_on_a_cpu_unless_said_otherwise():
    assert TrainDraft().computed_in("cuda:1") is torch.bfloat16
    assert TrainDraft().computed_in("cpu") is torch.float32
    assert TrainDraft(dtype="float32").computed_in("cuda") is torch.float32
