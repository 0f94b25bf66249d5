"""Hosts: the libraries that own arrays. What goes into a kernel decides what comes out.

A host is a module that offers the functions of `Host`. It is found by the type of the array, in a
dictionary of names, so that no library is imported unless the caller has imported it.
"""

from __future__ import annotations

import contextlib
import ctypes
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType
from typing import Any, NamedTuple, Protocol

import numpy as np

from .. import dtypes
from ..dtypes import Dtype
from ..errors import DeviceError, KernelError, KernelTypeError
from ..spec import Facts, Shape


class Maker(NamedTuple):
    """How runtime/kernel_calls.h makes an output, of whatever shape.

    Attributes:
        function: what makes it, called with the shape and ``arguments``; or, where there are
            ``keywords``, with these and the sizes one by one. None: C makes an array of NumPy's
            between canaries, whose dtype is the only argument.
        arguments, keywords: see there.
        zeroed: C fills it with zeros then.
        guarded: C puts a canary behind it (runtime/canary.h).
        large: what makes one of 32 MiB or more instead, called with the shape and ``arguments``,
            and all there is to do.
    """

    function: Callable[..., Any] | None
    arguments: tuple[Any, ...] = ()
    keywords: dict[str, Any] | None = None
    zeroed: bool = False
    guarded: bool = False
    large: Callable[..., Any] | None = None


UNKNOWN = object()  # a version


class Identity(NamedTuple):
    """By what an array is known again, and whether it has changed.

    Attributes:
        key, place: which memory, while its owner lives, and what of it.
        version: another one after each change; `UNKNOWN` where nothing can tell of one.
        owner: what lives as long as the memory; it can be referred to weakly.
    """

    key: int
    place: tuple[object, ...]
    version: object
    owner: object


class Host(Protocol):
    """The interface of a host. Messages of its errors name no argument: the caller adds it.

    A host may also have ``identity(array)``, an `Identity`, or None of an array that may change and
    does not say so, and then ``wait(device)``, which waits for the current stream of a GPU, and
    ``outside_pools(value, device)``, which gives what was made there in memory that may be kept.
    Without them nothing that is prepared of arrays is kept.
    """

    @property
    def name(self) -> str:
        """How messages call the library: ``"NumPy"``, ``"torch"``, ``"MLX"``."""
        ...

    @property
    def allocation_errors(self) -> tuple[type[Exception], ...]:
        """What `empty` and `full` raise where the library cannot allocate."""
        ...

    def facts(self, array: Any) -> Facts | None:
        """What a kernel must know of ``array``, which is not copied.

        None where only a `contiguous` copy can be given to a kernel: byte-swapped or misaligned
        elements, strides that are no whole number of elements, lazy conjugation.

        Raises:
            KernelError: an array without data of its own, or one that a kernel may not read.
            KernelTypeError: an element type that ferrule does not know.
        """
        ...

    def contiguous(self, array: Any) -> Any:
        """A row-contiguous array of the same shape, dtype and values, in native byte order."""
        ...

    def empty(self, shape: Shape, dtype: Dtype, device: str) -> Any:
        """A new row-contiguous array; its values are anything."""
        ...

    def full(self, shape: Shape, value: float, dtype: Dtype, device: str) -> Any:
        """A new row-contiguous array filled with ``value``, which ``dtype`` can hold.

        Raises:
            DeviceError: an earlier kernel broke the GPU that fills it.
        """
        ...

    def outside(self, array: Any) -> int:
        """How many bytes past the end of an array on the CPU, which `empty` or `full` made, were
        written to since; less than 0: before its start. 0 also where that is not known."""
        ...

    def to_numpy(self, array: Any) -> np.ndarray[Any, Any]:
        """The elements, in NumPy's memory; bfloat16 and 8-bit floats as float32."""
        ...

    def from_numpy(self, values: np.ndarray[Any, Any], dtype: Dtype, device: str) -> Any:
        """A new array of these elements, cast to ``dtype``."""
        ...

    def maker(self, number: float | None, dtype: Dtype, device: str) -> Maker | None:
        """How `empty`, or `full` of ``number``, makes outputs; None where calls of this library
        are not remembered (see `ferrule.kernels.repeated`)."""
        ...

    def finish(self, what: str, inputs: Sequence[Any], outputs: list[Any]) -> list[Any]:
        """The arrays to return, once ``what``, such as ``"kernel 'exp'"``, was launched."""
        ...

    def device(self) -> str:
        """Where outputs go when a call has no array among its inputs."""
        ...

    def stream(self, requested: object, device: str) -> int:
        """The queue for a launch on ``device``: an address, or 0 for the CPU.

        Raises:
            KernelTypeError: ``requested`` is no stream of this library.
            KernelError: a stream that cannot be used.
        """
        ...


# The libraries, by the names of their hosts: what loads a host, whose library it imports; whose
# arrays and dtypes are which, by module and name of their types.
offered: dict[str, Callable[[], Host]] = {}
arrays: dict[tuple[str, str], str] = {}
dtype_types: dict[tuple[str, str], str] = {}
# What `known` hosts have beside arrays: what makes nodes of lazy graphs out of calls, by the
# library's name in messages; what makes an operator of the library out of an op.
graphs: dict[str, Callable[[], ModuleType]] = {}
registrars: dict[str, Callable[[Any], Any]] = {}
# What loads `ferrule.ops`, which hosts may have names of their own for.
ops: list[Callable[[], ModuleType]] = []

