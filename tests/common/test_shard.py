"""The file of one shard: what it costs, what it holds, and that no change of it goes unnoticed."""

import errno
import pickle

import numpy as np
import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from tasks.common import shard as shard_module
from tasks.common.contract import Contract
from tasks.common.errors import DraftlineError
from tasks.common.files import read_json
from tasks.common.hidden_states import HiddenStates, Sample
from tasks.common.shard import ShardWriter, StoredShard, shard_is_done
from tasks.common.shard_layout import ShardPlan
from tasks.common.storage import StoredRows, _by_copy, _by_kernels, bytes_per_token
from tests.stored import write_shard, write_split

TYPES = ["float32", "bfloat16", "float16", "float8"]
CONTRACT = Contract(
    architecture="LlamaForCausalLM",
    num_layers=8,
    hidden_size=16,
    vocab_size=50,
    aux_layer_ids=(1, 3),
    last_is_normed=True,
    target_sha256="t",
    tokenizer_sha256="k",
)


def make_samples(lengths=(5, 1, 9)) -> list[Sample]:
    generator = torch.Generator().manual_seed(0)
    return [
        Sample(
            f"s{number}",
            torch.randint(50, (tokens,), generator=generator, dtype=torch.int32),
            (torch.arange(tokens) % 2).to(torch.uint8),
            torch.randn(tokens, 2, 16, generator=generator) * 10,
            torch.randn(tokens, 16, generator=generator),
        )
        for number, tokens in enumerate(lengths)
    ]


def plan_of(samples: list[Sample]) -> ShardPlan:
    return ShardPlan.of("shard-00000", "plan", [(s.id, s.input_ids.tolist(), s.loss_mask.tolist()) for s in samples])


def rows_of(sample: Sample, storage_dtype: str = "float32") -> StoredRows:
    return StoredRows.of(sample.aux, sample.last, storage_dtype)


@pytest.mark.parametrize("storage_dtype", TYPES)
def test_a_sample_is_read_as_it_was_written_within_the_stored_type(tmp_path, storage_dtype):
    samples = make_samples()
    states = write_split(tmp_path, CONTRACT, [samples[:2], samples[2:]], storage_dtype)
    relative = {"float32": 0, "bfloat16": 2**-8, "float16": 2**-11, "float8": 2**-4}[storage_dtype]
    for index, sample in enumerate(samples):
        read = states.read(index)
        assert (read.id, read.input_ids.tolist()) == (sample.id, sample.input_ids.tolist())
        assert read.loss_mask.tolist() == sample.loss_mask.tolist()
        for found, written in ((read.aux, sample.aux), (read.last, sample.last)):
            largest = written.abs().amax(-1, keepdim=True)
            # Below a float8's normal range steps are those of the range: 2^-10 of 448 that the largest value has.
            assert ((found.float() - written).abs() <= relative * written.abs() + largest / 448 * 2**-10).all()


@pytest.mark.parametrize("storage_dtype", TYPES)
def test_the_size_calculator_is_right_to_the_byte(tmp_path, storage_dtype):
    samples = make_samples((400, 600))
    write_shard(tmp_path, "shard-00000", samples, "plan", storage_dtype)
    header = len(shard_module.Layout(1000, 2, 2, 16, storage_dtype).header)
    size = (tmp_path / "shard-00000.safetensors").stat().st_size
    assert size == 1000 * bytes_per_token(2, 16, storage_dtype) + 8 * 3 + header


def test_a_scale_a_token_and_slot_keeps_the_small_beside_the_large():
    aux = torch.randn(4, 3, 64, generator=torch.Generator().manual_seed(0))
    aux[0] *= 25_000  # an attention sink
    aux[:, 1] *= 1e-3
    aux[2, 2] = 0
    rows = StoredRows.of(aux, aux[:, 0], "float8")
    error = (rows.aux.float() * rows.aux_scale[..., None] - aux).norm(dim=-1)
    assert (error <= 0.04 * aux.norm(dim=-1)).all()


