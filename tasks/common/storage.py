"""How states are stored: the types, what a token costs, and the statistics that are taken on the way.

float8 is e4m3 with one float32 scale per token and slot, the largest value of that state over 448: a state of the
attention sink, hundreds of times larger than its neighbours, costs them no precision.
"""

from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

from tasks.common.shard_layout import SAFETENSORS, WIDTHS

if TYPE_CHECKING:
    import torch

_FLOAT8_MAX = 448.0
_CACHED_VALUES = 2**18
_GPU_ROWS = 1024


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
    """States of n consecutive tokens as they are stored, and their statistics, on any device.

    Attributes:
        aux: [n, n_aux, H] in the storage type.
        last: [n, H] in the storage type.
        aux_scale: float32 [n, n_aux], last_scale: float32 [n]; None but for float8.
        norms: float32 [n, n_aux + 1], L2 norm of each aux state and of the last, as stored.
        max_abs: float32 [n].
        nonfinite: int32 [n], NaN or Inf values.
    """

    aux: "torch.Tensor"
    last: "torch.Tensor"
    aux_scale: "torch.Tensor | None"
    last_scale: "torch.Tensor | None"
    norms: "torch.Tensor"
    max_abs: "torch.Tensor"
    nonfinite: "torch.Tensor"

    @classmethod
    def of(cls, aux: "torch.Tensor", last: "torch.Tensor", storage_dtype: str) -> "StoredRows":
        """Encode aux [n, n_aux, H] and last [n, H]; on a GPU nothing waits for the device."""
        aux, aux_scale = _encode(aux, storage_dtype)
        last, last_scale = _encode(last, storage_dtype)
        return cls.measured(aux, last, aux_scale, last_scale)

    @classmethod
    def measured(
        cls,
        aux: "torch.Tensor",
        last: "torch.Tensor",
        aux_scale: "torch.Tensor | None",
        last_scale: "torch.Tensor | None",
    ) -> "StoredRows":
        """Stored values with their statistics taken."""
        import torch

        pieces = [
            [
                _statistics(decode(aux[piece], _cut(aux_scale, piece))),
                _statistics(decode(last[piece], _cut(last_scale, piece))[:, None]),
            ]
            for piece in _pieces(aux, last)
        ]
        norms, largest, nonfinite = zip(
            *((torch.cat([a[0], b[0]], dim=1), torch.maximum(a[1], b[1]), a[2] + b[2]) for a, b in pieces),
            strict=True,
        )
        return cls(aux, last, aux_scale, last_scale, torch.cat(norms), torch.cat(largest), torch.cat(nonfinite))

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
    rows = _GPU_ROWS if states[0].is_cuda else max(1, _CACHED_VALUES // width)
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


def _statistics(states: "torch.Tensor") -> tuple["torch.Tensor", "torch.Tensor", "torch.Tensor"]:
    """Of states [n, slots, H]: norms [n, slots], largest absolute value [n], count of values that are not finite [n].

    A norm beyond float32 is the largest float32: null in the table is for states that are not finite.
    """
    import torch

    if states.is_cuda:  # each in one kernel, without a copy in float32, and nothing waits for the device
        norms, each = (torch.linalg.vector_norm(states, o, -1, dtype=torch.float32) for o in (2, torch.inf))
    else:
        states = states.float()
        norms, each = torch.linalg.vector_norm(states, dim=-1), states.abs().amax(-1)
    norms = torch.where(each.isfinite(), norms.clamp_max(torch.finfo(torch.float32).max), norms)
    largest = each.amax(-1)
    if not states.is_cuda and bool(largest.isfinite().all()):
        return norms, largest, torch.zeros(len(states), dtype=torch.int32)
    return norms, largest, (~states.isfinite()).flatten(1).sum(-1, dtype=torch.int32)
