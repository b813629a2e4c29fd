"""What the format of the hidden states costs and gives, on the disk that holds --folder.

    python -m infra.benchmarks.hidden_states_io files --folder /data/io    # against one torch.save file a sample
    python -m infra.benchmarks.hidden_states_io scale --folder /data/io    # 200,000 samples: open, an epoch, memory
    python -m infra.benchmarks.hidden_states_io gate --folder /data/io     # 500,000 samples through the gate's tables

Each prints one JSON object. `files` stores the same tokens both ways in one run: shards, and one `torch.save` a sample,
padded to the longest of its batch of eight, as offline trainers keep them. Cold means that the kernel was told to forget
the file; every read ends in the memory of a batch.
"""

import argparse
import json
import os
import resource
import shutil
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch

from tasks.common.contract import Contract
from tasks.common.files import write_jsonl
from tasks.common.hidden_states import HIDDEN_STATES, HiddenStates, close_split
from tasks.common.params import Params
from tasks.common.responses import RESPONSES, SPLITS, Response
from tasks.common.shard import ShardWriter
from tasks.common.shard_layout import ShardPlan
from tasks.common.storage import StoredRows
from tasks.train_draft.batch import BatchForm
from tasks.train_draft.data import BatchStream, DraftData

_NUM_AUX = 3
_PADDED_BATCH = 8
_REPEATS = 5
_COMPUTED = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16", "float8": "bfloat16"}
_SHARD_TOKENS = 16_384
_VOCAB = 49_152


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("what", choices=("files", "scale", "gate"))
    parser.add_argument("--folder", type=Path, required=True, help="is emptied")
    parser.add_argument("--samples", type=int)
    parser.add_argument("--hidden-size", type=int)
    parser.add_argument("--storage-dtype", default="bfloat16")
    args = parser.parse_args()
    shutil.rmtree(args.folder, ignore_errors=True)
    args.folder.mkdir(parents=True)
    measure = {"files": compare_files, "scale": read_at_scale, "gate": gate_at_scale}[args.what]
    print(json.dumps(measure(args), indent=2))


def compare_files(args: argparse.Namespace) -> dict:
    """Writing and reading the same tokens as shards and as padded files."""
    samples, hidden = args.samples or 400, args.hidden_size or 576
    lengths = np.random.default_rng(0).integers(64, 1024, samples)
    tokens = int(lengths.sum())
    # As a target in 16 bits computes them, and as padded files hold them.
    states = torch.randn(1024, _NUM_AUX + 1, hidden).to(getattr(torch, _COMPUTED[args.storage_dtype]))
    contract = _contract(hidden)
    order = np.random.default_rng(1).permutation(samples).tolist()

    shards, padded = args.folder / "shards", args.folder / "padded"
    padded.mkdir()
    wrote_shards = _seconds(lambda: _write(shards, contract, lengths, args.storage_dtype, states))
    wrote_padded = _seconds(lambda: _write_padded(padded, lengths, states))
    os.sync()

    # Where a trainer would have its batch; used again and again.
    batch_aux, batch_last = (torch.empty(1024, width, dtype=states.dtype) for width in (_NUM_AUX * hidden, hidden))

    def read_shards(opened: HiddenStates) -> None:
        for index in order:
            sample = opened.read(index)
            batch_aux[: sample.num_tokens].copy_(sample.aux.flatten(1))
            batch_last[: sample.num_tokens].copy_(sample.last)

    def read_padded(_: None) -> None:
        for index in order:
            sample = torch.load(padded / f"data_{index}.ckpt", weights_only=True)
            aux, last = sample["aux_hidden_state"][0], sample["hidden_state"][0]
            batch_aux[: len(last)].copy_(aux)
            batch_last[: len(last)].copy_(last)

    figures: dict = {"tokens": tokens, "samples": samples, "hidden_size": hidden, "storage_dtype": args.storage_dtype}
    rates: dict[tuple[str, str], list[float]] = {}
    ways = (
        ("shards", shards, wrote_shards, lambda: HiddenStates(shards), read_shards),
        ("padded files", padded, wrote_padded, lambda: None, read_padded),
    )
    for _ in range(_REPEATS):  # in turn, so that a slow minute of the machine slows both
        for name, folder, _wrote, reader, read in ways:
            _forget(folder)
            opened = reader()
            for temperature in ("cold", "warm"):
                rates.setdefault((name, temperature), []).append(tokens / _seconds(partial(read, opened)))
            opened = None  # a page that is mapped is not forgotten
    for name, folder, wrote, _reader, _read in ways:
        size = sum(path.stat().st_size for path in folder.iterdir())
        figures[name] = {
            "bytes_per_token": round(size / tokens),
            "written_tokens_per_s": round(tokens / wrote),
            "read_cold_tokens_per_s": round(float(np.median(rates[name, "cold"]))),
            "read_warm_tokens_per_s": round(float(np.median(rates[name, "warm"]))),
        }
    figures["ratio"] = {
        key: round(figures["shards"][key] / figures["padded files"][key], 2) for key in figures["shards"]
    }
    return figures


