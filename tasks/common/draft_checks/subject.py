"""What the checks look at: a draft, and as much of its target, its training and its engine as is known."""

from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as shortened
from typing import Any

from tasks.common.check import Check, Expectation
from tasks.common.contract import Contract
from tasks.common.draft_files import CONFIG, read_config
from tasks.common.draft_form import Draft, rope_of
from tasks.common.errors import DraftlineError
from tasks.common.sglang_versions import ENGINES, NEWEST, Engine, engine_of
from tasks.common.target import TargetShape

# Problems of one check that are written out.
_SHOWN = 10


@dataclass(frozen=True)
class Subject:
    """One draft under examination.

    Attributes:
        target: sizes of the target; None where it is not given.
        target_config: the target's config.json.
        contract: what the draft was trained under; None where nothing records it.
        contract_from: the file that says so.
        context_length: what the server's command line asks for, None where it leaves that to the target.
        version: of SGLang.
    """

    draft: Draft
    target: TargetShape | None = None
    target_config: dict[str, Any] | None = None
    contract: Contract | None = None
    contract_from: str = ""
    context_length: int | None = None
    version: str = NEWEST

    @property
    def architecture(self) -> str | None:
        """Of the target as it is served, else of the one that it was trained on."""
        if self.target:
            return self.target.architecture
        return self.contract.architecture if self.contract else self.draft.architecture

    @property
    def num_layers(self) -> int | None:
        """N of the target."""
        if self.target:
            return self.target.num_layers
        return self.contract.num_layers if self.contract else None

    @property
    def engine(self) -> Engine:
        """The release's row of the table.

        Raises:
            DraftlineError: the release is older than the table.
        """
        engine = engine_of(self.version)
        if engine is None:
            raise DraftlineError(
                f"SGLang {self.version}: no release that is known here; the first is {ENGINES[0].version}."
            )
        return engine


def read_target(folder: Path) -> tuple[TargetShape, dict[str, Any]]:
    """Sizes of a target from config.json alone, without transformers: known at once. And config.json itself.

    Raises:
        DraftlineError: config.json cannot be read or lacks a size; names it.
    """
    config = read_config(folder)
    text = config["text_config"] if isinstance(config.get("text_config"), dict) else config
    where = folder / CONFIG
    for name in ("num_attention_heads", "num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings"):
        if type(text.get(name)) is not int or text[name] < 1:
            raise DraftlineError(f"{where}: {name} is {shortened(text.get(name))}; the doctor needs it, 1 or more.")
    try:
        rope = rope_of(text)
    except DraftlineError as ambiguous:
        raise DraftlineError(f"{where}: {ambiguous}") from None
    heads = text["num_attention_heads"]
    names = config.get("architectures") or text.get("architectures")
    shape = TargetShape(
        architecture=names[0] if isinstance(names, list) and names and isinstance(names[0], str) else "unknown",
        num_layers=text["num_hidden_layers"],
        hidden_size=text["hidden_size"],
        vocab_size=text["vocab_size"],
        intermediate_size=text.get("intermediate_size") or 0,
        num_attention_heads=heads,
        num_key_value_heads=text.get("num_key_value_heads") or heads,
        head_dim=text.get("head_dim") or text["hidden_size"] // heads,
        rms_norm_eps=text.get("rms_norm_eps", 1e-6),
        max_position_embeddings=text["max_position_embeddings"],
        rope_parameters=rope,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", False))),
    )
    return shape, config


def parts_of(config: dict[str, Any]) -> list[dict[str, Any]]:
    """A target's config, and the language model's within it where that is nested."""
    text = config.get("text_config")
    return [config, text] if isinstance(text, dict) else [config]


def is_quantised(config: dict[str, Any]) -> bool:
    """Whether a target's weights are stored quantised."""
    return any(part.get(key) for part in parts_of(config) for key in ("quantization_config", "compression_config"))


def verdict_of(want: Expectation, problems: list[str], fix: str, found: str) -> Check:
    """An error that lists the problems, or ok with what was found."""
    if not problems:
        return want.ok(found)
    more = f" And {len(problems) - _SHOWN} more." if len(problems) > _SHOWN else ""
    return want.error(" ".join(problems[:_SHOWN]) + more, fix)
