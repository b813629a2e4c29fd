"""Training, dumping and serving on two GPUs against one; prints one table, writes it and a JSON file a part.

    python -m infra.gpu.measure_two_gpus --target /models/target --draft /models/draft --work /tmp/w --out /tmp/out
    python -m infra.gpu.measure_two_gpus ... --parts dump     # one part: 420 s at most; train 520 s, serve 480 s

--draft is an export of that target. Parts need nothing of each other; each ends at its limit, what it has found by then
stays, and the table shows all parts whose files lie in --out. Before and after each part both GPUs must be idle, by
the check that the product makes before it starts a server. A target whose key-value heads two GPUs cannot share is padded
(padded_heads.py). Nothing is fetched. `--device cpu` rehearses it in small sizes, two processes in place of two GPUs.
"""

import argparse
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

from infra.gpu.two_gpus_parts import PARTS
from infra.gpu.two_gpus_runs import WITHOUT_MULTICAST, module_command, run
from infra.gpu.two_gpus_settings import GPUS, SIZES, Settings
from infra.gpu.two_gpus_table import table
from tasks.common import gpu
from tasks.common.errors import DraftlineError
from tasks.common.files import read_json, write_atomically, write_json
from tasks.common.server_gpus import ServerGpus
from tasks.common.server_plan import ServerPlan, flag

# Of a part's limit, to end servers and see that the GPUs are idle.
_ENDING_S = 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--target", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--draft", type=Path, required=True, help="an exported draft of that target")
    parser.add_argument("--work", type=Path, required=True, help="a folder a part is emptied there")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--device", choices=SIZES, default="cuda")
    parser.add_argument("--port", type=int, default=30_000, help="the first; a server takes up to 1,000 above its own")
    parser.add_argument(
        "--extra-args", default="--attention-backend triton --sampling-backend pytorch", help="of SGLang"
    )
    args = parser.parse_args()
    os.environ |= WITHOUT_MULTICAST
    # What runs is ended, however this is.
    signal.signal(signal.SIGTERM, lambda number, _: sys.exit(128 + number))
    settings = Settings(
        target=str(args.target.absolute()),
        draft=str(args.draft.absolute()),
        device=args.device,
        extra_args=tuple(args.extra_args.split()),
        port=args.port,
    )
    out = args.out.absolute()
    for part in args.parts:
        limit = PARTS[part] * settings.sizes.patience
        measure_part(part, settings, args.work.absolute() / part, out / f"{part}.json", limit)
    found = {part: read_json(path) for part in PARTS if (path := out / f"{part}.json").exists()}
    text = table(found)
    write_atomically(out / "table.md", f"{text}\n".encode())
    print(text)


def measure_part(part: str, settings: Settings, folder: Path, out: Path, limit: float) -> None:
    """Run it, in `folder`; what it found, why it ended early, and the GPUs' memory before and after go to `out`."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    out.unlink(missing_ok=True)
    found: dict[str, Any] = {"device": _device(settings.device)}
    began = time.monotonic()
    try:
        found["idle_before"] = idle_memory(settings.device)
        settings.write(folder / "settings.json")
        arguments = [part, "--settings", "settings.json", "--out", str(out)]
        seconds = limit - _ENDING_S
        command = module_command("infra.gpu.two_gpus_parts", *arguments, "--seconds", str(seconds))
        print(f"{part}: at most {limit:.0f} s, log {folder / 'log.txt'}", flush=True)
        run(command, folder, folder / "log.txt", seconds)
    except DraftlineError as error:
        found["failed"] = str(error)
    try:
        found["idle_after"] = idle_memory(settings.device)
    except DraftlineError as error:
        found["not_idle_after"] = str(error)
    found["seconds"] = round(time.monotonic() - began)
    found["found"] = read_json(out) if out.exists() else {}
    write_json(out, found)
    print(f"{part}: {found['seconds']} s {found.get('failed', '')}", flush=True)


def idle_memory(device: str) -> dict[str, int] | None:
    """MiB in use by GPU, of the GPUs that a server over two would have; None on a machine without.

    Raises:
        DraftlineError: one of them is not idle.
    """
    spanning = flag("--tp-size", str(GPUS), reason="both GPUs")
    # Never started: it says which GPUs are meant.
    plan = ServerPlan(
        kind="baseline",
        port=0,
        startup_timeout_s=0,
        device=device,
        dtype="",
        target=Path(),
        draft=None,
        algorithm=None,
        flags=(spanning,),
        environment=(),
    )
    gpus = ServerGpus(plan)
    gpus.require_idle()
    return {str(index): used for index, used in sorted(gpus.before.items())} or None


def _device(device: str) -> str:
    """What it is measured on, asked of the driver: this process is to hold no GPU memory."""
    return "cpu" if device == "cpu" else ", ".join(name for (name,) in gpu.query("--query-gpu=name"))


if __name__ == "__main__":
    main()
