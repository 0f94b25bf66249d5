"""Matrix products as steps of a CUDA unit: how they are declared, and what is multiplied in one
call."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from ..dtypes import Dtype, bfloat16, float16, float32
from ..errors import KernelError, KernelTypeError
from ..rules.expression import Expression
from ..unit import Fill, Product, Step
from .unit_parts import MatmulStep, UnitStep

WORKSPACE = 32 << 20  # bytes that cuBLAS may use: FR_CUBLAS_WORKSPACE of runtime/cublas.h
KINDS = (float32, float16, bfloat16)
_MOST = 2**31 - 1  # rows, columns, and matrices of a batch


class _Matrices(NamedTuple):
    """An array as matrices, of rows and columns; fewer than two dims are a matrix of one row."""

    number: int
    rows: int
    columns: int


def _matrices(shape: Sequence[int]) -> _Matrices:
    count = rows = columns = 1
    for size in shape:
        count, rows, columns = count * rows, columns, size
    return _Matrices(count, rows, columns)


def check(where: str, step: MatmulStep, numbers: Mapping[str, str]) -> None:
    """Refuse what is no product, whatever the sizes.

    Args:
        where: how messages call the step.
        step: what was declared.
        numbers: the dtypes of the rule's numbers.

    Raises:
        KernelError, KernelTypeError: a factor is no number; says what was expected.
    """
    if step.out in (step.a, step.b):
        raise KernelError(
            f"{where}: {step.out!r} is multiplied, and is the product; write that to another array."
        )
    for name in ("alpha", "beta"):
        value = getattr(step, name)
        if isinstance(value, str):
            if numbers.get(value) != "float32":
                known = ", ".join(n for n, kind in numbers.items() if kind == "float32") or "none"
                raise KernelError(
                    f"{where}: `{name}` is {value!r}; expected a float, or one of the rule's "
                    f"float32 numbers ({known})."
                )
        elif isinstance(value, bool) or not isinstance(value, (int, float)):
            raise KernelTypeError(f"{where}: `{name}` is {value!r}; expected a float.")
        elif not abs(value) <= float(np.finfo(np.float32).max):
            raise KernelError(f"{where}: `{name}` is {value!r}, which float32 does not hold.")
    for name in ("transpose_a", "transpose_b", "tf32"):
        if not isinstance(getattr(step, name), bool):
            raise KernelTypeError(f"{where}: `{name}` is {getattr(step, name)!r}; expected a bool.")


def check_dtypes(op: str, step: MatmulStep, dtypes: Mapping[str, Dtype]) -> None:
    """Refuse dtypes that are not multiplied.

    Raises:
        KernelError: that is so; says which are.
    """
    a, b, out = (dtypes[name] for name in (step.a, step.b, step.out))
    if a in KINDS and b == a and out in (a, float32):
        return
    raise KernelError(
        f"[op] op {op!r}: a step multiplies {step.a!r} of {a.name} and {step.b!r} of {b.name} to "
        f"{step.out!r} of {out.name}; expected two of float32, float16 or bfloat16, and a product "
        "of the same dtype or float32."
    )


def workspace(steps: Iterable[UnitStep]) -> Expression | None:
    """How many bytes cuBLAS gets in a call: 0 where no product has a `when` that holds. None where
    there are no products. All have the same, one after the other."""
    conditions = [step.when for step in steps if isinstance(step, MatmulStep)]
    nodes = [condition.node for condition in conditions if condition is not None]
    if not conditions:
        return None
    if len(nodes) < len(conditions):
        return Expression(("int", WORKSPACE))
    holds = functools.reduce(lambda one, other: ("or", one, other), nodes)
    return Expression(("if", holds, ("int", WORKSPACE), ("int", 0)))


def product(
    op: str, step: MatmulStep, shapes: Mapping[str, Sequence[int]], dtypes: Mapping[str, Dtype]
) -> Product | None:
    """What is multiplied in one call, without addresses; None where there is nothing to write.

    Raises:
        KernelError: the shapes or dtypes do not fit; says what was given and expected.
    """
    check_dtypes(op, step, dtypes)
    a, b, out = (_matrices(shapes[name]) for name in (step.a, step.b, step.out))
    if b.number == 1 and not step.transpose_a:  # one matrix, of all the rows
        a, out = (_Matrices(1, one.number * one.rows, one.columns) for one in (a, out))
    m, k = (a.columns, a.rows) if step.transpose_a else (a.rows, a.columns)
    inner, n = (b.columns, b.rows) if step.transpose_b else (b.rows, b.columns)
    fits = k == inner and (out.rows, out.columns) == (m, n)
    if not (fits and {a.number, b.number} <= {1, out.number}):
        raise _misfit(op, step, shapes, "do not fit")
    if max(m, n, k, out.number) > _MOST:
        raise _misfit(op, step, shapes, f"have more than {_MOST} rows, columns or matrices")
    if 0 in (m, n, out.number):
        return None
    return Product(
        f"{step.out} = {_shown(step.a, step.transpose_a)} @ {_shown(step.b, step.transpose_b)}",
        m, n, k, out.number,
        a.rows * a.columns * (a.number > 1), b.rows * b.columns * (b.number > 1),
        step.transpose_a, step.transpose_b, dtypes[step.a].name, dtypes[step.out].name, step.tf32,
    )  # fmt: skip


def _shown(name: str, transposed: bool) -> str:
    return f"{name} transposed" if transposed else name


def _misfit(
    op: str, step: MatmulStep, shapes: Mapping[str, Sequence[int]], wrong: str
) -> KernelError:
    """The error for shapes that are not multiplied."""
    a = "(…, k, m)" if step.transpose_a else "(…, m, k)"
    b = "(…, n, k)" if step.transpose_b else "(…, k, n)"
    given = ", ".join(f"{name!r} {tuple(shapes[name])}" for name in (step.a, step.b, step.out))
    return KernelError(
        f"[op] op {op!r}: the shapes of a product, {given}, {wrong}; expected {a}, {b} and "
        "(…, m, n), with as many matrices, or one for all."
    )


def multiplied(
    op: str,
    step: MatmulStep,
    product: Product,
    address: Mapping[str, int],
    numbers: Mapping[str, bytes],
) -> list[Step]:
    """The step with its arrays.

    Args:
        op, step, product: what is multiplied.
        address: where arrays lie, and under ``""`` the workspace.
        numbers: the bytes of the rule's numbers.

    Raises:
        KernelError: nothing is summed, and ``beta`` is neither 0 nor 1.
    """
    alpha, beta = (
        float(np.frombuffer(numbers[value], np.float32)[0]) if isinstance(value, str) else value
        for value in (step.alpha, step.beta)
    )
    if product.k:
        places = (address[name] for name in (step.a, step.b, step.out, ""))
        return [product._replace(factors=(alpha, beta), addresses=(*places,))]
    if beta == 1:
        return []
    if beta != 0:
        raise KernelError(
            f"[op] op {op!r}: a product sums over no elements, and `beta` is {beta}; expected 0 or "
            "1 there."
        )
    size = 4 if product.out_dtype == "float32" else 2
    count = math.prod((product.m, product.n, product.batch))
    return [Fill(address[step.out], count * size, b"\0")]
