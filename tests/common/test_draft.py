"""The packed test-time-training forward against a slow reference: one sample at a time, explicit masks, float64."""

import math

import pytest
import torch
import torch.nn.functional as F

from tasks.common.draft import DraftConfig, Eagle3Draft
from tasks.common.hidden_states import Sample
from tasks.common.packing import PackedSamples
from tasks.common.vocab_map import VocabMap
from tasks.common.walk import correct_drafts, round_starts, walk

VOCAB, HIDDEN, AUX = 40, 16, 3
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}


def make_draft(
    draft_vocab: int = 24, heads: int = 4, kv_heads: int = 2, head_dim: int = 4, rope: dict | None = None, **norms
):
    """A tiny draft with random weights, float32.

    Args:
        norms: of `DraftConfig`: target_hidden_size, norm_before_fc, fc_norm, norm_output.
    """
    config = DraftConfig(
        hidden_size=HIDDEN,
        intermediate_size=24,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        num_aux=AUX,
        vocab_size=VOCAB,
        draft_vocab_size=draft_vocab,
        rms_norm_eps=1e-5,
        rope_parameters=rope or {"rope_type": "default", "rope_theta": 100.0},
        max_position_embeddings=64,
        **norms,
    )
    draft = Eagle3Draft(config, torch.randn(VOCAB, HIDDEN))
    for parameter in draft.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.3)
    return draft


def make_sample(name: str, prompt: int, answer: int, turns: int = 1, width: int = HIDDEN) -> Sample:
    """Random states over `turns` turns of `prompt` tokens asked and `answer` tokens answered."""
    mask = torch.tensor(([0] * prompt + [1] * answer) * turns, dtype=torch.uint8)
    tokens = len(mask)
    return Sample(
        id=name,
        input_ids=torch.randint(VOCAB, (tokens,), dtype=torch.int32),
        loss_mask=mask,
        aux=torch.randn(tokens, AUX, width),
        last=torch.randn(tokens, HIDDEN),
    )


def make_map(draft_vocab: int = 24) -> VocabMap:
    return VocabMap(torch.randperm(VOCAB)[:draft_vocab].sort().values, VOCAB, "test")


class Reference:
    """Contract, sections 2 and 3, read literally; every step recomputes all before it, nothing is cached."""

    def __init__(self, draft: Eagle3Draft):
        self.config = draft.config
        self.embed = draft.embed_tokens.double()
        self.w = {name: p.detach().double().requires_grad_() for name, p in draft.named_parameters()}
        self.inv_freq, self.scale = draft.rotary.inv_freq.double(), draft.rotary.attention_scaling

    def norm(self, x, name):
        return x / (x.pow(2).mean(-1, keepdim=True) + self.config.rms_norm_eps).sqrt() * self.w[name]

    def rope(self, x, positions):
        """Rotate pairs (j, j + d/2) of [L, heads, d] as complex numbers."""
        angle = (positions[:, None] * self.inv_freq)[:, None]
        half = x.shape[-1] // 2
        a, b = x[..., :half], x[..., half:]
        return self.scale * torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], -1)

    def layer_outputs(self, sample: Sample, tokens: list[torch.Tensor]) -> list[torch.Tensor]:
        """Output of each step at every position 0..L-2, [L - 1, H]; `tokens[i]` [L - 1] is what step i reads."""
        c, n = self.config, sample.num_tokens - 1
        position = torch.arange(n)
        state = self.combine(sample.aux[:n].double())
        keys, values, masks, outputs = [], [], [], []
        for step, read in enumerate(tokens):
            embedding = self.norm(self.embed[read], "midlayer.input_layernorm.weight")
            x = torch.cat([embedding, self.norm(state, "midlayer.hidden_norm.weight")], -1)
            q, k, v = (
                (x @ self.w[f"midlayer.self_attn.{p}_proj.weight"].T).view(n, -1, c.head_dim) for p in ("q", "k", "v")
            )
            q, k = self.rope(q, position + step), self.rope(k, position + step)
            groups = c.num_attention_heads // c.num_key_value_heads
            keys.append(k.repeat_interleave(groups, 1))
            values.append(v.repeat_interleave(groups, 1))
            # Step 0: all positions up to this one. Later steps: only this position's own key.
            masks.append(position[None] <= position[:, None] if step == 0 else position[None] == position[:, None])
            scores = torch.einsum("qhd,khd->hqk", q, torch.cat(keys)) / math.sqrt(c.head_dim)
            shares = scores.masked_fill(~torch.cat(masks, dim=1), -torch.inf).softmax(-1)
            attended = torch.einsum("hqk,khd->qhd", shares, torch.cat(values)).reshape(n, -1)
            state = state + attended @ self.w["midlayer.self_attn.o_proj.weight"].T
            y = self.norm(state, "midlayer.post_attention_layernorm.weight")
            gate, up = y @ self.w["midlayer.mlp.gate_proj.weight"].T, y @ self.w["midlayer.mlp.up_proj.weight"].T
            state = state + (F.silu(gate) * up) @ self.w["midlayer.mlp.down_proj.weight"].T
            outputs.append(state)
            if c.norm_output:
                state = self.norm(state, "norm.weight")
        return outputs

    def combine(self, aux):
        """[n, n_aux, H_t] -> what stands in for the state of step 0, [n, H]."""
        if self.config.norm_before_fc:
            aux = self.norm(aux.flatten(1), "input_norm.weight").view(aux.shape)
        if self.config.fc_norm:
            aux = torch.stack([self.norm(aux[:, s], f"fc_norm.{s}.weight") for s in range(aux.shape[1])], dim=1)
        return aux.flatten(1) @ self.w["fc.weight"].T

    def logits(self, hidden):
        return self.norm(hidden, "norm.weight") @ self.w["lm_head.weight"].T


