"""The plan of a server with a draft, and what it refuses: drafts that SGLang would load cleanly and serve otherwise
than they were trained."""

from dataclasses import replace
from pathlib import Path

from tasks.common.capture import captured_layers, served_layer_ids
from tasks.common.checkpoint_form import check_export
from tasks.common.contract import Contract
from tasks.common.draft_files import CONFIG
from tasks.common.errors import DraftlineError
from tasks.common.files import ARTIFACTS, read_json
from tasks.common.params import PARAMS, Params
from tasks.common.server_plan import ServerPlan, baseline_plan, flag
from tasks.common.target import TARGET, load_config, target_contract

EXPORT = ARTIFACTS / "export"


def speculative_plan(
    params: Params, draft: Path = EXPORT, *, port: int | None = None, target: Path = TARGET
) -> ServerPlan:
    """The target with an exported EAGLE-3 draft.

    Raises:
        DraftlineError: the draft would load and be read otherwise than it was trained (`check_draft`),
            or the settings cannot be served.
    """
    serve = params.serve
    check_draft(params, draft, target_contract(params.contract, target))
    plan = baseline_plan(params, port=port, target=target)
    chain = f"{serve.num_steps} steps, top-k {serve.eagle_topk}, {serve.num_draft_tokens} tokens verified a round"
    speculation = [
        flag(
            "--speculative-algorithm",
            "EAGLE3",
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
    if _is_quantised(params, target):
        speculation.append(
            flag(
                "--speculative-draft-model-quantization",
                "unquant",
                reason="the target is quantised, and SGLang would read the draft's weights as quantised too",
            )
        )
    return replace(plan, kind="speculative", draft=draft, algorithm="EAGLE3", flags=(*plan.flags, *speculation))


def check_draft(params: Params, draft: Path, contract: Contract) -> None:
    """The exported draft would be served as it was trained.

    Args:
        contract: of the target as it will be served.

    Raises:
        DraftlineError: another algorithm (C1), a broken export (W1 to W10), another contract or other layers (C3),
            another dtype (C10), too few positions (W5). Each message says what would happen, and the fix.
    """
    _check_algorithm(params, draft, contract)
    problems = check_export(draft)
    if problems:
        raise DraftlineError("\n".join(problems))
    config = read_json(draft / CONFIG)
    _check_contract(draft, config, contract)
    _check_dtype_and_positions(params, draft / CONFIG, config)


def _check_algorithm(params: Params, draft: Path, contract: Contract) -> None:
    algorithm = params.serve.speculative_algorithm
    if algorithm != "EAGLE3":
        raise DraftlineError(
            f"{PARAMS}: serve.speculative_algorithm is {algorithm}, but {draft} holds an EAGLE-3 draft. SGLang would start "
            f"cleanly and accept nothing: fc is never called, so the draft is fed {contract.hidden_size}-wide states where "
            f"it was trained on {len(contract.aux_layer_ids)} x {contract.hidden_size} = {contract.aux_width}. "
            f"Set serve.speculative_algorithm: EAGLE3."
        )


def _check_contract(draft: Path, config: dict, contract: Contract) -> None:
    record = draft / "draftline.json"
    Contract.model_validate(read_json(record)["contract"]).require_same(contract, str(record), "the target as served")
    ids = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    captured = captured_layers(ids, contract.architecture, contract.num_layers)
    if captured != contract.aux_layer_ids:
        raise DraftlineError(
            f"{draft / CONFIG}: SGLang reads eagle_aux_hidden_state_layer_ids {ids} on {contract.architecture} as the "
            f"outputs of layers {list(captured)}; the draft was trained on {list(contract.aux_layer_ids)}, which is "
            f"written {served_layer_ids(contract.aux_layer_ids, contract.architecture, contract.num_layers)}. Export again: "
            f"`dvc repro --force export_draft`."
        )


def _check_dtype_and_positions(params: Params, where: Path, config: dict) -> None:
    if config["torch_dtype"] != params.target.dtype:
        raise DraftlineError(
            f"{where}: torch_dtype is {config['torch_dtype']}, target.dtype in {PARAMS} is {params.target.dtype}. A draft is "
            f"served in the type whose states it was trained on. Run `dvc repro` to make the draft anew."
        )
    positions = config["max_position_embeddings"]
    if positions < params.serve.context_length:
        raise DraftlineError(
            f"{where}: max_position_embeddings is {positions}, serve.context_length in {PARAMS} is "
            f"{params.serve.context_length}. Beyond {positions} tokens nothing would be accepted. Set "
            f"serve.context_length to at most {positions}, or export a draft with the target's positions."
        )


def _is_quantised(params: Params, target: Path) -> bool:
    config = load_config(target)
    stored = any(
        getattr(part, key, None)
        for part in (config, config.get_text_config())
        for key in ("quantization_config", "compression_config")
    )
    return stored or any(word.startswith(("--quantization", "--modelopt-quant")) for word in params.serve.extra_args)
