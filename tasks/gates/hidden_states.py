"""Gate on hidden states: every stored state is read again, and held against its sidecar, the answers and the target."""

from collections.abc import Iterator
from typing import Any

import great_expectations.expectations as gxe
import pandas as pd

from tasks.common.contract import Contract
from tasks.common.params import Params
from tasks.common.responses import SPLITS
from tasks.common.target import model_folder, target_contract
from tasks.common.target_weights import TargetWeights
from tasks.gates.gate import Gate
from tasks.gates.norms import NormRecord, compare, norm_label, sample_limits
from tasks.gates.replay import replay, replay_limit
from tasks.gates.report import Histogram
from tasks.gates.stored_states import StoredStates, read_stored_states
from tasks.gates.suite import Table, because

LEAD = (
    "Between dump_hidden_states and train_draft: every token of every answer has its states, they are the bytes that were "
    "written, and they are what the target computes at the layers that the contract names."
)
_DUMP_SHARD = "Delete the shard named above and run `dvc repro`: only it is dumped again."
# Of the samples, at least so many have gates.min_mask_density of their tokens from the assistant.
DENSE_SHARE = 0.95
# `--force` would take over the shards that are there.
_DUMP_ALL = "Dump again: delete artifacts/hidden_states, then `dvc repro`."


def build(params: Params) -> Gate:
    """Read artifacts/hidden_states sample by sample; replay some samples through the target.

    Raises:
        DraftlineError: a manifest, the responses or the target cannot be read.
    """
    contract = target_contract(params.contract)
    stored = read_stored_states(contract, TargetWeights(model_folder(params.target)).final_norm())
    tables = stored_tables(stored, contract, params)
    if params.gates.replay_samples:
        tables.append(replay_table(replay(params, contract, stored.splits, stored.states), params))
    return Gate(
        tables,
        _figures(stored),
        list(_histograms(stored.states, contract)),
        compare(NormRecord.of(contract, params.dump.storage_dtype, stored.norms)),
    )


def stored_tables(stored: StoredStates, contract: Contract, params: Params) -> list[Table]:
    """What is judged of the files of whole splits."""
    return [
        Table(
            "contract",
            "field",
            _contracts(stored, contract, params),
            contract_suite(),
            shown=("id", *SPLITS, "expected"),
        ),
        *shard_tables(stored, state_suite(params, contract, sample_limits(stored.states), whole=True)),
    ]


def shard_tables(stored: StoredStates, of_states: list[gxe.Expectation]) -> list[Table]:
    """What is judged of shards, be it one or all."""
    return [
        Table(
            "shards", "shard", stored.shards, shard_suite(), shown=("id", "samples", "tokens", "megabytes", "problem")
        ),
        Table("samples", "sample", stored.samples, sample_suite()),
        Table("states", "sample", stored.states, of_states),
    ]


def replay_table(replayed: pd.DataFrame, params: Params) -> Table:
    """What is judged of states that were replayed."""
    shown = ("id", "tokens", "contract", "relative_error", "cosine")
    return Table("replay", "state", replayed, replay_suite(replay_limit(params)), shown=shown)


def contract_suite() -> list[gxe.Expectation]:
    """What must hold of each field of the contract."""
    return [
        gxe.ExpectColumnPairValuesToBeEqual(
            column_A=split,
            column_B="expected",
            severity="critical",
            description=f"The contract of the {split} states is that of this target and params.yaml",
            meta=because(
                "H7",
                "States of another target or other layers train a draft that this target never accepts.",
                _DUMP_ALL,
            ),
        )
        for split in SPLITS
    ]


def shard_suite() -> list[gxe.Expectation]:
    """What must hold of each shard."""
    return [
        gxe.ExpectColumnValuesToBeInSet(
            column="problem",
            value_set=[""],
            severity="critical",
            description="Every shard can be read",
            meta=because("H6", "A shard that a killed writer left behind holds less than its index says.", _DUMP_SHARD),
        ),
        gxe.ExpectColumnPairValuesToBeEqual(
            column_A="checksum",
            column_B="recorded_checksum",
            severity="critical",
            description="Every shard has the checksum that was recorded when it was written",
            meta=because(
                "H6",
                "One changed byte in a file of states is a wrong number in training and nothing else.",
                _DUMP_SHARD,
            ),
        ),
    ]


