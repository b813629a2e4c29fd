"""A draft's folder as bytes: its config and the headers of its weights, whatever tool wrote them.

Reads .safetensors and .bin, a single file or an index. The files may be anybody's: sizes are checked before anything
is read, a pickle is read by torch's weights-only reader, which executes nothing, and what cannot be read is one sentence.
"""

import json
import stat
import zipfile
from dataclasses import dataclass, field
from functools import cached_property
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tasks.common.errors import DraftlineError

if TYPE_CHECKING:
    import torch

CONFIG = "config.json"
# A config has a few kilobytes, an index or a header of a draft a few more; larger is no draft's.
_MAX_JSON, _MAX_HEADER, _MAX_PICKLE = 8 * 2**20, 16 * 2**20, 16 * 2**20
_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2, "F8_E4M3": 1, "F8_E5M2": 1, "I8": 1}
_BYTES |= {"U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1}
_OF_TORCH = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "bool": "BOOL", "uint8": "U8"}
_OF_TORCH |= {"int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8"}
_OF_TORCH |= {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2"}


class Header(NamedTuple):
    """Of a stored tensor: safetensors' name of the type ('BF16'), and its shape."""

    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


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
    _opened: dict[Path, Any] = field(default_factory=dict, repr=False)

    @classmethod
    def open(cls, folder: Path) -> "DraftFiles":
        """Read config and headers.

        Raises:
            DraftlineError: config or weights are absent, unreadable or hostile; names the file.
        """
        config = read_config(folder)
        opened: dict[Path, Any] = {}
        headers: dict[str, Header] = {}
        files: dict[str, Path] = {}
        for path in _weight_files(folder):
            for name, header in _headers(path, opened).items():
                if name in files:
                    raise DraftlineError(f"{path}: tensor {name} is in {files[name].name} too; which one counts?")
                headers[name], files[name] = header, path
        return cls(folder, config, headers, files, opened)

    @cached_property
    def paths(self) -> list[Path]:
        """Weight files, each once."""
        return list(dict.fromkeys(self.files.values()))

    def read(self, name: str) -> "torch.Tensor":
        """One tensor as stored; a .bin is mapped, not copied."""
        path = self.files[name]
        if path.suffix == ".bin":
            return self._opened[path][name]
        from safetensors import safe_open

        if path not in self._opened:
            self._opened[path] = safe_open(path, framework="pt")
        return self._opened[path].get_tensor(name)


def read_config(folder: Path) -> dict[str, Any]:
    """config.json of a draft or of a target.

    Raises:
        DraftlineError: the folder or the file cannot be read, or is not a JSON object.
    """
    try:
        if folder.exists() and not folder.is_dir():
            raise DraftlineError(f"{folder}: not a folder.")
        return _read_json(folder / CONFIG)
    except PermissionError:
        raise DraftlineError(f"{folder}: no permission to read it. Run as its owner, or chmod it.") from None


def _weight_files(folder: Path) -> list[Path]:
    """The files that SGLang would load: safetensors before .bin, an index's files in its order."""
    for suffix in (".safetensors", ".bin"):
        index = next(iter(sorted(folder.glob(f"*{suffix}.index.json"))), None)
        if index is not None:
            return _files_of_index(index)
        found = sorted(path for path in folder.glob(f"*{suffix}") if not path.name.startswith("."))
        if found:
            return found
    raise DraftlineError(
        f"{folder}: no weights: *.safetensors or *.bin are not there; the server would start with random weights."
    )


def _files_of_index(index: Path) -> list[Path]:
    weight_map = _read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise DraftlineError(f"{index}: no weight_map of tensor names to file names.")
    names = list(dict.fromkeys(weight_map.values()))
    outside = [name for name in names if Path(name).name != name]
    if outside:
        raise DraftlineError(f"{index}: names {outside[0]!r}, which is not a file of this folder.")
    return [index.parent / name for name in names]


def _headers(path: Path, opened: dict[Path, Any]) -> dict[str, Header]:
    size = _size(path)
    try:
        if path.suffix == ".safetensors":
            return _safetensors_headers(path, size)
        opened[path] = _load_bin(path)
    except PermissionError:
        raise DraftlineError(f"{path}: no permission to read it. Run as its owner, or chmod it.") from None
    return {
        name: Header(_OF_TORCH.get(str(tensor.dtype).removeprefix("torch."), str(tensor.dtype)), tuple(tensor.shape))
        for name, tensor in opened[path].items()
    }


def _safetensors_headers(path: Path, size: int) -> dict[str, Header]:
    """Names, types and shapes from the header alone; every tensor's bytes must lie within the file."""
    with open(path, "rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > size - 8 or length > _MAX_HEADER:
            raise DraftlineError(
                f"{path}: cannot be read: its header claims {length:,} bytes, the file has {size:,} "
                f"(a header has at most {_MAX_HEADER:,}). It is cut short or not safetensors; copy it again."
            )
        described = _parse(path, file.read(length))
    headers = {}
    for name, tensor in described.items():
        if name == "__metadata__":
            continue
        try:
            header = Header(tensor["dtype"], tuple(map(int, tensor["shape"])))
            start, end = map(int, tensor["data_offsets"])
        except (KeyError, TypeError, ValueError):
            raise DraftlineError(f"{path}: cannot be read: no dtype, shape and offsets for tensor {name}.") from None
        if not 0 <= start <= end <= size - 8 - length:
            raise DraftlineError(
                f"{path}: cannot be read: tensor {name} ends at byte {8 + length + end:,}, the file has {size:,}. "
                f"It was cut short; copy it again."
            )
        if end - start != prod(header.shape) * _BYTES.get(header.dtype, 0):
            raise DraftlineError(f"{path}: cannot be read: tensor {name} is {header} in {end - start:,} bytes.")
        headers[name] = header
    return headers


def _load_bin(path: Path) -> dict[str, "torch.Tensor"]:
    """The tensors of a .bin, mapped into memory; nothing but tensors is ever built."""
    if not zipfile.is_zipfile(path):
        raise DraftlineError(
            f"{path}: cannot be read: cut short, or in torch's format before 1.6. Save it again as safetensors."
        )
    with zipfile.ZipFile(path) as archive:
        large = [entry for entry in archive.infolist() if entry.filename.endswith(".pkl")]
        if not large or any(entry.file_size > _MAX_PICKLE for entry in large):
            raise DraftlineError(f"{path}: cannot be read: its pickle is absent or larger than {_MAX_PICKLE:,} bytes.")
    import torch

    try:
        tensors = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:  # torch raises many kinds; each means that the file holds more than tensors, or less
        raise DraftlineError(
            f"{path}: refused: it does not hold tensors alone, and a pickle can run code (none was run): "
            f"{str(error).splitlines()[0][:160]}. Ask for safetensors."
        ) from None
    if not isinstance(tensors, dict) or not all(isinstance(tensor, torch.Tensor) for tensor in tensors.values()):
        raise DraftlineError(f"{path}: not a dictionary of tensors; save the draft's state_dict() alone.")
    return tensors


def _read_json(path: Path) -> dict[str, Any]:
    size = _size(path)
    if size > _MAX_JSON:
        raise DraftlineError(f"{path}: {size:,} bytes; a draft's has at most {_MAX_JSON:,}. Not read.")
    return _parse(path, path.read_bytes())


def _parse(path: Path, text: bytes) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise DraftlineError(f"{path}: cannot be read: not valid JSON ({error}).") from None
    if not isinstance(value, dict):
        raise DraftlineError(f"{path}: expected a JSON object, found {type(value).__name__}.")
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
