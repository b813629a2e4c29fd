"""SGLang's CPU operator library in plain PyTorch, as far as a dense Llama and EAGLE-3 reach it.

SGLang 0.5.23 imports `sgl_kernel` on a CPU, but no CPU build of it is on PyPI. The names, argument
orders and in-place outputs below are those that SGLang calls; the modules follow a request:

    cache.py        which slot of the KV cache holds which token
    attention.py    attention over those slots: prompt, one token, draft tree
    speculation.py  the draft tree: built before the target sees it, walked after

and `first_calls.py` is run by the import, which comes before SGLang's rotary table.

`torch.ops.sgl_kernel.convert_weight_packed` is left undefined on purpose: SGLang reads its presence as
"AMX kernels are here" (`cpu_has_amx_support()`), and would call packed linears, norms, rotary embeddings
and cache writes of a compiled library. Without it every layer takes its own PyTorch path.
"""

from .attention import decode_attention_cpu, extend_attention_cpu
from .cache import (
    assign_draft_cache_locs_contiguous_cpu,
    assign_extend_cache_locs_cpu,
    assign_req_to_token_pool_cpu,
    build_draft_decode_metadata_cpu,
    copy_all_layer_kv_cache_cpu,
    fill_accept_out_cache_loc_cpu,
)
from .first_calls import resolve_vector_functions
from .speculation import build_tree_kernel_efficient_cpu, fill_bonus_tokens_cpu, verify_tree_greedy_cpu

__version__ = "0.5.23+draftline.cpu"

__all__ = [
    "assign_draft_cache_locs_contiguous_cpu",
    "assign_extend_cache_locs_cpu",
    "assign_req_to_token_pool_cpu",
    "build_draft_decode_metadata_cpu",
    "build_tree_kernel_efficient_cpu",
    "copy_all_layer_kv_cache_cpu",
    "decode_attention_cpu",
    "extend_attention_cpu",
    "fill_accept_out_cache_loc_cpu",
    "fill_bonus_tokens_cpu",
    "verify_tree_greedy_cpu",
]

resolve_vector_functions()
