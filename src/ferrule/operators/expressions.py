"""Expressions over a rule's dims that an implementation is declared by: read, evaluated, and as
JSON."""

from __future__ import annotations

import difflib
import functools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from .. import dtypes
from ..dtypes import Dtype
from ..errors import KernelError, KernelTypeError, RuleError
from ..rules.expression import DEVICE_NUMBERS, Expression
from ..rules.grammar import parse
from ..rules.rule import Binding, Rule

INT32 = 2**31
_SCRATCH = re.compile(r"\s*([A-Za-z_]\w*)\s*\[(.*)\]\s*", re.DOTALL)

Sizes = tuple[int, int, int]
TemplateValue = int | bool | Dtype
Template = tuple[tuple[str, Expression | bool | Dtype], ...]  # before its call


@functools.lru_cache(maxsize=2048)
def _parsed(text: str, kinds: tuple[str, ...]) -> Expression:
    """An expression: families declare ops by the same texts again and again."""
    return parse(text, kinds=kinds)


def to_json(value: object) -> Any:
    """What a launch is declared by: an expression, several of them, a dtype, a number or None."""
    if isinstance(value, Expression):
        return value.to_json()
    if isinstance(value, tuple):
        return [expression.to_json() for expression in value]
    return ["dtype", value.name] if isinstance(value, Dtype) else value


def expression_from_json(data: Any) -> Any:
    """The reverse of `to_json` for what is an expression, several of them, or None."""
    if data is None:
        return None
    if isinstance(data, list) and (not data or isinstance(data[0], list)):
        return tuple(map(Expression.from_json, data))
    return Expression.from_json(data)


def value_from_json(data: Any) -> Any:
    """The reverse of `to_json` for a template's or initial value."""
    if isinstance(data, list) and data[0] == "dtype" and data[1] in dtypes.BY_NAME:
        return dtypes.BY_NAME[data[1]]
    return Expression.from_json(data) if isinstance(data, list) else data


def bound_dtype(name: str, binding: Binding) -> Dtype:
    """The dtype that a full name, or a variable of the rule, is in a call."""
    return dtypes.BY_NAME[binding.dtypes.get(name, name)]


def dtype_variables(rule: Rule) -> tuple[str, ...]:
    """The dtype variables of arrays, in the order in which they appear."""
    variables = dict.fromkeys(
        parameter.dtype
        for parameter in rule.inputs
        if parameter.dtype not in dtypes.BY_NAME and parameter.dims is not None
    )
    return tuple(variables)


def between_commas(text: str) -> list[str]:
    """The parts of a text between commas that stand outside of parentheses."""
    parts, depth = [""], 0
    for c in text:
        depth += (c == "(") - (c == ")")
        if c == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += c
    return parts if len(parts) > 1 or parts[0].strip() else []


def known_size(expression: Expression) -> int | None:
    """The value of an expression that is the same for all calls; None of others."""
    if not expression.constant:
        return None
    try:
        return int(expression.evaluate({}))
    except ZeroDivisionError:
        return None


class Scratch(NamedTuple):
    """An array of an implementation's own: what the steps of a unit share, or what is kept.

    Attributes:
        name: its name.
        dtype: a dtype's full name, or a variable of the rule.
        dims: its dims.
    """

    name: str
    dtype: str
    dims: tuple[Expression, ...]


