"""Every live check, in the order in which a reader wants them: who answers, what the draft is fed, what it drafts, what is accepted."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from safetensors import SafetensorError

from tasks.common.check import Check, Expectation
from tasks.common.draft_checks.subject import Subject
from tasks.common.draft_tensors import aux_size, num_aux_states
from tasks.common.draft_trace import DraftTrace
from tasks.common.errors import DraftlineError
from tasks.common.live_checks.accepted import Prediction, check_acceptance, check_speculation
from tasks.common.live_checks.identity import Listener, check_nonce, check_port_owner, check_serves
from tasks.common.live_checks.interview import MAX_ANSWER_TOKENS, Answer, Prompt, interview
from tasks.common.live_checks.layer_fix import is_recorded, layer_fix, trained_layers
from tasks.common.live_checks.rounds import WANT as WANT_ROUNDS
from tasks.common.live_checks.rounds import Decode, OwnDraft, check_rounds
from tasks.common.live_checks.rows import check_rows, check_width, name_slots, returns_states
from tasks.common.live_checks.slots import WHY, Reference, SlotParity, answer_of, check_slots, common_tokens, compare
from tasks.common.live_checks.unrecorded import check_unrecorded_layers
from tasks.common.served_draft import load_served_draft
from tasks.common.sglang_client import SGLangClient
from tasks.common.target_weights import TargetWeights


@dataclass(frozen=True)
class Expected:
    """What the server is planned to be.

    Attributes:
        served: values of server_info by SGLang's names: model_path, speculative_algorithm, ...
        planned: whether a plan says so.
        nonce: the weight version that it was started with, where that is known.
        max_relative_error: of a slot.
        gated: whether a slot beyond that is an error even where it is certainly the right layer.
        exact: whether states and draft are float32, so that every round must agree.
    """

    served: dict[str, str | None]
    planned: bool
    nonce: str | None
    max_relative_error: float
    gated: bool
    exact: bool


@dataclass(frozen=True)
class Material:
    """What the server is compared with.

    Attributes:
        references: takes the answers, gives states of their tokens from elsewhere, and where there are none why.
        target: weights of the target, whose embedding the draft shares; None where they are not here.
        decode: text of token ids, for messages.
        trace: written by a hook inside the server, where we started it.
    """

    prompts: Sequence[Prompt]
    references: Callable[[Sequence[Answer]], tuple[list[Reference], str]]
    target: TargetWeights | None
    decode: Decode
    trace: DraftTrace | None = None


@dataclass
class LiveReport:
    """Verdicts, and the figures behind those on the slots."""

    checks: list[Check] = field(default_factory=list)
    parity: list[SlotParity] = field(default_factory=list)


def check_server(
    client: SGLangClient, info: dict[str, Any], subject: Subject, expected: Expected, material: Material
) -> LiveReport:
    """Interview a server and judge it.

    Args:
        info: its server_info.

    Raises:
        DraftlineError: it does not answer, or refuses what is asked.
    """
    listener = Listener.of(client.url)
    num_steps = info.get("speculative_num_steps") or 0
    room = _room(info, num_steps)
    answers = interview(
        client,
        [prompt.within(room) for prompt in material.prompts],
        num_steps=num_steps,
        with_states=returns_states(info),
        trace=material.trace,
    )
    nonce = answers[0].completion.weight_version
    references, missing = material.references(answers)
    width, rows = check_width(answers, subject, references, info), check_rows(answers, info)
    are_whole = width.verdict == rows.verdict == "ok"
    slots, parity = _check_slots(subject, expected, answers, references, missing, are_whole, listener, info)
    own, problem = _own_draft(subject, material, info)
    if own is None or not are_whole:
        rounds = WANT_ROUNDS.not_applicable(problem or "without the states that the draft is fed there is no walk")
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
    predicted, unpredicted = _predict(own, answers, references, problem or missing)
    checks = [
        check_nonce(nonce, expected.nonce, listener),
        check_serves(info, expected.served, listener, expected.planned),
        check_port_owner(listener, nonce),
        check_speculation(answers),
        width,
        rows,
        *slots,
        *_check_unrecorded(subject, own, answers, references),
        rounds,
        check_acceptance(answers, predicted, unpredicted),
    ]
    return LiveReport(checks, parity)


def _room(info: dict[str, Any], num_steps: int) -> int:
    """Prompt tokens for which the whole interview fits into the context, and its prefill into one chunk."""
    spent = MAX_ANSWER_TOKENS + num_steps + 2
    context, chunk = (info.get(name) or 0 for name in ("context_length", "chunked_prefill_size"))
    # Of the context SGLang also keeps the tokens of one round free.
    rooms = [context - spent - (info.get("speculative_num_draft_tokens") or 0)] if context > 0 else []
    rooms += [chunk - spent] if chunk > 0 else []
    room = min(rooms, default=2**31)
    if room < 1:
        raise DraftlineError(
            f"the server's context_length {context} or chunked_prefill_size {chunk} is too small to ask anything: an answer of "
            f"{MAX_ANSWER_TOKENS} tokens must fit beside a prompt."
        )
    return room


def _check_slots(
    subject: Subject,
    expected: Expected,
    answers: Sequence[Answer],
    references: Sequence[Reference],
    missing: str,
    are_whole: bool,
    listener: Listener,
    info: dict[str, Any],
) -> tuple[list[Check], list[SlotParity]]:
    """C3, a verdict a slot; one that says why where they cannot be judged."""
    (layers, said_by), slots = trained_layers(subject), num_aux_states(subject.draft.config)
    want = Expectation("C3 slots", "the states that the draft was trained on", WHY)
    if not are_whole:
        return [want.not_applicable("see C1 width and H1 rows")], []
    if not references:
        return [want.not_applicable(missing)], []
    if layers is None:
        named = name_slots(answers, references, aux_size(subject.draft.config))
        return [want.not_applicable(f"{named}; nothing records what the draft was trained on")], []
    if len(layers) != slots:
        text = f"the server feeds {slots} states, {said_by} says {len(layers)}: outputs {list(layers)}"
        return [want.error(text, layer_fix(subject, layers, True)([None]))], []
    parity = [row for reference in references for row in compare(answer_of(answers, reference), reference, layers)]
    folder = str(subject.draft.files.folder)
    examined = listener.same_place(info.get("speculative_draft_model_path"), folder) is not False
    fix = layer_fix(subject, layers, examined)
    return check_slots(parity, expected.max_relative_error, expected.gated, said_by, fix), parity


def _check_unrecorded(
    subject: Subject, own: OwnDraft | None, answers: Sequence[Answer], references: Sequence[Reference]
) -> list[Check]:
    layers, _ = trained_layers(subject)
    if own is None or layers is None or is_recorded(subject):
        return []
    return [check_unrecorded_layers(own, answers, references, layers)]


def _own_draft(subject: Subject, material: Material, info: dict[str, Any]) -> tuple[OwnDraft | None, str]:
    """The examined draft in our own code, or why not."""
    if material.target is None:
        return None, "the target's weights are not here, and the draft shares its embedding (--target)"
    if not info.get("speculative_num_steps"):
        return None, "the server does not speculate"
    if (info.get("speculative_eagle_topk") or 1) > 1:
        topk = info["speculative_eagle_topk"]
        return None, (
            f"top-k {topk} verifies trees, our walk follows chains: start it with --speculative-num-steps 3 "
            f"--speculative-eagle-topk 1 --speculative-num-draft-tokens 4 to have it compared"
        )
    for flag in ("speculative_adaptive", "speculative_draft_window_size"):
        if info.get(flag):
            return (
                None,
                f"{flag} changes what is drafted: start it without --{flag.replace('_', '-')} to have it compared",
            )
    try:
        model, vocab_map = load_served_draft(subject.draft, material.target)
    except (DraftlineError, OSError, SafetensorError, RuntimeError) as error:
        return None, str(error).splitlines()[0]
    return OwnDraft(model, vocab_map, info["speculative_num_steps"]), ""


def _predict(
    own: OwnDraft | None, answers: Sequence[Answer], references: Sequence[Reference], missing: str
) -> tuple[Prediction | None, str]:
    """Over the first source that has the very answers of the server; or why there is none."""
    if own is None:
        return None, missing
    for source in dict.fromkeys(reference.source for reference in references):
        walked, rounds = [], []
        for reference in references:
            answer = answer_of(answers, reference)
            tokens = len(answer.token_ids)
            if reference.source == source and reference.aux is not None and common_tokens(answer, reference) == tokens:
                walked.append(answer)
                rounds += own.correct(answer, reference.aux)
        if rounds:
            return Prediction(source, walked, rounds), ""
    return None, missing or "the reference holds other answers than the server gives"
