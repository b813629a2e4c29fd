"""The forms in which tools write an EAGLE-3 draft, translated to the one that SGLang loads.

    SGLang/EAGLE   midlayer.*, config at the top level, eagle_config
    SpecForge      the same, or layers.0.*, fc_norm.*, the older aux_norm_{low,mid,high}
    speculators    transformer_layer_config nested, speculators_config, layers.0.*, embed_tokens

SGLang's loader renames `midlayer` and `aux_norm_*` itself and puts `model.` before a name that it does not know
(srt/models/llama_eagle3.py, load_weights). It cannot read speculators' config.
"""

from dataclasses import dataclass
from typing import Any

from tasks.common.capture import can_capture, served_layer_ids
from tasks.common.draft_files import DraftFiles
from tasks.common.errors import DraftlineError

ARCHITECTURE = "LlamaForCausalLMEagle3"
_AUX_NORMS = {"aux_norm_low": "fc_norm.0", "aux_norm_mid": "fc_norm.1", "aux_norm_high": "fc_norm.2"}
# What LlamaConfig of transformers takes for a key that is absent; speculators writes only what differs from it.
_LLAMA = {
    "model_type": "llama",
    "hidden_act": "silu",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
}
# Where a config states RoPE, in either spelling.
ROPE_KEYS = ("rope_theta", "rope_parameters", "rope_scaling")
# Norms that SGLang knows too, by the key that turns each on.
NORM_FLAGS = ("fc_norm", "norm_output", "norm_before_fc")


@dataclass(frozen=True)
class Draft:
    """A draft in SGLang's terms, whatever form it is stored in.

    Attributes:
        form: 'SGLang/EAGLE', 'SpecForge' or 'speculators'.
        config: what config.json says, or for speculators what it must say for SGLang.
        stored: name in the files of each tensor, by SGLang's name.
        doubled: SGLang's names that two stored tensors have.
        outputs: decoder layers whose outputs it was trained on, where its own form says so.
        architecture: of its target, where its own form says so.
    """

    files: DraftFiles
    form: str
    config: dict[str, Any]
    stored: dict[str, str]
    doubled: tuple[str, ...]
    outputs: tuple[int, ...] | None = None
    architecture: str | None = None

    @classmethod
    def of(cls, files: DraftFiles, architecture: str | None = None) -> "Draft":
        """Find the form and translate names and config.

        Args:
            architecture: `architectures[0]` of the target, which decides how layer ids are written; None where it is
                not known but to the draft's own form.
        """
        stored: dict[str, str] = {}
        doubled = []
        for name in files.headers:
            if canonical_name(name) in stored:
                doubled.append(canonical_name(name))
            stored[canonical_name(name)] = name
        raw = files.config
        if "transformer_layer_config" in raw or "speculators_config" in raw or "speculators_model_type" in raw:
            outputs, own = _speculators_outputs(raw), _verifier_architecture(raw)
            config = _from_speculators(raw, outputs, architecture or own)
            return cls(files, "speculators", config, stored, tuple(doubled), outputs, own)
        renamed = any(name != canonical_name(name) for name in files.headers) or "fc_norm.0.weight" in files.headers
        return cls(files, "SpecForge" if renamed else "SGLang/EAGLE", raw, stored, tuple(doubled))

    def header(self, name: str):
        """Type and shape of a tensor by SGLang's name."""
        return self.files.headers[self.stored[name]]

    def read(self, name: str):
        """A tensor by SGLang's name, as torch's."""
        return self.files.read(self.stored[name])

    def array(self, name: str):
        """A tensor of integers or bool by SGLang's name, as numpy's."""
        return self.files.array(self.stored[name])

    @property
    def dtype(self) -> str | None:
        """torch_dtype, which transformers 5 calls dtype."""
        return self.config.get("torch_dtype") or self.config.get("dtype")

    @property
    def layer_ids(self) -> list[int] | None:
        """eagle_aux_hidden_state_layer_ids, None where SGLang would not find a list of them."""
        eagle = self.config.get("eagle_config")
        ids = eagle.get("eagle_aux_hidden_state_layer_ids") if isinstance(eagle, dict) else None
        return ids if isinstance(ids, list) and ids and all(type(layer) is int for layer in ids) else None


def is_whole_model(files: DraftFiles) -> bool:
    """Whether these are a target's weights, say, and no draft's."""
    names = {canonical_name(name) for name in files.headers}
    return "fc.weight" not in names and any(name.startswith("layers.1.") for name in names)