@pytest.mark.parametrize("storage_dtype", TYPES)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_no_numbers_are_counted_in_every_type(tmp_path, storage_dtype, value):
    samples = make_samples()
    samples[2].last[4, 3] = value
    states = write_split(tmp_path, CONTRACT, [samples], storage_dtype)
    nonfinite = states.column("num_nonfinite")
    assert nonfinite[:2].tolist() == [0, 0]
    assert nonfinite[2] == (16 if storage_dtype == "float8" else 1)
    assert np.isnan(states.column("last_norm")).tolist() == [False, False, True]


def test_statistics_are_those_of_each_sample(tmp_path):
    samples = make_samples()
    samples[0].aux[1, 1, 3] = -500
    states = write_split(tmp_path, CONTRACT, [samples])
    for index, sample in enumerate(samples):
        row = {name: values[index] for name, values in states.table.to_pydict().items()}
        assert row["tokens"] == sample.num_tokens
        assert row["mask_tokens"] == sample.loss_mask.sum()
        assert row["norm_slot_1"] == pytest.approx(sample.aux[:, 1].norm(dim=-1).mean().item(), rel=1e-5)
        assert row["last_norm"] == pytest.approx(sample.last.norm(dim=-1).mean().item(), rel=1e-5)
        assert row["max_abs"] == pytest.approx(max(sample.aux.abs().max(), sample.last.abs().max()).item(), rel=1e-5)


def test_any_safetensors_reader_reads_a_shard(tmp_path):
    samples = make_samples()
    write_shard(tmp_path, "shard-00000", samples, "plan", "bfloat16")
    tensors = load_file(tmp_path / "shard-00000.safetensors")
    assert tensors["sample_offsets"].tolist() == [0, 5, 6, 15]
    assert torch.equal(tensors["aux"], torch.cat([s.aux for s in samples]).bfloat16())


@pytest.mark.parametrize("storage_dtype", ["bfloat16", "float8"])
def test_every_byte_of_the_file_is_under_the_checksum(tmp_path, storage_dtype):
    write_shard(tmp_path, "shard-00000", make_samples(), "plan", storage_dtype)
    path, recorded = tmp_path / "shard-00000.safetensors", read_json(tmp_path / "shard-00000.json")["checksum"]
    whole = path.read_bytes()
    offsets = np.array([0, 5, 6, 15])
    data = 8 + int.from_bytes(whole[:8], "little")
    unnoticed, unparsed = [], []
    for position in range(len(whole)):
        path.write_bytes(whole[:position] + bytes([whole[position] ^ 1]) + whole[position + 1 :])
        try:
            shard = StoredShard(path)
        except (SafetensorError, KeyError):
            unparsed.append(position)
            continue
        if shard.checksum(shard.sample_checksums(offsets)) == recorded:
            unnoticed.append(position)
    assert unnoticed == []
    assert max(unparsed) < data  # of the states and all else behind the header every byte was hashed
    path.write_bytes(whole)
    shard = StoredShard(path)
    assert shard.checksum(shard.sample_checksums(offsets)) == recorded


def test_the_header_is_under_the_checksum(tmp_path):
    write_shard(tmp_path, "shard-00000", make_samples(), "plan", "bfloat16")
    path, recorded = tmp_path / "shard-00000.safetensors", read_json(tmp_path / "shard-00000.json")["checksum"]
    path.write_bytes(path.read_bytes().replace(b'"BF16"', b'"F16" '))
    shard = StoredShard(path)
    assert shard.aux.dtype == torch.float16
    assert shard.checksum(shard.sample_checksums(np.array([0, 5, 6, 15]))) != recorded


