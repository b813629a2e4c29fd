"""A server's command line as text: every flag that costs a week, named before anything starts."""

import pytest

from tasks.common.command_line import CommandLine
from tasks.common.draft_checks.plan import RULES
from tasks.common.errors import DraftlineError
from tests.doctor.checkpoints import not_fine, sglang_draft, speculators_draft

GOOD = (
    "SGLANG_X=1 python -m sglang.launch_server --model-path target --speculative-algorithm EAGLE3 "
    "--speculative-draft-model-path {draft} --speculative-num-steps 3 --speculative-eagle-topk 1 "
    "--speculative-num-draft-tokens 4 --context-length 4096 --dtype float32"
)


@pytest.fixture
def judged(examined, tmp_path):
    """`judged("--page-size 64", removed="--x 1", kind=...)`: verdicts on the good line with words added or removed."""

    def judge(added: str = "", removed: str = "", draft=None, **request):
        line = (
            GOOD.format(draft=tmp_path / "draft").replace(removed, "")
            if removed
            else GOOD.format(draft=tmp_path / "draft")
        )
        return examined(draft or sglang_draft(), plan=f"{line} {added}", **request)

    return judge


def test_a_context_beyond_the_draft_is_named(judged):
    draft = sglang_draft()
    draft.config["max_position_embeddings"] = 1024
    check = judged("--context-length 2048", draft=draft)["W5 positions"]
    assert check.verdict == "error"
    assert "served is --context-length 2048" in check.found


def test_a_correct_line_passes(judged):
    assert not_fine(judged()) == {}


@pytest.mark.parametrize("version", ["0.5.16", "0.5.17", "0.5.20", "0.5.23", "0.5.23.post1"])
def test_a_correct_line_passes_on_every_release(judged, version):
    assert not_fine(judged(version=version)) == {}


def test_sglang_serve_and_other_spellings_are_read(examined, tmp_path):
    line = (
        f"sglang serve --model=target --speculative-algo=eagle3 --speculative-draft-model {tmp_path / 'draft'} "
        "--speculative-num-steps=3 \\\n --speculative-eagle-topk=1 --speculative-num-draft=4 --dtype float32"
    )
    assert not_fine(examined(sglang_draft(), plan=line)) == {}


