"""Acceptance from planted answers, in the spellings of both SGLang versions."""

import pytest

from tasks.common.acceptance import pool
from tasks.common.errors import DraftlineError
from tasks.common.sglang_client import Completion

NEW = ("spec_num_correct_drafts", "spec_correct_drafts_histogram")
OLD = ("spec_accepted_drafts", "spec_accept_histogram")


def answer(histogram, spelling=NEW, **changes) -> Completion:
    """An answer whose rounds accepted as `histogram` says."""
    correct_name, histogram_name = spelling
    meta = {
        "finish_reason": {"type": "length"},
        "prompt_tokens": 3,
        "cached_tokens": 0,
        "weight_version": "v",
        "spec_verify_ct": sum(histogram),
        correct_name: sum(length * count for length, count in enumerate(histogram)),
        histogram_name: histogram,
    }
    return Completion.of({"output_ids": [1], "text": "", "meta_info": meta | changes}, seconds=1.0)


def test_zero_acceptance_is_exactly_one():
    assert pool([answer([57])]).accept_length == 1.0


@pytest.mark.parametrize("spelling", [NEW, OLD])
def test_acceptance_length_is_one_plus_correct_drafts_per_round(spelling):
    # 2 rounds with none, 1 with 1, 3 with all 3: 10 drafts in 6 rounds
    assert pool([answer([2, 1, 0, 3], spelling)]).accept_length == 1 + 10 / 6


def test_rounds_are_pooled_not_averaged_over_answers():
    long, short = answer([90, 10]), answer([0, 0, 0, 10])
    assert pool([long, short]).accept_length == 1 + (10 + 30) / 110


def test_survival_at_i_is_the_share_of_rounds_with_at_least_i_correct():
    acceptance = pool([answer([2, 1, 0, 1])])
    assert acceptance.survival(3) == [0.5, 0.25, 0.25]
    assert sum(acceptance.survival(3)) == acceptance.accept_length - 1


def test_no_round_at_all_is_an_error_and_no_acceptance_of_one():
    with pytest.raises(DraftlineError, match="no speculation ran at all"):
        pool([answer([])])


def test_counts_that_contradict_the_histogram_are_refused():
    with pytest.raises(DraftlineError, match="counts in another way"):
        pool([answer([2, 1], spec_num_correct_drafts=2)])


def test_states_come_flat_with_the_prompt_first():
    """SGLang nests one list of rows for each chunk of the prompt and adds a bare row for each generated token."""
    nested = [[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0]], [7.0, 8.0]]
    rows = answer([1], hidden_states=nested).hidden_states
    assert rows.tolist() == [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0], [7.0, 8.0]]
