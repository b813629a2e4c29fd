"""Let the target answer every prompt: artifacts/prompts -> artifacts/responses.

    python -m tasks.regenerate_responses  # params.yaml, sections target and regenerate

Answers are kept as they come (journal.jsonl); a killed run goes on from there when started again.
"""

from tasks.common.params import Params
from tasks.common.stage import run_stage
from tasks.common.tracking import Tracker
from tasks.regenerate_responses.regenerate import regenerate


def main(params: Params, tracker: Tracker) -> None:
    manifest = regenerate(params)
    for split, counts in manifest["splits"].items():
        print(f"{split}: {counts}")
        tracker.log_metrics({f"responses/{split}_{name}": count for name, count in counts.items()})


if __name__ == "__main__":
    run_stage("regenerate_responses", main)
