"""Checkpoints that survive any death, and the best draft so far.

    artifacts/draft/checkpoints/run.json              key of the run: settings, contract, hidden states
    artifacts/draft/checkpoints/step-00000050.pt      all that training goes on from (`Trainer.state`)
    artifacts/draft/checkpoints/step-00000050.json    its SHA-256, that of the best draft it knows, the vocabulary map's hash
    artifacts/draft/checkpoints/best-00000100.safetensors   the draft with the best predicted acceptance length
    artifacts/draft_set_aside/                        checkpoints of other settings, which find them again

A file is written under another name, forced to the disk, renamed, and its name forced to the disk: whenever the process
or the machine dies, the newest checkpoint with a record that fits is whole.
"""

import shutil
from pathlib import Path

import torch
from safetensors.torch import save_file

from tasks.common.contract import Contract
from tasks.common.errors import DraftlineError
from tasks.common.files import read_json, replacing, sha256_file, sync_folder, write_json

_KEPT = 2
_NAME = 16  # characters of the key that name a folder
_UNKNOWN = "of_unknown_run"
_RECORDED = {"sha256", "vocab_map_sha256", "best_step", "best_sha256"}


class Checkpoints:
    """The partial work of one training run."""

    def __init__(self, folder: Path, key: str):
        """Open the checkpoints of the run `key`; those of another run are set aside with a printed line."""
        self.key, self.folder, self._aside = key, folder, folder.parent.with_name(f"{folder.parent.name}_set_aside")
        self._best_sha256: dict[int, str] = {}
        self._whole: list[int] = []  # steps of checkpoints that were written or found whole here
        self._gone = folder.with_name(f".{folder.name}.gone")
        shutil.rmtree(self._gone, ignore_errors=True)  # of a run that was killed while it removed its checkpoints
        run = folder / "run.json"
        if folder.exists() and (found := _key_of(run)) != key:
            self._set_aside(found)
        if not folder.exists() and (earlier := self._aside / key[:_NAME]).exists():
            folder.parent.mkdir(exist_ok=True)
            earlier.rename(folder)
        keep_newest(self._aside)
        for partial in folder.glob(".*.partial"):  # of a writer that was killed
            partial.unlink()
        if not run.exists():
            write_json(run, {"key": key})

    def best(self, step: int) -> Path:
        """Weights of the draft that was the best one when it was evaluated after `step`."""
        return self.folder / f"best-{step:08d}.safetensors"

    def save_best(self, step: int, weights: dict[str, torch.Tensor]) -> None:
        with replacing(self.best(step)) as partial:
            save_file(weights, partial)
        self._best_sha256[step] = sha256_file(self.best(step))

    def save(self, step: int, state: dict) -> None:
        """Write the state after `step`; keep the newest two that are known to be whole, and the best draft of each.

        Raises:
            DraftlineError: the disk is full; earlier checkpoints stay.
        """
        path, best = self._path(step), state["best_step"]
        with replacing(path) as partial, open(partial, "wb") as file:  # given a name, torch hides why it cannot write
            torch.save(state, file)
        record = {"sha256": sha256_file(path), "vocab_map_sha256": state["vocab_map_sha256"], "best_step": best}
        write_json(path.with_suffix(".json"), record | {"best_sha256": self._best_sha256.get(best)})
        sync_folder(self.folder)
        self._whole = [*(earlier for earlier in self._whole if earlier != step), step][-_KEPT:]
        for other in set(self._steps()) - set(self._whole):
            self._path(other).with_suffix(".json").unlink(missing_ok=True)
            self._path(other).unlink(missing_ok=True)
        wanted = {self.best(best) for kept in self._steps() if (best := self._record(kept).get("best_step"))}
        for path in set(self.folder.glob("best-*.safetensors")) - wanted:
            path.unlink()

    def newest(self, vocab_map_sha256: str) -> int | None:
        """Step of the newest checkpoint that is whole, or None; a damaged one is reported and passed over.

        Raises:
            DraftlineError: it was trained with another vocabulary map: its head rows mean other tokens.
        """
        for step in reversed(self._steps()):
            path, record = self._path(step), self._record(step)
            if not (self._is(path, record.get("sha256")) and self._has_best(record)):
                continue
            if record["vocab_map_sha256"] != vocab_map_sha256:
                raise DraftlineError(
                    f"{path}: trained with vocabulary map {record['vocab_map_sha256'][:12]}, this run's is "
                    f"{vocab_map_sha256[:12]}: the rows of the head would mean other tokens. Delete {self.folder} to "
                    f"train anew, or bring back the hidden states that it was trained on."
                )
            self._whole = [step]
            return step
        return None

    def load(self, step: int, contract: Contract) -> dict:
        """The state that `newest` named.

        Raises:
            DraftlineError: it was trained under another contract than `contract`.
        """
        record = self._record(step)
        if record["best_step"] is not None:
            self._best_sha256[record["best_step"]] = record["best_sha256"]
        state = torch.load(self._path(step), map_location="cpu", weights_only=True)
        theirs, ours = state["contract"], contract.model_dump(mode="json")
        differing = [f"{key} {theirs.get(key)}, not {ours[key]}" for key in ours if theirs.get(key) != ours[key]]
        if differing:
            raise DraftlineError(
                f"{self._path(step)}: trained under another contract than these hidden states: {'; '.join(differing)}. Delete "
                f"{self.folder} to train anew, or bring back the hidden states that it was trained on."
            )
        return state

    def remove(self) -> None:
        """Delete the partial work, once the result stands; whoever is killed meanwhile leaves none that is half there."""
        self.folder.rename(self._gone)
        shutil.rmtree(self._gone)

    def _set_aside(self, key: str | None) -> None:
        """Days of work are not deleted for a slip in params.yaml."""
        if not self._steps():
            shutil.rmtree(self.folder)
            return
        place = self._aside / (key or _UNKNOWN)[:_NAME]
        place.parent.mkdir(exist_ok=True)
        shutil.rmtree(place, ignore_errors=True)
        self.folder.rename(place)
        place.touch()
        why = (
            f"checkpoints of other settings or other hidden states; starting anew. They are kept in {place}, and taken up again "
            f"with those settings."
        )
        if key is None:
            why = f"run.json does not say what these checkpoints are of; starting anew. They are kept in {place}."
        print(f"{self.folder}: {why}")

    def _has_best(self, record: dict) -> bool:
        return record["best_step"] is None or self._is(self.best(record["best_step"]), record["best_sha256"])

    @staticmethod
    def _is(path: Path, sha256: str | None) -> bool:
        if path.exists() and sha256_file(path) == sha256:
            return True
        print(f"{path}: cut off, changed or gone since it was written; going back to the one before.")
        return False

    def _record(self, step: int) -> dict:
        """What is known of a checkpoint without loading it; empty where its writer died, or the disk lost or changed it."""
        record = _read(self._path(step).with_suffix(".json"))
        return record if record.keys() >= _RECORDED else {}

    def _path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}.pt"

    def _steps(self) -> list[int]:
        found = (path for path in self.folder.glob("step-*.pt") if path.is_file())
        return sorted(int(number) for path in found if (number := path.stem.removeprefix("step-")).isdigit())


def keep_newest(aside: Path) -> None:
    """Of the folders set aside in `aside` the newest two stay; what is taken up again is to be out of it before."""
    if aside.exists():
        folders = [path for path in aside.iterdir() if path.is_dir()]  # a file manager leaves files of its own
        for old in sorted(folders, key=lambda path: path.stat().st_mtime)[:-_KEPT]:
            shutil.rmtree(old)


def _key_of(run: Path) -> str | None:
    """Of the run whose folder this record is in; None where it does not say."""
    key = _read(run).get("key")
    return key if isinstance(key, str) else None


def _read(path: Path) -> dict:
    """A record; empty where there is none."""
    try:
        record = read_json(path)
    except DraftlineError:
        return {}
    return record if isinstance(record, dict) else {}
