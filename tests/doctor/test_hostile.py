"""Anybody's files: one clear sentence for each, in flat memory, and nothing in them is ever run."""

import json
import os
import pickle
import subprocess
import sys
import tempfile
import tracemalloc
import zipfile
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from tasks.common.draft_files import DraftFiles
from tasks.common.errors import DraftlineError
from tasks.doctor.examine import Request, examine
from tests.doctor.checkpoints import sglang_draft, speculators_draft

PEAK = 64 * 2**20


@pytest.fixture
def folder(tmp_path):
    return sglang_draft().write(tmp_path / "draft")


def write_header(folder, header: str | dict, data: int = 0) -> None:
    text = (header if isinstance(header, str) else json.dumps(header)).encode()
    (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(data))


def f32(start: int, end: int, *shape) -> dict:
    return {"dtype": "F32", "shape": list(shape), "data_offsets": [start, end]}


def truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


def cut_in_the_header(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:100])


def header_of_8_exabytes(folder):
    (folder / "model.safetensors").write_bytes((2**63 - 1).to_bytes(8, "little") + b"{}" * 100)


def header_of_200_megabytes(folder):
    with open(folder / "model.safetensors", "wb") as file:
        file.write((200_000_000).to_bytes(8, "little"))
        file.truncate(400_000_000)


def header_that_is_no_json(folder):
    write_header(folder, "{" * 200)


def header_nested_without_end(folder):
    write_header(folder, '{"a":' * 100_000)


def header_of_empty_lists(folder):
    write_header(folder, '{"a": [' + "[]," * 600_000 + "[]]}")


def header_without_offsets(folder):
    write_header(folder, {"fc.weight": {"dtype": "F32", "shape": [2]}})


def name_twice(folder):
    one = json.dumps(f32(0, 4, 1))
    write_header(folder, f'{{"fc.weight": {one}, "fc.weight": {one}}}', 4)


def name_that_moves_the_cursor(folder):
    write_header(folder, {"\x1b[2Jfc.weight": f32(0, 4, 1)}, 4)


def negative_shape(folder):
    write_header(folder, {"fc.weight": f32(0, 16, -2, -2)}, 16)


def shape_as_text(folder):
    write_header(folder, {"fc.weight": f32(0, 4, "1")}, 4)


def shape_that_its_bytes_do_not_fill(folder):
    write_header(folder, {"fc.weight": f32(0, 4, 2**40)}, 4)


def shape_without_end(folder):
    write_header(folder, {"fc.weight": f32(0, 4, *[2**62] * 50_000)}, 4)


def overlap(folder):
    write_header(folder, {"a": f32(0, 8, 2), "b": f32(4, 12, 2)}, 12)


def gap(folder):
    write_header(folder, {"a": f32(0, 4, 1), "b": f32(8, 12, 1)}, 12)


def bytes_behind_the_last_tensor(folder):
    write_header(folder, {"a": f32(0, 4, 1)}, 400)


def type_that_nobody_knows(folder):
    write_header(folder, {"a": f32(0, 4, 1) | {"dtype": "F4"}}, 4)


def empty_weights(folder):
    (folder / "model.safetensors").write_bytes(b"")


def config_of_200_megabytes(folder):
    with open(folder / "config.json", "wb") as file:
        file.truncate(200_000_000)


def config_nested_without_end(folder):
    (folder / "config.json").write_text("[" * 100_000)


def config_that_is_a_list(folder):
    (folder / "config.json").write_text("[]")


def config_with_a_key_twice(folder):
    (folder / "config.json").write_text('{"hidden_size": 32, "hidden_size": 64}')


def link_to_nothing(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to(folder / "elsewhere")


def link_to_itself(folder):
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to(folder / "config.json")


def endless_device(folder):
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("/dev/zero")


def endless_weights(folder):
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("/dev/zero")


def pipe(folder):
    (folder / "model.safetensors").unlink()
    os.mkfifo(folder / "model.safetensors")


def no_weights(folder):
    (folder / "model.safetensors").unlink()


def index_that_leaves_the_folder(folder):
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"fc.weight": "../../etc/passwd"}}')


def index_with_a_whole_path(folder):
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"fc.weight": "/etc/passwd"}}')


def index_without_its_shard(folder):
    (folder / "model.safetensors.index.json").write_text('{"weight_map": {"fc.weight": "gone.safetensors"}}')


