"""Calls of a kernel that C makes, once Python has made one like them."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from .. import dtypes
from ..dtypes import Dtype
from ..hosts.protocol import Host
from ..kernel import Kernel
from ..spec import Facts
from ..tools import fastcall
from . import arguments
from .entries import ARGUMENTS, BoundKernel, Numbered, Request, register_engine

if TYPE_CHECKING:
    from ..devices.protocol import Program


class _Programs(BoundKernel):
    """A kernel's programs, by numbers."""

    def __init__(self, kernel: Kernel) -> None:
        super().__init__(kernel)
        described = [kernel.wants(name)[0] for name in kernel.input_names]
        self.structure.body[0].described = sum(wants << i for i, wants in enumerate(described))
        self.known = Numbered()

    def program(
        self, request: Request, device: str, inputs: list[Facts], outputs: list[Facts]
    ) -> Program:
        """The program of a request."""
        program: Program = self.known.objects[request.template_value[0]]
        return program


class RepeatedCalls:
    """Calls of a kernel by runtime/kernel_calls.h.

    Attributes:
        call: takes the arguments of a call but ``verbose`` and ``stream``, in their order; gives
            the outputs, or None where Python must make the call.
    """

    def __init__(self, kernel: Kernel, library: Any) -> None:
        self._kernel, self._programs = kernel, _Programs(kernel)
        table = ctypes.addressof(self._programs.structure)
        self.call, self._remember = library.kernel_calls(table, self._programs.entry_at)

    def remember(
        self,
        call: tuple[Any, ...],
        program: Program,
        host: Host,
        device: str,
        inputs: Sequence[Facts],
        outputs: Sequence[Dtype],
        number: float | None,
    ) -> None:
        """Let C make calls like one that was made.

        Args:
            call: its arguments, as `call` takes them.
            program: what was launched.
            host, device: whose arrays they are, and where.
            inputs: the facts of the inputs, none of which was copied.
            outputs: the dtypes of the outputs.
            number: what these are filled with first, or None.
        """
        makers = []
        for i, dtype in enumerate(outputs):
            value = None if number is None else arguments.fill_value(self._kernel, i, number, dtype)
            maker = host.maker(value, dtype, device)
            if maker is None:
                return
            makers.append(maker)
        on_gpu = device != "cpu"
        if not on_gpu:
            register_engine()
        elif not _use_cuda():
            return
        kinds = bytes(dtypes.ALL.index(d) for d in (*[fact.dtype for fact in inputs], *outputs))
        self._remember(call, on_gpu, self._programs.known.number(program), kinds, tuple(makers))


def _use_cuda() -> bool:
    from ..tools.driver import driver

    return fastcall.use_cuda(driver().state)


def repeated_calls(kernel: Kernel) -> RepeatedCalls | None:
    """What remembers a kernel's calls; None where there is no such library, or it has no room."""
    library = fastcall.library()
    if library is None or len(kernel.input_names) + len(kernel.output_names) > ARGUMENTS:
        return None
    return RepeatedCalls(kernel, library)
