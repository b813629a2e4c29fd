"""What a server would accept: walking an answer round by round, as it verifies chains (contract, section 4).

A round at position t has x_{t+1} verified and drafts x_{t+2}, x_{t+3}, ...; c_t is the number of leading draft
tokens that are right. The first round starts where the first generated token is known; a round advances by
c_t + 1. So a server spends more rounds where the draft is bad, and the mean of c_t over all t is no prediction.
"""

from collections.abc import Iterator

import torch

from tasks.common.packing import PackedSamples


def round_starts(samples: PackedSamples) -> torch.Tensor:
    """Positions where a round could start: x_{t+1} and x_{t+2} are the assistant's; ascending int64 [n]."""
    return (samples.supervised(-1) & samples.supervised(0)).nonzero().squeeze(1)


def correct_drafts(samples: PackedSamples, rows: torch.Tensor, proposed: torch.Tensor) -> torch.Tensor:
    """c_t: leading proposed tokens that the answer has too, never past its end.

    Args:
        rows: positions t, [n].
        proposed: target ids for x_{t+2}, x_{t+3}, ...: [n, num_steps].

    Returns:
        int64 [n].
    """
    right = [
        samples.supervised(step)[rows] & (samples.input_ids[samples.ahead(2 + step)[rows]] == proposed[:, step])
        for step in range(proposed.shape[1])
    ]
    return torch.stack(right, dim=1).long().cumprod(dim=1).sum(dim=1)


def walk(rows: torch.Tensor, correct: torch.Tensor) -> Iterator[int]:
    """Yield c_t of each round that a server would spend on the answers.

    Args:
        rows: all of `round_starts`.
        correct: c_t there.
    """
    accepted = dict(zip(rows.tolist(), correct.tolist(), strict=True))
    for t in accepted:
        # The first round of a turn. Two turns, and two samples, are at least two positions apart here.
        if t - 1 not in accepted:
            while t in accepted:
                yield accepted[t]
                t += accepted[t] + 1
