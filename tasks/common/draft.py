"""The EAGLE-3 draft: one decoder layer over the target's aux states (contract, sections 2 and 3).

At position t it reads the embedding of x_{t+1} and g_t = fc(a_t) and predicts x_{t+2}. Step i > 0 of a
chain reads the next token and, in place of g, the layer's own output of step i - 1. It attends to the
step-0 keys at positions <= t of the same sample and to this position's own keys of steps 1..i; its RoPE
position is t + i. That is what SGLang computes when it drafts a chain from the states of verified tokens.

Parameters bear the names of the exported checkpoint, so `state_dict()` is that checkpoint without the map.
"""

from collections.abc import Iterator
from dataclasses import asdict, dataclass, field

import torch
import torch.nn.functional as F
from torch import nn

from tasks.common.contract import Contract
from tasks.common.errors import DraftlineError
from tasks.common.packing import PackedSamples
from tasks.common.target import TargetShape
from tasks.common.vocab_map import VocabMap


@dataclass(frozen=True)
class DraftConfig:
    """Sizes of a draft; in one that Draftline trains all but `draft_vocab_size` (D) and `num_aux` are the target's.

    Attributes:
        target_hidden_size: width of an aux state where the draft has another hidden size; None where both are one.
        norm_before_fc: one RMSNorm over the concatenated aux states before fc (SGLang 0.5.23).
        fc_norm: an RMSNorm for each aux state before fc.
        norm_output: the recurrent state is the layer's output after the final norm.
    """

    hidden_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    num_aux: int
    vocab_size: int
    draft_vocab_size: int
    rms_norm_eps: float
    rope_parameters: dict
    max_position_embeddings: int
    target_hidden_size: int | None = None
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False

    @property
    def aux_size(self) -> int:
        """Width of one aux state."""
        return self.target_hidden_size or self.hidden_size

    @classmethod
    def of(cls, shape: TargetShape, contract: Contract, draft_vocab_size: int) -> "DraftConfig":
        """The draft of a target.

        Raises:
            DraftlineError: the contract was written for a target of other sizes, or D exceeds V.
        """
        for name in ("architecture", "num_layers", "hidden_size", "vocab_size"):
            if getattr(shape, name) != getattr(contract, name):
                raise DraftlineError(
                    f"{name} is {getattr(shape, name)} in the target and {getattr(contract, name)} in the contract of its "
                    f"hidden states. Dump the states of this target: `dvc repro dump_hidden_states`."
                )
        if draft_vocab_size > shape.vocab_size:
            raise DraftlineError(
                f"train_draft.draft_vocab_size is {draft_vocab_size}, the target's vocabulary has {shape.vocab_size} "
                f"tokens. Set draft_vocab_size to at most that."
            )
        return cls(
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_attention_heads=shape.num_attention_heads,
            num_key_value_heads=shape.num_key_value_heads,
            head_dim=shape.head_dim,
            num_aux=len(contract.aux_layer_ids),
            vocab_size=shape.vocab_size,
            draft_vocab_size=draft_vocab_size,
            rms_norm_eps=shape.rms_norm_eps,
            rope_parameters=shape.rope_parameters,
            max_position_embeddings=shape.max_position_embeddings,
        )

    def to_dict(self) -> dict:
        return asdict(self)


def _unset(*shape: int) -> nn.Parameter:
    """A parameter that must be loaded or initialised: NaN until then, so that a forgotten one shows at once."""
    return nn.Parameter(torch.full(shape, torch.nan))


class _Linear(nn.Module):
    def __init__(self, inputs: int, outputs: int):
        super().__init__()
        self.weight = _unset(outputs, inputs)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)


class _RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = _unset(size)
        self.eps = eps

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class _MLP(nn.Module):
    def __init__(self, config: DraftConfig):
        super().__init__()
        self.gate_proj = _Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = _Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = _Linear(config.intermediate_size, config.hidden_size)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


@dataclass
class _Keys:
    """What the steps of one batch attend to.

    Attributes:
        keys, values: of step 0, at every position: [T, kv heads, head_dim].
        own_keys, own_values: of steps 1..i, at the rows of step i.
    """

    keys: torch.Tensor
    values: torch.Tensor
    own_keys: list[torch.Tensor] = field(default_factory=list)
    own_values: list[torch.Tensor] = field(default_factory=list)

    def keep(self, chosen: torch.Tensor) -> None:
        """Drop the own keys of rows that go no further."""
        self.own_keys = [keys[chosen] for keys in self.own_keys]
        self.own_values = [values[chosen] for values in self.own_values]


