"""A check: what was found, what was expected, why it matters, what to do."""

from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict

from tasks.common.errors import DraftlineError

Verdict = Literal["ok", "warning", "error", "not applicable"]


class Check(BaseModel):
    """One row of the table.

    Attributes:
        why: one sentence: what goes wrong later where this is not so.
        fix: a command or an edit; None where there is nothing to do.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    verdict: Verdict
    found: str
    expected: str
    why: str
    fix: str | None = None


@dataclass(frozen=True)
class Expectation:
    """What a check expects and why; what was found turns it into a `Check`."""

    id: str
    expected: str
    why: str

    def ok(self, found: str) -> Check:
        return self._found("ok", found)

    def warning(self, found: str, fix: str) -> Check:
        return self._found("warning", found, fix)

    def error(self, found: str, fix: str) -> Check:
        return self._found("error", found, fix)

    def not_applicable(self, found: str) -> Check:
        return self._found("not applicable", found)

    def _found(self, verdict: Verdict, found: str, fix: str | None = None) -> Check:
        return Check(id=self.id, verdict=verdict, found=found, expected=self.expected, why=self.why, fix=fix)


def worst(checks: list[Check]) -> Verdict:
    """'error' before 'warning' before 'ok'."""
    verdicts = {check.verdict for check in checks}
    return next((verdict for verdict in ("error", "warning") if verdict in verdicts), "ok")


def require_no_errors(checks: list[Check]) -> None:
    """Refuse to go on while a check has failed.

    Raises:
        DraftlineError: each failed check with what was found, what was expected, why, and what to do.
    """
    failed = [check for check in checks if check.verdict == "error"]
    if failed:
        raise DraftlineError("\n".join(f"- {described(check)}" for check in failed))


def described(check: Check) -> str:
    """A failed check in one paragraph."""
    return f"{check.id}: {check.found.rstrip('.')}. Expected: {check.expected}. {check.why} Fix: {check.fix}"
