"""Checks of the vocabulary map: d2t int64 [D] as offsets, t2d bool [V]."""

from tasks.common.check import Check, Expectation
from tasks.common.draft_checks.subject import Subject
from tasks.common.draft_tensors import vocab_map_problems

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
    missing = [name for name in ("d2t", "t2d") if name not in stored]
    if missing:
        text = " ".join(f"tensor {name} is missing; SGLang would take draft ids for target ids." for name in missing)
        fix = "--fix rebuilds t2d from d2t." if missing == ["t2d"] else "Export again with the map of the training run."
        return want.error(text, fix)
    return want.ok(f"D {drafted} of V {vocab}")


def check_map(subject: Subject) -> Check:
    """V2 and V3: offsets, strictly ascending ids, and the same tokens in both tensors."""
    want = Expectation("V2 V3 offsets", "i + d2t[i] strictly ascending below V, t2d true exactly there", _WHY)
    draft, stored = subject.draft, subject.draft.stored
    if "d2t" not in stored or "t2d" not in stored:
        return want.not_applicable("no map")
    d2t, t2d = draft.read("d2t"), draft.read("t2d")
    if d2t.dim() != 1 or t2d.dim() != 1 or d2t.is_floating_point():
        return want.error(
            f"d2t is {draft.header('d2t')}, t2d {draft.header('t2d')}.", "Export d2t int64 [D], t2d bool [V]."
        )
    problems = vocab_map_problems(d2t.long(), t2d.bool())
    if not problems:
        return want.ok(f"{len(d2t)} offsets")
    fix = "Store target id - draft id (--fix does)." if "absolute" in problems[0] else "Export the training run's map."
    return want.error(problems[0], fix)
