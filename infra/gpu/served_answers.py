"""The target's own answers and their states, once as Draftline stores them and once as SpecForge 0.2.0 does."""

import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from infra.gpu.training_sizes import specforge_feature
from tasks.collect_prompts.collect import collect_prompts
from tasks.common.errors import DraftlineError
from tasks.common.files import write_json
from tasks.common.hidden_states import HIDDEN_STATES, HiddenStates
from tasks.common.params import Params
from tasks.common.progress import progress
from tasks.common.storage import bytes_per_token
from tasks.common.target import TARGET, load_tokenizer, model_folder
from tasks.dump_hidden_states.dump import dump
from tasks.prepare_target.prepare import prepare_target
from tasks.regenerate_responses.regenerate import regenerate

ANSWERS, FEATURES = Path("answers.json"), Path("features.json")
SPECFORGE_TARGET = Path("specforge_target")
WANTED_TOKENS = 3_000_000
_WRITERS = 8


def make_answers(params: Params) -> dict[str, Any]:
    """Answers and states; what an earlier call has made is taken over."""
    found: dict[str, Any] = {"seconds": {}}

    def timed(name: str, work) -> Any:
        began = time.perf_counter()
        result = work()
        found["seconds"][name] = round(time.perf_counter() - began, 1)
        write_json(ANSWERS, found)
        print(f"{name}: {found['seconds'][name]} s", flush=True)
        return result

    timed("prepare_target", lambda: prepare_target(params.target, TARGET))
    prompts = timed("collect_prompts", lambda: collect_prompts(params.prompts, load_tokenizer()))
    found["prompts"] = {split: part["domains"] for split, part in prompts.items()}
    found["answers"] = timed("regenerate", lambda: regenerate(params)["splits"])
    written = found["answers"]["train"]["output_tokens"]
    found["reached_3m"] = written >= WANTED_TOKENS
    print(
        f"{written:,} answer tokens in train: "
        f"{'at least' if found['reached_3m'] else 'FEWER THAN'} {WANTED_TOKENS:,}; {found['answers']}",
        flush=True,
    )
    found["states"] = timed("dump", lambda: dump(params))
    write_json(ANSWERS, found)
    return found


def make_features(params: Params, folder: Path) -> None:
    """SpecForge's form of the states and of the target, a file a sample in `folder`."""
    began = time.perf_counter()
    write_features(HiddenStates(HIDDEN_STATES / "train"), folder)
    link_target(model_folder(params.target), SPECFORGE_TARGET)
    write_json(FEATURES, {"folder": str(folder), "seconds": round(time.perf_counter() - began, 1)})


def write_features(states: HiddenStates, folder: Path) -> None:
    """Every sample in a file of torch.save, whole or not at all.

    Raises:
        DraftlineError: the disk has no room for them.
    """
    if folder.exists():
        return
    state_bytes = bytes_per_token(len(states.contract.aux_layer_ids), states.contract.hidden_size, "bfloat16")
    needed = int(states.tokens.sum()) * (state_bytes + 16)  # ids and mask of 8 bytes each
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    if (free := shutil.disk_usage(folder.parent).free) < needed:
        raise DraftlineError(
            f"{folder}: SpecForge's features need {needed / 1e9:.1f} GB, {free / 1e9:.1f} GB are free there. Name a folder on "
            f"another disk with --folder; answers and states are kept."
        )
    rows = partial / f"rows_0-{len(states)}"
    rows.mkdir(parents=True)

    def write(number: int) -> None:
        torch.save(specforge_feature(states.read(number)), rows / f"data_{number}.ckpt")

    with ThreadPoolExecutor(_WRITERS) as pool, progress(total=len(states), desc="features", unit="file") as bar:
        for _ in pool.map(write, range(len(states))):
            bar.update()
    partial.rename(folder)


def link_target(target: Path, folder: Path) -> None:
    """The target with an index of its tensors, without which SpecForge reads none."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    for path in target.iterdir():
        (folder / path.name).symlink_to(path.absolute())
    if not (index := folder / "model.safetensors.index.json").exists():
        with safe_open(target / "model.safetensors", framework="pt") as file:
            write_json(index, {"metadata": {}, "weight_map": dict.fromkeys(file.keys(), "model.safetensors")})
