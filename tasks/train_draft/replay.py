"""A training step that the host starts by one launch: the CUDA graph of batches of one shape, recorded once and replayed.

Kernels take the GPU less time than launching them one by one takes the host. Nothing in a step waits for the device or
depends on a number that is on it, so what is launched for a batch follows from the shapes of its tensors, of which there
are few (`BatchForm`, `Rows`, `Lessons`). The same kernels run on the same numbers, so results are equal bit by bit.
"""

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from itertools import count

import torch

from tasks.common.draft import Eagle3Draft
from tasks.train_draft.batch import Batch
from tasks.train_draft.step import StepSums, TrainStep
from tasks.train_draft.target_head import RestrictedHead

Results = tuple[torch.Tensor, ...]
# Each takes a few MB on the GPU; beyond it the one that was not replayed for longest makes room.
_MOST_GRAPHS = 64


class CudaGraphs:
    """Recordings of what functions launch. They share memory: the next replay of any overwrites what one has returned."""

    def __init__(self, device: torch.device):
        self._device, self._pool = device, torch.cuda.graph_pool_handle()
        self._begun: list[torch.cuda.Event] = []

    def record(self, function: Callable[[], Results]) -> Callable[[], Results]:
        """What replays `function`, and returns the tensors that it returned here.

        Raises:
            RuntimeError: it waits for the device, or (torch.OutOfMemoryError) its memory is not there.
        """
        graph = torch.cuda.CUDAGraph()
        try:
            with (
                # The other one does not give back its stream where recording fails.
                torch.cuda.stream(torch.cuda.current_stream(self._device)),
                # Another thread copies the next batches meanwhile (prefetch.py); it may allocate.
                torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"),
            ):
                results = function()
        except RuntimeError:
            with suppress(RuntimeError):  # that it is closed already
                torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
            raise

        def replay() -> Results:
            graph.replay()
            return results

        return replay

    def keep_pace(self) -> None:
        """Wait until the replay before the last is done: a host that runs further ahead fills the device with batches."""
        event = torch.cuda.Event(blocking=True)
        event.record(torch.cuda.current_stream(self._device))
        self._begun.append(event)
        if len(self._begun) > 1:
            self._begun.pop(0).synchronize()


class ReplayedStep(TrainStep):
    """A `TrainStep` of one process on a GPU. The first batch of a shape is run as it is, which compiles its kernels; the
    second is recorded. Where there is no memory for that, or it is not possible, it says so and batches are run as they are.
    """

    def __init__(self, draft: Eagle3Draft, head: RestrictedHead, recompute_activations: bool = False):
        super().__init__(draft, head, recompute_activations)
        self._parameters = list(draft.parameters())
        self._graphs: CudaGraphs | None = CudaGraphs(self._parameters[0].device)
        self._gradients = [torch.zeros_like(parameter) for parameter in self._parameters]
        self._inputs: dict[tuple, torch.Tensor] = {}
        self._met: set[tuple] = set()
        self._recorded: dict[tuple, Callable[[], Results]] = {}

    def __call__(self, batch: Batch, loss_positions: torch.Tensor | None = None) -> tuple[torch.Tensor, StepSums]:
        positions = self.loss_positions(batch) if loss_positions is None else loss_positions
        self._attach_gradients()
        loss, totals, correct = self._results(batch, positions)
        return loss, StepSums(totals, batch.lessons.loss_positions, batch.lessons.supervised, correct)

    def _results(self, batch: Batch, positions: torch.Tensor) -> Results:
        if self._graphs is not None:
            try:
                results = self._of_shape(batch, positions)
            except RuntimeError as error:  # nothing was added to the gradients yet
                reason = str(error).splitlines()[0]
                print(f"CUDA graphs are given up, kernels are launched one by one from here on: {reason}", flush=True)
            else:
                return tuple(result.clone() for result in results)  # the next replay overwrites them
            self._graphs, self._recorded, self._inputs = None, {}, {}
            torch.cuda.empty_cache()
        return self._compute(batch, positions)

    def _of_shape(self, batch: Batch, positions: torch.Tensor) -> Results:
        self._graphs.keep_pace()
        shape, own, own_positions = self._placed(batch, positions)
        if shape not in self._met:
            results = self._compute(own, own_positions)
            self._met.add(shape)
            return results
        replay = self._recorded.pop(shape, None) or self._graphs.record(lambda: self._compute(own, own_positions))
        self._recorded[shape] = replay  # the last in order
        if len(self._recorded) > _MOST_GRAPHS:
            del self._recorded[next(iter(self._recorded))]
        return replay()

    def _compute(self, batch: Batch, positions: torch.Tensor) -> Results:
        """Loss, and of each step its sum and the hits; gradients are added when all of them are there."""
        loss, sums = self.module(batch, positions)
        torch._foreach_add_(self._gradients, torch.autograd.grad(loss, self._parameters))
        return loss.detach(), sums.loss, sums.correct

    def _attach_gradients(self) -> None:
        """Make the parameters' gradients those that are added to, with what they hold so far."""
        for parameter, gradient in zip(self._parameters, self._gradients, strict=True):
            if parameter.grad is None:
                gradient.zero_()
            elif parameter.grad is not gradient:
                gradient.copy_(parameter.grad)
            parameter.grad = gradient

    def _placed(self, batch: Batch, positions: torch.Tensor) -> tuple[tuple, Batch, torch.Tensor]:
        """The batch at addresses that stay, as recordings read it, and its shape; what it has on the host is left out."""
        numbers, shape = count(), []

        def place(tensor: torch.Tensor) -> torch.Tensor:
            key = (next(numbers), tensor.shape)
            shape.append(key)
            if key not in self._inputs:
                self._inputs[key] = torch.empty_like(tensor)
            return self._inputs[key].copy_(tensor)

        own_positions, own = place(positions), batch.map(place)
        samples = replace(own.samples, sample_ids=(), bounds=())
        inputs = replace(own.inputs, rows=replace(own.inputs.rows, count=0, segments=()))
        return tuple(shape), replace(own, samples=samples, inputs=inputs, num_tokens=0), own_positions
