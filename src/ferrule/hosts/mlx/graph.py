"""Makes nodes of MLX's graphs out of calls; while MLX traces a function for a file on a machine
without Metal, records for that file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from ...devices import protocol as devices
from . import kernel_nodes, node
from .kernel_nodes import again as again
from .node import exporting as exporting

if TYPE_CHECKING:
    from ...operators.op import Op


def call(op: Op, values: Sequence[Any]) -> Any:
    """The outputs of an op for MLX's arrays; NotImplemented where nodes cannot do it.

    Raises:
        KernelError, KernelTypeError, CompileError, DialectError, ToolchainError, DeviceError: as
            `Op.__call__` says.
    """
    if exporting():
        from . import export  # of the few programs that write files

        return export.call(op, values)
    result = node.call(op, values)
    if devices.watcher is not None and result is not NotImplemented:
        _evaluate(result)
    return result


def call_kernel(*call: Any) -> list[mx.array] | None:
    """The outputs of a kernel's call: as `kernel_nodes.call_kernel`."""
    nodes = kernel_nodes.call_kernel(*call)
    if devices.watcher is not None and nodes is not None:
        _evaluate(nodes)
    return nodes


@contextlib.contextmanager
def uncompiled() -> Iterator[None]:
    """Run what `mx.compile` made as it was written, inside a ``with`` block."""
    traced = False

    def probe(x: mx.array) -> mx.array:
        nonlocal traced
        try:
            mx.eval(x)
        except (RuntimeError, ValueError):
            traced = True
        return x

    mx.compile(probe)(mx.array(0))
    if not traced:  # somebody else has seen to it
        yield
        return
    mx.disable_compile()
    try:
        yield
    finally:
        mx.enable_compile()


def _evaluate(nodes: Any) -> None:
    """Run what is to be checked while somebody watches; MLX refuses where it traces."""
    with contextlib.suppress(RuntimeError, ValueError):
        mx.eval(nodes)


def record_kernel(*call: Any) -> list[mx.array]:
    """The outputs of a kernel's call while `exporting`: as `export.call_kernel`."""
    from . import export

    return export.call_kernel(*call)
