"""Figures of a run by two counts, side by side: within 2 %, or why not."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from tasks.benchmark.recording_proxy import Recorded
from tasks.benchmark.sglang_tool import ToolResult
from tasks.common.acceptance import Acceptance, pool
from tasks.common.traffic import Pass

LIMIT = 0.02
_UNKNOWN = "nothing that is known explains it"


@dataclass(frozen=True)
class Run:
    """A load asked by SGLang's tool, and by our own traffic right before or after.

    Attributes:
        recorded: the tool's requests and their answers, as they passed.
        counted: acceptance length by the server's counters over them.
    """

    theirs: ToolResult
    recorded: tuple[Recorded, ...]
    counted: float
    ours: Pass

    @property
    def acceptance(self) -> Acceptance:
        """Of the tool's run, as we define it."""
        return pool(one.answer for one in self.recorded)

    @property
    def tokens(self) -> int:
        """Of the tool's run."""
        return sum(len(one.answer.output_ids) for one in self.recorded)

    @property
    def seconds(self) -> float:
        """Of the tool's run, from the first request to the last answer."""
        return max(one.ended for one in self.recorded) - min(one.began for one in self.recorded)

    @property
    def differing(self) -> int:
        """Answers of our own traffic that are not those of the tool's run."""
        pairs = zip(self.recorded, self.ours.answers, strict=True)
        return sum(one.answer.output_ids != answer.output_ids for one, answer in pairs)


@dataclass(frozen=True)
class _Figure:
    """A figure of ours and one of SGLang's that should be the same.

    Attributes:
        same_run: both of one run, so that every pass must agree; of two runs, the median of their ratios.
        why: what explains it where they do not; empty where that is not known.
    """

    name: str
    ours: str
    theirs: str
    count: Callable[[Run], float]
    against: Callable[[Run], float]
    same_run: bool
    why: Callable[[Sequence[Run]], str]

    def row(self, runs: Sequence[Run]) -> dict[str, Any]:
        ours, theirs = [self.count(run) for run in runs], [self.against(run) for run in runs]
        ratios = [mine / other for mine, other in zip(ours, theirs, strict=True)]
        within = all(abs(ratio - 1) <= LIMIT for ratio in (ratios if self.same_run else [median(ratios)]))
        rounded = {
            "ours": median(ours),
            "theirs": median(theirs),
            "ratio": median(ratios),
            "least": min(ratios),
            "most": max(ratios),
        }
        return {
            "figure": self.name,
            "by_us": self.ours,
            "by_sglang": self.theirs,
            **{name: round(value, 4) for name, value in rounded.items()},
            "within": within,
            "why": None if within else self.why(runs) or _UNKNOWN,
        }


def pair_rows(runs: Sequence[Run], steps: int, overlaps: bool) -> list[dict[str, Any]]:
    """Each pair with its ratio, ours over theirs, over the passes, for the report.

    Args:
        steps: draft tokens that a round can accept.
        overlaps: whether the server schedules the next batch before it knows the last one's tokens.
    """

    def counters(found: Sequence[Run]) -> str:
        return _rounds_beyond_the_end(found, steps) if overlaps else ""

    def accept_length(run: Run) -> float:
        return run.acceptance.accept_length

    answers, tool = "the answers", "the tool"
    figures = [
        _Figure("output tokens", answers, tool, lambda run: run.tokens, lambda run: run.theirs.tokens, True, _nothing),
        _Figure(
            "tokens per second",
            "first request to last answer",
            tool,
            lambda run: run.tokens / run.seconds,
            lambda run: run.theirs.tokens_per_s,
            True,
            _clock,
        ),
        _Figure(
            "acceptance length", answers, tool, accept_length, lambda run: run.theirs.accept_length, True, counters
        ),
        _Figure("acceptance length", answers, "/server_info", accept_length, lambda run: run.counted, True, counters),
        _Figure(
            "acceptance length",
            answers,
            "mean of spec_accept_length",
            accept_length,
            lambda run: fmean(one.spec_accept_length for one in run.recorded),
            True,
            _other_definition,
        ),
        _Figure(
            "tokens per second",
            "our traffic, in turn",
            tool,
            lambda run: run.ours.tokens_per_s,
            lambda run: run.theirs.tokens_per_s,
            False,
            _two_runs,
        ),
        _Figure(
            "acceptance length",
            "our traffic, in turn",
            tool,
            lambda run: pool(run.ours.answers).accept_length,
            lambda run: run.theirs.accept_length,
            False,
            lambda found: _other_answers(found) or counters(found),
        ),
    ]
    return [figure.row(runs) for figure in figures]


def _nothing(_: Sequence[Run]) -> str:
    return ""


def _other_definition(_: Sequence[Run]) -> str:
    return "another definition: completion tokens over rounds counts the prefill's token, and a mean of ratios weighs answers"


def _clock(runs: Sequence[Run]) -> str:
    shorter, longer = (pick(runs, key=lambda run: run.theirs.seconds / run.seconds) for pick in (min, max))
    if any(run.tokens != run.theirs.tokens for run in runs) or shorter.theirs.seconds < (1 - LIMIT) * shorter.seconds:
        return ""
    return (
        f"its clock runs on until it has read /server_info, {longer.theirs.seconds - longer.seconds:.2f} s of "
        f"{longer.theirs.seconds:.2f} s"
    )


def _rounds_beyond_the_end(runs: Sequence[Run], steps: int) -> str:
    """Whether one more round of every answer, whatever of it was accepted, can make the difference."""
    for run in runs:
        rounds, correct = run.acceptance.rounds + len(run.recorded), run.acceptance.correct
        least, most = 1 + correct / rounds, 1 + (correct + steps * len(run.recorded)) / rounds
        if not least <= run.counted <= most:
            return ""
    return (
        "overlap scheduling has begun a round more when it learns that an answer has ended: the server counts it, the answer "
        "does not"
    )


def _two_runs(runs: Sequence[Run]) -> str:
    ours, theirs = [run.ours.tokens_per_s for run in runs], [run.theirs.tokens_per_s for run in runs]
    gap = abs(median(mine / other for mine, other in zip(ours, theirs, strict=True)) - 1)
    spread = max(_spread(ours), _spread(theirs))
    reasons = []
    if spread >= gap:
        reasons.append(f"two runs, and passes of one client differ by up to {spread:.1%} among themselves")
    streamed = sum(bool(answer.pieces) for run in runs for answer in run.ours.answers)
    asked = sum(len(run.ours.answers) for run in runs)
    if streamed < asked:
        reasons.append(
            f"the tool reads every answer piece by piece and through the recording proxy, our traffic {streamed} of {asked} and "
            f"directly; what that costs was not measured"
        )
    return "; ".join(reasons)


def _other_answers(runs: Sequence[Run]) -> str:
    differing, asked = sum(run.differing for run in runs), sum(len(run.recorded) for run in runs)
    return f"{differing} of {asked} answers of the two runs are not the same text" if differing else ""


def _spread(values: Sequence[float]) -> float:
    return (max(values) - min(values)) / median(values)
