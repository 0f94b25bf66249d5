"""Rotary position embeddings: pairs of features turned by angles that grow with the position."""

from __future__ import annotations

import math
from numbers import Integral
from typing import Any

import ferrule

from .arrays import cast, copy, count, library, widened
from .rotary_cuda import HEADS, body, groups
from .rows import FLOATS, as_int


def rope(
    x: Any,
    dims: int,
    traditional: bool = False,
    base: float = 10000.0,
    scale: float = 1.0,
    offset: Any = 0,
    freqs: Any = None,
) -> Any:
    """Turn pairs of features by angles ``(offset + l) * scale * base ** (-2 j / dims)``.

    ``l`` is the place along the last axis but one, ``j`` the number of the pair: `mx.fast.rope`.

    Args:
        x: an array ``[..., L, D]`` of float32, float16, bfloat16, or (not on Apple's GPUs) float64.
        dims: how many features are turned, an even number up to D; the others stay as they are.
        traditional: pairs are neighbours, features ``2 j`` and ``2 j + 1``; else they are the two
            halves', features ``j`` and ``j + dims / 2``.
        base, scale: numbers.
        offset: the position of ``l = 0``: an int; or an array of integers without dims, or with one
            for each ``x[i]``, of ``x[B, ..., L, D]``. An array makes no new graph where it changes.
        freqs: a float32 array of ``dims / 2``, by which positions are divided, so that ``base``
            has no part; None for its powers.

    Returns:
        An array like ``x``. Angles are float32. Derivatives are those by ``x``.

    Raises:
        KernelError: shapes, dtypes, ``dims`` or the number of dims of ``offset`` do not fit.
        KernelTypeError: ``x`` is no array, or ``dims`` no int.
    """
    op = _rope(*_chosen("rope", x, dims, traditional, offset, freqs), False)
    return op(x, offset, *[freqs] * (freqs is not None), base, scale)


def rope_(
    x: Any,
    dims: int,
    traditional: bool = False,
    base: float = 10000.0,
    scale: float = 1.0,
    offset: Any = 0,
    freqs: Any = None,
) -> Any:
    """`rope` in place: writes to ``x``, an array of NumPy or torch, and returns it.

    It has no derivative. MLX's arrays cannot be written to.

    Args and errors as in `rope`.
    """
    op = _rope_in_place(*_chosen("rope_", x, dims, traditional, offset, freqs))
    op(x, offset, *[freqs] * (freqs is not None), base, scale)
    return x


def _chosen(
    name: str, x: Any, dims: int, traditional: bool, offset: Any, freqs: Any
) -> tuple[int, bool, str, bool]:
    """The constants of a call."""
    if not hasattr(x, "ndim"):
        raise ferrule.KernelTypeError(
            f"[ops] {name}: got x of type {type(x).__name__}; expected an array of NumPy, torch or "
            "MLX."
        )
    dims = as_int(name, "dims", dims)
    if dims < 2 or dims % 2:
        raise ferrule.KernelError(f"[ops] {name}: got dims {dims}; expected an even number from 2.")
    offsets = "number"
    if type(offset) is not int and hasattr(offset, "ndim") and not isinstance(offset, Integral):
        if offset.ndim > 1:
            raise ferrule.KernelError(
                f"[ops] {name}: got an offset of shape {tuple(offset.shape)}; expected an int, an "
                "array without dims, or one with an offset for each x[i]."
            )
        offsets = "each" if offset.ndim else "one"
    return dims, bool(traditional), offsets, freqs is not None


def _declaration(dims: int, traditional: bool, offsets: str, by_freqs: bool) -> dict[str, str]:
    """Inputs and condition that both ops have."""
    example = "B," if offsets == "each" else ""
    offset = {"number": "offset:int64", "one": "offset[]:O", "each": "offset[B]:O"}[offsets]
    freqs = f", freqs[{dims // 2}]:float32" if by_freqs else ""
    return {
        "dims": f"{example}*S,L,D",
        "inputs": f"{offset}{freqs}, base:float32, scale:float32",
        "where": f"D >= {dims}, T in {FLOATS}" + ", O in (int32, int64)" * (offsets != "number"),
    }


