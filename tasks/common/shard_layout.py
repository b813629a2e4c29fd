"""What a shard will hold, and where: known before the first of its states is computed."""

import json
from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from tasks.common.tensor_types import SAFETENSORS, WIDTHS


@dataclass(frozen=True)
class ShardPlan:
    """What a shard will hold, known before a state of it is computed.

    Attributes:
        name: 'shard-00000'.
        sha256: over ids, tokens, masks and all else that its states depend on; resume compares it.
        ids: of the samples.
        offsets: int64 [samples + 1], where each sample starts on the token axis.
        input_ids: int32 [tokens].
        loss_mask: uint8 [tokens].
    """

    name: str
    sha256: str
    ids: tuple[str, ...]
    offsets: np.ndarray
    input_ids: np.ndarray
    loss_mask: np.ndarray

    @classmethod
    def of(cls, name: str, sha256: str, samples: list[tuple[str, list[int], list[int]]]) -> "ShardPlan":
        """Lay (id, token ids, loss mask) end to end."""
        ids, tokens, masks = zip(*samples, strict=True)
        return cls(
            name=name,
            sha256=sha256,
            ids=ids,
            offsets=np.cumsum([0, *map(len, tokens)], dtype=np.int64),
            input_ids=np.concatenate([np.asarray(t, np.int32) for t in tokens]),
            loss_mask=np.concatenate([np.asarray(m, np.uint8) for m in masks]),
        )

    @property
    def tokens(self) -> int:
        return len(self.input_ids)

    def sequence(self, index: int) -> list[int]:
        """Token ids of one sample."""
        return self.input_ids[self.offsets[index] : self.offsets[index + 1]].tolist()


@dataclass(frozen=True)
class Layout:
    """Where each tensor of a shard lies in its file."""

    tokens: int
    samples: int
    num_aux: int
    hidden_size: int
    storage_dtype: str

    @cached_property
    def tensors(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Name to safetensors type and shape, in file order: wide types first, so that each is aligned."""
        value = SAFETENSORS[self.storage_dtype]
        scales = {"aux_scale": ("F32", (self.tokens, self.num_aux)), "last_scale": ("F32", (self.tokens,))}
        return {
            "sample_offsets": ("I64", (self.samples + 1,)),
            "input_ids": ("I32", (self.tokens,)),
            **(scales if self.storage_dtype == "float8" else {}),
            "aux": (value, (self.tokens, self.num_aux, self.hidden_size)),
            "last": (value, (self.tokens, self.hidden_size)),
            "loss_mask": ("U8", (self.tokens,)),
        }

    @cached_property
    def header(self) -> bytes:
        """Length and header of the safetensors format."""
        described = {
            name: {"dtype": dtype, "shape": shape, "data_offsets": self._offsets[name]}
            for name, (dtype, shape) in self.tensors.items()
        }
        text = json.dumps(described, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        return len(text).to_bytes(8, "little") + text

    @cached_property
    def starts(self) -> dict[str, int]:
        """First byte of each tensor in the file."""
        return {name: len(self.header) + start for name, (start, _) in self._offsets.items()}

    @cached_property
    def size(self) -> int:
        """Bytes of the file."""
        return len(self.header) + max(end for _, end in self._offsets.values())

    @cached_property
    def _offsets(self) -> dict[str, tuple[int, int]]:
        """First byte of each tensor and the one behind its last, from the end of the header on."""
        offsets, end = {}, 0
        for name, (dtype, shape) in self.tensors.items():
            start, end = end, end + WIDTHS[dtype] * prod(shape)
            offsets[name] = start, end
        return offsets
