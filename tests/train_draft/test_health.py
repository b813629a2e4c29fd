"""What stops a run, planted in real ones; and traces of sound runs, which nothing may stop."""

import json
import math
import random

import pytest

from tasks.common.errors import DraftlineError
from tasks.common.hidden_states import HIDDEN_STATES, HiddenStates
from tasks.common.params import TrainDraft
from tasks.train_draft.health import BatchVitals, Health, Vitals, target_entropy
from tasks.train_draft.prepare import prepare_training
from tests.stored import copy_of, write_split
from tests.train_draft.conftest import DRAFT, SETTINGS

STEPS = 1000


def health(entropy: float = 1.0, **settings) -> Health:
    params = TrainDraft(ttt_length=1, max_steps=STEPS, **settings)
    return Health(params, lambda: entropy, lambda value: [value])


def vitals(step: int, loss: float = 2.0, norm: float = 1.0, supervised: int = 100, loss_positions: int = 90) -> Vitals:
    batches = (BatchVitals((f"a-{step}", f"b-{step}"), loss * loss_positions),)
    return Vitals(step, loss, norm, supervised, loss_positions, batches)


def examine(watching: Health, losses, norms=None, resumed_after: int | None = None) -> None:
    for step, (loss, norm) in enumerate(zip(losses, norms or [1.0] * len(losses), strict=True), 1):
        watching.examine(vitals(step, loss, norm))
        if step == resumed_after:
            watching = resumed(watching)


def resumed(watching: Health) -> Health:
    """What a new process makes of a checkpoint."""
    state = json.loads(json.dumps(watching.state_dict()))  # of numbers and names alone
    watching = health()
    watching.load_state_dict(state)
    return watching


def noisy(level, spread: float = 0.02) -> list[float]:
    """Losses around `level(step)`, as batches of unlike difficulty give them."""
    chance = random.Random(0)
    return [level(step) * (1 + spread * chance.gauss(0, 1)) for step in range(STEPS)]


@pytest.mark.parametrize(
    "level",
    [
        lambda step: 2.0 + 6.0 * math.exp(-step / 300),
        lambda step: 2.0 + 6.0 * math.exp(-step / 10),  # converged within the first window
        lambda step: 8.0 if step < 80 else 6.0,  # a plateau, and a step down
        lambda step: 8.0 - 0.0005 * step,  # slow
        lambda step: 8.0 + 2.0 * math.exp(-(((step - 60) / 30) ** 2)) - step / 500,  # rises first
        lambda step: 1.04,  # began at the target's own entropy
    ],
    ids=["falling", "fast", "plateau", "slow", "rising", "converged"],
)
@pytest.mark.parametrize("spread", [0.0001, 0.02, 0.2])
def test_a_sound_loss_stops_nothing(level, spread):
    examine(health(), noisy(level, spread))


def test_norms_of_sound_runs_stop_nothing():
    chance = random.Random(0)
    norms = [(10 - 9 * step / STEPS) * math.exp(chance.gauss(0, 0.7)) for step in range(STEPS)]
    norms[100] = norms[500] = norms[501] = 1e4  # spikes, which are clipped
    examine(health(), noisy(lambda step: 2 + 6 * math.exp(-step / 300)), norms)


@pytest.mark.parametrize("resumed_after", [None, 70])
@pytest.mark.parametrize("spread", [0.0001, 0.005, 0.02])
def test_a_loss_that_stands_still_stops_the_run(resumed_after, spread):
    with pytest.raises(
        DraftlineError, match=r"step \d00: the loss does not move: [78]\..*entropy is 1.000.* a-\d00, b-\d00"
    ):
        examine(health(), noisy(lambda step: 8.0, spread), resumed_after=resumed_after)


def test_a_standstill_is_not_called_before_warm_up_is_over():
    examine(health(warmup_steps=400), noisy(lambda step: 8.0, 0.0001)[:799])


@pytest.mark.parametrize("resumed_after", [None, 20, 41, 44])
def test_norms_far_above_the_usual_for_several_steps_name_the_first(resumed_after):
    norms = [1.0 + 0.1 * (step % 3) for step in range(40)] + [60.0, 80.0, 90.0, 200.0, 900.0]
    with pytest.raises(
        DraftlineError, match=r"step 45: .* 900, more than 50 times .* since step 41 on samples a-41, b-41"
    ):
        examine(health(), [2.0 - step / 100 for step in range(45)], norms, resumed_after)


