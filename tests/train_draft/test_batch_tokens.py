"""The largest batch that fits, by real steps of random drafts and by what memory they took."""

import pytest
import torch

from tasks.common.errors import DraftlineError
from tasks.train_draft.batch import BatchForm
from tasks.train_draft.batch_tokens import Trial, largest, main
from tests.reference import VOCAB, make_draft


def gpu(fixed: int, per_token: int, capacity: int, steeper_from: int = 1 << 40):
    """Memory that grows with the tokens, and faster beyond a size; and the sizes that were tried."""
    tried = []

    def peak(tokens: int) -> int:
        tried.append(tokens)
        needed = fixed + per_token * tokens + per_token * max(0, tokens - steeper_from)
        if needed > capacity:
            raise torch.OutOfMemoryError
        return needed

    return peak, tried


def test_memory_is_linear_so_two_sizes_tell_and_a_step_proves_it():
    peak, tried = gpu(fixed=10**9, per_token=10**5, capacity=10**10)
    found = largest(peak, 10**10)
    assert tried[-1] == found
    assert len(tried) == 3
    assert 0.9 * 10**10 < peak(found) <= 0.92 * 10**10


def test_a_size_that_does_not_fit_after_all_is_lowered_until_one_does():
    peak, tried = gpu(fixed=0, per_token=10**5, capacity=10**10, steeper_from=50_000)
    found = largest(peak, 10**10)
    assert len(tried) > 3 and tried[-1] == found
    assert peak(found) <= 10**10


def test_a_gpu_that_holds_no_small_batch_is_an_error_that_says_what_to_change():
    peak, _ = gpu(fixed=10**11, per_token=1, capacity=10**10)
    with pytest.raises(DraftlineError, match="recompute_activations: true"):
        largest(peak, 10**10)


@pytest.mark.parametrize("storage_dtype", ["bfloat16", "float8"])
def test_a_trial_is_a_whole_step_in_which_every_position_learns(storage_dtype):
    config, form = make_draft().config, BatchForm("cpu", torch.bfloat16, 3, torch.arange(VOCAB), 64)
    trial = Trial(config, storage_dtype, form, recompute_activations=True)
    batch = trial.batch(4096)
    assert batch.num_tokens == 4096
    assert batch.lessons.loss_positions.tolist() == [4096 - 2 * 2, 4096 - 2 * 3, 4096 - 2 * 4]
    trial.run(128)


def test_a_cpu_is_refused(tiny_params):
    with pytest.raises(DraftlineError, match="is cpu, and it is the memory of a GPU"):
        main(tiny_params())
