"""Read a dump again, sample by sample, into rows for the gate on hidden states: no state stays in memory."""

import math
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch

from tasks.common.contract import Contract
from tasks.common.errors import DraftlineError
from tasks.common.files import read_json, sha256_file
from tasks.common.final_norm import rms_over_norm
from tasks.common.hidden_states import HIDDEN_STATES, HiddenStates, Sample, SampleRow, describe
from tasks.common.progress import progress
from tasks.common.responses import SPLITS, read_responses

_SHARD_COLUMNS = ("id", "problem", "samples", "tokens", "megabytes", "sha256", "recorded_sha256", "detail")
_SAMPLE_COLUMNS = ("id", "stored", "answered", "problem", "detail")


@dataclass(frozen=True)
class StoredStates:
    """What a dump holds, a row each.

    Attributes:
        splits: the splits, opened.
        shards: whether it can be read, its hash as recorded and as it is.
        samples: every answer and every stored sample: how often stored, whether an answer, why unreadable.
        states: every sample that could be read, measured again.
    """

    splits: dict[str, HiddenStates]
    shards: pd.DataFrame
    samples: pd.DataFrame
    states: pd.DataFrame


def read_stored_states(contract: Contract, final_norm: torch.Tensor) -> StoredStates:
    """Read artifacts/hidden_states and compare each sample with its sidecar and its answer.

    Args:
        final_norm: weight of the target's norm before the head, [H].

    Raises:
        DraftlineError: a manifest or the responses cannot be read. A shard that cannot be read is a row.
    """
    splits = {split: HiddenStates(HIDDEN_STATES / split) for split in SPLITS}
    answers = _fingerprints()
    places = [(split, name) for split, dump in splits.items() for name in dump.shards]
    shards: list[dict[str, Any]] = []
    states: list[dict[str, Any]] = []
    stored: dict[str, dict[str, Any]] = {}
    # Hashing and arithmetic let other threads run: shards are read as fast as the disk gives them.
    with (
        ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool,
        # Closed first: a run that is stopped leaves the shards that wait.
        closing(pool.map(lambda place: _read_shard(*place, final_norm), places)) as read,
    ):
        for shard, samples, of_shard in progress(read, total=len(places), desc="gate hidden states", unit="shard"):
            shards.append(shard)
            states += of_shard
            for sample in samples:
                stored.setdefault(sample["id"], {**sample, "stored": 0})["stored"] += 1
    for state in states:
        state["same_as_answer"] = answers.get(state["id"]) == (state["split"], state.pop("fingerprint"))
    for missing in answers.keys() - stored.keys():
        stored[missing] = {"id": missing, "stored": 0, "problem": "", "detail": f"of {answers[missing][0]}"}
    samples = sorted(
        ({**sample, "answered": sample["id"] in answers} for sample in stored.values()), key=lambda s: s["id"]
    )
    return StoredStates(
        splits=splits,
        shards=pd.DataFrame(shards, columns=_SHARD_COLUMNS),
        samples=pd.DataFrame(samples, columns=_SAMPLE_COLUMNS),
        states=pd.DataFrame(states) if states else pd.DataFrame(columns=_state_columns(contract)),
    )


def _read_shard(
    split: str, name: str, final_norm: torch.Tensor
) -> tuple[dict[str, Any], list[dict[str, Any]], list[dict[str, Any]]]:
    """Rows of a shard: of itself, of its samples as recorded, and of those that could be measured."""
    # Opened for this shard alone, so that its memory mapping goes with it.
    dump = HiddenStates(HIDDEN_STATES / split)
    shard, recorded = _read_sidecar(dump, split, name)
    samples, states = [], []
    for row in recorded:
        sample = {"id": row.id, "problem": "", "detail": f"in {split}/{name}"}
        samples.append(sample)
        try:
            state = _measure(dump.read_from_shard(name, row.index, row.id), row, final_norm)
        except DraftlineError as error:
            shard["problem"] = sample["problem"] = str(error)
            continue
        states.append({**state, "split": split, "detail": f"in {split}/{name}{state['detail']}"})
        shard["tokens"] += state["tokens"]
    return shard, samples, states


def _fingerprints() -> dict[str, tuple[str, str]]:
    """For each answer its split and the hash of its token ids and mask."""
    return {
        response.id: (split, _fingerprint(np.array(response.token_ids, "int32"), np.array(response.loss_mask, "uint8")))
        for split in SPLITS
        for response in read_responses(split)
    }


def _fingerprint(ids: np.ndarray, mask: np.ndarray) -> str:
    import xxhash

    return xxhash.xxh3_128_hexdigest(ids.tobytes() + mask.tobytes())


