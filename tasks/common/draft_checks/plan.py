"""What a server's command line must say for an EAGLE-3 draft: a rule a row, with the releases that it holds for.

The doctor reads lines that others wrote, the server plan the one that it has put together. Sources: SGLang's
srt/arg_groups/speculative_hook.py (0.5.16, 0.5.23), and servers that were started. A rule that a new release changes
gets `until`, and a second row from that release on; facts that differ stand in common/sglang_versions.py.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.common.check import Check, Expectation
from tasks.common.command_line import CommandLine
from tasks.common.draft_checks.subject import Subject, is_quantised, parts_of
from tasks.common.draft_tensors import aux_size, num_aux_states
from tasks.common.params import tree_tokens
from tasks.common.sglang_versions import number

_CHAIN = ("--speculative-num-steps", "--speculative-eagle-topk", "--speculative-num-draft-tokens")


@dataclass(frozen=True)
class Rule:
    """A row of the table.

    Attributes:
        judge: takes the line, the draft and the expectation that the verdict is to be made of.
        since: first release that it holds for.
        until: first release that it no longer holds for; None while it holds.
    """

    expectation: Expectation
    judge: Callable[[CommandLine, Subject, Expectation], Check]
    since: str = "0.5.16"
    until: str | None = None

    def holds_for(self, version: str) -> bool:
        return number(self.since) <= number(version) and not (self.until and number(self.until) <= number(version))


def check_plan(line: CommandLine, subject: Subject) -> list[Check]:
    """A verdict of every rule of this release."""
    return [rule.judge(line, subject, rule.expectation) for rule in RULES if rule.holds_for(subject.version)]


def _algorithm(line: CommandLine, subject: Subject, want: Expectation) -> Check:
    algorithm, config = line.value("--speculative-algorithm"), subject.draft.config
    seen = aux_size(config)
    if algorithm is None:
        return want.error("no --speculative-algorithm: no speculation at all.", "Add --speculative-algorithm EAGLE3.")
    if algorithm.upper() in ("EAGLE", "NEXTN"):
        return want.error(
            f"{algorithm} for an EAGLE-3 draft: fc is never called, the draft is fed {seen}-wide states where it was "
            f"trained on {num_aux_states(config)} x {seen} = {num_aux_states(config) * seen}.",
            f"Replace {algorithm} by EAGLE3.",
        )
    if algorithm.upper() != "EAGLE3":
        return want.error(f"{algorithm} does not serve an EAGLE-3 draft.", f"Replace {algorithm} by EAGLE3.")
    return want.ok(algorithm)


def _draft_path(line: CommandLine, subject: Subject, want: Expectation) -> Check:
    path = line.value("--speculative-draft-model-path")
    folder = subject.draft.files.folder
    if path is None:
        return want.error("no --speculative-draft-model-path.", f"Add --speculative-draft-model-path {folder}.")
    if Path(path).exists() and Path(path).resolve() != folder.resolve():
        return want.warning(f"{path} is another folder than --draft {folder}.", "Examine the draft that is served.")
    if not Path(path).exists():
        return want.not_applicable(f"{path} is not here; that it is --draft {folder} cannot be seen")
    if subject.draft.form == "speculators":
        return want.error(
            f"{path} is in speculators form: SGLang does not read transformer_layer_config.",
            "Convert it with --fix OUT, and serve OUT.",
        )
    return want.ok(path)


def _chain(line: CommandLine, subject: Subject, want: Expectation) -> Check:
    given = {name: line.number(name) for name in _CHAIN}
    missing = [name for name, value in given.items() if value is None]
    if len(missing) == len(_CHAIN):
        return want.ok("none: SGLang chooses all three")
    found = ", ".join(f"{name.removeprefix('--speculative-')} {value}" for name, value in given.items())
    if missing and "--speculative-adaptive" in line:
        return want.ok(f"{found}: --speculative-adaptive chooses the rest")
    if missing:
        return want.error(f"{found}: all or none.", f"Add {' and '.join(missing)}.")
    steps, topk, tokens = (given[name] or 0 for name in _CHAIN)
    if min(steps, topk, tokens) < 1:
        return want.error(f"{found}.", "Each is 1 or more.")
    if topk == 1 and tokens != steps + 1:
        return want.warning(
            f"{found}: with top-k 1 SGLang verifies steps + 1 tokens whatever is asked.",
            f"Set --speculative-num-draft-tokens {steps + 1}.",
        )
    tree = tree_tokens(steps, topk)
    if tokens > tree:
        return want.error(
            f"{found}: {steps} steps with top-k {topk} make at most {tree} tokens.",
            f"Set --speculative-num-draft-tokens to at most {tree}.",
        )
    return want.ok(found)


def _page_size(line: CommandLine, subject: Subject, want: Expectation) -> Check:
    page, topk = line.number("--page-size") or 1, line.number("--speculative-eagle-topk") or 1
    backend, allowed = line.value("--attention-backend"), subject.engine.tree_backends
    if page == 1 or topk == 1:
        return want.ok(f"page size {page}, top-k {topk}")
    found, fix = f"page size {page} with top-k {topk}", f"Set --page-size 1, or --attention-backend {allowed[0]}."
    if backend is None:
        return want.warning(f"{found}, and the backend is left to SGLang.", fix)
    return want.ok(f"{found} on {backend}") if backend in allowed else want.error(f"{found} on {backend}.", fix)


def _backends(line: CommandLine, subject: Subject, want: Expectation) -> Check:
    named = [f"--{part}attention-backend" for part in ("", "prefill-", "decode-")]
    backends = {name: line.value(name) for name in named if line.value(name)}
    found = ", ".join(f"{name} {value}" for name, value in backends.items()) or "left to SGLang"
    if line.value("--device") == "cpu" and any(backends.get(name) != "intel_amx" for name in named[1:]):
        return want.error(
            f"{found}, on a CPU: a plain --attention-backend becomes torch_native, which refuses EAGLE.",
            "Set --prefill-attention-backend intel_amx --decode-attention-backend intel_amx.",
        )
    if "trtllm_mha" in backends.values() and (line.number("--speculative-eagle-topk") or 1) > 1:
        return want.error(f"{found}: trtllm_mha takes top-k 1 alone.", "Set --speculative-eagle-topk 1.")
    return want.ok(found)


def quantisation_of(line: CommandLine, target_config: dict[str, Any] | None) -> str | None:
    """How the target is quantised: by which flag, or in its config; None where it is not, as far as is known."""
    for name in ("--quantization", "--modelopt-quant"):
        if line.value(name) not in (None, "unquant"):
            return f"{name} {line.value(name)}"
    return "in its config" if target_config is not None and is_quantised(target_config) else None


def _quantisation(line: CommandLine, subject: Subject, want: Expectation) -> Check:
    draft = line.value("--speculative-draft-model-quantization")
    if subject.draft.config.get("quantization_config"):
        return want.not_applicable("the draft is quantised itself")
    quantised = quantisation_of(line, subject.target_config)
    if quantised is None:
        known = "" if subject.target_config else ", as far as the line says (--target)"
        return want.ok(f"the target is not quantised{known}")
    target = f"the target is quantised ({quantised})"
    fix = "Set --speculative-draft-model-quantization unquant."
    if draft is None:
        return want.error(f"{target}, and the draft is read as quantised too.", fix)
    if draft != "unquant":
        return want.warning(f"{target}, and the draft is quantised as {draft} when it is loaded.", fix)
    return want.ok(f"{target}, the draft unquant")


def served_dtype(asked: str | None, subject: Subject) -> str | None:
    """The type that SGLang computes in for a --dtype; None where it is the target's and that is not known."""
    asked = {"half": "float16", "float": "float32"}.get(asked or "", asked)
    if asked not in (None, "auto"):
        return asked
    parts = parts_of(subject.target_config) if subject.target_config else []
    stored = next((part[key] for part in parts for key in ("torch_dtype", "dtype") if part.get(key)), None)
    return "float16" if stored == "float32" else stored


