"""The EAGLE-3 contract: what a draft was trained on, and how each engine must be told to serve it.

A draft that is trained under one reading and served under another does not crash, it accepts nothing.
The contract is written by `dump_hidden_states`, travels with every artifact after it, and each stage
refuses to go on when its own reading differs.

`aux_layer_ids` always names decoder layers, 0-based, by their OUTPUT (residual added, no norm). What a
served config must say to get them depends on the architecture and the engine: `served_layer_ids` and
`captured_layers` are the only place that knows. The parity probe of `launch_server` has the last word.
"""

from pydantic import BaseModel, ConfigDict, model_validator

from tasks.common.errors import DraftlineError

# Architectures whose `set_eagle3_layers_to_capture` in SGLang 0.5.16 and 0.5.23 adds 1 to every id and
# captures at the INPUT of that layer: id k is the output of layer k.
_OUTPUT_READERS = frozenset({"LlamaForCausalLM", "Qwen2ForCausalLM", "Qwen3ForCausalLM"})
# These add 1 only if the first id is 1, else take ids as raw boundaries: [2, 30, 58] captures 1, 29, 57.
_BOUNDARY_READERS = frozenset(
    {"DeepseekV2ForCausalLM", "DeepseekV3ForCausalLM", "KimiK25ForConditionalGeneration", "Glm4MoeLiteForCausalLM"}
)
SUPPORTED_ARCHITECTURES = _OUTPUT_READERS | _BOUNDARY_READERS


class Contract(BaseModel):
    """Facts that dump, training, export and serving must share.

    Attributes:
        architecture: `architectures[0]` of the target's config.
        num_layers: N, decoder layers of the target.
        hidden_size: H.
        vocab_size: V.
        aux_layer_ids: outputs captured, ascending; slot s of an aux state is layer `aux_layer_ids[s]`.
        last_is_normed: whether the stored last state is after the target's final norm.
        target_sha256: hash over the target's config and weights.
        tokenizer_sha256: hash over tokenizer and chat template.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    aux_layer_ids: tuple[int, ...]
    last_is_normed: bool
    target_sha256: str
    tokenizer_sha256: str

    @model_validator(mode="after")
    def _layers_exist(self) -> "Contract":
        check_aux_layers(self.aux_layer_ids, self.num_layers)
        return self

    @property
    def aux_width(self) -> int:
        """n_aux * H, the width that the draft's fc reads."""
        return len(self.aux_layer_ids) * self.hidden_size

    def require_same(self, other: "Contract", mine: str, theirs: str) -> None:
        """Refuse to go on when `other` differs.

        Args:
            other: the contract of another artifact.
            mine: name of the artifact that carries `self`, for the message.
            theirs: name of the artifact that carries `other`.

        Raises:
            DraftlineError: names every field that differs, with both values.
        """
        ours, others = self.model_dump(), other.model_dump()
        differing = [
            f"{key}: {ours[key]} in {mine}, {others[key]} in {theirs}" for key in ours if ours[key] != others[key]
        ]
        if differing:
            raise DraftlineError(
                f"{mine} and {theirs} were made under different contracts: {'; '.join(differing)}. A draft that is "
                f"trained under one and served under the other accepts nothing. Run `dvc repro` to make both anew."
            )


def default_aux_layers(num_layers: int) -> tuple[int, int, int]:
    """Outputs [1, N//2 - 1, N - 4]: what SGLang captures when a config names no layers."""
    if num_layers < 6:
        raise DraftlineError(
            f"contract.aux_layer_ids: a target of {num_layers} layers has no default aux layers "
            f"(1, N//2-1, N-4 must ascend). Name them in params.yaml."
        )
    return (1, num_layers // 2 - 1, num_layers - 4)


def check_aux_layers(ids: tuple[int, ...], num_layers: int) -> None:
    """Refuse layer lists that an engine would take silently to mean something else.

    Raises:
        DraftlineError: ids not distinct and ascending (capture order is layer order, duplicates are
            captured once), outside 0..N-2 (-1 is not the embedding; the last boundary is captured by no
            architecture of the table), or a single id (SGLang skips fc when widths agree).
    """
    where = f"contract.aux_layer_ids {list(ids)}"
    if len(ids) < 2:
        raise DraftlineError(f"{where}: at least two layers are needed; with one, SGLang skips fc silently.")
    if list(ids) != sorted(set(ids)):
        raise DraftlineError(
            f"{where}: must be distinct and ascending; the engine captures in layer order, duplicates once."
        )
    if ids[0] < 0 or ids[-1] > num_layers - 2:
        raise DraftlineError(
            f"{where}: must lie in 0..{num_layers - 2} for a target of {num_layers} layers. The ids name decoder "
            f"layers by output: -1 is not the embedding, and the output of the last layer is not captured."
        )


def served_layer_ids(aux_layer_ids: tuple[int, ...], architecture: str) -> list[int]:
    """Ids that `eagle_aux_hidden_state_layer_ids` must hold so that SGLang captures these outputs.

    Raises:
        DraftlineError: the architecture is not in the table, or cannot express the list.
    """
    if architecture in _OUTPUT_READERS:
        return list(aux_layer_ids)
    if architecture in _BOUNDARY_READERS:
        if aux_layer_ids[0] == 1:
            return list(aux_layer_ids)
        if aux_layer_ids[0] == 0:
            raise DraftlineError(
                f"{architecture}: SGLang cannot capture output 0 as the first slot (a list that starts with 1 is "
                f"shifted by one). Choose a first layer above 0."
            )
        return [layer + 1 for layer in aux_layer_ids]
    raise DraftlineError(
        f"{architecture}: not known to support EAGLE-3 capture in SGLang. Known: {', '.join(sorted(SUPPORTED_ARCHITECTURES))}."
    )


def captured_layers(config_ids: list[int], architecture: str) -> tuple[int, ...]:
    """Outputs that SGLang really captures for the ids of a draft's config: the inverse of `served_layer_ids`."""
    if architecture in _OUTPUT_READERS or (architecture in _BOUNDARY_READERS and config_ids[0] == 1):
        return tuple(config_ids)
    if architecture in _BOUNDARY_READERS:
        return tuple(layer - 1 for layer in config_ids)
    raise DraftlineError(
        f"{architecture}: not known to support EAGLE-3 capture in SGLang. Known: {', '.join(sorted(SUPPORTED_ARCHITECTURES))}."
    )
