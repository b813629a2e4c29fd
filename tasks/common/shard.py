"""One shard of hidden states: a safetensors file written row by row, its checksums, its sidecar.

    shard-00000.safetensors   sample_offsets int64 [samples + 1], input_ids int32 [tokens], aux_scale float32
                              [tokens, n_aux] and last_scale float32 [tokens] (float8 alone), aux [tokens, n_aux, H],
                              last [tokens, H], loss_mask uint8 [tokens]
    shard-00000.json          plan hash, checksum, a column of values a statistic, one value a sample

No padding is stored. Where a row lies is known before the first one is computed, so rows are written as they come,
in any order. A shard counts as done when its sidecar exists and is of the same plan and size. The old sidecar goes before
the new shard comes, and the new one comes last, so a killed writer leaves nothing that looks whole.
"""

import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tasks.common.errors import DraftlineError
from tasks.common.files import read_json, replacing, sync_folder, write_atomically
from tasks.common.shard_layout import Layout, ShardPlan
from tasks.common.storage import StoredRows, decode

if TYPE_CHECKING:
    import torch

# A sample's checksum runs over these in this order.
_HASHED = ("input_ids", "loss_mask", "aux", "aux_scale", "last", "last_scale")
_OWN_NAME = re.compile(r"shard-\d{5,}\.(safetensors|json|freed)|\.shard-\d{5,}\.(safetensors|json)\.partial")


@dataclass(frozen=True)
class _TokenStatistics:
    """Statistics of each token of a shard, as `StoredRows` has them."""

    norms: np.ndarray
    max_abs: np.ndarray
    nonfinite: np.ndarray


