"""Verify the environment and plan the run, before anything is spent: the first stage, about 20 seconds.

    python -m tasks.verify_environment    # params.yaml -> artifacts/environment/versions.json, reports/environment.json

Reads the target's config, never its weights. All checks run, then the first stage fails if one of them did; each
failed check says what to do. What is checked and how costs are estimated: infra/docs/environment.md.
"""

import sys

try:
    from tasks.common.check import require_no_errors
    from tasks.common.files import REPORTS, write_json
    from tasks.common.params import Params
    from tasks.common.stage import run_stage
    from tasks.common.tracking import Tracker
    from tasks.common.versions import VERSIONS, result_versions
    from tasks.verify_environment.table import print_report
    from tasks.verify_environment.verify import verify
except ModuleNotFoundError as missing:
    sys.exit(
        f"verify_environment failed:\n{sys.executable} (Python {sys.version.split()[0]}) has no module {missing.name}. "
        f"`python` on PATH must be the environment that Draftline was installed in: run `make install`, then put "
        f".venv/bin first on PATH (. .venv/bin/activate)."
    )


def main(params: Params, tracker: Tracker) -> None:
    VERSIONS.unlink(missing_ok=True)
    report = verify(params)
    write_json(REPORTS / "environment.json", report.model_dump(mode="json"))
    print_report(report)
    tracker.log_metrics({"environment/estimated_hours": report.plan.seconds / 3600})
    require_no_errors(report.checks)
    write_json(VERSIONS, result_versions())


if __name__ == "__main__":
    run_stage("verify_environment", main)
