"""Answers on disk as they come: nothing is generated twice, whatever ends the run.

`artifacts/responses/journal.jsonl` holds a header with the key of the run, then one record a line, flushed
to the disk a group at a time. A line that a dying writer cut off is dropped on reading. When all prompts are
answered the journal becomes the sorted files that later stages read.
"""

import json
import os
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

from tasks.common.files import encode_line, read_json, read_jsonl, write_jsonl


class Journal:
    """Records by (split, prompt id), appended durably; the records stay on disk, an index in memory."""

    def __init__(self, folder: Path, key: str):
        """Open the journal of the run `key`; one of another key is discarded with a printed line.

        Answers of a finished run of the same key are taken over, so that a new prompt costs only itself.
        """
        folder.mkdir(parents=True, exist_ok=True)
        self.folder, self.path = folder, folder / "journal.jsonl"
        self._offsets: dict[tuple[str, str], int] = {}
        if self.path.exists() and self._read_index(key):
            return
        finished = self._finished_key()
        if finished != key and (finished or self.path.exists()):
            print(
                f"{folder}: the answers there were made from another target, with other settings or by other versions; starting anew."
            )
        self._start(key, self._finished_records() if finished == key else ())

    def __contains__(self, item: tuple[str, str]) -> bool:
        return item in self._offsets

    def append(self, records: list[dict]) -> None:
        """Write a group of records (each with `split` and `id`) and force it to the disk."""
        lines = [encode_line(record) for record in records]
        with open(self.path, "ab") as file:
            offset = file.tell()
            file.write(b"".join(lines))
            file.flush()
            os.fsync(file.fileno())
        for record, line in zip(records, lines, strict=True):
            self._offsets[record["split"], record["id"]] = offset
            offset += len(line)

    def read(self, split: str, prompt_id: str) -> dict:
        """The record of one prompt."""
        with open(self.path, "rb") as file:
            file.seek(self._offsets[split, prompt_id])
            return json.loads(file.readline())

    def remove(self) -> None:
        """Delete the journal, once its records stand in the final files."""
        self.path.unlink()

    def _read_index(self, key: str) -> bool:
        whole = 0
        with open(self.path, "rb") as file:
            for line in file:
                if not line.endswith(b"\n"):
                    break
                if whole == 0 and json.loads(line).get("key") != key:
                    return False
                if whole:
                    record = json.loads(line)
                    self._offsets[record["split"], record["id"]] = whole
                whole += len(line)
        os.truncate(self.path, whole)  # the cut-off line of a killed writer
        return whole > 0

    def _start(self, key: str, records: Iterable[dict]) -> None:
        write_jsonl(self.path, chain([{"key": key}], records))
        self._read_index(key)

    def _finished_key(self) -> str | None:
        manifest = self.folder / "manifest.json"
        return read_json(manifest)["key"] if manifest.exists() else None

    def _finished_records(self) -> Iterator[dict]:
        for split in ("train", "heldout"):
            if (self.folder / f"{split}.jsonl").exists():
                for record in read_jsonl(self.folder / f"{split}.jsonl"):
                    yield {"split": split, **record}
