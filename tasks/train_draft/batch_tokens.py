"""How large a batch does the GPU hold? Prints the largest train_draft.batch_tokens of which a whole step fits.

    python -m tasks.train_draft.batch_tokens       # params.yaml and artifacts/target; minutes, most of them compiling

Steps of two sizes are run and their memory measured; it is linear in the tokens, so the largest size follows, and a
step of that size proves it. There is no `batch_tokens: auto`: the size of a batch changes what a draft learns, so it
stands in params.yaml, where it is versioned, and is the same on every GPU.
"""

import sys
from collections.abc import Callable

import torch

from tasks.common.draft import DraftConfig, Eagle3Draft
from tasks.common.errors import DraftlineError
from tasks.common.hidden_states import Sample
from tasks.common.params import PARAMS, Params, load_params
from tasks.common.storage import StoredRows
from tasks.common.target import TargetShape, load_config, target_contract
from tasks.common.vocab_map import VocabMap
from tasks.train_draft.batch import Batch, BatchForm, StoredBatch
from tasks.train_draft.gpu_memory import USABLE, require_gpu
from tasks.train_draft.step import TrainStep
from tasks.train_draft.target_head import RestrictedHead

# Tokens of the two sizes that are measured, and what the answer is a multiple of.
_FIRST, _SECOND, _MULTIPLE = 4096, 8192, 1024
# Batches that wait on the device (prefetch.py).
_WAITING = 2
_SAMPLE_TOKENS = 2048


class _RandomHead:
    """A target's head of these sizes."""

    def __init__(self, config: DraftConfig, device: str):
        self.lm_head = torch.randn(config.vocab_size, config.aux_size, device=device)
        self.norm, self.eps = None, config.rms_norm_eps


class Trial:
    """Steps on batches of so many tokens, all of them supervised, of a draft with random weights."""

    def __init__(self, config: DraftConfig, storage_dtype: str, form: BatchForm, recompute_activations: bool):
        """
        Args:
            storage_dtype: of the states, which wait on the device decoded.
        """
        self._config, self._storage_dtype, self._form = config, storage_dtype, form
        embedding = torch.zeros(config.vocab_size, config.hidden_size, dtype=form.dtype, device=form.device)
        draft = Eagle3Draft(config, embedding).to(form.device)
        for parameter in draft.parameters():
            torch.nn.init.normal_(parameter, 1.0 if parameter.dim() == 1 else 0.0, 0.02)
        vocab_map = VocabMap(torch.arange(config.draft_vocab_size), config.vocab_size, "")
        head = RestrictedHead(_RandomHead(config, form.device), vocab_map, form.dtype)
        self._step = TrainStep(draft, head, recompute_activations)
        self._optimizer = torch.optim.AdamW(draft.parameters(), fused=True)
        self.run(_MULTIPLE)  # the optimiser's moments are there from its first step on

    def batch(self, tokens: int) -> Batch:
        """So many tokens of random states, in samples of equal length."""
        form, samples = self._form, []
        for start in range(0, tokens, _SAMPLE_TOKENS):
            count = min(_SAMPLE_TOKENS, tokens - start)
            states = torch.randn(count, self._config.num_aux + 1, self._config.aux_size)
            rows = StoredRows.of(states[:, :-1], states[:, -1], self._storage_dtype)
            ids, mask = torch.zeros(count, dtype=torch.int32), torch.ones(count, dtype=torch.uint8)
            samples.append((Sample("", ids, mask, rows.aux, rows.last), rows.aux_scale, rows.last_scale))
        stored = StoredBatch.of(samples, torch.zeros(tokens, dtype=torch.int64), form)
        return stored.on(form.device, form.dtype)

    def run(self, tokens: int) -> None:
        """A step and the optimiser's, with batches waiting as they do in training.

        Raises:
            torch.OutOfMemoryError: they do not fit.
        """
        batch, *_waiting = (self.batch(tokens) for _ in range(1 + _WAITING))
        self._step(batch)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def peak(self, tokens: int) -> int:
        """Bytes that `run` took on the GPU at most."""
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._form.device)
        self.run(tokens)
        return torch.cuda.max_memory_allocated(self._form.device)


def largest(peak: Callable[[int], int], capacity: int) -> int:
    """Tokens of the largest batch of which `peak` bytes are within reach, tried out.

    Args:
        peak: bytes that a step of so many tokens takes; raises torch.OutOfMemoryError.
        capacity: of the device, bytes.

    Raises:
        DraftlineError: not even a small batch fits.
    """
    try:
        first, second = peak(_FIRST), peak(_SECOND)
    except torch.OutOfMemoryError:
        raise DraftlineError(
            f"a step of {_SECOND} tokens does not fit into {capacity / 2**30:.0f} GiB. Set train_draft.recompute_activations: true, "
            f"lower train_draft.draft_vocab_size, or train with batches of less than {_FIRST} tokens."
        ) from None
    per_token = max(1.0, (second - first) / (_SECOND - _FIRST))
    tokens = _FIRST + int((USABLE * capacity - first) / per_token)
    while (tokens := tokens // _MULTIPLE * _MULTIPLE) > _SECOND:
        print(f"{per_token / 2**10:.0f} KiB a token: trying {tokens} tokens", flush=True)
        try:
            peak(tokens)
            return tokens
        except torch.OutOfMemoryError:
            tokens = tokens * 9 // 10
    return _SECOND


def main(params: Params) -> None:
    settings, device = params.train_draft, params.target.device
    if not device.startswith("cuda"):
        raise DraftlineError(
            f"{PARAMS}: target.device is {device}, and it is the memory of a GPU that is measured here. Set target.device: cuda."
        )
    require_gpu(device)
    shape, contract = TargetShape.of(load_config()), target_contract(params.contract)
    config = DraftConfig.of(shape, contract, settings.draft_vocab_size)
    dtype, ids = settings.computed_in(device), torch.arange(shape.vocab_size)
    form = BatchForm(device, dtype, settings.ttt_length, ids, _MULTIPLE)
    trial = Trial(config, params.dump.storage_dtype, form, settings.recompute_activations)
    free, _ = torch.cuda.mem_get_info(device)
    tokens = largest(trial.peak, free + torch.cuda.memory_reserved(device))
    print(
        f"train_draft.batch_tokens: at most {tokens} (now {settings.batch_tokens}). Near it there is no room to replay steps as "
        f"CUDA graphs; kernels are then launched one by one, as they were here."
    )


if __name__ == "__main__":
    try:
        main(load_params())
    except DraftlineError as error:
        sys.exit(f"batch_tokens failed:\n{error}")
