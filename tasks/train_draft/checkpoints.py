"""Checkpoints that survive any death, and the best draft so far.

    artifacts/draft/checkpoints/run.json              key of the run: settings, contract, hidden states
    artifacts/draft/checkpoints/step-00000050.pt      weights, optimiser, data position, curve; with its SHA-256
    artifacts/draft/checkpoints/best-00000100.safetensors   the draft with the best predicted acceptance length

A file is renamed into place after it was forced to the disk. The learning rate follows from the step and the
order of the data from (seed, epoch), so nothing else is needed for a resumed run to equal an uninterrupted one.
"""

import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from tasks.common.errors import DraftlineError
from tasks.common.files import read_json, replacing, sha256_file, write_json

_KEPT = 2


class Checkpoints:
    """The partial work of one training run."""

    def __init__(self, folder: Path, key: str):
        """Open the checkpoints of the run `key`; those of another run are discarded with a printed line."""
        self.folder = folder
        run = folder / "run.json"
        if folder.exists() and not (run.exists() and read_json(run)["key"] == key):
            print(f"{folder}: checkpoints of other settings or other hidden states; starting anew.")
            shutil.rmtree(folder)
        if not run.exists():
            write_json(run, {"key": key})

    def best(self, step: int) -> Path:
        """Weights of the draft that was the best one when it was evaluated after `step`."""
        return self.folder / f"best-{step:08d}.safetensors"

    def save_best(self, step: int, draft: torch.nn.Module) -> None:
        with replacing(self.best(step)) as partial:
            save_file(draft.state_dict(), partial)

    def save(self, step: int, state: dict) -> None:
        """Write the state after `step`; keep the newest two, and the best draft that each of them knows."""
        path = self._path(step)
        with replacing(path) as partial:
            torch.save(state, partial)
        record = {name: state[name] for name in ("vocab_map_sha256", "best_step")}
        write_json(path.with_suffix(".json"), {"sha256": sha256_file(path), **record})
        for old in self._steps()[:-_KEPT]:
            self._path(old).with_suffix(".json").unlink(missing_ok=True)
            self._path(old).unlink(missing_ok=True)
        wanted = {self.best(best) for kept in self._steps() if (best := self._record(kept).get("best_step"))}
        for path in set(self.folder.glob("best-*.safetensors")) - wanted:
            path.unlink()

    def newest(self, vocab_map_sha256: str) -> dict | None:
        """State of the newest checkpoint that is whole, or None; a damaged one is reported and passed over.

        Raises:
            DraftlineError: it was trained with another vocabulary map: its head rows mean other tokens.
        """
        for step in reversed(self._steps()):
            path, record = self._path(step), self._record(step)
            if record.get("sha256") != sha256_file(path):
                print(f"{path}: cut off or changed since it was written; going back to the one before.")
                continue
            if record["vocab_map_sha256"] != vocab_map_sha256:
                raise DraftlineError(
                    f"{path}: trained with vocabulary map {record['vocab_map_sha256'][:12]}, this run's is "
                    f"{vocab_map_sha256[:12]}: the rows of the head would mean other tokens. Delete {self.folder} to "
                    f"train anew, or bring back the hidden states that it was trained on."
                )
            return torch.load(path, weights_only=True)
        return None

    def remove(self) -> None:
        """Delete all partial work, once the result stands."""
        shutil.rmtree(self.folder)

    def _record(self, step: int) -> dict:
        """What is known of a checkpoint without loading it; empty where its writer died."""
        path = self._path(step).with_suffix(".json")
        return read_json(path) if path.exists() else {}

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}.pt"

    def _steps(self) -> list[int]:
        return sorted(int(path.stem.removeprefix("step-")) for path in self.folder.glob("step-*.pt"))
