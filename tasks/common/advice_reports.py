"""What other commands have measured, for advice (break_even.py): a file that cannot be read costs a sentence, never a measurement."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, model_validator

from tasks.common.break_even import RoundTime
from tasks.common.errors import DraftlineError
from tasks.common.files import REPORTS, read_json
from tasks.common.forms import Form, read_form

_Share = Annotated[float, Field(ge=0)]
# Of the settings of a report: what the time of a draft's step depends on.
_OF_A_STEP = ("target_sha256", "draft_sha256", "device", "dtype", "machine", "version", "extra_args")


def measured_step_share(
    requests: int, steps: int, topk: int, settings: Mapping[str, Any], folder: Path = REPORTS
) -> float | str | None:
    """Share of a round that one draft step takes with so many requests at once, from reports/tuned.json or profile.json.

    The tuner's line through rounds of several lengths counts first. Of a profile it is the draft's own passes, by the GPU's
    time or the host's, whichever is more: one of the two is what the round waits for.

    Args:
        settings: of the report that is advised on: the same target and draft must have been measured, on the same device and
            machine, in the same dtype, by the same version of the engine with the same flags. (The tuner's line is of servers
            without options: its settings have the flags of params.yaml alone.)

    Returns:
        None where neither report has it for these settings and this number of requests, steps and top-k; where one of them cannot
        be read, the sentence that says so. A measurement is worth more than advice on it, so that nothing is raised.
    """
    unreadable = []
    for file, form in (("tuned.json", _Tuned), ("profile.json", _Profile)):
        if not (path := folder / file).exists():
            continue
        try:
            report = read_form(path, form, "Make it again, or remove it.")
        except DraftlineError as error:
            unreadable.append(str(error))
            continue
        if all(report.settings.get(name) == settings.get(name) for name in _OF_A_STEP):
            share = report.step_share(requests, steps, topk)
            if share is not None:
                return share
    return " ".join(unreadable) or None


def scaling_fit(folder: Path = REPORTS) -> Any:
    """reports/scaling.json, for `advice`; None where there is none, and nothing in it where it cannot be read."""
    path = folder / "scaling.json"
    try:
        return read_json(path) if path.exists() else None
    except DraftlineError:
        return {}


class _Line(Form):
    fixed_ms: _Share
    step_ms: _Share

    @model_validator(mode="after")
    def _takes_time(self) -> "_Line":
        if self.fixed_ms + self.step_ms == 0:
            raise ValueError("a round takes more than no time")
        return self


class _Tuned(Form):
    """What is read of reports/tuned.json."""

    settings: dict[str, Any]
    concurrency: int
    round_time: _Line | None = None

    def step_share(self, requests: int, steps: int, topk: int) -> float | None:
        if self.round_time is None or topk != 1 or self.concurrency != requests:
            return None
        return RoundTime(self.round_time.fixed_ms, self.round_time.step_ms).step_share(steps)


class _Part(Form):
    part: str
    host_share: _Share
    gpu_share: _Share = 0.0


class _Round(Form):
    draft_passes: Annotated[int, Field(ge=0)]
    parts: list[_Part]


class _Row(Form):
    requests: int
    round: _Round


class _Profile(Form):
    """What is read of reports/profile.json."""

    settings: dict[str, Any]
    by_requests: list[_Row]

    def step_share(self, requests: int, steps: int, topk: int) -> float | None:
        if (self.settings.get("steps"), self.settings.get("topk")) != (steps, topk):
            return None
        return next(
            (
                max(part.host_share, part.gpu_share) / row.round.draft_passes
                for row in self.by_requests
                if row.requests == requests and row.round.draft_passes
                for part in row.round.parts
                if part.part == "draft"
            ),
            None,
        )
