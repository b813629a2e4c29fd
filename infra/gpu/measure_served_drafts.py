"""Drafts of two trainers on the same answers of the target, served by SGLang on the same machine; one table.

    python -m infra.gpu.measure_served_drafts answers --target /models/target --prompts /data/prompts --work /tmp/w
    python -m infra.gpu.measure_served_drafts train --work /tmp/w --what draftline --name draftline --learning-rate 1e-3
    python -m infra.gpu.measure_served_drafts features --work /tmp/w
    python -m infra.gpu.measure_served_drafts train --work /tmp/w --what specforge --name specforge --learning-rate 1e-4
    python -m infra.gpu.measure_served_drafts serve --work /tmp/w --sets /data/sets

`answers`: the target answers every prompt, greedily, with SGLang, and its states are dumped; what an earlier call has made
is taken over. `features`: the states as SpecForge reads them, as large again. `train`: may be called several times, also
at once, under other names and learning rates. `serve`:
acceptance length of every draft at 3/1/4 on each set and at 5/1/6 on GSM8K, with what was predicted and what training
took. Prompts and sets are folders of JSONL files (infra/docs/prompts.md); a set's file gives it its name. SpecForge
0.2.0 must be on PYTHONPATH. Nothing is fetched. On a CPU the same with `--device cpu --dtype float32` and fewer tokens.
"""

import argparse
import json
import os
from pathlib import Path

import yaml

from infra.gpu.served_acceptance import SERVED, read_trained, serve_all, table
from infra.gpu.served_answers import FEATURES, make_answers, make_features
from infra.gpu.served_training import EXPORTS, TRAINED, predicted, train_draftline, train_with_specforge
from tasks.common.files import read_json, write_atomically, write_json
from tasks.common.params import PARAMS, Params, load_params


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = parser.add_subparsers(required=True)
    _answers_arguments(parts.add_parser("answers"))
    _features_arguments(parts.add_parser("features"))
    _train_arguments(parts.add_parser("train"))
    _serve_arguments(parts.add_parser("serve"))
    args = parser.parse_args()
    for name in ("target", "prompts", "sets", "folder"):
        if getattr(args, name, None):
            setattr(args, name, getattr(args, name).absolute())
    args.work.mkdir(parents=True, exist_ok=True)
    os.chdir(args.work)
    args.run(args)


def _answers_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_answers)
    parser.add_argument("--target", type=Path, required=True, help="a Hugging Face folder")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="holds all that the parts hand on")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--max-train", type=int, help="prompts; all by default")
    parser.add_argument("--max-heldout", type=int)
    parser.add_argument("--max-new-tokens", type=int, default=256)
    parser.add_argument("--running", type=int, default=256, help="requests that the engine answers at once")
    parser.add_argument("--context-length", type=int, default=1024)
    parser.add_argument("--draft-vocab-size", type=int, default=16_000)
    parser.add_argument("--ttt-length", type=int, default=7)
    parser.add_argument(
        "--extra-args", default="--attention-backend triton --sampling-backend pytorch", help="of SGLang"
    )


def _features_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_features)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--folder", type=Path, help="for the files; in --work by default")


def _train_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_train)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--what", choices=("draftline", "specforge"), required=True)
    parser.add_argument("--name", required=True, help="of the draft")
    parser.add_argument("--learning-rate", type=float, required=True)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--per-step", type=int, default=16, help="sequences of an optimiser step")
    parser.add_argument("--evaluations", type=int, default=8, help="of Draftline's; the best is exported")
    parser.add_argument("--backend", default="sdpa", help="SpecForge's attention; flex_attention compiles by length")


def _serve_arguments(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_serve)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--sets", type=Path, required=True)
    parser.add_argument("--drafts", nargs="*", help="names; all that are exported by default")
    parser.add_argument("--questions", type=int, help="of a set, its first; all by default")
    parser.add_argument("--at-once", type=int, default=8, help="servers beside each other")
    parser.add_argument("--in-flight", type=int, default=8, help="questions that one server answers at once")


def _answers(args: argparse.Namespace) -> None:
    params = Params.model_validate(
        {
            "target": {"model": str(args.target), "device": args.device, "dtype": args.dtype},
            "prompts": {"folder": str(args.prompts), "max_train": args.max_train, "max_heldout": args.max_heldout},
            "regenerate": {
                "engine": "sglang",
                "max_new_tokens": args.max_new_tokens,
                "batch_size": args.running,
            },
            "dump": {"storage_dtype": args.dtype, "batch_tokens": 32_768, "shard_tokens": 65_536},
            "train_draft": {"draft_vocab_size": args.draft_vocab_size, "ttt_length": args.ttt_length},
            "serve": {
                "context_length": args.context_length,
                "max_running_requests": args.running,
                "max_total_tokens": None if args.device == "cuda" else 20_000,
                # Of the whole GPU, although many share it: the cache is bounded by max_total_tokens where they do.
                "mem_fraction_static": 0.5,
                "extra_args": args.extra_args.split(),
            },
        }
    )
    write_atomically(PARAMS, yaml.safe_dump(params.model_dump(mode="json")).encode())
    make_answers(params)


def _features(args: argparse.Namespace) -> None:
    make_features(load_params(), args.folder or Path("features").absolute())


def _train(args: argparse.Namespace) -> None:
    params, common = load_params(), (args.name, args.epochs, args.per_step, args.learning_rate)
    if args.what == "draftline":
        found = train_draftline(params, *common, args.evaluations)
    else:
        found = train_with_specforge(params, *common, args.backend, Path(read_json(FEATURES)["folder"]))
    path = TRAINED / f"{args.name}.json"
    write_json(path, found)
    print(json.dumps({k: v for k, v in found.items() if k not in ("curve", "data", "log")}), flush=True)
    write_json(path, found | {"predicted": predicted(params, args.name)})
    print(f"{args.name}: predicted {read_trained(args.name)['predicted']}", flush=True)


def _serve(args: argparse.Namespace) -> None:
    drafts = args.drafts or sorted(path.parent.name for path in EXPORTS.glob("*/config.json"))
    found = serve_all(load_params(), drafts, args.sets, args.questions, args.at_once, args.in_flight)
    write_json(SERVED, found)
    print(table(found))


if __name__ == "__main__":
    main()
