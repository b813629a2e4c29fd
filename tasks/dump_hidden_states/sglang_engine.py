"""Dump from a running SGLang: planned shards are sent as requests, the server's hooks write them."""

import shutil
import socket
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

from tasks.common.contract import Contract
from tasks.common.errors import DraftlineError
from tasks.common.files import read_json
from tasks.common.params import Params
from tasks.common.ring import was_written
from tasks.common.server import Server
from tasks.common.server_session import LOGS
from tasks.common.shard_layout import ShardPlan
from tasks.dump_hidden_states.spool import ERROR, FIGURES, Destination
from tasks.dump_hidden_states.states_plan import require_fits, require_hooks, states_plan

# Enough that the next pass always has its tokens waiting.
_SHARDS_IN_FLIGHT = 8
_WRITE_TIMEOUT_S = 600
_PROOF_TIMEOUT_S = 60
_POLL_S = 0.005


@contextmanager
def sglang_engine(params: Params, contract: Contract, longest: tuple[int, str]) -> Iterator:
    """Yield `compute(folder, shards)`, as engines.py defines it, over a server that lives as long as the block.

    Raises:
        DraftlineError: the server cannot be started with hooks, does not run with them, or they write nothing. Or it cannot
            take the longest sample.
    """
    spool = (LOGS / f"states-{params.serve.port}@{socket.gethostname()}").absolute()
    shutil.rmtree(spool, ignore_errors=True)
    spool.mkdir(parents=True)
    try:
        with Server(states_plan(params, contract, spool)) as server:
            info = server.server_info()
            require_hooks(info, expected=len(contract.aux_layer_ids) + 1)
            require_fits(info, *longest)
            hooked = HookedServer(server, spool)
            hooked.prove_hooks()
            yield hooked
    finally:
        shutil.rmtree(spool, ignore_errors=True)


class HookedServer:
    """A server whose hooks write the shards that it is sent: `compute(folder, shards)` of engines.py."""

    def __init__(self, server: Server, spool: Path):
        self.server, self._spool = server, spool

    def __call__(self, folder: Path, shards: Iterable[ShardPlan | None]) -> Iterator[ShardPlan]:
        """Keep some shards in flight; yield each, in order, once it is on the disk."""
        pool = ThreadPoolExecutor(_SHARDS_IN_FLIGHT)
        flying: deque[Future[ShardPlan]] = deque()
        try:
            for shard in shards:
                if shard is not None:
                    flying.append(pool.submit(self._dump, Destination(shard, folder)))
                yield from _landed(flying, most=_SHARDS_IN_FLIGHT - 1)
            yield from _landed(flying, most=0)
        finally:
            pool.shutdown(wait=False, cancel_futures=True)

    def prove_hooks(self) -> None:
        """Dump a sample of one token: a hook that no module of the target matches is found now.

        Raises:
            DraftlineError: its states were not written; quotes what the log says of unmatched hooks.
        """
        folder = self._spool / "proof"
        folder.mkdir()
        plan = ShardPlan.of("shard-00000", "proof", [("proof", [0], [0])])
        try:
            self._dump(Destination(plan, folder), _PROOF_TIMEOUT_S)
        except DraftlineError as error:
            log = self.server.log.read_text(encoding="utf-8", errors="replace")
            unmatched = [line for line in log.splitlines() if "No modules matched hook" in line]
            raise DraftlineError(
                "\n".join(["the hooks do not write what the server computes.", str(error), *unmatched])
            ) from None

    @property
    def waited_s(self) -> float:
        """Seconds that the server has stood still so far because writers were behind."""
        return read_json(self._spool / FIGURES)["waited_s"]

    def _dump(self, destination: Destination, timeout_s: float = _WRITE_TIMEOUT_S) -> ShardPlan:
        plan = destination.plan
        spooled = destination.put(self._spool)
        try:
            self.server.prefill([plan.sequence(index) for index in range(len(plan.ids))], destination.request_ids())
        except DraftlineError:
            self._require_no_error(destination)  # of which the server may have died
            raise
        deadline = time.monotonic() + timeout_s
        while not was_written(destination.folder, plan.name, plan.sha256):
            self._require_no_error(destination)
            self.server.require_alive()
            if time.monotonic() > deadline:
                raise DraftlineError(
                    f"{destination.folder / plan.name}: all its requests were answered, but after {timeout_s:.0f} s it is not "
                    f"whole on the disk. Either hooks did not run for some tokens, or the disk is very slow. Log: {self.server.log}"
                )
            time.sleep(_POLL_S)
        spooled.unlink()
        return plan

    def _require_no_error(self, destination: Destination) -> None:
        error = self._spool / ERROR
        if error.exists():
            raise DraftlineError(
                f"{destination.folder / destination.plan.name}: the server's hooks failed: {error.read_text()}"
            ) from None


def _landed(flying: deque[Future[ShardPlan]], most: int) -> Iterator[ShardPlan]:
    """Shards that are through, in order; waits while more than `most` are not. Raises what any of them raised."""
    for future in flying:
        if future.done():
            future.result()
    while flying and (flying[0].done() or len(flying) > most):
        yield flying.popleft().result()
