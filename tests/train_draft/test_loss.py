"""What gives loss, what counts in accuracy, and what the loss is divided by; the numbers are in test_reference.py."""

import pytest
import torch

from tasks.train_draft import loss
from tasks.train_draft.step import TrainStep, TttLoss
from tests.reference import (
    VOCAB,
    RandomTarget,
    make_batch,
    make_draft,
    make_map,
    make_sample,
    own_head,
)


def setup(draft_vocab: int = 12):
    """A step, and what makes a batch of samples for it."""
    torch.manual_seed(0)
    target, draft, vocab_map = RandomTarget(), make_draft(draft_vocab), make_map(draft_vocab)
    step = TrainStep(draft, own_head(target, vocab_map))
    return draft, step, vocab_map, lambda samples, steps=3: make_batch(samples, steps, target, vocab_map)


def test_argmax_outside_the_draft_vocabulary_gives_no_loss_and_counts_as_a_miss():
    _, step, vocab_map, batch_of = setup()
    batch = batch_of([make_sample("a", 3, 9)], 1)
    written = batch.target_argmax[2:11]
    inside = torch.isin(written, vocab_map.target_ids)
    assert 0 < inside.sum() < len(written)
    _, sums = step(batch)
    assert sums.supervised.tolist() == [9]
    assert sums.loss_positions.tolist() == [inside.sum()]
    assert sums.correct.tolist()[0] <= inside.sum()


def test_nothing_supervised_is_no_loss_and_no_gradient():
    draft, step, _, batch_of = setup()
    found, sums = step(batch_of([make_sample("a", 5, 0)]))
    assert found == 0
    assert sums.supervised.tolist() == sums.loss_positions.tolist() == [0, 0, 0]
    assert all(not parameter.grad.any() for parameter in draft.parameters())


def test_sums_do_not_depend_on_how_samples_are_packed():
    _, step, _, batch_of = setup(20)
    samples = [make_sample("a", 3, 6), make_sample("b", 1, 4), make_sample("c", 4, 2, turns=2)]
    _, together = step(batch_of(samples))
    alone = [step(batch_of([sample]))[1] for sample in samples]
    torch.testing.assert_close(together.loss, sum(sums.loss for sums in alone))
    for name in ("loss_positions", "supervised", "correct"):
        assert torch.equal(getattr(together, name), sum(getattr(sums, name) for sums in alone))


def test_gradients_of_two_batches_over_their_joint_positions_are_those_of_one_joint_batch():
    draft, step, _, batch_of = setup(VOCAB)
    first, second = [make_sample("a", 3, 6)], [make_sample("b", 1, 4), make_sample("c", 2, 8)]
    joint, _ = step(batch_of(first + second))
    expected = [parameter.grad.clone() for parameter in draft.parameters()]
    draft.zero_grad()
    batches = [batch_of(first), batch_of(second)]
    positions = sum(step.loss_positions(batch) for batch in batches)
    losses = [step(batch, positions)[0] for batch in batches]
    torch.testing.assert_close(sum(losses), joint)
    for parameter, gradient in zip(draft.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("normed", [False, True])
def test_the_frozen_norm_is_applied_exactly_when_the_stored_state_is_before_it(normed):
    torch.manual_seed(1)
    target, last = RandomTarget(last_is_normed=normed), torch.randn(7, 16)
    expected = target.logits(last)
    torch.testing.assert_close(own_head(target, make_map(VOCAB)).logits(last).double(), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(target.own_head().argmax(last), expected.argmax(-1))


def test_without_gradient_the_same_sums_are_found_and_none_is_computed(monkeypatch):
    draft, step, _, batch_of = setup()
    batch = batch_of([make_sample("a", 3, 6)])
    _, expected = step(batch)
    asked, real = [], loss.of_chunk
    monkeypatch.setattr(loss, "of_chunk", lambda *args: asked.append(args[-1]) or real(*args))
    with torch.no_grad():
        found, sums = TttLoss(draft, step.module.head)(batch, batch.lessons.loss_positions)
    assert asked == [False]
    assert not found.requires_grad
    assert torch.equal(sums.loss, expected.loss) and torch.equal(sums.correct, expected.correct)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_tie_goes_to_the_first_token_as_an_argmax_does(dtype):
    logits = torch.tensor([[[0.0, 1.0, 1.0], [0.0, 1.0, 2.0]]] * 2, dtype=dtype)
    weights = torch.ones(2, 2)
    _, correct, _ = loss.of_chunk(logits, torch.zeros(2, 3), torch.tensor([1, 2]), weights, False)
    assert correct.tolist() == [[True, False], [False, True]]
