"""Questions asked of a server by a fixed number of users at once: a closed loop, each asks its next when it is answered."""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from statistics import quantiles
from time import perf_counter
from typing import TypeVar

from tasks.common.sglang_client import Completion, SGLangClient

# So many requests of each user, that the time in which fewer are left than users weighs little.
_REQUESTS_A_USER = 4
# So many of the users read their answers piece by piece; more would measure this client and not the server.
_STREAMS = 4
_Server = TypeVar("_Server")


@dataclass(frozen=True)
class Question:
    """What is asked.

    Attributes:
        token_ids: the rendered conversation, generation prompt included.
    """

    id: str
    domain: str
    token_ids: list[int]


@dataclass(frozen=True)
class Load:
    """A set of questions and how they are asked.

    Attributes:
        name: of the set.
        concurrency: requests at once.
        max_new_tokens: of an answer; a stop token ends it before.
    """

    name: str
    questions: tuple[Question, ...]
    concurrency: int
    temperature: float
    max_new_tokens: int

    @classmethod
    def of(
        cls,
        name: str,
        questions: Sequence[Question],
        least: int,
        concurrency: int,
        temperature: float,
        max_new_tokens: int,
    ) -> "Load":
        """At least `least` requests and four a user; a set that has fewer questions is asked over again."""
        asked = tuple(questions[number % len(questions)] for number in range(requests_of(least, concurrency)))
        return cls(name, asked, concurrency, temperature, max_new_tokens)

    def warm_up(self, per_user: int) -> "Load":
        """The same with so many requests of each user."""
        count = per_user * self.concurrency
        return replace(self, questions=tuple(self.questions[number % len(self.questions)] for number in range(count)))

    @property
    def key(self) -> tuple[str, int, float]:
        """What tells one load of a benchmark from another."""
        return self.name, self.concurrency, self.temperature

    @property
    def sampling(self) -> dict[str, float]:
        return {"temperature": self.temperature, "max_new_tokens": self.max_new_tokens}

    def most_tokens(self, reserved: int) -> int:
        """Tokens that the requests which run at once can come to hold in the KV cache, each with `reserved` of a round."""
        longest = max(len(question.token_ids) for question in self.questions)
        return self.concurrency * (longest + self.max_new_tokens + reserved)


@dataclass(frozen=True)
class Pass:
    """One server's answers to a load.

    Attributes:
        arm: name of the server.
        seconds: from the first request to the last answer.
        answers: in the order of the questions.
    """

    arm: str
    load: Load
    repeat: int
    seconds: float
    answers: tuple[Completion, ...]

    @classmethod
    def in_turn(cls, arm: str, load: Load, repeat: int, answers: Sequence[Completion]) -> "Pass":
        """Of requests that were asked one at a time, others between them."""
        return cls(arm, load, repeat, sum(answer.seconds for answer in answers), tuple(answers))

    @property
    def tokens(self) -> int:
        return sum(len(answer.output_ids) for answer in self.answers)

    @property
    def tokens_per_s(self) -> float:
        """Of all users together, prefill included."""
        return self.tokens / self.seconds

    @property
    def waited_seconds(self) -> float:
        """Of all users together, each from its requests to its answers."""
        return sum(answer.seconds for answer in self.answers)

    @property
    def first_token_seconds(self) -> list[float]:
        """Time to first token of each streamed answer."""
        return [answer.pieces[0][0] for answer in self.answers if answer.pieces]

    @property
    def inter_token_seconds(self) -> list[float]:
        """Time between tokens of the streamed answers: of a piece of n tokens, n times its n-th part, as SGLang's own
        benchmark counts it."""
        return [gap for answer in self.answers for gap in _gaps(answer)]


def asked_at(concurrency: Sequence[int], temperatures: Sequence[float]) -> list[tuple[int, float]]:
    """Requests at once and temperature of each load: greedily at every concurrency, above 0 at the lowest alone."""
    return [(c, t) for t in temperatures for c in concurrency if t == 0 or c == min(concurrency)]


def requests_of(least: int, concurrency: int) -> int:
    """Requests of a load that asks at least `least` questions."""
    return max(least, _REQUESTS_A_USER * concurrency)


def percentile(values: Sequence[float], percent: int) -> float:
    """Of at least one value, interpolated."""
    return values[0] if len(values) == 1 else quantiles(values, n=100, method="inclusive")[percent - 1]


