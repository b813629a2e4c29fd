"""Who answers: the run's nonce, the target, the draft and the algorithm, and the owner of the port (failure mode S1)."""

from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tasks.common.check import Check, Expectation
from tasks.common.server_session import command_line, describe_process, port_owner

_WHY = "A health check can be answered by an old server that still holds the port."
_LOOPBACK = ("127.0.0.1", "localhost", "::1", "0.0.0.0")


def check_nonce(answered: str, planned: str | None) -> Check:
    """The weight version, which comes back in every answer.

    Args:
        planned: value of --weight-version in the plan.
    """
    want = Expectation("S1 nonce", f"weight version {planned}" if planned else "a nonce in the plan", _WHY)
    if planned is None:
        return want.not_applicable(
            f"answers say {answered!r}; a --plan with --weight-version NONCE proves which server it is"
        )
    if answered != planned:
        return want.error(
            f"answers say {answered!r}, the plan {planned!r}: another server",
            "Stop the server that holds the port, and start the planned one.",
        )
    return want.ok(answered)


def check_serves(info: dict[str, Any], expected: dict[str, str | None]) -> Check:
    """Target, draft, algorithm and whatever else is planned, against what the server resolved.

    Args:
        expected: by the server's own names (server_args); paths are compared as places, values as text.
    """
    want = Expectation(
        "S1 server",
        ", ".join(f"{name} {value}" for name, value in expected.items()),
        _WHY,
    )
    differing = [
        f"{name} is {info.get(name)}, planned {value}"
        for name, value in expected.items()
        if not _same(name, info.get(name), value)
    ]
    if differing:
        return want.error("; ".join(differing), "Stop it, and start the planned server on a free port.")
    return want.ok(", ".join(f"{name} {info.get(name)}" for name in expected))


def _same(name: str, served: Any, planned: str | None) -> bool:
    if served is None or planned is None:
        return served is None and planned is None
    return same_place(served, planned) if name.endswith("_path") else str(served) == planned


def same_place(served: Any, planned: str) -> bool:
    """Whether two paths, or names of a hub, are one."""
    return str(served) == planned or Path(str(served)).resolve() == Path(planned).resolve()


def check_port_owner(url: str, weight_version: str) -> Check:
    """On this host: the process that listens is an SGLang server, and the one that answers."""
    want = Expectation("S1 port", "an SGLang server's process with the weight version of the answers", _WHY)
    parts = urlsplit(url)
    if parts.hostname not in _LOOPBACK:
        return want.not_applicable(f"{parts.hostname} is another host: its processes cannot be seen from here")
    owner = port_owner(parts.port or 80)
    if owner is None:
        return want.not_applicable("the owner of the port cannot be seen by this user")
    words = command_line(owner)
    if "--weight-version" in words and words[words.index("--weight-version") + 1] != weight_version:
        return want.error(
            f"{describe_process(owner)} listens, and answers say {weight_version!r}",
            "Look at both processes; stop the stale one.",
        )
    return want.ok(describe_process(owner))
