"""Checks of what only the benchmark reads, after hours of work: sets of questions, and other people's drafts."""

from tasks.common.check import Check, Expectation
from tasks.verify_environment.facts import Asked, Named


def check_sets(asked: Asked) -> Check:
    want = Expectation(
        "question sets",
        "in each file of benchmark.sets a question a line, which the target's template takes and serve.context_length holds",
        "The benchmark reads them last, after hours of work.",
    )
    return _check(want, asked, asked.sets, "benchmark.sets is empty: the held-out prompts are asked")


def check_drafts(asked: Asked) -> Check:
    want = Expectation(
        "other drafts",
        "for each of benchmark.drafts the folder or hub id of an EAGLE-3 draft that can be served with this target",
        "The benchmark opens them last, after hours of work.",
    )
    return _check(want, asked, asked.drafts, "benchmark.drafts is empty")


def _check(want: Expectation, asked: Asked, named: dict[str, Named], none: str) -> Check:
    if asked.error:
        return want.error(asked.error, "Repair what the error names; without sets and drafts this check is left out.")
    if not named:
        return want.not_applicable(none)
    if problems := [one.problem.replace("\n", "\n  ") for one in named.values() if one.problem]:
        return want.error("\n".join(problems), "Correct the file, or its path in params.yaml.")
    return want.ok("; ".join(f"{name}: {one.found}" for name, one in named.items()))
