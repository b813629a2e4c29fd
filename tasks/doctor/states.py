"""Checks that need a dump: the norm of the last state, the map's coverage, and whose states they are."""

from pathlib import Path

from tasks.common.check import Check, Expectation
from tasks.common.draft_checks.subject import Subject
from tasks.common.errors import DraftlineError
from tasks.common.hidden_states import HiddenStates


def open_states(folder: Path) -> HiddenStates:
    """A split of a dump, or `train` of a dump of several splits.

    Raises:
        DraftlineError: there is no manifest, or it is of another version.
    """
    return HiddenStates(folder / "train" if (folder / "train").is_dir() else folder)


def check_last_norm(states: HiddenStates, target: Path | None) -> Check:
    """C5: rms(last / norm.weight) is 1 over a state iff the final norm was applied exactly once."""
    want = Expectation(
        "C5 final norm",
        f"last_is_normed {states.contract.last_is_normed}, and rms of last / norm weight 1 iff so",
        "A norm that is applied twice or never makes other targets than the ones that the server verifies with.",
    )
    if target is None:
        return want.not_applicable("give --target, whose norm weight is needed")
    from tasks.common.final_norm import rms_over_norm
    from tasks.common.target_weights import TargetWeights

    try:
        weight = TargetWeights(target).final_norm()
    except DraftlineError as error:
        return want.not_applicable(str(error))
    if not len(states):
        return want.error("no samples.", "Dump again.")
    rms, normed = rms_over_norm(states.read(0).last, weight, states.storage_dtype)
    found = f"last_is_normed {states.contract.last_is_normed}, rms of last / norm weight {rms:.4g}"
    if normed != states.contract.last_is_normed:
        fix = "Dump again; a last state after the final norm has rms 1, and the trainer norms no other twice."
        return want.error(f"{found}.", fix)
    return want.ok(found)


def check_coverage(subject: Subject, states: HiddenStates) -> Check:
    """V6: the share of the tokens that the target wrote which the draft can propose at all."""
    from tasks.train_draft.vocab_map import MIN_COVERAGE

    want = Expectation(
        "V6 coverage",
        f"{MIN_COVERAGE:.0%} of the supervised tokens in the draft vocabulary",
        "A token outside the map can never be proposed, so the map and not the draft sets the acceptance.",
    )
    stored = subject.draft.stored
    if "d2t" not in stored:
        return want.not_applicable("no map")
    import torch

    from tasks.common.vocab_map import VocabMap
    from tasks.train_draft.vocab_map import count_supervised_tokens, coverage

    d2t = subject.draft.read("d2t").long()
    ids = d2t + torch.arange(len(d2t))
    if int(ids.min()) < 0 or int(ids.max()) >= states.contract.vocab_size:
        return want.not_applicable("the map holds no token ids (V2)")
    counts = count_supervised_tokens(states)
    vocab_map = VocabMap(ids, states.contract.vocab_size, "")
    try:
        share = coverage(vocab_map, {"train": counts})["train"]
    except DraftlineError as error:
        return want.error(str(error), "Raise draft_vocab_size, or build the map from the answers it is served for.")
    return want.ok(f"{share:.1%}; {int((counts > 0).sum())} distinct tokens, D {len(ids)}")


def check_record(subject: Subject, recorded: dict | None, target_identity: dict | None) -> Check:
    """H7: draft, dump and target carry the same contract."""
    want = Expectation(
        "H7 record",
        "one contract in the draft, the states and the target",
        "A draft is of the target, the layers and the tokenizer that it was trained on, whatever its shapes say.",
    )
    contract, problems = subject.contract, []
    if contract is None:
        return want.not_applicable("nothing records what the draft was trained on")
    for name, other in (("draftline.json", recorded), ("the target", target_identity)):
        for field, value in (other or {}).items():
            mine = contract.model_dump(mode="json").get(field, value)
            if mine != value:
                problems.append(f"{field}: {mine} in {subject.contract_from}, {value} in {name}.")
    if problems:
        return want.error(" ".join(problems), "Take the draft, the states and the target of one run.")
    return want.ok(f"{subject.contract_from}: outputs {list(contract.aux_layer_ids)}")
