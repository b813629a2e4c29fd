"""Servers that are really started wrong: each starts cleanly, answers with 200, and is told what it is.

They load planted folders or run under planted flags; the doctor is shown the correct export, or the planted folder itself.
"""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks.common.errors import DraftlineError
from tasks.common.files import read_json
from tasks.common.hidden_states import HIDDEN_STATES, HiddenStates
from tasks.common.parity import output_name
from tasks.common.speculative_plan import EXPORT
from tasks.common.tracking import Tracker
from tasks.doctor.examine import Request, examine
from tasks.doctor.repair import repair
from tests.doctor.checkpoints import not_fine
from tests.live_checks.conftest import doctor, line_of
from tests.stored import close_again, copy_of, write_shard
from tests.tiny_run import AUX

pytestmark = pytest.mark.faults


@pytest.fixture
def plant(tiny_run, tmp_path):
    """`plant(config={...}, drop=("eagle_config",), tensors={...})`: a copy of the export with changes; None drops a tensor."""

    def planted(config: dict | None = None, drop: tuple[str, ...] = (), tensors: dict | None = None) -> Path:
        folder = shutil.copytree(EXPORT, tmp_path / "planted")
        written = read_json(folder / "config.json") | (config or {})
        (folder / "config.json").write_text(json.dumps({k: v for k, v in written.items() if k not in drop}))
        kept = load_file(folder / "model.safetensors") | (tensors or {})
        save_file({k: v for k, v in kept.items() if v is not None}, folder / "model.safetensors")
        return folder

    return planted


def tensor(name: str) -> torch.Tensor:
    return load_file(EXPORT / "model.safetensors")[name]


def eagle(*ids: int) -> dict:
    return {"eagle_config": {"eagle_aux_hidden_state_layer_ids": list(ids), "use_aux_hidden_state": True}}


def slots_of(checks) -> list[str]:
    return [checks[f"C3 slot {slot} (the dump)"].found.split(" (")[0] for slot in range(len(AUX))]


def test_eagle_for_eagle3(tiny_run):
    with tiny_run.serving(speculative_algorithm="EAGLE") as server:
        checks = doctor(server, hidden_states=HIDDEN_STATES)
    assert "EAGLE for an EAGLE-3 draft: fc is never called" in checks["C1 algorithm"].found
    assert "rows of 64, one state (slot 0: the output of layer 7 after the final norm (" in checks["C1 width"].found
    assert "EAGLE in place of EAGLE3" in checks["C1 width"].found
    assert checks["S4 acceptance"].verdict == "error"
    assert "predicted from the states of the dump" in checks["S4 acceptance"].found


def test_default_layers_where_the_config_names_none(tiny_run, plant):
    with tiny_run.serving(plant(drop=("eagle_config",))) as server:
        checks = doctor(server, draft=server.plan.draft, hidden_states=HIDDEN_STATES)
    assert "SGLang would silently capture default layers" in checks["C2 eagle_config"].found
    assert slots_of(checks) == [f"it is {output_name(layer)}" for layer in (1, 3, 4)]
    assert (
        "SGLang's default layers" in checks["C3 slot 0 (the dump)"].fix
        and str(list(AUX)) in checks["C3 slot 0 (the dump)"].fix
    )


def test_ids_shifted_by_one(tiny_run, plant):
    with tiny_run.serving(plant(config=eagle(*(layer + 1 for layer in AUX)))) as server:
        checks = doctor(server, draft=server.plan.draft, hidden_states=HIDDEN_STATES)
    assert slots_of(checks) == [f"it is {output_name(layer + 1)}" for layer in AUX]
    assert f"layer_ids to {list(AUX)}" in checks["C3 slot 0 (the dump)"].fix
    assert checks["W3 served draft"].verdict == "ok"  # the draft is the right one: only its states are not


