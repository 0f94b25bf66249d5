"""What an op declares: its arrays' shapes and dtypes, as data.

A rule reads like a signature::

    x[B,H,W,C]:T, grid[B,N,M,2]:T, bias[C]:T? -> out[B,N,M,C]:T
        where T in (float32, float16), C % 4 == 0

* A dim is a name, which the first input that has it alone binds; an integer; an expression
  (`expression`) of dims that are bound; or ``*S``, any number of dims, once per array.
* Without brackets an input is a Python number: ``eps:float32``.
* A dtype is a full name, or a variable (one that is no dtype's name), which an input binds.
* ``?`` after an input says that it may be None; ``!`` that the kernel writes it in place.
* ``~`` after an output says that it is constant to derivatives: it is kept for the backward pass,
  such as ``rstd[*S]:float32~``, and no gradient goes through it.
* ``where`` lists conditions, and what dtype variables may be.
"""

from __future__ import annotations

import inspect
import keyword
import re
from collections.abc import Mapping, Sequence
from operator import eq
from typing import Any, NamedTuple

from . import dtypes
from .errors import KernelError, RuleError
from .expression import Expression, Ints, parse

Shape = tuple[Any, ...]

_NAME = re.compile(r"[A-Za-z_][A-Za-z_0-9]*")
_CHOICES = re.compile(r"\s*([A-Za-z_]\w*)\s+in\s*\((.*)\)\s*", re.DOTALL | re.ASCII)
_DTYPE = re.compile(r"\s*:\s*([A-Za-z_]\w*)\s*([?!~]*)\s*", re.ASCII)
# No variable is called like a dtype of C, Metal or another library: it would take any dtype at all.
_LIKE_A_DTYPE = re.compile(
    r"(u?int|float|bfloat|complex|bool|half)(\d|_|$)|(f|fp|bf|i|u)(8|16|32|64)(_|$)|double$"
    r"|u?(char|short|long)$"
)
_STAR = re.compile(r"\s*\*\s*([A-Za-z_]\w*)\s*", re.ASCII)


class Star(NamedTuple):
    """``*name``: any number of dims.

    Attributes:
        name: what they are called together.
    """

    name: str

    def __str__(self) -> str:
        return f"*{self.name}"


Dim = Expression | Star


class Argument(NamedTuple):
    """An input or output.

    Attributes:
        name: its name.
        dims: its dims; None of an input that is a Python number.
        dtype: a dtype's full name, or a variable.
        optional: it may be None.
        mutable: the kernel writes it in place.
        constant: of an output: derivatives take it for a constant.
    """

    name: str
    dims: tuple[Dim, ...] | None
    dtype: str
    optional: bool = False
    mutable: bool = False
    constant: bool = False

    def __str__(self) -> str:
        dims = "" if self.dims is None else f"[{','.join(map(_tight, self.dims))}]"
        marks = f"{'?' * self.optional}{'!' * self.mutable}{'~' * self.constant}"
        return f"{self.name}{dims}:{self.dtype}{marks}"


class Binding:
    """What the inputs of one call say.

    Attributes:
        dims: the size of each dim.
        stars: the sizes that each ``*S`` stands for.
        dtypes: the full name of each dtype variable.
        shapes: the shape of each input, None of those that are absent; of outputs, too, once they
            are known.
    """

    def __init__(self, shapes: dict[str, Shape | None]) -> None:
        self.dims: dict[str, Any] = {}
        self.stars: dict[str, Shape] = {}
        self.dtypes: dict[str, str] = {}
        self.shapes = shapes

    def values(self, on: Expression) -> dict[str, Any]:
        """What an expression may name: dims, ``"x.size"`` and ``"x.ndim"``."""
        found = dict(self.dims)
        for name in on.arrays:
            size: Any = 1
            shape = self.shapes[name] or ()
            for n in shape:
                size = size * n
            found[f"{name}.size"], found[f"{name}.ndim"] = size, len(shape)
        return found


