"""Targets and drafts with more attention heads that compute the same: what is added is zero.

Tensor parallelism over n GPUs needs key-value heads that n divides. SmolLM2-135M has 9 query and 3 key-value heads: for two
GPUs it gets a fourth key-value head and the three query heads that share it. Their rows of q_proj, k_proj and v_proj and
their columns of o_proj are zero, so they add nothing to the layer's output.
"""

import re
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.common.errors import DraftlineError
from tasks.common.files import read_json, sha256_file, write_atomically, write_json

if TYPE_CHECKING:
    import torch

_PROJECTION = re.compile(r"self_attn\.([qkvo])_proj\.(weight|bias)$")


def padded_heads(heads: int, kv_heads: int, parts: int) -> tuple[int, int]:
    """Query and key-value heads that `parts` divides, as many query heads to a key-value head as before."""
    padded = -(-kv_heads // parts) * parts
    return heads // kv_heads * padded, padded


def pad_target(source: Path, folder: Path, parts: int) -> None:
    """Write the target in `source`, a Hugging Face folder of one weight file, to `folder`, with heads that `parts` divides.

    Raises:
        DraftlineError: its weights lie in several files, or its projections are not those of a Llama.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for path in source.iterdir():
        if path.suffix in (".json", ".jinja", ".txt", ".model", ".tiktoken") and path.name not in (
            "config.json",
            "draftline.json",
        ):
            shutil.copyfile(path, folder / path.name)
    _pad(source, folder, parts)


def pad_draft(source: Path, folder: Path, parts: int, target_sha256: str) -> None:
    """The same of an exported draft.

    Args:
        target_sha256: of the padded target, whose draft it is from now on.

    Raises:
        DraftlineError: as `pad_target`.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    _pad(source, folder, parts)
    record = read_json(source / "draftline.json")
    record["contract"]["target_sha256"] = target_sha256
    for name, file in (("model_sha256", "model.safetensors"), ("config_sha256", "config.json")):
        if name in record:
            record[name] = sha256_file(folder / file)
    write_json(folder / "draftline.json", record)


def _pad(source: Path, folder: Path, parts: int) -> None:
    from safetensors.torch import load_file, save

    config, weights = read_json(source / "config.json"), source / "model.safetensors"
    if not weights.exists():
        raise DraftlineError(f"{weights}: not there. Heads are padded in targets and drafts of one weight file.")
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    size = config.get("head_dim") or config["hidden_size"] // heads
    query, key = padded_heads(heads, kv_heads, parts)
    tensors = load_file(weights)
    for name, tensor in tensors.items():
        if found := _PROJECTION.search(name):
            old, new = (heads, query) if found[1] in "qo" else (kv_heads, key)
            tensors[name] = _with_zeros(name, tensor, found, size * old, size * new)
    write_json(folder / "config.json", _padded_config(config, query, key, size))
    write_atomically(folder / "model.safetensors", save(tensors, metadata={"format": "pt"}))


def _with_zeros(name: str, tensor: "torch.Tensor", found: re.Match, old: int, new: int) -> "torch.Tensor":
    """Rows of q, k and v, columns of o; o's bias is the layer's and stays."""
    import torch

    if found[1] == "o" and found[2] == "bias":
        return tensor
    axis = 1 if found[1] == "o" else 0
    if tensor.shape[axis] != old:
        raise DraftlineError(
            f"tensor {name} is {list(tensor.shape)}, expected {old} along axis {axis}: no Llama's heads."
        )
    added = list(tensor.shape)
    added[axis] = new - old
    return torch.cat([tensor, tensor.new_zeros(added)], dim=axis)


def _padded_config(config: dict[str, Any], query: int, key: int, size: int) -> dict[str, Any]:
    """head_dim is written out: it is the hidden size over the number of heads no more."""
    return config | {"num_attention_heads": query, "num_key_value_heads": key, "head_dim": size}
