"""The layer search on the embedded default target: every state that a slot could hold by mistake is called by its name."""

import pytest
import torch

from tasks.common.live_checks.interview import Answer, Prompt
from tasks.common.live_checks.slots import Reference, compare, named_states
from tasks.common.params import Target
from tasks.common.parity import output_name
from tasks.common.sglang_client import Completion
from tasks.common.target import load_model
from tasks.prepare_target.prepare import prepare_target

pytestmark = pytest.mark.faults  # nearly a minute of a whole core
LAYERS, HIDDEN, TOKENS = (1, 14, 26), 576, 48


@pytest.fixture(scope="module")
def reference(tmp_path_factory) -> Reference:
    """Recorded states of SmolLM2-135M-Instruct over random tokens."""
    folder = tmp_path_factory.mktemp("default") / "target"
    prepare_target(Target(), folder)
    input_ids = torch.randint(5, 49000, (TOKENS,), generator=torch.Generator().manual_seed(7))
    states = named_states(load_model(Target(), folder), input_ids)
    aux = torch.stack([states[output_name(layer)] for layer in LAYERS], dim=1)
    return Reference("the dump", "sample-7", input_ids, aux, states)


def answer_with(slots: list[torch.Tensor], reference: Reference) -> Answer:
    """What a server returns that feeds these states, rounded as bfloat16 serves them."""
    completion = Completion([], "", "length", TOKENS, 0, "nonce", 1, 0, (1,), None, 0.0)
    served = torch.cat(slots, dim=1).bfloat16().float()
    return Answer(Prompt(reference.prompt, reference.input_ids.tolist()), completion, [], served, 0)


def test_every_single_slot_error_is_named(reference):
    states, right = reference.states, list(reference.aux.unbind(1))
    outputs = [name for name in states if name.startswith("the output of layer") and name.count("layer") == 1]
    assert len(outputs) == 31  # 30 layers, and the last one after the final norm
    assert len(states) == 1 + 30 * 3 + 1
    for slot, layer in enumerate(LAYERS):
        for name, state in states.items():
            served = [*right[:slot], state, *right[slot + 1 :]]
            rows = compare(answer_with(served, reference), reference, LAYERS)
            assert rows[slot].match.name == name
            assert rows[slot].passes(0.05) == (name == output_name(layer)), name
            assert all(row.passes(0.05) for row in rows if row.slot != slot)


def test_the_runner_up_shows_the_margin(reference):
    row = compare(answer_with(list(reference.aux.unbind(1)), reference), reference, LAYERS)[1]
    assert row.match.runner_up in (output_name(13), output_name(15))
    assert row.match.runner_up_error > 10 * row.match.error
