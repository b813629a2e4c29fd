"""Which outputs SGLang captures for the ids of a draft's config: a row an architecture, another from the release on
that captures otherwise.

Read in each class's `set_eagle3_layers_to_capture` and in its model's forward pass, SGLang 0.5.16 to 0.5.23. Every
class there that has the hook as a target has a row, so an architecture without one cannot be served with EAGLE-3: the
server stops at its start. Boundary b is the input of layer b, so the output of layer b - 1; boundary N, the output of
the last layer, exists only where the forward pass captures behind its loop. Captures come in layer order whatever the
order of the ids, and one that is named twice comes once.

The parity probe of `launch_server` has the last word.
"""

from dataclasses import dataclass, replace
from typing import Literal

from tasks.common.errors import DraftlineError
from tasks.common.sglang_versions import NEWEST, OLDEST, number


@dataclass(frozen=True)
class Capture:
    """How a class captures.

    Attributes:
        reads: what the ids name. 'outputs': id k is the output of layer k. 'boundaries unless 1 is first': id k is
            boundary k, but in a list that starts with 1 it is output k. 'boundaries if N is named': id k is
            output k, but in a list that holds N it is boundary k.
        last: whether the output of layer N - 1 can be captured.
        fault: what is captured instead of outputs, where that is so; empty where the captures are right.
        since: first release that this holds for.
    """

    reads: Literal["outputs", "boundaries unless 1 is first", "boundaries if N is named"] = "outputs"
    last: bool = False
    fault: str = ""
    since: str = OLDEST


_OUTPUTS = Capture()
_BOUNDARIES = Capture("boundaries unless 1 is first")
# The hook writes a list that the forward pass of this class does not look at.
_DEAF = Capture(
    fault="captures nothing: its forward pass does not look at what its hook sets, and its first run stops the server"
)
_GEMMA3 = (
    Capture(last=True),
    Capture(fault="captures each layer's MLP branch without the residual, so no layer's output", since="0.5.17"),
)
_GEMMA4 = (
    Capture(fault="captures tensors that the next layer overwrites on a GPU, so no layer's output"),
    Capture(last=True, since="0.5.22"),
)
_QWEN3_5 = (_DEAF, replace(_OUTPUTS, since="0.5.22"))

_TABLE: dict[str, tuple[Capture, ...]] = {
    **dict.fromkeys(
        (
            "ApertusForCausalLM",
            "BailingMoEForCausalLM",
            "BailingMoeForCausalLM",
            "BailingMoeV2ForCausalLM",
            "ExaoneMoEForCausalLM",
            "Glm4MoeForCausalLM",
            "IQuestCoderForCausalLM",
            "InternLM3ForCausalLM",
            "InternS1ProForConditionalGeneration",
            "Llama4ForCausalLM",
            "Llama4ForConditionalGeneration",
            "LlamaForCausalLM",
            "LongcatFlashForCausalLM",
            "MellumForCausalLM",
            "MiniMaxM2ForCausalLM",
            "Ministral3ForCausalLM",
            "MistralForCausalLM",
            "Phi3ForCausalLM",
            "Qwen2ForCausalLM",
            "Qwen2MoeForCausalLM",
            "Qwen2_5_VLForConditionalGeneration",
            "Qwen3ForCausalLM",
            "Qwen3MoeForCausalLM",
            "Qwen3NextForCausalLM",
            "Qwen3VLForConditionalGeneration",
            "Qwen3VLMoeForConditionalGeneration",
            "SarvamMoEForCausalLM",
            "TeleFLMForCausalLM",
        ),
        (_OUTPUTS,),
    ),
    **dict.fromkeys(
        (
            "DeepseekV2ForCausalLM",
            "DeepseekV3ForCausalLM",
            "DeepseekV32ForCausalLM",
            "Glm4MoeLiteForCausalLM",
            "GlmMoeDsaForCausalLM",
            "KimiK25ForConditionalGeneration",
            "MistralLarge3ForCausalLM",
        ),
        (_BOUNDARIES,),
    ),
    "GptOssForCausalLM": (_OUTPUTS, Capture("boundaries if N is named", last=True, since="0.5.17")),
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3ForConditionalGeneration": _GEMMA3,
    "Gemma4ForCausalLM": _GEMMA4,
    "Gemma4ForConditionalGeneration": _GEMMA4,
    "Gemma4UnifiedForConditionalGeneration": _GEMMA4,
    "MiniMaxM3SparseForCausalLM": (_DEAF, replace(_OUTPUTS, since="0.5.18"), Capture(last=True, since="0.5.23")),
    "MiniMaxM3SparseForConditionalGeneration": (
        replace(_OUTPUTS, since="0.5.18"),
        Capture(last=True, since="0.5.23"),
    ),
    "Qwen3_5ForConditionalGeneration": _QWEN3_5,
    "Qwen3_5MoeForConditionalGeneration": _QWEN3_5,
    "InternS2PreviewForConditionalGeneration": _QWEN3_5,
    "InternS2MobiusForConditionalGeneration": (replace(_DEAF, since="0.5.18"), replace(_OUTPUTS, since="0.5.22")),
    "Qwen4ExpForConditionalGeneration": (
        replace(_DEAF, since="0.5.20"),
        Capture(fault="captures all its residual streams side by side, wider than a draft reads", since="0.5.22"),
    ),
    "Cosmos3ForConditionalGeneration": (replace(_OUTPUTS, since="0.5.20"),),
    "Glm5NextForConditionalGeneration": (replace(_OUTPUTS, since="0.5.20"),),
    "Qwen3_5ForCausalLM": (replace(_OUTPUTS, since="0.5.22"),),
    "Qwen3_5MoeForCausalLM": (replace(_OUTPUTS, since="0.5.22"),),
    "ExaoneMoeForCausalLM": (replace(_OUTPUTS, since="0.5.22"),),
}


