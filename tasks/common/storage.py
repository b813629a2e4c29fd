"""How states are stored: the types, what a token costs, and the statistics that are taken on the way.

float8 is e4m3 with one float32 scale per token and slot, the largest value of that state over 448: a state of the
attention sink, hundreds of times larger than its neighbours, costs them no precision.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from tasks.common.tensor_types import SAFETENSORS, WIDTHS

if TYPE_CHECKING:
    import torch

_FLOAT8_MAX = 448.0
_CACHED_VALUES = 2**18
_GPU_VALUES = 2**26


def bytes_per_token(num_aux: int, hidden_size: int, storage_dtype: str) -> int:
    """(n_aux + 1) states of H values, their scales where float8 has them, the token's id and mask."""
    states = num_aux + 1
    scales = 4 * states if storage_dtype == "float8" else 0
    return states * hidden_size * WIDTHS[SAFETENSORS[storage_dtype]] + scales + 5


def torch_dtype(storage_dtype: str) -> "torch.dtype":
    """What a stored value is in torch."""
    import torch

    return torch.float8_e4m3fn if storage_dtype == "float8" else getattr(torch, storage_dtype)


def decode(values: "torch.Tensor", scale: "torch.Tensor | None") -> "torch.Tensor":
    """Stored values [..., H] and scales [...] as numbers: float32 where there is a scale, else the values themselves."""
    return values if scale is None else values.float() * scale[..., None]


@dataclass(frozen=True)
class StoredRows:
    """States of n consecutive tokens as they are stored, and the statistics of their values, on any device.

    Attributes:
        aux: [n, n_aux, H] in the storage type.
        last: [n, H] in the storage type.
        aux_scale: float32 [n, n_aux], last_scale: float32 [n]; None but for float8.
        norm_and_max: float32 [n, 2, n_aux + 1], L2 norm and largest absolute value of each aux state and of the last, as stored.
    """

    aux: "torch.Tensor"
    last: "torch.Tensor"
    aux_scale: "torch.Tensor | None"
    last_scale: "torch.Tensor | None"
    norm_and_max: "torch.Tensor"

    @classmethod
    def of(cls, aux: "torch.Tensor", last: "torch.Tensor", storage_dtype: str) -> "StoredRows":
        """Encode aux [n, n_aux, H] and last [n, H]; on a GPU nothing waits for the device."""
        aux, aux_scale = _encode(aux, storage_dtype)
        last, last_scale = _encode(last, storage_dtype)
        return cls.read(aux, last, aux_scale, last_scale)

    @classmethod
    def read(
        cls,
        aux: "torch.Tensor",
        last: "torch.Tensor",
        aux_scale: "torch.Tensor | None",
        last_scale: "torch.Tensor | None",
    ) -> "StoredRows":
        """Rows as they are stored already, with their statistics."""
        import torch

        num_aux = aux.shape[1]
        norm_and_max = torch.empty((len(last), 2, num_aux + 1), dtype=torch.float32, device=last.device)
        fill = _by_kernels if last.is_cuda else _by_copy
        for piece in _pieces(aux, last):
            fill(norm_and_max[piece, :, :num_aux], decode(aux[piece], _cut(aux_scale, piece)))
            fill(norm_and_max[piece, :, num_aux:], decode(last[piece], _cut(last_scale, piece))[:, None])
        return cls(aux, last, aux_scale, last_scale, norm_and_max)

    @property
    def norms(self) -> "torch.Tensor":
        """float32 [n, n_aux + 1]; one beyond float32 is the largest float32: infinite are norms of states that are."""
        import torch

        norms, largest = self.norm_and_max.unbind(1)
        return torch.where(largest.isfinite(), norms.clamp_max(torch.finfo(torch.float32).max), norms)

    @property
    def max_abs(self) -> "torch.Tensor":
        """float32 [n]."""
        return self.norm_and_max[:, 1].amax(-1)

    @property
    def nonfinite(self) -> "torch.Tensor":
        """int32 [n], NaN or Inf values; states are looked at again only where the largest value is one."""
        import torch

        count = torch.zeros(len(self), dtype=torch.int32, device=self.last.device)
        odd = (~self.max_abs.isfinite()).nonzero().squeeze(1)
        for states, scale in ((self.aux, self.aux_scale), (self.last, self.last_scale)):
            decoded = decode(states[odd], None if scale is None else scale[odd])
            count[odd] += (~decoded.float().isfinite()).flatten(1).sum(-1, dtype=torch.int32)
        return count

    def __len__(self) -> int:
        return len(self.last)

    def __getitem__(self, rows: slice) -> "StoredRows":
        return StoredRows(*(None if tensor is None else tensor[rows] for tensor in self._tensors()))

    def map(self, function) -> "StoredRows":
        """`function` of every tensor that there is."""
        return StoredRows(*(None if tensor is None else function(tensor) for tensor in self._tensors()))

    def stored(self) -> dict[str, "torch.Tensor"]:
        """What goes into a shard, by the name that it has there."""
        named = {"aux": self.aux, "last": self.last, "aux_scale": self.aux_scale, "last_scale": self.last_scale}
        return {name: tensor for name, tensor in named.items() if tensor is not None}

    def _tensors(self) -> list:
        return [getattr(self, field.name) for field in fields(self)]


def _cut(scale: "torch.Tensor | None", rows: slice) -> "torch.Tensor | None":
    return None if scale is None else scale[rows]


def _pieces(*states: "torch.Tensor") -> Iterator[slice]:
    """Rows that are taken at once: on a GPU so many that their float32 copies stay small beside the states; on a CPU so
    few that what is computed from a piece finds it in the cache, which is five times faster."""
    width = max(1, sum(tensor.shape[1:].numel() for tensor in states))
    rows = max(1, (_GPU_VALUES if states[0].is_cuda else _CACHED_VALUES) // width)
    return (slice(start, start + rows) for start in range(0, max(1, len(states[0])), rows))


def _encode(states: "torch.Tensor", storage_dtype: str) -> tuple["torch.Tensor", "torch.Tensor | None"]:
    import torch

    dtype = torch_dtype(storage_dtype)
    if storage_dtype != "float8":
        return states.to(dtype), None
    # A NaN or Inf makes the scale one, and with it the whole state: nothing of it can be mistaken for a number.
    scale = (states.abs().amax(-1).float() / _FLOAT8_MAX).clamp_min(torch.finfo(torch.float32).tiny)
    values = [(states[piece].float() / scale[piece][..., None]).to(dtype) for piece in _pieces(states)]
    return torch.cat(values), scale


def _by_kernels(norm_and_max: "torch.Tensor", states: "torch.Tensor") -> None:
    """Fill float32 [n, 2, slots] from states [n, slots, H], NaN and Inf included; each half is one kernel, which makes no
    copy in float32 and does not wait for the device.
    """
    import torch

    for row, order in enumerate((2, torch.inf)):
        torch.linalg.vector_norm(states, order, -1, dtype=torch.float32, out=norm_and_max[:, row])


def _by_copy(norm_and_max: "torch.Tensor", states: "torch.Tensor") -> None:
    """The same by way of a copy in float32, of any stored type: on a CPU, where it stays in the cache, the faster one."""
    import torch

    states = states.float()
    norm_and_max[:, 0] = torch.linalg.vector_norm(states, dim=-1)
    norm_and_max[:, 1] = states.abs().amax(-1)
