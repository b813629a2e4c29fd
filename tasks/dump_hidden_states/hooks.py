"""Hooks that SGLang calls in its scheduler process (`--forward-hooks`, states_plan.py): they hand states to the recorder.

`layer_hook` is attached to each aux layer, `last_hook` to the decoder. A hook of SGLang's sees positional arguments alone.
A module that is called by keyword (Gemma 3's layers) gets a second hook at its first call, which sees all of them; that
call is the server's own first request, and where it is not, the recorder misses the layer and says so.

Under tensor parallelism every rank runs the hooks, since a layer's output may have to be summed over ranks; the first
rank records.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tasks.common.errors import DraftlineError
from tasks.dump_hidden_states.layer_output import LayerOutput
from tasks.dump_hidden_states.recorder import Recorder

Hook = Callable[[torch.nn.Module, tuple, Any], Any]

_recorders: dict[str, Recorder] = {}


def layer_hook(config: dict[str, Any]) -> Hook:
    """A hook for the decoder layer whose output is slot `config["slot"]`."""
    recorder, slot = _recorder(config), config["slot"]

    def record(layer: torch.nn.Module, batch: Any, output: Any) -> Any:
        if not recorder.takes(batch):
            return None
        found = LayerOutput.of(layer, batch, output)
        recorder.put(slot, batch, found)
        return found.returned

    return with_batch(record)


def last_hook(config: dict[str, Any]) -> Hook:
    """A hook for the decoder, whose output is the last state after the final norm."""
    recorder = _recorder(config)

    def record(_decoder: torch.nn.Module, batch: Any, output: Any) -> None:
        if recorder.takes(batch):
            recorder.finish(batch, output[0] if isinstance(output, tuple) else output)

    return with_batch(record)


def with_batch(record: Callable[[torch.nn.Module, Any, Any], Any]) -> Hook:
    """A hook that calls `record(module, ForwardBatch, output)`, however the module is called."""
    by_keyword: set[torch.nn.Module] = set()

    def hook(module: torch.nn.Module, args: tuple, output: Any) -> Any:
        batch = _find_batch(args)
        if batch is not None:
            return record(module, batch, output)
        if module not in by_keyword:
            by_keyword.add(module)
            module.register_forward_hook(whole_call, with_kwargs=True)  # runs from the next call on
        return None

    def whole_call(module: torch.nn.Module, args: tuple, named: dict[str, Any], output: Any) -> Any:
        if _find_batch(args) is not None:
            return None
        batch = _find_batch(named.values())
        if batch is None:
            raise DraftlineError(
                f"{type(module).__name__} was called with {[type(v).__name__ for v in (*args, *named.values())]}: no ForwardBatch "
                f"among them, so its rows belong to nobody. This release of SGLang passes it otherwise: use dump.engine: "
                f"transformers."
            )
        return record(module, batch, output)

    return hook


def _find_batch(values) -> Any | None:
    return next((v for v in values if hasattr(v, "forward_mode") and hasattr(v, "extend_seq_lens_cpu")), None)


def _recorder(config: dict[str, Any]) -> Recorder:
    if config["spool"] not in _recorders:
        sizes = config["num_aux"], config["hidden_size"], config["storage_dtype"]
        _recorders[config["spool"]] = Recorder(Path(config["spool"]), *sizes, is_first=_is_first_rank())
    return _recorders[config["spool"]]


def _is_first_rank() -> bool:
    return not torch.distributed.is_initialized() or torch.distributed.get_rank() == 0
