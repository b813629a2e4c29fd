"""Keys that transformers' config class drops or changes on loading: the server never sees them (failure mode C7)."""

from pathlib import Path
from typing import Any

from tasks.common.check import Check, Expectation
from tasks.common.draft_checks.subject import Subject
from tasks.common.draft_files import CONFIG

# What SGLang's EAGLE-3 class and worker read off the loaded config.
_READ_BY_SGLANG = (
    "architectures",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "head_dim",
    "vocab_size",
    "draft_vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
    "tie_word_embeddings",
    "eagle_config",
    "target_hidden_size",
    "num_aux_hidden_states",
    "fc_norm",
    "use_aux_norm",
    "norm_output",
    "norm_before_fc",
)


def lost_keys(folder: Path, config: dict[str, Any]) -> list[str]:
    """A sentence for each of these keys that is another once transformers has loaded the folder's config.

    Args:
        config: the keys to compare, as the file has them.
    """
    from transformers import AutoConfig

    # The folder may be anybody's: code that it brings is never run, whatever its files say about trust.
    loaded = AutoConfig.from_pretrained(folder, trust_remote_code=False).to_dict()
    # Renamed in transformers 5; both spellings are read.
    loaded |= {"torch_dtype": str(loaded.get("dtype", "")).removeprefix("torch.")}
    loaded["rope_theta"] = (loaded.get("rope_parameters") or {}).get("rope_theta")
    loaded["rope_scaling"] = config.get("rope_scaling")
    return [
        f"{folder / CONFIG}: {name} is {value!r} in the file and {loaded.get(name)!r} once transformers has loaded it."
        for name, value in config.items()
        if loaded.get(name) != value
    ]


def check_lost_keys(subject: Subject, load: bool = True) -> Check:
    """C7.

    Args:
        load: whether transformers may be imported, which takes longer than all other checks together.
    """
    want = Expectation(
        "C7 lost keys",
        "every key that SGLang reads, unchanged by transformers",
        "A key that the config class drops is served as its default: layers, norms or sizes that were not trained.",
    )
    draft = subject.draft
    if not load:
        return want.not_applicable("transformers' import takes seconds; --server, which needs it anyway, does this too")
    if draft.form == "speculators":
        return want.not_applicable("transformers has no class for speculators' config; convert it first")
    read = {name: draft.config[name] for name in _READ_BY_SGLANG if draft.config.get(name) is not None}
    try:
        lost = lost_keys(draft.files.folder, read)
    except Exception as error:  # the class is chosen by the file, and each raises its own kinds
        return want.error(
            f"transformers cannot load the config: {str(error).splitlines()[0][:200]}.",
            "Set model_type: llama, and correct the field that the message names.",
        )
    if lost:
        return want.error(" ".join(lost), "Correct the field, or take the transformers that the draft was saved with.")
    return want.ok(f"{len(read)} keys")
