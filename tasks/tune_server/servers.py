"""Servers of candidates: started side by side, kept up while they may be asked again, dropped where they fail."""

import math
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace

from tasks.common.errors import DraftlineError
from tasks.common.params import PARAMS, Params
from tasks.common.server import Server
from tasks.common.server_memory import fit_together
from tasks.common.server_session import port_is_free, ports_of_others
from tasks.tune_server.candidates import PLAIN, Candidate, Shape

# More would start too much at once, whatever the memory.
_MOST_SERVERS = 8
_REASON_LENGTH = 200


class OutOfBudget(Exception):
    """The time is up."""


class Budget:
    """Seconds from now on."""

    def __init__(self, seconds: float):
        self.seconds = seconds
        self._ends = time.monotonic() + seconds

    def remaining(self) -> float:
        """Below zero once it is spent."""
        return self._ends - time.monotonic()

    def require(self) -> None:
        """
        Raises:
            OutOfBudget: nothing is left.
        """
        if self.remaining() <= 0:
            raise OutOfBudget


class Fleet:
    """
    Attributes:
        limit: servers at once; 1 where even two do not fit.
        running: the servers that are up.
    """

    def __init__(self, params: Params, budget: Budget):
        self.running: dict[Candidate, Server] = {}
        self._params, self._budget = params, budget
        self.limit = _most_servers(params)

    @property
    def can_start_together(self) -> bool:
        """Whether servers may start at the same time.

        Each sizes its cache from the memory that is free when it looks; only a stated size is safe from that.
        """
        return self._params.serve.max_total_tokens is not None

    def __enter__(self) -> "Fleet":
        return self

    def __exit__(self, *_: object) -> None:
        with ExitStack() as stack:  # one that cannot be stopped leaves none of the others behind
            for candidate in self.running:
                stack.callback(self._stop, candidate)

    def ensure(self, wanted: Sequence[Candidate], ranked: Sequence[Candidate]) -> dict[Candidate, str]:
        """Have the servers of `wanted` run; others make room, those that rank last first.

        Returns:
            Why those that do not run do not.

        Raises:
            OutOfBudget: they were not up in time.
        """
        missing, failed = [c for c in wanted if c not in self.running], {}
        self._make_room(len(missing), wanted, ranked)
        for candidate in missing:
            try:
                self._launch(candidate)
                if not self.can_start_together:
                    self._wait(candidate)
            except DraftlineError as error:
                failed[candidate] = self.drop(candidate, error)
        for candidate in missing if self.can_start_together else ():
            if candidate not in failed:
                try:
                    self._wait(candidate)
                except DraftlineError as error:
                    failed[candidate] = self.drop(candidate, error)
        return failed

    def drop(self, candidate: Candidate, error: DraftlineError) -> str:
        """Stop a server that failed.

        Returns:
            Why, in a line.

        Raises:
            OutOfBudget: it was only not ready by the end of the budget.
        """
        self._stop(candidate)
        self._budget.require()
        return _reason(error)

    def _launch(self, candidate: Candidate) -> None:
        self._budget.require()
        plan = candidate.plan(self._params, self._free_port())
        patience = min(plan.startup_timeout_s, max(1, math.ceil(self._budget.remaining())))
        server = Server(replace(plan, startup_timeout_s=patience))
        self.running[candidate] = server
        try:
            server.launch()
        except DraftlineError:
            if plan.port not in ports_of_others() and port_is_free(plan.port):
                raise
            self._launch(candidate)  # another run took the port meanwhile: the next one

    def _wait(self, candidate: Candidate) -> None:
        server = self.running[candidate]
        server.wait_until_ready()
        if candidate.is_automatic:
            info = server.server_info()
            numbers = (info[f"speculative_{name}"] for name in ("num_steps", "eagle_topk", "num_draft_tokens"))
            if (chosen := Shape(*numbers)) != candidate.shape:
                raise DraftlineError(f"SGLang chose {chosen} on its own, expected was {candidate.shape}")

    def _make_room(self, count: int, wanted: Sequence[Candidate], ranked: Sequence[Candidate]) -> None:
        rank = {candidate: place for place, candidate in enumerate(ranked)}
        others = [candidate for candidate in self.running if candidate not in wanted]
        others.sort(key=lambda candidate: rank.get(candidate, len(rank)))
        while others and len(self.running) + count > self.limit:
            self._stop(others.pop())

    def _stop(self, candidate: Candidate) -> None:
        if server := self.running.pop(candidate, None):
            server.stop()

    def _free_port(self) -> int:
        taken = {server.plan.port for server in self.running.values()} | ports_of_others().keys()
        first = self._params.serve.port
        free = (port for port in range(first, 65_536) if port not in taken and port_is_free(port))
        if (port := next(free, None)) is None:
            raise DraftlineError(f"no port from {first} on is free for another server. Lower serve.port in {PARAMS}.")
        return port


def _most_servers(params: Params) -> int:
    port = params.serve.port
    plain, current = PLAIN.plan(params, port), Candidate(Shape.of(params.serve)).plan(params, port)
    fitting = (n for n in range(_MOST_SERVERS, 1, -1) if fit_together([plain, *[current] * (n - 1)], params))
    return next(fitting, 1)


def _reason(error: DraftlineError) -> str:
    """First and last line of a failure: what happened, and the log's word or a hint."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    said = lines[0] if len(lines) == 1 else f"{lines[0]} {lines[-1]}"
    return said if len(said) <= _REASON_LENGTH else said[: _REASON_LENGTH - 1] + "…"
