import fcntl
import os
import shutil
import stat
import subprocess
import tempfile
import threading
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from tasks.common import planned_shards
from tasks.common import shard as shard_module
from tasks.common.errors import DraftlineError
from tasks.common.files import read_json, write_json, write_jsonl
from tasks.common.hidden_states import FORMAT_VERSION, HIDDEN_STATES, HiddenStates
from tasks.common.parity import Agreement
from tasks.common.responses import RESPONSES, Response
from tasks.common.ring import is_freed
from tasks.common.server_session import Process, ServerRecord, boot_id, kill_session, record_path, session_processes
from tasks.common.storage import bytes_per_token
from tasks.common.target import load_model, target_contract
from tasks.common.versions import result_versions
from tasks.dump_hidden_states import dump as dump_module
from tasks.dump_hidden_states.dump import dump
from tasks.dump_hidden_states.share import Share
from tasks.dump_hidden_states.split_plan import SplitPlan


def write_responses(train: int) -> list[Response]:
    torch.manual_seed(0)
    written = []
    for split, count in (("train", train), ("heldout", 1)):
        rows = [
            Response(f"{split}-{n}", "chat", [], torch.randint(3, 320, (5 + n,)).tolist(), [7, 8, 9 + n], "x", "length")
            for n in range(count)
        ]
        write_jsonl(RESPONSES / f"{split}.jsonl", (row.to_row() for row in rows))
        written += rows
    return written


def disk_with(free: int):
    return lambda _path: SimpleNamespace(free=free)


@pytest.fixture
def params(project, tiny_params):
    return tiny_params(dump={"batch_tokens": 24, "shard_tokens": 20})


def test_states_are_layer_outputs_and_the_normed_last_state(params):
    responses = write_responses(6)
    dump(params)
    model = load_model(params.target)
    layers = target_contract(params.contract).aux_layer_ids
    assert layers == (1, 3, 4)
    states = HiddenStates(HIDDEN_STATES / "train")
    assert states.ids == [r.id for r in responses if r.id.startswith("train")]
    for index, response in enumerate(responses[:6]):
        sample = states.read(index)
        with torch.no_grad():
            expected = model(torch.tensor([response.token_ids]), output_hidden_states=True).hidden_states
        assert sample.input_ids.tolist() == response.token_ids
        assert sample.loss_mask.tolist() == response.loss_mask
        for slot, layer in enumerate(layers):
            # Relative to the state's norm: how far single values are rounded depends on the processor and on their size.
            assert Agreement.of(sample.aux[:, slot], expected[layer + 1][0]).relative_error < 1e-5
            assert Agreement.of(sample.aux[:, slot], expected[layer][0]).relative_error > 1e-2
        assert Agreement.of(sample.last, expected[-1][0]).relative_error < 1e-5


def test_no_padding_is_stored(params):
    responses = write_responses(4)
    dump(params)
    tokens = sum(len(r.token_ids) for r in responses if r.id.startswith("train"))
    states = HiddenStates(HIDDEN_STATES / "train")
    assert sum(len(states.open_shard(i).aux) for i in range(len(states.shards))) == tokens == states.tokens.sum()


def test_a_killed_dump_goes_on_with_the_missing_shards(params, monkeypatch):
    write_responses(6)
    dump(params)
    before = {path: path.read_bytes() for path in HIDDEN_STATES.rglob("*") if path.is_file()}
    (HIDDEN_STATES / "train" / "shard-00001.json").unlink()  # a sidecar comes last: its shard may be cut off
    (HIDDEN_STATES / "train" / "manifest.json").unlink()
    (HIDDEN_STATES / "train" / ".shard-00002.safetensors.partial").write_bytes(b"cut off")
    written = []
    real = shard_module.ShardWriter.__enter__
    monkeypatch.setattr(
        shard_module.ShardWriter, "__enter__", lambda self: (written.append(self.plan.name), real(self))[1]
    )
    dump(params)
    assert written == ["shard-00001"]
    assert {path: path.read_bytes() for path in HIDDEN_STATES.rglob("*") if path.is_file()} == before


