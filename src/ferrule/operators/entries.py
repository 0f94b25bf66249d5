"""Ops that C runs: the tables of kernels/entries.py, of an op's rule and bodies."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import dtypes
from ..errors import KernelError, KernelTypeError
from ..hosts import protocol as hosts
from ..kernels import entries as tables
from ..kernels.entries import CPU, CUDA, Bound, Prepared, Request, device_of, facts_of
from ..rules.argument import Argument
from ..rules.bytecode import compile_rule
from ..rules.expression import Expression
from ..spec import Facts, row_contiguous_strides
from ..tools import fastcall
from . import call as op_call
from .bodies import KernelBody
from .launch import Arguments, check_empty, prepare

if TYPE_CHECKING:
    from .declared import Declared

_int64 = ctypes.c_int64


class BoundOp(Bound):
    """An op that C runs."""

    def __init__(
        self, op: Declared, words: ctypes.Array[ctypes.c_int64], on_cuda: Callable[[], None] | None
    ) -> None:
        super().__init__()
        self.op, self.words = op, words
        self.on_cuda = on_cuda  # called before an entry for a GPU is used

    def prepared(self, request: Request) -> Prepared:
        """The launch that a request asks for; raises what is wrong with it."""
        op = self.op
        device = device_of(request)
        arguments = self.arguments(request, device)
        call = op_call.bound(op, device, arguments)
        results = call.results
        if request.status == tables.SHARED:
            op_call.check_apart(op, arguments)
        body = op_call.choose(call)
        if not isinstance(body, KernelBody):
            raise KernelError(f"[op] op {op.name!r} cannot be carried out in C for these sizes.")
        body_launch = body.launch_for(call.binding)
        at = (
            request.output_pointer[: len(results)] if request.output_pointer else [0] * len(results)
        )
        outputs = [
            Facts(kind, shape, row_contiguous_strides(shape), pointer or 0, device)
            for (shape, kind), pointer in zip(results, at, strict=True)
        ]
        if 0 in body_launch.grid:
            check_empty(op.name, op.rule, body_launch, outputs)
        program, facts, written, launch, owners = prepare(call, body, body_launch, outputs)
        prepared = Prepared(program, facts, written, launch, owners)
        prepared.check_ended(request, body.kernel, [output.name for output in op.rule.outputs])
        if request.body < 0:
            shapes = ", ".join(
                f"{n} {f.shape}" for n, f in arguments.items() if isinstance(f, Facts)
            )
            raise KernelError(
                f"[op] op {op.name!r} was called with {shapes}; expected 16 dims at most, and "
                "sizes that 64 bits can hold."
            )
        if device != "cpu" and self.on_cuda is not None:
            self.on_cuda()
        return prepared.placed(request)

    def arguments(self, request: Request, device: str) -> Arguments:
        """The facts of a call's inputs."""
        values: list[Any] = []  # numbers, and the places of arrays
        for i, parameter in enumerate(self.op.rule.inputs):
            kind = "" if parameter.dims is not None else dtypes.BY_NAME[parameter.dtype].kind
            if not kind:
                values.append(i if request.input[i].present else None)
            elif kind == "b":
                values.append(bool(request.integer[i]))
            else:
                values.append(request.number[i] if kind == "f" else request.integer[i])
        first: tuple[str, tuple[int, int]] | None = None

        def facts_at(parameter: Argument, i: int) -> Facts:
            nonlocal first
            label, entry = op_call.label_of(self.op, parameter), request.input[i]
            if request.host_device:
                where = (request.host_device[2 * i], request.host_device[2 * i + 1])
                if first is not None and where != first[1]:
                    raise KernelError(
                        f"{label} is on another device than input {first[0]!r}; expected one "
                        "device."
                    )
                first = first or (parameter.name, where)
            if entry.dtype < 0:
                names = ", ".join(d.name for d in dtypes.ALL)
                raise KernelTypeError(f"{label} has a dtype that is none of {names}.")
            return facts_of(request, i, device)

        return op_call.gathered(self.op, values, facts_at)


def serves(op: Declared, kinds: tuple[str, ...]) -> bool:
    """Whether C can run every implementation that may be chosen on a device."""
    tried = [body for body in op.implementations if body.kind != "cuda" or "cuda" in kinds]
    for body in tried:
        if not isinstance(body, KernelBody) or not _plain(body):
            return False
        if body.when is None:
            return True
    return False


