"""Gate between collect_prompts and regenerate_responses: exits 1 and names the prompts that break a rule.

    python -m tasks.gate_prompts          # artifacts/prompts -> reports/gates/prompts.{json,html}

Limits: params.yaml, section gates. What is checked and why: tasks/gates/prompts.py.
"""

from tasks.common.params import Params
from tasks.common.stage import run_stage
from tasks.common.tracking import Tracker


def main(params: Params, tracker: Tracker) -> None:
    from tasks.gates.gate import run_gate
    from tasks.gates.prompts import LEAD, build

    run_gate("prompts", LEAD, lambda: build(params), tracker)


if __name__ == "__main__":
    run_stage("gate_prompts", main)
