"""Dump the target's hidden states: artifacts/responses -> artifacts/hidden_states.

    python -m tasks.dump_hidden_states    # params.yaml, sections target, contract and dump

Shards that an earlier run wrote under the same plan are taken over, so a killed run goes on where it was.
Their bytes are verified by the gate (python -m tasks.gate_hidden_states), not here.
"""

from tasks.common.params import Params
from tasks.common.stage import run_stage
from tasks.common.tracking import Tracker
from tasks.dump_hidden_states.dump import dump


def main(params: Params, tracker: Tracker) -> None:
    for split, totals in dump(params).items():
        print(
            f"{split}: {totals['samples']} samples, {totals['tokens']} tokens, {totals['bytes'] / 1e6:.0f} MB "
            f"in {totals['shards']} shards ({totals['taken_over']} of them from an earlier run)"
        )
        tracker.log_metrics({f"hidden_states/{split}_{name}": value for name, value in totals.items()})


if __name__ == "__main__":
    run_stage("dump_hidden_states", main)
