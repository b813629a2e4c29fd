"""A finished run in miniature: real prompts, answers and states of the tiny target, made once and copied for each test."""

import shutil
from dataclasses import dataclass
from pathlib import Path

import pytest

from tasks.common.errors import DraftlineError
from tasks.common.files import read_json, write_jsonl
from tasks.common.params import Params
from tests.planted_benchmark import SETTINGS
from tests.silent_tracker import SilentTracker


@dataclass(frozen=True)
class Verdict:
    """What a gate wrote, and what it raised (empty: it passed)."""

    report: dict
    error: str
    page: str

    @property
    def findings(self) -> dict[str, dict]:
        """By sentence."""
        return {finding["sentence"]: finding for table in self.report["tables"] for finding in table["findings"]}

    def outcome(self, outcome: str) -> list[str]:
        """Sentences that came out so."""
        return [sentence for sentence, finding in self.findings.items() if finding["outcome"] == outcome]

    def samples(self, sentence: str) -> list[str]:
        """Ids that a finding names."""
        return [sample["id"] for sample in self.findings[sentence]["samples"]]


@pytest.fixture
def tracker() -> SilentTracker:
    return SilentTracker()


@pytest.fixture(scope="session")
def params(tiny_model_folder) -> Params:
    return Params.model_validate(
        {
            "target": {"model": str(tiny_model_folder)},
            "prompts": {"folder": "prompts"},
            "regenerate": {"max_new_tokens": 12},
            "dump": {"shard_tokens": 200},
            "gates": {"min_prompts": 4, "replay_samples": 0},
        }
    )


@pytest.fixture(scope="session")
def finished_run(params, tmp_path_factory) -> Path:
    from tasks.collect_prompts.collect import collect_prompts
    from tasks.common.target import TARGET, load_tokenizer
    from tasks.dump_hidden_states.dump import dump
    from tasks.prepare_target.prepare import prepare_target
    from tasks.regenerate_responses.regenerate import regenerate

    folder = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for split, count in (("train", 8), ("heldout", 4)):
            rows = [
                {"id": f"{split}-{n}", "prompt": f"what is {split} " + "the capital " * n + "?"} for n in range(count)
            ]
            write_jsonl(Path(f"prompts/{split}.jsonl"), rows)
        prepare_target(params.target, TARGET)
        collect_prompts(params.prompts, load_tokenizer())
        regenerate(params)
        dump(params)
    return folder


@pytest.fixture
def run(finished_run, tmp_path, monkeypatch) -> Path:
    """A copy of the finished run to break; the current directory."""
    shutil.copytree(finished_run, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def judge(params, tracker):
    """`judge("prompts", gates={...})` runs a gate in the current directory and returns its verdict."""
    import importlib

    from tasks.gates.report import GATES

    def judge_gate(name: str, **sections) -> Verdict:
        changed = Params.model_validate(_merged(params.model_dump(), sections))
        error = ""
        try:
            importlib.import_module(f"tasks.gate_{name}").main(changed, tracker)
        except DraftlineError as raised:
            error = str(raised)
        return Verdict(read_json(GATES / f"{name}.json"), error, (GATES / f"{name}.html").read_text())

    return judge_gate


@pytest.fixture
def judge_benchmark(judge):
    """`judge_benchmark(gates={...})`: the verdict on what tests/planted_benchmark.py plants, of the built-in target."""

    def judged(**sections) -> Verdict:
        return judge("benchmark", target={"model": SETTINGS["target"]} | sections.pop("target", {}), **sections)

    return judged


def _merged(sections: dict, changes: dict) -> dict:
    return {name: {**values, **changes.get(name, {})} for name, values in sections.items()}