def _dtype(line: CommandLine, subject: Subject, want: Expectation) -> Check:
    asked, dtype = line.value("--dtype"), subject.draft.dtype
    if asked not in (None, "auto"):
        asked = served_dtype(asked, subject)
        if asked != dtype:
            return want.warning(f"--dtype {asked} for a draft of {dtype}.", f"Drop it, or set --dtype {dtype}.")
        return want.ok(asked)
    if dtype == "float32":
        return want.warning("no --dtype: SGLang serves what is float32 as float16.", "Add --dtype float32.")
    if subject.target_config is None:
        return want.not_applicable("the target's type is not known (--target)")
    served = served_dtype(asked, subject)
    if served is not None and served != dtype:
        return want.error(f"the target runs in {served}, the draft in {dtype}.", f"Say which: --dtype {served}.")
    return want.ok(f"{served or 'not stated'}, the draft {dtype}")


def _hidden_states(line: CommandLine, subject: Subject, want: Expectation) -> Check:
    asking = [
        name
        for name in ("--enable-return-hidden-states", "--enable-return-aux-hidden-states", "--forward-hooks")
        if name in line
    ]
    if not asking:
        return want.not_applicable("no states are asked for")
    aux = "--enable-return-aux-hidden-states"
    if aux in line and not subject.engine.return_aux_hidden_states:
        return want.error(f"{aux} on SGLang {subject.version}, which has no such flag.", f"Drop {aux}.")
    fixes = []
    if "--disable-radix-cache" not in line:
        fixes.append("Add --disable-radix-cache: prompt tokens found in the cache are left out.")
    on_gpu = line.value("--device") != "cpu"
    if "--forward-hooks" in line and on_gpu and line.value("--cuda-graph-backend-prefill") != "disabled":
        fixes.append("Add --cuda-graph-backend-prefill disabled: hooks fire only outside CUDA graphs.")
    if fixes:
        return want.error(f"{', '.join(asking)}: states would be missing.", " ".join(fixes))
    return want.ok(", ".join(asking))