def rows_of(architecture: str) -> tuple[Capture, ...]:
    """All that is known of a class, the oldest first; empty where no release has its hook."""
    return _TABLE.get(architecture, ())


def capture_of(architecture: str, version: str = NEWEST) -> Capture | None:
    """The row that describes a release; None where its class has no hook. A newer release reads as the newest."""
    rows = [row for row in rows_of(architecture) if number(row.since) <= number(version)]
    return rows[-1] if rows else None


def can_capture(architecture: str | None, version: str = NEWEST) -> bool:
    """Whether a draft on this target can be fed layer outputs."""
    row = capture_of(architecture, version) if architecture else None
    return row is not None and not row.fault


def _require(architecture: str, version: str) -> Capture:
    row = capture_of(architecture, version)
    if row is None:
        raise DraftlineError(
            f"{architecture}: not known to support EAGLE-3 capture in SGLang {version}. Take another target, or a "
            f"release whose class has set_eagle3_layers_to_capture and stands in tasks/common/capture.py."
        )
    if row.fault:
        raise DraftlineError(f"{architecture}: SGLang {version} {row.fault}. Take another release or target.")
    return row


def last_output(architecture: str, num_layers: int, version: str = NEWEST) -> int:
    """The last layer whose output can be captured: N - 1 where boundary N is captured, else N - 2."""
    row = capture_of(architecture, version)
    return num_layers - (1 if row and row.last else 2)


def served_layer_ids(
    aux_layer_ids: tuple[int, ...], architecture: str, num_layers: int | None, version: str = NEWEST
) -> list[int]:
    """Ids that `eagle_aux_hidden_state_layer_ids` must hold so that SGLang captures these outputs.

    Args:
        num_layers: N of the target; None where it is not known, and the last layer goes unchecked.

    Raises:
        DraftlineError: the release captures no outputs of this architecture, or cannot express the list.
    """
    row = _require(architecture, version)
    if num_layers is not None and aux_layer_ids[-1] > last_output(architecture, num_layers, version):
        raise DraftlineError(
            f"{architecture}: aux layers {list(aux_layer_ids)} must lie in 0..{last_output(architecture, num_layers, version)} "
            f"for a target of {num_layers} layers: SGLang {version} captures no later output."
        )
    if row.reads != "boundaries unless 1 is first" or aux_layer_ids[0] == 1:
        return list(aux_layer_ids)
    if aux_layer_ids[0] == 0:
        raise DraftlineError(
            f"{architecture}: SGLang cannot capture output 0 as the first slot (a list that starts with 1 is "
            f"shifted by one). Choose a first layer above 0."
        )
    return [layer + 1 for layer in aux_layer_ids]


def captured_layers(
    config_ids: list[int], architecture: str, num_layers: int | None, version: str = NEWEST
) -> tuple[int, ...]:
    """Outputs that SGLang really captures for the ids of a draft's config, in layer order: undoes `served_layer_ids`.

    Args:
        num_layers: N of the target, as `served_layer_ids` takes it; without it no id is taken for boundary N.

    Raises:
        DraftlineError: the release captures no outputs of this architecture.
    """
    row = _require(architecture, version)
    boundaries = (row.reads == "boundaries unless 1 is first" and config_ids[0] != 1) or (
        row.reads == "boundaries if N is named" and max(config_ids) == num_layers
    )
    return tuple(sorted({layer - boundaries for layer in config_ids}))
