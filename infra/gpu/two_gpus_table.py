"""What was found on two GPUs as one table: a row a fact, with what it should be beside it."""

from collections.abc import Iterator
from itertools import pairwise
from statistics import median
from typing import Any

from infra.gpu import two_gpus_dump as dumped
from infra.gpu import two_gpus_pairs as served
from infra.gpu import two_gpus_train as trained
from infra.gpu.two_gpus_settings import GPUS

_EFFICIENCY = 0.9
_COSINE = 0.999
# By so much an acceptance length may differ: bfloat16 rounds otherwise where a sum is taken in two parts.
_ACCEPT_LENGTH = 0.02

Row = tuple[str, str, str, str, str]


def table(found: dict[str, dict[str, Any]]) -> str:
    """Markdown.

    Args:
        found: by part what its JSON file holds.
    """
    rows: list[Row] = [("part", "what", "one", "two", "verdict"), ("---",) * 5]
    for part, of_part in found.items():
        rows.append((part, "GPU memory before and after, MiB", *_idle(of_part)))
        if "failed" in of_part:
            rows.append((part, "the part", "", "", _failure(of_part)))
        rows += ((part, *row) for row in _ROWS[part](of_part.get("found", {})))
    head = "; ".join(f"{part}: {of_part['device']}, {of_part['seconds']} s" for part, of_part in found.items())
    return f"{head}\n\n" + "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _idle(of_part: dict[str, Any]) -> tuple[str, str, str]:
    shown = [
        "none seen" if memory is None else ", ".join(map(str, memory.values()))
        for memory in (of_part.get("idle_before"), of_part.get("idle_after"))
    ]
    if "not_idle_after" in of_part:
        return (shown[0], "-", _cell(of_part["not_idle_after"]))
    checked = of_part.get("idle_before") and of_part.get("idle_after")
    return (*shown, "idle" if checked else "not checked: no GPU")


def _dump_rows(found: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    one = found.get(dumped.ONE, {})
    for name, figures in found.items():
        if name == dumped.ONE:
            continue
        if failure := _failure(figures) or _failure(one):
            yield name, "", "", failure
            continue
        rate, alone = figures["tokens_per_s"], one["tokens_per_s"]
        yield f"tokens/s, {name}", f"{alone:,}", f"{rate:,}", f"{rate / alone:.2f} times"
        slots = figures["against one GPU"]
        cosine = min(slot["cosine"] for slot in slots.values())
        error = max(slot["relative_error"] for slot in slots.values())
        equal = _verdict(cosine >= _COSINE, "equal", f"below {_COSINE}")
        yield f"states, {name}", "", f"cosine {cosine:.6f}, relative error {error:.1e}, the worst slot's", equal
        each = figures["shards_of_each"]
        if len(each) > 1:
            yield f"shards of each, {name}", str(sum(one["shards_of_each"])), ", ".join(map(str, each)), "disjoint"


def _train_rows(found: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    one = found.get(trained.ONE, {})
    for name, figures in found.items():
        if name == trained.ONE:
            continue
        if failure := _failure(figures) or _failure(one):
            yield name, "", "", failure
            continue
        yield from _speed_rows(name, figures, found)
        difference, noise = differs(figures["readings"], one["readings"])
        steps = f"steps {figures['from_step'] + 1} to {figures['readings'][-1]['step']}"
        yield (
            f"losses, {name}",
            f"from one reading to the next {noise:.1e}",
            f"off by at most {difference:.1e}, {steps}",
            _verdict(difference < noise, "equal within noise", "other losses"),
        )


def _speed_rows(name: str, figures: dict[str, Any], found: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    """Against one process as it runs by itself and, where that replays its steps, against one that does not."""
    rate = figures["tokens_per_s"]
    if figures["processes"] == 1:
        if rate:
            yield f"tokens/s, {name}", f"{rate:,}", "", ""
        return
    for alone in (trained.ONE, trained.KERNELS):
        if not (base := found.get(alone, {}).get("tokens_per_s")) or not rate:
            continue
        efficiency = rate / (GPUS * base)
        reached = _verdict(efficiency >= _EFFICIENCY, "reached", "missed")
        verdict = f"efficiency {efficiency:.2f}, aim {_EFFICIENCY} {reached}"
        yield f"tokens/s, {name} against {alone}", f"{base:,}", f"{rate:,}", verdict


def differs(readings: list[dict[str, Any]], others: list[dict[str, Any]]) -> tuple[float, float]:
    """The largest relative difference of two curves at steps that both have, and the median of the second one's from one
    reading to the next: what other batches make of it."""
    theirs = {reading["step"]: reading["loss"] for reading in others}
    pairs = [(reading["loss"], theirs[reading["step"]]) for reading in readings if reading["step"] in theirs]
    losses = list(theirs.values())
    noise = median(abs(after - before) / before for before, after in pairwise(losses))
    return max(abs(ours - other) / other for ours, other in pairs), noise


def _serve_rows(found: dict[str, Any]) -> Iterator[tuple[str, str, str, str]]:
    one = found.get(served.ONE, {})
    for name, figures in found.items():
        if failure := _failure(figures):
            yield name, "", "", failure
            continue
        for concurrency, of_way in figures["by_concurrency"].items():
            alone = one.get("by_concurrency", {}).get(concurrency)
            at = f"{name}, {concurrency} at once"
            cells = (_served(alone) if alone else "-", "" if name == served.ONE else _served(of_way))
            yield f"speed-up and tokens/s, {at}", *cells, ""
            if alone and name != served.ONE:
                yield f"acceptance length, {at}", f"{alone['accept_length']}", *_acceptance(of_way, alone)


def _served(of_way: dict[str, Any]) -> str:
    speed_up, (plain, draft) = of_way["speed_up"], of_way["tokens_per_s"].values()
    spread = f"{speed_up['median']} ({speed_up['min']} to {speed_up['max']})"
    return f"{spread}; {plain:,} plain, {draft:,} with the draft"


def _acceptance(of_way: dict[str, Any], alone: dict[str, Any]) -> tuple[str, str]:
    same = of_way["same_answers"][served.DRAFT]
    off = of_way["accept_length"] / alone["accept_length"] - 1
    equal = _verdict(abs(off) <= _ACCEPT_LENGTH, "equal", f"more than {_ACCEPT_LENGTH:.0%} apart")
    return f"{of_way['accept_length']}", f"{equal} ({off:+.2%}), {same:.0%} of answers the same"


def _verdict(holds: bool, yes: str, no: str) -> str:
    return yes if holds else f"**{no}**"


def _failure(figures: dict[str, Any]) -> str:
    """Why there are none; empty where there are."""
    if not figures:
        return "**not measured**"
    return f"**{_cell(figures['failed'])}**" if "failed" in figures else ""


def _cell(text: str) -> str:
    """One line of it, the end cut: logs are quoted in the JSON file."""
    return " ".join(text.replace("|", "/").split())[:200]


_ROWS = {"dump": _dump_rows, "train": _train_rows, "serve": _serve_rows}
