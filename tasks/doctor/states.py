"""Checks against what is beside the draft: the target's weights, and a dump's last states, tokens and contract."""

from pathlib import Path

from tasks.common.check import Check, Expectation
from tasks.common.draft_checks.subject import Subject, read_target, verdict_of
from tasks.common.draft_checks.vocabulary import is_map
from tasks.common.draft_files import read_object
from tasks.common.errors import DraftlineError
from tasks.common.hidden_states import HiddenStates


def open_states(folder: Path, split: str = "train") -> HiddenStates:
    """A dump's split, or the folder itself where it is one.

    Raises:
        DraftlineError: there is no manifest, or it is of another version.
    """
    return HiddenStates(folder / split if (folder / split).is_dir() else folder)


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


def check_target_weights(target: Path | None) -> Check:
    """W9: the trainer finds embedding, final norm and head, in one file or in shards, tied or not."""
    want = Expectation(
        "W9 target weights",
        "embedding, final norm, and a head or an embedding that is tied to it",
        "The trainer reads these three off the target's files; the draft shares the embedding and learns from the head.",
    )
    if target is None:
        return want.not_applicable("give --target")
    if not any(target.glob("*.safetensors*")):
        return want.not_applicable(f"{target} holds no weights, its config alone")
    from safetensors import SafetensorError

    from tasks.common.target_weights import TargetWeights

    shape, _ = read_target(target)
    try:
        weights = TargetWeights(target)
        found = {
            name: weights.shape(name) for name in ("model.embed_tokens.weight", "model.norm.weight", "lm_head.weight")
        }
    except (DraftlineError, SafetensorError, OSError, ValueError, KeyError) as error:
        return want.error(f"{target}: {error}", "Copy the target again.")
    embedding, norm, head = found.values()
    problems = [f"no tensor {name} in {target}." for name, size in list(found.items())[:2] if size is None]
    if head is None and not shape.tie_word_embeddings:
        problems.append("no tensor lm_head.weight, and tie_word_embeddings is false.")
    rows = {"embedding": embedding, "head": head}
    problems += [
        f"the {name} is {list(size)}, the config says {[shape.vocab_size, shape.hidden_size]}."
        for name, size in rows.items()
        if size is not None and (size[0] < shape.vocab_size or size[1:] != (shape.hidden_size,))
    ]
    if norm is not None and norm != (shape.hidden_size,):
        problems.append(f"the final norm is {list(norm)}, the config says {[shape.hidden_size]}.")
    tied = "tied to the embedding" if head is None else f"head {list(head)}"
    return verdict_of(want, problems, "Take the target's whole folder.", f"embedding {list(embedding or [])}, {tied}")


def check_map_source(subject: Subject, states: HiddenStates) -> Check:
    """V4, V5: the head's rows mean the tokens of the map that these states give, and of no other."""
    want = Expectation(
        "V4 V5 map source",
        "the map that the answers of these states give, by the hash in draftline.json",
        "Under another map each row of the head means another token, and nothing fails.",
    )
    recorded = _recorded_map(subject)
    if recorded is None or not is_map(subject.draft):
        return want.not_applicable("no draftline.json with vocab_map_sha256, or no map")
    import torch

    from tasks.train_draft.vocab_map import build_vocab_map, count_supervised_tokens

    d2t = torch.from_numpy(subject.draft.array("d2t")).long()
    built = build_vocab_map(count_supervised_tokens(states), len(d2t))
    again = "Train and export again on these states: `dvc repro train_draft export_draft`."
    if recorded != built.inputs_sha256:
        return want.error(f"draftline.json says {recorded[:12]}, these states give {built.inputs_sha256[:12]}.", again)
    if not torch.equal(built.d2t, d2t):
        other = int((built.d2t != d2t).sum())
        return want.error(f"{other} of {len(d2t)} rows mean other tokens than when the head was trained.", again)
    return want.ok(f"{recorded[:12]}, {len(d2t)} rows")


def _recorded_map(subject: Subject) -> str | None:
    record = subject.draft.files.folder / "draftline.json"
    recorded = read_object(record).get("vocab_map_sha256") if record.is_file() else None
    return recorded if isinstance(recorded, str) else None


def check_coverage(subject: Subject, states: HiddenStates) -> Check:
    """V6: the share of the tokens that the target wrote which the draft can propose at all."""
    from tasks.train_draft.vocab_map import MIN_COVERAGE

    want = Expectation(
        "V6 coverage",
        f"{MIN_COVERAGE:.0%} of the supervised tokens in the draft vocabulary",
        "A token outside the map can never be proposed, so the map and not the draft sets the acceptance.",
    )
    if not is_map(subject.draft):
        return want.not_applicable("no map")
    import torch

    from tasks.common.vocab_map import VocabMap
    from tasks.train_draft.vocab_map import count_supervised_tokens, coverage

    d2t = torch.from_numpy(subject.draft.array("d2t")).long()
    ids = d2t + torch.arange(len(d2t))
    if not len(ids) or int(ids.min()) < 0 or int(ids.max()) >= states.contract.vocab_size:
        return want.not_applicable("the map holds no token ids (V2)")
    counts = count_supervised_tokens(states)
    vocab_map = VocabMap(ids, states.contract.vocab_size, "")
    try:
        share = coverage(vocab_map, {"train": counts})["train"]
    except DraftlineError as error:
        return want.error(str(error), "Raise draft_vocab_size, or build the map from the answers it is served for.")
    return want.ok(f"{share:.1%}; {int((counts > 0).sum())} distinct tokens, D {len(ids)}")
