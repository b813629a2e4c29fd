"""A draft's folder as bytes: its config and the headers of its weights, whatever tool wrote them.

Reads .safetensors and .bin, a single file or an index. The files may be anybody's: sizes are checked before anything
is read, a pickle is read by torch's weights-only reader, which executes nothing, and what cannot be read is one sentence.
"""

import json
import pickletools
import re
import stat
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tasks.common.errors import DraftlineError
from tasks.common.tensor_types import TYPES, WIDTHS

if TYPE_CHECKING:
    import numpy as np
    import torch

CONFIG = "config.json"
# A config has a few kilobytes, an index, a header or a pickle of a draft a few more; larger is no draft's.
_MAX_DESCRIPTION, _MAX_NAME, _MAX_DIMENSIONS = 2 * 2**20, 200, 8
_CHUNK = 16 * 2**20
# What trainers leave beside the weights, and SGLang passes over.
_NOT_WEIGHTS = ("training_args.bin", "optimizer.bin")
# What torch.save writes of a dictionary of tensors.
_OF_TENSORS = re.compile(
    r"collections OrderedDict|torch\._utils _rebuild_(tensor_v2|tensor_v3|parameter)|torch\.storage \w+Storage"
    r"|torch (\w+Storage|b?float\w+|u?int\d+|bool)"
)
_OF_TORCH = {f"torch.{name}": dtype for dtype, (name, _) in TYPES.items()}


class Header(NamedTuple):
    """Of a stored tensor: safetensors' name of the type ('BF16'), and its shape."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * WIDTHS[self.dtype]


@dataclass(frozen=True)
class DraftFiles:
    """A folder with config.json and weights.

    Attributes:
        config: config.json as it stands.
        headers: of every tensor, under the name it is stored by.
        files: which file holds which tensor.
    """

    folder: Path
    config: dict[str, Any]
    headers: dict[str, Header]
    files: dict[str, Path]
    _starts: dict[str, int] = field(default_factory=dict, repr=False)  # first byte of a tensor in its .safetensors
    _loaded: dict[Path, dict[str, "torch.Tensor"]] = field(default_factory=dict, repr=False)  # a .bin, mapped

    @classmethod
    def open(cls, folder: Path) -> "DraftFiles":
        """Read config and headers.

        Raises:
            DraftlineError: config or weights are absent, unreadable or hostile; names the file.
        """
        files = cls(folder, read_config(folder), {}, {})
        try:
            for path in _weight_files(folder):
                files._add(path)
        except PermissionError as error:
            raise DraftlineError(
                f"{error.filename}: no permission to read it. Run as its owner, or chmod it."
            ) from None
        return files

    def _add(self, path: Path) -> None:
        size = _size(path)
        if path.suffix == ".safetensors":
            placed = _safetensors_headers(path, size)
            headers = {name: header for name, (header, _) in placed.items()}
            self._starts.update({name: start for name, (_, start) in placed.items()})
        else:
            self._loaded[path] = _load_bin(path)
            headers = _bin_headers(path, size, self._loaded[path])
        for name, header in headers.items():
            if not name.isprintable() or len(name) > _MAX_NAME:
                raise DraftlineError(f"{path}: cannot be read: {name[:40]!r} is no name of a tensor.")
            if name in self.files:
                raise DraftlineError(f"{path}: tensor {name} is in {self.files[name].name} too; which one counts?")
            self.headers[name], self.files[name] = header, path

    @cached_property
    def paths(self) -> list[Path]:
        """Weight files, each once."""
        return list(dict.fromkeys(self.files.values()))

    def read(self, name: str) -> "torch.Tensor":
        """One tensor as stored; a .bin is mapped, not copied."""
        path = self.files[name]
        if path in self._loaded:
            return self._loaded[path][name]
        from safetensors import safe_open

        with safe_open(path, framework="pt") as file:
            return file.get_tensor(name)

    def bits(self, name: str) -> Iterator["np.ndarray"]:
        """A tensor's values in order, flat, a few megabytes at a time, and without torch, whose import takes seconds.

        Floats come as unsigned integers of their width, whole numbers and bool as themselves. The array is valid until
        the next one is asked for.
        """
        import numpy as np

        path, header = self.files[name], self.headers[name]
        dtype = np.dtype(TYPES[header.dtype][1])
        if path in self._loaded:
            import torch

            flat = self._loaded[path][name].detach().reshape(-1).view(torch.uint8).numpy()
            for start in range(0, len(flat), _CHUNK):
                yield flat[start : start + _CHUNK].view(dtype)
            return
        left = header.num_bytes
        buffer = bytearray(min(left, _CHUNK))
        with open(path, "rb", buffering=0) as file:
            file.seek(self._starts[name])
            while left:
                view = memoryview(buffer)[: min(left, len(buffer))]
                if file.readinto(view) != len(view):
                    raise DraftlineError(f"{path}: was cut short while it was read.")
                left -= len(view)
                yield np.frombuffer(view, dtype)

    def array(self, name: str) -> "np.ndarray":
        """A whole tensor of integers or bool in its shape, without torch."""
        import numpy as np

        dtype = np.dtype(TYPES[self.headers[name].dtype][1])
        chunks = [chunk.copy() for chunk in self.bits(name)]
        return np.concatenate([np.empty(0, dtype), *chunks]).reshape(self.headers[name].shape)


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a draft or of a target.

    Raises:
        DraftlineError: the folder or the file cannot be read, or is not a JSON object.
    """
    try:
        if folder.exists() and not folder.is_dir():
            raise DraftlineError(f"{folder}: not a folder.")
        return read_object(folder / CONFIG)
    except PermissionError as error:
        raise DraftlineError(f"{error.filename}: no permission to read it. Run as its owner, or chmod it.") from None


