"""Other people's drafts: what the benchmark refuses of them before a server starts, and what it takes."""

import json
from pathlib import Path

import pytest

from tasks.benchmark.arms import arms_of
from tasks.common.errors import DraftlineError
from tasks.common.params import Params
from tasks.common.target import target_contract
from tests.random_draft import write_random_draft

SERVE = {"context_length": 512, "port": 31201}
OURS, OTHERS = [1, 3, 4], (2, 4, 5)
THEIRS = Path("theirs")


@pytest.fixture
def params(project, tiny_params):
    """`params(draft)`: an export of ours, and `draft` beside it as 'other'."""

    def make(draft: str = str(THEIRS)) -> Params:
        made = tiny_params(serve=SERVE, contract={"aux_layer_ids": OURS}, benchmark={"drafts": {"other": draft}})
        write_random_draft(Path("artifacts/export"), target_contract(made.contract))
        return made

    return make


@pytest.fixture
def refusal(params):
    """`refusal(draft)`: why the benchmark refuses it."""

    def of(draft: str = str(THEIRS)) -> str:
        with pytest.raises(DraftlineError) as refused:
            arms_of(params(draft))
        assert str(refused.value).startswith("params.yaml: benchmark.drafts.other: ")
        return str(refused.value)

    return of


def write_theirs(params: Params, layers=OTHERS, **recorded) -> None:
    """Somebody's export of ours: trained on other layers than this run's, which its record says."""
    contract = target_contract(params.contract)
    write_random_draft(THEIRS, contract.model_copy(update={"aux_layer_ids": layers}))
    record = contract.model_dump() | {"aux_layer_ids": layers} | recorded
    (THEIRS / "draftline.json").write_text(json.dumps({"contract": record}))


def test_every_server_has_a_port_of_its_own_that_the_plan_checks(params):
    made = params()
    write_theirs(made)
    assert sorted(arm.plan.port for arm in arms_of(made)) == list(made.ports) == [31201, 31202, 31203]


def test_a_draft_whose_record_agrees_with_its_config_may_have_other_layers_than_ours(params):
    made = params()
    write_theirs(made)
    assert arms_of(made)[-1].plan.draft == THEIRS.absolute()


def test_a_draft_whose_record_contradicts_its_config_is_refused_with_the_doctors_sentence(params, refusal):
    write_theirs(params(), aux_layer_ids=[1, 3, 4])
    said = refusal()
    assert "C3 layers: ids [2, 4, 5] on LlamaForCausalLM capture the outputs of layers [2, 4, 5]" in said
    assert "it was trained on [1, 3, 4]" in said and "draftline.json says" in said


@pytest.mark.parametrize("fact", ["target_sha256", "tokenizer_sha256"])
def test_a_draft_whose_record_names_another_target_is_refused(params, refusal, fact):
    write_theirs(params(), **{fact: "another"})
    assert f"H7 record: {fact}: another in {THEIRS.absolute()}/draftline.json" in refusal()


def test_a_record_that_is_none_is_refused(params, refusal):
    write_theirs(params())
    (THEIRS / "draftline.json").write_text("{}")
    assert "draftline.json: holds no contract" in refusal()


def test_a_draft_without_a_record_is_taken_by_its_config(params):
    made = params()
    write_theirs(made, layers=(1, 3, 4), aux_layer_ids=[2, 4, 5])
    (THEIRS / "draftline.json").unlink()
    assert arms_of(made)[-1].plan.draft == THEIRS.absolute()


def test_an_empty_folder_is_told_what_a_draft_is(refusal, project):
    THEIRS.mkdir()
    assert "theirs/config.json: not there. Expected: the folder of an EAGLE-3 draft, its config.json and" in refusal()


def test_a_config_without_sizes_is_told_field_by_field(params, refusal):
    write_theirs(params())
    (THEIRS / "config.json").write_text("{}")
    assert "W7 types" in refusal()


def test_the_home_of_nobody_is_told(refusal):
    assert "'~nobody-here/draft' begins with a home that is not here. Write the whole path." in refusal(
        "~nobody-here/draft"
    )


def test_the_folder_that_the_trainer_fills_is_told_from_its_export(refusal, project):
    assert "Name artifacts/export, which export_draft writes from it" in refusal("artifacts/draft")
    THEIRS.mkdir()
    (THEIRS / "draft.json").write_text("{}")
    assert "holds a draft as train_draft writes it" in refusal()


def test_a_target_in_the_place_of_a_draft_is_said_to_be_none(refusal, tiny_model_folder):
    assert "is a whole model of 8 layers without fc, such as a target, and no EAGLE-3 draft" in refusal(
        str(tiny_model_folder)
    )


@pytest.mark.parametrize(
    ("draft", "found"),
    [
        ("./nowhere", "'./nowhere' is not there. Expected: the folder of a draft, or a hub id"),
        ("artifacts/export/config.json", "'artifacts/export/config.json' is a file"),
        ("nobody/no-such-draft", "nobody/no-such-draft is no folder here, and cannot be fetched as a hub id"),
    ],
)
def test_a_path_that_leads_nowhere_is_named(refusal, draft, found):
    assert found in refusal(draft)
