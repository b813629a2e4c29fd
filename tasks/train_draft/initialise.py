"""Where training starts: random weights, or as much of the target as fits into the draft."""

from collections.abc import Callable

import torch

from tasks.common.draft import Eagle3Draft
from tasks.common.target import TargetShape
from tasks.common.target_weights import TargetWeights
from tasks.common.vocab_map import VocabMap
from tasks.train_draft.induction import TrainingStates, start_induction_head

# Standard deviation of random matrices, as Llama starts (initializer_range).
_RANDOM_STD = 0.02


@torch.no_grad()
def initialise(
    draft: Eagle3Draft,
    vocab_map: VocabMap,
    seed: int,
    shape: TargetShape,
    weights: TargetWeights | None,
    sample: Callable[[], TrainingStates],
) -> None:
    """Set every parameter.

    From the target come its head's rows with the norm before them, so that the draft speaks its vocabulary from
    the first step; its last MLP; fc as a selector of the last aux slot, the state nearest to the target's own
    answer; and, fitted to its states, an induction head (see `induction`).

    Args:
        weights: the target's; None starts from random weights alone.
        sample: gives the training states that the induction head is fitted to.
    """
    generator = torch.Generator().manual_seed(seed)
    for parameter in draft.parameters():
        if parameter.dim() == 1:
            parameter.fill_(1)
        else:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * _RANDOM_STD)
    if weights is None:
        return
    lm_head = weights.lm_head()
    draft.lm_head.weight.copy_(lm_head[vocab_map.target_ids])
    draft.norm.weight.copy_(weights.final_norm())
    hidden = draft.config.hidden_size
    draft.fc.weight.zero_()
    draft.fc.weight[:, -hidden:] = torch.eye(hidden)
    start_induction_head(draft, sample(), lm_head)
    _copy_last_mlp(draft, weights, f"model.layers.{shape.num_layers - 1}")


def _copy_last_mlp(draft: Eagle3Draft, weights: TargetWeights, layer: str) -> None:
    """The MLP of the target's last layer, with the norm that it was trained behind; not of a mixture of experts."""
    mlp, norm = draft.midlayer.mlp, draft.midlayer.post_attention_layernorm
    # Families that norm what attention adds, too, call the norm before the MLP otherwise.
    before_mlp = f"{layer}.pre_feedforward_layernorm.weight"
    norm_name = before_mlp if weights.find(before_mlp) else f"{layer}.post_attention_layernorm.weight"
    pairs = [(getattr(mlp, name), f"{layer}.mlp.{name}.weight") for name in ("gate_proj", "up_proj", "down_proj")]
    if all(weights.shape(name) == module.weight.shape for module, name in [(norm, norm_name), *pairs]):
        norm.weight.copy_(weights.norm(norm_name))
        for module, name in pairs:
            module.weight.copy_(weights.read(name))
