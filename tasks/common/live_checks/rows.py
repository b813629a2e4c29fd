"""Rows of hidden states that a server returns: their width, and whether there is one for each token."""

from collections.abc import Sequence
from typing import Any

from tasks.common.check import Check, Expectation
from tasks.common.draft_checks.subject import Subject
from tasks.common.draft_tensors import num_aux_states
from tasks.common.live_checks.interview import Answer
from tasks.common.live_checks.parity import Reference, name_slot


def check_width(
    answers: Sequence[Answer], subject: Subject, references: Sequence[Reference], info: dict[str, Any]
) -> Check:
    """C1: n_aux * H, what the draft's fc reads."""
    config = subject.draft.config
    slots, seen = num_aux_states(config), config.get("target_hidden_size") or config["hidden_size"]
    want = Expectation(
        "C1 width",
        f"rows of {slots} x {seen} = {slots * seen}",
        "Rows of one state mean that fc is never called: nothing is accepted, and nothing fails.",
    )
    if not info.get("enable_return_hidden_states"):
        return want.not_applicable("the server returns no states: start it with --enable-return-hidden-states")
    states = [answer.states for answer in answers if answer.states is not None and len(answer.states)]
    if not states:
        return want.error("no rows at all", "Start it with --enable-return-hidden-states --disable-radix-cache.")
    width = states[0].shape[1]
    if width == slots * seen:
        return want.ok(f"rows of {width}")
    held = _held(answers, references, width, seen)
    if width == seen:
        return want.error(
            f"rows of {width}, one state{held}: EAGLE in place of EAGLE3, fc is never called",
            f"Start it with --speculative-algorithm EAGLE3 (it runs {info.get('speculative_algorithm')}).",
        )
    fix = "Name as many layers in eagle_config as the draft was trained on, and restart the server."
    return want.error(f"rows of {width}{held}: the server captures another number of layers", fix)


def check_rows(answers: Sequence[Answer], info: dict[str, Any]) -> Check:
    """H1: tokens found in the prefix cache have no row, and every later row belongs to another token."""
    want = Expectation(
        "H1 rows", "a row for each token of prompt and answer", "Rows that are left out shift all that is compared."
    )
    if not info.get("enable_return_hidden_states"):
        return want.not_applicable("the server returns no states")
    for answer in answers:
        rows, tokens = 0 if answer.states is None else len(answer.states), len(answer.token_ids)
        if rows != tokens:
            return want.error(
                f"{answer.prompt.id}: {rows} rows for {tokens} tokens, {answer.cached_tokens} of them from the prefix cache",
                "Start it with --disable-radix-cache.",
            )
    return want.ok(f"{sum(len(answer.token_ids) for answer in answers)} rows")


def _held(answers: Sequence[Answer], references: Sequence[Reference], width: int, seen: int) -> str:
    """Which states such rows hold, where that can be told."""
    if width % seen or not references:
        return ""
    reference = references[0]
    states = next(answer.states for answer in answers if answer.prompt.id == reference.prompt)
    tokens = min(len(states), len(reference.input_ids))
    matches = [name_slot(slot, reference) for slot in states[:tokens].unflatten(1, (-1, seen)).unbind(1)]
    return "" if None in matches else f" ({'; '.join(str(match) for match in matches)})"
