"""The doctor at a running server, anybody's: over HTTP alone, with the target's folder or a dump of its states beside it.

Without either it is asked random tokens: who answers, what width its draft is fed and whether it speculates need no more.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tasks.common.command_line import CommandLine
from tasks.common.conversations import read_folder
from tasks.common.draft_checks.plan import served_dtype
from tasks.common.draft_checks.subject import Subject
from tasks.common.hidden_states import HiddenStates
from tasks.common.live_checks.dumped import dumped_prompts, dumped_references
from tasks.common.live_checks.interview import MAX_PROMPT_TOKENS, NUM_PROMPTS, Answer, Prompt
from tasks.common.live_checks.layer_fix import is_recorded, trained_layers
from tasks.common.live_checks.run import Expected, LiveReport, Material, check_server
from tasks.common.live_checks.slots import Reference, named_states
from tasks.common.live_checks.unrecorded import SHIFTS
from tasks.common.memory import available_memory
from tasks.common.parity import error_limit, layer_outputs
from tasks.common.sglang_client import SGLangClient
from tasks.common.target import load_causal_lm, load_tokenizer, render_prompt
from tasks.common.target_weights import TargetWeights

# By the type that the server computes in: float32 differs by the order of sums alone; below it a unit roundoff is 4e-3 or
# 5e-4, and the nearest wrong layer of a trained target is 0.2 away (infra/docs/serving.md).
_MAX_RELATIVE_ERROR = {"float32": 1e-3, "float16": 0.01, "bfloat16": 0.05}
# Of the free memory, for the target's weights: its states and the draft need some too.
_MEMORY_SHARE = 0.8
_OWN_PROMPTS = Path(__file__).parents[1] / "collect_prompts" / "builtin"
_RANDOM_TOKENS = 32


@dataclass(frozen=True)
class Server:
    """A server to be examined.

    Attributes:
        info: its server_info.
        plan: its command line, where it is known.
        target: folder of the target, with weights or of config and tokenizer alone.
        states: a dump that the draft was trained or measured on.
    """

    client: SGLangClient
    info: dict[str, Any]
    plan: CommandLine | None
    target: Path | None
    states: HiddenStates | None


def examine_server(server: Server, subject: Subject) -> LiveReport:
    """Every live check.

    Raises:
        DraftlineError: the server does not answer, or refuses what is asked.
    """
    dtype = served_dtype(server.info.get("dtype"), subject)
    dtype = dtype if dtype in _MAX_RELATIVE_ERROR else "bfloat16"
    stored = server.states.storage_dtype if server.states else "float32"
    weights, no_weights = _weights(server.target)
    tokenizer = _tokenizer(server.target)
    material = Material(
        prompts=_prompts(server, subject, tokenizer),
        references=_references(server, subject, weights, no_weights, dtype),
        target=weights,
        decode=tokenizer.decode if tokenizer else str,
    )
    expected = Expected(
        served=_planned(server, subject, weights),
        planned=server.plan is not None,
        nonce=server.plan.value("--weight-version") if server.plan else None,
        max_relative_error=max(_MAX_RELATIVE_ERROR[dtype], error_limit(dtype, stored)),
        gated=False,
        exact=dtype == "float32",
    )
    return check_server(server.client, server.info, subject, expected, material)


def _planned(server: Server, subject: Subject, weights: TargetWeights | None) -> dict[str, str]:
    """What makes it this server and no other: the plan's own words, or what was named beside it."""
    planned = {
        "speculative_draft_model_path": str(subject.draft.files.folder),
        **({"model_path": str(weights.folder)} if weights else {}),
    }
    for name in ("speculative_algorithm", "speculative_draft_model_path", "model_path"):
        value = server.plan.value(f"--{name.replace('_', '-')}") if server.plan else None
        planned |= {name: value} if value else {}
    return planned


def _weights(target: Path | None) -> tuple[TargetWeights | None, str]:
    """The target's tensors, or why there are none."""
    if target is None:
        return None, "there is nothing to compare with (--target with weights, or --hidden-states)"
    try:
        return TargetWeights(target), ""
    except Exception as error:  # anybody's folder: whatever is wrong with it, every other check stands
        return None, f"the target's weights are not in {target} ({str(error).splitlines()[0]})"


