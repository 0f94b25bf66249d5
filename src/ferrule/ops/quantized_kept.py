"""Products of many rows with the dequantized matrix, which is kept: `quantized_matmul` with
``keep_bf16=True``. All of it is for torch's tensors, of which it can be told that they changed."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from typing import Any

import ferrule

from . import formats, quantizing
from . import quantized_cuda as on_cuda
from .arrays import dtype_name, library
from .formats import Format
from .rows import on_cpu


def dtype_to_keep(x: Any, w: Any) -> str:
    """The dtype in which a product is to keep w's elements; empty where it keeps nothing: of a
    batch, of other libraries' arrays, and in a program that is exported, since that is loaded where
    the Python function is not.

    Raises:
        KernelError: x, or the scales that it was promoted to, are of float32.
    """
    name = dtype_name(x)
    if name == "float32":
        raise ferrule.KernelError(
            "[quantized_matmul] keep_bf16=True, but x or the scales are of float32; a matrix of 16 "
            "bits is kept. Cast both to bfloat16 or float16, or leave keep_bf16 out."
        )
    if not hasattr(x, "to") or getattr(w, "ndim", 2) > 2:
        return ""
    if sys.modules["torch"].compiler.is_exporting():  # Dynamo of torch 2.11 knows no `library`
        return ""
    return name if name in ("float16", "bfloat16") else ""  # of others the op says what is wrong


def run(
    form: Format, transpose: bool, scaled: bool, dtype: str, packed: Callable[[], ferrule.Op]
) -> Any:
    """The function of a product's op that has the matrix kept, with its condition.

    Args:
        form, transpose, scaled: of the product.
        dtype: of x.
        packed: gives the op that reads the packed weights.
    """
    inputs = ["w", "scales", *["biases"] * form.affine]

    def product(x: Any, *parts: Any, dense: Any) -> Any:
        if dense is None:
            return packed()(x, *parts)
        right = dense.mT if transpose else dense
        if not scaled:
            return x @ right
        torch = library(x)
        sums = torch.mm(x.reshape(-1, x.shape[-1]), right, out_dtype=torch.float32)
        y = torch.empty_like(sums, dtype=x.dtype)
        torch.mul(sums, parts[-1] / formats.NVFP4_RANGE, out=y)  # rounds once
        return y.view(*x.shape[:-1], right.shape[-1])

    when = f"device == cuda and x.size > ({on_cuda.most_packed(form.bits, transpose)}) * K"
    # Of float16 a processor's dense products are slower. Global scales want sums in float32, which
    # torch gives on a GPU alone.
    if dtype == "bfloat16" and not scaled:
        when += f" or device == cpu and x.size > {1 if transpose else 8} * K"
    made = {"dense": (_dense(*form, dtype), *inputs)}
    return ferrule.run_function(product, when=when, prepared=made)


@cache
def _dense(mode: str, group: int, bits: int, dtype: str) -> Callable[..., Any]:
    """What dequantizes a matrix to keep it. It is one function for each format, so that products
    and their derivatives, which are other ops, share what it made."""

    def dense(w: Any, scales: Any, biases: Any = None) -> Any:
        if on_cpu(w) and not _multiplies_bf16(library(w)):
            return None
        return quantizing.dequantize(w, scales, biases, group, bits, mode, dtype=dtype)

    return dense


def _multiplies_bf16(torch: Any) -> bool:
    """Whether the processor multiplies bfloat16 itself: else torch is slower than packed weights,
    with `transpose=False` a hundred times."""
    known: dict[str, Any] = getattr(torch.cpu, "get_capabilities", dict)()
    return bool(known.get("avx512_bf16", False))