class Rule:
    """A declaration.

    Attributes:
        inputs, outputs: in order.
        choices: what dtype variables may be, by their name.
        conditions: what must hold.
    """

    def __init__(
        self,
        inputs: tuple[Argument, ...],
        outputs: tuple[Argument, ...],
        choices: Mapping[str, tuple[str, ...]],
        conditions: tuple[Expression, ...],
    ) -> None:
        self.inputs, self.outputs = inputs, outputs
        self.choices, self.conditions = dict(sorted(choices.items())), conditions

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rule) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash(str(self))

    def __str__(self) -> str:
        sides = (", ".join(map(str, side)) for side in (self.inputs, self.outputs))
        where = [f"{v} in ({', '.join(names)})" for v, names in self.choices.items()]
        where += map(str, self.conditions)
        return " -> ".join(sides).rstrip() + (f" where {', '.join(where)}" if where else "")

    def signature(self) -> inspect.Signature:
        """What a call takes, as Python's tools show it: the inputs, in order or by name."""
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        found: list[inspect.Parameter] = []
        for one in self.inputs:
            # Python has no parameter without a default behind one that has one.
            late = one.optional or (bool(found) and found[-1].default is None)
            default = None if late else inspect.Parameter.empty
            found.append(inspect.Parameter(one.name, kind, default=default))
        return inspect.Signature(found)

    @property
    def dim_names(self) -> tuple[str, ...]:
        """The dims that inputs bind, in the order in which they appear."""
        alone = (_alone(dim) for one in self.inputs if not one.optional for dim in one.dims or ())
        return tuple(dict.fromkeys(name for name in alone if name is not None))

    def bind(
        self, op: str, shapes: Sequence[Shape | None], kinds: Sequence[str | None],
        on: type[Ints] = Ints,
    ) -> Binding:  # fmt: skip
        """What a call's inputs say.

        Args:
            op: the op's name, for error messages.
            shapes: of each input; None of one that is absent, ``()`` of a Python number.
            kinds: the full name of each input's dtype; None of one that is absent, or of a Python
                number that fits the declared one.
            on: what compares sizes.

        Raises:
            KernelError: an input contradicts the declaration or another input; says which.
        """
        said = Binding(dict(zip((one.name for one in self.inputs), shapes, strict=True)))
        bound: dict[str, tuple[Argument, Shape]] = {}
        later: list[tuple[Argument, int, Any, Expression]] = []
        for one, shape, kind in zip(self.inputs, shapes, kinds, strict=True):
            if shape is None:
                if not one.optional:
                    raise KernelError(
                        f"[op] input {one.name!r} of op {op!r}: got None, expected an array: {one}."
                    )
                continue
            self._bind_dtype(op, said, bound, one, shape, kind)
            for i, size, dim in _aligned(op, one, shape, said, bound, on):
                name = _alone(dim)
                if name is not None and name not in said.dims:
                    said.dims[name] = size
                    bound[name] = one, shape
                else:
                    later.append((one, i, size, dim))
        for one, i, size, dim in later:
            expected = self.value(op, dim, said, on)
            if not on.holds(expected == size):
                arrays = {a.name: (a, said.shapes[a.name] or ()) for a in self.inputs}
                shape = said.shapes[one.name] or ()
                raise _disagreement(op, one, shape, i, dim, expected, bound, arrays)
        for condition in self.conditions:
            if not on.holds(self.value(op, condition, said, on)):
                values = said.values(condition)
                named = sorted(condition.names | condition.attributes)
                sizes = ", ".join(f"{name} = {values[name]}" for name in named)
                raise KernelError(
                    f"[op] op {op!r} wants {condition}, and the inputs say {sizes}: "
                    f"{_shapes(said)}."
                )
        return said

    def results(self, op: str, said: Binding, on: type[Ints] = Ints) -> list[tuple[Shape, str]]:
        """The shape and dtype of each output; adds the shapes to what ``said`` knows.

        Args:
            op: the op's name, for error messages.
            said: what `bind` found.
            on: what compares sizes.

        Raises:
            KernelError: a size would be negative.
        """
        found = []
        for one in self.outputs:
            shape: list[Any] = []
            for dim in one.dims or ():
                if isinstance(dim, Star):
                    shape += said.stars[dim.name]
                    continue
                size = self.value(op, dim, said, on)
                if type(size) is int and size < 0:
                    what = f"[op] output {one.name!r} of op {op!r}: {dim} is {size}"
                    raise KernelError(f"{what} for {_shapes(said)}.")
                shape.append(size)
            said.shapes[one.name] = tuple(shape)
            found.append((tuple(shape), said.dtypes.get(one.dtype, one.dtype)))
        return found

    def _bind_dtype(
        self, op: str, said: Binding, bound: dict[str, tuple[Argument, Shape]], one: Argument,
        shape: Shape, kind: str | None,
    ) -> None:  # fmt: skip
        if kind is None:
            return
        label = f"[op] input {one.name!r} of op {op!r}: got {kind}, "
        if one.dtype in dtypes.BY_NAME:
            if kind != one.dtype:
                raise KernelError(f"{label}expected {one}.")
            return
        allowed = self.choices.get(one.dtype)
        if allowed is not None and kind not in allowed:
            raise KernelError(
                f"{label}expected {one} where {one.dtype} is one of {', '.join(allowed)}."
            )
        known = said.dtypes.setdefault(one.dtype, kind)
        if known != kind:
            first = bound[f":{one.dtype}"][0]
            raise KernelError(
                f"{label}but {one.dtype} is {known} by input {first.name!r} ({first}, {one})."
            )
        bound.setdefault(f":{one.dtype}", (one, shape))

    def value(self, op: str, what: Expression, said: Binding, on: type[Ints] = Ints) -> Any:
        """What an expression is for one call.

        Raises:
            KernelError: it divides by zero; names ``op``.
        """
        try:
            return what.evaluate(said.values(what), on)
        except ZeroDivisionError:
            raise KernelError(
                f"[op] {what} of op {op!r} divides by zero for {_shapes(said)}."
            ) from None

    def to_json(self) -> Any:
        """Lists and dictionaries."""

        def argument(one: Argument) -> Any:
            dims: Any = None
            if one.dims is not None:
                dims = [f"*{d.name}" if isinstance(d, Star) else d.to_json() for d in one.dims]
            known = [one.name, dims, one.dtype, one.optional, one.mutable]
            return [*known, True] if one.constant else known  # digests are older than the mark

        return {
            "inputs": [argument(one) for one in self.inputs],
            "outputs": [argument(one) for one in self.outputs],
            "choices": {name: list(names) for name, names in self.choices.items()},
            "conditions": [one.to_json() for one in self.conditions],
        }

    @staticmethod
    def from_json(data: object) -> Rule:
        """The reverse of `to_json`.

        Raises:
            RuleError: these are none of `to_json`, or contradict themselves.
        """

        def dim(one: Any) -> Dim:
            if isinstance(one, str) and one.startswith("*") and one[1:].isidentifier():
                return Star(one[1:])
            return Expression.from_json(one)

        def argument(one: Any) -> Argument:
            name, dims, dtype, optional, mutable, *more = one
            good = all(isinstance(s, str) and _NAME.fullmatch(s) for s in (name, dtype))
            if not good or type(optional) is not bool or type(mutable) is not bool:
                raise TypeError
            found = None if dims is None else tuple(dim(d) for d in dims)
            return Argument(name, found, dtype, optional, mutable, bool(more))

        try:
            found = Rule(
                tuple(argument(one) for one in data["inputs"]),  # type: ignore[index]
                tuple(argument(one) for one in data["outputs"]),  # type: ignore[index]
                {str(n): tuple(map(str, c)) for n, c in data["choices"].items()},  # type: ignore[index]
                tuple(Expression.from_json(one) for one in data["conditions"]),  # type: ignore[index]
            )
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            if isinstance(error, RuleError):
                raise
            raise RuleError("a saved rule is damaged") from None
        again = parse_rule(str(found))  # with all the checks of one that is written
        if again.to_json() != data:
            raise RuleError("a saved rule is damaged")
        return again


