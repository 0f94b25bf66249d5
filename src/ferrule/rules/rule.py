"""What an op declares: its arrays' shapes and dtypes, as data.

A rule reads like a signature::

    x[B,H,W,C]:T, grid[B,N,M,2]:T, bias[C]:T? -> out[B,N,M,C]:T
        where T in (float32, float16), C % 4 == 0

* A dim is a name, which the first input that has it alone binds; an integer; an expression
  (`expression`) of dims that are bound; or ``*S``, any number of dims, once per array. A dim that
  optional inputs alone have is 0 where none of them is there. ``S_size`` is how many elements
  ``*S`` has.
* ``*broadcast(S,R)`` in an output is what ``*S`` and ``*R`` broadcast to, by NumPy's rules.
* Without brackets an input is a Python number: ``eps:float32``. One of an integer dtype or bool,
  such as ``k:int32``, may be named like a dim, in sizes, conditions and launches.
* A dtype is a full name, or a variable (one that is no dtype's name), which an input binds.
* ``w[N]:W=T?``: a variable that optional inputs alone have is ``T`` where none of them is there, or
  a dtype, as in ``W=float32``.
* ``?`` after an input says that it may be None; ``!`` that the kernel writes it in place.
* ``~`` after an output says that it is constant to derivatives: it is kept for the backward pass,
  such as ``rstd[*S]:float32~``, and no gradient goes through it.
* ``if`` after an output says when a call has it: ``dw[N]:float32 if w`` with an optional input
  ``w``, ``rstd[*S]:float32~ if stats`` with a bool. A rule whose conditions are settled, as
  `Rule.settled` gives it, says ``if True`` or ``if False`` there.
* ``where`` lists conditions, and what dtype variables may be.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from operator import eq
from typing import Any

from .. import dtypes
from ..errors import KernelError, RuleError
from .argument import Argument, Broadcast, Dim, Star, as_declared, is_countable, name_of
from .binding import Binding as Binding
from .binding import Shape
from .expression import Expression, Ints
from .parser import NAME, declaration

_BROADCAST = re.compile(r"\*broadcast\(([\w,]+)\)")


class Rule:
    """An op's inputs, outputs and conditions.

    Attributes:
        inputs, outputs: in order; of outputs those that may be there.
        declared: all outputs, also those that are settled to be absent.
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
        self.inputs, self.declared = inputs, outputs
        self.outputs = tuple(output for output in outputs if output.present is not False)
        self.choices, self.conditions = dict(sorted(choices.items())), conditions

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Rule) and self.to_json() == other.to_json()

    def __hash__(self) -> int:
        return hash(str(self))

    def __str__(self) -> str:
        sides = (", ".join(map(str, side)) for side in (self.inputs, self.declared))
        where = [f"{v} in ({', '.join(names)})" for v, names in self.choices.items()]
        where += map(str, self.conditions)
        return " -> ".join(sides).rstrip() + (f" where {', '.join(where)}" if where else "")

    def shown(self) -> str:
        """The rule as it would be declared for its calls: of a settled one, the outputs that it
        has, without their conditions."""
        settled = (o._replace(present=None) if o.present is True else o for o in self.outputs)
        return str(Rule(self.inputs, tuple(settled), self.choices, self.conditions))

    @property
    def presences(self) -> tuple[Expression, ...]:
        """The conditions of outputs that are not settled, each once."""
        each = (output.present for output in self.declared)
        return tuple(dict.fromkeys(p for p in each if isinstance(p, Expression)))

    def settled(self, presences: Mapping[Expression, bool]) -> Rule:
        """The rule of the calls for which the conditions of outputs are these."""
        outputs = (
            output._replace(present=presences[output.present])
            if isinstance(output.present, Expression)
            else output
            for output in self.declared
        )
        return Rule(self.inputs, tuple(outputs), self.choices, self.conditions)

    def signature(self) -> inspect.Signature:
        """The signature of a call, as Python's tools show it: the inputs, in order or by name."""
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        # Python has no parameter without a default behind one that has one.
        last = max(
            (i for i, argument in enumerate(self.inputs) if not argument.optional), default=-1
        )
        parameters = [
            inspect.Parameter(
                argument.name, kind, default=None if i > last else inspect.Parameter.empty
            )
            for i, argument in enumerate(self.inputs)
        ]
        return inspect.Signature(parameters)

    @cached_property
    def star_sizes(self) -> dict[str, str]:
        """By ``"S_size"``, the name of how many elements ``*S`` has, that star: of inputs that are
        always there, where nothing else has the name."""
        taken = {*self.dim_names, *(a.name for a in (*self.inputs, *self.declared))}
        there = [a for a in self.inputs if not a.optional]
        stars = [dim.name for a in there for dim in a.dims or () if isinstance(dim, Star)]
        return {f"{name}_size": name for name in stars if f"{name}_size" not in taken}

    @cached_property
    def defaults(self) -> dict[str, str]:
        """What dtype variables are where no input says it: dtypes, or other variables."""
        return {a.dtype: a.default for a in self.inputs if a.default is not None}

    @property
    def dim_names(self) -> tuple[str, ...]:
        """The dims that the shapes of inputs bind, in the order in which they appear."""
        alone = (name_of(dim) for argument in self.inputs for dim in argument.dims or ())
        numbers = self.numbers
        return tuple(
            dict.fromkeys(name for name in alone if name is not None and name not in numbers)
        )

    @cached_property
    def numbers(self) -> tuple[str, ...]:
        """The numbers that expressions may name: all but floats."""
        return tuple(argument.name for argument in self.inputs if is_countable(argument))

    def bind(
        self,
        op: str,
        shapes: Sequence[Shape | None],
        kinds: Sequence[str | None],
        on: type[Ints] = Ints,
        numbers: Mapping[str, Any] | None = None,
    ) -> Binding:
        """Check a call's inputs and bind their dims and dtypes.

        Args:
            op: the op's name, for error messages.
            shapes: of each input; None of one that is absent, ``()`` of a Python number.
            kinds: the full name of each input's dtype; None of one that is absent, or of a Python
                number that fits the declared one.
            on: what compares sizes.
            numbers: the value of each of the rule's `numbers`, by its name.

        Raises:
            KernelError: an input contradicts the declaration or another input; says which.
        """
        binder = _Binder(self, op, shapes, on)
        binding = binder.binding
        for number in self.numbers:
            value = (numbers or {})[number]
            binding.numbers[number] = int(value) if isinstance(value, bool) else value
        later: list[tuple[Argument, int, Any, Expression]] = []
        absent: list[Dim] = []
        for argument, shape, kind in zip(self.inputs, shapes, kinds, strict=True):
            if shape is None:
                if not argument.optional:
                    label = binder.label(argument)
                    raise KernelError(f"{label}: got None, expected an array: {argument}.")
                absent += argument.dims or ()
                continue
            if kind is not None:
                binder.bind_dtype(argument, shape, kind)
            for i, size, dim in binder.aligned(argument, shape):
                name = name_of(dim)
                if name is not None and name not in binding.dims and name not in self.numbers:
                    binding.dims[name] = size
                    binder.bound[name] = argument, shape
                else:
                    later.append((argument, i, size, dim))
        for variable, default in self.defaults.items():
            if variable not in binding.dtypes:
                binder.bind_default(variable, binding.dtypes.get(default, default))
        for name in map(name_of, absent):
            if name is not None and name not in self.numbers:
                binding.dims.setdefault(name, 0)
        for argument, i, size, dim in later:
            expected = self.value(op, dim, binding, on)
            if not on.holds(expected == size):
                raise binder.disagreement(argument, i, dim, expected)
        for condition in self.conditions:
            if not on.holds(self.value(op, condition, binding, on)):
                values = binding.values(condition)
                symbols = sorted(condition.names | condition.attributes)
                known = [f"{name} = {values[name]}" for name in symbols]
                sizes = ", ".join([*known, *binding.dtypes_of(condition)])
                raise KernelError(
                    f"[op] op {op!r} wants {condition}, and the inputs say {sizes}: "
                    f"{binding.words()}."
                )
        return binding

    def results(self, op: str, binding: Binding, on: type[Ints] = Ints) -> list[tuple[Shape, str]]:
        """The shape and dtype of each output; adds the shapes to what ``binding`` knows.

        Args:
            op: the op's name, for error messages.
            binding: what `bind` found.
            on: what compares sizes.

        Raises:
            KernelError: a size would be negative, or sizes do not broadcast.
        """
        results = []
        for argument in self.outputs:
            shape: list[Any] = []
            for dim in argument.dims or ():
                if isinstance(dim, Star):
                    shape += binding.stars[dim.name]
                    continue
                if isinstance(dim, Broadcast):
                    shape += self._broadcast(op, argument, dim, binding, on)
                    continue
                size = self.value(op, dim, binding, on)
                if type(size) is int and size < 0:
                    problem = f"[op] output {argument.name!r} of op {op!r}: {dim} is {size}"
                    raise KernelError(f"{problem} for {binding.words(dim)}.")
                shape.append(size)
            binding.shapes[argument.name] = tuple(shape)
            results.append((tuple(shape), binding.dtypes.get(argument.dtype, argument.dtype)))
        return results

    def _broadcast(
        self, op: str, argument: Argument, dim: Broadcast, binding: Binding, on: type[Ints]
    ) -> Shape:
        """What the starred dims of a call broadcast to, in an output."""
        shape: Shape | None = ()
        for name in dim.names:
            shape = None if shape is None else on.broadcast(shape, binding.stars[name])
        if shape is not None:
            return shape
        stars = []
        for name in dim.names:
            there = (a for a in self.inputs if binding.shapes[a.name] is not None)
            first = next(a for a in there if Star(name) in (a.dims or ()))
            of = f"input {first.name!r} of shape {binding.shapes[first.name]} ({first})"
            stars.append(f"*{name} is {binding.stars[name]} by {of}")
        raise KernelError(
            f"[op] output {argument.name!r} of op {op!r} ({as_declared(argument)}): "
            f"{' and '.join(stars)}, which do not broadcast; expected the same sizes, or 1, "
            "counted from the last."
        )

    def value(
        self, op: str, expression: Expression, binding: Binding, on: type[Ints] = Ints
    ) -> Any:
        """Evaluate an expression for one call.

        Raises:
            KernelError: it divides by zero, or names what is not known of the device; names ``op``.
        """
        try:
            return expression.evaluate(binding.values(expression), on)
        except KeyError as unknown:
            raise KernelError(
                f"[op] {expression} of op {op!r}: {str(unknown.args[0]).lstrip(':')} is not known "
                "here, where no device runs the op; give a condition or a size without it."
            ) from None
        except ZeroDivisionError:
            raise KernelError(
                f"[op] {expression} of op {op!r} divides by zero for {binding.words(expression)}."
            ) from None

    def to_json(self) -> Any:
        """Lists and dictionaries."""

        def fields_of(argument: Argument) -> Any:
            dims: Any = None
            if argument.dims is not None:
                dims = [d.to_json() if isinstance(d, Expression) else str(d) for d in argument.dims]
            fields = [argument.name, dims, argument.dtype, argument.optional, argument.mutable]
            # Digests are older than what follows.
            present: Any = argument.present
            if isinstance(present, Expression):
                present = present.to_json()
            if argument.default is not None:
                return [*fields, argument.constant, present, argument.default]
            if present is not None:
                return [*fields, argument.constant, present]
            return [*fields, True] if argument.constant else fields

        return {
            "inputs": list(map(fields_of, self.inputs)),
            "outputs": list(map(fields_of, self.declared)),
            "choices": {name: list(names) for name, names in self.choices.items()},
            "conditions": [condition.to_json() for condition in self.conditions],
        }

    @staticmethod
    def from_json(data: object) -> Rule:
        """The reverse of `to_json`.

        Raises:
            RuleError: these are none of `to_json`, or contradict themselves.
        """

        def dim(entry: Any) -> Dim:
            if isinstance(entry, str) and entry.startswith("*") and entry[1:].isidentifier():
                return Star(entry[1:])
            if isinstance(entry, str) and (stars := _BROADCAST.fullmatch(entry)) is not None:
                return Broadcast(tuple(stars[1].split(",")))
            return Expression.from_json(entry)

        def argument(entry: Any) -> Argument:
            name, dims, dtype, optional, mutable, *more = entry
            rest: list[Any] = [*more, *(False, None, None)[len(more) :]]
            constant, when, default = rest
            present = Expression.from_json(when) if isinstance(when, list) else when
            good = all(isinstance(s, str) and NAME.fullmatch(s) for s in (name, dtype))
            if not good or type(optional) is not bool or type(mutable) is not bool:
                raise TypeError
            sizes = None if dims is None else tuple(dim(d) for d in dims)
            return Argument(name, sizes, dtype, optional, mutable, constant, present, default)

        try:
            rule = Rule(
                tuple(argument(entry) for entry in data["inputs"]),  # type: ignore[index]
                tuple(argument(entry) for entry in data["outputs"]),  # type: ignore[index]
                {str(n): tuple(map(str, c)) for n, c in data["choices"].items()},  # type: ignore[index]
                tuple(Expression.from_json(entry) for entry in data["conditions"]),  # type: ignore[index]
            )
        except (TypeError, KeyError, ValueError, AttributeError) as error:
            if isinstance(error, RuleError):
                raise
            raise RuleError("a saved rule is damaged") from None
        again = parse_rule(str(rule))  # with all the checks of one that is written
        if again.to_json() != data:
            raise RuleError("a saved rule is damaged")
        return again


