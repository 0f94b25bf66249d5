"""The C text of the library in a package: its ops as tables, and their kernels' machine code.

``packaged/ops.h`` says what the tables are, and reads them. This module knows no array library and
no device: its callers give it what the tables hold.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from .. import dtypes
from ..devices.protocol import Code
from ..dtypes import Dtype
from ..errors import KernelError
from ..kernels.arguments import fill_value
from ..kernels.entries import MOST_TEMPLATES
from ..rules.expression import Expression
from ..rules.rule import Binding
from ..source.cuda.launch import kernel_parameters
from ..spec import Spec
from ..unit import UnitSpec
from . import entries as op_entries
from . import unit_call, unit_maps, unit_matmul
from .bodies import KernelBody
from .expressions import bound_dtype
from .op import Op
from .unit_maps import MapArgument
from .unit_parts import CopyStep, FillStep, MatmulStep, RunStep
from .unit_steps import CudaUnit

FOLDER = Path(__file__).resolve().parents[1]
INCLUDES = FOLDER / "packaged", FOLDER / "runtime"

# What packaged/*.h keep room for.
_MOST_STEPS, _MOST_ARGUMENTS, _MOST_SCRATCH = 64, 512, 32
_MAP_WORDS = 16  # a tensor map takes as much room as so many arguments

_FLOATS = (dtypes.float16, dtypes.bfloat16, dtypes.float32, dtypes.float64)
_FILLS = (*(d for d in dtypes.ALL if d.kind in "bui"), *_FLOATS)


class Special(NamedTuple):
    """A body or unit, compiled for some dtypes, ranks and template values.

    Attributes:
        spec: what was compiled.
        dtypes: per input of the op, None of those that are absent or numbers.
        ndims: per input of the op.
        outputs: the dtypes of the op's outputs.
        templates: the value of each template parameter that is an expression.
        codes: the last of them is for all sizes.
        scratch: of a unit, the dtype of each scratch array.
        patterns: of a unit, per step what it fills with, or None.
    """

    spec: Spec | UnitSpec
    dtypes: tuple[Dtype | None, ...]
    ndims: tuple[int, ...]
    outputs: tuple[Dtype, ...]
    templates: tuple[int, ...]
    codes: tuple[Code, ...]
    scratch: tuple[Dtype, ...] = ()
    patterns: tuple[bytes | None, ...] = ()


Packaged = KernelBody | CudaUnit


class PackagedOp(NamedTuple):
    """An op of a package.

    Attributes:
        name: what torch calls it there.
        schema: its arguments and results, as torch writes them.
        op: the op.
        cuda: whether it runs on NVIDIA GPUs, else on the CPU.
        bodies: those that may be chosen, in order, with all that they were compiled for; units,
            too.
    """

    name: str
    schema: str
    op: Op
    cuda: bool
    bodies: tuple[tuple[Packaged, tuple[Special, ...]], ...]


def text(ops: Sequence[PackagedOp]) -> str:
    """The C text of the library.

    Raises:
        KernelError: an op has something that such a library cannot do; says which, and what.
    """
    writers = [_OpTables(i, packaged) for i, packaged in enumerate(ops)]
    parts = [_head({dtype for writer in writers for dtype in writer.dtypes})]
    parts += [line for writer in writers for line in writer.lines]
    parts.append("static const fr_packaged_op fr_ops[] = {")
    parts += [f"    {writer.record}," for writer in writers]
    parts.append("};\n")
    for i in range(len(ops)):
        parts.append(
            f"static void fr_op_{i}(SIV* stack, uint64_t inputs, uint64_t outputs) {{\n"
            f"  (void)inputs;\n  (void)outputs;\n  fr_boxed(&fr_ops[{i}], stack);\n}}"
        )
    parts.append(
        "\n__attribute__((constructor)) static void fr_define_all(void) {\n"
        "  LH fragment = NULL; /* such handles live as long as the process */\n"
        "  fr_learn_codes();\n"
        '  if (aoti_torch_library_init_fragment("ferrule", "ferrule", 0, &fragment)) return;'
    )
    parts += [f"  fr_define(fragment, &fr_ops[{i}], fr_op_{i});" for i in range(len(ops))]
    return "\n".join([*parts, "}", ""])


def check(op: Op, body: Packaged, outputs: Sequence[Dtype]) -> None:
    """Refuse a body or unit that such a library cannot run.

    Args:
        outputs: the dtypes of the op's outputs.

    Raises:
        KernelError: it has that; says what to write instead.
    """
    for argument in op.rule.inputs:
        dtype = dtypes.BY_NAME.get(argument.dtype)
        if (
            argument.dims is None
            and dtype is not None
            and dtype.kind == "f"
            and dtype not in _FLOATS
        ):
            raise KernelError(
                f"[op] op {op.name!r}: its input {argument.name!r} is a number of "
                f"{argument.dtype}, which a package cannot hand over; declare "
                f"{argument.name}:float32, and convert in the body."
            )
    if isinstance(body, CudaUnit):
        given = [a for step in body.steps if isinstance(step, RunStep) for a in step.arguments]
        words = sum(_MAP_WORDS if isinstance(a.value, MapArgument) else 1 for a in given)
        limits = (
            ("steps", len(body.steps), _MOST_STEPS),
            ("scratch arrays", len(body.scratch), _MOST_SCRATCH),
            ("arguments of steps", words, _MOST_ARGUMENTS),
        )
        for things, count, most in limits:
            if count > most:
                raise KernelError(
                    f"[op] op {op.name!r} has a CUDA unit with {count} {things}; a package keeps "
                    f"room for {most}."
                )
        return
    if isinstance(body.fill, Expression):
        for argument, dtype in zip(op.rule.outputs, outputs, strict=True):
            if dtype not in _FILLS:
                raise KernelError(
                    f"[op] op {op.name!r}: its `init_value` is {body.fill}, which a package cannot "
                    f"turn into output {argument.name!r} of {dtype.name}; give a number, or "
                    "declare the output as an integer or float32."
                )


def with_arrays(op: Op, unit: CudaUnit, special: Special, binding: Binding) -> Special:
    """Add the dtypes of a unit's scratch, and the patterns that its steps fill arrays with.

    Raises:
        KernelError: a fill or product cannot be done with such dtypes.
    """
    scratch = tuple(bound_dtype(array.dtype, binding) for array in unit.scratch)
    dtype_of = dict(zip((output.name for output in op.rule.outputs), special.outputs, strict=True))
    arrays = [parameter for parameter in op.rule.inputs if parameter.dims is not None]
    dtype_of.update((p.name, bound_dtype(p.dtype, binding)) for p in arrays)
    dtype_of.update((array.name, dtype) for array, dtype in zip(unit.scratch, scratch, strict=True))
    for step in unit.steps:
        if isinstance(step, MatmulStep):
            unit_matmul.check_dtypes(op.name, step, dtype_of)
    patterns = tuple(
        unit_call.pattern(op.name, step, dtype_of[step.array])
        if isinstance(step, FillStep)
        else None
        for step in unit.steps
    )
    return special._replace(scratch=scratch, patterns=patterns)


def _head(used: set[Dtype]) -> str:
    """The includes, and the tables of dtypes."""
    codes = ", ".join(f"aoti_torch_dtype_{d.name}" if d in used else "NULL" for d in dtypes.ALL)
    return (
        "/* Written by ferrule. The ops of one package of AOTInductor; see packaged/ops.h. */\n"
        '#define FR_API\n#define FR_DIGEST ""\n'
        '#include "runtime.c"\n#include "torch_abi.h"\n\n'
        "/* Codes of torch's dtypes; NULL of those that no op here has. */\n"
        f"static const fr_dtype_code fr_dtype_codes[] = {{{codes}}};\n\n"
        '#include "ops.h"\n'
    )


class _OpTables:
    """The tables of one op.

    Attributes:
        lines: definitions.
        record: what stands in the table of ops.
        dtypes: those that the op meets.
        expressions: what the engine does not work out, numbered from ``first`` on.
    """

    def __init__(self, number: int, packaged: PackagedOp) -> None:
        self.packaged, self.op, self.number = packaged, packaged.op, number
        self.lines: list[str] = []
        self.dtypes: set[Dtype] = set()
        self.expressions: dict[Expression, int] = {}
        rule = self.op.rule
        chosen = [body for body, _ in packaged.bodies]
        self.first = sum(len(op_entries.expressions_of(body)) for body in chosen)
        bodies = [
            self.unit(f"{number}_{b}", body, specials)
            if isinstance(body, CudaUnit)
            else self.body(f"{number}_{b}", body, specials)
            for b, (body, specials) in enumerate(packaged.bodies)
        ]  # before the program, whose expressions they number
        bound = op_entries.table_of(rule, chosen, tuple(self.expressions))
        if bound is None:
            raise KernelError(
                f"[op] op {self.op.name!r} has more arguments, dims or names than a package keeps "
                "room for."
            )
        table, program = bound
        self.define("const int64_t", "rule", ", ".join(map(_word, program.words)))
        launches = ", ".join(_initializer(table.body[b], {}) for b in range(len(bodies)))
        self.define("const fr_body", "launches", launches)
        pointers = {
            "program": f"fr_rule_{number}", "body": f"fr_launches_{number}",
            "tell_gpu": "fr_tell_gpu",
        }  # fmt: skip
        self.lines.append(f"static fr_op fr_table_{number} = {_initializer(table, pointers)};")
        names = ", ".join(_string(parameter.name) for parameter in rule.inputs)
        self.define("const char* const", "inputs", names or "NULL")
        self.define("const fr_packaged_body", "bodies", ", ".join(bodies))
        self.record = (
            f"{{{_string(packaged.name)}, {_string(self.op.name)}, "
            f"{_string(packaged.name + packaged.schema)}, {_string(str(rule))}, "
            f"&fr_table_{number}, fr_inputs_{number}, fr_bodies_{number}, {_c(packaged.cuda)}}}"
        )

    def define(self, kind: str, name: str, content: str) -> None:
        self.lines.append(f"static {kind} fr_{name}_{self.number}[] = {{{content}}};")

    def value(self, expression: Expression | None) -> int:
        """The number of an expression among the op's values."""
        if expression is None:
            return -1
        return self.first + self.expressions.setdefault(expression, len(self.expressions))

    def body(self, name: str, body: KernelBody, specials: Sequence[Special]) -> str:
        texts = ", ".join(_string(str(e)) for e in (*body.grid, *body.threadgroup))
        self.lines.append(f"static const char* const fr_texts_{name}[] = {{{texts}}};")
        compiled = self.compiled(name, body, specials)
        fill = self.value(body.fill) if isinstance(body.fill, Expression) else -1
        described = any(any(body.kernel.wants(n)) for n in body.kernel.input_names)
        return (
            f"{{{self.value(body.shared)}, {fill}, {_c(described)}, fr_texts_{name}, "
            f"{compiled}, NULL, {_c(body.kernel.pdl)}}}"
        )

    def unit(self, name: str, unit: CudaUnit, specials: Sequence[Special]) -> str:
        add = self.lines.append
        names = [a.name for a in (*self.op.rule.inputs, *self.op.rule.outputs)]
        names += [a.name for a in unit.scratch]
        places = {array: i for i, array in enumerate(names)}
        functions = {f: i for i, f in enumerate(dict.fromkeys(c.function for c in unit.calls))}
        rows, steps = [], []
        for i, array in enumerate(unit.scratch):
            dims = ", ".join(str(self.value(dim)) for dim in array.dims) or "0"
            texts = ", ".join(_string(str(dim)) for dim in array.dims) or "NULL"
            add(f"static const int16_t fr_dims_{name}_{i}[] = {{{dims}}};")
            add(f"static const char* const fr_dim_texts_{name}_{i}[] = {{{texts}}};")
            rows.append(
                f"{{{_string(array.name)}, fr_dims_{name}_{i}, fr_dim_texts_{name}_{i}, "
                f"{len(array.dims)}}}"
            )
        for i, step in enumerate(unit.steps):
            when, none = self.value(step.when), "{0}, NULL, NULL, 0"
            if isinstance(step, FillStep):
                label = _string(f"fill {step.array}")
                steps.append(f"{{FR_FILL, {when}, {places[step.array]}, 0, 0, {label}, {none}}}")
            elif isinstance(step, CopyStep):
                label, to = _string(f"copy {step.source}"), places[step.to]
                source = places[step.source]
                steps.append(f"{{FR_COPY, {when}, {to}, {source}, 0, {label}, {none}}}")
            elif isinstance(step, MatmulStep):
                label = _string(f"{step.out} = {step.a} @ {step.b}")
                table = self.multiplied(f"{name}_{i}", step, places)
                places_of = f"{places[step.out]}, {places[step.a]}"
                steps.append(f"{{FR_MATMUL, {when}, {places_of}, 0, {label}, {none}, {table}}}")
            else:
                launch = self.launched(f"{name}_{i}", step, places)
                steps.append(
                    f"{{FR_RUN, {when}, 0, 0, {functions[step.function]}, "
                    f"{_string(step.function)}, {launch}, NULL, {_c(step.pdl)}}}"
                )
        add(f"static const fr_scratch fr_scratch_{name}[] = {{{_list(rows)}}};")
        add(f"static const fr_step fr_steps_{name}[] = {{{_list(steps)}}};")
        add(
            f"static const fr_unit fr_unit_{name} = {{fr_steps_{name}, {len(steps)}, "
            f"fr_scratch_{name}, {len(rows)}}};"
        )
        compiled = self.compiled(name, unit, specials)
        return f"{{-1, -1, false, NULL, {compiled}, &fr_unit_{name}}}"

    def launched(self, name: str, step: RunStep, places: Mapping[str, int]) -> str:
        """The launch of a step: its sizes and its arguments."""
        ones = [Expression(("int", 1))] * 3
        values = [*step.blocks, *step.block, *(step.cluster or ones), step.shared_memory]
        numbers = [str(self.value(value)) for value in values]
        if step.cluster is None:
            numbers[6:9] = ["-1"] * 3
        rows: list[str] = []
        for argument in step.arguments:
            value, kind = argument.value, f"FR_GIVE_{argument.kind.upper()}"
            label, table = _string(str(value)), "NULL"
            if isinstance(value, MapArgument):
                place, table = places[value.array], self.mapped(f"{name}_{len(rows)}", value)
            else:
                place = self.value(value) if isinstance(value, Expression) else places[value]
            rows.append(f"{{{kind}, {place}, {label}, {table}}}")
        texts = ", ".join(_string(str(value)) for value in values)
        add = self.lines.append
        add(f"static const fr_argument_given fr_given_{name}[] = {{{_list(rows)}}};")
        add(f"static const char* const fr_launch_texts_{name}[] = {{{texts}}};")
        return f"{{{', '.join(numbers)}}}, fr_launch_texts_{name}, fr_given_{name}, {len(rows)}"

    def mapped(self, name: str, one: MapArgument) -> str:
        """A tensor map."""
        swizzle = list(unit_maps.SWIZZLES).index(one.swizzle)
        numbers = swizzle, unit_maps.PROMOTIONS.index(one.l2), unit_maps.FILLS.index(one.fill)
        sizes = one.dims[::-1], one.strides[::-1], one.box[::-1]
        lists = ", ".join(f"{{{', '.join(str(self.value(s)) for s in row) or 0}}}" for row in sizes)
        content = f"{len(one.dims)}, {', '.join(map(str, numbers))}, {lists}"
        self.lines.append(f"static const fr_tensor_map fr_map_{name} = {{{content}}};")
        return f"&fr_map_{name}"

    def multiplied(self, name: str, step: MatmulStep, places: Mapping[str, int]) -> str:
        """What a step multiplies, beside two arrays."""
        factors = [step.alpha, step.beta]
        numbers = [places[value] if isinstance(value, str) else -1 for value in factors]
        values = [0.0 if isinstance(value, str) else float(value) for value in factors]
        row = [
            places[step.b],
            places[""],
            -1 if step.factors is None else places[step.factors],
            *map(_c, (step.transpose_a, step.transpose_b, step.tf32)),
        ]
        content = ", ".join(map(str, [*row, *numbers, *values]))
        self.lines.append(f"static const fr_multiplied fr_multiplied_{name} = {{{content}}};")
        return f"&fr_multiplied_{name}"

    def compiled(self, name: str, body: Packaged, specials: Sequence[Special]) -> str:
        """A body's or unit's template parameters, and what it was compiled to."""
        templates = op_entries.templates_of(body)
        if len(templates) > MOST_TEMPLATES:
            raise KernelError(
                f"[op] op {self.op.name!r} has {len(templates)} template parameters that are "
                f"expressions; a package keeps room for {MOST_TEMPLATES}."
            )
        rows = [f"{{{_string(n)}, {_string(str(e))}}}" for n, e in templates]
        table = [self.special(f"{name}_{s}", body, special) for s, special in enumerate(specials)]
        add = self.lines.append
        add(f"static const fr_template fr_templates_{name}[] = {{{_list(rows)}}};")
        add(f"static fr_special fr_specials_{name}[] = {{{', '.join(table)}}};")
        return f"fr_templates_{name}, fr_specials_{name}, {len(specials)}"

    def special(self, name: str, body: Packaged, special: Special) -> str:
        self.dtypes.update(
            special.outputs, (dtype for dtype in special.dtypes if dtype is not None)
        )
        add = self.lines.append
        places = ", ".join(
            "-1" if dtype is None else str(_place(dtype)) for dtype in special.dtypes
        )
        fills = ["NULL"] * len(special.outputs)
        scratch, patterns = ["0"], ["{0}"]
        if isinstance(body, CudaUnit):
            self.dtypes.update(
                [dtypes.uint8] if special.scratch else []
            )  # of which scratch is made
            scratch = [str(_place(dtype)) for dtype in special.scratch] or scratch
            patterns = [
                "{0}" if p is None else f"{{{len(p)}, {int.from_bytes(p, 'little')}u}}"
                for p in special.patterns
            ] or patterns
        elif body.fill is not None and not isinstance(body.fill, Expression):
            for i, dtype in enumerate(special.outputs):
                element = np.array(fill_value(body.kernel, i, body.fill, dtype), dtype.numpy)
                fills[i] = _bytes(element.tobytes())
        codes = [self.code(f"{name}_{k}", code) for k, code in enumerate(special.codes)]
        passed = []
        if self.packaged.cuda and isinstance(special.spec, Spec):
            passed = [f"FR_PASS_{kind.upper()}, {i}" for kind, i in kernel_parameters(special.spec)]
        add(f"static const int8_t fr_dtypes_{name}[] = {{{places}}};")
        add(f"static const int8_t fr_ndims_{name}[] = {{{', '.join(map(str, special.ndims))}}};")
        values = ", ".join(_word(value) for value in special.templates)
        add(f"static const int64_t fr_values_{name}[] = {{{values or 0}}};")
        add(f"static const char* const fr_fills_{name}[] = {{{', '.join(fills) or 'NULL'}}};")
        add(f"static fr_code fr_codes_{name}[] = {{{', '.join(codes)}}};")
        add(f"static const int32_t fr_passed_{name}[] = {{{', '.join(passed) or 0}}};")
        add(f"static const int8_t fr_scratch_dtypes_{name}[] = {{{', '.join(scratch)}}};")
        add(f"static const fr_pattern fr_patterns_{name}[] = {{{', '.join(patterns)}}};")
        return (
            f"{{fr_dtypes_{name}, fr_ndims_{name}, fr_values_{name}, fr_fills_{name}, "
            f"fr_codes_{name}, {len(codes)}, fr_passed_{name}, {len(passed)}, "
            f"fr_scratch_dtypes_{name}, fr_patterns_{name}}}"
        )

    def code(self, name: str, code: Code) -> str:
        """The machine code for one form of launch, and its functions."""
        add = self.lines.append
        add(
            f"static const char fr_bytes_{name}[] __attribute__((aligned(16))) =\n"
            f"    {_bytes(code.payload)};"
        )
        functions = []
        for f, symbol in enumerate(code.symbols):
            add(f"static fr_loaded fr_on_{name}_{f}[FR_MOST_GPUS];")
            functions.append(f"{{{_string(symbol)}, fr_on_{name}_{f}}}")
        add(f"static fr_function fr_functions_{name}[] = {{{_list(functions)}}};")
        number = "".join(c for c in code.architecture if c.isdigit()) or "0"
        return (
            f"{{fr_bytes_{name}, {len(code.payload)}, {' | '.join(code.needs) or 0}, "
            f"FR_{code.blocks.upper()}, {_c(code.far)}, {number}, "
            f"{_c(code.architecture.startswith('compute_'))}, "
            f"{_c(code.architecture[-1:] == 'a')}, {code.each}, {_c(code.aligned)}, "
            f"{code.shared}, fr_functions_{name}, NULL, false, false, NULL}}"
        )


