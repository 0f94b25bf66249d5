"""Checks of a call's arguments. Each error names the kernel, the argument, the value and the rule.

The first lines of each check let the usual value pass at little cost; what follows is for others.
Messages begin with MLX's own sentence where MLX has one.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np

from .. import dtypes
from ..dtypes import Dtype
from ..errors import DeviceError, FerruleError, KernelError, KernelTypeError
from ..hosts import protocol as hosts
from ..hosts.protocol import Host
from ..kernel import Kernel
from ..spec import (
    CUDA_RANK,
    MAX_THREADS,
    MOST_BLOCKS,
    MOST_DEEP,
    Facts,
    Shape,
    clamped,
    is_row_contiguous,
    row_contiguous_strides,
    with_threads,
)

INT32 = 2**31
MAX_BYTES = 2**63 - 1
BAD_TEMPLATE = "Invalid template argument. Must be `mlx.core.Dtype`, `int` or `bool`."
_DESCRIBED = re.compile(r"\s*(\w+)\s*(?:\[([\d,\s]*)\])?\s*", re.ASCII)
_seen: dict[object, Dtype] = {}  # dtypes of any library seen so far


def shown(value: object) -> str:
    """``value`` for a message: its repr, or its type and shape where it is an array."""
    kind = type(value)
    if hosts.find(kind) is not None:
        shape = getattr(value, "shape", ())
        return f"a {kind.__module__}.{kind.__qualname__} of shape {tuple(shape)}"
    try:
        text = repr(value)
    except Exception:  # a message must not fail over a value's repr
        text = f"a {kind.__module__}.{kind.__qualname__}"
    return text if len(text) <= 80 else text[:77] + "..."


def label_of(kernel: Kernel, argument: str) -> str:
    """How messages call an argument."""
    return f"{kernel.tag} `{argument}` of kernel {kernel.name!r}"


def input_label(kernel: Kernel, index: int) -> str:
    """How messages call an input."""
    return f"{kernel.tag} input {kernel.input_names[index]!r} of kernel {kernel.name!r}"


def output_label(kernel: Kernel, argument: str, index: int) -> str:
    """How messages call an entry of ``output_shapes`` or ``output_dtypes``."""
    return f"{label_of(kernel, argument)} for output {kernel.output_names[index]!r}"


def renamed(error: FerruleError, label: str) -> FerruleError:
    """A host's error, which tells what is wrong, with the argument that it is wrong with."""
    return type(error)(f"{label} {error}")


def wrong_type(label: str, value: object, expected: str) -> KernelTypeError:
    """The error for an argument of a wrong type."""
    return KernelTypeError(
        f"{label}: got {shown(value)} of type {type(value).__name__}, expected {expected}."
    )


def mixed(kernel: Kernel, first: int, had: str, second: int, has: str, kinds: str) -> KernelError:
    """The error for two libraries or devices in one call."""
    names = kernel.input_names
    return KernelError(
        f"{kernel.tag} kernel {kernel.name!r} got arrays of two {kinds}: input {names[first]!r} is "
        f"{had}, input {names[second]!r} is {has}; convert one of them."
    )


def listed(kernel: Kernel, argument: str, value: object, names: tuple[str, ...]) -> list[Any]:
    """The entries of an argument that has one per name."""
    if type(value) is not list and type(value) is not tuple:
        if isinstance(value, Mapping):
            raise KernelTypeError(
                f"{label_of(kernel, argument)}: got a dictionary, expected a list, because the "
                "kernel was made with `input_names` and `output_names`."
                + (" Leave both out to call it with dictionaries." * (kernel.language == "metal"))
            )
        if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
            label = label_of(kernel, argument)
            wrong = wrong_type(label, value, f"a list of {len(names)} entries")
            if hosts.find(type(value)) is None:
                raise wrong
            raise KernelError(str(wrong))  # MLX takes an array for a list, and counts its rows
    entries: list[Any] = list(value)
    if len(entries) != len(names):
        raise KernelError(
            f"{kernel.tag} Expected `{argument}` to have size {len(names)} but got size "
            f"{len(entries)}. Kernel {kernel.name!r} wants one entry for each of: "
            f"{', '.join(names) or '(none)'}."
        )
    return entries