@pytest.mark.parametrize("wrong", [(0, 4, 5), (2, 3, 5), (2, 4, 6)])
def test_a_single_slot_read_from_another_layer(tiny_run, plant, wrong):
    with tiny_run.serving(plant(config=eagle(*wrong))) as server:
        checks = doctor(server, draft=server.plan.draft, hidden_states=HIDDEN_STATES)
    for slot, (found, layer, expected) in enumerate(zip(slots_of(checks), wrong, AUX, strict=True)):
        if layer == expected:
            assert checks[f"C3 slot {slot} (the dump)"].verdict == "ok"
        else:
            assert found == f"it is {output_name(layer)}"


def test_a_missing_tensor_is_random_in_the_server(tiny_run, plant):
    """The doctor is shown the correct export; the folder of the same plan was overwritten."""
    with tiny_run.serving(plant(tensors={"fc.weight": None})) as server:
        served = doctor(server, draft=server.plan.draft, hidden_states=HIDDEN_STATES)
        checks = doctor(server, hidden_states=HIDDEN_STATES)
    assert "tensor fc.weight is missing" in served["W3 tensors"].found
    assert "tensor fc.weight is missing" in served["W3 served draft"].found
    assert "first differing round at token" in checks["W3 served draft"].found
    assert checks["S4 acceptance"].verdict == "error"


def test_absolute_ids_in_the_map(tiny_run, plant):
    d2t = tensor("d2t")
    absolute = d2t + torch.arange(len(d2t))
    # SGLang would index beyond the vocabulary and die; half of them are enough to be served and to be wrong.
    halved = torch.where(absolute + torch.arange(len(d2t)) < 320, absolute, d2t)
    with tiny_run.serving(plant(tensors={"d2t": halved})) as server:
        checks = doctor(server, hidden_states=HIDDEN_STATES)
        served = doctor(server, draft=server.plan.draft, hidden_states=HIDDEN_STATES)
    assert served["V2 V3 offsets"].verdict == "error"
    assert "first differing round at token" in checks["W3 served draft"].found


def test_the_draft_of_another_target(tiny_run, plant):
    """Same sizes, other weights: nothing of the files can show it but the record, and the server accepts nothing."""
    generator = torch.Generator().manual_seed(9)
    others = {
        name: torch.randn(tensor(name).shape, generator=generator) * tensor(name).std()
        for name in ("fc.weight", "lm_head.weight", "midlayer.mlp.down_proj.weight")
    }
    folder = plant(tensors=others)
    record = read_json(folder / "draftline.json")
    record["contract"]["target_sha256"] = "0" * 64
    (folder / "draftline.json").write_text(json.dumps(record))
    with tiny_run.serving(folder) as server:
        checks = doctor(server, draft=folder, hidden_states=HIDDEN_STATES)
    assert "target_sha256" in checks["H7 record"].found
    assert checks["S4 acceptance"].verdict == "warning"
    assert "next to nothing is accepted, as predicted" in checks["S4 acceptance"].found


def test_a_server_without_the_flags_says_which_to_add(tiny_run):
    with tiny_run.serving(enable_return_hidden_states=None, disable_radix_cache=None) as server:
        checks = doctor(server, hidden_states=HIDDEN_STATES, plan=line_of(server))
    assert not_fine(checks) == {}
    assert "--enable-return-hidden-states" in checks["C1 width"].found
    assert checks["C3 slots"].verdict == checks["W3 served draft"].verdict == "not applicable"


def test_a_right_server_in_bfloat16_with_a_prefix_cache_and_one_step(tiny_run, plant):
    """Other people's servers: no error from rounding, from cached prompts, or from a chain of one. The draft was trained on
    float32 answers, which a random target in bfloat16 does not give, so little is accepted."""
    tensors = load_file(EXPORT / "model.safetensors")
    folder = plant(
        config={"torch_dtype": "bfloat16"},
        tensors={name: kept.bfloat16() for name, kept in tensors.items() if kept.is_floating_point()},
    )
    flags = {"speculative_num_steps": "1", "speculative_num_draft_tokens": "2", "disable_radix_cache": None}
    with tiny_run.serving(folder, dtype="bfloat16", **flags) as server:
        checks = doctor(server, draft=folder, hidden_states=HIDDEN_STATES)
    assert "error" not in {check.verdict for check in checks.values()}
    for name in ("H1 rows", "C1 width", *(f"C3 slot {slot} (transformers)" for slot in range(len(AUX)))):
        assert checks[name].verdict == "ok", name


