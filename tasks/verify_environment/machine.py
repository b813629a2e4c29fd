"""The machine: processor, memory, GPUs. Facts for the report; the checks judge them."""

import os
import platform

from tasks.common import gpu
from tasks.common.errors import DraftlineError
from tasks.common.machine import cores, processor
from tasks.common.memory import available_memory
from tasks.verify_environment.facts import Gpu, GpuProcess, Gpus


def machine_facts() -> dict:
    """What a reader of the report asks first."""
    return {
        "platform": platform.platform(),
        "processor": processor(),
        "cores": cores(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
        "memory_available_bytes": available_memory(),
    }


def find_gpus() -> Gpus:
    """What nvidia-smi says; run before any probe touches a GPU. One whose memory it does not tell is left out."""
    try:
        rows = gpu.query("--query-gpu=index,uuid,memory.total,memory.used,driver_version,name")
        holders = gpu.query("--query-compute-apps=gpu_uuid,pid,used_memory,process_name")
    except DraftlineError as error:
        return Gpus(error=str(error))
    if not rows:
        return Gpus(error="no nvidia-smi on PATH")
    index = {uuid: int(number) for number, uuid, *_ in rows}
    known = [row for row in rows if row[2].isdigit() and row[3].isdigit()]  # else "[N/A]", on unified memory for one
    return Gpus(
        error=None if known else f"nvidia-smi does not tell the memory of GPU {', '.join(row[0] for row in rows)}",
        driver=rows[0][4],
        gpus=tuple(
            Gpu(index=int(number), name=", ".join(name), memory_total_mib=int(total), memory_used_mib=int(used))
            for number, _, total, used, _, *name in known
        ),
        processes=tuple(
            GpuProcess(
                gpu=index[uuid], pid=int(pid), name=", ".join(name), memory_mib=int(used) if used.isdigit() else None
            )
            for uuid, pid, used, *name in holders
            if uuid in index and pid.isdigit()
        ),
    )
