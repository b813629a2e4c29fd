import subprocess
from pathlib import Path

import pytest
import yaml

from tasks.common.errors import DraftlineError
from tasks.common.params import Params, load_params

ROOT = Path(__file__).parents[2]


def keys(section: dict, prefix: str = "") -> set[str]:
    return {
        key
        for name, value in section.items()
        for key in (keys(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name})
    }


def test_params_yaml_names_every_parameter():
    """DVC tracks values in params.yaml: a default that only stands in the code would be changed unseen."""
    written = keys(yaml.safe_load((ROOT / "params.yaml").read_text()))
    assert written == keys(Params().model_dump())


def load(tmp_path, text: str) -> Params:
    path = tmp_path / "params.yaml"
    path.write_text(text)
    return load_params(path)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("train_draft: {lerning_rate: 0.1}", ["params.yaml: train_draft.lerning_rate", "did you mean learning_rate?"]),
        ("train_draft: {epochs: 3}", ["train_draft.epochs: no such parameter; known are draft_vocab_size, ttt_length"]),
        ("train_drafts: {epochs: 3}", ["params.yaml: train_drafts: no such parameter; did you mean train_draft?"]),
        ("train_draft: {learning_rate: true}", ["train_draft.learning_rate", "no numbers"]),
        ("train_draft: {warmup_steps: 5, max_steps: 4}", ["train_draft", "warmup_steps is 5, max_steps 4"]),
        ("seed: 1\nserve: {port: 3000, port: 4000}", ["not valid YAML", "port stands twice", "line 2, column 21"]),
        ("dump: {batch_tokens: many}", ["dump.batch_tokens: a whole number is expected", "'many'"]),
        ("serve: {num_steps: 5}", ["serve", "num_draft_tokens is 4", "set num_draft_tokens: 6"]),
        ("serve: {num_steps: 3, eagle_topk: 2, num_draft_tokens: 40}", ["serve", "make at most 11"]),
        ("serve: {num_steps: 5, num_draft_tokens: 6}", ["ttt_length is 3", "drafts 5"]),
        ("train_draft: {weight_decay: .inf}", ["train_draft.weight_decay", "finite number", "inf"]),
        ("train_draft: {seed: -1}", ["train_draft.seed", "greater than or equal to 0"]),
        ("target: [", ["not valid YAML"]),
        ("contract: {aux_layer_ids: [true, 4, 5]}", ["contract.aux_layer_ids", "no numbers"]),
        ("train_draft:\n  # seed: 1\nserve: {port: 3000}", ["train_draft: parameters are expected below it", "None"]),
        ("- train_draft", ["params.yaml: sections are expected", "['train_draft']"]),
        ("false", ["params.yaml: sections are expected", "False"]),
        ("serve: {1: 2}", ["params.yaml: serve.1: a name that is a text is expected (found 1)"]),
        ("serve: {null: 2}", ["params.yaml: serve.None: a name that is a text is expected (found None)"]),
        ("serve: {on: 1}", ["params.yaml: serve.1: a name that is a text is expected (found True)"]),
        ("serve: {2024-01-31: 1}", ["a name that is a text is expected (found datetime.date(2024, 1, 31))"]),
        ("null: 2", ["params.yaml: None: a name that is a text is expected (found None)"]),
        ("seed: 1\ndump: {{ dump }}", ["not valid YAML", "a name is expected", "line 2, column 8"]),
        ("train_draft:\n  seed: 2024-02-31", ["2024-02-31 is no timestamp; put it in quotes", "line 2, column 9"]),
        ("train_draft: {seed: !!int ten}", ["ten is no int", "line 1, column 21"]),
        ("train_draft: {seed: !!bool ten}", ["ten is no bool", "line 1, column 21"]),
        (
            "benchmark: {temperatures: 0.7}",
            ["a list of numbers is expected, such as `temperatures: [0.0, 1.0]`", "0.7"],
        ),
        ("benchmark: {temperatures: ['0.0']}", ["benchmark.temperatures: a number", "'0.0'; write it without quotes"]),
        ("train_draft: {learning_rate: '1e-3'}", ["train_draft.learning_rate", "'1e-3'; write it without quotes"]),
        ("contract: {aux_layer_ids: 3}", ["a list of whole numbers is expected, such as `aux_layer_ids: [1, 14, 26]`"]),
        ("benchmark: {sets: [a.jsonl]}", ["sets: names with a text each are expected", "`sets: {mine: path/to/"]),
        ("benchmark: {drafts: theirs}", ["drafts: names with a text each are expected", "`drafts: {theirs: path/to/"]),
        ("benchmark: {sets: {mine: }}", ["benchmark.sets.mine: a text is expected, such as `sets: {mine: path/to/"]),
        ("serve: {environment: {A: 4}}", ["serve.environment.A: a text is expected; put it in quotes"]),
        ("benchmark: {concurrency: []}", ["a list with at least one value is expected, such as `concurrency: [1, 4]`"]),
        (
            "benchmark: {repeats: 1}",
            ["benchmark.repeats: must be greater than or equal to 3", "fewest that give a spread"],
        ),
        (
            "benchmark: {repeats: 1000000000}",
            ["benchmark.repeats: must be less than or equal to 1000", "no spread needs"],
        ),
        (
            "benchmark: {num_prompts: 1000000000}",
            ["benchmark.num_prompts: must be less than or equal to 100000", "each"],
        ),
        ("benchmark: {warmup_prompts: 1000000000}", ["benchmark.warmup_prompts: must be less than or equal to 100"]),
        (
            "benchmark: {concurrency: [1000000000000000000000000000000]}",
            ["benchmark.concurrency.0: must be less than or equal to 1024", "this client would be what is measured"],
        ),
        (
            "benchmark: {max_new_tokens: 1}",
            ["benchmark.max_new_tokens: must be greater than or equal to 2", "no draft"],
        ),
        (
            r'serve: {environment: {A: "a\0b"}}',
            ["serve.environment: 'a\\x00b' holds the character '\\x00'", "remove it"],
        ),
        (r'serve: {extra_args: ["--log-level", "a\0b"]}', ["serve.extra_args: 'a\\x00b' holds the character '\\x00'"]),
        (r'benchmark: {sets: {mine: "a\0b"}}', ["benchmark.sets: 'a\\x00b' holds the character"]),
        (r'target: {model: "\uD800"}', ["target.model: '\\ud800' holds the character '\\ud800'"]),
        (f"serve: {{environment: {{A: {'x' * 131_070}}}}}", ["serve.environment: A=xxx", "131,072 characters"]),
        (f"serve: {{extra_args: [--x, {'y' * 131_072}]}}", ["serve.extra_args: yyy", "takes 131,071 bytes"]),
        ("serve: {environment: {PATH: ''}}", ["serve.environment: PATH= holds no `sh`", "write all of it"]),
        (f"benchmark: {{sets: {{mine: {'a/' * 2500}}}}}", ["benchmark.sets.mine: no path: 5,000 characters, a/a/"]),
        (
            f"benchmark: {{drafts: {{mine: {'a' * 256}}}}}",
            ["benchmark.drafts.mine: no path: 256", "255 of them between"],
        ),
        (f"target: {{model: {'a' * 5000}}}", ["target.model: no path: 5,000 characters"]),
        ("target: " + "[" * 5000, ["params.yaml: not valid YAML: "]),
        ("benchmark: {concurrency: [1, 64]}", ["params.yaml: benchmark.concurrency goes up to 64"]),
    ],
)
def test_a_wrong_parameter_is_named_with_what_was_expected(tmp_path, text, words):
    with pytest.raises(DraftlineError) as error:
        load(tmp_path, text)
    for word in words:
        assert word in str(error.value)


