"""Matrix products as steps of a CUDA unit: how they are declared, and what is multiplied in one
call."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from ..dtypes import BY_NAME, Dtype, bfloat16, float16, float32
from ..errors import KernelError, KernelTypeError
from ..rules.argument import Dim
from ..rules.expression import Expression
from ..unit import Fill, Product, Step
from .expressions import known_size
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
    if step.factors is not None and (step.alpha, step.beta) != (1, 0):
        raise KernelError(
            f"{where}: got alpha={step.alpha!r}, beta={step.beta!r} and "
            f"factors={step.factors!r}; expected one of both ways to say them."
        )
    for name in ("transpose_a", "transpose_b", "tf32"):
        if not isinstance(getattr(step, name), bool):
            raise KernelTypeError(f"{where}: `{name}` is {getattr(step, name)!r}; expected a bool.")


def check_fits(
    op: str,
    step: MatmulStep,
    arrays: Mapping[str, tuple[str, Sequence[Dim]]],
    choices: Mapping[str, Sequence[str]],
) -> None:
    """Refuse what is no product in any call, as far as the rule tells.

    Args:
        op, step: what was declared.
        arrays: the dtypes or variables, and the dims, of inputs, outputs and scratch arrays.
        choices: the dtypes that variables may be; any where there are none.

    Raises:
        KernelError: it is none; says what was declared and expected.
    """
    names = (step.a, step.b, step.out)
    kinds = {name: arrays[name][0] for name in names}
    dims = {name: arrays[name][1] for name in names}

    def may_be(name: str, kind: Dtype) -> bool:
        declared = kinds[name]
        if declared in BY_NAME:
            return declared == kind.name
        return kind.name in choices.get(declared, (kind.name,))

    if not any(
        may_be(step.a, kind)
        and may_be(step.b, kind)
        and (may_be(step.out, kind) or may_be(step.out, float32))
        for kind in KINDS
    ):
        raise _not_multiplied(op, step, kinds)
    if step.factors is not None:
        kind, shape = arrays[step.factors]
        if kind != "float32" or _count(shape, 0) not in (2, None):
            raise KernelError(
                f"[op] op {op!r}: `factors` of a product is {step.factors!r} of {kind}, "
                f"({', '.join(map(str, shape))}); expected float32 and two elements."
            )
    a, b, out = (_last(dims[name]) for name in names)
    m, k = reversed(a) if step.transpose_a else a
    inner, n = reversed(b) if step.transpose_b else b
    pairs = [(k, inner), (n, out[1])]
    if step.transpose_a or max(len(dims[name]) for name in (step.a, step.out)) <= 2:
        pairs.append((m, out[0]))  # of several matrices the rows may be counted together
    if any(_differ(*pair) for pair in pairs) or _counts_differ(step, dims):
        raise _misfit(op, step, dims, "do not fit")


_NO_DIM = Expression(("int", 1))  # of an array with fewer than two dims


def _last(dims: Sequence[Dim]) -> tuple[Expression | None, Expression | None]:
    """The last two dims; None of those that a call decides."""
    found: list[Expression | None] = [_NO_DIM, _NO_DIM]
    for i, dim in enumerate(reversed(dims[-2:]), 1):
        if not isinstance(dim, Expression):
            found[: 3 - i] = [None] * (3 - i)
            break
        found[-i] = dim
    return found[0], found[1]


def _differ(one: Expression | None, other: Expression | None) -> bool:
    """Whether two sizes are never the same, or a dim stands against one that is not there."""
    if one is None or other is None:
        return False
    values = known_size(one), known_size(other)
    if None in values:
        return one is _NO_DIM or other is _NO_DIM
    return values[0] != values[1]


def _counts_differ(step: MatmulStep, dims: Mapping[str, Sequence[Dim]]) -> bool:
    """Whether there are never as many matrices, or rows, as `product` asks for."""
    a, b, out = (dims[name] for name in (step.a, step.b, step.out))
    one_for_all = _count(b, 2)
    if step.transpose_a or one_for_all not in (1, None):
        many = {_count(a, 2), one_for_all} - {1, None}
        return len(many | ({_count(out, 2)} - {None})) > 1
    rows = _count(a, 1), _count(out, 1)
    return one_for_all == 1 and None not in rows and rows[0] != rows[1]


def _count(dims: Sequence[Dim], last: int) -> int | None:
    """The product of the sizes of all dims but the last ones; None where a call decides."""
    count = 1
    for i, dim in enumerate(reversed(dims)):
        size = known_size(dim) if isinstance(dim, Expression) and i >= last else 1
        if size is None or not isinstance(dim, Expression):
            return None
        count *= size
    return count


def check_dtypes(op: str, step: MatmulStep, dtypes: Mapping[str, Dtype]) -> None:
    """Refuse dtypes that are not multiplied.

    Raises:
        KernelError: that is so; says which are.
    """
    a, b, out = (dtypes[name] for name in (step.a, step.b, step.out))
    if a in KINDS and b == a and out in (a, float32):
        return
    raise _not_multiplied(op, step, {name: dtypes[name].name for name in dtypes})


def _not_multiplied(op: str, step: MatmulStep, kinds: Mapping[str, str]) -> KernelError:
    """The error for dtypes that are not multiplied."""
    return KernelError(
        f"[op] op {op!r}: a step multiplies {step.a!r} of {kinds[step.a]} and {step.b!r} of "
        f"{kinds[step.b]} to {step.out!r} of {kinds[step.out]}; expected two of "
        "float32, float16 or bfloat16, and a product of the same dtype or float32."
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
    op: str, step: MatmulStep, shapes: Mapping[str, Sequence[Any]], wrong: str
) -> KernelError:
    """The error for shapes that are not multiplied."""
    a = "(…, k, m)" if step.transpose_a else "(…, m, k)"
    b = "(…, n, k)" if step.transpose_b else "(…, k, n)"
    given = ", ".join(
        f"{name!r} ({', '.join(map(str, shapes[name]))})" for name in (step.a, step.b, step.out)
    )
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
        read = 0 if step.factors is None else address[step.factors]
        return [product._replace(factors=(alpha, beta), addresses=(*places, read))]
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
