"""What dumping hidden states costs on a GPU, and whether they are the target's; prints a table, writes JSON.

    python -m infra.gpu.measure_hidden_states engine --target /models/target --work /tmp/w --out engine.json
    python -m infra.gpu.measure_hidden_states float8 --target /models/target --work /tmp/w --out float8.json

`engine`: a server without hooks, one with them, and one that cuts prompts into small chunks; transformers beside them.
States against transformers at every aux layer, one request against 32 at once, chunks against whole prompts; tokens/s.
`float8`: the target answers the built-in prompts, its states are stored as bfloat16 and as float8, and a draft is
trained on each, same seed, same order. Nothing is fetched. On a CPU the same runs with `--device cpu` and fewer tokens.
"""

import argparse
import os
import shutil
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tasks.common.contract import Contract
from tasks.common.files import write_json
from tasks.common.hidden_states import HIDDEN_STATES, HiddenStates
from tasks.common.params import Params
from tasks.common.parity import Agreement
from tasks.common.server import Server
from tasks.common.server_plan import baseline_plan
from tasks.common.shard import StoredShard
from tasks.common.shard_layout import ShardPlan
from tasks.common.storage import bytes_per_token
from tasks.common.target import TARGET, load_model, load_tokenizer, target_contract
from tasks.dump_hidden_states.capture import Capture
from tasks.dump_hidden_states.engines import open_engine
from tasks.prepare_target.prepare import prepare_target
from tasks.train_draft.acceptance import measure
from tasks.train_draft.data import DraftData

