"""The target's own next-token distribution, from its stored last states and its frozen head."""

import os
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

from tasks.common.errors import DraftlineError
from tasks.common.files import read_json, replacing, sha256_file, write_json
from tasks.common.hidden_states import HiddenStates
from tasks.common.progress import progress
from tasks.common.target import TargetShape
from tasks.common.target_weights import TargetWeights
from tasks.common.vocab_map import VocabMap

# Logits over the whole vocabulary are taken for so many values at a time: 64 MB in float32.
_LOGITS_AT_ONCE = 1 << 24


class TargetHead:
    """Head and, where the stored state is before it, final norm of the target; nothing here is trained."""

    def __init__(self, weights: TargetWeights, shape: TargetShape, last_is_normed: bool, device: str):
        self.lm_head = weights.lm_head().to(device)
        # Applied twice or never it would skew every target and raise no error: the contract says which.
        self.norm = None if last_is_normed else weights.final_norm().to(device)
        self.eps = shape.rms_norm_eps

    @torch.no_grad()
    def argmax(self, last: torch.Tensor) -> torch.Tensor:
        """The target's greedy next token after each stored last state [n, H], over all V tokens: int64 [n]."""
        states = normed(last.to(self.lm_head.device, self.lm_head.dtype), self.norm, self.eps)
        chunks = states.split(max(1, _LOGITS_AT_ONCE // len(self.lm_head)))
        return torch.cat([F.linear(chunk, self.lm_head).argmax(-1) for chunk in chunks])

    def greedy(self, loss_mask: torch.Tensor, last: torch.Tensor) -> torch.Tensor:
        """The target's greedy token at each position of a sample that predicts one of the assistant's, -1 elsewhere.

        Args:
            loss_mask: [T]; last: its stored last states, [T, H].

        Returns:
            int64 [T] on the CPU.
        """
        tokens = torch.full((len(loss_mask),), -1)
        predicting = loss_mask[1:].bool().nonzero().squeeze(1)
        if len(predicting):
            tokens[predicting] = self.argmax(last[predicting]).cpu()
        return tokens


def normed(last: torch.Tensor, norm: torch.Tensor | None, eps: float) -> torch.Tensor:
    """Stored last states [n, H] -> what the head reads; `norm` is None where they are behind the final norm."""
    return last if norm is None else F.rms_norm(last, norm.shape, norm, eps)


class RestrictedHead:
    """The target's distribution over the draft vocabulary, renormalised there: what the draft learns to imitate."""

    def __init__(self, head: TargetHead, vocab_map: VocabMap, dtype: torch.dtype = torch.float32):
        """
        Args:
            dtype: that training computes in.
        """
        device = head.lm_head.device
        whole = len(vocab_map.target_ids) == len(head.lm_head)
        self.rows = (head.lm_head if whole else head.lm_head[vocab_map.target_ids.to(device)]).to(dtype)
        self.norm = None if head.norm is None else head.norm.to(dtype)
        self.eps = head.eps

    @torch.no_grad()
    def logits(self, last: torch.Tensor) -> torch.Tensor:
        """Stored last states [n, H] -> logits [n, D], in the type of the head."""
        return F.linear(normed(last.to(self.rows.dtype), self.norm, self.eps), self.rows)


def cache_target_argmax(states: HiddenStates, head: TargetHead, path: Path) -> np.ndarray:
    """The target's argmax at each position that predicts a token of the assistant, kept on disk.

    It costs the full head for each token, so it is taken once: int32, 4 bytes a token.

    Args:
        path: where it is kept, with its SHA-256 beside it; read from there if an earlier run finished it.

    Returns:
        memory-mapped int32 over the tokens of the split, in its order; -1 where not needed.
    """
    if not _is_cached(path):
        total, start = int(states.tokens.sum()), 0
        with replacing(path) as partial:
            argmax = np.lib.format.open_memmap(partial, mode="w+", dtype=np.int32, shape=(total,))
            _take_room(partial)
            with progress(total=total, desc=path.stem.replace("_", " "), unit="token") as bar:
                for index in range(len(states)):
                    sample = states.read(index)
                    tokens = head.greedy(sample.loss_mask, sample.last)
                    argmax[start : start + sample.num_tokens] = tokens.numpy()
                    start += sample.num_tokens
                    bar.update(sample.num_tokens)
            argmax.flush()
        write_json(path.with_suffix(".json"), {"sha256": sha256_file(path)})
    return np.load(path, mmap_mode="r")


def _is_cached(path: Path) -> bool:
    if not path.exists():
        return False
    try:
        whole = read_json(path.with_suffix(".json")).get("sha256") == sha256_file(path)
    except (DraftlineError, AttributeError):
        whole = False
    if not whole:
        print(f"{path}: cut off or changed since it was written; it is computed again.", flush=True)
    return whole


def _take_room(path: Path) -> None:
    """Have the disk hold all of a file: a full one is an error now, and would be a bus error when its memory is written."""
    with open(path, "r+b") as file:
        os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
