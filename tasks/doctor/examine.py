"""Put together what is known of a draft, and run every check that applies."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tasks.common.check import Check
from tasks.common.command_line import CommandLine
from tasks.common.contract import Contract
from tasks.common.draft_checks.lost_keys import check_lost_keys
from tasks.common.draft_checks.plan import check_plan
from tasks.common.draft_checks.record import RECORD, check_record, recorded_contract
from tasks.common.draft_checks.run import can_go_on, check_draft_files
from tasks.common.draft_checks.subject import Subject, read_target
from tasks.common.draft_files import CONFIG, DraftFiles, read_object
from tasks.common.draft_form import Draft, is_whole_model
from tasks.common.errors import DraftlineError
from tasks.common.sglang_client import SGLangClient
from tasks.common.sglang_versions import NEWEST, engine_of
from tasks.doctor.states import (
    check_coverage,
    check_last_norm,
    check_map_source,
    check_target_weights,
    open_states,
)

# For 48 tokens; a server that takes longer hangs, or is asked by many others.
_ANSWER_TIMEOUT_S = 300.0
# EAGLE-3 classes of SGLang whose layer is not Llama's: latent attention has other tensors.
_OTHER_CLASSES = ("Eagle3DeepseekV2ForCausalLM",)


@dataclass(frozen=True)
class Request:
    """What the doctor is shown.

    Attributes:
        hidden_states: a dump of Draftline's, or one split of it.
        version: of SGLang; None takes the running server's, else the newest that is known.
        plan: a server's command line.
        server: URL of a running server.
    """

    draft: Path
    target: Path | None = None
    hidden_states: Path | None = None
    version: str | None = None
    plan: str | None = None
    server: str | None = None


def examine(request: Request) -> tuple[Subject, list[Check]]:
    """Every check with its verdict.

    Raises:
        DraftlineError: something that was named cannot be read at all; the doctor could not run.
    """
    for folder in (request.draft, request.target):
        if folder is not None and not folder.exists():
            raise DraftlineError(
                f"{folder}: no such folder. The doctor reads local folders: `hf download` fetches a hub's."
            )
    files = DraftFiles.open(request.draft)
    _require_draft(files)
    shape, target_config = read_target(request.target) if request.target is not None else (None, None)
    states = open_states(request.hidden_states) if request.hidden_states is not None else None
    client = SGLangClient(request.server, _ANSWER_TIMEOUT_S) if request.server is not None else None
    info = client.server_info() if client else {}
    planned = CommandLine.parse(request.plan) if request.plan is not None else None
    line = planned or (resolved_line(info) if info else None)
    recorded = recorded_contract(request.draft)
    contract, contract_from = (None, "")
    if states is not None:
        contract, contract_from = states.contract, str(states.folder / "manifest.json")
    elif recorded:
        contract, contract_from = recorded, str(request.draft / RECORD)
    architecture = shape.architecture if shape else contract.architecture if contract else None
    if files.config.get("architectures") in [[name] for name in _OTHER_CLASSES]:
        raise DraftlineError(
            f"{request.draft / CONFIG}: architectures is {files.config['architectures']}; the doctor knows drafts with "
            f"Llama's layer only, and every verdict on another would be a guess."
        )
    subject = Subject(
        draft=Draft.of(files, architecture),
        target=shape,
        target_config=target_config,
        contract=contract,
        contract_from=contract_from,
        context_length=line.number("--context-length") if line else None,
        version=request.version or _release_of(info) or NEWEST,
    )
    _ = subject.engine  # a release that the table does not know is no verdict on the draft
    checks = check_draft_files(subject)
    if not can_go_on(checks):
        return subject, checks
    checks += [check_lost_keys(subject, load=request.server is not None), check_target_weights(request.target)]
    identity = _identity(request.target, contract)
    checks.append(
        check_record(subject, recorded.model_dump(mode="json") if recorded and states is not None else None, identity)
    )
    if states is not None:
        checks += [check_last_norm(states, request.target), check_map_source(subject, states)]
        checks.append(check_coverage(subject, states))
    if line:
        # What a running server returns is looked at itself (H1 rows); its flags need not promise it.
        checks += [check for check in check_plan(line, subject) if client is None or check.id != "H1 hidden states"]
    if client:
        from tasks.doctor.live import Server, examine_server

        heldout = open_states(request.hidden_states, "heldout") if states is not None else None
        if heldout is not None:
            heldout.contract.require_same(states.contract, str(heldout.folder), str(states.folder))
        checks += examine_server(Server(client, info, planned, request.target, heldout), subject).checks
    return subject, checks


def _require_draft(files: DraftFiles) -> None:
    """A slip that would be explained key by key: a whole model in the place of a draft."""
    if is_whole_model(files):
        raise DraftlineError(
            f"{files.folder}: a whole model of {files.config.get('num_hidden_layers')} layers without fc, no EAGLE-3 draft. "
            f"Give the draft's folder to --draft, and this one to --target."
        )


def examine_copy(request: Request, folder: Path) -> list[Check]:
    """The same examination of a repaired copy's files; a plan's draft path is taken to be the copy's."""
    plan = request.plan and request.plan.replace(str(request.draft), str(folder))
    return examine(replace(request, draft=folder, plan=plan, server=None))[1]


def resolved_line(info: dict[str, Any]) -> CommandLine:
    """A running server's arguments as it resolved them, in place of a command line: the same rules hold for both."""
    # SGLang resolves the draft's quantisation to the target's where none is asked for, and 'unquant' to nothing.
    draft = "speculative_draft_model_quantization"
    asked = {draft: "unquant"} if info.get(draft) is None else {}
    if info.get(draft) is not None and info.get(draft) == info.get("quantization"):
        asked = {draft: None}
    return CommandLine(
        {
            f"--{name.replace('_', '-')}": () if value is True else (str(value),)
            for name, value in (info | asked).items()
            if value is not None and value is not False
        }
    )


def _release_of(info: dict[str, Any]) -> str | None:
    """The running server's release; None of a build from source, which calls itself 0.0.0."""
    version = info.get("version")
    return version if version and engine_of(version) else None


def _identity(target: Path | None, contract: Contract | None) -> dict | None:
    """Hashes of a target that Draftline prepared, by the contract's field names."""
    if target is None or contract is None or not (target / RECORD).is_file():
        return None
    identity = read_object(target / RECORD)
    return {name: identity[name] for name in ("target_sha256", "tokenizer_sha256") if name in identity}
