"""Start the real server with the exported draft; prove what it is, that it speculates, and on which states.

    python -m tasks.launch_server            # start, prove, shut down -> reports/launch_server.json
    python -m tasks.launch_server --print    # the line to serve the draft with, a reason for each flag; starts nothing

The plan is checked before anything starts. Then: identity (nonce, paths, owner of the port), speculation on, the
draft's input n_aux * H wide, and the first parity check: dumped held-out samples are replayed as the same token
ids, and the server's aux states must equal the dump slot by slot within `gates.max_relative_error`. At the end
nothing of the server is left running.
"""

import math
import sys
from collections.abc import Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING

from tasks.common.errors import DraftlineError
from tasks.common.files import REPORTS, write_json
from tasks.common.hidden_states import HIDDEN_STATES, HiddenStates
from tasks.common.params import Params, load_params
from tasks.common.server_plan import ServerPlan
from tasks.common.speculative_plan import speculative_plan
from tasks.common.stage import run_stage
from tasks.common.target import load_model, target_contract
from tasks.common.tracking import Tracker
from tasks.launch_server.show import show_parity, show_plan

if TYPE_CHECKING:
    from tasks.launch_server.probe import SlotParity

REPORT = REPORTS / "launch_server.json"


def main(params: Params, tracker: Tracker) -> None:
    from tasks.common.server import Server
    from tasks.launch_server import probe

    plan = speculative_plan(params).with_hidden_states()
    show_plan(plan)
    contract, limit = target_contract(params.contract), params.gates.max_relative_error
    states = HiddenStates(HIDDEN_STATES / "heldout")
    states.contract.require_same(contract, str(states.folder), "the target as served")
    samples = probe.choose_samples(states, params.serve.context_length)
    replays = probe.with_wrong_reading(params.target, samples, contract)
    probe.require_telling_limit(replays, limit)

    with Server(plan) as server:
        probe.prove_speculation(server, samples[0].input_ids.tolist(), contract)
        served = [probe.fetch_states(server, replay, contract) for replay in replays]

    parity = [row for replay, aux in zip(replays, served, strict=True) for row in probe.compare(replay, aux, contract)]
    show_parity(parity, limit)
    tracker.log_metrics({f"parity_relative_error/slot{row.slot}": row.agreement.relative_error for row in parity})
    failed = {row.sample for row in parity if not row.agreement.relative_error <= limit}
    if failed:
        model = load_model(params.target)
        named = [
            f"sample {replay.id}:\n{probe.name_captured_layers(model, replay, aux, parity, limit)}"
            for replay, aux in zip(replays, served, strict=True)
            if replay.id in failed
        ]
        raise DraftlineError(
            "the server feeds the draft other states than it was trained on; served so, it accepts little or nothing.\n"
            + "\n".join(named)
        )
    write_json(REPORT, report(plan, params, parity))
    tracker.log_artifact(REPORT)
    print("identity proven, speculation on, parity within the limit; the server is down and nothing of it is left")


def report(plan: ServerPlan, params: Params, parity: "Sequence[SlotParity]") -> dict:
    """What was proven. The same for every run over the same inputs: no ports, pids, times or last digits."""
    limit = params.gates.max_relative_error
    slots = sorted({(row.slot, row.layer) for row in parity})
    return {
        "engine": {"name": "sglang", "version": version("sglang"), "device": plan.device, "dtype": plan.dtype},
        "algorithm": plan.algorithm,
        "identity": "proven: weight version, paths and algorithm, owner of the port",
        "speculation": "on: draft tokens were verified",
        "parity": {
            "limit": limit,
            "samples": sorted({row.sample for row in parity}),
            "slots": [
                {
                    "slot": slot,
                    "output_of_layer": layer,
                    "relative_error_below": _bound(
                        [r.agreement.relative_error for r in parity if r.slot == slot], limit
                    ),
                    "wrong_reading": {
                        "output_of_layer": layer + 1,
                        "relative_error": round(min(r.shifted.relative_error for r in parity if r.slot == slot), 2),
                    },
                }
                for slot, layer in slots
            ],
        },
        "shutdown": "clean: no process, no listener" + ("" if plan.device == "cpu" else ", GPU memory back"),
    }


def _bound(errors: list[float], limit: float) -> float:
    """A power of ten above all errors, no finer than a hundredth of the limit: the last digits vary between runs."""
    return 10.0 ** math.ceil(math.log10(max(*errors, limit / 100)) - 1e-9)


def print_plan() -> None:
    """The server that people should run, and why so: without the probe's flags."""
    try:
        show_plan(speculative_plan(load_params()))
    except DraftlineError as error:
        sys.exit(f"launch_server failed:\n{error}")


if __name__ == "__main__":
    if sys.argv[1:] == ["--print"]:
        print_plan()
    else:
        run_stage("launch_server", main)
