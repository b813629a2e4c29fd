"""The target model: where it is, what it is, and how it is loaded."""

import hashlib
from dataclasses import dataclass
from pathlib import Path

from tasks.common.contract import Contract, default_aux_layers
from tasks.common.errors import DraftlineError
from tasks.common.files import ARTIFACTS, read_json, sha256_json
from tasks.common.params import ContractParams
from tasks.common.params import Target as TargetParams
from tasks.common.target_source import locate

TARGET = ARTIFACTS / "target"


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
    """`AutoConfig` of a prepared target."""
    from transformers import AutoConfig

    return AutoConfig.from_pretrained(folder)


def load_tokenizer(folder: Path = TARGET):
    """`AutoTokenizer` of a prepared target, chat template included."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder)


def model_folder(params: TargetParams, folder: Path = TARGET) -> Path:
    """Where the weights are: the prepared folder itself, or the local folder or hub snapshot it stands for.

    `prepare_target` copies config and tokenizer but not the weights of a real target, which can be a terabyte.

    Raises:
        DraftlineError: a weight file has changed size or header since `prepare_target` hashed it.
    """
    identity = read_json(folder / "draftline.json")
    if identity["source"] == "builtin":
        return folder
    source = locate(params)
    if weight_outline(source.folder) != identity["weight_outline"]:
        raise DraftlineError(
            f"target.model: the weights in {source.folder} are not those that prepare_target hashed. "
            f"Run `dvc repro --force prepare_target`, and all that was made from the old weights is made anew."
        )
    return source.folder


def weight_outline(folder: Path) -> str:
    """Hash over names, sizes and headers of the weight files: read in seconds where hashing them takes minutes."""
    outline = []
    for path in sorted(folder.glob("*.safetensors")):
        with open(path, "rb") as file:
            header = file.read(int.from_bytes(file.read(8), "little"))
        outline.append([path.name, path.stat().st_size, hashlib.sha256(header).hexdigest()])
    return sha256_json(outline)


def load_model(params: TargetParams, folder: Path = TARGET):
    """The prepared target in eval mode, in `params.dtype` on `params.device`."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        model_folder(params, folder),
        dtype=getattr(torch, params.dtype),
        trust_remote_code=params.trust_remote_code,
    )
    return model.to(params.device).eval()


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
