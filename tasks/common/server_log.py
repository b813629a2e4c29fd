"""Reading the log of a starting SGLang server: how far it is, whether it is lost, and what would help."""

import re
from pathlib import Path

# First match of a line wins; phases may repeat (target and draft load one after the other).
_PHASES = (
    (re.compile(r"The server is fired up"), "ready"),
    (re.compile(r"Uvicorn running on"), "warming up"),
    (re.compile(r"[Cc]apture .*graph"), "capturing CUDA graphs"),
    (re.compile(r"KV Cache (is allocated|VA upper bound)|Memory pool end"), "allocating the KV cache"),
    (re.compile(r"Load weight (begin|end)"), "loading weights"),
    (re.compile(r"Init (torch distributed|parallel) begin"), "starting the scheduler"),
    (re.compile(r"server_args="), "importing SGLang in the scheduler"),
)
FIRST_PHASE = "importing SGLang"
_GRAPH_OF_ROUND = re.compile(r"Capture (target verify|draft extend) .*begin")
# A traceback alone is no sign: SGLang logs some and lives on.
_FATAL = re.compile(
    r"(Scheduler|DataParallelController|TokenizerManager|DetokenizerManager) hit an exception|[Rr]eceived sigquit|"
    r"SIGQUIT received|Initialization failed|Rank \d+ scheduler (is dead|died)|Subprocess \S+ \(pid=\d+\) crashed|"
    r"watchdog timeout \(.*soft=False|address already in use|Killing the server"
)
# First match wins.
_HINTS = (
    (
        r"try to increase --mem-fraction-static",
        "Weights and what else lies on the GPU leave no room for the KV cache. Raise serve.mem_fraction_static, or see what "
        "else holds memory (`nvidia-smi`).",
    ),
    (
        r"out of memory|OutOfMemoryError|Not enough memory|bad_alloc|[Cc]an(no|')t allocate memory",
        "It ran out of memory. Lower serve.mem_fraction_static, serve.max_total_tokens or serve.max_running_requests, and "
        "see what else holds memory (`nvidia-smi`, `free -g`).",
    ),
    (
        r"architectures? .*(not supported|failed to be inspected)|does not recognize this architecture|"
        r"Cannot find model module|has no SGlang implementation and|"
        r"set_eagle3_layers_to_capture|does not support EAGLE3?",
        "This SGLang does not serve the target's architecture, or cannot capture aux states from it.",
    ),
    (
        r"address already in use",
        "Another process took the port between the check and the start. Set serve.port to a free one.",
    ),
    (
        r"at \d+ is not available in|Port is already in use",
        "One of the further ports that SGLang takes for itself is in use. Start again, or set serve.port to another.",
    ),
    (
        r"undefined symbol|common_ops library|cannot open shared object file",
        "A compiled package was built for another torch or CUDA than is installed. Install torch, sglang-kernel and "
        "flashinfer in the versions that this SGLang pins.",
    ),
    (
        r"driver on your system is too old|driver version is insufficient|unsupported toolchain",
        "The GPU's driver is older than the CUDA that torch was built for. Update it, or install the torch of an older CUDA "
        "(`nvidia-smi` says up to which).",
    ),
    (
        r"Torch not compiled with CUDA|torch\._C' has no attribute '_cuda_|Found no NVIDIA driver|No CUDA GPUs are available|No accelerator",
        "torch sees no GPU. Install a torch that was built for CUDA (not +cpu), see that `nvidia-smi` and "
        "CUDA_VISIBLE_DEVICES name one, or set target.device: cpu.",
    ),
    (
        r"no kernel image|minimum required version",
        "The kernels that are installed are too old for this SGLang, or were not built for this GPU. Install torch, "
        "sglang-kernel and flashinfer in the versions that this SGLang pins.",
    ),
    (
        r"No module named '?(sgl_kernel|sglang_kernel|torchvision|flashinfer)|sgl_kernel'? object has no attribute|"
        r"operator (sgl_kernel|torchvision)::",
        "A kernel is missing. On a CPU, infra/sglang_cpu must be first on PYTHONPATH (the plan sees to it; the operator "
        "named may not be written yet). On a GPU, install the sglang-kernel wheel that this SGLang pins.",
    ),
    (r"AttributeError.*draft_vocab_size", "The draft's config.json lacks draft_vocab_size. Export it again."),
    (
        r"SafetensorError",
        "A file of weights is cut short or damaged. Make it again: `dvc repro --force prepare_target`, or `export_draft` for "
        "the draft.",
    ),
    (
        r"crashed with exit code -9|exit code: -9\b",
        "One of its processes was killed (signal 9): most likely by the kernel, for memory. See `dmesg`.",
    ),
    (
        r"watchdog timeout",
        "It hung, and SGLang's own watchdog ended it. The stacks that it left in the log say where.",
    ),
)
_NO_EXTEND_GRAPH = (
    "no CUDA graph was captured for the draft's pass over the accepted tokens: with this attention backend SGLang launches its "
    "kernels one by one in every round. Try --speculative-draft-attention-backend triton in serve.extra_args."
)
_EXCEPTION = re.compile(r"^(- |\[[^\]]*\] )?[\w.]*(Error|Exception|Interrupt)\b.*")


class LogReader:
    """Follows the log file of one server."""

    def __init__(self, path: Path):
        self.path = path
        self._file = path.open(encoding="utf-8", errors="replace")
        self.phase = FIRST_PHASE
        self.is_lost = False
        self._graphs: set[str] = set()

    def read_on(self) -> None:
        """Take in what was written since the last call."""
        for line in self._file:
            self.phase = next((phase for pattern, phase in _PHASES if pattern.search(line)), self.phase)
            self.is_lost = self.is_lost or bool(_FATAL.search(line))
            self._graphs.update(_GRAPH_OF_ROUND.findall(line))

    @property
    def warning(self) -> str:
        """What makes a server that is ready slower than it need be; empty where nothing is known to."""
        # SGLang leaves that graph out without a word for attention backends that it does not list: up to 0.5.22 for fa3.
        return _NO_EXTEND_GRAPH if self._graphs == {"target verify"} else ""

    def close(self) -> None:
        self._file.close()


def explain(log: str, exit_code: int | None) -> str:
    """The part of a dead server's log that says why, and a hint where the reason is known.

    Args:
        log: all of it.
        exit_code: of the server; negative for a signal, None while it lives.
    """
    # Two kinds of noise: the arguments, 20 kB in a line, and every model file that this machine cannot import.
    lines = [line[:300] for line in log.splitlines() if not re.search("server_args=|Ignore import error", line)]
    errors = [number for number, line in enumerate(lines) if _EXCEPTION.match(line) or _FATAL.search(line)]
    known = [(number, hint) for number in errors for pattern, hint in _HINTS if re.search(pattern, lines[number])]
    # The first error of a known kind, since those that follow only report it; else the last of all.
    end, hint = known[0] if known else (errors[-1] if errors else len(lines) - 1, "")
    excerpt = "\n".join(f"    {line}" for line in lines[max(0, end - 11) : end + 1])
    if not hint and exit_code == -9 and not any(_FATAL.search(line) for line in lines):
        hint = "It was killed (signal 9) without a word: most likely by the kernel, for memory. See `dmesg`."
    return "\n".join(part for part in (excerpt, hint) if part)
