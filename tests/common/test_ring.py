"""The two ends of the ring, a step at a time: what may be computed now, and what counts as written."""

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from tasks.common import ring
from tasks.common.errors import DraftlineError
from tasks.common.hidden_states import Sample
from tasks.common.ring import bounded, consume, forget_freed, was_written
from tasks.common.shard_layout import ShardPlan
from tests.stored import write_shard


def sample(number: int) -> Sample:
    ids = torch.arange(3, dtype=torch.int32) + number
    return Sample(f"s{number}", ids, torch.ones(3, dtype=torch.uint8), torch.ones(3, 2, 4), torch.ones(3, 4))


def plans(count: int = 8, sha256: str = "plan") -> list[ShardPlan]:
    rows = [(f"s{n}", [n, n + 1, n + 2], [1, 1, 1]) for n in range(count)]
    return [ShardPlan.of(f"shard-{n:05d}", sha256, [row]) for n, row in enumerate(rows)]


def write(folder: Path, *numbers: int, sha256: str = "plan") -> None:
    for number in numbers:
        write_shard(folder, f"shard-{number:05d}", [sample(number)], sha256)


def free(folder: Path, count: int) -> None:
    """A reader that consumes so many shards from the first on."""
    shards = consume(folder, plans(count), lambda folder, plan: None, patience_s=10)
    assert len(list(shards)) == count


def names(shards) -> list[str | None]:
    """What may be begun, up to where there is no room."""
    found = []
    for shard in shards:
        found.append(shard and int(shard.name[-5:]))
        if shard is None:
            break
    return found


def test_a_rank_begins_as_many_as_it_has_room_for(tmp_path):
    assert names(bounded(tmp_path, plans(), 3)) == [0, 1, 2, None]


def test_what_was_consumed_makes_room(tmp_path):
    shards = bounded(tmp_path, plans(), 2)
    assert names(shards) == [0, 1, None]
    write(tmp_path, 0, 1)
    assert names(shards) == [None]
    free(tmp_path, 1)
    assert names(shards) == [2, None]


def test_shards_of_another_rank_take_no_room(tmp_path):
    write(tmp_path, 1, 3, 5, 7)
    assert names(bounded(tmp_path, plans()[::2], 2)) == [0, 2, None]


def test_shards_of_another_plan_take_no_room(tmp_path):
    write(tmp_path, 0, 1, 2, 3, sha256="another plan")
    assert names(bounded(tmp_path, plans(), 2)) == [0, 1, None]


def test_shards_that_a_larger_ring_left_cannot_keep_back_what_the_reader_waits_for(tmp_path):
    write(tmp_path, 1, 2, 3, 4, 5)
    assert names(bounded(tmp_path, plans(), 2)) == [0, None]


def test_what_is_there_or_was_consumed_is_not_computed_again(tmp_path):
    write(tmp_path, 0, 1, 2)
    free(tmp_path, 2)
    assert names(bounded(tmp_path, plans(), 3)) == [3, 4, None]


def test_a_new_epoch_computes_everything_again(tmp_path):
    write(tmp_path, 0, 1)
    free(tmp_path, 2)
    assert was_written(tmp_path, "shard-00001", "plan")
    forget_freed(tmp_path)
    assert names(bounded(tmp_path, plans(), 8)) == list(range(8))


def test_a_dump_without_a_reader_gives_up(tmp_path):
    shards = bounded(tmp_path, plans(), 1, patience_s=0)
    next(shards)
    with pytest.raises(DraftlineError, match=r"shard-00000: not consumed within 0 s.*set dump\.ahead_shards: null"):
        list(shards)


def test_a_shard_counts_as_written_while_it_is_consumed(tmp_path):
    """One becomes the other between two looks: at no moment is it neither."""
    count, lost, stop = 200, [], threading.Event()
    write(tmp_path, *range(count))

    def look() -> None:
        while not stop.is_set():
            lost.extend(s.name for s in plans(count) if not was_written(tmp_path, s.name, s.sha256))

    with ThreadPoolExecutor(1) as pool:
        watcher = pool.submit(look)
        try:
            free(tmp_path, count)
        finally:
            stop.set()
        watcher.result()  # what it raised, too
    assert lost == []


def test_a_reader_that_waits_says_for_which_shard(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(ring, "_QUIET_S", 0.05)
    with pytest.raises(DraftlineError, match=r"shard-00000\.safetensors: not written within 0 s"):
        next(consume(tmp_path, plans(), lambda folder, plan: None, patience_s=0.4))
    (line,) = capsys.readouterr().out.splitlines()
    assert line.endswith("shard-00000.safetensors: waiting for the dump to write it, for 0 s at most")
