"""Every live check, in the order in which a reader wants them: who answers, what the draft is fed, what it drafts, what is accepted."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from tasks.common.check import Check, Expectation
from tasks.common.draft_checks.subject import Subject
from tasks.common.draft_trace import DraftTrace
from tasks.common.errors import DraftlineError
from tasks.common.live_checks.acceptance import check_acceptance, check_speculation
from tasks.common.live_checks.identity import check_nonce, check_port_owner, check_serves, same_place
from tasks.common.live_checks.interview import Answer, Prompt, interview
from tasks.common.live_checks.layer_fix import layer_fix, trained_layers
from tasks.common.live_checks.parity import Reference, SlotParity, check_slots, compare
from tasks.common.live_checks.rounds import Decode, OwnDraft, check_rounds
from tasks.common.live_checks.rows import check_rows, check_width
from tasks.common.served_draft import load_served_draft
from tasks.common.sglang_client import SGLangClient
from tasks.common.target_weights import TargetWeights


@dataclass(frozen=True)
class Expected:
    """What the server is planned to be.

    Attributes:
        served: values of server_info by SGLang's names: model_path, speculative_algorithm, ...
        nonce: the weight version that it was started with, where that is known.
        max_relative_error: of a slot.
        exact: whether states and draft are float32, so that every round must agree.
    """

    served: dict[str, str | None]
    nonce: str | None
    max_relative_error: float
    exact: bool


@dataclass(frozen=True)
class Material:
    """What the server is compared with.

    Attributes:
        references: takes the answers, gives states of their tokens from elsewhere; empty where there are none.
        target: weights of the target, whose embedding the draft shares; None where they are not here.
        decode: text of token ids, for messages.
        trace: written by a hook inside the server, where we started it.
    """

    prompts: Sequence[Prompt]
    references: Callable[[Sequence[Answer]], list[Reference]]
    target: TargetWeights | None
    decode: Decode
    trace: DraftTrace | None = None


@dataclass
class LiveReport:
    """Verdicts, and the figures behind those on the slots."""

    checks: list[Check] = field(default_factory=list)
    parity: list[SlotParity] = field(default_factory=list)


def check_server(client: SGLangClient, subject: Subject, expected: Expected, material: Material) -> LiveReport:
    """Interview a server and judge it.

    Raises:
        DraftlineError: it does not answer, or refuses what is asked.
    """
    info = client.server_info()
    num_steps = info.get("speculative_num_steps") or 0
    answers = interview(
        client,
        material.prompts,
        num_steps=num_steps,
        with_states=bool(info.get("enable_return_hidden_states")),
        trace=material.trace,
    )
    weight_version = answers[0].completion.weight_version
    report = LiveReport(
        [
            check_nonce(weight_version, expected.nonce),
            check_serves(info, expected.served),
            check_port_owner(client.url, weight_version),
            check_speculation(answers),
        ]
    )
    layers, references = trained_layers(subject), material.references(answers)
    width, rows = check_width(answers, subject, references, info), check_rows(answers, info)
    report.checks += [width, rows]
    states_are_right = width.verdict == rows.verdict == "ok"
    if layers and states_are_right:
        report.parity = [
            row for reference in references for row in compare(_answer_of(answers, reference), reference, layers)
        ]
    serves_examined = same_place(info.get("speculative_draft_model_path"), str(subject.draft.files.folder))
    fix = layer_fix(subject, layers, serves_examined)
    report.checks += check_slots(report.parity, expected.max_relative_error, fix)
    report.checks += _check_draft(client, subject, expected, material, answers, references, info, states_are_right)
    return report


def _check_draft(client, subject, expected, material, answers, references, info, states_are_right) -> list[Check]:
    own, problem = _own_draft(subject, material, info)
    want = Expectation("W3 served draft", "rounds as our own code computes them from the exported files", "")
    if own is None:
        rounds = want.not_applicable(problem)
    elif not states_are_right:
        rounds = want.not_applicable("without the states that the draft is fed there is nothing to walk over")
    else:
        rounds = check_rounds(
            answers,
            own,
            exact=expected.exact,
            ask_again=lambda answer, tokens: client.generate(
                answer.prompt.token_ids, {"temperature": 0, "max_new_tokens": tokens}
            ),
            decode=material.decode,
        )
    return [rounds, check_acceptance(answers, _predict(own, answers, references))]


def _own_draft(subject: Subject, material: Material, info: dict[str, Any]) -> tuple[OwnDraft | None, str]:
    """The examined draft in our own code, or why not."""
    if material.target is None:
        return None, "the target's weights are not here, and the draft shares its embedding (--target)"
    if not info.get("speculative_num_steps"):
        return None, "the server does not speculate"
    if (info.get("speculative_eagle_topk") or 1) > 1:
        return None, "top-k above 1 verifies trees; our walk follows chains"
    try:
        model, vocab_map = load_served_draft(subject.draft, material.target)
    except DraftlineError as error:
        return None, str(error)
    return OwnDraft(model, vocab_map, info["speculative_num_steps"]), ""


def _predict(
    own: OwnDraft | None, answers: Sequence[Answer], references: Sequence[Reference]
) -> tuple[list[int], str] | None:
    """Correct drafts of each round over the first source's states of the same answers."""
    if own is None or not references:
        return None
    source = references[0].source
    rounds: list[int] = []
    for reference in references:
        if reference.source == source:
            answer = _answer_of(answers, reference)
            prompt_tokens, ids = len(answer.prompt.token_ids), reference.input_ids.tolist()
            end = min(len(ids), len(answer.token_ids))
            walked = own.rounds(
                prompt_tokens, ids[prompt_tokens:end], ids[end:], ids[:end], reference.aux[:end].flatten(1)
            )
            rounds += [one.correct for one in walked]
    return rounds, f"the states of {source}"


def _answer_of(answers: Sequence[Answer], reference: Reference) -> Answer:
    return next(answer for answer in answers if answer.prompt.id == reference.prompt)
