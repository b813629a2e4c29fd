"""What was proven. The same for every run over the same inputs: no ports, pids, times or last digits."""

import math
from collections.abc import Sequence
from importlib.metadata import version

from tasks.common.live_checks.run import LiveReport
from tasks.common.live_checks.slots import SlotParity
from tasks.common.params import Params
from tasks.common.parity import error_limit
from tasks.common.server_plan import ServerPlan


def report(plan: ServerPlan, params: Params, found: LiveReport) -> dict:
    """reports/launch_server.json.

    Args:
        found: without an error.
    """
    limit = served_limit(params)
    slots = sorted({(row.slot, row.layer) for row in found.parity})
    return {
        "engine": {"name": "sglang", "version": version("sglang"), "device": plan.device, "dtype": plan.dtype},
        "algorithm": plan.algorithm,
        "checks": {check.id: check.verdict for check in found.checks},
        "parity": {
            "limit": limit,
            "samples": sorted({row.prompt for row in found.parity}),
            "slots": [_slot([row for row in found.parity if row.slot == slot], layer, limit) for slot, layer in slots],
        },
        "shutdown": "clean: no process, no listener" + ("" if plan.device == "cpu" else ", GPU memory back"),
    }


def served_limit(params: Params) -> float:
    """The relative error above which what the draft is fed is not what was dumped."""
    return params.gates.max_relative_error or error_limit(params.target.dtype, params.dump.storage_dtype)


def _slot(rows: Sequence[SlotParity], layer: int, limit: float) -> dict:
    nearest = min((row.match for row in rows if row.match), key=lambda match: match.runner_up_error)
    return {
        "slot": rows[0].slot,
        "output_of_layer": layer,
        "relative_error_below": _bound([row.agreement.relative_error for row in rows], limit),
        "next_best": {"state": nearest.runner_up, "relative_error": round(nearest.runner_up_error, 2)},
    }


def _bound(errors: Sequence[float], limit: float) -> float:
    """A power of ten above all errors, no finer than a hundredth of the limit: the last digits vary between runs."""
    return 10.0 ** math.ceil(math.log10(max(*errors, limit / 100)) - 1e-9)