def _whole_line(line: CommandLine, subject: Subject, want: Expectation) -> Check:
    if "--config" in line:
        return want.warning(
            f"--config {line.value('--config') or ''}: its flags are not read here.", "Write them into the line."
        )
    if line.value("--json-model-override-args") not in (None, "{}"):
        return want.warning(
            "--json-model-override-args replaces values of the draft's config too, and they are not read here.",
            "Write them into the target's config.json.",
        )
    return want.ok(f"{len(line.flags)} flags")


RULES = (
    Rule(
        Expectation(
            "C1 algorithm",
            "--speculative-algorithm EAGLE3",
            "EAGLE loads an EAGLE-3 draft cleanly, answers, and accepts nothing.",
        ),
        _algorithm,
    ),
    Rule(
        Expectation(
            "S4 draft path", "the examined draft", "Another folder's draft is served, and this one was checked."
        ),
        _draft_path,
    ),
    Rule(
        Expectation(
            "S3 chain",
            "steps, top-k and draft tokens together; with top-k 1 draft tokens = steps + 1",
            "SGLang stops at one that is missing, and changes one that does not fit.",
        ),
        _chain,
    ),
    Rule(
        Expectation(
            "S3 page size",
            "page size 1, or top-k 1, or a backend that verifies trees in pages",
            "Branches that share a page overwrite each other's keys; SGLang refuses or is wrong.",
        ),
        _page_size,
    ),
    Rule(
        Expectation("S3 backends", "attention backends that verify drafts", "Others stop the server after minutes."),
        _backends,
    ),
    Rule(
        Expectation(
            "C9 quantisation",
            "--speculative-draft-model-quantization unquant beside a quantised target",
            "SGLang reads the draft's weights as quantised like the target's.",
        ),
        _quantisation,
    ),
    Rule(
        Expectation("C10 served dtype", "the draft's torch_dtype", "The draft sees states of another rounding."), _dtype
    ),
    Rule(
        Expectation(
            "H1 hidden states",
            "with states asked for: no radix cache, and hooks outside CUDA graphs",
            "Rows are left out without a word, and every later row belongs to another token.",
        ),
        _hidden_states,
    ),
    Rule(Expectation("plan", "every flag in the line", "A flag that is not read is not checked."), _whole_line),
)
