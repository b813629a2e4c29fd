"""Our acceptance length and tokens per second against those of SGLang's own benchmark and of its server, on the same run.

    python -m tasks.benchmark.cross_check     # artifacts/export -> reports/cross_check.json

Starts the speculative server of params.yaml. `python -m sglang.benchmark.serving` asks it the questions of the first set, token
id by token id, through a proxy that notes each request and its answer: of one and the same run there is what the tool reports,
what the server counted, and what our definitions make of the answers. In turn with it our own traffic asks the same questions of
the same server. At the lowest and the highest concurrency of params.yaml, benchmark.repeats times.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import version

from tasks.benchmark.cross_check_pairs import LIMIT, Run, pair_rows
from tasks.benchmark.questions import loads_of
from tasks.benchmark.recording_proxy import Recorded, RecordingProxy
from tasks.benchmark.sglang_tool import require_tool, run_tool
from tasks.common.console import console
from tasks.common.errors import DraftlineError
from tasks.common.files import REPORTS, remove, require_writable, write_json
from tasks.common.params import Params, load_params
from tasks.common.server import Server
from tasks.common.server_plan import ServerPlan, flag
from tasks.common.server_session import LOGS
from tasks.common.speculative_plan import speculative_plan
from tasks.common.stage import ending_in_words
from tasks.common.traffic import Load, Pass, Question, run_load

REPORT = REPORTS / "cross_check.json"
_FOLDER = LOGS / "cross_check"
_EVERY_STEP = flag(
    "--decode-log-interval",
    "1",
    reason="the server's counters gain what was verified whenever it logs: at the default of 40 steps the last ones are left out",
)


def main() -> None:
    params = load_params()
    require_writable(REPORTS)
    require_tool()
    loads, plan = _loads(params), speculative_plan(params).adding((_EVERY_STEP,))
    with Server(plan) as server, RecordingProxy(server.url) as proxy:
        remove(REPORT)  # an earlier one is not to pass for this one's, should it fail in its first load
        overlaps = not server.server_info().get("disable_overlap_schedule")
        runs: list[tuple[Load, list[Run]]] = []
        try:
            for load in loads:
                runs.append((load, _runs(server, proxy, plan, load, params)))
                report = {"complete": len(runs) == len(loads)} | _report(runs, params, overlaps)
                write_json(REPORT, report)
        except BaseException as error:
            if runs:
                error.add_note(
                    f"{REPORT} holds what was compared by then, {len(runs)} of {len(loads)} loads, marked as incomplete."
                )
            raise
    show(report)


def _loads(params: Params) -> list[Load]:
    """The first set, greedily, at the lowest and the highest concurrency."""
    greedy = [load for load in loads_of(params) if load.temperature == 0]
    first_set = [load for load in greedy if load.name == greedy[0].name]
    return [first_set[0], *first_set[1:][-1:]]


def _runs(server: Server, proxy: RecordingProxy, plan: ServerPlan, load: Load, params: Params) -> list[Run]:
    """The tool and our own traffic in turn; who goes first alternates."""
    run_load(server, load.warm_up(params.benchmark.warmup_prompts), "warm-up")
    runs = []
    for repeat in range(params.benchmark.repeats):
        ours = _own_pass(server, load, repeat) if repeat % 2 else None
        _say(f"{load.name}, {load.concurrency} at once: pass {repeat + 1} of {params.benchmark.repeats}")
        server.flush_cache()  # which also sets the server's counters back
        try:
            with server.waiting():
                theirs = run_tool(proxy.url, plan, load, _FOLDER)
        except DraftlineError:
            server.require_alive()
            raise
        recorded = in_order(proxy.take(), load.questions)
        counted = server.server_info()["internal_states"][0]["avg_spec_accept_length"]
        runs.append(Run(theirs, recorded, counted, ours or _own_pass(server, load, repeat)))
    return runs


def in_order(recorded: Iterable[Recorded], questions: Sequence[Question]) -> tuple[Recorded, ...]:
    """In the order of the questions: requests that are sent at once overtake each other.

    Raises:
        DraftlineError: other token ids were asked than the questions hold.
    """
    waiting: dict[tuple[int, ...], list[Recorded]] = {}
    for one in recorded:
        waiting.setdefault(tuple(one.input_ids or ()), []).append(one)
    try:
        return tuple(waiting[tuple(question.token_ids)].pop(0) for question in questions)
    except (KeyError, IndexError):
        raise DraftlineError(
            "sglang.benchmark.serving did not send the token ids that it was given: its data set `openai` is known from 0.5.16 "
            "and 0.5.23."
        ) from None


def _own_pass(server: Server, load: Load, repeat: int) -> Pass:
    server.flush_cache()
    return run_load(server, load, "ours", repeat)


def _report(runs: list[tuple[Load, list[Run]]], params: Params, overlaps: bool) -> dict:
    return {
        "limit": LIMIT,
        "loads": [
            {
                "set": load.name,
                "concurrency": load.concurrency,
                "requests": len(load.questions),
                "pairs": pair_rows(of_load, params.serve.num_steps, overlaps),
            }
            for load, of_load in runs
        ],
        "settings": {
            "version": version("sglang"),
            "steps": params.serve.num_steps,
            "topk": params.serve.eagle_topk,
            "draft_tokens": params.serve.num_draft_tokens,
            "temperature": 0.0,
            "max_new_tokens": params.benchmark.max_new_tokens,
            "repeats": params.benchmark.repeats,
            "device": params.target.device,
            "dtype": params.target.dtype,
        },
    }


def show(report: dict) -> None:
    """Print each pair with its ratio over the passes, and why where it is not within the limit."""
    from rich.table import Table

    terminal, settings = console(), report["settings"]
    for load in report["loads"]:
        title = (
            f"{load['set']}, {load['concurrency']} at once, {load['requests']} requests, {settings['repeats']} passes"
        )
        table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
        for column in ("", "ours, by", "SGLang's, by", "ours", "SGLang's", "ratio", "least", "most", "within"):
            table.add_column(column)
        for pair in load["pairs"]:
            figures = (f"{pair[name]:.4g}" for name in ("ours", "theirs", "ratio", "least", "most"))
            table.add_row(pair["figure"], pair["by_us"], pair["by_sglang"], *figures, "yes" if pair["within"] else "no")
        terminal.print(table)
        for pair in (pair for pair in load["pairs"] if not pair["within"]):
            said = f"{pair['figure']}, {pair['by_us']} against {pair['by_sglang']}: not within {report['limit']:.0%}: {pair['why']}."
            terminal.print(f"  {said}", markup=False, soft_wrap=True)
    terminal.print(
        f"SGLang {settings['version']}, {settings['device']}, {settings['dtype']}, steps {settings['steps']}, top-k "
        f"{settings['topk']}, draft tokens {settings['draft_tokens']}, greedy, at most {settings['max_new_tokens']} new tokens. "
        f"Figures are medians over the passes.",
        markup=False,
        soft_wrap=True,
    )


def _say(sentence: str) -> None:
    print(sentence, file=sys.stderr, flush=True)


if __name__ == "__main__":
    with ending_in_words("cross_check"):
        argparse.ArgumentParser(
            prog="python -m tasks.benchmark.cross_check",
            description=__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        ).parse_args()
        main()
