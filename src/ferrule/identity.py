"""What an op's name is made of: a digest of its content, Python functions included.

Names that carry the digest of all that changes behaviour keep every cache of every graph system
right, and a saved graph is refused where the op beside it is another one.
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

from .dtypes import Dtype
from .errors import KernelError

SEMANTICS = 1  # raised only when the same declaration would compute something else
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
_SHOWN = {("torch", "dtype"), ("torch", "device"), ("mlx.core", "Dtype"), ("mlx.core", "Device")}
# Array libraries, whose functions keep their meaning: a graph that was saved with one version is of
# use with the next, and their caches know their versions.
_KNOWN = frozenset({"ferrule", "numpy", "ml_dtypes", "torch", "mlx", "cupy"})
_STDLIB = sysconfig.get_path("stdlib")
_MOST = 2000
_ABSENT = object()
_C_FUNCTIONS = (
    types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, np.ufunc,
    type(np.dot),
)  # fmt: skip


def digest(content: object) -> str:
    """16 hexadecimal digits of SHA-256 over ``content``, which JSON can hold."""
    text = json.dumps([SEMANTICS, content], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def of_callable(what: str, function: object, version: object = None) -> str:
    """The digest of a Python function: its code, what it closes over, its defaults, and what these
    name of the modules around.

    Names are followed as they stand in the code, ``scale`` and ``helpers.scale``, with what they
    mean by now: to constants, ops, functions, classes with their methods, and to what these name
    in turn. So it goes through modules of the user's own, which are all but the standard library
    and what is installed (lies in a ``site-packages``), and through the function's own package in
    any case. Of other installed packages, the name and version count; of the standard library and
    of array libraries (NumPy, torch, MLX, CuPy) the name alone.

    Not seen are modules that are imported inside of functions, attributes of objects, and globals
    that can change: lists, dicts, sets, objects, and what the function itself assigns.

    Args:
        what: how messages call it: ``"`run` of op 'linear'"``.
        function: the function.
        version: a str or int that stands for the content in its place; the caller changes it with
            each change of behaviour.

    Raises:
        KernelError: it is none, or holds what has no digest (an array, an object with state), or
            what it names leads to more than 2,000 functions.
    """
    if not callable(function):
        raise KernelError(f"[op] {what}: got {function!r}, expected a function.")
    if version is not None:
        if type(version) not in (str, int):
            raise KernelError(f"[op] `version` of {what}: got {version!r}, expected a str or int.")
        return digest(["version", getattr(function, "__qualname__", ""), version])
    return digest(_Reader(what, function).everything(function))


class _Reader:
    """Turns a function, and all that it leads to, into what JSON can hold.

    Functions, and the user's own classes, are numbered in the order in which they are met, and each
    is read once: they may name each other.

    Attributes:
        package: that of the function.
        met: functions and classes.
        given: whether what is read was given to the op, so that its content must be known. It need
            not where something is only named, unless it is an array: a weight there is as hidden as
            one in a closure.
    """

    def __init__(self, what: str, function: object) -> None:
        self.what = what
        self.package = _package(function)
        self.met: list[types.FunctionType | type] = []
        self.given = True
        self.seen: dict[int, Any] = {}
        self.kept: list[Any] = []  # so that no other object gets its id

    def everything(self, function: object) -> Any:
        found = [self.value(function, "it")]
        for one in self.met:  # more are met on the way
            found.append([] if isinstance(one, type) else self.function(one))
        given, self.given = len(self.met), False
        for i, one in enumerate(self.met):
            if i == _MOST:
                raise KernelError(
                    f"[op] {self.what} leads to more than {_MOST} functions and classes of modules "
                    "that are not installed. Give `version=`, a str or int that you change "
                    "whenever they change."
                )
            if isinstance(one, type):
                found.append(self.members(one))
                continue
            if i >= given:
                found.append(self.function(one))
            if self.own(one.__globals__.get("__name__")):
                found.append([[name, self.named(value, name)] for name, value in _named(one)])
        return found

    def own(self, module: object) -> bool:
        return _own(module, self.package)

    def meet(self, value: Any) -> Any:
        self.see(value)
        self.seen[id(value)] = f"met {len(self.met)}"
        self.met.append(value)
        return self.seen[id(value)]

    def named(self, value: Any, name: str) -> Any:
        """What a name means; no more than the type of what can change, or is not known."""
        if isinstance(value, types.ModuleType):
            return ["module", _versioned(value.__name__)]
        if isinstance(value, type) and self.own(value.__module__):
            known = id(value) in self.seen
            return ["again", self.seen[id(value)]] if known else self.meet(value)
        # functools.lru_cache and JITs leave this.
        wrapped = inspect.getattr_static(value, "__wrapped__", None)
        if isinstance(wrapped, types.FunctionType) and not isinstance(value, types.FunctionType):
            return ["wrapped", _type_name(value), self.value(wrapped, name)]
        return self.value(value, f"the global {name!r}")

    def members(self, value: type) -> Any:
        """What a class inherits from, its methods and constants."""
        found: list[Any] = [
            value.__qualname__, [self.named(base, base.__name__) for base in value.__bases__]
        ]  # fmt: skip
        for name, one in sorted(vars(value).items()):
            where = f"{value.__qualname__}.{name}"
            if isinstance(one, property):
                found.append([name, "property", self.named(one.fget, where)])
            elif isinstance(one, (staticmethod, classmethod)):
                found.append([name, type(one).__name__, self.named(one.__func__, where)])
            elif isinstance(one, types.FunctionType) or not name.startswith("__"):
                found.append([name, self.named(one, where)])
        return found

    def see(self, value: Any) -> None:
        self.seen[id(value)] = len(self.seen)
        self.kept.append(value)

    def value(self, value: Any, where: str) -> Any:
        kind = type(value)
        if kind in _PLAIN:
            return [kind.__name__, repr(value)]
        if id(value) in self.seen:
            return ["again", self.seen[id(value)]]
        if not self.given and kind in (list, set, dict, OrderedDict, types.MappingProxyType):
            return ["some", kind.__name__]
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
        if hasattr(kind, "ferrule_digest"):
            return ["op", value.ferrule_digest]
        if isinstance(value, Dtype):
            return ["dtype", value.name]
        if isinstance(value, np.dtype) or (kind.__module__, kind.__name__) in _SHOWN:
            return [kind.__module__, kind.__name__, repr(value)]
        if isinstance(value, np.generic):
            return ["number", repr(value.dtype), repr(value.item())]
        if kind.__module__ == "torch._ops":  # an operator is what its name and schema say
            return ["torch op", str(value), str(getattr(value, "_schema", ""))]
        if isinstance(value, types.ModuleType):
            return ["module", _versioned(value.__name__)]
        if kind is functools.partial:
            return [
                "partial",
                *(self.value(v, where) for v in (value.func, value.args, value.keywords)),
            ]
        if isinstance(value, types.MethodType):
            return ["method", self.value(value.__func__, where), self.value(value.__self__, where)]
        if isinstance(value, types.FunctionType):
            name = by_name(value)
            if name is None or self.own(name.partition(":")[0]):
                return self.meet(value)
            return ["name", name, _versioned(name.partition(":")[0])]
        name = importable(value)
        if name is not None:
            if isinstance(value, type) and self.own(value.__module__):
                return ["name", name, self.meet(value)]
            return ["name", name, _versioned(name.partition(":")[0])]
        if not self.given and not hasattr(kind, "__dlpack__"):
            return ["some", _type_name(value)]
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
        return [self.code(code), cells, defaults, keywords]

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


def ops_in(function: object) -> list[Any]:
    """The ops that a Python function leads to: those in its closure and its defaults, those that it
    names, and those of functions that it names, as `of_callable` follows them."""
    found: list[Any] = []
    package = _package(function)
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
            if _own(one.__globals__.get("__name__"), package):
                rest += [value for _, value in _named(one)]
        elif isinstance(one, type) and _own(one.__module__, package):
            rest += [*one.__bases__, *vars(one).values()]
        elif isinstance(one, (staticmethod, classmethod)):
            rest.append(one.__func__)
    return found


def _package(function: Any) -> str | None:
    """The package, or module, that a function's code is of."""
    while not isinstance(function, types.FunctionType):
        inner = getattr(function, "func", None) or getattr(function, "__func__", None)
        if inner is None:
            return None
        function = inner
    name = function.__globals__.get("__name__")
    return name.partition(".")[0] if isinstance(name, str) else None


