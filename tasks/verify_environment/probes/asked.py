"""Whether the benchmark could ask the sets of questions and serve the drafts that params.yaml names: what it will refuse itself,
hours later, by the same code. Of the target config and tokenizer are read, of a draft on the hub its config.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tasks.common.draft_files import read_config as read_json_config
from tasks.common.errors import DraftlineError
from tasks.common.files import expanded
from tasks.common.params import PARAMS, Params
from tasks.common.question_sets import read_set, render_set
from tasks.common.speculative_plan import KnownTarget, require_theirs
from tasks.common.target import TargetShape
from tasks.common.target_source import EXPORT, locate, locate_draft, read_config, read_tokenizer
from tasks.verify_environment.probes import respond


class _Target(NamedTuple):
    known: KnownTarget
    tokenizer: Any


def find(arguments: dict) -> dict:
    """`arguments` is params.yaml."""
    params = Params.model_validate(arguments)
    target = _target(params)
    sets, drafts = params.benchmark.sets, params.benchmark.drafts
    return {
        "sets": {name: _named(lambda name=name: _ask(name, params, target)) for name in sets},
        "drafts": {name: _named(lambda name=name: _serve(name, params, target)) for name in drafts},
    }


def _target(params: Params) -> _Target | None:
    """None where it cannot be read: the probe `target` says why, and files are looked at for themselves."""
    try:
        source = locate(params.target, weights=False)
        config = read_config(source, params.target.trust_remote_code)
        shape = TargetShape.of(config)
        tokenizer = read_tokenizer(source, params.target.trust_remote_code) if params.benchmark.sets else None
    except Exception:  # whatever a model's own code raises
        return None
    identity = {
        "architecture": shape.architecture,
        "num_layers": shape.num_layers,
        "hidden_size": shape.hidden_size,
        "vocab_size": shape.vocab_size,
    }
    written = config.to_dict() if source.gguf_file else read_json_config(source.folder)
    return _Target(KnownTarget(shape, written, identity), tokenizer)


def _named(look: Callable[[], str]) -> dict:
    try:
        return {"found": look()}
    except DraftlineError as error:
        return {"problem": str(error)}


def _ask(name: str, params: Params, target: _Target | None) -> str:
    rows = read_set(name, params)
    # Without a template prepare_target refuses the target, before anything is spent.
    if target is None or target.tokenizer.chat_template is None:
        return f"{len(rows)} questions, not rendered"
    questions = render_set(name, rows, target.tokenizer, params)
    return f"{len(questions)} questions of up to {max(len(question.token_ids) for question in questions)} tokens"


def _serve(name: str, params: Params, target: _Target | None) -> str:
    draft, field = params.benchmark.drafts[name], f"benchmark.drafts.{name}"
    if Path(draft) == EXPORT:
        return "this run's own export, which export_draft will have checked"
    folder = locate_draft(draft, field, weights=False)
    if not expanded(draft, field).is_dir():
        try:
            read_json_config(folder)
        except DraftlineError as error:
            raise DraftlineError(f"{PARAMS}: {field}: {error} Expected: the hub id of an EAGLE-3 draft.") from None
        return f"{draft} on the hub, its config alone"
    require_theirs(params, folder, field, target.known if target else None)
    return str(draft)


if __name__ == "__main__":
    respond(find)
