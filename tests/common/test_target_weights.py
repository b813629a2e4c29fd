"""Which tensor of a target is meant, by the names that families give them."""

from importlib import import_module

import pytest
import torch
from safetensors.torch import save_file

from tasks.common.files import write_json
from tasks.common.target_weights import TargetWeights


@pytest.fixture
def weights(tmp_path):
    """`weights(*names)`: a target whose tensor number n holds n."""

    def make(*names: str) -> TargetWeights:
        save_file({name: torch.tensor([n]) for n, name in enumerate(names)}, tmp_path / "model-1.safetensors")
        write_json(
            tmp_path / "model.safetensors.index.json", {"weight_map": dict.fromkeys(names, "model-1.safetensors")}
        )
        write_json(tmp_path / "config.json", {"model_type": "llama"})
        return TargetWeights(tmp_path)

    return make


def test_a_layer_for_multi_token_prediction_is_not_the_target(weights):
    """Names of DeepSeek-V3: layer 61 has embedding, head and norm of its own."""
    target = weights(
        "model.embed_tokens.weight",
        "lm_head.weight",
        "model.norm.weight",
        "model.layers.61.embed_tokens.weight",
        "model.layers.61.shared_head.head.weight",
        "model.layers.61.shared_head.norm.weight",
    )
    assert [target.embed_tokens(), target.lm_head(), target.final_norm()] == [0, 1, 2]


@pytest.mark.parametrize("prefix", ["language_model.model", "model.language_model"])
def test_the_language_model_of_a_multimodal_target_is_found(weights, prefix):
    target = weights(f"{prefix}.embed_tokens.weight", f"{prefix}.norm.weight", "model.visual.norm.weight")
    assert [target.embed_tokens(), target.lm_head(), target.final_norm()] == [0, 0, 1]


@pytest.mark.parametrize(
    ("family", "norm"),
    [
        ("llama", "LlamaRMSNorm"),
        ("qwen3", "Qwen3RMSNorm"),
        ("gemma3n", "Gemma3nRMSNorm"),
        ("gemma4", "Gemma4RMSNorm"),
        ("gemma", "GemmaRMSNorm"),
        ("gemma2", "Gemma2RMSNorm"),
        ("gemma3", "Gemma3RMSNorm"),
        ("minimax_m3_vl", "MiniMaxM3VLRMSNorm"),
        ("qwen3_5", "Qwen3_5RMSNorm"),
        ("qwen3_5_moe", "Qwen3_5MoeRMSNorm"),
        ("qwen3_next", "Qwen3NextRMSNorm"),
        ("step3p7", "Step3p7RMSNorm"),
        ("vaultgemma", "VaultGemmaRMSNorm"),
    ],
)
@pytest.mark.parametrize("suffix", ["", "_text"])
def test_the_final_norm_is_what_the_norm_of_the_family_multiplies_by(tmp_path, family, norm, suffix):
    module = getattr(import_module(f"transformers.models.{family}.modeling_{family}"), norm)(8)
    torch.nn.init.normal_(module.weight, generator=torch.Generator().manual_seed(0))
    save_file({"model.norm.weight": module.weight.detach()}, tmp_path / "model.safetensors")
    write_json(tmp_path / "config.json", {"model_type": family + suffix})
    torch.testing.assert_close(TargetWeights(tmp_path).final_norm(), module(torch.ones(8)).detach())
