"""What an op's name is made of: a digest of its content, Python functions included.

Names that carry the digest of all that changes behaviour keep every cache of every graph system
right, and a saved graph is refused where the op beside it is another one.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import json
import sys
import types
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from .dtypes import Dtype
from .errors import KernelError

SEMANTICS = 1  # raised only when the same declaration would compute something else
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_SHOWN = {("torch", "dtype"), ("torch", "device"), ("mlx.core", "Dtype"), ("mlx.core", "Device")}
_C_FUNCTIONS = (
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, np.ufunc,
    type(np.dot),
)  # fmt: skip


def digest(content: object) -> str:
    """16 hexadecimal digits of SHA-256 over ``content``, which JSON can hold."""
    text = json.dumps([SEMANTICS, content], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def of_callable(what: str, function: object, version: object = None) -> str:
    """The digest of a Python function: its code, what it closes over, its defaults, and what it
    names of its module: constants, ops and functions that are there by now.

    Args:
        what: how messages call it: ``"`run` of op 'linear'"``.
        function: the function.
        version: a str or int that stands for the content in its place; the caller changes it with
            each change of behaviour.

    Raises:
        KernelError: it is none, or holds what has no digest (an array, an object with state).
    """
    if not callable(function):
        raise KernelError(f"[op] {what}: got {function!r}, expected a function.")
    if version is not None:
        if type(version) not in (str, int):
            raise KernelError(f"[op] `version` of {what}: got {version!r}, expected a str or int.")
        return digest(["version", getattr(function, "__qualname__", ""), version])
    return digest(_Reader(what).value(function, "it"))


class _Reader:
    """Turns values into what JSON can hold."""

    def __init__(self, what: str) -> None:
        self.what = what
        self.seen: dict[int, int] = {}  # functions may name themselves
        self.kept: list[Any] = []  # so that no other object gets its id
        self.met_array = False  # an op must not hide one, wherever it is

    def see(self, value: Any) -> None:
        self.seen[id(value)] = len(self.seen)
        self.kept.append(value)

    def value(self, value: Any, where: str) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return [kind.__name__, repr(value)]
        if id(value) in self.seen:
            return ["again", self.seen[id(value)]]
        if kind in (tuple, list, set, frozenset):
            if kind in (list, set):  # equal tuples may be one object or two; these tell
                self.see(value)
            parts = [self.value(one, where) for one in value]
            return [
                kind.__name__,
                sorted(map(json.dumps, parts)) if kind not in (tuple, list) else parts,
            ]
        if kind in (dict, OrderedDict, types.MappingProxyType):
            self.see(value)
            return [
                kind.__name__,
                [[self.value(k, where), self.value(v, where)] for k, v in value.items()],
            ]
        found = getattr(value, "ferrule_digest", None)  # an op
        if isinstance(found, str):
            return ["op", found]
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
            return [
                "partial",
                *(self.value(v, where) for v in (value.func, value.args, value.keywords)),
            ]
        if isinstance(value, types.MethodType):
            return ["method", self.value(value.__func__, where), self.value(value.__self__, where)]
        if isinstance(value, types.FunctionType):
            self.see(value)
            return self.function(value)
        name = importable(value)
        if name is not None:
            return ["name", name]
        self.met_array |= _is_array(value)
        raise KernelError(
            f"[op] {self.what} cannot be told from others like it: {where} is {short(value)} of "
            f"type {kind.__module__}.{kind.__qualname__}, whose content is not known. Make arrays "
            "arguments of the op; for anything else give `version=`, a str or int that you change "
            "whenever it changes."
        )

    def function(self, function: types.FunctionType) -> Any:
        code = function.__code__
        cells = []
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            try:
                content = cell.cell_contents
            except ValueError:  # not assigned yet
                cells.append([name, "empty"])
                continue
            cells.append([name, self.value(content, f"{name!r}, which it closes over,")])
        defaults = self.value(function.__defaults__ or (), "a default")
        keywords = self.value(function.__kwdefaults__ or {}, "a default")
        return [
            "function", self.code(code), cells, defaults, keywords, self.of_module(function)
        ]  # fmt: skip

    def of_module(self, function: types.FunctionType) -> Any:
        """What a function reads of its module by name: constants, ops, and functions of the same
        module; none that cannot be read, or that a function assigns. Arrays are refused: a weight
        there is as hidden as one in a closure."""
        around = function.__globals__
        found = []
        for name in _globals_of(function.__code__):
            value = around.get(name)
            same = isinstance(value, types.FunctionType) and value.__globals__ is around
            known = isinstance(getattr(value, "ferrule_digest", None), str)
            plain = type(value) in (*_PLAIN, tuple, frozenset, Dtype)
            if same or known or plain or _is_array(value):
                try:
                    found.append([name, self.value(value, f"the global {name!r}")])
                except KernelError:
                    if self.met_array:
                        raise
        return found

    def code(self, code: types.CodeType) -> Any:
        return [
            code.co_code.hex(), [self.constant(one) for one in code.co_consts],
            list(code.co_names), list(code.co_varnames), list(code.co_freevars),
            list(code.co_cellvars), code.co_argcount, code.co_posonlyargcount,
            code.co_kwonlyargcount, code.co_flags,
            getattr(code, "co_exceptiontable", b"").hex(),
        ]  # fmt: skip

    def constant(self, one: Any) -> Any:
        if isinstance(one, types.CodeType):
            return self.code(one)
        if isinstance(one, (tuple, frozenset)):
            parts = [json.dumps(self.constant(part)) for part in one]
            # A set's order is another one in each process.
            return [type(one).__name__, sorted(parts) if isinstance(one, frozenset) else parts]
        return repr(one)


def _is_array(value: object) -> bool:
    return hasattr(type(value), "__dlpack__")


def ops_in(function: object) -> list[Any]:
    """The ops that a Python function names: in its closure and its defaults, in its module, and in
    functions of the same package that it names. What it finds in other ways is not seen."""
    found: list[Any] = []
    seen: dict[int, Any] = {}
    rest = [function]
    while rest:
        one = rest.pop()
        if id(one) in seen:
            continue
        seen[id(one)] = one
        if hasattr(type(one), "ferrule_digest"):
            found.append(one)
        elif isinstance(one, functools.partial):
            rest += [one.func, *one.args, *one.keywords.values()]
        elif isinstance(one, types.MethodType):
            rest.append(one.__func__)
        elif isinstance(one, (tuple, list)):
            rest += one
        elif isinstance(one, dict):
            rest += one.values()
        elif isinstance(one, types.FunctionType):
            # A cell of a name that is not assigned yet equals another empty one.
            cells = [cell for cell in one.__closure__ or () if cell != types.CellType()]
            rest += [cell.cell_contents for cell in cells]
            rest += [one.__defaults__, one.__kwdefaults__]
            named = [one.__globals__.get(name) for name in _globals_of(one.__code__)]
            package = one.__module__.partition(".")[0]
            rest += [
                value
                for value in named
                if hasattr(type(value), "ferrule_digest")
                or (
                    isinstance(value, types.FunctionType)
                    and value.__module__.partition(".")[0] == package
                )
            ]
    return found


def _globals_of(code: types.CodeType) -> list[str]:
    """The global names that code, and functions in it, read and do not assign."""
    seen = [(one.opname, one.argval) for part in _codes(code) for one in dis.get_instructions(part)]
    assigned = {name for op, name in seen if op in ("STORE_GLOBAL", "DELETE_GLOBAL")}
    return sorted({name for op, name in seen if op == "LOAD_GLOBAL"} - assigned)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            yield from _codes(one)


def importable(value: Any) -> str | None:
    """``module:name`` of a class or a function written in C that can be found under it.

    None of what carries a Python function's name without being one, as functions do that a JIT, or
    a cache, was put around: the name says nothing of their content.
    """
    if not isinstance(value, (type, *_C_FUNCTIONS)):
        return None
    found: Any
    owner = getattr(value, "__objclass__", None)  # of a method such as str.join
    if isinstance(owner, type):
        found = importable(owner)
        return None if found is None else f"{found}.{value.__name__}"
    return by_name(value)


def by_name(value: Any) -> str | None:
    """``module:name`` under which a value can be found, or None."""
    module = getattr(value, "__module__", None)
    for name in (getattr(value, "__qualname__", None), getattr(value, "__name__", None)):
        if isinstance(module, str) and isinstance(name, str):
            found: Any = sys.modules.get(module)
            for part in name.split("."):
                found = getattr(found, part, None)
            if found is value:
                return f"{module}:{name}"
    return None


def short(value: object) -> str:
    """A value for a message, in 60 characters at most."""
    text = repr(value).replace("\n", " ")
    return text if len(text) <= 60 else f"{text[:57]}..."


def named(function: Callable[..., Any] | None) -> str:
    """How messages call a function: ``"module:qualname"``."""
    module = getattr(function, "__module__", None) or type(function).__module__
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return f"{module}:{name}"
