"""From the states that a server was seen to capture to what its config must say."""

from collections.abc import Callable

from tasks.common.capture import captured_layers, served_layer_ids
from tasks.common.contract import default_aux_layers
from tasks.common.draft_checks.subject import Subject
from tasks.common.errors import DraftlineError
from tasks.common.parity import Match, output_layer

_KEY = "eagle_config.eagle_aux_hidden_state_layer_ids"


def trained_layers(subject: Subject) -> tuple[tuple[int, ...] | None, str]:
    """Outputs that the draft was trained on, and what says so; None where nothing does."""
    if subject.contract:
        return subject.contract.aux_layer_ids, subject.contract_from
    if subject.draft.outputs:
        return tuple(subject.draft.outputs), "the draft's own form"
    return _reading(subject), "the reading of its ids, and nothing records its training,"


def is_recorded(subject: Subject) -> bool:
    """Whether anything but the ids themselves says which layers the draft was trained on."""
    return bool(subject.contract or subject.draft.outputs)


def layer_fix(subject: Subject, layers: tuple[int, ...], serves_examined: bool) -> Callable[[list[Match | None]], str]:
    """A function from what each slot holds to one sentence that says what to write.

    Args:
        serves_examined: whether the server loaded the examined folder; another one's ids are not known.
    """

    def fix(slots: list[Match | None]) -> str:
        if not serves_examined:
            return f"Serve {subject.draft.files.folder}: the server loaded another folder."
        written, ids = _written(subject, layers), subject.draft.layer_ids
        outputs = [output_layer(match.name) if match else None for match in slots]
        if None in outputs and layers == _reading(subject):
            return "The ids are right: the target or the dump is another than the served one, or the server computes otherwise."
        if None in outputs or tuple(outputs) == _reading(subject):
            return written
        if subject.num_layers and subject.num_layers >= 6 and tuple(outputs) == default_aux_layers(subject.num_layers):
            return (
                f"These are SGLang's default layers: the config that it loaded names none that it could read. {written}"
            )
        shifts = {output - layer for output, layer in zip(outputs, ids or (), strict=False)}
        if ids and len(shifts) == 1 and len(ids) == len(outputs):
            shift = shifts.pop()
            return (
                f"This server reads id k as the output of layer k{shift:+d}: set {_KEY} to "
                f"{[layer - shift for layer in layers]} and restart it."
            )
        return written

    return fix


def _reading(subject: Subject) -> tuple[int, ...] | None:
    """What the examined config's ids should capture, by the table."""
    ids, architecture = subject.draft.layer_ids, subject.architecture
    if not ids or architecture is None:
        return None
    try:
        return captured_layers(ids, architecture, subject.num_layers, subject.version)
    except DraftlineError:
        return None


def _written(subject: Subject, layers: tuple[int, ...]) -> str:
    try:
        ids = served_layer_ids(layers, subject.architecture or "", subject.num_layers, subject.version)
    except DraftlineError as error:
        return str(error)
    return f"Set {_KEY} to {ids} and restart the server."
