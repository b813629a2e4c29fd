"""Who answers: the run's nonce, the target, the draft and the algorithm, and the owner of the port (failure mode S1)."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from tasks.common.check import Check, Expectation
from tasks.common.command_line import CommandLine
from tasks.common.server_session import command_line, describe_process, port_owner, working_folder

_WHY = "A health check can be answered by an old server that still holds the port."
_LOOPBACK = ("127.0.0.1", "localhost", "::1", "0.0.0.0")
# What SGLang calls the weights where --weight-version is not given.
_NO_NONCE = "default"


@dataclass(frozen=True)
class Listener:
    """The process that listens on a server's port.

    Attributes:
        pid: None where it cannot be seen.
        local: whether the port is this host's.
        words: that the process was started with.
    """

    pid: int | None
    local: bool
    words: tuple[str, ...] = ()

    @classmethod
    def of(cls, url: str) -> "Listener":
        parts = urlsplit(url)
        local = parts.hostname in _LOOPBACK
        pid = port_owner(parts.port or (443 if parts.scheme == "https" else 80)) if local else None
        return cls(pid, local, tuple(command_line(pid)) if pid else ())

    @property
    def is_sglang(self) -> bool:
        """Whether it is a server itself, and not what forwards to one."""
        return any("sglang" in word for word in self.words[:4])

    def same_place(self, served: Any, named: str) -> bool | None:
        """Whether the path that the server names is `named`; None where that cannot be told from here: another host, a
        hub's name, a folder of a container."""
        if str(served) == named:
            return True
        folder = working_folder(self.pid) if self.pid and self.is_sglang else None
        path = folder / str(served) if folder else None
        return path.resolve() == Path(named).resolve() if path and path.exists() else None


def check_nonce(answered: str, planned: str | None, listener: Listener) -> Check:
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
        return want.error(f"answers say {answered!r}, the plan {planned!r}: another server", _stop(listener))
    return want.ok(answered)


def check_serves(
    info: dict[str, Any], expected: dict[str, str | None], listener: Listener, planned: bool = True
) -> Check:
    """Target, draft, algorithm and type against what the server resolved.

    Args:
        expected: by the server's own names: model_path, speculative_algorithm, ...; None for what it must not have.
        planned: whether a plan says so, or only what was named beside the server.
    """
    why = _WHY if planned else "What is examined beside a server is what it serves, or says nothing of it."
    want = Expectation("S1 server", ", ".join(f"{name} {value}" for name, value in expected.items()), why)
    if not expected:
        return want.not_applicable("neither a plan nor a target is named")
    same = {name: _same(name, info.get(name), value, listener) for name, value in expected.items()}
    word = "planned" if planned else "examined"
    differing = [
        f"{name} is {info.get(name)}, {word} {expected[name]}" for name, equal in same.items() if equal is False
    ]
    if differing:
        fix = "Examine the folders that the server loaded, or ask the server that loads these."
        return want.error("; ".join(differing), _stop(listener) if planned else fix)
    unseen = [f"{name} {info.get(name)}" for name, equal in same.items() if equal is None]
    if unseen:
        return want.not_applicable(f"{', '.join(unseen)}: whether that is what was {word} cannot be seen from here")
    return want.ok(", ".join(f"{name} {info.get(name)}" for name in expected))


def _same(name: str, served: Any, planned: str | None, listener: Listener) -> bool | None:
    if served is None or planned is None:
        return served is None and planned is None
    return listener.same_place(served, planned) if name.endswith("_path") else str(served).upper() == planned.upper()


def check_port_owner(listener: Listener, weight_version: str) -> Check:
    """On this host: the process that listens is an SGLang server, and the one that answers."""
    want = Expectation("S1 port", "an SGLang server's process with the weight version of the answers", _WHY)
    if not listener.local:
        return want.not_applicable("another host: its processes cannot be seen from here")
    if listener.pid is None:
        return want.not_applicable("the owner of the port cannot be seen by this user")
    owner = describe_process(listener.pid)
    if not listener.is_sglang:
        return want.not_applicable(f"{owner} is no SGLang server: it forwards to one, or hides it")
    started = CommandLine.of(listener.words).value("--weight-version") or _NO_NONCE
    if started != weight_version:
        return want.error(f"{owner} was started as {started!r}, answers say {weight_version!r}", _stop(listener))
    return want.ok(owner)


def _stop(listener: Listener) -> str:
    command = f" (kill {listener.pid})" if listener.is_sglang else ""
    return f"Stop the server that answers{command}, and start the planned one on a free port."
