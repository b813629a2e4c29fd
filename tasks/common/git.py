"""What git says of the repository that the run stands in."""

import subprocess


def git(*arguments: str) -> str:
    """Output of a git command in the current directory.

    Raises:
        OSError: git is not there.
        CalledProcessError: no repository, no commit yet, or nothing of that name.
    """
    done = subprocess.run(["git", *arguments], capture_output=True, encoding="utf-8", check=True)
    return done.stdout.strip()
