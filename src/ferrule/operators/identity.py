"""Digests of ops, of which their full names are made; Python functions are included.

A name that carries the digest of what changes behaviour tells ops apart, in one process and in
saved graphs. Of a Python function no digest can cover all that it reads, so no cache relies on this
one: functions that implement an op are called at run time, and derivative rules are traced anew
whenever a graph is (`hosts.torch.op`).
"""

from __future__ import annotations

import dis
import functools
import hashlib
import inspect
import json
import sys
import sysconfig
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ..dtypes import Dtype
from ..errors import KernelError
from ..moved import was

# Raised only when the same declaration would compute something else: of ops with a Metal body, and
# of all others. 2: products are fused within expressions alone, shift counts are taken modulo the
# width.
METAL_SEMANTICS, SEMANTICS = 2, 1
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_SHOWN = {("torch", "dtype"), ("torch", "device"), ("mlx.core", "Dtype"), ("mlx.core", "Device")}
_LISTS = (tuple, list, set, frozenset)
_DICTS = (dict, OrderedDict, types.MappingProxyType)
# Packages whose functions and classes count by their names.
_BY_NAME_ONLY = frozenset({"ferrule", "numpy", "ml_dtypes", "torch", "mlx", "cupy"})
_STDLIB = sysconfig.get_path("stdlib")
_MOST_FUNCTIONS = 2000
_C_FUNCTIONS = (
    types.BuiltinFunctionType,
    types.MethodDescriptorType,
    types.WrapperDescriptorType,
    np.ufunc,
    type(np.dot),
)


