"""The batch size that fits, from what batches took; and the error that names it."""

from dataclasses import replace

import pytest
import torch

from tasks.common.errors import DraftlineError
from tasks.common.files import write_jsonl
from tasks.common.params import TrainDraft
from tasks.common.responses import RESPONSES, Response
from tasks.dump_hidden_states.dump import dump
from tasks.train_draft.data import DraftData
from tasks.train_draft.gpu_memory import MemoryByTokens, out_of_memory, try_smaller
from tasks.train_draft.prepare import prepare_training
from tasks.train_draft.step import TrainStep
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
    error = str(out_of_memory(7, batch, TrainDraft(batch_tokens=4096), 1, 2048, 30 * GIB))
    assert f"step 7: the GPU has too little memory for a batch of {tokens} tokens" in error
    assert ", ".join(batch.samples.sample_ids) in error
    # One that did not fit is not recommended, whatever was measured.
    assert (
        f"at most 30.0 GiB), {tokens * 3 // 4} tokens fit: set train_draft.batch_tokens to {tokens * 3 // 4}" in error
    )


def test_there_may_be_no_room_for_the_batch_after_this_one(trainer):
    error = str(out_of_memory(7, None, TrainDraft(batch_tokens=4096), 1, 2048, 30 * GIB))
    assert "for the next batch beside the one that is computed" in error
    assert "set train_draft.batch_tokens to 2048" in error


@pytest.mark.parametrize(("processes", "batches"), [(1, 11), (2, 12), (4, 12)])  # 4 x 4096 tokens in batches of 1536
def test_the_error_names_how_many_batches_see_as_many_tokens(processes, batches):
    error = str(out_of_memory(7, None, TrainDraft(batch_tokens=4096, global_batch_size=4), processes, 1536, 30 * GIB))
    assert "set train_draft.batch_tokens to 1536, and train_draft.global_batch_size to" in error
    assert f"global_batch_size to {batches} (now 4) if a step shall see as many tokens as before" in error


def test_where_nothing_fits_no_size_is_recommended():
    error = str(out_of_memory(7, None, TrainDraft(), 1, 0, 30 * GIB))
    assert "what is held without a batch leaves no room. Set train_draft.recompute_activations: true" in error


def test_a_sample_that_is_too_long_by_itself_is_not_helped_by_smaller_batches(trainer):
    batch = trainer.heldout.read([0])
    error = str(out_of_memory(7, batch, TrainDraft(batch_tokens=8), 1, 4, 30 * GIB))
    assert "this one sample alone is longer. Lower prompts.max_prompt_tokens or regenerate.max_new_tokens" in error


def test_where_nothing_was_measured_smaller_batches_are_tried_until_one_fits(params, monkeypatch):
    """A device of 2 GiB that holds 512 MiB beside a batch and takes 16 MiB a token: batches of at most 96 tokens."""
    held, per_token, tried = 512 * 2**20, 16 * 2**20, []
    trainer, _ = prepare_training(of_long_answers(params), DRAFT)
    step = trainer.train_step

    def run(batch, positions=None):
        tried.append(batch.samples.num_tokens)
        peak = held + per_token * tried[-1]
        if peak > 2 * GIB:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        trainer.memory.observe(tried[-1], held, peak)  # as the allocator would say
        return step(batch, positions)

    trainer.train_step, run.module, run.loss_positions = run, step.module, step.loss_positions
    monkeypatch.setattr("tasks.train_draft.trainer.capacity", lambda device: 2 * GIB)
    with pytest.raises(
        DraftlineError, match=r"step 1: .* 64 tokens fit: set train_draft.batch_tokens to 64, and"
    ) as error:
        list(trainer.steps())
    assert tried == [512, 256, 128, 64]
    assert "at most 1.5 GiB" in str(error.value)


def of_long_answers(params):
    """Settings with batches of 512 tokens, and splits of 20 samples of 32."""
    for split in ("train", "heldout"):
        rows = [
            Response(f"{split}-{n}", "chat", [], [3 + n] * 8, list(range(10 + n, 34 + n)), "x", "length")
            for n in range(20)
        ]
        write_jsonl(RESPONSES / f"{split}.jsonl", (row.to_row() for row in rows))
    params = params.model_copy(update={"train_draft": params.train_draft.model_copy(update={"batch_tokens": 512})})
    dump(params)
    return params


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu_of_one_gib_the_size_that_is_named_fits(params):
    params = params.model_copy(update={"target": params.target.model_copy(update={"device": "cuda"})})
    trainer, _ = prepare_training(params, DRAFT)
    step, heldout, memory = TrainStep(trainer.draft, trainer.head), trainer.heldout, MemoryByTokens()

    def padded_to(tokens: int) -> DraftData:
        form = replace(heldout.form, batch_tokens=tokens)
        return DraftData(heldout.states, heldout.target_argmax, tokens, form)

    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(GIB / total)
    try:
        try_smaller(memory, heldout, 2**22, step)
        named = memory.fitting_tokens(GIB)
        assert 64 <= named < 2**21  # which was tried first, and whose states alone take a GiB
        step(padded_to(named).read(heldout.usable.tolist()))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_run_that_meets_it_keeps_its_checkpoint(trainer, monkeypatch):
    step = trainer.train_step

    def full_from_step_4(batch, positions):
        if trainer.step == 3:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return step(batch, positions)

    trainer.train_step, full_from_step_4.module = full_from_step_4, step.module
    full_from_step_4.loss_positions = step.loss_positions
    trainer.memory.observe(64, 1 * GIB, 2 * GIB)
    monkeypatch.setattr("tasks.train_draft.trainer.capacity", lambda device: 4 * GIB)
    with pytest.raises(
        DraftlineError, match=r"step 4: .* \(at most 2.0 GiB\), [1-9]\d* tokens fit: set train_draft.batch_tokens"
    ):
        list(trainer.steps())
    assert trainer.checkpoints.newest(trainer.vocab_map.inputs_sha256) == 2
