"""Checks of the target against the contract and the parameters, from its config alone."""

from tasks.common.capture import can_capture, last_output, served_layer_ids
from tasks.common.check import Check, Expectation
from tasks.common.contract import check_aux_layers, default_aux_layers
from tasks.common.errors import DraftlineError
from tasks.common.params import Params
from tasks.verify_environment.facts import Engine, Gpus, TargetFacts
from tasks.verify_environment.plan import server_gpus

# What a CPU server holds beside its weights: 2.8 GB in all were seen with the built-in target's 0.5 GB.
_SERVER_BYTES = 2.3e9


def check_config(params: Params, target: TargetFacts) -> Check:
    want = Expectation("target", "transformers reads its config", "Every stage reads the target through transformers.")
    if target.error:
        return want.error(
            target.error,
            "Correct target.model, or repair the package that the error names; a model with code of its own needs "
            "target.trust_remote_code: true (read that code first).",
        )
    shape, count = target.shape, target.parameters
    size = f"{count / 1e9:.3g} B" if count >= 1e9 else f"{count / 1e6:.0f} M"
    found = f"{params.target.model}: {size} parameters, {shape.num_layers} layers, H {shape.hidden_size}, V {shape.vocab_size}"
    return want.ok(found + (f", {target.quantisation}" if target.quantisation else ""))


def check_capture(target: TargetFacts, engine: Engine) -> Check:
    """The contract's table, and as a cross-check the class in the installed engine."""
    want = Expectation(
        "eagle3_capture",
        "an architecture of the table in tasks/common/capture.py; its class in SGLang has the capture hook",
        "Without the hook, or with another reading of layer ids, the draft is fed nothing it was trained on.",
    )
    if target.error:
        return want.not_applicable("no config")
    architecture = target.shape.architecture
    if engine.is_broken:
        hook = "for the hook see sglang"
    elif engine.captures is None:
        hook = next((f"{i.module}: {i.error}" for i in engine.failed("model")), "SGLang has no such class")
    else:
        hook = f"its class in SGLang has {'the' if engine.captures else 'no'} hook"
    found = f"{architecture}; {hook}"
    if not can_capture(architecture):
        fix = "Take a target of a known architecture"
        if engine.captures:
            fix += ", or establish how SGLang reads layer ids for this one and add it to tasks/common/capture.py"
        return want.error(found, f"{fix}.")
    if not engine.is_broken and not engine.captures:
        return want.error(found, "Install an SGLang whose class defines set_eagle3_layers_to_capture (0.5.23 does).")
    return want.ok(found)


def check_layers(params: Params, target: TargetFacts) -> Check:
    why = "A draft that is trained on other layers than the engine captures accepts nothing, and nothing fails."
    if target.error:
        return Expectation("aux_layers", "layers of the target", why).not_applicable("no config")
    shape = target.shape
    last = last_output(shape.architecture, shape.num_layers)
    want = Expectation("aux_layers", f"distinct, ascending, within 0..{last}, at least two", why)
    try:
        ids = params.contract.aux_layer_ids or default_aux_layers(shape.num_layers)
        check_aux_layers(ids, shape.num_layers)
        written = (
            served_layer_ids(ids, shape.architecture, shape.num_layers) if can_capture(shape.architecture) else None
        )
        served = f", written {written} in the served config" if written else ""
    except DraftlineError as error:
        return want.error(str(error), "Set contract.aux_layer_ids, or null for [1, N//2-1, N-4] where N is at least 6.")
    return want.ok(f"outputs {list(ids)}{served}")


def check_dtype(params: Params, target: TargetFacts) -> Check:
    device, dtype, stored = params.target.device.partition(":")[0], params.target.dtype, params.dump.storage_dtype
    want = Expectation(
        "dtype",
        "float32 on cpu" if device == "cpu" else "bfloat16 on cuda",
        "Speed, memory and the range of the states depend on it.",
    )
    found = f"{dtype} on {device}, states stored as {stored}"
    fixes = []
    if device == "cpu" and dtype != "float32":
        fixes.append(
            "On the reference CPU transformers wrote 34 tok/s in bfloat16, 192 in float32: set target.dtype: float32."
        )
    if device == "cuda" and dtype == "float32":
        fixes.append("float32 doubles memory and leaves the tensor cores idle: set target.dtype: bfloat16.")
    if dtype == "float16" and target.dtype == "bfloat16":
        fixes.append(
            "The weights are bfloat16, whose activations can exceed float16's 65504: set target.dtype: bfloat16."
        )
    if stored == "float16":
        fixes.append("Single channels of deep layers can exceed float16's 65504: set dump.storage_dtype: bfloat16.")
    return want.warning(found, " ".join(fixes)) if fixes else want.ok(found)


