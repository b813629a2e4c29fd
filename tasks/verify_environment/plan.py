"""What the run will cost: tokens, time, disk and GPU hours of each stage, before anything is spent.

Time is FLOPs / (utilisation x measured matmul FLOP/s), plus what does not depend on FLOPs. It may be off by a
factor of two on a CPU and three on GPUs; tokens and disk are upper bounds (every answer as long as it may become).
Formulas: infra/docs/environment.md.
"""

import math
from dataclasses import dataclass

from tasks.common.contract import default_aux_layers
from tasks.common.params import Params
from tasks.common.server_plan import spanned_gpus
from tasks.common.storage import bytes_per_token
from tasks.common.target import TargetShape
from tasks.common.traffic import asked_at, requests_of
from tasks.verify_environment.facts import Compute, TargetFacts
from tasks.verify_environment.pace import (
    CPU,
    CUDA,
    DEQUANTISED_BYTES_PER_S,
    DISK_BYTES_PER_S,
    NETWORK_BYTES_PER_S,
    SGLANG_DUMP,
    START_S,
    Decoding,
)
from tasks.verify_environment.prompt_sources import PromptSource, prompts_and_tokens

_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Estimate:
    """One stage.

    Attributes:
        tokens: that the stage reads or writes.
        disk_bytes: that stay under artifacts/, one copy.
        gpus: held while the stage runs.
        basis: where the time comes from.
    """

    stage: str
    tokens: int
    seconds: float
    disk_bytes: int
    gpus: int
    basis: str

    @property
    def gpu_hours(self) -> float:
        return self.seconds / 3600 * self.gpus


@dataclass(frozen=True)
class Workload:
    """Counts of one run over both splits, each answer as long as it may become."""

    prompts: int
    prompt_tokens: int
    answer_tokens: int
    train_tokens: int

    @property
    def tokens(self) -> int:
        return self.prompt_tokens + self.answer_tokens

    @classmethod
    def of(cls, params: Params, sources: list[PromptSource]) -> "Workload":
        train, train_tokens = prompts_and_tokens(sources, "train", params.prompts.max_train)
        heldout, heldout_tokens = prompts_and_tokens(sources, "heldout", params.prompts.max_heldout)
        answer = params.regenerate.max_new_tokens
        return cls(
            prompts=train + heldout,
            prompt_tokens=train_tokens + heldout_tokens,
            answer_tokens=(train + heldout) * answer,
            train_tokens=train_tokens + train * answer,
        )


def server_gpus(params: Params) -> int:
    """GPUs that one server holds."""
    return 0 if params.target.device == "cpu" else spanned_gpus(params.serve.extra_args)


def estimate(params: Params, load: Workload, target: TargetFacts, speed: Compute) -> list[Estimate]:
    """Cost of each stage, in the order in which they run."""
    costs = _Costs(params, load, target, speed)
    return [
        costs.prepare_target(),
        Estimate("collect_prompts", load.prompt_tokens, START_S, 4 * load.prompt_tokens, 0, "imports"),
        costs.regenerate_responses(),
        costs.dump_hidden_states(),
        costs.train_draft(),
        costs.export_draft(),
        costs.launch_server(),
        costs.benchmark(),
        costs.gates(),
    ]


