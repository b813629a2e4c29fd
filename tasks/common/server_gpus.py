"""The GPUs of a server: idle before it starts, and as they were when it is gone."""

import os
import sys
import time
from typing import ClassVar

from tasks.common import gpu
from tasks.common.errors import DraftlineError
from tasks.common.server_plan import ServerPlan
from tasks.common.server_session import describe_process

# The driver gives memory of a process back a little after its end.
_RELEASE_S = 15.0
_TOLERANCE_MIB = 256
_POLL_S = 0.25


class ServerGpus:
    """Memory in use on the GPUs of one server, read before its start, while it runs, and after its end."""

    _running: ClassVar[list["ServerGpus"]] = []  # of the servers of this process, in the order of their starts

    def __init__(self, plan: ServerPlan):
        self._plan = plan
        self._is_used = plan.device.startswith("cuda")
        self.before: dict[int, int] = {}
        self.held: list[int] = []  # those on which memory of this server lies
        self._is_ready = False
        self._starting: list[ServerGpus] = []  # at the same time: what they take was not in use before

    def require_idle(self) -> None:
        """Show the memory in use, and refuse to share a GPU with anybody but servers of this process.

        The server of a dump may: a trainer of the same run works beside it (`dump.ahead_shards`).

        Raises:
            DraftlineError: a GPU of the plan holds memory of others.
        """
        deadline = time.monotonic() + _RELEASE_S
        while True:
            self.before = self._memory()
            foreign = self._foreign()
            if not foreign or time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
        self._show(self.before)
        if foreign:
            raise DraftlineError(
                f"GPU {', '.join(map(str, foreign))} is not idle: {', '.join(map(str, foreign.values()))} MiB in use by others "
                f"before the {self._plan.kind} server starts. Processes that the driver names: {self._named(foreign)}. Their "
                f"memory is missing for weights and cache, and their work falsifies what is measured. End them, or set "
                f"target.device to an idle GPU."
            )

    def started(self) -> None:
        """The server exists from now on: its GPUs are those of this process."""
        self._starting = [server for server in self._running if not server._is_ready]
        self._running.append(self)

    def ready(self) -> None:
        """Memory is taken: note on which GPUs; a neighbour's may have grown as well."""
        own, self._is_ready = self._own(), True
        self.held = [i for i, used in self._memory().items() if self._has_grown(i, used) and (own is None or i in own)]

    def ended(self) -> None:
        """The server is gone. What it held is not told apart from what servers of this process hold on the same GPU that
        started later or at the same time."""
        if self in self._running:
            later = self._running[self._running.index(self) + 1 :]
            beside = [*later, *(server for server in self._starting if server in self._running)]
            self.held = [i for i in self.held if not any(server._may_hold(i) for server in beside)]
            self._running.remove(self)

    def prove_given_back(self) -> None:
        """Wait until the memory that the server took is free again, and show it.

        A driver that has failed since is said and no more: what was measured by now is worth more than this proof, and the next
        server does not start without the driver.

        Raises:
            DraftlineError: it is not.
        """
        deadline = time.monotonic() + _RELEASE_S
        while True:
            try:
                now = self._memory()
            except DraftlineError as error:
                print(
                    f"whether the GPU memory of the {self._plan.kind} server came back is not known: {error}",
                    file=sys.stderr,
                    flush=True,
                )
                return
            kept = {i: used for i, used in now.items() if i in self.held and self._has_grown(i, used)}
            if not kept or time.monotonic() > deadline:
                break
            time.sleep(_POLL_S)
        self._show(now)
        if kept:
            raise DraftlineError(
                f"GPU memory did not come back after the server was stopped: MiB in use by GPU {kept}, before {self.before}. "
                f"Processes that the driver names: {self._named(kept)}. Unless another job has started meanwhile, a process that "
                f"is left holds it."
            )

    def _foreign(self) -> dict[int, int]:
        """MiB by GPU of the plan that neither this process nor a server of it holds, beyond what any GPU shows."""
        own = self._own()
        if not self._is_used or own is None or self._plan.kind == "states":
            return {}
        shared = [server._own() for server in self._running]
        holders = gpu.holders() if any(self.before.get(i, 0) > _TOLERANCE_MIB for i in own) else {}
        foreign = {}
        for index in sorted(own & self.before.keys()):
            ours = holders.get(index, {}).get(os.getpid())
            # Of a process that the driver does not name nobody can tell how much of the memory is its own.
            untold = ours is None and _computes_here()
            used = self.before[index] - (ours or 0)
            if used > _TOLERANCE_MIB and not untold and not any(gpus is None or index in gpus for gpus in shared):
                foreign[index] = used
        return foreign

    def _may_hold(self, index: int) -> bool:
        own = self._own()
        return index in self.held if self._is_ready else own is None or index in own

    def _own(self) -> set[int] | None:
        return gpu.physical(self._plan.gpus)

    def _memory(self) -> dict[int, int]:
        return gpu.memory_used_mib() if self._is_used else {}

    def _has_grown(self, index: int, used: int) -> bool:
        return used > self.before.get(index, 0) + _TOLERANCE_MIB

    def _show(self, memory: dict[int, int]) -> None:
        if not memory:
            return
        own = self._own() or set()
        some = own & memory.keys() != memory.keys()
        cells = [f"[{used}]" if some and index in own else str(used) for index, used in sorted(memory.items())]
        marked = f" ([] those of the {self._plan.kind} server)" if some and own else ""
        print(f"GPU memory in use: {', '.join(cells)} MiB{marked}", file=sys.stderr, flush=True)

    @staticmethod
    def _named(indices: dict[int, int]) -> str:
        named = {i: pids for i, pids in gpu.holders().items() if i in indices}
        words = [
            f"{describe_process(pid)} with {mib} MiB on GPU {i}"
            for i, pids in named.items()
            for pid, mib in pids.items()
        ]
        return "; ".join(words) or "none"


def _computes_here() -> bool:
    """Whether this process has a CUDA context of its own."""
    torch = sys.modules.get("torch")
    return torch is not None and torch.cuda.is_initialized()
