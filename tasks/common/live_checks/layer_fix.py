"""From the states that a server was seen to capture to what its config must say."""

import re
from collections.abc import Callable, Sequence

from tasks.common.capture import captured_layers, served_layer_ids
from tasks.common.contract import default_aux_layers
from tasks.common.draft_checks.subject import Subject
from tasks.common.errors import DraftlineError
from tasks.common.parity import Match

_OUTPUT = re.compile(r"the output of layer (\d+)$")


def trained_layers(subject: Subject) -> tuple[int, ...] | None:
    """Outputs that the draft was trained on: the record's, its form's own, or what its ids should mean; else None."""
    if subject.contract:
        return subject.contract.aux_layer_ids
    return tuple(subject.draft.outputs) if subject.draft.outputs else _reading(subject)


def layer_fix(
    subject: Subject, layers: Sequence[int] | None, serves_examined: bool
) -> Callable[[list[Match | None]], str]:
    """A function from what each slot holds to one sentence that says what to write.

    Args:
        serves_examined: whether the server loaded the examined folder; another one's ids are not known.
    """

    def fix(slots: list[Match | None]) -> str:
        if not serves_examined:
            return f"Serve {subject.draft.files.folder}: the server loaded another folder."
        outputs = [_output(match) for match in slots]
        if layers is None or None in outputs:
            return "Serve the target and the layers that the draft was trained on, or train it on what is captured."
        captured, ids = tuple(output for output in outputs if output is not None), subject.draft.layer_ids
        text = (
            f"Set eagle_config.eagle_aux_hidden_state_layer_ids to {_written(subject, layers)} and restart the server."
        )
        if captured == _reading(subject):
            return text
        if subject.num_layers and subject.num_layers >= 6 and captured == default_aux_layers(subject.num_layers):
            return f"These are SGLang's default layers: the config that it loaded names none that it could read. {text}"
        shifts = {output - layer for output, layer in zip(captured, ids or (), strict=False)}
        if ids and len(shifts) == 1 and len(ids) == len(captured):
            shift = shifts.pop()
            return (
                f"This server reads id k as the output of layer k{shift:+d}: set eagle_aux_hidden_state_layer_ids to "
                f"{[layer - shift for layer in layers]} and restart it."
            )
        return text

    return fix


def _output(match: Match | None) -> int | None:
    found = _OUTPUT.match(match.name) if match else None
    return int(found[1]) if found else None


def _reading(subject: Subject) -> tuple[int, ...] | None:
    """What the examined config's ids should capture, by the table."""
    ids, architecture = subject.draft.layer_ids, subject.architecture
    if not ids or architecture is None:
        return None
    try:
        return captured_layers(ids, architecture, subject.num_layers, subject.version)
    except DraftlineError:
        return None


def _written(subject: Subject, layers: Sequence[int]) -> list[int]:
    try:
        return served_layer_ids(tuple(layers), subject.architecture or "", subject.num_layers, subject.version)
    except DraftlineError:
        return list(layers)
