"""One part of what is measured on two GPUs, in a process of its own, which may be ended at its limit.

python -m infra.gpu.two_gpus_parts dump --settings settings.json --out dump.json --seconds 400
"""

import argparse
import importlib
import time
from pathlib import Path

from infra.gpu.two_gpus_runs import Found
from infra.gpu.two_gpus_settings import Settings

# With the seconds that each may take.
PARTS = {"dump": 420, "train": 520, "serve": 480}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--settings", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True, help="what is found; written again after each step")
    parser.add_argument("--seconds", type=float, required=True, help="to go by; it is not ended by them")
    args = parser.parse_args()
    measured = importlib.import_module(f"infra.gpu.two_gpus_{args.part}")
    measured.measure(Settings.read(args.settings), Found(args.out, time.time() + args.seconds))


if __name__ == "__main__":
    main()
