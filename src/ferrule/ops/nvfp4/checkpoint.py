"""A folder of safetensors: which tensors there are, what its configuration says of them, and
reading one at a time from the memory-mapped files. Nothing is unpickled."""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import torch

import ferrule

INDEX = "model.safetensors.index.json"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


class Tensor(NamedTuple):
    """What a file's header says of a tensor."""

    file: str
    dtype: str  # as safetensors has it: "U8", "F8_E4M3", "F32", "BF16"
    shape: tuple[int, ...]


class Checkpoint:
    """The tensors of a folder, or of one file, by their names.

    Attributes:
        path: of the folder or file.
        tensors: what there is.
        quantization: what the configuration says of it, or an empty dictionary.
        ignored: names and patterns of layers that are not quantized.
    """

    def __init__(self, path: Any) -> None:
        """Open the files and read their headers.

        Raises:
            KernelError: there are no safetensors, a file is truncated or something else, a file
                that the index names is missing, or two files have a tensor of the same name.
        """
        self.path = Path(path)
        self._opened: dict[str, Any] = {}
        self._stack = ExitStack()
        self.tensors: dict[str, Tensor] = {}
        folder = self.path if self.path.is_dir() else self.path.parent
        self.quantization = _quantization(folder) if self.path.is_dir() else {}
        self.ignored = _patterns(self.quantization)
        try:
            for file in _files(self.path):
                self._open(file)
        except BaseException:
            self._stack.close()
            raise

    def _open(self, file: Path) -> None:
        safe_open = _safetensors()
        try:
            opened = self._stack.enter_context(safe_open(file, framework="pt"))
        except Exception as error:
            raise ferrule.KernelError(f"[load] {file}: {_fault(file, error)}") from None
        self._opened[str(file)] = opened
        for name in opened.keys():  # noqa: SIM118, it is no dictionary
            if name in self.tensors:
                raise ferrule.KernelError(
                    f"[load] tensor {name!r} is in two files, {self.tensors[name].file} and "
                    f"{file}. Keep one of them, or add {INDEX}, which says which files belong to "
                    "the model."
                )
            part = opened.get_slice(name)
            self.tensors[name] = Tensor(str(file), part.get_dtype(), tuple(part.get_shape()))

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, *_: Any) -> None:
        self._stack.close()

    def read(self, name: str, device: Any = "cpu") -> Any:
        """A tensor of its own, on a device: the file may go afterwards."""
        tensor = self.mapped(name)
        moved = tensor.to(device)
        return moved.clone() if moved is tensor else moved

    def mapped(self, name: str) -> Any:
        """A tensor on the CPU as the file has it, to be copied from while this is open."""
        return self._opened[self.tensors[name].file].get_tensor(name)

    def size(self, name: str) -> int:
        """How many bytes a tensor has."""
        tensor, size = self.tensors[name], 1
        for extent in tensor.shape:
            size *= extent
        bits = re.search(r"\d+", tensor.dtype)
        return size * (int(bits[0]) if bits else 8) // 8

    def group_sizes(self) -> list[int]:
        """How many elements share a scale, by the configuration; empty where it does not say."""
        groups = (self.quantization.get("config_groups") or {}).values()
        places = [self.quantization, *((group.get("weights") or {}) for group in groups)]
        return [place["group_size"] for place in places if place.get("group_size")]

    def ignores(self, layer: str) -> bool:
        """Whether the configuration says that a layer is not quantized: by its name, by a pattern
        with ``*`` (ModelOpt), or after ``re:`` by a regular expression (compressed-tensors)."""
        return any(
            re.match(pattern[3:], layer)
            if pattern.startswith("re:")
            else fnmatchcase(layer, pattern)
            for pattern in self.ignored
        )


def _safetensors() -> Any:
    try:
        from safetensors import safe_open
    except ImportError:
        raise ferrule.KernelError(
            "[load] safetensors is not installed, which reads the files: pip install "
            "'ferrule[nvfp4]', or pip install safetensors."
        ) from None
    return safe_open


