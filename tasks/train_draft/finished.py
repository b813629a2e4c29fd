"""A training that has ended, recognised where only its report outside artifacts/draft is gone.

DVC removes reports/train_draft.json before the stage starts, and records nothing of a run under torchrun: a slip in
params.yaml, or `dvc repro` after torchrun, would train for days what stands there whole.
"""

from pathlib import Path
from typing import Any

from tasks.common.contract import Contract
from tasks.common.files import read_json, sha256_file, sha256_json, write_json
from tasks.common.hidden_states import HIDDEN_STATES, HiddenStates
from tasks.common.params import Params
from tasks.common.versions import result_versions
from tasks.train_draft.source import DumpedSource

FINISHED = "finished.json"
_RESULT = ("draft.safetensors", "draft.json", "vocab_map.safetensors")
_CODE = Path(__file__).resolve().parents[1]
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
            "num_steps": params.serve.num_steps,
            "contract": contract.model_dump(),
            "shards": {"train": train, "heldout": [shard["checksum"] for shard in heldout.shards]},
        }
    )


def write_finished(folder: Path, key: str, report: dict[str, Any]) -> None:
    """Note beside a result what it was made by."""
    made_by = sha256_json([key, _made_with()])
    write_json(folder / FINISHED, {"made_by": made_by, "files": _hashes(folder), "report": report})


def finished_report(params: Params, folder: Path) -> dict[str, Any] | None:
    """The report of the result in `folder`, if it is whole and just what training on the dump with `params` would give.

    None beside a ring (`dump.ahead_shards`), of whose states nothing stays to compare with.
    """
    if params.dump.ahead_shards is not None or not (folder / FINISHED).exists():
        return None
    found, source = read_json(folder / FINISHED), DumpedSource(params)
    key = run_key(params, source.contract, source.identity, HiddenStates(HIDDEN_STATES / "heldout"))
    if found["made_by"] != sha256_json([key, _made_with()]) or found["files"] != _hashes(folder):
        return None
    return found["report"]


def _hashes(folder: Path) -> dict[str, str | None]:
    return {name: sha256_file(folder / name) if (folder / name).exists() else None for name in _RESULT}


def _made_with() -> dict[str, Any]:
    """Versions, and all code that training may run."""
    files = sorted([*(_CODE / "train_draft").glob("*.py"), *(_CODE / "common").glob("*.py")])
    return {
        "versions": result_versions(),
        "code": {f"{path.parent.name}/{path.name}": sha256_file(path) for path in files},
    }