@pytest.mark.parametrize("resumed_after", [None, 3, 54, 70, 104])
def test_a_loss_that_stays_far_above_its_start_stops_the_run(resumed_after):
    losses = [10.0] * 5 + [16.0] * 49 + [9.0] + [16.0] * 50
    with pytest.raises(
        DraftlineError, match=r"step 105: the loss is 16, and for 50 steps .* than 1.5 times the 10 .* a-105"
    ):
        examine(health(), losses, resumed_after=resumed_after)


@pytest.mark.parametrize("field", ["loss", "norm"])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_value_that_is_not_finite_names_its_samples(field, value):
    with pytest.raises(DraftlineError, match=r"step 3: the .* is (nan|inf) on samples a-3, b-3, .*learning_rate"):
        health().examine(vitals(3, **{field: value}))


def test_of_several_batches_the_one_that_is_not_finite_is_named():
    batches = (BatchVitals(("fine",), 1.0), BatchVitals(("bad",), math.nan), BatchVitals(("fine too",), 2.0))
    with pytest.raises(DraftlineError, match=r"is nan on samples bad,"):
        health().examine(Vitals(1, math.nan, 1.0, 100, 90, batches))


def test_a_step_without_a_supervised_position_names_its_samples():
    with pytest.raises(DraftlineError, match=r"no position is supervised in samples a-1, b-1: .* chat template"):
        health().examine(vitals(1, supervised=0, loss_positions=0))


def test_a_step_whose_targets_all_lie_outside_the_draft_vocabulary_names_its_samples():
    with pytest.raises(DraftlineError, match=r"none of the 100 supervised positions .* a-1, b-1: .*draft_vocab_size"):
        health().examine(vitals(1, loss_positions=0))
    health().examine(vitals(1, supervised=3, loss_positions=0))  # by chance


@pytest.mark.parametrize(
    ("supervised", "says"), [(0, "train: no token has loss mask 1"), (2, "train: none of the 9 samples .*train-0, ")]
)
def test_an_epoch_without_a_supervised_position_starts_no_run(params, tiny_params, supervised, says):
    """R6, D1: of the first two tokens, which nothing predicts, it does not help to be supervised."""
    states = HiddenStates(HIDDEN_STATES / "train")
    samples = [copy_of(states.read(index)) for index in range(len(states))]
    for sample in samples:
        sample.loss_mask.zero_()[:supervised] = 1
    for path in states.folder.iterdir():
        path.unlink()
    write_split(states.folder, states.contract, [samples])
    with pytest.raises(DraftlineError, match=says):
        prepare_training(tiny_params(train_draft=SETTINGS | {"draft_vocab_size": 320}), DRAFT)


@pytest.fixture
def run(params, tiny_params):
    def run(max_steps: int, **settings):
        changed = SETTINGS | {"max_steps": max_steps, "evaluate_every": 1000, "checkpoint_every": 1000} | settings
        trainer, _ = prepare_training(tiny_params(train_draft=changed), DRAFT)
        for _ in trainer.steps():
            pass

    return run


@pytest.mark.parametrize(
    ("learning_rate", "from_target", "says"),
    [
        (1e-9, False, r"step 100: the loss does not move: 1\d\.\d+ over the first 50 steps"),
        (
            100.0,
            False,
            r"step \d+: (the norm of the gradient is .* times the usual|the loss is .* more than 1.5 times)",
        ),
    ],
)
def test_a_wrong_learning_rate_stops_a_real_run(run, learning_rate, from_target, says):
    with pytest.raises(DraftlineError, match=rf"{says}.*train-\d.*learning_rate"):
        run(110, learning_rate=learning_rate, init_from_target=from_target)


def test_no_loss_is_below_the_targets_entropy(params):
    trainer, _ = prepare_training(params, DRAFT)
    entropy = target_entropy(trainer.head, trainer.heldout)
    assert 0 < entropy < math.log(200)
    assert all(step.loss > entropy for step in trainer.steps())
