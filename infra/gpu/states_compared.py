"""Two sets of states side by side, slot by slot."""

import torch

from tasks.common.contract import Contract
from tasks.common.parity import Agreement


def compare(ones: list, others: list, contract: Contract) -> dict[str, dict[str, float]]:
    """Slot by slot: mean cosine and relative error over all tokens, and the lowest cosine of a token."""
    names = [*(f"layer {layer}" for layer in contract.aux_layer_ids), "last"]
    found = {}
    for slot, name in enumerate(names):
        pairs = [
            [(last if name == "last" else aux[:, slot]).float().cpu() for aux, last in side] for side in (ones, others)
        ]
        one, other = (torch.cat(side) for side in pairs)
        agreement = Agreement.of(one, other)
        lowest = torch.nn.functional.cosine_similarity(one.double(), other.double(), dim=-1).min().item()
        found[name] = {
            "cosine": round(agreement.cosine, 6),
            "lowest_cosine": round(lowest, 6),
            "relative_error": float(f"{agreement.relative_error:.3g}"),
        }
    return found