def read_at_scale(args: argparse.Namespace) -> dict:
    """Opening many samples, one epoch of packed batches in this process and in two workers, and memory on the way."""
    samples, hidden = args.samples or 200_000, args.hidden_size or 16
    lengths = np.random.default_rng(0).integers(8, 48, samples)
    began = time.perf_counter()
    _write(args.folder, _contract(hidden), lengths, args.storage_dtype)
    written_s = time.perf_counter() - began
    began = time.perf_counter()
    states = HiddenStates(args.folder)
    opened_s = time.perf_counter() - began
    began = time.perf_counter()
    form = BatchForm("cpu", torch.float32, 1, torch.zeros(_VOCAB, dtype=torch.int64), 4096)
    data = DraftData(states, np.zeros(int(lengths.sum()), np.int32), 4096, form)
    prepared_s = time.perf_counter() - began
    began = time.perf_counter()
    batches = data.epoch(0, 0)
    figures: dict = {
        "samples": samples,
        "tokens": int(lengths.sum()),
        "hidden_size": hidden,
        "write_s": round(written_s, 1),
        "open_s": round(opened_s, 2),
        "find_supervised_s": round(prepared_s, 2),
        "order_of_an_epoch_s": round(time.perf_counter() - began, 2),
        "batches": len(batches),
        "filled": round(float(lengths.sum()) / (4096 * len(batches)), 4),
    }
    for workers in (0, 2):
        figures[f"epoch_with_{workers}_workers"] = _one_epoch(BatchStream(data, 0, workers), len(batches))
    return figures


