"""Gate between export_draft and launch_server: exits 1 and names the tensors and facts that would be served wrongly.

    python -m tasks.gate_draft            # artifacts/export -> reports/gates/draft.{json,html}

Limits: params.yaml, section gates. What is checked and why: tasks/gates/draft.py.
"""

from tasks.common.params import Params
from tasks.common.stage import run_stage
from tasks.common.tracking import Tracker


def main(params: Params, tracker: Tracker) -> None:
    from tasks.gates.draft import LEAD, build
    from tasks.gates.gate import run_gate

    run_gate("draft", LEAD, lambda: build(params), tracker)


if __name__ == "__main__":
    run_stage("gate_draft", main)
