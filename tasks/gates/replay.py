"""Replay stored samples through the target, alone and unpadded, and compare every state with what was stored."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import pandas as pd
import torch

from tasks.common.contract import Contract
from tasks.common.hidden_states import HiddenStates, Sample
from tasks.common.params import Params
from tasks.common.parity import Agreement, Match, all_states, error_limit, find_state, layer_outputs, output_name
from tasks.common.progress import progress
from tasks.common.target import load_model

_COLUMNS = ("id", "tokens", "contract", "relative_error", "cosine", "detail")


def replay_limit(params: Params) -> float:
    """The relative error above which a replayed state is not what was stored."""
    return params.gates.max_replay_error or error_limit(params.target.dtype, params.dump.storage_dtype)


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
    target = Replay(params, contract)
    rows: list[dict[str, Any]] = []
    for place in progress(chosen, total=len(chosen), desc="replaying through the target", unit="sample"):
        sample = splits[place.split].read(place.index)
        rows += target.rows(sample)
    return as_table(rows)


def as_table(rows: list[dict[str, Any]]) -> pd.DataFrame:
    """Rows of `Replay.rows`, of none too."""
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
        & (states["last_width"] == contract.hidden_size)
    )
    usable = states[(states["split"] == split) & whole].sort_values(["tokens", "id"])
    count = min(count, len(usable))
    places = [round(i * (len(usable) - 1) / max(count - 1, 1)) for i in range(count)]
    return [_Place(*values) for values in usable.iloc[places][["split", "index"]].itertuples(index=False)]


class Replay:
    """The target, loaded at the first sample."""

    def __init__(self, params: Params, contract: Contract):
        self._params, self._contract = params, contract

    def rows(self, sample: Sample) -> Iterator[dict[str, Any]]:
        """A row a state of `sample`, its aux slots and its last."""
        layers, model, limit = self._contract.aux_layer_ids, self._model, replay_limit(self._params)
        outputs = layer_outputs(model, sample.input_ids, layers)
        references = {output_name(layer): output for layer, output in zip(layers, outputs, strict=True)}
        last = f"{output_name(self._contract.num_layers - 1)} after the final norm"
        references[last] = _last_state(model, sample.input_ids)
        every: dict[str, torch.Tensor] = {}
        for slot, (name, reference) in enumerate(references.items()):
            state = sample.last if name == last else sample.aux[:, slot]
            agreement = Agreement.of(state, reference)
            detail = ""
            if agreement.relative_error > limit:
                every = every or all_states(model, sample.input_ids)
                detail = _explain(name, find_state(state, every))
            yield {
                "id": f"{sample.id} {'last' if name == last else f'slot {slot}'}",
                "tokens": sample.num_tokens,
                "contract": name,
                "relative_error": float(f"{agreement.relative_error:.1g}"),  # further digits change with the threads
                "cosine": round(agreement.cosine, 4),
                "detail": detail,
            }

    @cached_property
    def _model(self) -> torch.nn.Module:
        return load_model(self._params.target)


def _explain(name: str, match: Match) -> str:
    if match.name == name:
        return f"it is {name}, but not computed alike: another precision, or rows that a batch mixed up"
    return f"the contract says {name}; it is {match}"


@torch.inference_mode()
def _last_state(model: torch.nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
    """The target's final state, after its final norm: float32 [T, H]."""
    ids = input_ids.long()[None].to(model.device)
    return model.get_decoder()(input_ids=ids, use_cache=False).last_hidden_state[0].float().cpu()