def parse_rule(text: str) -> Rule:
    """Parse a rule.

    Raises:
        RuleError: it cannot be understood, or contradicts itself; points at the character.
    """
    return Rule(*declaration(text))


class _Binder:
    """The inputs of one call while they are bound, one after the other.

    Attributes:
        binding: what is bound.
        bound: the input that bound each dim, ``*S`` and ``:T``, and its shape.
    """

    def __init__(self, rule: Rule, op: str, shapes: Sequence[Shape | None], on: type[Ints]) -> None:
        self.rule, self.op, self.on = rule, op, on
        names = (argument.name for argument in rule.inputs)
        self.binding = Binding(dict(zip(names, shapes, strict=True)))
        self.bound: dict[str, tuple[Argument, Shape]] = {}

    def label(self, argument: Argument) -> str:
        """How messages call an input."""
        return f"[op] input {argument.name!r} of op {self.op!r}"

    def bind_dtype(self, argument: Argument, shape: Shape, kind: str) -> None:
        name, label = argument.dtype, f"{self.label(argument)}: got {kind}, "
        if name in dtypes.BY_NAME:
            if kind != name:
                raise KernelError(f"{label}expected {argument}.")
            return
        allowed = self.rule.choices.get(name)
        if allowed is not None and kind not in allowed:
            raise KernelError(
                f"{label}expected {argument} where {name} is one of {', '.join(allowed)}."
            )
        bound_dtype = self.binding.dtypes.setdefault(name, kind)
        first = self.bound.setdefault(f":{name}", (argument, shape))[0]
        if bound_dtype != kind:
            raise KernelError(
                f"{label}but {name} is {bound_dtype} by input {first.name!r} ({first}, {argument})."
            )

    def bind_default(self, variable: str, kind: str) -> None:
        """Bind a dtype variable that no input has bound."""
        allowed = self.rule.choices.get(variable)
        if allowed is not None and kind not in allowed:
            raise KernelError(
                f"[op] op {self.op!r}: {variable} is {kind}, as no input says what it is; expected "
                f"one of {', '.join(allowed)}."
            )
        self.binding.dtypes[variable] = kind

    def aligned(self, argument: Argument, shape: Shape) -> list[tuple[int, Any, Expression]]:
        """The dims of an input but ``*S``, with where they stand in its shape and their sizes."""
        dims = argument.dims or ()
        starred = any(isinstance(dim, Star) for dim in dims)
        least = len(dims) - starred
        if len(shape) < least or (not starred and len(shape) > least):
            many = f"{least} dim{'s' * (least != 1)}{' or more' * starred}"
            raise KernelError(
                f"{self.label(argument)}: got the shape {shape}, expected {argument}, with {many}."
            )
        more = len(shape) - least
        aligned = []
        at = 0
        for dim in dims:
            if isinstance(dim, Star):
                self._bind_star(argument, shape, dim, shape[at : at + more])
                at += more
            elif isinstance(dim, Expression):
                aligned.append((at, shape[at], dim))
                at += 1
        return aligned

    def _bind_star(self, argument: Argument, shape: Shape, star: Star, sizes: Shape) -> None:
        bound_sizes = self.binding.stars.setdefault(star.name, sizes)
        first, its = self.bound.setdefault(str(star), (argument, shape))
        same = map(self.on.holds, map(eq, bound_sizes, sizes))
        if len(bound_sizes) != len(sizes) or not all(same):
            raise KernelError(
                f"{self.label(argument)} has the shape {shape} ({argument}), so {star} is {sizes}, "
                f"but input {first.name!r} of shape {its} ({first}) says {bound_sizes}."
            )

    def disagreement(self, argument: Argument, i: int, dim: Expression, expected: Any) -> Exception:
        """The error for a dim of an input whose size is not what others say."""
        shapes = self.binding.shapes
        shape = shapes[argument.name] or ()
        why = f"expected {expected}"
        if not dim.constant:
            arrays = {a.name: (a, shapes[a.name] or ()) for a in self.rule.inputs}
            binders = [self.bound[name] for name in sorted(dim.names) if name in self.bound]
            binders += [arrays[name] for name in sorted(dim.arrays)]
            sources = [f"input {first.name!r} of shape {its} ({first})" for first, its in binders]
            sources += [f"number {name!r}" for name in self.rule.numbers if name in dim.names]
            unbound = dim.names - self.bound.keys() - set(self.rule.numbers)
            sources += [
                f"the absence of {a.name!r} ({a})"
                for a in self.rule.inputs
                if any(name_of(d) in unbound for d in a.dims or ())
            ]
            sources += self.binding.dtypes_of(dim)
            why = f"{dim} is {expected} by {' and '.join(dict.fromkeys(sources))}"
        return KernelError(
            f"{self.label(argument)}: got the shape {shape} ({argument}), whose dim {i} is "
            f"{shape[i]}, but {why}."
        )
