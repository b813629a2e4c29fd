"""All that training needs, built from the hidden states and the target, and the result written at its end."""

import shutil
from pathlib import Path

from tasks.common.contract import Contract
from tasks.common.draft import Eagle3Draft
from tasks.common.errors import DraftlineError
from tasks.common.files import replacing, write_json
from tasks.common.hidden_states import HIDDEN_STATES, HiddenStates
from tasks.common.memory import available_memory
from tasks.common.params import PARAMS, Params
from tasks.common.target import TargetShape, load_config, model_folder
from tasks.common.target_weights import TargetWeights
from tasks.train_draft.batch import BatchForm
from tasks.train_draft.checkpoints import Checkpoints
from tasks.train_draft.data import DraftData
from tasks.train_draft.finished import FINISHED, run_key, set_aside
from tasks.train_draft.gpu_memory import capacity
from tasks.train_draft.initialise import initialise
from tasks.train_draft.processes import Processes
from tasks.train_draft.source import DumpedSource, OpenSource
from tasks.train_draft.target_head import RestrictedHead, TargetHead, cache_target_argmax
from tasks.train_draft.trainer import Trainer
from tasks.train_draft.vocab_map import build_vocab_map, count_supervised_tokens, coverage


def prepare_training(
    params: Params, folder: Path, open_source: OpenSource = DumpedSource, processes: Processes | None = None
) -> tuple[Trainer, dict]:
    """Build the trainer over the states of `open_source`, with partial work in `folder`/checkpoints.

    Returns:
        the trainer, and what the report says of the data: samples, tokens, vocabulary coverage.

    Raises:
        DraftlineError: train and heldout differ in contract, there is nothing to train on, or a step's batches have no room.
    """
    processes = processes or Processes.alone(params)
    params = processes.with_own_device(params)
    settings, device = params.train_draft, params.target.device
    shape, weights = TargetShape.of(load_config()), TargetWeights(model_folder(params.target))
    train = open_source(params)
    heldout = HiddenStates(HIDDEN_STATES / "heldout")
    contract, known = train.contract, train.summary()
    contract.require_same(heldout.contract, str(HIDDEN_STATES / "train"), str(heldout.folder))
    # Before the target's greedy tokens are computed: it refuses sizes that do not fit.
    draft = Eagle3Draft.for_target(shape, contract, settings.draft_vocab_size, weights.embed_tokens())
    counts = {"train": known.counts, "heldout": count_supervised_tokens(heldout)}
    vocab_map = build_vocab_map(counts["train"], settings.draft_vocab_size)
    shares = coverage(vocab_map, counts)

    _require_room(params, contract, known.tokens, processes)
    head, dtype = TargetHead(weights, shape, contract.last_is_normed, device), settings.computed_in(device)
    form = BatchForm.of(vocab_map, device, dtype, settings.ttt_length, settings.batch_tokens)
    with processes.first_alone():
        if processes.is_first:
            set_aside(folder)
        checkpoints = Checkpoints(folder / "checkpoints", run_key(params, contract, known.identity, heldout))
        if processes.is_first:
            # Of an earlier run: no result stands beside partial work.
            for name in (FINISHED, "draft.safetensors", "draft.json"):
                (folder / name).unlink(missing_ok=True)
            vocab_map.save(folder / "vocab_map.safetensors")
        batches = train.batches(head, checkpoints.folder, form, processes)
        argmax = cache_target_argmax(heldout, head, checkpoints.folder / "heldout_argmax.npy")
    start = weights if settings.init_from_target else None
    initialise(draft, vocab_map, settings.seed, shape, start, train.first_states)
    draft.to(device)
    draft.embed_tokens = draft.embed_tokens.to(dtype)  # frozen: it needs no more than is computed with
    trainer = Trainer(
        draft,
        RestrictedHead(head, vocab_map, dtype),
        vocab_map,
        batches,
        DraftData(heldout, argmax, settings.batch_tokens, form),
        settings,
        checkpoints,
        contract,
        processes,
    )
    sizes = {"train": (known.samples, known.tokens), "heldout": (len(heldout), int(heldout.tokens.sum()))}
    facts = {
        split: {
            "samples": samples,
            "tokens": tokens,
            "supervised_tokens": int(counts[split].sum()),
            "vocabulary_coverage": round(shares[split], 6),
        }
        for split, (samples, tokens) in sizes.items()
    }
    return trainer, {"draft_vocab_size": settings.draft_vocab_size, "contract": contract.model_dump(), **facts}


def write_result(trainer: Trainer, folder: Path, facts: dict) -> dict:
    """Leave draft.safetensors and draft.json beside the vocabulary map; checkpoints stay until the report is written.

    Returns:
        The report: the best evaluation, the learning curve, the data. Of its predictions `predicted_accept_length` reads
        the one for what is served.
    """
    best = trainer.best
    with replacing(folder / "draft.safetensors") as partial:
        shutil.copyfile(trainer.checkpoints.best(best["step"]), partial)
    summary = {
        "predicted_accept_lengths": best["heldout"]["predicted_accept_lengths"],
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


def _require_room(params: Params, contract: Contract, train_tokens: int, processes: Processes) -> None:
    """All batches of a step are on the device at once: what losses are divided by is known before the first is computed."""
    settings, device = params.train_draft, params.target.device
    share, width = (
        settings.global_batch_size // processes.size,
        (len(contract.aux_layer_ids) + 1) * contract.hidden_size,
    )
    tokens = share * min(settings.batch_tokens, train_tokens)
    needed = tokens * width * settings.computed_in(device).itemsize
    room = capacity(device) if device.startswith("cuda") else available_memory()
    if needed > room:
        raise DraftlineError(
            f"{PARAMS}: with train_draft.global_batch_size {settings.global_batch_size} each of {processes.size} processes holds the "
            f"{share} batches of a step at once, {needed / 2**30:.1f} GiB of states, and {room / 2**30:.1f} GiB are free on "
            f"{device}. Lower global_batch_size or batch_tokens, or train with more processes."
        )
