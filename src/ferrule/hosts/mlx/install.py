"""`install_mlx`: programs written for MLX on a Mac find kernels that run here, unedited.

MLX without a GPU has the functions that make custom kernels, and refuses to run what they make.
Packages know that, and ask first: whether Metal is there, whether the default device is the GPU.
While ferrule is installed these functions make ferrule's kernels, and these questions have a Mac's
answers, until the program asks for the CPU by name. Devices are left alone where MLX has a GPU, and
on a Mac nothing is replaced but `cuda_kernel`.
"""

from __future__ import annotations

import functools
import os
import re
import sys
import threading
from collections.abc import Callable
from types import ModuleType, TracebackType
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.utils import tree_map

from ...errors import FerruleWarning, warn
from ...kernel import make_kernel
from ...kernels import cuda as cuda_call
from ...kernels.call import MetalKernel
from ...kernels.cuda import CudaKernel
from . import build as mlx_build
from . import matmul as mlx_matmul

_installed: dict[int, tuple[Any, Any]] = {}  # by what is replaced: that, and what stands for it
_changing = threading.RLock()  # what modules hold


def install_mlx() -> None:
    """Run the kernels that packages for MLX make with ferrule, on this machine.

    Replaces `mx.fast.metal_kernel`, but not on a Mac, and `mx.fast.cuda_kernel`, wherever a module
    has one of them by a name of its own. Where MLX has no GPU, these also answer as they do on a
    Mac: `mx.metal.is_available`, `mx.is_available`, `mx.device_count`, `mx.device_info`, and
    `mx.default_device`, which is equal to `mx.gpu` until the program asks for the CPU with
    `mx.set_default_device` or `mx.stream`. The functions that take a device take `mx.gpu`, and give
    a stream of the CPU. But not on a Mac, `mx.import_function` is `ferrule.import_function`, and
    `mx.gather_mm`, `mx.gather_qmm` and `mx.quantized_matmul` are those of `ferrule.mlx` where MLX's
    are wrong in some transformation, and for half floats, which MLX's kernels for CPUs do not add
    up in float32, where there is a compiler. All else of MLX computes as before.

    Call it before the packages are imported: many make their kernels, or decide against them, when
    they are. A second call changes nothing. `uninstall_mlx` puts everything back.

    Warns:
        FerruleWarning: modules that make kernels were imported before.

    Raises:
        ImportError: MLX is not installed.
    """
    with _changing:
        if _installed:
            return
        pairs = _replacements()
        early = _imported_early()
        _installed.update((id(old), (old, new)) for old, new in pairs)
        _exchange(_installed)
        _types.__eq__ = _equal_to_gpu
        _streams.device = property(_device_of)
    if early:
        names = ", ".join(early[:8]) + (" …" if len(early) > 8 else "")
        warn(
            f"install_mlx was called after {names} had been imported. Kernels that they made then "
            "are MLX's, and where they made none, since there was no GPU, they may miss them. Call "
            "ferrule.install_mlx() before these imports, or run the program with "
            "`python -m ferrule run`.",
            FerruleWarning,
        )


def uninstall_mlx() -> None:
    """Put back all that `install_mlx` replaced, in modules imported meanwhile, too.

    Kernels that were made meanwhile stay ferrule's.
    """
    with _changing:
        _exchange({id(new): (new, old) for old, new in _installed.values()})
        _types.__eq__ = _type_equal
        _streams.device = _stream_device
        _installed.clear()
        _device.cpu = False


def _exchange(pairs: dict[int, tuple[Any, Any]]) -> None:
    """In every module but ferrule's own, give names of the first of a pair to the second."""
    for name, module in list(sys.modules.items()):
        if not isinstance(module, ModuleType) or name.partition(".")[0] == "ferrule":
            continue
        for name, value in list(vars(module).items()):
            pair = pairs.get(id(value))
            if pair is not None and pair[0] is value:
                vars(module)[name] = pair[1]