def parse_rule(text: str) -> Rule:
    """Read a rule.

    Raises:
        RuleError: it cannot be understood, or contradicts itself; points at the character.
    """
    return _Reader(text).rule()


class _Reader:
    """A rule's text, and where its parts stand."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.positions: dict[int, int] = {}  # of arguments and dims, by their id

    def fail(self, message: str, at: int) -> RuleError:
        return RuleError.at(message, self.text, at)

    def rule(self) -> Rule:
        text = self.text
        arrow = text.find("->")
        if arrow < 0:
            raise self.fail("a rule has '->' between its inputs and outputs", len(text))
        if (second := text.find("->", arrow + 2)) >= 0:
            raise self.fail("a rule has one '->'", second)
        where = re.search(r"\bwhere\b", text)
        end = where.start() if where else len(text)
        if end < arrow:
            raise self.fail("'where' stands at the end of a rule", end)
        inputs = [self.argument(*part) for part in self.parts(0, arrow)]
        outputs = [self.argument(*part) for part in self.parts(arrow + 2, end)]
        if not outputs and not any(one.mutable for one in inputs):
            raise self.fail("a rule has an output, or an input that is written in place", arrow + 2)
        choices: dict[str, tuple[str, ...]] = {}
        conditions = []
        if where:
            for start, stop in self.parts(where.end(), len(text)):
                found = _CHOICES.fullmatch(text, start, stop)
                if found is None:
                    one = parse(text[start:stop], whole=text, at=start)
                    if not one.condition:
                        raise self.fail("expected a condition, such as K % 16 == 0", start)
                    conditions.append(one)
                else:
                    names = self.dtype_names(*found.span(2))
                    if found[1] in choices:
                        raise self.fail(f"{found[1]!r} has been limited before", found.start(1))
                    choices[found[1]] = names
        rule = Rule(tuple(inputs), tuple(outputs), choices, tuple(conditions))
        self.check(rule, where.end() if where else len(text))
        return rule

    def begin(self, start: int, end: int) -> int:
        """Where a part's text begins, after spaces."""
        return end - len(self.text[start:end].lstrip())

    def dtype_names(self, start: int, end: int) -> tuple[str, ...]:
        """The names of dtypes between commas."""
        found = []
        for part in self.parts(start, end) or [(start, end)]:
            name = self.text[slice(*part)].strip()
            if name not in dtypes.BY_NAME:
                raise self.fail(f"there is no dtype {name!r}", self.begin(*part))
            found.append(name)
        return tuple(found)

    def parts(self, start: int, end: int) -> list[tuple[int, int]]:
        """Where the parts between commas stand, those inside brackets apart."""
        found, begin = [], start
        closing: list[
            tuple[str, int]
        ] = []  # what closes each bracket that is open, and where it is
        for i in range(start, end):
            c = self.text[i]
            if c in "([":
                closing.append((")" if c == "(" else "]", i))
            elif c in ")]":
                if not closing:
                    raise self.fail(f"{c!r} closes nothing", i)
                if (expected := closing.pop()[0]) != c:
                    raise self.fail(f"expected {expected!r} before {c!r}", i)
            elif c == "," and not closing:
                found.append((begin, i))
                begin = i + 1
        if closing:
            raise self.fail("a bracket is not closed", closing[-1][1])
        if found or self.text[begin:end].strip():
            found.append((begin, end))
        return found

    def argument(self, start: int, end: int) -> Argument:
        """One input or output: ``name[dims]:dtype?!~``."""
        text = self.text
        begin = self.begin(start, end)
        name = _NAME.match(text, begin, end)
        if name is None:
            raise self.fail("expected an array, such as x[B,C]:float32", begin)
        if keyword.iskeyword(name[0]):  # neither torch nor a call by name could say it
            raise self.fail(f"{name[0]!r} is a word of Python; choose another name", begin)
        at, dims = name.end(), None
        if at < end and text[at] == "[":
            close, depth = at, 1
            while depth:  # `parts` has seen that it is closed
                close += 1
                depth += (text[close] == "[") - (text[close] == "]")
            dims = tuple(self.dim(*part) for part in self.parts(at + 1, close))
            if len([d for d in dims if isinstance(d, Star)]) > 1:
                raise self.fail("an array has one starred dim at most", at)
            at = close + 1
        rest = _DTYPE.fullmatch(text, at, end)
        if rest is None:
            if (more := _DTYPE.match(text, at, end)) is not None and text[more.end() - 1].isspace():
                raise self.fail("expected ',' before the next array", more.end())
            raise self.fail("expected ':' and a dtype, such as :float32 or :T", at)
        if rest[1] not in dtypes.BY_NAME and _LIKE_A_DTYPE.match(rest[1]):
            known = ", ".join(dtypes.BY_NAME)
            raise self.fail(f"there is no dtype {rest[1]!r}; expected {known}", rest.start(1))
        marks = rest[2]
        if len(set(marks)) != len(marks):
            raise self.fail("a mark stands twice", rest.start(2))
        found = Argument(name[0], dims, rest[1], "?" in marks, "!" in marks, "~" in marks)
        self.positions[id(found)] = begin
        return found

    def dim(self, start: int, end: int) -> Dim:
        star = _STAR.fullmatch(self.text, start, end)
        found: Dim
        if star is not None:
            found = Star(star[1])
        else:
            found = parse(self.text[start:end], whole=self.text, at=start)
            if found.condition:
                raise self.fail("a condition stands where a size is expected", start)
        self.positions[id(found)] = start
        return found

    def check(self, rule: Rule, where: int) -> None:
        """What the parts say together."""
        names: set[str] = set()
        for one in (*rule.inputs, *rule.outputs):
            at = self.positions[id(one)]
            if one.name in names:
                raise self.fail(f"there are two arrays called {one.name!r}", at)
            names.add(one.name)
        dims, stars, kinds = self.bound(rule)
        for one in rule.inputs:
            if one.constant:
                raise self.fail(
                    "'~' is a mark of outputs; a vjp gives None for an input without a gradient",
                    self.positions[id(one)],
                )
        for one in rule.outputs:
            at = self.positions[id(one)]
            if one.dims is None:
                raise self.fail(f"output {one.name!r} has no shape: expected {one.name}[…]", at)
            if one.optional or one.mutable:
                raise self.fail("'?' and '!' are marks of inputs", at)
            if one.dtype not in dtypes.BY_NAME and one.dtype not in kinds:
                raise self.fail(f"no input says what dtype {one.dtype!r} is", at)
        for one in (*rule.inputs, *rule.outputs):
            for dim in one.dims or ():
                at = self.positions[id(dim)]
                if not isinstance(dim, Star):
                    self.known(dim, dims, rule, at)
                elif dim.name not in stars:
                    raise self.fail(f"no input that is always there says what {dim} is", at)
        for condition in rule.conditions:
            self.known(condition, dims, rule, where)
        for name in rule.choices:
            if name not in kinds:
                raise self.fail(f"no input has the dtype {name!r}", where)
        for name in sorted(dims & stars | dims & kinds | stars & kinds):
            raise self.fail(f"{name!r} is two things: a dim, *dims or a dtype", 0)
        for one in (*rule.inputs, *rule.outputs):
            at = self.positions[id(one)]
            if one.name in kinds:  # both are names of the body
                raise self.fail(f"{one.name!r} is two things: an array and a dtype", at)
            if one.dims is None and one.name in dims:
                raise self.fail(f"{one.name!r} is two things: a number and a dim", at)

    def bound(self, rule: Rule) -> tuple[set[str], set[str], set[str]]:
        """The dims, starred dims and dtype variables that inputs bind which are always there."""
        dims: set[str] = set()
        stars: set[str] = set()
        kinds: set[str] = set()
        for one in rule.inputs:
            if one.dims is None and (one.optional or one.mutable):
                raise self.fail("'?' and '!' are marks of arrays", self.positions[id(one)])
            if one.dims is None and one.dtype not in dtypes.BY_NAME:
                raise self.fail(
                    f"a number has a dtype's name, as in {one.name}:float32; {one.dtype!r} is a "
                    "variable",
                    self.positions[id(one)],
                )
            if one.optional:
                continue
            if one.dims is not None and one.dtype not in dtypes.BY_NAME:
                kinds.add(one.dtype)
            for dim in one.dims or ():
                if isinstance(dim, Star):
                    stars.add(dim.name)
                elif (name := _alone(dim)) is not None:
                    dims.add(name)
        for one in rule.inputs:
            if one.dtype not in dtypes.BY_NAME and one.dtype not in kinds:
                raise self.fail(
                    f"no array that is always there says what dtype {one.dtype!r} is",
                    self.positions[id(one)],
                )
        return dims, stars, kinds

    def known(self, what: Expression, dims: set[str], rule: Rule, start: int) -> None:
        """Fail where an expression, whose text begins at or after ``start``, names what is not."""

        def at(name: str) -> int:
            found = re.compile(rf"\b{name}\b").search(self.text, start)
            return found.start() if found else start

        for name in sorted(what.names - dims):
            numbers = [one for one in rule.inputs if one.dims is None and one.name == name]
            why = (
                f"{name!r} is a number of the call, which sizes cannot depend on; write its value "
                "into the rule: an op per value"
                if numbers
                else f"no input that is always there has the dim {name!r} by itself; they have "
                + (", ".join(sorted(dims)) or "none")
            )
            raise self.fail(why, at(name))
        arrays = {one.name for one in rule.inputs if one.dims is not None and not one.optional}
        for name in sorted(what.arrays - arrays):
            raise self.fail(f"there is no input {name!r} that always has a shape", at(name))


