"""A target alone and with its draft, served side by side in one way, and what both have answered."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from infra.gpu.places import PORT_STEP
from infra.gpu.two_gpus_settings import over_both
from tasks.common.acceptance import pool
from tasks.common.params import Params
from tasks.common.server import Server
from tasks.common.server_plan import baseline_plan
from tasks.common.speculative_plan import speculative_plan
from tasks.common.traffic import Load, Pass, run_load
from tasks.tune_server.options import ALL_REDUCE, Device, open_options

ONE = "one GPU"
PLAIN, DRAFT = "plain", "with the draft"


@dataclass(frozen=True)
class Way:
    """How a pair of servers runs.

    Attributes:
        is_shared: whether two GPUs share each layer.
        flags: SGLang's, for both.
        environment: names and values, for both.
    """

    name: str
    is_shared: bool = True
    flags: tuple[str, ...] = ()
    environment: tuple[tuple[str, str], ...] = ()

    def of(self, params: Params) -> Params:
        """`params`, served in this way."""
        params = over_both(params) if self.is_shared else params
        changed = {
            "extra_args": (*params.serve.extra_args, *self.flags),
            "environment": params.serve.environment | dict(self.environment),
        }
        return params.model_copy(update={"serve": params.serve.model_copy(update=changed)})


def ways(params: Params) -> list[Way]:
    """One GPU, two, and two with each option of the all-reduce that the tuner tries."""
    # The options do not follow from the device, but where there is none the tuner has no use for them.
    options, _ = open_options(over_both(params), 1, Device(capability=(9, 0)))
    reduced = [option for option in options if option.group == ALL_REDUCE]
    return [
        Way(ONE, is_shared=False),
        Way("tensor parallel 2"),
        *(Way(option.name, flags=option.flags, environment=option.environment) for option in reduced),
    ]


class Pair:
    """The two servers of a way, and what they have answered."""

    def __init__(self, way: Way, params: Params, draft: Path, port: int):
        """
        Raises:
            DraftlineError: the plan refuses: the draft would not be served as it was trained.
        """
        served, self.way = way.of(params), way
        self.servers = {
            PLAIN: Server(baseline_plan(served, port=port)),
            DRAFT: Server(speculative_plan(served, draft, port=port + PORT_STEP)),
        }
        self.passes: list[Pass] = []

    def launch(self) -> None:
        for server in self.servers.values():
            server.launch()

    def wait_until_ready(self) -> None:
        for server in self.servers.values():
            server.wait_until_ready()

    def ask(self, loads: Sequence[Load], repeat: int) -> None:
        """Every load of each server, prefix cache emptied before."""
        for load in loads:
            for arm, server in self.servers.items():
                server.flush_cache()
                self.passes.append(run_load(server, load, arm, repeat))

    def warm_up(self, loads: Sequence[Load]) -> None:
        """A question a user, of each server."""
        for load in loads:
            for arm, server in self.servers.items():
                run_load(server, load.warm_up(1), arm)

    def stop(self) -> None:
        """
        Raises:
            DraftlineError: something of a server is left; the other one was stopped nevertheless.
        """
        with ExitStack() as stack:
            for server in self.servers.values():
                stack.callback(server.stop)


def summary(passes: Sequence[Pass], reference: Sequence[Pass]) -> dict[str, Any]:
    """By concurrency: acceptance length, tokens/s, speed-up of each repeat; answers against the first way's.

    Args:
        reference: that way's passes; none where it failed.
    """
    figures: dict[str, Any] = {}
    for concurrency in sorted({one.load.concurrency for one in passes}):
        of_both = {
            arm: [one for one in passes if (one.load.concurrency, one.arm) == (concurrency, arm)]
            for arm in (PLAIN, DRAFT)
        }
        rates = {arm: [one.tokens_per_s for one in of_arm] for arm, of_arm in of_both.items()}
        speed_ups = [draft / plain for plain, draft in zip(*rates.values(), strict=True)]
        answers = [answer for one in of_both[DRAFT] for answer in one.answers]
        figures[str(concurrency)] = {
            "accept_length": round(pool(answers).accept_length, 4),
            "tokens_per_s": {arm: round(median(of_arm), 1) for arm, of_arm in rates.items()},
            "speed_up": {
                "median": round(median(speed_ups), 3),
                "min": round(min(speed_ups), 3),
                "max": round(max(speed_ups), 3),
            },
            "same_answers": {arm: _same(of_arm, reference) for arm, of_arm in of_both.items()},
        }
    return {"by_concurrency": figures, "repeats": len({one.repeat for one in passes})}


def _same(passes: Sequence[Pass], reference: Sequence[Pass]) -> float | None:
    """Share of answers that are the reference's, token by token, of the same arm, load and repeat."""
    theirs = {(one.arm, one.load.concurrency, one.repeat): one.answers for one in reference}
    pairs = [
        (ours.output_ids, other.output_ids)
        for one in passes
        for ours, other in zip(one.answers, theirs.get((one.arm, one.load.concurrency, one.repeat), ()), strict=False)
    ]
    return round(sum(ours == other for ours, other in pairs) / len(pairs), 4) if pairs else None
