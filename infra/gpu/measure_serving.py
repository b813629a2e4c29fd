"""Serving with a draft on a GPU, measured whole: tuner, profile, benchmark, cross-check, each by the product's own command.

    python -m infra.gpu.measure_serving --target /models/target --draft /models/draft --sets /data/sets --work /tmp/w \\
        --tune-minutes 5 --requests 1 16 64 --concurrency 1 4 16 64

Makes a project of its own in --work: params.yaml, the prepared target, the draft as its export. The tuner's best plan is what
the other parts serve. --sets is a folder of JSONL files, a set a file. Parts run in the order given by --parts, each ends at
its limit, and what a part has written stays; `--parts benchmark` takes the tuner's plan of an earlier call. Nothing is fetched.
On a CPU the same with `--device cpu --dtype float32`.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import yaml

from infra.gpu.served_acceptance import read_sets
from tasks.common.draft_files import DraftFiles
from tasks.common.files import REPORTS, read_json, write_atomically, write_json
from tasks.common.params import PARAMS, Params
from tasks.common.responses import RESPONSES, Response
from tasks.common.speculative_plan import EXPORT
from tasks.common.target import TARGET
from tasks.common.versions import VERSIONS, result_versions
from tasks.prepare_target.prepare import prepare_target

ROOT = Path(__file__).resolve().parents[2]
PARTS = ("tune", "profile", "benchmark", "cross_check")
TUNED = REPORTS / "tuned_params.yaml"
SECONDS = Path("seconds.json")


def main() -> None:
    args = _arguments()
    args.work.mkdir(parents=True, exist_ok=True)
    os.chdir(args.work)
    if not PARAMS.exists():
        _make_project(args)
    commands = {
        "tune": ["tasks.tune_server", "--minutes", str(args.tune_minutes), "--concurrency", "1"],
        "profile": ["tasks.profile_server", "--requests", *map(str, args.requests)],
        "benchmark": ["infra.gpu.untracked", "tasks.benchmark"],
        "cross_check": ["tasks.benchmark.cross_check"],
    }
    took = read_json(SECONDS) if SECONDS.exists() else {}
    for part in args.parts:
        began = time.monotonic()
        code = _run(commands[part], args.limits[PARTS.index(part)])
        took[part] = {"seconds": round(time.monotonic() - began, 1), "exit_code": code}
        write_json(SECONDS, took)
        print(f"{part}: {took[part]}", flush=True)
        if part == "tune" and TUNED.exists():
            _serve(yaml.safe_load(TUNED.read_text())["serve"])
    print(json.dumps(took))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--draft", type=Path, required=True, help="an export of that target")
    parser.add_argument("--sets", type=Path, required=True, help="JSONL files of questions")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--limits", nargs=4, type=int, default=(600, 300, 600, 300), help="seconds, a part each")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tune-minutes", type=float, default=5)
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 16, 64], help="at once, of the profile")
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--questions", type=int, default=24, help="of a set, at the least")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--predicted", type=float, help="acceptance length that training predicted")
    parser.add_argument(
        "--extra-args", default="--attention-backend triton --sampling-backend pytorch", help="of SGLang"
    )
    args = parser.parse_args()
    for name in ("target", "draft", "sets"):
        setattr(args, name, getattr(args, name).absolute())
    return args


def _make_project(args: argparse.Namespace) -> None:
    most = max(args.concurrency)
    on_gpu = args.device != "cpu"
    aux = DraftFiles.open(args.draft).config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    params = Params.model_validate(
        {
            "target": {"model": str(args.target), "device": args.device, "dtype": args.dtype},
            "contract": {"aux_layer_ids": aux},
            "train_draft": {"ttt_length": 7},
            "serve": {
                "context_length": 1024,
                "max_running_requests": most,
                "max_total_tokens": 1024 * most,
                "mem_fraction_static": 0.5 if on_gpu else 0.3,
                "extra_args": args.extra_args.split(),
            },
            "benchmark": {
                "sets": {path.stem: str(path) for path in sorted(args.sets.glob("*.jsonl"))},
                "num_prompts": args.questions,
                "max_new_tokens": args.max_new_tokens,
                "concurrency": args.concurrency,
                "temperatures": [0.0, 1.0],
                "warmup_prompts": 1,
            },
        }
    )
    prepare_target(params.target, TARGET)
    _write_heldout(params)
    shutil.copytree(args.draft, EXPORT, dirs_exist_ok=True)
    write_json(REPORTS / "train_draft.json", {"predicted_accept_length": args.predicted})
    write_json(VERSIONS, result_versions())
    write_atomically(PARAMS, yaml.safe_dump(params.model_dump(mode="json"), sort_keys=False).encode())


def _write_heldout(params: Params) -> None:
    """The questions of all sets in turn, where tuner and profiler look for the run's held-out prompts."""
    sets = read_sets(Path(next(iter(params.benchmark.sets.values()))).parent, None)
    rows = [
        Response(f"{name}-{number}", name, [], token_ids, [], "", "length").to_row()
        for name, questions in sets.items()
        for number, token_ids in enumerate(questions)
    ]
    (RESPONSES / "heldout.jsonl").parent.mkdir(parents=True, exist_ok=True)
    write_atomically(RESPONSES / "heldout.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode())


def _serve(tuned: dict) -> None:
    """Take the tuner's plan over."""
    params = yaml.safe_load(PARAMS.read_text())
    params["serve"] |= tuned
    write_atomically(PARAMS, yaml.safe_dump(params, sort_keys=False).encode())


def _run(module: list[str], limit: int) -> int | str:
    """A command of the product, whose servers end with it, whatever happens."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen([sys.executable, "-m", *module], env=os.environ | {"PYTHONPATH": path})
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
        return f"ended at its limit of {limit} s"


if __name__ == "__main__":
    main()
