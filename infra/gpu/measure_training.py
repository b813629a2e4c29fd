"""What training costs on a GPU, against the floor of what it must do and against SpecForge; prints tables, writes JSON.

    python -m infra.gpu.measure_training --size smollm2-135m --target /models/SmolLM2-135M-Instruct --work /tmp/w --out small.json
    python -m infra.gpu.measure_training --size 8b --steps 60 --discard 20 --work /tmp/w --out large.json
    python -m infra.gpu.measure_training --size tiny --device cpu --steps 12 --discard 2 --work /tmp/w --out tiny.json

First the floor, then our step, then SpecForge on the same states, one after the other on the same machine. Sequences
are all of one length and wholly supervised, so that neither side has padding. With --target the states are the target's,
over text that it writes itself; else they are random. SpecForge must be on PYTHONPATH; without it, or on a CPU, its
rows are left out. Nothing is fetched.
"""

import argparse
import importlib.util
import shutil
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from infra.gpu.training_floor import floor
from infra.gpu.training_ours import measure_ours
from infra.gpu.training_sizes import SIZES, RandomStates, TargetStates, write_states, write_target
from infra.gpu.training_specforge import measure_specforge
from tasks.common.files import write_json
from tasks.train_draft.replay import ReplayedStep
from tasks.train_draft.step import TrainStep

_ROWS = (
    "tokens_per_s",
    "ms_per_step",
    "peak_memory_gib",
    "peak_reserved_gib",
    "host_ms_per_step",
    "gpu_busy_by_driver",
    "host_waits_for_data",
    "seconds_to_step_10",
    "same_losses",
    "time_over_floor",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", choices=SIZES, required=True)
    parser.add_argument("--target", type=Path, help="Hugging Face folder of a target of that size")
    parser.add_argument("--work", type=Path, required=True, help="is emptied; states and logs go there")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--discard", type=int, default=50, help="steps at the start that do not count")
    parser.add_argument("--sequences", type=int, help="of the size by default")
    parser.add_argument("--per-step", type=int, help="sequences of a step; of the size by default")
    parser.add_argument("--ttt-length", type=int, default=7)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--workers", type=int, default=0, help="processes that read our states; 0: a thread")
    parser.add_argument("--recompute", action="store_true", help="activation checkpointing")
    parser.add_argument("--backends", nargs="*", default=["flex_attention"], help="SpecForge's; none skips it")
    args = parser.parse_args()
    if args.steps <= args.discard:
        parser.error(f"--steps {args.steps} leaves none to count: --discard is {args.discard}")
    args.work, out = args.work.absolute(), args.out.absolute()
    shutil.rmtree(args.work, ignore_errors=True)
    changes = {name: value for name in ("sequences", "per_step") if (value := getattr(args, name))}
    began, size = time.perf_counter(), replace(SIZES[args.size], **changes)
    compared = args.backends if args.device != "cpu" and importlib.util.find_spec("specforge") else []

    found: dict[str, Any] = {
        "size": vars(size),
        "ttt_length": args.ttt_length,
        "device": torch.cuda.get_device_name() if args.device != "cpu" else "cpu",
        "torch": torch.__version__,
        "floor": floor(size, args.ttt_length, args.device),
    }
    states = TargetStates(size, args.target, args.device) if args.target else RandomStates(size, args.device)
    features = args.work / "features" if compared else None
    stored = write_states(states, args.work / "states", features)
    if compared:
        write_target(states, args.work / "target")
    found["seconds_to_make_states"] = round(time.perf_counter() - began)
    kinds = {"draftline": TrainStep}
    if args.device != "cpu":
        kinds = {"draftline": ReplayedStep, "draftline kernel by kernel": TrainStep}
    for name, kind in kinds.items():
        found[name] = measure_ours(states, stored, kind, args)
        found[name]["time_over_floor"] = round(found[name]["ms_per_step"] / found["floor"]["floor_ms"], 2)
        found[name]["same_losses"] = found[name]["losses"] == found["draftline"]["losses"]
        write_json(out, found)  # what is known so far, should the time run out
    del states
    if args.device != "cpu":
        torch.cuda.empty_cache()
    for backend in compared:
        name = f"specforge {backend}"
        found[name] = measure_specforge(size, features, args.work / "target", args.work / backend, backend, args)
        write_json(out, found)
    found["seconds_in_all"] = round(time.perf_counter() - began)
    write_json(out, found)
    _print(found)


def _print(found: dict[str, Any]) -> None:
    limits = found["floor"]
    print(f"{found['device']}, torch {found['torch']}, {found['size']['name']}, TTT {found['ttt_length']}")
    print(
        f"floor {limits['floor_ms']} ms a step: {limits['parts_ms']}; {limits['tflop']} TFLOP, {limits['bandwidth_gb_s']} GB/s"
    )
    for name, product in limits["products"].items():
        print(
            f"  {name:14s} {product['shape']!s:24s} x {product['times']:<8} {product['tflops']:8} TFLOP/s {product['ms']:9} ms"
        )
    sides = {name: value for name, value in found.items() if name.startswith(("draftline", "specforge"))}
    print(f"{'':24s}" + "".join(f"{name:>28s}" for name in sides))
    for row in _ROWS:
        print(f"{row:24s}" + "".join(f"{side.get(row, side.get('failed', '-'))!s:>28s}" for side in sides.values()))
    for name, ours in sides.items():
        if "profile" not in ours:
            continue
        profile = ours["profile"]
        print(f"{name}, parts {ours['parts_ms']}")
        print(f"profile, ms a step ({profile['kernels_per_step']} kernels, busy {profile['gpu_busy_while_profiled']}):")
        for label, value in {**profile["ms_by_group"], **profile["longest"]}.items():
            print(f"  {value:9} {label}")
    for name, side in sides.items():
        print(name, *(side.get("curve") or side.get("log", []))[-1:])


if __name__ == "__main__":
    main()
