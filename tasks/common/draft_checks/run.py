"""All checks of a draft's files, in the order in which a reader wants them."""

from collections.abc import Callable

from tasks.common.check import Check, Expectation
from tasks.common.draft_checks import config, contract, vocabulary, weights
from tasks.common.draft_checks.subject import Subject

# The config's types come first: no other check can read a config whose values are not of their type.
CHECKS: tuple[Callable[[Subject], Check], ...] = (
    weights.check_architecture,
    contract.check_eagle_config,
    contract.check_layers,
    contract.check_layer_list,
    contract.check_embedding_slot,
    contract.check_norms,
    contract.check_capture,
    contract.check_dtype,
    contract.check_draft_layers,
    contract.check_one_aux_layer,
    vocabulary.check_map_present,
    vocabulary.check_map,
    weights.check_head,
    config.check_tied,
    weights.check_tensor_set,
    weights.check_shapes,
    config.check_positions,
    config.check_rope,
    weights.check_target,
    weights.check_finite,
)


def check_draft_files(subject: Subject) -> list[Check]:
    """A verdict of every check; nothing is raised for a draft that fails."""
    types = config.check_types(subject)
    if types.verdict == "error":
        eagle = contract.check_eagle_config(subject)
        rest = Expectation("others", "a config that can be read", "They compute with the config's values.")
        return [types, eagle, rest.not_applicable(f"{len(CHECKS) - 1} checks wait for W7")]
    return [types, *(check(subject) for check in CHECKS)]


def can_go_on(checks: list[Check]) -> bool:
    """Whether the config is one that further checks can compute with."""
    return all(check.id != "others" for check in checks)
