"""Which D tokens the draft can propose, chosen from what the target wrote in training.

Rule: the D tokens that occur most often among the supervised tokens of `train`; ties go to the lower id.
A token that never occurs counts zero, so places left over are filled with the lowest unused ids (in BPE
vocabularies the earliest, hence most general, merges).
"""

import torch

from tasks.common.errors import DraftlineError
from tasks.common.files import sha256_json
from tasks.common.hidden_states import HiddenStates
from tasks.common.vocab_map import VocabMap

# A token outside the map can never be accepted: below this share the map, not the draft, sets the acceptance.
MIN_COVERAGE = 0.8


def count_supervised_tokens(states: HiddenStates) -> torch.Tensor:
    """How often the assistant wrote each token of the vocabulary, int64 [V]."""
    counts = torch.zeros(states.contract.vocab_size, dtype=torch.int64)
    for index in range(len(states)):
        input_ids, loss_mask = states.read_tokens(index)
        counts += torch.bincount(input_ids[loss_mask.bool()], minlength=len(counts))
    return counts


def build_vocab_map(counts: torch.Tensor, draft_vocab_size: int) -> VocabMap:
    """The map of D tokens for these counts; the same counts and D always give the same map.

    Args:
        counts: occurrences of each target id, int64 [V].
    """
    by_frequency = torch.argsort(counts, descending=True, stable=True)
    inputs = {"draft_vocab_size": draft_vocab_size, "vocab_size": len(counts), "counts": _sparse(counts)}
    return VocabMap(by_frequency[:draft_vocab_size].sort().values, len(counts), sha256_json(inputs))


def coverage(vocab_map: VocabMap, counts: dict[str, torch.Tensor]) -> dict[str, float]:
    """Share of each split's supervised tokens that the map holds.

    Raises:
        DraftlineError: a share is below MIN_COVERAGE.
    """
    shares = {}
    for split, of_split in counts.items():
        if not of_split.sum():
            raise DraftlineError(
                f"artifacts/hidden_states/{split}: no token has loss mask 1, so there is nothing to learn or to predict. "
                f"See the mask densities in reports/gates/hidden_states.json."
            )
        shares[split] = int(of_split[vocab_map.target_ids].sum()) / int(of_split.sum())
    for split, share in shares.items():
        if share < MIN_COVERAGE:
            raise DraftlineError(
                f"train_draft.draft_vocab_size {len(vocab_map.target_ids)} covers {share:.1%} of the tokens that the target "
                f"wrote in {split}; at least {MIN_COVERAGE:.0%} is expected, since the draft can never propose the rest. "
                f"Raise draft_vocab_size (at most {vocab_map.vocab_size}), or train on more answers: "
                f"{int((counts['train'] > 0).sum())} distinct tokens occur in train."
            )
    return shares


def _sparse(counts: torch.Tensor) -> list[list[int]]:
    ids = counts.nonzero().squeeze(1)
    return torch.stack([ids, counts[ids]], dim=1).tolist()
