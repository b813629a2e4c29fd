"""The form in which SGLang loads an EAGLE-3 draft, and every way in which a folder can silently miss it.

SGLang's loader skips tensors that it does not know and leaves those that are missing at random values,
without a word (contract, section 5). So the set, the shapes and the types are checked here, from the headers;
values are read only for the vocabulary map and for NaN.
"""

from pathlib import Path
from typing import TYPE_CHECKING

from tasks.common.errors import DraftlineError
from tasks.common.files import read_json

if TYPE_CHECKING:
    from tasks.common.target import TargetShape

WEIGHTS, CONFIG = "model.safetensors", "config.json"
ARCHITECTURE = "LlamaForCausalLMEagle3"
_SAFETENSORS_TYPES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
# Type that a field must have; SGLang or transformers reads each without checking, and null is none of them.
_FIELDS: dict[str, type | tuple[type, ...]] = {
    "architectures": list,
    "model_type": str,
    "torch_dtype": str,
    "hidden_size": int,
    "intermediate_size": int,
    "num_hidden_layers": int,
    "num_attention_heads": int,
    "num_key_value_heads": int,
    "head_dim": int,
    "vocab_size": int,
    "draft_vocab_size": int,
    "max_position_embeddings": int,
    "rms_norm_eps": float,
    "rope_theta": (int, float),
    "rope_parameters": dict,
    "tie_word_embeddings": bool,
    "eagle_config": dict,
}


def expected_tensors(config: dict) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Exactly the tensors that a draft of this config must have: name -> (safetensors type, shape)."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"]
    queries, keys = heads * config["head_dim"], config["num_key_value_heads"] * config["head_dim"]
    inner, vocab, draft_vocab = config["intermediate_size"], config["vocab_size"], config["draft_vocab_size"]
    num_aux = len(config["eagle_config"]["eagle_aux_hidden_state_layer_ids"])
    dtype = _SAFETENSORS_TYPES[config["torch_dtype"]]
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, num_aux * hidden),
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
        "lm_head.weight": (draft_vocab, hidden),
    }
    expected = {name: (dtype, shape) for name, shape in shapes.items()}
    if draft_vocab != vocab:
        expected |= {"d2t": ("I64", (draft_vocab,)), "t2d": ("BOOL", (vocab,))}
    return expected


def check_export(folder: Path) -> list[str]:
    """Every reason why SGLang would not serve this folder as it was trained; empty when there is none.

    Each is a sentence with file, field or tensor, what was found and what was expected.
    """
    try:
        config = read_json(folder / CONFIG)
    except DraftlineError as error:
        return [str(error)]
    problems = [f"{folder / CONFIG}: {problem}" for problem in _config_problems(config)]
    if problems:
        return problems
    return [f"{folder / WEIGHTS}: {problem}" for problem in _tensor_problems(folder / WEIGHTS, config)]


def check_against_target(config: dict, shape: "TargetShape") -> list[str]:
    """Where a draft's config contradicts the target that it will draft for (failure modes W4 to W6)."""
    rope = dict(shape.rope_parameters)
    wanted = {
        "hidden_size": shape.hidden_size,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.max_position_embeddings,
        "rope_parameters": rope,
        "rope_theta": rope.get("rope_theta"),
    }
    return [
        f"{name} is {config.get(name)}, the target has {value}. Export again: `dvc repro --force export_draft`."
        for name, value in wanted.items()
        if config.get(name) != value
    ]


def _config_problems(config: dict) -> list[str]:
    problems = []
    for name, kind in _FIELDS.items():
        value = config.get(name)
        if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
            expected = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
            problems.append(f"{name} is {value!r}, expected {expected}.")
    problems += [f"{name} is null; SGLang would read it as a value." for name, value in config.items() if value is None]
    if problems:
        return problems
    if config["architectures"] != [ARCHITECTURE]:
        problems.append(f"architectures is {config['architectures']}, expected ['{ARCHITECTURE}'].")
    if config["model_type"] != "llama":
        problems.append(f"model_type is {config['model_type']!r}, expected 'llama'.")
    if config["num_hidden_layers"] != 1:
        problems.append(f"num_hidden_layers is {config['num_hidden_layers']}; SGLang runs one draft layer.")
    if config["tie_word_embeddings"]:
        problems.append("tie_word_embeddings is true: SGLang would overwrite the draft's head with the embedding.")
    if config["torch_dtype"] not in _SAFETENSORS_TYPES:
        problems.append(f"torch_dtype is {config['torch_dtype']!r}, expected one of {', '.join(_SAFETENSORS_TYPES)}.")
    if config["rope_parameters"].get("rope_theta") != config["rope_theta"]:
        problems.append(
            f"rope_theta is {config['rope_theta']} and rope_parameters says {config['rope_parameters'].get('rope_theta')}; "
            f"transformers 4 reads one, 5 the other."
        )
    if not 0 < config["draft_vocab_size"] <= config["vocab_size"]:
        problems.append(
            f"draft_vocab_size is {config['draft_vocab_size']}, expected 1 to vocab_size {config['vocab_size']}."
        )
    if config.get("bias"):
        problems.append("bias is true: SGLang would give fc a bias that no tensor holds, so a random one.")
    problems += [
        f"{name} is {config[name]!r}, but the draft was trained without it."
        for name in ("fc_norm", "norm_output", "norm_before_fc")
        if config.get(name)
    ]
    return problems + _eagle_config_problems(config["eagle_config"])


