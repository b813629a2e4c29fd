from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks.common.files import read_json, read_jsonl, write_json, write_jsonl
from tasks.common.hidden_states import HIDDEN_STATES, HiddenStates, Sample
from tasks.common.params import ContractParams
from tasks.common.responses import RESPONSES
from tasks.common.target import load_model
from tasks.dump_hidden_states.dump import dump
from tasks.gates.replay import replay_limit
from tests.stored import close_again, copy_of, write_shard

TRAIN = HIDDEN_STATES / "train"
SHARD = TRAIN / "shard-00000.safetensors"
WRITTEN = "The states are the bytes that were written"
REPLAYED = "A state is what the target computes there, alone and unpadded"
SAME_AS_ANSWER = "Token ids and loss mask are those of the answer"


def names(shard: str = "shard-00000") -> list[str]:
    return read_json(TRAIN / f"{shard}.json")["samples"]["id"]


def rewrite(change, *numbers: int) -> list[str]:
    """Write the first shard again, checksums and all, with some samples changed (no number: all); returns their ids."""
    states = HiddenStates(TRAIN)
    samples = [copy_of(states.read(number)) for number in range(len(names()))]
    numbers = numbers or tuple(range(len(samples)))
    for number in numbers:
        samples[number] = change(samples[number])
    write_shard(TRAIN, "shard-00000", samples, read_json(TRAIN / "shard-00000.json")["plan_sha256"])
    close_again(states)
    return [samples[number].id for number in numbers]


def change_first(tensor: torch.Tensor, value: float) -> torch.Tensor:
    tensor.view(-1)[0] = value
    return tensor


def test_dumped_states_pass(run, judge):
    verdict = judge("hidden_states", gates={"replay_samples": 2})
    assert verdict.error == ""
    assert verdict.report["figures"]["samples"] == 12
    (replayed,) = [table["rows"] for table in verdict.report["tables"] if table["name"] == "replay"]
    assert replayed == 16  # 2 samples of each split, 3 aux slots and the last state of each


def test_verdict_and_page_are_the_same_bytes_again(run, judge):
    first, second = (judge("hidden_states", gates={"replay_samples": 1}) for _ in range(2))
    assert first == second
    assert str(run) not in first.page


def test_a_flipped_byte_names_the_sample(run, judge):
    states = HiddenStates(TRAIN)
    sample = states.read(1)
    value = sample.aux[-1, 0, :4].numpy().tobytes()  # the first rows are alike in all samples
    content = bytearray(SHARD.read_bytes())
    content[content.index(value)] ^= 1
    SHARD.write_bytes(content)
    verdict = judge("hidden_states")
    assert verdict.samples(WRITTEN) == [names()[1]]
    assert verdict.samples("Every shard has the checksum that was recorded when it was written") == [
        "train/shard-00000"
    ]
    assert names()[1] in verdict.error


def test_a_nan_names_the_sample(run, judge):
    [broken] = rewrite(lambda s: replace(s, aux=change_first(s.aux, float("nan"))), 2)
    verdict = judge("hidden_states")
    assert verdict.samples("Every state is finite") == [broken]
    assert WRITTEN not in verdict.outcome("failed")


def test_a_row_too_few_names_the_sample_that_lacks_it(run, judge):
    tensors = load_file(SHARD)
    save_file({**tensors, "aux": tensors["aux"][:-1].contiguous()}, SHARD)
    verdict = judge("hidden_states")
    assert verdict.samples("Every token has a row of states") == [names()[-1]]


def test_samples_that_a_short_shard_does_not_hold_are_named(run, judge):
    tensors = load_file(SHARD)
    first = int(tensors["sample_offsets"][1])
    save_file({**tensors, "last": tensors["last"][: first - 1].contiguous()}, SHARD)
    verdict = judge("hidden_states")
    assert verdict.samples("Every stored sample can be read") == sorted(names()[1:])
    assert verdict.samples("Every token has a row of states") == names()[:1]


