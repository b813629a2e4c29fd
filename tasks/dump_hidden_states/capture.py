"""Capture the outputs of chosen decoder layers and the final state, with transformers."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


class Capture:
    """Runs a decoder and keeps what the contract names: layer outputs (residual added, no norm) and the last state."""

    def __init__(self, model: nn.Module, aux_layer_ids: tuple[int, ...]):
        """
        Args:
            model: a `transformers` causal language model in eval mode.
            aux_layer_ids: 0-based decoder layers, ascending.
        """
        self.decoder = model.get_decoder()
        self.aux_layer_ids = aux_layer_ids
        self.device = model.device

    @torch.inference_mode()
    def run(self, sequences: list[list[int]]) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """States of each sequence, computed in one right-padded batch.

        Right padding leaves positions and, under causal attention, every real token's state as they are
        alone. The head is not run.

        Returns:
            For each sequence of T tokens: aux [T, n_aux, H], and last [T, H] after the final norm.
        """
        width = max(map(len, sequences))
        ids = torch.tensor([sequence + [0] * (width - len(sequence)) for sequence in sequences], device=self.device)
        mask = torch.tensor([[1] * len(s) + [0] * (width - len(s)) for s in sequences], device=self.device)
        with self._hooked() as outputs:
            last = self.decoder(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state
        # Layers may lie on several devices.
        aux = torch.stack([outputs[layer].to(last.device) for layer in self.aux_layer_ids], dim=2)
        return [(aux[row, : len(s)], last[row, : len(s)]) for row, s in enumerate(sequences)]

    @contextmanager
    def _hooked(self) -> Iterator[dict[int, torch.Tensor]]:
        outputs: dict[int, torch.Tensor] = {}

        def keep(layer: int):
            def hook(_module, _inputs, output):
                outputs[layer] = output if isinstance(output, torch.Tensor) else output[0]

            return hook

        handles = [self.decoder.layers[layer].register_forward_hook(keep(layer)) for layer in self.aux_layer_ids]
        try:
            yield outputs
        finally:
            for handle in handles:
                handle.remove()
