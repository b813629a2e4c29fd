"""Bringing a real server into steady decoding of so many requests, timing a step there, and having a step traced there."""

import shutil
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from itertools import cycle, islice
from pathlib import Path
from statistics import median

from tasks.common.errors import DraftlineError
from tasks.common.params import reserved_tokens
from tasks.common.server import Server
from tasks.common.sglang_client import Completion
from tasks.profile_server.trace import is_whole

# A step's time is the difference of two answers of one request, prefill and queueing alike in both. An answer starts at any
# moment of a round that runs, so that the long one must hold many.
_SHORT_TOKENS, _FEWEST_MORE, _MOST_MORE, _LONG_S = 8, 32, 192, 3.0
_REPEATS = 3
_ROUNDS = 640  # that the other requests last, context permitting
_TRACED_STEPS = 24
_SETTLE_TIMEOUT_S, _TRACE_TIMEOUT_S, _POLL_S = 120.0, 180.0, 0.02


class ProfiledServer(Server):
    """A server that is asked to profile itself."""

    def start_profile(self, folder: Path, steps: int) -> None:
        """Trace the next steps into a file of `folder`, without Python stacks, which would slow the host more.

        Raises:
            DraftlineError: it refused.
        """
        request = {"output_dir": str(folder), "num_steps": steps, "activities": ["CPU", "GPU"], "with_stack": False}
        self._ask("POST", "/start_profile", json=request | {"record_shapes": False})

    def running_requests(self, since: float) -> int:
        """Requests that decode, 0 where the server has not counted them again since `since`, seconds of Unix time."""
        loads = self._ask("GET", "/v1/loads?include=core")["loads"]
        return sum(load["num_running_reqs"] for load in loads if load["timestamp"] > since)

    def abort_all(self) -> None:
        """End all requests."""
        self._ask("POST", "/abort_request", json={"abort_all": True})


def step_ms(server: ProfiledServer, prompts: Sequence[list[int]], requests: int) -> float:
    """Milliseconds of a plain step or a draft-plus-verify round while `requests` decode at once, without the profiler.

    Raises:
        DraftlineError: the others did not last as long as the request that is timed.
    """
    tokens = _tokens_that_last(server, prompts, requests)
    return median(_time_step(server, prompts, requests, tokens) for _ in range(_REPEATS)) * 1e3


def trace_steps(server: ProfiledServer, prompts: Sequence[list[int]], requests: int, folder: Path) -> Path:
    """Have some steps traced while `requests` decode at once.

    Args:
        folder: emptied before.

    Returns:
        The trace of the first rank.

    Raises:
        DraftlineError: no trace came.
    """
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    tokens = _tokens_that_last(server, prompts, requests)
    with _decoding(server, prompts, requests, tokens) as others:
        server.start_profile(folder.resolve(), _TRACED_STEPS)
        deadline = time.monotonic() + _TRACE_TIMEOUT_S
        while not (found := [path for path in folder.glob("*TP-0*.trace.json.gz") if is_whole(path)]):
            server.require_alive()
            if time.monotonic() > deadline:
                raise DraftlineError(
                    f"{folder}: no whole trace {_TRACE_TIMEOUT_S:.0f} s after the server was asked for {_TRACED_STEPS} steps; it "
                    f"holds {[path.name for path in folder.iterdir()]}. See {server.log} for 'Profiling'."
                )
            _require_running(others, server)
            time.sleep(_POLL_S)
    return found[0]


def _time_step(server: ProfiledServer, prompts: Sequence[list[int]], requests: int, tokens: int) -> float:
    """Seconds, of one measurement beside requests of so many tokens."""
    observer = prompts[(requests - 1) % len(prompts)]

    def ask(new: int) -> Completion:
        answer = server.generate(observer, _sampling(new))
        _require_running(others, server)
        return answer

    with _decoding(server, prompts, requests - 1, tokens) as others:
        ask(_SHORT_TOKENS)  # its prompt is in the prefix cache from here on
        short = ask(_SHORT_TOKENS)
        more = round(_LONG_S / short.seconds * _SHORT_TOKENS)
        long = ask(_SHORT_TOKENS + min(max(more, _FEWEST_MORE), _MOST_MORE))
    return (long.seconds - short.seconds) / (_steps(long) - _steps(short))


def _steps(answer: Completion) -> int:
    """Target forwards behind the first token."""
    return answer.verify_rounds or len(answer.output_ids) - 1


@contextmanager
def _decoding(
    server: ProfiledServer, prompts: Sequence[list[int]], requests: int, tokens: int
) -> Iterator[list[Future]]:
    """Keep so many requests decoding until the block ends, or each has come to `tokens` new ones."""
    with ThreadPoolExecutor(max_workers=max(1, requests)) as pool:
        since = time.time()
        futures = [
            pool.submit(server.generate, prompt, _sampling(tokens)) for prompt in islice(cycle(prompts), requests)
        ]
        try:
            _settle(server, futures, since)
            yield futures
        finally:
            with suppress(DraftlineError):  # of a server that is gone, requests end by themselves
                server.abort_all()


def _settle(server: ProfiledServer, futures: Sequence[Future], since: float) -> None:
    """Wait until all of them decode."""
    deadline = time.monotonic() + _SETTLE_TIMEOUT_S
    while (running := server.running_requests(since) if futures else 0) < len(futures):
        _require_running(futures, server)
        if time.monotonic() > deadline:
            raise DraftlineError(
                f"the {server.plan.kind} server runs {running} of {len(futures)} requests at once, and the rest wait: its KV cache "
                f"holds no more. Raise serve.max_total_tokens, or profile fewer with --requests."
            )
        time.sleep(_POLL_S)


def _require_running(futures: Sequence[Future], server: ProfiledServer) -> None:
    """
    Raises:
        DraftlineError: one of the requests has ended.
    """
    for future in futures:
        if future.done():
            future.result()
            raise DraftlineError(
                f"a request of the {server.plan.kind} server ended after {len(future.result().output_ids)} tokens, before the "
                f"measurement did: fewer than {len(futures)} were left at once. Raise serve.context_length and "
                f"serve.max_total_tokens, so that they can last, or profile fewer with --requests."
            )


def _tokens_that_last(server: ProfiledServer, prompts: Sequence[list[int]], requests: int) -> int:
    """New tokens that take `_ROUNDS` rounds however many are accepted, as far as the context, and the cache for all requests
    at once, hold them: SGLang lets a request wait for which it sees no room to its end.

    Raises:
        DraftlineError: the cache holds no token more than the prompts.
    """
    settings = {flag.name: flag.values for flag in server.plan.flags}
    steps, reserved = 0, 0
    if server.plan.draft is not None:
        names = ("num-steps", "eagle-topk", "num-draft-tokens")
        steps, *drafted = (int(settings[f"--speculative-{name}"][0]) for name in names)
        reserved = reserved_tokens(steps, *drafted)
    cache, taken = server.server_info()["max_total_num_tokens"], max(map(len, prompts)) + 1 + reserved
    if cache < requests * (taken + 1):
        raise DraftlineError(
            f"the {server.plan.kind} server's KV cache holds {cache} tokens, and {requests} requests at once need more than "
            f"{requests * taken}. Raise serve.max_total_tokens, or profile fewer with --requests."
        )
    return min(_ROUNDS * (steps + 1), int(settings["--context-length"][0]) - taken, cache // requests - taken)


def _sampling(tokens: int) -> dict:
    return {"temperature": 0, "max_new_tokens": tokens, "ignore_eos": True}
