"""What the running server is asked: does it speculate, what is its draft fed, and are those the states it was trained on."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from tasks.common.acceptance import pool
from tasks.common.contract import Contract
from tasks.common.errors import DraftlineError
from tasks.common.hidden_states import HiddenStates, Sample
from tasks.common.params import PARAMS, Target
from tasks.common.parity import Agreement, all_states, find_state, layer_outputs
from tasks.common.server import Server
from tasks.common.target import load_model

if TYPE_CHECKING:
    import numpy as np

# States come back as JSON, 4 to 20 bytes a number: enough tokens to tell any two layers apart, and no more.
_SAMPLES = 3
_MAX_TOKENS = 256
_SPECULATED_TOKENS = 16


@dataclass(frozen=True)
class Replay:
    """A dumped sample, cut to what is replayed, with the states of the wrong reading beside it.

    Attributes:
        input_ids: int32 [T].
        expected: what the draft was trained on, [T, n_aux, H].
        shifted: outputs of the layers after each (config ids read as boundaries, or shifted twice), [T, n_aux, H].
    """

    id: str
    input_ids: torch.Tensor
    expected: torch.Tensor
    shifted: torch.Tensor


@dataclass(frozen=True)
class SlotParity:
    """One aux slot of one replayed sample.

    Attributes:
        agreement: served against dumped.
        shifted: what the figure would be if the server read the config's ids one layer late.
        first_served: first five values of the last token.
    """

    sample: str
    slot: int
    layer: int
    agreement: Agreement
    shifted: Agreement
    first_served: list[float]
    first_expected: list[float]


def choose_samples(states: HiddenStates, context_length: int) -> list[Sample]:
    """A few dumped samples from all over the split, cut to what the server can hold."""
    chosen = sorted({round(i * (len(states) - 1) / (_SAMPLES - 1)) for i in range(_SAMPLES)})
    limit = min(_MAX_TOKENS, context_length - 2)  # room for the one token that is generated
    samples = (states.read(index) for index in chosen)
    return [Sample(s.id, s.input_ids[:limit], s.loss_mask[:limit], s.aux[:limit], s.last[:limit]) for s in samples]


def with_wrong_reading(target: Target, samples: Sequence[Sample], contract: Contract) -> list[Replay]:
    """Compute, with transformers, what a server would return that reads the config's ids one layer late."""
    model = load_model(target)
    late = tuple(layer + 1 for layer in contract.aux_layer_ids)
    replays = [
        Replay(s.id, s.input_ids, s.aux, torch.stack(layer_outputs(model, s.input_ids, late), dim=1)) for s in samples
    ]
    del model
    torch.cuda.empty_cache()  # the server needs the room; does nothing without a GPU
    return replays


def require_telling_limit(replays: Sequence[Replay], limit: float) -> None:
    """Refuse a limit that the wrong reading would pass.

    Raises:
        DraftlineError: names the limit and the smallest error of a slot read one layer late.
    """
    smallest = min(
        Agreement.of(replay.shifted[:, slot], replay.expected[:, slot]).relative_error
        for replay in replays
        for slot in range(replay.expected.shape[1])
    )
    if limit >= smallest:
        raise DraftlineError(
            f"{PARAMS}: gates.max_relative_error is {limit:g}, but states read one layer late differ by only {smallest:.2g}: "
            f"parity would pass them. Lower it."
        )


def prove_speculation(server: Server, input_ids: list[int], contract: Contract) -> None:
    """Speculation really runs, and fc reads n_aux * H wide states.

    Raises:
        DraftlineError: no round was verified (S4), or the rows are not n_aux * H wide (C1).
    """
    sampling = {"temperature": 0, "max_new_tokens": _SPECULATED_TOKENS, "ignore_eos": True}
    completion = server.generate(input_ids, sampling, return_hidden_states=True)
    require_aux_width(completion.hidden_states, contract)
    pool([completion])


def require_aux_width(rows: "np.ndarray | None", contract: Contract) -> None:
    """Refuse states that are not what an EAGLE-3 draft reads.

    Raises:
        DraftlineError: names the width and what produces it.
    """
    if rows is None:
        raise DraftlineError("the server returned no hidden states. It must run with --enable-return-hidden-states.")
    width = rows.shape[1]
    if width == contract.hidden_size:
        raise DraftlineError(
            f"the server's hidden states are {width} wide, one state of H = {contract.hidden_size}; the draft's fc reads "
            f"{len(contract.aux_layer_ids)} x {contract.hidden_size} = {contract.aux_width}. This is what a server started "
            f"with EAGLE instead of EAGLE3 produces: fc is never called and nothing is accepted. Start it with "
            f"--speculative-algorithm EAGLE3."
        )
    if width != contract.aux_width:
        raise DraftlineError(
            f"the server's hidden states are {width} wide, the contract says {contract.aux_width} "
            f"({len(contract.aux_layer_ids)} layers x {contract.hidden_size}): it captures another number of layers."
        )


def fetch_states(server: Server, replay: Replay, contract: Contract) -> torch.Tensor:
    """Aux states that the server computes for a sample's own token ids, [T, n_aux, H].

    Raises:
        DraftlineError: rows are missing (H1) or of another width.
    """
    ids = replay.input_ids.tolist()
    rows = server.generate(ids, {"temperature": 0, "max_new_tokens": 1}, return_hidden_states=True).hidden_states
    require_aux_width(rows, contract)
    if len(rows) < len(ids):
        raise DraftlineError(
            f"sample {replay.id}: the server returned {len(rows)} rows of hidden states for {len(ids)} tokens. Tokens found "
            f"in the prefix cache are left out: it must run with --disable-radix-cache."
        )
    return torch.from_numpy(rows[: len(ids)]).view(len(ids), len(contract.aux_layer_ids), contract.hidden_size)


def compare(replay: Replay, served: torch.Tensor, contract: Contract) -> list[SlotParity]:
    """Compare a replay slot by slot."""
    return [
        SlotParity(
            sample=replay.id,
            slot=slot,
            layer=layer,
            agreement=Agreement.of(served[:, slot], replay.expected[:, slot]),
            shifted=Agreement.of(replay.shifted[:, slot], replay.expected[:, slot]),
            first_served=served[-1, slot, :5].tolist(),
            first_expected=replay.expected[-1, slot, :5].tolist(),
        )
        for slot, layer in enumerate(contract.aux_layer_ids)
    ]


def name_captured_layers(
    model, replay: Replay, served: torch.Tensor, parity: Sequence[SlotParity], limit: float
) -> str:
    """For each slot that disagrees, which state of the target the server really captured: one sentence a slot."""
    states = all_states(model, replay.input_ids)
    return "\n".join(
        f"  slot {row.slot} is {find_state(served[:, row.slot], states)}; the contract says the output of layer {row.layer} "
        f"(relative error {row.agreement.relative_error:.1e}, limit {limit:g})"
        for row in parity
        if row.sample == replay.id and not row.agreement.relative_error <= limit
    )
