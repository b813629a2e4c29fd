"""How the dump tells the server's hooks which shard a request belongs to: a folder of planned shards, and request ids.

Both sides are processes of one host. The dump puts a shard's plan into the folder before it sends the first of its
requests; the hooks write the shard where the plan says, and the dump sees its sidecar appear.
"""

import json
from dataclasses import dataclass
from pathlib import Path

from tasks.common.shard_layout import ShardPlan

ERROR, FIGURES = "error.txt", "figures.json"
_PREFIX = "states:"


@dataclass(frozen=True)
class Destination:
    """A planned shard, and the folder of the split that it goes to."""

    plan: ShardPlan
    folder: Path

    @property
    def key(self) -> str:
        """Name of the plan in the spool."""
        return f"{self.folder.name}-{self.plan.name}"

    def put(self, spool: Path) -> Path:
        """Write the plan, whole or not at all; returns the file."""
        from safetensors.numpy import save_file

        arrays = {name: getattr(self.plan, name) for name in ("offsets", "input_ids", "loss_mask")}
        known = {"name": self.plan.name, "sha256": self.plan.sha256, "folder": str(self.folder.absolute())}
        path = spool / self.key
        partial = path.with_name(f".{path.name}")
        save_file(arrays, partial, metadata={**known, "ids": json.dumps(self.plan.ids)})
        return partial.replace(path)

    @classmethod
    def take(cls, spool: Path, key: str) -> "Destination":
        """Read what `put` wrote."""
        from safetensors import safe_open

        with safe_open(spool / key, framework="np") as file:
            known = file.metadata()
            arrays = {name: file.get_tensor(name) for name in ("offsets", "input_ids", "loss_mask")}
        plan = ShardPlan(known["name"], known["sha256"], tuple(json.loads(known["ids"])), **arrays)
        return cls(plan, Path(known["folder"]))

    def request_ids(self) -> list[str]:
        """The id of each sample's request."""
        return [f"{_PREFIX}{self.key}:{index}" for index in range(len(self.plan.ids))]


def parse_request_id(request_id: str) -> tuple[str, int] | None:
    """The plan's key and the sample's index; None for a request of somebody else, a health check say."""
    if not request_id.startswith(_PREFIX):
        return None
    key, _, index = request_id.removeprefix(_PREFIX).rpartition(":")
    return key, int(index)
