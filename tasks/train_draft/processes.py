"""The processes that train together: started by torchrun, one a GPU, on one machine or many; or this one alone.

    torchrun --nproc-per-node 8 -m tasks.train_draft

Gradients are summed over the processes, by DDP or by FSDP2 (`train_draft.parallel`). Since each process divides its loss by
the positions of all of them, the sum is the gradient of the joint batch.
"""

import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.nn.parallel import DistributedDataParallel

from tasks.common.errors import DraftlineError
from tasks.common.params import PARAMS, Params
from tasks.train_draft.gpu_memory import require_gpu

_VARIABLES = {"WORLD_SIZE": 1, "RANK": 0, "LOCAL_RANK": 0}
# One process prepares or evaluates while the others wait; if it dies its connection closes and they do not wait longer.
_PATIENCE = timedelta(days=1)
# torchrun takes the first one that it sees ended for the cause: those that only follow end later.
_GRACE_SECONDS = 2.0


class SharedError(DraftlineError):
    """An error that every process raises at the same step; the first one says it."""


class SharedExit(SystemExit):
    """Every process leaves after the same step."""


@dataclass(frozen=True)
class Processes:
    """Which of how many processes this is.

    Attributes:
        device: this process's own, counted from `target.device`.
        host: the same processes, for what is no tensor on a device.
    """

    rank: int
    size: int
    device: str
    parallel: str
    host: dist.ProcessGroup | None = None

    @classmethod
    def alone(cls, params: Params) -> "Processes":
        """One process."""
        return cls(0, 1, params.target.device, params.train_draft.parallel)

    @classmethod
    @contextmanager
    def joined(cls, params: Params) -> Iterator["Processes"]:
        """The processes that torchrun started; they leave together.

        Raises:
            DraftlineError: they cannot share the batches of a step.
            SystemExit: another process ended first; a sentence says so.
        """
        size, rank, local = (int(os.environ.get(name, alone)) for name, alone in _VARIABLES.items())
        settings = params.train_draft
        if settings.global_batch_size % size:
            raise DraftlineError(
                f"{PARAMS}: train_draft.global_batch_size is {settings.global_batch_size}, which {size} processes cannot share "
                f"evenly. Set it to a multiple of {size}: it is how many packed batches one optimiser step takes, whatever the "
                f"number of processes."
            )
        require_gpu(params.target.device)
        kind, _, first = params.target.device.partition(":")
        device = f"cuda:{int(first or 0) + local}" if kind == "cuda" else "cpu"
        if size == 1:
            yield cls(rank, size, device, settings.parallel)
            return
        if kind == "cuda":
            torch.cuda.set_device(device)
        try:
            dist.init_process_group("nccl" if kind == "cuda" else "gloo")
            host = dist.new_group(backend="gloo", timeout=_PATIENCE)
            yield cls(rank, size, device, settings.parallel, host)
        except (SharedError, SharedExit) as error:
            if not rank:
                raise
            # torchrun ends all of them once one has ended: wait until the first has said why and is gone.
            with suppress(RuntimeError):
                dist.barrier(host)
            raise SystemExit(getattr(error, "code", 1)) from None
        except RuntimeError as error:
            if not _is_of_another_process(error):
                raise
            print(
                f"process {rank} of {size}: another process ended in mid-step; what it said stands above, or in its own log. "
                f"Start all of them again: they go on from the newest checkpoint.",
                file=sys.stderr,
                flush=True,
            )
            time.sleep(_GRACE_SECONDS)
            raise SystemExit(1) from None
        else:
            dist.barrier(host)
            dist.destroy_process_group()

    @property
    def is_first(self) -> bool:
        """Whether this process writes what is written once: checkpoints, reports, curves."""
        return self.rank == 0

    def with_own_device(self, params: Params) -> Params:
        """`params`, with this process's device as the target's."""
        target = params.target.model_copy(update={"device": self.device})
        return params.model_copy(update={"target": target})

    @contextmanager
    def first_alone(self) -> Iterator[None]:
        """The first process runs the block before the others do, so that they find what it wrote."""
        if not self.is_first:
            self.wait()
        yield
        if self.is_first:
            self.wait()

    def wait(self) -> None:
        """Until every process is here."""
        if self.size > 1:
            dist.barrier(self.host)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Over all processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)
        return tensor

    def any(self, value: bool) -> Callable[[], bool]:
        """Ask all processes whether one of them says so. Call what is returned for the answer, the same in each: nobody waits
        for it before, and nobody for the device."""
        if self.size == 1:
            return lambda: value
        said = torch.tensor(int(value))
        work = dist.all_reduce(said, dist.ReduceOp.MAX, self.host, async_op=True)

        def answer() -> bool:
            work.wait()
            return bool(said)

        return answer

    def gather(self, value: Any) -> list[Any]:
        """Of every process, in their order."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, self.host)
        return values

    def of_first(self, value: Any) -> Any:
        """What the first process has."""
        if self.size == 1:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, group=self.host)
        return values[0]

    def joined_module(self, module: nn.Module) -> nn.Module:
        """`module`, whose gradients are summed over the processes by every backward; all start from the first one's weights."""
        if self.size == 1:
            return module
        for parameter in module.parameters():
            dist.broadcast(parameter.data, src=0)
        kind = torch.device(self.device).type
        if self.parallel == "ddp":
            with warnings.catch_warnings(action="ignore", category=FutureWarning):  # renamed in torch 2.13
                return DistributedDataParallel(module, broadcast_buffers=False)
        # One group: the draft is a single layer. The frozen embedding is no parameter, so each process has it whole.
        fully_shard(module, mesh=init_device_mesh(kind, (self.size,)))
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)  # gloo cannot scale
        return module

    def loss_gradient(self, module: nn.Module) -> torch.Tensor | None:
        """What each backward of a loss starts from (None: from 1), so that gradients are summed: DDP divides its sum by the
        number of processes.

        A hook in Python that does not divide can hang a process at its end: the last bucket's future needs the interpreter
        to be freed, while the interpreter waits in gloo's destructor for the thread that frees it.
        """
        is_divided = isinstance(module, DistributedDataParallel)
        return torch.tensor(float(self.size), device=self.device) if is_divided else None

    def accumulating(self, module: nn.Module, is_last: bool) -> Any:
        """Context of one backward of a step: gradients are summed over the processes in the last one alone."""
        if isinstance(module, DistributedDataParallel) and not is_last:
            return module.no_sync()
        if isinstance(module, FSDPModule):
            module.set_requires_gradient_sync(is_last)
        return nullcontext()

    @contextmanager
    def whole(self, module: nn.Module) -> Iterator[None]:
        """Every process holds all weights of `module` within the block."""
        if not isinstance(module, FSDPModule):
            yield
            return
        module.unshard()
        yield
        module.reshard()


def _is_of_another_process(error: RuntimeError) -> bool:
    """A collective in which a peer is missing: gloo's errors have no type of their own."""
    return isinstance(error, dist.DistError) or "gloo" in str(error) or "Connection closed by peer" in str(error)