def test_rows_may_come_in_any_order_and_in_pieces(tmp_path):
    samples = make_samples()
    write_shard(tmp_path / "whole", "shard-00000", samples, "plan")
    (tmp_path / "pieces").mkdir()
    with ShardWriter(tmp_path / "pieces", plan_of(samples), 2, 16, "float32") as shard:
        last, first = rows_of(samples[2]), rows_of(samples[0])
        shard.write(6 + 4, last[4:9])
        shard.write(0, first)
        shard.write(5, rows_of(samples[1]))
        assert not shard.is_complete
        shard.write(6, last[0:4])
        assert shard.is_complete
    for name in ("shard-00000.safetensors", "shard-00000.json"):
        assert (tmp_path / "pieces" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_a_token_without_states_leaves_nothing_and_is_named(tmp_path):
    samples = make_samples()
    with (
        pytest.raises(DraftlineError, match=r"2 of 15 tokens have no states, the first of them token 7 of sample s2"),
        ShardWriter(tmp_path, plan_of(samples), 2, 16, "float32") as shard,
    ):
        shard.write(0, rows_of(samples[0]))
        shard.write(5, rows_of(samples[1]))
        shard.write(6, rows_of(samples[2])[0:7])
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_is_met_before_the_first_state(tmp_path, monkeypatch):
    def full(*_):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(shard_module.os, "posix_fallocate", full)
    with (
        pytest.raises(DraftlineError, match="the disk is full"),
        ShardWriter(tmp_path, plan_of(make_samples()), 2, 16, "float32"),
    ):
        pass
    assert list(tmp_path.iterdir()) == []


def test_reading_copies_nothing(tmp_path):
    states = write_split(tmp_path, CONTRACT, [make_samples()])
    first, again = states.read(2), states.read(2)
    assert first.aux.data_ptr() == again.aux.data_ptr()
    assert first.aux.data_ptr() == states.read(1).aux.data_ptr() + states.read(1).aux.nbytes


def test_a_reader_travels_to_a_worker_without_its_maps(tmp_path):
    states = write_split(tmp_path, CONTRACT, [make_samples()])
    expected = states.read(1)
    there = pickle.loads(pickle.dumps(states))
    assert torch.equal(there.read(1).aux, expected.aux)


def test_a_reader_keeps_few_shards_open(tmp_path, monkeypatch):
    monkeypatch.setattr("tasks.common.hidden_states._OPEN_SHARDS", 2)
    samples = make_samples((3, 4, 5, 6))
    states = write_split(tmp_path, CONTRACT, [[sample] for sample in samples])
    for index in (0, 1, 2, 0, 3):
        assert torch.equal(states.read(index).aux, samples[index].aux)
    assert list(states._opened) == [0, 3]


@pytest.mark.parametrize("name", ["aux", "last", "aux_scale", "last_scale", "input_ids", "loss_mask"])
def test_a_sample_that_its_shard_does_not_hold_whole_is_named_and_the_others_are_read(tmp_path, name):
    states = write_split(tmp_path, CONTRACT, [make_samples((5, 1, 9))], "float8")
    path = tmp_path / "shard-00000.safetensors"
    tensors = load_file(path)
    save_file(tensors | {name: tensors[name][:-1].clone()}, path)
    assert states.read(1).num_tokens == 1
    for read in (states.read, states.read_tokens):
        with pytest.raises(
            DraftlineError,
            match=r"shard-00000.safetensors: holds 14 tokens, .* sample s2 is 6 to 15\. Delete the shard and run `dvc repro`",
        ):
            read(2)


def test_a_split_without_samples_can_be_opened(tmp_path):
    assert len(write_split(tmp_path, CONTRACT, [])) == 0


def test_the_manifest_says_what_was_computed_by_what(tmp_path):
    write_split(tmp_path, CONTRACT, [make_samples()], "float8")
    manifest = read_json(tmp_path / "manifest.json")
    assert manifest["format_version"] == 2
    assert manifest["contract"]["tokenizer_sha256"] == "k"
    assert manifest["engine"] == {"name": "test", "version": None}
    assert (manifest["storage_dtype"], manifest["samples"], manifest["tokens"]) == ("float8", 3, 15)
    assert HiddenStates(tmp_path).engine == manifest["engine"]


def test_a_writer_killed_before_its_sidecar_leaves_nothing_that_counts(tmp_path, monkeypatch):
    """The old sidecar of the same plan would vouch for bytes that it never saw."""
    write_shard(tmp_path, "shard-00000", make_samples(), "plan")
    assert shard_is_done(tmp_path, "shard-00000", "plan")

    def killed(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(shard_module, "write_atomically", killed)
    with pytest.raises(KeyboardInterrupt):
        write_shard(tmp_path, "shard-00000", make_samples(), "plan")
    assert not shard_is_done(tmp_path, "shard-00000", "plan")


@pytest.mark.parametrize("size", [0, -1])
def test_a_shard_of_another_size_does_not_count_as_done(tmp_path, size):
    write_shard(tmp_path, "shard-00000", make_samples(), "plan")
    path = tmp_path / "shard-00000.safetensors"
    path.write_bytes(path.read_bytes()[:size])
    assert not shard_is_done(tmp_path, "shard-00000", "plan")


@pytest.mark.parametrize("content", ["", "{", None])
def test_a_sidecar_that_cannot_be_read_does_not_count(tmp_path, content):
    write_shard(tmp_path, "shard-00000", make_samples(), "plan")
    sidecar = tmp_path / "shard-00000.json"
    sidecar.unlink() if content is None else sidecar.write_text(content)
    assert not shard_is_done(tmp_path, "shard-00000", "plan")


def test_bytes_are_on_the_disk_before_they_are_read_back_and_names_before_the_next(tmp_path, monkeypatch):
    steps = []

    def note(name, real):
        return lambda *args: (steps.append(name), real(*args))[1]

    monkeypatch.setattr(shard_module.os, "fsync", note("fsync", shard_module.os.fsync))
    monkeypatch.setattr(StoredShard, "sample_checksums", note("read back", StoredShard.sample_checksums))
    monkeypatch.setattr(shard_module, "sync_folder", note("folder", lambda folder: None))
    monkeypatch.setattr(shard_module, "write_atomically", note("sidecar", lambda *args: None))
    write_shard(tmp_path, "shard-00000", make_samples(), "plan")
    assert [steps[0], *steps[-3:]] == ["fsync", "folder", "sidecar", "folder"]
    assert steps.index("fsync") < steps.index("read back") < steps.index("folder")


def test_no_rows_have_statistics(tmp_path):
    rows = StoredRows.of(torch.zeros(0, 2, 16), torch.zeros(0, 16), "float8")
    assert (len(rows), rows.norms.shape, rows.max_abs.shape) == (0, (0, 3), (0,))


def test_a_norm_beyond_float32_is_a_number_and_no_missing_value():
    aux, last = torch.full((2, 2, 16), 1e30), torch.ones(2, 16)
    rows = StoredRows.of(aux, last, "float32")
    assert rows.norms[:, 0].tolist() == [torch.finfo(torch.float32).max] * 2
    assert rows.nonfinite.tolist() == [0, 0]
    aux[0, 0, 0] = float("inf")
    assert StoredRows.of(aux, last, "float32").nonfinite.tolist() == [1, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_gpus_way_to_norms_and_largest_values_finds_what_a_cpus_does(dtype):
    """The kernels of the one are run on the CPU here, into the strided halves that they fill on a GPU."""
    states = torch.randn(6, 3, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    states[0, 1] = 0
    states[1, 0, 5] = float("nan")
    states[2, 2, 7] = -float("inf")
    states[3] = torch.finfo(dtype).max  # as bfloat16 or float32 its norm is beyond float32
    ways = [torch.full((6, 2, 4), -1.0) for _ in range(2)]
    for fill, found in zip((_by_kernels, _by_copy), ways, strict=True):
        fill(found[:, :, :3], states)
        assert found[..., 3].unique().tolist() == [-1]
    torch.testing.assert_close(*ways, rtol=1e-6, atol=0, equal_nan=True)
    norms, largest = ways[0].unbind(1)
    assert norms[1].isnan().tolist() == largest[1].isnan().tolist() == [True, False, False, False]
    assert (norms[2, 2], largest[2, 2]) == (float("inf"), float("inf"))
    assert largest[3, 0] == torch.finfo(dtype).max
    assert norms[3, 0].isinf() == (dtype != torch.float16)


def test_what_is_not_finite_is_counted_where_the_states_are():
    rows = rows_of(make_samples()[0], "bfloat16")
    with torch.device("meta"):  # where a tensor goes whose device nobody names
        assert rows.nonfinite.device == rows.last.device


@pytest.mark.parametrize("storage_dtype", TYPES)
def test_what_is_taken_at_once_changes_nothing(monkeypatch, storage_dtype):
    [sample] = make_samples([97])
    whole = rows_of(sample, storage_dtype)
    monkeypatch.setattr("tasks.common.storage._CACHED_VALUES", 7 * 3 * 16)
    pieces = rows_of(sample, storage_dtype)
    for name, tensor in {**whole.stored(), "norms": whole.norms, "max_abs": whole.max_abs}.items():
        other = pieces.stored().get(name, getattr(pieces, name))
        assert torch.equal(tensor.float(), other.float()), name