def speed(passes: Iterable[Pass]) -> float:
    """Tokens per second of all users together."""
    passes = list(passes)
    return sum(one.tokens for one in passes) / sum(one.seconds for one in passes)


def step_seconds(*arms: Sequence[Pass]) -> list[float]:
    """Seconds of a step of each server: a round of draft and verify, or a plain token.

    Of streamed answers from their first piece on: prefill is the same with and without a draft, and would draw the ratio of two
    servers towards the acceptance length reached. The prefills of requests that join while an answer is written are in it, and
    do draw it there; whether the draft pays they leave as it is. Where all answers of one came in one piece, all of the waiting,
    of each.
    """
    found = [_decoding(passes) for passes in arms]
    if not all(steps for steps, _ in found):
        found = [_steps_and_wait(passes) for passes in arms]
    return [seconds / steps for steps, seconds in found]


def run_load(
    server: SGLangClient, load: Load, arm: str, repeat: int = 0, on_answer: Callable[[], object] = lambda: None
) -> Pass:
    """Ask all of it.

    Raises:
        DraftlineError: a request was refused or the server died; the others are given up.
    """
    numbers, lock = iter(range(len(load.questions))), threading.Lock()
    answers: list[Completion | None] = [None] * len(load.questions)

    def user(streams: bool) -> None:
        for number in _shared(numbers, lock):
            answers[number] = ask(server, load, number, streams)
            on_answer()

    began = perf_counter()
    pool = ThreadPoolExecutor(load.concurrency, thread_name_prefix="user")
    try:
        users = [pool.submit(user, number < _STREAMS) for number in range(load.concurrency)]
        for done in wait(users, return_when=FIRST_EXCEPTION).done:
            done.result()
    except BaseException:
        for _ in _shared(numbers, lock):  # nobody asks further
            pass
        # Whoever still waits for an answer gets none once the server is stopped.
        pool.shutdown(wait=False, cancel_futures=True)
        raise
    seconds = perf_counter() - began
    pool.shutdown()
    return Pass(arm, load, repeat, seconds, tuple(answers))


def in_turn(load: Load, servers: Sequence[_Server]) -> Iterator[tuple[int, _Server]]:
    """Each question for every server before the next one is, so that a slow moment slows all.

    Who goes first alternates: nobody always finds the processor's caches as another server left them.
    """
    for number in range(len(load.questions)):
        yield from ((number, server) for server in (servers if number % 2 == 0 else reversed(servers)))


def ask(server: SGLangClient, load: Load, number: int, stream: bool) -> Completion:
    """Ask one request of a load. A question that is asked over again is computed over again: each request has a prefix cache
    of its own."""
    question = load.questions[number]
    return server.generate(question.token_ids, load.sampling, cache_key=cache_key(number), stream=stream)


def cache_key(number: int) -> str:
    """Of a request of a load: it shares the prefix cache with the same request of other passes alone, before which it is emptied."""
    return f"request-{number}"


def _shared(numbers: Iterator[int], lock: threading.Lock) -> Iterator[int]:
    """What is left of `numbers`, which several threads take from."""
    while True:
        with lock:
            number = next(numbers, None)
        if number is None:
            return
        yield number


def _gaps(answer: Completion) -> Iterator[float]:
    for (before, had), (now, has) in zip(answer.pieces, answer.pieces[1:], strict=False):
        if has > had:
            yield from [(now - before) / (has - had)] * (has - had)


def _decoding(passes: Iterable[Pass]) -> tuple[float, float]:
    """(steps, seconds) of the streamed answers behind their first piece; what that holds beyond the prefill's token is left out."""
    steps = seconds = 0.0
    for answer in (answer for one in passes for answer in one.answers if len(answer.pieces) > 1):
        (began, first), (ended, last) = answer.pieces[0], answer.pieces[-1]
        if last > first:
            steps += (answer.verify_rounds or len(answer.output_ids) - 1) * (last - first) / (last - 1)
            seconds += ended - began
    return steps, seconds


def _steps_and_wait(passes: Sequence[Pass]) -> tuple[float, float]:
    rounds = sum(answer.verify_rounds for one in passes for answer in one.answers)
    return rounds or sum(one.tokens for one in passes), sum(one.waited_seconds for one in passes)
