"""The tensors of an EAGLE-3 draft under SGLang's names: which there must be, of what shapes, and what the map may hold."""

from typing import Any

from tasks.common.tensor_types import SAFETENSORS

_TWICE_WIDE = ("q_proj.weight", "k_proj.weight", "v_proj.weight")
# What torch_dtype may be, and every weight with it.
DRAFT_DTYPES = ("float32", "bfloat16", "float16")


def num_aux_states(config: dict[str, Any]) -> int:
    """n_aux as SGLang finds it: num_aux_hidden_states, else the length of the list of ids, else 3."""
    if config.get("num_aux_hidden_states") is not None:
        return config["num_aux_hidden_states"]
    ids = eagle_of(config).get("eagle_aux_hidden_state_layer_ids")
    return len(ids) if isinstance(ids, list) and ids else 3


def aux_size(config: dict[str, Any]) -> int:
    """H_t, the width of one aux state that the draft reads: the target's hidden size where it is another than the draft's."""
    return config.get("target_hidden_size") or config["hidden_size"]


def eagle_of(config: dict[str, Any]) -> dict[str, Any]:
    """eagle_config, empty where it is none."""
    eagle = config.get("eagle_config")
    return eagle if isinstance(eagle, dict) else {}


def has_fc_norm(config: dict[str, Any]) -> bool:
    """Whether SGLang builds a norm for each aux state; it looks at the top level only."""
    return bool(config.get("fc_norm") or config.get("use_aux_norm"))


def has_input_norm(config: dict[str, Any]) -> bool:
    """Whether SGLang from 0.5.17 on builds one norm over all aux states; it looks into eagle_config first."""
    return bool(eagle_of(config).get("norm_before_fc", config.get("norm_before_fc", False)))


def expected_shapes(config: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Exactly the tensors that a draft of this config must have, by SGLang's name.

    H the draft's hidden size, H_t the target's (config target_hidden_size), V and D the vocabularies:
    fc [H, n_aux * H_t]; q/k/v read 2H; lm_head [D, H] unless draft_vocab_size is null, which borrows the target's;
    d2t [D] and t2d [V] where D < V; embed_tokens [V, H] where H_t != H, since the target's cannot be shared then.
    """
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    seen = aux_size(config)
    head_dim = config.get("head_dim") or hidden // heads
    queries, keys = heads * head_dim, (config.get("num_key_value_heads") or heads) * head_dim
    inner, vocab, draft_vocab = config["intermediate_size"], config["vocab_size"], config["draft_vocab_size"]
    num_aux = num_aux_states(config)
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, num_aux * seen),
        "midlayer.input_layernorm.weight": (hidden,),
        "midlayer.hidden_norm.weight": (hidden,),
        "midlayer.self_attn.q_proj.weight": (queries, 2 * hidden),
        "midlayer.self_attn.k_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.v_proj.weight": (keys, 2 * hidden),
        "midlayer.self_attn.o_proj.weight": (hidden, queries),
        "midlayer.post_attention_layernorm.weight": (hidden,),
        "midlayer.mlp.gate_proj.weight": (inner, hidden),
        "midlayer.mlp.up_proj.weight": (inner, hidden),
        "midlayer.mlp.down_proj.weight": (hidden, inner),
        "norm.weight": (hidden,),
    }
    for layer in range(1, config["num_hidden_layers"]):
        # Further layers read the state alone, and hidden_norm is their input's norm.
        shapes |= {
            name.replace("midlayer", f"layers.{layer}"): (shape[0], hidden) if name.endswith(_TWICE_WIDE) else shape
            for name, shape in list(shapes.items())
            if name.startswith("midlayer.") and "input_layernorm" not in name
        }
    if draft_vocab is not None:
        shapes["lm_head.weight"] = (draft_vocab, hidden)
        if draft_vocab != vocab:
            shapes |= {"d2t": (draft_vocab,), "t2d": (vocab,)}
    if seen != hidden:
        shapes["embed_tokens.weight"] = (vocab, hidden)
    if has_fc_norm(config):
        shapes |= {f"fc_norm.{slot}.weight": (seen,) for slot in range(num_aux)}
    if has_input_norm(config):
        shapes["input_norm.weight"] = (num_aux * seen,)
    return shapes


def expected_tensors(config: dict[str, Any]) -> dict[str, tuple[str, tuple[int, ...]]]:
    """The same with safetensors' types: name -> (type, shape)."""
    dtype, map_types = SAFETENSORS[config["torch_dtype"]], {"d2t": "I64", "t2d": "BOOL"}
    return {name: (map_types.get(name, dtype), shape) for name, shape in expected_shapes(config).items()}


def is_passed_over(name: str, config: dict[str, Any]) -> bool:
    """Whether a tensor beyond the expected ones does no harm: nothing that was trained is lost with it.

    The embedding is the target's own (the server shares it), inverse RoPE frequencies are computed from the config,
    layers behind the first do not use an input_layernorm, and a map may stand beside a draft that proposes the whole
    vocabulary.
    """
    whole = config["draft_vocab_size"] == config["vocab_size"]
    unused = name.startswith("layers.") and name.endswith("input_layernorm.weight")
    return (
        name == "embed_tokens.weight"
        or unused
        or name.endswith("rotary_emb.inv_freq")
        or (whole and name in ("d2t", "t2d"))
    )


def vocab_map_problems(d2t, t2d, vocab_size: int | None = None) -> list[str]:
    """What is wrong with a vocabulary map (failure modes V2, V3).

    Args:
        d2t: integers [D] as offsets, of torch or numpy.
        t2d: bool [V]; None where it is not there, which SGLang does not miss.
        vocab_size: V where t2d is None.
    """
    import numpy as np

    d2t = np.asarray(d2t, dtype=np.int64)
    marked = None if t2d is None else np.asarray(t2d, dtype=bool)
    vocab = vocab_size if marked is None else len(marked)
    if not len(d2t) or not vocab:
        return ["d2t or t2d is empty."]
    if holds_absolute_ids(d2t, marked, vocab):
        return ["d2t holds absolute target ids; SGLang adds the draft id to each. Store target id - draft id."]
    target_ids = d2t + np.arange(len(d2t))
    if (np.diff(target_ids) <= 0).any() or target_ids[0] < 0 or target_ids[-1] >= vocab:
        return [f"d2t: i + d2t[i] must ascend strictly within 0..{vocab - 1}."]
    if len(d2t) < vocab and not d2t.any():
        return ["d2t is all zero: the draft could propose only the first tokens of the vocabulary."]
    if marked is not None and not np.array_equal(np.flatnonzero(marked), target_ids):
        return [f"t2d marks {int(marked.sum())} tokens, d2t names {len(d2t)}; they must be the same tokens."]
    return []


def holds_absolute_ids(d2t, t2d, vocab_size: int) -> bool:
    """Whether d2t holds ids where SGLang takes offsets.

    The marks of t2d decide. Without them only a list that ascends within the vocabulary, and as offsets would leave it,
    can be nothing else.
    """
    import numpy as np

    if t2d is not None:
        return len(d2t) > 1 and np.array_equal(d2t, np.flatnonzero(t2d))
    ascends = bool((np.diff(d2t) > 0).all()) and d2t[0] >= 0 and d2t[-1] < vocab_size
    return ascends and int(d2t[-1]) + len(d2t) - 1 >= vocab_size
