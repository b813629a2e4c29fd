"""What the search found: reports/tuned.json, and the best plan as a `serve:` section to copy."""

from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path
from statistics import fmean

from tasks.common.advice_reports import measured_step_share, scaling_fit
from tasks.common.break_even import advice
from tasks.common.files import replacing
from tasks.common.params import PARAMS, Params
from tasks.tune_server.candidates import Candidate
from tasks.tune_server.results import Result, Trial
from tasks.tune_server.search import Search
from tasks.tune_server.space import CURRENT

# Why a share is missing here: the advice's own reason would send people to this search, which has just ended without one.
_NO_STEP_TIME = (
    "how much of a round one step takes is seen by chains of two lengths, "
    "which were not both measured, or by `python -m tasks.profile_server`."
)


def report(
    search: Search,
    params: Params,
    identity: Mapping[str, str],
    concurrency: int,
    budget_s: float,
    spent_s: float,
    folder: Path,
) -> dict:
    """reports/tuned.json.

    Args:
        identity: hashes of target and draft, and the machine, for the settings.
        folder: where reports/scaling.json and profile.json may lie, for the advice.
    """
    best = search.best if search.has_compared else None
    settings = {
        "engine": "sglang",
        "version": version("sglang"),
        "device": params.target.device,
        "dtype": params.target.dtype,
        "temperature": 0.0,
        "max_new_tokens": params.benchmark.max_new_tokens,
        "extra_args": list(params.serve.extra_args),
        "environment": dict(params.serve.environment),
        **identity,
    }
    return {
        "concurrency": concurrency,
        "budget_s": round(budget_s, 1),
        "spent_s": round(spent_s, 1),
        "complete": search.is_complete,
        "ended": search.ended,
        "best": _row(best, params) if best else None,
        "comparison": comparison(search, params),
        "round_time": _round_time(search),
        "verdict": verdict(search),
        "advice": _advice(search.best, search, params, settings, concurrency, folder) if search.best else [],
        "candidates": [_row(trial, params) for trial in search.in_order],
        "notes": list(search.space.notes),
        "settings": settings,
    }


def comparison(search: Search, params: Params) -> list[dict]:
    """The best and what it is compared with: a row each, of the latest rung that it was asked all repeats in."""
    rows = {"best": search.best} if search.has_compared else {}
    rows |= {name: search.trials.get(candidate, Trial(candidate)) for name, candidate in search.space.rows.items()}
    alike = _alike(search)
    return [
        {"row": name, "name": trial.candidate.name, "failed": trial.failed, "result": _result(trial.last)}
        for name, trial in (rows | ({"plain server, best settings": alike} if alike else {})).items()
    ]


def verdict(search: Search) -> str:
    """How the best stands to the plain server and to the current parameters, in a few sentences."""
    best = search.best
    if best is None:
        return "Nothing was measured in full."
    if not search.has_compared:
        return (
            f"{best.candidate.name}, the current parameters: {best.last.speedup:.2f} times the plain server "
            f"({_spread(best.last)}). Nothing else that {PARAMS} would take was measured."
        )
    said = [f"{best.candidate.name}: {best.last.speedup:.2f} times the plain server ({_spread(best.last)})."]
    if best.last.speedup <= 1:
        said = [
            f"No plan beats the plain server; the best is {best.candidate.name}, {best.last.speedup:.2f} times ({_spread(best.last)})."
        ]
    current = search.trials.get(search.space.rows[CURRENT])
    if current and current.last and current is not best:
        said.append(_beside(best, current))
    if (alike := _alike(search)) and (both := best.beside(alike)):
        of_best, of_alike = both
        said.append(
            f"Its settings make the plain server {of_alike.speedup:.2f} times as fast as well{_rung(best, of_best)}: of the draft "
            f"itself are {of_best.speedup / of_alike.speedup:.2f} times."
        )
    return " ".join([*said, *filter(None, [search.shortage])])


def write_profile(path: Path, search: Search, params: Params, command: str, where: str) -> None:
    """The best plan: the section `serve:`, and where it comes from.

    Args:
        search: has a best.
        command: that made it.
        where: device and engine.
    """
    import yaml

    best = search.best
    chosen = best.candidate.params(params)
    said = [
        f"The section serve: of {PARAMS}, tuned by `{command}`.",
        f"Measured on {where}.",
        verdict(search),
        f"Acceptance length {best.last.accept_length:.2f} over {best.last.questions} questions, greedy.",
    ]
    if params.dump.engine == "sglang" and chosen.serve.extra_args != params.serve.extra_args:
        said.append(
            "Other flags than before, with which dump.engine sglang computes the states as well: `dvc repro` would dump and train "
            "again; `python -m tasks.benchmark` measures it without."
        )
    if not search.is_complete:
        said.append(search.ended)
    text = yaml.safe_dump({"serve": chosen.serve.model_dump(mode="json")}, sort_keys=False)
    with replacing(path) as partial:
        partial.write_text("".join(f"# {line}\n" for line in said) + text, encoding="utf-8")


