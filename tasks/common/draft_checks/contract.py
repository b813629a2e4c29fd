"""Checks of what the draft is fed: aux layers, norms, widths, types, and whether the engine can feed it."""

from typing import Any

from tasks.common.capture import can_capture, capture_of, captured_layers, last_output, rows_of, served_layer_ids
from tasks.common.check import Check, Expectation
from tasks.common.draft_checks.subject import Subject, verdict_of
from tasks.common.draft_form import NORM_FLAGS
from tasks.common.draft_tensors import (
    DRAFT_DTYPES,
    aux_size,
    eagle_of,
    expected_shapes,
    has_fc_norm,
    has_input_norm,
    num_aux_states,
)
from tasks.common.errors import DraftlineError
from tasks.common.sglang_versions import NEWEST, number
from tasks.common.tensor_types import SAFETENSORS

_EAGLE_CONFIG = '"eagle_config": {{"eagle_aux_hidden_state_layer_ids": {ids}, "use_aux_hidden_state": true}}'


def eagle_config_problems(config: dict[str, Any]) -> list[str]:
    """Why SGLang would not read the ids: it swallows any exception there and captures default layers."""
    eagle = config.get("eagle_config")
    if not isinstance(eagle, dict):
        return [f"eagle_config is {eagle!r}, expected dict; SGLang would silently capture default layers."]
    ids = eagle.get("eagle_aux_hidden_state_layer_ids")
    if not isinstance(ids, list) or not ids or not all(type(layer) is int for layer in ids):
        return [
            f"eagle_config.eagle_aux_hidden_state_layer_ids is {ids!r}; SGLang would silently capture default layers."
        ]
    if eagle.get("use_aux_hidden_state", True) is not True:
        return ["eagle_config.use_aux_hidden_state is not true: the draft would be fed the last state alone."]
    return []


def check_eagle_config(subject: Subject) -> Check:
    want = Expectation(
        "C2 eagle_config",
        "eagle_config with integer layer ids and use_aux_hidden_state true",
        "Without them SGLang captures default layers and says nothing: the draft sees states it never learned.",
    )
    ids, fix = subject.draft.layer_ids, "Name the layers that it was trained on; without a record, ask who trained it."
    served = _served(subject)
    if served:
        fix = f"Add to config.json (--fix does): {_EAGLE_CONFIG.format(ids=served)}."
    if subject.draft.config.get("eagle_config") is None and subject.contract is None:
        return want.warning(
            "eagle_config is absent: SGLang captures its default layers, the outputs 1, N//2 - 1 and N - 4.",
            "Right for a draft that was trained on these, as EAGLE's own code does; nothing here records it. " + fix,
        )
    return verdict_of(want, eagle_config_problems(subject.draft.config), fix, f"ids {ids}")


def _served(subject: Subject) -> list[int] | None:
    """The ids that the record's layers are written as; None where there is no record, or no way to write them."""
    if subject.contract is None or subject.architecture is None:
        return None
    try:
        return served_layer_ids(
            subject.contract.aux_layer_ids, subject.architecture, subject.num_layers, subject.version
        )
    except DraftlineError:
        return None


def check_layers(subject: Subject) -> Check:
    """C3: the outputs that the engine captures for these ids are those that the draft was trained on."""
    trained = subject.contract.aux_layer_ids if subject.contract else subject.draft.outputs
    source = subject.contract_from if subject.contract else "the draft's own form"
    want = Expectation(
        "C3 layers",
        f"outputs {list(trained)}, as {source} says" if trained else "the outputs that it was trained on",
        "A draft that is fed other layers than it was trained on accepts nothing, and nothing fails.",
    )
    ids, architecture = subject.draft.layer_ids, subject.architecture
    if ids is None or architecture is None or not can_capture(architecture, subject.version):
        return want.not_applicable(
            "no ids to read" if ids is None else "what is captured of this target is not known (C8)"
        )
    captured = captured_layers(ids, architecture, subject.num_layers, subject.version)
    found = f"ids {ids} on {architecture} capture the outputs of layers {list(captured)}"
    if trained is None:
        return want.not_applicable(f"{found}; nothing records what it was trained on (--hidden-states, draftline.json)")
    if captured != tuple(trained):
        try:
            served = served_layer_ids(tuple(trained), architecture, subject.num_layers, subject.version)
        except DraftlineError as error:
            return want.error(f"{found}.", str(error))
        return want.error(
            f"{found}; it was trained on {list(trained)}.",
            f"Set eagle_aux_hidden_state_layer_ids to {served} in config.json (--fix does).",
        )
    return want.ok(found)


