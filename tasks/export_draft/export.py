"""Write a trained draft as the folder that SGLang loads, and read it back."""

import shutil
from pathlib import Path

from tasks.common.capture import served_layer_ids
from tasks.common.checkpoint_form import WEIGHTS, check_export
from tasks.common.contract import Contract
from tasks.common.draft_checks.lost_keys import lost_keys
from tasks.common.draft_files import CONFIG
from tasks.common.draft_form import ARCHITECTURE, spell_rope
from tasks.common.errors import DraftlineError
from tasks.common.files import read_json, sha256_file, write_atomically, write_json
from tasks.common.target import TARGET, TargetShape, load_config


def export_draft(draft: Path, folder: Path, dtype: str, target: Path = TARGET) -> dict:
    """Write config.json, model.safetensors and draftline.json (contract and provenance) to `folder`.

    The config is derived from the run, never handed in (failure mode W8).

    Args:
        draft: what `train_draft` left: draft.safetensors, draft.json, vocab_map.safetensors.
        dtype: type of the served weights.

    Returns:
        What draftline.json holds.

    Raises:
        DraftlineError: the draft is of another target, or what was written would not be served as trained.
    """
    import torch
    from safetensors.torch import load_file, save

    from tasks.common.vocab_map import VocabMap

    trained = read_json(draft / "draft.json")
    contract = Contract.model_validate(trained["contract"])
    shape = TargetShape.of(load_config(target))
    vocab_map = VocabMap.load(draft / "vocab_map.safetensors")
    tensors = {
        name: tensor.to(getattr(torch, dtype)) for name, tensor in load_file(draft / "draft.safetensors").items()
    }
    config = export_config(trained["config"], contract, dtype)
    if config["draft_vocab_size"] != config["vocab_size"]:
        tensors |= {"d2t": vocab_map.d2t, "t2d": vocab_map.t2d}
    if folder.exists():
        shutil.rmtree(folder)
    write_json(folder / CONFIG, config)
    write_atomically(folder / WEIGHTS, save(tensors, metadata={"format": "pt"}))
    problems = check_export(folder, shape) + lost_keys(folder, config)
    if problems:
        raise DraftlineError("\n".join(problems))
    record = {
        "contract": contract.model_dump(),
        "vocab_map_sha256": trained["vocab_map_sha256"],
        "draft_sha256": sha256_file(draft / "draft.safetensors"),
        "model_sha256": sha256_file(folder / WEIGHTS),
        "config_sha256": sha256_file(folder / CONFIG),
    }
    write_json(folder / "draftline.json", record)
    return record


def export_config(sizes: dict, contract: Contract, dtype: str) -> dict:
    """config.json of a draft (contract, section 5); RoPE in both spellings, no nulls.

    Args:
        sizes: `DraftConfig.to_dict()` of the trained draft.
    """
    return {
        "architectures": [ARCHITECTURE],
        "model_type": "llama",
        "torch_dtype": dtype,
        "hidden_act": "silu",
        "hidden_size": sizes["hidden_size"],
        "intermediate_size": sizes["intermediate_size"],
        "num_hidden_layers": 1,
        "num_attention_heads": sizes["num_attention_heads"],
        "num_key_value_heads": sizes["num_key_value_heads"],
        "head_dim": sizes["head_dim"],
        "vocab_size": sizes["vocab_size"],
        "draft_vocab_size": sizes["draft_vocab_size"],
        "max_position_embeddings": sizes["max_position_embeddings"],
        "rms_norm_eps": sizes["rms_norm_eps"],
        **spell_rope(sizes["rope_parameters"]),
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": served_layer_ids(
                contract.aux_layer_ids, contract.architecture, contract.num_layers
            ),
            "use_aux_hidden_state": True,
        },
    }
