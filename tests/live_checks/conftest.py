"""A tiny run whose draft is accepted, and servers over it: the right one, and wrong ones that are really started."""

import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from tasks.common.check import Check
from tasks.common.params import Params
from tasks.common.server import Server
from tasks.common.server_plan import ServerPlan, Setting
from tasks.common.speculative_plan import EXPORT, speculative_plan
from tasks.doctor.examine import Request, examine
from tests.ports import free_port_pair
from tests.tiny_run import AUX, SERVED, TRAINED, train_tiny_draft


@dataclass(frozen=True)
class TinyRun:
    """A folder with artifacts/ up to the export; the tests' current directory."""

    params: Params

    @property
    def plan(self) -> ServerPlan:
        """The right server, able to answer with states."""
        return speculative_plan(self.params).with_hidden_states()

    @contextmanager
    def serving(self, draft: Path = EXPORT, **flags: str | None) -> Iterator[Server]:
        """A server that loads another folder, or runs under other flags: `page_size="1"`; None drops one."""
        plan = self.plan
        algorithm, dtype = flags.get("speculative_algorithm", plan.algorithm), flags.get("dtype", plan.dtype)
        plan = replace(plan, draft=draft, algorithm=algorithm, dtype=dtype)
        changed = {f"--{name.replace('_', '-')}": value for name, value in flags.items()}
        changed["--speculative-draft-model-path"] = str(draft)
        kept = [setting for setting in plan.flags if setting.name not in changed]
        new = [Setting(name, (value,), "test") for name, value in changed.items() if value is not None]
        with Server(replace(plan, flags=(*kept, *new))) as server:
            yield server


@pytest.fixture(scope="package")
def tiny_run(tmp_path_factory, tiny_model_folder) -> Iterator[TinyRun]:
    params = Params.model_validate(
        {
            "target": {"model": str(tiny_model_folder)},
            "contract": {"aux_layer_ids": AUX},
            "train_draft": TRAINED,
            "serve": SERVED | {"port": free_port_pair()},
        }
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("tiny_run"))
        train_tiny_draft(params)
        yield TinyRun(params)


def line_of(server: Server) -> str:
    """The command line that a server was started with."""
    return shlex.join(server.plan.command(server.weight_version))


def doctor(server: Server, draft: Path = EXPORT, **request) -> dict[str, Check]:
    """The doctor's verdicts on a running server, by id."""
    _, checks = examine(Request(draft, server.plan.target, server=server.url, **request))
    assert len({check.id for check in checks}) == len(checks)
    return {check.id: check for check in checks}
