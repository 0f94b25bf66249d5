"""The kernel of a Metal text that MLX, or `source.metal.text`, has written.

Files of ``mx.export_function`` hold the text alone: header, signature, body and instantiation in
one. What is read here is written again by `source.metal.text` and compared, so that a text of any
other make is refused and never guessed at.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from ... import dtypes
from ...dtypes import Dtype
from ...kernel import make_kernel
from ...spec import Input, Spec, TemplateValue
from . import text as metal

BY_METAL = {dtype.metal: dtype for dtype in dtypes.ALL if dtype not in dtypes.FLOAT8}

_INPUT = re.compile(r"  const (?:constant|device) (\w+)([&*]) (\w+) \[\[buffer\(\d+\)\]\],\n")
_PART = re.compile(r"  const constant (?:int\*|int64_t\*|int&) \w+ \[\[buffer\(\d+\)\]\],\n")
_OUTPUT = re.compile(r"(  device (atomic<)?(\w+)>?\* (\w+) \[\[buffer\(\d+\)\]\])(,\n|\) \{\n)")
_ATTRIBUTE = re.compile(r"  uint3? \w+ \[\[\w+\]\](,\n|\) \{\n)")
_TEMPLATE = re.compile(r"template <([^<>\n]+)>\n\Z")
_PARAMETER = re.compile(r"(int|bool|typename) (\w+)")


def read(
    text: str,
    function: str,
    inputs: Sequence[Input],
    outputs: Sequence[Dtype],
    wants: Sequence[tuple[bool, bool, bool]],
    contiguous: bool,
    math_mode: str,
) -> Spec:
    """The kernel of a text, and what was compiled of it.

    Args:
        text: all of it.
        function: the name of its Metal function.
        inputs, outputs: what it was called with.
        wants: per input, whether it is given its shape, strides and rank.
        contiguous: the kernel's `ensure_row_contiguous`, which the text does not have.
        math_mode: its `compile_options`.

    Raises:
        ValueError: this is no text that MLX writes; says what was expected. A `KernelError` where
            a name or the body is none that a kernel can have.
    """
    signature = text.find(f"[[kernel]] void {function}(\n")
    if signature < 0:
        raise ValueError(f"it has no Metal function {function!r}")
    head, end = text[:signature], len(text)
    template: tuple[tuple[str, TemplateValue], ...] = ()
    tail = re.search(
        rf'\ntemplate \[\[host_name\("{re.escape(function)}"\)\]\] \[\[kernel\]\] decltype\('
        rf"({re.escape(function)}<([^<>\n]*)>)\) \1;\n\Z",
        text,
    )
    if tail is not None:
        if (declared := _TEMPLATE.search(head)) is None:
            raise ValueError("it instantiates a function that is no template")
        template, end = _template(declared[1], tail[2]), tail.start()
        head = head[: declared.start()]

    position = text.index("\n", signature) + 1
    names: list[str] = []

    def line(pattern: re.Pattern[str], expected: str) -> re.Match[str]:
        nonlocal position
        match = pattern.match(text, position)
        if match is None:
            raise ValueError(f"its signature has no {expected}")
        position = match.end()
        return match

    for i, (input_, wanted) in enumerate(zip(inputs, wants, strict=True)):
        names.append(line(_INPUT, f"input {i + 1} of {len(inputs)}")[3])
        for _ in range(sum(wanted) if input_.ndim else 0):
            line(_PART, f"shape, strides or rank of input {names[-1]!r}")
    start = position
    declarations = [line(_OUTPUT, f"output {i + 1} of {len(outputs)}") for i in range(len(outputs))]
    # Where MLX closed the signature too early (see source.metal), it is closed once.
    end_of_outputs = declarations[-1][5]
    corrected = ",\n".join(match[1] for match in declarations) + end_of_outputs
    corrected, body = text[:start] + corrected + text[position:], position
    if end_of_outputs == ",\n":
        while line(_ATTRIBUTE, "end")[1] == ",\n":
            pass
        body = position
    source = text[body:end]
    if not source.endswith("\n}\n"):
        raise ValueError("its function does not end")
    kernel = make_kernel(
        "kernel",
        names,
        [match[4] for match in declarations],
        source.removesuffix("\n}\n"),
        head,
        contiguous,
        any(match[2] for match in declarations),
        {"math_mode": math_mode},
    )
    spec = Spec(kernel, tuple(inputs), tuple(outputs), template)
    if metal.text(spec, function) != corrected:
        raise ValueError("its signature is not that of its inputs and outputs")
    suffix = metal.kernel_name(spec).removeprefix("custom_kernel_kernel")
    name = function.removeprefix("custom_kernel_").removesuffix(suffix) or function
    return replace(spec, kernel=replace(kernel, name=name))


def _template(declared: str, arguments: str) -> tuple[tuple[str, TemplateValue], ...]:
    values: list[tuple[str, TemplateValue]] = []
    for parameter, value in zip(declared.split(", "), arguments.split(", "), strict=True):
        match = _PARAMETER.fullmatch(parameter)
        if match is None:
            raise ValueError(f"it has the template parameter {parameter!r}")
        kind, name = match[1], match[2]
        if kind == "typename":
            dtype = BY_METAL.get(value)
            if dtype is None:
                raise ValueError(f"its template has the type {value!r}")
            values.append((name, dtype))
        elif not re.fullmatch(r"-?\d{1,10}", value, re.ASCII):
            raise ValueError(f"its template has the value {value!r}")
        else:
            values.append((name, value != "0" if kind == "bool" else int(value)))
    return tuple(values)
