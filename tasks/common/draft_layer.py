"""The arithmetic of the draft's layer (contract, section 3), on plain tensors; what a step does once is one kernel.

n places, H hidden size. Norms, rotations and sums over a row's own keys are taken in float32, products of matrices in
the type of the weights.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from tasks.common.kernels import Kernel


@dataclass(frozen=True)
class DraftWeights:
    """The draft's parameters in the type that is computed in; gradients reach them through the conversion.

    Attributes:
        aux_norms: weights of the norms before fc, one for each aux state.
        kv: k_proj over v_proj; gate_up: gate_proj over up_proj. One product each.
    """

    input_norm: torch.Tensor | None
    aux_norms: list[torch.Tensor]
    fc: torch.Tensor
    input_layernorm: torch.Tensor
    hidden_norm: torch.Tensor
    q: torch.Tensor
    kv: torch.Tensor
    o: torch.Tensor
    post_attention_layernorm: torch.Tensor
    gate_up: torch.Tensor
    down: torch.Tensor
    norm: torch.Tensor


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def _headed(x: torch.Tensor, cos: torch.Tensor) -> torch.Tensor:
    """[n, heads * d] -> [n, heads, d], where cos is [n, d]."""
    width = cos.shape[-1]
    return x.view(len(x), x.shape[-1] // width, width)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate [n, heads, d] in the half-split form of Llama; cos and sin float32 [n, d]."""
    first, second = x.chunk(2, dim=-1)
    turned = torch.cat([-second, first], dim=-1)
    return (x * cos[:, None] + turned * sin[:, None]).to(x.dtype)


@Kernel
def combine(aux, input_norm, aux_norms: list, fc, eps: float) -> torch.Tensor:
    """g, [n, H], from the aux states of each token side by side, [n, n_aux * H_t]."""
    if input_norm is not None:
        aux = _norm(aux, input_norm, eps)
    if aux_norms:
        chunks = aux.chunk(len(aux_norms), dim=-1)
        aux = torch.cat([_norm(chunk, norm, eps) for norm, chunk in zip(aux_norms, chunks, strict=True)], dim=-1)
    return F.linear(aux, fc)


@Kernel
def keys_and_values(state, embed_tokens, tokens, input_layernorm, hidden_norm, kv, cos, sin, eps: float) -> tuple:
    """What q, k and v read, [n, 2H], and the rotated keys and the values, [n, kv heads, d] each."""
    embedding = _norm(F.embedding(tokens, embed_tokens).to(state.dtype), input_layernorm, eps)
    x = torch.cat([embedding, _norm(state, hidden_norm, eps)], dim=-1)
    keys, values = _headed(F.linear(x, kv), cos).chunk(2, dim=1)
    return x, _rotated(keys, cos, sin), values.contiguous()


@Kernel
def queries(x, q, cos, sin) -> torch.Tensor:
    """Rotated queries, [n, heads, d]."""
    return _rotated(_headed(F.linear(x, q), cos), cos, sin)


@Kernel
def add_own(q, attended, lse, own_keys: list, own_values: list) -> torch.Tensor:
    """Add a row's own keys of steps 1..i to what it attended of step 0, [n, heads, d]; no other row sees them.

    Args:
        lse: log-sum-exp of the scores that `attended` stands for, float32 [n, heads].
        own_keys, own_values: [n, kv heads, d] each.
    """
    n, kv_heads, width = own_keys[0].shape
    split = (n, kv_heads, q.shape[1] // kv_heads, width)  # heads that share keys side by side
    scaled = q.view(split).float() * width**-0.5
    past = lse.view(split[:3])
    scores = torch.stack([past, *((scaled * keys[:, :, None]).sum(-1) for keys in own_keys)], dim=-1)
    shares = scores.softmax(-1)
    mixed = attended.view(split) * shares[..., :1]
    for step, values in enumerate(own_values, 1):
        mixed = mixed + shares[..., step : step + 1] * values[:, :, None]
    return mixed.view(q.shape).to(q.dtype)


@Kernel
def finish(attended, state, o, post_attention_layernorm, gate_up, down, norm, eps: float) -> tuple:
    """The layer's output, [n, H], and the same after the final norm."""
    state = state + F.linear(attended.flatten(1), o)
    gate, up = F.linear(_norm(state, post_attention_layernorm, eps), gate_up).chunk(2, dim=-1)
    state = state + F.linear(F.silu(gate) * up, down)
    return state, _norm(state, norm, eps)