def _round_time(search: Search) -> dict | None:
    """Milliseconds of a chain's round, `fixed_ms` + steps * `step_ms`."""
    prediction = search.prediction
    if (line := prediction.round_time) is None:
        return None
    plain_ms = 1e3 * fmean(result.plain_step_s for result in prediction.measured.values())
    return {"fixed_ms": round(line.fixed * plain_ms, 4), "step_ms": round(line.step * plain_ms, 4)}


def _alike(search: Search) -> Trial | None:
    """The plain server under the best one's settings, where it was measured."""
    best = search.best
    if best is None or not best.candidate.options:
        return None
    trial = search.trials.get(Candidate(None, best.candidate.options))
    return trial if trial and trial.last else None


def _advice(
    trial: Trial, search: Search, params: Params, settings: Mapping, concurrency: int, folder: Path
) -> list[str]:
    result, shape = trial.last, trial.candidate.shape
    if line := search.prediction.round_time:
        share = line.step_share(shape.steps)
    else:
        own = settings | {"extra_args": list(trial.candidate.params(params).serve.extra_args)}
        share = measured_step_share(concurrency, shape.steps, shape.topk, own, folder)
    return advice(
        result.accept_length,
        result.survival,
        shape.steps,
        result.break_even,
        topk=shape.topk,
        draft_step_share=_NO_STEP_TIME if share is None else share,
        scaling=scaling_fit(folder),
    )


def _row(trial: Trial, params: Params) -> dict:
    candidate, shape = trial.candidate, trial.candidate.shape
    serve = candidate.params(params).serve
    return {
        "name": candidate.name,
        "steps": shape and shape.steps,
        "topk": shape and shape.topk,
        "draft_tokens": shape and shape.draft_tokens,
        "automatic": candidate.is_automatic,
        "options": [option.name for option in candidate.options],
        "extra_args": list(serve.extra_args),
        "environment": dict(serve.environment),
        "max_running_requests": serve.max_running_requests,
        "rungs": [_result(result) for result in trial.results],
        "failed": trial.failed,
        "pruned": trial.pruned,
    }


def _result(result: Result | None) -> dict | None:
    if result is None:
        return None
    return {
        "rung": result.rung,
        "questions": result.questions,
        "speedup": {
            "median": round(result.speedup, 3),
            "min": round(min(result.ratios), 3),
            "max": round(max(result.ratios), 3),
            "repeats": len(result.ratios),
            "ratios": [round(ratio, 3) for ratio in result.ratios],
        },
        "tokens_per_s": round(result.tokens_per_s, 2),
        "plain_tokens_per_s": round(result.plain_tokens_per_s, 2),
        "accept_length": result.accept_length and round(result.accept_length, 4),
        "survival": [round(share, 4) for share in result.survival],
        "round_ms": result.break_even and round(1e3 * result.break_even * result.plain_step_s, 4),
        "plain_step_ms": round(1e3 * result.plain_step_s, 4),
        "break_even_accept_length": result.break_even and round(result.break_even, 3),
    }


def _beside(best: Trial, current: Trial) -> str:
    """Of the latest rung that both were in; what others say of them are other questions and other minutes."""
    if not (both := best.beside(current)):
        return f"With the current parameters it is {current.last.speedup:.2f} times; no rung asked all repeats of both."
    of_best, of_current = both
    apart = "" if best.is_above(current) or current.is_above(best) else ", within the spread"
    return f"With the current parameters it is {of_current.speedup:.2f} times{_rung(best, of_best)}{apart}."


def _rung(best: Trial, of_best: Result) -> str:
    """Which one is spoken of, where it is not the best one's latest."""
    return "" if of_best is best.last else f" in rung {of_best.rung}, where the best was {of_best.speedup:.2f}"


def _spread(result: Result) -> str:
    return f"{min(result.ratios):.2f} to {max(result.ratios):.2f} in {len(result.ratios)} repeat{'s' * (len(result.ratios) > 1)}"
