"""What a server's own draft proposes, written down by a forward hook inside the server (`--forward-hooks`).

The hook runs in SGLang's scheduler process on the logits processors of target and draft. The target's verification
batch holds the proposals themselves; the draft's batches hold the candidates that each was chosen from. Hooks fire only
outside CUDA graphs. One request at a time: rounds are told apart by their order alone.
"""

import json
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tasks.common.draft_form import ARCHITECTURE
from tasks.common.errors import DraftlineError
from tasks.common.server_plan import Setting, flag

_CANDIDATES = 5


@dataclass(frozen=True)
class TracedRound:
    """One verification round of the server.

    Attributes:
        position: of the last verified token x_{t+1} in its sequence; the states up to t were known.
        proposed: target ids of the chain.
        candidates: for each token of the chain the draft's best target ids, best first.
    """

    position: int
    proposed: list[int]
    candidates: list[list[int]]


class DraftTrace:
    """The file that the hook writes, read by the process that started the server."""

    def __init__(self, path: Path, target_ids: list[int]):
        """
        Args:
            target_ids: target id of each draft id.

        Raises:
            DraftlineError: the file cannot be written.
        """
        self.path = path.resolve()
        self._target_ids = target_ids
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.path.unlink(missing_ok=True)
        except OSError as error:
            raise DraftlineError(f"{self.path}: cannot be written: {error.strerror}.") from None

    @property
    def flags(self) -> tuple[Setting, ...]:
        """What the server must be started with."""
        hook = {
            "name": "draft trace",
            "target_modules": ["*logits_processor"],
            "hook_factory": f"{__name__}:write_trace",
            "config": {"path": str(self.path)},
        }
        return (
            flag("--forward-hooks", json.dumps([hook]), reason="writes down what the draft proposes, round by round"),
            flag("--disable-cuda-graph", reason="hooks fire only outside CUDA graphs"),
        )

    @property
    def environment(self) -> tuple[Setting, ...]:
        """Where the server's process finds the hook."""
        return (
            Setting("PYTHONPATH", (str(Path(__file__).resolve().parents[2]),), "the hook is a module of Draftline"),
        )

    def mark(self) -> int:
        """Where the file ends now."""
        return self.path.stat().st_size if self.path.exists() else 0

    def rounds_since(self, mark: int) -> list[TracedRound] | None:
        """Rounds written since a mark, in order; None where the hook could not write them."""
        if not self.path.exists():
            return None
        with self.path.open("rb") as file:
            file.seek(mark)
            lines = file.read().splitlines()
        try:
            records = [json.loads(line) for line in lines]
        except ValueError:  # cut short on a full disk
            return None
        rounds: list[TracedRound] = []
        candidates: dict[int, list[list[int]]] = {}
        for record in records:
            if record["verifies"]:
                position, proposed = record["positions"][0], record["input_ids"][1:]
                # The draft's rows bear the position of the state that they start from, one before their token.
                found = [candidates.get(position - 1 + step, [[]])[-1] for step in range(len(proposed))]
                rounds.append(TracedRound(position, proposed, found))
                candidates = {}
            elif record["candidates"] is not None:
                for position, ids in zip(
                    record["positions"][-len(record["candidates"]) :], record["candidates"], strict=True
                ):
                    candidates.setdefault(position, []).append([self._target_ids[token] for token in ids])
        return rounds


def write_trace(config: dict[str, Any]) -> Callable:
    """Hook factory: SGLang calls it once for each of the two models.

    Args:
        config: `path` of the file to append to.
    """
    import torch.distributed

    if torch.distributed.is_initialized() and torch.distributed.get_rank() > 0:
        return lambda *_: None  # the ranks of a tensor-parallel server compute the same logits
    file = open(config["path"], "a", encoding="utf-8")  # noqa: SIM115 - lives as long as the server

    def hook(module, args, output) -> None:
        batch = args[3]
        drafts = getattr(getattr(module, "config", None), "architectures", None) == [ARCHITECTURE]
        verifies = not drafts and batch.forward_mode.is_target_verify()
        if not drafts and not verifies:
            return
        best = output.next_token_logits.float().topk(_CANDIDATES, dim=-1).indices.tolist() if drafts else None
        record = {
            "verifies": verifies,
            "input_ids": args[0].tolist(),
            "positions": batch.positions.tolist(),
            "candidates": best,
        }
        # A full disk must not end the server: without a trace there is still the count of each round.
        with suppress(OSError):
            file.write(json.dumps(record) + "\n")
            file.flush()

    return hook
