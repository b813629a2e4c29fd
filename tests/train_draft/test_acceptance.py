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

STEPS = 4
SETTINGS = {
    "draft_vocab_size": 90,
    "max_steps": 50,
    "learning_rate": 0.003,
    "batch_tokens": 256,
    "warmup_steps": 2,
    "ttt_length": STEPS,
}


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


def measured(trainer, batch_tokens: int):
    trainer.heldout.batch_tokens = batch_tokens
    return measure(trainer.draft, trainer.head, trainer.vocab_map, trainer.heldout, STEPS)


def rounds_of(trainer, num_steps: int) -> list[int]:
    """Correct drafts of each round that a server spends which drafts so many tokens."""
    rounds = []
    for index in trainer.heldout.usable:
        samples = trainer.heldout.read([index]).samples
        rows = round_starts(samples)
        proposed = trainer.draft.propose(samples, rows, num_steps, trainer.vocab_map)
        rounds += walk(rows, correct_drafts(samples, rows, proposed))
    return rounds


def test_figures_do_not_depend_on_the_batches(trainer):
    one_by_one, together = measured(trainer, 1), measured(trainer, 4096)
    assert one_by_one.loss == pytest.approx(together.loss, rel=1e-5)
    assert one_by_one.predicted_accept_lengths == together.predicted_accept_lengths
    assert (one_by_one.rounds, one_by_one.survival) == (together.rounds, together.survival)
    assert one_by_one.accuracy_by_position == together.accuracy_by_position


def test_the_acceptance_length_for_each_number_of_steps_is_that_of_a_walk_with_so_many(trainer):
    found = measured(trainer, 4096).predicted_accept_lengths
    walks = [rounds_of(trainer, steps) for steps in range(1, STEPS + 1)]
    assert found == [1 + sum(rounds) / len(rounds) for rounds in walks]
    assert all(1 < length <= 1 + steps for steps, length in enumerate(found, 1))
    # None of them is told by the longest walk's survival: with fewer steps rounds start elsewhere.
    cut = [1 + sum(min(correct, steps) for correct in walks[-1]) / len(walks[-1]) for steps in range(1, STEPS)]
    assert all(ours != pytest.approx(theirs) for ours, theirs in zip(found, cut, strict=False))


def test_survival_is_of_the_longest_chain(trainer):
    found, rounds = measured(trainer, 4096), rounds_of(trainer, STEPS)
    assert found.rounds == len(rounds)
    assert found.survival == [sum(accepted > i for accepted in rounds) / len(rounds) for i in range(STEPS)]
    assert sum(found.survival) == pytest.approx(found.predicted_accept_lengths[-1] - 1)
