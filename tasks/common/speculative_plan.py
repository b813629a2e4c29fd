"""The plan of a server with a draft, and what it refuses: drafts that SGLang would load cleanly and serve otherwise
than they were trained."""

import shlex
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tasks.common.check import Check, described
from tasks.common.command_line import CommandLine
from tasks.common.contract import Contract
from tasks.common.draft_checks.plan import check_plan, quantisation_of
from tasks.common.draft_checks.record import RECORD, check_record, recorded_contract
from tasks.common.draft_checks.run import can_go_on, check_draft_files
from tasks.common.draft_checks.subject import Subject
from tasks.common.draft_files import DraftFiles, read_config
from tasks.common.draft_form import Draft, is_whole_model
from tasks.common.errors import DraftlineError
from tasks.common.params import PARAMS, Params
from tasks.common.server_plan import ServerPlan, baseline_plan, flag, plan_over
from tasks.common.target import TARGET, TargetShape, load_config, target_contract
from tasks.common.target_source import EXPORT

# Where the flags that a check reads come from.
_PARAMETERS = {
    "C1 algorithm": "serve.speculative_algorithm",
    "S3 chain": "serve.num_steps, serve.eagle_topk, serve.num_draft_tokens",
    "S3 page size": "serve.eagle_topk, serve.extra_args",
    "S3 backends": "serve.eagle_topk, serve.extra_args",
    "C9 quantisation": "serve.extra_args",
    "C10 served dtype": "target.dtype",
    "W5 positions": "serve.context_length",
    "H1 hidden states": "serve.extra_args",
    "plan": "serve.extra_args",
}


@dataclass(frozen=True)
class KnownTarget:
    """What a draft is held against, as much of it as is known.

    Attributes:
        config: config.json.
        identity: facts of the target, by the contract's field names.
    """

    shape: TargetShape
    config: dict[str, Any]
    identity: dict[str, Any]


def speculative_plan(
    params: Params, draft: Path = EXPORT, *, port: int | None = None, target: Path = TARGET, theirs: str | None = None
) -> ServerPlan:
    """The target with an exported EAGLE-3 draft.

    Args:
        theirs: the parameter that names the draft, where it is somebody's. It need not be of this run's contract: the
            doctor's errors are refused, its warnings not, and a record that it brings is held against it and the target.

    Raises:
        DraftlineError: the settings cannot be served, or the draft would load cleanly and be served otherwise than it
            was trained: another algorithm, a broken export, another contract, other layers, another dtype, too few
            positions. Each check that failed says what would happen, and the fix.
    """
    contract = target_contract(params.contract, target)
    identity = contract.model_dump(mode="json", exclude={"aux_layer_ids"})
    known = KnownTarget(TargetShape.of(load_config(target)), read_config(target), identity)
    plan = _speculating(params, baseline_plan(params, port=port, target=target), draft, known)
    if theirs:
        _require_theirs(plan, draft, theirs, known)
        return plan
    subject = _subject(plan, DraftFiles.open(draft), known, contract)
    _refuse(_checks(plan, subject), str(draft), ("error", "warning"))
    record, recorded = draft / RECORD, recorded_contract(draft)
    if recorded is None:
        raise DraftlineError(
            f"{record}: not there. Export the draft again: `dvc repro --force --single-item export_draft`."
        )
    recorded.require_same(contract, str(record), "the target as served")
    return plan


def require_theirs(params: Params, draft: Path, field: str, target: KnownTarget | None) -> None:
    """Refuse what `speculative_plan` would refuse of somebody's draft, before the target is prepared.

    Args:
        field: that names the draft.
        target: None where nothing is known of it: that there is a draft is all that is looked at.

    Raises:
        DraftlineError: as `speculative_plan`.
    """
    if target is None:
        _open_theirs(draft, field)
        return
    plan = plan_over(params, params.serve.port, Path(params.target.model))
    _require_theirs(_speculating(params, plan, draft, target), draft, field, target)


