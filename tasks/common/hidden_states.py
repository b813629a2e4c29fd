"""Hidden states on disk: token-packed safetensors shards, a sidecar each, and a manifest with the contract.

    hidden_states/<split>/shard-00000.safetensors   aux [tokens, n_aux, H], last [tokens, H],
                                                    input_ids int32 [tokens], loss_mask uint8 [tokens],
                                                    sample_offsets int64 [samples + 1]
    hidden_states/<split>/shard-00000.json          plan hash, SHA-256, one row of statistics a sample
    hidden_states/<split>/manifest.json             format version, contract, storage dtype, shards

No padding is stored. A shard counts as done when its sidecar exists, and the sidecar is renamed into
place after the shard was, so a killed writer leaves nothing that looks whole.
"""

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

from tasks.common.contract import Contract
from tasks.common.errors import DraftlineError
from tasks.common.files import ARTIFACTS, read_json, replacing, sha256_file, write_json

if TYPE_CHECKING:
    import torch

HIDDEN_STATES = ARTIFACTS / "hidden_states"
FORMAT_VERSION = 1


@dataclass(frozen=True)
class Sample:
    """States of one conversation of T tokens.

    Attributes:
        input_ids: int32 [T].
        loss_mask: uint8 [T], 1 where the assistant wrote the token.
        aux: [T, n_aux, H]; slot s is the output of layer contract.aux_layer_ids[s].
        last: [T, H], the final state (after the final norm iff contract.last_is_normed).
    """

    id: str
    input_ids: "torch.Tensor"
    loss_mask: "torch.Tensor"
    aux: "torch.Tensor"
    last: "torch.Tensor"

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids)


@dataclass(frozen=True)
class SampleRow:
    """What is known of a stored sample without reading its states.

    Attributes:
        index: position within its shard.
        rows: rows of aux and of last that were stored; must equal `tokens`.
        aux_width: n_aux * H.
        mask_tokens: tokens with loss mask 1.
        num_nonfinite: NaN or Inf values in aux and last.
        aux_norms: mean L2 norm over tokens, a value per slot.
        last_norm: the same of the last state.
        checksum: xxh3_128 over ids, mask, aux and last as stored.
    """

    id: str
    shard: str
    index: int
    tokens: int
    rows: int
    aux_width: int
    dtype: str
    mask_tokens: int
    num_nonfinite: int
    aux_norms: tuple[float | None, ...]
    last_norm: float | None
    max_abs: float | None
    checksum: str


def describe(sample: Sample, shard: str, index: int) -> SampleRow:
    """Statistics of a sample as stored; norms are None where values are not finite (JSON has no NaN)."""
    import math

    import torch
    import xxhash

    def finite(value: float) -> float | None:
        return float(f"{value:.6g}") if math.isfinite(value) else None

    digest = xxhash.xxh3_128()
    for tensor in (sample.input_ids, sample.loss_mask, sample.aux, sample.last):
        digest.update(tensor.contiguous().view(torch.uint8).numpy())
    aux, last = sample.aux.float(), sample.last.float()
    return SampleRow(
        id=sample.id,
        shard=shard,
        index=index,
        tokens=len(sample.input_ids),
        rows=min(len(aux), len(last)),
        aux_width=aux.shape[1] * aux.shape[2],
        dtype=str(sample.aux.dtype).removeprefix("torch."),
        mask_tokens=int(sample.loss_mask.sum()),
        num_nonfinite=int((~aux.isfinite()).sum() + (~last.isfinite()).sum()),
        aux_norms=tuple(finite(v) for v in aux.norm(dim=-1).mean(0).tolist()),
        last_norm=finite(last.norm(dim=-1).mean().item()),
        max_abs=finite(max(aux.abs().max().item(), last.abs().max().item())),
        checksum=digest.hexdigest(),
    )


