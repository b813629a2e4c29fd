"""The record that Draftline's export leaves beside a draft: what it was trained on, held against what is known elsewhere."""

from pathlib import Path
from typing import Any

from pydantic import ValidationError

from tasks.common.check import Check, Expectation
from tasks.common.contract import Contract
from tasks.common.draft_checks.subject import Subject
from tasks.common.draft_files import read_object
from tasks.common.errors import DraftlineError
from tasks.common.forms import fault

RECORD = "draftline.json"


def recorded_contract(draft: Path) -> Contract | None:
    """The contract in a draft's folder; other tools leave none.

    Raises:
        DraftlineError: draftline.json holds no contract.
    """
    path = draft / RECORD
    if not path.is_file():
        return None
    found = read_object(path).get("contract")
    if not isinstance(found, dict):
        raise DraftlineError(f"{path}: holds no contract. Export the draft again.")
    try:
        return Contract.model_validate(found)
    except ValidationError as error:
        raise DraftlineError(f"{path}: holds no contract ({fault(error)}). Export the draft again.") from None
    except DraftlineError as error:  # the layers
        raise DraftlineError(f"{path}: {error}") from None


def check_record(subject: Subject, recorded: dict[str, Any] | None, target_identity: dict[str, Any] | None) -> Check:
    """H7: draft, dump and target carry the same contract.

    Args:
        recorded: contract in draftline.json, where the subject's is another's.
        target_identity: what is known of the target, by the contract's field names.
    """
    want = Expectation(
        "H7 record",
        "one contract in the draft, the states and the target",
        "A draft is of the target, the layers and the tokenizer that it was trained on, whatever its shapes say.",
    )
    contract, problems = subject.contract, []
    if contract is None:
        return want.not_applicable("nothing records what the draft was trained on")
    for name, other in (("draftline.json", recorded), ("the target", target_identity)):
        for field, value in (other or {}).items():
            mine = contract.model_dump(mode="json").get(field, value)
            if mine != value:
                problems.append(f"{field}: {mine} in {subject.contract_from}, {value} in {name}.")
    if problems:
        return want.error(" ".join(problems), "Take the draft, the states and the target of one run.")
    return want.ok(f"{subject.contract_from}: outputs {list(contract.aux_layer_ids)}")