class ShardWriter:
    """Writes a planned shard: `with ShardWriter(...) as shard: shard.write(0, rows)`; left whole or not at all.

    Rows may come in any order and from several threads. On leaving: fsync, checksums of what was really written,
    rename, sidecar, each of the two made durable in the folder before the next step.
    """

    def __init__(self, folder: Path, plan: ShardPlan, num_aux: int, hidden_size: int, storage_dtype: str):
        self.plan = plan
        self._layout = Layout(plan.tokens, len(plan.ids), num_aux, hidden_size, storage_dtype)
        self._path = folder / f"{plan.name}.safetensors"
        self._sidecar_path = self._path.with_suffix(".json")
        self._statistics = _TokenStatistics(
            np.zeros((plan.tokens, num_aux + 1), np.float32),
            np.zeros(plan.tokens, np.float32),
            np.zeros(plan.tokens, np.int32),
        )
        self._written = np.zeros(plan.tokens, bool)

    def __enter__(self) -> "ShardWriter":
        self._replacing = replacing(self._path)
        self._partial = self._replacing.__enter__()
        self._file = os.open(self._partial, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o644)
        try:
            os.posix_fallocate(self._file, 0, self._layout.size)  # a disk that is full says so now
            self._put(0, self._layout.header)
            known = {
                "sample_offsets": self.plan.offsets,
                "input_ids": self.plan.input_ids,
                "loss_mask": self.plan.loss_mask,
            }
            for name, values in known.items():
                self._put(self._layout.starts[name], values)
        except BaseException as error:
            self.__exit__(type(error), error, error.__traceback__)
            raise
        return self

    @property
    def is_complete(self) -> bool:
        """Whether every token has its states."""
        return bool(self._written.all())

    def write(self, start: int, rows: StoredRows) -> None:
        """Put rows, on the CPU, at tokens start, start + 1, ... of the shard."""
        for name, tensor in rows.stored().items():
            data = _bytes_of(tensor)
            self._put(self._layout.starts[name] + start * (data.size // max(len(rows), 1)), data)
        end = start + len(rows)
        self._statistics.norms[start:end] = rows.norms.numpy()
        self._statistics.max_abs[start:end] = rows.max_abs.numpy()
        self._statistics.nonfinite[start:end] = rows.nonfinite.numpy()
        self._written[start:end] = True

    def __exit__(self, kind, error, traceback) -> None:
        sidecar = None
        try:
            if kind is None:
                self._require_complete()
                os.fsync(self._file)
                sidecar = self._sidecar()
                self._sidecar_path.unlink(missing_ok=True)
        except BaseException as late:
            os.close(self._file)
            self._replacing.__exit__(type(late), late, late.__traceback__)
            raise
        os.close(self._file)
        self._replacing.__exit__(kind, error, traceback)
        if sidecar:
            sync_folder(self._path.parent)
            write_atomically(self._sidecar_path, (json.dumps(sidecar, allow_nan=False) + "\n").encode())
            sync_folder(self._path.parent)

    def _put(self, position: int, data) -> None:
        view = memoryview(data).cast("B")
        while view:
            written = os.pwrite(self._file, view, position)
            view, position = view[written:], position + written

    def _require_complete(self) -> None:
        missing = np.flatnonzero(~self._written)
        if len(missing):
            sample = int(np.searchsorted(self.plan.offsets, missing[0], side="right")) - 1
            raise DraftlineError(
                f"{self._path}: {len(missing)} of {self.plan.tokens} tokens have no states, the first of them token "
                f"{missing[0] - self.plan.offsets[sample]} of sample {self.plan.ids[sample]}. A prefix cache leaves out cached "
                f"tokens: the server must run with --disable-radix-cache."
            )

    def _sidecar(self) -> dict[str, Any]:
        shard = StoredShard(self._partial)
        checksums = shard.sample_checksums(self.plan.offsets)
        statistics = _per_sample(self.plan.offsets, self._statistics, self.plan.loss_mask)
        return {
            "plan_sha256": self.plan.sha256,
            "bytes": self._layout.size,
            "checksum": shard.checksum(checksums),
            "samples": {
                "id": list(self.plan.ids),
                **{k: _plain(v) for k, v in statistics.items()},
                "checksum": checksums,
            },
        }


class StoredShard:
    """A shard that is there, memory-mapped: its tensors are views of the file."""

    def __init__(self, path: Path):
        """
        Raises:
            SafetensorError, OSError, KeyError: it cannot be parsed, is not there, or lacks a tensor.
        """
        from safetensors import safe_open

        with safe_open(path, framework="pt") as file:
            self._tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        self.path = path
        self.sample_offsets: torch.Tensor = self._tensors["sample_offsets"]
        self.input_ids: torch.Tensor = self._tensors["input_ids"]
        self.loss_mask: torch.Tensor = self._tensors["loss_mask"]
        self.aux: torch.Tensor = self._tensors["aux"]
        self.last: torch.Tensor = self._tensors["last"]
        self.aux_scale: torch.Tensor | None = self._tensors.get("aux_scale")
        self.last_scale: torch.Tensor | None = self._tensors.get("last_scale")

    @property
    def rows(self) -> int:
        """Tokens of which everything is there."""
        return min(len(tensor) for name, tensor in self._tensors.items() if name != "sample_offsets")

    def states(self, start: int, end: int) -> tuple["torch.Tensor", "torch.Tensor"]:
        """aux [n, n_aux, H] and last [n, H] of tokens start to end: views, or float32 where float8 is stored."""
        aux_scale = None if self.aux_scale is None else self.aux_scale[start:end]
        last_scale = None if self.last_scale is None else self.last_scale[start:end]
        return decode(self.aux[start:end], aux_scale), decode(self.last[start:end], last_scale)

    def sample_checksums(self, offsets: np.ndarray) -> list[str]:
        """xxh3_128 of each sample: ids, mask, states and scales as stored."""
        import xxhash

        tensors = [self._tensors[name] for name in _HASHED if name in self._tensors]
        hashed = [(_bytes_of(t), t.element_size() * t[:1].numel()) for t in tensors]
        checksums = []
        for start, end in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
            digest = xxhash.xxh3_128()
            for data, width in hashed:
                digest.update(data[start * width : end * width])
            checksums.append(digest.hexdigest())
        return checksums

    def checksum(self, sample_checksums: list[str]) -> str:
        """xxh3_128 over header, offsets and the samples' checksums: every byte of the file, read once."""
        import xxhash

        with open(self.path, "rb") as file:
            length = file.read(8)
            digest = xxhash.xxh3_128(length + file.read(int.from_bytes(length, "little")))
        digest.update(_bytes_of(self.sample_offsets))
        digest.update("".join(sample_checksums).encode())
        return digest.hexdigest()

    def stored_rows(self, rows: int) -> StoredRows:
        """Its first rows, with the statistics of what is there now."""
        states = (self.aux, self.last, self.aux_scale, self.last_scale)
        return StoredRows.read(*(None if tensor is None else tensor[:rows] for tensor in states))

    def statistics(self, offsets: np.ndarray, rows: StoredRows) -> dict[str, np.ndarray]:
        """What the sidecar says of each sample, from the rows of them all."""
        return _per_sample(offsets, rows, self.loss_mask.numpy()[: len(rows)])


def read_sidecar(folder: Path, name: str) -> dict[str, Any]:
    """What `ShardWriter` wrote beside a shard."""
    return read_json(folder / f"{name}.json")


def read_mark(path: Path) -> dict[str, Any]:
    """A sidecar that may not be there, or be cut off or spoilt: empty then, as if nothing had been written."""
    try:
        mark = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return mark if isinstance(mark, dict) else {}


def files_of_shards(folder: Path) -> Iterator[Path]:
    """What shards and their writers leave in a folder; files of other names are somebody else's."""
    return (path for path in folder.glob("*shard-*") if _OWN_NAME.fullmatch(path.name))


def shard_is_done(folder: Path, name: str, plan_sha256: str) -> bool:
    """Whether the shard was written whole under this very plan; a reader may free it meanwhile. Its bytes are the gate's."""
    try:
        size = (folder / f"{name}.safetensors").stat().st_size
    except FileNotFoundError:
        return False
    sidecar = read_mark(folder / f"{name}.json")
    return (sidecar.get("plan_sha256"), sidecar.get("bytes")) == (plan_sha256, size)


def _per_sample(offsets: np.ndarray, rows: "StoredRows | _TokenStatistics", mask: np.ndarray) -> dict[str, np.ndarray]:
    """Columns of one value a sample; NaN or infinite where the states are.

    Args:
        rows: norms [tokens, n_aux + 1], max_abs [tokens] and nonfinite [tokens], of a shard's tokens.
    """
    starts, tokens = offsets[:-1], np.diff(offsets)
    with np.errstate(invalid="ignore"):
        means = np.add.reduceat(np.asarray(rows.norms, np.float64), starts, axis=0) / tokens[:, None]
    return {
        "tokens": tokens,
        "mask_tokens": np.add.reduceat(mask, starts, dtype=np.int64),
        "num_nonfinite": np.add.reduceat(np.asarray(rows.nonfinite), starts, dtype=np.int64),
        "max_abs": np.maximum.reduceat(np.asarray(rows.max_abs, np.float64), starts),
        **{f"norm_slot_{slot}": means[:, slot] for slot in range(means.shape[1] - 1)},
        "last_norm": means[:, -1],
    }


def _plain(values: np.ndarray) -> list:
    """Numbers as JSON has them, rounded to what does not change with the number of threads; None for NaN and Inf."""
    if values.dtype.kind == "i":
        return values.tolist()
    return [float(f"{value:.6g}") if np.isfinite(value) else None for value in values.tolist()]


def _bytes_of(tensor: "torch.Tensor") -> np.ndarray:
    """The tensor's memory, uint8 [bytes]; copied only where it is not in one piece."""
    import torch

    return tensor.contiguous().view(-1).view(torch.uint8).numpy()
