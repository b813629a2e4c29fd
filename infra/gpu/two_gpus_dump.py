"""Hidden states dumped with SGLang by one GPU, by two that share the target, and by two that each have it whole.

    torchrun --nproc-per-node 2 -m infra.gpu.two_gpus_dump     # one of the dumps: `tasks.dump_hidden_states`, with notes

The same answers each time: text, whose states are compared, and random tokens. Held-out answers come first and warm up.
"""

import os
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any

import numpy as np

from infra.gpu.places import PORT_STEP
from infra.gpu.two_gpus_runs import Found, module_command, run
from infra.gpu.two_gpus_settings import (
    GPUS,
    Settings,
    Sizes,
    over_both,
    prepare_padded_target,
    text_sequences,
    write_params,
)
from tasks.common.contract import Contract
from tasks.common.errors import DraftlineError
from tasks.common.files import ARTIFACTS, read_json, write_json, write_jsonl
from tasks.common.hidden_states import HIDDEN_STATES, HiddenStates
from tasks.common.params import Params, load_params
from tasks.common.responses import RESPONSES, Response
from tasks.common.shard_layout import ShardPlan
from tasks.common.target import TARGET, load_tokenizer, target_contract
from tasks.dump_hidden_states import dump as product
from tasks.dump_hidden_states.engines import Compute, open_engine

ONE = "one GPU"


@dataclass(frozen=True)
class Dump:
    """One dump.

    Attributes:
        is_shared: whether two GPUs share each layer.
        processes: ranks under torchrun, each with a server of its own.
        limit_s: one that hangs leaves those behind it their turn.
    """

    name: str
    limit_s: float
    is_shared: bool = False
    processes: int = 1

    @property
    def folder(self) -> Path:
        return Path(self.name.replace(" ", "_")).absolute()


ALONE = Dump(ONE, 270)
DUMPS = (
    ALONE,
    Dump("tensor parallel 2", 330, is_shared=True),
    Dump("2 replicas", 390, processes=GPUS),
)
_NOTES = "shards-of-rank-{}.json"
_TURN = "turn"
# Of the longest samples, so many find room in the cache of a server.
_REQUESTS = 256


def measure(settings: Settings, found: Found) -> None:
    """Each dump, in a folder of its own, and its states against the first one's."""
    padded = prepare_padded_target(settings)
    contract = target_contract(settings.params(padded).contract)
    _write_answers(settings.sizes, contract)
    folders = [_prepare(number, one, settings, padded) for number, one in enumerate(DUMPS)]
    # Their servers start beside each other, each start takes a minute or two; what is timed is done one after the other.
    with ThreadPoolExecutor(len(DUMPS)) as pool:
        running = [
            pool.submit(
                run,
                module_command("infra.gpu.two_gpus_dump", processes=one.processes),
                folder,
                folder / "dump.log",
                min(found.seconds_left, one.limit_s * settings.sizes.patience),
            )
            for one, folder in zip(DUMPS, folders, strict=True)
        ]
        for one, folder, ended in zip(DUMPS, folders, running, strict=True):
            (folder / _TURN).touch()
            found.attempt(one.name, lambda one=one, ended=ended: ended.result() or _figures(one, settings.sizes))


def _prepare(number: int, one: Dump, settings: Settings, padded: Path) -> Path:
    """A folder in which a dump finds its parameters, the target and the answers."""
    sizes, folder = settings.sizes, one.folder
    (folder / ARTIFACTS).mkdir(parents=True)
    for shared in (TARGET, RESPONSES):
        (folder / shared).symlink_to(shared.absolute())
    params = settings.params(
        padded,
        dump={"engine": "sglang", "storage_dtype": sizes.dtype, "shard_tokens": sizes.shard_tokens},
        serve={
            "port": settings.port + number * PORT_STEP,
            "context_length": sizes.longest + 8,
            "max_total_tokens": _REQUESTS * sizes.longest,
            # Of the whole GPU, although several share it: max_total_tokens bounds what each takes.
            "mem_fraction_static": 0.5,
        },
    )
    write_params(over_both(params) if one.is_shared else params, folder / "params.yaml")
    return folder


def _figures(one: Dump, sizes: Sizes) -> dict[str, Any]:
    by_rank = [read_json(one.folder / _NOTES.format(rank)) for rank in range(one.processes)]
    states = HiddenStates(one.folder / HIDDEN_STATES / "train")
    figures = rates(by_rank) | shares(by_rank, states)
    if one is not ALONE:
        figures["against one GPU"] = _against_one(states, sizes.texts)
    return figures


