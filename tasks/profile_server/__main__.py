"""Where the time of a draft-plus-verify round goes, and how long it and a plain step are, by requests at once.

    python -m tasks.profile_server                        # 1, 4 and 16 requests, as far as serve.max_running_requests goes
    python -m tasks.profile_server --requests 1 4 8       # -> reports/profile.json, traces in logs/traces

Starts the plain server, then the speculative one, as params.yaml has them. Each decodes so many held-out prompts at once: first
without the profiler, for the length of a step; then it traces some steps itself, which are taken apart. The acceptance length
at which the draft begins to pay is a round over a plain step. The traces open in https://ui.perfetto.dev.
"""

import argparse

from tasks.common.errors import DraftlineError, in_a_line
from tasks.common.files import REPORTS, remove, require_writable, write_json
from tasks.common.machine import machine
from tasks.common.measured_draft import identities
from tasks.common.params import PARAMS, Params, load_params
from tasks.common.responses import require_heldout
from tasks.common.server_plan import baseline_plan
from tasks.common.speculative_plan import speculative_plan
from tasks.common.stage import ending_in_words

REPORT, PARTIAL = REPORTS / "profile.json", REPORTS / "profile.partial.json"
_DEFAULT = (1, 4, 16)


def main(requests: list[int] | None) -> None:
    from tasks.profile_server.profile import TRACES, plain_alone, profile, report
    from tasks.profile_server.show import show

    params = load_params()
    require_writable(REPORTS)
    asked = _requests(requests, params)
    prompts = [response.prompt_token_ids for response in require_heldout("the profile")]
    plain, drafted = baseline_plan(params), speculative_plan(params)
    identity = identities() | {"machine": machine(params.target.device)}
    remove(PARTIAL)  # of an earlier draft
    baseline = profile(plain, prompts, asked)
    try:
        speculative = profile(drafted, prompts, asked)
    except BaseException as error:
        write_json(PARTIAL, plain_alone(baseline, params, identity, in_a_line(error)))
        error.add_note(f"What was measured of the plain server is kept in {PARTIAL}, marked as incomplete.")
        raise
    found = report(baseline, speculative, params, identity)
    write_json(REPORT, found)
    show(found)
    print(f"{REPORT}: the same for programs; {TRACES}: the traces, for https://ui.perfetto.dev")


def _requests(asked: list[int] | None, params: Params) -> list[int]:
    """
    Raises:
        DraftlineError: more than a server runs at once.
    """
    most = params.serve.max_running_requests
    if asked is None:
        return [count for count in _DEFAULT if count <= most]
    if min(asked) < 1:
        raise DraftlineError(f"--requests {min(asked)}: at least one request must run.")
    if max(asked) > most:
        raise DraftlineError(
            f"--requests {max(asked)}: the servers run at most {most} requests at once (serve.max_running_requests in {PARAMS}); "
            f"the rest would wait, and the step measured would be one of {most}. Set serve.max_running_requests to at least "
            f"{max(asked)}, or ask for fewer."
        )
    return sorted(set(asked))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tasks.profile_server",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--requests",
        type=int,
        nargs="+",
        metavar="N",
        help="that decode at once (1 4 16, as far as serve.max_running_requests goes)",
    )
    return parser


if __name__ == "__main__":
    with ending_in_words("profile_server"):
        main(_parser().parse_args().requests)