def forced_tokens(sample: Sample, num_steps: int) -> list[torch.Tensor]:
    """x_{t+1+i} for positions 0..L-2; past the end, where nothing is supervised, the last token."""
    ids, last = sample.input_ids.long(), sample.num_tokens - 1
    return [ids[(torch.arange(last) + 1 + step).clamp(max=last)] for step in range(num_steps)]


def supervised_positions(sample: Sample, step: int) -> list[int]:
    length = sample.num_tokens
    return [t for t in range(length) if t + 2 + step < length and sample.loss_mask[t + 2 + step] == 1]


SHAPES = [
    {"lengths": [(5, 6)], "num_steps": 1},
    {"lengths": [(3, 4), (7, 2), (1, 9)], "num_steps": 3},
    {"lengths": [(2, 2), (4, 1), (6, 8)], "num_steps": 4, "heads": 8, "kv_heads": 2, "head_dim": 6},
    {"lengths": [(4, 5), (3, 3)], "num_steps": 3, "draft_vocab": VOCAB},
    {"lengths": [(9, 12), (2, 7)], "num_steps": 5, "heads": 2, "kv_heads": 2, "head_dim": 8, "rope": LLAMA3},
    {"lengths": [(3, 4), (7, 2)], "num_steps": 3, "fc_norm": True},
    {"lengths": [(3, 4), (7, 2)], "num_steps": 3, "norm_output": True},
    {"lengths": [(3, 4), (7, 2)], "num_steps": 3, "norm_before_fc": True, "fc_norm": True, "target_hidden_size": 20},
]


@pytest.mark.parametrize("shape", SHAPES)
def test_packed_forward_equals_the_reference_in_outputs_and_gradients(shape):
    torch.manual_seed(1)
    shape = dict(shape)
    lengths, num_steps = shape.pop("lengths"), shape.pop("num_steps")
    draft = make_draft(**shape)
    reference = Reference(draft)
    width = draft.config.aux_size
    samples = [make_sample(str(i), *length, 2 if i == 0 else 1, width) for i, length in enumerate(lengths)]
    packed = PackedSamples.of(samples)

    outputs = [reference.layer_outputs(sample, forced_tokens(sample, num_steps)) for sample in samples]
    loss, expected_loss, seen = 0.0, 0.0, 0
    for step, (rows, hidden) in enumerate(draft(packed, num_steps)):
        supervised = packed.supervised(step)[rows]
        logits = draft.logits(hidden[supervised])
        expected = torch.cat(
            [reference.logits(outputs[i][step][supervised_positions(sample, step)]) for i, sample in enumerate(samples)]
        )
        torch.testing.assert_close(logits.double(), expected, rtol=1e-5, atol=1e-5)
        seen += len(expected)
        weights = torch.randn(expected.shape, dtype=torch.float64)
        loss = loss + (logits * weights.float()).sum()
        expected_loss = expected_loss + (expected * weights).sum()
    assert seen > 0
    loss.backward()
    expected_loss.backward()
    for name, parameter in draft.named_parameters():
        gradient = reference.w[name].grad
        error = (parameter.grad.double() - gradient).norm() / gradient.norm()
        assert error < 1e-5, name


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


def test_a_sample_is_computed_alike_alone_and_packed():
    torch.manual_seed(2)
    draft, samples = make_draft(), [make_sample(str(i), 3 + i, 5) for i in range(3)]
    alone = [list(draft(PackedSamples.of([sample]), 3)) for sample in samples]
    for step, (_, hidden) in enumerate(draft(PackedSamples.of(samples), 3)):
        torch.testing.assert_close(hidden, torch.cat([steps[step][1] for steps in alone]))


def test_a_position_does_not_see_what_comes_after_it():
    torch.manual_seed(3)
    draft, sample = make_draft(), make_sample("a", 2, 8)
    changed = Sample(**{**vars(sample), "aux": sample.aux.clone(), "input_ids": sample.input_ids.clone()})
    changed.aux[6:] += 1.0
    changed.input_ids[7:] = (changed.input_ids[7:] + 1) % VOCAB
    (rows, before), (_, after) = (next(draft(PackedSamples.of([s]), 1)) for s in (sample, changed))
    assert torch.equal(before[rows < 6], after[rows < 6])
    assert not torch.allclose(before[rows >= 6], after[rows >= 6])


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
