"""Answer every prompt once and write the answers in prompt order."""

from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from typing import Any

from tasks.common.errors import DraftlineError
from tasks.common.files import read_json, sha256_json, write_json, write_jsonl
from tasks.common.params import Params
from tasks.common.progress import progress
from tasks.common.prompts import Prompt, read_prompts
from tasks.common.responses import RESPONSES, SPLITS, Response
from tasks.common.target import TARGET, load_tokenizer, render_prompt
from tasks.common.versions import result_versions
from tasks.regenerate_responses.engines import Answer, Request, open_engine
from tasks.regenerate_responses.journal import Journal


def regenerate(params: Params) -> dict:
    """Write artifacts/responses/{train,heldout,failures}.jsonl and manifest.json.

    Returns:
        The manifest: provenance (target, tokenizer, engine, sampling, versions) and counts by split.

    Raises:
        DraftlineError: no prompt has an answer that can be used.
    """
    provenance = _provenance(params)
    key = sha256_json(provenance)
    tokenizer, journal = load_tokenizer(), Journal(RESPONSES, key)
    prompts = {split: list(read_prompts(split)) for split in SPLITS}
    requests = [
        Request(split, prompt.id, render_prompt(tokenizer, prompt.messages))
        for split in SPLITS
        for prompt in prompts[split]
    ]
    waiting = [request for request in requests if not _is_answered(journal, request)]
    if waiting:
        # Closed before the engine is, so that a server which is stopped has no queue left.
        with open_engine(params) as generate, closing(generate(waiting)) as groups:
            _answer_all(groups, journal, tokenizer, total=len(requests), done=len(requests) - len(waiting))
    counts = {split: _write_split(split, prompts[split], journal, tokenizer) for split in SPLITS}
    failures = [failure for split in SPLITS for failure in counts[split].pop("failed_ids")]
    if not any(part["answers"] for part in counts.values()):
        raise DraftlineError(
            f"{RESPONSES}: none of {len(requests)} prompts has an answer that can be used. First: {failures[:3]}."
        )
    write_jsonl(RESPONSES / "failures.jsonl", failures)
    manifest = {"key": key, **provenance, "splits": counts}
    write_json(RESPONSES / "manifest.json", manifest)
    journal.remove()
    return manifest


def _provenance(params: Params) -> dict[str, Any]:
    """All that an answer depends on besides its prompt; how many prompts run together is no property of an answer."""
    identity = read_json(TARGET / "draftline.json")
    provenance = {
        "target_sha256": identity["target_sha256"],
        "tokenizer_sha256": identity["tokenizer_sha256"],
        "dtype": params.target.dtype,
        "sampling": params.regenerate.model_dump(exclude={"batch_size"}),
        "versions": result_versions(),
    }
    if params.regenerate.engine == "sglang":
        # The first two bound an answer's length.
        names = {"context_length", "max_total_tokens", "extra_args"}
        provenance["serve"] = params.serve.model_dump(mode="json", include=names)
    return provenance


def _is_answered(journal: Journal, request: Request) -> bool:
    """Whether the journal holds an answer to this very rendering of the prompt."""
    return (request.split, request.id) in journal and (
        journal.read(request.split, request.id)["prompt_token_ids"] == request.prompt_token_ids
    )


def _answer_all(groups: Iterator[list[Answer]], journal: Journal, tokenizer, total: int, done: int) -> None:
    tokens = 0
    with progress(total=total, initial=done, desc="regenerating", unit="answer") as bar:
        for group in groups:
            journal.append([_record(answer, tokenizer) for answer in group])
            tokens += sum(len(answer.output_token_ids) for answer in group)
            bar.set_postfix_str(f"{tokens / max(bar.format_dict['elapsed'], 1e-9):.0f} tok/s", refresh=False)
            bar.update(len(group))


def _record(answer: Answer, tokenizer) -> dict:
    # stop tokens are special, so the text is what a user would see
    return {
        "split": answer.request.split,
        "id": answer.request.id,
        "prompt_token_ids": answer.request.prompt_token_ids,
        "output_token_ids": answer.output_token_ids,
        "text": tokenizer.decode(answer.output_token_ids, skip_special_tokens=True),
        "finish_reason": answer.finish_reason,
    }


def _write_split(split: str, prompts: list[Prompt], journal: Journal, tokenizer) -> dict:
    counts = Counter(answers=0)
    failed = []

    def rows() -> Iterator[dict]:
        for prompt in prompts:
            record = journal.read(split, prompt.id)
            if not record["text"].strip():
                failed.append({"split": split, "id": prompt.id, "reason": "empty_answer"})
                continue
            counts.update(answers=1, output_tokens=len(record["output_token_ids"]), **{record["finish_reason"]: 1})
            yield Response(
                id=prompt.id,
                domain=prompt.domain,
                messages=prompt.messages,
                prompt_token_ids=record["prompt_token_ids"],
                output_token_ids=record["output_token_ids"],
                text=record["text"],
                finish_reason=record["finish_reason"],
            ).to_row()

    write_jsonl(RESPONSES / f"{split}.jsonl", rows())
    return {"prompts": len(prompts), **dict(sorted(counts.items())), "failed": len(failed), "failed_ids": failed}
