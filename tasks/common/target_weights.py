"""Single tensors of a target, read without loading the model."""

import json
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING

from safetensors import safe_open

from tasks.common.errors import DraftlineError
from tasks.common.files import read_json
from tasks.common.target import TARGET

if TYPE_CHECKING:
    import torch

# Families whose RMSNorm multiplies by 1 + weight.
_STORED_MINUS_ONE = frozenset(
    {
        "gemma",
        "gemma2",
        "gemma3",
        "minimax_m3_vl",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_next",
        "step3p7",
        "vaultgemma",
    }
)


class TargetWeights:
    """Tensors of a Hugging Face folder: one file or an index of shards, head tied to the embedding or not."""

    def __init__(self, folder: Path = TARGET):
        """Find which file holds which tensor; reads headers only.

        Raises:
            DraftlineError: the folder holds no safetensors weights.
        """
        self.folder = folder
        index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
        if index.exists():
            self._files: dict[str, str] = json.loads(index.read_bytes())["weight_map"]
        elif single.exists():
            with safe_open(single, framework="np") as file:  # a header needs no torch, whose import takes seconds
                self._files = dict.fromkeys(file.keys(), single.name)
        else:
            raise DraftlineError(
                f"{folder}: neither model.safetensors nor model.safetensors.index.json. Draftline reads safetensors "
                f"weights; prepare the target again: `dvc repro prepare_target`."
            )

    def find(self, suffix: str) -> str | None:
        """Full name of the one tensor whose name ends with `suffix`.

        Multimodal targets prefix the language model's names, and may call it `language_model` instead of `model`.

        Raises:
            DraftlineError: several tensors match.
        """
        endings = (f".{suffix}", f".language_{suffix}")
        names = [name for name in self._files if f".{name}".endswith(endings)]
        if len(names) > 1:
            raise DraftlineError(f"{self.folder}: several tensors are named {suffix}: {', '.join(sorted(names))}.")
        return names[0] if names else None

    def read(self, suffix: str) -> "torch.Tensor":
        """The tensor whose name ends with `suffix`, in float32.

        Raises:
            DraftlineError: there is none; names it.
        """
        name = self.find(suffix)
        if name is None:
            raise DraftlineError(
                f"{self.folder}: no tensor {suffix} among {len(self._files)}. Draftline needs a decoder-only target with Llama's "
                f"tensor names; see what is there with `safetensors`' safe_open(...).keys()."
            )
        with safe_open(self.folder / self._files[name], framework="pt") as file:
            return file.get_tensor(name).float()

    def shape(self, suffix: str) -> tuple[int, ...] | None:
        """Shape of the tensor whose name ends with `suffix`, from its header; None where there is none."""
        name = self.find(suffix)
        if name is None:
            return None
        with safe_open(self.folder / self._files[name], framework="np") as file:
            return tuple(file.get_slice(name).get_shape())

    def num_parameters(self) -> int:
        """Numbers in all tensors, from the headers."""
        total = 0
        for path in dict.fromkeys(self._files.values()):
            with safe_open(self.folder / path, framework="np") as file:
                total += sum(prod(file.get_slice(name).get_shape()) for name in file.keys())  # noqa: SIM118
        return total

    def embed_tokens(self) -> "torch.Tensor":
        """[V, H]; not the copy that a layer for multi-token prediction has (model.layers.61.embed_tokens)."""
        return self.read("model.embed_tokens.weight")

    def lm_head(self) -> "torch.Tensor":
        """[V, H]: the head's own rows, or the embedding's where the two are tied."""
        return self.read("lm_head.weight") if self.find("lm_head.weight") else self.embed_tokens()

    def final_norm(self) -> "torch.Tensor":
        """What the RMSNorm before the head multiplies by, [H]."""
        return self.norm("model.norm.weight")

    def norm(self, suffix: str) -> "torch.Tensor":
        """What an RMSNorm multiplies by, [H]; some families store it less one."""
        weight = self.read(suffix)
        family = str(read_json(self.folder / "config.json").get("model_type")).removesuffix("_text")
        return weight + 1 if family in _STORED_MINUS_ONE else weight
