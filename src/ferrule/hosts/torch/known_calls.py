"""Calls with tensors that lie as in a call before, of Python functions or CUDA units:
runtime/torch_functions.h makes them, without Python code but a function's."""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from threading import Thread
from typing import Any

import torch

from ... import dtypes
from ...operators import call as op_call
from ...operators.launch import BoundCall
from ...operators.op import Op
from ...operators.runners import Runner
from ...operators.unit_steps import CudaUnit
from ...tools import fastcall
from . import arrays as host
from .functions import AUTOCAST_KEYS, USE_COUNT, checked_output

_MOST_KNOWN = 1000  # layouts of an op's calls
# c10::impl::ExcludeDispatchKeyGuard, which `torch._C._ExcludeDispatchKeyGuard` wraps.
_EXCLUDE = "_ZN3c104impl23ExcludeDispatchKeyGuardC1ENS_14DispatchKeySetE"
_RESTORE = "_ZN3c104impl23ExcludeDispatchKeyGuardD1Ev"


def letters(op: Op) -> str:
    """What `tools.fastcall.operator` must know of an op's inputs."""
    return "".join([
        dtypes.BY_NAME[p.dtype].kind if p.dims is None else "o" if p.optional else "a"
        for p in op.rule.inputs
    ])  # fmt: skip


class KnownCalls:
    """What is known of an op's calls.

    Attributes:
        entries: by the layout of the inputs, of a Python function: it, whether the outputs were
            made for it, what makes outputs of an unusual result, and the layouts of the outputs;
            of a unit what `unit_calls` keeps.
        again: the outputs of a call that is known; else NotImplemented.
    """

    def __init__(self, op: Op) -> None:
        self.entries: dict[bytes, Any] = {}
        self._kinds = letters(op).encode()
        library: Any = fastcall.library()
        self._library = library
        self.again: Callable[..., Any] = library.known_calls(self._kinds, self.entries)

    def keep(self, values: Sequence[Any], entry: tuple[Any, ...]) -> None:
        """Keep what calls share whose inputs lie as these do, if C can tell."""
        key = self._library.layout(self._kinds, tuple(values))
        if key is not None:
            if len(self.entries) >= _MOST_KNOWN:
                self.entries.clear()
            self.entries[key] = entry

    def remember(
        self, call: BoundCall, runner: Runner, values: Sequence[Any], outputs: Sequence[Any]
    ) -> None:
        """Keep what a call of a function, whose outputs have been checked, shares with others."""
        rule = call.op.rule
        if len(rule.declared) != len(rule.outputs) or not outputs:
            return
        if runner.contiguous and op_call.strided(call, True):
            return
        layouts = tuple([self._library.layout(b"a", (output,)) for output in outputs])
        if None in layouts:
            return
        function, own = _function(call, runner)
        self.keep(values, (function, own, _finish(call, runner, own), layouts))


def known_calls(op: Op) -> KnownCalls | None:
    """What will be known of an op's calls; None where C makes none of them."""
    made = any(isinstance(body, (Runner, CudaUnit)) for body in op.implementations)
    return KnownCalls(op) if made and not op.in_place and in_c() else None


def _function(call: BoundCall, runner: Runner) -> tuple[Callable[..., Any], bool]:
    """What is called with the inputs, and whether its outputs are made for it."""
    function, takes_outputs, takes_stream = runner.function_for(
        call.device, call.binding, host.capturing
    )
    if takes_stream or runner.prepared or runner.state:
        return partial(_with_more, call, runner), takes_outputs
    return partial(_into_new, call, runner, function) if takes_outputs else function, takes_outputs


def _with_more(call: BoundCall, runner: Runner, *inputs: Any) -> Any:
    """What a function gives that gets more than inputs and outputs."""
    queue = host.stream(None, call.device)
    return op_call.packed(op_call.run(call, runner, queue, inputs, host, host.capturing)[0])


def _into_new(call: BoundCall, runner: Runner, function: Callable[..., Any], *inputs: Any) -> Any:
    """The outputs of a function that writes to them."""
    names = [output.name for output in call.op.rule.outputs]
    written = [host.empty(shape, kind, call.device) for shape, kind in call.results]
    result = function(*inputs, **dict(zip(names, written, strict=True)))
    if result is not None:
        op_call.check_written(call.op, runner, result, written)
    return op_call.packed(written)


def _finish(call: BoundCall, runner: Runner, own: bool) -> Callable[[list[Any]], Any]:
    """What makes outputs of a function's result, which nothing but a list holds; raises as
    `checked_output`."""

    def finish(held: list[Any]) -> Any:
        result = held.pop()
        returned = op_call.returned(call.op, runner, result)
        del result
        places = range(len(returned))
        return op_call.packed([checked_output(call, runner, returned, i, own) for i in places])

    return finish


@lru_cache(maxsize=1)
def in_c() -> bool:
    """Whether C can call functions, with the torch that there is."""
    library: Any = fastcall.library()
    profiler = getattr(torch.autograd, "_profiler_enabled", None)
    if library is None or USE_COUNT is None or profiler is None:
        return False
    registered: list[bool] = []

    def register() -> None:
        if addresses := _excluding():
            registered.append(
                library.register_functions(
                    *addresses,
                    torch.Tensor,
                    torch._C.DisableTorchFunction,
                    profiler,
                    getattr(torch._C, "_cuda_getDevice", None),
                    USE_COUNT,
                    torch.empty,
                    torch.empty(1, device="cpu"),
                )
            )

    thread = Thread(target=register)  # in which nothing is excluded or transformed yet
    thread.start()
    thread.join()
    return registered == [True]


def _excluding() -> list[int]:
    """The addresses of what excludes dispatch keys and what ends that; the keys of autograd and
    autocast, those of autograd, and the one that inference mode excludes. Nothing where this torch
    has no such functions, or they do something else."""
    suffix = "dylib" if sys.platform == "darwin" else "so"
    excluded = torch._C._dispatch_tls_local_exclude_set
    try:
        c10 = ctypes.CDLL(str(Path(torch.__file__).resolve().parent / "lib" / f"libc10.{suffix}"))
        exclude, restore = getattr(c10, _EXCLUDE), getattr(c10, _RESTORE)
        before = excluded().raw_repr()
        with torch._C._AutoDispatchBelowADInplaceOrView():
            autograd = excluded().raw_repr()
            with torch._C._ExcludeDispatchKeyGuard(AUTOCAST_KEYS):
                keys = excluded().raw_repr()
    except (OSError, AttributeError):
        return []
    exclude.argtypes, exclude.restype = (ctypes.c_void_p, ctypes.c_uint64), None
    restore.argtypes, restore.restype = (ctypes.c_void_p,), None
    guard = (ctypes.c_uint64 * 8)()
    exclude(guard, keys)
    within = excluded().raw_repr()
    differs = list((ctypes.c_uint64 * 2).from_address(guard[0])) if guard[0] else []
    restore(guard)
    same = within == keys and excluded().raw_repr() == before and not any(guard[2:])
    if not same or differs != [0, keys ^ before]:
        return []
    addresses = [ctypes.cast(f, ctypes.c_void_p).value or 0 for f in (exclude, restore)]
    inference = torch._C.DispatchKeySet(torch._C.DispatchKey.ADInplaceOrView).raw_repr()
    return [*addresses, keys, autograd ^ before, inference]
