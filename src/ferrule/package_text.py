"""The C text of the library in a package: its ops as tables, and their kernels' machine code.

``packaged/ops.h`` says what the tables are, and reads them. This room knows no array library and no
device: what is in the tables was found out by those who know.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from . import dtypes
from .arguments import fill_value
from .bytecode import compile_rule
from .cuda_steps import Copied, CudaUnit, Filled, Launched
from .devices.package_code import Code
from .dtypes import Dtype
from .errors import KernelError
from .expression import Expression
from .implementation import KernelBody
from .op_declaration import Op
from .source.cuda_launch import kernel_parameters
from .spec import Spec
from .unit import UnitSpec

FOLDER = Path(__file__).resolve().parent
INCLUDES = FOLDER / "packaged", FOLDER / "runtime"

# What packaged/*.h keep room for.
_MOST_TEMPLATES = 64
_MOST_STEPS, _MOST_GIVEN, _MOST_SCRATCH = 64, 512, 32

_NUMBERS = {"b": "FR_BOOL_NUMBER", "u": "FR_INT_NUMBER", "i": "FR_INT_NUMBER"}
_FLOATS = (dtypes.float16, dtypes.bfloat16, dtypes.float32, dtypes.float64)
_FILLS = (*(d for d in dtypes.ALL if d.kind in "bui"), *_FLOATS)
_PASSED = {
    "input": "FR_PASS_INPUT", "value": "FR_PASS_VALUE", "shape": "FR_PASS_SHAPE",
    "strides": "FR_PASS_STRIDES", "output": "FR_PASS_OUTPUT", "launch": "FR_PASS_LAUNCH",
    "extent": "FR_PASS_EXTENT",
}  # fmt: skip


class Special(NamedTuple):
    """A body or unit for some dtypes, ranks and template values.

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
    """The whole text.

    Raises:
        KernelError: an op has something that such a library cannot do; says which, and what.
    """
    writers = [_Writer(i, one) for i, one in enumerate(ops)]
    parts = [_head({kind for one in writers for kind in one.kinds})]
    parts += [line for one in writers for line in one.lines]
    parts.append("static const fr_op fr_ops[] = {")
    parts += [f"    {one.record}," for one in writers]
    parts.append("};\n")
    for i in range(len(ops)):
        parts.append(
            f"static void fr_op_{i}(SIV* stack, uint64_t inputs, uint64_t outputs) {{\n"
            f"  (void)inputs;\n  (void)outputs;\n  fr_boxed(&fr_ops[{i}], stack);\n}}"
        )
    parts.append(
        "\n__attribute__((constructor)) static void fr_define_all(void) {\n"
        "  LH fragment = NULL; /* such handles live as long as the process */\n"
        '  if (aoti_torch_library_init_fragment("ferrule", "ferrule", 0, &fragment)) return;'
    )
    parts += [f"  fr_define(fragment, &fr_ops[{i}], fr_op_{i});" for i in range(len(ops))]
    return "\n".join([*parts, "}", ""])


def check(op: Op, body: Packaged, outputs: Sequence[Dtype]) -> None:
    """Refuse what such a library cannot do.

    Args:
        outputs: the dtypes of the op's outputs.

    Raises:
        KernelError: it has that; says what to write instead.
    """
    for one in op.rule.inputs:
        kind = dtypes.BY_NAME.get(one.dtype)
        if one.dims is None and kind is not None and kind.kind == "f" and kind not in _FLOATS:
            raise KernelError(
                f"[op] op {op.name!r}: its input {one.name!r} is a number of {one.dtype}, which a "
                f"package cannot hand over; declare {one.name}:float32, and convert in the body."
            )
    if isinstance(body, CudaUnit):
        given = [len(one.arguments) for one in body.steps if isinstance(one, Launched)]
        for what, count, most in (
            ("steps", len(body.steps), _MOST_STEPS), ("scratch arrays", len(body.scratch),
             _MOST_SCRATCH), ("arguments of steps", sum(given), _MOST_GIVEN),
        ):  # fmt: skip
            if count > most:
                raise KernelError(
                    f"[op] op {op.name!r} has a CUDA unit with {count} {what}; a package keeps "
                    f"room for {most}."
                )
        return
    if isinstance(body.fill, Expression):
        for one, kind in zip(op.rule.outputs, outputs, strict=True):
            if kind not in _FILLS:
                raise KernelError(
                    f"[op] op {op.name!r}: its `init_value` is {body.fill}, which a package cannot "
                    f"turn into output {one.name!r} of {kind.name}; give a number, or declare the "
                    "output as an integer or float32."
                )


