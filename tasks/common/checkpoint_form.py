"""Draftline's own export against the form in which SGLang loads an EAGLE-3 draft.

SGLang's loader skips tensors that it does not know and leaves those that are missing at random values, without a word
(contract, section 5). The checks are the doctor's (draft_checks): headers first, values for the map and for NaN.
"""

from pathlib import Path

from tasks.common.draft_checks.contract import untrained_norms
from tasks.common.draft_checks.run import check_draft_files
from tasks.common.draft_checks.subject import Subject
from tasks.common.draft_files import DraftFiles
from tasks.common.draft_form import Draft
from tasks.common.errors import DraftlineError
from tasks.common.target import TargetShape

WEIGHTS = "model.safetensors"


def check_export(folder: Path, target: TargetShape | None = None) -> list[str]:
    """Every reason why SGLang would not serve this folder as it was trained; empty when there is none.

    What the doctor only warns of is a reason too: an export that is derived from the run has no excuse.

    Args:
        target: sizes of the target that it will draft for, where that is to be compared (W4 to W6, W8).
    """
    try:
        files = DraftFiles.open(folder)
    except DraftlineError as error:
        return [str(error)]
    checks = check_draft_files(Subject(Draft.of(files), target))
    problems = [check.found for check in checks if check.verdict in ("error", "warning")]
    return [f"{folder}: {problem}" for problem in problems + untrained_norms(files.config)]
