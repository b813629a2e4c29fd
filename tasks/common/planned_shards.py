"""Which answers each shard holds: the same for the dump, for each of its ranks, and for who reads along."""

from collections.abc import Iterator
from typing import Any

from tasks.common.contract import Contract
from tasks.common.files import sha256_json
from tasks.common.hidden_states import FORMAT_VERSION
from tasks.common.params import Params
from tasks.common.responses import Response, read_responses
from tasks.common.shard_layout import ShardPlan
from tasks.common.versions import result_versions


def plan_shards(split: str, params: Params, contract: Contract) -> Iterator[ShardPlan]:
    """Yield shards of about `shard_tokens` tokens in prompt order: a prompt that is added last leaves all but the last as they were."""
    made_with = _made_with(params, contract)
    pending: list[Response] = []
    tokens = index = 0
    for response in read_responses(split):
        pending.append(response)
        tokens += len(response.token_ids)
        if tokens >= params.dump.shard_tokens:
            yield _planned(index, pending, made_with)
            pending, tokens, index = [], 0, index + 1
    if pending:
        yield _planned(index, pending, made_with)


def _made_with(params: Params, contract: Contract) -> list[Any]:
    """What makes them other states, besides tokens.

    Device, batch size and how a target is spread over devices move the last digits alone: a dump may go on elsewhere.
    """
    engine: list[Any] = [params.dump.engine]
    if params.dump.engine == "sglang":
        engine.append(params.serve.extra_args)
    return [
        FORMAT_VERSION,
        contract.model_dump(),
        params.target.dtype,
        params.dump.storage_dtype,
        engine,
        result_versions(),
    ]


def _planned(index: int, responses: list[Response], made_with: list[Any]) -> ShardPlan:
    content = [(response.id, response.token_ids, response.loss_mask) for response in responses]
    return ShardPlan.of(f"shard-{index:05d}", sha256_json([made_with, content]), content)
