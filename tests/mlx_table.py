"""What composes with what in MLX: the table of docs/mlx.md, found by trying each cell.

``python tests/mlx_table.py`` prints it for MLX's default device.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx

import ferrule as fe

I = "uint i = thread_position_in_grid.x;"  # noqa: E741
TEXT = f"{I} y[i] = x[i] * x[i];"
Function = Callable[[mx.array], mx.array]

_kernel = fe.metal_kernel("squares", ["x"], ["y"], TEXT)


def level_0(x: mx.array) -> mx.array:
    (y,) = _kernel(
        inputs=[x], grid=(x.size, 1, 1), threadgroup=(64, 1, 1), output_shapes=[x.shape],
        output_dtypes=[x.dtype],
    )  # fmt: skip
    return y


def level_0_with_expressions(x: mx.array) -> mx.array:
    (y,) = _kernel(
        inputs=[x], grid=("x.size", 1, 1), threadgroup=(64, 1, 1), output_shapes=["x.shape"],
        output_dtypes=[x.dtype],
    )  # fmt: skip
    return y


def _op(name: str) -> fe.Op:
    return fe.op(name, "x[*S]:T -> y[*S]:T", grid="x.size", threadgroup=64, metal=TEXT)


op = _op("squares")
with_rules = _op("squares_with_rules")
_vjp = fe.op(
    "squares_vjp", "x[*S]:T, cotangent[*S]:T -> x_grad[*S]:T", grid="x.size", threadgroup=64,
    metal=f"{I} x_grad[i] = T(2) * x[i] * cotangent[i];",
)  # fmt: skip
with_rules.def_vjp(_vjp)
with_rules.def_jvp(
    fe.op(
        "squares_jvp", "x[*S]:T, x_tangent[*S]:T -> y_tangent[*S]:T", grid="x.size",
        threadgroup=64, metal=f"{I} y_tangent[i] = T(2) * x[i] * x_tangent[i];",
    )
)  # fmt: skip

COLUMNS: dict[str, Function] = {
    "`metal_kernel`, numbers": level_0,
    "`metal_kernel`, expressions": level_0_with_expressions,
    "op": op,
    "op with `def_vjp`, `def_jvp`": with_rules,
}
SIZES = ((2, 3), (4, 5), (2, 3))


def _values(*shape: int) -> mx.array:
    return mx.arange(1, 1 + shape[0] * shape[1]).reshape(shape).astype(mx.float32)


def _same(found: mx.array, expected: mx.array) -> None:
    assert found.shape == expected.shape and mx.array_equal(found, expected).item()


def _each(function: Function, expected: Function) -> None:
    for shape in SIZES:
        x = _values(*shape)
        _same(function(x), expected(x))


def _square(x: mx.array) -> mx.array:
    return x * x


def _grad(f: Function) -> Function:
    return mx.grad(lambda x: f(x).sum())  # type: ignore[no-any-return]


def _exported(f: Function, x: mx.array, shapeless: bool) -> Callable[..., Any]:
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder, "f.mlxfn"))
        mx.export_function(path, f, x, shapeless=shapeless)
        found: Callable[..., Any] = fe.import_function(path)
        return found


def _round_trip(f: Function) -> None:
    for shape in SIZES:
        x = _values(*shape)
        (y,) = _exported(lambda x: f(x) + 1, x, False)(x)
        _same(y, x * x + 1)


def _round_trip_of_a_gradient(f: Function) -> None:
    x = _values(2, 3)
    (y,) = _exported(_grad(f), x, False)(x)
    _same(y, 2 * x)


def _shapeless_round_trip(f: Function) -> None:
    imported = _exported(lambda x: f(x) + 1, _values(2, 3), True)
    for shape in SIZES:
        x = _values(*shape)
        _same(imported(x)[0], x * x + 1)


def _jvp(f: Function) -> None:
    x = _values(2, 3)
    (y,), (tangent,) = mx.jvp(f, [x], [x])
    _same(y, x * x)
    _same(tangent, 2 * x * x)


def _vmap(f: Function) -> None:
    x = _values(4, 3)
    for axis in (0, 1):
        _same(mx.vmap(f, in_axes=axis, out_axes=axis)(x), x * x)


def _custom_function(f: Function) -> None:
    wrapped = mx.custom_function(f)
    wrapped.vjp(lambda x, cotangent, y: 2 * x * cotangent)
    for transform in (lambda g: g, mx.compile):
        _each(transform(_grad(wrapped)), lambda x: 2 * x)


ROWS: dict[str, Callable[[Function], None]] = {
    "a call; `mx.eval`, `mx.async_eval`": lambda f: _each(f, _square),
    "`mx.compile`": lambda f: _each(mx.compile(lambda x: f(x + 1)), lambda x: (x + 1) * (x + 1)),
    "`mx.compile(shapeless=True)`, other sizes": lambda f: _each(
        mx.compile(lambda x: f(x) + 1, shapeless=True), lambda x: x * x + 1
    ),
    "`mx.grad`, `mx.vjp`": lambda f: _each(_grad(f), lambda x: 2 * x),
    "`mx.compile(mx.grad(f), shapeless=True)`": lambda f: _each(
        mx.compile(_grad(f), shapeless=True), lambda x: 2 * x
    ),
    "`mx.jvp`": _jvp,
    "`mx.vmap`": _vmap,
    "`mx.vmap(mx.grad(f))`": lambda f: _each(mx.vmap(_grad(f)), lambda x: 2 * x),
    "`mx.checkpoint`": lambda f: _each(mx.checkpoint(f), _square),
    "`mx.grad(mx.checkpoint(f))`": lambda f: _each(_grad(mx.checkpoint(f)), lambda x: 2 * x),
    "`mx.custom_function` around it": _custom_function,
    "`mx.export_function`, `ferrule.import_function`": _round_trip,
    "the same, shapeless": _shapeless_round_trip,
    "the same of `mx.grad(f)`": _round_trip_of_a_gradient,
}
FILES = list(ROWS)[-3:]

# What a cell that is no says: the pattern of its error, and the note under the table.
NOTES = {
    1: (r"has the shape .* but grid, threadgroup and output shapes were given as numbers",
        "Its sizes are numbers, so other sizes are an error that names the input, both shapes and "
        "`ferrule.op`; where the kernel's own inputs keep their shapes, it works."),
    2: (r"has no (forward-mode )?derivative", "It has no such rule; the error names `def_vjp` or "
        "`def_jvp`. For a `metal_kernel` call, `mx.custom_function` gives one in MLX's own way."),
    3: (r"has no batching rule", "A `metal_kernel` call says nothing of what is independent; an op "
        "does."),
}  # fmt: skip


def cell(row: str, column: str) -> str:
    """``"yes"``, or the number of the note that says why not."""
    import re

    try:
        ROWS[row](COLUMNS[column])
    except Exception as error:
        for number, (pattern, _) in NOTES.items():
            if re.search(pattern, str(error)):
                return f"no ({number})"
        raise
    return "yes"


def line(row: str) -> str:
    """A row of the table."""
    return f"| {row} | {' | '.join(cell(row, column) for column in COLUMNS)} |"


def table() -> str:
    """The table of docs/mlx.md."""
    lines = [f"| | {' | '.join(COLUMNS)} |", "|---" * (len(COLUMNS) + 1) + "|"]
    lines += [line(row) for row in ROWS]
    notes = [f"({number}) {text}" for number, (_, text) in NOTES.items()]
    return "\n".join([*lines, "", *notes])


if __name__ == "__main__":
    print(table())
