"""What is trained on when training is measured: sizes, random or real states, and the two forms they are stored in."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file

from tasks.common.contract import Contract
from tasks.common.draft import DraftConfig
from tasks.common.files import write_json
from tasks.common.hidden_states import HiddenStates, Sample, close_split
from tasks.common.shard import ShardWriter
from tasks.common.shard_layout import ShardPlan
from tasks.common.storage import StoredRows
from tasks.common.target import TargetShape
from tasks.common.target_weights import TargetWeights
from tasks.common.vocab_map import VocabMap

ROPE = {"rope_type": "default", "rope_theta": 100000.0}


@dataclass(frozen=True)
class Size:
    """A draft, and the sequences of a measurement, all of one length.

    Attributes:
        target_layers: decoder layers of the target.
    """

    name: str
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocab: int
    target_layers: int
    draft_vocab: int
    sequences: int
    length: int
    per_step: int
    num_aux: int = 3

    @property
    def step_tokens(self) -> int:
        return self.per_step * self.length

    @property
    def aux_layers(self) -> tuple[int, ...]:
        return (1, self.target_layers // 2 - 1, self.target_layers - 4)

    def config(self) -> DraftConfig:
        return DraftConfig(
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            head_dim=self.head_dim,
            num_aux=self.num_aux,
            vocab_size=self.vocab,
            draft_vocab_size=self.draft_vocab,
            rms_norm_eps=1e-5,
            rope_parameters=ROPE,
            max_position_embeddings=8192,
        )

    def contract(self) -> Contract:
        return Contract(
            architecture="LlamaForCausalLM",
            num_layers=self.target_layers,
            hidden_size=self.hidden,
            vocab_size=self.vocab,
            aux_layer_ids=self.aux_layers,
            last_is_normed=True,
            target_sha256=self.name,
            tokenizer_sha256=self.name,
        )


SIZES = {
    size.name: size
    for size in (
        Size("tiny", 64, 128, 4, 2, 16, 320, 8, 128, sequences=8, length=64, per_step=2),
        Size("smollm2-135m", 576, 1536, 9, 3, 64, 49152, 30, 16000, sequences=256, length=2048, per_step=8),
        Size("8b", 4096, 14336, 32, 8, 128, 128256, 32, 16000, sequences=64, length=2048, per_step=8),
    )
}


class RandomStates:
    """A target's head and random states. Tokens, and what the target says, lie in the draft vocabulary."""

    def __init__(self, size: Size, device: str):
        generator = torch.Generator(device).manual_seed(0)

        def random(*shape):
            return torch.randn(*shape, generator=generator, device=device, dtype=torch.float32)

        self.size, self._random, self._device = size, random, device
        self.vocab_map = VocabMap(torch.arange(0, size.draft_vocab), size.vocab, size.name)
        self.embed_tokens = random(size.vocab, size.hidden).mul_(0.02).bfloat16()
        self.lm_head = random(size.vocab, size.hidden).mul_(0.05).bfloat16()
        self.lm_head[size.draft_vocab :] *= 0.02

    def samples(self) -> Iterator[Sample]:
        size = self.size
        for number in range(size.sequences):
            ids = torch.randint(size.draft_vocab, (size.length,), generator=torch.Generator().manual_seed(number))
            states = self._random(size.length, size.num_aux + 1, size.hidden).bfloat16().cpu()
            yield _sample(number, ids, states)


