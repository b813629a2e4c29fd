"""What half the bytes cost a draft: drafts trained on states stored as bfloat16 and as float8, same seeds, same order."""

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
from tasks.train_draft.trainer import Trainer

_SEEDS = (0, 1, 2)


def measure_float8(args: argparse.Namespace, params: Params, _out: Path) -> dict[str, Any]:
    """Figures of both; how far seeds are apart says what a difference between types is worth."""
    collect_prompts(params.prompts, load_tokenizer())
    answers = regenerate(params)["splits"]
    found: dict[str, Any] = {"answers": {split: counts["answers"] for split, counts in answers.items()}}
    stored: dict[str, HiddenStates] = {}
    real: DraftData | None = None  # held-out states as the target computes them, which are what a server feeds a draft
    for storage_dtype in ("bfloat16", "float8"):
        settings = params.model_copy(
            update={"dump": params.dump.model_copy(update={"engine": "transformers", "storage_dtype": storage_dtype})}
        )
        train = dump(settings)["train"]
        trainers = [_train(settings, seed, Path("artifacts") / f"draft-{storage_dtype}-{seed}") for seed in _SEEDS]
        kept = HIDDEN_STATES.with_name(f"hidden_states_{storage_dtype}")
        HIDDEN_STATES.rename(kept)
        stored[storage_dtype] = HiddenStates(kept / "heldout")
        found[storage_dtype] = {"bytes_per_token": train["bytes"] // train["tokens"]}
        for seed, (trainer, tokens_per_s) in zip(_SEEDS, trainers, strict=True):
            trainer.heldout.states = stored[storage_dtype]
            real = real or trainer.heldout
            ttt_length = params.train_draft.ttt_length
            served = measure(trainer.draft, trainer.head, trainer.vocab_map, real, ttt_length)
            found[f"{storage_dtype}, seed {seed}"] = {
                "training_tokens_per_s": tokens_per_s,
                "predicted_accept_length": round(trainer.curve[-1]["heldout"]["predicted_accept_lengths"][-1], 3),
                "heldout_loss": round(trainer.curve[-1]["heldout"]["loss"], 4),
                "predicted_accept_length_on_bfloat16_states": round(served.predicted_accept_lengths[-1], 3),
                "rounds": served.rounds,
            }
    contract = stored["bfloat16"].contract
    pairs = [[states.read(index) for index in range(len(states))] for states in (stored["float8"], stored["bfloat16"])]
    found["float8 / bfloat16"] = compare(*[[(s.aux, s.last) for s in samples] for samples in pairs], contract)
    return found


def _train(params: Params, seed: int, folder: Path) -> tuple[Trainer, int]:
    """A trained draft, and tokens/s with its evaluations."""
    seeded = params.model_copy(update={"train_draft": params.train_draft.model_copy(update={"seed": seed})})
    trainer, _ = prepare_training(seeded, folder)
    began = time.perf_counter()
    tokens = sum(step.tokens for step in trainer.steps())
    return trainer, round(tokens / (time.perf_counter() - began))
