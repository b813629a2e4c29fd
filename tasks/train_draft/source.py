"""Where training states come from: here a split that was dumped; online.py has a ring that is filled meanwhile."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch

from tasks.common.contract import Contract
from tasks.common.errors import DraftlineError
from tasks.common.hidden_states import HIDDEN_STATES, HiddenStates
from tasks.common.params import PARAMS, Params
from tasks.train_draft.batch import BatchForm
from tasks.train_draft.data import BatchStream, DraftData, Share
from tasks.train_draft.induction import TrainingStates, training_states
from tasks.train_draft.processes import Processes
from tasks.train_draft.ring import RingStream
from tasks.train_draft.target_head import TargetHead, cache_target_argmax
from tasks.train_draft.vocab_map import count_supervised_tokens

TRAIN = HIDDEN_STATES / "train"


@dataclass(frozen=True)
class Summary:
    """What the report and the vocabulary map need.

    Attributes:
        identity: of the shards; checkpoints of others are not taken up.
        counts: how often the assistant wrote each token, int64 [V].
    """

    identity: list[str]
    counts: torch.Tensor
    samples: int
    tokens: int


class Source(Protocol):
    """States of train."""

    contract: Contract

    def summary(self) -> Summary: ...

    def first_states(self) -> TrainingStates:
        """What the induction head is fitted to."""

    def batches(self, head: TargetHead, cache: Path, form: BatchForm, processes: Processes) -> BatchStream | RingStream:
        """This process's batches without end; `head` says what the target's greedy tokens are, `cache` may keep them."""


OpenSource = Callable[[Params], Source]


class DumpedSource:
    """artifacts/hidden_states/train, closed and judged."""

    def __init__(self, params: Params):
        """
        Raises:
            DraftlineError: it is not there, or its shards come and go.
        """
        if params.dump.ahead_shards is not None:
            raise DraftlineError(
                f"{PARAMS}: dump.ahead_shards is {params.dump.ahead_shards}, so the states of train come and go. Train beside the "
                f"dump with `python -m tasks.train_draft.online`, or set dump.ahead_shards: null."
            )
        self._params = params
        self.states = HiddenStates(TRAIN)
        self.contract = self.states.contract

    @property
    def identity(self) -> list[str]:
        return [shard["checksum"] for shard in self.states.shards]

    def summary(self) -> Summary:
        states = self.states
        return Summary(self.identity, count_supervised_tokens(states), len(states), int(states.tokens.sum()))

    def first_states(self) -> TrainingStates:
        return training_states(self.states)

    def batches(self, head: TargetHead, cache: Path, form: BatchForm, processes: Processes) -> BatchStream:
        settings = self._params.train_draft
        argmax = cache_target_argmax(self.states, head, cache / "train_argmax.npy")
        data = DraftData(self.states, argmax, settings.batch_tokens, form)
        share = Share(processes.rank, processes.size, settings.global_batch_size)
        return BatchStream(data, settings.seed, settings.data_workers, share)