ROOT = Path(__file__).resolve().parents[2]
_PARITY_SAMPLES = 32
_SMALL_CHUNK = 128
_IN_FLIGHT = 8


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("engine", "float8"))
    parser.add_argument("--target", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--work", type=Path, required=True, help="is emptied; artifacts and logs go there")
    parser.add_argument("--memory-folder", type=Path, default=Path("/dev/shm/draftline"), help="is emptied")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--tokens", type=int, default=5_200_000, help="of the dump to --work; shorter passes take a fifth"
    )
    parser.add_argument("--longest", type=int, default=1024, help="tokens of the longest sample")
    parser.add_argument("--shard-tokens", type=int, default=65_536)
    parser.add_argument("--train-steps", type=int, default=300)
    parser.add_argument("--draft-vocab-size", type=int, default=8192)
    parser.add_argument("--max-new-tokens", type=int, default=192)
    parser.add_argument("--max-train", type=int, help="prompts; all by default")
    parser.add_argument(
        "--extra-args", default="--attention-backend triton --sampling-backend pytorch", help="of SGLang"
    )
    args = parser.parse_args()
    args.target, args.memory_folder, out = args.target.absolute(), args.memory_folder.absolute(), args.out.absolute()
    shutil.rmtree(args.work, ignore_errors=True)
    args.work.mkdir(parents=True)
    os.chdir(args.work)
    params = _params(args)
    prepare_target(params.target, TARGET)
    began = time.perf_counter()
    found = {"engine": measure_engine, "float8": measure_float8}[args.part](args, params, out)
    found["device"] = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    found["seconds_in_all"] = round(time.perf_counter() - began)
    write_json(out, found)
    _print(found)


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
    parity["transformers / transformers in float32"] = _compare(own, exact, contract)

    with Server(baseline_plan(_many_requests(params))) as server:
        _prefill(server, _random_shards(args, contract, few // 4), "warm")
        speed["server without hooks"] = _rate(
            few, lambda: _prefill(server, _random_shards(args, contract, few), "plain")
        )
    write_json(out, found)

    memory = args.memory_folder if _has_room(args.memory_folder, 1.5 * few * size) else Path("memory").absolute()
    with open_engine(params, contract) as compute:
        together = _states(compute, Path("together"), [texts])
        parity["32 at once / transformers"] = _compare(together, own, contract)
        parity["32 at once / transformers in float32"] = _compare(together, exact, contract)
        parity["one at a time / 32 at once"] = _compare(
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
    parity[f"in chunks of {_SMALL_CHUNK} / 32 at once"] = _compare(cut, together, contract)
    return found


def measure_float8(args: argparse.Namespace, params: Params, _out: Path) -> dict[str, Any]:
    """What half the bytes cost a draft."""
    from tasks.collect_prompts.collect import collect_prompts
    from tasks.dump_hidden_states.dump import dump
    from tasks.regenerate_responses.regenerate import regenerate
    from tasks.train_draft.prepare import prepare_training

    collect_prompts(params.prompts, load_tokenizer())
    answers = regenerate(params)["splits"]
    found: dict[str, Any] = {"answers": {split: counts["answers"] for split, counts in answers.items()}}
    stored: dict[str, HiddenStates] = {}
    real: DraftData | None = None  # held-out states as the target computes them, which are what a server feeds a draft
    for storage_dtype in ("bfloat16", "float8"):
        settings = params.model_copy(
            update={"dump": params.dump.model_copy(update={"engine": "transformers", "storage_dtype": storage_dtype})}
        )
        totals = dump(settings)
        trainer, _ = prepare_training(settings, Path("artifacts") / f"draft-{storage_dtype}")
        began = time.perf_counter()
        tokens = sum(step.tokens for step in trainer.steps())
        figures = {
            "bytes": sum(split["bytes"] for split in totals.values()),
            "bytes_per_token": totals["train"]["bytes"] // totals["train"]["tokens"],
            "training_tokens_per_s": round(tokens / (time.perf_counter() - began)),
            "predicted_accept_length": [round(p["heldout"]["predicted_accept_length"], 3) for p in trainer.curve],
            "heldout_loss": [round(p["heldout"]["loss"], 4) for p in trainer.curve],
            "survival": trainer.best["heldout"]["survival"],
        }
        found[storage_dtype] = figures
        kept = HIDDEN_STATES.with_name(f"hidden_states_{storage_dtype}")
        HIDDEN_STATES.rename(kept)
        stored[storage_dtype] = trainer.heldout.states = HiddenStates(kept / "heldout")
        real = real or trainer.heldout
        steps = params.train_draft.ttt_length, params.serve.num_steps
        served = measure(trainer.draft, trainer.head, trainer.vocab_map, real, *steps)
        figures["last_draft_on_bfloat16_states"] = {
            "predicted_accept_length": round(served.predicted_accept_length, 3),
            "loss": round(served.loss, 4),
            "rounds": served.rounds,
        }
    contract = stored["bfloat16"].contract
    pairs = [[states.read(index) for index in range(len(states))] for states in (stored["float8"], stored["bfloat16"])]
    found["float8 / bfloat16"] = _compare(*[[(s.aux, s.last) for s in samples] for samples in pairs], contract)
    return found


def _params(args: argparse.Namespace) -> Params:
    return Params.model_validate(
        {
            "target": {"model": str(args.target), "device": args.device, "dtype": args.dtype},
            "prompts": {"folder": str(ROOT / "tasks/collect_prompts/builtin"), "max_train": args.max_train},
            "regenerate": {"max_new_tokens": args.max_new_tokens, "batch_size": 128},
            "dump": {
                "engine": "sglang",
                "storage_dtype": args.dtype,
                "batch_tokens": 32_768,
                "shard_tokens": args.shard_tokens,
            },
            "train_draft": {
                "draft_vocab_size": args.draft_vocab_size,
                "max_steps": args.train_steps,
                "batch_tokens": 4096,
                "evaluate_every": max(1, args.train_steps // 3),
                "checkpoint_every": args.train_steps,
            },
            "serve": {
                "context_length": args.longest + 8,
                "max_total_tokens": None if args.device == "cuda" else 20_000,
                "mem_fraction_static": 0.5,
                "extra_args": args.extra_args.split(),
            },
        }
    )


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
    from tasks.dump_hidden_states.engines import batches

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


def _compare(ones: list, others: list, contract: Contract) -> dict[str, dict[str, float]]:
    """Slot by slot: mean cosine and relative error over all tokens, and the lowest cosine of a token."""
    names = [*(f"layer {layer}" for layer in contract.aux_layer_ids), "last"]
    found = {}
    for slot, name in enumerate(names):
        pairs = [
            [(last if name == "last" else aux[:, slot]).float().cpu() for aux, last in side] for side in (ones, others)
        ]
        one, other = (torch.cat(side) for side in pairs)
        agreement = Agreement.of(one, other)
        lowest = torch.nn.functional.cosine_similarity(one.double(), other.double(), dim=-1).min().item()
        found[name] = {
            "cosine": round(agreement.cosine, 6),
            "lowest_cosine": round(lowest, 6),
            "relative_error": float(f"{agreement.relative_error:.3g}"),
        }
    return found


def _rate(tokens: int, work) -> int:
    began = time.perf_counter()
    work()
    return round(tokens / (time.perf_counter() - began))


def _print(found: dict[str, Any], indent: str = "") -> None:
    for name, value in found.items():
        if isinstance(value, dict) and all(isinstance(inner, dict) for inner in value.values()):
            print(f"{indent}{name}")
            _print(value, indent + "  ")
        elif isinstance(value, dict):
            print(f"{indent}{name:44s} " + "  ".join(f"{key} {_shown(inner)}" for key, inner in value.items()))
        else:
            print(f"{indent}{name:44s} {_shown(value)}")


def _shown(value: Any) -> str:
    return f"{value:,}" if isinstance(value, int | float) else str(value)


if __name__ == "__main__":
    main()
