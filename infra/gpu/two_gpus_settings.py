"""What is measured on two GPUs, and how much of it: full sizes for GPUs, and small ones to rehearse on a CPU."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import yaml

from infra.gpu.padded_heads import pad_target
from infra.gpu.places import ROOT
from tasks.common.files import read_json, write_atomically, write_json
from tasks.common.params import PARAMS, Params
from tasks.common.target import TARGET
from tasks.prepare_target.prepare import prepare_target

GPUS = 2
# Text that every checkout has; the target's states over it are what is compared and trained on.
_TEXTS = ("infra/**/*.md", "tasks/**/*.py", "infra/**/*.py", "tests/**/*.py")


@dataclass(frozen=True)
class Sizes:
    """How much is computed.

    Attributes:
        dump_tokens: of the dump whose time is taken; `warm_up_tokens` come before it.
        longest: tokens of the longest sample of the dump.
        texts: samples of text, whose states are compared; the others are random tokens.
        sequence: tokens of a sample that is trained on; `sequences` of them at most.
        saved_at: step at which the run over two processes stops, and from which one process goes on.
        discard: steps at the start that do not count for speed.
        questions: asked at concurrency 1, at least, in each repeat.
        many: requests at once, where it is not one.
        ways: of serving, at most: one GPU, two, and two with options of the all-reduce.
        patience: times the limits in seconds, which are those of GPUs.
    """

    dtype: str
    dump_tokens: int
    warm_up_tokens: int
    longest: int
    shard_tokens: int
    texts: int
    sequence: int
    sequences: int
    batch_tokens: int
    ttt_length: int
    steps: int
    saved_at: int
    discard: int
    context_length: int
    answer_tokens: int
    questions: int
    many: int
    repeats: int
    ways: int
    patience: float = 1.0


SIZES = {
    "cuda": Sizes(
        dtype="bfloat16",
        dump_tokens=2_097_152,
        warm_up_tokens=524_288,
        longest=1024,
        shard_tokens=65_536,
        texts=32,
        sequence=2048,
        sequences=320,
        # So large that a GPU and not the launching of kernels sets the pace, which is replayed by one process alone.
        batch_tokens=65_536,
        ttt_length=7,
        steps=120,
        saved_at=90,
        discard=20,
        context_length=1024,
        answer_tokens=128,
        questions=8,
        many=32,
        repeats=3,
        ways=10,
    ),
    "cpu": Sizes(
        dtype="float32",
        dump_tokens=1024,
        warm_up_tokens=256,
        longest=48,
        shard_tokens=96,
        texts=4,
        sequence=64,
        sequences=16,
        batch_tokens=128,
        ttt_length=3,
        steps=12,
        saved_at=8,
        discard=2,
        context_length=256,
        answer_tokens=8,
        questions=4,
        many=4,
        repeats=2,
        ways=4,
        patience=3.0,
    ),
}


@dataclass(frozen=True)
class Settings:
    """What the command was given; a part reads it from a file."""

    target: str
    draft: str
    device: str
    extra_args: tuple[str, ...]
    port: int

    @classmethod
    def read(cls, path: Path) -> "Settings":
        row = read_json(path)
        return cls(**row | {"extra_args": tuple(row["extra_args"])})

    def write(self, path: Path) -> None:
        write_json(path, asdict(self))

    @property
    def sizes(self) -> Sizes:
        return SIZES[self.device]

    def params(self, target: str | Path, **sections: dict[str, Any]) -> Params:
        """Parameters over the target in that folder, with these values of sections."""
        on_gpu = self.device == "cuda"
        serve = {
            "port": self.port,
            "max_total_tokens": None if on_gpu else 4096,
            "mem_fraction_static": 0.3,
            "extra_args": list(self.extra_args),
        }
        return Params.model_validate(
            {
                "target": {"model": str(target), "device": self.device, "dtype": self.sizes.dtype},
                **sections,
                "serve": serve | sections.get("serve", {}),
            }
        )


def over_both(params: Params) -> Params:
    """The same, served by two GPUs that share each layer."""
    changed: dict[str, Any] = {"extra_args": (*params.serve.extra_args, "--tp-size", str(GPUS))}
    if params.target.device == "cpu":
        # Else SGLang wants a NUMA node for each.
        changed["environment"] = params.serve.environment | {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    return params.model_copy(update={"serve": params.serve.model_copy(update=changed)})


def write_params(params: Params, path: Path = PARAMS) -> None:
    write_atomically(path, yaml.safe_dump(params.model_dump(mode="json")).encode())


def prepare_padded_target(settings: Settings) -> Path:
    """The target with heads that two GPUs can share, prepared in artifacts/target of the current folder; where it lies."""
    padded = Path("padded_target").absolute()
    pad_target(Path(settings.target), padded, GPUS)
    prepare_target(settings.params(padded).target, TARGET)
    return padded


def text_sequences(tokenizer, length: int) -> Iterator[list[int]]:
    """This checkout's own text and code, cut into sequences of so many tokens, in the same order each time."""
    rest: list[int] = []
    for path in (path for pattern in _TEXTS for path in sorted(ROOT.glob(pattern))):
        rest += tokenizer.encode(path.read_text(encoding="utf-8"), add_special_tokens=False)
        while len(rest) >= length:
            yield rest[:length]
            rest = rest[length:]