def canonical_name(name: str) -> str:
    """SGLang's name of a tensor: 'layers.0.mlp.up_proj.weight' -> 'midlayer.mlp.up_proj.weight'."""
    name = name.removeprefix("model.")
    for old, new in _AUX_NORMS.items():
        name = name.replace(old, new)
    return "midlayer." + name.removeprefix("layers.0.") if name.startswith("layers.0.") else name


def rope_of(config: dict[str, Any]) -> dict[str, Any]:
    """RoPE parameters in transformers 5's spelling, whichever spelling a config has.

    Raises:
        DraftlineError: the spellings contradict each other, so that engines would disagree.
    """
    new, old, theta = config.get("rope_parameters"), config.get("rope_scaling"), config.get("rope_theta")
    if isinstance(new, dict) and theta is not None and new.get("rope_theta", theta) != theta:
        raise DraftlineError(
            f"rope_theta is {theta} and rope_parameters says {new['rope_theta']}; transformers 4 reads one, 5 the other."
        )
    if theta is None and isinstance(new, dict):
        theta = new.get("rope_theta")
    spelled = [_rope(part, theta) for part in (new, old) if isinstance(part, dict) and part]
    if len(spelled) == 2 and spelled[0] != spelled[1]:
        raise DraftlineError(f"rope_parameters is {new} and rope_scaling {old}; transformers 4 reads one, 5 the other.")
    return spelled[0] if spelled else _rope({}, theta)


def _rope(part: dict[str, Any], theta: float | None) -> dict[str, Any]:
    rope = {name: value for name, value in part.items() if name != "type" and value is not None}
    rope.setdefault("rope_type", part.get("type", "default"))
    # 10000 is the default of LlamaConfig and of every target's class in the contract's table.
    rope.setdefault("rope_theta", 10000.0 if theta is None else theta)
    return rope


def spell_rope(rope: dict[str, Any]) -> dict[str, Any]:
    """RoPE in both spellings, as entries of a config: what transformers 4 and 5 each read."""
    entries: dict[str, Any] = {"rope_theta": rope["rope_theta"], "rope_parameters": dict(rope)}
    if rope.get("rope_type", "default") != "default":
        # transformers 4 and older SGLang read scaling from here, and its type without theta
        entries["rope_scaling"] = {name: value for name, value in rope.items() if name != "rope_theta"}
    return entries


def _speculators_outputs(raw: dict[str, Any]) -> tuple[int, ...] | None:
    """speculators and vLLM name boundaries: k is the input of layer k, so the output of layer k - 1."""
    ids = raw.get("eagle_aux_hidden_state_layer_ids")
    if isinstance(ids, list) and ids and all(type(layer) is int for layer in ids):
        return tuple(layer - 1 for layer in ids)
    return None


def _verifier_architecture(raw: dict[str, Any]) -> str | None:
    """speculators calls the target the verifier, and writes down its class, or for a converted draft the draft's own."""
    value: Any = raw
    for key in ("speculators_config", "verifier", "architectures"):
        value = value.get(key) if isinstance(value, dict) else None
    name = value[0] if isinstance(value, list) and value else None
    return name if isinstance(name, str) and "Eagle3" not in name else None


def _from_speculators(raw: dict[str, Any], outputs: tuple[int, ...] | None, architecture: str | None) -> dict[str, Any]:
    layer = raw.get("transformer_layer_config")
    layer = dict(layer) if isinstance(layer, dict) else {}
    if layer.get("model_type", "llama") == "llama":
        layer = _LLAMA | layer
    for name in ("architectures", "transformers_version", "_name_or_path"):
        layer.pop(name, None)
    config = {"architectures": [ARCHITECTURE], **layer, "tie_word_embeddings": raw.get("tie_word_embeddings", False)}
    for name in ("torch_dtype", "dtype", "draft_vocab_size", *NORM_FLAGS):
        if name in raw:
            config[name] = raw[name]
    if raw.get("target_hidden_size") is not None:
        config["target_hidden_size"] = raw["target_hidden_size"]
    if outputs is not None:
        known = can_capture(architecture) and min(outputs) >= 0
        config["eagle_config"] = {
            "eagle_aux_hidden_state_layer_ids": _served(outputs, architecture) if known else list(outputs),
            "use_aux_hidden_state": True,
        }
    return config


def _served(outputs: tuple[int, ...], architecture: str) -> list[int]:
    try:
        return served_layer_ids(outputs, architecture, None)
    except DraftlineError:  # outputs that this architecture cannot express: the check on layers says so
        return list(outputs)