def _imported_early() -> list[str]:
    """Modules, not MLX's and ferrule's own, whose text makes kernels."""
    names = []
    owners = {id(mx), id(mx.fast), id(mx.fast.metal_kernel)}
    for name, module in list(sys.modules.items()):
        top = name.partition(".")[0]
        if top in ("mlx", "ferrule", "__main__") or not isinstance(module, ModuleType):
            continue
        if not owners.isdisjoint(map(id, list(vars(module).values()))) and _makes_kernels(module):
            names.append(name)
    return sorted(names)


def _makes_kernels(module: ModuleType) -> bool:
    path = vars(module).get("__file__")
    if not isinstance(path, str) or not path.endswith(".py"):
        return False
    try:
        with open(path, "rb") as file:
            return b"metal_kernel" in file.read()
    except OSError:
        return False


# -- kernels ------------------------------------------------------------------------------------


class _TakesNumpy:
    """A kernel that makes MLX's arrays of NumPy's, as MLX's kernels do."""

    def __call__(self, *, inputs: Any, **call: Any) -> list[Any]:
        if isinstance(inputs, (list, tuple)) and np.ndarray in map(type, inputs):
            inputs = [mx.array(value) if type(value) is np.ndarray else value for value in inputs]
        outputs: list[Any] = super().__call__(inputs=inputs, **call)  # type: ignore[misc]
        return outputs


class InstalledKernel(_TakesNumpy, MetalKernel):
    """The result of `mx.fast.metal_kernel`."""


class InstalledCudaKernel(_TakesNumpy, CudaKernel):
    """The result of `mx.fast.cuda_kernel`."""


class InstalledFunction(mx.custom_function):  # type: ignore[misc, unused-ignore]
    """`mx.custom_function`, with words for what MLX refuses to do with one that calls kernels."""

    def __init__(self, f: Callable[..., Any]) -> None:
        self._rules = rules = [False]

        @functools.wraps(f)
        def function(*args: Any, **kwargs: Any) -> Any:
            native = mlx_build.library()
            before = native.fr_mlx_traced() if native else 0
            result = f(*args, **kwargs)
            if not rules[0] or native is None or native.fr_mlx_traced() == before:
                return result  # without rules MLX does nothing but call it
            if not native.fr_mlx_shapeless() and not native.fr_mlx_exporting():
                return result
            why = _not_in_custom_functions(native.fr_mlx_last().decode()).encode()

            def refused(leaf: Any) -> Any:
                return native.fr_mlx_refused(leaf, why) if isinstance(leaf, mx.array) else leaf

            return tree_map(refused, result)

        super().__init__(function)

    def vjp(self, f: Callable[..., Any]) -> Any:
        self._rules[0] = True
        return super().vjp(f)

    def jvp(self, f: Callable[..., Any]) -> Any:
        self._rules[0] = True
        return super().jvp(f)

    def vmap(self, f: Callable[..., Any]) -> Any:
        self._rules[0] = True
        return super().vmap(f)


def _not_in_custom_functions(label: str) -> str:
    name = label.partition(" ")[2].strip("'")
    return (
        f"[custom_function] {label} was called inside an mx.custom_function, which MLX can neither "
        f"compile with shapeless=True nor export. Declare it and its derivative with ferrule.op, "
        f"and call {name} without a custom_function:\n"
        f"    {name} = ferrule.op({name!r}, ..., metal=...)\n"
        f"    {name}.def_vjp(ferrule.op('{name}_vjp', ..., metal=...))"
    )


def _metal_kernel(
    name: str,
    input_names: Any,
    output_names: Any,
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    atomic_outputs: bool = False,
    compile_options: Any = None,
) -> InstalledKernel:
    """`mx.fast.metal_kernel`, by ferrule: see `ferrule.metal_kernel`."""
    names = _valid_name(name), input_names, output_names
    flags = ensure_row_contiguous, atomic_outputs, compile_options
    return InstalledKernel(make_kernel(*names, source, header, *flags))


_metal_kernel.__name__ = _metal_kernel.__qualname__ = "metal_kernel"  # as errors call it


