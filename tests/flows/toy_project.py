"""A DVC project of three tiny stages."""

import subprocess
import sys
from pathlib import Path

REPOSITORY = Path(__file__).parents[2]

# Listed against their order, which only the dependencies tell.
DVC_YAML = """\
stages:
  train_draft:
    cmd: python step.py train_draft artifacts/slow/text
    deps: [step.py, artifacts/slow]
    outs: [artifacts/train_draft]
    metrics: [reports/train_draft.json: {cache: false}]
  slow:
    desc: takes a while
    cmd: python step.py slow artifacts/first/text
    deps: [step.py, seconds, artifacts/first]
    params: [train_draft.learning_rate]
    outs: [artifacts/slow]
    meta: {prefect: {timeout_seconds: 120}}
  first:
    desc: makes the first text
    cmd: python step.py first word
    deps: [step.py, word]
    outs: [artifacts/first]
"""
STEP = """\
import subprocess
import sys
from pathlib import Path

name, source = sys.argv[1:]
print(f"{name} begins", flush=True)
Path(f"{name}.begun").touch()
if name == "slow":
    subprocess.run(["sleep", Path("seconds").read_text()])
text = Path(source).read_text()
if "bad" in text:
    sys.exit(f"{name} failed:\\nword holds 'bad'")
Path(f"artifacts/{name}").mkdir(parents=True)
Path(f"artifacts/{name}/text").write_text(text + name)
if name == "train_draft":
    Path("reports").mkdir(exist_ok=True)
    Path("reports/train_draft.json").write_text('{"predicted_accept_lengths": [1.5, 2.0, 2.5]}')
print(f"{name} ends", flush=True)
"""


def dvc_repro(root: Path, environment: dict[str, str]) -> str:
    """What `dvc repro` prints."""
    command = [sys.executable, "-m", "dvc", "repro"]
    return subprocess.run(command, cwd=root, env=environment, capture_output=True, text=True, check=True).stdout
