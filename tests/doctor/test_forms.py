"""No false alarm: correct drafts in each form, for each kind of target, pass without an error or a warning."""

import json

import pytest
import torch
from safetensors.torch import save_file

from tasks.doctor.examine import Request, examine
from tests.doctor.checkpoints import FORMS, VOCAB, not_fine, sglang_draft, specforge_draft, speculators_draft

SIZES = {
    "three layers": {},
    "two layers": {"num_aux": 2},
    "four layers": {"num_aux": 4},
    "another width than the target": {"target_hidden": 64},
    "whole vocabulary without a map": {"draft_vocab": VOCAB},
    "the target's own head": {"draft_vocab": None},
    "two layers of another width, the whole vocabulary": {"num_aux": 2, "target_hidden": 64, "draft_vocab": VOCAB},
    "four layers of another width": {"num_aux": 4, "target_hidden": 64},
}


@pytest.mark.parametrize("version", ["0.5.16", "0.5.23"])
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("kind", ["llama", "qwen3", "deepseek"])
@pytest.mark.parametrize("form", FORMS)
def test_a_correct_draft_passes(examined, form, kind, sizes, version):
    hidden = SIZES[sizes].get("target_hidden", 32)
    checks = examined(FORMS[form](kind, **SIZES[sizes]), kind, hidden, version=version)
    assert not_fine(checks) == {}
    assert checks["form"].found.startswith(form)


def test_the_older_names_of_the_norms_pass(examined):
    assert not_fine(examined(specforge_draft(legacy=True))) == {}


def test_names_with_a_prefix_pass_since_sglang_adds_it(examined):
    draft = sglang_draft()
    draft.tensors = {("model." + name if name != "lm_head.weight" else name): t for name, t in draft.tensors.items()}
    assert not_fine(examined(draft)) == {}


def test_what_has_to_change_to_serve_it_is_said(examined):
    assert "convert it: --fix OUT" in examined(speculators_draft())["form"].found
    assert "serves it as it is" in examined(sglang_draft())["form"].found


def test_speculators_boundaries_are_the_inputs_of_layers(examined):
    found = examined(speculators_draft("deepseek"), "deepseek")["C3 layers"]
    assert found.verdict == "ok"
    assert "ids [3, 31, 59] on DeepseekV3ForCausalLM capture the outputs of layers [2, 30, 58]" in found.found


def test_a_nested_target_config_is_read(examined, tmp_path, write_target):
    folder = sglang_draft("deepseek").write(tmp_path / "draft")
    target = write_target("deepseek")
    nested = {
        "architectures": ["DeepseekV3ForCausalLM"],
        "text_config": json.loads((target / "config.json").read_text()),
    }
    (target / "config.json").write_text(json.dumps(nested))
    _, checks = examine(Request(folder, target))
    assert not_fine({check.id: check for check in checks}) == {}


def test_a_bin_is_read_without_being_copied(examined, tmp_path, write_target):
    draft = sglang_draft()
    folder = draft.write(tmp_path / "draft")
    (folder / "model.safetensors").unlink()
    torch.save(draft.tensors, folder / "pytorch_model.bin")
    _, checks = examine(Request(folder, write_target()))
    assert not_fine({check.id: check for check in checks}) == {}


def test_an_index_of_shards_is_read(tmp_path, write_target):
    draft = sglang_draft()
    folder = draft.write(tmp_path / "draft")
    (folder / "model.safetensors").unlink()
    names = sorted(draft.tensors)
    shards = {"a.safetensors": names[:5], "b.safetensors": names[5:]}
    for file, of_shard in shards.items():
        save_file({name: draft.tensors[name] for name in of_shard}, folder / file)
    weight_map = {name: file for file, of_shard in shards.items() for name in of_shard}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    _, checks = examine(Request(folder, write_target()))
    assert not_fine({check.id: check for check in checks}) == {}


def test_without_a_target_what_cannot_be_known_is_said_to_be_not_applicable(examined):
    draft = sglang_draft()
    draft.record = False
    checks = examined(draft, target=False)
    assert not_fine(checks) == {}
    for name in ("C3 layers", "C8 capture", "W5 positions", "W8 target"):
        assert checks[name].verdict == "not applicable"
