"""Which draft on which target a benchmark is of: it writes the hashes down, and its gate holds them against what lies there now."""

from tasks.common.files import ARTIFACTS, read_json, sha256_json
from tasks.common.forms import Form, read_form


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
