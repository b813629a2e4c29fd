"""`params.yaml`, typed: a section a stage, unknown keys refused, exclusive options checked at load time."""

import re
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator, model_validator

from tasks.common.benchmark_names import RESERVED_NAMES
from tasks.common.errors import DraftlineError
from tasks.common.params_errors import described, kinds_of
from tasks.common.params_texts import PathText, require_fitting_words, require_possible_texts, require_programs

if TYPE_CHECKING:
    import torch

PARAMS = Path("params.yaml")
Engine = Literal["transformers", "sglang"]
Dtype = Literal["float32", "bfloat16", "float16"]
StorageDtype = Literal["float32", "bfloat16", "float16", "float8"]
Count = Annotated[int, Field(gt=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
_IN_QUOTES = re.compile(r"\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*")


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _truth_and_text_are_no_numbers(cls, value: Any, info: ValidationInfo) -> Any:
        """Pydantic takes true for the number 1, and text that looks like a number for that number."""
        values = value if isinstance(value, list) else [value]
        kinds = kinds_of(cls.model_fields[info.field_name].annotation)
        if any(isinstance(one, bool) for one in values) and bool not in kinds:
            raise ValueError("true and false are no numbers and no text")
        if quoted := [one for one in values if isinstance(one, str) and str not in kinds and _IN_QUOTES.fullmatch(one)]:
            raise ValueError(f"a number is expected, found the text {quoted[0]!r}; write it without quotes")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _the_system_takes_texts(cls, value: Any, info: ValidationInfo) -> Any:
        """Python raises a ValueError of its own where such a text becomes a path, an argument or a variable."""
        if str in kinds_of(cls.model_fields[info.field_name].annotation):
            require_possible_texts(value)
        return value


class Target(Section):
    """The model to be made faster."""

    model: PathText = Field("builtin", description="'builtin' (SmolLM2-135M-Instruct), a local folder, or a hub id")
    revision: str | None = Field(None, description="commit of a hub id; null takes the newest")
    dtype: Dtype = "float32"
    device: str = Field("cpu", pattern=r"^(cpu|cuda(:\d+)?)$")
    device_map: Literal["auto", "balanced", "balanced_low_0", "sequential"] | None = Field(
        None, description="transformers: spread a target that one GPU cannot hold over all that are visible"
    )
    trust_remote_code: bool = False


class ContractParams(Section):
    aux_layer_ids: tuple[int, ...] | None = Field(
        None, description="0-based OUTPUT layers; null: [1, N//2-1, N-4]", examples=["[1, 14, 26]"]
    )


class Prompts(Section):
    """Which conversations the target answers."""

    folder: PathText = Field(
        "tasks/collect_prompts/builtin", description="JSONL files in messages form (infra/docs/prompts.md)"
    )
    max_train: Count | None = Field(None, description="take this many, spread over domains; null: all")
    max_heldout: Count | None = None
    max_prompt_tokens: Count = Field(512, description="longer prompts are dropped and counted")


class Regenerate(Section):
    engine: Engine = "transformers"
    max_new_tokens: Count = 48
    temperature: Annotated[float, Field(ge=0)] = 0.0
    seed: int = Field(0, description="used when temperature > 0")
    batch_size: Count = Field(32, description="prompts generated together (transformers) or in flight (sglang)")


class Dump(Section):
    engine: Engine = Field("transformers", description="sglang: the kernels and the quantisation that will serve")
    storage_dtype: StorageDtype = Field("float32", description="float8: e4m3 with a scale per token and slot")
    batch_tokens: Count = Field(4096, description="tokens, padding included, of one forward pass (transformers)")
    shard_tokens: Count = Field(16384, description="tokens at which a shard is closed")
    ahead_shards: Count | None = Field(
        None, description="online: shards of train that may wait for who consumes and frees them; null: all stay"
    )
    max_gigabytes: Annotated[float, Field(gt=0)] | None = Field(None, description="quota of the states; null: the disk")


class TrainDraft(Section):
    draft_vocab_size: Count = 4096
    ttt_length: Count = Field(3, description="test-time-training steps K; at least serve.num_steps")
    init_from_target: bool = Field(
        True, description="start from the target's weights and an induction head fitted to its states"
    )
    learning_rate: Annotated[float, Field(gt=0)] = 1e-3
    warmup_steps: Annotated[int, Field(ge=0)] = 20
    max_steps: Count = 200
    batch_tokens: Count = Field(1024, description="tokens of one packed batch, which a GPU computes at once")
    global_batch_size: Count = Field(
        1, description="packed batches of an optimiser step, shared by all processes; what is more is accumulated"
    )
    parallel: Literal["ddp", "fsdp"] = Field("ddp", description="several processes: fsdp shards weights and optimiser")
    data_workers: Annotated[int, Field(ge=0)] = Field(
        0, description="processes that read ahead; 0 reads in the trainer"
    )
    dtype: Literal["float32", "bfloat16"] | None = Field(
        None,
        description="that training computes in; parameters stay float32; null: bfloat16 on a GPU, float32 on a CPU",
    )
    recompute_activations: bool = Field(
        False, description="activation checkpointing: less memory, a third more arithmetic in the layer"
    )
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    weight_decay: Annotated[float, Field(ge=0)] = 0.0
    checkpoint_every: Count = 50
    evaluate_every: Count = Field(
        100, description="steps between held-out evaluations; the best AL predicted for ttt_length steps is kept"
    )
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0

    @model_validator(mode="after")
    def _warmup_ends(self) -> "TrainDraft":
        if self.warmup_steps > self.max_steps:
            raise ValueError(
                f"warmup_steps is {self.warmup_steps}, max_steps {self.max_steps}: the learning rate would never be reached"
            )
        return self

    def computed_in(self, device: str) -> "torch.dtype":
        """The type that training computes in on `device`."""
        import torch

        return getattr(torch, self.dtype or ("bfloat16" if device.startswith("cuda") else "float32"))


def tree_tokens(num_steps: int, topk: int) -> int:
    """Tokens of the tree that a round can verify: the last one, top-k behind it, and top-k squared a further step."""
    return 1 + topk + (num_steps - 1) * topk**2


def reserved_tokens(num_steps: int, topk: int, num_draft_tokens: int) -> int:
    """Tokens of a round that SGLang keeps room for behind those of a request (its `compute_num_reserved_tokens`)."""
    return max(topk * num_steps, num_draft_tokens)


class Serve(Section):
    speculative_algorithm: str = "EAGLE3"
    num_steps: Count = 3
    eagle_topk: Count = 1
    num_draft_tokens: Count = 4
    port: Annotated[int, Field(ge=1024, le=65534)] = 30000
    context_length: Count = 2048
    max_running_requests: Count = 8
    max_total_tokens: Count | None = Field(20000, description="KV cache tokens; null lets SGLang choose")
    mem_fraction_static: Fraction = 0.3
    startup_timeout_s: Count = 600
    extra_args: tuple[str, ...] = Field(
        (), description="more SGLang flags, given to both servers", examples=["[--tp-size, '2']"]
    )
    environment: dict[Annotated[str, Field(pattern=r"^[A-Za-z_]\w*$")], str] = Field(
        {},
        description="environment variables given to both servers, such as NCCL_ALGO; numbers in quotes",
        examples=["{NCCL_ALGO: Ring}"],
    )

    @property
    def reserved_tokens(self) -> int:
        """Tokens of a round that SGLang keeps room for behind those of a request."""
        return reserved_tokens(self.num_steps, self.eagle_topk, self.num_draft_tokens)

    @field_validator("extra_args", "environment")
    @classmethod
    def _a_process_takes_them(cls, given: tuple[str, ...] | dict[str, str]) -> tuple[str, ...] | dict[str, str]:
        words = [f"{name}={value}" for name, value in given.items()] if isinstance(given, dict) else given
        require_fitting_words(words)
        return given

    @field_validator("environment")
    @classmethod
    def _programs_are_found(cls, given: dict[str, str]) -> dict[str, str]:
        if "PATH" in given:
            require_programs(given["PATH"])
        return given

    @model_validator(mode="after")
    def _chain_is_consistent(self) -> "Serve":
        if self.eagle_topk == 1 and self.num_draft_tokens != self.num_steps + 1:
            raise ValueError(
                f"num_draft_tokens is {self.num_draft_tokens}, but with eagle_topk 1 a round verifies num_steps + 1 = "
                f"{self.num_steps + 1} tokens (SGLang forces it); set num_draft_tokens: {self.num_steps + 1}"
            )
        tree = tree_tokens(self.num_steps, self.eagle_topk)
        if self.num_draft_tokens > tree:
            raise ValueError(
                f"num_draft_tokens is {self.num_draft_tokens}, but {self.num_steps} steps with top-k {self.eagle_topk} "
                f"make at most {tree}"
            )
        return self


class Benchmark(Section):
    """What is asked of the plain server and of the ones with a draft, in turn."""

    sets: dict[str, PathText] = Field(
        {},
        description="name: JSONL file of questions (messages, EAGLE, Spec-Bench); none: the held-out prompts",
        examples=["{mine: path/to/questions.jsonl}"],
    )
    num_prompts: Annotated[int, Field(gt=0, le=100_000)] = Field(
        16, description="prompts of a set, spread over domains; each is asked of each server `repeats` times"
    )
    max_new_tokens: Annotated[int, Field(ge=2)] = Field(
        48, description="of an answer; its first token comes with the prompt, so that an answer of one sees no draft"
    )
    concurrency: tuple[Annotated[int, Field(gt=0, le=1024)], ...] = Field(
        (1,),
        min_length=1,
        description="requests at once, each of a thread of its own; of more this client would be what is measured",
        examples=["[1, 4]"],
    )
    temperatures: tuple[Annotated[float, Field(ge=0)], ...] = Field(
        (0.0,),
        min_length=1,
        description="above 0 is measured at the lowest concurrency alone",
        examples=["[0.0, 1.0]"],
    )
    repeats: Annotated[int, Field(ge=3, le=1000)] = Field(
        3,
        description="passes over a set, by each server in turn; three are the fewest that give a spread, and no spread needs more "
        "than a thousand",
    )
    warmup_prompts: Annotated[int, Field(gt=0, le=100)] = Field(
        2, description="asked of each server before, for each request at once; what is warm stays so"
    )
    drafts: dict[str, PathText] = Field(
        {},
        description="name: folder or hub id of a draft to be measured beside ours",
        examples=["{theirs: path/to/draft}"],
    )

    @field_validator("sets", "drafts")
    @classmethod
    def _names_are_plain(cls, named: dict[str, str]) -> dict[str, str]:
        """They become columns, file names and MLflow metrics."""
        for name in named:
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9_.-]*", name) or name in RESERVED_NAMES:
                raise ValueError(
                    f"{name!r} is no name for this: letters, digits, '_', '-' and '.', and none of {', '.join(RESERVED_NAMES)}"
                )
        return named

    @field_validator("temperatures")
    @classmethod
    def _greedy_is_among_them(cls, values: tuple[float, ...]) -> tuple[float, ...]:
        if 0 not in values:
            raise ValueError(f"{list(values)}: 0 must be among them; losslessness and the prediction are greedy")
        return values

    @field_validator("concurrency", "temperatures")
    @classmethod
    def _ascending(cls, values: tuple[float, ...]) -> tuple[float, ...]:
        if list(values) != sorted(set(values)):
            raise ValueError(f"{list(values)}: each value once, in ascending order")
        return values


class Gates(Section):
    """Limits of the gates; a breach fails the stage and names the samples."""

    min_prompts: Count = 16
    max_dropped_share: Fraction = 0.1
    max_truncated_share: Fraction = Field(1.0, description="answers cut at max_new_tokens; 1.0 allows all")
    max_failed_share: Fraction = 0.02
    min_mask_density: Fraction = Field(0.02, description="share of assistant tokens in a sample")
    replay_samples: Annotated[int, Field(ge=0)] = Field(2, description="samples replayed through the target; 0 skips")
    max_replay_error: Annotated[float, Field(gt=0)] | None = Field(
        None, description="relative L2 error of a replayed state; null: by computed and stored type (common/parity.py)"
    )
    max_relative_error: Annotated[float, Field(gt=0)] | None = Field(
        None, description="the same of what the server feeds the draft, per aux slot, against the dump"
    )
    min_predicted_accept_length: Annotated[float, Field(ge=1)] = Field(1.5, description="with serve.num_steps")
    min_accept_length: Annotated[float, Field(ge=1)] = 1.5
    max_accept_length_drop: Fraction = Field(
        0.05, description="share of the committed benchmark's acceptance length by which it may fall"
    )


class Tracking(Section):
    uri: str = Field("sqlite:///mlflow.db", description="MLflow tracking URI")
    experiment: str = "draftline"


class Params(Section):
    target: Target = Target()
    contract: ContractParams = ContractParams()
    prompts: Prompts = Prompts()
    regenerate: Regenerate = Regenerate()
    dump: Dump = Dump()
    train_draft: TrainDraft = TrainDraft()
    serve: Serve = Serve()
    benchmark: Benchmark = Benchmark()
    gates: Gates = Gates()
    tracking: Tracking = Tracking()

    @property
    def ports(self) -> range:
        """Of the benchmark's servers: with our draft, without a draft, and with each of `benchmark.drafts`."""
        return range(self.serve.port, self.serve.port + 2 + len(self.benchmark.drafts))

    @model_validator(mode="after")
    def _sections_agree(self) -> "Params":
        if self.train_draft.ttt_length < self.serve.num_steps:
            raise ValueError(
                f"train_draft.ttt_length is {self.train_draft.ttt_length}, but serve.num_steps drafts "
                f"{self.serve.num_steps} tokens: the draft would be served beyond the steps it was trained on. Set "
                f"serve.num_steps to {self.train_draft.ttt_length} at most, or ttt_length to {self.serve.num_steps} and train again"
            )
        if self.ports[-1] > 65535:
            raise ValueError(
                f"serve.port: the servers of the benchmark take the ports up to {self.ports[-1]}; lower it"
            )
        most = max(self.benchmark.concurrency)
        if most > self.serve.max_running_requests:
            raise ValueError(
                f"benchmark.concurrency goes up to {most}, but serve.max_running_requests is "
                f"{self.serve.max_running_requests}: the rest would wait in a queue; raise it to {most}"
            )
        return self


def load_params(path: Path = PARAMS) -> Params:
    """Read and check params.yaml.

    Raises:
        DraftlineError: the file is absent, cannot be read, is not YAML, has an unknown key, a wrong type, or options that
            exclude each other; one line for each, naming the field.
    """
    try:
        raw = yaml.load(path.read_text(encoding="utf-8"), _PlainValues)
    except FileNotFoundError:
        raise DraftlineError(f"{path}: not there. Run from the repository's root, which holds it.") from None
    except OSError as error:
        raise DraftlineError(f"{path}: cannot be read: {error.strerror}.") from None
    except UnicodeDecodeError as error:
        raise DraftlineError(f"{path}: not UTF-8 ({error}). Save it as UTF-8.") from None
    except yaml.YAMLError as error:
        raise DraftlineError(f"{path}: not valid YAML: {error}") from None
    except RecursionError:
        raise DraftlineError(f"{path}: not valid YAML: hundreds of brackets within each other.") from None
    try:
        return Params.model_validate({} if raw is None else raw)
    except ValidationError as error:
        raise DraftlineError("\n".join(f"{path}: {problem}" for problem in described(error, Params))) from None


class _PlainValues(yaml.SafeLoader):
    """Refuses with line and column what YAML would take in silence or drop with an error of Python's own."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict:
        """Of a key that stands twice YAML would take the last; a list or a mapping as a key is a template, `{{ x }}`."""
        seen = set()
        for name, _ in node.value:
            if not isinstance(name, yaml.ScalarNode):
                raise self._error(
                    "a name is expected, found a list or a mapping; put text with brackets in quotes", name
                )
            if name.value in seen:
                raise self._error(f"{name.value} stands twice", name)
            seen.add(name.value)
        return super().construct_mapping(node, deep)

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        """What looks like a date or a number and is none, 2024-02-31, raises a ValueError without a place."""
        try:
            return super().construct_object(node, deep)
        except (ValueError, LookupError, AttributeError):
            if not isinstance(node, yaml.ScalarNode):
                raise
            kind = node.tag.rpartition(":")[2]
            raise self._error(f"{node.value[:40]} is no {kind}; put it in quotes if it is text", node) from None

    @staticmethod
    def _error(problem: str, node: yaml.Node) -> yaml.YAMLError:
        return yaml.constructor.ConstructorError(None, None, problem, node.start_mark)


# YAML 1.1 takes 1e-3 for text; YAML 1.2, which DVC reads, for a number.
_PlainValues.add_implicit_resolver(
    "tag:yaml.org,2002:float", re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
)
