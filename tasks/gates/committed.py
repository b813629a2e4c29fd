"""What git's HEAD holds of a report: the run that another one is held against."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from subprocess import CalledProcessError

from tasks.common.errors import DraftlineError
from tasks.common.git import git


def committed(path: str) -> str | None:
    """The file's text, None where there is no repository, no commit or no such file in it; within `git_answering`.

    Raises:
        ValueError: it is not UTF-8.
        OSError, CalledProcessError: git does not answer.
    """
    if not (_has_commit() and git("ls-tree", "HEAD", "--", path)):
        return None
    return git("cat-file", "blob", f"HEAD:./{path}")


def _has_commit() -> bool:
    """Whether there is a repository, and a commit in it."""
    here = Path.cwd()
    if "GIT_DIR" not in os.environ and not any((folder / ".git").exists() for folder in (here, *here.parents)):
        return False
    try:
        git("rev-parse", "--verify", "--quiet", "HEAD")
    except CalledProcessError as error:
        if error.returncode != 1:
            raise
        # 1 of a branch without a commit, and of one whose file is damaged: here that fails too.
        git("symbolic-ref", "HEAD")
        return False
    return True


@contextmanager
def git_answering(path: str) -> Iterator[None]:
    """Where git is silent a report that is committed would go unheard, and what differs from it too.

    Raises:
        DraftlineError: git did not answer within the block.
    """
    try:
        yield
    except OSError as error:
        raise _unheard(path, f"git cannot be started ({error.strerror}): put it on PATH") from None
    except CalledProcessError as error:
        raise _unheard(path, f"`git {error.cmd[1]}` says: {' '.join(error.stderr.split())}") from None


def _unheard(path: str, what: str) -> DraftlineError:
    return DraftlineError(
        f"{path} as it is committed: git does not give it, so that nothing can be held against it. {what}. Mend that, then `dvc repro`."
    )