def _weight_files(folder: Path) -> list[Path]:
    """The files that SGLang would load: safetensors before .bin, an index's files in its order."""
    here = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    for suffix in (".safetensors", ".bin"):
        index = next((path for path in here if path.name.endswith(f"{suffix}.index.json")), None)
        if index is not None:
            return _files_of_index(index)
        found = [path for path in here if path.suffix == suffix and path.name not in _NOT_WEIGHTS]
        if found:
            return found
    raise DraftlineError(
        f"{folder}: no weights: *.safetensors or *.bin are not there; the server would start with random weights."
    )


def _files_of_index(index: Path) -> list[Path]:
    weight_map = read_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise DraftlineError(f"{index}: no weight_map of tensor names to file names.")
    names = list(dict.fromkeys(weight_map.values()))
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise DraftlineError(f"{index}: names {outside[0]!r}, which is not a file of this folder.")
    return [index.parent / name for name in names]


def _safetensors_headers(path: Path, size: int) -> dict[str, tuple[Header, int]]:
    """Type, shape and first byte of each tensor, from the header alone.

    The bytes must be those of the shapes, one tensor behind the other to the file's end: safetensors loads no other.
    """
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8 or length > _MAX_DESCRIPTION:
            raise DraftlineError(
                f"{path}: cannot be read: its header claims {length:,} bytes, the file has {size:,} "
                f"(a header has at most {_MAX_DESCRIPTION:,}). It is cut short or not safetensors; copy it again."
            )
        described = _parse(path, file.read(length))
    described.pop("__metadata__", None)
    data = 8 + length
    placed = {name: _place(path, name, tensor) for name, tensor in described.items()}
    end = 0
    for name, (header, start) in sorted(placed.items(), key=lambda item: (item[1][1], item[1][0].num_bytes)):
        if start != end:
            raise DraftlineError(
                f"{path}: cannot be read: tensor {name} begins at byte {data + start:,}, where the one before it ends at "
                f"{data + end:,}. Overlaps and gaps are no safetensors; save it again."
            )
        end = start + header.num_bytes
        if data + end > size:
            raise DraftlineError(
                f"{path}: cannot be read: tensor {name} ends at byte {data + end:,}, the file has {size:,}. "
                f"It was cut short; copy it again."
            )
    if data + end < size:
        raise DraftlineError(
            f"{path}: cannot be read: its tensors end at byte {data + end:,}, the file has {size:,}. Save it again."
        )
    return {name: (header, data + start) for name, (header, start) in placed.items()}


def _place(path: Path, name: str, described: Any) -> tuple[Header, int]:
    """What a header says of one tensor, and where its bytes begin behind the header."""
    try:
        dtype, shape, (start, end) = described["dtype"], described["shape"], described["data_offsets"]
        numbers = [*shape, start, end]
        understood = all(type(number) is int and number >= 0 for number in numbers) and len(shape) <= _MAX_DIMENSIONS
    except (KeyError, TypeError, ValueError):
        understood = False
    if not understood:
        raise DraftlineError(f"{path}: cannot be read: no dtype, shape and offsets for tensor {name[:_MAX_NAME]!r}.")
    if dtype not in TYPES:
        raise DraftlineError(
            f"{path}: cannot be read: tensor {name} is of type {str(dtype)[:20]!r}, which is not known."
        )
    header = Header(dtype, tuple(shape))
    if end - start != header.num_bytes:
        raise DraftlineError(f"{path}: cannot be read: tensor {name} is {header} in {end - start:,} bytes.")
    return header, start