def _read_sidecar(dump: HiddenStates, split: str, name: str) -> tuple[dict[str, Any], list[SampleRow]]:
    """The shard's row, and the rows of its samples as they were recorded; none where the sidecar is unreadable."""
    path = dump.folder / f"{name}.safetensors"
    shard: dict[str, Any] = {
        "id": f"{split}/{name}",
        "problem": "",
        "samples": 0,
        "tokens": 0,
        "megabytes": 0.0,
        "detail": "",
    }
    shard |= {"sha256": "absent", "recorded_sha256": "absent"}
    try:
        sidecar = read_json(path.with_suffix(".json"))
        recorded = [SampleRow(**row) for row in sidecar["samples"]]
        shard |= {"samples": len(recorded), "recorded_sha256": sidecar["sha256"], "detail": _names(recorded)}
    except (DraftlineError, KeyError, TypeError) as error:
        shard["problem"] = f"its sidecar {path.with_suffix('.json')} cannot be read: {error}"
        recorded = []
    if path.exists():
        shard |= {"sha256": sha256_file(path), "megabytes": round(path.stat().st_size / 1e6, 1)}
    else:
        shard["problem"] = shard["problem"] or f"{path} is not there"
    return shard, recorded


def _names(recorded: list[SampleRow], shown: int = 3) -> str:
    names = ", ".join(row.id for row in recorded[:shown])
    return f"holds {names}" + (f" and {len(recorded) - shown} more" if len(recorded) > shown else "")


def _state_columns(contract: Contract) -> list[str]:
    """Columns of `_measure`, for a dump of which nothing could be read."""
    measured = "id split shard index tokens rows aux_width last_width dtype num_nonfinite mask_tokens mask_density"
    compared = (
        "smallest_id largest_id checksum recorded_checksum sidecar_differs same_as_answer last_is_normed last_norm"
    )
    return [*measured.split(), *compared.split(), *(f"norm_slot_{slot}" for slot in range(len(contract.aux_layer_ids)))]


def _measure(sample: Sample, recorded: SampleRow, final_norm: torch.Tensor) -> dict[str, Any]:
    """What a stored sample is now, beside what its sidecar says.

    Raises:
        DraftlineError: the tensors cannot be measured (no rows, or not [T, n_aux, H] and [T, H]).
    """
    if (
        not sample.num_tokens
        or not len(sample.aux)
        or not len(sample.last)
        or sample.aux.dim() != 3
        or sample.last.dim() != 2
    ):
        raise DraftlineError(
            f"{sample.id}: {sample.num_tokens} tokens, aux {list(sample.aux.shape)}, last {list(sample.last.shape)}; "
            f"expected [tokens, n_aux, H] and [tokens, H]."
        )
    found = describe(sample, recorded.shard, recorded.index)
    rms, normed = rms_over_norm(sample.last, final_norm)
    return {
        "id": sample.id,
        "shard": recorded.shard,
        "index": recorded.index,
        "tokens": found.tokens,
        "rows": found.rows,
        "aux_width": found.aux_width,
        "last_width": sample.last.shape[1],
        "dtype": found.dtype,
        "num_nonfinite": found.num_nonfinite,
        "mask_tokens": found.mask_tokens,
        "mask_density": found.mask_tokens / found.tokens,
        "smallest_id": int(sample.input_ids.min()),
        "largest_id": int(sample.input_ids.max()),
        **{f"norm_slot_{slot}": norm for slot, norm in enumerate(found.aux_norms)},
        "last_norm": found.last_norm,
        "checksum": found.checksum,
        "recorded_checksum": recorded.checksum,
        "sidecar_differs": ", ".join(_differing(recorded, found)),
        "fingerprint": _fingerprint(sample.input_ids.numpy(), sample.loss_mask.numpy()),
        "last_is_normed": normed,
        "detail": "" if normed else f", rms of last / norm weight {rms:.4g}",
    }


def _differing(recorded: SampleRow, found: SampleRow) -> Iterator[str]:
    """Names of the statistics that the sidecar has otherwise; the checksum has an expectation of its own."""
    for name, now in asdict(found).items():
        then = getattr(recorded, name)
        if name != "checksum" and not _same(then, now):
            yield f"{name} {then} recorded, {now} now"


def _same(then: Any, now: Any) -> bool:
    if isinstance(now, float) and isinstance(then, float | int):
        return math.isclose(then, now, rel_tol=1e-4)  # sums differ in the last digits with the number of threads
    if isinstance(now, list | tuple):
        return len(then) == len(now) and all(_same(a, b) for a, b in zip(then, now, strict=True))
    return then == now
