"""The format of MLX's ``.mlxfn`` files: read, with every length checked, and written.

A file is a version, a number of functions, whether they are shapeless, and metadata; a function is
keywords, inputs, outputs, and a tape: the operations in an order in which they can be run,
and constants. Of an operation there is a stream, the name of MLX's class, and its state, which says
nothing of its own make: a *layout* is a text per class, in letters of `struct` and

``s`` bytes, ``*x`` a list of x, ``ox`` x or nothing, ``(…)`` one after the other, ``D`` a dtype,
``V`` an int, float or bool, ``!`` what MLX cannot write.

Nothing here imports MLX, or runs anything.
"""

from __future__ import annotations

import functools
import io
import math
import struct
from collections.abc import Mapping, Sequence
from typing import Any, BinaryIO, NamedTuple

from ...errors import KernelError

Shape = tuple[int, ...]
CPU, GPU = 0, 1  # MLX's numbers of devices
DTYPES = {
    "bool": (0, 1), "uint8": (1, 1), "uint16": (2, 2), "uint32": (3, 4), "uint64": (4, 8),
    "int8": (5, 1), "int16": (6, 2), "int32": (7, 4), "int64": (8, 8), "float16": (9, 2),
    "float32": (10, 4), "float64": (11, 8), "bfloat16": (12, 2), "complex64": (13, 8),
}  # fmt: skip
_NAMES = {number: name for name, (number, _) in DTYPES.items()}
_MOST_DIMS, _MOST_ENTRIES, _MOST_BYTES = 64, 1 << 20, 1 << 28  # of a shape, a list, a text
_SIZES = {letter: struct.calcsize(f"<{letter}") for letter in "?bBhHiIqQfd"}
_LEAST = {**_SIZES, "s": 8, "*": 8, "o": 1, "D": 5, "V": 5, "!": 0}  # bytes


class Array(NamedTuple):
    """An array's dtype, by name, and its sizes."""

    dtype: str
    shape: Shape


class Constant(NamedTuple):
    """An array of which a file has the elements, row-major, from the byte ``offset``."""

    array: Array
    offset: int
    size: int


class Operation(NamedTuple):
    """One operation.

    Attributes:
        outputs: the ids of all that it makes.
        on_tape: which of these stands on the tape.
        inputs: ids.
        device: `CPU` or `GPU`.
        stream: MLX's number of it, -1 for none in particular.
        name: MLX's class.
        state: its bytes.
        arrays: one per output.
        alone: whether it can have one output alone.
    """

    outputs: tuple[int, ...]
    on_tape: int
    inputs: tuple[int, ...]
    device: int
    stream: int
    name: str
    state: bytes
    arrays: tuple[Array, ...]
    alone: bool


class Function(NamedTuple):
    """One function.

    Attributes:
        keywords: of its last inputs.
        inputs: id and array of each, positional ones first.
        outputs: ids.
        operations: in an order in which they can be run.
        constants: by id.
    """

    keywords: tuple[str, ...]
    inputs: tuple[tuple[int, Array], ...]
    outputs: tuple[int, ...]
    operations: tuple[Operation, ...]
    constants: Mapping[int, Constant]


class File(NamedTuple):
    """A file's content: the version of MLX that wrote it, and what it says; no metadata where that
    MLX has none in files."""

    version: str
    shapeless: bool
    metadata: str | None
    functions: tuple[Function, ...]


# -- reading -------------------------------------------------------------------------------------


class Damaged(Exception):
    """A fault of a file, and at which byte. Internal: `read` says which file."""