def _alone(dim: Dim) -> str | None:
    """The name of a dim that is one."""
    return dim.node[1] if isinstance(dim, Expression) and dim.node[0] == "name" else None


def _tight(dim: Dim) -> str:
    """A dim without spaces, but for those around words."""
    return re.sub(r"(?<!\w) | (?!\w)", "", str(dim))


def _aligned(
    op: str,
    one: Argument,
    shape: Shape,
    said: Binding,
    bound: dict[str, tuple[Argument, Shape]],
    on: type[Ints],
) -> list[tuple[int, Any, Expression]]:
    """The dims of an input but ``*S``, with where they stand in its shape and their sizes."""
    dims = one.dims or ()
    starred = any(isinstance(dim, Star) for dim in dims)
    least = len(dims) - starred
    if len(shape) < least or (not starred and len(shape) > least):
        many = f"{least} dim{'s' * (least != 1)}{' or more' * starred}"
        raise KernelError(
            f"[op] input {one.name!r} of op {op!r}: got the shape {shape}, expected {one}, with "
            f"{many}."
        )
    more = len(shape) - least
    found = []
    at = 0
    for dim in dims:
        if isinstance(dim, Star):
            _bind_star(op, one, shape, dim, shape[at : at + more], said, bound, on)
            at += more
        else:
            found.append((at, shape[at], dim))
            at += 1
    return found


