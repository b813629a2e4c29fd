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

from infra.gpu.places import ROOT
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
from tasks.dump_hidden_states.sglang_engine import HookedServer

_PARITY_SAMPLES = 32
_SMALL_CHUNK = 128
_IN_FLIGHT = 8
_ROUNDS = 5


def measure_engine(args: argparse.Namespace, params: Params, out: Path) -> dict[str, Any]:
    """Parity and speed; what is known so far is in `out` after each server."""
    contract = target_contract(params.contract)
    speed: dict[str, dict[str, Any]] = {}
    parity: dict[str, Any] = {}
    found: dict[str, Any] = {
        "tokens_per_s": speed,
        "tokens_dumped": _ROUNDS * args.tokens,
        "bytes_per_token": bytes_per_token(
            len(contract.aux_layer_ids), contract.hidden_size, params.dump.storage_dtype
        ),
        "parity": parity,
    }
    texts = _text_shard(params)
    own, exact, rates = _with_transformers(args, params, contract, texts)
    speed["transformers prefill"] = _spread(rates)
    parity["transformers / transformers in float32"] = compare(own, exact, contract)

    with Server(baseline_plan(_beside(params))) as plain, open_engine(params, contract) as compute:
        together = _states(compute, Path("together"), [texts])
        parity["32 at once / transformers"] = compare(together, own, contract)
        parity["32 at once / transformers in float32"] = compare(together, exact, contract)
        parity["one at a time / 32 at once"] = compare(
            _states(compute, Path("alone"), _split(texts)), together, contract
        )
        write_json(out, found)
        found |= _side_by_side(args, contract, plain, compute, speed)
    write_json(out, found)

    extra = (*params.serve.extra_args, "--chunked-prefill-size", str(_SMALL_CHUNK))
    chunked = params.model_copy(update={"serve": params.serve.model_copy(update={"extra_args": extra})})
    with open_engine(chunked, contract) as compute:
        cut = _states(compute, Path("chunks"), [texts])
    parity[f"in chunks of {_SMALL_CHUNK} / 32 at once"] = compare(cut, together, contract)
    return found


def _side_by_side(args, contract: Contract, plain: Server, compute: HookedServer, speed: dict) -> dict[str, Any]:
    """Rounds of each in turn: the pace of a machine that others use too changes from one minute to the next."""
    tokens, folder = args.tokens, Path("dump").absolute()
    works = {
        "server without hooks": lambda: _prefill(plain, _random_shards(args, contract, tokens), "plain"),
        "server with hooks, requests of others": lambda: _prefill(
            compute.server, _random_shards(args, contract, tokens), "others"
        ),
        "dump to a disk": lambda: _drain(compute, folder, _random_shards(args, contract, tokens)),
    }
    rates: dict[str, list[int]] = {name: [] for name in works}
    waited_s = dump_s = 0.0
    for number in range(-1, _ROUNDS):  # the first is to warm up
        for name, work in works.items():
            before = compute.waited_s
            rate = _rate(tokens, work)
            if number >= 0:
                rates[name].append(rate)
                waited_s += compute.waited_s - before
                dump_s += tokens / rate if name == "dump to a disk" else 0
        shutil.rmtree(folder)
    speed |= {name: _spread(of_name) for name, of_name in rates.items()}
    alone, *hooked = rates.values()
    return {
        "over_server_without_hooks": {
            name: _spread([round(rate / base, 3) for rate, base in zip(of_name, alone, strict=True)])
            for name, of_name in zip(list(rates)[1:], hooked, strict=True)
        },
        "dump_over_transformers_prefill": round(
            speed["dump to a disk"]["median"] / speed["transformers prefill"]["median"], 3
        ),
        "share_of_time_the_server_waited_for_writing": round(waited_s / dump_s, 4),
    }


def _spread(rates: list) -> dict[str, Any]:
    return {"median": sorted(rates)[len(rates) // 2], "min": min(rates), "max": max(rates)}


def _beside(params: Params) -> Params:
    """A server for the same device and requests: as many at once as the one with hooks takes, and no prefix cache either."""
    changed = {
        "port": params.serve.port + 1,
        "max_running_requests": 256,
        "extra_args": (*params.serve.extra_args, "--disable-radix-cache"),
    }
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
    text = "\n".join(path.read_text() for path in sorted((ROOT / "infra/docs").glob("*.md")))
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
    """States in the target's type and in float32, and tokens/s of each round; its memory is given back before a server starts."""
    shards = list(_random_shards(args, contract, args.tokens))
    model = load_model(params.target)
    _plain_forward(model, shards[:1])
    speed = [_rate(args.tokens, partial(_plain_forward, model, shards)) for _ in range(_ROUNDS)]
    own = _alone(model, contract, texts)
    exact = _alone(model.float(), contract, texts)
    del model
    if args.device == "cuda":
        torch.cuda.empty_cache()
    return own, exact, speed


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
