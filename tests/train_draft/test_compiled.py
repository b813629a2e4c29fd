"""Where kernels are compiled, a length that was not met before compiles nothing."""

import random
from functools import partial

import torch
from torch._dynamo.utils import counters

from tasks.train_draft.step import TrainStep, TttLoss
from tests.reference import (
    RandomTarget,
    make_batch,
    make_draft,
    make_map,
    make_sample,
    on_the_path_of_a_gpu,
    own_head,
)


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def test_nothing_is_compiled_again_for_other_lengths(monkeypatch):
    torch.manual_seed(0)
    on_the_path_of_a_gpu(monkeypatch, partial(torch.compile, backend="eager"))
    target, vocab_map, draft = RandomTarget(), make_map(), make_draft(head_dim=16)
    step, generator = TrainStep(draft, own_head(target, vocab_map)), random.Random(0)
    torch._dynamo.reset()
    seen, found = set(), []
    for number in range(8):
        samples = [
            make_sample(str(n), generator.randint(1, 9), generator.randint(2, 12), generator.randint(1, 2))
            for n in range(generator.randint(2, 6))
        ]
        batch = make_batch(samples, 3, target, vocab_map, batch_tokens=256)
        step(batch)
        with torch.no_grad():
            TttLoss(draft, step.module.head)(batch, step.loss_positions(batch))
            draft.propose(batch.samples, torch.arange(number + 1), 3, vocab_map)
        seen.add((batch.num_tokens, batch.inputs.rows.count, len(batch.samples.bounds)))
        found.append(graphs())
    assert len(seen) == 8
    assert {len(batch.inputs.rows.index), batch.samples.num_tokens} == {128, 256}
    assert 0 < found[0] == found[-1]


def test_more_rows_than_ever_before_are_another_size_once(monkeypatch):
    torch.manual_seed(0)
    on_the_path_of_a_gpu(monkeypatch, partial(torch.compile, backend="eager"))
    target, vocab_map, draft = RandomTarget(), make_map(), make_draft(head_dim=16)
    step = TrainStep(draft, own_head(target, vocab_map))
    torch._dynamo.reset()
    found = []
    for answer in (20, 90, 150, 170, 60):
        step(make_batch([make_sample("a", 30, answer)], 3, target, vocab_map, batch_tokens=256))
        found.append(graphs())
    assert found[0] == found[1] < found[2] == found[3] == found[4]
