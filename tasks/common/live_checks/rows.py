"""Rows of hidden states that a server returns: their width, and whether there is one for each token."""

from collections.abc import Sequence
from typing import Any

from tasks.common.check import Check, Expectation
from tasks.common.draft_checks.subject import Subject
from tasks.common.draft_tensors import aux_size, num_aux_states
from tasks.common.live_checks.interview import Answer
from tasks.common.live_checks.slots import Reference, answer_of


def returns_states(info: dict[str, Any]) -> bool:
    """Whether a server was started so that it returns the states of every token."""
    return bool(info.get("enable_return_hidden_states")) and info.get("return_hidden_states_mode", "full") == "full"


def check_width(
    answers: Sequence[Answer], subject: Subject, references: Sequence[Reference], info: dict[str, Any]
) -> Check:
    """C1: n_aux * H, what the draft's fc reads."""
    slots, seen = num_aux_states(subject.draft.config), aux_size(subject.draft.config)
    want = Expectation(
        "C1 width",
        f"rows of {slots} x {seen} = {slots * seen}",
        "Rows of one state mean that fc is never called: nothing is accepted, and nothing fails.",
    )
    if not returns_states(info):
        mode = " --return-hidden-states-mode full" if info.get("enable_return_hidden_states") else ""
        return want.not_applicable(f"it returns no states: start it with --enable-return-hidden-states{mode}")
    states = [answer.states for answer in answers if answer.states is not None and len(answer.states)]
    if not states:
        return want.error("no rows at all", "Start it with --enable-return-hidden-states --disable-radix-cache.")
    width = states[0].shape[1]
    if width == slots * seen:
        return want.ok(f"rows of {width}")
    found = f"rows of {width}{', one state' if width == seen else ''}{_held(answers, references, seen)}"
    algorithm = str(info.get("speculative_algorithm"))
    if width != seen or algorithm.upper() == "EAGLE3":
        fix = "Name the layers that the draft was trained on in the eagle_config that the server loads, and restart it."
        return want.error(f"{found}: it captures another number of layers", fix)
    if info.get("speculative_algorithm") is None:
        return want.error(
            f"{found}: it runs without a draft", "Start it with the draft: --speculative-algorithm EAGLE3."
        )
    return want.error(
        f"{found}: {algorithm} in place of EAGLE3, fc is never called",
        f"Start it with --speculative-algorithm EAGLE3 (it runs {algorithm}).",
    )


def check_rows(answers: Sequence[Answer], info: dict[str, Any]) -> Check:
    """H1: a token without a row shifts every row behind it."""
    want = Expectation(
        "H1 rows",
        "a finite row for each token of prompt and answer",
        "Rows that are left out shift all that is compared.",
    )
    if not returns_states(info):
        return want.not_applicable("it returns no states")
    for answer in answers:
        rows, tokens = 0 if answer.states is None else len(answer.states), len(answer.token_ids)
        if rows != tokens and answer.cached_tokens:
            return want.error(
                f"{answer.prompt.id}: {rows} rows for {tokens} tokens, {answer.cached_tokens} of them from the prefix cache",
                "Start it with --disable-radix-cache.",
            )
        if rows != tokens:
            return want.error(
                f"{answer.prompt.id}: {rows} rows for {tokens} tokens: its prefill was cut into chunks, of which the last "
                f"alone returns rows (chunked_prefill_size {info.get('chunked_prefill_size')})",
                "Start it with --chunked-prefill-size -1, or ask it while nobody else does.",
            )
        finite = answer.states.isfinite().all(dim=1)
        if not bool(finite.all()):
            return want.error(
                f"{answer.prompt.id}: {int((~finite).sum())} of {tokens} rows hold NaN or Inf, token {int(finite.int().argmin())} first",
                "Serve in bfloat16 or float32 where float16 overflows; else look for the request in the server's log.",
            )
    return want.ok(f"{sum(len(answer.token_ids) for answer in answers)} rows")


def name_slots(answers: Sequence[Answer], references: Sequence[Reference], seen: int) -> str:
    """'slot 0: the output of layer 2 (...), slot 1: ...' of the first answer that a reference has; '' where unknown."""
    for reference in references:
        states = answer_of(answers, reference).states
        if states is not None and len(states) and states.shape[1] % seen == 0:
            tokens = min(len(states), len(reference.input_ids))
            slots = states[:tokens].unflatten(1, (-1, seen)).unbind(1)
            return ", ".join(f"slot {number}: {reference.name(slot) or 'unknown'}" for number, slot in enumerate(slots))
    return ""


def _held(answers: Sequence[Answer], references: Sequence[Reference], seen: int) -> str:
    named = name_slots(answers, references, seen)
    return f" ({named})" if named else ""