def test_no_manifest_stands_beside_partial_work(params, monkeypatch):
    write_responses(6)
    dump(params)
    (HIDDEN_STATES / "train" / "shard-00001.json").unlink()

    def fail(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr(shard_module.ShardWriter, "write", fail)
    with pytest.raises(KeyboardInterrupt):
        dump(params)
    assert not (HIDDEN_STATES / "train" / "manifest.json").exists()
    assert (HIDDEN_STATES / "heldout" / "manifest.json").exists()


def test_another_layer_set_dumps_everything_anew(params, tiny_params):
    write_responses(3)
    dump(params)
    totals = dump(tiny_params(dump={"batch_tokens": 24, "shard_tokens": 20}, contract={"aux_layer_ids": [0, 3, 4]}))
    assert totals["train"]["taken_over"] == 0
    assert HiddenStates(HIDDEN_STATES / "train").contract.aux_layer_ids == (0, 3, 4)


@pytest.mark.parametrize("changed", ["dtype", "versions", "format"])
def test_what_changes_the_states_dumps_everything_anew(params, tiny_params, tiny_model_folder, monkeypatch, changed):
    write_responses(3)
    dump(params)
    assert dump(params)["train"]["taken_over"] == dump(params)["train"]["shards"]
    if changed == "dtype":
        params = tiny_params(
            target={"model": str(tiny_model_folder), "dtype": "bfloat16"},
            dump={"batch_tokens": 24, "shard_tokens": 20},
        )
    elif changed == "versions":
        monkeypatch.setattr(planned_shards, "result_versions", lambda: result_versions() | {"torch": "99"})
    else:
        monkeypatch.setattr(planned_shards, "FORMAT_VERSION", 99)
    assert dump(params)["train"]["taken_over"] == 0


def test_shards_beyond_the_plan_are_removed(params):
    write_responses(6)
    dump(params)
    many = len(HiddenStates(HIDDEN_STATES / "train").shards)
    write_responses(2)
    dump(params)
    left = {path.stem for path in (HIDDEN_STATES / "train").glob("shard-*")}
    assert len(left) == len(HiddenStates(HIDDEN_STATES / "train").shards) < many


def test_a_disk_that_is_too_small_is_refused_before_the_start(params, monkeypatch):
    write_responses(3)
    monkeypatch.setattr("shutil.disk_usage", disk_with(1000))
    with pytest.raises(
        DraftlineError, match=r"need .* GB, .* and the disk of .* has room for 0\.0 GB\. Options: dump\.storage_dtype"
    ):
        dump(params)
    assert not list(HIDDEN_STATES.rglob("*.safetensors"))


def test_states_beyond_the_quota_are_refused_before_the_start(tiny_params, project):
    write_responses(3)
    with pytest.raises(DraftlineError, match=r"dump\.max_gigabytes allows 1e-05 GB\. Options: .*float8"):
        dump(tiny_params(dump={"max_gigabytes": 1e-5}))
    assert not list(HIDDEN_STATES.rglob("*.safetensors"))


@pytest.mark.parametrize("storage_dtype", ["bfloat16", "float8"])
def test_states_are_stored_in_the_type_asked_for(project, tiny_params, storage_dtype):
    write_responses(2)
    totals = dump(tiny_params(dump={"storage_dtype": storage_dtype}))
    states = HiddenStates(HIDDEN_STATES / "train")
    assert states.storage_dtype == storage_dtype
    assert totals["train"]["bytes"] == states.tokens.sum() * (
        4 * 64 * {"bfloat16": 2, "float8": 1}[storage_dtype] + (16 if storage_dtype == "float8" else 0) + 5
    )


def test_a_format_of_another_version_is_refused(params):
    write_responses(1)
    dump(params)
    manifest = HIDDEN_STATES / "train" / "manifest.json"
    write_json(manifest, read_json(manifest) | {"format_version": 99})
    with pytest.raises(DraftlineError, match=r"format_version 99.*delete artifacts/hidden_states, then `dvc repro`"):
        HiddenStates(HIDDEN_STATES / "train")


@pytest.mark.parametrize("content", [{}, [], {"format_version": FORMAT_VERSION}])
def test_what_is_no_manifest_is_refused_with_the_fix(tmp_path, content):
    write_json(tmp_path / "manifest.json", content)
    with pytest.raises(DraftlineError, match=r"manifest.json: no manifest of hidden states.*tasks.dump_hidden_states"):
        HiddenStates(tmp_path)


def test_a_shard_that_cannot_be_read_is_named_with_its_sample(params):
    write_responses(2)
    dump(params)
    shard = HIDDEN_STATES / "train" / "shard-00000.safetensors"
    shard.write_bytes(shard.read_bytes()[:100])
    with pytest.raises(DraftlineError, match=r"shard-00000.safetensors: cannot be read \(sample train-0\)"):
        HiddenStates(HIDDEN_STATES / "train").read(0)


def free_one(name: str, split: str = "train") -> None:
    """As a reader of the ring leaves a shard that it has consumed."""
    folder = HIDDEN_STATES / split
    (folder / f"{name}.json").rename(folder / f"{name}.freed")
    (folder / f"{name}.safetensors").unlink()


def test_a_dump_that_stays_computes_what_a_reader_had_consumed(params):
    write_responses(6)
    dump(params)
    whole = {path: path.read_bytes() for path in HIDDEN_STATES.rglob("*") if path.is_file()}
    free_one("shard-00001")
    totals = dump(params)
    assert totals["train"]["taken_over"] == totals["train"]["shards"] - 1
    assert {path: path.read_bytes() for path in HIDDEN_STATES.rglob("*") if path.is_file()} == whole


def test_an_online_dump_leaves_what_was_consumed_and_no_manifest(params, tiny_params, capsys):
    write_responses(6)
    dump(params)
    free_one("shard-00000")
    online = tiny_params(dump={"batch_tokens": 24, "shard_tokens": 20, "ahead_shards": 99})
    totals = dump(online)["train"]
    assert totals["taken_over"] == totals["shards"]
    assert not (HIDDEN_STATES / "train" / "shard-00000.safetensors").exists()
    assert not (HIDDEN_STATES / "train" / "manifest.json").exists()
    assert (HIDDEN_STATES / "heldout" / "manifest.json").exists()
    assert "For a new epoch remove" in capsys.readouterr().out


def test_a_shard_that_vanishes_while_the_dump_runs_is_an_error(params, monkeypatch):
    write_responses(6)
    real = shard_module.ShardWriter.__enter__

    def vanish(writer):
        if writer.plan.name == "shard-00002":
            (HIDDEN_STATES / "train" / "shard-00000.safetensors").unlink(missing_ok=True)
        return real(writer)

    monkeypatch.setattr(shard_module.ShardWriter, "__enter__", vanish)
    with pytest.raises(DraftlineError, match="shard-00000: not there after the dump, and 0 more"):
        dump(params)
    assert not (HIDDEN_STATES / "train" / "manifest.json").exists()


def test_a_ring_without_room_for_each_rank_is_refused(tiny_params, project, monkeypatch):
    write_responses(2)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(DraftlineError, match="ahead_shards is 3, fewer than the 4 ranks"):
        dump(tiny_params(dump={"ahead_shards": 3}))


def test_held_out_states_are_there_before_the_first_of_train(params, monkeypatch):
    write_responses(3)
    seen = []
    real = shard_module.ShardWriter.__enter__

    def look(writer):
        seen.append((writer._path.parent.name, (HIDDEN_STATES / "heldout" / "manifest.json").exists()))
        return real(writer)

    monkeypatch.setattr(shard_module.ShardWriter, "__enter__", look)
    dump(params)
    assert seen[0] == ("heldout", False)
    assert ("train", True) in seen
    assert ("train", False) not in seen


def test_shards_of_another_plan_are_gone_before_new_ones_are_written(params, tiny_params, monkeypatch):
    write_responses(6)
    dump(params)
    left = []
    real = shard_module.ShardWriter.__enter__
    train = HIDDEN_STATES / "train"
    monkeypatch.setattr(
        shard_module.ShardWriter,
        "__enter__",
        lambda self: (self._path.parent == train and left.append(len(list(train.glob("*.safetensors")))), real(self))[
            1
        ],
    )
    dump(tiny_params(dump={"batch_tokens": 24, "shard_tokens": 20, "storage_dtype": "bfloat16"}))
    assert left[0] == 0


def test_a_full_disk_takes_over_what_is_there_and_makes_room_of_what_is_left_over(params, monkeypatch):
    """Once all old files counted as room at once, so half a dump passed that could not end."""
    write_responses(6)
    dump(params)
    monkeypatch.setattr("shutil.disk_usage", disk_with(0))
    (HIDDEN_STATES / "train" / "shard-00001.json").unlink()
    dump(params)  # its own remains make room for it
    kept = {path: path.read_bytes() for path in HIDDEN_STATES.rglob("*") if path.is_file()}
    (HIDDEN_STATES / "train" / "shard-00001.safetensors").unlink()
    with pytest.raises(DraftlineError, match=r"of them are not there yet, and the disk of .* has room for"):
        dump(params)
    assert {p: kept[p] for p in kept if p.exists()} == {
        p: p.read_bytes() for p in HIDDEN_STATES.rglob("*") if p.is_file()
    }


class Begun(Exception):
    """The dump has found that it has room, and is about to compute."""


def begin(*_):
    raise Begun


def test_a_full_ring_is_gone_on_with_on_the_disk_that_was_large_enough_for_it(params, tiny_params, monkeypatch):
    write_responses(16)
    dump(params)
    sidecars = sorted((HIDDEN_STATES / "train").glob("shard-*.json"))
    tokens = [sum(read_json(path)["samples"]["tokens"]) for path in sidecars]
    assert len(tokens) > 6
    free_one("shard-00000")
    for path in [*sidecars[4:5], *sidecars[6:]]:  # shards 1, 2 and 3 wait; 5 is left of a larger ring
        path.unlink()
        path.with_suffix(".safetensors").unlink()
    online = tiny_params(dump={"batch_tokens": 24, "shard_tokens": 20, "ahead_shards": 3})
    free = (3 * max(tokens) - sum(tokens[1:4])) * bytes_per_token(3, 64, "float32")
    monkeypatch.setattr(dump_module, "open_engine", begin)
    monkeypatch.setattr("shutil.disk_usage", disk_with(free))
    with pytest.raises(Begun):
        dump(online)
    monkeypatch.setattr("shutil.disk_usage", disk_with(free - 1))
    with pytest.raises(DraftlineError, match=r"of them are not there yet, and the disk of .* has room for"):
        dump(online)


SHARED_MEMORY = Path("/dev/shm")


@pytest.mark.skipif(
    not SHARED_MEMORY.is_dir() or SHARED_MEMORY.stat().st_dev == Path(tempfile.gettempdir()).stat().st_dev,
    reason="there is no second file system",
)
@pytest.mark.parametrize("full", ["the disk", "the RAM disk"])
def test_a_ram_disk_for_one_split_has_room_of_its_own(params, monkeypatch, full):
    write_responses(3)
    dump(params)
    train = HIDDEN_STATES / "train"
    shutil.rmtree(train)
    disk = HIDDEN_STATES.stat().st_dev

    def usage(path):
        return SimpleNamespace(free=0 if (Path(path).stat().st_dev == disk) == (full == "the disk") else 10**9)

    monkeypatch.setattr("shutil.disk_usage", usage)
    with tempfile.TemporaryDirectory(dir=SHARED_MEMORY) as mounted:
        train.symlink_to(mounted)
        if full == "the disk":
            assert dump(params)["train"]["taken_over"] == 0
        else:
            with pytest.raises(DraftlineError, match=f"the disk of {train} has room for 0.0 GB"):
                dump(params)


def test_ranks_close_a_split_one_after_the_other(params, monkeypatch):
    write_responses(1)
    dump(params)
    both, met, locks = threading.Barrier(2), [], []

    def close(*_):
        with suppress(threading.BrokenBarrierError):
            both.wait(2)
            met.append(True)

    real = fcntl.flock

    def lock(file: int, operation: int) -> None:
        locks.append((stat.S_ISREG(os.fstat(file).st_mode), fcntl.fcntl(file, fcntl.F_GETFL) & os.O_ACCMODE))
        real(file, operation)

    monkeypatch.setattr(dump_module, "close_split", close)
    monkeypatch.setattr(fcntl, "flock", lock)
    contract = target_contract(params.contract)
    plan = SplitPlan.of("train", params, contract, Share(0, 1))
    ranks = [threading.Thread(target=dump_module._close, args=(plan, params, contract, 1)) for _ in range(2)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    assert met == []
    # NFS gives an exclusive lock on a file that is open for writing alone.
    assert locks == [(True, os.O_RDWR)] * 2
    assert not list(HIDDEN_STATES.glob("*.lock"))  # DVC's output holds states alone


def test_a_longest_sample_is_told_to_the_engine_before_anything_is_computed(params, monkeypatch):
    """Of those that are still to be computed by this rank."""
    write_responses(6)
    dump(params)
    (HIDDEN_STATES / "train" / "shard-00000.json").unlink()
    told = []
    monkeypatch.setattr(dump_module, "open_engine", lambda *args: (told.append(args[2]), begin()))
    with pytest.raises(Begun):
        dump(params)
    first = next(planned_shards.plan_shards("train", params, target_contract(params.contract)))
    lengths = dict(zip(first.ids, (first.offsets[1:] - first.offsets[:-1]).tolist(), strict=True))
    assert told == [max((tokens, name) for name, tokens in lengths.items())]


@pytest.mark.parametrize("spoilt", ["{}", "[]", "null", "3", '{"plan_sha256": 1}', '{"plan'])
def test_a_sidecar_that_is_none_makes_its_shard_dumped_again(params, spoilt):
    write_responses(3)
    dump(params)
    sidecar = HIDDEN_STATES / "train" / "shard-00000.json"
    whole = sidecar.read_bytes()
    sidecar.write_text(spoilt)
    assert not is_freed(HIDDEN_STATES / "train", "shard-00000", "plan")
    sidecar.with_suffix(".freed").write_text(spoilt)
    assert not is_freed(HIDDEN_STATES / "train", "shard-00000", "plan")
    totals = dump(params)["train"]
    assert totals["taken_over"] == totals["shards"] - 1
    assert sidecar.read_bytes() == whole


def test_files_of_other_names_stay(params):
    write_responses(1)
    train = HIDDEN_STATES / "train"
    train.mkdir(parents=True)
    others = [train / name for name in ("my-shard-notes.txt", "shard-00000.md", "shard-notes.json")]
    for path in others:
        path.write_text("mine")
    old = [train / name for name in ("shard-00099.json", ".shard-00099.safetensors.partial", "shard-00098.freed")]
    for path in old:
        path.write_text("{}")
    dump(params)
    assert [path.exists() for path in others + old] == [True] * 3 + [False] * 3


def test_a_folder_that_cannot_be_written_is_named_at_the_start(params):
    write_responses(1)
    HIDDEN_STATES.mkdir(parents=True)
    (HIDDEN_STATES / "train").write_text("no folder")
    with pytest.raises(DraftlineError, match=r"hidden_states/train: cannot be written: File exists\.$"):
        dump(params)


def test_ranks_of_one_host_do_not_all_spread_the_target_over_its_gpus(
    project, tiny_params, tiny_model_folder, monkeypatch
):
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    spread = {"model": str(tiny_model_folder), "device_map": "auto"}
    with pytest.raises(
        DraftlineError,
        match=r"target\.device_map is auto, .* each of the 2 ranks here would .* --nproc-per-node 1.*target\.device_map: null",
    ):
        dump(tiny_params(target=spread))
    # A server has devices by its own flags.
    with pytest.raises(DraftlineError, match=r"responses/heldout\.jsonl: not there"):
        dump(tiny_params(target=spread, dump={"engine": "sglang"}))


def test_a_server_that_a_killed_dump_left_is_gone_before_its_shards_are_looked_at(params, monkeypatch):
    """With another engine, too: it would go on writing shards of its plan."""
    write_responses(1)
    server = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        record = record_path("states", 31202)
        record.parent.mkdir(exist_ok=True)
        left = session_processes(server.pid)
        ServerRecord("states", 31202, boot_id(), Process(os.getpid(), 1), left).write(record)
        running = []
        real = dump_module.SplitPlan.of
        monkeypatch.setattr(
            dump_module.SplitPlan, "of", lambda *args: (running.append(session_processes(server.pid)), real(*args))[1]
        )
        dump(params)
        assert len(left) == 1
        assert running == [(), ()]
    finally:
        kill_session(server.pid)
        server.wait()


def test_a_target_that_is_spread_by_a_device_map_gives_the_same_states(
    params, tiny_params, tiny_model_folder, monkeypatch
):
    write_responses(3)
    dump(params)
    expected = HiddenStates(HIDDEN_STATES / "train").read(2).aux.clone()
    maps = []
    real = AutoModelForCausalLM.from_pretrained
    monkeypatch.setattr(
        AutoModelForCausalLM,
        "from_pretrained",
        lambda *args, **kwargs: (maps.append(kwargs["device_map"]), real(*args, **kwargs))[1],
    )
    # The type makes another plan: all is computed again.
    settings = {"batch_tokens": 24, "shard_tokens": 20, "storage_dtype": "float16"}
    dump(tiny_params(target={"model": str(tiny_model_folder), "device_map": "auto"}, dump=settings))
    assert maps == ["auto"]
    torch.testing.assert_close(HiddenStates(HIDDEN_STATES / "train").read(2).aux, expected.half(), rtol=1e-3, atol=1e-3)
