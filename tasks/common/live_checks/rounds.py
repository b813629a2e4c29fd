"""Does the server draft what its files say? Our own draft walked over the server's states and tokens, round by round.

Over HTTP a server tells how many rounds an answer took and how many drafts were right in each, as a histogram. The draft
that is loaded as it was exported must reproduce both exactly; where it does not, the server computes with other weights,
another vocabulary map or another rotation than the files hold.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from tasks.common.check import Check, Expectation
from tasks.common.draft import Eagle3Draft
from tasks.common.hidden_states import Sample
from tasks.common.live_checks.interview import Answer
from tasks.common.packing import PackedSamples
from tasks.common.sglang_client import Completion
from tasks.common.vocab_map import VocabMap
from tasks.common.walk import correct_drafts, round_starts, walk

Decode = Callable[[list[int]], str]


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

    def rounds(
        self, prompt_tokens: int, answer: list[int], beyond: list[int], token_ids: list[int], aux
    ) -> list[Round]:
        """The rounds that a server spends on an answer.

        Args:
            prompt_tokens: before the answer in `token_ids`.
            beyond: what follows the answer; its last round is verified against it.
            token_ids: prompt and answer.
            aux: states of those tokens, [T, n_aux * H].
        """
        whole = token_ids + beyond
        padded = torch.cat([aux, aux.new_zeros(len(whole) - len(aux), aux.shape[1])])
        known, judged = (
            _pack(whole[:length], prompt_tokens, padded[:length]) for length in (len(token_ids), len(whole))
        )
        starts = round_starts(known)
        if not len(starts):
            return []
        proposed = self.model.propose(judged, starts, self.num_steps, self.vocab_map)
        correct = correct_drafts(judged, starts, proposed)
        place = {t: row for row, t in enumerate(starts.tolist())}
        rounds, t = [], int(starts[0])
        for accepted in walk(starts, correct):
            rounds.append(
                Round(
                    generated=t + 2 - prompt_tokens,
                    proposed=proposed[place[t]].tolist(),
                    verified=whole[t + 2 : t + 2 + self.num_steps],
                    correct=accepted,
                )
            )
            t += accepted + 1
        return rounds

    def rounds_of(self, answer: Answer) -> list[Round]:
        """Over the server's own states."""
        prompt, output = answer.prompt.token_ids, answer.completion.output_ids
        return self.rounds(len(prompt), output, answer.beyond, answer.token_ids, answer.states)


def _pack(token_ids: list[int], prompt_tokens: int, aux: torch.Tensor) -> PackedSamples:
    mask = torch.arange(len(token_ids)) >= prompt_tokens
    nothing = aux.new_zeros(len(token_ids), 0)
    sample = Sample("", torch.tensor(token_ids, dtype=torch.int32), mask.to(torch.uint8), aux[:, None], nothing)
    return PackedSamples.of([sample])


def check_rounds(
    answers: Sequence[Answer],
    own: OwnDraft,
    *,
    exact: bool,
    ask_again: Callable[[Answer, int], Completion],
    decode: Decode,
) -> Check:
    """Our walk against the server's counts.

    Args:
        exact: whether server and draft compute in float32; else a rounding may decide a round.
        ask_again: the same prompt, with another number of new tokens.
        decode: text of token ids, for the message.
    """
    want = Expectation(
        "W3 served draft",
        "rounds and correct drafts of every answer as our own code computes them from the exported files",
        "A server that drafts other tokens than its files hold has other weights, another map or other positions.",
    )
    walked = [(answer, own.rounds_of(answer)) for answer in answers]
    differing = [(answer, rounds) for answer, rounds in walked if not _same(answer.completion, rounds)]
    total = sum(len(rounds) for _, rounds in walked)
    ours = sum(one.correct for _, rounds in walked for one in rounds)
    theirs = sum(answer.completion.correct_drafts for answer in answers)
    found = f"{total} rounds of {len(answers)} answers, {ours} drafts right; the server counts {theirs}"
    if not differing:
        return want.ok(f"{found}: every histogram is the same")
    answer, rounds = differing[0]
    text = f"{found}. {answer.prompt.id}, {_first_difference(answer, rounds, ask_again, decode)}"
    fix = "Compare the folder that the server loaded with the examined one: tensor names, d2t, RoPE, norms; then restart it."
    if not exact and abs(ours - theirs) <= 0.05 * max(ours, theirs):
        return want.warning(f"{text} (below float32 a rounding may decide a round)", fix)
    return want.error(text, fix)


def _same(completion: Completion, rounds: list[Round]) -> bool:
    return _counts(completion) == Counter(one.correct for one in rounds)


def _counts(completion: Completion) -> Counter:
    histogram = completion.correct_drafts_histogram
    return Counter({length: count for length, count in enumerate(histogram) if count})


def _first_difference(answer: Answer, rounds: list[Round], ask_again, decode: Decode) -> str:
    if answer.rounds:
        return _first_traced(answer, rounds, decode)
    # A shorter answer has the same rounds up to its end, the last one whole: find the shortest that differs.
    agrees, differs = 1, len(answer.completion.output_ids)
    while differs - agrees > 1:
        middle = (agrees + differs) // 2
        if _same(ask_again(answer, middle), _up_to(rounds, middle)):
            agrees = middle
        else:
            differs = middle
    served = _counts(ask_again(answer, differs))
    here = _up_to(rounds, differs)
    ours = Counter(one.correct for one in here)
    last = here[-1]
    only_served = sorted((served - ours).elements())
    return (
        f"first differing round at token {last.generated}: {_described(last, decode)}; "
        f"the server counts {only_served or 'no round'} where we count {sorted((ours - served).elements())}"
    )


def _up_to(rounds: list[Round], tokens: int) -> list[Round]:
    """Rounds that an answer of so many tokens takes."""
    return [one for one in rounds if one.generated < tokens]


def _first_traced(answer: Answer, rounds: list[Round], decode: Decode) -> str:
    for number, (ours, theirs) in enumerate(zip(rounds, answer.rounds or [], strict=False), 1):
        generated = theirs.position + 1 - len(answer.prompt.token_ids)
        if ours.generated != generated or ours.proposed != theirs.proposed:
            best = "; ".join(f"{decode([step[0]])!r} of {step}" for step in theirs.candidates if step)
            return (
                f"round {number} at token {generated}: {_described(ours, decode)}; the server drafted {theirs.proposed} "
                f"{decode(theirs.proposed)!r}, its best 5 a token: {best}"
            )
    return f"the server spent {len(answer.rounds or [])} rounds, our walk {len(rounds)}"


def _described(one: Round, decode: Decode) -> str:
    return (
        f"we draft {one.proposed} {decode(one.proposed)!r}, the target says {one.verified} {decode(one.verified)!r}, "
        f"{one.correct} right"
    )
