"""Checks of the config's values: types, positions, RoPE, tied head."""

from reprlib import repr as shortened
from typing import Any

from tasks.common.check import Check, Expectation
from tasks.common.draft_checks.subject import Subject, verdict_of
from tasks.common.draft_form import rope_of
from tasks.common.errors import DraftlineError

_NUMBER = (int, float)
# Type that a field must have. Of a null transformers or SGLang makes an error, and of another type anything.
_REQUIRED: dict[str, type | tuple[type, ...]] = {
    "architectures": list,
    "model_type": str,
    "hidden_size": int,
    "intermediate_size": int,
    "num_hidden_layers": int,
    "num_attention_heads": int,
    "vocab_size": int,
    "max_position_embeddings": int,
    "rms_norm_eps": _NUMBER,
}
_WHERE_PRESENT: dict[str, type | tuple[type, ...]] = {
    "rope_theta": _NUMBER,
    "target_hidden_size": int,
    "tie_word_embeddings": bool,
    "attention_bias": bool,
    "mlp_bias": bool,
    "hidden_act": str,
    "initializer_range": _NUMBER,
    "use_cache": bool,
}
# Of these a null is the default, in transformers and in SGLang.
DEFAULTED: dict[str, type | tuple[type, ...]] = {
    "num_key_value_heads": int,
    "head_dim": int,
    "num_aux_hidden_states": int,
    "torch_dtype": str,
    "dtype": str,
    "bias": bool,
    "fc_norm": bool,
    "use_aux_norm": bool,
    "norm_output": bool,
    "norm_before_fc": bool,
}
# And of these transformers itself writes a null.
_ROPE = {"rope_parameters": dict, "rope_scaling": dict}


def type_problems(config: dict[str, Any]) -> list[str]:
    """Fields that are absent, null or of another type than the engine takes them for."""
    problems = []
    for name, kind in (_REQUIRED | _WHERE_PRESENT | DEFAULTED | _ROPE).items():
        value = config.get(name)
        if (name not in _REQUIRED and name not in config) or (name in DEFAULTED | _ROPE and value is None):
            continue
        if not isinstance(value, kind) or (kind in (int, _NUMBER) and isinstance(value, bool)):
            expected = " or ".join(k.__name__ for k in (kind if isinstance(kind, tuple) else (kind,)))
            problems.append(f"{name} is {shortened(value)}, expected {expected}.")
        elif kind is int and not 1 <= value < 2**31:
            problems.append(f"{name} is {shortened(value)}, expected 1 or more.")
    if "draft_vocab_size" not in config:
        problems.append("draft_vocab_size is absent: the server raises AttributeError.")
    elif config["draft_vocab_size"] is not None and type(config["draft_vocab_size"]) is not int:
        text = shortened(config["draft_vocab_size"])
        problems.append(f"draft_vocab_size is {text}, expected int, or null with no head.")
    for name in _ROPE:
        rope = config.get(name)
        if isinstance(rope, dict) and type(rope.get("rope_theta", 0)) not in _NUMBER:
            problems.append(f"{name}.rope_theta is {shortened(rope['rope_theta'])}, expected int or float.")
    return problems


def check_types(subject: Subject) -> Check:
    want = Expectation(
        "W7 types",
        "every field present and of its type, none null",
        "transformers and SGLang take a null for a value, each in its own way.",
    )
    config = subject.draft.config
    problems = type_problems(config)
    nulls = [name for name in DEFAULTED if name in config and config[name] is None]
    if nulls and not problems:
        return want.warning(f"{', '.join(nulls)}: null, which is read as absent.", "Drop each (--fix does).")
    return verdict_of(want, problems, "Write each with its value into config.json.", f"{len(config)} keys")


def check_tied(subject: Subject) -> Check:
    want = Expectation(
        "W2 tied head",
        "tie_word_embeddings false",
        "Where it is true, SGLang takes the embedding for the draft's head: every proposal is a wrong token.",
    )
    config = subject.draft.config
    if config.get("tie_word_embeddings"):
        return want.error(
            "tie_word_embeddings is true: SGLang would overwrite the draft's head with the embedding.",
            "Set tie_word_embeddings: false in config.json (--fix does).",
        )
    if "tie_word_embeddings" not in config and config["model_type"] != "llama":
        return want.error(
            f"tie_word_embeddings is absent, and model_type {config['model_type']} may take it for true.",
            "Set tie_word_embeddings: false in config.json (--fix does).",
        )
    return want.ok("false" if "tie_word_embeddings" in config else "absent, which is false for model_type llama")


def check_positions(subject: Subject) -> Check:
    positions = subject.draft.config["max_position_embeddings"]
    why = (
        "SGLang refuses to start; where SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN lets it go on, little is accepted beyond "
        "the draft's positions."
    )
    limit = subject.context_length or (subject.target and subject.target.max_position_embeddings)
    if limit is None:
        return Expectation("W5 positions", "what is served", why).not_applicable(
            f"{positions} positions; give --target or a --plan with --context-length to compare"
        )
    served = f"--context-length {limit}" if subject.context_length else f"the target's {limit}"
    want = Expectation("W5 positions", f"at least {served}", why)
    if subject.target and limit > subject.target.max_position_embeddings:
        longest = subject.target.max_position_embeddings
        return want.error(
            f"{served} is beyond the target's own {longest} positions.", f"Set --context-length {longest}."
        )
    if positions < limit:
        return want.error(
            f"max_position_embeddings is {positions}, served is {served}.",
            f"Set max_position_embeddings: {limit} in config.json (--fix does); what the draft does beyond the length "
            f"that it was trained on, only a benchmark says.",
        )
    return want.ok(f"{positions} positions")


def check_rope(subject: Subject) -> Check:
    """Both spellings of one config must agree, and with the target's (failure mode W6).

    A draft of Draftline has its target's RoPE. Others were trained with their own (EAGLE's code: theta 10000 whatever
    the target has), and what the files say may be right.
    """
    draft, target = subject.draft, subject.target
    want = Expectation(
        "W6 RoPE",
        "the target's, in the spelling of transformers 4 and of 5",
        "With another rotation the draft attends to the wrong positions, and nothing fails.",
    )
    fix = "Write rope_theta, rope_parameters and, where scaled, rope_scaling into config.json (--fix does, with --target)."
    try:
        rope = rope_of(draft.config)
    except DraftlineError as ambiguous:
        return want.error(str(ambiguous), fix)
    if target is not None and rope != target.rope_parameters:
        text = f"the draft has {rope}, the target {target.rope_parameters}."
        if subject.contract is None:
            return want.warning(text, "Right only if it was trained so: ask who trained it; nothing here records it.")
        return want.error(text, fix)
    if draft.form != "speculators":
        if "rope_theta" not in draft.config and rope["rope_theta"] != 10000:
            return want.warning("rope_parameters alone: transformers 4 would take rope_theta 10000.", fix)
        if rope["rope_type"] != "default" and not draft.config.get("rope_scaling"):
            return want.warning("rope_parameters alone: transformers 4 would drop the scaling.", fix)
    return want.ok(
        f"{rope['rope_type']}, theta {rope['rope_theta']:g}" + ("" if target else "; give --target to compare")
    )