def _place(dtype: Dtype) -> int:
    return dtypes.ALL.index(dtype)


def _word(value: int) -> str:
    # C has no negative literals, and the positive one of the smallest does not fit.
    return "INT64_MIN" if value == -(2**63) else f"{value}"


def _list(rows: Sequence[str]) -> str:
    """The rows of a table; C needs one at least."""
    return ", ".join(rows) or "{0}"


def _c(value: bool) -> str:
    return "true" if value else "false"


def _initializer(value: object, pointers: Mapping[str, str]) -> str:
    """A structure of ctypes, as C writes what it begins with, of whose fields some are pointers."""
    if isinstance(value, ctypes.Structure):
        fields = [(name, getattr(value, name)) for name, *_ in value._fields_]
        items = [pointers.get(name) or _initializer(field, {}) for name, field in fields]
        return f"{{{', '.join(items)}}}"
    if isinstance(value, ctypes.Array) and not any(map(_content, value)):
        return "{0}"
    if isinstance(value, ctypes.Array):  # but for zeros at its end
        elements = list(value)
        while len(elements) > 1 and not _content(elements[-1]):
            elements.pop()
        return f"{{{', '.join(_initializer(element, {}) for element in elements)}}}"
    return "NULL" if value is None else _bytes(value) if isinstance(value, bytes) else f"{value}"


def _content(value: object) -> bool:
    """Whether anything of an element of an array is not zero."""
    plain = not isinstance(value, (ctypes.Structure, ctypes.Array))
    return bool(value) if plain else any(bytes(value))  # type: ignore[call-overload]


def _string(value: str) -> str:
    return _bytes(value.encode()).replace("\n    ", " ")


def _bytes(value: bytes) -> str:
    """A C string literal, in lines; three digits each, so that none runs into the next."""
    shown = [
        chr(c) if 32 <= c < 127 and c not in b'"\\?' else f"\\{c:03o}" for c in value
    ]  # no ?, for trigraphs
    lines = ("".join(shown[i : i + 4096]) for i in range(0, len(shown), 4096))
    return "\n    ".join(f'"{line}"' for line in lines) or '""'
