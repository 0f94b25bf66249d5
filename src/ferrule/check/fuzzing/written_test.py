"""A failing call as a test of pytest's, ready to be pasted."""

from __future__ import annotations

import pprint
import re
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from .judge import FORMS, Failure, Judge, Mismatch
from .recipes import Recipe, literal

_WIDTH = 96


@dataclass(frozen=True)
class Origin:
    """Where a test has something from.

    Attributes:
        imports: a line, such as ``"from kernels import scale"``.
        name: the expression for it, such as ``"scale"``.
    """

    imports: str
    name: str


@dataclass(frozen=True)
class Origins:
    """Where a test has the op and the reference from; None of what it must have without import."""

    op: Origin | None
    reference: Origin | None = None


def origin_of(value: Any) -> Origin | None:
    """Where something can be imported from: the module that has it by a name."""
    modules = [sys.modules.get(getattr(value, "__module__", None) or ""), *sys.modules.values()]
    for module in modules:
        if not isinstance(module, types.ModuleType):
            continue
        if module.__name__ == "__main__" or module.__name__.startswith("ferrule.check"):
            continue
        for name, held in vars(module).items():
            if held is value and name.isidentifier() and not name.startswith("_"):
                return Origin(f"from {module.__name__} import {name}", name)
    return None


def written_test(
    judge: Judge, failure: Failure, reference: Callable[..., Any] | None, origins: Origins | None
) -> str:
    """A test that makes a call, and fails as that does.

    Args:
        judge: what judged it.
        failure: the call, and what is wrong with it.
        reference: what it was compared with.
        origins: where the test has the op and the reference from; None: looked for in modules.
    """
    found = origins or Origins(
        origin_of(judge.whole), None if reference is None else origin_of(reference)
    )
    return _Writer(judge, failure, found).text()


