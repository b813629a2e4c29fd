"""The reports of a benchmark with planted figures: two prompts, 100 rounds, 150 correct drafts, one draft on one set."""

import csv
from importlib.metadata import version
from typing import Any

from tasks.common.files import ARTIFACTS, REPORTS, sha256_json, write_json
from tasks.common.measured_draft import params_sha256
from tasks.common.params import Params

_FIELDS = "prompt domain repeat answer_tokens baseline_tokens verify_rounds correct_drafts accept_length baseline_tokens_per_s speculative_tokens_per_s speedup first_difference"
DRAFT = {"contract": {"target_sha256": "1" * 64}, "model_sha256": "2" * 64, "config_sha256": "3" * 64}
SETTINGS = {
    "version": version("sglang"),
    "steps": 3,
    "topk": 1,
    "draft_tokens": 4,
    "temperature": 0.0,
    "num_prompts": 16,
    "prompts": 2,
    "prompts_sha256": sha256_json(["chat-1", "chat-2"]),
    "target": "builtin",
    "target_sha256": "1" * 64,
    "draft_sha256": sha256_json(DRAFT),
    "sets": ["heldout"],
    "max_new_tokens": 48,
    "repeats": 3,
    "concurrency": [1],
    "temperatures": [0.0],
    "params_sha256": params_sha256(Params()),
    "device": "cpu",
    "dtype": "float32",
}


def asked_for(**sections: Any) -> dict[str, str]:
    """Settings of a benchmark with these sections of params.yaml."""
    return {"params_sha256": params_sha256(Params.model_validate(sections))}


def cell(**changes: Any) -> dict[str, Any]:
    """One draft on one set at one load."""
    drafted = 10 * float(changes.get("speedup", 1.5))
    return {
        "draft": "speculative",
        "set": "heldout",
        "concurrency": 1,
        "temperature": 0.0,
        "requests": 2,
        "repeats": 3,
        "accept_length": 2.5,
        "survival": [0.7, 0.5, 0.3],
        "verify_rounds": 100,
        "correct_drafts": 150,
        "tokens_per_s": {"pooled": drafted, "median": drafted, "min": drafted - 1, "max": drafted + 1},
        "baseline_tokens_per_s": {"pooled": 10.0, "median": 10.0, "min": 9.5, "max": 10.5},
        "speedup": 1.5,
        "break_even_accept_length": 1.67,
        "agreement": 1.0,
    } | changes


def pooled(**changes: Any) -> dict[str, Any]:
    """The headline's counts."""
    return {"accept_length": 2.5, "tokens_per_s": 15.0, "verify_rounds": 100, "correct_drafts": 150} | changes


def bucket(tokens: str, accept_length: float, verify_rounds: int = 50) -> dict[str, Any]:
    """A row of by_context."""
    return {"tokens": tokens, "answers": 2, "verify_rounds": verify_rounds, "accept_length": accept_length}


def write_benchmark(
    parted: int | str = "",
    settings: dict[str, Any] | None = None,
    *,
    first: int | str = "",
    tokens: int = 24,
    **changes: Any,
) -> None:
    """Write reports/benchmark.json and benchmark_prompts.csv, and the records of target and draft that they are of.

    Args:
        parted, first: token at which the second prompt's answers part, and the first one's.
        tokens: of each answer with the draft; those of the plain server have 24.
        settings, changes: what is other than in a sound report.
    """
    report = {
        "speculative": pooled(tokens_per_s=10 * float(changes.get("speedup", 1.5))),
        "baseline": {"tokens_per_s": 10.0},
        "speedup": 1.5,
        "break_even_accept_length": 1.67,
        "lossless": True,
        "predicted_accept_length": 2.4,
        "survival": [0.7, 0.5, 0.3],
        "by_domain": [{"domain": "chat", "accept_length": 2.5, "speedup": 1.5}],
        "by_context": [bucket("up to 128", 2.6), bucket("129 to 256", 2.4)],
        "cells": [cell(**{name: changes[name] for name in ("speedup", "break_even_accept_length") if name in changes})],
        "settings": SETTINGS | (settings or {}),
    } | changes
    write_json(REPORTS / "benchmark.json", report)
    write_json(ARTIFACTS / "target" / "draftline.json", {"target_sha256": SETTINGS["target_sha256"]})
    write_json(ARTIFACTS / "export" / "draftline.json", DRAFT)
    counts = pooled() | report["speculative"]
    halves = [(n // 2, n - n // 2) for n in (counts["verify_rounds"], counts["correct_drafts"])]
    rows = [
        [f"chat-{number}", "chat", 0, tokens, 24, rounds, correct, 2.5, 10, 15, 1.5, at]
        for number, (rounds, correct, at) in enumerate(zip(*halves, (first, parted), strict=True), 1)
    ]
    with (REPORTS / "benchmark_prompts.csv").open("w", newline="") as file:
        csv.writer(file).writerows([_FIELDS.split(), *rows])
