"""The server settings that are fastest with this draft, searched for on real servers within a time budget.

    python -m tasks.tune_server                                  # 10 minutes, one request at a time
    python -m tasks.tune_server --minutes 6 --concurrency 1      # -> reports/tuned.json, reports/tuned_params.yaml

Reads params.yaml and artifacts/export as tasks.launch_server does. Draft steps, top-k and draft tokens, attention backends,
CUDA graphs, batch limits and, where layers are split over GPUs, all-reduce: few of the held-out prompts for many candidates,
then more for the faster ones. Every candidate is measured beside the plain server; what the break-even model rules out is
not started. How it is done and read: infra/docs/tuning.md.
"""

import argparse
import math
import shlex
import sys
from typing import TYPE_CHECKING

from tasks.common.errors import DraftlineError
from tasks.common.files import REPORTS, require_writable, write_json
from tasks.common.params import PARAMS, Params, load_params
from tasks.common.stage import ending_in_words

if TYPE_CHECKING:
    from tasks.tune_server.search import Search
    from tasks.tune_server.servers import Budget

REPORT, PROFILE = REPORTS / "tuned.json", REPORTS / "tuned_params.yaml"


def main(minutes: float, concurrency: int) -> None:
    from tasks.common.machine import machine
    from tasks.common.measured_draft import identities
    from tasks.tune_server.measure import ServerBench
    from tasks.tune_server.search import Search
    from tasks.tune_server.servers import Budget, Fleet
    from tasks.tune_server.show import show

    params = load_params()
    require_writable(REPORTS)
    _require_sensible(minutes, concurrency, params)
    space = _space(params, concurrency)
    questions = _questions(params, concurrency, space.most_reserved)
    budget, identity = Budget(60 * minutes), identities() | {"machine": machine(params.target.device)}
    with Fleet(params, budget) as fleet:
        bench = ServerBench(params, concurrency, questions, budget, fleet)
        search = Search(space, bench, lambda sentence: print(sentence, file=sys.stderr, flush=True))
        found = run_and_report(search, params, identity, minutes, concurrency, budget)
    show(found)
    if not search.has_compared:
        raise DraftlineError(_nothing_found(search))
    print(f"The best plan, to copy into {PARAMS}: {PROFILE}")


def run_and_report(
    search: "Search", params: Params, identity: dict[str, str], minutes: float, concurrency: int, budget: "Budget"
) -> dict:
    """Search, and write both reports however the search ends, if something was compared by then.

    Else those of an earlier search stay, which found more.

    Args:
        identity: hashes of target and draft, and the machine, for the report.

    Returns:
        reports/tuned.json.

    Raises:
        DraftlineError: the search's.
    """
    from tasks.tune_server.report import report, write_profile

    try:
        search.run()
    except BaseException as error:
        if search.has_compared:
            error.add_note(f"{REPORT} and {PROFILE} hold what was measured by then.")
        raise
    finally:
        spent_s = budget.seconds - budget.remaining()
        found = report(search, params, identity, concurrency, budget.seconds, spent_s, REPORTS)
        if search.has_compared:
            write_json(REPORT, found)
            settings = found["settings"]
            where = f"{settings['machine']}, SGLang {settings['version']}, {settings['dtype']}, {concurrency} at once"
            write_profile(PROFILE, search, params, _command(minutes, concurrency), where)
    return found


def _nothing_found(search: "Search") -> str:
    why = search.shortage or f"Every other server that {PARAMS} would take was dropped: see above why."
    kept = f"; {REPORT} is still an earlier search's" if REPORT.exists() else ""
    return f"{why}\nNothing was compared, so nothing was written{kept}."


def _require_sensible(minutes: float, concurrency: int, params: Params) -> None:
    """
    Raises:
        DraftlineError: no time, no request, or more requests than a server runs at once.
    """
    if not 0 < minutes < math.inf:
        raise DraftlineError(f"--minutes {minutes:g}: a budget of some minutes is expected.")
    if concurrency < 1:
        raise DraftlineError(f"--concurrency {concurrency}: at least one request must run.")
    if concurrency > params.serve.max_running_requests:
        raise DraftlineError(
            f"--concurrency {concurrency}: the servers run at most {params.serve.max_running_requests} requests at once "
            f"(serve.max_running_requests in {PARAMS}), and the rest would wait. Set serve.max_running_requests to at least "
            f"{concurrency}, or ask for fewer."
        )


def _questions(params: Params, concurrency: int, reserved: int):
    """The held-out prompts, spread over domains. Not the benchmark's sets: what is tuned on them would flatter itself there.

    Args:
        reserved: tokens of a round beside a request's own, of the candidate with the most.

    Raises:
        DraftlineError: there are none that the servers' context holds, or their cache not so many at once.
    """
    from tasks.common.prompts import spread_over_domains
    from tasks.common.responses import require_heldout
    from tasks.common.traffic import Question

    rows, serve, answer = require_heldout("the tuner"), params.serve, params.benchmark.max_new_tokens
    spread = spread_over_domains(rows, len(rows))
    fitting = [row for row in spread if len(row.prompt_token_ids) + answer + reserved <= serve.context_length]
    if not fitting:
        raise DraftlineError(
            f"{PARAMS}: serve.context_length is {serve.context_length}, and none of the {len(rows)} held-out prompts fits into it "
            f"with {answer} tokens of an answer (benchmark.max_new_tokens) and {reserved} of a round."
        )
    # Trees that reserve more than the current parameters are held against the cache when their server is up, and dropped alone.
    needed = concurrency * (max(len(row.prompt_token_ids) for row in fitting) + answer + serve.reserved_tokens)
    if serve.max_total_tokens and needed > serve.max_total_tokens:
        raise DraftlineError(
            f"{PARAMS}: serve.max_total_tokens is {serve.max_total_tokens}, and {concurrency} requests at once can come to "
            f"{needed} tokens: some would wait. Raise it to {needed}."
        )
    return [Question(row.id, row.domain, row.prompt_token_ids) for row in fitting]


def _space(params: Params, concurrency: int):
    from tasks.common.target import TargetShape, load_config
    from tasks.tune_server.options import Device
    from tasks.tune_server.space import Space

    config = load_config()
    is_latent = getattr(config.get_text_config(), "kv_lora_rank", None) is not None
    return Space.of(params, concurrency, TargetShape.of(config).architecture, Device.of(params), is_latent)


def _command(minutes: float, concurrency: int) -> str:
    words = ["--minutes", f"{minutes:g}", "--concurrency", str(concurrency)]
    return shlex.join(["python", "-m", "tasks.tune_server", *words])


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tasks.tune_server",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--minutes", type=float, default=10, help="time budget, starts of servers included (10)")
    parser.add_argument("--concurrency", type=int, default=1, help="requests at once that count (1)")
    return parser


if __name__ == "__main__":
    with ending_in_words("tune_server"):
        arguments = _parser().parse_args()
        main(arguments.minutes, arguments.concurrency)
