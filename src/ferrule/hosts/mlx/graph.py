"""Makes nodes of MLX's graphs out of calls; while MLX traces a function for a file on a machine
without Metal, records for that file."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from . import node
from .kernel_nodes import again as again
from .kernel_nodes import call_kernel as call_kernel
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
    return node.call(op, values)


def record_kernel(*call: Any) -> list[mx.array]:
    """The outputs of a kernel's call while `exporting`: as `export.call_kernel`."""
    from . import export

    return export.call_kernel(*call)