class TargetStates:
    """States of a real target over sequences that it writes itself, at temperature 1, from its first token on."""

    def __init__(self, size: Size, folder: Path, device: str):
        from transformers import AutoModelForCausalLM

        self.size, self._device = size, device
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to(device)
        shape = TargetShape.of(self._model.config)
        if (shape.hidden_size, shape.vocab_size, shape.num_layers) != (size.hidden, size.vocab, size.target_layers):
            raise SystemExit(f"{folder} is no target of the size {size.name}")
        weights = TargetWeights(folder)
        self.embed_tokens, self.lm_head = weights.embed_tokens().bfloat16(), weights.lm_head().bfloat16()
        self._ids = self._generated()
        counts = torch.bincount(self._ids.flatten(), minlength=size.vocab)
        kept = counts.sort(descending=True, stable=True).indices[: size.draft_vocab].sort().values
        self.vocab_map = VocabMap(kept, size.vocab, size.name)

    @torch.inference_mode()
    def _generated(self) -> torch.Tensor:
        torch.manual_seed(0)
        # Each starts with another token, so that no two are alike.
        first = torch.randperm(self.size.vocab)[: self.size.sequences, None].to(self._device)
        new = {"min_new_tokens": self.size.length - 1, "max_new_tokens": self.size.length - 1}
        plain = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "repetition_penalty": 1.0}
        whole = self._model.generate(first, attention_mask=torch.ones_like(first), do_sample=True, **plain, **new)
        return whole.cpu()

    @torch.inference_mode()
    def samples(self) -> Iterator[Sample]:
        for number, ids in enumerate(self._ids):
            states = self._model.model(ids[None].to(self._device), output_hidden_states=True).hidden_states
            chosen = [states[layer + 1][0] for layer in self.size.aux_layers] + [states[-1][0]]
            yield _sample(number, ids, torch.stack(chosen, dim=1).cpu())


def _sample(number: int, ids: torch.Tensor, states: torch.Tensor) -> Sample:
    mask = torch.ones(len(ids), dtype=torch.uint8)
    return Sample(f"sequence-{number:05d}", ids.int(), mask, states[:, :-1].contiguous(), states[:, -1].contiguous())


def write_states(states: RandomStates | TargetStates, folder: Path, features: Path | None) -> HiddenStates:
    """Store every sample as Draftline does and, beside it, as SpecForge 0.2.0 does: one file of torch.save each.

    Args:
        features: SpecForge's folder; None writes no such files.
    """
    size, names = states.size, []
    if features:
        features = features / f"rows_0-{size.sequences}"
        features.mkdir(parents=True)
    folder.mkdir(parents=True)
    for number, sample in enumerate(states.samples()):
        name = f"shard-{number:05d}"
        names.append(name)
        plan = ShardPlan.of(name, "measured", [(sample.id, sample.input_ids.tolist(), sample.loss_mask.tolist())])
        with ShardWriter(folder, plan, size.num_aux, size.hidden, "bfloat16") as shard:
            shard.write(0, StoredRows.of(sample.aux, sample.last, "bfloat16"))
        if features:
            torch.save(specforge_feature(sample), features / f"data_{number}.ckpt")
    close_split(folder, size.contract(), "bfloat16", {"name": "measured", "version": None}, names)
    return HiddenStates(folder)


def specforge_feature(sample: Sample) -> dict[str, torch.Tensor]:
    """A sample as SpecForge 0.2.0 reads it: states in bfloat16, the last one behind the final norm.

    Copied, since torch.save of a view writes all that it is a view of.
    """
    return {
        "input_ids": sample.input_ids.long(),
        "loss_mask": sample.loss_mask.long(),
        "hidden_state": sample.last[None].to(torch.bfloat16, copy=True),
        "aux_hidden_state": sample.aux.flatten(1)[None].to(torch.bfloat16, copy=True),
    }


def write_target(states: RandomStates | TargetStates, folder: Path) -> None:
    """A target folder of which only config, embedding, norm and head are there: all that offline training reads."""
    size = states.size
    folder.mkdir(parents=True)
    tensors = {
        "model.embed_tokens.weight": states.embed_tokens.cpu().contiguous(),
        "model.norm.weight": torch.ones(size.hidden, dtype=torch.bfloat16),
        "lm_head.weight": states.lm_head.cpu().clone(),
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model.safetensors")}
    write_json(folder / "model.safetensors.index.json", index)
    write_json(folder / "config.json", llama_config(size, "LlamaForCausalLM", size.target_layers))


def llama_config(size: Size, architecture: str, layers: int) -> dict:
    return {
        "architectures": [architecture],
        "model_type": "llama",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "hidden_act": "silu",
        "hidden_size": size.hidden,
        "initializer_range": 0.02,
        "intermediate_size": size.intermediate,
        "max_position_embeddings": 8192,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "num_hidden_layers": layers,
        "rms_norm_eps": 1e-5,
        "rope_theta": ROPE["rope_theta"],
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "vocab_size": size.vocab,
    }
