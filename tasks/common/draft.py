"""The EAGLE-3 draft: one decoder layer over the target's aux states (contract, sections 2 and 3).

At position t it reads the embedding of x_{t+1} and g_t = fc(a_t) and predicts x_{t+2}. Step i > 0 of a
chain reads the next token and, in place of g, the layer's own output of step i - 1. It attends to the
step-0 keys at positions <= t of the same sample and to this position's own keys of steps 1..i; its RoPE
position is t + i. That is what SGLang computes when it drafts a chain from the states of verified tokens.

Parameters bear the names of the exported checkpoint, so `state_dict()` is that checkpoint without the map.
"""

from dataclasses import asdict, dataclass, field
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from tasks.common.contract import Contract
from tasks.common.draft_layer import DraftWeights, add_own, combine, finish, keys_and_values, queries
from tasks.common.errors import DraftlineError
from tasks.common.packing import PackedSamples, TttInputs
from tasks.common.past_attention import Past, past_of
from tasks.common.rows import Rows
from tasks.common.target import TargetShape
from tasks.common.vector_functions import resolve_vector_functions
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


class _RMSNorm(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.weight = _unset(size)


class _MLP(nn.Module):
    def __init__(self, config: DraftConfig):
        super().__init__()
        self.gate_proj = _Linear(config.hidden_size, config.intermediate_size)
        self.up_proj = _Linear(config.hidden_size, config.intermediate_size)
        self.down_proj = _Linear(config.intermediate_size, config.hidden_size)


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


class _Midlayer(nn.Module):
    def __init__(self, config: DraftConfig):
        super().__init__()
        self.input_layernorm = _RMSNorm(config.hidden_size)
        self.hidden_norm = _RMSNorm(config.hidden_size)
        self.self_attn = _Attention(config)
        self.post_attention_layernorm = _RMSNorm(config.hidden_size)
        self.mlp = _MLP(config)


@dataclass
class _Seen:
    """What the steps of one batch attend to.

    Attributes:
        keys, values: of step 0, at every position: [T, kv heads, head_dim].
        past: attention from the rows to them.
        own_keys, own_values: of steps 1..i, at the rows.
    """

    keys: torch.Tensor
    values: torch.Tensor
    past: Past
    own_keys: list[torch.Tensor] = field(default_factory=list)
    own_values: list[torch.Tensor] = field(default_factory=list)


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
        self.input_norm = _RMSNorm(aux_width) if config.norm_before_fc else None
        norms = [_RMSNorm(config.aux_size) for _ in range(config.num_aux)] if config.fc_norm else []
        self.fc_norm = nn.ModuleList(norms)
        self.fc = _Linear(aux_width, config.hidden_size)
        self.midlayer = _Midlayer(config)
        self.norm = _RMSNorm(config.hidden_size)
        self.lm_head = _Linear(config.hidden_size, config.draft_vocab_size)
        self.register_buffer("embed_tokens", embed_tokens, persistent=False)
        resolve_vector_functions()
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

    def weights(self, dtype: torch.dtype) -> DraftWeights:
        """All parameters but the head's, in `dtype`; gradients arrive in the type of the parameters."""
        layer, attention, mlp = self.midlayer, self.midlayer.self_attn, self.midlayer.mlp
        return DraftWeights(
            input_norm=None if self.input_norm is None else self.input_norm.weight.to(dtype),
            aux_norms=[norm.weight.to(dtype) for norm in self.fc_norm],
            fc=self.fc.weight.to(dtype),
            input_layernorm=layer.input_layernorm.weight.to(dtype),
            hidden_norm=layer.hidden_norm.weight.to(dtype),
            q=attention.q_proj.weight.to(dtype),
            kv=torch.cat([attention.k_proj.weight, attention.v_proj.weight]).to(dtype),
            o=attention.o_proj.weight.to(dtype),
            post_attention_layernorm=layer.post_attention_layernorm.weight.to(dtype),
            gate_up=torch.cat([mlp.gate_proj.weight, mlp.up_proj.weight]).to(dtype),
            down=mlp.down_proj.weight.to(dtype),
            norm=self.norm.weight.to(dtype),
        )

    def unroll(self, inputs: TttInputs, aux: torch.Tensor, recompute: bool = False) -> list[torch.Tensor]:
        """Test-time training with teacher-forced tokens: step i reads x_{t+1+i}.

        Args:
            aux: [T, n_aux * H_t], in the type to compute in.
            recompute: of steps i > 0 keep the states alone and compute the rest again in the backward.

        Returns:
            for each step what the head reads: the layer's output after the final norm at the rows, [R, H].
        """
        weights, rows = self.weights(aux.dtype), inputs.rows
        rotations = self._rotations(inputs.positions, rows.index, len(inputs.read_ids))
        seen, state, normed = self._first_step(weights, rows, inputs.positions, inputs.next_ids, aux, rotations)
        outputs = [normed]
        for tokens, rotation in zip(inputs.read_ids[1:], rotations[1:], strict=True):
            step = self._next_step
            if recompute:
                step = partial(checkpoint, step, use_reentrant=False, preserve_rng_state=False)
            own = (list(seen.own_keys), list(seen.own_values))
            state, normed, *of_step = step(weights, self._recurrent(state, normed), tokens, rotation, seen, *own)
            seen.own_keys.append(of_step[0])
            seen.own_values.append(of_step[1])
            outputs.append(normed)
        return outputs

    @torch.no_grad()
    def propose(
        self,
        batch: PackedSamples,
        index: torch.Tensor,
        num_steps: int,
        vocab_map: VocabMap,
    ) -> torch.Tensor:
        """Chains that a server would draft: from the real states up to each row, on the draft's OWN tokens, greedily.

        Args:
            batch: its aux states are in the type to compute in.
            index: ascending positions t on the token axis, [n]; x_{t+1} must lie in the same sample.

        Returns:
            target ids proposed for x_{t+2}, x_{t+3}, ...: int64 [n, num_steps].
        """
        device, dtype = index.device, batch.aux.dtype
        weights, head, target_ids = self.weights(dtype), self.lm_head.weight.to(dtype), vocab_map.target_ids.to(device)
        rows = Rows.of(index, batch.bounds, device).map(lambda tensor: tensor.to(device))
        next_ids = batch.input_ids[batch.ahead(1)]
        rotations = self._rotations(batch.positions, rows.index, num_steps)
        seen, state, normed = self._first_step(weights, rows, batch.positions, next_ids, batch.aux, rotations)
        chain = [target_ids[F.linear(normed, head).argmax(-1)]]
        for rotation in rotations[1:]:
            own = (seen.own_keys, seen.own_values)
            recurrent = self._recurrent(state, normed)
            state, normed, keys, values = self._next_step(weights, recurrent, chain[-1], rotation, seen, *own)
            seen.own_keys.append(keys)
            seen.own_values.append(values)
            chain.append(target_ids[F.linear(normed, head).argmax(-1)])
        return torch.stack(chain, dim=1)[: rows.count]

    def _recurrent(self, state: torch.Tensor, normed: torch.Tensor) -> torch.Tensor:
        """What the next step reads in place of g."""
        return normed if self.config.norm_output else state

    def _first_step(self, weights: DraftWeights, rows: Rows, positions, next_ids, aux, rotations: list) -> tuple:
        """Keys of every position; the layer's output at the rows before and after the final norm, [R, H] each."""
        w, eps = weights, self.config.rms_norm_eps
        (cos, sin), (of_rows, *_) = self._rotation(positions), rotations
        g = combine(aux, w.input_norm, w.aux_norms, w.fc, eps)
        x, keys, values = keys_and_values(
            g, self.embed_tokens, next_ids, w.input_layernorm, w.hidden_norm, w.kv, cos, sin, eps
        )
        seen = _Seen(keys, values, past_of(rows, len(keys)))
        attended, _ = seen.past(queries(x.index_select(0, rows.index), w.q, *of_rows), keys, values)
        return seen, *self._finish(w, attended, g.index_select(0, rows.index))

    def _next_step(
        self, weights: DraftWeights, recurrent, tokens, rotation, seen: _Seen, own_keys, own_values
    ) -> tuple:
        """Step i > 0 at the rows.

        Args:
            recurrent: of step i - 1, [R, H]; tokens: that step i reads, [R].
            own_keys, own_values: of steps 1..i-1.

        Returns:
            the layer's output before and after the final norm, [R, H] each; keys and values of this step.
        """
        w = weights
        x, keys, values = keys_and_values(
            recurrent,
            self.embed_tokens,
            tokens,
            w.input_layernorm,
            w.hidden_norm,
            w.kv,
            *rotation,
            self.config.rms_norm_eps,
        )
        q = queries(x, w.q, *rotation)
        attended, lse = seen.past(q, seen.keys, seen.values)
        attended = add_own(q, attended, lse, [*own_keys, keys], [*own_values, values])
        return *self._finish(w, attended, recurrent), keys, values

    def _finish(self, w: DraftWeights, attended: torch.Tensor, state: torch.Tensor) -> tuple:
        eps = self.config.rms_norm_eps
        return finish(attended, state, w.o, w.post_attention_layernorm, w.gate_up, w.down, w.norm, eps)

    def _rotations(self, positions: torch.Tensor, index: torch.Tensor, num_steps: int) -> list[tuple]:
        """cos and sin of each step at the rows: RoPE position t + i."""
        at_rows = positions[index]
        return [self._rotation(at_rows + step) for step in range(num_steps)]

    def _rotation(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and sin, float32 [n, head_dim] each."""
        cos, sin = self.rotary(self.rotary.inv_freq, positions[None])
        return cos[0], sin[0]