def rates(by_rank: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """Tokens/s over the training split, of all ranks from the first's start to the last's end, and of each."""

    def rate(shards: list[dict[str, Any]]) -> int:
        began, ended = min(shard["began"] for shard in shards), max(shard["landed"] for shard in shards)
        return round(sum(shard["tokens"] for shard in shards) / (ended - began))

    of_rank = [[shard for shard in notes if shard["split"] == "train"] for notes in by_rank]
    return {"tokens_per_s": rate([*chain(*of_rank)]), "tokens_per_s_of_each": [rate(shards) for shards in of_rank]}


def shares(by_rank: list[list[dict[str, Any]]], states: HiddenStates) -> dict[str, Any]:
    """How many shards each rank wrote.

    Raises:
        DraftlineError: a shard was written twice, or is none of the split.
    """
    written = [shard["name"] for notes in by_rank for shard in notes if shard["split"] == "train"]
    listed = [shard["name"] for shard in states.shards]
    if sorted(written) != sorted(listed):
        raise DraftlineError(f"{states.folder}: ranks wrote shards {sorted(written)}, the split has {sorted(listed)}.")
    by_split = [sum(shard["split"] == "train" for shard in notes) for notes in by_rank]
    return {"shards_of_each": by_split, "samples": len(states), "tokens": int(states.tokens.sum())}


def _against_one(states: HiddenStates, texts: int) -> dict[str, Any]:
    from infra.gpu.states_compared import compare

    one = HiddenStates(ALONE.folder / HIDDEN_STATES / "train")
    of_texts = [[(sample.aux, sample.last) for sample in map(side.read, range(texts))] for side in (states, one)]
    return compare(*of_texts, one.contract)


def _write_answers(sizes: Sizes, contract: Contract) -> None:
    """Text of many lengths, then random tokens, as the answers of a target that says all of it itself."""
    generator = np.random.default_rng(0)
    lengths = np.linspace(max(2, sizes.longest // 16), sizes.longest, sizes.texts).astype(int).tolist()
    texts = list(islice(text_sequences(load_tokenizer(), sizes.longest), sizes.texts))
    train = [ids[:length] for ids, length in zip(texts, lengths, strict=True)]
    for split, first, tokens in (("heldout", [], sizes.warm_up_tokens), ("train", train, sizes.dump_tokens)):
        sequences = first + list(_random(generator, tokens - sum(map(len, first)), sizes.longest, contract.vocab_size))
        rows = (Response(f"{split}-{n}", "", [], [], ids, "", "stop") for n, ids in enumerate(sequences))
        write_jsonl(RESPONSES / f"{split}.jsonl", (row.to_row() for row in rows))


def _random(generator: np.random.Generator, tokens: int, longest: int, vocab_size: int) -> Iterator[list[int]]:
    while tokens > 0:
        length = min(tokens, int(generator.integers(max(1, longest // 8), longest)))
        tokens -= length
        yield generator.integers(3, vocab_size, length).tolist()


def main() -> None:
    """This rank's share of the dump, with the time at which each of its shards was begun and there."""
    rank, ranks = (int(os.environ.get(name, alone)) for name, alone in (("RANK", 0), ("WORLD_SIZE", 1)))
    notes: list[dict[str, Any]] = []

    @contextmanager
    def noted_engine(params: Params, contract: Contract, longest: tuple[int, str]) -> Iterator[Compute]:
        with open_engine(params, contract, longest) as compute:

            def noted(folder: Path, shards: Iterable[ShardPlan | None]) -> Iterator[ShardPlan]:
                if folder.name == "train":
                    _meet(rank, ranks)
                began = time.time()
                for shard in compute(folder, shards):
                    landed = {"tokens": shard.tokens, "began": began, "landed": time.time()}
                    notes.append({"split": folder.name, "name": shard.name, **landed})
                    yield shard

            yield noted

    product.open_engine = noted_engine
    product.dump(load_params())
    write_json(Path(_NOTES.format(rank)), notes)


def _meet(rank: int, ranks: int) -> None:
    """It is this dump's turn, and all its servers are up and warm; whoever started all this ends it if one does not come."""
    Path(f"ready-{rank}").touch()
    while len(list(Path().glob("ready-*"))) < ranks or not Path(_TURN).exists():
        time.sleep(0.01)


if __name__ == "__main__":
    main()
