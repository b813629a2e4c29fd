"""The target model: where it is, what it is, and how it is loaded."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from tasks.common.contract import Contract, default_aux_layers
from tasks.common.errors import DraftlineError
from tasks.common.files import ARTIFACTS, read_json, sha256_file, sha256_json
from tasks.common.params import ContractParams
from tasks.common.params import Target as TargetParams
from tasks.common.target_source import locate

TARGET = ARTIFACTS / "target"
# Of a weight file's data, for its outline.
_SAMPLES, _SAMPLE_BYTES = 32, 2**14


@dataclass(frozen=True)
class TargetShape:
    """Sizes of a decoder-only target, read from its Hugging Face config (`text_config` where nested)."""

    architecture: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    intermediate_size: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    rope_parameters: dict
    tie_word_embeddings: bool

    @classmethod
    def of(cls, config) -> "TargetShape":
        """Read the sizes off a `transformers` config.

        Raises:
            DraftlineError: a size is absent; names it.
        """
        text = config.get_text_config()
        try:
            heads = text.num_attention_heads
            return cls(
                architecture=(config.architectures or ["unknown"])[0],
                num_layers=text.num_hidden_layers,
                hidden_size=text.hidden_size,
                vocab_size=text.vocab_size,
                intermediate_size=text.intermediate_size,
                num_attention_heads=heads,
                num_key_value_heads=getattr(text, "num_key_value_heads", None) or heads,
                head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
                rms_norm_eps=text.rms_norm_eps,
                max_position_embeddings=text.max_position_embeddings,
                rope_parameters=dict(text.rope_parameters),
                tie_word_embeddings=bool(config.tie_word_embeddings),
            )
        except AttributeError as error:
            raise DraftlineError(
                f"target config: {error}. Draftline needs a decoder-only model with RMSNorm and RoPE."
            ) from None


def load_config(folder: Path = TARGET):
    """`AutoConfig` of a prepared target.

    Raises:
        DraftlineError: nothing is prepared there.
    """
    from transformers import AutoConfig

    config = folder / "config.json"
    if not config.exists():
        raise DraftlineError(f"{config}: not there. Run the stage that writes it: `dvc repro prepare_target`.")
    return AutoConfig.from_pretrained(folder, trust_remote_code=_trusts_own_code(folder))


def load_tokenizer(folder: Path = TARGET, trust_remote_code: bool | None = None):
    """`AutoTokenizer` of a prepared target, chat template included.

    Args:
        trust_remote_code: None takes what `prepare_target` recorded; anybody else's folder is not to decide it.
    """
    from transformers import AutoTokenizer

    trusted = _trusts_own_code(folder) if trust_remote_code is None else trust_remote_code
    return AutoTokenizer.from_pretrained(folder, trust_remote_code=trusted)


def _trusts_own_code(folder: Path) -> bool:
    """target.trust_remote_code, as `prepare_target` recorded it: without it transformers asks at the terminal."""
    identity = folder / "draftline.json"
    return identity.exists() and read_json(identity).get("trust_remote_code", False)


def control_tokens(tokenizer) -> list[str]:
    """Texts that become control tokens wherever they stand: those with a name (eos, pad) and all others marked so."""
    marked = {token.content for token in tokenizer.added_tokens_decoder.values() if token.special}
    return sorted(marked | set(tokenizer.all_special_tokens))


def model_folder(params: TargetParams, folder: Path = TARGET) -> Path:
    """Where the weights are: the prepared folder itself, or the local folder or hub snapshot it stands for.

    `prepare_target` copies config and tokenizer but not the weights of a real target, which can be a terabyte.

    Raises:
        DraftlineError: config or weights have changed since `prepare_target` hashed them (see `weight_outline`).
    """
    identity = read_json(folder / "draftline.json")
    if identity["source"] == "builtin":
        return folder
    source = locate(params)
    if weight_outline(source.folder) != identity["weight_outline"]:
        raise DraftlineError(
            f"target.model: config and weights in {source.folder} are not those that prepare_target hashed. "
            f"Run `dvc repro --force prepare_target`, and all that was made from the old ones is made anew."
        )
    return source.folder


def weight_outline(folder: Path) -> str:
    """Hash over the config and, of each weight file, its name, size, header and samples of its data.

    Read in seconds where hashing the files takes minutes: half a megabyte of each. A model that was trained on and
    saved over this one is noticed; an edit of single tensors may fall between the samples.
    """
    files = [_outline(path) for path in sorted(folder.glob("*.safetensors"))]
    return sha256_json({"config": sha256_file(folder / "config.json"), "files": files})


def _outline(path: Path) -> list:
    size = path.stat().st_size
    with open(path, "rb") as file:
        outline = hashlib.sha256(file.read(int.from_bytes(file.read(8), "little")))
        first = file.tell()
        room = max(0, size - _SAMPLE_BYTES - first)
        for number in range(_SAMPLES):  # at even distances, the first and the last bytes included
            file.seek(first + room * number // (_SAMPLES - 1))
            outline.update(file.read(_SAMPLE_BYTES))
    return [path.name, size, outline.hexdigest()]


def load_model(params: TargetParams, folder: Path = TARGET):
    """The prepared target in eval mode, in `params.dtype` on `params.device`, or spread by `params.device_map`."""
    device = params.device_map or params.device
    return load_causal_lm(model_folder(params, folder), params.dtype, device, params.trust_remote_code)


def load_causal_lm(folder: Path, dtype: str, device: str = "cpu", trust_remote_code: bool = False):
    """A folder of weights as transformers' causal LM in eval mode.

    Args:
        device: a device, or how to spread the layers over several ('auto', ...).
    """
    import torch
    from transformers import AutoModelForCausalLM

    from tasks.common.vector_functions import resolve_vector_functions

    resolve_vector_functions()
    of_one = device.partition(":")[0] in ("cpu", "cuda")
    model = AutoModelForCausalLM.from_pretrained(
        folder,
        dtype=getattr(torch, dtype),
        trust_remote_code=trust_remote_code,
        device_map=None if of_one else device,
    )
    return (model.to(device) if of_one else model).eval()


def render_prompt(tokenizer, messages: list[dict]) -> list[int]:
    """Token ids of a conversation up to where the assistant speaks: the one place that applies the template."""
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=True)[
        "input_ids"
    ]


def stop_token_ids(folder: Path = TARGET) -> tuple[int, ...]:
    """Ids that end an answer, from the target's generation config."""
    ids = read_json(folder / "generation_config.json").get("eos_token_id")
    if ids is None:
        raise DraftlineError(
            f"{folder / 'generation_config.json'}: no eos_token_id. Add the id that ends the assistant's turn."
        )
    return tuple(ids) if isinstance(ids, list) else (ids,)


def target_contract(params: ContractParams, folder: Path = TARGET) -> Contract:
    """The contract that a run over this prepared target has, last state after the final norm."""
    shape = TargetShape.of(load_config(folder))
    identity = read_json(folder / "draftline.json")
    return Contract(
        architecture=shape.architecture,
        num_layers=shape.num_layers,
        hidden_size=shape.hidden_size,
        vocab_size=shape.vocab_size,
        aux_layer_ids=params.aux_layer_ids or default_aux_layers(shape.num_layers),
        last_is_normed=True,
        target_sha256=identity["target_sha256"],
        tokenizer_sha256=identity["tokenizer_sha256"],
    )