known: dict[type, Host] = {}  # array types seen so far


def identity(host: object, array: Any) -> Identity | None:
    """By what an array is known again; None where nothing can tell whether it has changed."""
    of_host = getattr(host, "identity", None)
    return None if of_host is None else of_host(array)


def load(name: str) -> Host:
    """The host ``name``: ``"numpy"``, ``"torch"``, ``"mlx"`` …; imports its library."""
    return offered[name]()


def find(kind: type) -> Host | None:
    """The host whose arrays are of type ``kind`` or of a base of it, else None."""
    host = known.get(kind)
    if host is None:
        for base in kind.__mro__:
            name = arrays.get((base.__module__, base.__qualname__))
            if name is not None:
                host = known[kind] = load(name)
                break
        else:
            dlpack = hasattr(kind, "__dlpack__") and hasattr(kind, "__dlpack_device__")
            if (dlpack or hasattr(kind, "__cuda_array_interface__")) and _has_torch():
                host = known[kind] = load("dlpack")
    return host


def _has_torch() -> bool:
    from importlib.util import find_spec

    return find_spec("torch") is not None


def nodes(values: Iterable[Any], dtype: object = None) -> ModuleType | None:
    """What makes nodes, where all arrays among these values are of one library with lazy graphs.

    Where there is no array, an output's ``dtype`` decides, if given. None where calls run at once.
    """
    name = ""
    for value in values:
        host = known.get(type(value)) or find(type(value))
        if host is not None:
            if host.name not in graphs or name not in ("", host.name):
                return None
            name = host.name
    if not name and dtype is not None:
        name = of_dtype(dtype).name
    make = graphs.get(name)
    return None if make is None else make()


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Have lazy graphs that are imported run functions as they were written, and not what they made
    of them, inside a ``with`` block."""
    with contextlib.ExitStack() as stack:
        if "mlx.core" in sys.modules and "MLX" in graphs:
            stack.enter_context(graphs["MLX"]().uncompiled())
        yield


def of_dtype(value: object) -> Host:
    """The host that a dtype belongs to: torch's and MLX's to theirs, all others to NumPy."""
    return load(dtype_types.get((type(value).__module__, type(value).__name__), "numpy"))


def scalar(value: object) -> tuple[Facts, object] | None:
    """The facts of a Python or NumPy scalar and the object that owns its bytes, or None.

    Python's bool, int, float and complex become bool, int32 (int64 where it does not fit),
    float32 and complex64, as in MLX. NumPy scalars keep their dtype, but for float64 and
    complex128, which become float32 and complex64, as in MLX.

    Raises:
        KernelError: an int that int64 cannot hold.
        KernelTypeError: a NumPy scalar of a dtype that ferrule does not know.
    """
    owner: Any
    if isinstance(value, np.generic):
        narrow = {"d": np.float32, "D": np.complex64}.get(value.dtype.char)
        owner = np.array(value, narrow)
        known_dtype = dtypes.find(owner.dtype)
        if known_dtype is None:
            raise unknown_dtype(owner.dtype)
        return Facts(known_dtype, (), (), owner.ctypes.data, "cpu", True), owner
    if isinstance(value, bool):
        dtype, owner = dtypes.bool_, ctypes.c_bool(value)
    elif isinstance(value, int):
        if -(2**31) <= value < 2**31:
            dtype, owner = dtypes.int32, ctypes.c_int32(value)
        elif -(2**63) <= value < 2**63:
            dtype, owner = dtypes.int64, ctypes.c_int64(value)
        else:
            raise KernelError(
                f"is the int {value}, which does not fit in int64; give a NumPy scalar such as "
                "np.uint64(value), or a float."
            )
    elif isinstance(value, float):
        dtype, owner = dtypes.float32, ctypes.c_float(value)
    elif isinstance(value, complex):
        dtype, owner = dtypes.complex64, (ctypes.c_float * 2)(value.real, value.imag)
    else:
        return None
    return Facts(dtype, (), (), ctypes.addressof(owner), "cpu", True), owner


def all_bits_zero(value: float) -> bool:
    """Whether a fill value is what fresh pages and a memset hold: 0, but not -0.0."""
    return value == 0 and math.copysign(1, value) > 0


def unknown_dtype(dtype: object) -> KernelTypeError:
    """The error for an array whose element type ferrule does not know."""
    return KernelTypeError(f"has dtype {dtype}, expected one of {dtypes.LEVEL0_NAMES}.")


def check_written(what: str, host: Host, names: Iterable[str], outputs: Iterable[Any]) -> None:
    """Check that nothing was written outside outputs on the CPU, which this host made.

    Args:
        what: what wrote to them, such as ``"kernel 'exp'"``.
        host, names, outputs: the host, the names of the outputs, and the arrays.

    Raises:
        DeviceError: something was.
    """
    for name, output in zip(names, outputs, strict=True):
        count = host.outside(output)
        if count:
            raise wrote_outside(what, name, tuple(output.shape), count)


def wrote_outside(what: str, output: str, shape: Shape, count: int) -> DeviceError:
    """The error for ``count`` bytes written past the end of an output; less than 0: before it."""
    side = "past the end" if count > 0 else "before the start"
    return DeviceError(
        f"{what} wrote outside output {output!r} of shape {shape}, {abs(count)} "
        f"byte{'s' * (abs(count) != 1)} {side}. Check the indices against the shape; the outputs "
        "are lost, and what lies farther outside may be damaged."
    )
