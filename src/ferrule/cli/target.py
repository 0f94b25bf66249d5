"""The kernel and the call that a command line describes."""

from __future__ import annotations

import contextlib
import inspect
import os
import pkgutil
import re
import sys
import traceback
import types
from collections.abc import Callable, Sequence
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import click

from .. import CudaKernel, DictionaryKernel, Dtype, MetalKernel, Op, dtypes
from .faults import Fault

ELEMENTS = 1024  # of an input that is not described
AnyKernel = MetalKernel | DictionaryKernel | CudaKernel

_WITH = re.compile(r"(?P<name>\w+)\s*=\s*(?P<value>.*)", re.ASCII)
_ARRAY = re.compile(r"(?P<dtype>[A-Za-z_]\w*)(?:\[(?P<shape>[^\]]*)(?P<end>\])?)?", re.ASCII)
_NUMBER = re.compile(r"[-+]?(?:\d|\.\d|inf$|nan$)", re.ASCII)

_Command = TypeVar("_Command", bound=Callable[..., Any])


class Target(NamedTuple):
    """A kernel and a call of it that is only described.

    Attributes:
        kernel: the kernel.
        call: what `text` and `compile` take.
        title: the kernel's name, inputs and outputs.
        notes: what was not given, and is taken instead.
    """

    kernel: AnyKernel
    call: dict[str, Any]
    title: str
    notes: list[str]


def options(command: _Command) -> _Command:
    """The argument and the options of a command that calls `described`."""
    for decorate in reversed(
        (
            click.argument("target", metavar="FILE:NAME"),
            click.option(
                "--with", "inputs", multiple=True, metavar="INPUT=DTYPE[SHAPE]",
                help='An input, such as "inp=float16[4,16]", or a number: "eps=1e-5". Once per '
                f"input; float32[{ELEMENTS}] where it is not given.",
            ),
            click.option(
                "--out", "outputs", multiple=True, metavar="OUTPUT=DTYPE",
                help="The dtype of an output; that of the first input where it is not given.",
            ),
            click.option(
                "--template", "templates", multiple=True, metavar="NAME=VALUE",
                help='A template parameter: a dtype, an int, or "true" or "false".',
            ),
            click.option("--grid", metavar="X,Y,Z", help="Threads along each axis."),
            click.option(
                "--threadgroup", metavar="X,Y,Z", help="Threads per threadgroup along each axis."
            ),
        )
    ):  # fmt: skip
        command = decorate(command)
    return command


def described(
    target: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    templates: Sequence[str],
    grid: str | None,
    threadgroup: str | None,
    found_kernel: tuple[str, AnyKernel] | None = None,
) -> Target:
    """The kernel and the call that a command line describes.

    Args:
        target, inputs, outputs, templates, grid, threadgroup: as the command line has them.
        found_kernel: the target's name and kernel, where it was read before.

    Raises:
        Fault: there is no such kernel, or an option does not fit it.
    """
    arrays = dict(described_input(text) for text in inputs)
    output_dtypes = dict(_dtype_option(text) for text in outputs)
    template = dict(_template_option(text) for text in templates) or None
    sizes = {"grid": _axes("--grid", grid), "threadgroup": _axes("--threadgroup", threadgroup)}
    if (grid is None) != (threadgroup is None):
        raise Fault("--grid and --threadgroup are given together or not at all.")
    name, kernel = find_kernel(target) if found_kernel is None else found_kernel
    notes = _complete(kernel, arrays, output_dtypes)
    call: dict[str, Any]
    if not isinstance(kernel, DictionaryKernel):
        call = {
            "inputs": list(arrays.values()),
            "output_dtypes": list(output_dtypes.values()),
            "template": None if template is None else list(template.items()),
        }
    else:
        call = {"inputs": arrays, "output_dtypes": output_dtypes, "template": template}
    shown = ", ".join(f"{n}={v}" for n, v in arrays.items())
    title = f"{name}({shown}) -> {', '.join(f'{n}={d.name}' for n, d in output_dtypes.items())}"
    return Target(kernel, call | sizes, title, notes)


# -- the kernel ------------------------------------------------------------------------------------