@dataclass(frozen=True)
class _Costs:
    params: Params
    load: Workload
    target: TargetFacts
    speed: Compute

    @property
    def on_cpu(self) -> bool:
        return self.params.target.device == "cpu"

    @property
    def pace(self):
        return CPU if self.on_cpu else CUDA

    @property
    def shape(self) -> TargetShape:
        return self.target.shape

    def prepare_target(self) -> Estimate:
        size = self.target.weight_bytes
        if self.params.target.model == "builtin":
            seconds = START_S + size / DEQUANTISED_BYTES_PER_S
            return Estimate("prepare_target", 0, seconds, size, 0, "weights dequantised at 20 MB/s")
        seconds = START_S + size / NETWORK_BYTES_PER_S
        return Estimate("prepare_target", 0, seconds, 0, 0, "weights fetched or hashed at 100 MB/s")

    def regenerate_responses(self) -> Estimate:
        settings, load = self.params.regenerate, self.load
        served = settings.engine == "sglang"
        gpus = server_gpus(self.params) if served else int(not self.on_cpu)
        batch = min(settings.batch_size, self.params.serve.max_running_requests) if served else settings.batch_size
        step = self._step_s(self.pace.sglang if served else self.pace.transformers, batch, gpus)
        steps = math.ceil(load.prompts / batch) * settings.max_new_tokens
        prefill = self._prefill_s(load.prompt_tokens, gpus)
        seconds = START_S + served * self._server_start_s() + steps * step + prefill
        basis = f"{steps:,} decode steps of {batch} in {step * 1e3:.3g} ms, prefill {prefill:.0f} s"
        # Ids and text of an answer, as JSON: about 10 bytes a token.
        return Estimate("regenerate_responses", load.tokens, seconds, 10 * load.tokens, gpus, basis)

    def dump_hidden_states(self) -> Estimate:
        served = self.params.dump.engine == "sglang"
        gpus = server_gpus(self.params) if served else int(not self.on_cpu)
        forward, writing = self._prefill_s(self.load.tokens, gpus), self._state_bytes() / DISK_BYTES_PER_S
        if served:  # its threads write while it computes
            forward /= SGLANG_DUMP
            seconds = START_S + self._server_start_s() + max(forward, writing)
        else:
            seconds = START_S + forward + writing
        basis = f"{self.params.dump.engine}: prefill {forward:.0f} s; {self._state_bytes_per_token():,} bytes a token at 300 MB/s"
        size = self._tokens_at_once() * self._state_bytes_per_token()
        return Estimate("dump_hidden_states", self.load.tokens, seconds, size, gpus, basis)

    def train_draft(self) -> Estimate:
        settings, hidden = self.params.train_draft, self.shape.hidden_size
        fc, each_step = self._draft_parameters()
        # Forward and backward: 6 FLOPs a parameter, chain steps only at what the assistant wrote. The target's frozen
        # head: 2, over the draft vocabulary at each step and, once, over the whole vocabulary.
        supervised = self.load.answer_tokens / max(self.load.tokens, 1)
        chain = 6 * settings.ttt_length * each_step + 2 * hidden * settings.draft_vocab_size
        per_token = 6 * fc + supervised * chain
        step_tokens = settings.batch_tokens * settings.global_batch_size
        tokens = settings.max_steps * step_tokens
        flops = per_token * tokens + 2 * hidden * self.shape.vocab_size * self.load.answer_tokens
        seconds = START_S + flops / (self.pace.training * self.speed.matmul_flops)
        # Two checkpoints and one that is written, each of float32 weights and Adam's two moments; two drafts that were best.
        size = (fc + each_step) * 4 * (3 * 3 + 2)
        basis = f"{settings.max_steps} steps of {step_tokens} tokens, {per_token / 1e6:.0f} MFLOP a token"
        return Estimate("train_draft", tokens, seconds, size, int(not self.on_cpu), basis)

    def export_draft(self) -> Estimate:
        size = sum(self._draft_parameters()) * _BYTES[self.params.target.dtype]
        return Estimate("export_draft", 0, START_S, size, 0, "imports")

    def launch_server(self) -> Estimate:
        seconds = START_S + self._server_start_s()
        return Estimate("launch_server", 0, seconds, 0, server_gpus(self.params), "one server start")

    def benchmark(self) -> Estimate:
        """Every server at every load; one that speculates is taken to be no faster than the plain one."""
        asked, gpus = self.params.benchmark, server_gpus(self.params)
        servers, sets = 2 + len(asked.drafts), max(1, len(asked.sets))
        seconds, answers = servers * self._server_start_s(), 0
        for concurrency, _ in asked_at(asked.concurrency, asked.temperatures):
            requests = concurrency * asked.warmup_prompts + sets * asked.repeats * requests_of(
                asked.num_prompts, concurrency
            )
            step = self._step_s(self.pace.sglang, concurrency, gpus)
            seconds += servers * requests * asked.max_new_tokens * step / concurrency
            answers += servers * requests
        step = self._step_s(self.pace.sglang, 1, gpus)
        basis = f"{servers} server starts; {answers} answers, {step * 1e3:.3g} ms a plain token of one reader"
        return Estimate("benchmark", answers * asked.max_new_tokens, START_S + seconds, 0, gpus, basis)

    def gates(self) -> Estimate:
        seconds = 5 * START_S + self._state_bytes() / DISK_BYTES_PER_S
        return Estimate("gates (5)", self.load.tokens, seconds, 0, 0, "imports, and the states read once")

    def _step_s(self, decoding: Decoding, batch: int, gpus: int) -> float:
        active, weights = self.target.active_parameters, self.target.weight_bytes
        # A mixture of experts reads those experts that any sequence of the batch is routed to.
        read = weights * min(1.0, batch * active / self.target.parameters) / self.speed.memory_bytes_per_s
        multiply = batch * 2 * active / (decoding.utilisation * self.speed.matmul_flops)
        return self.shape.num_layers * decoding.layer_s + (read + multiply) / max(gpus, 1)

    def _prefill_s(self, tokens: int, gpus: int) -> float:
        flops = 2 * self.target.active_parameters * tokens
        return flops / (self.pace.prefill * self.speed.matmul_flops * max(gpus, 1))

    def _server_start_s(self) -> float:
        return self.pace.server_start_s + self.target.weight_bytes / DISK_BYTES_PER_S

    def _state_bytes(self) -> int:
        return self.load.tokens * self._state_bytes_per_token()

    def _tokens_at_once(self) -> int:
        """Tokens whose states are on the disk at once: online, a ring of shards of train, each closed by an answer."""
        settings, load = self.params.dump, self.load
        if settings.ahead_shards is None:
            return load.tokens
        longest = self.params.prompts.max_prompt_tokens + self.params.regenerate.max_new_tokens
        ring = settings.ahead_shards * (settings.shard_tokens + longest)
        return load.tokens - load.train_tokens + min(load.train_tokens, ring)

    def _state_bytes_per_token(self) -> int:
        """(n_aux + 1) x H values, and the token's id and mask."""
        return bytes_per_token(self._num_aux(), self.shape.hidden_size, self.params.dump.storage_dtype)

    def _draft_parameters(self) -> tuple[int, int]:
        """(fc, what each chain step runs through): the draft of contract section 3, whose embedding is the target's."""
        shape = self.shape
        hidden, heads = shape.hidden_size, shape.num_attention_heads * shape.head_dim
        key_value = shape.num_key_value_heads * shape.head_dim
        layer = 2 * hidden * (heads + 2 * key_value) + heads * hidden + 3 * hidden * shape.intermediate_size
        return self._num_aux() * hidden * hidden, layer + self.params.train_draft.draft_vocab_size * hidden

    def _num_aux(self) -> int:
        return len(self.params.contract.aux_layer_ids or default_aux_layers(self.shape.num_layers))
