"""Gate between regenerate_responses and dump_hidden_states: exits 1 and names the answers that break a rule.

    python -m tasks.gate_responses        # artifacts/responses -> reports/gates/responses.{json,html}

Limits: params.yaml, section gates. What is checked and why: tasks/gates/responses.py.
"""

from tasks.common.params import Params
from tasks.common.stage import run_stage
from tasks.common.tracking import Tracker


def main(params: Params, tracker: Tracker) -> None:
    from tasks.gates.gate import run_gate
    from tasks.gates.responses import LEAD, build

    run_gate("responses", LEAD, lambda: build(params), tracker)


if __name__ == "__main__":
    run_stage("gate_responses", main)