def integers(label: str, value: object, expected: str) -> tuple[int, ...]:
    """``value`` as a tuple of ints, for what is no tuple of ints."""
    if isinstance(value, (str, bytes, Mapping)) or not hasattr(value, "__len__"):
        raise wrong_type(label, value, expected)
    try:
        entries = list(value)  # type: ignore[call-overload]
    except TypeError:  # a 0-d array has a length, too
        raise wrong_type(label, value, expected) from None
    sizes = []
    for entry in entries:
        if isinstance(entry, (bool, np.bool_)):
            raise wrong_type(label, value, expected)
        try:
            sizes.append(operator.index(entry))
        except TypeError:
            raise wrong_type(label, value, expected) from None
    return tuple(sizes)


def axes(kernel: Kernel, argument: str, value: object, least: int) -> tuple[int, int, int]:
    """``grid`` or ``threadgroup``: three int32, none below ``least``."""
    if type(value) is tuple and len(value) == 3:
        x, y, z = value
        if (
            type(x) is int
            and type(y) is int
            and type(z) is int
            and least <= x < INT32
            and least <= y < INT32
            and least <= z < INT32
        ):
            return value
    label = label_of(kernel, argument)
    expected = f"three integers from {least} to {INT32 - 1}"
    sizes = integers(label, value, expected)
    if len(sizes) != 3 or not all(-INT32 <= size < INT32 for size in sizes):
        raise wrong_type(label, value, expected)
    if min(sizes) < least:
        raise KernelError(f"{label}: got {sizes}, expected {expected}.")
    return sizes[0], sizes[1], sizes[2]


def threadgroup_axes(
    kernel: Kernel, value: object, grid: tuple[int, int, int] | None
) -> tuple[int, int, int]:
    """``threadgroup``: three int32 with a product of 1024 at most, positive where threads run."""
    empty = grid is not None and 0 in grid
    group = axes(kernel, "threadgroup", value, 0 if empty else 1)
    if grid is not None:
        group = with_threads(group, grid)
    x, y, z = group
    if kernel.language == "cuda":
        if grid is not None and not empty:
            _check_blocks(kernel, group, grid)
    elif x * y * z > MAX_THREADS:
        raise KernelError(
            f"{label_of(kernel, 'threadgroup')}: got {group}, which is "
            f"{x * y * z} threads; at most {MAX_THREADS} are allowed."
        )
    return group


