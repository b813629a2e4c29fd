"""Real measurements for the search: every candidate beside the plain server, warm, in turn, the prefix cache emptied."""

import math
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import TYPE_CHECKING

from tasks.common.acceptance import pool
from tasks.common.benchmark_names import HELDOUT
from tasks.common.errors import DraftlineError
from tasks.common.params import Params
from tasks.common.progress import progress
from tasks.common.sglang_client import Completion
from tasks.common.traffic import Load, Pass, Question, ask, in_turn, run_load, speed, step_seconds
from tasks.tune_server.bench import MeasuredBatch
from tasks.tune_server.candidates import PLAIN, Candidate
from tasks.tune_server.costs import REPEATS
from tasks.tune_server.results import Result
from tasks.tune_server.schedule import MOST_TIMES
from tasks.tune_server.servers import Budget, Fleet, OutOfBudget

if TYPE_CHECKING:
    from tqdm import tqdm

_FEW = 4


class ServerBench:
    """The bench of real servers (bench.Bench)."""

    def __init__(self, params: Params, concurrency: int, questions: Sequence[Question], budget: Budget, fleet: Fleet):
        """
        Args:
            questions: the first of them are asked in every rung.
        """
        self._params, self._concurrency, self._questions = params, concurrency, questions
        self._budget, self._fleet = budget, fleet
        self.capacity = fleet.limit
        # On a CPU servers that start together take the time of all.
        self.starts_together = fleet.can_start_together and params.target.device != "cpu"
        self.least_questions = len(self._load(_FEW).questions)

    @property
    def running(self) -> set[Candidate]:
        """Where servers run in turn none stays."""
        return set(self._fleet.running) if self.capacity > 1 else set()

    def remaining(self) -> float:
        """Seconds of the budget that are left."""
        return self._budget.remaining()

    def measure(
        self, batch: Sequence[Candidate], questions: int, rung: int, ranked: Sequence[Candidate]
    ) -> MeasuredBatch:
        """As bench.Bench says.

        Raises:
            DraftlineError: the plain server failed; without it nothing can be compared.
        """
        asked, arms = _Asked(self._load(questions)), [PLAIN, *batch]
        warm = asked.load.warm_up(self._params.benchmark.warmup_prompts)
        try:
            for group in [arms] if self.capacity > 1 else [[arm] for arm in arms]:
                if self.starts_together and PLAIN in group and not self._fleet.running:
                    self._start_plain_alone(ranked, warm, asked)
                began, before = time.monotonic(), set(self._fleet.running)
                asked.fail(self._fleet.ensure(group, ranked))
                new = [candidate for candidate in asked.alive(group) if candidate not in before]
                answers = len(new) * len(warm.questions) + REPEATS * len(asked.alive(group)) * len(asked.load.questions)
                with progress(total=answers, desc=f"rung {rung}", unit="answer") as bar:
                    self._warm_up(new, warm, asked, bar)
                    asked.started += len(new)
                    asked.start_s += time.monotonic() - began
                    for repeat in range(REPEATS):
                        self._pass(group, repeat, asked, bar)
        except OutOfBudget:
            asked.is_cut = True
        return asked.measured(batch, rung)

    def _load(self, questions: int) -> Load:
        asked = self._params.benchmark
        return Load.of(HELDOUT, self._questions, questions, self._concurrency, 0.0, asked.max_new_tokens)

    def _start_plain_alone(self, ranked: Sequence[Candidate], warm: Load, asked: "_Asked") -> None:
        """The first on a fresh host reads all from disk and compiles kernels that the others find: what it takes says nothing
        of them, so it does not count."""
        asked.fail(self._fleet.ensure([PLAIN], ranked))
        with progress(total=len(warm.questions), desc="warm-up", unit="answer") as bar:
            self._warm_up([PLAIN], warm, asked, bar)

    def _warm_up(self, new: Sequence[Candidate], warm: Load, asked: "_Asked", bar: "tqdm") -> None:
        for candidate in new:
            with self._surviving(candidate, asked):
                self._require_room(candidate)
                made = self._run(candidate, warm, 0, bar)
                if candidate == PLAIN:
                    asked.warm = [made]

    def _run(self, candidate: Candidate, load: Load, repeat: int, bar: "tqdm") -> Pass:
        def answered() -> None:
            bar.update()
            self._budget.require()

        return run_load(self._fleet.running[candidate], load, candidate.name, repeat, answered)

    def _require_room(self, candidate: Candidate) -> None:
        """For all that later rungs may ask: a request that waits for room makes its server look slow."""
        load = self._load(MOST_TIMES * self.least_questions)
        room = self._fleet.running[candidate].server_info().get("max_total_num_tokens")
        needed = load.most_tokens(candidate.shape.reserved if candidate.shape else 0)
        if room is not None and room < needed:
            raise DraftlineError(
                f"its cache holds {room} tokens, and the requests can come to {needed}: raise serve.max_total_tokens or "
                f"serve.mem_fraction_static"
            )

    def _pass(self, group: Sequence[Candidate], repeat: int, asked: "_Asked", bar: "tqdm") -> None:
        for candidate in asked.alive(group):
            with self._surviving(candidate, asked):
                self._fleet.running[candidate].flush_cache()
        order = group if repeat % 2 == 0 else group[::-1]
        if self._concurrency > 1:
            for candidate in asked.alive(order):
                with self._surviving(candidate, asked):
                    asked.add(self._run(candidate, asked.load, repeat, bar), candidate)
            return
        answers: dict[Candidate, list[Completion]] = {candidate: [] for candidate in asked.alive(group)}
        for number, candidate in in_turn(asked.load, order):
            if candidate in asked.failed:
                continue
            self._budget.require()
            with self._surviving(candidate, asked):
                answers[candidate].append(ask(self._fleet.running[candidate], asked.load, number, stream=True))
                bar.update()
        for candidate in asked.alive(group):
            asked.add(Pass.in_turn(candidate.name, asked.load, repeat, answers[candidate]), candidate)

    @contextmanager
    def _surviving(self, candidate: Candidate, asked: "_Asked") -> Iterator[None]:
        """A server that fails within the block is dropped, and the others are asked on."""
        try:
            yield
        except DraftlineError as error:
            asked.fail({candidate: self._fleet.drop(candidate, error)})


