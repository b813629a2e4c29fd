"""The EAGLE-3 contract: what a draft was trained on, and how each engine must be told to serve it.

A draft that is trained under one reading and served under another does not crash, it accepts nothing.
The contract is written by `dump_hidden_states`, travels with every artifact after it, and each stage
refuses to go on when its own reading differs.

`aux_layer_ids` always names decoder layers, 0-based, by their OUTPUT (residual added, no norm). What a
served config must say to get them depends on the architecture and the engine: common/capture.py is the only place
that knows.
"""

from pydantic import BaseModel, ConfigDict, model_validator

from tasks.common.errors import DraftlineError


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
    """Outputs [1, N//2 - 1, N - 4]: what SGLang captures of nearly every class when a config names no layers."""
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
            captured once), outside 0..N-1 (-1 is not the embedding), or a single id (SGLang skips fc when
            widths agree). Whether N-1 can be served is for `served_layer_ids` to say.
    """
    where = f"contract.aux_layer_ids {list(ids)}"
    if len(ids) < 2:
        raise DraftlineError(f"{where}: at least two layers are needed; with one, SGLang skips fc silently.")
    if list(ids) != sorted(set(ids)):
        raise DraftlineError(
            f"{where}: must be distinct and ascending; the engine captures in layer order, duplicates once."
        )
    if ids[0] < 0 or ids[-1] > num_layers - 1:
        raise DraftlineError(
            f"{where}: must lie in 0..{num_layers - 1} for a target of {num_layers} layers. The ids name decoder "
            f"layers by output: -1 is not the embedding."
        )