class SizedImplementation:
    """An implementation that is declared by expressions of its op's rule.

    Attributes:
        when: the condition under which it is chosen, or None.
        template: template parameters, or constants.
    """

    when: Expression | None
    template: Template

    def __init__(self, op: str, rule: Rule) -> None:
        self._op, self._rule = op, rule

    def _label(self, setting: str) -> str:
        """How messages call what was declared."""
        return f"[op] `{setting}` of op {self._op!r}"

    # -- as it is declared -------------------------------------------------------------------------

    def _expression(self, setting: str, value: object, typed: bool = False) -> Expression:
        """An int, text or `Expression` over what a launch may depend on; a dtype, if ``typed``.

        Raises:
            KernelTypeError, RuleError: it is none, or names what the rule does not have.
        """
        label, rule = self._label(setting), self._rule
        if isinstance(value, Expression):
            expression = value
        elif type(value) is int:
            expression = Expression(("neg", ("int", -value)) if value < 0 else ("int", value))
        elif isinstance(value, str):
            try:
                kinds = (*dtypes.BY_NAME, *dtype_variables(rule)) if typed else ()
                expression = _parsed(value, kinds)
            except RuleError as error:
                message = f"{label}: {error}"
                raise RuleError(message, text=error.text, position=error.position) from None
        else:
            raise KernelTypeError(
                f"{label}: got {value!r} of type {type(value).__name__}, "
                'expected an int or an expression such as "B*N".'
            )
        dims = {*rule.dim_names, *rule.numbers, *rule.star_sizes, *DEVICE_NUMBERS}
        arrays = {
            a.name for a in (*rule.inputs, *rule.outputs) if a.dims is not None and not a.optional
        }
        kinds = dtype_variables(rule)
        own = sorted(dims.difference(DEVICE_NUMBERS))
        bound = f"; the rule binds {', '.join(own) or 'none'}"
        for kind, names, words in (
            ("dtype variable", expression.variables - set(kinds), ""),
            ("dim", expression.names - dims, bound),
            ("array", expression.arrays - arrays, " that is always there"),
        ):
            for name in sorted(names, key=lambda name: (name != "device", name)):
                text = str(expression)
                match = re.search(rf"\b{name}\b", text)
                message = f"{label}: there is no {kind} {name!r}{words}"
                if typed and text == name:
                    close = difflib.get_close_matches(name, (*dtypes.BY_NAME, *kinds, *dims), 1)
                    hint = f"; did you mean {close[0]!r}?" if close else words
                    message = f"{label}: {name!r} is neither a dtype nor a dim{hint}"
                elif name in kinds:
                    message = (
                        f"{label}: {name!r} is a dtype variable; compare it: {name} == float16"
                    )
                elif name == "device":
                    message = f"{label}: `device` is one of cpu, cuda, metal, as in device == cuda"
                raise RuleError.at(message, text, match.start() if match else 0)
        return expression

    def _size(self, setting: str, value: object) -> Expression:
        """An expression that is no condition."""
        size = self._expression(setting, value)
        if size.condition:
            raise KernelError(f"{self._label(setting)}: got the condition {size}, expected a size.")
        return size

    def _axes(self, setting: str, sizes: object) -> tuple[Expression, ...]:
        """One to three sizes; those left out are 1."""
        parts: Sequence[object] = sizes if isinstance(sizes, (list, tuple)) else [sizes]
        if not 1 <= len(parts) <= 3:
            raise KernelError(
                f"{self._label(setting)}: got {len(parts)} sizes, expected one to three."
            )
        axes = [self._expression(setting, part) for part in parts]
        for axis in axes:
            self._size(setting, axis)
        return (*axes, *[Expression(("int", 1))] * (3 - len(axes)))

    def _condition(self, condition: object) -> Expression | None:
        """The condition of a `when`, if there is one."""
        if condition is None:
            return None
        expression = self._expression("when", condition)
        if not expression.condition:
            raise KernelError(
                f"{self._label('when')}: got {condition!r}, expected a condition, such as "
                '"M <= 16".'
            )
        return expression

    def _template(self, values: object, setting: str = "template") -> Template:
        """Template parameters, or constants: ints and texts become expressions."""
        if values is None:
            return ()
        label = self._label(setting)
        pairs = list(values.items()) if isinstance(values, Mapping) else values
        if isinstance(pairs, (str, bytes)) or not isinstance(pairs, Sequence):
            raise KernelTypeError(
                f'{label}: got {values!r}, expected a dictionary such as {{"D": "D"}}.'
            )
        template: list[tuple[str, Expression | bool | Dtype]] = []
        for pair in pairs:
            named = isinstance(pair, (tuple, list)) and len(pair) == 2
            if not named or not isinstance(pair[0], str):
                raise KernelTypeError(f"{label}: got {pair!r}, expected a name and a value.")
            name, value = pair
            dtype = None if isinstance(value, (str, int)) else dtypes.find(value)
            if isinstance(value, bool):
                template.append((name, value))
            elif dtype is not None:
                template.append((name, dtype))
            else:
                expression = self._expression(f"{setting}[{name!r}]", value, True)
                known = dtypes.BY_NAME.get(expression.node[1]) if expression.of_dtype else None
                template.append((name, expression if known is None else known))
        return tuple(template)

    def _memory(self, kind: str, declared: object) -> tuple[Scratch, ...]:
        """Arrays of its own, beside inputs and outputs."""
        if declared is None:
            return ()
        label = self._label(kind)
        if not isinstance(declared, Mapping):
            expected = 'a dictionary such as {"partial": "float32[N]"}'
            raise KernelTypeError(f"{label}: got {declared!r}, expected {expected}.")
        arrays = []
        for name, text in declared.items():
            match = _SCRATCH.fullmatch(text) if isinstance(text, str) else None
            if match is None:
                raise KernelError(
                    f'{label}: got {text!r} for {name!r}, expected "dtype[dims]", such as '
                    '"float32[M,N]".'
                )
            dtype = match[1]
            if dtype not in dtypes.BY_NAME and dtype not in dtype_variables(self._rule):
                raise KernelError(
                    f"{label}: {name!r} has the dtype {dtype!r}, which is neither a dtype's full "
                    "name nor a variable of the rule."
                )
            setting = f"{kind}[{name!r}]"
            dims = tuple(self._expression(setting, part) for part in between_commas(match[2]))
            for dim in dims:
                if dim.condition:
                    problem = f"got the condition {dim}, expected a size"
                    raise KernelError(f"{label}: {name!r}: {problem}.")
            arrays.append(Scratch(str(name), dtype, dims))
        return tuple(arrays)

    # -- for one call ------------------------------------------------------------------------------

    def holds(self, binding: Binding) -> bool:
        """Whether its `when` holds for a call's sizes."""
        return self.when is None or bool(self._value(self.when, binding))

    def template_for(
        self, binding: Binding, number: Callable[[Expression], int] | None = None
    ) -> tuple[tuple[str, TemplateValue], ...]:
        """The template parameters of one call: dtypes, ``has_<input>``, and the declared ones.

        Args:
            number: evaluates an expression; by default it is evaluated for ``binding``.

        Raises:
            KernelError: one is no int32.
        """
        values: list[tuple[str, TemplateValue]] = [
            (name, dtypes.BY_NAME[binding.dtypes[name]]) for name in dtype_variables(self._rule)
        ]
        for parameter in self._rule.inputs:
            if parameter.optional:
                present = binding.shapes[parameter.name] is not None
                values.append((f"has_{parameter.name}", present))
        for name, value in self.template:
            if not isinstance(value, Expression):
                values.append((name, value))
                continue
            size = self._value(value, binding) if number is None else number(value)
            if not -INT32 <= size < INT32:
                raise self._bad("template", f"{name} = {value}", size, binding, "an int32")
            if value.of_dtype:
                values.append((name, dtypes.ALL[size]))
            else:
                values.append((name, bool(size) if value.condition else size))
        return tuple(values)

    def _shape(self, kind: str, array: Scratch, binding: Binding) -> tuple[int, ...]:
        """The shape that an array of its own has in a call."""
        shape = tuple([self._value(dim, binding) for dim in array.dims])
        for dim, length in zip(array.dims, shape, strict=True):
            if length < 0:
                raise self._bad(kind, f"{array.name}: {dim}", length, binding, "0 or more")
        return shape

    def _sizes(self, setting: str, axes: Sequence[Expression], binding: Binding) -> Sizes:
        x, y, z = sizes = [self._value(axis, binding) for axis in axes]
        for axis, size in zip(axes, sizes, strict=True):
            if not 0 <= size < INT32:
                raise self._bad(setting, axis, size, binding, f"0 to {INT32 - 1}")
        return x, y, z

    def _between(
        self, setting: str, text: Expression, binding: Binding, low: int, high: int, words: str
    ) -> int:
        """The value of an expression; ``words`` call its limits."""
        value: int = self._value(text, binding)
        if not low <= value <= high:
            raise self._bad(setting, text, value, binding, words)
        return value

    def _value(self, expression: Expression, binding: Binding) -> Any:
        return self._rule.value(self._op, expression, binding)

    def _bad(
        self, setting: str, text: object, value: object, binding: Binding, expected: str
    ) -> KernelError:
        """The error for the value of an expression, or several, for one call's sizes."""
        parts = text if isinstance(text, tuple) else (text,)
        sizes = binding.words(*(part for part in parts if isinstance(part, Expression)))
        if isinstance(text, tuple):
            text = f"({', '.join(map(str, text))})"
        got = f"got {value}" if str(text) == str(value) else f"{text} is {value} for {sizes}"
        return KernelError(f"{self._label(setting)}: {got}; expected {expected}.")


def memory_to_json(arrays: Sequence[Scratch]) -> Any:
    """Arrays of an implementation's own, as data."""
    return [[array.name, array.dtype, to_json(array.dims)] for array in arrays]


def memory_from_json(data: Any) -> dict[str, str]:
    """The reverse of `memory_to_json`: as they might be written, and as yet unchecked."""
    return {
        str(name): f"{dtype}[{','.join(map(str, expression_from_json(dims)))}]"
        for name, dtype, dims in data
    }
