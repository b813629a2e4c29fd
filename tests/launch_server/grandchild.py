"""Loaded by a server's scheduler as a forward hook: a process behind SGLang's back that ignores SIGTERM."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tasks.common.server_plan import ServerPlan, Setting, flag

_STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"


def with_grandchild(plan: ServerPlan) -> ServerPlan:
    """The same server, with a child of its scheduler that outlives a polite end."""
    hook = {"name": "grandchild", "target_modules": ["*logits_processor"], "hook_factory": f"{__name__}:plant"}
    root = str(Path(__file__).parents[2])
    return plan.adding(
        (flag("--forward-hooks", json.dumps([hook]), reason="test"),), (Setting("PYTHONPATH", (root,), "test"),)
    )


def plant(config: dict[str, Any]) -> Callable:
    """Hook factory."""
    subprocess.Popen([sys.executable, "-c", _STUBBORN])
    return lambda *_: None


def is_grandchild(words: list[str]) -> bool:
    return _STUBBORN in words
