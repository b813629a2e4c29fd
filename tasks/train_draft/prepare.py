"""All that training needs, built from the hidden states and the target, and the result written at its end."""

import shutil
from pathlib import Path

from tasks.common.draft import Eagle3Draft
from tasks.common.files import replacing, sha256_json, write_json
from tasks.common.hidden_states import HIDDEN_STATES, HiddenStates
from tasks.common.params import Params
from tasks.common.target import TargetShape, load_config, model_folder
from tasks.common.target_weights import TargetWeights
from tasks.train_draft.checkpoints import Checkpoints
from tasks.train_draft.data import DraftData
from tasks.train_draft.initialise import initialise
from tasks.train_draft.target_head import RestrictedHead, TargetHead, cache_target_argmax
from tasks.train_draft.trainer import Trainer
from tasks.train_draft.vocab_map import build_vocab_map, count_supervised_tokens, coverage


def prepare_training(params: Params, folder: Path) -> tuple[Trainer, dict]:
    """Build the trainer over `artifacts/hidden_states`, with partial work in `folder`/checkpoints.

    Returns:
        the trainer, and what the report says of the data: samples, tokens, vocabulary coverage.

    Raises:
        DraftlineError: train and heldout differ in contract, or there is nothing to train on.
    """
    settings, device = params.train_draft, params.target.device
    states = {split: HiddenStates(HIDDEN_STATES / split) for split in ("train", "heldout")}
    contract = states["train"].contract
    contract.require_same(states["heldout"].contract, str(states["train"].folder), str(states["heldout"].folder))
    checkpoints = Checkpoints(folder / "checkpoints", _key(params, states))
    for name in ("draft.safetensors", "draft.json"):  # of an earlier run: no result stands beside partial work
        (folder / name).unlink(missing_ok=True)

    shape, weights = TargetShape.of(load_config()), TargetWeights(model_folder(params.target))
    counts = {split: count_supervised_tokens(split_states) for split, split_states in states.items()}
    vocab_map = build_vocab_map(counts["train"], settings.draft_vocab_size)
    shares = coverage(vocab_map, counts)
    vocab_map.save(folder / "vocab_map.safetensors")

    target_head = TargetHead(weights, shape, contract.last_is_normed, device)
    data = {}
    for split, split_states in states.items():
        argmax = cache_target_argmax(split_states, target_head, checkpoints.folder / f"{split}_argmax.npy")
        data[split] = DraftData(split_states, argmax, settings.batch_tokens, device)

    draft = Eagle3Draft.for_target(shape, contract, settings.draft_vocab_size, weights.embed_tokens())
    initialise(draft, vocab_map, settings.seed, shape, weights if settings.init_from_target else None, states["train"])
    draft.to(device)
    trainer = Trainer(
        draft,
        RestrictedHead(target_head, vocab_map),
        vocab_map,
        data["train"],
        data["heldout"],
        settings,
        params.serve.num_steps,
        checkpoints,
    )
    facts = {
        split: {
            "samples": len(split_states),
            "tokens": int(split_states.tokens.sum()),
            "supervised_tokens": int(counts[split].sum()),
            "vocabulary_coverage": round(shares[split], 6),
        }
        for split, split_states in states.items()
    }
    return trainer, {"draft_vocab_size": settings.draft_vocab_size, "contract": contract.model_dump(), **facts}


def write_result(trainer: Trainer, folder: Path, facts: dict) -> dict:
    """Leave draft.safetensors and draft.json beside the vocabulary map; checkpoints stay until the report is written.

    Returns:
        The report: the best evaluation, the learning curve, the data.
    """
    best = trainer.best
    with replacing(folder / "draft.safetensors") as partial:
        shutil.copyfile(trainer.checkpoints.best(best["step"]), partial)
    summary = {
        "predicted_accept_length": best["heldout"]["predicted_accept_length"],
        "num_steps": trainer.num_steps,
        "step": best["step"],
    }
    write_json(
        folder / "draft.json",
        {
            "contract": facts["contract"],
            "config": trainer.draft.config.to_dict(),
            "vocab_map_sha256": trainer.vocab_map.inputs_sha256,
            **summary,
        },
    )
    return {**summary, "heldout": best["heldout"], "data": facts, "curve": trainer.curve}


def _key(params: Params, states: dict[str, HiddenStates]) -> str:
    return sha256_json(
        {
            "train_draft": params.train_draft.model_dump(),
            "num_steps": params.serve.num_steps,
            "contract": states["train"].contract.model_dump(),
            "shards": {
                split: [shard["checksum"] for shard in split_states.shards] for split, split_states in states.items()
            },
        }
    )
