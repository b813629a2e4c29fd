"""Fixed tiny runs whose losses and acceptance are committed: who changes arithmetic, order of the data or optimiser sees it.

To renew golden_losses.json after a change that is meant to alter training, and say in the commit why it did:

    RENEW_GOLDEN=1 python -m pytest --import-mode=importlib tests/train_draft/test_golden.py
"""

import os
from pathlib import Path

import pytest
import torch

from tasks.common.files import ARTIFACTS, read_json, write_json, write_jsonl
from tasks.common.responses import RESPONSES, Response
from tasks.common.target import load_model
from tasks.dump_hidden_states.dump import dump
from tasks.train_draft.evaluation import Step
from tasks.train_draft.prepare import prepare_training

GOLDEN = Path(__file__).with_name("golden_losses.json")
SETTINGS = {
    "draft_vocab_size": 140,
    "max_steps": 50,
    "batch_tokens": 160,
    "warmup_steps": 5,
    "learning_rate": 0.002,
    "checkpoint_every": 50,
    "evaluate_every": 25,
}


def golden_run(params) -> dict:
    """Loss and accuracy of every step, and what is measured at the evaluations."""
    generator = torch.Generator().manual_seed(11)
    for split, count in (("train", 40), ("heldout", 6)):
        rows = [
            Response(
                f"{split}-{n}",
                "chat",
                [],
                torch.randint(3, 60, (4 + n % 7,), generator=generator).tolist(),
                torch.randint(3, 160, (9 + n % 11,), generator=generator).tolist(),
                "x",
                "length",
            )
            for n in range(count)
        ]
        write_jsonl(RESPONSES / f"{split}.jsonl", (row.to_row() for row in rows))
    steps = trained(params)
    return {
        "loss": [round(step.loss, 6) for step in steps],
        "accuracy_by_position": [[round(value, 6) for value in step.accuracy_by_position] for step in steps],
        "heldout_loss": [round(step.heldout.loss, 6) for step in steps if step.heldout],
        "predicted_accept_lengths": predictions(steps),
    }


def golden_acceptance(params) -> list[list[float]]:
    """Predicted acceptance lengths at the evaluations on answers that the target would give, and that were trained on."""
    generator, target = torch.Generator().manual_seed(11), load_model(params.target)
    prompts = [torch.randint(3, 60, (4 + n,), generator=generator) for n in range(6)]
    answers = [target.generate(p[None], do_sample=False, max_new_tokens=16)[0, len(p) :] for p in prompts]
    for split in ("train", "heldout"):
        rows = [
            Response(f"{split}-{n}", "chat", [], prompt.tolist(), answer.tolist(), "x", "length")
            for n, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
        ]
        write_jsonl(RESPONSES / f"{split}.jsonl", (row.to_row() for row in rows))
    return predictions(trained(params))


def predictions(steps: list[Step]) -> list[list[float]]:
    """At each evaluation, with chains of 1, 2, ... steps."""
    return [[round(value, 6) for value in s.heldout.predicted_accept_lengths] for s in steps if s.heldout]


def trained(params) -> list[Step]:
    """Every step on the answers that were written."""
    dump(params)
    trainer, _ = prepare_training(params, ARTIFACTS / "draft")
    return list(trainer.steps())


def test_the_golden_run_is_reproduced(project, tiny_params):
    found = golden_run(tiny_params(train_draft=SETTINGS))
    found["seen_predicted_accept_lengths"] = golden_acceptance(tiny_params(train_draft=SETTINGS))
    if os.environ.get("RENEW_GOLDEN"):
        write_json(GOLDEN, found)
    expected = read_json(GOLDEN)
    # Sums are taken in another order on another machine; a changed term is larger at once.
    assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4)
    assert found["heldout_loss"] == pytest.approx(expected["heldout_loss"], rel=1e-4)
    for of_step, of_golden in zip(found["accuracy_by_position"], expected["accuracy_by_position"], strict=True):
        assert of_step == pytest.approx(of_golden, abs=0.02)  # a tie may fall the other way
    for name in ("predicted_accept_lengths", "seen_predicted_accept_lengths"):
        for evaluated, of_golden in zip(found[name], expected[name], strict=True):
            assert evaluated == pytest.approx(of_golden, abs=0.15), name