def sample_suite() -> list[gxe.Expectation]:
    """What must hold of each answer and each stored sample."""
    return [
        gxe.ExpectColumnValuesToBeInSet(
            column="stored",
            value_set=[1],
            severity="critical",
            description="Every answer has exactly one stored sample",
            meta=because("R1", "Answers that are lost or doubled shift what the draft learns.", _DUMP_ALL),
        ),
        gxe.ExpectColumnValuesToBeInSet(
            column="answered",
            value_set=[True],
            severity="critical",
            description="Every stored sample belongs to an answer",
            meta=because("D9", "Samples of answers that are gone are left over from another run.", _DUMP_ALL),
        ),
        gxe.ExpectColumnValuesToBeInSet(
            column="problem",
            value_set=[""],
            severity="critical",
            description="Every stored sample can be read",
            meta=because("H6", "Training would stop at it after hours, or skip it.", _DUMP_SHARD),
        ),
    ]


def state_suite(
    params: Params, contract: Contract, norms: dict[str, tuple[float, float]], *, whole: bool
) -> list[gxe.Expectation]:
    """What must hold of the states of each sample.

    Args:
        norms: for each norm column the range outside which a sample differs from all others, from `sample_limits`.
        whole: whether the samples are a whole split or more, of which a share may be exempt from a rule.
    """
    return [
        gxe.ExpectColumnPairValuesToBeEqual(
            column_A="checksum",
            column_B="recorded_checksum",
            severity="critical",
            description="The states are the bytes that were written",
            meta=because("H6", "A flipped byte is a wrong number in training and nothing else.", _DUMP_SHARD),
        ),
        gxe.ExpectColumnValuesToBeInSet(
            column="table_differs",
            value_set=[""],
            severity="critical",
            description="The recorded statistics are those of the states",
            meta=because("H6", "Training plans its batches by them.", _DUMP_SHARD),
        ),
        gxe.ExpectColumnPairValuesToBeEqual(
            column_A="rows",
            column_B="tokens",
            severity="critical",
            description="Every token has a row of states",
            meta=because(
                "H1",
                "A prefix cache leaves out cached tokens, and every later state moves to the wrong token.",
                _DUMP_SHARD,
            ),
        ),
        gxe.ExpectColumnValuesToBeInSet(
            column="same_as_answer",
            value_set=[True],
            severity="critical",
            description="Token ids and loss mask are those of the answer",
            meta=because("H7", "States of other tokens, or of another template, supervise the wrong words.", _DUMP_ALL),
        ),
        gxe.ExpectColumnValuesToBeInSet(
            column="aux_width",
            value_set=[contract.aux_width],
            severity="critical",
            description=f"Aux states are {len(contract.aux_layer_ids)} layers of {contract.hidden_size} wide",
            meta=because(
                "C1",
                "One layer's width is what a server gives that was started with EAGLE for an EAGLE3 draft.",
                f"If a server dumped them, start it with --speculative-algorithm EAGLE3. {_DUMP_ALL}",
            ),
        ),
        gxe.ExpectColumnValuesToBeInSet(
            column="last_width",
            value_set=[contract.hidden_size],
            severity="critical",
            description="The last state is as wide as the target",
            meta=because("H7", "The targets of training come from it.", _DUMP_ALL),
        ),
        gxe.ExpectColumnValuesToBeInSet(
            column="dtype",
            value_set=[params.dump.storage_dtype],
            severity="critical",
            description="States are stored as dump.storage_dtype",
            meta=because("C10", "Mixed types hide a shard of another run.", _DUMP_ALL),
        ),
        gxe.ExpectColumnValuesToBeInSet(
            column="num_nonfinite",
            value_set=[0],
            severity="critical",
            description="Every state is finite",
            meta=because(
                "H3",
                "One NaN makes the loss of its whole batch NaN.",
                "Dump the shard again; if it is NaN again, use float32.",
            ),
        ),
        gxe.ExpectColumnValuesToBeBetween(
            column="smallest_id",
            min_value=0,
            severity="critical",
            description="No token id is negative",
            meta=because("D6", "Padding ids that were stored count as tokens.", _DUMP_ALL),
        ),
        gxe.ExpectColumnValuesToBeBetween(
            column="largest_id",
            max_value=contract.vocab_size - 1,
            severity="critical",
            description="Every token id is in the target's vocabulary",
            meta=because("D6", "Ids of another tokenizer look like numbers all the same.", _DUMP_ALL),
        ),
        gxe.ExpectColumnValuesToBeInSet(
            column="last_is_normed",
            value_set=[contract.last_is_normed],
            severity="critical",
            description="The last state has the rms of one that went through the final norm",
            meta=because("C5", "Targets computed with the norm missing are another distribution.", _DUMP_ALL),
        ),
        gxe.ExpectColumnValuesToBeBetween(
            column="mask_tokens",
            min_value=1,
            severity="critical",
            description="Every sample has a token to learn from",
            meta=because(
                "D1",
                "A mask of zeros trains on nothing and reports no error.",
                "Check the chat template and the answers.",
            ),
        ),
        *([_mask_density(params)] if whole else []),
        *(
            gxe.ExpectColumnValuesToBeBetween(
                column=column,
                min_value=low,
                max_value=high,
                strict_min=low == 0,
                severity="critical",
                description=f"The norm of {norm_label(column, contract)} is like that of the other samples",
                meta=because("H2", "Rows of zeros, garbage or another layer stand out by their size.", _DUMP_SHARD),
            )
            for column, (low, high) in norms.items()
        ),
    ]


