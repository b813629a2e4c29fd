"""Hidden states on disk: shards of packed tokens, a table with a row a sample, and a manifest with the contract.

    hidden_states/<split>/shard-00000.{safetensors,json}   states and their sidecar (tasks/common/shard.py)
    hidden_states/<split>/samples.parquet                  the sidecars' columns, all shards in one table
    hidden_states/<split>/manifest.json                    format version, contract, engine, shards, checksums

The format is described in infra/docs/hidden_states.md.
"""

from collections import OrderedDict, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tasks.common.contract import Contract
from tasks.common.errors import DraftlineError
from tasks.common.files import ARTIFACTS, read_json, replacing, sha256_file, write_json
from tasks.common.shard import StoredShard, files_of_shards, read_sidecar
from tasks.common.storage import decode

if TYPE_CHECKING:
    import pyarrow as pa
    import torch

HIDDEN_STATES = ARTIFACTS / "hidden_states"
FORMAT_VERSION = 2
TABLE, MANIFEST = "samples.parquet", "manifest.json"
# Memory maps kept by one reader (Linux allows a process 65,530): a shard that is opened again costs half a millisecond.
_OPEN_SHARDS = 4096


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


def close_split(
    folder: Path, contract: Contract, storage_dtype: str, engine: dict[str, str | None], shards: Iterable[str]
) -> None:
    """Write table and manifest: what is not named there is not part of the split, and its files are removed.

    No other process may do so at the same time.

    Args:
        engine: name and version of what computed the states.
    """
    listed: list[dict[str, Any]] = []
    tables = [table_of(defaultdict(list), 0, contract)]  # the columns of a split without samples
    for number, name in enumerate(shards):
        sidecar = read_sidecar(folder, name)
        table = table_of(sidecar["samples"], number, contract)
        tables.append(table)
        listed.append(
            {
                "name": name,
                "samples": len(table),
                "tokens": sum(sidecar["samples"]["tokens"]),
                "checksum": sidecar["checksum"],
            }
        )
    named = {shard["name"] for shard in listed}
    for path in files_of_shards(folder):  # of another plan, or left half by a writer that was killed
        if path.stem not in named or path.suffix == ".freed":
            path.unlink(missing_ok=True)
    _write_table(folder / TABLE, tables)
    write_json(
        folder / MANIFEST,
        {
            "format_version": FORMAT_VERSION,
            "contract": contract.model_dump(),
            "storage_dtype": storage_dtype,
            "engine": engine,
            "samples": sum(shard["samples"] for shard in listed),
            "tokens": sum(shard["tokens"] for shard in listed),
            "samples_sha256": sha256_file(folder / TABLE),
            "shards": listed,
        },
    )


_FIELDS = {"format_version", "samples_sha256", "contract", "storage_dtype", "engine", "shards"}