def _head(kinds: set[Dtype]) -> str:
    """The includes, and what is known of dtypes."""
    every = dtypes.ALL
    places = ", ".join(f"FR_{d.name.upper()} = {i}" for i, d in enumerate(every))
    codes = ", ".join(f"aoti_torch_dtype_{d.name}" if d in kinds else "NULL" for d in every)
    names = ", ".join(_string(d.name) for d in every)
    sizes = ", ".join(str(d.itemsize) for d in every)
    return (
        "/* Written by ferrule. The ops of one package of AOTInductor; see packaged/ops.h. */\n"
        '#define FR_API\n#define FR_DIGEST ""\n'
        '#include "runtime.c"\n#include "torch_abi.h"\n\n'
        f"enum {{ {places}, FR_DTYPES = {len(every)} }};\n"
        "/* Codes of torch's dtypes; NULL of those that no op here has. */\n"
        f"static const fr_dtype_code fr_dtype_codes[] = {{{codes}}};\n"
        f"static const char* const fr_dtype_names[] = {{{names}}};\n"
        f"static const uint8_t fr_dtype_sizes[] = {{{sizes}}};\n\n"
        '#include "ops.h"\n'
    )


class _Writer:
    """The tables of one op.

    Attributes:
        lines: definitions.
        record: what stands in the table of ops.
        kinds: the dtypes that it meets.
    """

    def __init__(self, number: int, one: PackagedOp) -> None:
        self.one, self.op, self.number = one, one.op, number
        self.lines: list[str] = []
        self.kinds: set[Dtype] = set()
        self.expressions: dict[Expression, int] = {}
        rule = self.op.rule
        bodies = [
            self.unit(f"{number}_{b}", body, specials)
            if isinstance(body, CudaUnit)
            else self.body(f"{number}_{b}", body, specials)
            for b, (body, specials) in enumerate(one.bodies)
        ]  # before the rule, whose expressions they number
        declared = self.program(tuple(self.expressions))
        arguments = ", ".join(self.arguments())
        outputs = ", ".join(_string(output.name) for output in rule.outputs)
        self.define("fr_argument", "inputs", arguments)
        self.define("char* const", "outputs", outputs or "NULL")
        self.lines.append(f"static fr_body fr_bodies_{number}[] = {{")
        self.lines += [f"    {body}," for body in bodies]
        self.lines.append("};\n")
        contiguous = any(body.contiguous for body, _ in one.bodies)
        self.record = (
            f"{{{_string(one.name)}, {_string(self.op.name)}, {_string(one.name + one.schema)}, "
            f"{_string(str(rule))}, {declared}, fr_inputs_{number}, fr_outputs_{number}, "
            f"{len(rule.inputs)}, {len(rule.outputs)}, {_c(contiguous)}, "
            f"fr_bodies_{number}, {len(bodies)}, {_c(one.cuda)}}}"
        )

    def define(self, kind: str, name: str, content: str) -> None:
        self.lines.append(f"static const {kind} fr_{name}_{self.number}[] = {{{content}}};")

    def program(self, values: tuple[Expression, ...]) -> str:
        """The words of the rule and of expressions."""
        found = compile_rule(self.op.rule, values)
        if found is None:
            raise KernelError(
                f"[op] op {self.op.name!r} has more arguments, dims or names than a package keeps "
                "room for."
            )
        words = ", ".join(_word(word) for word in found.words)
        self.define("int64_t", "rule", words)
        return f"fr_rule_{self.number}"

    def arguments(self) -> Iterable[str]:
        for one in self.op.rule.inputs:
            kind, dtype = "FR_ARRAY", -1
            if one.dims is None:
                number = dtypes.BY_NAME[one.dtype]
                kind, dtype = _NUMBERS.get(number.kind, "FR_FLOAT_NUMBER"), _place(number)
            flags = f"{_c(one.optional)}, {_c(one.mutable)}, {_c(bool(one.dims))}"
            yield f"{{{_string(one.name)}, {kind}, {flags}, {dtype}}}"

    def value(self, one: Expression | None) -> int:
        """The number of an expression among the op's values."""
        return -1 if one is None else self.expressions.setdefault(one, len(self.expressions))

    def body(self, name: str, body: KernelBody, specials: Sequence[Special]) -> str:
        kernel, rule = body.kernel, self.op.rule
        places = {one.name: i for i, one in enumerate(rule.inputs)}
        sources = []
        for input_name in kernel.input_names:
            described = any(kernel.wants(input_name)[:2])
            if input_name in places:
                place = places[input_name]
                sources.append(f"{{FR_FROM_INPUT, {place}, {_c(described)}}}")
            else:
                value = self.value(Expression(("name", input_name)))
                sources.append(f"{{FR_FROM_VALUE, {value}, false}}")
        texts = ", ".join(_string(str(e)) for e in (*body.grid, *body.threadgroup))
        add = self.lines.append
        add(f"static const fr_source fr_sources_{name}[] = {{{_list(sources)}}};")
        add(f"static const char* const fr_texts_{name}[] = {{{texts}}};")
        compiled = self.compiled(name, body, specials)
        fill = self.value(body.fill) if isinstance(body.fill, Expression) else -1
        grid = ", ".join(str(self.value(e)) for e in body.grid)
        group = ", ".join(str(self.value(e)) for e in body.threadgroup)
        return (
            f"{{{self.value(body.when)}, {{{grid}}}, {{{group}}}, {self.value(body.shared)}, "
            f"{fill}, {_c(body.fill is not None)}, {_c(body.kind == 'cuda')}, fr_texts_{name}, "
            f"fr_sources_{name}, {len(sources)}, {compiled}, NULL}}"
        )

    def unit(self, name: str, unit: CudaUnit, specials: Sequence[Special]) -> str:
        add = self.lines.append
        names = [one.name for one in (*self.op.rule.inputs, *self.op.rule.outputs)]
        names += [one.name for one in unit.scratch]
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
            if isinstance(step, Filled):
                label = _string(f"fill {step.array}")
                steps.append(f"{{FR_FILL, {when}, {places[step.array]}, 0, 0, {label}, {none}}}")
            elif isinstance(step, Copied):
                label, to = _string(f"copy {step.source}"), places[step.to]
                source = places[step.source]
                steps.append(f"{{FR_COPY, {when}, {to}, {source}, 0, {label}, {none}}}")
            else:
                steps.append(
                    f"{{FR_RUN, {when}, 0, 0, {functions[step.function]}, "
                    f"{_string(step.function)}, {self.launched(f'{name}_{i}', step, places)}}}"
                )
        add(f"static const fr_scratch fr_scratch_{name}[] = {{{_list(rows)}}};")
        add(f"static const fr_step fr_steps_{name}[] = {{{_list(steps)}}};")
        add(
            f"static const fr_unit fr_unit_{name} = {{fr_steps_{name}, {len(steps)}, "
            f"fr_scratch_{name}, {len(rows)}}};"
        )
        none = "{-1, -1, -1}, {-1, -1, -1}, -1, -1, false, true, NULL, NULL, 0"
        compiled = self.compiled(name, unit, specials)
        return f"{{{self.value(unit.when)}, {none}, {compiled}, &fr_unit_{name}}}"

    def launched(self, name: str, step: Launched, places: Mapping[str, int]) -> str:
        """What a step launches: its sizes and its arguments."""
        one = Expression(("int", 1))
        values = [*step.blocks, *step.block, *(step.cluster or [one] * 3), step.shared]
        numbers = [str(self.value(value)) for value in values]
        if step.cluster is None:
            numbers[6:9] = ["-1"] * 3
        given = []
        for argument in step.arguments:
            value, kind = argument.value, f"FR_GIVE_{argument.kind.upper()}"
            place = self.value(value) if isinstance(value, Expression) else places[value]
            given.append(f"{{{kind}, {place}, {_string(str(value))}}}")
        texts = ", ".join(_string(str(value)) for value in values)
        add = self.lines.append
        add(f"static const fr_argument_given fr_given_{name}[] = {{{_list(given)}}};")
        add(f"static const char* const fr_launch_texts_{name}[] = {{{texts}}};")
        return f"{{{', '.join(numbers)}}}, fr_launch_texts_{name}, fr_given_{name}, {len(given)}"

    def compiled(self, name: str, body: Packaged, specials: Sequence[Special]) -> str:
        """What a body or unit was compiled for, and became."""
        templates = [(n, e) for n, e in body.template if isinstance(e, Expression)]
        if len(templates) > _MOST_TEMPLATES:
            raise KernelError(
                f"[op] op {self.op.name!r} has {len(templates)} template parameters that are "
                f"expressions; a package keeps room for {_MOST_TEMPLATES}."
            )
        rows = [f"{{{_string(n)}, {_string(str(e))}, {self.value(e)}}}" for n, e in templates]
        table = [self.special(f"{name}_{s}", body, one) for s, one in enumerate(specials)]
        add = self.lines.append
        add(f"static const fr_template fr_templates_{name}[] = {{{_list(rows)}}};")
        add(f"static fr_special fr_specials_{name}[] = {{{', '.join(table)}}};")
        return f"fr_templates_{name}, {len(templates)}, fr_specials_{name}, {len(specials)}"

    def special(self, name: str, body: Packaged, one: Special) -> str:
        self.kinds.update(one.outputs, (kind for kind in one.dtypes if kind is not None))
        add = self.lines.append
        kinds = ", ".join("-1" if kind is None else str(_place(kind)) for kind in one.dtypes)
        fills = ["NULL"] * len(one.outputs)
        scratch, patterns = ["0"], ["{0}"]
        if isinstance(body, CudaUnit):
            self.kinds.update([dtypes.uint8] if one.scratch else [])  # of which scratch is made
            scratch = [str(_place(kind)) for kind in one.scratch] or scratch
            patterns = [
                "{0}" if p is None else f"{{{len(p)}, {int.from_bytes(p, 'little')}u}}"
                for p in one.patterns
            ] or patterns
        elif body.fill is not None and not isinstance(body.fill, Expression):
            for i, kind in enumerate(one.outputs):
                element = np.array(fill_value(body.kernel, i, body.fill, kind), kind.numpy)
                fills[i] = _bytes(element.tobytes())
        codes = []
        for k, code in enumerate(one.codes):
            add(
                f"static const char fr_bytes_{name}_{k}[] __attribute__((aligned(16))) =\n"
                f"    {_bytes(code.payload)};"
            )
            functions = []
            for f, symbol in enumerate(code.symbols):
                add(f"static fr_loaded fr_on_{name}_{k}_{f}[FR_MOST_GPUS];")
                functions.append(f"{{{_string(symbol)}, fr_on_{name}_{k}_{f}}}")
            add(f"static fr_function fr_functions_{name}_{k}[] = {{{_list(functions)}}};")
            number = "".join(c for c in code.architecture if c.isdigit()) or "0"
            codes.append(
                f"{{fr_bytes_{name}_{k}, {len(code.payload)}, {' | '.join(code.needs) or 0}, "
                f"FR_{code.blocks.upper()}, {_c(code.far)}, {number}, "
                f"{_c(code.architecture.startswith('compute_'))}, "
                f"{_c(code.architecture[-1:] == 'a')}, {code.each}, {_c(code.aligned)}, "
                f"{code.shared}, fr_functions_{name}_{k}, "
                "NULL, false, false, NULL}"
            )
        passed = []
        if self.one.cuda and isinstance(one.spec, Spec):
            passed = [f"{{{_PASSED[kind]}, {i}}}" for kind, i in kernel_parameters(one.spec)]
        add(f"static const int8_t fr_dtypes_{name}[] = {{{kinds}}};")
        add(f"static const int8_t fr_ndims_{name}[] = {{{', '.join(map(str, one.ndims))}}};")
        values = ", ".join(_word(value) for value in one.templates)
        add(f"static const int64_t fr_values_{name}[] = {{{values or 0}}};")
        add(f"static const char* const fr_fills_{name}[] = {{{', '.join(fills) or 'NULL'}}};")
        add(f"static fr_code fr_codes_{name}[] = {{{', '.join(codes)}}};")
        add(f"static const fr_parameter fr_passed_{name}[] = {{{_list(passed)}}};")
        add(f"static const int8_t fr_scratch_dtypes_{name}[] = {{{', '.join(scratch)}}};")
        add(f"static const fr_pattern fr_patterns_{name}[] = {{{', '.join(patterns)}}};")
        return (
            f"{{fr_dtypes_{name}, fr_ndims_{name}, fr_values_{name}, fr_fills_{name}, "
            f"fr_codes_{name}, {len(codes)}, fr_passed_{name}, {len(passed)}, "
            f"fr_scratch_dtypes_{name}, fr_patterns_{name}}}"
        )


def _place(kind: Dtype) -> int:
    return dtypes.ALL.index(kind)


def _word(value: int) -> str:
    # C has no negative literals, and the positive one of the smallest does not fit.
    return "INT64_MIN" if value == -(2**63) else f"{value}"


def _list(rows: Sequence[str]) -> str:
    """The rows of a table, which C wants to have one at least."""
    return ", ".join(rows) or "{0}"


def _c(value: bool) -> str:
    return "true" if value else "false"


def _string(value: str) -> str:
    return _bytes(value.encode()).replace("\n    ", " ")


def _bytes(value: bytes) -> str:
    """A C string literal, in lines; three digits each, so that none runs into the next."""
    shown = [
        chr(c) if 32 <= c < 127 and c not in b'"\\?' else f"\\{c:03o}" for c in value
    ]  # no ?, for trigraphs
    lines = ("".join(shown[i : i + 4096]) for i in range(0, len(shown), 4096))
    return "\n    ".join(f'"{line}"' for line in lines) or '""'
