"""What the logs of SGLang and the errors of torch say, in their own words."""

import pytest

from tasks.common.server_log import FIRST_PHASE, LogReader, explain

# Lines of a start with EAGLE-3 on an H200 (SGLang 0.5.16); the comma ends what is left out of a line here.
_START_0_5_16 = """\
[2026-11-30 15:52:21] server_args=ServerArgs(model_path='/tmp/target', tokenizer_path='/tmp/target',
[2026-11-30 15:52:48] Init torch distributed begin.
[2026-11-30 15:52:48] Init torch distributed ends. elapsed=0.27 s, mem usage=0.09 GB
[2026-11-30 15:52:50] Ignore import error when loading sglang.srt.models.inkling: No module named 'helion'
[2026-11-30 15:52:52] Load weight begin. avail mem=125.07 GB
[2026-11-30 15:52:52] Load weight end. elapsed=0.24 s, type=LlamaForCausalLM, avail mem=124.80 GB, mem usage=0.27 GB.
[2026-11-30 15:52:54] Init torch distributed begin.
[2026-11-30 15:52:54] Load weight begin. avail mem=124.80 GB
[2026-11-30 15:52:54] Load weight end. elapsed=0.03 s, type=LlamaForCausalLMEagle3, avail mem=124.71 GB, mem usage=0.09 GB.
[2026-11-30 15:52:55] KV Cache is allocated. dtype: torch.bfloat16, #tokens: 14014, K size: 0.15 GB, V size: 0.15 GB
[2026-11-30 15:52:55] Memory pool end. avail mem=124.34 GB
[2026-11-30 15:52:55] Capture target prefill CUDA graph begin. backend=breakable, num_tokens=[4, 8, 12, 16,
[2026-11-30 15:53:49] Capture target prefill CUDA graph end. elapsed=54.23 s, mem usage=0.46 GB, avail mem=123.82 GB.
[2026-11-30 15:53:49] Capture target verify CUDA graph begin. backend=full, num_tokens_per_req=4, bs=[1, 2, 3, 4,
[2026-11-30 15:54:03] max_total_num_tokens=14014, chunked_prefill_size=8192, max_prefill_tokens=16384,
[2026-11-30 15:54:03] INFO:     Uvicorn running on http://127.0.0.1:33000 (Press CTRL+C to quit)
[2026-11-30 15:54:07] The server is fired up and ready to roll!
"""


def phases(log: str, path) -> list[str]:
    """Every phase that a reader passes through who reads line by line."""
    path.touch()
    reader, seen = LogReader(path), [FIRST_PHASE]
    with path.open("a") as file:
        for line in log.splitlines(keepends=True):
            file.write(line)
            file.flush()
            reader.read_on()
            assert not reader.is_lost, line
            if reader.phase != seen[-1]:
                seen.append(reader.phase)
    reader.close()
    return seen


def test_a_start_on_a_gpu_passes_through_its_phases(tmp_path):
    assert phases(_START_0_5_16, tmp_path / "log") == [
        "importing SGLang",
        "importing SGLang in the scheduler",
        "starting the scheduler",
        "loading weights",
        "starting the scheduler",  # of the draft
        "loading weights",
        "allocating the KV cache",
        "capturing CUDA graphs",
        "warming up",
        "ready",
    ]


@pytest.mark.parametrize(
    ("line", "phase"),
    [
        (
            "Target KV Cache VA upper bound. dtype: torch.bfloat16, #tokens: 14014, K size: 0.15 GB, V",
            "allocating the KV cache",
        ),
        ("Capture draft extend CUDA graph begin. step=0, avail mem=123.43 GB", "capturing CUDA graphs"),
        (
            "Capture target decode CUDA graph begin. backend=full, num_tokens_per_req=1, bs=[1, 2],",
            "capturing CUDA graphs",
        ),
    ],
)
def test_phases_in_the_words_of_0_5_23(line, phase, tmp_path):
    assert phases(f"[2026-11-30 15:52:55] {line}\n", tmp_path / "log")[-1] == phase


@pytest.mark.parametrize(
    "line",
    [
        "Scheduler hit an exception: Traceback (most recent call last):",
        "DetokenizerManager hit an exception: Traceback (most recent call last):",
        "Received sigquit from a child process. It usually means the child failed.",
        "SIGQUIT received. signum=<Signals.SIGQUIT: 3>, frame=None. It usually means one child failed.",
        "Initialization failed. warmup error: Traceback (most recent call last):",
        "Subprocess scheduler_0 (pid=811) crashed with exit code -9. Triggering SIGQUIT for cleanup...",
        "Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)",
        "RuntimeError: Rank 0 scheduler died during initialization (exit code: -9). If exit code is -9 (SIGKILL), a common",
        "ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 31000): address already in use",
    ],
)
def test_a_server_that_writes_this_is_lost(line, tmp_path):
    with (tmp_path / "log").open("w") as file:
        file.write(f"[2026-11-30 15:52:55] {line}\n")
    reader = LogReader(tmp_path / "log")
    reader.read_on()
    assert reader.is_lost
    reader.close()


