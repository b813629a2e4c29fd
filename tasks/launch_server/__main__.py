"""Start the real server with the exported draft; prove what it is, on which states, and that it drafts what was exported.

    python -m tasks.launch_server            # start, prove, shut down -> reports/launch_server.json
    python -m tasks.launch_server --print    # the line to serve the draft with, a reason for each flag; starts nothing

The plan is checked before anything starts. Then the doctor's live checks (tasks/common/live_checks): identity, speculation
on, the draft's input n_aux * H wide, its states equal to the dump's slot by slot within `gates.max_relative_error`, every
round as our own draft computes it, and the predicted acceptance length. At the end nothing of the server is left running.
"""

import sys

from tasks.common.check import require_no_errors
from tasks.common.check_table import print_checks
from tasks.common.console import console
from tasks.common.files import REPORTS, write_json
from tasks.common.hidden_states import HIDDEN_STATES, HiddenStates
from tasks.common.params import Params, load_params
from tasks.common.speculative_plan import speculative_plan
from tasks.common.stage import ending_in_words, run_stage
from tasks.common.target import target_contract
from tasks.common.tracking import Tracker
from tasks.launch_server.show import show_plan

REPORT = REPORTS / "launch_server.json"


def main(params: Params, tracker: Tracker) -> None:
    from tasks.common.live_checks.run import check_server
    from tasks.common.server import Server
    from tasks.launch_server.proof import Proof
    from tasks.launch_server.report import report

    plan = speculative_plan(params).with_hidden_states()
    states = HiddenStates(HIDDEN_STATES / "heldout")
    states.contract.require_same(target_contract(params.contract), str(states.folder), "the target as served")
    proof = Proof.of(params, plan, states)
    show_plan(proof.plan)
    with Server(proof.plan) as server:
        expected = proof.expected(server.weight_version)
        found = check_server(server, server.server_info(), proof.subject, expected, proof.material)
    print_checks(found.checks, console())
    tracker.log_metrics({f"parity_relative_error/slot{row.slot}": row.agreement.relative_error for row in found.parity})
    require_no_errors(found.checks)
    write_json(REPORT, report(plan, params, found))
    tracker.log_artifact(REPORT)
    open_questions = [f"{check.id}: {check.found}" for check in found.checks if check.verdict == "not applicable"]
    print(
        "; ".join(["proven, the server is down, nothing of it is left", *(f"not proven: {q}" for q in open_questions)])
    )


def print_plan() -> None:
    """The server that people should run, and why so: without the probe's flags."""
    show_plan(speculative_plan(load_params()))


if __name__ == "__main__":
    if sys.argv[1:] == ["--print"]:
        with ending_in_words("launch_server"):
            print_plan()
    else:
        run_stage("launch_server", main)
