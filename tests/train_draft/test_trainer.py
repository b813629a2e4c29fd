import os

import pytest
import torch

from tasks.common.errors import DraftlineError
from tasks.common.files import read_json, write_json
from tasks.common.hidden_states import HIDDEN_STATES, HiddenStates, Sample
from tasks.common.locks import alone_on
from tasks.train_draft import __main__ as train_draft
from tasks.train_draft.prepare import prepare_training, write_result
from tasks.train_draft.processes import Processes
from tasks.train_draft.source import DumpedSource
from tests.stored import copy_of, write_split
from tests.train_draft.conftest import CHECKPOINTS, DRAFT, SETTINGS, train


def test_two_runs_give_the_same_bytes(params):
    train(params)
    first = (DRAFT / "draft.safetensors").read_bytes()
    train(params)
    assert (DRAFT / "draft.safetensors").read_bytes() == first


@pytest.mark.parametrize(
    ("device", "killed_after"),
    [
        ("cpu", 1),
        ("cpu", 3),
        ("cpu", 5),
        pytest.param("cuda", 4, marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")),
    ],
)
def test_a_killed_run_resumes_to_the_same_bytes_and_the_same_curve(params, device, killed_after):
    params = params.model_copy(update={"target": params.target.model_copy(update={"device": device})})
    report = train(params)
    whole = {path.name: path.read_bytes() for path in DRAFT.iterdir()}
    for path in DRAFT.iterdir():
        path.unlink()
    train(params, until=killed_after)
    assert train(params) == report
    assert {path.name: path.read_bytes() for path in DRAFT.iterdir()} == whole


def test_nothing_of_the_partial_work_is_left(params):
    train(params)
    assert sorted(path.name for path in DRAFT.iterdir()) == ["draft.json", "draft.safetensors", "vocab_map.safetensors"]


def test_a_cut_off_checkpoint_is_passed_over(params, capsys):
    report = train(params)
    train(params, until=5)
    newest = DRAFT / "checkpoints" / "step-00000004.pt"
    newest.write_bytes(newest.read_bytes()[:1000])
    assert train(params) == report
    assert "going back to the one before" in capsys.readouterr().out


def test_another_learning_rate_starts_anew(params, tiny_params, capsys):
    train(params, until=5)
    changed = tiny_params(train_draft=SETTINGS | {"learning_rate": 0.01})
    trainer, _ = prepare_training(changed, DRAFT)
    assert trainer.step == 0
    assert "starting anew" in capsys.readouterr().out


def test_a_step_of_more_batches_than_memory_holds_is_refused_before_anything_is_written(params, tiny_params):
    changed = tiny_params(train_draft=SETTINGS | {"global_batch_size": 10**9})
    with pytest.raises(
        DraftlineError,
        match=r"global_batch_size 1000000000 .* the 1000000000 batches of a step at once, .* free on cpu",
    ):
        prepare_training(changed, DRAFT)
    assert not DRAFT.exists()


def test_a_draft_vocabulary_beyond_the_targets_is_refused_before_anything_is_computed(params, tiny_params):
    changed = tiny_params(train_draft=SETTINGS | {"draft_vocab_size": 10**6})
    with pytest.raises(DraftlineError, match=r"draft_vocab_size is 1000000, the target's vocabulary has"):
        prepare_training(changed, DRAFT)
    assert not DRAFT.exists()


@pytest.mark.parametrize("changed", [b"", b"\x93NUMPY", None])
def test_greedy_tokens_that_were_changed_on_the_disk_are_computed_again(params, changed, capsys):
    report = train(params)
    train(params, until=5)
    cached = CHECKPOINTS / "heldout_argmax.npy"
    cached.write_bytes(cached.read_bytes()[:-8] + bytes(8) if changed is None else changed)
    assert train(params) == report
    assert "heldout_argmax.npy: cut off or changed since it was written" in capsys.readouterr().out


def test_held_out_states_that_are_not_finite_stop_the_run_at_its_first_evaluation(params):
    states = HiddenStates(HIDDEN_STATES / "heldout")
    samples = [copy_of(states.read(index)) for index in range(len(states))]
    samples[1].last[9] = float("nan")
    write_split(states.folder, states.contract, [samples])
    with pytest.raises(DraftlineError, match=r"step 4: the held-out loss is nan.* hold NaN or Inf"):
        train(params)


@pytest.mark.parametrize("device", ["cuda", "cuda:7"])
def test_a_gpu_that_is_not_there_is_said(tiny_params, device):
    if device == "cuda" and torch.cuda.is_available():
        pytest.skip("it is there")
    with (
        pytest.raises(DraftlineError, match=rf"target.device is {device}, and torch .* Set target.device: cpu"),
        Processes.joined(tiny_params(target={"device": device})),
    ):
        pass


def test_a_second_training_on_the_same_folder_is_refused_and_the_first_is_named(params):
    (DRAFT.parent).mkdir(exist_ok=True)
    with (
        alone_on(DRAFT.with_suffix(".lock"), "{}"),
        pytest.raises(DraftlineError, match=rf"another training \(pid {os.getpid()} on .*\) works there"),
    ):
        train_draft.train(params, None, DumpedSource)
    assert not DRAFT.exists()


def test_another_type_starts_anew_unless_it_is_only_spelled_out(params, tiny_params):
    train(params, until=5)
    in_type = {dtype: tiny_params(train_draft=SETTINGS | {"dtype": dtype}) for dtype in ("float32", "bfloat16")}
    assert prepare_training(in_type["float32"], DRAFT)[0].step == 4
    assert prepare_training(in_type["bfloat16"], DRAFT)[0].step == 0


def test_a_run_goes_on_with_another_number_of_readers_and_other_checkpoints(params, tiny_params):
    train(params, until=5)
    changed = tiny_params(
        train_draft=SETTINGS | {"data_workers": 1, "checkpoint_every": 3, "recompute_activations": True}
    )
    assert params.train_draft.data_workers != 1
    assert prepare_training(changed, DRAFT)[0].step == 4


def test_checkpoint_of_another_vocabulary_map_is_refused(params):
    train(params, until=5)
    record = DRAFT / "checkpoints" / "step-00000004.json"
    write_json(record, read_json(record) | {"vocab_map_sha256": "f" * 64})
    with pytest.raises(DraftlineError, match="rows of the head would mean other tokens"):
        prepare_training(params, DRAFT)


def test_the_best_acceptance_length_with_all_steps_is_kept_not_the_last(params):
    trainer, facts = prepare_training(params, DRAFT)
    for step in trainer.steps():
        if step.step == 4:
            kept = {name: tensor.clone() for name, tensor in trainer.draft.state_dict().items()}
            trainer.curve[-1]["heldout"]["predicted_accept_lengths"][-1] = 99.0
    trainer.curve[-1]["heldout"]["predicted_accept_lengths"][0] = 99.0  # of fewer steps than it is trained for
    report = write_result(trainer, DRAFT, facts)
    assert (report["step"], report["predicted_accept_lengths"][-1]) == (4, 99.0)
    from safetensors.torch import load_file

    saved = load_file(DRAFT / "draft.safetensors")
    assert all(torch.equal(saved[name], kept[name]) for name in kept)


def test_the_best_draft_outlives_the_checkpoints_of_its_time(params, tiny_params):
    longer = tiny_params(train_draft=SETTINGS | {"max_steps": 16})
    trainer, _ = prepare_training(longer, DRAFT)
    for step in trainer.steps():
        if step.step == 4:
            trainer.curve[-1]["heldout"]["predicted_accept_lengths"][-1] = 99.0
        if step.step == 15:
            break
    kept = sorted(path.name for path in (DRAFT / "checkpoints").iterdir() if not path.name.endswith((".json", ".npy")))
    assert kept == ["best-00000004.safetensors", "step-00000012.pt", "step-00000014.pt"]
    trainer, facts = prepare_training(longer, DRAFT)
    for _ in trainer.steps():
        pass
    assert write_result(trainer, DRAFT, facts)["step"] == 4


@pytest.mark.parametrize(
    ("from_target", "expected"),
    [(False, "the loss is nan on samples .*train-4"), (True, "sample train-4 holds .* values that are NaN or Inf")],
)
def test_states_that_are_not_finite_name_their_sample(params, tiny_params, from_target, expected):
    states = HiddenStates(HIDDEN_STATES / "train")
    samples = [states.read(i) for i in range(len(states))]
    poisoned = samples[4]
    samples[4] = Sample(poisoned.id, poisoned.input_ids, poisoned.loss_mask, poisoned.aux * float("nan"), poisoned.last)
    for path in states.folder.iterdir():
        path.unlink()
    write_split(states.folder, states.contract, [samples])
    with pytest.raises(DraftlineError, match=expected):
        train(tiny_params(train_draft=SETTINGS | {"init_from_target": from_target}))


def test_states_of_another_contract_in_one_split_are_refused(params):
    manifest = HIDDEN_STATES / "heldout" / "manifest.json"
    content = read_json(manifest)
    content["contract"]["aux_layer_ids"] = [0, 3, 4]
    write_json(manifest, content)
    with pytest.raises(DraftlineError, match=r"aux_layer_ids: \(1, 3, 4\) in .*train, \(0, 3, 4\) in .*heldout"):
        train(params)


def test_a_learned_draft_beats_the_start(params, tiny_params):
    longer = tiny_params(train_draft=SETTINGS | {"max_steps": 150, "evaluate_every": 10})
    curve = train(longer)["curve"]
    assert curve[-1]["loss"] < 0.7 * curve[0]["loss"]
