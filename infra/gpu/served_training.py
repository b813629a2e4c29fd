"""Two trainers on the same answers: Draftline's and SpecForge 0.2.0's, each through to the folder that a server loads.

Both have the same draft, TTT length, draft vocabulary size, epochs, learning rate and, on average, sequences a step. All
else is what each of them does by default: start of the weights, schedule, clipping, vocabulary map.
"""

import math
import shutil
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import torch

from infra.gpu.served_answers import SPECFORGE_TARGET
from infra.gpu.training_specforge import train_specforge
from tasks.common.draft import DraftConfig
from tasks.common.draft_files import DraftFiles
from tasks.common.draft_form import Draft
from tasks.common.errors import DraftlineError
from tasks.common.files import write_json
from tasks.common.hidden_states import HIDDEN_STATES, HiddenStates
from tasks.common.params import Params
from tasks.common.rows import BLOCK, round_up
from tasks.common.served_draft import load_served_draft
from tasks.common.target import TargetShape, load_config, model_folder
from tasks.common.target_weights import TargetWeights
from tasks.export_draft.export import export_config, export_draft
from tasks.train_draft.acceptance import measure
from tasks.train_draft.batch import BatchForm
from tasks.train_draft.data import DraftData, pack
from tasks.train_draft.prepare import prepare_training, write_result
from tasks.train_draft.target_head import RestrictedHead, TargetHead, cache_target_argmax

TRAINED, EXPORTS = Path("trained"), Path("exports")
CHAINS = (3, 5)
_SAY_EVERY = 100


def train_draftline(params: Params, name: str, epochs: int, per_step: int, rate: float, evaluations: int) -> dict:
    """Train and export; figures.

    Args:
        per_step: sequences of a step on average: batches are packed by tokens.
        evaluations: over the held-out answers, the best of which is exported.
    """
    states = HiddenStates(HIDDEN_STATES / "train")
    batch_tokens = max(round_up(math.ceil(per_step * states.tokens.mean()), BLOCK), int(states.tokens.max()))
    steps = epochs * len(pack(states.tokens, np.arange(len(states)), batch_tokens))
    changed = {
        "learning_rate": rate,
        "max_steps": steps,
        "batch_tokens": batch_tokens,
        "evaluate_every": math.ceil(steps / evaluations),
        "checkpoint_every": steps,
    }
    params = params.model_copy(update={"train_draft": params.train_draft.model_copy(update=changed)})
    on_gpu = params.target.device != "cpu"
    began = time.perf_counter()
    trainer, facts = prepare_training(params, TRAINED / name)
    prepared, tokens = time.perf_counter(), 0
    for step in trainer.steps():
        tokens += step.tokens
        if step.evaluation or step.step % _SAY_EVERY == 0:
            heldout = f"predicted {step.heldout.predicted_accept_lengths[-1]:.3f}" if step.heldout else ""
            spent = time.perf_counter() - prepared
            print(f"{name}: {step.step}/{steps} loss {step.loss:.3f} {tokens / spent:,.0f} tok/s {heldout}", flush=True)
    seconds = time.perf_counter() - prepared
    report = write_result(trainer, TRAINED / name, facts)
    export_draft(TRAINED / name, EXPORTS / name, params.target.dtype)
    trainer.checkpoints.remove()
    return {
        "trainer": "draftline",
        "learning_rate": rate,
        "epochs": epochs,
        "steps": steps,
        "sequences_per_step": round(epochs * len(states) / steps, 2),
        "seconds": round(seconds, 1),
        "seconds_with_preparation": round(time.perf_counter() - began, 1),
        "tokens_per_s": round(tokens / seconds),
        "peak_memory_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if on_gpu else None,
        "best_step": report["step"],
        "curve": report["curve"],
        "data": report["data"],
    }


def train_with_specforge(
    params: Params, name: str, epochs: int, per_step: int, rate: float, backend: str, features: Path
) -> dict:
    """The same by SpecForge's own commands.

    Raises:
        DraftlineError: one of them failed; quotes its last lines.
    """
    states = HiddenStates(HIDDEN_STATES / "train")
    shape, work = TargetShape.of(load_config()), TRAINED / name
    sizes = DraftConfig.of(shape, states.contract, params.train_draft.draft_vocab_size)
    draft = export_config(sizes.to_dict(), states.contract, params.target.dtype)
    model = {"target_model_path": str(SPECFORGE_TARGET.absolute())}
    if shape.tie_word_embeddings:
        model["lm_head_key"] = "model.embed_tokens.weight"
    data = {"hidden_states_path": str(features.absolute()), "max_length": params.serve.context_length}
    training = {
        "batch_size": per_step,
        "num_epochs": epochs,
        "ttt_length": params.train_draft.ttt_length,
        "attention_backend": backend,
        "learning_rate": rate,
    }
    steps = len(states) // per_step * epochs
    every = min(50, max(1, steps // 3))
    shutil.rmtree(work, ignore_errors=True)
    began = time.perf_counter()
    found = train_specforge(work.absolute(), draft, model, data, training, discard=every, log_interval=every)
    seconds = time.perf_counter() - began
    if "failed" in found or found["exit_code"]:
        raise DraftlineError(f"SpecForge's training failed: {found}; see {work / 'log.txt'}.")
    export = EXPORTS / name
    what = ("--checkpoint", work / "output", "--draft-config", work / "draft.json", "--output-dir", export)
    command = [sys.executable, "-m", "specforge.cli", "export", "--to", "sglang", *map(str, what)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise DraftlineError(f"SpecForge's export failed: {(done.stdout + done.stderr)[-2000:]}")
    write_json(export / "draftline.json", {"contract": states.contract.model_dump()})  # whose states it was trained on
    step_tokens = int(states.tokens.sum()) * per_step / len(states)
    return {
        "trainer": "specforge",
        "learning_rate": rate,
        "epochs": epochs,
        "steps": steps,
        "sequences_per_step": per_step,
        "seconds": round(seconds, 1),
        "tokens_per_s": round(1e3 * step_tokens / found["ms_per_step"]),
        **found,
    }


def predicted(params: Params, name: str) -> dict[str, float]:
    """Predicted acceptance length of an exported draft over the held-out answers, for each chain that it was trained for."""
    heldout = HiddenStates(HIDDEN_STATES / "heldout")
    device, ttt_length = params.target.device, params.train_draft.ttt_length
    dtype, tokens = params.train_draft.computed_in(device), round_up(8 * int(heldout.tokens.max()), BLOCK)
    weights = TargetWeights(model_folder(params.target))
    files = DraftFiles.open(EXPORTS / name)
    draft, vocab_map = load_served_draft(Draft.of(files, heldout.contract.architecture), weights)
    head = TargetHead(weights, TargetShape.of(load_config()), heldout.contract.last_is_normed, device)
    argmax = cache_target_argmax(heldout, head, TRAINED / f"{name}-heldout_argmax.npy")
    draft.to(device)
    draft.embed_tokens = draft.embed_tokens.to(dtype)
    form = BatchForm.of(vocab_map, device, dtype, ttt_length, tokens)
    data = DraftData(heldout, argmax, tokens, form)
    restricted = RestrictedHead(head, vocab_map, dtype)
    lengths = measure(draft, restricted, vocab_map, data, ttt_length).predicted_accept_lengths
    return {f"{steps}/1/{steps + 1}": round(lengths[steps - 1], 3) for steps in CHAINS if steps <= ttt_length}
