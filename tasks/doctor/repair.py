"""A repaired copy of a draft: everything that follows from the files themselves, nothing that would be a guess.

What is repaired: speculators form to SGLang's; absolute ids in d2t; a missing t2d; eagle_config where a record or the
form names the layers; the tied head; RoPE in both spellings; positions; a missing dtype; nulls that are read as absent;
norm flags inside eagle_config. What is not: a tensor that is missing, a norm that SGLang lacks, another target's draft.
"""

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.common.capture import can_capture, served_layer_ids
from tasks.common.draft_checks.config import DEFAULTED, check_rope, type_problems
from tasks.common.draft_checks.subject import Subject
from tasks.common.draft_checks.vocabulary import is_map
from tasks.common.draft_files import CONFIG, read_object
from tasks.common.draft_form import ARCHITECTURE, ROPE_KEYS, rope_of, spell_rope
from tasks.common.draft_tensors import DRAFT_DTYPES, holds_absolute_ids, vocab_map_problems
from tasks.common.errors import DraftlineError
from tasks.common.files import replacing, write_json
from tasks.common.tensor_types import SAFETENSORS

if TYPE_CHECKING:
    import torch

_RECORD = "draftline.json"
# Null is an error for these, and absent is the default.
_NULL_IS_ABSENT = ("target_hidden_size", "rope_theta", "attention_bias", "mlp_bias", "tie_word_embeddings")
_NULL_IS_ABSENT += ("hidden_act", "initializer_range", "use_cache")


@dataclass
class Repair:
    """What is changed, and why each change is no guess.

    Attributes:
        config: of the copy.
        tensors: that differ from the stored ones, by SGLang's name.
        done: a sentence for each change.
    """

    config: dict[str, Any]
    tensors: "dict[str, torch.Tensor]" = field(default_factory=dict)
    done: list[str] = field(default_factory=list)

    def set(self, name: str, value: Any) -> None:
        """Write a key of the config, and say so if that changes it."""
        if name not in self.config or self.config[name] != value:
            self.done.append(f"{name}: {self.config.get(name, 'absent')} -> {value}")
            self.config[name] = value


def repair(subject: Subject, folder: Path) -> list[str]:
    """Write the repaired copy.

    Args:
        folder: must not exist, or be empty.

    Returns:
        what was changed, a sentence each; empty when there was nothing that can be repaired, and nothing is written.

    Raises:
        DraftlineError: the folder is in use, or the form cannot be served by SGLang at all.
    """
    if folder.exists() and any(folder.iterdir()):
        raise DraftlineError(f"--fix {folder}: is not empty. Name a new folder; nothing is overwritten.")
    draft = subject.draft
    changed = Repair(dict(draft.config))
    if draft.form == "speculators":
        _refuse_what_sglang_lacks(draft.files.config)
        if draft.outputs and not can_capture(subject.architecture, subject.version):
            raise DraftlineError(
                f"--fix: how layer ids are written depends on the target's class, which is {subject.architecture}. "
                f"Give --target, of a class that SGLang {subject.version} captures outputs of."
            )
        changed.done.append("speculators form -> SGLang form, norm flags kept")
    _repair_config(changed, subject)
    _repair_map(changed, subject)
    if changed.done:
        _write(changed, subject, folder)
    return changed.done


def _refuse_what_sglang_lacks(raw: dict[str, Any]) -> None:
    if raw.get("norm_before_residual") is not False:
        raise DraftlineError(
            f"--fix: norm_before_residual is {raw.get('norm_before_residual', 'absent')}: the residual was normed in "
            f"training, and SGLang never norms it. Serve this draft with vLLM, or train one with norm_before_residual false."
        )
    layer = raw.get("transformer_layer_config")
    if isinstance(layer, dict) and layer.get("model_type", "llama") != "llama":
        raise DraftlineError(
            f"--fix: the draft's layer is of {layer['model_type']}; SGLang's EAGLE-3 class has Llama's alone. Serve this "
            f"draft with vLLM."
        )
    if raw.get("embed_requires_grad"):
        raise DraftlineError("--fix: the embedding was trained (embed_requires_grad), and SGLang takes the target's.")


def _repair_config(changed: Repair, subject: Subject) -> None:
    config, target = changed.config, subject.target
    for name in (*DEFAULTED, *_NULL_IS_ABSENT):
        if name in config and config[name] is None:
            del config[name]
            changed.done.append(f"{name}: null -> absent, which is its default")
    if config.get("model_type", "llama") == "llama":
        changed.set("architectures", [ARCHITECTURE])
    if config.get("tie_word_embeddings"):
        changed.set("tie_word_embeddings", False)
    _name_dtype(changed, subject)
    _lift_norm_flags(changed)
    _name_layers(changed, subject)
    if target and type(config.get("max_position_embeddings")) is int:
        changed.set("max_position_embeddings", max(config["max_position_embeddings"], target.max_position_embeddings))
    _spell_rope(changed, subject)


def _name_dtype(changed: Repair, subject: Subject) -> None:
    """The type of the weights where all have one and the config names none."""
    found = {subject.draft.header(name).dtype for name in subject.draft.stored if name not in ("d2t", "t2d")}
    names = [dtype for dtype in DRAFT_DTYPES if found == {SAFETENSORS[dtype]}]
    if names and not (changed.config.get("torch_dtype") or changed.config.get("dtype")):
        changed.set("torch_dtype", names[0])


