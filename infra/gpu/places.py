"""Where things lie that the measurements share: this checkout, its built-in prompts, the ports of servers beside each other."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
BUILTIN_PROMPTS = ROOT / "tasks/collect_prompts/builtin"
# SGLang takes its own ports from 100 to 1000 above the one that it listens on.
PORT_STEP = 1_100
