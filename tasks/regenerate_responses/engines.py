"""Two engines behind one call: groups of rendered prompts in, generated token ids out."""

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from queue import SimpleQueue

from tasks.common.errors import DraftlineError
from tasks.common.files import sha256_json
from tasks.common.params import PARAMS, Params, Regenerate
from tasks.common.server_plan import ServerPlan, baseline_plan, flag
from tasks.common.target import load_model, stop_token_ids

# Sent with each request, so that no default of the server counts: SGLang knows --preferred-sampling-params, and
# --sampling-defaults takes what its OpenAI routes are not told from the model's generation_config.json.
_PLAIN = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "repetition_penalty": 1.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
}


@dataclass(frozen=True)
class Request:
    """A rendered prompt that waits for its answer."""

    split: str
    id: str
    prompt_token_ids: list[int]


@dataclass(frozen=True)
class Answer:
    """What the target generated, the stop token included where it ended the answer."""

    request: Request
    output_token_ids: list[int]
    finish_reason: str


@contextmanager
def open_engine(params: Params):
    """Yield `generate(requests)`, a generator of groups of answers, for `params.regenerate.engine`; close it first.

    Raises:
        DraftlineError: SGLang would not draw by the seed.
    """
    if params.regenerate.engine == "transformers":
        model = load_model(params.target)
        yield lambda requests: _generate_in_batches(model, params.regenerate, requests)
    else:
        from tasks.common.server import Server

        _require_seed_to_count(params)
        with Server(answering_plan(params)) as server:
            yield lambda requests: _generate_on_server(server, params.regenerate, requests)


def answering_plan(params: Params) -> ServerPlan:
    """The target, for prompts that come once each."""
    why = "a prompt comes once; a full prefix cache costs a search of all its answers at every step (5,000 for 17,000 tok/s)"
    return baseline_plan(params).adding((flag("--disable-radix-cache", reason=why),))


def _generate_in_batches(model, settings: Regenerate, requests: list[Request]) -> Iterator[list[Answer]]:
    """Left-padded batches, longest prompts first: an out-of-memory error comes at once, and the ETA is honest."""
    import torch
    from transformers import GenerationConfig

    # What generate() is not told it takes from the model's own configuration (top_p, repetition_penalty even when
    # greedy, ...), and so it would for what a configuration that is passed in leaves open.
    model.generation_config = GenerationConfig()
    stops = stop_token_ids()
    pad = stops[0]  # masked in front and cut off behind; not every tokenizer has a token for it
    ordered = sorted(requests, key=lambda request: (-len(request.prompt_token_ids), request.split, request.id))
    for start in range(0, len(ordered), settings.batch_size):
        batch = ordered[start : start + settings.batch_size]
        width = max(len(request.prompt_token_ids) for request in batch)
        ids = torch.tensor([[pad] * (width - len(r.prompt_token_ids)) + r.prompt_token_ids for r in batch])
        mask = torch.tensor([[0] * (width - len(r.prompt_token_ids)) + [1] * len(r.prompt_token_ids) for r in batch])
        # Seeded by the batch's first prompt, so that a resumed run samples what an uninterrupted one would.
        torch.manual_seed(_seed_of(batch[0], settings))
        with torch.inference_mode():
            output = model.generate(
                input_ids=ids.to(model.device),
                attention_mask=mask.to(model.device),
                max_new_tokens=settings.max_new_tokens,
                do_sample=settings.temperature > 0,
                pad_token_id=pad,
                eos_token_id=list(stops),
                **({"temperature": settings.temperature, "top_k": 0} if settings.temperature > 0 else {}),
            )
        yield [
            _cut_at_stop(request, row, stops) for request, row in zip(batch, output[:, width:].tolist(), strict=True)
        ]


def _cut_at_stop(request: Request, ids: list[int], stops: tuple[int, ...]) -> Answer:
    end = next((position for position, token in enumerate(ids) if token in stops), None)
    if end is None:
        return Answer(request, ids, "length")
    return Answer(request, ids[: end + 1], "stop")


def _generate_on_server(server, settings: Regenerate, requests: list[Request]) -> Iterator[list[Answer]]:
    """`batch_size` requests in flight; SGLang batches them itself. What was answered meanwhile comes as one group: who takes
    groups forces each to the disk, and a small target answers faster than a disk does that.

    A refused request ends the stage: those that wait are dropped, those in flight are still answered and kept. A stage
    that is stopped drops both, and keeps what is answered by then.
    """
    pool = ThreadPoolExecutor(max_workers=settings.batch_size)
    asked = {}
    try:
        for request in requests:
            asked[pool.submit(server.generate, request.prompt_token_ids, _sampling(request, settings))] = request
        for group in _completed(list(asked)):
            results = [future.result() for future in group]  # one may raise: nothing of the group is taken yet
            yield [_served(asked.pop(future), result) for future, result in zip(group, results, strict=True)]
    except (Exception, KeyboardInterrupt, SystemExit) as error:
        pool.shutdown(wait=isinstance(error, Exception), cancel_futures=True)
        answered = [f for f in asked if f.done() and not f.cancelled() and not f.exception()]
        yield [_served(asked[future], future.result()) for future in answered]
        raise
    finally:
        pool.shutdown(wait=False, cancel_futures=True)


def _completed(futures: list[Future]) -> Iterator[list[Future]]:
    """Groups of futures that have ended since the last group, at least one."""
    ended: SimpleQueue[Future] = SimpleQueue()
    for future in futures:
        future.add_done_callback(ended.put)
    left = len(futures)
    while left:
        group = [ended.get()]
        while not ended.empty():
            group.append(ended.get())
        left -= len(group)
        yield group


def _sampling(request: Request, settings: Regenerate) -> dict:
    return {
        **_PLAIN,
        "max_new_tokens": settings.max_new_tokens,
        "temperature": settings.temperature,
        "sampling_seed": _seed_of(request, settings),
    }


def _served(request: Request, completion) -> Answer:
    return Answer(request, completion.output_ids, completion.finish_reason)


def _seed_of(request: Request, settings: Regenerate) -> int:
    return int(sha256_json([settings.seed, request.id])[:15], 16)


def _require_seed_to_count(params: Params) -> None:
    """SGLang takes a seed with any request and leaves it aside unless the whole server is deterministic."""
    settings, flag = params.regenerate, "--enable-deterministic-inference"
    if settings.seed and settings.temperature and flag not in params.serve.extra_args:
        raise DraftlineError(
            f"{PARAMS}: regenerate.seed is {settings.seed}, but SGLang draws without a seed unless it is started with "
            f"{flag}. Add that to serve.extra_args (GPUs only), set regenerate.seed: 0, or use regenerate.engine: "
            f"transformers."
        )
