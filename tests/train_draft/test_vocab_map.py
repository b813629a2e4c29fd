"""Which tokens the draft can propose."""

import pytest
import torch

from tasks.common.errors import DraftlineError
from tasks.train_draft.vocab_map import build_vocab_map, coverage


def counts_of(vocab_size: int = 12, **occurrences: int) -> torch.Tensor:
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    for token, count in occurrences.items():
        counts[int(token.removeprefix("t"))] = count
    return counts


def test_the_most_frequent_tokens_are_taken_and_ties_go_to_the_lower_id():
    counts = counts_of(t9=5, t4=2, t7=2, t2=2, t11=1)
    assert build_vocab_map(counts, 3).target_ids.tolist() == [2, 4, 9]


def test_places_left_over_are_filled_with_the_lowest_unused_ids():
    assert build_vocab_map(counts_of(t9=5, t1=1), 5).target_ids.tolist() == [0, 1, 2, 3, 9]


def test_offsets_and_marks_name_the_same_tokens():
    vocab_map = build_vocab_map(counts_of(t9=5, t4=2, t7=1), 3)
    assert vocab_map.d2t.tolist() == [4, 6, 7]
    assert vocab_map.t2d.nonzero().flatten().tolist() == [4, 7, 9]


def test_a_whole_vocabulary_is_the_identity():
    assert not build_vocab_map(counts_of(t9=5), 12).d2t.any()


def test_a_map_is_addressed_by_counts_and_size():
    counts = counts_of(t9=5, t4=2)
    address = build_vocab_map(counts, 3).inputs_sha256
    assert address == build_vocab_map(counts.clone(), 3).inputs_sha256
    assert address != build_vocab_map(counts, 4).inputs_sha256
    assert address != build_vocab_map(counts_of(t9=5, t4=3), 3).inputs_sha256


def test_coverage_is_the_share_of_what_the_target_wrote():
    train, heldout = counts_of(t9=6, t4=3, t7=1), counts_of(t9=9, t11=1)
    assert coverage(build_vocab_map(train, 2), {"train": train, "heldout": heldout}) == {"train": 0.9, "heldout": 0.9}


def test_a_map_that_covers_too_little_is_an_error():
    train = counts_of(t9=10)
    with pytest.raises(DraftlineError, match=r"covers 50.0% of the tokens that the target wrote in heldout"):
        coverage(build_vocab_map(train, 3), {"train": train, "heldout": counts_of(t9=5, t11=5)})


def test_a_split_without_an_assistant_token_is_an_error():
    train = counts_of(t9=10)
    with pytest.raises(DraftlineError, match="heldout: no token has loss mask 1"):
        coverage(build_vocab_map(train, 3), {"train": train, "heldout": counts_of()})