class _Attention(nn.Module):
    def __init__(self, config: DraftConfig):
        super().__init__()
        self.heads, self.kv_heads, self.head_dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        self.q_proj = _Linear(2 * config.hidden_size, self.heads * self.head_dim)
        self.k_proj = _Linear(2 * config.hidden_size, self.kv_heads * self.head_dim)
        self.v_proj = _Linear(2 * config.hidden_size, self.kv_heads * self.head_dim)
        self.o_proj = _Linear(self.heads * self.head_dim, config.hidden_size)

    def keys_and_values(self, x: torch.Tensor, rope: "_Rope") -> tuple[torch.Tensor, torch.Tensor]:
        """[n, 2H] -> rotated keys and values, [n, kv heads, head_dim] each."""
        split = (len(x), self.kv_heads, self.head_dim)
        return rope.rotate(self.k_proj(x).view(split)), self.v_proj(x).view(split)

    def forward(self, x, rope: "_Rope", seen: _Keys, rows: torch.Tensor, bounds) -> torch.Tensor:
        """Attend from `rows` to the step-0 keys up to each and to their own keys.

        Args:
            x: [n, 2H] at `rows`.
            rows: ascending positions on the token axis, [n].

        Returns:
            [n, H].
        """
        groups = self.heads // self.kv_heads
        q = rope.rotate(self.q_proj(x).view(len(x), self.heads, self.head_dim)) * self.head_dim**-0.5
        q = q.view(len(x), self.kv_heads, groups, self.head_dim)
        # [n, kv heads, groups, steps]: a position's own keys are no one else's, so this part is elementwise.
        own = [(q * keys.unsqueeze(2)).sum(-1, keepdim=True) for keys in seen.own_keys]
        mixed, own_shares = [], []
        for first, last, start, end in _segments(rows, bounds):
            n, length = last - first, end - start
            future = torch.arange(start, end, device=rows.device) > rows[first:last, None]
            queries = q[first:last].permute(1, 2, 0, 3).reshape(self.kv_heads, groups * n, self.head_dim)
            scores = (queries @ seen.keys[start:end].permute(1, 2, 0)).view(self.kv_heads, groups, n, length)
            scores = scores.masked_fill(future, -torch.inf)
            if own:
                scores = torch.cat([scores, *(s[first:last].permute(1, 2, 0, 3) for s in own)], dim=-1)
            shares = scores.softmax(-1)
            past = shares[..., :length].reshape(self.kv_heads, groups * n, length)
            mixed.append(
                (past @ seen.values[start:end].transpose(0, 1)).view(self.kv_heads, groups, n, -1).permute(2, 0, 1, 3)
            )
            own_shares.append(shares[..., length:].permute(2, 0, 1, 3))
        output, shares = torch.cat(mixed), torch.cat(own_shares)
        for step, values in enumerate(seen.own_values):
            output = output + shares[..., step : step + 1] * values.unsqueeze(2)
        return self.o_proj(output.reshape(len(x), -1))


def _segments(rows: torch.Tensor, bounds: tuple[tuple[int, int], ...]) -> Iterator[tuple[int, int, int, int]]:
    """For each sample with rows: their range in `rows`, and the range of positions up to the last of them."""
    edges = torch.searchsorted(rows.cpu(), torch.tensor([0, *(end for _, end in bounds)])).tolist()
    for (start, _), first, last in zip(bounds, edges[:-1], edges[1:], strict=True):
        if last > first:
            yield first, last, start, int(rows[last - 1]) + 1


class _Midlayer(nn.Module):
    def __init__(self, config: DraftConfig):
        super().__init__()
        self.input_layernorm = _RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = _RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = _RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = _MLP(config)

    def inputs(self, embedding: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
        """What q, k and v read, [n, 2H]."""
        return torch.cat([self.input_layernorm(embedding), self.hidden_norm(state)], dim=-1)

    def forward(self, state, attended: torch.Tensor) -> torch.Tensor:
        """Residual of the state, then the MLP; [n, H]."""
        state = state + attended
        return state + self.mlp(self.post_attention_layernorm(state))


class _Rope:
    """Rotation at given positions, in the half-split form of Llama."""

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor):
        self.cos, self.sin = cos[:, None], sin[:, None]

    def rotate(self, x: torch.Tensor) -> torch.Tensor:
        """[n, heads, head_dim] at the n positions."""
        first, second = x.chunk(2, dim=-1)
        return x * self.cos + torch.cat([-second, first], dim=-1) * self.sin