def check_layer_list(subject: Subject) -> Check:
    """C4: distinct, ascending, within the target, and as many as fc reads."""
    draft, config = subject.draft, subject.draft.config
    want = Expectation(
        "C4 layer list",
        "distinct, ascending, within the target; as many as num_aux_hidden_states and fc say",
        "The engine captures in layer order, duplicates once, and layers that are not there never.",
    )
    ids = draft.layer_ids
    if ids is None:
        return want.not_applicable("no ids to read")
    problems = []
    if ids != sorted(set(ids)):
        problems.append(f"eagle_aux_hidden_state_layer_ids {ids} are not distinct and ascending, as they are captured.")
    elif can_capture(subject.architecture, subject.version) and subject.num_layers:
        captured = captured_layers(ids, subject.architecture, subject.num_layers, subject.version)
        last = last_output(subject.architecture, subject.num_layers, subject.version)
        # The embedding has a check of its own.
        if captured[-1] > last:
            problems.append(
                f"ids {ids} name the outputs {list(captured)}; of {subject.num_layers} layers those captured on "
                f"SGLang {subject.version} must lie in 0..{last}."
            )
    if num_aux_states(config) != len(ids):
        problems.append(f"num_aux_hidden_states is {config['num_aux_hidden_states']}, but {len(ids)} ids are named.")
    seen = aux_size(config)
    if "fc.weight" in draft.stored and draft.header("fc.weight").shape[-1] != len(ids) * seen:
        width = draft.header("fc.weight").shape[-1]
        problems.append(f"fc reads {width} values, {len(ids)} layers of {seen} give {len(ids) * seen}.")
    return verdict_of(
        want, problems, "Name the layers that it was trained on, as many as fc reads.", f"{len(ids)} layers"
    )


def check_embedding_slot(subject: Subject) -> Check:
    """H8: the embedding is none of the captured states; a code comment once said that -1 is."""
    ids = subject.draft.layer_ids
    want = Expectation(
        "H8 no embedding",
        "no id that would mean the embedding",
        "Where SGLang starts with such an id it feeds the embedding itself, which no contract of Draftline records.",
    )
    if ids is None:
        return want.not_applicable("no ids to read")
    outputs: list[int] = list(ids)
    if can_capture(subject.architecture, subject.version):
        outputs = list(captured_layers(ids, subject.architecture, subject.num_layers, subject.version))
    if subject.draft.outputs:
        outputs += subject.draft.outputs
    if min(outputs) < 0:
        return want.error(f"ids {ids} name the embedding.", "Train on the outputs of decoder layers, and name those.")
    return want.ok(f"ids {ids}")


def untrained_norms(config: dict[str, Any]) -> list[str]:
    """Norms that a config turns on though Draftline's trainer has none of them."""
    flags = [name for name in NORM_FLAGS if config.get(name)]
    return [f"{name} is {config[name]!r}, but the draft was trained without it." for name in flags]


def check_norms(subject: Subject) -> Check:
    """C6: a norm runs in serving iff its tensor was trained, and the flag stands where the engine reads it."""
    draft, config, raw = subject.draft, subject.draft.config, subject.draft.files.config
    want = Expectation(
        "C6 norms",
        "a flag at the top level for each norm that has a tensor, and no other",
        "SGLang skips the tensor of a norm that no flag turns on, and leaves one random that a flag alone turns on.",
    )
    eagle = eagle_of(config)
    problems = [
        f"{name} is inside eagle_config, where SGLang ignores it."
        for name in ("fc_norm", "norm_output")
        if name in eagle
    ]
    pairs = (
        ("fc_norm", has_fc_norm(config), any(name.startswith("fc_norm.") for name in draft.stored)),
        ("norm_before_fc", has_input_norm(config), "input_norm.weight" in draft.stored),
    )
    for name, flagged, stored in pairs:
        if flagged != stored:
            problems.append(
                f"{name} is {'on' if flagged else 'off'}, but its tensor is {'' if stored else 'not '}there."
            )
    if has_input_norm(config) and not subject.engine.norm_before_fc:
        problems.append(f"norm_before_fc is on; SGLang {subject.version} does not know it.")
    if config.get("bias"):
        problems.append("bias is true: SGLang would give fc a bias that no tensor holds, so a random one.")
    if draft.form == "speculators" and raw.get("norm_before_residual") is not False:
        problems.append(
            f"norm_before_residual is {raw.get('norm_before_residual', 'absent')}: SGLang's residual is never normed."
        )
    if draft.form == "speculators" and raw.get("embed_requires_grad"):
        problems.append("embed_requires_grad is true: SGLang replaces the embedding that was trained by the target's.")
    if subject.contract_from.endswith("draftline.json"):
        problems += untrained_norms(config)
    fix = "Set each flag at the top level of config.json as in training; what SGLang lacks has to be trained without."
    norms = [name for name, flagged, _ in pairs if flagged] + ["norm_output"] * bool(config.get("norm_output"))
    return verdict_of(want, problems, fix, ", ".join(norms) or "none")