def _check_blocks(kernel: Kernel, group: tuple[int, int, int], grid: tuple[int, int, int]) -> None:
    """Refuse blocks that CUDA does not launch; a Metal body's can be arranged otherwise."""
    x, y, z = block = clamped(group, grid)
    if x * y * z > MAX_THREADS or z > MOST_DEEP:
        raise KernelError(
            f"{label_of(kernel, 'threadgroup')}: got {group} for the grid {grid}, which makes "
            f"blocks of {block} threads; at most {MAX_THREADS} are allowed, and {MOST_DEEP} along "
            "z."
        )
    for axis in (1, 2):
        blocks = -(-grid[axis] // block[axis])
        if blocks > MOST_BLOCKS:
            raise KernelError(
                f"{label_of(kernel, 'grid')}: got {grid}, which is {blocks} blocks along "
                f"{'xyz'[axis]} with the threadgroup {group}; CUDA allows {MOST_BLOCKS}. Put the "
                "long axis first."
            )


def check_empty(kernel: Kernel, grid: tuple[int, int, int], shapes: Sequence[Shape]) -> None:
    """Refuse a grid of no threads where an output has elements to write."""
    for name, shape in zip(kernel.output_names, shapes, strict=True):
        if 0 not in shape:
            raise KernelError(
                f"{label_of(kernel, 'grid')}: got {grid}, which runs no "
                f"thread, but output {name!r} of shape {shape} is not empty; expected three "
                "positive integers."
            )


def output_shape(kernel: Kernel, index: int, value: object, dtype: Dtype) -> Shape:
    """One entry of ``output_shapes``."""
    usual = type(value) is tuple
    size = dtype.itemsize
    if usual:
        for dim in value:  # type: ignore[attr-defined]
            if type(dim) is not int or dim < 0:
                usual = False
                break
            size *= dim
        if usual and size <= MAX_BYTES:
            return value  # type: ignore[return-value]
    label = output_label(kernel, "output_shapes", index)
    expected = "a sequence of non-negative integers"
    shape = integers(label, value, expected)
    if shape and min(shape) < 0:
        raise KernelError(f"{label}: got {shape}, expected {expected}.")
    size = dtype.itemsize * math.prod(shape)
    if size > MAX_BYTES:
        raise KernelError(
            f"{label}: got {shape}, which is {size} bytes of {dtype.name}; at most "
            f"{MAX_BYTES} are allowed."
        )
    return shape


def find_dtype(value: Any) -> Dtype | None:
    """`dtypes.find`, which remembers what it found."""
    try:
        return _seen[value]
    except (KeyError, TypeError):
        dtype = dtypes.find(value)
        if dtype is not None:
            _seen[value] = dtype
        return dtype


def output_dtype(kernel: Kernel, index: int, value: object) -> Dtype:
    """One entry of ``output_dtypes``."""
    dtype = dtypes.BY_NAME.get(value) if isinstance(value, str) else find_dtype(value)
    if dtype is None:
        raise wrong_type(
            output_label(kernel, "output_dtypes", index),
            value,
            f"a dtype of NumPy, torch or MLX, or its name, one of {dtypes.LEVEL0_NAMES}",
        )
    if not dtype.level0:
        why, instead = _refused(dtype)
        raise KernelError(
            f"{output_label(kernel, 'output_dtypes', index)}: {dtype.name} {why}, so no "
            f"{kernel.language}_kernel takes it; expected another, such as {instead}."
        )
    return dtype


def _refused(dtype: Dtype) -> tuple[str, str]:
    """Why no level-0 call takes ``dtype``, and what to give instead."""
    if dtype in dtypes.FLOAT8:
        return "is a type that neither Metal nor MLX has", "uint8"
    return "is not supported on the GPU", "float32"


def scalar(kernel: Kernel, index: int, value: object) -> tuple[Facts, object]:
    """The facts of an input that is no array, and what owns its bytes."""
    try:
        described = hosts.scalar(value)
    except FerruleError as error:
        raise renamed(error, input_label(kernel, index)) from error
    if described is not None:
        check_input(kernel, index, described[0])
        return described
    expected = "a NumPy, torch or MLX array, or a Python or NumPy number"
    wrong = wrong_type(input_label(kernel, index), value, expected)
    if value is None or isinstance(value, type):
        raise wrong
    raise KernelError(str(wrong))  # MLX raises a ValueError for a list or a str


def check_input(kernel: Kernel, index: int, facts: Facts) -> None:
    """Refuse what no level-0 call takes, and sizes and ranks that a body reads and cannot."""
    dtype = facts.dtype
    if not dtype.level0:
        why, instead = _refused(dtype)
        hint = f"cast the array to another dtype, such as {instead}"
        if dtype in dtypes.FLOAT8:
            hint = f"give its bytes, such as x.view(torch.{instead}) or x.view(np.{instead})"
        raise KernelError(
            f"{input_label(kernel, index)}: {dtype.name} {why}, so no {kernel.language}_kernel "
            f"takes it; {hint}."
        )
    name = kernel.input_names[index]
    if kernel.language == "cuda" and len(facts.shape) > CUDA_RANK and any(kernel.wants(name)[:2]):
        raise KernelError(
            f"{input_label(kernel, index)}: got the shape {facts.shape} of {len(facts.shape)} "
            f"dims, but the body reads its shape or strides, which hold {CUDA_RANK}; reshape it."
        )
    if kernel.wants(name)[0] and facts.shape and max(facts.shape) >= INT32:
        raise KernelError(
            f"{input_label(kernel, index)}: got the shape {facts.shape}, but the "
            f"body reads {name}_shape, whose sizes are int32: at most {INT32 - 1}."
        )


def gather(
    kernel: Kernel, inputs: list[Any], wants: tuple[bool, ...]
) -> tuple[Host | None, str, list[Facts], list[Any], tuple[int, ...], list[object]]:
    """The facts of a call's inputs, copied where a kernel cannot take them as they lie.

    Returns:
        The host of the arrays and their device (None and ``""`` where there is no array), the
        facts of all inputs, the arrays that were given, the indices of those that were copied, and
        the objects that own the memory of copies and scalars.
    """
    host: Host | None = None
    device = ""
    first = 0
    facts: list[Facts] = []
    arrays: list[Any] = []
    owners: list[object] = []
    copies: tuple[int, ...] = ()
    for i, value in enumerate(inputs):
        library = hosts.known.get(type(value)) or hosts.find(type(value))
        if library is None:
            fact, owner = scalar(kernel, i, value)
            facts.append(fact)
            owners.append(owner)
            continue
        if host is None:
            host, first = library, i
        elif library is not host:
            raise mixed(kernel, first, host.name, i, library.name, "libraries")
        try:
            array = library.facts(value)
            if array is None or (
                kernel.ensure_row_contiguous and not is_row_contiguous(array.shape, array.strides)
            ):
                copy = library.contiguous(value)
                array = cast(Facts, library.facts(copy))
                owners.append(copy)
                copies += (i,)
        except FerruleError as error:
            for j, other in enumerate(inputs[i + 1 :], i + 1):  # why it was asked to run now
                other_library = hosts.find(type(other))
                if other_library is not None and other_library is not library:
                    raise mixed(
                        kernel, i, library.name, j, other_library.name, "libraries"
                    ) from None
            raise renamed(error, input_label(kernel, i)) from error
        if not array.dtype.level0 or wants[i]:
            check_input(kernel, i, array)
        if not device:
            device = array.device
        elif array.device != device:
            raise mixed(kernel, first, f"on {device}", i, f"on {array.device}", "devices")
        facts.append(array)
        arrays.append(value)
    return host, device, facts, arrays, copies, owners


def needs_cuda(kernel: Kernel, host: str, device: str, remedy: str = "") -> DeviceError:
    """The error for a call of a CUDA body with arrays that are not on an NVIDIA GPU."""
    if not remedy and host == "MLX":
        remedy = "Install MLX's CUDA build (pip install 'mlx[cuda13]')"
    where = remedy or 'Give torch tensors on a CUDA device, such as x.to("cuda")'
    return DeviceError(
        f"{kernel.tag} kernel {kernel.name!r} is written in CUDA C++, which runs on NVIDIA GPUs "
        f"alone, but was called with {host} arrays on {device!r}. {where}, or write the body for "
        "ferrule.metal_kernel, which runs on any machine."
    )


def no_text(kernel: Kernel, device: str) -> DeviceError:
    """The error for asking what a CUDA body becomes elsewhere."""
    return DeviceError(
        f"{kernel.tag} kernel {kernel.name!r} is written in CUDA C++ and has no text for "
        f"{device!r}; expected 'cuda' or an architecture such as 'sm_90'."
    )


def template_value(kernel: Kernel, name: object, value: object) -> int | bool | Dtype:
    """The value of a template parameter."""
    kind = type(value)
    where = f"`template` of kernel {kernel.name!r}: {name}"
    if kind is bool or kind is int:
        number: int = value  # type: ignore[assignment]
        if -INT32 <= number < INT32:
            return number
        raise KernelError(
            f"{kernel.tag} {BAD_TEMPLATE} {where} is {number}, expected an int from {-INT32} to "
            f"{INT32 - 1}."
        )
    dtype = find_dtype(value)
    if dtype is None:
        hint = "give int(x)" if hasattr(value, "dtype") else "NumPy and torch dtypes do as well"
        raise KernelError(
            f"{kernel.tag} {BAD_TEMPLATE} {where} is {shown(value)} of type {kind.__name__}; "
            f"{hint}."
        )
    if not dtype.level0:
        why, instead = _refused(dtype)
        raise KernelError(
            f"{kernel.tag} {where} is {dtype.name}, which {why}; expected another dtype, such as "
            f"{instead}."
        )
    return dtype


def number(kernel: Kernel, value: object) -> float:
    """``init_value`` as a Python bool, int or float."""
    if type(value) is float or type(value) is int or type(value) is bool:
        return value
    plain = value
    if getattr(value, "shape", None) == () and hasattr(value, "item"):
        plain = value.item()
    if not isinstance(plain, (bool, int, float)):
        raise wrong_type(label_of(kernel, "init_value"), value, "a number or None")
    return plain


def fill_value(kernel: Kernel, index: int, value: float, dtype: Dtype) -> float:
    """``init_value`` as an element of ``dtype``, as a cast has it: truncated for integers."""
    label = f"{output_label(kernel, 'init_value', index)} of dtype {dtype.name}"
    if dtype.kind == "b":
        return bool(value)
    if dtype.kind in "iu":
        limits = np.iinfo(dtype.numpy)
        low, high = int(limits.min), int(limits.max)
        if not math.isfinite(value) or not low <= int(value) <= high:
            raise KernelError(f"{label}: got {value!r}, expected a number from {low} to {high}.")
        return int(value)
    try:
        with np.errstate(over="ignore"):
            number = np.float32(value)  # MLX takes a C float
            # What is too large for a smaller one is infinite in every library.
            return float(number.astype(dtype.numpy) if dtype.kind == "f" else number)
    except OverflowError:
        raise wrong_type(label, value, "a number that a float can hold") from None


def describe(kernel: Kernel, index: int, value: Any) -> Facts:
    """The facts of an input that is described: an array, a pair, a string or a scalar."""
    label = input_label(kernel, index)
    if isinstance(value, str):
        match = _DESCRIBED.fullmatch(value)
        dtype = dtypes.BY_NAME.get(match[1]) if match else None
        sizes = re.findall(r"\d+", match[2] or "") if match else []
        shape = tuple(int(size) for size in sizes)
        if dtype is None:
            raise KernelError(
                f"{label}: got {shown(value)}, expected a dtype and a shape such "
                f'as "float16[4,16]", with one of the dtypes {dtypes.LEVEL0_NAMES}.'
            )
    elif isinstance(value, (tuple, list)):
        expected = "a pair such as ((4, 16), np.float16)"
        if len(value) != 2:
            raise wrong_type(label, value, expected)
        shape = integers(label, value[0], expected)
        dtype = find_dtype(value[1])
        if dtype is None:
            raise wrong_type(label, value[1], "a dtype of NumPy, torch or MLX")
    elif hosts.find(type(value)) is not None:
        shape = tuple(value.shape)
        dtype = find_dtype(value.dtype)
        if dtype is None:
            raise renamed(hosts.unknown_dtype(value.dtype), label)
    else:
        return scalar(kernel, index, value)[0]
    if shape and min(shape) < 0:
        raise KernelError(f"{label}: got the shape {shape}, which has no meaning.")
    facts = Facts(dtype, shape, row_contiguous_strides(shape), 0, "")
    check_input(kernel, index, facts)
    return facts
