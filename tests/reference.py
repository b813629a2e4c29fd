"""What training computes, in a page of float64: the contract, sections 2 to 4, read literally. One sample at a time, every
TTT step from scratch, explicit masks, nothing cached; and small random drafts, samples and targets to compare it on."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tasks.common import draft_layer, kernels, past_attention
from tasks.common.draft import DraftConfig, Eagle3Draft
from tasks.common.hidden_states import Sample
from tasks.common.vocab_map import VocabMap
from tasks.train_draft import loss
from tasks.train_draft.batch import Batch, BatchForm, StoredBatch
from tasks.train_draft.target_head import RestrictedHead, TargetHead

VOCAB, HIDDEN, AUX = 40, 16, 3
EPS = 1e-5


class Reference:
    """The draft; every step recomputes all before it."""

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


@dataclass
class RandomTarget:
    """Head and final norm of a target; `last_is_normed` as in the contract."""

    last_is_normed: bool = True
    vocab: int = VOCAB
    rms_norm_eps: float = EPS

    def __post_init__(self):
        self.head, self.norm = torch.randn(self.vocab, HIDDEN), torch.rand(HIDDEN) + 0.5
        self.lm_head, self.final_norm = (lambda: self.head), (lambda: self.norm)

    def own_head(self, device: str = "cpu") -> TargetHead:
        return TargetHead(self, self, self.last_is_normed, device)

    def logits(self, last: torch.Tensor) -> torch.Tensor:
        """In float64, all V."""
        last = last.double()
        if not self.last_is_normed:
            last = last / (last.pow(2).mean(-1, keepdim=True) + self.rms_norm_eps).sqrt() * self.norm.double()
        return last @ self.head.double().T


@dataclass
class Sums:
    """Of each TTT step over some samples: loss in nats, positions that give loss, supervised ones, right ones."""

    loss: list[torch.Tensor]
    loss_positions: list[int]
    supervised: list[int]
    correct: list[int]

    @property
    def weighted(self) -> torch.Tensor:
        """0.8^i times the mean of step i over the positions that give loss."""
        pairs = zip(self.loss, self.loss_positions, strict=True)
        return sum(0.8**step * total / max(count, 1) for step, (total, count) in enumerate(pairs))


def reference_sums(
    reference: Reference, samples: Sequence[Sample], target: RandomTarget, vocab_map: VocabMap, num_steps: int
) -> Sums:
    found = Sums([torch.zeros((), dtype=torch.float64)] * num_steps, *([0] * num_steps for _ in range(3)))
    kept = vocab_map.target_ids
    for sample in samples:
        outputs = reference.layer_outputs(sample, forced_tokens(sample, num_steps))
        for step in range(num_steps):
            for t in supervised_positions(sample, step):
                found.supervised[step] += 1
                wanted = target.logits(sample.last[t + 1 + step])
                label = (kept == wanted.argmax()).nonzero().flatten()
                if not len(label):
                    continue
                logits = reference.logits(outputs[step][t])
                loss = -(wanted[kept].softmax(-1) * logits.log_softmax(-1)).sum()
                found.loss[step] = found.loss[step] + loss
                found.loss_positions[step] += 1
                found.correct[step] += int(logits.argmax() == label)
    return found


def make_draft(
    draft_vocab: int = 24,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 4,
    num_aux: int = AUX,
    rope: dict | None = None,
    **norms,
) -> Eagle3Draft:
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
        num_aux=num_aux,
        vocab_size=VOCAB,
        draft_vocab_size=draft_vocab,
        rms_norm_eps=EPS,
        rope_parameters=rope or {"rope_type": "default", "rope_theta": 100.0},
        max_position_embeddings=64,
        **norms,
    )
    draft = Eagle3Draft(config, torch.randn(VOCAB, HIDDEN))
    for parameter in draft.parameters():
        torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.3)
    return draft


def sample_of(name: str, mask: Sequence[int], num_aux: int = AUX, width: int = HIDDEN) -> Sample:
    """Random tokens and states under a loss mask."""
    return Sample(
        id=name,
        input_ids=torch.randint(VOCAB, (len(mask),), dtype=torch.int32),
        loss_mask=torch.tensor(mask, dtype=torch.uint8),
        aux=torch.randn(len(mask), num_aux, width),
        last=torch.randn(len(mask), HIDDEN),
    )


def make_sample(name: str, prompt: int, answer: int, turns: int = 1) -> Sample:
    """`turns` turns of `prompt` tokens asked and `answer` tokens answered."""
    return sample_of(name, ([0] * prompt + [1] * answer) * turns)


def make_map(draft_vocab: int = 24) -> VocabMap:
    return VocabMap(torch.randperm(VOCAB)[:draft_vocab].sort().values, VOCAB, "test")


def make_batch(
    samples: Sequence[Sample],
    num_steps: int,
    target: RandomTarget | None = None,
    vocab_map: VocabMap | None = None,
    batch_tokens: int = 1,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> Batch:
    """Packed as training packs them.

    Args:
        target: by default one that predicts token 0 everywhere.
        batch_tokens: multiple that the token axis is padded to, where kernels are compiled.
    """
    form = BatchForm.of(vocab_map or make_map(VOCAB), device, dtype, num_steps, batch_tokens)
    nothing = [torch.where(F.pad(sample.loss_mask[1:], (0, 1)) > 0, 0, -1) for sample in samples]
    greedy = [target.own_head().greedy(sample.loss_mask, sample.last) for sample in samples] if target else nothing
    stored = [(sample, None, None) for sample in samples]
    return StoredBatch.of(stored, torch.cat(greedy), form).on(device, dtype)


def own_head(
    target: RandomTarget, vocab_map: VocabMap, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> RestrictedHead:
    return RestrictedHead(target.own_head(device), vocab_map, dtype)


def on_the_path_of_a_gpu(monkeypatch, compiler: Callable = lambda function, **_: function) -> None:
    """Pad, and attend by flex_attention over tiles, on a CPU.

    Args:
        compiler: in place of torch.compile; by default nothing is compiled.
    """
    from torch.nn.attention import flex_attention

    monkeypatch.setattr(kernels, "COMPILED_ON", {"cuda", "cpu"})
    monkeypatch.setattr(torch, "compile", compiler)
    for module in (draft_layer, past_attention, loss):
        for value in vars(module).values():
            if isinstance(value, kernels.Kernel):
                monkeypatch.setattr(value, "_compiled", None)
    # It refuses gradients on a CPU, where its plain form computes them.
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
