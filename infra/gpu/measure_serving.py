"""Serving with a draft on a GPU, measured whole: tuner, profile, benchmark, cross-check, each by the product's own command.

    python -m infra.gpu.measure_serving --target /models/target --draft /models/draft --ttt-length 7 --work /tmp/w \\
        --sets /data/sets --heldout /data/heldout --tune-minutes 8

Makes a project of its own in --work: params.yaml, the prepared target, the draft as its export. --sets is a folder of JSONL files
of questions, a set a file, which the benchmark asks; --heldout one of other prompts, by which tuner and profile go. Parts run
in the order of --parts, each ends at its limit, and what it has written stays until the same part runs again: a later call
goes on in the same --work. The best plan of a tuner that ended well is what the parts behind it serve. Nothing is fetched. On a CPU the same
with `--device cpu --dtype float32 --extra-args=""`.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import yaml

from infra.gpu.places import ROOT
from infra.gpu.served_acceptance import read_sets
from tasks.common.draft_checks.record import RECORD, recorded_contract
from tasks.common.errors import DraftlineError
from tasks.common.files import REPORTS, read_json, write_atomically, write_json
from tasks.common.params import PARAMS, Params
from tasks.common.responses import RESPONSES, Response
from tasks.common.server_session import reap_stale_servers
from tasks.common.speculative_plan import EXPORT
from tasks.common.stage import ending_in_words
from tasks.common.target import TARGET
from tasks.common.versions import VERSIONS, result_versions
from tasks.prepare_target.prepare import prepare_target

PARTS = ("tune", "profile", "benchmark", "cross_check")
TUNED = REPORTS / "tuned_params.yaml"
SECONDS, PROJECT = Path("seconds.json"), Path("project.json")
# Of the arguments, what may differ between two calls that work on the same project: what is asked, not what is served.
_OF_A_CALL = ("work", "parts", "limit", "tune_minutes", "requests", "concurrency", "temperatures", "questions")
_GRACE_S = 60


def main() -> None:
    args = _arguments()
    with ending_in_words("measure_serving"):
        _measure(args)


def _measure(args: argparse.Namespace) -> None:
    args.work.mkdir(parents=True, exist_ok=True)
    os.chdir(args.work)
    _make_project(args)
    asked = {"concurrency": args.concurrency, "temperatures": args.temperatures, "num_prompts": args.questions}
    _change("benchmark", asked)
    commands = {
        "tune": ["tasks.tune_server", "--minutes", str(args.tune_minutes), "--concurrency", "1"],
        "profile": ["tasks.profile_server", "--requests", *map(str, args.requests)],
        "benchmark": ["infra.gpu.untracked", "tasks.benchmark"],
        "cross_check": ["tasks.benchmark.cross_check"],
    }
    took = read_json(SECONDS) if SECONDS.exists() else {}
    for part in args.parts:
        if part == "tune":
            TUNED.unlink(missing_ok=True)
        began = time.monotonic()
        code = _run(commands[part], args.limit)
        took[part] = {"seconds": round(time.monotonic() - began, 1), "exit_code": code}
        write_json(SECONDS, took)
        print(f"{part}: {took[part]}", flush=True)
        if part == "tune" and code == 0:  # the parts behind it serve its plan, whatever they ask
            _change("serve", yaml.safe_load(TUNED.read_text())["serve"] | {"max_running_requests": args.most_requests})
    sys.exit(int(any(took[part]["exit_code"] for part in args.parts)))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--draft", type=Path, required=True, help="an export of that target")
    parser.add_argument("--ttt-length", type=int, required=True, help="that the draft was trained with: its most steps")
    parser.add_argument("--sets", type=Path, required=True, help="JSONL files of questions")
    parser.add_argument("--heldout", type=Path, required=True, help="JSONL files of other prompts")
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--limit", type=int, default=1200, help="seconds of a part")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--tune-minutes", type=float, default=8)
    parser.add_argument("--requests", nargs="+", type=int, default=[1, 16, 64], help="at once, of the profile")
    parser.add_argument("--most-requests", type=int, default=64, help="that a server runs at once")
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 2, 4, 8, 16, 32, 64])
    parser.add_argument("--temperatures", nargs="+", type=float, default=[0.0, 1.0])
    parser.add_argument("--questions", type=int, default=24, help="of a set, at the least")
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument(
        "--extra-args", default="--attention-backend triton --sampling-backend pytorch", help="of SGLang"
    )
    args = parser.parse_args()
    if (most := max(args.concurrency)) > args.most_requests:
        parser.error(f"--concurrency {most}: a server runs at most --most-requests {args.most_requests}")
    if not list(args.sets.glob("*.jsonl")):
        parser.error(f"--sets {args.sets}: holds no JSONL file")
    for name in ("target", "draft", "sets", "heldout"):
        setattr(args, name, getattr(args, name).absolute())
    return args


def _make_project(args: argparse.Namespace) -> None:
    """Once; a later call must describe the same project."""
    project = {name: str(value) for name, value in vars(args).items() if name not in _OF_A_CALL}
    if PROJECT.exists():
        if (earlier := read_json(PROJECT)) != project:
            differing = [name for name in project if earlier.get(name) != project[name]]
            raise DraftlineError(
                f"{args.work} was made with other values of {', '.join(differing)}: name another --work."
            )
        return
    # Not the config's ids, which an engine may count otherwise than the contract counts outputs of layers.
    contract = recorded_contract(args.draft)
    if contract is None:
        raise DraftlineError(f"--draft {args.draft}: holds no {RECORD}, which every export of Draftline does.")
    params = Params.model_validate(
        {
            "target": {"model": str(args.target), "device": args.device, "dtype": args.dtype},
            "contract": {"aux_layer_ids": contract.aux_layer_ids},
            "train_draft": {"ttt_length": args.ttt_length},
            "serve": {
                "context_length": 2048,
                "max_running_requests": args.most_requests,
                "max_total_tokens": max(20_000, 1024 * args.most_requests),
                "mem_fraction_static": 0.3 if args.device == "cpu" else 0.5,
                "extra_args": args.extra_args.split(),
            },
            "benchmark": {
                "sets": {path.stem: str(path) for path in sorted(args.sets.glob("*.jsonl"))},
                "max_new_tokens": args.max_new_tokens,
                "warmup_prompts": 1,
            },
        }
    )
    prepare_target(params.target, TARGET)
    _write_heldout(args.heldout)
    shutil.copytree(args.draft, EXPORT, dirs_exist_ok=True)
    write_json(VERSIONS, result_versions())
    write_atomically(PARAMS, yaml.safe_dump(params.model_dump(mode="json"), sort_keys=False).encode())
    write_json(PROJECT, project)


def _write_heldout(folder: Path) -> None:
    """Prompts, where tuner and profiler look for the run's held-out ones."""
    rows = [
        Response(f"{name}-{number}", name, [], token_ids, [], "", "length").to_row()
        for name, prompts in read_sets(folder, None).items()
        for number, token_ids in enumerate(prompts)
    ]
    path = RESPONSES / "heldout.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(path, "".join(json.dumps(row) + "\n" for row in rows).encode())


def _change(section: str, values: dict) -> None:
    """Set `values` in a section of params.yaml."""
    params = yaml.safe_load(PARAMS.read_text())
    params[section] |= values
    write_atomically(PARAMS, yaml.safe_dump(params, sort_keys=False).encode())


def _run(module: list[str], limit: int) -> int | str:
    """A command of the product; whatever ends it, its servers are gone afterwards."""
    path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    process = subprocess.Popen([sys.executable, "-m", *module], env=os.environ | {"PYTHONPATH": path})
    try:
        return process.wait(limit)
    except subprocess.TimeoutExpired:
        return f"ended at its limit of {limit} s"
    finally:
        if process.poll() is None:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)
            process.kill()
            process.wait()
        reap_stale_servers()


if __name__ == "__main__":
    main()
