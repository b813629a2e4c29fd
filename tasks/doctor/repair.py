"""A repaired copy of a draft: everything that follows from the files themselves, nothing that would be a guess.

What is repaired: speculators form to SGLang's; absolute ids in d2t; a missing t2d; eagle_config where a record or the
form names the layers; the tied head; RoPE in both spellings; positions; nulls of fields that have a default; norm flags
inside eagle_config. What is not: a tensor that is missing, a norm that SGLang lacks, another target's draft.
"""

import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.common.capture import can_capture, served_layer_ids
from tasks.common.draft_checks.subject import Subject
from tasks.common.draft_files import CONFIG
from tasks.common.draft_form import ARCHITECTURE, rope_of, spell_rope
from tasks.common.draft_tensors import vocab_map_problems
from tasks.common.errors import DraftlineError
from tasks.common.files import replacing, write_json

if TYPE_CHECKING:
    import torch

# Null means the default for these, and the default follows from the other fields.
_DEFAULTED = ("head_dim", "num_key_value_heads", "target_hidden_size", "num_aux_hidden_states", "rope_theta")
_DEFAULTED += ("bias", "attention_bias", "mlp_bias", "fc_norm", "norm_output", "norm_before_fc", "tie_word_embeddings")


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
    if raw.get("embed_requires_grad"):
        raise DraftlineError("--fix: the embedding was trained (embed_requires_grad), and SGLang takes the target's.")


def _repair_config(changed: Repair, subject: Subject) -> None:
    config, target = changed.config, subject.target
    for name in _DEFAULTED:
        if name in config and config[name] is None:
            del config[name]
            changed.done.append(f"{name}: null -> absent, which is its default")
    if config.get("model_type", "llama") == "llama":
        changed.set("architectures", [ARCHITECTURE])
    if config.get("tie_word_embeddings") is not False:
        changed.set("tie_word_embeddings", False)
    eagle = config.get("eagle_config")
    if isinstance(eagle, dict):
        for name in ("fc_norm", "norm_output"):
            if name in eagle:
                eagle = {key: value for key, value in eagle.items() if key != name}
                changed.set(name, config["eagle_config"][name])
                changed.set("eagle_config", eagle)
    outputs = subject.contract.aux_layer_ids if subject.contract else subject.draft.outputs
    if outputs and can_capture(subject.architecture, subject.version):
        ids = served_layer_ids(tuple(outputs), subject.architecture, subject.num_layers, subject.version)
        named = {"eagle_aux_hidden_state_layer_ids": ids, "use_aux_hidden_state": True}
        changed.set("eagle_config", (eagle if isinstance(eagle, dict) else {}) | named)
    if target and type(config.get("max_position_embeddings")) is int:
        changed.set("max_position_embeddings", max(config["max_position_embeddings"], target.max_position_embeddings))
    rope = _rope(config, target.rope_parameters if target else None)
    if rope:
        for name, value in spell_rope(rope).items():
            changed.set(name, value)


def _rope(config: dict[str, Any], of_target: dict[str, Any] | None) -> dict[str, Any] | None:
    """RoPE of the copy; None where choosing one would be a guess."""
    stated = [name for name in ("rope_theta", "rope_parameters", "rope_scaling") if config.get(name) is not None]
    if not stated:
        return of_target
    try:
        rope = rope_of(config)
    except DraftlineError:
        # The spellings contradict each other; the one that is the target's own is the one that was trained with.
        alone = [
            rope_of({name: value for name, value in config.items() if name in names})
            for names in (("rope_parameters",), ("rope_theta", "rope_scaling"))
        ]
        return of_target if of_target in alone else None
    theta_stated = config.get("rope_theta") is not None or "rope_theta" in (config.get("rope_parameters") or {})
    if of_target and not theta_stated and {**rope, "rope_theta": of_target["rope_theta"]} == of_target:
        return of_target
    return rope


def _repair_map(changed: Repair, subject: Subject) -> None:
    import torch

    draft = subject.draft
    vocab = changed.config.get("vocab_size")
    if "d2t" not in draft.stored or type(vocab) is not int:
        return
    d2t = draft.read("d2t").long()
    positions = torch.arange(len(d2t))
    t2d = draft.read("t2d").bool() if "t2d" in draft.stored else None
    marked = torch.zeros(vocab, dtype=torch.bool) if t2d is None else t2d
    problems = vocab_map_problems(d2t, marked)
    if problems and problems[0].startswith("d2t holds absolute"):
        d2t = d2t - positions
        changed.tensors["d2t"] = d2t
        changed.done.append("d2t: absolute ids -> offsets")
    ids = d2t + positions
    if t2d is None and bool((ids.diff() > 0).all()) and int(ids.min()) >= 0 and int(ids.max()) < vocab:
        marked[ids] = True
        changed.tensors["t2d"] = marked
        changed.done.append("t2d: rebuilt from d2t")


def _write(changed: Repair, subject: Subject, folder: Path) -> None:
    draft, files = subject.draft, subject.draft.files
    folder.mkdir(parents=True, exist_ok=True)
    rewritten = changed.tensors or draft.form == "speculators" or any(path.suffix == ".bin" for path in files.paths)
    if rewritten:
        from safetensors.torch import save_file

        shared = draft.form == "speculators" and "target_hidden_size" not in changed.config
        tensors = {
            name: draft.read(name).contiguous()
            for name in draft.stored
            if not (shared and name == "embed_tokens.weight") and name not in changed.tensors
        }
        with replacing(folder / "model.safetensors") as partial:
            save_file(tensors | changed.tensors, partial, metadata={"format": "pt"})
    else:
        for path in [*files.paths, *files.folder.glob("*.safetensors.index.json")]:
            shutil.copyfile(path, folder / path.name)
    write_json(folder / CONFIG, changed.config)
    if subject.contract:
        record = {"contract": subject.contract.model_dump(mode="json"), "repaired": changed.done}
        write_json(folder / "draftline.json", record)
