"""Soft cross-entropy over the draft vocabulary, against sums written out position by position in float64."""

import pytest
import torch

from tasks.common.draft import DraftConfig, Eagle3Draft
from tasks.common.hidden_states import Sample
from tasks.common.packing import PackedSamples
from tasks.common.vocab_map import VocabMap
from tasks.train_draft.data import Batch
from tasks.train_draft.loss import ttt_losses, weighted_loss
from tasks.train_draft.target_head import RestrictedHead, TargetHead

VOCAB, HIDDEN = 30, 12


class Weights:
    """A target of random head and norm."""

    def __init__(self):
        self.head, self.norm = torch.randn(VOCAB, HIDDEN), torch.rand(HIDDEN) + 0.5

    def lm_head(self):
        return self.head

    def final_norm(self):
        return self.norm


class Shape:
    rms_norm_eps = 1e-5


def setup(draft_vocab: int, normed: bool = True):
    torch.manual_seed(0)
    config = DraftConfig(
        HIDDEN, 16, 2, 1, 6, 2, VOCAB, draft_vocab, 1e-5, {"rope_type": "default", "rope_theta": 10.0}, 64
    )
    draft = Eagle3Draft(config, torch.randn(VOCAB, HIDDEN))
    for parameter in draft.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.4)
    vocab_map = VocabMap(torch.randperm(VOCAB)[:draft_vocab].sort().values, VOCAB, "test")
    target_head = TargetHead(Weights(), Shape(), normed, "cpu")
    samples = []
    for name, prompt, answer in (("a", 3, 6), ("b", 1, 4)):
        tokens = prompt + answer
        samples.append(
            Sample(
                name,
                torch.randint(VOCAB, (tokens,), dtype=torch.int32),
                torch.tensor([0] * prompt + [1] * answer, dtype=torch.uint8),
                torch.randn(tokens, 2, HIDDEN),
                torch.randn(tokens, HIDDEN),
            )
        )
    packed = PackedSamples.of(samples)
    argmax = torch.where(packed.supervised(-1), target_head.argmax(packed.last), -1)
    return draft, target_head, vocab_map, Batch(packed, argmax)


def positions(batch: Batch, step: int):
    """(row on the token axis, position whose distribution it learns) of every supervised position, by hand."""
    for start, end in batch.samples.bounds:
        for t in range(start, end):
            if t + 2 + step < end and batch.samples.loss_mask[t + 2 + step]:
                yield t, t + 1 + step


@pytest.mark.parametrize("draft_vocab", [12, VOCAB])
def test_loss_is_the_mean_over_positions_that_give_loss(draft_vocab):
    draft, target_head, vocab_map, batch = setup(draft_vocab)
    outputs = list(draft(batch.samples, 3))
    total = 0.0
    for step, found in enumerate(ttt_losses(draft, RestrictedHead(target_head, vocab_map), batch, 3)):
        rows, hidden = outputs[step]
        losses, right, supervised = [], 0, 0
        for t, source in positions(batch, step):
            supervised += 1
            target = target_head.lm_head.double() @ batch.samples.last[source].double()
            if int(target.argmax()) not in vocab_map.target_ids:
                continue
            logits = draft.logits(hidden[rows == t])[0].double()
            wanted = target[vocab_map.target_ids].softmax(-1)
            losses.append(-(wanted * logits.log_softmax(-1)).sum())
            right += int(vocab_map.target_ids[logits.argmax()]) == int(target.argmax())
        assert (found.supervised, found.loss_positions, found.correct) == (supervised, len(losses), right)
        total += 0.8**step * sum(losses) / len(losses)
    found = weighted_loss(list(ttt_losses(draft, RestrictedHead(target_head, vocab_map), batch, 3)))
    torch.testing.assert_close(found.double(), total, rtol=1e-5, atol=1e-5)


def test_argmax_outside_the_draft_vocabulary_gives_no_loss_and_counts_as_a_miss():
    draft, target_head, vocab_map, batch = setup(draft_vocab=12)
    known = {int(t) for t in vocab_map.target_ids}
    outside = torch.tensor([int(token) >= 0 and int(token) not in known for token in batch.target_argmax])
    assert outside.any()
    (found,) = ttt_losses(draft, RestrictedHead(target_head, vocab_map), batch, 1)
    inside = [source for _, source in positions(batch, 0) if not outside[source]]
    assert found.loss_positions == len(inside) < found.supervised
    assert found.correct <= len(inside)


def test_the_frozen_norm_is_applied_exactly_when_the_stored_state_is_before_it():
    _, normed, _, batch = setup(VOCAB, normed=True)
    _, before, _, _ = setup(VOCAB, normed=False)
    last = batch.samples.last
    assert torch.equal(normed.normed(last), last)
    expected = last / (last.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * before.norm
    torch.testing.assert_close(before.normed(last), expected)


def test_loss_does_not_depend_on_how_samples_are_packed():
    draft, target_head, vocab_map, batch = setup(draft_vocab=20)
    head = RestrictedHead(target_head, vocab_map)
    together = list(ttt_losses(draft, head, batch, 3))
    parts = []
    for start, end in batch.samples.bounds:
        alone = PackedSamples(
            ("x",),
            ((0, end - start),),
            *(getattr(batch.samples, name)[start:end] for name in ("input_ids", "loss_mask", "aux", "last")),
        )
        parts.append(list(ttt_losses(draft, head, Batch(alone, batch.target_argmax[start:end]), 3)))
    for step, whole in enumerate(together):
        torch.testing.assert_close(whole.total, sum(part[step].total for part in parts))
        assert whole.loss_positions == sum(part[step].loss_positions for part in parts)