HOSTILE = {
    truncate: "ends at byte .*cut short",
    cut_in_the_header: "header claims",
    header_of_8_exabytes: "header claims 9,223,372,036,854,775,807 bytes",
    header_of_200_megabytes: "header claims 200,000,000 bytes",
    header_that_is_no_json: "not valid JSON",
    header_nested_without_end: "not valid JSON",
    header_of_empty_lists: "no dtype, shape and offsets for tensor 'a'",
    header_without_offsets: "no dtype, shape and offsets for tensor 'fc.weight'",
    name_twice: "'fc.weight' is there twice",
    name_that_moves_the_cursor: r"'\\x1b\[2Jfc.weight' is no name of a tensor",
    negative_shape: "no dtype, shape and offsets",
    shape_as_text: "no dtype, shape and offsets",
    shape_that_its_bytes_do_not_fill: "in 4 bytes",
    shape_without_end: "no dtype, shape and offsets",
    overlap: "tensor b begins at byte .*Overlaps",
    gap: "tensor b begins at byte .*gaps",
    bytes_behind_the_last_tensor: "its tensors end at byte",
    type_that_nobody_knows: "of type 'F4', which is not known",
    empty_weights: "the file has 0",
    config_of_200_megabytes: "200,000,000 bytes.*Not read",
    config_nested_without_end: "not valid JSON",
    config_that_is_a_list: "expected a JSON object, found list",
    config_with_a_key_twice: "'hidden_size' is there twice",
    link_to_nothing: "a link to nothing",
    link_to_itself: "cannot be read",
    endless_device: "not a regular file",
    endless_weights: "not a regular file",
    pipe: "not a regular file",
    no_weights: "no weights",
    index_that_leaves_the_folder: "which is not a file of this folder",
    index_with_a_whole_path: "which is not a file of this folder",
    index_without_its_shard: "gone.safetensors: not there",
}


@pytest.mark.parametrize("plant", HOSTILE, ids=lambda plant: plant.__name__)
def test_a_hostile_file_is_one_sentence_in_flat_memory(folder, plant):
    plant(folder)
    tracemalloc.start()
    with pytest.raises(DraftlineError, match=HOSTILE[plant]) as raised:
        DraftFiles.open(folder)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < PEAK
    assert str(folder) in str(raised.value)
    assert len(str(raised.value)) < 1000
    assert str(raised.value).isprintable()


@contextmanager
def unprivileged():
    """As somebody whom permissions bind: root reads everything."""
    root = os.geteuid() == 0
    if root:
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


@pytest.mark.parametrize(
    ("part", "mode"), [("", 0), ("", 0o111), ("config.json", 0), ("model.safetensors", 0)], ids=str
)
def test_without_permission_it_says_so(part, mode):
    with tempfile.TemporaryDirectory() as shared:  # pytest's own folders are closed to others
        Path(shared).chmod(0o755)
        folder = sglang_draft().write(Path(shared) / "draft")
        (folder / part).chmod(mode)
        try:
            with unprivileged(), pytest.raises(DraftlineError, match=r"[Pp]ermission") as raised:
                DraftFiles.open(folder)
            assert str(folder / part) in str(raised.value)
        finally:
            (folder / part).chmod(0o755)


# --- pickles


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
    with pytest.raises(DraftlineError, match=r"refused: .*names '\w+ open'; none was run"):
        DraftFiles.open(as_bin.parent)
    assert not (tmp_path / "was_run").exists()


def test_a_bare_pickle_is_refused_and_never_run(as_bin, tmp_path):
    as_bin.write_bytes(pickle.dumps(Code(tmp_path / "was_run")))
    with pytest.raises(DraftlineError, match="cannot be read"):
        DraftFiles.open(as_bin.parent)
    assert not (tmp_path / "was_run").exists()


@pytest.mark.parametrize("protocol", range(6))
def test_code_is_found_in_every_protocol(as_bin, tmp_path, protocol):
    """Protocol 4 and later build the name while they run."""
    torch.save({"x": Code(tmp_path / "was_run")}, as_bin, pickle_protocol=max(protocol, 2))
    with zipfile.ZipFile(as_bin, "a") as archive:
        archive.writestr("archive/more.pkl", pickle.dumps(Code(tmp_path / "was_run"), protocol))
    with pytest.raises(DraftlineError, match=r"none was run"):
        DraftFiles.open(as_bin.parent)
    assert not (tmp_path / "was_run").exists()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.float64])
def test_tensors_of_each_type_are_read(as_bin, dtype):
    weight = torch.nn.Parameter(torch.tensor([1.0, torch.nan]).to(dtype))
    torch.save({"fc.weight": weight, "d2t": torch.arange(2), "t2d": torch.ones(2).bool()}, as_bin)
    files = DraftFiles.open(as_bin.parent)
    assert list(files.headers) == ["fc.weight", "d2t", "t2d"]
    assert files.array("d2t").tolist() == [0, 1]
    (bits,) = files.bits("fc.weight")
    assert bits.itemsize == weight.element_size()
    assert bits.tobytes() == weight.detach().view(torch.uint8).numpy().tobytes()


def pickle_that_swells(path):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("archive/data.pkl", bytes(200_000_000))


