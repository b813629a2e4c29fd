"""What half the bytes cost a draft: one trained on states stored as bfloat16, one on float8, same seed, same order."""

import argparse
import time
from pathlib import Path
from typing import Any

from infra.gpu.states_compared import compare
from tasks.collect_prompts.collect import collect_prompts
from tasks.common.hidden_states import HIDDEN_STATES, HiddenStates
from tasks.common.params import Params
from tasks.common.target import load_tokenizer
from tasks.dump_hidden_states.dump import dump
from tasks.regenerate_responses.regenerate import regenerate
from tasks.train_draft.acceptance import measure
from tasks.train_draft.data import DraftData
from tasks.train_draft.prepare import prepare_training


def measure_float8(args: argparse.Namespace, params: Params, _out: Path) -> dict[str, Any]:
    """Figures of both."""
    collect_prompts(params.prompts, load_tokenizer())
    answers = regenerate(params)["splits"]
    found: dict[str, Any] = {"answers": {split: counts["answers"] for split, counts in answers.items()}}
    stored: dict[str, HiddenStates] = {}
    real: DraftData | None = None  # held-out states as the target computes them, which are what a server feeds a draft
    for storage_dtype in ("bfloat16", "float8"):
        settings = params.model_copy(
            update={"dump": params.dump.model_copy(update={"engine": "transformers", "storage_dtype": storage_dtype})}
        )
        totals = dump(settings)
        trainer, _ = prepare_training(settings, Path("artifacts") / f"draft-{storage_dtype}")
        began = time.perf_counter()
        tokens = sum(step.tokens for step in trainer.steps())
        figures = {
            "bytes": sum(split["bytes"] for split in totals.values()),
            "bytes_per_token": totals["train"]["bytes"] // totals["train"]["tokens"],
            "training_tokens_per_s": round(tokens / (time.perf_counter() - began)),
            "predicted_accept_length": [round(p["heldout"]["predicted_accept_length"], 3) for p in trainer.curve],
            "heldout_loss": [round(p["heldout"]["loss"], 4) for p in trainer.curve],
            "survival": trainer.best["heldout"]["survival"],
        }
        found[storage_dtype] = figures
        kept = HIDDEN_STATES.with_name(f"hidden_states_{storage_dtype}")
        HIDDEN_STATES.rename(kept)
        stored[storage_dtype] = trainer.heldout.states = HiddenStates(kept / "heldout")
        real = real or trainer.heldout
        steps = params.train_draft.ttt_length, params.serve.num_steps
        served = measure(trainer.draft, trainer.head, trainer.vocab_map, real, *steps)
        figures["last_draft_on_bfloat16_states"] = {
            "predicted_accept_length": round(served.predicted_accept_length, 3),
            "loss": round(served.loss, 4),
            "rounds": served.rounds,
        }
    contract = stored["bfloat16"].contract
    pairs = [[states.read(index) for index in range(len(states))] for states in (stored["float8"], stored["bfloat16"])]
    found["float8 / bfloat16"] = compare(*[[(s.aux, s.last) for s in samples] for samples in pairs], contract)
    return found
