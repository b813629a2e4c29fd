"""The draft's reduced vocabulary: which D of the target's V tokens it can propose."""

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save

from tasks.common.errors import DraftlineError
from tasks.common.files import write_atomically


@dataclass(frozen=True)
class VocabMap:
    """Draft id i stands for target id `target_ids[i]`.

    Attributes:
        target_ids: int64 [D], strictly increasing.
        vocab_size: V.
        inputs_sha256: hash of what the map was built from. Head rows mean nothing under another map.
    """

    target_ids: torch.Tensor
    vocab_size: int
    inputs_sha256: str

    @classmethod
    def of_offsets(cls, d2t: torch.Tensor, vocab_size: int, inputs_sha256: str = "") -> "VocabMap":
        """From offsets as SGLang reads them: target id = i + d2t[i]; int64 [D]."""
        return cls(d2t.long() + torch.arange(len(d2t)), vocab_size, inputs_sha256)

    @property
    def d2t(self) -> torch.Tensor:
        """Offsets as SGLang reads them: target id = i + d2t[i]; int64 [D]."""
        return self.target_ids - torch.arange(len(self.target_ids))

    @property
    def t2d(self) -> torch.Tensor:
        """True at the target ids that the draft can propose; bool [V]."""
        return self.draft_ids >= 0

    @cached_property
    def draft_ids(self) -> torch.Tensor:
        """Draft id of each target id, -1 where it has none; int64 [V]."""
        draft_ids = torch.full((self.vocab_size,), -1)
        draft_ids[self.target_ids] = torch.arange(len(self.target_ids))
        return draft_ids

    def save(self, path: Path) -> None:
        """Write d2t, t2d and the hash of the inputs."""
        tensors = {"d2t": self.d2t, "t2d": self.t2d}
        write_atomically(path, save(tensors, metadata={"inputs_sha256": self.inputs_sha256}))

    @classmethod
    def load(cls, path: Path) -> "VocabMap":
        """Read a map back.

        Raises:
            DraftlineError: the file is absent or is no vocabulary map.
        """
        try:
            with safe_open(path, framework="pt") as file:
                d2t, t2d = file.get_tensor("d2t"), file.get_tensor("t2d")
                inputs_sha256 = file.metadata()["inputs_sha256"]
        except Exception as error:
            raise DraftlineError(f"{path}: no vocabulary map: {error}. Run `dvc repro train_draft`.") from None
        return cls.of_offsets(d2t, len(t2d), inputs_sha256)
