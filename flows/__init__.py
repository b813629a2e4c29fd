"""Prefect flows over the stages of dvc.yaml. Importing `tasks` first switches telemetry off, Prefect's too."""

import os

import tasks  # noqa: F401

# The temporary API server creates its database at the first run; 20 s are not enough on a busy laptop.
os.environ.setdefault("PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS", "120")