def write_shard(folder: Path, name: str, samples: list[Sample], plan_sha256: str) -> None:
    """Write a shard, then its sidecar: each to a partial file, fsynced and renamed.

    Args:
        folder: of the split.
        name: 'shard-00000'.
        samples: in the order of the plan.
        plan_sha256: hash of what the shard was planned to hold; resume compares it.
    """
    import torch
    from safetensors.torch import save_file

    offsets = torch.tensor([0] + [sample.num_tokens for sample in samples]).cumsum(0)
    tensors = {
        field: torch.cat([getattr(s, field) for s in samples]) for field in ("input_ids", "loss_mask", "aux", "last")
    }
    path = folder / f"{name}.safetensors"
    with replacing(path) as partial:
        save_file({**tensors, "sample_offsets": offsets}, partial)
    rows = [asdict(describe(sample, name, index)) for index, sample in enumerate(samples)]
    write_json(folder / f"{name}.json", {"plan_sha256": plan_sha256, "sha256": sha256_file(path), "samples": rows})


def shard_is_done(folder: Path, name: str, plan_sha256: str) -> bool:
    """Whether the shard was written whole under this very plan. Its bytes are the gate's to verify."""
    sidecar = folder / f"{name}.json"
    return (
        sidecar.exists()
        and (folder / f"{name}.safetensors").exists()
        and read_json(sidecar)["plan_sha256"] == plan_sha256
    )


def write_manifest(folder: Path, contract: Contract, storage_dtype: str, engine: str, shards: Iterable[str]) -> None:
    """Close a split: what is not named here is not part of it."""
    write_json(
        folder / "manifest.json",
        {
            "format_version": FORMAT_VERSION,
            "contract": contract.model_dump(),
            "storage_dtype": storage_dtype,
            "engine": engine,
            "shards": list(shards),
        },
    )


class HiddenStates:
    """A split of dumped states, read sample by sample from memory-mapped shards."""

    def __init__(self, folder: Path):
        """Read manifest and sidecars, not the states.

        Raises:
            DraftlineError: manifest or sidecar absent or of another format version.
        """
        manifest = read_json(folder / "manifest.json")
        if manifest["format_version"] != FORMAT_VERSION:
            raise DraftlineError(
                f"{folder / 'manifest.json'}: format_version {manifest['format_version']}, this code reads "
                f"{FORMAT_VERSION}. Dump again: delete {HIDDEN_STATES}, then `dvc repro`."
            )
        self.folder = folder
        self.contract = Contract.model_validate(manifest["contract"])
        self.storage_dtype: str = manifest["storage_dtype"]
        self.shards: list[str] = manifest["shards"]

    @cached_property
    def samples(self) -> list[SampleRow]:
        """One row a sample, in the order of the plan."""
        return [
            SampleRow(**row | {"aux_norms": tuple(row["aux_norms"])})
            for shard in self.shards
            for row in read_json(self.folder / f"{shard}.json")["samples"]
        ]

    def __len__(self) -> int:
        return len(self.samples)

    def read(self, index: int) -> Sample:
        """States of sample `index` of `samples`."""
        row = self.samples[index]
        return self.read_from_shard(row.shard, row.index, row.id)

    def read_from_shard(self, shard: str, index: int, sample_id: str) -> Sample:
        """States of the sample at `index` of a shard.

        Raises:
            DraftlineError: the shard cannot be parsed or is shorter than its offsets say; names both.
        """
        return Sample(sample_id, *self._read(shard, index, sample_id, ("input_ids", "loss_mask", "aux", "last")))

    def read_tokens(self, index: int) -> tuple["torch.Tensor", "torch.Tensor"]:
        """Token ids and loss mask of sample `index`, without its states: int32 [T] and uint8 [T].

        Raises:
            DraftlineError: as `read_from_shard`.
        """
        row = self.samples[index]
        input_ids, loss_mask = self._read(row.shard, row.index, row.id, ("input_ids", "loss_mask"))
        return input_ids, loss_mask

    def _read(self, shard: str, index: int, sample_id: str, fields: tuple[str, ...]) -> list["torch.Tensor"]:
        from safetensors import SafetensorError

        path = self.folder / f"{shard}.safetensors"
        try:
            file = self._open(path)
            start, end = file.get_slice("sample_offsets")[index : index + 2].tolist()
            return [file.get_slice(field)[start:end] for field in fields]
        except (SafetensorError, OSError, ValueError) as error:
            raise DraftlineError(
                f"{path}: cannot be read (sample {sample_id}): {error}. Delete the shard and run `dvc repro`: only it is dumped again."
            ) from None

    def _open(self, path: Path):
        from safetensors import safe_open

        files = self.__dict__.setdefault("_files", {})
        if path not in files:
            files[path] = safe_open(path, framework="pt")
        return files[path]
