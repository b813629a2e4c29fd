"""Two engines behind one call: groups of rendered prompts in, generated token ids out."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass

from tasks.common.files import sha256_json
from tasks.common.params import Params, Regenerate
from tasks.common.target import load_model, load_tokenizer, stop_token_ids


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
    """Yield `generate(requests)`, an iterator over groups of answers, for `params.regenerate.engine`."""
    if params.regenerate.engine == "transformers":
        model = load_model(params.target)
        yield lambda requests: _generate_in_batches(model, params.regenerate, requests)
    else:
        from tasks.common.server import Server
        from tasks.common.server_plan import baseline_plan

        with Server(baseline_plan(params)) as server:
            yield lambda requests: _generate_on_server(server, params.regenerate, requests)


def _generate_in_batches(model, settings: Regenerate, requests: list[Request]) -> Iterator[list[Answer]]:
    """Left-padded batches, longest prompts first: an out-of-memory error comes at once, and the ETA is honest."""
    import torch

    stops, pad = stop_token_ids(), load_tokenizer().pad_token_id
    ordered = sorted(requests, key=lambda request: (-len(request.prompt_token_ids), request.split, request.id))
    for start in range(0, len(ordered), settings.batch_size):
        batch = ordered[start : start + settings.batch_size]
        width = max(len(request.prompt_token_ids) for request in batch)
        ids = torch.tensor([[pad] * (width - len(r.prompt_token_ids)) + r.prompt_token_ids for r in batch])
        mask = torch.tensor([[0] * (width - len(r.prompt_token_ids)) + [1] * len(r.prompt_token_ids) for r in batch])
        # Seeded by the batch's first prompt, so that a resumed run samples what an uninterrupted one would.
        torch.manual_seed(int(sha256_json([settings.seed, batch[0].id])[:15], 16))
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
    """`batch_size` requests in flight; SGLang batches them itself. A refused one ends the stage; the journal keeps the rest."""
    sampling = {"max_new_tokens": settings.max_new_tokens, "temperature": settings.temperature}
    with ThreadPoolExecutor(max_workers=settings.batch_size) as pool:
        waiting = {pool.submit(server.generate, r.prompt_token_ids, sampling): r for r in requests}
        for done in as_completed(waiting):
            completion = done.result()
            yield [Answer(waiting[done], completion.output_ids, completion.finish_reason)]