def _files(path: Path) -> list[Path]:
    """The files of safetensors that belong to a model."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise ferrule.KernelError(
            f"[load] {path} does not exist; expected a folder with safetensors. Models on a hub "
            "are downloaded first: huggingface_hub.snapshot_download."
        )
    index = path / INDEX
    if index.is_file():
        weight_map = _json(index).get("weight_map")
        if not (isinstance(weight_map, dict) and weight_map) or not all(
            isinstance(file, str) for file in weight_map.values()
        ):
            raise ferrule.KernelError(
                f"[load] {index} has no weight_map of names to files. Download it again."
            )
        named = sorted(set(weight_map.values()))
        for file in named:
            if not (path / file).is_file():
                raise ferrule.KernelError(
                    f"[load] {index} names the file {file}, which is missing, with the tensors "
                    f"{some(n for n, f in weight_map.items() if f == file)}. "
                    "Download it again."
                )
        return [path / file for file in named]
    files = sorted(path.glob("*.safetensors"))
    if files:
        return files
    pickled = sorted(file.name for file in path.iterdir() if file.suffix in _PICKLED)
    if pickled:
        raise ferrule.KernelError(
            f"[load] {path} has {some(pickled)} and no safetensors. Such files are pickles, which "
            "run code when they are read, and are not read here. Convert them to safetensors where "
            "you trust them."
        )
    raise ferrule.KernelError(f"[load] {path} has no file that ends in .safetensors.")


def _quantization(folder: Path) -> dict[str, Any]:
    """What the configuration files say of quantization; of several the first."""
    if (folder / "hf_quant_config.json").is_file():
        found = _json(folder / "hf_quant_config.json")
        return dict(found.get("quantization") or found)
    if (folder / "config.json").is_file():
        config = _json(folder / "config.json")
        for where in (config, config.get("text_config") or {}):
            for key in ("quantization_config", "compression_config"):
                if where.get(key):
                    found = where[key]
                    return {**found, **(found.get("quantization") or {})}
    return {}


def _patterns(quantization: dict[str, Any]) -> list[str]:
    """Names and patterns of layers that are not quantized.

    Raises:
        KernelError: one is no regular expression.
    """
    found = []
    for key in ("exclude_modules", "ignore"):
        given = quantization.get(key) or ()
        found += [given] if isinstance(given, str) else [str(each) for each in given]
    for pattern in found:
        if pattern.startswith("re:"):
            try:
                re.compile(pattern[3:])
            except re.error as error:
                raise ferrule.KernelError(
                    f"[load] the configuration ignores {pattern!r}, which is no regular "
                    f"expression: {error}. Correct the configuration."
                ) from None
    return found


def _json(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text("utf-8"))
    except (ValueError, OSError) as error:
        raise ferrule.KernelError(f"[load] {file} cannot be read as JSON: {error}.") from None
    if not isinstance(found, dict):
        raise ferrule.KernelError(f"[load] {file} is no JSON object.")
    return found


def _fault(file: Path, error: Exception) -> str:
    """What is wrong with a file that safetensors does not open: of a truncated one the first tensor
    that is not whole."""
    size = file.stat().st_size
    with file.open("rb") as stream:
        length, brace = int.from_bytes(stream.read(8), "little"), stream.read(1)
        if size <= 8 or (brace == b"{" and length > size - 8):
            return f"truncated in its header, at {size} bytes. Download it again."
        if brace == b"{":  # asked first: a length may begin as a pickle does
            name, end = _first_cut(brace + stream.read(length - 1), size)
            if name:
                return (
                    f"truncated: tensor {name!r} ends at byte {end}, and the file has {size}. "
                    "Download it again."
                )
        stream.seek(0)
        if stream.read(2).startswith((b"\x80", b"PK")):
            return (
                "is a pickle of torch.save, whatever its name says, and is not read: pickles run "
                "code. Convert it to safetensors where you trust it."
            )
    return f"is no file of safetensors: {error}."


def _first_cut(header: bytes, size: int) -> tuple[str, int]:
    """The tensor that ends behind the file, and where; of several the first."""
    try:
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        ends = {name: 8 + len(header) + entry["data_offsets"][1] for name, entry in entries.items()}
    except (ValueError, KeyError, TypeError, AttributeError):
        return "", 0
    cut = [(end, name) for name, end in ends.items() if end > size]
    return (min(cut)[1], min(cut)[0]) if cut else ("", 0)


def some(names: Any, most: int = 3) -> str:
    """The first names, and how many there are besides."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(str, names[:most])) + more


FLOATS = ("F32", "F16", "BF16", "F64")
DTYPES = {
    "U8": torch.uint8,
    "F8_E4M3": torch.float8_e4m3fn,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
}
