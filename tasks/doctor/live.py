"""The doctor at a running server, anybody's: what is needed beside HTTP is the target's folder, or a dump of its states."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tasks.collect_prompts import sources
from tasks.common.draft_checks.subject import Subject
from tasks.common.errors import DraftlineError
from tasks.common.hidden_states import HiddenStates
from tasks.common.live_checks.dumped import dumped_prompts, dumped_references
from tasks.common.live_checks.interview import MAX_PROMPT_TOKENS, Answer, Prompt
from tasks.common.live_checks.layer_fix import trained_layers
from tasks.common.live_checks.parity import Reference, named_states
from tasks.common.live_checks.run import Expected, LiveReport, Material, check_server
from tasks.common.parity import layer_outputs
from tasks.common.sglang_client import SGLangClient
from tasks.common.target import load_causal_lm, render_prompt
from tasks.common.target_weights import TargetWeights
from tasks.doctor.command_line import CommandLine

_PROMPTS = 4
_OWN_PROMPTS = Path(sources.__file__).parent / "builtin"
# By the type that the server computes in: float32 differs by the order of sums alone; below it a unit roundoff is 4e-3 or
# 5e-4, and the nearest wrong layer of a trained target is 0.2 away (infra/docs/serving.md).
_MAX_RELATIVE_ERROR = {"float32": 1e-3, "float16": 0.01, "bfloat16": 0.05}


@dataclass(frozen=True)
class Server:
    """A server to be examined.

    Attributes:
        plan: its command line, where it is known.
        target: folder of the target, with weights or of config and tokenizer alone.
        states: a dump that the draft was trained or measured on.
    """

    url: str
    plan: CommandLine | None
    target: Path | None
    states: HiddenStates | None


def examine_server(server: Server, subject: Subject) -> LiveReport:
    """Every live check.

    Raises:
        DraftlineError: the server does not answer, or there are no prompts to ask.
    """
    client = SGLangClient(server.url.rstrip("/"))
    dtype = _dtype(client.server_info(), subject)
    weights = server.target if server.target and list(server.target.glob("*.safetensors")) else None
    tokenizer = _tokenizer(server.target)
    material = Material(
        prompts=_prompts(server, tokenizer),
        references=_references(server, subject, weights, dtype),
        target=TargetWeights(weights) if weights else None,
        decode=tokenizer.decode if tokenizer else str,
    )
    expected = Expected(
        served=_planned(server, subject, weights),
        nonce=server.plan.value("--weight-version") if server.plan else None,
        max_relative_error=_MAX_RELATIVE_ERROR[dtype],
        exact=dtype == "float32",
    )
    return check_server(client, subject, expected, material)


def _dtype(info: dict[str, Any], subject: Subject) -> str:
    """What the server computes in; 'auto' is the target's own type."""
    config = subject.target_config or {}
    text = config.get("text_config") or {}
    stated = [info.get("dtype"), *(part.get(key) for part in (config, text) for key in ("torch_dtype", "dtype"))]
    dtype = next((name for name in stated if name in _MAX_RELATIVE_ERROR), subject.draft.dtype)
    return dtype if dtype in _MAX_RELATIVE_ERROR else "bfloat16"


def _planned(server: Server, subject: Subject, weights: Path | None) -> dict[str, str | None]:
    """What server_info must say: the plan's flags, or what was named beside the server."""
    planned: dict[str, str | None] = {"speculative_algorithm": "EAGLE3"}
    planned["speculative_draft_model_path"] = str(subject.draft.files.folder)
    if weights:
        planned["model_path"] = str(weights)
    if server.plan:
        planned |= {
            name.removeprefix("--").replace("-", "_"): values[0]
            for name, values in server.plan.flags.items()
            if len(values) == 1 and not values[0].startswith(("[", "{")) and name != "--weight-version"
        }
    return planned


def _tokenizer(target: Path | None):
    if target is None or not any((target / name).exists() for name in ("tokenizer.json", "tokenizer_config.json")):
        return None
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(target)


def _prompts(server: Server, tokenizer) -> list[Prompt]:
    """Held-out ones: the dump's, else Draftline's own, of every domain in turn."""
    if server.states:
        return dumped_prompts(server.states, _PROMPTS)
    if tokenizer is None:
        raise DraftlineError(
            "--server: nothing to ask. Give --target with its tokenizer, or --hidden-states with held-out samples."
        )
    by_domain: dict[str, Prompt] = {}
    for row in sources.read_folder(_OWN_PROMPTS):
        if row.split == "heldout" and row.prompt and row.prompt.domain not in by_domain:
            ids = render_prompt(tokenizer, row.prompt.messages)
            if len(ids) <= MAX_PROMPT_TOKENS:
                by_domain[row.prompt.domain] = Prompt(row.prompt.id, ids)
    return list(by_domain.values())[:_PROMPTS]


def _references(
    server: Server, subject: Subject, weights: Path | None, dtype: str
) -> Callable[[Sequence[Answer]], list[Reference]]:
    """Of each answer the states by transformers, where the weights are here, and by the dump, where it has them."""

    def references(answers: Sequence[Answer]) -> list[Reference]:
        layers, found = trained_layers(subject), []
        model = load_causal_lm(weights, dtype) if weights and layers else None
        states: dict[str, dict[str, torch.Tensor]] = {}
        for answer in answers if model else ():
            ids = torch.tensor(answer.token_ids + answer.beyond)
            states[answer.prompt.id] = named_states(model, ids)
            aux = torch.stack(layer_outputs(model, ids, layers), dim=1)
            found.append(Reference("transformers", answer.prompt.id, ids, aux, states[answer.prompt.id]))
        # The dump comes first: its states are those that the draft was trained on.
        return [*(dumped_references(server.states, answers, states) if server.states else []), *found]

    return references