def digest(content: object, semantics: int = SEMANTICS) -> str:
    """16 hexadecimal digits of SHA-256 over ``content``, which JSON can hold."""
    text = json.dumps([semantics, content], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def of_op(content: Any) -> str:
    """The digest of an op's content (`Op.to_json`)."""
    return digest(content, _semantics(content))


def earlier(content: Any) -> list[str]:
    """The digests that the same content had, by which saved graphs may call it."""
    return [digest(content, number) for number in range(1, _semantics(content))]


def _semantics(content: Any) -> int:
    metal = any(body.get("kind") == "metal" for body in content["implementations"])
    return METAL_SEMANTICS if metal else SEMANTICS


def of_callable(label: str, function: object, version: object = None) -> str:
    """The digest of a Python function: its code, what it closes over, its defaults, and the
    constants, ops and functions that these name, ``scale`` or ``helpers.scale``, as they are now.

    Functions are followed through the user's own modules, which are all but the standard library
    and what is installed (lies in a ``site-packages``), and through the function's own package in
    any case. Others, and classes, count by their names. What can change is not looked into:
    attributes of objects, and lists, dicts and sets that are globals.

    Args:
        label: how messages call it: ``"`run` of op 'linear'"``.
        function: the function.
        version: a str or int that stands for the content in its place; the caller changes it with
            each change of behaviour. What a function closes over, its defaults and a partial's
            arguments count as they do without it, where they are plain values, or tuples of such:
            functions that a function makes differ in them alone.

    Raises:
        KernelError: it is none, or holds what has no digest (an array, an object with state), or
            what it names leads to more than 2,000 functions.
    """
    if not callable(function):
        raise KernelError(f"[op] {label}: got {function!r}, expected a function.")
    if version is not None:
        if type(version) not in (str, int):
            raise KernelError(f"[op] `version` of {label}: got {version!r}, expected a str or int.")
        name, constants = getattr(function, "__qualname__", ""), _plain_constants(function)
        return digest(["version", name, version, *([constants] if constants else [])])
    return digest(_FunctionReader(label, function).read_all(function))


def content_of(label: str, function: object, version: object, found: str) -> str | None:
    """The digest of a function's content whatever its version; None where it cannot be read.

    Args:
        label, function, version: as of `of_callable`, which has ``found`` of them.
    """
    try:
        return found if version is None else of_callable(label, function)
    except KernelError:
        return None


def _plain_constants(function: Any) -> list[Any]:
    """The plain values that were given to a function when it was made."""
    values: list[tuple[str, Any]] = []
    while isinstance(function, functools.partial):
        values += [("partial", function.args), *sorted(function.keywords.items())]
        function = function.func
    if isinstance(function, types.FunctionType):
        cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
        values += [(name, c.cell_contents) for name, c in cells if c != types.CellType()]
        values.append(("defaults", function.__defaults__ or ()))
        values += sorted((function.__kwdefaults__ or {}).items())

    def plain(value: Any) -> bool:
        return type(value) in _PLAIN or (type(value) is tuple and all(map(plain, value)))

    return [[name, repr(value)] for name, value in values if plain(value) and value != ()]


def ops_in(function: object) -> list[Any]:
    """The ops that a Python function refers to, as `of_callable` follows it."""
    reader = _FunctionReader(None, function)
    reader.read_all(function)
    return reader.ops


class _FunctionReader:
    """Turn a function, and all that it refers to, into what JSON can hold.

    Attributes:
        label: how messages call the function; None where nothing is to be refused.
        package: that of the function.
        met: the functions, and whether each was given to the op, numbered in the order in which
            they are met and each read once: they may call each other.
        ops: the ops that were met.
    """

    def __init__(self, label: str | None, function: object) -> None:
        self.label = label
        self.package = _package(function)
        self.met: list[tuple[types.FunctionType, bool]] = []
        self.ops: list[Any] = []
        self.seen: dict[int, tuple[str, Any]] = {}  # kept, so that no other object gets its id

    def read_all(self, function: object) -> Any:
        contents = [self.value(function, "it", True)]
        for i, (callee, captured) in enumerate(self.met):  # more are met on the way
            if i == _MOST_FUNCTIONS:
                if self.label is None:
                    break
                raise KernelError(
                    f"[op] {self.label} leads to more than {_MOST_FUNCTIONS} functions of modules "
                    "that are not installed. Give `version=`, a str or int that you change "
                    "whenever they change."
                )
            contents.append(self.function(callee, captured))
        return contents

    def value(self, value: Any, where: str, captured: bool) -> Any:
        """Describe a value.

        Args:
            value: it.
            where: how messages call it.
            captured: whether it was given to the op, in a closure, a default or such, so that its
                content must be known. Of what is only named arrays are refused alone: a weight
                there is as hidden as one in a closure.
        """
        kind = type(value)
        if kind in _PLAIN:
            return [kind.__name__, repr(value)]
        if id(value) in self.seen:
            return ["again", self.seen[id(value)][0]]
        if kind in _LISTS and (captured or kind in (tuple, frozenset)):
            if kind in (list, set):  # equal tuples may be one object or two; these tell
                self.see(value)
            parts = [self.value(part, where, captured) for part in value]
            ordered = parts if kind in (tuple, list) else sorted(map(json.dumps, parts))
            return [kind.__name__, ordered]
        if kind in _DICTS and captured:
            self.see(value)
            items = [[self.value(part, where, True) for part in pair] for pair in value.items()]
            return [kind.__name__, items]
        if hasattr(kind, "ferrule_digest"):
            self.ops.append(value)
            return ["op", None if self.label is None else value.ferrule_digest]
        if isinstance(value, Dtype):
            return ["dtype", value.name]
        if isinstance(value, np.dtype) or (kind.__module__, kind.__name__) in _SHOWN:
            return [kind.__module__, kind.__name__, repr(value)]
        if isinstance(value, np.generic):
            return ["number", repr(value.dtype), repr(value.item())]
        if kind.__module__ == "torch._ops":  # an operator is what its name and schema say
            return ["torch op", str(value), str(getattr(value, "_schema", ""))]
        if isinstance(value, types.ModuleType):
            return ["module", value.__name__]
        if kind is functools.partial:
            parts = [value.func, value.args, value.keywords]
            return ["partial", *(self.value(part, where, captured) for part in parts)]
        if isinstance(value, types.MethodType):
            parts = [value.__func__, value.__self__]
            return ["method", *(self.value(part, where, captured) for part in parts)]
        if isinstance(value, types.FunctionType):
            name = by_name(value)
            if name is None and _package(value) == "ferrule" != self.package:
                name = named(value)  # made in a function, as what stands in MLX's place
            if name is not None and not _is_own(name.partition(":")[0], self.package):
                return ["name", name]
            self.met.append((value, captured))
            return ["met", self.see(value)]
        # None of what carries a Python function's name without being one, as functions do that a
        # JIT, or a cache, was put around: the name says nothing of their content.
        if isinstance(value, (type, *_C_FUNCTIONS)):
            owner = getattr(value, "__objclass__", None)  # of a method such as str.join
            name = by_name(value if owner is None else owner)
            if name is not None:
                return ["name", name, "" if owner is None else value.__name__]
        family = hasattr(kind, "ferrule_is_function")
        if self.label is None or family or not (captured or hasattr(kind, "__dlpack__")):
            inner = inspect.getattr_static(value, "__wrapped__", None)  # left by lru_cache, JITs
            function = self.value(inner, where, captured and family) if callable(inner) else None
            return ["some", _type_name(value), function]
        raise KernelError(
            f"[op] {self.label} cannot be told from others like it: {where} is {short(value)} of "
            f"type {kind.__module__}.{kind.__qualname__}, whose content is not known. Make arrays "
            "arguments of the op; for anything else give `version=`, a str or int that you change "
            "whenever it changes."
        )

    def see(self, value: Any) -> str:
        name = f"{type(value).__name__} {len(self.seen)}"
        self.seen[id(value)] = name, value
        return name

    def function(self, function: types.FunctionType, captured: bool) -> Any:
        code = function.__code__
        cells = []
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            if cell == types.CellType():  # not assigned yet
                cells.append([name, "empty"])
            else:
                where = f"{name!r}, which it closes over,"
                cells.append([name, self.value(cell.cell_contents, where, captured)])
        defaults = function.__defaults__ or (), function.__kwdefaults__ or {}
        named = [
            [name, self.value(value, f"the global {name!r}", False)]
            for name, value in _globals_read(function, self.package)
        ]
        return [_content(code), cells, self.value(defaults, "a default", captured), named]


def _globals_read(function: types.FunctionType, package: str | None) -> list[tuple[str, Any]]:
    """The globals that a function reads, with their values, except those that it assigns.

    Of the user's own modules among them, every attribute whose name the function reads: a superset
    of what it reads there.
    """
    space = function.__globals__
    if not _is_own(space.get("__name__"), package):
        return []
    read, assigned, attributes = _names_of(function.__code__)
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    around = {**space, **{n: c.cell_contents for n, c in cells if c != types.CellType()}}
    values = {name: space[name] for name in read - assigned if name in space}
    modules = [
        (name, around[name])
        for name in read | set(function.__code__.co_freevars)
        if isinstance(around.get(name), types.ModuleType)
    ]
    while modules:
        path, module = modules.pop()
        if not _is_own(module.__name__, package):
            continue
        for name in attributes & vars(module).keys():
            where, value = f"{path}.{name}", vars(module)[name]
            if isinstance(value, types.ModuleType) and path.count(".") < 8:
                modules.append((where, value))
            values[where] = value
    return sorted(values.items(), key=lambda pair: pair[0])


@functools.lru_cache(maxsize=4096)
def _names_of(code: types.CodeType) -> tuple[frozenset[str], frozenset[str], frozenset[str]]:
    """The globals that code, and functions in it, reads; those that it assigns; and the names of
    all attributes in it."""
    names: dict[str, set[str]] = {"LOAD": set(), "STORE": set(), "DELETE": set()}
    attributes: set[str] = set()
    for part in _codes(code):
        attributes |= set(part.co_names)
        for instruction in dis.get_instructions(part):
            action, _, scope = instruction.opname.partition("_")
            if scope == "GLOBAL":
                names[action].add(instruction.argval)
    return (
        frozenset(names["LOAD"]),
        frozenset(names["STORE"] | names["DELETE"]),
        frozenset(attributes),
    )


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _codes(constant)


def _content(code: Any) -> Any:
    """Describe code, or a constant in it."""
    if isinstance(code, types.CodeType):
        return [
            code.co_code.hex(),
            [_content(constant) for constant in code.co_consts],
            code.co_names,
            code.co_varnames,
            code.co_freevars,
            code.co_cellvars,
            code.co_argcount,
            code.co_posonlyargcount,
            code.co_kwonlyargcount,
            code.co_flags,
            getattr(code, "co_exceptiontable", b"").hex(),
        ]
    if isinstance(code, (tuple, frozenset)):
        parts = [json.dumps(_content(part)) for part in code]
        # A set's order is another one in each process.
        return [type(code).__name__, sorted(parts) if isinstance(code, frozenset) else parts]
    return repr(code)


def _package(function: Any) -> str | None:
    """The package or module that defines a function."""
    while not isinstance(function, types.FunctionType):
        inner = getattr(function, "func", None) or getattr(function, "__func__", None)
        if inner is None:
            return None
        function = inner
    name = function.__globals__.get("__name__")
    return name.partition(".")[0] if isinstance(name, str) else None


def _is_own(module: object, package: str | None) -> bool:
    """Whether a module is the user's own, or of this package."""
    if not isinstance(module, str):
        return True
    top = module.partition(".")[0]
    if top in _BY_NAME_ONLY:
        return False
    file = getattr(sys.modules.get(module), "__dict__", {}).get("__file__")
    if file is None:  # built in; or typed in, or made by exec
        return module not in sys.stdlib_module_names
    path = Path(file)
    if {"site-packages", "dist-packages"} & set(path.parts):
        return top == package
    return not path.is_relative_to(_STDLIB)


def by_name(value: Any) -> str | None:
    """``module:name`` under which a value can be found, or None."""
    module = getattr(value, "__module__", None)
    for name in (getattr(value, "__qualname__", None), getattr(value, "__name__", None)):
        if isinstance(module, str) and isinstance(name, str):
            candidate: Any = sys.modules.get(module)
            for part in name.split("."):
                candidate = getattr(candidate, part, None)
            if candidate is value:
                return f"{was(module)}:{name}"
    return None


def _type_name(value: object) -> str:
    return f"{was(type(value).__module__)}.{type(value).__qualname__}"


def short(value: object) -> str:
    """A value for a message, in 60 characters at most."""
    text = repr(value).replace("\n", " ")
    return text if len(text) <= 60 else f"{text[:57]}..."


def named(function: Callable[..., Any] | None) -> str:
    """How messages call a function: ``"module:qualname"``."""
    module = getattr(function, "__module__", None) or type(function).__module__
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return f"{was(module)}:{name}"
