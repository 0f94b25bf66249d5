"""`metal_kernel`: kernels with the body of a Metal function, as `mx.fast.metal_kernel` has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import overload

from ..errors import KernelTypeError
from ..hosts import imported
from ..kernel import make_kernel
from .call import MetalKernel
from .dictionary import DictionaryKernel


@overload
def metal_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    atomic_outputs: bool = False,
    compile_options: Mapping[str, str] | None = None,
    *,
    portable: bool = False,
) -> MetalKernel: ...


@overload
def metal_kernel(
    name: str,
    *,
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    atomic_outputs: bool = False,
    compile_options: Mapping[str, str] | None = None,
    portable: bool = False,
) -> DictionaryKernel: ...


def metal_kernel(
    name: str,
    input_names: Sequence[str] | None = None,
    output_names: Sequence[str] | None = None,
    source: str | None = None,
    header: str = "",
    ensure_row_contiguous: bool = True,
    atomic_outputs: bool = False,
    compile_options: Mapping[str, str] | None = None,
    *,
    portable: bool = False,
) -> MetalKernel | DictionaryKernel:
    """A kernel from the body of a Metal function, run on the device of its arrays.

    The parameters are those of ``mx.fast.metal_kernel``. Nothing is compiled before the first
    call.

    Args:
        name: the kernel's name: letters, digits and underscores.
        input_names: the names of the inputs, in order. Without ``input_names`` and
            ``output_names`` each call names its arguments: see `DictionaryKernel`.
        output_names: the names of the outputs, in order.
        source: the body of a Metal function; its signature is generated.
        header: text placed before the function: helper functions, structs, constants.
        ensure_row_contiguous: copy the inputs that are not row-contiguous before the launch.
            Otherwise a body that wants strides reads ``<input>_strides``, in elements.
        atomic_outputs: make every output a ``device atomic<T>*``.
        compile_options: ``{"math_mode": "safe" | "relaxed" | "fast"}``; safe by default.
        portable: refuse what runs here but Apple's compiler or GPU would not take.

    Raises:
        KernelError: a name, option or text that is not allowed (also a ValueError).
        KernelTypeError: an argument of a type that is not allowed (also a TypeError).

    Example:
        >>> import ferrule, numpy as np
        >>> double = ferrule.metal_kernel(
        ...     name="double_it", input_names=["inp"], output_names=["out"],
        ...     source="uint i = thread_position_in_grid.x; out[i] = 2 * inp[i];")
        >>> x = np.arange(4, dtype=np.float32)
        >>> (y,) = double(inputs=[x], grid=(4, 1, 1), threadgroup=(4, 1, 1),
        ...               output_shapes=[x.shape], output_dtypes=[x.dtype])
        >>> y
        array([0., 2., 4., 6.], dtype=float32)
    """
    if source is None:
        raise KernelTypeError(
            f"[metal_kernel] kernel {name!r} has no `source`; give the body of a Metal function."
        )
    imported.prepare_tracers()
    if input_names is None and output_names is None:
        return DictionaryKernel(
            name, source, header, ensure_row_contiguous, atomic_outputs, compile_options, portable
        )
    if input_names is None or output_names is None:
        missing = "input_names" if input_names is None else "output_names"
        raise KernelTypeError(
            f"[metal_kernel] kernel {name!r} has no `{missing}`; give both `input_names` and "
            "`output_names`, or neither to name the arguments in each call's dictionaries."
        )
    return MetalKernel(
        make_kernel(
            name,
            input_names,
            output_names,
            source,
            header,
            ensure_row_contiguous,
            atomic_outputs,
            compile_options,
            portable,
        )
    )