def _plain(body: KernelBody) -> bool:
    fill = body.fill
    constant = not isinstance(fill, Expression) and (fill is None or hosts.all_bits_zero(fill))
    count = len(body.dims) <= tables.DIMS and len(body.template) <= tables.TEMPLATE
    return constant and count and not (body.shared.names or body.shared.arrays)


def bind(
    op: Declared, on_cuda: Callable[[], None] | None = None, launches: bool = True
) -> BoundOp | None:
    """The tables of an op for C, or where it ``launches`` nothing, of its rule; None where they
    need more room than C has."""
    bodies = [body for body in op.implementations if isinstance(body, KernelBody) and launches]
    if any(len(body.dims) > tables.DIMS or len(body.template) > tables.TEMPLATE for body in bodies):
        return None
    extra: list[Expression] = []
    places = []
    for body in bodies:
        when = -1
        if body.when is not None:
            when = len(extra)
            extra.append(body.when)
        grid = len(extra)
        extra += [*body.grid, *body.threadgroup]
        templates = [value for _, value in body.template if isinstance(value, Expression)]
        places.append((when, grid, len(templates), len(extra)))
        extra += templates
    program = compile_rule(op.rule, extra)
    numbers = [
        dtypes.BY_NAME[parameter.dtype] for parameter in op.rule.inputs if parameter.dims is None
    ]
    wide = ("b", "i", "u")
    if program is None or len(bodies) > tables.BODIES:
        return None
    floats = ("float32", "float64") if launches else ("float16", "bfloat16", "float32", "float64")
    if any(kind.kind not in wide and kind.name not in floats for kind in numbers):
        return None
    words = (_int64 * len(program.words))(*program.words)
    bound = BoundOp(op, words, on_cuda)
    s = bound.structure
    s.program = ctypes.cast(words, ctypes.POINTER(_int64))
    s.inputs, s.outputs, s.bodies = len(op.rule.inputs), len(op.rule.outputs), len(bodies)
    for i, output in enumerate(op.rule.outputs):
        s.output_names[i] = output.name.encode()
    for i, parameter in enumerate(op.rule.inputs):
        argument = s.input[i]
        argument.optional, argument.mutable_ = parameter.optional, parameter.mutable
        argument.dims = len(parameter.dims or ())
        if parameter.dims is None:
            kind = dtypes.BY_NAME[parameter.dtype]
            argument.dtype = dtypes.ALL.index(kind)
            argument.kind = {"f": tables.FLOAT, "b": tables.BOOL}.get(kind.kind, tables.INT)
    for structure, body, (when, grid, count, first) in zip(s.body, bodies, places, strict=False):
        text = body.kernel.source + body.kernel.header
        structure.devices = CUDA if body.kind == "cuda" else CPU | CUDA
        structure.when, structure.grid = when, grid
        structure.templates, structure.first_template = count, first
        structure.zeroed = body.fill is not None
        structure.contiguous = body.kernel.ensure_row_contiguous
        structure.atomics = "atomic" in text
        places_read = [parameter.name in body.described for parameter in op.rule.inputs]
        structure.described = sum(read << i for i, read in enumerate(places_read))
        structure.dims = len(body.dims)
        for i, name in enumerate(body.dims):
            structure.dim[i] = program.symbols.index(name)
    return bound


@lru_cache(maxsize=1)
def _numpy_in_c() -> Any:
    """The C library, if it takes NumPy's arrays: where outputs can have canaries."""
    hosts.load("numpy")  # registers them
    library = fastcall.library()
    if library is None:
        return None
    tables.register_engine()
    kinds = tuple(np.dtype(kind.numpy) for kind in dtypes.ALL)
    return library if library.register_ops(kinds) else None


def numpy_caller(op: Declared) -> Callable[..., Any]:
    """What runs an op in C for NumPy's arrays, and gives NotImplemented for what C does not do."""
    library = _numpy_in_c()
    if library is None or not serves(op, ("metal",)):
        return not_in_c
    table = bind(op)
    if table is None:
        return not_in_c
    caller: Callable[..., Any] = library.numpy_op(ctypes.addressof(table.structure), table.entry_at)
    return caller


def not_in_c(*_: Any) -> Any:
    """Stands for a caller in C where there is none."""
    return NotImplemented
