"""Are two hidden states the same, and if not, which state of the target is it really? (contract, section 6)

Relative L2 error comes first: the outputs of neighbouring layers have cosines near 1, so a cosine says little.
When a slot disagrees, `find_state` compares it with every state of the target that an engine has ever been seen
to capture by mistake, and names the best match with its margin.
"""

import re
from contextlib import ExitStack
from dataclasses import dataclass

import torch

# Largest relative error by the type that the target computes in and the one that its states are stored in. Rounding alone
# gives 0.0002 (float16), 0.0017 (bfloat16) and 0.026 (float8); two engines that compute in bfloat16 differ by 0.013; a
# neighbouring layer by 0.2.
_LIMITS: dict[str, dict[str, float]] = {
    "float32": {"float32": 1e-4, "float16": 1e-3, "bfloat16": 5e-3, "float8": 0.05},
    "float16": {"float32": 0.01, "float16": 0.01, "bfloat16": 0.015, "float8": 0.06},
    "bfloat16": {"float32": 0.05, "float16": 0.05, "bfloat16": 0.05, "float8": 0.08},
}


def error_limit(computed: str, stored: str) -> float:
    """The relative error above which a state computed in one type is not the one stored in another."""
    return _LIMITS[computed][stored]


@dataclass(frozen=True)
class Agreement:
    """How near `served` is to `reference`: means over tokens, each token weighing the same.

    A sum over all tokens would hide the rest behind the first, whose state is often tens of times larger and hardly
    changes from layer to layer.

    Attributes:
        relative_error: ||served - reference|| / ||reference||.
        cosine: of served and reference.
        norm_ratio: ||served|| / ||reference||.
    """

    relative_error: float
    cosine: float
    norm_ratio: float

    @classmethod
    def of(cls, served: torch.Tensor, reference: torch.Tensor) -> "Agreement":
        """Compare two states [tokens, H]."""
        served, reference = served.double(), reference.double()
        norm = reference.norm(dim=-1).clamp_min(torch.finfo(torch.float64).tiny)
        return cls(
            relative_error=((served - reference).norm(dim=-1) / norm).mean().item(),
            cosine=torch.nn.functional.cosine_similarity(served, reference, dim=-1).mean().item(),
            norm_ratio=(served.norm(dim=-1) / norm).mean().item(),
        )


@dataclass(frozen=True)
class Match:
    """Which state of the target a slot holds.

    Attributes:
        name: 'the output of layer 3'.
        error: relative L2 error of the best match.
        runner_up: the second best, with its error: the margin.
    """

    name: str
    error: float
    runner_up: str
    runner_up_error: float

    def __str__(self) -> str:
        return f"{self.name} (relative error {self.error:.1e}; next best: {self.runner_up}, {self.runner_up_error:.1e})"


def find_state(served: torch.Tensor, states: dict[str, torch.Tensor]) -> Match:
    """The best match of `served` [tokens, H] among named states of the same tokens."""
    errors = sorted((Agreement.of(served, state).relative_error, name) for name, state in states.items())
    (error, name), (runner_up_error, runner_up) = errors[:2]
    return Match(name, error, runner_up, runner_up_error)


def output_name(layer: int) -> str:
    """How the output of a decoder layer is called in every message, and in `all_states`."""
    return f"the output of layer {layer}"


def output_layer(name: str) -> int | None:
    """The layer whose output a state is called; None of any other state."""
    found = re.fullmatch(r"the output of layer (\d+)", name)
    return int(found[1]) if found else None


def layer_outputs(model, input_ids: torch.Tensor, layers: tuple[int, ...]) -> list[torch.Tensor]:
    """Outputs of decoder layers, 0-based, residual added and no norm: float32 [tokens, H] each.

    Args:
        model: a transformers causal LM in eval mode.
        input_ids: int [tokens] of one sequence.
    """
    decoder_layers = model.get_decoder().layers
    captured = _capture(model, input_ids, {layer: decoder_layers[layer] for layer in layers})
    return [captured[layer] for layer in layers]


def all_states(model, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Every state that could be captured by mistake, by name: float32 [tokens, H] each.

    The embedding; each layer's output; the same after the norm that follows it; what each layer's MLP adds
    before the residual is added (what an engine holds between two fused norms), where the layers have these parts.
    """
    decoder = model.get_decoder()
    modules: dict[str, torch.nn.Module] = {"the embedding": model.get_input_embeddings()}
    for number, layer in enumerate(decoder.layers):
        modules[output_name(number)] = layer
        before = "the embedding" if number == 0 else output_name(number - 1)
        parts = {
            f"the MLP branch of layer {number}, without the residual": getattr(layer, "mlp", None),
            f"{before} after the input norm of layer {number}": getattr(layer, "input_layernorm", None),
        }
        modules |= {name: part for name, part in parts.items() if part is not None}
    if hasattr(decoder, "norm"):
        modules[f"{output_name(len(decoder.layers) - 1)} after the final norm"] = decoder.norm
    return _capture(model, input_ids, modules)


@torch.inference_mode()
def _capture(model, input_ids: torch.Tensor, modules: dict) -> dict:
    """Run one sequence and keep what each module returned."""
    captured: dict = {}
    with ExitStack() as stack:
        for name, module in modules.items():
            stack.callback(module.register_forward_hook(_keep(captured, name)).remove)
        model(input_ids=input_ids.long()[None].to(model.device), use_cache=False)
    return {name: captured[name] for name in modules}


def _keep(captured: dict, name):
    def hook(_module, _args, output):
        state = output[0] if isinstance(output, tuple) else output
        captured[name] = state[0].float().cpu()

    return hook
