"""A training that has ended: recognised where it would be repeated, set aside where another one starts.

    artifacts/draft/finished.json     what made the result beside it, and the report
    artifacts/draft_finished/         results of other settings, states, code or versions, which find them again

DVC removes reports/train_draft.json before the stage starts, and records nothing of a run under torchrun: a slip in
params.yaml, or `dvc repro` after torchrun, would train for days what stood there whole.
"""

import shutil
from pathlib import Path
from typing import Any

from tasks.common.contract import Contract
from tasks.common.dvc_files import DvcFiles
from tasks.common.errors import DraftlineError
from tasks.common.files import read_json, sha256_file, sha256_json, write_json
from tasks.common.hidden_states import HIDDEN_STATES, HiddenStates
from tasks.common.params import Params
from tasks.common.versions import result_versions
from tasks.train_draft.checkpoints import Checkpoints, keep_newest
from tasks.train_draft.source import DumpedSource

FINISHED = "finished.json"
_NAME = 16  # characters of the key that name a folder
_RESULT = ("draft.safetensors", "draft.json", "vocab_map.safetensors")
_NOT_OF_THE_STEPS = {"data_workers", "checkpoint_every", "parallel", "recompute_activations", "dtype"}


def run_key(params: Params, contract: Contract, train: list[str], heldout: HiddenStates) -> str:
    """Names all that the steps depend on. How they are computed may change from one start to the next, not in what type.

    Args:
        train: identity of the shards that are trained on.
    """
    return sha256_json(
        {
            "train_draft": params.train_draft.model_dump(exclude=_NOT_OF_THE_STEPS),
            "dtype": str(params.train_draft.computed_in(params.target.device)),
            "contract": contract.model_dump(),
            "shards": {"train": train, "heldout": [shard["checksum"] for shard in heldout.shards]},
        }
    )


def write_finished(folder: Path, key: str, report: dict[str, Any]) -> None:
    """Note beside a result what it was made by."""
    record = {"made_by": _made_by(key), "files": _hashes(folder), "report": report}
    write_json(folder / FINISHED, {"sha256": sha256_json(record), **record})


def finished_report(params: Params, folder: Path) -> dict[str, Any] | None:
    """The report of a result that is whole and just what training on the dump with `params` would give, in `folder` or
    brought back to it. Partial work beside it is gone then, as it would be had the run not died before it removed it.

    None beside a ring (`dump.ahead_shards`), of whose states nothing stays to compare with.

    Raises:
        DraftlineError: the record is damaged.
    """
    if params.dump.ahead_shards is not None or not (folder.exists() or _aside(folder).exists()):
        return None
    source = DumpedSource(params)
    key = run_key(params, source.contract, source.identity, HiddenStates(HIDDEN_STATES / "heldout"))
    made_by = _made_by(key)
    earlier = _aside(folder) / made_by[:_NAME]
    for place in (folder, earlier):
        found = _record(place)
        if found is None or found["made_by"] != made_by or _changed(place, found):
            continue
        if place == earlier:
            _move_aside(folder)
            Checkpoints(folder / "checkpoints", key)  # sets those of another run aside
            shutil.rmtree(folder)
            earlier.rename(folder)
            keep_newest(_aside(folder))
        Checkpoints(folder / "checkpoints", key).remove()
        return found["report"]
    return None


def set_aside(folder: Path) -> None:
    """Move a finished training out of the way of another one: days of it are not deleted for a slip in params.yaml.

    Raises:
        DraftlineError: the record is damaged.
    """
    _move_aside(folder)
    keep_newest(_aside(folder))


def _move_aside(folder: Path) -> None:
    found = _record(folder)
    if found is None:
        return
    if changed := _changed(folder, found):
        print(f"{folder}: {', '.join(changed)} changed or gone since the training ended; this result is not kept.")
        return
    place = _aside(folder) / found["made_by"][:_NAME]
    place.parent.mkdir(exist_ok=True)
    shutil.rmtree(place, ignore_errors=True)
    folder.rename(place)
    place.touch()
    print(
        f"{folder}: a finished training of other settings, states, code or versions. It is kept in {place}, and taken up again with "
        f"those."
    )


def _record(folder: Path) -> dict[str, Any] | None:
    """What is noted beside the result in `folder`; None where nothing is.

    Raises:
        DraftlineError: it cannot be read, or is not what was noted.
    """
    path = folder / FINISHED
    if not path.exists():
        return None
    damage = f"{path}: damaged."
    try:
        record = read_json(path)
        if record.pop("sha256") == sha256_json(record):
            return record
    except DraftlineError as error:
        damage = str(error)
    except (AttributeError, TypeError, KeyError):  # no record at all
        pass
    raise DraftlineError(
        f"{damage} It does not say what made the draft beside it. `dvc checkout --force train_draft` brings back what DVC recorded; to "
        f"train anew, delete it."
    )


def _changed(folder: Path, record: dict[str, Any]) -> list[str]:
    """Files of the result that are not what they were when the training ended."""
    return [name for name, sha256 in _hashes(folder).items() if record["files"][name] != sha256]


def _aside(folder: Path) -> Path:
    return folder.with_name(f"{folder.name}_finished")


def _hashes(folder: Path) -> dict[str, str | None]:
    return {name: sha256_file(folder / name) if (folder / name).is_file() else None for name in _RESULT}


def _made_by(key: str) -> str:
    """Names the run `key` with the versions, and with the code that its result depends on for DVC."""
    code = {path.as_posix(): sha256_file(path) for path in DvcFiles().code("train_draft")}
    return sha256_json([key, {"versions": result_versions(), "code": code}])