def _eagle_config_problems(eagle: dict) -> list[str]:
    ids = eagle.get("eagle_aux_hidden_state_layer_ids")
    if not isinstance(ids, list) or not all(type(layer) is int for layer in ids):
        return [
            f"eagle_config.eagle_aux_hidden_state_layer_ids is {ids!r}; SGLang would silently capture default layers."
        ]
    problems = []
    if len(ids) < 2:
        problems.append(f"eagle_config names {len(ids)} aux layer; SGLang then skips fc silently.")
    if ids != sorted(set(ids)):
        problems.append(f"eagle_aux_hidden_state_layer_ids {ids} are not distinct and ascending, as they are captured.")
    if eagle.get("use_aux_hidden_state") is not True:
        problems.append("eagle_config.use_aux_hidden_state is not true: the draft would be fed the last state alone.")
    return problems


def _tensor_problems(path: Path, config: dict) -> list[str]:
    from safetensors import SafetensorError, safe_open

    if not path.exists():
        return ["not there; the server would start with random weights."]
    try:
        with safe_open(path, framework="pt") as file:
            found = {
                name: (file.get_slice(name).get_dtype(), tuple(file.get_slice(name).get_shape()))
                for name in file.keys()  # noqa: SIM118 -- no dict
            }
            problems = _set_problems(found, expected_tensors(config))
            if problems:
                return problems
            return _value_problems(file, found)
    except SafetensorError as error:
        return [f"cannot be read: {error}."]


def _set_problems(found: dict, expected: dict) -> list[str]:
    problems = [
        f"tensor {name} is missing; SGLang would leave random values there." for name in expected if name not in found
    ]
    problems += [f"tensor {name} is unknown to SGLang and would be skipped." for name in found if name not in expected]
    problems += [
        f"tensor {name} is {found[name][0]} {list(found[name][1])}, expected {kind} {list(shape)}."
        for name, (kind, shape) in expected.items()
        if name in found and found[name] != (kind, shape)
    ]
    return problems


def _value_problems(file, found: dict) -> list[str]:
    import torch

    problems = []
    for name, (kind, _) in found.items():
        if kind in _SAFETENSORS_TYPES.values() and not bool(torch.isfinite(file.get_tensor(name)).all()):
            problems.append(f"tensor {name} holds NaN or Inf.")
    if "d2t" in found:
        problems += vocab_map_problems(file.get_tensor("d2t"), file.get_tensor("t2d"))
    return problems


def vocab_map_problems(d2t, t2d) -> list[str]:
    """What is wrong with a vocabulary map: d2t int64 [D] as offsets, t2d bool [V] (failure modes V2, V3)."""
    import torch

    target_ids = d2t + torch.arange(len(d2t))
    if bool((d2t.diff() > 0).all()) and int(d2t.max()) < len(t2d) <= int(target_ids.max()):
        return ["d2t holds absolute target ids; SGLang adds the draft id to each. Store target id - draft id."]
    if bool((target_ids.diff() <= 0).any()) or int(target_ids.min()) < 0 or int(target_ids.max()) >= len(t2d):
        return [f"d2t: i + d2t[i] must ascend strictly within 0..{len(t2d) - 1}."]
    if len(d2t) < len(t2d) and not bool(d2t.any()):
        return ["d2t is all zero: the draft could propose only the first tokens of the vocabulary."]
    marked = torch.zeros_like(t2d)
    marked[target_ids] = True
    if not torch.equal(marked, t2d):
        return [f"t2d marks {int(t2d.sum())} tokens, d2t names {len(d2t)}; they must be the same tokens."]
    return []
