"""Bring a target into `artifacts/target` and record what it is."""

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tasks.common.errors import DraftlineError
from tasks.common.files import read_json, sha256_file, sha256_json, write_json
from tasks.common.params import Target
from tasks.common.progress import progress
from tasks.common.target import TARGET, TargetShape, stop_token_ids, weight_outline
from tasks.common.target_source import TargetSource, locate, read_config

# What decides how text becomes token ids; absent ones are skipped.
_TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "vocab.json",
    "merges.txt",
)
# The same of SentencePiece and tiktoken, under whatever name: tokenizer.model, spiece.model, qwen.tiktoken.
_TOKENIZER_SUFFIXES = (".model", ".tiktoken")


def prepare_target(target: Target, folder: Path) -> dict:
    """Fill `folder` with config, tokenizer and (built-in target) weights, and `draftline.json`.

    Returns:
        The identity that `draftline.json` holds: source, architecture, sizes, target_sha256,
        tokenizer_sha256, weight_outline, trust_remote_code.

    Raises:
        DraftlineError: the target cannot be had, has no chat template, or has no safetensors weights.
    """
    source = locate(target)
    _require_apart(source, folder)
    if folder == TARGET:
        _remove_earlier(folder)
    folder.mkdir(parents=True, exist_ok=True)
    if source.gguf_file:
        _dequantise(source, folder)
    else:
        _copy_small_files(source.folder, folder)
    weights = folder if source.gguf_file else source.folder
    _require_usable(weights, folder, target.trust_remote_code)
    shape = TargetShape.of(read_config(TargetSource(source.kind, folder), target.trust_remote_code))
    identity = {
        "source": source.kind,
        "architecture": shape.architecture,
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "vocab_size": shape.vocab_size,
        "target_sha256": _hash_weights(weights, read_json(folder / "config.json")),
        "tokenizer_sha256": sha256_json({name: sha256_file(folder / name) for name in _tokenizer_files(folder)}),
        "weight_outline": weight_outline(weights),
        "trust_remote_code": target.trust_remote_code,
    }
    write_json(folder / "draftline.json", identity)
    return identity


def _require_apart(source: TargetSource, folder: Path) -> None:
    if source.folder.resolve().is_relative_to(folder.resolve()):
        raise DraftlineError(
            f"target.model: {source.folder} is in {folder}, which prepare_target empties and fills. Move the model elsewhere."
        )


def _remove_earlier(folder: Path) -> None:
    """What only an earlier target had, a chat template say, would be taken for this one's."""
    if folder.is_symlink():
        folder.unlink()  # what it points to may be anyone's
    elif folder.exists():
        shutil.rmtree(folder)


def _dequantise(source: TargetSource, folder: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig, GgufConfig

    config = read_config(source)
    model = AutoModelForCausalLM.from_pretrained(
        source.folder,
        config=config,
        dtype=torch.float32,
        # Without `dequantize`, transformers refuses to save what it loaded from a GGUF.
        quantization_config=GgufConfig(dequantize=True),
        **source.options,
    )
    model.generation_config = GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    )
    model.save_pretrained(folder)
    AutoTokenizer.from_pretrained(source.folder, **source.options).save_pretrained(folder)


def _copy_small_files(source: Path, folder: Path) -> None:
    for path in sorted(source.iterdir()):
        if path.is_file() and (path.suffix in (".json", ".jinja", ".py") or _is_of_tokenizer(path)):
            shutil.copyfile(path, folder / path.name)
    if not (folder / "generation_config.json").exists():
        config = read_json(folder / "config.json")
        config = config.get("text_config", config)
        write_json(folder / "generation_config.json", {"eos_token_id": config.get("eos_token_id")})


def _require_usable(weights: Path, folder: Path, trust_remote_code: bool) -> None:
    from transformers import AutoTokenizer

    if not list(weights.glob("*.safetensors")):
        raise DraftlineError(f"{weights}: no .safetensors weights. Convert the target with `save_pretrained` first.")
    if AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code).chat_template is None:
        raise DraftlineError(
            f"{weights}: the tokenizer has no chat template, so its answers would not look like those it gives when "
            f"served. Add chat_template.jinja (the one that your server will use)."
        )
    stop_token_ids(folder)


def _tokenizer_files(folder: Path) -> list[str]:
    return [path.name for path in folder.iterdir() if _is_of_tokenizer(path)]


def _is_of_tokenizer(path: Path) -> bool:
    return path.name in _TOKENIZER_FILES or path.suffix in _TOKENIZER_SUFFIXES


def _hash_weights(weights: Path, config: dict) -> str:
    paths = sorted(weights.glob("*.safetensors"))
    # SHA-256 releases the GIL: a terabyte in many files is read as fast as the disk gives it.
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        hashes = list(progress(pool.map(sha256_file, paths), total=len(paths), desc="hashing weights", unit="file"))
    return sha256_json({"config": config, "weights": dict(zip((p.name for p in paths), hashes, strict=True))})
