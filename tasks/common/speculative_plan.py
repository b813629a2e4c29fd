"""The plan of a server with a draft, and what it refuses: drafts that SGLang would load cleanly and serve otherwise
than they were trained."""

import shlex
from dataclasses import replace
from pathlib import Path

from tasks.common.check import Check, described
from tasks.common.command_line import CommandLine
from tasks.common.contract import Contract
from tasks.common.draft_checks.plan import check_plan, quantisation_of
from tasks.common.draft_checks.run import check_draft_files
from tasks.common.draft_checks.subject import Subject
from tasks.common.draft_files import DraftFiles, read_config
from tasks.common.draft_form import Draft
from tasks.common.errors import DraftlineError
from tasks.common.files import ARTIFACTS, read_json
from tasks.common.params import PARAMS, Params
from tasks.common.server_plan import ServerPlan, baseline_plan, flag
from tasks.common.target import TARGET, TargetShape, load_config, target_contract

EXPORT = ARTIFACTS / "export"
RECORD = "draftline.json"
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


def speculative_plan(
    params: Params, draft: Path = EXPORT, *, port: int | None = None, target: Path = TARGET, own: bool = True
) -> ServerPlan:
    """The target with an exported EAGLE-3 draft.

    Args:
        own: False for somebody's draft, of which no contract is known: the doctor's errors are refused, its warnings not.

    Raises:
        DraftlineError: the settings cannot be served, or the draft would load cleanly and be served otherwise than it
            was trained: another algorithm, a broken export, another contract, other layers, another dtype, too few
            positions. Each check that failed says what would happen, and the fix.
    """
    serve = params.serve
    plan = baseline_plan(params, port=port, target=target)
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
    if quantisation_of(_line(plan), read_config(target)):
        speculation.append(
            flag(
                "--speculative-draft-model-quantization",
                "unquant",
                reason="the target is quantised, and SGLang would read the draft's weights as quantised too",
            )
        )
    algorithm = serve.speculative_algorithm.upper()
    plan = replace(plan, kind="speculative", draft=draft, algorithm=algorithm, flags=(*plan.flags, *speculation))
    contract = target_contract(params.contract, target)
    checks = _checks(plan, draft, target, contract, own)
    _refuse(checks, draft, ("error", "warning") if own else ("error",))
    if own:
        record = draft / RECORD
        Contract.model_validate(read_json(record)["contract"]).require_same(
            contract, str(record), "the target as served"
        )
    return plan


def _checks(plan: ServerPlan, draft: Path, target: Path, contract: Contract, own: bool) -> list[Check]:
    """The doctor's checks of the draft's files and of the plan's command line.

    Args:
        contract: of the target as it will be served.
    """
    line = _line(plan)
    subject = Subject(
        draft=Draft.of(DraftFiles.open(draft), contract.architecture),
        target=TargetShape.of(load_config(target)),
        target_config=read_config(target),
        contract=contract if own else None,
        contract_from=str(draft / RECORD) if own else "",
        context_length=line.number("--context-length"),
    )
    return [*check_draft_files(subject), *check_plan(line, subject)]


def _refuse(checks: list[Check], draft: Path, verdicts: tuple[str, ...]) -> None:
    failed = [check for check in checks if check.verdict in verdicts]
    if failed:
        problems = "\n".join(_described(check) for check in failed)
        raise DraftlineError(f"{draft} would not be served as it was trained:\n{problems}")


def _described(check: Check) -> str:
    named = _PARAMETERS.get(check.id)
    return f"- {described(check)}" + (f" It comes from {named} in {PARAMS}." if named else "")


def _line(plan: ServerPlan) -> CommandLine:
    return CommandLine.parse(shlex.join(plan.command("")))