# name: (check, verdict, words added, words removed, what is found)
FAULTS = {
    "EAGLE": ("C1 algorithm", "error", "--speculative-algorithm EAGLE", "", "fed 32-wide states where it was trained on 3 x 32 = 96"),
    "NEXTN": ("C1 algorithm", "error", "--speculative-algorithm=NEXTN", "", "NEXTN for an EAGLE-3 draft"),
    "none": ("C1 algorithm", "error", "", "--speculative-algorithm EAGLE3", "no speculation at all"),
    "no draft": ("S4 draft path", "error", "--speculative-draft-model-path", "", "no --speculative-draft-model-path"),
    "another draft": ("S4 draft path", "warning", "--speculative-draft-model-path /", "", "another folder"),
    "two of three": ("S3 chain", "error", "", "--speculative-eagle-topk 1", "all or none"),
    "adjusted": ("S3 chain", "warning", "--speculative-num-draft-tokens 8", "", "SGLang verifies steps + 1"),
    "beyond the tree": ("S3 chain", "error", "--speculative-eagle-topk 2 --speculative-num-draft-tokens 64", "", "at most 11"),
    "tree in pages": (
        "S3 page size", "error",
        "--speculative-eagle-topk 4 --speculative-num-draft-tokens 8 --page-size 64 --attention-backend flashmla", "", "on flashmla",
    ),
    "tree in pages, backend open": (
        "S3 page size", "warning", "--speculative-eagle-topk 4 --speculative-num-draft-tokens 8 --page-size 64", "", "left to SGLang",
    ),
    "CPU": ("S3 backends", "error", "--device cpu --attention-backend intel_amx", "", "becomes torch_native"),
    "trtllm tree": (
        "S3 backends", "error", "--attention-backend trtllm_mha --speculative-eagle-topk 4 --speculative-num-draft-tokens 8", "", "top-k 1 alone",
    ),
    "neither": ("C1 algorithm", "error", "--speculative-algorithm NGRAM", "", "NGRAM does not serve an EAGLE-3 draft"),
    "quantised": ("C9 quantisation", "error", "--quantization fp8", "", "the draft is read as quantised too"),
    "quantised by modelopt": ("C9 quantisation", "error", "--modelopt-quant nvfp4", "", "the draft is read as quantised too"),
    "draft quantised on purpose": (
        "C9 quantisation", "warning", "--quantization fp8 --speculative-draft-model-quantization fp8", "", "quantised as fp8",
    ),
    "overrides": ("plan", "warning", "--json-model-override-args {}x", "", "replaces values of the draft's config too"),
    "float32 that SGLang halves": ("C10 served dtype", "warning", "", "--dtype float32", "serves what is float32 as float16"),
    "served in another type": ("C10 served dtype", "warning", "--dtype half", "", "--dtype float16 for a draft of float32"),
    "cache on": ("H1 hidden states", "error", "--enable-return-hidden-states", "", "states would be missing"),
    "hooks in graphs": ("H1 hidden states", "error", "--forward-hooks [] --disable-radix-cache", "", "states would be missing"),
    "a file of flags": ("plan", "warning", "--config x.yaml", "", "not read here"),
    "context beyond the target": ("W5 positions", "error", "--context-length 8192", "", "is beyond the target's own 4096 positions"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_line_is_named(judged, fault):
    name, verdict, added, removed, found = FAULTS[fault]
    check = judged(added, removed)[name]
    assert check.verdict == verdict
    assert found in check.found
    assert check.fix


def test_adaptive_speculation_chooses_what_the_line_leaves_open(judged):
    assert not_fine(judged("--speculative-adaptive", removed="--speculative-num-draft-tokens 4")) == {}


def test_every_rule_has_a_planted_fault():
    assert {rule.expectation.id for rule in RULES} == {name for name, *_ in FAULTS.values()} - {"W5 positions"}


def test_a_quantised_checkpoint_counts_as_well_as_the_flag(examined, write_target, tmp_path):
    from tasks.doctor.examine import Request, examine

    folder, target = sglang_draft().write(tmp_path / "draft"), write_target(quantization_config={"quant_method": "fp8"})
    line = GOOD.format(draft=folder)

    def verdict(added: str) -> str:
        _, checks = examine(Request(folder, target, plan=line + added))
        return {check.id: check for check in checks}["C9 quantisation"].verdict

    assert verdict("") == "error"
    assert verdict(" --speculative-draft-model-quantization unquant") == "ok"


def test_another_type_of_the_target_is_an_error_where_the_line_says_nothing(tmp_path, write_target):
    from tasks.doctor.examine import Request, examine

    draft = sglang_draft()
    draft.config["torch_dtype"] = "float16"
    draft.tensors = {n: t.half() if t.is_floating_point() else t for n, t in draft.tensors.items()}
    folder = draft.write(tmp_path / "draft")
    line = GOOD.format(draft=folder).replace("--dtype float32", "")
    for dtype, verdict in (("bfloat16", "error"), ("float16", "ok")):
        _, checks = examine(Request(folder, write_target(torch_dtype=dtype), plan=line))
        assert {check.id: check for check in checks}["C10 served dtype"].verdict == verdict


def test_aux_states_are_asked_of_a_release_that_has_them(judged):
    added = "--enable-return-aux-hidden-states --disable-radix-cache"
    assert judged(added)["H1 hidden states"].verdict == "ok"
    assert "has no such flag" in judged(added, version="0.5.16")["H1 hidden states"].found


def test_a_shorter_context_than_the_targets_makes_fewer_positions_enough(judged):
    draft = sglang_draft()
    draft.config["max_position_embeddings"] = 2048
    assert judged("--context-length 4096", draft=draft)["W5 positions"].verdict == "error"
    assert judged("--context-length 2048", draft=draft)["W5 positions"].verdict == "ok"


def test_sglang_cannot_be_given_speculators_form(judged):
    check = judged(draft=speculators_draft())["S4 draft path"]
    assert check.verdict == "error"
    assert "--fix OUT" in check.fix


@pytest.mark.parametrize("line", ["vllm serve x", "python -m sglang.bench --x", "sglang serve 'x", ""])
def test_what_starts_no_server_could_not_be_checked(line):
    with pytest.raises(DraftlineError, match="--plan"):
        CommandLine.parse(line)


def test_a_release_before_the_table_is_no_verdict_on_the_draft(judged):
    with pytest.raises(DraftlineError, match=r"SGLang 0\.5\.2: no release that is known here"):
        judged(version="0.5.2")
