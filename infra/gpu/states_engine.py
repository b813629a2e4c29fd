"""The dump of a server with hooks, on the device: its states against transformers', and what it costs."""

import argparse
import shutil
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from infra.gpu.states_compared import compare
from tasks.common.contract import Contract
from tasks.common.files import write_json
from tasks.common.params import Params
from tasks.common.server import Server
from tasks.common.server_plan import baseline_plan
from tasks.common.shard import StoredShard
from tasks.common.shard_layout import ShardPlan
from tasks.common.storage import bytes_per_token
from tasks.common.target import load_model, load_tokenizer, target_contract
from tasks.dump_hidden_states.capture import Capture
from tasks.dump_hidden_states.engines import batches, open_engine

_ROOT = Path(__file__).resolve().parents[2]
_PARITY_SAMPLES = 32
_SMALL_CHUNK = 128
_IN_FLIGHT = 8


def measure_engine(args: argparse.Namespace, params: Params, out: Path) -> dict[str, Any]:
    """Parity and speed; what is known so far is in `out` after each server."""
    contract = target_contract(params.contract)
    few, many = args.tokens // 5, args.tokens
    size = bytes_per_token(len(contract.aux_layer_ids), contract.hidden_size, params.dump.storage_dtype)
    speed: dict[str, int] = {}
    parity: dict[str, Any] = {}
    found: dict[str, Any] = {
        "tokens_per_s": speed,
        "tokens_dumped_to_disk": many,
        "bytes_per_token": size,
        "parity": parity,
    }
    texts = _text_shard(params)
    own, exact, speed["transformers prefill"] = _with_transformers(args, params, contract, texts)
    parity["transformers / transformers in float32"] = compare(own, exact, contract)

    with Server(baseline_plan(_many_requests(params))) as server:
        _prefill(server, _random_shards(args, contract, few // 4), "warm")
        speed["server without hooks"] = _rate(
            few, lambda: _prefill(server, _random_shards(args, contract, few), "plain")
        )
    write_json(out, found)

    memory = args.memory_folder if _has_room(args.memory_folder, 1.5 * few * size) else Path("memory").absolute()
    with open_engine(params, contract) as compute:
        together = _states(compute, Path("together"), [texts])
        parity["32 at once / transformers"] = compare(together, own, contract)
        parity["32 at once / transformers in float32"] = compare(together, exact, contract)
        parity["one at a time / 32 at once"] = compare(
            _states(compute, Path("alone"), _split(texts)), together, contract
        )
        write_json(out, found)
        _drain(compute, memory / "warm", _random_shards(args, contract, few // 4))
        speed["server with hooks, requests of others"] = _rate(
            few, lambda: _prefill(compute.server, _random_shards(args, contract, few), "plain")
        )
        name = "server with hooks, to memory" if memory == args.memory_folder else "server with hooks, a fifth to disk"
        speed[name] = _rate(few, lambda: _drain(compute, memory / "dump", _random_shards(args, contract, few)))
        shutil.rmtree(memory)
        before = compute.waited_s
        began = time.perf_counter()
        _drain(compute, Path("dump").absolute(), _random_shards(args, contract, many))
        seconds = time.perf_counter() - began
        waited = compute.waited_s - before
    shutil.rmtree("dump")
    hooked = speed["server with hooks, to disk"] = round(many / seconds)
    found["to_disk_over_server_without_hooks"] = round(hooked / speed["server without hooks"], 3)
    found["to_disk_over_transformers_prefill"] = round(hooked / speed["transformers prefill"], 3)
    found["share_of_time_the_server_waited_for_writing"] = round(waited / seconds, 3)
    write_json(out, found)

    extra = (*params.serve.extra_args, "--chunked-prefill-size", str(_SMALL_CHUNK))
    chunked = params.model_copy(update={"serve": params.serve.model_copy(update={"extra_args": extra})})
    with open_engine(chunked, contract) as compute:
        cut = _states(compute, Path("chunks"), [texts])
    parity[f"in chunks of {_SMALL_CHUNK} / 32 at once"] = compare(cut, together, contract)
    return found


def _many_requests(params: Params) -> Params:
    """As many at once as the server with hooks takes, and no prefix cache either: each pass asks for the same tokens."""
    changed = {"max_running_requests": 256, "extra_args": (*params.serve.extra_args, "--disable-radix-cache")}
    return params.model_copy(update={"serve": params.serve.model_copy(update=changed)})


def _random_shards(args: argparse.Namespace, contract: Contract, tokens: int) -> Iterable[ShardPlan]:
    """Samples of random tokens and lengths; the same for the same number of tokens."""
    generator = np.random.default_rng(0)
    number = 0
    while tokens > 0:
        rows: list[tuple[str, list[int], list[int]]] = []
        room = min(tokens, args.shard_tokens)
        tokens -= room
        while room:
            length = min(room, int(generator.integers(args.longest // 8, args.longest)))
            ids = generator.integers(3, contract.vocab_size, length).tolist()
            rows.append((f"{number}-{len(rows)}", ids, [1] * length))
            room -= length
        yield ShardPlan.of(f"shard-{number:05d}", f"random-{number}", rows)
        number += 1


def _text_shard(params: Params) -> ShardPlan:
    """English text, 32 samples of many lengths."""
    text = "\n".join(path.read_text() for path in sorted((_ROOT / "infra/docs").glob("*.md")))
    ids = load_tokenizer().encode(text)
    longest = params.serve.context_length - 8
    lengths = np.linspace(longest // 16, longest, _PARITY_SAMPLES).astype(int).tolist()
    starts = [number * (len(ids) - longest) // _PARITY_SAMPLES for number in range(_PARITY_SAMPLES)]
    rows = [(f"text-{s}", ids[s : s + n], [1] * n) for s, n in zip(starts, lengths, strict=True)]
    return ShardPlan.of("shard-00000", "text", rows)


def _split(shard: ShardPlan) -> list[ShardPlan]:
    """A shard a sample."""
    rows = [(name, shard.sequence(index)) for index, name in enumerate(shard.ids)]
    return [
        ShardPlan.of(f"shard-{n:05d}", f"one-{n}", [(name, ids, [1] * len(ids))]) for n, (name, ids) in enumerate(rows)
    ]


def _with_transformers(args: argparse.Namespace, params: Params, contract: Contract, texts: ShardPlan) -> tuple:
    """States in the target's type and in float32, and tokens/s; its memory is given back before a server starts."""
    few = args.tokens // 5
    shards = list(_random_shards(args, contract, few))
    model = load_model(params.target)
    _plain_forward(model, shards[:1])
    speed = _rate(few, partial(_plain_forward, model, shards))
    own = _alone(model, contract, texts)
    exact = _alone(model.float(), contract, texts)
    del model
    if args.device == "cuda":
        torch.cuda.empty_cache()
    return own, exact, speed


def _has_room(folder: Path, needed: float) -> bool:
    """Whether the file system of a folder to be made can hold so many bytes."""
    return folder.parent.is_dir() and shutil.disk_usage(folder.parent).free > needed


def _alone(model: torch.nn.Module, contract: Contract, texts: ShardPlan) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """States of each sample by itself."""
    capture = Capture(model, contract.aux_layer_ids)
    states = [capture.run([texts.sequence(index)])[0] for index in range(len(texts.ids))]
    return [(aux.float().cpu(), last.float().cpu()) for aux, last in states]


@torch.inference_mode()
def _plain_forward(model: torch.nn.Module, shards: list[ShardPlan]) -> None:
    """The decoder over right-padded batches of like lengths, nothing captured."""
    for shard in shards:
        for batch in batches(shard, 32_768):
            sequences = [shard.sequence(index) for index in batch]
            width = max(map(len, sequences))
            ids = torch.tensor([s + [0] * (width - len(s)) for s in sequences], device=model.device)
            mask = torch.tensor([[1] * len(s) + [0] * (width - len(s)) for s in sequences], device=model.device)
            model.get_decoder()(input_ids=ids, attention_mask=mask, use_cache=False)
    if model.device.type == "cuda":
        torch.cuda.synchronize()


def _prefill(server: Server, shards: Iterable[ShardPlan], name: str) -> None:
    """The same requests in the same way, under ids that no hook knows."""
    with ThreadPoolExecutor(_IN_FLIGHT) as pool:
        sent = [
            pool.submit(
                server.prefill,
                [shard.sequence(index) for index in range(len(shard.ids))],
                [f"{name}-{shard.name}-{index}" for index in range(len(shard.ids))],
            )
            for shard in shards
        ]
        for one in sent:
            one.result()


def _drain(compute, folder: Path, shards: Iterable[ShardPlan]) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for _ in compute(folder, iter(shards)):
        pass


def _states(compute, folder: Path, shards: list[ShardPlan]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """States of each sample; of several shards one is sent at a time."""
    folder.mkdir()
    states = []
    for shard in shards:
        list(compute(folder, iter([shard])))
        stored = StoredShard(folder / f"{shard.name}.safetensors")
        for start, end in zip(shard.offsets[:-1].tolist(), shard.offsets[1:].tolist(), strict=True):
            states.append(stored.states(start, end))
    return states


def _rate(tokens: int, work) -> int:
    began = time.perf_counter()
    work()
    return round(tokens / (time.perf_counter() - began))
