"""Gate on the draft: what is served must be what was trained, tensor by tensor, and good enough to be served."""

from pathlib import Path
from typing import Any

import great_expectations.expectations as gxe
import pandas as pd

from tasks.common.capture import captured_layers
from tasks.common.checkpoint_form import WEIGHTS, check_export
from tasks.common.contract import Contract
from tasks.common.draft_files import CONFIG
from tasks.common.draft_tensors import expected_tensors
from tasks.common.errors import DraftlineError
from tasks.common.files import ARTIFACTS, read_json, sha256_file
from tasks.common.params import Gates, Params
from tasks.common.target import TargetShape, load_config, target_contract
from tasks.common.training_report import TRAINED, predicted_accept_length
from tasks.gates.gate import Gate
from tasks.gates.report import Histogram
from tasks.gates.suite import Table, because

LEAD = (
    "Between export_draft and launch_server: SGLang skips tensors that it does not know and leaves missing ones random, "
    "without a word. So the exact tensors, the config and the contract are checked here."
)
EXPORT = ARTIFACTS / "export"
_AGAIN = "Export again: `dvc repro --force --single-item export_draft`."
_TENSOR_COLUMNS = ("id", "type", "expected", "numbers", "nonfinite", "rms")


def build(params: Params) -> Gate:
    """Read artifacts/export and reports/train_draft.json.

    Raises:
        DraftlineError: config.json, draftline.json or the report cannot be read, or the report says nothing of serve.num_steps.
    """
    config, record = read_json(EXPORT / CONFIG), read_json(EXPORT / "draftline.json")
    tensors, ids = _tensors(EXPORT / WEIGHTS, config)
    predicted = {"predicted_accept_length": predicted_accept_length(params.serve.num_steps)}
    return Gate(
        tables=[
            Table("checkpoint", "check", _problems(), checkpoint_suite()),
            Table("tensors", "tensor", tensors, tensor_suite(), shown=("id", "type", "numbers", "rms")),
            Table(
                "contract",
                "fact",
                _facts(config, record, params),
                contract_suite(),
                shown=("id", "exported", "expected"),
            ),
            Table(
                "training", "report", pd.DataFrame([{"id": TRAINED.name, **predicted}]), training_suite(params.gates)
            ),
        ],
        figures={
            "predicted acceptance": predicted["predicted_accept_length"],
            "draft vocabulary": config.get("draft_vocab_size", "absent"),
            "tensors": len(tensors),
            "parameters": int(tensors.loc[tensors["rms"] >= 0, "numbers"].sum()),
        },
        histograms=[Histogram("Target ids in the draft vocabulary", ids, "token ids")] if ids else [],
    )


def checkpoint_suite() -> list[gxe.Expectation]:
    """What must hold of the folder as a whole."""
    return [
        gxe.ExpectColumnValuesToBeInSet(
            column="problem",
            value_set=[""],
            severity="critical",
            description="SGLang would load the folder as it was trained: config, tensors, vocabulary map",
            meta=because(
                "W3", "The loader reports nothing: the draft is served with random weights or layers.", _AGAIN
            ),
        )
    ]


def tensor_suite() -> list[gxe.Expectation]:
    """What must hold of each tensor, expected or found."""
    return [
        gxe.ExpectColumnPairValuesToBeEqual(
            column_A="type",
            column_B="expected",
            severity="critical",
            description="Exactly the tensors that the config asks for, with their types and shapes",
            meta=because("W3", "A renamed tensor is skipped, and the one that it should be stays random.", _AGAIN),
        ),
        gxe.ExpectColumnValuesToBeInSet(
            column="nonfinite",
            value_set=[0],
            severity="critical",
            description="Every weight is finite",
            meta=because(
                "W10", "One NaN makes every proposal the same token.", "Train again with a lower learning rate."
            ),
        ),
        gxe.ExpectColumnValuesToBeBetween(
            column="rms",
            min_value=0,
            strict_min=True,
            severity="critical",
            description="No tensor is all zeros",
            meta=because("W3", "A tensor that nothing ever wrote carries nothing.", _AGAIN),
        ),
    ]