class _Writer:
    """Writes one test."""

    def __init__(self, judge: Judge, failure: Failure, origins: Origins) -> None:
        self._judge, self._failure = judge, failure
        self._taken = {*failure.call.names, "expected", "findings", "np", "ferrule"}
        op = origins.op and self._apart(origins.op, "op")
        self._name = op.name if op else self._free(judge.op.name)
        self._taken.add(_root(self._name))
        self._origins = Origins(
            op, origins.reference and self._apart(origins.reference, "reference")
        )
        self._imports: set[str] = set()
        if any(isinstance(value, Recipe) for value in failure.call.inputs):
            self._imports.add("import numpy as np")
        self._declared = ""

    def text(self) -> str:
        """The whole file."""
        name = self._judge.op.name
        op = self._op()
        body = [*self._failure.call.lines(), *self._checks(op)]
        if any("ml_dtypes." in line for line in body):
            self._imports.add("import ml_dtypes")
        if self._declared or any("ferrule." in line for line in body):
            self._imports.add("import ferrule")
        heads = _sorted(self._imports)
        declared = f"\n{self._declared}" if self._declared else ""
        lines = "\n".join(f"    {line}" if line else "" for line in body)
        said = " ".join(self._failure.message.split()).replace('"""', "'''").replace("\\", "/")
        return f'{heads}\n{declared}\n\ndef test_{name}():\n    """{said}"""\n{lines}\n'

    def _free(self, name: str) -> str:
        """A name that no local variable of the test has."""
        while name in self._taken:
            name += "_"
        return name

    def _apart(self, origin: Origin, other: str) -> Origin:
        """What is imported, by another name where something else in the test has its own."""
        root = _root(origin.name)
        if root not in self._taken:
            return origin
        free = self._free(other)
        return Origin(f"{origin.imports} as {free}", free + origin.name.removeprefix(root))

    def _op(self) -> str:
        """The expression for the op that is called."""
        origin, call = self._origins.op, self._failure.call
        if origin is None:
            name = self._name
            op = self._judge.op.variant(*call.values())
            data = pprint.pformat({**op.to_json(), "rules": {}}, width=_WIDTH, sort_dicts=False)
            self._declared = f"{name} = ferrule.Op.from_json(\n{data}\n)\n"
        else:
            self._imports.add(origin.imports)
            name = origin.name
            if len({body.kind for body in self._judge.whole.implementations}) > 1:
                name = f'{name}.using("metal")' if self._judge.op is not self._judge.whole else name
        if call.threadgroup is not None:
            self._imports.add("from ferrule.check.fuzzing.redeclare import with_threadgroup")
            return f"with_threadgroup({name}, {call.threadgroup})"
        return name

    def _checks(self, op: str) -> list[str]:
        arguments = ", ".join(self._failure.call.names)
        mismatch, ignore = self._failure.mismatch, self._judge.ignore
        options = f"ignore={literal(ignore)}" if ignore else ""
        called = f"{op}({arguments})"
        if mismatch is None:
            checked = f"with ferrule.checking({options}) as findings:"
            return [checked, f"    {called}", "assert not findings, findings"]
        rule = self._judge.op.rule
        outputs = [output.name for output in rule.declared]
        actual = mismatch.output
        lines = [called]
        if actual in outputs:
            actual = self._free("result")
            place = f"[{outputs.index(mismatch.output)}]" if len(outputs) > 1 else ""
            lines = [f"{actual} = {called}{place}"]
        writes = any(argument.mutable for argument in rule.inputs)
        expected = None if writes else self._expected(mismatch, arguments)
        if expected is None:
            return [*lines, *self._element(mismatch, actual)]
        if len(outputs) > 1:
            expected[-1] += f"[{outputs.index(mismatch.output)}]"
        return [*lines, *expected, *self._close(mismatch, actual)]

    def _expected(self, mismatch: Mismatch, arguments: str) -> list[str] | None:
        """Lines that give ``expected`` by another way; None where that needs what has no name."""
        way, origin = mismatch.way.name, self._origins.op
        op = self._name
        if way == "reference" and self._origins.reference is not None:
            self._imports.add(self._origins.reference.imports)
            return [f"expected = {self._origins.reference.name}({arguments})"]
        if way in FORMS:
            self._imports.add("from ferrule.devices.cpu.program import running")
            return [f'with running("{way}"):', f"    expected = {op}({arguments})"]
        if way == "reverse":
            lines = ["with ferrule.checking(reverse=True):"]
            return [*lines, f"    expected = {self._op()}({arguments})"]
        if way == "declared":
            return [f"expected = {op}({arguments})"]
        if way.startswith("using ") and origin is not None:
            return [f'expected = {op}.using("{way[6:]}")({arguments})']
        return None

    def _close(self, mismatch: Mismatch, actual: str) -> list[str]:
        self._imports.add("import numpy as np")
        if mismatch.at is None:
            return [f"assert {actual}.shape == np.shape(expected)"]
        values = [actual, "expected"]
        if mismatch.dtype.startswith(("bfloat16", "float8")):  # of which NumPy knows little
            values = [f"np.asarray({value}).astype(np.float32)" for value in values]
        return [f"np.testing.assert_allclose({', '.join(values)}, {_limits(mismatch)})"]

    def _element(self, mismatch: Mismatch, actual: str) -> list[str]:
        """What the element that is off by most must be."""
        self._imports.add("import numpy as np")
        if mismatch.at is None:
            return [f"assert {actual}.shape == {mismatch.expected}"]
        at = ", ".join(map(str, mismatch.at)) or "()"
        element, expected = f"{actual}[{at}].item()", literal(mismatch.expected)
        return [f"np.testing.assert_allclose({element}, {expected}, {_limits(mismatch)})"]


def _root(name: str) -> str:
    """The name that is imported: ``Rows`` of ``Rows.sums``, ``make`` of ``make()``."""
    return re.split(r"\W", name, maxsplit=1)[0]


def _sorted(imports: set[str]) -> str:
    """Import lines as formatters have them: NumPy's first, then ferrule's and the user's."""
    parts: dict[bool, list[str]] = {True: [], False: []}
    names: dict[str, list[str]] = {}
    for line in sorted(imports):
        words = line.split()
        if words[0] == "import":
            parts[words[1] in ("numpy", "ml_dtypes")].append(line)
        else:
            names.setdefault(words[1], []).append(line.partition(" import ")[2])
    parts[False] += [f"from {module} import {', '.join(each)}" for module, each in names.items()]
    return "\n\n".join("\n".join(lines) for lines in parts.values() if lines)


def _limits(mismatch: Mismatch) -> str:
    return f"rtol={mismatch.rtol:.3g}, atol={mismatch.atol:.3g}"
