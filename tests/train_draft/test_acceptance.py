"""Held-out figures, pooled over positions and rounds whatever the batches."""

import pytest
import torch

from tasks.common.files import ARTIFACTS, write_jsonl
from tasks.common.responses import RESPONSES, Response
from tasks.common.target import load_model
from tasks.common.walk import correct_drafts, round_starts, walk
from tasks.dump_hidden_states.dump import dump
from tasks.train_draft.acceptance import measure
from tasks.train_draft.prepare import prepare_training

SETTINGS = {"draft_vocab_size": 90, "max_steps": 30, "batch_tokens": 64, "warmup_steps": 2}


@pytest.fixture
def trainer(project, tiny_params):
    """A draft that has learnt its held-out answers by heart: with no round accepting anything, every figure would be trivial."""
    params = tiny_params(train_draft=SETTINGS)
    model = load_model(params.target)
    prompts = [torch.randint(3, 60, (4 + n,), generator=torch.Generator().manual_seed(n)) for n in range(9)]
    answers = [
        model.generate(prompt[None], max_new_tokens=17, min_new_tokens=17, do_sample=False)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    for split, count in (("train", 9), ("heldout", 5)):
        rows = [
            Response(f"{split}-{n}", "chat", [], prompts[n].tolist(), answers[n], "x", "length") for n in range(count)
        ]
        write_jsonl(RESPONSES / f"{split}.jsonl", (row.to_row() for row in rows))
    dump(params)
    trainer, _ = prepare_training(params, ARTIFACTS / "draft")
    for _ in trainer.steps():
        pass
    return trainer


def measured(trainer, batch_tokens: int, num_steps: int = 3):
    trainer.heldout.batch_tokens = batch_tokens
    return measure(trainer.draft, trainer.head, trainer.vocab_map, trainer.heldout, 3, num_steps)


def test_figures_do_not_depend_on_the_batches(trainer):
    one_by_one, together = measured(trainer, 1), measured(trainer, 4096)
    assert one_by_one.loss == pytest.approx(together.loss, rel=1e-5)
    assert (one_by_one.rounds, one_by_one.survival) == (together.rounds, together.survival)
    assert one_by_one.accuracy_by_position == together.accuracy_by_position


def test_predicted_acceptance_length_is_one_plus_correct_drafts_per_round(trainer):
    rounds = []
    for index in trainer.heldout.usable:
        samples = trainer.heldout.read([index]).samples
        rows = round_starts(samples)
        rounds += walk(rows, correct_drafts(samples, rows, trainer.draft.propose(samples, rows, 3, trainer.vocab_map)))
    found = measured(trainer, 4096)
    assert found.rounds == len(rounds)
    assert found.predicted_accept_length == 1 + sum(rounds) / len(rounds) > 1
    assert found.survival == [sum(accepted > i for accepted in rounds) / len(rounds) for i in range(3)]
    assert sum(found.survival) == pytest.approx(found.predicted_accept_length - 1)


def test_a_chain_of_one_accepts_at_most_one(trainer):
    found = measured(trainer, 4096, num_steps=1)
    assert 1 < found.predicted_accept_length <= 2
    assert len(found.survival) == 1