def check_capture(subject: Subject) -> Check:
    """C8: the target's class has the capture hook in this release, and what it captures are layers' outputs."""
    want = Expectation(
        "C8 capture",
        "a target whose class in SGLang has set_eagle3_layers_to_capture, and captures outputs of layers",
        "Without the hook the server stops at its start; with a hook that captures something else nothing is accepted.",
    )
    architecture, version = subject.architecture, subject.version
    if architecture is None:
        return want.not_applicable("the target is not known (--target)")
    row, newer = capture_of(architecture, version), number(version) > number(NEWEST)
    if row is None and newer:
        return want.warning(
            f"{architecture} has no capture hook up to SGLang {NEWEST}; {version} is newer than the table.",
            "Ask a running server, which has the last word: --server URL.",
        )
    if row is None or row.fault:
        right = [known.since for known in rows_of(architecture) if not known.fault]
        fix = f"Serve it with SGLang {right[-1]}." if right else "EAGLE-3 needs another target, or its hook in SGLang."
        return want.error(
            f"{architecture}: SGLang {version} {row.fault if row else 'has no capture hook for it and stops at its start'}.",
            fix,
        )
    return want.ok(f"{architecture} on SGLang {version}" + (f", read as {NEWEST}" if newer else ""))


def check_dtype(subject: Subject) -> Check:
    draft, dtype = subject.draft, subject.draft.dtype
    want = Expectation(
        "C10 dtype",
        "torch_dtype, and every weight of that type",
        "The server casts weights to the config's type without a word; states of another type were trained on.",
    )
    if dtype not in DRAFT_DTYPES:
        return want.error(
            f"torch_dtype is {dtype!r}, expected one of {', '.join(DRAFT_DTYPES)}.",
            "Set torch_dtype to the type of the weights.",
        )
    stored = {draft.header(name).dtype for name in draft.stored if name not in ("d2t", "t2d")}
    if len(stored) == 1 and stored != {SAFETENSORS[dtype]}:
        return want.warning(
            f"torch_dtype is {dtype}, every weight is {next(iter(stored))}: the server rounds them on loading.",
            "Set torch_dtype to the type of the weights, if the draft was trained in it.",
        )
    others = [
        f"tensor {name} is {draft.header(name)}."
        for name in draft.stored
        if name not in ("d2t", "t2d") and draft.header(name).dtype != SAFETENSORS[dtype]
    ]
    return verdict_of(want, others, f"Export again in one type, or set torch_dtype; now it says {dtype}.", dtype)


def check_draft_layers(subject: Subject) -> Check:
    """C11: SGLang builds as many layers as the config says; each must be there, and nothing here replays more than one."""
    layers, stored = subject.draft.config["num_hidden_layers"], subject.draft.stored
    want = Expectation(
        "C11 draft layers",
        "1, or as many as the weights hold",
        "SGLang builds every layer that the config names: one without weights is random, one that it does not name is skipped.",
    )
    if layers == 1:
        return want.ok("1")
    missing = [
        name for name in expected_shapes(subject.draft.config) if name.startswith("layers.") and name not in stored
    ]
    if layers < 1 or missing:
        lacking = f"; the weights lack {len(missing)} tensors of further layers, as {missing[0]}" if missing else ""
        return want.error(
            f"num_hidden_layers is {layers}{lacking}.",
            "Set num_hidden_layers to the layers that the weights hold.",
        )
    return want.warning(
        f"num_hidden_layers is {layers}: SGLang runs them all, Draftline trains and replays drafts of one layer.",
        "Nothing to change to serve it; judge it by the benchmark.",
    )


def check_one_aux_layer(subject: Subject) -> Check:
    config, ids = subject.draft.config, subject.draft.layer_ids
    want = Expectation(
        "C12 fc runs",
        "two aux layers or more, or another width than the target's",
        "SGLang calls fc only where the widths differ: with one aux layer of the draft's width it is skipped.",
    )
    seen, num_aux = aux_size(config), num_aux_states(config)
    if num_aux * seen == config["hidden_size"]:
        return want.error(
            f"eagle_config names {num_aux} aux layer of width {seen}; SGLang then skips fc silently.",
            "Train on two layers or more.",
        )
    return want.ok(f"{num_aux} x {seen} into {config['hidden_size']}" + ("" if ids else " (default layers)"))
