"""Places of a packed batch, what a position sees, and walks over the draft's own chains."""

import pytest
import torch

from tasks.common.draft import Eagle3Draft
from tasks.common.hidden_states import Sample
from tasks.common.packing import PackedSamples
from tasks.common.vocab_map import VocabMap
from tasks.common.walk import correct_drafts, round_starts, walk
from tests.reference import HIDDEN, VOCAB, Reference, forced_tokens, make_batch, make_draft, make_map, make_sample


def test_mask_shifts_with_the_targets():
    sample = make_sample("a", prompt=4, answer=3)
    packed = PackedSamples.of([sample])
    # Tokens 4, 5, 6 are the assistant's. Step i at t predicts t + 2 + i.
    assert packed.supervised(0).nonzero().flatten().tolist() == [2, 3, 4]
    assert packed.supervised(1).nonzero().flatten().tolist() == [1, 2, 3]
    assert packed.supervised(2).nonzero().flatten().tolist() == [0, 1, 2]


def test_no_supervision_past_a_turn_or_into_the_next_sample():
    first, second = make_sample("a", prompt=2, answer=2, turns=2), make_sample("b", prompt=0, answer=3)
    packed = PackedSamples.of([first, second])
    # a: 0 0 1 1 0 0 1 1 | b: 1 1 1
    assert packed.supervised(0).nonzero().flatten().tolist() == [0, 1, 4, 5, 8]
    assert packed.supervised(2).nonzero().flatten().tolist() == [2, 3]


def unrolled(draft: Eagle3Draft, samples: list[Sample], num_steps: int) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """Rows and what the head reads there at each step."""
    batch = make_batch(samples, num_steps)
    return batch.inputs.rows.index, draft.unroll(batch.inputs, batch.samples.aux)


def test_a_sample_is_computed_alike_alone_and_packed():
    torch.manual_seed(2)
    draft, samples = make_draft(), [make_sample(str(i), 3 + i, 5) for i in range(3)]
    alone = [unrolled(draft, [sample], 3)[1] for sample in samples]
    for step, hidden in enumerate(unrolled(draft, samples, 3)[1]):
        torch.testing.assert_close(hidden, torch.cat([steps[step] for steps in alone]))


def test_a_position_does_not_see_what_comes_after_it():
    torch.manual_seed(3)
    draft, sample = make_draft(), make_sample("a", 2, 8)
    changed = Sample(**{**vars(sample), "aux": sample.aux.clone(), "input_ids": sample.input_ids.clone()})
    changed.aux[6:] += 1.0
    changed.input_ids[7:] = (changed.input_ids[7:] + 1) % VOCAB
    (rows, (before,)), (_, (after,)) = (unrolled(draft, [one], 1) for one in (sample, changed))
    assert torch.equal(before[rows < 6], after[rows < 6])
    assert not torch.allclose(before[rows >= 6], after[rows >= 6])


def test_recomputed_activations_give_the_same_gradients():
    torch.manual_seed(6)
    draft, batch = make_draft(), make_batch([make_sample("a", 3, 6), make_sample("b", 2, 5)], 4)
    gradients = []
    for recompute in (False, True):
        draft.zero_grad()
        torch.stack(draft.unroll(batch.inputs, batch.samples.aux, recompute)).square().sum().backward()
        gradients.append([p.grad for name, p in draft.named_parameters() if name != "lm_head.weight"])
    assert all(torch.equal(kept, again) for kept, again in zip(*gradients, strict=True))


def test_parameters_bear_the_names_of_the_served_checkpoint():
    assert set(make_draft().state_dict()) == {
        "fc.weight",
        "norm.weight",
        "lm_head.weight",
        "midlayer.input_layernorm.weight",
        "midlayer.hidden_norm.weight",
        "midlayer.post_attention_layernorm.weight",
        *(f"midlayer.self_attn.{name}_proj.weight" for name in "qkvo"),
        *(f"midlayer.mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
    }


def test_a_draft_that_was_not_loaded_is_nan():
    config = make_draft().config
    draft = Eagle3Draft(config, torch.randn(VOCAB, HIDDEN))
    assert all(parameter.isnan().all() for parameter in draft.parameters())


def brute_force_walk(draft: Eagle3Draft, vocab_map: VocabMap, sample: Sample, num_steps: int) -> list[int]:
    """Serve one answer token by token: at each round run the draft anew on its own tokens, accept, advance."""
    reference, accepted = Reference(draft), []
    ids, end = sample.input_ids.tolist(), sample.num_tokens
    first = sample.loss_mask.tolist().index(1)
    t = first - 1
    while t + 2 < end:
        chain: list[int] = []
        prefix = Sample(**{**vars(sample), "input_ids": sample.input_ids[: t + 2]})
        for _ in range(num_steps):
            read = forced_tokens(prefix, 1)
            read += [torch.full((t + 1,), token) for token in chain]
            hidden = reference.layer_outputs(prefix, read)[-1][t]
            chain.append(int(vocab_map.target_ids[reference.logits(hidden).argmax()]))
        right = 0
        while right < num_steps and t + 2 + right < end and chain[right] == ids[t + 2 + right]:
            right += 1
        accepted.append(right)
        t += right + 1
    return accepted


@pytest.mark.parametrize("norm_output", [False, True])
def test_walk_equals_serving_token_by_token(norm_output):
    torch.manual_seed(4)
    draft, vocab_map, num_steps = make_draft(draft_vocab=24, norm_output=norm_output), make_map(24), 3
    samples = []
    for i in range(3):
        sample = make_sample(str(i), prompt=3 + i, answer=14)
        # An answer that the draft often continues rightly: else no round accepts anything.
        for t in range(2 + i, sample.num_tokens - 2):
            if torch.rand(()) < 0.7:
                chain = draft.propose(PackedSamples.of([sample]), torch.tensor([t]), 1, vocab_map)
                sample.input_ids[t + 2] = int(chain[0, 0])
        samples.append(sample)
    expected = [accepted for sample in samples for accepted in brute_force_walk(draft, vocab_map, sample, num_steps)]
    assert 0 in expected and max(expected) >= 2

    packed = PackedSamples.of(samples)
    rows = round_starts(packed)
    correct = correct_drafts(packed, rows, draft.propose(packed, rows, num_steps, vocab_map))
    assert list(walk(rows, correct)) == expected


def test_each_turn_is_walked_from_its_first_generated_token():
    sample = make_sample("a", prompt=3, answer=4, turns=2)
    rows = round_starts(PackedSamples.of([sample]))
    # Turns are tokens 3..6 and 10..13; a round needs x_{t+1} verified and x_{t+2} to predict.
    assert rows.tolist() == [2, 3, 4, 9, 10, 11]
    assert list(walk(rows, torch.tensor([1, 3, 0, 2, 0, 0]))) == [1, 0, 2]


def test_vocab_map_survives_saving(tmp_path):
    torch.manual_seed(5)
    vocab_map = make_map()
    vocab_map.save(tmp_path / "map.safetensors")
    loaded = VocabMap.load(tmp_path / "map.safetensors")
    assert torch.equal(loaded.target_ids, vocab_map.target_ids)
    assert (loaded.vocab_size, loaded.inputs_sha256) == (VOCAB, "test")
    assert torch.equal(torch.arange(24) + loaded.d2t, vocab_map.target_ids)
    assert loaded.t2d.nonzero().flatten().equal(vocab_map.target_ids)
