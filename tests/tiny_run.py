"""A whole run over the tiny target, small enough for a test: its own answers, their states, a draft that is accepted."""

from pathlib import Path

import torch

from tasks.common.files import write_jsonl
from tasks.common.params import Params
from tasks.common.responses import RESPONSES, Response
from tasks.common.speculative_plan import EXPORT
from tasks.common.target import TARGET, load_model
from tasks.dump_hidden_states.dump import dump
from tasks.export_draft.export import export_draft
from tasks.prepare_target.prepare import prepare_target
from tasks.train_draft.prepare import prepare_training, write_result

AUX = (2, 4, 5)  # not the layers that SGLang takes where a config names none: those are 1, 3, 4
TRAINED = {
    "draft_vocab_size": 200,
    "max_steps": 150,
    "learning_rate": 0.003,
    "batch_tokens": 512,
    "warmup_steps": 10,
    "checkpoint_every": 60,
    "evaluate_every": 150,
}
# A server small enough for two beside each other on a CPU.
SERVED = {"context_length": 256, "max_total_tokens": 4096, "max_running_requests": 2}
_PROMPTS, _PROMPT_TOKENS, _ANSWER_TOKENS = 8, 9, 48


def train_tiny_draft(params: Params) -> None:
    """Fill artifacts/ of the current directory up to the export. Both splits hold the same answers: the draft is to be
    accepted, not to generalise."""
    prepare_target(params.target, TARGET)
    rows = [row.to_row() for row in _answers(params)]
    for split in ("train", "heldout"):
        write_jsonl(RESPONSES / f"{split}.jsonl", (row | {"id": f"{split}-{n}"} for n, row in enumerate(rows)))
    dump(params)
    draft = Path("artifacts/draft")
    trainer, facts = prepare_training(params, draft)
    for _ in trainer.steps():
        pass
    write_result(trainer, draft, facts)
    trainer.checkpoints.remove()
    export_draft(draft, EXPORT, params.target.dtype)


@torch.inference_mode()
def _answers(params: Params) -> list[Response]:
    model = load_model(params.target)
    prompts = torch.randint(3, 300, (_PROMPTS, _PROMPT_TOKENS), generator=torch.Generator().manual_seed(3))
    plain = {"do_sample": False, "min_new_tokens": _ANSWER_TOKENS, "max_new_tokens": _ANSWER_TOKENS}
    whole = model.generate(prompts, attention_mask=torch.ones_like(prompts), **plain)
    return [
        Response("", "chat", [], prompt.tolist(), row[_PROMPT_TOKENS:].tolist(), "", "length")
        for prompt, row in zip(prompts, whole, strict=True)
    ]
