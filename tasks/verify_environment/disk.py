"""How much disk the run needs and where: DVC keeps a second copy of artifacts unless it can link them."""

import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from tasks.common.files import ARTIFACTS
from tasks.common.hidden_states import HIDDEN_STATES
from tasks.common.responses import SPLITS
from tasks.common.target import TARGET
from tasks.verify_environment.facts import Repository
from tasks.verify_environment.plan import Estimate

# Seen with dvc 3.67: `copy` keeps both copies for good, `symlink` while it commits (it copies, then links).
_TWO_COPIES = ("copy", "symlink")
# The large artifacts, by the stage that writes them, and what a finished stage leaves.
_LARGE = {
    "dump_hidden_states": (HIDDEN_STATES, [HIDDEN_STATES / split / "manifest.json" for split in SPLITS]),
    "prepare_target": (TARGET, [TARGET / "draftline.json"]),
}
LARGE_FOLDERS = [str(folder) for folder, _ in _LARGE.values()]


@dataclass(frozen=True)
class Need:
    """Bytes that a run takes on one file system.

    Attributes:
        wanted: from nothing.
        missing: less what an earlier run left there.
        missing_if_changed: the same, where changed parameters make artifacts that DVC's cache does not hold yet.
    """

    folder: str
    what: str
    free: int
    wanted: int
    missing: int
    missing_if_changed: int


@dataclass(frozen=True)
class _Artifact:
    """Bytes of one artifact: as estimated, in the workspace now, and whether a finished stage left it there."""

    wanted: int
    there: int
    whole: bool
    copied: bool

    @property
    def missing(self) -> int:
        return max(0, self.wanted - self.there)

    @property
    def missing_copy(self) -> int:
        """What a finished stage left is in DVC's cache too."""
        return max(0, self.wanted - self.there * self.whole) * self.copied


def disk_needs(estimates: Iterable[Estimate], repository: Repository) -> list[Need]:
    """One need for the workspace's file system and, where another holds it, one for DVC's cache."""
    artifacts = [_artifact(estimate, repository) for estimate in estimates]
    wanted, missing = sum(a.wanted for a in artifacts), sum(a.missing for a in artifacts)
    copies, missing_copies = sum(a.wanted * a.copied for a in artifacts), sum(a.missing_copy for a in artifacts)
    here = _nearest(ARTIFACTS)
    cache = _nearest(Path(repository.cache)) if repository.cache else here
    if here.stat().st_dev != cache.stat().st_dev:
        return [
            Need(str(ARTIFACTS), "artifacts", shutil.disk_usage(here).free, wanted, missing, missing),
            Need(str(cache), "DVC's copies", shutil.disk_usage(cache).free, copies, missing_copies, copies),
        ]
    what = f"artifacts, twice (DVC's link type is {repository.link or 'copy'})" if copies else "artifacts, once"
    free = shutil.disk_usage(here).free
    return [Need(str(ARTIFACTS), what, free, wanted + copies, missing + missing_copies, missing + copies)]


def _artifact(estimate: Estimate, repository: Repository) -> _Artifact:
    folder, marks = _LARGE.get(estimate.stage, (None, []))
    return _Artifact(
        wanted=estimate.disk_bytes,
        there=sum(path.stat().st_size for path in folder.rglob("*") if path.is_file()) if folder else 0,
        whole=bool(marks) and all(mark.exists() for mark in marks),
        copied=repository.cached.get(str(folder), True) and (repository.link or "copy") in _TWO_COPIES,
    )


def _nearest(folder: Path) -> Path:
    """The folder, or the nearest above it that exists: it is on the file system that will hold it."""
    folder = folder.absolute()
    while not folder.exists():
        folder = folder.parent
    return folder
