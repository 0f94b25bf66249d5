"""`cuda_kernel`: kernels with the body of a CUDA function, as `mx.fast.cuda_kernel` takes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..hosts import imported
from ..kernel import make_kernel
from .call import CallableKernel

if TYPE_CHECKING:
    from ..devices.protocol import Binary


class CudaKernel(CallableKernel):
    """A kernel with the body of a CUDA function: what `cuda_kernel` returns.

    It is called as a `MetalKernel` is, with arrays on an NVIDIA GPU.

    Attributes:
        kernel: the text, names and flags, checked.
    """

    def text(self, device: str = "cuda", **call: Any) -> str:
        """The CUDA text: as `MetalKernel.text`, for ``"cuda"`` or an architecture alone."""
        return super().text(device, **call)

    def compile(self, device: str = "cuda", **call: Any) -> Binary:
        """The machine code: as `MetalKernel.compile`, for ``"cuda"`` or an architecture alone."""
        return super().compile(device, **call)


def cuda_kernel(
    name: str,
    input_names: Sequence[str],
    output_names: Sequence[str],
    source: str,
    header: str = "",
    ensure_row_contiguous: bool = True,
    shared_memory: int = 0,
) -> CudaKernel:
    """A kernel from the body of a CUDA function, run on NVIDIA GPUs.

    The parameters are those of ``mx.fast.cuda_kernel`` of MLX 0.32.4, and so are the names that a
    body may use: docs/cuda_kernel.md lists them. Nothing is compiled before the first call, and
    text and machine code can be had without a GPU (`CudaKernel.text`, `CudaKernel.compile`).

    Args:
        name: the kernel's name: letters, digits and underscores.
        input_names: the names of the inputs, in order. In the body each is a pointer to const
            elements, that of a 0-d array or number too: ``x[0]``.
        output_names: the names of the outputs, in order: pointers to elements.
        source: the body of a CUDA ``__global__`` function; its signature is generated. Where it
            names ``<input>_shape``, ``<input>_strides`` (in elements) or ``<input>_ndim``, it has
            them: 10 int32, 10 int64, and an int.
        header: text placed before the function: helper functions, structs, includes.
        ensure_row_contiguous: copy the inputs that are not row-contiguous before the launch.
        shared_memory: bytes of dynamic shared memory per block, which the body declares as
            ``extern __shared__ float tile[];``.

    Raises:
        KernelError: a name, size or text that is not allowed (also a ValueError).
        KernelTypeError: an argument of a type that is not allowed (also a TypeError).

    Example:
        >>> import ferrule
        >>> exp = ferrule.cuda_kernel(
        ...     name="myexp", input_names=["inp"], output_names=["out"],
        ...     source='''
        ...         auto elem = cooperative_groups::this_grid().thread_rank();
        ...         if (elem < inp_shape[0]) out[elem] = exp(inp[elem]);
        ...     ''')
        >>> "__global__" in exp.text(inputs=["float32[1000]"], output_dtypes=[ferrule.float32])
        True
    """
    imported.prepare_tracers()
    return CudaKernel(
        make_kernel(
            name,
            input_names,
            output_names,
            source,
            header,
            ensure_row_contiguous,
            language="cuda",
            shared_memory=shared_memory,
        )
    )
