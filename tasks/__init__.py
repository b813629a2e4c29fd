"""The stages, a package each: `python -m tasks.<stage>` runs one, `dvc repro` runs what is due.

Telemetry of every library is switched off here, before any of them is imported. Stages, the flow (which
imports `tasks.common`) and all processes they start inherit it. For tools that a person starts directly:
`.dvc/config` (DVC), `[tool.prefect]` in pyproject.toml (Prefect), the Makefile (MLflow's UI).
"""

import os

for _name, _value in {
    "DO_NOT_TRACK": "true",  # Prefect's client, Hugging Face, MLflow
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",  # it writes over the bars of training
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DVC_NO_ANALYTICS": "true",
    "ITERATIVE_DO_NOT_TRACK": "true",  # DVC's studio client
    "GX_ANALYTICS_ENABLED": "false",
    "HF_HUB_DISABLE_TELEMETRY": "1",
}.items():
    os.environ.setdefault(_name, _value)
