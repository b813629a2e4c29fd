"""Read a dump again, shard by shard, into columns for the gate on hidden states: no state stays in memory."""

import os
from array import array
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import torch
from safetensors import SafetensorError

from tasks.common.contract import Contract
from tasks.common.final_norm import TOLERANCE, farthest_from_one, token_rms
from tasks.common.hidden_states import HIDDEN_STATES, HiddenStates, table_of
from tasks.common.progress import progress
from tasks.common.responses import SPLITS, read_responses
from tasks.common.shard import StoredShard, read_sidecar
from tasks.common.shard_layout import ShardPlan
from tasks.common.storage import StoredRows
from tasks.common.tensor_types import SAFETENSORS
from tasks.gates.token_norms import TokenNorms

_SHARD_COLUMNS = ("id", "problem", "samples", "tokens", "megabytes", "checksum", "recorded_checksum", "detail")
_ROWS_AT_ONCE = 1024


@dataclass(frozen=True)
class StoredStates:
    """What a dump holds, a row each.

    Attributes:
        splits: the splits, opened.
        shards: whether it can be read, its checksum as recorded and as it is.
        samples: every answer and every stored sample: how often stored, whether an answer, why unreadable.
        states: every sample that could be read, measured again; `index` is its place in the split.
        norms: of all tokens that could be read, a slot each for the aux states and the last.
    """

    splits: dict[str, HiddenStates]
    shards: pd.DataFrame
    samples: pd.DataFrame
    states: pd.DataFrame
    norms: TokenNorms


def read_stored_states(contract: Contract, final_norm: torch.Tensor) -> StoredStates:
    """Read artifacts/hidden_states and compare each sample with the table of its split and its answer.

    Args:
        final_norm: weight of the target's norm before the head, [H].

    Raises:
        DraftlineError: a manifest, a table or the responses cannot be read. A shard that cannot be read is a row.
    """
    splits = {split: HiddenStates(HIDDEN_STATES / split) for split in SPLITS}
    places = [(split, number) for split, dump in splits.items() for number in range(len(dump.shards))]
    recorded = {split: dump.table.to_pandas() for split, dump in splits.items()}
    read: list[_ReadShard] = []
    norms = TokenNorms(len(contract.aux_layer_ids) + 1)

    def read_one(place: tuple[str, int]) -> _ReadShard:
        split, number = place
        dump, table = splits[split], recorded[split]
        first, end = np.searchsorted(table["shard"], [number, number + 1])
        return _read_shard(
            dump.folder, dump.shards[number], table.iloc[first:end], final_norm, dump.storage_dtype, norms
        )

    # Hashing and arithmetic let other threads run: shards are read as fast as the disk gives them.
    with (
        ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool,
        # Closed first: a run that is stopped leaves the shards that wait.
        closing(pool.map(read_one, places)) as shards,
    ):
        for shard in progress(shards, total=len(places), desc="gate hidden states", unit="shard"):
            read.append(shard)
    return _stored(splits, read, _answers(), contract, norms)


def read_stored_shard(
    folder: Path, plan: ShardPlan, contract: Contract, final_norm: torch.Tensor, storage_dtype: str
) -> StoredStates:
    """The same for one shard of a dump that goes on, held against what it was planned to hold; `splits` is empty."""
    sidecar = read_sidecar(folder, plan.name)
    facts = {"name": plan.name, "checksum": sidecar["checksum"]}
    table = table_of(sidecar["samples"], 0, contract).to_pandas()
    bounds = zip(plan.ids, plan.offsets[:-1].tolist(), plan.offsets[1:].tolist(), strict=True)
    rows = [
        (name, folder.name, _fingerprint(plan.input_ids[start:end].tobytes(), plan.loss_mask[start:end].tobytes()))
        for name, start, end in bounds
    ]
    norms = TokenNorms(len(contract.aux_layer_ids) + 1)
    read = _read_shard(folder, facts, table, final_norm, storage_dtype, norms)
    return _stored({}, [read], _indexed(rows), contract, norms)


def _stored(
    splits: dict[str, HiddenStates],
    read: "list[_ReadShard]",
    answers: pd.DataFrame,
    contract: Contract,
    norms: TokenNorms,
) -> StoredStates:
    states = pd.concat([s.states for s in read if len(s.states)] or [pd.DataFrame(columns=_state_columns(contract))])
    states = states.reset_index(drop=True)
    expected = answers.reindex(states["id"])
    states["same_as_answer"] = (expected["split"].to_numpy() == states["split"].to_numpy()) & (
        expected["fingerprint"].to_numpy() == states.pop("fingerprint").to_numpy()
    )
    return StoredStates(
        splits=splits,
        shards=pd.DataFrame([shard.row for shard in read], columns=_SHARD_COLUMNS),
        samples=_samples([shard.samples for shard in read], answers),
        states=states,
        norms=norms,
    )


@dataclass(frozen=True)
class _ReadShard:
    """A shard's row, its samples as recorded with why they are unreadable, and those that could be measured."""

    row: dict[str, Any]
    samples: pd.DataFrame
    states: pd.DataFrame


