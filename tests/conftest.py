"""A whole target in miniature, shared by the tests: a random Llama, a trained byte-level tokenizer, a chat template."""

import os
import signal
from pathlib import Path

import pytest

os.environ.setdefault("HF_HUB_OFFLINE", "1")
# A job in the background ignores Ctrl-C and under nohup hang-ups, and so would every process that a test starts.
signal.signal(signal.SIGINT, signal.default_int_handler)
signal.signal(signal.SIGHUP, signal.SIG_DFL)

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="session")
def tiny_model_folder(tmp_path_factory) -> Path:
    """A Hugging Face folder: 8 layers, hidden size 64, 320 tokens, float32."""
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("tiny") / "model"
    bpe = Tokenizer(models.BPE(unk_token="<unk>"))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<unk>", "<|im_start|>", "<|im_end|>"]
    bpe.train_from_iterator(
        ["the quick brown fox jumps over the lazy dog. what is the capital of France? Paris is the capital."] * 4,
        trainers.BpeTrainer(
            vocab_size=320, special_tokens=special, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
        ),
    )
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        unk_token="<unk>",
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    torch.manual_seed(0)
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=320,
            hidden_size=64,
            intermediate_size=128,
            num_hidden_layers=8,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=1024,
            tie_word_embeddings=False,  # a tied random model only repeats its last token
            initializer_range=0.3,
            bos_token_id=1,
            eos_token_id=2,
            pad_token_id=2,
        )
    )
    model.generation_config = GenerationConfig(bos_token_id=1, eos_token_id=2, pad_token_id=2)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def project(tmp_path, monkeypatch, tiny_model_folder) -> Path:
    """An empty working folder with the tiny target prepared in artifacts/target; the current directory."""
    from tasks.common.params import Target
    from tasks.common.target import TARGET
    from tasks.prepare_target.prepare import prepare_target

    monkeypatch.chdir(tmp_path)
    prepare_target(Target(model=str(tiny_model_folder)), TARGET)
    return tmp_path


@pytest.fixture
def tiny_params(tiny_model_folder):
    """Parameters over the tiny target; `tiny_params(section={...})` replaces values."""
    from tasks.common.params import Params

    def make(**sections) -> Params:
        return Params.model_validate({"target": {"model": str(tiny_model_folder)}, **sections})

    return make


@pytest.fixture(scope="session")
def empty_mlflow(tmp_path_factory) -> Path:
    """An MLflow database without runs, to be copied: making one takes seconds."""
    from tasks.common.mlflow_layout import connect
    from tasks.common.params import Tracking

    database = tmp_path_factory.mktemp("mlflow") / "mlflow.db"
    connect(Tracking(uri=f"sqlite:///{database}"))
    return database
