"""Reading and writing the small files of a run: atomic, hashed, and with errors that name the line."""

import errno
import hashlib
import json
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tasks.common.errors import DraftlineError

ARTIFACTS = Path("artifacts")
REPORTS = Path("reports")

_FULL = (errno.ENOSPC, errno.EDQUOT)
_REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOTDIR, errno.EISDIR, errno.EEXIST)
_NOTHING_LEFT = 2**20  # bytes


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Yield where to write a new `path`: a reader sees the old file or the new one, never a part (fsync, rename).

    Raises:
        DraftlineError: the disk is full, or the place cannot be written. What was written of the file is removed.
    """
    partial = path.with_name(f".{path.name}.partial")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        yield partial
        with open(partial, "rb") as file:
            os.fsync(file.fileno())
        partial.chmod(0o644)  # safetensors makes files that only the owner can read
        partial.replace(path)
    except Exception as error:
        # torch and safetensors wrap the system's error in their own.
        number, full = getattr(error, "errno", None), False
        with suppress(OSError):  # whatever it is, the first error counts
            full = number in _FULL or shutil.disk_usage(path.parent).free < _NOTHING_LEFT
            partial.unlink(missing_ok=True)
        if number in _REFUSED and error.filename in (None, str(partial), str(path.parent)):
            raise DraftlineError(f"{path}: cannot be written: {os.strerror(number)}.") from None
        if full:
            raise DraftlineError(
                f"{path}: cannot be written, the disk is full. Make room, then run it again: finished stages are kept."
            ) from None
        raise


def expanded(path: str, field: str) -> Path:
    """`~` and `~user` are homes.

    Args:
        field: where the path is named.

    Raises:
        DraftlineError: there is no such home.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        raise DraftlineError(f"{field}: {path!r} begins with a home that is not here. Write the whole path.") from None


def require_writable(folder: Path) -> None:
    """Ask before the work what would fail after it.

    Raises:
        DraftlineError: no file can be made in the folder.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise DraftlineError(f"{folder}: cannot be written: {error.strerror}.") from None


def remove(path: Path) -> None:
    """Remove a file, where there is one.

    Raises:
        DraftlineError: it cannot be removed, such as a folder.
    """
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        raise DraftlineError(f"{path}: cannot be removed: {error.strerror}.") from None


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable: after a crash of the machine what was renamed or removed is so."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, data: bytes | Iterable[bytes]) -> None:
    """Write `data`, whole or in pieces, as the new content of `path`."""
    with replacing(path) as partial, open(partial, "wb") as file:
        file.writelines([data] if isinstance(data, bytes) else data)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON, keys in the order given; NaN is refused (it is not JSON)."""
    write_atomically(path, (json.dumps(value, indent=2, ensure_ascii=False, allow_nan=False) + "\n").encode())


def read_json(path: Path) -> Any:
    """Parse a JSON file.

    Raises:
        DraftlineError: the file is absent, cannot be read or is not JSON; the message names it (and the line).
    """
    try:
        return json.loads(path.read_bytes())
    except FileNotFoundError:
        raise DraftlineError(f"{path}: not there. Run the stage that writes it: `dvc repro`.") from None
    except OSError as error:
        raise DraftlineError(f"{path}: cannot be read: {error.strerror}.") from None
    except (ValueError, RecursionError) as error:
        raise DraftlineError(f"{path}: not valid JSON ({error}).") from None


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write one JSON object a line."""
    write_atomically(path, (encode_line(row) for row in rows))


def encode_line(row: dict[str, Any]) -> bytes:
    """One JSON object as one line of UTF-8, newline included."""
    return (json.dumps(row, ensure_ascii=False, allow_nan=False) + "\n").encode()


def read_jsonl(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a JSON-lines file.

    Raises:
        DraftlineError: a line is not a JSON object; the message names file and line.
    """
    for _, row in read_numbered_jsonl(path):
        yield row


def read_numbered_jsonl(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield (line number, object), blank lines skipped; lines end at \\n only, a byte order mark is allowed."""
    if not path.is_file():
        raise DraftlineError(f"{path}: not there, or not a file. If a stage writes it, run `dvc repro`.")
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line.rstrip(b"\r\n"))
            except UnicodeDecodeError as error:
                raise DraftlineError(f"{path}:{number}: not UTF-8 ({error}). Save the file as UTF-8.") from None
            except json.JSONDecodeError as error:  # its own text says 'line 1' of every line
                raise DraftlineError(f"{path}:{number}: not valid JSON ({error.msg}: column {error.colno}).") from None
            except (ValueError, RecursionError) as error:
                raise DraftlineError(f"{path}:{number}: not valid JSON ({error}).") from None
            if not isinstance(row, dict):
                raise DraftlineError(f"{path}:{number}: expected a JSON object, found {type(row).__name__}.")
            yield number, row


def sha256_file(path: Path) -> str:
    """SHA-256 of a file's bytes, hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sha256_json(value: Any) -> str:
    """SHA-256 of a value's canonical JSON: the key under which partial work is found again."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
