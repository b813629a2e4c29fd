"""A replayed step is the step: the same losses and gradients, whatever was recorded before and whatever comes between.

With a GPU the same facts are asserted of CUDA graphs; on a CPU a recording calls its function again and writes over what
it returned, as a graph does.
"""

from copy import deepcopy

import pytest
import torch

from tasks.train_draft import replay
from tasks.train_draft.replay import CudaGraphs, ReplayedStep
from tasks.train_draft.step import TrainStep
from tests.reference import (
    VOCAB,
    RandomTarget,
    make_batch,
    make_draft,
    make_map,
    make_sample,
    on_the_path_of_a_gpu,
    own_head,
)

ON_A_GPU = pytest.param("cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"))
# Tokens of the answers of each batch: two numbers of rows, and of sources. Each is compiled for.
ANSWERS = [(20, 31), (9, 40), (330, 90), (31, 19), (300, 111), (40, 9), (390, 20)]


class Again:
    """In place of CudaGraphs."""

    def __init__(self, _device):
        pass

    def record(self, function):
        results = []

        def run():
            found = function()
            if not results:
                results.extend(found)
            for result, new in zip(results, found, strict=True):
                result.copy_(new)
            return tuple(results)

        return run

    def keep_pace(self):
        pass


class Unrecordable(Again):
    def record(self, function):
        raise RuntimeError("operation not permitted when stream is capturing\nand more")


@pytest.fixture(params=["cpu", ON_A_GPU])
def both(request, monkeypatch) -> "Compared":
    torch.manual_seed(0)
    if request.param == "cpu":
        on_the_path_of_a_gpu(monkeypatch)
        monkeypatch.setattr(replay, "CudaGraphs", Again)
    return Compared(request.param)


class Compared:
    """The same draft, stepped over the same batches kernel by kernel and replayed."""

    def __init__(self, device: str):
        self.device, self.dtype = device, torch.bfloat16 if device == "cuda" else torch.float32
        self.target, self.vocab_map = RandomTarget(), make_map(VOCAB)
        self.plain = make_draft(VOCAB, head_dim=16).to(device)
        self.replayed = deepcopy(self.plain)
        head = own_head(self.target, self.vocab_map, self.dtype, device)
        self.step, self.replayed_step = TrainStep(self.plain, head), ReplayedStep(self.replayed, head)

    def batch(self, answers):
        samples = [make_sample(str(n), 3, answer) for n, answer in enumerate(answers)]
        return make_batch(samples, 2, self.target, self.vocab_map, 512, self.dtype, self.device)

    def check(self, batch, positions=None) -> None:
        """Forward and backward on both sides; losses, sums and what the gradients are by then."""
        (loss, sums), (found, found_sums) = self.step(batch, positions), self.replayed_step(batch, positions)
        assert torch.equal(loss, found)
        for name, value in vars(sums).items():
            assert torch.equal(value, getattr(found_sums, name)), name
        self.check_gradients()

    def check_gradients(self) -> None:
        for (name, one), other in zip(self.plain.named_parameters(), self.replayed.parameters(), strict=True):
            assert one.grad.any()
            assert torch.equal(one.grad, other.grad), name

    def forget_gradients(self) -> None:
        self.plain.zero_grad(), self.replayed.zero_grad()


def test_losses_and_gradients_of_a_replay_are_those_of_the_step_bit_by_bit(both):
    for number, answers in enumerate(ANSWERS):
        both.check(both.batch(answers))
        if number % 3 == 2:  # the others are added to what is there
            both.forget_gradients()
    assert len(both.replayed_step._recorded) == 2


def test_what_a_step_returned_stays_when_the_next_is_replayed(both):
    batches = [both.batch(answers) for answers in [(20, 31), (9, 40), (31, 19), (40, 9)]]
    found = [both.replayed_step(batch) for batch in batches]
    for batch, (loss, sums) in zip(batches, found, strict=True):
        expected, of_step = both.step(batch)
        assert torch.equal(loss, expected) and torch.equal(sums.loss, of_step.loss)
        assert torch.equal(sums.correct, of_step.correct)


def test_weights_are_read_anew_and_so_is_what_the_loss_is_divided_by(both):
    optimizers = [torch.optim.AdamW(draft.parameters(), lr=0.01) for draft in (both.plain, both.replayed)]
    for number in range(5):
        batch = both.batch((20 + number, 31))
        both.check(batch, batch.lessons.loss_positions * (number + 1))
        for optimizer in optimizers:
            optimizer.step()
        both.forget_gradients()


def test_gradients_from_elsewhere_are_added_to(both):
    for _ in range(3):
        batch = both.batch((20, 31))
        both.forget_gradients()
        both.step(batch), both.replayed_step.module(batch, batch.lessons.loss_positions)[0].backward()
        both.check_gradients()
        both.check(batch)


@pytest.mark.parametrize("both", ["cpu"], indirect=True)
def test_the_recording_that_was_not_used_for_longest_makes_room(both, monkeypatch):
    monkeypatch.setattr(replay, "_MOST_GRAPHS", 2)
    graphs, recorded, counts = both.replayed_step._graphs, [], []
    record = graphs.record
    monkeypatch.setattr(graphs, "record", lambda function: recorded.append(function) or record(function))
    small, middle, large = (20, 31), (200,), (330, 90)
    for answers in [small, middle, large, small, middle, small, large, small, middle]:
        both.check(both.batch(answers))
        counts.append(len(recorded))
    assert counts == [0, 0, 0, 1, 2, 2, 3, 3, 4]


def test_what_cannot_be_recorded_is_run_as_it_is_and_said_once(both, monkeypatch, capsys):
    monkeypatch.setattr(both.replayed_step, "_graphs", Unrecordable(None))
    for answers in [(20, 31), (330, 90), (9, 40), (300, 111), (31, 19)]:
        both.check(both.batch(answers))
    said = capsys.readouterr().out.splitlines()
    assert len(said) == 1
    assert said[0].endswith("one by one from here on: operation not permitted when stream is capturing")


def test_what_waits_for_the_device_cannot_be_recorded_and_does_no_harm():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    device, stream = torch.device("cuda:0"), torch.cuda.current_stream()
    graphs, numbers = CudaGraphs(device), torch.arange(4, device=device)
    with pytest.raises(RuntimeError):
        graphs.record(lambda: (numbers.cumsum(0) * int(numbers.sum().item()),))
    assert torch.cuda.current_stream() == stream
    held = []
    for _ in range(3):  # memory that another stream used is given back still
        other = torch.empty(1 << 26, device=device)
        other.record_stream(torch.cuda.Stream())
        del other
        torch.cuda.synchronize()
        torch.empty(1 << 20, device=device)  # whoever asks for memory finds what is free by now
        held.append(torch.cuda.memory_allocated(device))
    assert held[0] == held[2]
    replayed = CudaGraphs(device).record(lambda: (numbers * 2,))
    assert replayed()[0].tolist() == [0, 2, 4, 6]
