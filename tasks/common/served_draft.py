"""A served checkpoint, of whatever form, as Draftline's own draft: what the server should compute with these files."""

import torch

from tasks.common.draft import DraftConfig, Eagle3Draft
from tasks.common.draft_form import Draft, rope_of
from tasks.common.draft_tensors import (
    aux_size,
    expected_shapes,
    has_fc_norm,
    has_input_norm,
    num_aux_states,
    vocab_map_problems,
)
from tasks.common.errors import DraftlineError
from tasks.common.target_weights import TargetWeights
from tasks.common.vocab_map import VocabMap


def load_served_draft(draft: Draft, target: TargetWeights) -> tuple[Eagle3Draft, VocabMap]:
    """Build the draft in float32, with the target's embedding, and its head where the config borrows it.

    Raises:
        DraftlineError: a tensor is missing or of another shape, or the map holds no offsets: SGLang would serve random
            weights or wrong tokens, and there is nothing to compare with.
    """
    config = draft.config
    for name, shape in expected_shapes(config).items():
        if name == "t2d":  # the server does not read it
            continue
        found = draft.header(name).shape if name in draft.stored else "missing"
        if found != shape:
            raise DraftlineError(
                f"{draft.files.folder}: tensor {name} is {found if found == 'missing' else list(found)}, expected "
                f"{list(shape)}. The server leaves random values there; export the draft again."
            )
    own = Eagle3Draft(_config(config), _embedding(draft, target))
    tensors = {name: draft.read(name).float() for name in own.state_dict() if name in draft.stored}
    if config["draft_vocab_size"] is None:
        tensors["lm_head.weight"] = target.lm_head()[: config["vocab_size"]]
    own.load_state_dict(tensors)
    return own.eval(), served_vocab_map(draft)


def _config(config: dict) -> DraftConfig:
    heads = config["num_attention_heads"]
    if config.get("hidden_act", "silu") != "silu":
        raise DraftlineError(f"hidden_act is {config['hidden_act']}; SGLang's EAGLE-3 class computes silu alone.")
    return DraftConfig(
        hidden_size=config["hidden_size"],
        intermediate_size=config["intermediate_size"],
        num_attention_heads=heads,
        num_key_value_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        num_aux=num_aux_states(config),
        vocab_size=config["vocab_size"],
        draft_vocab_size=config["draft_vocab_size"] or config["vocab_size"],
        rms_norm_eps=config["rms_norm_eps"],
        rope_parameters=rope_of(config),
        max_position_embeddings=config["max_position_embeddings"],
        target_hidden_size=config.get("target_hidden_size"),
        norm_before_fc=has_input_norm(config),
        fc_norm=has_fc_norm(config),
        norm_output=bool(config.get("norm_output")),
    )


def _embedding(draft: Draft, target: TargetWeights) -> torch.Tensor:
    """The server shares the target's embedding, [V, H], unless the draft's hidden size is another."""
    config = draft.config
    if aux_size(config) != config["hidden_size"]:
        return draft.read("embed_tokens.weight").float()
    return target.embed_tokens()


def served_vocab_map(draft: Draft) -> VocabMap:
    """Which target ids the draft proposes, as the server reads its map.

    Raises:
        DraftlineError: the map holds no offsets.
    """
    vocab = draft.config["vocab_size"]
    if "d2t" not in expected_shapes(draft.config):
        return VocabMap(torch.arange(vocab), vocab, "")
    d2t = draft.read("d2t").long()
    problems = vocab_map_problems(d2t, draft.read("t2d").bool() if "t2d" in draft.stored else None, vocab)
    if problems:
        raise DraftlineError(f"{draft.files.folder}: {problems[0]}")
    return VocabMap.of_offsets(d2t, vocab)
