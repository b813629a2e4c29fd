"""Anybody's files: one clear sentence for each, quickly, in flat memory, and nothing in them is ever run."""

import json
import os
import pickle
import time
import tracemalloc
import zipfile

import pytest
import torch

from tasks.common.draft_files import DraftFiles
from tasks.common.errors import DraftlineError
from tests.doctor.checkpoints import sglang_draft


@pytest.fixture
def folder(tmp_path):
    return sglang_draft().write(tmp_path / "draft")


def truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def cut_in_the_header(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])


def header_of_8_exabytes(folder):
    (folder / "model.safetensors").write_bytes((2**63 - 1).to_bytes(8, "little") + b"{}" * 100)


def header_that_is_no_json(folder):
    (folder / "model.safetensors").write_bytes((200).to_bytes(8, "little") + b"{" * 200)


def header_without_offsets(folder):
    header = json.dumps({"fc.weight": {"dtype": "F32", "shape": [2]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)


def shape_that_its_bytes_do_not_fill(folder):
    header = json.dumps({"fc.weight": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 4]}}).encode()
    (folder / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))


def empty_weights(folder):
    (folder / "model.safetensors").write_bytes(b"")


def config_of_200_megabytes(folder):
    with open(folder / "config.json", "wb") as file:
        file.truncate(200_000_000)


def config_nested_without_end(folder):
    (folder / "config.json").write_text("[" * 100_000)


def config_that_is_a_list(folder):
    (folder / "config.json").write_text("[]")


def link_to_nothing(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(folder / "elsewhere")


def link_to_itself(folder):
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(folder / "config.json")


def endless_device(folder):
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("/dev/zero")


def pipe(folder):
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")


def no_weights(folder):
    (folder / "model.safetensors").unlink()


def index_that_leaves_the_folder(folder):
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"fc.weight": "../../etc/passwd"}}')


def index_without_its_shard(folder):
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"fc.weight": "gone.safetensors"}}')


HOSTILE = {
    truncate: "ends at byte .*cut short",
    cut_in_the_header: "header claims",
    header_of_8_exabytes: "header claims 9,223,372,036,854,775,807 bytes",
    header_that_is_no_json: "not valid JSON",
    header_without_offsets: "no dtype, shape and offsets for tensor fc.weight",
    shape_that_its_bytes_do_not_fill: "in 4 bytes",
    empty_weights: "the file has 0",
    config_of_200_megabytes: "200,000,000 bytes.*Not read",
    config_nested_without_end: "not valid JSON",
    config_that_is_a_list: "expected a JSON object, found list",
    link_to_nothing: "a link to nothing",
    link_to_itself: "cannot be read",
    endless_device: "not a regular file",
    pipe: "not a regular file",
    no_weights: "no weights",
    index_that_leaves_the_folder: "which is not a file of this folder",
    index_without_its_shard: "gone.safetensors: not there",
}


@pytest.mark.parametrize("plant", HOSTILE, ids=lambda plant: plant.__name__)
def test_a_hostile_file_is_one_sentence(folder, plant):
    plant(folder)
    started = time.monotonic()
    tracemalloc.start()
    with pytest.raises(DraftlineError, match=HOSTILE[plant]) as raised:
        DraftFiles.open(folder)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert time.monotonic() - started < 2
    assert peak < 20_000_000
    assert str(folder) in str(raised.value)
    assert "\n" not in str(raised.value)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
@pytest.mark.parametrize("part", ["", "config.json", "model.safetensors"])
def test_without_permission_it_says_so(folder, part):
    (folder / part).chmod(0)
    try:
        with pytest.raises(DraftlineError, match=r"[Pp]ermission"):
            DraftFiles.open(folder)
    finally:
        (folder / part).chmod(0o755)


class Code:
    """What an attacker pickles: on loading it would write a file."""

    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return open, (str(self.path), "w")


@pytest.fixture
def as_bin(folder):
    (folder / "model.safetensors").unlink()
    return folder / "pytorch_model.bin"


def test_code_in_a_pickle_is_refused_and_never_run(as_bin, tmp_path):
    torch.save({"fc.weight": torch.ones(2), "x": Code(tmp_path / "was_run")}, as_bin)
    with pytest.raises(DraftlineError, match=r"refused: .*none was run"):
        DraftFiles.open(as_bin.parent)
    assert not (tmp_path / "was_run").exists()


def test_a_bare_pickle_is_refused_and_never_run(as_bin, tmp_path):
    as_bin.write_bytes(pickle.dumps(Code(tmp_path / "was_run")))
    with pytest.raises(DraftlineError, match="cannot be read"):
        DraftFiles.open(as_bin.parent)
    assert not (tmp_path / "was_run").exists()


def test_a_pickle_that_swells_is_not_unpacked(as_bin):
    with zipfile.ZipFile(as_bin, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(64 * 2**20))
    with pytest.raises(DraftlineError, match="its pickle is absent or larger"):
        DraftFiles.open(as_bin.parent)


def test_more_than_tensors_is_refused(as_bin):
    torch.save({"state": {"fc.weight": torch.ones(2)}}, as_bin)
    with pytest.raises(DraftlineError, match="not a dictionary of tensors"):
        DraftFiles.open(as_bin.parent)


def test_one_tensor_in_two_files_is_refused(folder):
    (folder / "again.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(DraftlineError, match=r"is in again\.safetensors too; which one counts"):
        DraftFiles.open(folder)


def test_a_link_to_a_file_is_followed_as_the_hubs_cache_has_them(folder):
    (folder / "model.safetensors").rename(folder / "blob")
    (folder / "model.safetensors").symlink_to(folder / "blob")
    assert "fc.weight" in DraftFiles.open(folder).headers
