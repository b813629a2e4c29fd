"""What dvc.yaml and dvc.lock say of a stage, read as plain YAML: a stage does not import DVC."""

import hashlib
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import yaml

_DVC_YAML, _DVC_LOCK = Path("dvc.yaml"), Path("dvc.lock")


@dataclass(frozen=True)
class Artifact:
    """A file or folder that DVC versions; `md5` as in dvc.lock (a folder's ends in '.dir')."""

    path: str
    md5: str


def lock_md5() -> str | None:
    """MD5 of dvc.lock itself, which names the state of every artifact at once; None where there is none."""
    return hashlib.md5(_DVC_LOCK.read_bytes()).hexdigest() if _DVC_LOCK.exists() else None


class DvcFiles:
    """Both files as they are now; either may be absent (a stage can run outside any pipeline)."""

    def __init__(self) -> None:
        self._stages = _read_stages(_DVC_YAML)
        self._locked = _read_stages(_DVC_LOCK)

    def description(self, stage: str) -> str:
        """`desc` of the stage, '' where it has none."""
        return self._stages.get(stage, {}).get("desc", "")

    def parameter_names(self, stage: str) -> list[str]:
        """What the stage depends on in params.yaml: 'train_draft' (a section) or 'serve.num_steps' (a value)."""
        return [entry for entry in self._stages.get(stage, {}).get("params", []) if isinstance(entry, str)]

    def code(self, stage: str) -> list[Path]:
        """Modules that the stage's result depends on: those listed, and all of each folder that is."""
        listed = [Path(dep) for dep in self._paths(stage, "deps") if dep.startswith("tasks/")]
        return sorted({path for dep in listed for path in (dep.rglob("*.py") if dep.is_dir() else [dep])})

    def input_artifacts(self, stage: str) -> list[Artifact]:
        """The stage's dependencies under artifacts/, with the MD5 of what the stage before it made.

        A dependency inside an output folder carries the folder's MD5. What dvc.lock does not know (a stage
        that never ran through DVC) is left out.
        """
        made = {a.path: a.md5 for locked in self._locked for a in self._locked_outputs(locked)}
        return [
            Artifact(dep, made[holder])
            for dep in self._paths(stage, "deps")
            for holder in _self_and_parents(dep)
            if holder in made
        ]

    def output_artifact(self, stage: str) -> Artifact | None:
        """The stage's first output under artifacts/, as dvc.lock records it."""
        return next(iter(self._locked_outputs(stage)), None)

    def upstream(self, stage: str) -> set[str]:
        """Every stage that `dvc repro` brings up to date before this one."""
        maker = {
            out: name
            for name in self._stages
            for kind in ("outs", "metrics", "plots")
            for out in self._paths(name, kind)
        }
        above: set[str] = set()
        below = [stage]
        while below:
            deps = self._paths(below.pop(), "deps")
            new = {maker[path] for dep in deps for path in _self_and_parents(dep) if path in maker} - above
            above |= new
            below += new
        return above

    def _locked_outputs(self, stage: str) -> list[Artifact]:
        outs = self._locked.get(stage, {}).get("outs", [])
        return [
            Artifact(out["path"], out["md5"]) for out in outs if "md5" in out and out["path"].startswith("artifacts/")
        ]

    def _paths(self, stage: str, kind: str) -> list[str]:
        """Paths of a list whose entries are a path or {path: options}."""
        entries = self._stages.get(stage, {}).get(kind, [])
        return [entry if isinstance(entry, str) else next(iter(entry)) for entry in entries]


def _self_and_parents(path: str) -> list[str]:
    return [path, *map(str, PurePosixPath(path).parents)]


def _read_stages(path: Path) -> dict[str, Any]:
    return (yaml.safe_load(path.read_text(encoding="utf-8")) or {}).get("stages", {}) if path.exists() else {}