class HiddenStates:
    """A split of dumped states, memory-mapped: a sample is read when it is asked for, and nothing is copied.

    Attributes:
        contract: under which they were dumped.
        table: a row a sample, in the order of the plan: id, shard (index into `shards`), index (within the shard),
            start (first token in the shard), tokens, mask_tokens, num_nonfinite, max_abs, norm_slot_<s>, last_norm,
            checksum. What could not be measured is null.
        shards: name, samples, tokens and checksum of each.
    """

    def __init__(self, folder: Path):
        """Read manifest and table, not the states.

        Raises:
            DraftlineError: manifest or table absent, no manifest, of another format version, or changed since it was written.
        """
        import pyarrow.parquet as pq

        manifest = read_json(folder / MANIFEST)
        is_of_this_version = (
            isinstance(manifest, dict) and manifest.get("format_version", FORMAT_VERSION) == FORMAT_VERSION
        )
        if not isinstance(manifest, dict) or (is_of_this_version and not manifest.keys() >= _FIELDS):
            raise DraftlineError(
                f"{folder / MANIFEST}: no manifest of hidden states. `python -m tasks.dump_hidden_states` takes over all shards and "
                f"writes it again."
            )
        if manifest["format_version"] != FORMAT_VERSION:
            raise DraftlineError(
                f"{folder / MANIFEST}: format_version {manifest['format_version']}, this code reads "
                f"{FORMAT_VERSION}. Dump again: delete {HIDDEN_STATES}, then `dvc repro`."
            )
        table = folder / TABLE
        if not table.exists() or sha256_file(table) != manifest["samples_sha256"]:
            raise DraftlineError(
                f"{table}: not the table that the manifest beside it was written with. Run `dvc repro`: the dump takes over "
                f"all shards and writes the table again."
            )
        self.folder = folder
        self.contract = Contract.model_validate(manifest["contract"])
        self.storage_dtype: str = manifest["storage_dtype"]
        self.engine: dict[str, str | None] = manifest["engine"]
        self.shards: list[dict[str, Any]] = manifest["shards"]
        self.table: pa.Table = pq.read_table(table, use_threads=False)
        self._opened: OrderedDict[int, StoredShard] = OrderedDict()

    def __len__(self) -> int:
        return len(self.table)

    def __getstate__(self) -> dict[str, Any]:
        """A worker process maps the shards itself."""
        return {**self.__dict__, "_opened": OrderedDict()}

    @cached_property
    def ids(self) -> list[str]:
        """Of every sample."""
        return self.table.column("id").to_pylist()

    @cached_property
    def tokens(self) -> np.ndarray:
        """Of every sample, int64 [samples]."""
        return self.column("tokens")

    def column(self, name: str) -> np.ndarray:
        """A column of the table; null becomes NaN."""
        return self.table.column(name).to_numpy()

    def read(self, index: int) -> Sample:
        """States of sample `index`: views of the file, or float32 where float8 is stored.

        Raises:
            DraftlineError: the shard is not there, cannot be parsed, or ends before the sample does; names both.
        """
        sample, aux_scale, last_scale = self.read_stored(index)
        aux, last = decode(sample.aux, aux_scale), decode(sample.last, last_scale)
        return Sample(sample.id, sample.input_ids, sample.loss_mask, aux, last)

    def read_stored(self, index: int) -> tuple[Sample, "torch.Tensor | None", "torch.Tensor | None"]:
        """Sample `index` as it is stored: its values, and the scales of aux and last (None but for float8)."""
        shard, start, end = self._place(index)
        fields = (shard.input_ids, shard.loss_mask, shard.aux, shard.last, shard.aux_scale, shard.last_scale)
        *values, aux_scale, last_scale = (None if field is None else field[start:end] for field in fields)
        return Sample(self._id(index), *values), aux_scale, last_scale

    def read_tokens(self, index: int) -> tuple["torch.Tensor", "torch.Tensor"]:
        """Token ids and loss mask of sample `index`, without its states: int32 [T] and uint8 [T]."""
        shard, start, end = self._place(index)
        return shard.input_ids[start:end], shard.loss_mask[start:end]

    def open_shard(self, number: int) -> StoredShard:
        """A shard of its own, kept open by nobody but the caller.

        Raises:
            SafetensorError, OSError: it cannot be parsed or is not there.
        """
        return StoredShard(self.folder / f"{self.shards[number]['name']}.safetensors")

    @cached_property
    def _starts(self) -> np.ndarray:
        return self.column("start")

    @cached_property
    def _shard_of(self) -> np.ndarray:
        return self.column("shard")

    def _id(self, index: int) -> str:
        return self.table.column("id")[index].as_py()

    def _place(self, index: int) -> tuple[StoredShard, int, int]:
        from safetensors import SafetensorError

        number = int(self._shard_of[index])
        if number not in self._opened:
            try:
                self._opened[number] = self.open_shard(number)
            except (SafetensorError, OSError, KeyError) as error:
                raise self._unreadable(index, f"cannot be read (sample {self._id(index)}): {error}.") from None
            if len(self._opened) > _OPEN_SHARDS:
                self._opened.popitem(last=False)
        self._opened.move_to_end(number)
        shard, start = self._opened[number], int(self._starts[index])
        end = start + int(self.tokens[index])
        if shard.rows < end:
            raise self._unreadable(
                index, f"holds {shard.rows} tokens, and {TABLE} says that sample {self._id(index)} is {start} to {end}."
            )
        return shard, start, end

    def _unreadable(self, index: int, problem: str) -> DraftlineError:
        name = self.shards[int(self._shard_of[index])]["name"]
        return DraftlineError(
            f"{self.folder / name}.safetensors: {problem} Delete the shard and run `dvc repro`: only it is dumped again."
        )


def table_of(columns: dict[str, list], shard: int, contract: Contract) -> "pa.Table":
    """A sidecar's columns as they stand in the table of the split."""
    import pyarrow as pa

    samples = len(columns["id"])
    starts = np.cumsum([0, *columns["tokens"]], dtype=np.int64)[:-1]
    numbers = [*(f"norm_slot_{slot}" for slot in range(len(contract.aux_layer_ids))), "last_norm"]
    return pa.table(
        {
            "id": pa.array(columns["id"], pa.string()),
            "shard": pa.array(np.full(samples, shard, np.int32)),
            "index": pa.array(np.arange(samples, dtype=np.int32)),
            "start": pa.array(starts),
            **{name: pa.array(columns[name], pa.int64()) for name in ("tokens", "mask_tokens", "num_nonfinite")},
            "max_abs": pa.array(columns["max_abs"], pa.float64()),
            # A shard with fewer slots than the contract says is the gate's to find.
            **{name: pa.array(columns.get(name, [None] * samples), pa.float64()) for name in numbers},
            "checksum": pa.array(columns["checksum"], pa.string()),
        }
    )


def _write_table(path: Path, tables: list["pa.Table"]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    with replacing(path) as partial:
        pq.write_table(pa.concat_tables(tables), partial)
