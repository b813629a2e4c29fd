"""Gate after benchmark: exits 1 when the served draft is not good enough, or its figures cannot be true.

    python -m tasks.gate_benchmark        # reports/benchmark* -> reports/gates/benchmark.{json,html}

Limits: params.yaml, section gates. What is checked and why: tasks/gates/benchmark.py.
"""

from tasks.common.params import Params
from tasks.common.stage import run_stage
from tasks.common.tracking import Tracker


def main(params: Params, tracker: Tracker) -> None:
    from tasks.gates.benchmark import LEAD, build
    from tasks.gates.gate import run_gate

    run_gate("benchmark", LEAD, lambda: build(params), tracker)


if __name__ == "__main__":
    run_stage("gate_benchmark", main)
