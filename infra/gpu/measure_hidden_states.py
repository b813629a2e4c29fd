"""What dumping hidden states costs on a GPU, and whether they are the target's; prints a table, writes JSON.

    python -m infra.gpu.measure_hidden_states engine --target /models/target --work /tmp/w --out engine.json
    python -m infra.gpu.measure_hidden_states float8 --target /models/target --work /tmp/w --out float8.json

`engine`: a server without hooks and one with them, in turn; one that cuts prompts into small chunks; transformers before
them. States against transformers at every aux layer, one request against 32 at once, chunks against whole; tokens/s.
`float8`: the target answers the built-in prompts, its states are stored as bfloat16 and as float8, and a draft is
trained on each, same seed, same order. Nothing is fetched. On a CPU the same runs with `--device cpu` and fewer tokens.
"""

import argparse
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch

from infra.gpu.places import BUILTIN_PROMPTS
from infra.gpu.states_engine import measure_engine
from infra.gpu.states_float8 import measure_float8
from tasks.common.files import write_json
from tasks.common.params import Params
from tasks.common.target import TARGET
from tasks.prepare_target.prepare import prepare_target


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=("engine", "float8"))
    parser.add_argument("--target", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--work", type=Path, required=True, help="is emptied; artifacts and logs go there")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tokens", type=int, default=1_048_576, help="of each of five rounds")
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
    args.target, out = args.target.absolute(), args.out.absolute()
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


def _params(args: argparse.Namespace) -> Params:
    return Params.model_validate(
        {
            "target": {"model": str(args.target), "device": args.device, "dtype": args.dtype},
            "prompts": {"folder": str(BUILTIN_PROMPTS), "max_train": args.max_train},
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
                "warmup_steps": min(20, args.train_steps),
                "batch_tokens": 4096,
                "evaluate_every": max(1, args.train_steps // 3),
                "checkpoint_every": args.train_steps,
            },
            "serve": {
                "context_length": args.longest + 8,
                "max_total_tokens": None if args.device == "cuda" else 20_000,
                "mem_fraction_static": 0.3,
                "extra_args": args.extra_args.split(),
            },
        }
    )


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
