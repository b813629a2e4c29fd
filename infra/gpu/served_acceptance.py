"""Acceptance length as SGLang serves it: a server a draft and chain, all on the same GPU, asked the same questions."""

import json
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from infra.gpu.places import PORT_STEP
from infra.gpu.served_training import CHAINS, EXPORTS, TRAINED
from tasks.common.acceptance import pool
from tasks.common.conversations import read_folder
from tasks.common.errors import DraftlineError
from tasks.common.files import write_json
from tasks.common.params import Params
from tasks.common.server import Server
from tasks.common.speculative_plan import speculative_plan
from tasks.common.target import load_tokenizer, render_prompt

SERVED = Path("served.json")
_FIRST_PORT = 20_000
# Sets that are asked at each chain; the longer one is asked the last set alone, as the drafts' papers report it.
_ONLY_AT_LONGER = "gsm8k"


class _Neighbour(Server):
    """One of several servers that start and stop at the same time on a GPU: whose memory came back cannot be told."""

    def _prove_gpu_memory_is_back(self) -> None:
        pass


def serve_all(params: Params, drafts: Sequence[str], folder: Path, limit: int | None, at_once: int, in_flight: int):
    """Serve every draft at every chain and ask the sets; what is known so far is in served.json.

    Args:
        folder: JSONL files of questions, a set a file, in the form of prompts.folder; the first turn is asked.
        limit: questions of a set; None asks all.
        at_once: servers that run beside each other.
        in_flight: questions that one server answers at once.

    Returns:
        By draft and chain the figures of each set, or why there are none.
    """
    sets = read_sets(folder, limit)
    found: dict[str, dict[str, Any]] = {name: {} for name in drafts}
    lock = threading.Lock()

    def one(number: int, name: str, steps: int) -> None:
        chain = f"{steps}/1/{steps + 1}"
        asked = {k: v for k, v in sets.items() if steps == CHAINS[0] or k == _ONLY_AT_LONGER}
        try:
            figures = _serve_one(params, name, steps, asked, _FIRST_PORT + PORT_STEP * number, in_flight)
        except Exception as error:  # the others go on
            figures = {"failed": f"{type(error).__name__}: {error}"}
        with lock:
            found[name][chain] = figures
            write_json(SERVED, found)
            print(f"{name} {chain}: {json.dumps(figures)}", flush=True)

    jobs = [(name, steps) for name in drafts for steps in CHAINS]
    with ThreadPoolExecutor(at_once) as threads:
        for running in [threads.submit(one, number, *job) for number, job in enumerate(jobs)]:
            running.result()
    return found


def read_sets(folder: Path, limit: int | None) -> dict[str, list[list[int]]]:
    """Rendered questions by set.

    Raises:
        DraftlineError: a row holds no conversation; names file and line.
    """
    tokenizer, sets = load_tokenizer(), {}
    for row in read_folder(folder):
        if row.prompt is None:
            raise DraftlineError(f"{folder / row.file}:{row.line}: no question: {row.reason}.")
        sets.setdefault(Path(row.file).stem, []).append(render_prompt(tokenizer, row.prompt.messages))
    return {name: prompts[:limit] for name, prompts in sets.items()}


def _serve_one(params: Params, name: str, steps: int, sets: dict, port: int, in_flight: int) -> dict[str, Any]:
    serve = {
        "num_steps": steps,
        "num_draft_tokens": steps + 1,
        "max_running_requests": in_flight,
        "max_total_tokens": in_flight * params.serve.context_length,
    }
    served = params.model_copy(update={"serve": params.serve.model_copy(update=serve)})
    plan = speculative_plan(served, (EXPORTS / name).absolute(), port=port)
    sampling = {"temperature": 0, "max_new_tokens": params.regenerate.max_new_tokens}
    figures: dict[str, Any] = {}
    with _Neighbour(plan) as server, ThreadPoolExecutor(in_flight) as threads:
        for of_set, prompts in sets.items():
            began = time.perf_counter()
            answers = list(threads.map(lambda ids: server.generate(ids, sampling), prompts))
            acceptance = pool(answers)
            figures[of_set] = {
                "accept_length": round(acceptance.accept_length, 4),
                "survival": [round(share, 4) for share in acceptance.survival(steps)],
                "rounds": acceptance.rounds,
                "prompts": len(prompts),
                "answer_tokens": sum(len(answer.output_ids) for answer in answers),
                "seconds": round(time.perf_counter() - began, 1),
            }
    return figures


def table(found: dict[str, dict[str, Any]]) -> str:
    """Markdown: a row a draft, its served and predicted acceptance lengths and what its training took."""
    columns = list(
        dict.fromkeys(
            (of_set, chain)
            for by_chain in found.values()
            for chain in sorted(by_chain)
            for of_set, figures in by_chain[chain].items()
            if isinstance(figures, dict)
        )
    )
    costs = ("seconds", "tokens_per_s", "peak_memory_gib")
    head = [
        "draft",
        *(f"{of_set} {chain}" for of_set, chain in columns),
        *(f"predicted {steps}/1/{steps + 1}" for steps in CHAINS),
        *costs,
    ]
    lines = [head, ["---"] * len(head)]
    for name, by_chain in found.items():
        trained = read_trained(name)
        served = [by_chain.get(chain, {}).get(of_set, {}).get("accept_length", "-") for of_set, chain in columns]
        expected = [trained.get("predicted", {}).get(f"{steps}/1/{steps + 1}", "-") for steps in CHAINS]
        lines.append([name, *served, *expected, *(trained.get(cost, "-") for cost in costs)])
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in lines)


def read_trained(name: str) -> dict[str, Any]:
    """What is known of a draft's training; empty where it was trained elsewhere."""
    path = TRAINED / f"{name}.json"
    return json.loads(path.read_bytes()) if path.exists() else {}