def _tokenizer(target: Path | None):
    """None where there is none, or where it needs code that nobody has said to trust."""
    if target is None or not any((target / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        return None
    try:
        return load_tokenizer(target, trust_remote_code=False)
    except Exception:  # anybody's files; without them the prompts are random tokens
        return None


def _prompts(server: Server, subject: Subject, tokenizer) -> list[Prompt]:
    """Held-out ones: the dump's, else Draftline's own, of every domain in turn; else random tokens."""
    if server.states is not None:
        return dumped_prompts(server.states)
    try:
        own = _own_prompts(tokenizer) if tokenizer and tokenizer.chat_template else []
    except Exception:  # a template may raise anything
        own = []
    vocab, generator = subject.draft.config["vocab_size"], torch.Generator().manual_seed(0)
    random = torch.randint(vocab, (NUM_PROMPTS, _RANDOM_TOKENS), generator=generator)
    return own or [Prompt(f"random-{number}", row.tolist()) for number, row in enumerate(random)]


def _own_prompts(tokenizer) -> list[Prompt]:
    by_domain: dict[str, Prompt] = {}
    for row in read_folder(_OWN_PROMPTS):
        if row.split == "heldout" and row.prompt and row.prompt.domain not in by_domain:
            ids = render_prompt(tokenizer, row.prompt.messages)
            if len(ids) <= MAX_PROMPT_TOKENS:
                by_domain[row.prompt.domain] = Prompt(row.prompt.id, ids)
    return list(by_domain.values())[:NUM_PROMPTS]


def _references(
    server: Server, subject: Subject, weights: TargetWeights | None, no_weights: str, dtype: str
) -> Callable[[Sequence[Answer]], tuple[list[Reference], str]]:
    """Of each answer the states by the dump, which the draft was trained on, and by transformers where the weights are here."""

    def references(answers: Sequence[Answer]) -> tuple[list[Reference], str]:
        model, problem = _load(weights, dtype) if weights else (None, no_weights)
        layers = trained_layers(subject)[0]
        if model is not None and not _fits(model, answers, layers):
            model, problem = (
                None,
                f"{weights.folder}: it has other sizes than what the server was asked: another target",
            )
        replayed = (
            [_replay(model, answer, layers, is_recorded(subject)) for answer in answers] if model is not None else []
        )
        named = {reference.prompt: reference.states for reference in replayed}
        dumped = dumped_references(server.states, answers, named) if server.states is not None else []
        return [*dumped, *replayed], problem

    return references


def _fits(model, answers: Sequence[Answer], layers: tuple[int, ...] | None) -> bool:
    """Whether it has the layers, and all tokens that the server was asked and gave."""
    config = model.config.get_text_config()
    largest = max(token for answer in answers for token in answer.token_ids)
    return largest < config.vocab_size and max(layers or (0,)) < config.num_hidden_layers


def _replay(model, answer: Answer, layers: tuple[int, ...] | None, recorded: bool) -> Reference:
    ids = torch.tensor(answer.token_ids)

    def outputs(of: tuple[int, ...]) -> torch.Tensor:
        return torch.stack(layer_outputs(model, ids, of), dim=1)

    num_layers = model.config.get_text_config().num_hidden_layers
    beside = {shift: tuple(layer + shift for layer in layers) for shift in SHIFTS} if layers and not recorded else {}
    return Reference(
        source="transformers",
        prompt=answer.prompt.id,
        input_ids=ids,
        aux=outputs(layers) if layers else None,
        states=named_states(model, ids),
        shifted={shift: outputs(of) for shift, of in beside.items() if of[0] >= 0 and of[-1] < num_layers},
    )


def _load(weights: TargetWeights, dtype: str):
    """The target in transformers, or why it cannot be run here."""
    try:
        needed, free = weights.num_parameters() * getattr(torch, dtype).itemsize, available_memory()
        if needed > _MEMORY_SHARE * free:
            return None, (
                f"{weights.folder}: {needed / 1e9:.0f} GB of weights in {dtype}, {free / 1e9:.0f} GB of memory are free: it "
                f"cannot be replayed here; --hidden-states compares a dump in its place"
            )
        return load_causal_lm(weights.folder, dtype), ""
    except Exception as error:  # a target's own code may raise anything, and every other check stands without it
        return None, f"{weights.folder}: transformers cannot load it ({str(error).splitlines()[0][:200]})"
