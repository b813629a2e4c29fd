"""How many tokens of a batch the GPU holds, from what batches really took."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

import numpy as np
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tasks.common.errors import DraftlineError
from tasks.common.params import PARAMS, TrainDraft
from tasks.train_draft.batch import Batch
from tasks.train_draft.data import DraftData

# The allocator splits its blocks, so not all that is free can be used.
USABLE = 0.92
_MULTIPLE = 64  # tokens


class MemoryByTokens:
    """What a batch takes: bytes that are held without it, and so many for each of its tokens.

    Attributes:
        peak: the highest of all batches, bytes.
    """

    def __init__(self) -> None:
        self.peak = 0
        self._held = 0
        self._bytes_per_token = 0.0

    def observe(self, tokens: int, held: int, peak: int) -> None:
        """Take in a batch that fitted. The largest says most about larger ones."""
        self._held = max(self._held, held)
        if peak > self.peak:
            self.peak, self._bytes_per_token = peak, (peak - held) / tokens

    @contextmanager
    def observed(self, batch: Batch) -> Iterator[None]:
        """Run the batch within the block; on a CPU nothing is noted."""
        device = batch.target_argmax.device
        if device.type != "cuda":
            yield
            return
        torch.cuda.reset_peak_memory_stats(device)
        held = _allocated(device)["current"] - batch.samples.aux.nbytes - batch.samples.last.nbytes
        yield
        self.observe(batch.samples.num_tokens, held, _allocated(device)["peak"])

    def fitting_tokens(self, capacity: int, still_to_come: int = 0) -> int | None:
        """Tokens that `capacity` bytes hold; None where nothing was observed.

        Args:
            still_to_come: bytes that are held later and were not while batches were observed.
        """
        if not self._bytes_per_token:
            return None
        tokens = int((USABLE * capacity - self._held - still_to_come) / self._bytes_per_token)
        return max(tokens // _MULTIPLE * _MULTIPLE, 0)


def _allocated(device: torch.device) -> dict[str, int]:
    """Bytes, `current` and `peak`; the flat form of these figures takes torch ten times as long."""
    return torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"]["all"]


def require_gpu(device: str) -> None:
    """
    Raises:
        DraftlineError: it is a GPU that this process cannot use.
    """
    kind, _, index = device.partition(":")
    if kind == "cuda" and not (torch.cuda.is_available() and int(index or 0) < torch.cuda.device_count()):
        found = f"sees {torch.cuda.device_count()} GPUs" if torch.cuda.is_available() else "can use no GPU"
        raise DraftlineError(
            f"{PARAMS}: target.device is {device}, and torch {torch.__version__} {found} here. Set target.device: cpu, or see "
            f"`python -m tasks.verify_environment`."
        )


def capacity(device: str) -> int:
    """Bytes of the GPU that are free or this process's."""
    if not device.startswith("cuda"):
        return 0
    torch.cuda.empty_cache()
    return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)


def held_bytes(module: nn.Module) -> int:
    """Of the parameters, or of this process's shards of them."""
    shards = (p.to_local() if isinstance(p, DTensor) else p for p in module.parameters())
    return sum(shard.nbytes for shard in shards)


def out_of_memory(
    step: int, batch: Batch | None, params: TrainDraft, processes: int, fitting: int | None, peak: int
) -> DraftlineError:
    """The error for a batch that did not fit.

    Args:
        batch: None if there was no room for the next one beside the one that is computed.
        processes: that share the batches of a step.
        fitting: tokens that fit by what was measured (`MemoryByTokens.fitting_tokens`).
        peak: bytes of the largest batch that did fit.
    """
    tokens = batch_tokens = params.batch_tokens
    what = "the next batch beside the one that is computed"
    if batch:
        tokens = batch.samples.num_tokens
        what = f"a batch of {tokens} tokens, samples {', '.join(batch.samples.sample_ids)}"
    message = f"step {step}: the GPU has too little memory for {what}. "
    if fitting is None:
        return DraftlineError(
            f"{message}Nothing was measured yet: set train_draft.batch_tokens to {batch_tokens // 2}, or let "
            f"`python -m tasks.train_draft.batch_tokens` find the largest."
        )
    fitting = min(fitting, tokens * 3 // 4)  # this one did not fit, whatever the others took
    measured = f"By what batches took so far (at most {peak / 2**30:.1f} GiB), {fitting} tokens fit: "
    if batch and len(batch.samples.sample_ids) == 1 and batch.num_tokens > batch_tokens:
        return DraftlineError(
            f"{message}{measured}this one sample alone is longer. Lower prompts.max_prompt_tokens or regenerate.max_new_tokens, "
            f"or train with train_draft.parallel: fsdp on more GPUs."
        )
    if not fitting:
        return DraftlineError(
            f"{message}{measured}what is held without a batch leaves no room. Set train_draft.recompute_activations: true, lower "
            f"train_draft.draft_vocab_size, or train with train_draft.parallel: fsdp on more GPUs."
        )
    batches = math.ceil(params.global_batch_size * batch_tokens / fitting / processes) * processes
    return DraftlineError(
        f"{message}{measured}set train_draft.batch_tokens to {fitting}, and train_draft.global_batch_size to {batches} (now "
        f"{params.global_batch_size}) if a step shall see as many tokens as before."
    )


def try_smaller(memory: MemoryByTokens, samples: DraftData, tokens: int, run: Callable[[Batch], object]) -> None:
    """Run batches of half as many tokens, of a quarter and so on, until one fits."""
    ends = np.cumsum(samples.states.tokens[samples.usable])
    while (tokens := tokens // 2) >= _MULTIPLE:
        torch.cuda.empty_cache()
        form = replace(samples.form, batch_tokens=tokens)  # it says how far a batch is padded
        smaller = DraftData(samples.states, samples.target_argmax, tokens, form)
        indices = samples.usable[: max(1, np.searchsorted(ends, tokens, "right"))].tolist()
        with suppress(torch.OutOfMemoryError):
            _observe(
                memory, smaller.read(indices), run
            )  # no name holds the batch: it is gone when the next one is read
            return


def _observe(memory: MemoryByTokens, batch: Batch, run: Callable[[Batch], object]) -> None:
    with memory.observed(batch):
        run(batch)