def _read_shard(
    folder: Path,
    facts: dict[str, Any],
    recorded: pd.DataFrame,
    final_norm: torch.Tensor,
    storage_dtype: str,
    norms: TokenNorms,
) -> _ReadShard:
    """
    Args:
        facts: name and recorded checksum of the shard.
        recorded: its rows of the split's table.
        norms: those of its tokens are added to it.
    """
    path, split = folder / f"{facts['name']}.safetensors", folder.name
    place = f"{split}/{facts['name']}"
    row = {
        "id": place,
        "problem": "",
        "samples": len(recorded),
        "tokens": 0,
        "megabytes": 0.0,
        "checksum": "absent",
        "recorded_checksum": facts["checksum"],
        "detail": _names(recorded["id"]),
    }
    samples = pd.DataFrame({"id": recorded["id"], "problem": "", "detail": f"in {place}"})
    try:
        shard = StoredShard(path)  # mapped for this gate alone
        row["megabytes"] = round(shard.path.stat().st_size / 1e6, 1)
        offsets = _offsets(shard, recorded)
    except (SafetensorError, OSError, KeyError, ValueError) as error:
        row["problem"] = f"{path} cannot be read: {error}"
        return _ReadShard(row, samples.assign(problem=row["problem"]), pd.DataFrame())
    there = len(offsets) - 1
    if there < len(recorded):
        row["problem"] = f"{shard.path} ends before its last {len(recorded) - there} samples"
        samples.iloc[there:, samples.columns.get_loc("problem")] = row["problem"]
    rows = shard.stored_rows(int(offsets[-1]))
    token_norms = rows.norms.numpy()
    if token_norms.shape[1] == norms.slots:
        norms.add(token_norms)
    states = _measure(shard, rows, offsets, recorded.iloc[:there], final_norm, storage_dtype)
    row["checksum"] = shard.checksum(states["checksum"].tolist())
    row["tokens"] = int(offsets[-1])
    states.insert(1, "split", split)
    states.insert(2, "shard", facts["name"])
    states["index"] = recorded.index[:there]
    states["detail"] = f"in {place}" + states["detail"]
    return _ReadShard(row, samples, states)


def _offsets(shard: StoredShard, recorded: pd.DataFrame) -> np.ndarray:
    """Where the samples lie of which at least a row is there, the last one cut to what is.

    Raises:
        ValueError: a tensor has no tokens, or is not what a shard has under its name.
    """
    _require_tensors(shard)
    offsets = np.append(recorded["start"].to_numpy(), recorded["start"].iloc[-1] + recorded["tokens"].iloc[-1])
    there = int(np.searchsorted(offsets[:-1], shard.rows))
    return np.minimum(offsets[: there + 1], shard.rows)


def _require_tensors(shard: StoredShard) -> None:
    """Types and shapes fit together; how many rows there are, how wide states are and how they are stored is judged later.

    Raises:
        ValueError: names the tensor that does not.
    """
    slots, hidden_size = shard.aux.shape[1:] if shard.aux.dim() == 3 else ("n_aux", "H")
    expected: dict[str, tuple[str, tuple[int | str, ...]]] = {
        "aux": ("a float", ("tokens", "n_aux", "H")),
        "last": ("a float", ("tokens", hidden_size)),
        "aux_scale": ("float32", ("tokens", slots)),
        "last_scale": ("float32", ("tokens",)),
        "input_ids": ("int32", ("tokens",)),
        "loss_mask": ("uint8", ("tokens",)),
        "sample_offsets": ("int64", ("samples + 1",)),
    }
    for name, (dtype, shape) in expected.items():
        tensor: torch.Tensor | None = getattr(shard, name)
        if tensor is None:
            continue
        is_float = tensor.is_floating_point() and _name_of(tensor.dtype) in SAFETENSORS
        of_type = is_float if dtype == "a float" else _name_of(tensor.dtype) == dtype
        of_shape = tensor.dim() == len(shape) and all(
            size == wanted or isinstance(wanted, str) for size, wanted in zip(tensor.shape, shape, strict=True)
        )
        if not (of_type and of_shape and len(tensor)):
            wanted = ", ".join(map(str, shape))
            raise ValueError(f"{name} is {_name_of(tensor.dtype)} {list(tensor.shape)}, expected {dtype} [{wanted}]")


