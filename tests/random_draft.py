"""An exported draft over the tiny target with random weights: it loads, speculates, and is nearly always wrong."""

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from tasks.common.contract import Contract

HIDDEN, HEADS, KV_HEADS, HEAD_DIM, MLP, VOCAB, DRAFT_VOCAB = 64, 4, 2, 16, 128, 320, 128


def write_random_draft(folder: Path, contract: Contract, **changes) -> None:
    """Write config.json, model.safetensors and draftline.json.

    Args:
        changes: values of the config to replace.
    """
    generator = torch.Generator().manual_seed(0)

    def random(*shape):
        return torch.randn(*shape, generator=generator) * 0.1

    target_ids = torch.arange(0, 2 * DRAFT_VOCAB, 2)
    known = torch.zeros(VOCAB, dtype=torch.bool)
    known[target_ids] = True
    tensors = {
        "fc.weight": random(HIDDEN, contract.aux_width),
        "norm.weight": torch.ones(HIDDEN),
        "lm_head.weight": random(DRAFT_VOCAB, HIDDEN),
        "d2t": target_ids - torch.arange(DRAFT_VOCAB),
        "t2d": known,
        **{
            f"midlayer.{n}.weight": torch.ones(HIDDEN)
            for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")
        },
        "midlayer.self_attn.q_proj.weight": random(HEADS * HEAD_DIM, 2 * HIDDEN),
        "midlayer.self_attn.k_proj.weight": random(KV_HEADS * HEAD_DIM, 2 * HIDDEN),
        "midlayer.self_attn.v_proj.weight": random(KV_HEADS * HEAD_DIM, 2 * HIDDEN),
        "midlayer.self_attn.o_proj.weight": random(HIDDEN, HEADS * HEAD_DIM),
        "midlayer.mlp.gate_proj.weight": random(MLP, HIDDEN),
        "midlayer.mlp.up_proj.weight": random(MLP, HIDDEN),
        "midlayer.mlp.down_proj.weight": random(HIDDEN, MLP),
    }
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": MLP,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "num_hidden_layers": 1,
        "vocab_size": VOCAB,
        "draft_vocab_size": DRAFT_VOCAB,
        "tie_word_embeddings": False,
        "max_position_embeddings": 1024,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "hidden_act": "silu",
        "torch_dtype": "float32",
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(contract.aux_layer_ids),
            "use_aux_hidden_state": True,
        },
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config | changes))
    (folder / "draftline.json").write_text(json.dumps({"contract": contract.model_dump()}))
