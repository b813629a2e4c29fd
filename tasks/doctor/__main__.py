"""The doctor: every known silent failure of an EAGLE-3 draft, found in seconds on anyone's files.

    python -m tasks.doctor --draft artifacts/export --target artifacts/target
    python -m tasks.doctor --draft DIR --plan "python -m sglang.launch_server --model-path M --speculative-algorithm EAGLE3 ..."
    python -m tasks.doctor --draft DIR --target DIR --fix REPAIRED
    python -m tasks.doctor --draft DIR --target DIR --server http://127.0.0.1:30000

Reads SGLang/EAGLE, SpecForge and speculators checkpoints, .safetensors or .bin; no GPU, no server is started, and but for
--server no model is built. Exit code 0: no errors; 1: errors; 2: could not run.
"""

import argparse
import io
import json
import os
import sys
import traceback
from pathlib import Path

from tasks.common.check import Check, worst
from tasks.common.draft_checks.subject import Subject
from tasks.common.errors import DraftlineError
from tasks.common.sglang_versions import NEWEST, number
from tasks.common.stage import ending_in_words
from tasks.doctor.examine import Request, examine, examine_copy

OK, ERRORS, COULD_NOT_RUN = 0, 1, 2


def main(arguments: list[str] | None = None) -> int:
    """Examine, repair where asked, print; the exit code."""
    options = _parser().parse_args(arguments)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # a terminal that cannot show a character shows its code
    try:
        return _examine(options)
    except BrokenPipeError:  # whoever reads has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return COULD_NOT_RUN
    except DraftlineError as error:
        return _could_not_run(options, str(error))
    except Exception as error:  # files and servers are anybody's: what nobody has thought of is no verdict either
        traceback.print_exc()
        return _could_not_run(
            options, f"{type(error).__name__}: {error}. This is a fault of the doctor; please report it."
        )


def _could_not_run(options: argparse.Namespace, problem: str) -> int:
    if options.json:
        print(json.dumps({"verdict": "could not run", "problem": problem}))
    print(f"doctor could not run:\n{problem}", file=sys.stderr)
    return COULD_NOT_RUN


def _examine(options: argparse.Namespace) -> int:
    request = Request(
        draft=options.draft,
        target=options.target,
        hidden_states=options.hidden_states,
        version=options.sglang,
        plan=options.plan,
        server=options.server,
    )
    subject, checks = examine(request)
    repairs: list[str] = []
    if options.fix:
        from tasks.doctor.repair import repair

        repairs = repair(subject, options.fix)
        if repairs:
            checks = examine_copy(request, options.fix)
    code = ERRORS if any(check.verdict == "error" for check in checks) else OK
    if options.json:
        print(json.dumps(_report(subject, options, checks, repairs), indent=2))
    else:
        _print(subject, options, checks, repairs)
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tasks.doctor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--draft", type=Path, required=True, help="folder of the draft")
    parser.add_argument("--target", type=Path, help="folder of the target; config.json is enough for most checks")
    parser.add_argument("--hidden-states", type=Path, help="Draftline's dump that the draft was trained on")
    parser.add_argument(
        "--sglang", metavar="VERSION", help=f"release that will serve (the running server's, else {NEWEST})"
    )
    parser.add_argument("--plan", metavar="LINE", help="the server's whole command line, quoted")
    parser.add_argument("--server", metavar="URL", help="a running server; with --target's weights or --hidden-states")
    parser.add_argument("--json", action="store_true", help="for machines")
    parser.add_argument("--fix", type=Path, metavar="OUT", help="write a repaired copy, and examine that")
    return parser


def _report(subject: Subject, options: argparse.Namespace, checks: list[Check], repairs: list[str]) -> dict:
    return {
        "verdict": worst(checks),
        "draft": str(options.draft),
        "form": subject.draft.form,
        "sglang": subject.version,
        "repaired": {"folder": str(options.fix), "changes": repairs} if repairs else None,
        "checks": [check.model_dump() for check in checks],
    }


def _print(subject: Subject, options: argparse.Namespace, checks: list[Check], repairs: list[str]) -> None:
    from tasks.common.check_table import print_checks
    from tasks.common.console import console

    terminal = console()
    read_as = "" if number(subject.version) <= number(NEWEST) else f", read as {NEWEST}, the newest that is known"
    terminal.print(f"{options.draft}: {subject.draft.form} form, for SGLang {subject.version}{read_as}", markup=False)
    if options.fix:
        broken = worst(checks) != "ok"
        nothing = "nothing that can be repaired without guessing" if broken else "nothing to repair"
        for change in repairs or [f"{nothing}; no copy was written"]:
            terminal.print(f"  {change}", markup=False, soft_wrap=True)
        if repairs:
            terminal.print(f"examined again: {options.fix}", markup=False)
    print_checks(checks, terminal)
    for verdict, name in (
        ("error", "errors"),
        ("warning", "warnings"),
        ("ok", "ok"),
        ("not applicable", "not checked"),
    ):
        found = [check.id for check in checks if check.verdict == verdict]
        listed = "" if verdict == "ok" or not found else f" ({', '.join(found)})"
        terminal.print(f"{name}: {len(found)}{listed}", markup=False)


if __name__ == "__main__":
    with ending_in_words("doctor"):
        sys.exit(main())
