"""The batch size that fits, from what batches took; and the error that names it."""

import pytest
import torch

from tasks.common.errors import DraftlineError
from tasks.train_draft.gpu_memory import MemoryByTokens, out_of_memory
from tasks.train_draft.prepare import prepare_training
from tests.train_draft.conftest import DRAFT

GIB = 2**30


def test_tokens_that_fit_follow_from_the_largest_batch():
    memory = MemoryByTokens()
    assert memory.fitting_tokens(80 * GIB) is None
    memory.observe(tokens=512, held=10 * GIB, peak=14 * GIB)  # small ones have their fixed share in each token
    memory.observe(tokens=4096, held=10 * GIB, peak=30 * GIB)
    usable = 0.92 * 80 - 10
    assert memory.fitting_tokens(80 * GIB) == pytest.approx(usable / 20 * 4096, abs=64)
    assert memory.fitting_tokens(80 * GIB, still_to_come=8 * GIB) == pytest.approx((usable - 8) / 20 * 4096, abs=64)
    assert memory.fitting_tokens(8 * GIB) == 0


@pytest.fixture
def trainer(params):
    return prepare_training(params, DRAFT)[0]


def test_the_error_names_samples_and_the_size_that_fits(trainer):
    batch = next(iter(trainer.batches))
    tokens = batch.samples.num_tokens
    error = str(out_of_memory(7, batch, 4096, 2048, 30 * GIB))
    assert f"step 7: the GPU has too little memory for a batch of {tokens} tokens" in error
    assert ", ".join(batch.samples.sample_ids) in error
    # One that did not fit is not recommended, whatever was measured.
    assert (
        f"at most 30.0 GiB), {tokens * 3 // 4} tokens fit: set train_draft.batch_tokens to {tokens * 3 // 4}" in error
    )


def test_there_may_be_no_room_for_the_batch_after_this_one(trainer):
    error = str(out_of_memory(7, None, 4096, 2048, 30 * GIB))
    assert "for the next batch beside the one that is computed" in error
    assert "set train_draft.batch_tokens to 2048" in error


def test_a_sample_that_is_too_long_by_itself_is_not_helped_by_smaller_batches(trainer):
    batch = trainer.heldout.read([0])
    error = str(out_of_memory(7, batch, 8, 4, 30 * GIB))
    assert "this one sample alone is longer. Lower prompts.max_prompt_tokens or regenerate.max_new_tokens" in error


def test_a_run_that_meets_it_keeps_its_checkpoint(trainer, monkeypatch):
    step = trainer.train_step

    def full_from_step_4(batch, positions):
        if trainer.step == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return step(batch, positions)

    trainer.train_step, full_from_step_4.module = full_from_step_4, step.module
    full_from_step_4.loss_positions = step.loss_positions
    trainer.memory.observe(64, 1 * GIB, 2 * GIB)
    monkeypatch.setattr("tasks.train_draft.trainer.capacity", lambda device: 2 * GIB)
    with pytest.raises(
        DraftlineError, match=r"step 4: .* \(at most 2.0 GiB\), \d+ tokens fit: set train_draft.batch_tokens"
    ):
        list(trainer.steps())
    assert trainer.checkpoints.newest(trainer.vocab_map.inputs_sha256) == 2