def test_a_stage_whose_dump_lies_about_its_layers_is_stopped(tiny_run):
    """The real case: a comment said which states were dumped, and they were others."""
    from tasks.launch_server.__main__ import main

    folder, kept = HIDDEN_STATES / "heldout", HIDDEN_STATES.with_name("kept")
    shutil.copytree(HIDDEN_STATES, kept)
    states = HiddenStates(folder)
    samples = [copy_of(states.read(index)) for index in range(len(states))]
    lying = [replace(sample, aux=sample.aux.roll(1, dims=1)) for sample in samples]
    (shard,) = states.shards
    name = shard["name"]
    write_shard(folder, name, lying, read_json(folder / f"{name}.json")["plan_sha256"])
    close_again(states)
    tracker = Tracker("launch_server", tiny_run.params)
    try:
        with pytest.raises(DraftlineError) as raised:
            main(tiny_run.params, tracker)
    finally:
        shutil.rmtree(HIDDEN_STATES)
        kept.rename(HIDDEN_STATES)
    for slot, (layer, lied) in enumerate(zip(AUX, (5, 2, 4), strict=True)):
        found = next(line for line in str(raised.value).splitlines() if f"C3 slot {slot} (the dump): " in line)
        assert f"it is {output_name(layer)} (" in found
        assert f"as the contract says, but the dump holds {output_name(lied)} (" in found
    assert not list(Path("logs").glob("server-*.json"))


def speculators(folder: Path) -> None:
    """Rewrite SGLang form as speculators writes it: layers named by input, the layer's config nested."""
    config = read_json(folder / "config.json")
    top = ("draft_vocab_size", "torch_dtype", "tie_word_embeddings")
    nested = {k: v for k, v in config.items() if k not in (*top, "architectures", "eagle_config")}
    written = {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": "eagle3",
        "speculators_config": {"verifier": {"architectures": ["LlamaForCausalLM"]}},
        "transformer_layer_config": nested,
        "eagle_aux_hidden_state_layer_ids": [layer + 1 for layer in AUX],
        "norm_before_residual": False,
        **{name: config[name] for name in top},
    }
    tensors = load_file(folder / "model.safetensors")
    renamed = {name.replace("midlayer.", "layers.0."): kept for name, kept in tensors.items()}
    (folder / "config.json").write_text(json.dumps(written))
    save_file(renamed, folder / "model.safetensors")


def absolute(folder: Path) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors["d2t"] = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    save_file(tensors, folder / "model.safetensors")


def edit(**changes):
    def fault(folder: Path) -> None:
        config = read_json(folder / "config.json") | changes
        (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))

    return fault


FAULTS = {
    "absolute d2t": absolute,
    "no eagle_config": edit(eagle_config=None),
    "tied head": edit(tie_word_embeddings=True),
    "positions and RoPE": edit(max_position_embeddings=128, rope_theta=None, rope_parameters=None),
    "speculators form": speculators,
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_repaired_copy_serves_like_the_correct_draft(tiny_run, plant, tmp_path, fault):
    folder, out = plant(), tmp_path / "repaired"
    FAULTS[fault](folder)
    request = Request(folder, tiny_run.plan.target, HIDDEN_STATES)
    subject, checks = examine(request)
    assert not_fine({check.id: check for check in checks}) or subject.draft.form == "speculators"
    assert repair(subject, out)
    with tiny_run.serving(out) as server:
        checks = doctor(server, draft=out, hidden_states=HIDDEN_STATES)
    assert not_fine(checks) == {}
    assert "every histogram is the same" in checks["W3 served draft"].found
    assert "+0.0%" in checks["S4 acceptance"].found
    assert float(checks["S4 acceptance"].found.split()[0]) > 2
