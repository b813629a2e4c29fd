"""Norms of states, slot by slot, against bounds from the run itself and from the run before it, which git has.

A sample's mean norm follows its length, since the first token's is often a thousand times the others'. The median over
all tokens of a run hardly moves: with SmolLM2-135M, whose tokens deviate by 8 to 19 %, by 5 % between kinds of prompts and
by at most 25 % from English answers to code, digits, German or Chinese. So a whole run shows there that was scaled, is of
layers some way off, or has its slots in other places.
"""

import json
from typing import Any

import great_expectations.expectations as gxe
import numpy as np
import pandas as pd
from pydantic import BaseModel, ConfigDict

from tasks.common.contract import Contract
from tasks.gates.committed import committed, git_answering
from tasks.gates.report import GATES, Comparison
from tasks.gates.suite import Table, because, show
from tasks.gates.token_norms import TokenNorms

_REPORT = (GATES / "hidden_states.json").as_posix()
# How far a later run's median may be: so many robust deviations of a token's norm, and at least this factor.
_DEVIATIONS, _FACTOR = 2, 1.3


class SlotNorms(BaseModel):
    """Median norm of a slot over all tokens of a run, and the range in which that of a later run is expected."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    median: float
    lowest: float
    highest: float


class NormRecord(BaseModel):
    """What a run leaves in its report for later ones.

    Attributes:
        norms: by column of the table of samples, norm_slot_0, ..., last_norm; without a finite norm a slot is not there.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    contract: Contract
    storage_dtype: str
    norms: dict[str, SlotNorms]

    @classmethod
    def of(cls, contract: Contract, storage_dtype: str, norms: TokenNorms) -> "NormRecord":
        slots = {column: _slot(norms, slot) for slot, column in enumerate(norm_columns(contract))}
        return cls(
            contract=contract,
            storage_dtype=storage_dtype,
            norms={column: found for column, found in slots.items() if found},
        )


def norm_columns(contract: Contract) -> list[str]:
    """Of the table of samples: a column a slot, and the last state's."""
    return [*(f"norm_slot_{slot}" for slot in range(len(contract.aux_layer_ids))), "last_norm"]


def norm_label(column: str, contract: Contract) -> str:
    """'slot 1 (layer 14)' or 'the last state'."""
    if column == "last_norm":
        return "the last state"
    slot = int(column.removeprefix("norm_slot_"))
    layers = contract.aux_layer_ids
    return f"slot {slot} (layer {layers[slot]})" if slot < len(layers) else f"slot {slot}"


def sample_limits(states: pd.DataFrame) -> dict[str, tuple[float, float]]:
    """For each norm column a range from the run itself: 20 robust deviations of the logarithm, at least a factor of 30.

    A sample's mean norm depends on its length, so the range is generous: it is there for zeros and garbage.
    """
    limits = {}
    for column in [name for name in states.columns if name.startswith("norm_slot_") or name == "last_norm"]:
        norms = states[column].dropna().to_numpy(dtype=float)
        logs = np.log(norms[norms > 0])
        if len(logs):
            median = np.median(logs)
            reach = max(20 * 1.4826 * np.median(np.abs(logs - median)), np.log(30))
            limits[column] = (float(f"{np.exp(median - reach):.3g}"), float(f"{np.exp(median + reach):.3g}"))
        else:
            limits[column] = (0.0, float("inf"))
    return limits


def compare(record: NormRecord) -> Comparison:
    """With the run whose report is committed at git's HEAD."""
    earlier, against = _committed(record)
    return Comparison(
        against,
        record.model_dump(mode="json"),
        earlier.model_dump(mode="json") if earlier else {},
        norm_table(record, earlier) if earlier else None,
    )


def _committed(record: NormRecord) -> tuple[NormRecord | None, str]:
    """The record in that report; None and why, where there is nothing that `record` could be held against.

    Raises:
        DraftlineError: git does not give it.
    """
    try:
        with git_answering(_REPORT):
            text = committed(_REPORT)
        if text is None:
            return None, "nothing committed"
        earlier = NormRecord.model_validate(json.loads(text)["record"])
    except (ValueError, KeyError, TypeError):
        return None, "nothing: no norms committed"
    if earlier.contract != record.contract:
        return None, "nothing: other contract"
    if earlier.storage_dtype != record.storage_dtype:
        return None, "nothing: other storage type"
    return earlier, "committed run"


def norm_table(record: NormRecord, earlier: NormRecord) -> Table:
    """A row a slot: the median norm of this run, and what the earlier one allows."""
    rows = [
        {
            "id": norm_label(column, earlier.contract),
            "median": record.norms[column].median if column in record.norms else None,
            "earlier": then.median,
            "lowest": then.lowest,
            "highest": then.highest,
        }
        for column, then in earlier.norms.items()
    ]
    shown = ("id", "median", "earlier", "lowest", "highest")
    return Table(
        "norms", "slot", pd.DataFrame([row | {"outside": _outside(**row)} for row in rows]), norm_suite(), shown
    )


def norm_suite() -> list[gxe.Expectation]:
    """What must hold of each slot of a run, held against an earlier one."""
    return [
        gxe.ExpectColumnValuesToBeInSet(
            column="outside",
            value_set=[""],
            severity="critical",
            description="The median norm of every slot is as in the run whose report is committed",
            meta=because(
                "C3",
                "The same target at the same layers gives states of nearly the same size, whatever the prompts: these were scaled, "
                "are of other layers, or stand in other slots.",
                "Set gates.replay_samples above 0 to see whether these states are right. If not, delete artifacts/hidden_states, "
                f"then `dvc repro`. If so, forget the earlier run: `git rm --cached {_REPORT}`, `git commit`, `dvc repro`, and commit "
                "the new report.",
            ),
        )
    ]


def _slot(norms: TokenNorms, slot: int) -> SlotNorms | None:
    median = norms.median(slot)
    if not np.isfinite(median):
        return None
    reach = max(np.exp(_DEVIATIONS * norms.deviation(slot)), _FACTOR)
    lowest, median, highest = (float(f"{value:.3g}") for value in (median / reach, median, median * reach))
    return SlotNorms(median=median, lowest=lowest, highest=highest)


def _outside(median: float | None, earlier: float, lowest: float, highest: float, **_: Any) -> str:
    if median is not None and lowest <= median <= highest:
        return ""
    return f"{show(lowest)} … {show(highest)}: the median norm is {show(median)}, and was {show(earlier)}"
