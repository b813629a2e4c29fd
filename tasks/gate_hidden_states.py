"""Gate between dump_hidden_states and train_draft: exits 1 and names the samples that break a rule.

    python -m tasks.gate_hidden_states    # artifacts/hidden_states -> reports/gates/hidden_states.{json,html}

Limits: params.yaml, section gates. What is checked and why: tasks/gates/hidden_states.py.
"""

from tasks.common.params import Params
from tasks.common.stage import run_stage
from tasks.common.tracking import Tracker


def main(params: Params, tracker: Tracker) -> None:
    from tasks.gates.gate import run_gate
    from tasks.gates.hidden_states import LEAD, build

    run_gate("hidden_states", LEAD, lambda: build(params), tracker)


if __name__ == "__main__":
    run_stage("gate_hidden_states", main)