def test_a_manifest_with_another_layer_set_is_refused(run, judge):
    manifest = read_json(TRAIN / "manifest.json")
    manifest["contract"]["aux_layer_ids"] = [2, 3, 4]
    write_json(TRAIN / "manifest.json", manifest)
    verdict = judge("hidden_states")
    (sentence,) = verdict.outcome("failed")
    assert verdict.samples(sentence) == ["aux_layer_ids"]
    assert "delete artifacts/hidden_states, then `dvc repro`" in verdict.error  # --force would keep the shards


def test_states_of_another_layer_are_found_by_replay_which_names_it(run, judge, params):
    honest = {split: read_json(HIDDEN_STATES / split / "manifest.json") for split in ("train", "heldout")}
    dump(params.model_copy(update={"contract": ContractParams(aux_layer_ids=(1, 2, 4))}))
    for split, manifest in honest.items():
        path = HIDDEN_STATES / split / "manifest.json"
        write_json(path, read_json(path) | {"contract": manifest["contract"]})
    verdict = judge("hidden_states", gates={"replay_samples": 2})
    assert verdict.outcome("failed") == [REPLAYED]
    assert {name.split(maxsplit=1)[1] for name in verdict.samples(REPLAYED)} == {"slot 1"}
    assert "the contract says the output of layer 3; it is the output of layer 2" in verdict.error


def test_the_embedding_in_place_of_a_layer_is_found_by_replay_which_names_it(run, judge, params):
    """H8: a comment said that the first slot is the embedding, and a fix was built on it."""
    embedding = load_model(params.target).get_input_embeddings()

    def with_embedding(sample: Sample) -> Sample:
        sample.aux[:, 0] = embedding(sample.input_ids.long()).detach()
        return sample

    planted = rewrite(with_embedding)
    verdict = judge("hidden_states", gates={"replay_samples": 8})
    assert set(verdict.samples(REPLAYED)) == {f"{name} slot 0" for name in planted}
    assert "the contract says the output of layer 1; it is the embedding" in verdict.error


def test_the_limit_of_the_replay_follows_the_types(params):
    def limit(dtype: str, storage_dtype: str, **gates) -> float:
        return replay_limit(
            params.model_copy(
                update={
                    "target": params.target.model_copy(update={"dtype": dtype}),
                    "dump": params.dump.model_copy(update={"storage_dtype": storage_dtype}),
                    "gates": params.gates.model_copy(update=gates),
                }
            )
        )

    assert limit("float32", "float32") == 1e-4
    assert limit("bfloat16", "bfloat16") == 0.05 < limit("bfloat16", "float8")
    assert limit("float32", "float32", max_replay_error=0.02) == 0.02


@pytest.mark.parametrize("storage_dtype", ["float16", "bfloat16", "float8"])
def test_rounding_to_the_stored_type_passes_the_replay_by_the_limit_of_that_type(run, judge, params, storage_dtype):
    stored = params.model_copy(update={"dump": params.dump.model_copy(update={"storage_dtype": storage_dtype})})
    dump(stored)
    verdict = judge("hidden_states", gates={"replay_samples": 2}, dump={"storage_dtype": storage_dtype})
    assert verdict.error == ""
    exact = judge(
        "hidden_states", gates={"replay_samples": 2, "max_replay_error": 1e-5}, dump={"storage_dtype": storage_dtype}
    )
    assert exact.outcome("failed") == [REPLAYED]


def test_rows_that_a_batch_mixed_up_are_found_by_replay(run, judge):
    [mixed] = rewrite(lambda s: replace(s, last=s.last.roll(1, 0)), 0)
    verdict = judge("hidden_states", gates={"replay_samples": 8})
    assert verdict.outcome("failed") == [REPLAYED]
    assert verdict.samples(REPLAYED) == [f"{mixed} last"]


@pytest.mark.parametrize("break_shard", [lambda: SHARD.unlink(), lambda: SHARD.write_bytes(SHARD.read_bytes()[:-400])])
def test_a_shard_that_cannot_be_read_is_named_with_its_samples(run, judge, break_shard):
    expected = sorted(names())
    break_shard()
    verdict = judge("hidden_states")
    assert verdict.samples("Every shard can be read") == ["train/shard-00000"]
    assert verdict.samples("Every stored sample can be read") == expected