class Reader:
    """Reads values one after the other.

    Raises:
        Damaged: from every method: the bytes are none of what is asked for.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.at = file, 0
        self.size = file.seek(0, io.SEEK_END)
        file.seek(0)

    def damaged(self, fault: str, position: int | None = None) -> Damaged:
        return Damaged(f"at byte {self.at if position is None else position}: {fault}")

    def back(self, position: int) -> None:
        """Read from the byte ``position`` on."""
        self.file.seek(position)
        self.at = position

    def take(self, count: int, label: str) -> bytes:
        """The next ``count`` bytes."""
        data = self.file.read(count) if count <= self.size - self.at else b""
        if len(data) != count:
            left = self.size - self.at
            raise self.damaged(f"{label} takes {count} bytes, and {left} follow: it is cut off")
        self.at += count
        return data

    def skip(self, count: int, label: str) -> None:
        if count > self.size - self.at:
            self.take(count, label)
        self.back(self.at + count)

    def number(self, letter: str, label: str) -> Any:
        data = self.take(_SIZES[letter], label)
        if letter == "?" and data[0] > 1:
            raise self.damaged(f"{label} is neither true nor false", self.at - 1)
        return struct.unpack(f"<{letter}", data)[0]

    def count(self, entry_bytes: int, label: str, limit: int = _MOST_ENTRIES) -> int:
        """The length of a list whose entries take ``entry_bytes`` or more."""
        start = self.at
        count: int = self.number("Q", f"the number of {label}")
        if count * entry_bytes > self.size - self.at or count > limit:
            fault = f"there should be {count} {label}, for which there is no room"
            raise self.damaged(fault, start)
        return count

    def bytes(self, label: str) -> bytes:
        return self.take(self.count(1, f"bytes of {label}", _MOST_BYTES), label)

    def text(self, label: str) -> str:
        start = self.at
        try:
            return self.bytes(label).decode()
        except UnicodeDecodeError:
            raise self.damaged(f"{label} is no text", start) from None

    def ids(self, label: str) -> tuple[int, ...]:
        count = self.count(8, label)
        return struct.unpack(f"<{count}Q", self.take(8 * count, label))

    def shape(self, label: str) -> Shape:
        start = self.at
        count = self.count(4, f"dims of {label}", _MOST_DIMS)
        shape: Shape = struct.unpack(f"<{count}i", self.take(4 * count, label))
        if min(shape, default=0) < 0:
            raise self.damaged(f"{label} has the shape {shape}", start)
        return shape

    def dtype(self, label: str) -> str:
        start = self.at
        number, size = self.number("i", label), self.number("B", label)
        name = _NAMES.get(number)
        if name is None or DTYPES[name][1] != size:
            shown = f"{label} has the dtype {number} of {size} bytes, which MLX has not"
            raise self.damaged(shown, start)
        return name

    def array(self, label: str) -> Array:
        shape = self.shape(label)
        return Array(self.dtype(label), shape)

    def value(self, layout: str, label: str) -> Any:
        """A value of this layout."""
        return self._value(_parsed(layout), label) if layout else None

    def _value(self, layout: Any, label: str) -> Any:
        kind, *parts = layout
        if kind == "(":
            return tuple([self._value(part, label) for part in parts])
        if kind == "*":
            count = self.count(max(_least(parts[0]), 1), f"entries of {label}")
            return [self._value(parts[0], label) for _ in range(count)]
        if kind == "o":
            return self._value(parts[0], label) if self.number("?", label) else None
        if kind == "V":
            number = self.number("i", label)
            if number not in (0, 1, 2):
                raise self.damaged(f"{label} has a value of kind {number}")
            return self.number("if?"[number], label)
        if kind == "D":
            return self.dtype(label)
        if kind == "s":
            return self.bytes(label)
        if kind == "!":
            raise self.damaged(f"{label} has a state that MLX does not write")
        return self.number(kind, label)


@functools.cache
def _parsed(layout: str) -> Any:
    """A layout as a letter, ``("*", part)``, ``("o", part)``, or ``("(", part, …)``."""
    letters = iter(layout)

    def following() -> Any:
        letter = next(letters)
        if letter == "(":
            return (letter, *iter(following, ")"))
        return (letter, following()) if letter in "*o" else letter

    return following()


def _least(layout: Any) -> int:
    """The fewest bytes of a value."""
    kind, *parts = layout
    return sum(map(_least, parts)) if kind == "(" else _LEAST[kind]


def read(path: str, file: BinaryIO, layouts: Mapping[str, str], version: str) -> File:
    """A file's content.

    Args:
        path: what messages call the file.
        file: from its beginning.
        layouts: of MLX's classes, and ``"metadata"`` where this MLX's files have some.
        version: of this MLX.

    Raises:
        KernelError: the file is cut off, damaged, or laid out as by another MLX; says where.
    """
    reader = Reader(file)
    writer = ""
    try:
        writer = reader.text("the version")
        if len(writer) > 100 or not writer.isprintable():
            raise Damaged("it begins with no version of MLX")
        count = reader.number("i", "the number of functions")
        if count < 0:
            raise reader.damaged(f"it should have {count} functions")
        shapeless = reader.number("?", "the mark of shapeless functions")
        metadata = reader.text("the metadata") if "metadata" in layouts else None
        constants: dict[int, Constant] = {}
        functions = []
        for _ in range(count):
            functions.append(_function(reader, layouts, constants))
        if reader.at != reader.size:
            raise reader.damaged(f"{reader.size - reader.at} bytes follow the last function")
    except Damaged as damage:
        other = (
            f" It was written by MLX {writer}, and this is MLX {version}, which may lay out files "
            "in another way: import it with that version, or export it again."
            if writer and writer.isprintable() and writer != version and len(writer) < 100
            else " Export the function again."
        )
        raise KernelError(
            f"[import_function] {path!r} is no file of mx.export_function, or damaged: {damage}."
            + other
        ) from None
    return File(writer, shapeless, metadata, tuple(functions))


def _function(
    reader: Reader, layouts: Mapping[str, str], constants: dict[int, Constant]
) -> Function:
    keywords = tuple([reader.text("a keyword") for _ in range(reader.count(8, "keywords"))])
    ids = reader.ids("inputs")
    count = reader.count(13, "inputs")
    if count != len(ids) or len(set(ids)) != len(ids) or len(keywords) > len(ids):
        raise reader.damaged(f"{len(ids)} inputs, {count} shapes of them, {len(keywords)} keywords")
    inputs = [(i, reader.array("an input")) for i in ids]
    outputs = reader.ids("outputs")
    defined = set(ids)
    own_constants: dict[int, Constant] = {}
    operations: list[Operation] = []
    for _ in range(reader.count(9, "entries of the tape", _MOST_BYTES)):
        start = reader.at
        i = reader.number("Q", "an id")
        if reader.number("?", "the mark of operations"):
            operation = _operation(reader, i, layouts)
            unknown = [j for j in operation.inputs if j not in defined]
            if unknown:
                raise reader.damaged(f"{operation.name} takes what was not made before it", start)
            if defined.intersection(operation.outputs):
                raise reader.damaged(f"{operation.name} makes what is there already", start)
            defined.update(operation.outputs)
            operations.append(operation)
        elif reader.number("?", "the mark of constants"):
            if i not in constants:  # an earlier function may have it
                array = reader.array("a constant")
                size = DTYPES[array.dtype][1] * math.prod(array.shape)
                constants[i] = Constant(array, reader.at, size)
                reader.skip(size, f"a constant of shape {array.shape}")
            own_constants[i] = constants[i]
            defined.add(i)
        elif i not in defined:
            raise reader.damaged("the tape has an input that the function has not", start)
    for i in outputs:
        if i not in defined:
            raise reader.damaged("an output is nothing that is made")
    return Function(keywords, tuple(inputs), outputs, tuple(operations), own_constants)


def _operation(reader: Reader, on_tape: int, layouts: Mapping[str, str]) -> Operation:
    inputs = reader.ids("inputs of an operation")
    stream = reader.number("i", "a stream")
    device = reader.number("i", "a stream's device")
    reader.number("i", "a stream's device")
    if device not in (CPU, GPU):
        raise reader.damaged(f"an operation is on device {device}")
    at = reader.at
    name = reader.text("the name of an operation")
    layout = layouts.get(name)
    if layout is None:
        shown = name if len(name) < 60 else name[:57] + "..."
        raise reader.damaged(f"{shown!r} is no operation of this MLX", at)
    start = reader.at
    reader.value(layout, f"the state of {name}")
    end = reader.at
    reader.back(start)
    state = reader.take(end - start, "a state")
    siblings = reader.number("Q", "the number of siblings")
    if siblings == 0:
        return Operation((on_tape,), on_tape, inputs, device, stream, name, state, (
            reader.array(f"an output of {name}"),
        ), True)  # fmt: skip
    ids = reader.ids(f"outputs of {name}")
    shapes = [reader.shape(f"an output of {name}") for _ in range(reader.count(8, "shapes"))]
    dtypes = [reader.dtype(f"an output of {name}") for _ in range(reader.count(5, "dtypes"))]
    fits = len(ids) == len(shapes) == len(dtypes) == siblings + 1
    if not fits or on_tape not in ids or len(set(ids)) != len(ids):
        raise reader.damaged(f"the outputs of {name} do not fit together")
    arrays = tuple(map(Array, dtypes, shapes))
    return Operation(ids, on_tape, inputs, device, stream, name, state, arrays, False)


def state_of(operation: Operation, layouts: Mapping[str, str]) -> Any:
    """The state of an operation, as values of its layout."""
    return Reader(io.BytesIO(operation.state)).value(layouts[operation.name], operation.name)


# -- writing -------------------------------------------------------------------------------------


def write(file: File) -> bytes:
    """The reverse of `read`, for functions without constants."""
    out = [_text(file.version), struct.pack("<i?", len(file.functions), file.shapeless)]
    if file.metadata is not None:
        out.append(_text(file.metadata))
    for function in file.functions:
        out += [_count(function.keywords), *map(_text, function.keywords)]
        ids = [i for i, _ in function.inputs]
        out += [_list("Q", ids), _count(ids)]
        for _, array in function.inputs:
            out += [_list("i", array.shape), _dtype(array.dtype)]
        out += [
            _list("Q", function.outputs),
            struct.pack("<Q", len(ids) + len(function.operations)),
        ]
        out += [struct.pack("<Q??", i, False, False) for i in ids]
        for operation in function.operations:
            out.append(_operation_bytes(operation))
    return b"".join(out)


def _operation_bytes(operation: Operation) -> bytes:
    out = [
        struct.pack("<Q?", operation.on_tape, True),
        _list("Q", operation.inputs),
        struct.pack("<iii", operation.stream, operation.device, 0),
        _text(operation.name),
        operation.state,
        struct.pack("<Q", 0 if operation.alone else len(operation.outputs) - 1),
    ]
    shapes = [_list("i", array.shape) for array in operation.arrays]
    dtypes = [_dtype(array.dtype) for array in operation.arrays]
    if not operation.alone:
        out.append(_list("Q", operation.outputs))
        shapes.insert(0, _count(shapes))
        dtypes.insert(0, _count(dtypes))
    return b"".join([*out, *shapes, *dtypes])


def _count(values: Sequence[object]) -> bytes:
    return struct.pack("<Q", len(values))


def _text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def _list(letter: str, values: Sequence[int]) -> bytes:
    return struct.pack(f"<Q{len(values)}{letter}", len(values), *values)


def _dtype(name: str) -> bytes:
    return struct.pack("<iB", *DTYPES[name])