def _lift_norm_flags(changed: Repair) -> None:
    for name in ("fc_norm", "norm_output"):
        eagle = changed.config.get("eagle_config")
        if isinstance(eagle, dict) and name in eagle and changed.config.get(name, eagle[name]) == eagle[name]:
            changed.set(name, eagle[name])
            changed.set("eagle_config", {key: value for key, value in eagle.items() if key != name})


def _name_layers(changed: Repair, subject: Subject) -> None:
    """eagle_config as it captures the outputs that the record or the form names, where it does not already."""
    outputs = subject.contract.aux_layer_ids if subject.contract else subject.draft.outputs
    if not outputs or not can_capture(subject.architecture, subject.version):
        return
    eagle = changed.config.get("eagle_config")
    eagle = eagle if isinstance(eagle, dict) else {}
    try:
        ids = served_layer_ids(tuple(outputs), subject.architecture, subject.num_layers, subject.version)
    except DraftlineError:  # outputs that this class cannot capture stay an error
        return
    if eagle.get("eagle_aux_hidden_state_layer_ids") != ids or eagle.get("use_aux_hidden_state", True) is not True:
        named = {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}
        changed.set("eagle_config", eagle | named)


def _spell_rope(changed: Repair, subject: Subject) -> None:
    """Both spellings where the form has another, or a check complains of the one that is there."""
    of_target = subject.target.rope_parameters if subject.target else None
    # Draftline trains with the target's RoPE; what another trainer took where its config says nothing is not known.
    as_target = subject.contract is not None
    if type_problems(changed.config):
        return
    if subject.draft.form != "speculators":
        stated = any(changed.config.get(name) is not None for name in ROPE_KEYS)
        if check_rope(subject).verdict == "ok" or not (stated or as_target):
            return
    rope = _rope(changed.config, of_target, as_target)
    for name, value in (spell_rope(rope) if rope else {}).items():
        changed.set(name, value)


def _rope(config: dict[str, Any], of_target: dict[str, Any] | None, as_target: bool) -> dict[str, Any] | None:
    """RoPE of the copy; None where choosing one would be a guess.

    Args:
        as_target: whether the draft is known to have been trained with the target's.
    """
    try:
        rope = rope_of(config)
    except DraftlineError:
        # The spellings contradict each other; the one that is the target's own is the one that was trained with.
        alone = [
            rope_of({name: value for name, value in config.items() if name in names})
            for names in (("rope_parameters",), ("rope_theta", "rope_scaling"))
        ]
        return of_target if of_target in alone else None
    if not as_target or of_target is None:
        return rope
    stated = {name for name in ROPE_KEYS if config.get(name) is not None}
    theta_stated = "rope_theta" in stated or "rope_theta" in (config.get("rope_parameters") or {})
    lost = not stated or (not theta_stated and rope | {"rope_theta": of_target["rope_theta"]} == of_target)
    return of_target if lost else rope


def _repair_map(changed: Repair, subject: Subject) -> None:
    import numpy as np
    import torch

    draft, vocab = subject.draft, changed.config.get("vocab_size")
    if not is_map(draft) or type(vocab) is not int:
        return
    d2t = draft.array("d2t").astype(np.int64)
    t2d = draft.array("t2d") if "t2d" in draft.stored else None
    if len(d2t) and holds_absolute_ids(d2t, t2d, vocab):
        d2t = d2t - np.arange(len(d2t))
        changed.tensors["d2t"] = torch.from_numpy(d2t)
        changed.done.append("d2t: absolute ids -> offsets")
    if draft.header("d2t").dtype != "I64":
        changed.tensors["d2t"] = torch.from_numpy(d2t)
        changed.done.append(f"d2t: {draft.header('d2t').dtype} -> I64")
    if t2d is None and not vocab_map_problems(d2t, None, vocab):
        t2d = np.zeros(vocab, dtype=bool)
        t2d[d2t + np.arange(len(d2t))] = True
        changed.tensors["t2d"] = torch.from_numpy(t2d)
        changed.done.append("t2d: rebuilt from d2t")


def _write(changed: Repair, subject: Subject, folder: Path) -> None:
    draft, files = subject.draft, subject.draft.files
    folder.mkdir(parents=True, exist_ok=True)
    rewritten = changed.tensors or draft.form == "speculators" or any(path.suffix == ".bin" for path in files.paths)
    if rewritten:
        import torch
        from safetensors.torch import save_file

        shared = draft.form == "speculators" and "target_hidden_size" not in changed.config
        tensors = {
            # a copy of its own each: tied weights of a .bin share one
            name: draft.read(name).clone(memory_format=torch.contiguous_format)
            for name in draft.stored
            if not (shared and name == "embed_tokens.weight") and name not in changed.tensors
        }
        with replacing(folder / "model.safetensors") as partial:
            save_file(tensors | changed.tensors, partial, metadata={"format": "pt"})
    else:
        for path in [*files.paths, *files.folder.glob("*.safetensors.index.json")]:
            shutil.copyfile(path, folder / path.name)
    write_json(folder / CONFIG, changed.config)
    record = read_object(files.folder / _RECORD) if (files.folder / _RECORD).is_file() else {}
    if subject.contract:
        # What the draft's own record says stands, also where it contradicts a dump that is shown beside it.
        record = {"contract": subject.contract.model_dump(mode="json")} | record | {"repaired": changed.done}
        of_files = ("model_sha256", "config_sha256")
        write_json(folder / _RECORD, {name: value for name, value in record.items() if name not in of_files})
