"""Export the draft in the form that SGLang loads: artifacts/draft -> artifacts/export.

    python -m tasks.export_draft          # params.yaml: target.dtype

What was written is read back and checked: exact tensors, shapes, types, vocabulary map, every key of the config.
"""

from tasks.common.files import ARTIFACTS
from tasks.common.params import Params
from tasks.common.stage import run_stage
from tasks.common.tracking import Tracker
from tasks.export_draft.export import export_draft


def main(params: Params, tracker: Tracker) -> None:
    folder = ARTIFACTS / "export"
    record = export_draft(ARTIFACTS / "draft", folder, params.target.dtype)
    print(f"{folder}: layers {record['contract']['aux_layer_ids']}, sha256 {record['model_sha256'][:12]}")


if __name__ == "__main__":
    run_stage("export_draft", main)
