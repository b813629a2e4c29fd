"""What the probes find out. Each probe runs in a process of its own and answers with one of these as JSON."""

from typing import Literal

from pydantic import BaseModel, ConfigDict

from tasks.common.target import TargetShape


class _Facts(BaseModel):
    """`error` says why the probe itself failed; the other fields are then at their defaults."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    error: str | None = None
    seconds: float = 0.0


class Gpu(BaseModel):
    index: int
    name: str
    memory_total_mib: int
    memory_used_mib: int


class GpuProcess(BaseModel):
    gpu: int
    pid: int
    name: str
    memory_mib: int | None


class Gpus(_Facts):
    """What `nvidia-smi` says, before any probe touches a GPU."""

    driver: str | None = None
    gpus: tuple[Gpu, ...] = ()
    processes: tuple[GpuProcess, ...] = ()


class Compute(_Facts):
    """What torch can do here.

    Attributes:
        cuda_build: CUDA version that torch was built for, None for a CPU build.
        devices: CUDA devices that torch sees.
        capability: compute capability of the configured device.
        device_error: why the configured device cannot multiply two matrices.
        matmul_flops: FLOP/s of a square matrix product on the configured device and dtype.
        memory_bytes_per_s: read and written by a copy on the configured device.
    """

    torch: str | None = None
    cuda_build: str | None = None
    devices: int = 0
    capability: tuple[int, int] | None = None
    threads: int = 0
    device_error: str | None = None
    matmul_flops: float | None = None
    memory_bytes_per_s: float | None = None


class Import(BaseModel):
    """A module that was imported, or the last line of why it could not be."""

    role: Literal["engine", "kernels", "attention", "model"]
    module: str
    error: str | None = None


class Engine(_Facts):
    """What the server will import, in the environment that the server will get.

    Attributes:
        captures: whether the engine's class of the target has `set_eagle3_layers_to_capture`; None where
            the engine has no such class.
    """

    version: str | None = None
    imports: tuple[Import, ...] = ()
    captures: bool | None = None

    @property
    def is_broken(self) -> bool:
        """Whether SGLang itself does not import: the check `sglang` says why, and nothing else can be known of it."""
        return bool(self.error or self.failed("engine"))

    def failed(self, role: str) -> list[Import]:
        return [entry for entry in self.imports if entry.role == role and entry.error]


class TargetFacts(_Facts):
    """What the target's config says.

    Attributes:
        dtype: in which the weights are stored, where the config says so.
        quantisation: method named in the config, None for plain weights.
        parameters: counted from the config, embeddings and head included.
        active_parameters: those that a token's forward pass multiplies with: the head included, the input
            embedding and the experts it is not routed to left out.
        weight_bytes: of the weights once loaded.
    """

    shape: TargetShape | None = None
    dtype: str | None = None
    quantisation: str | None = None
    parameters: int = 0
    active_parameters: int = 0
    weight_bytes: int = 0


class Named(BaseModel):
    """A set of questions or a draft that params.yaml names: what it is, or why the benchmark would refuse it."""

    found: str = ""
    problem: str | None = None


class Asked(_Facts):
    """What the benchmark will ask, and of whose drafts, by the names in params.yaml."""

    sets: dict[str, Named] = {}
    drafts: dict[str, Named] = {}


class Package(BaseModel):
    """Where a package comes from: `locations[0]` is the copy that is imported."""

    version: str | None
    locations: tuple[str, ...]


class Interpreter(_Facts):
    """A Python interpreter and what it would import."""

    executable: str = ""
    prefix: str = ""
    version: str = ""
    packages: dict[str, Package] = {}


class Repository(_Facts):
    """What DVC would do with the artifacts.

    Attributes:
        cache: folder of DVC's cache, None where the folder is no DVC repository.
        link: how DVC links from cache to workspace here: the first configured type that the filesystem supports.
        cached: which folders under artifacts/ are outputs that DVC caches.
    """

    version: str | None = None
    cache: str | None = None
    link: str | None = None
    cached: dict[str, bool] = {}
