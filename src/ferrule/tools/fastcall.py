"""Calls of kernels and ops without Python code: runtime/fastcall.c, where it was built.

Installing ferrule builds ``ferrule/_fastcall*.so`` where there is a C compiler with Python's
headers. Without it, and after its sources have changed, every call takes the long way, with the
same results. setup.py has this module without the package.
"""

from __future__ import annotations

import ctypes
import hashlib
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

FOLDER = Path(__file__).resolve().parents[1] / "runtime"
# What carries out calls, with whatever arrays.
_ENGINE = "op_calls arithmetic arrays canary cpu_launch cuda_launch numbers rule runtime"
ENGINE = tuple(f"{name}.h" for name in _ENGINE.split())
_SOURCES = (
    "host_calls kernel_calls numpy_arrays numpy_ops torch_arrays torch_layouts torch_units"
    " torch_functions torch_operators"
)
SOURCES = ("fastcall.c", *[f"{name}.h" for name in _SOURCES.split()], *ENGINE)
TORCH_SOURCES = ("torch_calls.c", "torch_abi.h", "torch_stack.h", *ENGINE)
_RUNTIME = "cublas.h cuda_launch.h cuda_units.h faults.h platform.h printing.h runtime.c runtime.h"
RUNTIME_SOURCES = tuple(_RUNTIME.split())  # of `binding.runtime`, which setup.py builds, too

_changing = threading.Lock()
bypasses = 0  # how many `bypassed` blocks there are, in all threads
_told: list[Callable[[bool], object]] = []


@lru_cache(maxsize=1)
def library() -> ModuleType | None:
    """The C module, if it is there and of these sources."""
    try:
        import ferrule._fastcall as _fastcall
    except ImportError:
        return None
    text = b"".join((FOLDER / name).read_bytes() for name in SOURCES)
    return _fastcall if hashlib.sha256(text).hexdigest() == _fastcall.DIGEST else None


def operator(
    function: object,
    kinds: str,
    refused: Callable[[], bool] | None = None,
    known: dict[bytes, Any] | None = None,
    apply: object = None,
) -> Callable[..., Any] | None:
    """What calls an operator of torch that has no Autograd kernel, where no derivative is wanted,
    and else gives NotImplemented; None where it cannot be had.

    Args:
        function: the operator, which takes positional arguments.
        kinds: a letter per argument: ``a`` for an array, ``o`` for one that may be None; a
            number's is the kind of its dtype.
        refused: says whether it gives NotImplemented now.
        known: calls of Python functions that can be made in its place.
        apply: what records calls where a derivative is wanted.
    """
    module: Any = library()
    if module is None:
        return None
    try:
        called: Callable[..., Any] = module.operator(
            function, kinds.encode(), refused, known, apply
        )
    except ValueError:  # this torch lacks what that takes
        return None
    return called


@contextmanager
def bypassed() -> Iterator[None]:
    """Sends all calls the long way inside a ``with`` block, those of other threads, too."""
    _change(1)
    try:
        yield
    finally:
        _change(-1)


def _change(by: int) -> None:
    global bypasses
    module = library()
    with _changing:
        bypasses += by
        if module is not None:
            module.bypass(by)
        for told in _told:
            told(bypasses > 0)


def tell_when_bypassed(told: Callable[[bool], object]) -> None:
    """Call a function with whether some thread is in `bypassed`, now and when that changes."""
    with _changing:
        _told.append(told)
        told(bypasses > 0)


_states: dict[int, ctypes.Structure] = {}  # C keeps their addresses


def use_cuda(state: ctypes.Structure) -> bool:
    """Lets calls on GPUs be made in C, given a driver's `State`; False where they cannot."""
    module = library()
    at = ctypes.addressof(state)
    _states[at] = state
    return module is not None and bool(module.register_cuda(at))
