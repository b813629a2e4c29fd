"""What git says of the repository that the run stands in."""

import subprocess


def git(*arguments: str) -> str:
    """Output of a git command in the current directory.

    Raises:
        OSError: git is not there.
        CalledProcessError: no repository, no commit yet, or nothing of that name.
        UnicodeDecodeError: what it gives is not UTF-8.
    """
    command = ["git", *arguments]
    done = subprocess.run(command, capture_output=True, stdin=subprocess.DEVNULL)
    if done.returncode:  # git quotes paths as they are, in any encoding
        raise subprocess.CalledProcessError(done.returncode, command, stderr=done.stderr.decode(errors="replace"))
    return done.stdout.decode().strip()