class _Asked:
    """A batch in the making.

    Attributes:
        warm: what the plain server was warmed up with, which tells what an answer takes where no pass was ended.
    """

    def __init__(self, load: Load):
        self.load = load
        self.warm: list[Pass] = []
        self.failed: dict[Candidate, str] = {}
        self.started, self.start_s, self.is_cut = 0, 0.0, False
        self._passes: dict[Candidate, list[Pass]] = {}

    def alive(self, candidates: Sequence[Candidate]) -> list[Candidate]:
        return [candidate for candidate in candidates if candidate not in self.failed]

    def fail(self, failed: dict[Candidate, str]) -> None:
        self.failed |= failed
        if PLAIN in failed:
            raise DraftlineError(
                f"the plain server failed, and without it no speed-up can be measured: {failed[PLAIN]}"
            )

    def add(self, made: Pass, candidate: Candidate) -> None:
        self._passes.setdefault(candidate, []).append(made)

    def measured(self, batch: Sequence[Candidate], rung: int) -> MeasuredBatch:
        plain, results = self._passes.get(PLAIN, []), {}
        for candidate in self.alive(batch):
            made = self._passes.get(candidate, [])[: len(plain)]
            if made:
                try:
                    results[candidate] = result_of(
                        rung, made, plain[: len(made)], candidate.shape and candidate.shape.steps
                    )
                except DraftlineError as error:  # it does not speculate
                    self.failed[candidate] = str(error)
        timed = plain or self.warm
        answers = sum(len(one.answers) for one in timed)
        return MeasuredBatch(
            results,
            {candidate: self.failed[candidate] for candidate in batch if candidate in self.failed},
            self.started,
            self.start_s,
            sum(one.seconds for one in timed) / answers if answers else None,
            self.is_cut,
        )


def result_of(rung: int, made: Sequence[Pass], plain: Sequence[Pass], steps: int | None) -> Result:
    """What passes say of a server, beside the plain server's of the same repeats.

    Args:
        steps: of its draft; None where it has none.

    Raises:
        DraftlineError: it has a draft, and did not speculate.
    """
    answers = [answer for one in made for answer in one.answers]
    acceptance, beside = pool(answers) if steps else None, list(zip(made, plain, strict=True))
    return Result(
        rung=rung,
        questions=len(made[0].answers),
        ratios=tuple(one.tokens_per_s / of_plain.tokens_per_s for one, of_plain in beside),
        tokens_per_s=speed(made),
        plain_tokens_per_s=speed(plain),
        accept_length=acceptance.accept_length if acceptance else None,
        survival=tuple(acceptance.survival(steps)) if acceptance else (),
        accept_error=_accept_error(made, acceptance.accept_length) if acceptance else 0.0,
        break_even=median(map(_break_even, made, plain)) if acceptance else None,
        plain_step_s=step_seconds(made, plain)[1],
        answer_s=sum(one.seconds for one in made) / len(answers),
    )


def _break_even(made: Pass, plain: Pass) -> float:
    round_s, plain_s = step_seconds([made], [plain])
    return round_s / plain_s


def _accept_error(passes: Sequence[Pass], accept_length: float) -> float:
    """Standard error of the acceptance length, as of a ratio of sums over questions, as a share of it."""
    asked: dict[str, list[Completion]] = defaultdict(list)
    for one in passes:
        for question, answer in zip(one.load.questions, one.answers, strict=True):
            asked[question.id].append(answer)
    if len(asked) < 2:
        return math.inf
    rounds = sum(answer.verify_rounds for answers in asked.values() for answer in answers)
    off = [sum(a.correct_drafts - (accept_length - 1) * a.verify_rounds for a in answers) for answers in asked.values()]
    return math.sqrt(sum(one**2 for one in off) * len(off) / (len(off) - 1)) / rounds / accept_length