@pytest.fixture
def judge_float8(run, judge, params):
    """Judge the run, dumped as float8, after `change(tensors)` of its first shard."""
    dump(params.model_copy(update={"dump": params.dump.model_copy(update={"storage_dtype": "float8"})}))

    def judge_changed(change):
        save_file(change(load_file(SHARD)), SHARD)
        return judge("hidden_states", dump={"storage_dtype": "float8"}, gates={"replay_samples": 8})

    return judge_changed


@pytest.mark.parametrize("scales", ["aux_scale", "last_scale"])
def test_float8_without_its_scales_is_no_float8(judge_float8, scales):
    verdict = judge_float8(lambda tensors: {name: tensor for name, tensor in tensors.items() if name != scales})
    assert verdict.samples("States are stored as dump.storage_dtype") == sorted(names())
    assert "float8_e4m3fn without scales" in verdict.error


@pytest.mark.parametrize("name", ["aux", "last"])
def test_both_states_are_stored_in_the_type_asked_for(run, judge, name):
    tensors = load_file(SHARD)
    save_file({**tensors, name: tensors[name].half()}, SHARD)
    verdict = judge("hidden_states")
    assert verdict.samples("States are stored as dump.storage_dtype") == sorted(names())
    assert "float16 and float32" in verdict.error


def cut_to_nothing(tensor: torch.Tensor) -> torch.Tensor:
    return tensor[:0]


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("aux", cut_to_nothing, "aux is float8_e4m3fn [0, 3, 64]"),
        ("input_ids", cut_to_nothing, "input_ids is int32 [0]"),
        ("aux_scale", lambda t: t[:, :2].contiguous(), "aux_scale is float32 [{tokens}, 2]"),
        ("aux_scale", lambda t: t.half(), "aux_scale is float16 [{tokens}, 3]"),
        ("last_scale", lambda t: t[:, None].contiguous(), "last_scale is float32 [{tokens}, 1]"),
        ("input_ids", lambda t: t[:, None].contiguous(), "input_ids is int32 [{tokens}, 1]"),
        ("input_ids", lambda t: t.long(), "input_ids is int64 [{tokens}]"),
        ("input_ids", lambda t: t[0].clone(), "input_ids is int32 []"),
        ("loss_mask", lambda t: t.float(), "loss_mask is float32 [{tokens}]"),
        ("sample_offsets", lambda t: t.int(), "sample_offsets is int32 [{samples}]"),
        ("aux", lambda t: t.flatten(1), "aux is float8_e4m3fn [{tokens}, 192]"),
        ("last", lambda t: t[:, None].contiguous(), "last is float8_e4m3fn [{tokens}, 1, 64]"),
        ("last", lambda t: t.view(torch.uint8), "last is uint8 [{tokens}, 64]"),
        ("last", lambda t: t[:, :32].contiguous(), "last is float8_e4m3fn [{tokens}, 32]"),
    ],
)
def test_a_tensor_that_no_shard_has_is_named_with_what_was_expected(judge_float8, name, change, said):
    sizes = {"tokens": sum(read_json(TRAIN / "shard-00000.json")["samples"]["tokens"]), "samples": len(names()) + 1}
    verdict = judge_float8(lambda tensors: {**tensors, name: change(tensors[name])})
    assert verdict.samples("Every shard can be read") == ["train/shard-00000"]
    assert verdict.samples("Every stored sample can be read") == sorted(names())
    assert f"cannot be read: {said.format(**sizes)}, expected " in verdict.error


@pytest.mark.parametrize("name", ["sample_offsets", "input_ids", "loss_mask", "aux", "last"])
def test_a_shard_that_lacks_a_tensor_cannot_be_read(run, judge, name):
    save_file({other: tensor for other, tensor in load_file(SHARD).items() if other != name}, SHARD)
    verdict = judge("hidden_states")
    assert verdict.samples("Every shard can be read") == ["train/shard-00000"]
    assert f"cannot be read: '{name}'" in verdict.error