def _valid_name(name: Any) -> Any:
    """A kernel's name as ferrule allows it. MLX takes every text, and looks at none."""
    if not isinstance(name, str):
        return name  # to be refused
    valid = re.sub("[^A-Za-z0-9_]", "_", name)
    if valid != name:
        warn(
            f"The metal_kernel {name!r} is called {valid!r} here: the name of a kernel has "
            "letters, digits and underscores. On a Mac, Metal may refuse it when it runs.",
            FerruleWarning,
        )
    return valid[:256] or "_"  # kernels are told apart by their text, too


# -- devices ------------------------------------------------------------------------------------


class _DefaultDevice:
    """Whether the program has asked for the CPU. MLX's default device is the process's, too."""

    cpu = False


_device = _DefaultDevice()
_cpu_streams: set[str] = set()  # that the program made for the CPU


class _Gpu(mx.Device):  # type: ignore[misc, name-defined, unused-ignore]
    """MLX's CPU under the name of a GPU: what `mx.default_device` returns.

    MLX takes it for the CPU, wherever a device or a stream is given.
    """

    __slots__ = ()

    @property
    def type(self) -> Any:
        return mx.DeviceType.gpu

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Gpu) or _is_gpu(other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return hash(mx.gpu)

    def __repr__(self) -> str:
        return "Device(gpu, 0)"

    def __reduce__(self) -> tuple[Any, ...]:
        return _Gpu, (mx.cpu,)


_gpu = _Gpu(mx.cpu)


def _is_gpu(value: object) -> bool:
    """Whether a device, or its type, is the GPU."""
    if isinstance(value, _Gpu):
        return True
    return isinstance(value, (mx.Device, mx.DeviceType)) and bool(mx.gpu == value)


_types: Any = mx.DeviceType
_type_equal = _types.__eq__


def _equal_to_gpu(self: Any, other: object) -> bool:
    """`mx.DeviceType.__eq__`, which looks at the device that MLX sees."""
    return bool(self is mx.gpu if isinstance(other, _Gpu) else _type_equal(self, other))


_streams: Any = mx.Stream
_stream_device = vars(_streams)["device"]
_gpu_streams: dict[int, Any] = {}  # that the program was given for the GPU, by their ids
_default_streams: dict[str, Any] = {}  # those of them that are MLX's default streams
_cpu_info: Callable[[Any], dict[str, Any]] = getattr(mx, "device_info", lambda device: {})


def _device_of(self: Any) -> Any:
    """`mx.Stream.device`."""
    return _Gpu(mx.cpu) if id(self) in _gpu_streams else _stream_device.__get__(self)


def _marked_for_gpu(stream: Any) -> Any:
    """A stream whose device, the program is told, is the GPU."""
    _gpu_streams[id(stream)] = stream
    return stream


def _real_device(value: Any) -> Any:
    return mx.cpu if _is_gpu(value) else value


def _around(replacement: Callable[[Any], Callable[..., Any]]) -> Callable[[Any], Any]:
    """What makes a replacement of one of MLX's functions, given that, which errors call by MLX's
    name."""

    def make(old: Any) -> Any:
        return functools.wraps(old)(replacement(old))

    return make


def _on_cpu(old: Callable[..., Any]) -> Callable[..., Any]:
    """A function of devices and streams that takes the GPU for the CPU."""

    def call(*args: Any, **kwargs: Any) -> Any:
        named = {key: _real_device(value) for key, value in kwargs.items()}
        return old(*map(_real_device, args), **named)

    return call


def _is_available(old: Callable[[Any], bool]) -> Callable[[Any], bool]:
    def call(device: Any) -> bool:
        return old(_real_device(device))

    return call


def _default_stream(old: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """`mx.default_stream`: for the GPU the same object each time, since others have no mark."""

    def call(device: Any) -> Any:
        stream = old(_real_device(device))
        if not _is_gpu(device):
            return stream
        return _marked_for_gpu(_default_streams.setdefault(str(stream), stream))

    return call


def _new_stream(old: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A function that makes a stream; those for the CPU are remembered."""

    def call(device: Any) -> Any:
        stream = old(_real_device(device))
        if _is_gpu(device):
            return _marked_for_gpu(stream)
        _cpu_streams.add(str(stream))
        return stream

    return call


class _StreamContext:
    """The context of `mx.stream`, in which the default device is the stream's."""

    def __init__(self, target: Any, context: Any) -> None:
        self._context = context
        is_device = isinstance(target, (mx.Device, mx.DeviceType))
        self._cpu: bool | None = None  # as it is: a stream of any device
        if is_device:
            self._cpu = not _is_gpu(target)
        elif str(target) in _cpu_streams:
            self._cpu = True
        self._before: list[bool] = []

    def __enter__(self) -> None:
        self._context.__enter__()
        self._before.append(_device.cpu)
        if self._cpu is not None:
            _device.cpu = self._cpu

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        _device.cpu = self._before.pop()
        self._context.__exit__(kind, error, traceback)


def _memory() -> int:
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return 1 << 33


def _replacements() -> list[tuple[Any, Any]]:
    """Each function or class that is replaced, and its replacement."""
    makers: list[tuple[Any, str, Callable[[Any], Any]]] = []
    if not mx.metal.is_available():
        makers += [
            (mx.fast, "metal_kernel", lambda old: _metal_kernel),
            (mx, "custom_function", lambda old: InstalledFunction),
            (mx.metal, "is_available", _around(lambda old: lambda: True)),
            (mx, "import_function", _import_function),
            *((mx, name, make) for name, make in mlx_matmul.REPLACEMENTS.items()),
        ]
    makers.append((mx.fast, "cuda_kernel", lambda old: _cuda_kernel))
    if not mx.is_available(mx.gpu):  # MLX's CUDA build has its own
        makers += [(mx, name, _around(function)) for name, function in _OF_DEVICES.items()]
        makers.append((mx.metal, "device_info", _around(_device_info)))
    originals = [(getattr(owner, name, None), make) for owner, name, make in makers]
    return [(old, make(old)) for old, make in originals if old is not None]  # as this MLX has them


def _default_device(old: Callable[[], Any]) -> Callable[[], Any]:
    def call() -> Any:
        return old() if _device.cpu else _gpu

    return call


def _set_default_device(old: Callable[[Any], None]) -> Callable[[Any], None]:
    def call(device: Any) -> None:
        old(_real_device(device))
        _device.cpu = not _is_gpu(device)

    return call


def _stream(old: Callable[[Any], Any]) -> Callable[[Any], Any]:
    def call(s: Any) -> _StreamContext:
        return _StreamContext(s, old(_real_device(s)))

    return call


def _device_info(old: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    def call(d: Any = None) -> dict[str, Any]:
        info = dict(_cpu_info(mx.cpu))
        if _is_gpu(_gpu if d is None and not _device.cpu else d):
            size = _memory()
            info |= {
                "memory_size": size,
                "max_buffer_length": size,
                "max_recommended_working_set_size": size // 4 * 3,
            }
        return info

    return call


_OF_DEVICES: dict[str, Callable[..., Any]] = {
    "default_device": _default_device,
    "set_default_device": _set_default_device,
    "stream": _stream,
    "is_available": _is_available,
    "device_count": _on_cpu,
    "device_info": _device_info,
    "default_stream": _default_stream,
    "synchronize": _on_cpu,
    "new_stream": _new_stream,
    "new_thread_local_stream": _new_stream,
    "new_thread_unsafe_stream": _new_stream,
}


def _import_function(old: Callable[..., Any]) -> Callable[..., Any]:
    """`mx.import_function`, by ferrule where it can have nodes: see `ferrule.import_function`."""
    from . import reading as mlx_import  # holds MLX's own, which must be there now

    @functools.wraps(old)
    def call(file: str, return_metadata: bool = False) -> Any:
        has_nodes = mlx_build.library() is not None
        return (mlx_import.import_function if has_nodes else old)(file, return_metadata)

    return call


@functools.wraps(cuda_call.cuda_kernel)
def _cuda_kernel(*args: Any, **kwargs: Any) -> InstalledCudaKernel:
    return InstalledCudaKernel(cuda_call.cuda_kernel(*args, **kwargs).kernel)