@pytest.mark.parametrize(
    "line",
    [
        "Health check failed. Server couldn't get a response from detokenizer for last 20 seconds. tic start time: 15:52:55.",
        "Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=True)",
        "OpenAI Responses API (/v1/responses) disabled: OpenAIServingResponses init failed (ModuleNotFoundError: No module",
    ],
)
def test_a_server_that_writes_this_lives_on(line, tmp_path):
    assert phases(f"[2026-11-30 15:52:55] {line}\n", tmp_path / "log") == [FIRST_PHASE]


_OOM = "It ran out of memory"
_NO_ROOM = "Raise serve.mem_fraction_static"
_ARCHITECTURE = "does not serve the target's architecture"
_ABI = "built for another torch or CUDA than is installed"
_DRIVER = "The GPU's driver is older than the CUDA"
_NO_GPU = "torch sees no GPU"
_OLD_KERNELS = "too old for this SGLang, or were not built for this GPU"
_NO_KERNEL = "A kernel is missing"
_KILLED = "One of its processes was killed (signal 9)"


@pytest.mark.parametrize(
    ("line", "hint"),
    [
        ("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 139.80 GiB", _OOM),
        ("torch.AcceleratorError: CUDA error: out of memory", _OOM),
        ("RuntimeError: [enforce fail at alloc_cpu.cpp:125] err == 0. DefaultCPUAllocator: can't allocate memory: you tried", _OOM),
        ("OSError: [Errno 12] Cannot allocate memory", _OOM),
        ("Exception: Capture cuda graph failed: CUDA out of memory. Tried to allocate 20.00 MiB. GPU 0 has a total", _OOM),
        (
            "RuntimeError: Not enough memory. Please try to increase --mem-fraction-static. Current value: mem_fraction_static=0.3",
            _NO_ROOM,
        ),
        ("ValueError: Model architectures ['FooForCausalLM'] are not supported for now. Supported architectures:", _ARCHITECTURE),
        ("ValueError: Model architectures ['FooForCausalLM'] failed to be inspected. Please check the logs", _ARCHITECTURE),
        (
            "ValueError: The checkpoint you are trying to load has model type `foo` but Transformers does not recognize this "
            "architecture. This could be because of an issue with the checkpoint",
            _ARCHITECTURE,
        ),
        ("ValueError: Cannot find model module. 'FooForCausalLM' is not a registered model in the Transformers", _ARCHITECTURE),
        ("ValueError: FooForCausalLM has no SGlang implementation and the Transformers implementation is not", _ARCHITECTURE),
        ("AttributeError: 'FooForCausalLM' object has no attribute 'set_eagle3_layers_to_capture'", _ARCHITECTURE),
        ("ImportError: /opt/sgl_kernel/sm90/common_ops.abi3.so: undefined symbol: _ZNK3c106SymInt6sym_neERKS0_", _ABI),
        ("ImportError: libcudart.so.12: cannot open shared object file: No such file or directory", _ABI),
        ("RuntimeError: The NVIDIA driver on your system is too old (found version 12040). Please update your GPU driver", _DRIVER),
        ("RuntimeError: CUDA error: CUDA driver version is insufficient for CUDA runtime version", _DRIVER),
        ("RuntimeError: CUDA error: the provided PTX was compiled with an unsupported toolchain.", _DRIVER),
        ("AssertionError: Torch not compiled with CUDA enabled", _NO_GPU),
        ("RuntimeError: No accelerator (CUDA, XPU, HPU, NPU, MUSA, MPS) or platform plugin is available.", _NO_GPU),
        ("RuntimeError: Found no NVIDIA driver on your system. Please check that you have an NVIDIA GPU", _NO_GPU),
        ("torch.AcceleratorError: CUDA error: no kernel image is available for execution on the device", _OLD_KERNELS),
        (
            "Exception: sglang-kernel is installed with version 0.4.1, which is less than the minimum required version 0.4.5. "
            "Please reinstall the latest version with `pip install sglang-kernel --force-reinstall`",
            _OLD_KERNELS,
        ),
        ("Exception: flashinfer_python with minimum required version 0.6.14 is not installed. Please uninstall", _OLD_KERNELS),
        ("ModuleNotFoundError: No module named 'sgl_kernel'", _NO_KERNEL),
        ("AttributeError: 'LlamaConfig' object has no attribute 'draft_vocab_size'", "lacks draft_vocab_size"),
        ("safetensors._safetensors_rust.SafetensorError: Error while deserializing header: incomplete metadata, file not fully covered", "cut short"),
        (
            "[2026-11-30 15:52:55] ERROR:    [Errno 98] error while attempting to bind on address ('127.0.0.1', 31000): address "
            "already in use",
            "Set serve.port to a free one",
        ),
        ("ValueError: nccl_port at 28123 is not available in 30 seconds. nccl_port is used by a process already.", "further ports"),
        ("[2026-11-30 15:52:55] Subprocess scheduler_0 (pid=811) crashed with exit code -9. Triggering SIGQUIT", _KILLED),
        ("RuntimeError: Rank 0 scheduler died during initialization (exit code: -9). If exit code is -9 (SIGKILL),", _KILLED),
        ("[2026-11-30 15:52:55] Scheduler watchdog timeout (self.watchdog_timeout=300, self.soft=False)", "SGLang's own watchdog"),
    ],
)  # fmt: skip
def test_a_known_reason_comes_with_what_to_do(line, hint):
    *excerpt, last = explain(
        f"Load weight begin.\n{line}\nRuntimeError: Initialization failed. See above.", 1
    ).splitlines()
    assert hint in last
    assert excerpt[-1].strip() == line