def test_every_wrong_parameter_is_reported_at_once(tmp_path):
    with pytest.raises(DraftlineError) as error:
        load(tmp_path, "dump: {batch_tokens: 0}\nregenerate: {engine: vllm}")
    assert len(str(error.value).splitlines()) == 2


def test_a_list_of_wrong_values_is_not_reported_as_empty_too(tmp_path):
    with pytest.raises(DraftlineError) as error:
        load(tmp_path, "benchmark: {temperatures: [warm]}")
    assert str(error.value).endswith(
        "benchmark.temperatures.0: a number is expected, such as `temperatures: [0.0, 1.0]` (found 'warm')"
    )


def test_a_number_with_an_exponent_alone_is_one_as_dvc_reads_it(tmp_path):
    assert load(tmp_path, "train_draft: {learning_rate: 1e-3}").train_draft.learning_rate == 0.001


def test_every_list_and_mapping_shows_how_it_is_written():
    fields = [
        (name, field)
        for section in Params.model_fields.values()
        for name, field in section.annotation.model_fields.items()
        if "tuple" in str(field.annotation) or "dict" in str(field.annotation)
    ]
    assert {name for name, field in fields if field.examples} == {name for name, _ in fields} != set()


def test_missing_params_yaml_says_where_to_run(tmp_path):
    with pytest.raises(DraftlineError, match="repository's root"):
        load_params(tmp_path / "params.yaml")


def test_bytes_that_are_no_text_are_an_error(tmp_path):
    (tmp_path / "params.yaml").write_bytes("target: {model: /models/é}".encode("latin-1"))
    with pytest.raises(DraftlineError, match=r"params\.yaml: not UTF-8 .*position 24.*Save it as UTF-8"):
        load_params(tmp_path / "params.yaml")


def test_a_folder_in_its_place_is_an_error(tmp_path):
    with pytest.raises(DraftlineError, match="cannot be read: Is a directory"):
        load_params(tmp_path)


@pytest.mark.parametrize("text", ["", "# nothing yet\n", "{}"])
def test_an_empty_file_takes_every_default(tmp_path, text):
    assert load(tmp_path, text) == Params()


def test_the_longest_word_that_is_taken_starts_a_process(tmp_path):
    value = "x" * (131_071 - len("A="))
    serve = load(tmp_path, f"serve: {{extra_args: [--x, {'y' * 131_071}], environment: {{A: {value}}}}}").serve
    subprocess.run(["/bin/true", *serve.extra_args], env=serve.environment, check=True)
    with pytest.raises(OSError, match="Argument list too long"):
        subprocess.run(["/bin/true", *serve.extra_args, serve.extra_args[1] + "y"])
