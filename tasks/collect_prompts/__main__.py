"""Collect the prompts: two disjoint splits, train and heldout, in artifacts/prompts.

    python -m tasks.collect_prompts       # params.yaml, section prompts -> artifacts/prompts

Rows that cannot be used are written to dropped.jsonl with source, line and reason.
"""

from tasks.collect_prompts.collect import collect_prompts
from tasks.common.params import Params
from tasks.common.stage import run_stage
from tasks.common.target import load_tokenizer
from tasks.common.tracking import Tracker


def main(params: Params, tracker: Tracker) -> None:
    manifest = collect_prompts(params.prompts, load_tokenizer())
    for split, part in manifest.items():
        print(
            f"{split}: {part['prompts']} prompts of {part['kept']} kept and {part['read']} read, "
            f"dropped: {part['dropped'] or 'none'}; by domain: {part['domains']}"
        )
        tracker.log_metrics({f"prompts/{split}": part["prompts"]})


if __name__ == "__main__":
    run_stage("collect_prompts", main)