def find_kernel(target: str, *, ops: bool = False) -> tuple[str, Any]:
    """The kernel that ``FILE:NAME``, ``package.module:NAME`` or either without NAME stands for.

    With ``ops``, it may be an op.

    Returns:
        Its name there, and the kernel.

    Raises:
        Fault: there is no such file, module or name, or it is no kernel.
    """
    place, colon, path = target.rpartition(":")
    if not colon:
        place, path = target, ""
    if not place:
        raise Fault(f"{target!r}: expected FILE:NAME or package.module:NAME.")
    module = load_module(place)
    if not path:
        kernels = _of_kind(AnyKernel, module) or (_of_kind(Op, module) if ops else {})
        if len(kernels) == 1:
            return next(iter(kernels.items()))
        kinds = "ops" if any(isinstance(kernel, Op) for kernel in kernels.values()) else "kernels"
        listed = f"has {len(kernels)} {kinds}: {', '.join(kernels)}" if kernels else "has no kernel"
        raise Fault(f"{place!r} {listed}; expected {place}:NAME.")
    value: Any = module
    for part in path.split("."):
        try:
            value = getattr(value, part)
        except AttributeError:
            names = ", ".join(_of_kind(AnyKernel, module)) or "none"
            raise Fault(f"there is no {path!r} in {place!r}; kernels there: {names}.") from None
    if isinstance(value, types.FunctionType):
        _check_callable(path, place, value)
        value = _call(f"{path}()", value)
    if not isinstance(value, AnyKernel) and not (ops and isinstance(value, Op)):
        names = ", ".join(_of_kind(AnyKernel, module)) or "none"
        kind = f"{type(value).__module__}.{type(value).__qualname__}"
        raise Fault(
            f"{path!r} in {place!r} is a {kind}, not a kernel that ferrule made; "
            f"kernels there: {names}."
        )
    return path, value


def _check_callable(path: str, place: str, function: types.FunctionType) -> None:
    """Refuse a function that cannot be called without arguments.

    Raises:
        Fault: it is one.
    """
    parameters = inspect.signature(function).parameters.values()
    bound = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in bound]
    if needed:
        code = function.__code__
        raise Fault(
            f"{path!r} in {place!r} is a function that takes {', '.join(needed)} "
            f"({code.co_filename}, line {code.co_firstlineno}), and it is called without arguments "
            "here; give them defaults, or name a kernel that it made."
        )


def _of_kind(kind: Any, module: types.ModuleType) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if isinstance(value, kind)}


def load_module(place: str) -> types.ModuleType:
    """The module in a file, or the one of that name.

    Raises:
        Fault: there is none, or it raises something.
    """
    is_file = place.endswith(".py") or os.sep in place or os.path.isfile(place)
    if is_file and not os.path.isfile(place):
        problem = "is a folder" if os.path.isdir(place) else "does not exist"
        raise Fault(f"the file {place!r} {problem}.")
    if not is_file:
        # As `python -m` does: modules of the working folder are found.
        sys.path.insert(0, os.getcwd())
        if not re.fullmatch(r"[^\W\d]\w*(\.[^\W\d]\w*)*", place):
            raise Fault(f"{place!r} is neither a file nor the name of a module.")
        try:
            module = _call(place, lambda: pkgutil.resolve_name(f"{place}:"))
        except Fault as fault:
            missing = fault.__cause__
            if isinstance(missing, ModuleNotFoundError) and missing.name in _parents(place):
                raise Fault(
                    f"there is no file and no module {place!r}; files need their full name, such "
                    "as kernels.py:NAME."
                ) from None
            raise
        if not isinstance(module, types.ModuleType):
            raise Fault(f"{place!r} is not a module; expected package.module:NAME.")
        return module
    path = os.path.abspath(place)
    sys.path.insert(0, os.path.dirname(path))  # as `python FILE` does
    name = os.path.basename(path).removesuffix(".py")
    spec = spec_from_file_location(f"inspected.{name}", path)
    if spec is None or spec.loader is None:
        raise Fault(f"{place!r} is not a Python file: its name does not end in .py.")
    module = module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses and pickles look there
    loader = spec.loader
    _call(place, lambda: loader.exec_module(module))
    return module


def _parents(name: str) -> set[str]:
    parts = name.split(".")
    return {".".join(parts[:n]) for n in range(1, len(parts) + 1)}


_PACKAGE = str(Path(__file__).parent.parent)  # an error is of the line that called ferrule


def _call(label: str, function: Any) -> Any:
    """What the user's own code returns; what it raises is a `Fault` in one line.

    What it prints goes to the standard error, for the output may be sent to a file.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return function()
    except (Exception, SystemExit) as error:
        if isinstance(error, SyntaxError):
            where = f"{error.filename}, line {error.lineno}"
        else:
            frames = traceback.extract_tb(error.__traceback__)
            own = [f for f in frames if not f.filename.startswith((_PACKAGE, "<frozen "))]
            frame = (own or frames)[-1]
            where = f"{frame.filename}, line {frame.lineno}"
        message = " ".join(str(error).split())
        kind = type(error).__name__
        raise Fault(f"running {label} failed: {kind}: {message} ({where}).") from error


# -- the call --------------------------------------------------------------------------------------


def _fault(option: str, text: str, position: int, message: str) -> Fault:
    """A fault that points at the place in an option's value, counted from 1."""
    return Fault(f"{option} {text!r}: at character {position + 1}, {message}")


def _dtype(
    option: str, text: str, position: int, name: str, also: str = "", level0: bool = True
) -> Dtype:
    dtype = dtypes.BY_NAME.get(name)
    if dtype is None or (level0 and not dtype.level0):  # the kernel does not take it
        got = repr(name) if name else "nothing"
        names = dtypes.LEVEL0_NAMES if level0 else ", ".join(dtypes.BY_NAME)
        expected = f"{also}one of {names}"
        raise _fault(option, text, position, f"got {got}, expected {expected}.")
    return dtype