def check_lengths(params: Params, target: TargetFacts) -> Check:
    why = "Beyond its positions the target writes noise, and a draft cannot know more tokens than the target."
    if target.error:
        return Expectation("lengths", "within the target's positions and vocabulary", why).not_applicable("no config")
    shape, prompt, served = target.shape, params.prompts.max_prompt_tokens, params.serve.context_length
    positions = shape.max_position_embeddings
    want = Expectation("lengths", f"within {positions} positions, vocabulary {shape.vocab_size}", why)
    sample = prompt + params.regenerate.max_new_tokens
    asked = prompt + params.benchmark.max_new_tokens + params.serve.num_draft_tokens
    vocabulary = params.train_draft.draft_vocab_size
    fixes = []
    if sample > positions:
        fixes.append(f"Lower prompts.max_prompt_tokens + regenerate.max_new_tokens to {positions}.")
    elif params.regenerate.engine == "sglang" and sample > served:
        fixes.append(f"SGLang refuses requests that may grow to {sample}: set serve.context_length to at least that.")
    if served > positions:
        fixes.append(f"Set serve.context_length to at most {positions}.")
    if asked > served:
        fixes.append(f"The benchmark asks for up to {asked} tokens: set serve.context_length to at least that.")
    if vocabulary > shape.vocab_size:
        fixes.append(f"Set train_draft.draft_vocab_size to at most {shape.vocab_size}.")
    found = f"samples up to {sample} tokens, served {served}, draft vocabulary {vocabulary}"
    return want.error(found, " ".join(fixes)) if fixes else want.ok(found)


def check_memory(params: Params, target: TargetFacts, gpus: Gpus, available_bytes: int) -> Check:
    """Weights against memory: a server's on a CPU, the share of one GPU on CUDA.

    Args:
        available_bytes: of the host's memory, within the limit of the control group.
    """
    why = "What does not fit is killed by the kernel or by CUDA hours later."
    if target.error:
        return Expectation("memory", "room for the weights", why).not_applicable("no config")
    if params.target.device != "cpu":
        return _check_gpu_memory(params, target, gpus, why)
    needed = target.weight_bytes + _SERVER_BYTES
    want = Expectation("memory", f"{needed / 1e9:.1f} GB for a server, twice that for two side by side", why)
    found = f"{available_bytes / 1e9:.1f} GB free, weights {target.weight_bytes / 1e9:.2f} GB"
    if needed <= available_bytes:
        return want.ok(found)
    verdict = want.error if target.weight_bytes > available_bytes else want.warning
    return verdict(found, "End what holds memory, or take a smaller target or a larger host.")


def _check_gpu_memory(params: Params, target: TargetFacts, gpus: Gpus, why: str) -> Check:
    fraction, servers = params.serve.mem_fraction_static, server_gpus(params)
    want = Expectation(
        "memory",
        f"weights / {servers} within serve.mem_fraction_static of a GPU; "
        f"transformers needs all on {'the GPUs together' if params.target.device_map else 'one GPU'}",
        why,
    )
    if not gpus.gpus:
        return want.not_applicable("nvidia-smi lists no GPUs")
    sizes = [gpu.memory_total_mib * 2**20 for gpu in gpus.gpus]
    total, for_transformers = min(sizes), sum(sizes) if params.target.device_map else min(sizes)
    found = f"weights {target.weight_bytes / 1e9:.1f} GB, GPUs of {total / 1e9:.0f} GB, mem_fraction_static {fraction}"
    if target.weight_bytes / servers > fraction * total:
        return want.error(
            found, "Raise serve.mem_fraction_static, or spread the target: serve.extra_args: [--tp-size, '8']."
        )
    if target.weight_bytes > 0.9 * for_transformers:
        return want.error(
            found,
            "transformers loads the target for the gate's replay, and for dump and answers where that is their engine: set "
            "target.device_map: auto to spread it, or take a smaller target or more or larger GPUs.",
        )
    return want.ok(found)
