"""SpecForge 0.2.0 on the same states: its own command in a process of its own, measured from outside.

It is no dependency: whoever measures puts it on PYTHONPATH (`python -m specforge.cli` must start).
"""

import ast
import json
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml

from infra.gpu.gpu_busy import Busy
from infra.gpu.training_sizes import Size, llama_config
from tasks.common.files import write_json

_STEP = re.compile(r"^step (\d+): (\{.*\})$")


def measure_specforge(size: Size, features: Path, target: Path, work: Path, backend: str, args) -> dict[str, Any]:
    """Figures over the steps behind the first `args.discard`, or why there are none."""
    draft = llama_config(size, "LlamaForCausalLMEagle3", 1) | {"draft_vocab_size": size.draft_vocab}
    training = {
        "batch_size": size.per_step,
        "max_steps": args.steps,
        "num_epochs": 10_000,
        "ttt_length": args.ttt_length,
        "attention_backend": backend,
        "learning_rate": args.learning_rate,
        "lr_scheduler": "constant",
        "max_grad_norm": 0.5,
    }
    data = {"hidden_states_path": str(features), "max_length": size.length}
    found = train_specforge(work, draft, {"target_model_path": str(target)}, data, training, args.discard)
    if "failed" not in found:
        found["tokens_per_s"] = round(1e3 * size.step_tokens / found["ms_per_step"])
    return found


def train_specforge(
    work: Path, draft: dict, model: dict, data: dict, training: dict, discard: int, log_interval: int = 10
) -> dict[str, Any]:
    """Train in `work`, checkpoints in `work`/output; figures over the steps behind the first `discard`, or why there are none.

    Args:
        draft: config.json of the draft, which becomes `work`/draft.json.
        model, data, training: these sections of its run.yaml, without what follows from `work` and from one GPU.
    """
    work.mkdir(parents=True)
    write_json(work / "draft.json", draft)
    run = {
        "model": {"draft_model_config": str(work / "draft.json")} | model,
        "data": {"cache_dir": str(work / "cache")} | data,
        "training": {"strategy": "eagle3", "fsdp_sharding": "NO_SHARD", "log_interval": log_interval} | training,
        "run_id": "draft",
        "output_dir": str(work / "output"),
    }
    (work / "run.yaml").write_text(yaml.safe_dump(run))
    log, peak = work / "log.txt", work / "peak.json"
    program = Path(__file__).with_name("peak_memory_of.py")
    command = [sys.executable, str(program), str(peak), "specforge.cli", "train", "-c", str(work / "run.yaml")]
    began, points, started = time.perf_counter(), [], None
    with Busy() as busy, log.open("w") as written:
        process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": "1"},
        )
        for line in process.stdout:
            written.write(line)
            written.flush()
            if match := _STEP.match(line.strip()):
                values = ast.literal_eval(match[2])
                points.append({"step": int(match[1]), "seconds": time.perf_counter() - began, **values})
                if started is None and points[-1]["step"] >= discard:
                    started = time.perf_counter()
        process.wait()
    backend, counted = training["attention_backend"], [point for point in points if point["step"] > discard]
    if not counted:
        tail = log.read_text().splitlines()[-12:]
        return {"backend": backend, "failed": process.returncode, "log": tail}
    step_s = statistics.fmean(point["perf/optimizer_step_time_s"] for point in counted)
    waits = statistics.fmean(point["perf/data_wait_time_s"] for point in counted)
    return {
        "backend": backend,
        "ms_per_step": round(1e3 * step_s, 2),
        "peak_memory_gib": round(json.loads(peak.read_text()) / 2**30, 2) if peak.exists() else None,
        "gpu_busy_by_driver": busy.since(started or began),
        "host_waits_for_data": round(waits / step_s, 4),
        f"seconds_to_step_{points[0]['step']}": round(points[0]["seconds"], 1),
        "exit_code": process.returncode,
        "curve": [{k: _rounded(v) for k, v in p.items() if not k.startswith("perf/")} for p in points],
    }


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    return round(value, 4) if isinstance(value, float) else value