def _load_bin(path: Path) -> dict[str, "torch.Tensor"]:
    """The tensors of a .bin, mapped into memory; nothing but tensors is ever built.

    Refused from the names in its pickle, before torch is imported, which takes seconds; torch's own reader, which builds
    nothing but tensors either, has the last word.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            pickles = [member for member in members if member.filename.endswith(".pkl")]
            if not pickles or any(member.file_size > _MAX_DESCRIPTION for member in pickles):
                raise DraftlineError(
                    f"{path}: cannot be read: its pickle is absent or larger than {_MAX_DESCRIPTION:,} bytes."
                )
            if any(member.compress_type != zipfile.ZIP_STORED for member in members):
                raise DraftlineError(
                    f"{path}: cannot be read: it is compressed, which torch never writes. Save it again."
                )
            named = [name for member in pickles for name in _names_in_pickle(archive.read(member))]
    except (zipfile.BadZipFile, NotImplementedError, ValueError, EOFError, OSError) as error:
        if isinstance(error, PermissionError):
            raise
        raise DraftlineError(
            f"{path}: cannot be read: cut short, or in torch's format before 1.6. Save it again as safetensors."
        ) from None
    strange = [name for name in named if not _OF_TENSORS.fullmatch(name)]
    if strange:
        raise DraftlineError(
            f"{path}: refused: a pickle can run code, and beside tensors this one names {strange[0][:_MAX_NAME]!r}; none "
            f"was run. Ask for safetensors."
        )
    import torch

    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises many kinds; each means that the file holds more than tensors, or less
        raise DraftlineError(
            f"{path}: cannot be read as tensors alone: {str(error).splitlines()[0][:160]}. Ask for safetensors."
        ) from None
    if not isinstance(tensors, dict) or not all(
        isinstance(name, str) and isinstance(tensor, torch.Tensor) for name, tensor in tensors.items()
    ):
        raise DraftlineError(f"{path}: not a dictionary of tensors; save the draft's state_dict() alone.")
    return tensors


def _names_in_pickle(text: bytes) -> Iterator[str]:
    """Whatever a pickle would call, as 'module name', without calling it.

    Raises:
        ValueError: it is no pickle.
    """
    for operation, argument, _ in pickletools.genops(text):
        if operation.name in ("GLOBAL", "INST"):
            yield argument
        elif operation.name in ("STACK_GLOBAL", "EXT1", "EXT2", "EXT4"):
            yield operation.name  # torch.save writes none: a name that is only known when it runs


def _bin_headers(path: Path, size: int, tensors: dict[str, "torch.Tensor"]) -> dict[str, Header]:
    """Types and shapes; a tensor that repeats a few bytes with strides of 0 could have any size, and is refused."""
    import torch

    headers = {}
    for name, tensor in tensors.items():
        if str(tensor.dtype) not in _OF_TORCH or tensor.layout != torch.strided or tensor.device.type != "cpu":
            raise DraftlineError(
                f"{path}: cannot be read: tensor {name[:_MAX_NAME]} is no plain tensor ({tensor.dtype})."
            )
        headers[name] = Header(_OF_TORCH[str(tensor.dtype)], tuple(tensor.shape))
    # Tied weights are stored once and named twice.
    if sum(header.num_bytes for header in headers.values()) > 2 * size:
        raise DraftlineError(f"{path}: cannot be read: its tensors would be larger than the file, {size:,} bytes.")
    return headers


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object of somebody's file, of the size of a description.

    Raises:
        DraftlineError: it is absent, no regular file, too large, not JSON, or no object.
    """
    size = _size(path)
    if size > _MAX_DESCRIPTION:
        raise DraftlineError(f"{path}: {size:,} bytes; a draft's has at most {_MAX_DESCRIPTION:,}. Not read.")
    return _parse(path, path.read_bytes())


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise DraftlineError(f"{path}: cannot be read: not valid JSON ({error}).") from None
    if not isinstance(value, dict):
        raise DraftlineError(f"{path}: expected a JSON object, found {type(value).__name__}.")
    return value


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose names are distinct; of two with one name, readers differ in which one counts."""
    value: dict[str, Any] = {}
    for name, of_name in pairs:
        if name in value:
            raise ValueError(f"{name[:_MAX_NAME]!r} is there twice")
        value[name] = of_name
    return value


def _size(path: Path) -> int:
    """Bytes of a regular file, links followed (a hub's snapshot is made of links)."""
    try:
        found = path.stat()
    except FileNotFoundError:
        problem = "a link to nothing" if path.is_symlink() else "not there"
        raise DraftlineError(f"{path}: {problem}.") from None
    except OSError as error:
        raise DraftlineError(f"{path}: cannot be read: {error.strerror}.") from None
    if not stat.S_ISREG(found.st_mode):
        raise DraftlineError(f"{path}: not a regular file.")
    return found.st_size
