"""SGLang's own benchmark, `python -m sglang.benchmark.serving`, asked to send exactly our questions; 0.5.16 and 0.5.23."""

import importlib.util
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.common.errors import DraftlineError
from tasks.common.files import read_jsonl, write_jsonl
from tasks.common.server_plan import ServerPlan, process_environment
from tasks.common.traffic import Load, Question, cache_key

_TIMEOUT_S = 3600


@dataclass(frozen=True)
class ToolResult:
    """What the tool says of a run.

    Attributes:
        seconds: from before its first request until it has read /server_info.
        tokens_per_s: output tokens over that time.
        accept_length: that it read from /server_info.
    """

    completed: int
    tokens: int
    seconds: float
    tokens_per_s: float
    accept_length: float

    @classmethod
    def of(cls, row: dict[str, Any]) -> "ToolResult":
        """Read the line that the tool appends to --output-file.

        Raises:
            DraftlineError: it lacks a figure.
        """
        try:
            return cls(
                completed=int(row["completed"]),
                tokens=int(row["total_output_tokens"]),
                seconds=float(row["duration"]),
                tokens_per_s=float(row["output_throughput"]),
                accept_length=float(row["accept_length"]),
            )
        except KeyError as error:
            raise DraftlineError(
                f"sglang.benchmark.serving wrote no {error}: its results are known from 0.5.16 and 0.5.23."
            ) from None
        except TypeError:
            raise DraftlineError(
                "sglang.benchmark.serving found no acceptance length in /server_info: the server verified nothing."
            ) from None


def require_tool() -> None:
    """
    Raises:
        DraftlineError: the tool cannot be imported here: it wants `datasets`, which serving does not.
    """
    if importlib.util.find_spec("datasets") is None:
        raise DraftlineError(
            "sglang.benchmark.serving imports the package `datasets`, which is not installed: pip install datasets."
        )


def run_tool(url: str, plan: ServerPlan, load: Load, folder: Path) -> ToolResult:
    """Send a load with SGLang's tool.

    Args:
        url: of what is asked.
        folder: for the questions and the result.

    Raises:
        DraftlineError: the tool failed, or not every request was answered.
    """
    questions, result = folder / "questions.jsonl", folder / "result.jsonl"
    write_jsonl(questions, question_rows(load.questions))
    result.unlink(missing_ok=True)
    try:
        done = subprocess.run(
            command(url, plan.target, load, questions, result),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            encoding="utf-8",
            errors="replace",
            env=process_environment(plan.environment),
            timeout=_TIMEOUT_S,
        )
    except subprocess.TimeoutExpired:
        raise DraftlineError(f"sglang.benchmark.serving had not ended after {_TIMEOUT_S} s.") from None
    if done.returncode or not result.exists():
        raise DraftlineError(f"sglang.benchmark.serving failed (exit code {done.returncode}):\n{done.stdout[-3000:]}")
    [row] = read_jsonl(result)
    found = ToolResult.of(row)
    if found.completed != len(load.questions):
        raise DraftlineError(
            f"sglang.benchmark.serving got {found.completed} answers to {len(load.questions)} questions:\n{done.stdout[-3000:]}"
        )
    return found


def question_rows(questions: Sequence[Question]) -> list[dict[str, Any]]:
    """Rows of its data set `openai`, whose other fields it adds to the request: `input_ids` takes the place of the message, and
    `extra_key` keeps a question that is asked again out of the prefix cache, as in our own traffic.

    No other of its data sets sends token ids of a file, and text would be tokenised again.
    """
    message = [{"role": "user", "content": "-"}]
    return [
        {"messages": message, "input_ids": question.token_ids, "extra_key": cache_key(number)}
        for number, question in enumerate(questions)
    ]


def command(url: str, target: Path, load: Load, questions: Path, result: Path) -> list[str]:
    """Asked as our own traffic is: a closed loop, a stop token ends an answer, nothing asked before (we warm up ourselves,
    and its own warm-up would send the message)."""
    flags = {
        "--backend": "sglang",
        "--base-url": url,
        "--model": target,
        "--tokenizer": target,
        "--dataset-name": "openai",
        "--dataset-path": questions,
        "--num-prompts": len(load.questions),
        "--sharegpt-output-len": load.max_new_tokens,
        "--max-concurrency": load.concurrency,
        "--request-rate": "inf",
        "--temperature": load.temperature,
        "--warmup-requests": 0,
        "--ready-check-timeout-sec": 0,
        "--output-file": result,
    }
    words = [str(word) for pair in flags.items() for word in pair]
    return [sys.executable, "-m", "sglang.benchmark.serving", *words, "--disable-ignore-eos", "--disable-tqdm"]