def _named(option: str, text: str, example: str) -> tuple[str, str, int]:
    """The name, the value and where the value starts."""
    match = _WITH.fullmatch(text)
    if match is None:
        start = re.match(r"\w*\s*", text, re.ASCII)
        position = start.end() if start else 0
        raise _fault(option, text, position, f'expected a name and "=", as in "{example}".')
    return match["name"], match["value"], match.start("value")


def described_input(text: str, *, level0: bool = True) -> tuple[str, Any]:
    """The name and the description of an input: a string for an array, else a number.

    Raises:
        Fault: it cannot be understood, or has a dtype that does not exist; with ``level0``, one
            that a kernel does not take.
    """
    option = "--with"
    name, value, start = _named(option, text, "inp=float16[4,16]")
    if value in ("true", "false"):
        return name, value == "true"
    if _NUMBER.match(value):
        try:
            return name, int(value) if re.fullmatch(r"[-+]?\d+", value) else float(value)
        except ValueError:
            raise _fault(option, text, start, f"{value!r} is not a number.") from None
    array = _ARRAY.match(value)
    if array is None:
        got = repr(value) if value else "nothing"
        raise _fault(option, text, start, f"got {got}, expected a dtype, as in float16[4,16].")
    dtype = _dtype(option, text, start, array["dtype"], level0=level0)
    sizes: list[int] = []
    if array["shape"] is not None:
        position = start + array.start("shape")
        if array["shape"].strip():
            sizes = _integers(option, text, array["shape"], position, "a size")
        if array["end"] is None:
            raise _fault(option, text, len(text), 'expected "]".')
    if array.end() != len(value):
        remainder = value[array.end() :]
        expected = "nothing more" if array["end"] else 'a shape in brackets, as in "[4,16]"'
        raise _fault(option, text, start + array.end(), f"got {remainder!r}, expected {expected}.")
    return name, f"{dtype.name}[{','.join(map(str, sizes))}]"


def _dtype_option(text: str) -> tuple[str, Dtype]:
    name, value, start = _named("--out", text, "out=float16")
    return name, _dtype("--out", text, start, value)


def _template_option(text: str) -> tuple[str, int | bool | Dtype]:
    name, value, start = _named("--template", text, "T=float16")
    if value in ("true", "false"):
        return name, value == "true"
    if re.fullmatch(r"[-+]?\d+", value, re.ASCII):
        return name, int(value)
    return name, _dtype("--template", text, start, value, "an int, true, false or ")


def _integers(option: str, text: str, value: str, position: int, expected: str) -> list[int]:
    """The integers of a part of an option's value, which begins at ``position``."""
    sizes = []
    for part in value.split(","):
        if not re.fullmatch(r"\s*\d+\s*", part, re.ASCII):
            got = repr(part.strip()) if part.strip() else "nothing"
            raise _fault(option, text, position, f"got {got}, expected {expected}.")
        sizes.append(int(part))
        position += len(part) + 1
    return sizes


def _axes(option: str, text: str | None) -> tuple[int, int, int] | None:
    if text is None:
        return None
    sizes = _integers(option, text, text, 0, "a number of threads")
    if len(sizes) > 3:
        raise Fault(f"{option} {text!r}: got {len(sizes)} numbers, expected three, as in 1024,1,1.")
    x, y, z = (*sizes, 1, 1)[:3]
    return x, y, z


def _complete(
    kernel: AnyKernel, described: dict[str, Any], output_dtypes: dict[str, Dtype]
) -> list[str]:
    """Put inputs and outputs in order and fill in defaults; says which.

    Raises:
        Fault: a name that is not the kernel's.
    """
    if isinstance(kernel, DictionaryKernel):
        # Its arguments have no names before a call, so the command line names them.
        if not described or not output_dtypes:
            option = "--with" if not described else "--out"
            raise Fault(
                "the kernel was made without names, so the command line must give each input with "
                f"--with and each output with --out; there is no {option}."
            )
        return []
    k = kernel.kernel
    default = f"float32[{ELEMENTS}]"
    notes = _fill("--with", "input", k.input_names, described, default, default)
    first = next((v for v in described.values() if isinstance(v, str)), "float32")
    dtype = dtypes.BY_NAME[first.partition("[")[0]]
    return notes + _fill("--out", "output", k.output_names, output_dtypes, dtype, dtype.name)


def _fill(
    option: str, kind: str, names: tuple[str, ...], values: dict[str, Any], default: Any, shown: str
) -> list[str]:
    """Put values in the order of ``names``, with a default for the others; says which."""
    for name in values:
        if name not in names:
            allowed = ", ".join(names) or "none"
            raise Fault(
                f"{option} {name!r}: the kernel has no such {kind}; its {kind}s: {allowed}."
            )
    missing = [name for name in names if name not in values]
    ordered = {name: values.get(name, default) for name in names}
    values.clear()
    values.update(ordered)
    return [f"{', '.join(missing)}: taken as {shown}; see {option}"] if missing else []