def _own(module: object, package: str | None) -> bool:
    """Whether a module is the user's own, or of this package."""
    if not isinstance(module, str):
        return True
    top = module.partition(".")[0]
    if top in _KNOWN:
        return False
    file = getattr(sys.modules.get(module), "__dict__", {}).get("__file__")
    if file is None:  # built in; or typed in, or made by exec
        return module not in sys.stdlib_module_names
    path = Path(file)
    if {"site-packages", "dist-packages"} & set(path.parts):
        return top == package
    return not path.is_relative_to(_STDLIB)


def _versioned(module: str) -> list[str | None]:
    """The name of a module and, of most that are installed, the package's version."""
    top = module.partition(".")[0]
    plain = top in _KNOWN or top in sys.stdlib_module_names or _own(module, None)
    return [module, None if plain else _version(top)]


@functools.cache
def _version(package: str) -> str | None:
    known = getattr(sys.modules.get(package), "__dict__", {}).get("__version__")
    if isinstance(known, str):
        return known
    import importlib.metadata  # takes milliseconds

    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _named(function: types.FunctionType) -> list[tuple[str, Any]]:
    """What a function's code reads from around it by name, through modules, and what that is; none
    that is not there, or that the function assigns. Modules that are installed are not looked
    into."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    package = _package(function)
    found: dict[str, Any] = {}
    for names in _names_of(function.__code__):
        if names[0] in cells:
            cell = cells[names[0]]
            value = _ABSENT if cell == types.CellType() else cell.cell_contents
            if not isinstance(value, types.ModuleType):  # what is closed over is read elsewhere
                continue
        else:
            value = function.__globals__.get(names[0], _ABSENT)
        depth = 1
        while (
            depth < len(names)
            and isinstance(value, types.ModuleType)
            and _own(value.__name__, package)
        ):
            value, depth = vars(value).get(names[depth], _ABSENT), depth + 1
        if value is not _ABSENT:
            found[".".join(names[:depth])] = value
    return sorted(found.items())


@functools.lru_cache(maxsize=4096)
def _names_of(code: types.CodeType) -> list[tuple[str, ...]]:
    """The names that code, and functions in it, read from around, each with the attributes that
    follow; none that it assigns."""
    found: set[tuple[str, ...]] = set()
    assigned: set[str] = set()
    for part in _codes(code):
        names: tuple[str, ...] = ()
        for one in dis.get_instructions(part):
            if one.opname == "EXTENDED_ARG":
                continue
            if one.opname in ("LOAD_ATTR", "LOAD_METHOD") and names:
                names = (*names, one.argval)
                continue
            if names:
                found.add(names)
            around = one.opname == "LOAD_DEREF" and one.argval in code.co_freevars
            names = (one.argval,) if around or one.opname == "LOAD_GLOBAL" else ()
            if one.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                assigned.add(one.argval)
    return sorted(names for names in found if names[0] not in assigned)


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


def _type_name(value: object) -> str:
    return f"{type(value).__module__}.{type(value).__qualname__}"


def short(value: object) -> str:
    """A value for a message, in 60 characters at most."""
    text = repr(value).replace("\n", " ")
    return text if len(text) <= 60 else f"{text[:57]}..."


def named(function: Callable[..., Any] | None) -> str:
    """How messages call a function: ``"module:qualname"``."""
    module = getattr(function, "__module__", None) or type(function).__module__
    name = getattr(function, "__qualname__", None) or type(function).__qualname__
    return f"{module}:{name}"