def contract_suite() -> list[gxe.Expectation]:
    """What must hold of each fact that travels with the draft."""
    return [
        gxe.ExpectColumnPairValuesToBeEqual(
            column_A="exported",
            column_B="expected",
            severity="critical",
            description="Contract, captured layers and hashes are those of this target and of the files",
            meta=because("C3", "A draft that is served other layers than it was trained on accepts nothing.", _AGAIN),
        )
    ]


def training_suite(gates: Gates) -> list[gxe.Expectation]:
    """What must hold of the training report."""
    return [
        gxe.ExpectColumnValuesToBeBetween(
            column="predicted_accept_length",
            min_value=gates.min_predicted_accept_length,
            severity="critical",
            description="Predicted acceptance length at serve.num_steps is at least gates.min_predicted_accept_length",
            meta=because(
                "R8",
                "A draft that misses on held-out answers misses when it is served, after an hour of serving.",
                "Train longer or on more answers (train_draft.max_steps, prompts.folder), or lower the limit.",
            ),
        )
    ]


def _problems() -> pd.DataFrame:
    problems = check_export(EXPORT, TargetShape.of(load_config()))
    return pd.DataFrame(
        {"id": "artifacts/export" if not problems else f"problem {number}", "problem": problem}
        for number, problem in enumerate(problems or [""], 1)
    )


def _tensors(path: Path, config: dict[str, Any]) -> tuple[pd.DataFrame, list[int]]:
    """A row a tensor, expected or found, and the target ids of the draft vocabulary (empty without a map)."""
    from safetensors import SafetensorError, safe_open

    try:
        expected = {name: _type(*form) for name, form in expected_tensors(config).items()}
    except (KeyError, TypeError):
        expected = {}  # the config itself is wrong, and the table of the checkpoint says how
    rows: dict[str, dict[str, Any]] = {
        name: {"id": name, "type": "absent", "expected": form} for name, form in expected.items()
    }
    ids: list[int] = []
    try:
        with safe_open(path, framework="pt") as file:
            for name in file.keys():  # noqa: SIM118
                tensor, header = file.get_tensor(name), file.get_slice(name)
                found = {
                    "id": name,
                    "type": _type(header.get_dtype(), header.get_shape()),
                    "expected": "no such tensor",
                }
                rows[name] = found | _statistics(tensor) | ({"expected": expected[name]} if name in expected else {})
                if name == "d2t":
                    ids = (tensor + tensor.new_ones(len(tensor)).cumsum(0) - 1).tolist()
    except (SafetensorError, OSError):
        pass  # the table of the checkpoint says so; here every tensor is absent
    # What was not found has no statistics to judge.
    frame = pd.DataFrame(rows.values(), columns=_TENSOR_COLUMNS)
    return frame.fillna({"numbers": 0, "nonfinite": 0, "rms": 1.0}), ids


def _type(kind: str, shape: Any) -> str:
    return f"{kind} {list(shape)}"


def _statistics(tensor) -> dict[str, float | int]:
    """Of a tensor of numbers: how many, how many not finite, root mean square."""
    import torch

    values = tensor.double()
    finite = values[torch.isfinite(values)]
    return {
        "numbers": values.numel(),
        "nonfinite": values.numel() - finite.numel(),
        "rms": float(f"{finite.square().mean().sqrt().item():.4g}"),
    }


def _facts(config: dict[str, Any], record: dict[str, Any], params: Params) -> pd.DataFrame:
    contract = target_contract(params.contract)
    facts = [(name, record.get("contract", {}).get(name), value) for name, value in contract.model_dump().items()]
    facts.append(("layers that SGLang captures", _captured(config, contract), list(contract.aux_layer_ids)))
    for name, file in (("model_sha256", WEIGHTS), ("config_sha256", CONFIG)):
        path = EXPORT / file
        facts.append((name, record.get(name), sha256_file(path) if path.exists() else "absent"))
    return pd.DataFrame(
        {"id": name, "exported": _plain(exported), "expected": _plain(value)} for name, exported, value in facts
    )


def _captured(config: dict[str, Any], contract: Contract) -> list[int] | str:
    try:
        ids = config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
        return list(captured_layers(ids, contract.architecture, contract.num_layers))
    except (KeyError, TypeError, IndexError, DraftlineError) as error:
        return f"unreadable: {error}"


def _plain(value: Any) -> str:
    return "absent" if value is None else str(list(value) if isinstance(value, tuple) else value)
