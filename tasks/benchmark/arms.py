"""Who is asked: the plain server, the one with our draft, and those with other people's drafts."""

from dataclasses import dataclass

from tasks.common.benchmark_names import BASELINE, OURS
from tasks.common.params import Params
from tasks.common.server_plan import ServerPlan, baseline_plan
from tasks.common.speculative_plan import speculative_plan
from tasks.common.target_source import locate_draft


@dataclass(frozen=True)
class Arm:
    """A server under a name."""

    name: str
    plan: ServerPlan


def arms_of(params: Params) -> list[Arm]:
    """The plain server first, then ours, then the others in the order of params.yaml.

    Raises:
        DraftlineError: a draft cannot be had, or would not be served as it was trained.
    """
    ours, plain, *others = params.ports
    arms = [Arm(BASELINE, baseline_plan(params, port=plain)), Arm(OURS, speculative_plan(params, port=ours))]
    for port, (name, draft) in zip(others, params.benchmark.drafts.items(), strict=True):
        field = f"benchmark.drafts.{name}"
        arms.append(Arm(name, speculative_plan(params, locate_draft(draft, field), port=port, theirs=field)))
    return arms
