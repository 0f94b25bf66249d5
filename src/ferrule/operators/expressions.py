"""Expressions over a rule's dims that a launch depends on: read, evaluated, and as JSON."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from .. import dtypes
from ..dtypes import Dtype
from ..errors import KernelError, KernelTypeError, RuleError
from ..rules.expression import Expression, parse
from ..rules.rule import Binding, Rule

INT32 = 2**31

Sizes = tuple[int, int, int]
TemplateValue = int | bool | Dtype
Template = tuple[tuple[str, Expression | bool | Dtype], ...]  # before its call


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
    if isinstance(data, list) and data[0] == "dtype":
        return dtypes.BY_NAME[data[1]]
    return Expression.from_json(data) if isinstance(data, list) else data


def wrong_size(
    op: str, setting: str, text: object, value: object, binding: Binding, expected: str
) -> KernelError:
    """The error for the value of an expression for one call's sizes."""
    if isinstance(text, tuple):
        text = f"({', '.join(map(str, text))})"
    sizes = ", ".join(f"{n} {s}" for n, s in binding.shapes.items() if s)
    got = f"got {value}" if str(text) == str(value) else f"{text} is {value} for {sizes}"
    return KernelError(f"[op] `{setting}` of op {op!r}: {got}; expected {expected}.")


def template_values(
    op: str,
    rule: Rule,
    template: Template,
    binding: Binding,
    number: Callable[[Expression], int] | None = None,
) -> tuple[tuple[str, TemplateValue], ...]:
    """The template parameters of one call: dtypes, ``has_<input>``, and the declared ones.

    Args:
        number: evaluates an expression; by default it is evaluated for ``binding``.

    Raises:
        KernelError: one is no int32.
    """
    values: list[tuple[str, TemplateValue]] = [
        (name, dtypes.BY_NAME[binding.dtypes[name]]) for name in dtype_variables(rule)
    ]
    for parameter in rule.inputs:
        if parameter.optional:
            values.append((f"has_{parameter.name}", binding.shapes[parameter.name] is not None))
    for name, value in template:
        if not isinstance(value, Expression):
            values.append((name, value))
            continue
        size = rule.value(op, value, binding) if number is None else number(value)
        if not -INT32 <= size < INT32:
            raise wrong_size(op, "template", f"{name} = {value}", size, binding, "an int32")
        values.append((name, bool(size) if value.condition else size))
    return tuple(values)


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


def expression_of(op: str, rule: Rule, setting: str, value: object) -> Expression:
    """An int, text or `Expression` over what a launch may depend on."""
    label = f"[op] `{setting}` of op {op!r}"
    if isinstance(value, Expression):
        expression = value
    elif type(value) is int:
        expression = Expression(("neg", ("int", -value)) if value < 0 else ("int", value))
    elif isinstance(value, str):
        try:
            expression = parse(value)
        except RuleError as error:
            message = f"{label}: {error}"
            raise RuleError(message, text=error.text, position=error.position) from None
    else:
        raise KernelTypeError(
            f"{label}: got {value!r} of type {type(value).__name__}, "
            'expected an int or an expression such as "B*N".'
        )
    dims = set(rule.dim_names)
    arrays = {
        a.name for a in (*rule.inputs, *rule.outputs) if a.dims is not None and not a.optional
    }
    bound = f"; the rule binds {', '.join(sorted(dims)) or 'none'}"
    for kind, names, words in (
        ("dim", expression.names - dims, bound),
        ("array", expression.arrays - arrays, " that is always there"),
    ):
        for name in sorted(names):
            text = str(expression)
            match = re.search(rf"\b{name}\b", text)
            message = f"{label}: there is no {kind} {name!r}{words}"
            raise RuleError.at(message, text, match.start() if match else 0)
    return expression


def size_of(op: str, rule: Rule, setting: str, value: object) -> Expression:
    """What is no condition."""
    size = expression_of(op, rule, setting, value)
    if size.condition:
        raise KernelError(
            f"[op] `{setting}` of op {op!r}: got the condition {size}, expected a size."
        )
    return size


def condition_of(op: str, rule: Rule, condition: object) -> Expression | None:
    """The condition of a `when`, if there is one."""
    if condition is None:
        return None
    expression = expression_of(op, rule, "when", condition)
    if not expression.condition:
        raise KernelError(
            f'[op] `when` of op {op!r}: got {condition!r}, expected a condition, such as "M <= 16".'
        )
    return expression


def axes_of(op: str, rule: Rule, setting: str, sizes: object) -> tuple[Expression, ...]:
    """One to three sizes; those left out are 1."""
    parts: Sequence[object] = sizes if isinstance(sizes, (list, tuple)) else [sizes]
    if not 1 <= len(parts) <= 3:
        raise KernelError(
            f"[op] `{setting}` of op {op!r}: got {len(parts)} sizes, expected one to three."
        )
    axes = [size_of(op, rule, setting, part) for part in parts]
    return (*axes, *[Expression(("int", 1))] * (3 - len(axes)))


def template_of(op: str, rule: Rule, values: object, setting: str = "template") -> Template:
    """Template parameters, or constants: ints and texts become expressions."""
    if values is None:
        return ()
    pairs = list(values.items()) if isinstance(values, Mapping) else values
    if isinstance(pairs, (str, bytes)) or not isinstance(pairs, Sequence):
        raise KernelTypeError(
            f"[op] `{setting}` of op {op!r}: got {values!r}, expected a dictionary such as "
            '{"D": "D"}.'
        )
    template: list[tuple[str, Expression | bool | Dtype]] = []
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not isinstance(pair[0], str):
            raise KernelTypeError(
                f"[op] `{setting}` of op {op!r}: got {pair!r}, expected a name and a value."
            )
        name, value = pair
        dtype = None if isinstance(value, (str, int)) else dtypes.find(value)
        if isinstance(value, bool):
            template.append((name, value))
        elif dtype is not None:
            template.append((name, dtype))
        else:
            template.append((name, expression_of(op, rule, f"{setting}[{name!r}]", value)))
    return tuple(template)


def fill_of(op: str, rule: Rule, value: object) -> Expression | float | None:
    """An initial value of outputs; a text becomes an expression."""
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return expression_of(op, rule, "init_value", value)


class SizedImplementation:
    """An implementation whose launch is declared in expressions.

    Attributes:
        when: the condition under which it is chosen, or None.
    """

    when: Expression | None

    def __init__(self, op: str, rule: Rule) -> None:
        self._op, self._rule = op, rule

    def holds(self, binding: Binding) -> bool:
        """Whether its `when` holds for a call's sizes."""
        return self.when is None or bool(self._value(self.when, binding))

    def _sizes(self, setting: str, axes: Sequence[Expression], binding: Binding) -> Sizes:
        sizes = [self._value(axis, binding) for axis in axes]
        for axis, size in zip(axes, sizes, strict=True):
            if not 0 <= size < INT32:
                raise self._bad(setting, axis, size, binding, f"0 to {INT32 - 1}")
        return sizes[0], sizes[1], sizes[2]

    def _value(self, expression: Expression, binding: Binding) -> Any:
        return self._rule.value(self._op, expression, binding)

    def _bad(
        self, setting: str, text: object, value: object, binding: Binding, expected: str
    ) -> KernelError:
        return wrong_size(self._op, setting, text, value, binding, expected)