def test_states_of_another_width_are_named_though_their_slots_make_up_for_it(run, judge):
    tensors = load_file(SHARD)
    halves = {"aux": tensors["aux"].unflatten(-1, (2, 32)).flatten(1, 2), "last": tensors["last"][:, :32].contiguous()}
    save_file(tensors | halves, SHARD)
    verdict = judge("hidden_states", gates={"replay_samples": 8})
    assert verdict.samples("The last state is as wide as the target") == sorted(names())


def test_an_answer_without_states_is_named(run, judge):
    manifest = read_json(TRAIN / "manifest.json")
    lost = sorted(names(manifest["shards"].pop()["name"]))
    write_json(TRAIN / "manifest.json", manifest)
    assert judge("hidden_states").samples("Every answer has exactly one stored sample") == lost


def test_states_of_an_answer_that_is_gone_are_named(run, judge):
    rows = list(read_jsonl(RESPONSES / "train.jsonl"))
    write_jsonl(RESPONSES / "train.jsonl", rows[1:])
    assert judge("hidden_states").samples("Every stored sample belongs to an answer") == [rows[0]["id"]]


def test_states_of_other_tokens_are_named(run, judge):
    rows = list(read_jsonl(RESPONSES / "train.jsonl"))
    rows[3]["output_token_ids"][0] += 1
    write_jsonl(RESPONSES / "train.jsonl", rows)
    verdict = judge("hidden_states")
    assert verdict.outcome("failed") == [SAME_AS_ANSWER]
    assert verdict.samples(SAME_AS_ANSWER) == [rows[3]["id"]]


def test_a_mask_of_zeros_is_named(run, judge):
    [unmasked] = rewrite(lambda s: replace(s, loss_mask=s.loss_mask * 0), 1)
    assert judge("hidden_states").samples("Every sample has a token to learn from") == [unmasked]


def test_a_last_state_without_the_final_norm_is_named(run, judge):
    [raw] = rewrite(lambda s: replace(s, last=s.last * 1.2), 0)
    verdict = judge("hidden_states")
    assert verdict.outcome("failed") == ["The last state has the rms of one that went through the final norm"]
    assert verdict.samples("The last state has the rms of one that went through the final norm") == [raw]
    assert "rms of last / norm weight 1.2" in verdict.error


def test_a_slot_of_zeros_is_named(run, judge):
    def without_slot_1(sample: Sample) -> Sample:
        sample.aux[:, 1] = 0
        return sample

    [empty] = rewrite(without_slot_1, 2)
    verdict = judge("hidden_states")
    assert verdict.outcome("failed") == ["The norm of slot 1 (layer 3) is like that of the other samples"]
    assert verdict.samples("The norm of slot 1 (layer 3) is like that of the other samples") == [empty]


def test_one_layers_width_points_at_a_server_started_with_eagle(run, judge):
    rewrite(lambda s: replace(s, aux=s.aux[:, :1].clone()))
    verdict = judge("hidden_states")
    assert verdict.samples("Aux states are 3 layers of 64 wide") == names()
    assert "--speculative-algorithm EAGLE3" in verdict.error


def test_statistics_that_are_not_those_of_the_states_name_the_sample(run, judge):
    states = HiddenStates(TRAIN)
    sidecar = read_json(TRAIN / "shard-00000.json")
    sidecar["samples"]["mask_tokens"][1] += 1
    write_json(TRAIN / "shard-00000.json", sidecar)
    close_again(states)
    verdict = judge("hidden_states")
    assert verdict.outcome("failed") == ["The recorded statistics are those of the states"]
    assert verdict.samples("The recorded statistics are those of the states") == [names()[1]]


def test_a_table_that_was_edited_is_refused(run, judge):
    table = TRAIN / "samples.parquet"
    table.write_bytes(table.read_bytes()[:-1] + b"x")
    assert "samples.parquet: not the table that the manifest beside it was written with" in judge("hidden_states").error
