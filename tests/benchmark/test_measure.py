"""In which order servers are started and asked, and what is counted aloud; stand-ins answer in the place of SGLang."""

import sys
from pathlib import Path

import pytest

from tasks.benchmark.arms import Arm
from tasks.benchmark.measure import measure
from tasks.benchmark.partial import Partial
from tasks.common.params import Params
from tasks.common.server_plan import ServerPlan
from tests.benchmark.passes import completion, load

ARMS = [
    Arm(kind, ServerPlan(kind, 1, 1, "cpu", "float32", Path("t"), None, None, (), ()))
    for kind in ("baseline", "speculative")
]


class StandIn:
    """A server that says when it is ready, and answers at once."""

    def __init__(self, plan: ServerPlan):
        self.plan = plan

    def __enter__(self) -> "StandIn":
        self.wait_until_ready()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def launch(self) -> None:
        pass

    def wait_until_ready(self) -> None:
        print(f"{self.plan.kind} server: ready", file=sys.stderr)

    def stop(self) -> None:
        pass

    def server_info(self) -> dict:
        return {}

    def flush_cache(self) -> None:
        pass

    def generate(self, *_: object, **__: object):
        return completion(4, 0.5, (1, 1), pieces=((0.1, 1), (0.5, 4)))


@pytest.mark.parametrize(
    ("side_by_side", "said"),
    [
        (True, ["baseline server: ready", "speculative server: ready", "benchmark: 0/16"]),
        (
            False,
            [
                "speculative server: ready",  # for its settings
                "baseline server: ready",
                "benchmark, baseline server: 0/8",
                "speculative server: ready",
                "benchmark, speculative server: 0/8",
            ],
        ),
    ],
)
def test_answers_are_counted_and_timed_from_when_the_servers_are_ready(
    tmp_path, monkeypatch, capsys, side_by_side, said
):
    monkeypatch.setattr("tasks.benchmark.measure.Server", StandIn)
    monkeypatch.setattr("tasks.benchmark.measure.fit_together", lambda *_: side_by_side)
    params = Params.model_validate({"benchmark": {"warmup_prompts": 2}})
    partial = Partial(params, tmp_path / "partial.json", [])
    measured = measure(ARMS, [load(2)], params, partial)
    assert len(measured.passes) == 6
    lines = [line.partition(" answer")[0] for line in capsys.readouterr().err.splitlines()]
    assert [line for line in lines if "ready" in line or ": 0/" in line] == said
