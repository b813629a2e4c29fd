"""What the target's config says, read by the `transformers` that every stage uses. No weights are touched."""

import dataclasses

from tasks.common.params import Target
from tasks.common.target import TargetShape
from tasks.common.target_source import TargetSource, locate, read_config
from tasks.verify_environment.parameters import count_parameters
from tasks.verify_environment.probes import respond

_DTYPE_BITS = {"float32": 32, "bfloat16": 16, "float16": 16}


def find(arguments: dict) -> dict:
    """`arguments` is the section `target` of params.yaml."""
    target = Target.model_validate(arguments)
    source = locate(target, weights=False)
    config = read_config(source, target.trust_remote_code)
    total, active = count_parameters(config)
    method, bits = quantisation(config)
    return {
        "shape": dataclasses.asdict(TargetShape.of(config)),
        "dtype": str(getattr(config, "dtype", None) or "").removeprefix("torch.") or None,
        "quantisation": method,
        "parameters": total,
        "active_parameters": active,
        "weight_bytes": _stored_bytes(source, method) or total * (bits or _DTYPE_BITS[target.dtype]) // 8,
    }


def quantisation(config) -> tuple[str | None, int | None]:
    """Method and bits a weight of a quantised target; (None, None) for plain weights."""
    for part in (config, config.get_text_config()):
        stored = getattr(part, "quantization_config", None) or getattr(part, "compression_config", None)
        if stored:
            stored = stored if isinstance(stored, dict) else stored.to_dict()
            method = str(stored.get("quant_method", "unnamed"))
            groups = [group.get("weights") or {} for group in (stored.get("config_groups") or {}).values()]
            bits = stored.get("bits") or next((g["num_bits"] for g in groups if "num_bits" in g), None)
            return method, bits or (8 if "8" in method else 4)
    return None, None


def _stored_bytes(source: TargetSource, method: str | None) -> int | None:
    """Size of a quantised target's files: they are loaded as they are. Unknown where only the config was fetched."""
    files = list(source.folder.glob("*.safetensors")) if method else []
    return sum(path.stat().st_size for path in files) or None


if __name__ == "__main__":
    respond(find)