def _require_theirs(plan: ServerPlan, draft: Path, field: str, target: KnownTarget) -> None:
    files = _open_theirs(draft, field)
    try:
        subject = _subject(plan, files, target, recorded_contract(draft))
    except DraftlineError as error:
        raise DraftlineError(f"{PARAMS}: {field}: {error}") from None
    checks = [*_checks(plan, subject), check_record(subject, None, target.identity)]
    _refuse(checks, f"{PARAMS}: {field}: {draft}", ("error",))


def _open_theirs(draft: Path, field: str) -> DraftFiles:
    expected = "Expected: the folder of an EAGLE-3 draft, its config.json and its weights. Correct the path."
    try:
        files = DraftFiles.open(draft)
    except DraftlineError as error:
        raise DraftlineError(f"{PARAMS}: {field}: {error} {expected}") from None
    if is_whole_model(files):
        raise DraftlineError(
            f"{PARAMS}: {field}: {draft} is a whole model of {files.config.get('num_hidden_layers')} layers without fc, such "
            f"as a target, and no EAGLE-3 draft. {expected}"
        )
    return files


def _speculating(params: Params, plan: ServerPlan, draft: Path, target: KnownTarget) -> ServerPlan:
    """A plan of the target alone, with the draft."""
    serve = params.serve
    chain = f"{serve.num_steps} steps, top-k {serve.eagle_topk}, {serve.num_draft_tokens} tokens verified a round"
    speculation = [
        flag(
            "--speculative-algorithm",
            serve.speculative_algorithm,
            reason="EAGLE would load this draft, never call its fc, and accept nothing",
        ),
        flag("--speculative-draft-model-path", str(draft), reason="the exported draft"),
        flag("--speculative-num-steps", str(serve.num_steps), reason=chain),
        flag("--speculative-eagle-topk", str(serve.eagle_topk), reason="goes with steps and draft tokens: all or none"),
        flag(
            "--speculative-num-draft-tokens",
            str(serve.num_draft_tokens),
            reason="a round verifies the last token and the draft behind it",
        ),
    ]
    if quantisation_of(_line(plan), target.config):
        speculation.append(
            flag(
                "--speculative-draft-model-quantization",
                "unquant",
                reason="the target is quantised, and SGLang would read the draft's weights as quantised too",
            )
        )
    algorithm = serve.speculative_algorithm.upper()
    return replace(plan, kind="speculative", draft=draft, algorithm=algorithm, flags=(*plan.flags, *speculation))


def _subject(plan: ServerPlan, files: DraftFiles, target: KnownTarget, contract: Contract | None) -> Subject:
    """
    Args:
        contract: that the draft was trained under; None where nothing records it.
    """
    return Subject(
        draft=Draft.of(files, target.shape.architecture),
        target=target.shape,
        target_config=target.config,
        contract=contract,
        contract_from=str(files.folder / RECORD) if contract else "",
        context_length=_line(plan).number("--context-length"),
    )


def _checks(plan: ServerPlan, subject: Subject) -> list[Check]:
    """The doctor's checks of the draft's files and of the plan's command line."""
    checks = check_draft_files(subject)
    return [*checks, *check_plan(_line(plan), subject)] if can_go_on(checks) else checks


def _refuse(checks: list[Check], draft: str, verdicts: tuple[str, ...]) -> None:
    failed = [check for check in checks if check.verdict in verdicts]
    if failed:
        problems = "\n".join(_described(check) for check in failed)
        raise DraftlineError(f"{draft} would not be served as it was trained:\n{problems}")


def _described(check: Check) -> str:
    named = _PARAMETERS.get(check.id)
    return f"- {described(check)}" + (f" It comes from {named} in {PARAMS}." if named else "")


def _line(plan: ServerPlan) -> CommandLine:
    line = CommandLine.parse(shlex.join(plan.command("")))
    return replace(line, said_in=f"{PARAMS}: serve.extra_args")  # what Draftline says itself is checked