def _bind_star(
    op: str, one: Argument, shape: Shape, star: Star, sizes: Shape, said: Binding,
    bound: dict[str, tuple[Argument, Shape]], on: type[Ints],
) -> None:  # fmt: skip
    known = said.stars.setdefault(star.name, sizes)
    first, its = bound.setdefault(str(star), (one, shape))
    if len(known) != len(sizes) or not all(map(on.holds, map(eq, known, sizes))):
        raise KernelError(
            f"[op] input {one.name!r} of op {op!r} has the shape {shape} ({one}), so {star} is "
            f"{sizes}, but input {first.name!r} of shape {its} ({first}) says {known}."
        )


def _disagreement(
    op: str, one: Argument, shape: Shape, i: int, dim: Expression, expected: Any,
    bound: dict[str, tuple[Argument, Shape]], arrays: dict[str, tuple[Argument, Shape]],
) -> KernelError:  # fmt: skip
    why = f"expected {expected}"
    if dim.names or dim.arrays:
        said = [bound[name] for name in sorted(dim.names)]
        said += [arrays[name] for name in sorted(dim.arrays)]
        sources = " and ".join(
            dict.fromkeys(f"input {first.name!r} of shape {its} ({first})" for first, its in said)
        )
        why = f"{dim} is {expected} by {sources}"
    return KernelError(
        f"[op] input {one.name!r} of op {op!r}: got the shape {shape} ({one}), whose dim {i} is "
        f"{shape[i]}, but {why}."
    )


def _shapes(said: Binding) -> str:
    return ", ".join(f"{name} {shape}" for name, shape in said.shapes.items() if shape)
