"""A function of CuTeDSL, for tests that adopt it: what docs/adopt.md imports from ``mykernels``."""

# CuTeDSL reads the types of parameters when it compiles: no `from __future__ import annotations`.

import cuda.bindings.driver as driver
import cutlass
import cutlass.cute as cute

THREADS = 256


@cute.kernel
def scale_kernel(x: cute.Tensor, y: cute.Tensor):  # type: ignore[no-untyped-def]
    thread, _, _ = cute.arch.thread_idx()
    block, _, _ = cute.arch.block_idx()
    rows, columns = x.shape
    i = block * THREADS + thread
    if i < rows * columns:
        row, column = i // columns, i % columns
        y[row, column] = (cutlass.Float32(2) * x[row, column].to(cutlass.Float32)).to(
            cutlass.BFloat16
        )


@cute.jit
def scale_rows(x: cute.Tensor, y: cute.Tensor, stream: driver.CUstream):  # type: ignore[no-untyped-def]
    rows, columns = x.shape
    blocks = (rows * columns + THREADS - 1) // THREADS
    scale_kernel(x, y).launch(grid=(blocks, 1, 1), block=(THREADS, 1, 1), stream=stream)
