"""What a training predicts of the draft, for those who serve it with fewer steps than it was trained for."""

from typing import Annotated

from pydantic import Field

from tasks.common.errors import DraftlineError
from tasks.common.files import REPORTS
from tasks.common.forms import Form, read_form

TRAINED = REPORTS / "train_draft.json"
_FIX = "Train again: `dvc repro --force --single-item train_draft`."


class _Trained(Form):
    predicted_accept_lengths: list[Annotated[float, Field(ge=1)]]


def predicted_accept_length(num_steps: int) -> float:
    """Acceptance length that training predicted for chains of `num_steps`.

    Raises:
        DraftlineError: the report is absent, damaged or older than its form, or the draft was trained for fewer steps.
    """
    lengths = read_form(TRAINED, _Trained, _FIX).predicted_accept_lengths
    if num_steps > len(lengths):
        raise DraftlineError(
            f"{TRAINED}: nothing is predicted for chains of {num_steps} steps, only for up to {len(lengths)}: the draft was trained "
            f"with train_draft.ttt_length {len(lengths)}. Set serve.num_steps to that at most, or ttt_length to {num_steps}, and "
            f"run `dvc repro train_draft`."
        )
    return lengths[num_steps - 1]
