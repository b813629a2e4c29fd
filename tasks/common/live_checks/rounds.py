"""Does the server draft what its files say? Our own draft walked over the server's states and tokens, round by round.

Over HTTP a server tells how many rounds an answer took and how many drafts were right in each, as a histogram. The draft
that is loaded as it was exported must reproduce both; where it does not, the server computes with other weights, another
vocabulary map or another rotation than the files hold. Where a hook inside the server writes down its proposals, they
are compared token by token.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tasks.common.check import Check, Expectation
from tasks.common.draft import Eagle3Draft
from tasks.common.draft_trace import TracedRound
from tasks.common.hidden_states import Sample
from tasks.common.live_checks.interview import Answer
from tasks.common.packing import PackedSamples
from tasks.common.sglang_client import Completion
from tasks.common.vocab_map import VocabMap
from tasks.common.walk import correct_drafts, round_starts, walk

Decode = Callable[[list[int]], str]
AskAgain = Callable[[Answer, int], Completion]

WANT = Expectation(
    "W3 served draft",
    "rounds and correct drafts of every answer as our own code computes them from the exported files",
    "A server that drafts other tokens than its files hold has other weights, another map or other positions.",
)
_FIX = (
    "Compare the folder that the server loaded with the examined one (sha256sum of the weights, config.json): tensor names, "
    "d2t, RoPE, norms; then restart it."
)
# Below float32 a rounding decides a round now and then, and all that follows it. Measured: infra/docs/doctor.md.
_ROUNDED_OK, _ROUNDED_WARNING = 0.10, 0.25


@dataclass(frozen=True)
class Round:
    """One round of our walk.

    Attributes:
        generated: tokens of the answer that were known when it started.
        proposed: target ids of our chain.
        verified: what the target says in their place.
        correct: leading proposals that are right.
    """

    generated: int
    proposed: list[int]
    verified: list[int]
    correct: int


@dataclass(frozen=True)
class OwnDraft:
    """The examined draft in our own code."""

    model: Eagle3Draft
    vocab_map: VocabMap
    num_steps: int

    def rounds(self, answer: Answer, aux: torch.Tensor) -> list[Round]:
        """The rounds that a server spends on an answer.

        Args:
            aux: states of prompt and answer, [T, n_aux * H].
        """
        prompt, known = len(answer.prompt.token_ids), answer.token_ids
        whole = known + answer.beyond
        padded = torch.cat([aux, aux.new_zeros(len(whole) - len(aux), aux.shape[1])])
        starts = round_starts(_pack(known, prompt, padded[: len(known)]))
        if not len(starts):
            return []
        judged = _pack(whole, prompt, padded)
        proposed = self.model.propose(judged, starts, self.num_steps, self.vocab_map)
        correct = correct_drafts(judged, starts, proposed)
        place = {t: row for row, t in enumerate(starts.tolist())}
        rounds, t = [], int(starts[0])
        for accepted in walk(starts, correct):
            verified = whole[t + 2 : t + 2 + self.num_steps]
            rounds.append(Round(t + 2 - prompt, proposed[place[t]].tolist(), verified, accepted))
            t += accepted + 1
        return rounds

    def correct(self, answer: Answer, aux: torch.Tensor) -> list[int]:
        """Drafts right in each of those rounds, over the states of a reference, [at least T, n_aux, H]."""
        return [one.correct for one in self.rounds(answer, aux[: len(answer.token_ids)].flatten(1))]


def _pack(token_ids: list[int], prompt_tokens: int, aux: torch.Tensor) -> PackedSamples:
    mask = torch.arange(len(token_ids)) >= prompt_tokens
    nothing = aux.new_zeros(len(token_ids), 0)
    sample = Sample("", torch.tensor(token_ids, dtype=torch.int32), mask.to(torch.uint8), aux[:, None], nothing)
    return PackedSamples.of([sample])


def check_rounds(
    answers: Sequence[Answer], own: OwnDraft, *, exact: bool, ask_again: AskAgain, decode: Decode
) -> Check:
    """Our walk over the server's own states against the server's counts, and against its proposals where they are known.

    Args:
        exact: whether server and draft compute in float32; else a rounding may decide a round.
        ask_again: the same prompt, with another number of new tokens.
        decode: text of token ids, for the message.
    """
    walked = [(answer, own.rounds(answer, answer.states)) for answer in answers]
    total = sum(len(rounds) for _, rounds in walked)
    ours = sum(one.correct for _, rounds in walked for one in rounds)
    theirs = sum(answer.completion.correct_drafts for answer in answers)
    found = f"{total} rounds of {len(answers)} answers, {ours} drafts right; the server counts {theirs}"
    if not ours and not theirs:
        return WANT.not_applicable(
            f"{found}: two drafts that accept nothing agree whatever they are; ask held-out prompts (--hidden-states)"
        )
    differing = [(answer, rounds) for answer, rounds in walked if not _agree(answer, rounds)]
    if not differing:
        traced = ", and every proposal" if all(answer.rounds for answer in answers) else ""
        return WANT.ok(f"{found}: every histogram is the same{traced}")
    answer, rounds = differing[0]
    text = f"{found}; {answer.prompt.id}, {_first_difference(answer, rounds, ask_again, decode)}"
    apart = abs(ours - theirs) / max(ours, theirs)
    if not exact and apart <= _ROUNDED_OK:
        return WANT.ok(f"{text} (below float32 a rounding decides a round now and then)")
    return WANT.warning(text, _FIX) if not exact and apart <= _ROUNDED_WARNING else WANT.error(text, _FIX)


def _agree(answer: Answer, rounds: list[Round]) -> bool:
    same = _same(answer.completion, rounds)
    return same and not (answer.rounds and _first_traced(answer.rounds, rounds, len(answer.prompt.token_ids)))


def _same(completion: Completion, rounds: list[Round]) -> bool:
    counts = {length: count for length, count in enumerate(completion.correct_drafts_histogram) if count}
    return counts == Counter(one.correct for one in rounds)


def _first_difference(answer: Answer, rounds: list[Round], ask_again: AskAgain, decode: Decode) -> str:
    if answer.rounds:
        pair = _first_traced(answer.rounds, rounds, len(answer.prompt.token_ids))
        if pair is None:
            return f"the server spent {len(answer.rounds)} rounds, our walk {len(rounds)}"
        ours, theirs = pair
        best = "; ".join(f"{decode([step[0]])!r} of {step}" for step in theirs.candidates if step)
        return (
            f"first differing round at token {ours.generated}: {_described(ours, decode)}; the server drafted "
            f"{theirs.proposed} {decode(theirs.proposed)!r}, its best 5 for each token: {best}"
        )
    # An answer that is cut behind a round's start has the same rounds up to that one, which is counted whole.
    for number, last in enumerate(rounds, 1):
        served = ask_again(answer, last.generated + 1)
        if not _same(served, rounds[:number]):
            right = served.correct_drafts - sum(one.correct for one in rounds[: number - 1])
            return f"first differing round at token {last.generated}: {_described(last, decode)}; the server had {right} right"
    return "the server spent more rounds on it than our walk"


def _first_traced(
    served: Sequence[TracedRound], rounds: Sequence[Round], prompt_tokens: int
) -> tuple[Round, TracedRound] | None:
    """The first pair that starts elsewhere or proposes other tokens."""
    for ours, theirs in zip(rounds, served, strict=False):
        if ours.generated != theirs.position + 1 - prompt_tokens or ours.proposed != theirs.proposed:
            return ours, theirs
    return None


def _described(one: Round, decode: Decode) -> str:
    return (
        f"we draft {one.proposed} {decode(one.proposed)!r}, the target says {one.verified} {decode(one.verified)!r}, "
        f"{one.correct} right"
    )