def gate_at_scale(args: argparse.Namespace) -> dict:
    """Every check of the gate but the replay and the norms of the committed run, over a dump and its answers."""
    from tasks.gates.hidden_states import stored_tables
    from tasks.gates.stored_states import read_stored_states
    from tasks.gates.suite import judge

    samples, hidden = args.samples or 500_000, args.hidden_size or 16
    lengths = np.random.default_rng(0).integers(8, 48, samples)
    os.chdir(args.folder)
    contract = _contract(hidden)
    for split, of_split in zip(SPLITS, np.split(lengths, [samples * 99 // 100]), strict=True):
        _write(HIDDEN_STATES / split, contract, of_split, args.storage_dtype, prefix=f"{split}-")
        write_jsonl(
            RESPONSES / f"{split}.jsonl",
            (
                Response(name, "", [], ids[: len(ids) // 2], ids[len(ids) // 2 :], "", "stop").to_row()
                for name, ids, _ in _rows(of_split, f"{split}-")
            ),
        )
    began = time.perf_counter()
    stored = read_stored_states(contract, torch.ones(hidden))
    read_s = time.perf_counter() - began
    params = Params.model_validate({"dump": {"storage_dtype": args.storage_dtype}})
    judgements = judge(stored_tables(stored, contract, params))
    seconds = time.perf_counter() - began
    return {
        "samples": samples,
        "tokens": int(lengths.sum()),
        "hidden_size": hidden,
        "seconds": round(seconds, 1),
        "of_them_reading_the_states_again_s": round(read_s, 1),
        "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "not_passed": [f.sentence for j in judgements for f in j.findings if f.outcome != "passed"],
    }


def _write(
    folder: Path,
    contract: Contract,
    lengths: np.ndarray,
    storage_dtype: str,
    states: torch.Tensor | None = None,
    prefix: str = "sample-",
) -> None:
    """A split of random tokens; `states` [longest, n_aux + 1, H] are cut to each sample, by default made for each shard."""
    folder.mkdir(parents=True, exist_ok=True)
    names: list[str] = []
    pending: list[tuple[str, list[int], list[int]]] = []
    tokens = 0

    def flush() -> None:
        plan = ShardPlan.of(f"shard-{len(names):05d}", "plan", pending)
        names.append(plan.name)
        with ShardWriter(folder, plan, _NUM_AUX, contract.hidden_size, storage_dtype) as shard:
            if states is None:
                some = torch.nn.functional.rms_norm(
                    torch.randn(plan.tokens, _NUM_AUX + 1, contract.hidden_size), (contract.hidden_size,)
                )
                shard.write(0, StoredRows.of(some[:, :_NUM_AUX], some[:, _NUM_AUX], storage_dtype))
            else:
                for start, end in zip(plan.offsets[:-1].tolist(), plan.offsets[1:].tolist(), strict=True):
                    some = states[: end - start]
                    shard.write(start, StoredRows.of(some[:, :_NUM_AUX], some[:, _NUM_AUX], storage_dtype))

    for row in _rows(lengths, prefix):
        pending.append(row)
        tokens += len(row[1])
        if tokens >= _SHARD_TOKENS:
            flush()
            pending, tokens = [], 0
    if pending:
        flush()
    close_split(folder, contract, storage_dtype, {"name": "random", "version": None}, names)


def _rows(lengths: np.ndarray, prefix: str) -> Iterator[tuple[str, list[int], list[int]]]:
    generator = np.random.default_rng(2)
    for number, length in enumerate(lengths.tolist()):
        mask = [0] * (length // 2) + [1] * (length - length // 2)
        yield f"{prefix}{number}", generator.integers(_VOCAB, size=length).tolist(), mask


def _write_padded(folder: Path, lengths: np.ndarray, states: torch.Tensor) -> None:
    for first in range(0, len(lengths), _PADDED_BATCH):
        batch = lengths[first : first + _PADDED_BATCH]
        longest = int(batch.max())
        for index in range(first, first + len(batch)):
            torch.save(
                {
                    "input_ids": torch.zeros(longest, dtype=torch.long),
                    "loss_mask": torch.zeros(longest, dtype=torch.long),
                    "hidden_state": states[None, :longest, _NUM_AUX].clone(),
                    "aux_hidden_state": states[None, :longest, :_NUM_AUX].flatten(2).clone(),
                },
                folder / f"data_{index}.ckpt",
            )


def _one_epoch(stream: BatchStream, batches: int) -> dict:
    began, tokens, memory = time.perf_counter(), 0, []
    for number, batch in enumerate(stream, 1):
        tokens += batch.samples.num_tokens
        if number % max(1, batches // 4) == 0:
            memory.append(_memory_mib())
        if number == batches:
            break
    seconds = time.perf_counter() - began
    return {
        "seconds": round(seconds, 1),
        "tokens_per_s": round(tokens / seconds),
        "private_memory_mib_at_each_quarter": memory,
    }


def _memory_mib() -> int:
    """Memory of this process that no file backs."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) // 1024


def _contract(hidden: int) -> Contract:
    return Contract(
        architecture="LlamaForCausalLM",
        num_layers=30,
        hidden_size=hidden,
        vocab_size=_VOCAB,
        aux_layer_ids=(1, 14, 26),
        last_is_normed=True,
        target_sha256="t",
        tokenizer_sha256="k",
    )


def _seconds(work: Callable[[], None]) -> float:
    began = time.perf_counter()
    work()
    return time.perf_counter() - began


def _forget(folder: Path) -> None:
    """Drop the folder's files from the page cache."""
    for path in folder.iterdir():
        file = os.open(path, os.O_RDONLY)
        os.fsync(file)
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(file)


if __name__ == "__main__":
    main()
