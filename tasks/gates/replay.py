"""Replay stored samples through the target, alone and unpadded, and compare every state with what was stored."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch

from tasks.common.contract import Contract
from tasks.common.hidden_states import HiddenStates, Sample
from tasks.common.params import Params
from tasks.common.parity import Agreement, Match, all_states, find_state, layer_outputs, output_name
from tasks.common.progress import progress
from tasks.common.target import load_model

_COLUMNS = ("id", "tokens", "contract", "relative_error", "detail")


def replay(params: Params, contract: Contract, splits: dict[str, HiddenStates], states: pd.DataFrame) -> pd.DataFrame:
    """Recompute `gates.replay_samples` samples of each split with transformers at batch 1.

    The samples are spread evenly over the lengths, shortest and longest included: states that a padded batch
    got wrong differ most there.

    Args:
        states: the measured samples, from `read_stored_states`.

    Returns:
        A row for each state (aux slots and last) of each sample: its relative L2 error over all tokens and,
        where that is too large, which state of the target it really is.
    """
    chosen = [place for split in splits for place in _spread(states, split, contract, params.gates.replay_samples)]
    model = load_model(params.target) if chosen else None
    rows: list[dict[str, Any]] = []
    for place in progress(chosen, total=len(chosen), desc="replaying through the target", unit="sample"):
        sample = splits[place.split].read(place.index)
        rows += _compare(model, sample, contract, params.gates.max_relative_error)
    return pd.DataFrame(rows, columns=_COLUMNS)


@dataclass(frozen=True)
class _Place:
    split: str
    index: int


def _spread(states: pd.DataFrame, split: str, contract: Contract, count: int) -> list[_Place]:
    """Where samples of a split are, evenly over their lengths; those with another fault are left to it."""
    whole = (
        (states["rows"] == states["tokens"])
        & (states["num_nonfinite"] == 0)
        & (states["aux_width"] == contract.aux_width)
    )
    usable = states[(states["split"] == split) & whole].sort_values(["tokens", "id"])
    count = min(count, len(usable))
    places = [round(i * (len(usable) - 1) / max(count - 1, 1)) for i in range(count)]
    return [_Place(*values) for values in usable.iloc[places][["split", "index"]].itertuples(index=False)]


def _compare(model: torch.nn.Module, sample: Sample, contract: Contract, limit: float) -> Iterator[dict[str, Any]]:
    outputs = layer_outputs(model, sample.input_ids, contract.aux_layer_ids)
    references = {output_name(layer): output for layer, output in zip(contract.aux_layer_ids, outputs, strict=True)}
    references[f"{output_name(contract.num_layers - 1)} after the final norm"] = _last_state(model, sample.input_ids)
    stored = [*sample.aux.unbind(1), sample.last]
    every: dict[str, torch.Tensor] = {}
    for slot, (state, (name, reference)) in enumerate(zip(stored, references.items(), strict=True)):
        error = Agreement.of(state, reference).relative_error
        detail = ""
        if error > limit:
            every = every or all_states(model, sample.input_ids)
            detail = _explain(name, find_state(state, every))
        yield {
            "id": f"{sample.id} {'last' if state is sample.last else f'slot {slot}'}",
            "tokens": sample.num_tokens,
            "contract": name,
            "relative_error": float(f"{error:.1g}"),  # further digits change with the number of threads
            "detail": detail,
        }


def _explain(name: str, match: Match) -> str:
    if match.name == name:
        return f"it is {name}, but not computed alike: another precision, or rows that a batch mixed up"
    return f"the contract says {name}; it is {match}"


@torch.inference_mode()
def _last_state(model: torch.nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
    """The target's final state, after its final norm: float32 [T, H]."""
    ids = input_ids.long()[None].to(model.device)
    return model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state[0].float().cpu()