def test_a_kernel_of_another_torch_is_found_below_the_exception_that_reports_it():
    log = """\
ImportError:
[sgl_kernel] CRITICAL: Could not load any common_ops library!
Attempted locations:
1. Architecture-specific pattern: /opt/sgl_kernel/sm100/common_ops.* - found files: ['common_ops.abi3.so']
Error details from previous import attempts:
- ImportError: /opt/sgl_kernel/sm100/common_ops.abi3.so: undefined symbol: _ZNK3c106SymInt6sym_neERKS0_
- ModuleNotFoundError: No module named 'common_ops'
"""
    *excerpt, hint = explain(log, 1).splitlines()
    assert _ABI in hint
    assert "undefined symbol" in excerpt[-1]


def test_a_death_without_a_word_is_most_likely_the_kernels():
    assert "most likely by the kernel, for memory" in explain("Load weight begin.", -9)


def test_model_files_that_cannot_be_imported_explain_nothing():
    log = "Ignore import error when loading sglang.srt.models.grok: 'sgl_kernel' object has no attribute 'x'\nValueError: y"
    assert explain(log, 1).strip() == "ValueError: y"


def test_the_cause_is_quoted_and_not_the_errors_that_follow_from_it():
    log = "torch.OutOfMemoryError: CUDA out of memory.\nRuntimeError: Initialization failed. See above."
    assert explain(log, 1).splitlines()[0].strip() == "torch.OutOfMemoryError: CUDA out of memory."


def test_the_excerpt_ends_with_the_exception_and_not_with_what_came_after():
    log = "\n".join(["noise"] * 50 + ["ValueError: the reason"] + [f"later {i}" for i in range(50)])
    assert explain(log, 1).splitlines()[-1].strip() == "ValueError: the reason"


def test_a_kill_is_the_kernels_only_where_the_server_left_no_word():
    alone = "most likely by the kernel, for memory"
    assert alone in explain("loading", -9)
    assert alone not in explain(
        "Scheduler hit an exception: Traceback\nValueError: x\nReceived sigquit from a child process.", -9
    )
    assert _NO_GPU in explain(
        "AttributeError: module 'torch._C' has no attribute '_cuda_setDevice'\nReceived sigquit", -9
    )


# Of SGLang 0.5.16 on an H200, cut at the end of each line.
_GRAPHS_OF_FA3 = """\
[2026-12-01 02:59:15] Capture target verify CUDA graph begin. backend=full, num_tokens_per_req=32, bs=[1, 2, 4, 8, 16,
[2026-12-01 02:59:16] Capture draft prefill CUDA graph begin. backend=breakable, num_tokens=[4, 8, 12, 16, 20, 24, 28,
[2026-12-01 02:59:17] Capture draft decode CUDA graph begin. backend=full, num_tokens_per_req=4, bs=[1, 2, 4, 8, 16, 32,
"""
_OF_TRITON = (
    "[2026-12-01 03:06:06] Capture draft extend CUDA graph begin. backend=full, num_tokens_per_req=4, bs=[1, 2, 3,\n"
)


@pytest.mark.parametrize(
    ("log", "words"),
    [(_GRAPHS_OF_FA3, "--speculative-draft-attention-backend triton"), (_GRAPHS_OF_FA3 + _OF_TRITON, ""), ("", "")],
)
def test_a_draft_of_which_a_part_runs_without_cuda_graphs_is_told(log, words, tmp_path):
    (tmp_path / "log").write_text(log)
    reader = LogReader(tmp_path / "log")
    reader.read_on()
    reader.close()
    assert words in reader.warning and bool(words) == bool(reader.warning)
