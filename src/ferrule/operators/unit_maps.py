"""Tensor maps as arguments of steps of a CUDA unit: how they are declared, and what one call's are.

A tensor map tells the tensor memory accelerator (TMA, compute capability 9.0) where an array lies
and which boxes of it are copied at once. The driver encodes it for each launch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from ..dtypes import Dtype
from ..errors import KernelError, KernelTypeError
from ..rules.argument import Dim
from ..rules.expression import Expression
from ..unit import TensorMap
from .expressions import expression_from_json, known_size, to_json

MOST_RANK, MOST_BOX = 5, 256
# In the order of CUDA's numbers for them.
SWIZZLES = {"none": 0, "32B": 32, "64B": 64, "128B": 128}  # the bytes that a row of a box may have
PROMOTIONS = ("none", "64B", "128B", "256B")
FILLS = ("zeros", "nan")
_EXPRESSIONS = ("dims", "strides", "box")


@dataclass(frozen=True)
class MapArgument:
    """A tensor map: what `cuda_tensor_map` returns, and the same bound to a rule: then ``dims``,
    ``strides`` and ``box`` are tuples of expressions."""

    array: str
    box: Any
    dims: Any
    strides: Any
    swizzle: str
    l2: str
    fill: str

    def __str__(self) -> str:
        return f"the tensor map of {self.array}"


def cuda_tensor_map(
    array: str,
    box: Sequence[int | str],
    *,
    dims: Sequence[int | str] | None = None,
    strides: Sequence[int | str] | None = None,
    swizzle: str = "none",
    l2: str = "none",
    fill: str = "zeros",
) -> MapArgument:
    """An argument of a `cuda_step`: a tensor map (CUtensorMap) of an array, by value, which the
    function takes as ``const __grid_constant__ CUtensorMap``.

    All sizes are in elements and in the order of the array's dims, the last of which lies without
    gaps. Coordinates in PTX have the opposite order.

    Args:
        array: an input that is always there, an output or a scratch array; it may be written.
        box: the sizes that are copied at once: 1 to 256 each, the last of a multiple of 16 bytes.
        dims: the sizes of what is mapped, 1 to 5 of them: ints or expressions; None for the
            declared dims of the array.
        strides: of all dims but the last, ints or expressions, of multiples of 16 bytes; None where
            rows follow each other.
        swizzle: how rows of a box lie in shared memory: ``"none"``, ``"32B"``, ``"64B"`` or
            ``"128B"``, which is also how long they may be.
        l2: what is fetched to the L2 cache at once: ``"none"``, ``"64B"``, ``"128B"``, ``"256B"``.
        fill: what lies outside of the array: ``"zeros"``, or ``"nan"`` for floats.

    Raises:
        KernelError: ``swizzle``, ``l2`` or ``fill`` is none of these.
        KernelError, KernelTypeError, RuleError: from `ferrule.op` or a call, where the rest is not
            so; before anything is started.
        DeviceError: from a call: the GPU has none.
    """
    declared = MapArgument(array, box, dims, strides, swizzle, l2, fill)
    _check_choices(f"[step] the tensor map of {array!r}", declared)
    return declared


def _check_choices(label: str, value: MapArgument) -> None:
    for name, known in (("swizzle", tuple(SWIZZLES)), ("l2", PROMOTIONS), ("fill", FILLS)):
        if getattr(value, name) not in known:
            listed = ", ".join(map(repr, known))
            raise KernelError(
                f"{label}: `{name}` is {getattr(value, name)!r}; expected one of {listed}."
            )


def bound(
    label: str,
    value: MapArgument,
    declared: Mapping[str, Sequence[Dim]],
    expression: Callable[[object], Expression],
) -> MapArgument:
    """A map whose sizes are expressions.

    Args:
        label: how messages call the argument.
        value: what was declared.
        declared: the dims of the arrays that have maps.
        expression: reads an int or text.

    Raises:
        KernelError, KernelTypeError, RuleError: it is no tensor map; says why.
    """
    if value.array not in declared:
        listed = ", ".join(sorted(declared)) or "none"
        raise KernelError(
            f"{label}: there is no tensor map of {value.array!r}; expected an array that is always "
            f"there ({listed})."
        )
    _check_choices(label, value)  # which may come from a file
    dims = declared[value.array] if value.dims is None else value.dims
    if not all(isinstance(dim, (int, str, Expression)) for dim in dims):
        raise KernelError(
            f"{label}: {value.array!r} has a dim of several, so say `dims`, such as "
            'dims=("x.size // max(K, 1)", "K").'
        )
    sizes = _several(label, "dims", dims, expression)
    rank = len(sizes)
    if not 1 <= rank <= MOST_RANK:
        raise KernelError(f"{label}: it has {rank} dims; expected 1 to {MOST_RANK}.")
    rows = list(sizes[1:])
    for i in range(rank - 2, 0, -1):
        rows[i - 1] = Expression(("*", rows[i - 1].node, rows[i].node))
    given = rows if value.strides is None else value.strides
    strides = _several(label, "strides", given, expression)
    box = _several(label, "box", value.box, expression)
    for name, found, expected in (("strides", strides, rank - 1), ("box", box, rank)):
        if len(found) != expected:
            raise KernelError(
                f"{label}: `{name}` has {len(found)} sizes for {rank} dims; expected {expected}."
            )
    for size in box:
        if (fixed := known_size(size)) is not None and not 1 <= fixed <= MOST_BOX:
            raise KernelError(
                f"{label}: `box` has the size {size}; expected 1 to {MOST_BOX} along each dim."
            )
    return replace(value, dims=sizes, strides=strides, box=box)


def _several(
    label: str, name: str, values: Any, expression: Callable[[object], Expression]
) -> tuple[Expression, ...]:
    if isinstance(values, str) or not isinstance(values, Sequence):
        raise KernelTypeError(f'{label}: `{name}` is {values!r}; expected sizes such as (64, "K").')
    found = tuple(one if isinstance(one, Expression) else expression(one) for one in values)
    for one in found:
        if one.condition:
            raise KernelError(f"{label}: `{name}` has the condition {one}; expected a size.")
    return found


def for_call(
    label: str, bound_map: MapArgument, dtype: Dtype, size: Callable[[Expression], int]
) -> TensorMap:
    """The map of one call, without its address.

    Args:
        label: how messages call the argument.
        bound_map, dtype: what is mapped.
        size: the value of an expression.

    Raises:
        KernelError: sizes that no tensor map has; says which are allowed.
    """
    dims, strides, box = (tuple(map(size, getattr(bound_map, name))) for name in _EXPRESSIONS)
    item = dtype.itemsize
    row, most = box[-1] * item, SWIZZLES[bound_map.swizzle]
    wrong = ""
    if not all(1 <= dim <= 2**31 for dim in dims):
        wrong = f"dims {dims}; expected 1 to 2**31 each"
    elif not all(0 < step * item < 2**40 and step * item % 16 == 0 for step in strides):
        wrong = f"strides {strides} of {dtype.name}; expected multiples of 16 bytes, below 2**40"
    elif not all(1 <= length <= MOST_BOX for length in box):
        wrong = f"the box {box}; expected 1 to {MOST_BOX} along each dim"
    elif row % 16 or (most and row > most):
        limit = f", {most} at most with this swizzle" if most else ""
        wrong = f"the box {box} of {dtype.name}; expected rows of a multiple of 16 bytes{limit}"
    elif bound_map.fill == "nan" and (dtype.kind != "f" or item == 1):
        wrong = f"the fill 'nan' for {dtype.name}; expected 'zeros'"
    if wrong:
        raise KernelError(f"{label}: {bound_map} has {wrong}.")
    numbers = (
        list(SWIZZLES).index(bound_map.swizzle),
        PROMOTIONS.index(bound_map.l2),
        FILLS.index(bound_map.fill),
    )
    return TensorMap(dtype.name, item, dims, strides, box, numbers)


def placed(op: str, bound_map: MapArgument, one: TensorMap, address: int) -> TensorMap:
    """A map with its array.

    Raises:
        KernelError: the array does not begin where a tensor map's can.
    """
    if not address or address % 16:
        raise KernelError(
            f"[op] op {op!r}: {bound_map} is for arrays that begin at a multiple of 16 bytes, and "
            "this one does not; give a copy."
        )
    return one._replace(address=address)


def map_to_json(value: MapArgument) -> Any:
    """All that decides what a bound map is."""
    sizes = {name: to_json(getattr(value, name)) for name in _EXPRESSIONS}
    return {**asdict(replace(value, box=None, dims=None, strides=None)), **sizes}


def map_from_json(data: Any) -> MapArgument:
    """The reverse of `map_to_json`."""
    sizes = {name: expression_from_json(data[name]) for name in _EXPRESSIONS}
    return MapArgument(**{**data, **sizes})