def _body(
    dims: int, traditional: bool, offsets: str, by_freqs: bool, turned: str, sign: str = ""
) -> str:
    """A thread finds one angle, and turns the pair in some of the heads (``*S``) of each example.

    Args:
        turned: the array that the turned pair is written to.
        sign: ``"-"`` to turn backwards.
    """
    half = dims // 2
    first, second = ("2 * j", "2 * j + 1") if traditional else ("j", f"j + {half}")
    offset = "offset[example]" if offsets == "each" else "offset"
    frequency = "1 / freqs[j]" if by_freqs else f"metal::exp2(-metal::log2(base) * j / {half})"
    rest = f"for (size_t h = head; h < end; h++) y[AT(h) + j + {half}] = x[AT(h) + j + {half}];"
    return f"""
    const uint j = thread_position_in_grid.x, l = thread_position_in_grid.y;
    const size_t groups = (S_size + {HEADS - 1}) / {HEADS};
    const size_t example = thread_position_in_grid.z / groups;
    const size_t head = thread_position_in_grid.z % groups * {HEADS};
    const size_t end = metal::min(head + {HEADS}, size_t(S_size));
    if (j < {half}) {{
        const float angle = float(long({offset}) + l) * scale * ({frequency});
        const A c = A(metal::cos(angle)), s = A({sign}metal::sin(angle));
        for (size_t h = head; h < end; h++) {{
            const A u = A(x[AT(h) + {first}]), v = A(x[AT(h) + {second}]);
            {turned}[AT(h) + {first}] = T(u * c - v * s);
            {turned}[AT(h) + {second}] = T(u * s + v * c);
        }}
    }}
    {f"else {rest}" if turned == "y" else ""}
"""


def _turn(
    x: Any, dims: int, traditional: bool, sign: int, offset: Any, others: tuple[Any, ...]
) -> Any:
    """Turn the pairs of an array in place, in ordinary array code."""
    *freqs, base, scale = others
    of, half = library(x), dims // 2
    if hasattr(offset, "shape"):
        index = (..., *[None] * (x.ndim - 1))
        offset = offset[index]
    position = cast(offset + count(x.shape[-2], x)[:, None], "float32")
    j = cast(count(half, x), "float32")
    angle = position * scale * (1 / freqs[0] if freqs else 2.0 ** (-math.log2(base) * j / half))
    c, s = of.cos(angle), of.sin(angle) * sign
    first, second = slice(half), slice(half, dims)
    if traditional:
        first, second = slice(0, dims, 2), slice(1, dims, 2)
    u, v = widened(x[..., first]), widened(x[..., second])
    x[..., first], x[..., second] = cast(u * c - v * s, x.dtype), cast(u * s + v * c, x.dtype)
    return x


_HEADER = "#define AT(h) (((example * S_size + (h)) * L + l) * D)"


@ferrule.family
def _rope(
    dims: int, traditional: bool, offsets: str, by_freqs: bool, backwards: bool
) -> ferrule.Op:
    says = _declaration(dims, traditional, offsets, by_freqs)
    op = ferrule.op(
        "rope",
        f"x[{says['dims']}]:T, {says['inputs']} -> y[{says['dims']}]:T where {says['where']}",
        metal=_body(dims, traditional, offsets, by_freqs, "y", "-" * backwards),
        header=_HEADER,
        cuda=body(dims, traditional, offsets, by_freqs, "y", "-" * backwards),
        reference=lambda x, offset, *others: _turn(
            copy(x), dims, traditional, -1 if backwards else 1, offset, others
        ),
        version=1,
        grid=(f"D - {dims // 2}", "L", groups(offsets)),
        threadgroup=(f"min(D - {dims // 2}, 64)", f"max(256 // max(D - {dims // 2}, 4), 1)", 1),
        template={"A": "float64 if T == float64 else float32"},
    )

    # What turns is linear, and its transpose turns back.
    @op.def_vjp
    def _(primals: Any, cotangents: Any, outputs: Any) -> Any:
        back = _rope(dims, traditional, offsets, by_freqs, not backwards)
        return (back(cotangents[0], *primals[1:]), *[None] * (len(primals) - 1))

    @op.def_jvp
    def _(primals: Any, tangents: Any, outputs: Any) -> Any:
        return op(tangents[0], *primals[1:])

    return op


@ferrule.family
def _rope_in_place(dims: int, traditional: bool, offsets: str, by_freqs: bool) -> ferrule.Op:
    says = _declaration(dims, traditional, offsets, by_freqs)
    return ferrule.op(
        "rope_in_place",
        f"x[{says['dims']}]:T!, {says['inputs']} -> where {says['where']}",
        metal=_body(dims, traditional, offsets, by_freqs, "x"),
        header=_HEADER,
        cuda=body(dims, traditional, offsets, by_freqs, "x"),
        reference=lambda x, offset, *others: _turn(x, dims, traditional, 1, offset, others),
        version=1,
        grid=(dims // 2, "L", groups(offsets)),
        threadgroup=(min(dims // 2, 64), max(256 // max(dims // 2, 4), 1), 1),
        template={"A": "float64 if T == float64 else float32"},
    )
