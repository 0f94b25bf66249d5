"""Ops that C runs: the tables of kernels/entries.py, of an op's rule and bodies."""

from __future__ import annotations

import ctypes
import itertools
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from .. import dtypes
from ..devices import protocol as devices
from ..errors import FerruleError, KernelError, KernelTypeError
from ..hosts import protocol as hosts
from ..kernels import entries as tables
from ..kernels.entries import (
    CPU,
    CUDA,
    BodyTable,
    Bound,
    OpTable,
    Prepared,
    Request,
    device_of,
    facts_of,
)
from ..rules.argument import Argument
from ..rules.bytecode import OF_DEVICE, RuleProgram, compile_rule
from ..rules.expression import DEVICE_NUMBERS, Expression
from ..spec import Facts, row_contiguous_strides
from ..tools import fastcall
from . import call as op_call
from .bodies import KernelBody
from .launch import Arguments, bound, check_empty, prepare
from .runners import Runner

if TYPE_CHECKING:
    from ..rules.rule import Rule
    from .declared import Declared
    from .unit_steps import Implementation

_int64 = ctypes.c_int64


class BoundOp(Bound):
    """An op that C runs."""

    def __init__(
        self, op: Declared, structure: OpTable, on_cuda: Callable[[], None] | None
    ) -> None:
        super().__init__(structure)
        self.op = op
        self.on_cuda = on_cuda  # called before an entry for a GPU is used

    def prepared(self, request: Request) -> Prepared:
        """The launch that a request asks for; raises what is wrong with it."""
        op = self.op
        device = device_of(request)
        arguments = self.arguments(request, device)
        call = bound(op, device, arguments)
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
            inputs = ", ".join(
                f"{name} {value.shape}" if isinstance(value, Facts) else f"{name} = {value}"
                for name, value in arguments.items()
            )
            raise KernelError(
                f"[op] op {op.name!r} was called with {inputs}; expected 16 dims at most, and "
                "sizes, also within expressions, that 64 bits can hold."
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


def serves(op: Declared, kinds: tuple[str, ...], functions: bool = False) -> bool:
    """Whether C can run every implementation that may be chosen on a device; or, with
    ``functions``, some, where the others are Python functions."""
    tried = [body for body in op.implementations if body.kind != "cuda" or "cuda" in kinds]
    kernels = 0
    for body in tried:
        if isinstance(body, KernelBody) and _plain(body):
            kernels += 1
        elif not (functions and isinstance(body, Runner)):
            return False
        if body.when is None:
            return kernels > 0
    return False


def _plain(body: KernelBody) -> bool:
    fill = body.fill
    constant = not isinstance(fill, Expression) and (fill is None or hosts.all_bits_zero(fill))
    return constant and body.shared.constant


def bind(
    op: Declared,
    on_cuda: Callable[[], None] | None = None,
    launches: bool = True,
    functions: bool = False,
) -> BoundOp | None:
    """The tables of an op for C, or where it ``launches`` nothing, of its rule; None where they
    need more room than C has. ``functions`` of Python are among them, for which C finds no
    launch."""
    kinds = (KernelBody, Runner) if functions else (KernelBody,)
    bodies = [body for body in op.implementations if isinstance(body, kinds) and launches]
    floats = ("float32", "float64") if launches else ("float16", "bfloat16", "float32", "float64")
    numbers = [dtypes.BY_NAME[p.dtype] for p in op.rule.inputs if p.dims is None]
    if any(kind.kind not in "biu" and kind.name not in floats for kind in numbers):
        return None
    bound = table_of(op.rule, bodies)
    return None if bound is None else BoundOp(op, bound[0], on_cuda)


def templates_of(body: Implementation) -> list[tuple[str, Expression]]:
    """The template parameters that are expressions."""
    if isinstance(body, Runner):
        return []
    return [(name, value) for name, value in body.template if isinstance(value, Expression)]


def expressions_of(body: Implementation) -> list[Expression]:
    """What a launch is worked out from: sizes of a body, template values, and the condition."""
    sizes = [*body.grid, *body.threadgroup] if isinstance(body, KernelBody) else []
    if isinstance(body, Runner):
        sizes = [Expression(("neg", ("int", 1)))] * 6  # which no launch has
    templates = [value for _, value in templates_of(body)]
    return [*sizes, *templates, *([] if body.when is None else [body.when])]


def _tell_gpu(gpu: int, facts: Any) -> int:
    """What C asks once of each GPU, for an op whose launch depends on it."""
    try:
        known = devices.described(f"cuda:{gpu}")
    except FerruleError:
        return 1  # Python finds out the same, and says it
    for i, name in enumerate(DEVICE_NUMBERS):
        facts[1 + i] = known[name]
    return 0


_TELL_GPU = tables.TELL_GPU(_tell_gpu)


def table_of(
    rule: Rule, bodies: Sequence[Implementation], more: Sequence[Expression] = ()
) -> tuple[OpTable, RuleProgram] | None:
    """The table of an op for C, and its program, which has the expressions of all bodies, and then
    ``more``. None where they need more room than C has."""
    known = [expressions_of(body) for body in bodies]
    read = [body.dims for body in bodies if isinstance(body, KernelBody)]
    stars = [
        Expression(("name", name)) for name in itertools.chain(*read) if name in rule.star_sizes
    ]
    program = compile_rule(rule, [*itertools.chain(*known), *more, *stars])
    if program is None or any(len(templates_of(body)) > tables.MOST_TEMPLATES for body in bodies):
        return None
    table = tables.new_table(len(bodies))
    table.program = (_int64 * len(program.words))(*program.words)
    table.inputs, table.outputs = len(rule.inputs), len(rule.outputs)
    for i, output in enumerate(rule.outputs):
        table.output_names[i] = output.name.encode()
    for argument, parameter in zip(table.input, rule.inputs, strict=False):
        argument.optional, argument.mutable_ = parameter.optional, parameter.mutable
        argument.dims = len(parameter.dims or ())
        if parameter.dims is None:
            kind = dtypes.BY_NAME[parameter.dtype]
            argument.dtype = dtypes.ALL.index(kind)
            argument.kind = {"f": tables.FLOAT, "b": tables.BOOL}.get(kind.kind, tables.INT)
    for i, symbol in enumerate(OF_DEVICE):
        if symbol in program.symbols and symbol not in (*rule.dim_names, *rule.numbers):
            table.device_symbol[i] = program.symbols.index(symbol)
    table.tell_gpu = _TELL_GPU
    first = 0
    for i, body in enumerate(bodies):
        _fill_body(table.body[i], body, first, rule, program)
        first += len(known[i])
    return table, program


def _fill_body(
    structure: BodyTable, body: Implementation, first: int, rule: Rule, program: RuleProgram
) -> None:
    """Fill in how a body is launched, given the number of the first of its expressions."""
    structure.devices = CUDA if body.kind == "cuda" else CPU | CUDA
    structure.contiguous = body.contiguous
    structure.grid, structure.first_template = first, first
    structure.templates = len(templates_of(body))
    if isinstance(body, (KernelBody, Runner)):
        structure.first_template += 6
    if isinstance(body, KernelBody):
        structure.zeroed = body.fill is not None
        structure.atomics = "atomic" in body.kernel.source + body.kernel.header
        read = [parameter.name in body.described for parameter in rule.inputs]
        structure.described = sum(bit << i for i, bit in enumerate(read))
        structure.dims = len(body.dims)
        for i, name in enumerate(body.dims):
            structure.dim[i] = program.symbols.index(name)
    structure.when = -1
    if body.when is not None:
        structure.when = structure.first_template + structure.templates


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
    if library is None or not serves(op, ("metal",), functions=True):
        return not_in_c
    table = bind(op, functions=True)
    if table is None:
        return not_in_c
    caller: Callable[..., Any] = library.numpy_op(ctypes.addressof(table.structure), table.entry_at)
    return caller


def not_in_c(*_: Any) -> Any:
    """Stands for a caller in C where there is none."""
    return NotImplemented
