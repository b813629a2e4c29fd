"""Correct tiny checkpoints in each form, for targets of each kind: written by hand, not by the code under test."""

import json
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors.torch import save_file

from tasks.common.check import Check
from tasks.common.contract import Contract

HIDDEN, INNER, HEADS, KV_HEADS, HEAD_DIM, VOCAB, DRAFT_VOCAB = 32, 48, 4, 2, 8, 96, 24
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 128,
}
# Configs as the models' own repositories spell them: transformers 4 for the first two, nested and latent for the third.
TARGETS = {
    "llama": {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "num_hidden_layers": 12,
        "rope_theta": 500000.0,
        "rope_scaling": LLAMA3,
    },
    "qwen3": {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": 12,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1000000.0},
    },
    "deepseek": {
        "architectures": ["DeepseekV3ForCausalLM"],
        "model_type": "deepseek_v3",
        "num_hidden_layers": 61,
        "kv_lora_rank": 16,
        "rope_theta": 10000,
        "rope_scaling": None,
    },
}
OUTPUTS = {"llama": (1, 5, 8), "qwen3": (1, 5, 8), "deepseek": (2, 30, 58)}
SERVED = {"llama": [1, 5, 8], "qwen3": [1, 5, 8], "deepseek": [3, 31, 59]}


def target_config(kind: str, hidden: int = HIDDEN) -> dict:
    return {
        "hidden_size": hidden,
        "intermediate_size": INNER,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCAB,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "torch_dtype": "float32",
        **TARGETS[kind],
    }


@dataclass
class Checkpoint:
    """A draft before it is written: mutate, then `write`."""

    config: dict
    tensors: dict[str, torch.Tensor]
    contract: Contract | None = None
    record: bool = field(default=True)

    def write(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(self.config))
        save_file(self.tensors, folder / "model.safetensors")
        if self.contract and self.record:
            (folder / "draftline.json").write_text(json.dumps({"contract": self.contract.model_dump(mode="json")}))
        return folder


def contract_of(kind: str, outputs: tuple[int, ...] | None = None, hidden: int = HIDDEN) -> Contract:
    return Contract(
        architecture=TARGETS[kind]["architectures"][0],
        num_layers=TARGETS[kind]["num_hidden_layers"],
        hidden_size=hidden,
        vocab_size=VOCAB,
        aux_layer_ids=outputs or OUTPUTS[kind],
        last_is_normed=True,
        target_sha256="1" * 64,
        tokenizer_sha256="2" * 64,
    )


def sglang_draft(kind: str = "llama", **sizes) -> Checkpoint:
    """SGLang/EAGLE form: midlayer.*, everything at the top level.

    Args:
        sizes: num_aux (3), draft_vocab (DRAFT_VOCAB; VOCAB; None), target_hidden (HIDDEN).
    """
    num_aux, seen = sizes.get("num_aux", 3), sizes.get("target_hidden", HIDDEN)
    draft_vocab = sizes.get("draft_vocab", DRAFT_VOCAB)
    outputs = {2: OUTPUTS[kind][:2], 3: OUTPUTS[kind], 4: (*OUTPUTS[kind], OUTPUTS[kind][-1] + 1)}[num_aux]
    served = [layer + (kind == "deepseek") for layer in outputs]
    target = target_config(kind, seen)
    rope = {"rope_theta": target.get("rope_theta", 1000000.0)}
    rope["rope_parameters"] = {"rope_type": "default", "rope_theta": rope["rope_theta"]}
    if kind == "llama":
        rope["rope_parameters"] = LLAMA3 | {"rope_theta": 500000.0}
        rope["rope_scaling"] = LLAMA3
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "torch_dtype": "float32",
        "hidden_act": "silu",
        "hidden_size": HIDDEN,
        "intermediate_size": INNER,
        "num_hidden_layers": 1,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "draft_vocab_size": draft_vocab,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "eagle_config": {"eagle_aux_hidden_state_layer_ids": served, "use_aux_hidden_state": True},
        **rope,
    }
    if seen != HIDDEN:
        config["target_hidden_size"] = seen
    return Checkpoint(config, tensors(num_aux, seen, draft_vocab), contract_of(kind, outputs, seen))


