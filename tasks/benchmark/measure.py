"""Asking every server the same: same token ids, same flags, in turn, warm, the prefix cache emptied before each pass."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from tasks.benchmark.arms import Arm
from tasks.benchmark.conditions import require_equal_conditions, require_equal_environments
from tasks.benchmark.partial import Partial
from tasks.common.params import Params
from tasks.common.progress import progress
from tasks.common.server import Server, running
from tasks.common.server_memory import fit_together
from tasks.common.sglang_client import Completion
from tasks.common.traffic import Load, Pass, ask, in_turn, run_load

# An arm and the server that runs for it.
_Running = tuple[Arm, Server]


@dataclass(frozen=True)
class Measured:
    """All answers.

    Attributes:
        infos: what each server said that it runs with, by arm, the plain one's first.
        side_by_side: whether all servers ran at once and were asked in turn.
    """

    passes: tuple[Pass, ...]
    infos: dict[str, dict[str, Any]]
    side_by_side: bool


def measure(arms: Sequence[Arm], loads: Sequence[Load], params: Params, partial: Partial) -> Measured:
    """Pass `benchmark.repeats` times over every load with every server.

    Side by side they are asked in turn, so that a slow minute of the machine slows all: question by question where one
    request runs at a time, else pass by pass. Who goes first alternates.

    Args:
        partial: begun when the first servers are up, and given the passes of a load when it was asked of all servers that run.

    Raises:
        DraftlineError: a server does not start, dies or hangs, or the servers do not run under the same conditions.
    """
    side_by_side = fit_together([arm.plan for arm in arms], params)
    require_equal_environments({arm.name: arm.plan.environment for arm in arms})
    passes = []
    # One after the other, a draft's server would be known when all before it had been measured.
    infos = {} if side_by_side else {arm.name: _info(arm) for arm in arms[1:]}
    groups = [list(arms)] if side_by_side else [[arm] for arm in arms]
    asked = params.benchmark
    warm = [load.warm_up(asked.warmup_prompts) for load in _one_a_kind(loads)]
    answers = sum(
        len(load.questions) for load in [*warm, *loads, *(load for load in loads for _ in range(asked.repeats - 1))]
    )
    for group in groups:
        servers = [(arm, Server(arm.plan)) for arm in group]
        with running(*(server for _, server in servers)):
            infos |= {arm.name: server.server_info() for arm, server in servers}
            infos = {arm.name: infos[arm.name] for arm in arms}
            require_equal_conditions(infos, loads, params.serve.reserved_tokens)
            if not passes:
                partial.begin()
            # Its clock begins here: with the start of servers in it the rate, and so the time left, would be of no answer.
            desc = "benchmark" if side_by_side else f"benchmark, {group[0].name} server"
            with progress(total=len(group) * answers, desc=desc, unit="answer") as bar:
                for load in warm:
                    for arm, server in servers:
                        run_load(server, load, arm.name, on_answer=bar.update)
                for repeat in range(asked.repeats):
                    for number, load in enumerate(loads):
                        first = (number + repeat) % 2
                        made = _passes(servers if not first else servers[::-1], load, repeat, bar.update)
                        passes += made
                        partial.keep(made)
    return Measured(tuple(passes), infos, side_by_side)


def _info(arm: Arm) -> dict[str, Any]:
    """What its server says that it runs with, started for that alone."""
    with Server(arm.plan) as server:
        return server.server_info()


def _one_a_kind(loads: Sequence[Load]) -> Iterator[Load]:
    """A load of each concurrency and temperature: what a server captures or compiles depends on both."""
    return iter({(load.concurrency, load.temperature): load for load in reversed(loads)}.values())


def _passes(servers: Sequence[_Running], load: Load, repeat: int, on_answer: Callable[[], object]) -> list[Pass]:
    for _, server in servers:
        server.flush_cache()
    if load.concurrency == 1:
        return _question_by_question(servers, load, repeat, on_answer)
    return [run_load(server, load, arm.name, repeat, on_answer) for arm, server in servers]


def _question_by_question(
    servers: Sequence[_Running], load: Load, repeat: int, on_answer: Callable[[], object]
) -> list[Pass]:
    answers: dict[str, list[Completion]] = {arm.name: [] for arm, _ in servers}
    for number, (arm, server) in in_turn(load, servers):
        answers[arm.name].append(ask(server, load, number, stream=True))
        on_answer()
    return [Pass.in_turn(name, load, repeat, given) for name, given in answers.items()]