def _measure(
    shard: StoredShard,
    rows: StoredRows,
    offsets: np.ndarray,
    recorded: pd.DataFrame,
    final_norm: torch.Tensor,
    storage_dtype: str,
) -> pd.DataFrame:
    """What stored samples are now, beside what the table says."""
    starts, ends = offsets[:-1], offsets[1:]
    ids, mask = shard.input_ids.numpy()[: offsets[-1]], shard.loss_mask.numpy()
    found = shard.statistics(offsets, rows)
    rms = farthest_from_one(_rms(shard, int(ends[-1]), final_norm), starts)
    normed = np.abs(rms - 1) <= TOLERANCE[storage_dtype]
    tokens = recorded["tokens"].to_numpy()
    return pd.DataFrame(
        {
            "id": recorded["id"].to_numpy(),
            "tokens": tokens,
            "rows": found["tokens"],
            "aux_width": shard.aux.shape[1] * shard.aux.shape[2],
            "last_width": shard.last.shape[1],
            "dtype": _stored_type(shard),
            "num_nonfinite": found["num_nonfinite"],
            "mask_tokens": found["mask_tokens"],
            "mask_density": found["mask_tokens"] / tokens,
            "smallest_id": np.minimum.reduceat(ids, starts),
            "largest_id": np.maximum.reduceat(ids, starts),
            **{
                name: _or_missing(found[name]) for name in found if name.startswith("norm_slot_") or name == "last_norm"
            },
            "checksum": shard.sample_checksums(offsets),
            "recorded_checksum": recorded["checksum"].to_numpy(),
            "table_differs": _differences(recorded, found),
            "fingerprint": [
                _fingerprint(ids[start:end].tobytes(), mask[start:end].tobytes())
                for start, end in zip(starts.tolist(), ends.tolist(), strict=True)
            ],
            "last_is_normed": normed,
            "detail": ["" if ok else f", rms of last / norm weight {r:.4g}" for ok, r in zip(normed, rms, strict=True)],
        }
    )


def _rms(shard: StoredShard, end: int, final_norm: torch.Tensor) -> np.ndarray:
    """rms of last / norm weight of each token up to `end`."""
    pieces = ((start, min(start + _ROWS_AT_ONCE, end)) for start in range(0, end, _ROWS_AT_ONCE))
    return np.concatenate([token_rms(shard.states(*piece)[1], final_norm).numpy() for piece in pieces])


def _stored_type(shard: StoredShard) -> str:
    """As dump.storage_dtype spells it; both where aux and last differ."""
    types = {_type(shard.aux, shard.aux_scale), _type(shard.last, shard.last_scale)}
    return " and ".join(sorted(types))


def _type(values: torch.Tensor, scale: torch.Tensor | None) -> str:
    name = _name_of(values.dtype)
    if name == "float8_e4m3fn":
        return f"{name} without scales" if scale is None else "float8"
    return name if scale is None else f"{name} with scales"


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _or_missing(values: np.ndarray) -> np.ndarray:
    """NaN for what is not finite, as the table has it."""
    return np.where(np.isfinite(values), values, np.nan)


def _differences(recorded: pd.DataFrame, found: dict[str, np.ndarray]) -> list[str]:
    """Of each sample the statistics that the table has otherwise; the checksum has an expectation of its own."""
    differs = [""] * len(recorded)
    for name, now in found.items():
        then = recorded[name].to_numpy(float) if name in recorded else np.full(len(recorded), np.nan)
        now = _or_missing(now)
        same = np.isclose(then, now, rtol=1e-4, atol=0, equal_nan=True)  # threads change the last digits
        for row in np.flatnonzero(~same):
            differs[row] += f"{', ' if differs[row] else ''}{name} {then[row]:g} recorded, {now[row]:g} now"
    return differs


def _answers() -> pd.DataFrame:
    """Of each answer, by id, its split and the hash of its token ids and mask."""
    rows = [
        (response.id, split, _fingerprint(array("i", response.token_ids).tobytes(), bytes(response.loss_mask)))
        for split in SPLITS
        for response in read_responses(split)
    ]
    return _indexed(rows)


def _indexed(rows: list[tuple[str, str, str]]) -> pd.DataFrame:
    return pd.DataFrame(rows, columns=["id", "split", "fingerprint"]).set_index("id")


def _fingerprint(ids: bytes, mask: bytes) -> str:
    """Hash of int32 token ids and a mask of bytes."""
    import xxhash

    return xxhash.xxh3_128_hexdigest(ids + mask)


def _samples(read: list[pd.DataFrame], answers: pd.DataFrame) -> pd.DataFrame:
    stored = pd.concat([*read, pd.DataFrame(columns=["id", "problem", "detail"])])
    times = stored["id"].value_counts()
    stored = stored.drop_duplicates("id")
    places = answers.index.get_indexer(stored["id"])
    missing = answers[~np.isin(np.arange(len(answers)), places)]
    lost = pd.DataFrame({"id": missing.index, "problem": "", "detail": "of " + missing["split"].to_numpy()})
    samples = pd.concat([stored, lost]).sort_values("id", ignore_index=True)
    samples["stored"] = samples["id"].map(times).fillna(0).astype(int)
    samples["answered"] = answers.index.get_indexer(samples["id"]) >= 0
    return samples


def _names(ids: pd.Series, shown: int = 3) -> str:
    names = ", ".join(ids.iloc[:shown])
    return f"holds {names}" + (f" and {len(ids) - shown} more" if len(ids) > shown else "")


def _state_columns(contract: Contract) -> Iterator[str]:
    """Columns of `_measure`, for a dump of which nothing could be read."""
    measured = "id split shard index tokens rows aux_width last_width dtype num_nonfinite mask_tokens mask_density"
    compared = "smallest_id largest_id checksum recorded_checksum table_differs fingerprint last_is_normed last_norm"
    yield from [*measured.split(), *compared.split()]
    yield from (f"norm_slot_{slot}" for slot in range(len(contract.aux_layer_ids)))
