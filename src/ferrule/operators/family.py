"""`family`: ops that differ in constants."""

from __future__ import annotations

import functools
import inspect
import itertools
import threading
from collections.abc import Callable
from enum import Enum
from typing import Any, Generic, ParamSpec

from .. import dtypes
from ..errors import KernelTypeError
from ..hosts import imported
from .op import Op

P = ParamSpec("P")


class Family(Generic[P]):
    """Ops that differ in constants, of a function that declares them: see `ferrule.family`."""

    __qualname__: str
    ferrule_is_function = True  # `operators.identity`: its content is that of `__wrapped__`

    def __init__(self, function: Callable[P, Op]) -> None:
        functools.update_wrapper(self, function)
        self._members = _Members(function)
        self._find = self._members.find
        self._plain = self._members.plain
        self._name = self._members.name

    def __call__(self, *args: P.args, **named: P.kwargs) -> Op:
        """The op of these constants, the same each time.

        Raises:
            KernelTypeError: these are no constants, or not those of the function; or what it
                returned is no op.
        """
        imported.watch_once()  # before `traced` is read, which Dynamo remembers
        if not imported.traced():
            if not named:
                key = args, *map(type, args)
                try:
                    return self._plain[key]
                except (KeyError, TypeError):  # not called so yet, or no constants
                    pass
            return self._find(args, named)
        # Dynamo guards an attribute, and takes nothing but plain values from a constant function.
        constants = {name: settled(value) for name, value in named.items()}
        op: Op = getattr(self._members, self._name(*map(settled, args), **constants))
        return op

    def __repr__(self) -> str:
        return f"<ferrule.family {self._members.family}>"

    def __reduce__(self) -> str:
        return self.__qualname__  # as functions are


def family(function: Callable[P, Op]) -> Family[P]:
    """Ops that differ in constants: a mode, a number of bits, a layout.

    The function declares the op of some constants; what this makes of it is called alike, and calls
    it once for each. Inside `torch.compile`, also with ``fullgraph=True``, and `torch.export` the
    call is a constant of the graph: constants are looked at while the graph is traced, and other
    ones make another graph.

    Args:
        function: takes constants, with or without defaults, and returns an op. Constants are
            bools, ints, floats, strs, None, dtypes of any library, members of an Enum, and tuples
            of these. ``True``, ``1`` and ``1.0`` are three of them.

    Raises:
        KernelTypeError: ``function`` cannot be called, or its parameters cannot be read.

    Example:
        >>> import ferrule, numpy as np
        >>> @ferrule.family
        ... def power(exponent: int = 2, negative: bool = False):
        ...     value = "-" * negative + "*".join(["x[i]"] * exponent)
        ...     return ferrule.op("power", "x[N]:T -> y[N]:T", grid="N", threadgroup=256,
        ...         metal=f"uint i = thread_position_in_grid.x; y[i] = {value};")
        >>> power(3)(np.array([2, 3], np.int32))
        array([ 8, 27], dtype=int32)
        >>> power(exponent=3) is power(3)
        True
    """
    if not callable(function):
        raise KernelTypeError(
            f"[family] `function` is {function!r}; expected a function that takes constants and "
            "returns an op."
        )
    return Family(function)


def settled(value: Any) -> Any:
    """A constant of a function that is traced. Of a number whose value the graph leaves open,
    Dynamo looks at the value now: that is how it groups numbers."""
    if type(value) is tuple:
        return tuple([settled(item) for item in value])
    if type(value) is bool:
        return True if value else False  # noqa: SIM210, a condition settles it
    if type(value) in (int, float):
        ((value, _),) = itertools.groupby((value,))
    return value


class _Members:
    """The ops of a family, each an attribute."""

    def __init__(self, function: Callable[..., Op]) -> None:
        self._function = function
        self.family = getattr(function, "__name__", repr(function))
        try:
            self._signature = inspect.signature(function)
        except (TypeError, ValueError) as error:
            raise KernelTypeError(
                f"[family] the parameters of {self.family!r} cannot be read: {error}; expected a "
                "function."
            ) from None
        self._by_call: dict[Any, Op] = {}
        self.plain: dict[Any, Op] = {}  # by plain constants without names, and then their types
        self._names: dict[Any, str] = {}
        self.name = _constant(self)

    def find(self, args: tuple[Any, ...], named: dict[str, Any]) -> Op:
        """The member of these constants."""
        call = _known_by(self.family, args), _known_by(self.family, named) if named else None
        if (op := self._by_call.get(call)) is None:
            op = self._by_call[call] = getattr(self, imported.untraced(self.declared)(args, named))
            if not named and _PLAIN.issuperset(map(type, args)):
                key = args, *map(type, args)
                self.plain[key] = op
        return op

    def declared(self, args: tuple[Any, ...], named: dict[str, Any]) -> str:
        """The name of the attribute; calls the function where it is not there yet."""
        try:
            bound = self._signature.bind(*args, **named)
        except TypeError as error:
            raise KernelTypeError(
                f"[family] {self.family!r} takes the constants {self._signature}: {error}."
            ) from None
        bound.apply_defaults()
        constants = _known_by(self.family, bound.arguments)
        if constants not in self._names:
            op = self._function(*bound.args, **bound.kwargs)
            if not isinstance(op, Op):
                raise KernelTypeError(
                    f"[family] {self.family!r} returned {op!r}; expected an op, of ferrule.op or "
                    "ferrule.adopt."
                )
            with _lock:
                if constants not in self._names:  # or another thread's op is the member
                    name = f"member_{len(self._names)}"
                    setattr(self, name, op)  # before others can ask for it
                    self._names[constants] = name
        return self._names[constants]


_lock = threading.Lock()


def _constant(members: _Members) -> Callable[..., str]:
    def name(*args: Any, **named: Any) -> str:
        return imported.untraced(members.declared)(args, named)

    name._dynamo_marked_constant = True  # type: ignore[attr-defined]  # as of Op._register
    return name


_PLAIN = frozenset((bool, int, str, type(None)))
_EXPECTED = "expected a bool, an int, a float, a str, None, a dtype, an Enum's member or a tuple"


def _known_by(family: str, constants: tuple[Any, ...] | dict[str, Any]) -> Any:
    """What constants are known by: equal ones of two types are two."""
    if isinstance(constants, dict):
        names = sorted(constants)
        return tuple(names), _known_by(family, tuple([constants[name] for name in names]))
    types = tuple(map(type, constants))
    if _PLAIN.issuperset(types):
        return types, constants
    return types, tuple([_key(family, value) for value in constants])


def _key(family: str, value: Any) -> Any:
    if type(value) is float:
        return value.hex()  # of NaN and of both zeros, too
    if type(value) in (tuple, dict):
        return _known_by(family, value)
    if type(value) in _PLAIN or isinstance(value, Enum) or dtypes.find(value) is not None:
        return value
    kind = type(value).__name__
    if hasattr(value, "__dlpack__") or hasattr(value, "__array__"):
        shape = tuple(getattr(value, "shape", ()))
        got, hint = f"{kind} of shape {shape}", "int() or float() makes a constant of it"
        if shape:
            hint = f"arrays are inputs of the op that it returns: {family}(...)(x)"
    else:
        sequence = isinstance(value, (list, tuple))
        shown = tuple(value) if isinstance(value, tuple) else value  # Dynamo empties a named one
        got, hint = f"{shown!r} of type {kind}", _EXPECTED + "; tuple() makes one of it" * sequence
    raise KernelTypeError(f"[family] {family!r} got {got} as a constant; {hint}.")
