"""Plan the shards of a split, compute those that are not there yet, close the split."""

import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tasks.common.contract import Contract
from tasks.common.errors import DraftlineError
from tasks.common.files import sha256_json
from tasks.common.hidden_states import (
    FORMAT_VERSION,
    HIDDEN_STATES,
    Sample,
    shard_is_done,
    write_manifest,
    write_shard,
)
from tasks.common.params import Dump, Params
from tasks.common.progress import progress
from tasks.common.responses import SPLITS, Response, read_responses
from tasks.common.target import load_model, target_contract
from tasks.common.versions import result_versions

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class PlannedShard:
    """Which answers a shard holds; `sha256` covers their ids, tokens and masks, and all that their states depend on."""

    name: str
    sha256: str
    responses: list[Response]

    @property
    def tokens(self) -> int:
        return sum(len(response.token_ids) for response in self.responses)


def dump(params: Params) -> dict[str, dict[str, int]]:
    """Write artifacts/hidden_states/{train,heldout}.

    Returns:
        For each split: samples, tokens, bytes, shards, and how many shards were taken over.

    Raises:
        DraftlineError: the disk cannot hold the states; names the options.
    """
    contract = target_contract(params.contract)
    totals: dict[str, dict[str, int]] = {}
    missing: dict[str, set[str]] = {}
    for split in SPLITS:
        totals[split] = {"samples": 0, "tokens": 0, "shards": 0, "taken_over": 0}
        missing[split] = set()
        for shard in plan_shards(split, params, contract):
            done = shard_is_done(HIDDEN_STATES / split, shard.name, shard.sha256)
            totals[split]["samples"] += len(shard.responses)
            totals[split]["tokens"] += shard.tokens
            totals[split]["shards"] += 1
            totals[split]["taken_over"] += done
            if not done:
                missing[split].add(shard.name)
        totals[split]["bytes"] = totals[split]["tokens"] * bytes_per_token(contract, params.dump.storage_dtype)
    _require_disk(sum(part["bytes"] for part in totals.values()), HIDDEN_STATES)
    capture = _capture(params, contract) if any(missing.values()) else None
    for split in SPLITS:
        folder = HIDDEN_STATES / split
        with progress(total=totals[split]["tokens"], desc=f"dumping {split}", unit="tok") as bar:
            for shard in plan_shards(split, params, contract):
                if shard.name in missing[split]:
                    _write(shard, folder, capture, params.dump)
                bar.update(shard.tokens)
        _remove_others(folder, totals[split]["shards"])
        names = (_shard_name(index) for index in range(totals[split]["shards"]))
        write_manifest(folder, contract, params.dump.storage_dtype, "transformers", names)
    return totals


def bytes_per_token(contract: Contract, storage_dtype: str) -> int:
    """(n_aux + 1) * H values, and the token id and mask beside them."""
    return (contract.aux_width + contract.hidden_size) * _BYTES[storage_dtype] + 5


def plan_shards(split: str, params: Params, contract: Contract) -> Iterator[PlannedShard]:
    """Yield shards of about `shard_tokens` tokens in prompt order: a prompt that is added last leaves all but the last as they were."""
    made_with = [
        FORMAT_VERSION,
        contract.model_dump(),
        params.target.dtype,
        params.dump.storage_dtype,
        result_versions(),
    ]
    pending: list[Response] = []
    tokens = index = 0
    for response in read_responses(split):
        pending.append(response)
        tokens += len(response.token_ids)
        if tokens >= params.dump.shard_tokens:
            yield _planned(index, pending, made_with)
            pending, tokens, index = [], 0, index + 1
    if pending:
        yield _planned(index, pending, made_with)


def _planned(index: int, responses: list[Response], made_with: list) -> PlannedShard:
    content = [[response.id, response.token_ids, response.loss_mask] for response in responses]
    return PlannedShard(_shard_name(index), sha256_json([made_with, content]), responses)


def _shard_name(index: int) -> str:
    return f"shard-{index:05d}"


def _capture(params: Params, contract: Contract) -> Callable[[list[list[int]]], list]:
    from tasks.dump_hidden_states.capture import Capture

    return Capture(load_model(params.target), contract.aux_layer_ids).run


def _write(shard: PlannedShard, folder: Path, capture, params: Dump) -> None:
    import torch

    dtype = getattr(torch, params.storage_dtype)
    samples: dict[str, Sample] = {}
    for batch in _batches(shard.responses, params.batch_tokens):
        for response, (aux, last) in zip(batch, capture([r.token_ids for r in batch]), strict=True):
            samples[response.id] = Sample(
                id=response.id,
                input_ids=torch.tensor(response.token_ids, dtype=torch.int32),
                loss_mask=torch.tensor(response.loss_mask, dtype=torch.uint8),
                aux=aux.to("cpu", dtype),
                last=last.to("cpu", dtype),
            )
    write_shard(folder, shard.name, [samples[response.id] for response in shard.responses], shard.sha256)


def _batches(responses: list[Response], batch_tokens: int) -> Iterator[list[Response]]:
    """Batches of similar lengths, at most `batch_tokens` with padding (a longer answer goes alone)."""
    batch: list[Response] = []
    for response in sorted(responses, key=lambda response: (-len(response.token_ids), response.id)):
        if batch and (len(batch) + 1) * len(batch[0].token_ids) > batch_tokens:
            yield batch
            batch = []
        batch.append(response)
    yield batch


def _remove_others(folder: Path, shards: int) -> None:
    planned = {_shard_name(index) for index in range(shards)}
    for path in folder.iterdir():
        if path.stem not in planned and path.name != "manifest.json":
            path.unlink()


def _require_disk(needed: int, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    stored = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    free = shutil.disk_usage(folder).free
    if needed > free + stored:
        raise DraftlineError(
            f"{folder}: the hidden states need {needed / 1e9:.1f} GB, the disk has {free / 1e9:.1f} GB free. Options: "
            f"dump.storage_dtype: bfloat16 (half of float32), fewer prompts (prompts.max_train), shorter answers "
            f"(regenerate.max_new_tokens), or a larger disk mounted at {folder}."
        )
