"""Passes with planted answers, to compute figures from."""

from tasks.benchmark.figures import Comparison
from tasks.common.sglang_client import Completion
from tasks.common.traffic import Load, Pass, Question


def completion(tokens, seconds, histogram=(), pieces=()) -> Completion:
    correct = sum(length * count for length, count in enumerate(histogram))
    ids = list(range(tokens)) if isinstance(tokens, int) else tokens
    return Completion(ids, "", "length", 3, 0, "v", sum(histogram), correct, tuple(histogram), None, seconds, pieces)


def load(count, name="heldout", concurrency=1, temperature=0.0, domains=("chat",)) -> Load:
    questions = tuple(Question(f"q{n}", domains[n % len(domains)], [1, 2, 3]) for n in range(count))
    return Load(name, questions, concurrency, temperature, 64)


def made(arm, of: Load, answers, repeat=0, seconds=None) -> Pass:
    return Pass(arm, of, repeat, seconds or sum(answer.seconds for answer in answers), tuple(answers))


def comparison(plain, drafted, of: Load | None = None, repeats=1) -> Comparison:
    """The same answers in every repeat."""
    of = of or load(len(plain))
    return Comparison(
        "speculative",
        of.name,
        tuple(made("baseline", of, plain, repeat) for repeat in range(repeats)),
        tuple(made("speculative", of, drafted, repeat) for repeat in range(repeats)),
    )
