"""The op that a command line names, and the function that it is compared with."""

from __future__ import annotations

import os
import sys
import types
from collections.abc import Callable
from typing import Any, NamedTuple

from .. import Op
from ..check.fuzzing.written_test import Origin
from .faults import Fault
from .target import find_kernel, load_module


class Subject(NamedTuple):
    """An op, or a function.

    Attributes:
        name: what it is called in its file.
        value: the op, or the function.
        origin: where a test has it from.
    """

    name: str
    value: Any
    origin: Origin


def find_op(target: str) -> Subject:
    """The op that ``FILE:NAME`` or ``package.module:NAME`` stands for.

    Raises:
        Fault: there is none, or it is a kernel without a rule.
    """
    name, value = find_kernel(target, ops=True)
    if not isinstance(value, Op):
        raise Fault(
            f"{name!r} is a kernel without a rule, which says nothing of its sizes; expected an "
            "op, made by ferrule.op(name, rule, metal=…, grid=…, threadgroup=…)."
        )
    place = target.rpartition(":")[0] or target
    return Subject(name, value, _origin(place, name, value))


def find_reference(target: str, name: str) -> Subject:
    """The function, or op, that ``FILE:NAME`` or ``FILE`` stands for.

    Args:
        target: as on the command line.
        name: which, where the target does not say it.

    Raises:
        Fault: there is none.
    """
    place, colon, path = target.rpartition(":")
    place, path = (place, path) if colon else (target, name)
    value: Any = load_module(place)
    names = ", ".join(functions_of(value)) or "none"
    for part in path.split("."):
        if not hasattr(value, part):
            raise Fault(f"there is no {path!r} in {place!r}; functions there: {names}.")
        value = getattr(value, part)
    if not callable(value):
        kind = type(value).__qualname__
        raise Fault(f"{path!r} in {place!r} is a {kind}, expected a function of NumPy's arrays.")
    return Subject(path, value, _origin(place, path, value))


def functions_of(module: types.ModuleType) -> dict[str, Callable[..., Any]]:
    """The functions and ops that a module has."""
    return {
        name: value
        for name, value in vars(module).items()
        if isinstance(value, (types.FunctionType, Op)) and not name.startswith("_")
    }


def _origin(place: str, path: str, value: Any) -> Origin:
    """Where a test that lies beside the file has something from."""
    is_file = place.endswith(".py") or os.sep in place
    module = os.path.basename(place).removesuffix(".py") if is_file else place
    root = path.partition(".")[0]
    loaded = sys.modules.get(f"inspected.{module}" if is_file else place)
    made = isinstance(getattr(loaded, root, None), types.FunctionType)
    called = f"{path}()" if made and isinstance(value, Op) else path
    return Origin(f"from {module} import {root}", called)
