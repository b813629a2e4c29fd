"""What a decoder layer of SGLang returns, and its output with the residual added: known forms, and nothing guessed.

0.5.16    a pair (hidden, residual), whose sum is the output; DeepSeek adds top-k indices as a third value
0.5.23    one value, of which the layer's boundary makes the output (`attn_boundary.capture_output`); DeepSeek returns
          it with top-k indices in a tuple; Gemma 3 still returns the pair
"""

from dataclasses import dataclass
from typing import Any

import torch

from tasks.common.errors import DraftlineError

PAIR, STREAM = "a pair of hidden state and residual", "a value of the residual stream"


@dataclass(frozen=True)
class LayerOutput:
    """
    Attributes:
        form: PAIR or STREAM.
        returned: what the layer must return from now on; None: what it returned.
        state: [rows, H].
    """

    form: str
    returned: Any
    state: torch.Tensor

    @classmethod
    def of(cls, layer: torch.nn.Module, batch: Any, output: Any) -> "LayerOutput":
        """Read what `layer` returned for `batch`.

        Raises:
            DraftlineError: it is none of the known forms.
        """
        boundary = getattr(layer, "attn_boundary", None)
        if _is_pair(output):
            if getattr(output[0], "_sglang_needs_allreduce_fusion", False):
                raise DraftlineError(
                    f"{type(layer).__name__} returned a part of its output: its sum over ranks is fused into the next layer. Add "
                    f"--enforce-disable-flashinfer-allreduce-fusion to serve.extra_args."
                )
            return cls(PAIR, None, output[0] + output[1])
        value, rest = (output[0], output[1:]) if _has_indices(output) else (output, None)
        is_stream = getattr(batch, "residual_stream", None) is not None and hasattr(boundary, "capture_output")
        if is_stream and not isinstance(value, tuple | list):
            handle, state = boundary.capture_output(value, batch)
            return cls(STREAM, handle if rest is None else (handle, *rest), state)
        raise DraftlineError(
            f"{type(layer).__name__} returned {_describe(output)}: neither a pair of hidden state and residual (SGLang 0.5.16) nor "
            f"a value of a residual stream (0.5.23). The output of this layer cannot be told: use dump.engine: transformers."
        )


def _is_pair(output: Any) -> bool:
    """(hidden, residual), or with indices (or None) behind them."""
    if not isinstance(output, tuple) or not (len(output) == 2 or (len(output) == 3 and _is_indices(output[2]))):
        return False
    one, other = output[:2]
    both = isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor)
    return both and one.shape == other.shape and one.is_floating_point() and other.is_floating_point()


def _has_indices(output: Any) -> bool:
    """(value, indices or None)."""
    return isinstance(output, tuple) and len(output) == 2 and _is_indices(output[1])


def _is_indices(value: Any) -> bool:
    return value is None or (isinstance(value, torch.Tensor) and not value.is_floating_point())


def _describe(output: Any) -> str:
    if isinstance(output, tuple | list):
        return f"{len(output)} values: {', '.join(map(_describe, output))}"
    return (
        f"{type(output).__name__} {list(output.shape)}" if isinstance(output, torch.Tensor) else type(output).__name__
    )