def _mask_density(params: Params) -> gxe.Expectation:
    return gxe.ExpectColumnValuesToBeBetween(
        column="mask_density",
        min_value=params.gates.min_mask_density,
        mostly=DENSE_SHARE,
        severity="critical",
        description="Nearly every sample has at least gates.min_mask_density of its tokens from the assistant",
        meta=because(
            "D1",
            "Short answers to long prompts cost a whole forward pass for a few tokens of training.",
            "Raise regenerate.max_new_tokens, lower prompts.max_prompt_tokens, or lower gates.min_mask_density.",
        ),
    )


def replay_suite(limit: float) -> list[gxe.Expectation]:
    """What must hold of each state that was replayed."""
    return [
        gxe.ExpectColumnValuesToBeBetween(
            column="relative_error",
            max_value=limit,
            severity="critical",
            description="A state is what the target computes there, alone and unpadded",
            meta=because(
                "C3",
                "A draft trained on other layers, or on rows that a batch mixed up, accepts nothing when it is served.",
                f"Where another layer is named, the dump took the wrong one: check contract.aux_layer_ids. {_DUMP_ALL}",
            ),
        )
    ]


def _contracts(stored: StoredStates, contract: Contract, params: Params) -> pd.DataFrame:
    found = {
        split: {**dump.contract.model_dump(), "storage_dtype": dump.storage_dtype}
        for split, dump in stored.splits.items()
    }
    expected = {**contract.model_dump(), "storage_dtype": params.dump.storage_dtype}
    return pd.DataFrame(
        {"id": name, **{split: str(found[split][name]) for split in found}, "expected": str(value)}
        for name, value in expected.items()
    )


def _figures(stored: StoredStates) -> dict[str, Any]:
    tokens = int(stored.states["tokens"].sum())
    return {
        "samples": len(stored.states),
        "tokens": tokens,
        "tokens to learn from": int(stored.states["mask_tokens"].sum()),
        "shards": len(stored.shards),
        "megabytes": round(float(stored.shards["megabytes"].sum())),
    }


def _histograms(states: pd.DataFrame, contract: Contract) -> Iterator[Histogram]:
    yield Histogram("Tokens a sample", states["tokens"].tolist(), "tokens")
    yield Histogram("Assistant tokens a sample", states["mask_density"].tolist(), "share")
    for column in sample_limits(states):
        label = norm_label(column, contract)
        yield Histogram(f"Norm of {label}", states[column].tolist(), "mean L2 over tokens", log=True)
