"""Checks of the vocabulary map: d2t int64 [D] as offsets, t2d bool [V]."""

from tasks.common.check import Check, Expectation
from tasks.common.draft_checks.subject import Subject
from tasks.common.draft_form import Draft
from tasks.common.draft_tensors import vocab_map_problems

_WHOLE = ("I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL")
_WHY = "A proposal is mapped to another token than the head was trained for, and the target rejects it."


def check_map_present(subject: Subject) -> Check:
    config, stored = subject.draft.config, subject.draft.stored
    drafted, vocab = config["draft_vocab_size"], config["vocab_size"]
    want = Expectation("V1 vocabulary map", "d2t and t2d where D < V", _WHY)
    if drafted is None or drafted == vocab:
        return want.not_applicable(f"the draft proposes all {vocab} tokens")
    if not 0 < drafted < vocab:
        return want.error(
            f"draft_vocab_size is {drafted}, expected 1 to vocab_size {vocab}.", "Correct draft_vocab_size."
        )
    if "d2t" not in stored:
        return want.error(
            "tensor d2t is missing; SGLang would take draft ids for target ids.",
            "Export again with the map of the training run.",
        )
    if "t2d" not in stored:
        return want.warning(
            "tensor t2d is missing; SGLang does not read it, but trainers do, and d2t cannot be compared with it.",
            "--fix rebuilds t2d from d2t.",
        )
    return want.ok(f"D {drafted} of V {vocab}")


def check_map(subject: Subject) -> Check:
    """V2 and V3: offsets, strictly ascending ids, and the same tokens in both tensors."""
    want = Expectation("V2 V3 offsets", "i + d2t[i] strictly ascending below V, t2d true exactly there", _WHY)
    draft, stored = subject.draft, subject.draft.stored
    if "d2t" not in stored:
        return want.not_applicable("no map")
    if not is_map(draft):
        found = ", ".join(f"{name} is {draft.header(name)}" for name in ("d2t", "t2d") if name in stored)
        return want.error(f"{found}.", "Export d2t int64 [D], t2d bool [V].")
    t2d = draft.array("t2d") if "t2d" in stored else None
    problems = vocab_map_problems(draft.array("d2t"), t2d, draft.config["vocab_size"])
    if not problems:
        return want.ok(f"{draft.header('d2t').shape[0]} offsets")
    fix = "Store target id - draft id (--fix does)." if "absolute" in problems[0] else "Export the training run's map."
    return want.error(problems[0], fix)


def is_map(draft: Draft) -> bool:
    """Whether d2t is there, and it and t2d, if there, are lists of whole numbers."""
    headers = [draft.header(name) for name in ("d2t", "t2d") if name in draft.stored]
    return "d2t" in draft.stored and all(len(h.shape) == 1 and h.dtype in _WHOLE for h in headers)