def tensors(num_aux: int, seen: int, draft_vocab: int | None) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    made = {
        "fc.weight": random(HIDDEN, num_aux * seen),
        "norm.weight": random(HIDDEN),
        "midlayer.input_layernorm.weight": random(HIDDEN),
        "midlayer.hidden_norm.weight": random(HIDDEN),
        "midlayer.post_attention_layernorm.weight": random(HIDDEN),
        "midlayer.self_attn.q_proj.weight": random(HEADS * HEAD_DIM, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": random(KV_HEADS * HEAD_DIM, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": random(KV_HEADS * HEAD_DIM, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": random(HIDDEN, HEADS * HEAD_DIM),
        "midlayer.mlp.gate_proj.weight": random(INNER, HIDDEN),
        "midlayer.mlp.up_proj.weight": random(INNER, HIDDEN),
        "midlayer.mlp.down_proj.weight": random(HIDDEN, INNER),
    }
    if draft_vocab is not None:
        made["lm_head.weight"] = random(draft_vocab, HIDDEN)
        if draft_vocab != VOCAB:
            ids = torch.arange(draft_vocab) * 3 + 1
            made["d2t"] = ids - torch.arange(draft_vocab)
            made["t2d"] = torch.zeros(VOCAB, dtype=torch.bool)
            made["t2d"][ids] = True
    if seen != HIDDEN:
        made["embed_tokens.weight"] = random(VOCAB, HIDDEN)
    return made


def specforge_draft(kind: str = "llama", legacy: bool = False, **sizes) -> Checkpoint:
    """SpecForge form: layers.0.*, a norm for each aux state; the older names of those norms where `legacy`."""
    draft = sglang_draft(kind, **sizes)
    draft.tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in draft.tensors.items()}
    num_aux, seen = sizes.get("num_aux", 3), sizes.get("target_hidden", HIDDEN)
    names = ("aux_norm_low", "aux_norm_mid", "aux_norm_high")
    for slot in range(num_aux):
        draft.tensors[f"{names[slot] if legacy else f'fc_norm.{slot}'}.weight"] = torch.ones(seen)
    draft.config["use_aux_norm" if legacy else "fc_norm"] = True
    draft.record = False  # Draftline's own trainer has no such norm
    return draft


def speculators_draft(kind: str = "llama", **sizes) -> Checkpoint:
    """speculators form: the layer's config nested, ids as boundaries (input of layer k), the embedding stored."""
    draft = sglang_draft(kind, **sizes)
    flat, outputs = draft.config, draft.contract.aux_layer_ids
    rope = {name: flat[name] for name in ("rope_theta", "rope_scaling", "rope_parameters") if name in flat}
    sizes_of_layer = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
    sizes_of_layer += ("num_key_value_heads", "vocab_size", "max_position_embeddings", "rms_norm_eps")
    draft.config = {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "torch_dtype": "float32",
        "draft_vocab_size": flat["draft_vocab_size"],
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in outputs],
        "norm_before_residual": False,
        "embed_requires_grad": False,
        "target_hidden_size": flat.get("target_hidden_size"),
        "tie_word_embeddings": False,
        "transformer_layer_config": {"model_type": "llama"} | {name: flat[name] for name in sizes_of_layer} | rope,
        "speculators_config": {"algorithm": "eagle3", "verifier": {"architectures": TARGETS[kind]["architectures"]}},
    }
    draft.tensors = {name.replace("midlayer.", "layers.0."): tensor for name, tensor in draft.tensors.items()}
    draft.tensors["embed_tokens.weight"] = torch.ones(VOCAB, HIDDEN)
    draft.record = False
    return draft


FORMS = {"SGLang/EAGLE": sglang_draft, "SpecForge": specforge_draft, "speculators": speculators_draft}


def not_fine(checks: dict[str, Check]) -> dict[str, str]:
    """Findings that are an error or a warning."""
    return {name: check.found for name, check in checks.items() if check.verdict in ("error", "warning")}