class Eagle3Draft(nn.Module):
    """A draft that is built from the target's sizes, the contract and D alone."""

    def __init__(self, config: DraftConfig, embed_tokens: torch.Tensor):
        """Every parameter is NaN until it is loaded or initialised.

        Args:
            embed_tokens: the target's embedding [V, H]: frozen, shared, no part of `state_dict()`.
        """
        super().__init__()
        from transformers import LlamaConfig
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

        self.config = config
        aux_width = config.num_aux * config.aux_size
        self.input_norm = _RMSNorm(aux_width, config.rms_norm_eps) if config.norm_before_fc else None
        norms = (
            [_RMSNorm(config.aux_size, config.rms_norm_eps) for _ in range(config.num_aux)] if config.fc_norm else []
        )
        self.fc_norm = nn.ModuleList(norms)
        self.fc = _Linear(aux_width, config.hidden_size)
        self.midlayer = _Midlayer(config)
        self.norm = _RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = _Linear(config.hidden_size, config.draft_vocab_size)
        self.register_buffer("embed_tokens", embed_tokens, persistent=False)
        self.rotary = LlamaRotaryEmbedding(
            LlamaConfig(
                hidden_size=config.hidden_size,
                num_attention_heads=config.num_attention_heads,
                head_dim=config.head_dim,
                max_position_embeddings=config.max_position_embeddings,
                rope_parameters=config.rope_parameters,
            )
        )

    @classmethod
    def for_target(
        cls, shape: TargetShape, contract: Contract, draft_vocab_size: int, embed_tokens: torch.Tensor
    ) -> "Eagle3Draft":
        return cls(DraftConfig.of(shape, contract, draft_vocab_size), embed_tokens)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """[n, H] layer outputs -> [n, D]."""
        return self.lm_head(self.norm(hidden))

    def forward(self, batch: PackedSamples, num_steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Test-time training with teacher-forced tokens: step i reads x_{t+1+i}.

        Yields:
            for each step its rows (positions on the token axis, [n]; see `PackedSamples.rows`) and the layer's
            output there, [n, H]; nothing for steps without rows. Take logits only where a loss or a prediction
            is wanted.
        """
        rows = [of_step for of_step in batch.rows(num_steps) if len(of_step)]
        if not rows:
            return
        seen, state = self._first_step(batch, rows[0])
        yield rows[0], state
        for step in range(1, len(rows)):
            chosen = torch.searchsorted(rows[step - 1], rows[step])
            seen.keep(chosen)
            tokens = batch.input_ids[batch.ahead(1 + step)[rows[step]]]
            state = self._next_step(batch, rows[step], step, self._recurrent(state[chosen]), tokens, seen)
            yield rows[step], state

    @torch.no_grad()
    def propose(self, batch: PackedSamples, rows: torch.Tensor, num_steps: int, vocab_map: VocabMap) -> torch.Tensor:
        """Chains that a server would draft: from the real states up to each row, on the draft's OWN tokens, greedily.

        Args:
            rows: ascending positions t on the token axis, [n]; x_{t+1} must lie in the same sample.

        Returns:
            target ids proposed for x_{t+2}, x_{t+3}, ...: int64 [n, num_steps].
        """
        target_ids = vocab_map.target_ids.to(rows.device)
        seen, state = self._first_step(batch, rows)
        chain = [target_ids[self.logits(state).argmax(-1)]]
        for step in range(1, num_steps):
            state = self._next_step(batch, rows, step, self._recurrent(state), chain[-1], seen)
            chain.append(target_ids[self.logits(state).argmax(-1)])
        return torch.stack(chain, dim=1)

    def _combine(self, aux: torch.Tensor) -> torch.Tensor:
        """g, [T, H], from the aux states of each token side by side, [T, n_aux * H_t]."""
        if self.input_norm is not None:
            aux = self.input_norm(aux)
        if len(self.fc_norm):
            chunks = aux.chunk(len(self.fc_norm), dim=-1)
            aux = torch.cat([norm(chunk) for norm, chunk in zip(self.fc_norm, chunks, strict=True)], dim=-1)
        return self.fc(aux)

    def _recurrent(self, state: torch.Tensor) -> torch.Tensor:
        """What the next step reads in place of g, from the layer's output [n, H]."""
        return self.norm(state) if self.config.norm_output else state

    def _first_step(self, batch: PackedSamples, rows: torch.Tensor) -> tuple[_Keys, torch.Tensor]:
        """Keys of every position and the layer's output at `rows`, [n, H]."""
        layer, g = self.midlayer, self._combine(batch.aux)
        x = layer.inputs(self.embed_tokens[batch.input_ids[batch.ahead(1)]], g)
        seen = _Keys(*layer.self_attn.keys_and_values(x, self._rope(g, batch.positions)))
        attended = layer.self_attn(x[rows], self._rope(g, batch.positions[rows]), seen, rows, batch.bounds)
        return seen, layer(g[rows], attended)

    def _next_step(self, batch: PackedSamples, rows, step: int, state, tokens, seen: _Keys) -> torch.Tensor:
        """Step i > 0 at `rows` from the recurrent states of step i - 1, [n, H]; adds its keys to `seen`."""
        layer, rope = self.midlayer, self._rope(state, batch.positions[rows] + step)
        x = layer.inputs(self.embed_tokens[tokens], state)
        keys, values = layer.self_attn.keys_and_values(x, rope)
        seen.own_keys.append(keys)
        seen.own_values.append(values)
        return layer(state, layer.self_attn(x, rope, seen, rows, batch.bounds))

    def _rope(self, like: torch.Tensor, positions: torch.Tensor) -> _Rope:
        cos, sin = self.rotary(like, positions[None])
        return _Rope(cos[0], sin[0])
