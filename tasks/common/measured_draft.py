"""Which draft on which target a benchmark is of, and what was asked of which servers: it writes the hashes down, and its gate
holds them against what lies there now."""

from tasks.common.files import ARTIFACTS, read_json, sha256_json
from tasks.common.forms import Form, read_form
from tasks.common.params import Params

# No figure depends on them: dvc.yaml measures nothing again for their sake.
_OF_NO_FIGURE = {"serve": {"port", "startup_timeout_s"}}


class _Target(Form):
    target_sha256: str


def identities() -> dict[str, str]:
    """The prepared target's hash, and that of all that the exported draft's record says: its files' hashes, its contract.

    Raises:
        DraftlineError: a record is absent or damaged.
    """
    target = read_form(ARTIFACTS / "target" / "draftline.json", _Target, "Prepare the target again: `dvc repro`.")
    return {
        "target_sha256": target.target_sha256,
        "draft_sha256": sha256_json(read_json(ARTIFACTS / "export" / "draftline.json")),
    }


def params_sha256(params: Params) -> str:
    """Of all of params.benchmark, and of all of params.serve that figures depend on."""
    return sha256_json(params.model_dump(mode="json", include={"benchmark", "serve"}, exclude=_OF_NO_FIGURE))