def storage_that_swells(path):
    torch.save({"fc.weight": torch.zeros(50_000_000)}, path)
    with zipfile.ZipFile(path) as archive:
        members = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, data in members.items():
            archive.writestr(name, data)


def tensor_that_repeats_one_number(path):
    torch.save({"fc.weight": torch.ones(1).expand(2**40)}, path)


def tensor_that_is_nowhere(path):
    torch.save({"fc.weight": torch.empty(2**40, device="meta")}, path)


SWELLING = {
    pickle_that_swells: "its pickle is absent or larger",
    storage_that_swells: "it is compressed",
    tensor_that_repeats_one_number: "its tensors would be larger than the file",
    tensor_that_is_nowhere: "names 'torch._utils _rebuild_meta_tensor_no_storage'",
}
_OPEN = """
import resource, sys, torch
from pathlib import Path
from tasks.common.draft_files import DraftFiles
from tasks.common.errors import DraftlineError
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
try:
    DraftFiles.open(Path(sys.argv[1]))
except DraftlineError as error:
    print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, error)
"""


@pytest.mark.parametrize("plant", SWELLING, ids=lambda plant: plant.__name__)
def test_a_bin_that_swells_is_refused_in_flat_memory(as_bin, plant):
    """In a process of its own: what torch allocates is seen in no trace of Python's."""
    plant(as_bin)
    said = subprocess.run(
        [sys.executable, "-c", _OPEN, str(as_bin.parent)], capture_output=True, text=True, check=True
    ).stdout
    kilobytes, _, sentence = said.partition(" ")
    assert SWELLING[plant] in sentence
    assert int(kilobytes) * 1024 < PEAK


def test_more_than_tensors_is_refused(as_bin):
    torch.save({"state": {"fc.weight": torch.ones(2)}}, as_bin)
    with pytest.raises(DraftlineError, match="not a dictionary of tensors"):
        DraftFiles.open(as_bin.parent)


def test_what_trainers_leave_beside_the_weights_is_passed_over(as_bin):
    torch.save({"fc.weight": torch.ones(2)}, as_bin)
    (as_bin.parent / "training_args.bin").write_bytes(b"no zip")
    assert list(DraftFiles.open(as_bin.parent).headers) == ["fc.weight"]


def test_one_tensor_in_two_files_is_refused(folder):
    (folder / "again.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    with pytest.raises(DraftlineError, match=r"is in again\.safetensors too; which one counts"):
        DraftFiles.open(folder)


def test_a_link_to_a_file_is_followed_as_the_hubs_cache_has_them(folder):
    (folder / "model.safetensors").rename(folder / "blob")
    (folder / "model.safetensors").symlink_to(folder / "blob")
    assert "fc.weight" in DraftFiles.open(folder).headers


def test_a_thousand_unknown_tensors_make_no_thousand_sentences(tmp_path):
    draft = sglang_draft()
    draft.tensors |= {f"unknown.{number}": torch.ones(1) for number in range(1000)}
    _, checks = examine(Request(draft.write(tmp_path / "draft")))
    found = {check.id: check.found for check in checks}["W3 tensors"]
    assert found.count("is unknown to SGLang") == 10
    assert found.endswith("And 990 more.")


# --- values

NONSENSE = (None, "x", "", [], ["x"], [None], {}, {"x": 1}, True, 0, -1, 2**70, 1.5, float("inf"), {"rope_theta": None})


@pytest.mark.parametrize("make", [sglang_draft, speculators_draft])
@pytest.mark.parametrize("beside", [True, False], ids=["with target", "alone"])
def test_no_value_of_a_config_stops_the_doctor(tmp_path, write_target, make, beside):
    """Each key in turn holds each nonsense: a verdict, or one sentence, and never a traceback."""
    target = write_target() if beside else None
    draft = make()
    folder = draft.write(tmp_path / "draft")
    nested = ("eagle_config", "transformer_layer_config", "rope_parameters", "speculators_config")
    places = [(name,) for name in draft.config]
    places += [(name, key) for name in nested for key in draft.config.get(name, {})]
    for place in places:
        for value in NONSENSE:
            config = json.loads(json.dumps(draft.config))
            (config if len(place) == 1 else config[place[0]])[place[-1]] = value
            (folder / "config.json").write_text(json.dumps(config))
            try:
                examine(Request(folder, target))
            except DraftlineError as error:
                assert "\n" not in str(error)


def test_no_value_of_a_targets_config_stops_the_doctor(tmp_path, write_target):
    folder, target = sglang_draft().write(tmp_path / "draft"), write_target()
    correct = json.loads((target / "config.json").read_text())
    for name in [*correct, "text_config", "quantization_config"]:
        for value in NONSENSE:
            (target / "config.json").write_text(json.dumps(correct | {name: value}))
            try:
                examine(Request(folder, target))
            except DraftlineError as error:
                assert str(target) in str(error)
