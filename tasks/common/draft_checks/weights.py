"""Checks of the weights: the exact tensors, their shapes, the target they belong to, and finite values."""

from tasks.common.check import Check, Expectation
from tasks.common.draft_checks.subject import Subject, verdict_of
from tasks.common.draft_form import ARCHITECTURE
from tasks.common.draft_tensors import aux_size, expected_shapes, is_passed_over

# Bits of a type's exponent; all of them set is Inf or NaN. F8_E4M3 has no Inf, and NaN where all bits but the sign are.
_EXPONENT = {
    "F64": 0x7FF << 52,
    "F32": 0xFF << 23,
    "F16": 0x1F << 10,
    "BF16": 0xFF << 7,
    "F8_E5M2": 0x7C,
    "F8_E4M3": 0x7F,
}


def check_architecture(subject: Subject) -> Check:
    """The class that SGLang builds; what has to change to serve the draft is said here."""
    config, form = subject.draft.config, subject.draft.form
    want = Expectation(
        "form",
        f"architectures [{ARCHITECTURE}], model_type llama",
        "SGLang builds the class that the config names, and loads into it what happens to have its names.",
    )
    fix = f'Set "architectures": ["{ARCHITECTURE}"] in config.json (--fix does).'
    problems = []
    if config["architectures"] != [ARCHITECTURE]:
        problems.append(f"architectures is {config['architectures']}, expected ['{ARCHITECTURE}'].")
    if config["model_type"] != "llama":
        problems.append(f"model_type is {config['model_type']!r}, expected 'llama'.")
        fix = f"Train a draft of Llama's layer, which SGLang's class {ARCHITECTURE} builds whatever model_type says."
    to_serve = {
        "SGLang/EAGLE": "SGLang serves it as it is",
        "SpecForge": "SGLang renames its tensors on loading and serves it as it is",
        "speculators": "to serve it with SGLang, convert it: --fix OUT",
    }
    return verdict_of(want, problems, fix, f"{form} form; {to_serve[form]}")


def check_head(subject: Subject) -> Check:
    draft, drafted = subject.draft, subject.draft.config["draft_vocab_size"]
    want = Expectation(
        "W1 head",
        "lm_head.weight where draft_vocab_size is set; neither head nor map where it is null",
        "Without its tensor the head is random: the server answers, and accepts nothing.",
    )
    if drafted is None:
        extra = [name for name in ("lm_head.weight", "d2t", "t2d") if name in draft.stored]
        text = [f"draft_vocab_size is None, which borrows the target's head, but {name} is there." for name in extra]
        return verdict_of(want, text, "Set draft_vocab_size to the rows of lm_head.weight.", "the target's head")
    if "lm_head.weight" not in draft.stored:
        return want.error(
            "tensor lm_head.weight is missing; SGLang would leave random values there.",
            "Export again with the head; or, if it was trained on the target's own head, set draft_vocab_size: null.",
        )
    return want.ok(f"{drafted} rows expected, {draft.header('lm_head.weight')}")


def check_tensor_set(subject: Subject) -> Check:
    draft, config = subject.draft, subject.draft.config
    want = Expectation(
        "W3 tensors",
        "exactly the tensors of the config",
        "SGLang's loader skips what it does not know and leaves random what is missing, without a word.",
    )
    expected = expected_shapes(config)
    elsewhere = ("lm_head.weight", "d2t", "t2d")  # W1 and V1 say it, C11 what further layers lack
    problems = [
        f"tensor {name} is missing; SGLang would leave random values there."
        for name in expected
        if name not in draft.stored and name not in elsewhere and not name.startswith("layers.")
    ]
    problems += [
        f"tensor {stored} is unknown to SGLang and would be skipped."
        for name, stored in draft.stored.items()
        if name not in expected and name not in elsewhere and not is_passed_over(name, config)
    ]
    problems += [f"tensor {name} is there under two names; the later one counts." for name in draft.doubled]
    fix = "Rename or add each tensor; where one was never trained, train it."
    return verdict_of(want, problems, fix, f"{len(draft.stored)} tensors")


def check_shapes(subject: Subject) -> Check:
    draft = subject.draft
    want = Expectation(
        "W4 shapes",
        "the shapes that the config gives: fc n_aux wide, q/k/v 2H wide",
        "A shape that disagrees is another model's tensor, or one that the server cuts or refuses.",
    )
    problems = [
        f"tensor {draft.stored[name]} is {draft.header(name)}, expected {draft.header(name).dtype} {list(shape)}."
        for name, shape in expected_shapes(draft.config).items()
        if name in draft.stored and draft.header(name).shape != shape
    ]
    if "d2t" in draft.stored and draft.header("d2t").dtype != "I64":
        problems.append(f"tensor d2t is {draft.header('d2t')}, expected I64.")
    return verdict_of(want, problems, "Correct the config to the tensors, or export the tensors again.", "all agree")


def check_target(subject: Subject) -> Check:
    """W8: this draft was made for this target."""
    config, target = subject.draft.config, subject.target
    why = "A draft of another target loads, and proposes tokens that this one never says."
    if target is None:
        return Expectation("W8 target", "the target's sizes", why).not_applicable("give --target to compare")
    want = Expectation("W8 target", f"made for H {target.hidden_size}, V {target.vocab_size}", why)
    seen = aux_size(config)
    problems = []
    if seen != target.hidden_size:
        name = "target_hidden_size" if config.get("target_hidden_size") else "hidden_size"
        problems.append(f"{name} is {seen}, the target has {target.hidden_size}.")
    if config["vocab_size"] != target.vocab_size:
        problems.append(f"vocab_size is {config['vocab_size']}, the target has {target.vocab_size}.")
    contract = subject.contract
    if contract is not None:
        for name in ("architecture", "num_layers", "hidden_size", "vocab_size"):
            if getattr(contract, name) != getattr(target, name):
                there = f"{subject.contract_from} {getattr(contract, name)}"
                problems.append(f"{name}: {there}, the target {getattr(target, name)}.")
    return verdict_of(
        want, problems, "Take the draft that was trained on this target.", f"H {seen}, V {config['vocab_size']}"
    )


def check_finite(subject: Subject) -> Check:
    """Looked for in the bits, a chunk at a time: in numpy, which has no bfloat16, and in memory of one chunk."""
    draft = subject.draft
    want = Expectation("W10 finite", "no NaN, no Inf", "One NaN makes every proposal the same token.")
    problems = []
    for name, stored in draft.stored.items():
        exponent = _EXPONENT.get(draft.header(name).dtype)
        if exponent is not None and any(
            bool(((bits & exponent) == exponent).any()) for bits in draft.files.bits(stored)
        ):
            problems.append(f"tensor {name} holds NaN or Inf.")
    return verdict_of(want, problems, "Train again with a lower learning rate.", "all weights")
