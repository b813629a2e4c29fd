"""A thread that makes items ahead of time changes neither their order nor what goes wrong with them."""

import threading

import pytest
import torch

from tasks.train_draft.batch import BatchForm, StoredBatch
from tasks.train_draft.prefetch import ahead, on_device
from tests.reference import VOCAB, make_map, make_sample


def test_items_come_in_order_and_end():
    assert list(ahead(range(20))) == list(range(20))


def test_no_more_than_so_many_are_made_ahead():
    made, taken = [], threading.Semaphore(0)

    def items():
        for number in range(10):
            made.append(number)
            taken.release()
            yield number

    stream = ahead(items(), count=2)
    assert next(stream) == 0
    for _ in range(4):  # 0 is taken, 1 and 2 wait, 3 is made and finds no room
        taken.acquire()
    assert not taken.acquire(timeout=0.3)
    assert made == [0, 1, 2, 3]
    stream.close()


def test_an_error_is_raised_where_its_item_is_awaited():
    def items():
        yield 1
        raise ValueError("shard-3 is cut off")

    stream = ahead(items())
    assert next(stream) == 1
    with pytest.raises(ValueError, match="shard-3 is cut off"):
        next(stream)


def test_who_stops_taking_leaves_no_thread_behind():
    endless = ahead(iter(int, 1))
    next(endless)
    endless.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "prefetch"]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_what_is_copied_ahead_is_whole_when_a_gpu_that_is_behind_reads_it():
    form = BatchForm.of(make_map(VOCAB), "cuda", torch.bfloat16, 3, 256)
    stored = []
    for number in range(12):
        sample = make_sample(str(number), 20, 200)
        stored.append(StoredBatch.of([(sample, None, None)], torch.zeros(sample.num_tokens), form))
    found = []
    for batch, number in on_device(zip(stored, range(12), strict=True), form):
        torch.cuda._sleep(20_000_000)  # cycles: later batches are copied before this one is read
        found.append((number, [batch.samples.aux.clone(), batch.samples.last.clone(), batch.lessons.learners.clone()]))
        del batch
    assert [number for number, _ in found] == list(range(12))
    for number, tensors in found:
        whole = stored[number].on("cuda", torch.bfloat16)
        assert all(map(torch.equal, tensors, (whole.samples.aux, whole.samples.last, whole.lessons.learners)))
