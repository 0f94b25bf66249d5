"""Parses the text of a rule. Errors point at the character."""

from __future__ import annotations

import keyword
import re
from typing import NamedTuple

from .. import dtypes
from ..errors import RuleError
from .argument import Argument, Broadcast, Dim, Star, is_countable, name_of
from .expression import Expression
from .grammar import parse

NAME = re.compile(r"[A-Za-z_][A-Za-z_0-9]*")
_CHOICES = re.compile(r"\s*([A-Za-z_]\w*)\s+in\s*\(([^()]*)\)\s*", re.ASCII)
_DTYPE = re.compile(r"\s*:\s*([A-Za-z_]\w*)\s*(?:=\s*([A-Za-z_]\w*)\s*)?([?!~]*)\s*", re.ASCII)
# No variable is called like a dtype of C, Metal or another library: it would take any dtype at all.
_LIKE_A_DTYPE = re.compile(
    r"(u?int|float|bfloat|complex|bool|half)(\d|_|$)|(f|fp|bf|i|u)(8|16|32|64)(_|$)|double$"
    r"|u?(char|short|long)$"
)
_IF = re.compile(r"\bif\b")
_STAR = re.compile(r"\s*\*\s*([A-Za-z_]\w*)\s*", re.ASCII)
_BROADCAST = re.compile(r"\s*\*\s*broadcast\s*\(([^()]*)\)\s*", re.ASCII)


class Declaration(NamedTuple):
    """The parts of a rule, as `Rule` has them."""

    inputs: tuple[Argument, ...]
    outputs: tuple[Argument, ...]
    choices: dict[str, tuple[str, ...]]
    conditions: tuple[Expression, ...]


def declaration(text: str) -> Declaration:
    """Parse the text of a rule.

    Raises:
        RuleError: it cannot be understood, or contradicts itself; points at the character.
    """
    return _Parser(text).declaration()


class _Parser:
    """Parses one rule, and knows where its parts stand."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.positions: dict[int, int] = {}  # of arguments and dims, by their id

    def fail(self, message: str, at: int | Argument | Dim) -> RuleError:
        position = at if isinstance(at, int) else self.positions[id(at)]
        return RuleError.at(message, self.text, position)

    def declaration(self) -> Declaration:
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
        always = [a for a in outputs if a.present in (None, True)]
        if not always and not any(argument.mutable for argument in inputs):
            what = "an output that is always there" if outputs else "an output"
            raise self.fail(f"a rule has {what}, or an input that is written in place", arrow + 2)
        choices: dict[str, tuple[str, ...]] = {}
        conditions = []
        if where:
            for start, stop in self.parts(where.end(), len(text)):
                choice = _CHOICES.fullmatch(text, start, stop)
                if choice is None:
                    condition = parse(text[start:stop], whole=text, at=start)
                    if not condition.condition:
                        raise self.fail("expected a condition, such as K % 16 == 0", start)
                    conditions.append(condition)
                else:
                    names = self.dtype_names(*choice.span(2))
                    if choice[1] in choices:
                        raise self.fail(f"{choice[1]!r} has been limited before", choice.start(1))
                    choices[choice[1]] = names
        rule = Declaration(tuple(inputs), tuple(outputs), choices, tuple(conditions))
        self.check(rule, where.end() if where else len(text))
        return rule

    def begin(self, start: int, end: int) -> int:
        """Where a part's text begins, after spaces."""
        return end - len(self.text[start:end].lstrip())

    def dtype_names(self, start: int, end: int) -> tuple[str, ...]:
        """The names of dtypes between commas."""
        names = []
        parts = self.parts(start, end) or [(start, end)]
        if len(parts) > 1 and not self.text[slice(*parts[-1])].strip():
            parts.pop()  # behind a last comma
        for part in parts:
            name = self.text[slice(*part)].strip()
            if name not in dtypes.BY_NAME:
                raise self.fail(f"there is no dtype {name!r}", self.begin(*part))
            names.append(name)
        return tuple(names)

    def parts(self, start: int, end: int) -> list[tuple[int, int]]:
        """Where the parts between commas stand, those inside brackets apart."""
        spans, begin = [], start
        closing: list[tuple[str, int]] = []  # what closes each open bracket, and where it is
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
                spans.append((begin, i))
                begin = i + 1
        if closing:
            raise self.fail("a bracket is not closed", closing[-1][1])
        if spans or self.text[begin:end].strip():
            spans.append((begin, end))
        return spans

    def argument(self, start: int, end: int) -> Argument:
        """One input or output: ``name[dims]:dtype?!~``, and behind an output ``if condition``."""
        text = self.text
        begin = self.begin(start, end)
        name = NAME.match(text, begin, end)
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
            if len([d for d in dims if not isinstance(d, Expression)]) > 1:
                raise self.fail("an array has one starred dim at most", at)
            at = close + 1
        present: Expression | bool | None = None
        if (condition := _IF.search(text, at, end)) is not None:
            present = self.presence(condition.end(), end)
            end = condition.start()
        dtype = _DTYPE.fullmatch(text, at, end)
        if dtype is None:
            if (more := _DTYPE.match(text, at, end)) is not None and text[more.end() - 1].isspace():
                raise self.fail("expected ',' before the next array", more.end())
            raise self.fail("expected ':' and a dtype, such as :float32 or :T", at)
        if dtype[1] not in dtypes.BY_NAME and _LIKE_A_DTYPE.match(dtype[1]):
            expected = ", ".join(dtypes.BY_NAME)
            raise self.fail(f"there is no dtype {dtype[1]!r}; expected {expected}", dtype.start(1))
        default, marks = dtype[2], dtype[3]
        if len(set(marks)) != len(marks):
            raise self.fail("a mark stands twice", dtype.start(3))
        if default is not None and ("?" not in marks or dtype[1] in dtypes.BY_NAME):
            what = "a default is for the dtype variable of an input that may be absent: w[N]:W=T?"
            raise self.fail(what, dtype.start(2))
        argument = Argument(
            name[0], dims, dtype[1], "?" in marks, "!" in marks, "~" in marks, present, default
        )
        self.positions[id(argument)] = begin
        return argument

    def presence(self, start: int, end: int) -> Expression | bool:
        """The condition under which a call has an output."""
        text = self.text[start:end]
        if text.strip() in ("True", "False"):
            return text.strip() == "True"
        condition = parse(text, whole=self.text, at=start, truths=True)
        if not condition.condition:
            raise self.fail("expected a condition, such as `if w` or `if k > 0`", start)
        self.positions[id(condition)] = start
        return condition

    def dim(self, start: int, end: int) -> Dim:
        star = _STAR.fullmatch(self.text, start, end)
        stars = _BROADCAST.fullmatch(self.text, start, end)
        dim: Dim
        if star is not None:
            dim = Star(star[1])
        elif stars is not None:
            names = tuple(name.strip() for name in stars[1].split(","))
            if len(set(names)) < max(len(names), 2) or not all(map(NAME.fullmatch, names)):
                raise self.fail(
                    "expected two starred dims or more, each once, as in *broadcast(S,R)", start
                )
            dim = Broadcast(names)
        else:
            dim = parse(self.text[start:end], whole=self.text, at=start)
            if dim.condition:
                raise self.fail("a condition stands where a size is expected", start)
        self.positions[id(dim)] = start
        return dim

    def check(self, rule: Declaration, where: int) -> None:
        """Check the parts of a rule against each other."""
        names: set[str] = set()
        for argument in (*rule.inputs, *rule.outputs):
            if argument.name in names:
                raise self.fail(f"there are two arrays called {argument.name!r}", argument)
            names.add(argument.name)
        dims, stars, kinds = self.bound_names(rule)
        sizes = {f"{name}_size" for name in stars} - names
        for argument in rule.inputs:
            for dim in argument.dims or ():
                if isinstance(dim, Broadcast):
                    raise self.fail(f"{dim} is for outputs; an input has one *S", dim)
            if argument.constant:
                raise self.fail(
                    "'~' is a mark of outputs; a vjp gives None for an input without a gradient",
                    argument,
                )
            if argument.present is not None:
                raise self.fail(
                    "`if` is for outputs; '?' says that an input may be absent", argument
                )
        for argument in rule.outputs:
            name = argument.name
            if isinstance(argument.present, Expression):
                self.check_presence(argument.present, rule)
            if argument.dims is None:
                raise self.fail(f"output {name!r} has no shape: expected {name}[…]", argument)
            if argument.optional or argument.mutable:
                raise self.fail("'?' and '!' are marks of inputs", argument)
            if argument.dtype not in dtypes.BY_NAME and argument.dtype not in kinds:
                raise self.fail(f"no input says what dtype {argument.dtype!r} is", argument)
        for argument in (*rule.inputs, *rule.outputs):
            for dim in argument.dims or ():
                if isinstance(dim, Expression):
                    self.check_names(dim, dims | sizes, kinds, rule, self.positions[id(dim)])
                    continue
                for name in (dim.name,) if isinstance(dim, Star) else dim.names:
                    if name not in stars:
                        raise self.fail(f"no input that is always there says what *{name} is", dim)
        for condition in rule.conditions:
            self.check_names(condition, dims | sizes, kinds, rule, where)
        for name in rule.choices:
            if name not in kinds:
                raise self.fail(f"no input has the dtype {name!r}", where)
        for name in sorted(dims & stars | dims & kinds | stars & kinds):
            raise self.fail(f"{name!r} is two things: a dim, *dims or a dtype", 0)
        for argument in (*rule.inputs, *rule.outputs):
            name = argument.name
            if name in kinds:  # both are names of the body
                raise self.fail(f"{name!r} is two things: an array and a dtype", argument)
            if argument.dims is None and name in dims:
                raise self.fail(
                    f"{name!r} is two things: a number of {argument.dtype} and a dim", argument
                )

    def check_presence(self, condition: Expression, rule: Declaration) -> None:
        """Refuse a condition of an output that asks for more than what is known of any call
        before its sizes are: which inputs are there, and numbers."""
        start = self.positions[id(condition)]
        named = {a.name for a in rule.inputs if a.optional or is_countable(a)}
        other = {*condition.names, *condition.arrays, *condition.variables} - named
        for name in sorted(other):
            match = re.compile(rf"\b{name}\b").search(self.text, start)
            raise self.fail(
                f"{name!r} cannot say whether an output is there; inputs that may be None can, and "
                "numbers that are no floats",
                match.start() if match else start,
            )

    def bound_names(self, rule: Declaration) -> tuple[set[str], set[str], set[str]]:
        """The dims that inputs bind, and the starred dims and dtype variables of those inputs that
        are always there."""
        dims: set[str] = set()
        stars: set[str] = set()
        kinds: set[str] = set()
        numbers = {argument.name for argument in rule.inputs if is_countable(argument)}
        for argument in rule.inputs:
            if argument.dims is None and (argument.optional or argument.mutable):
                raise self.fail("'?' and '!' are marks of arrays", argument)
            if argument.dims is None and argument.dtype not in dtypes.BY_NAME:
                raise self.fail(
                    f"a number has a dtype's name, as in {argument.name}:float32; "
                    f"{argument.dtype!r} is a variable",
                    argument,
                )
            named = {name_of(dim) for dim in argument.dims or ()} - numbers
            dims.update(name for name in named if name is not None)
            if argument.optional:
                continue
            if argument.dims is not None and argument.dtype not in dtypes.BY_NAME:
                kinds.add(argument.dtype)
            stars.update(dim.name for dim in argument.dims or () if isinstance(dim, Star))
        return dims, stars, kinds | self.defaults(rule, kinds)

    def defaults(self, rule: Declaration, kinds: set[str]) -> set[str]:
        """The dtype variables that inputs have which may be absent, and no others."""
        defaults: dict[str, str] = {}
        for argument in rule.inputs:
            if argument.default is None:
                continue
            default = argument.default
            if argument.dtype in kinds:
                raise self.fail(
                    f"{argument.dtype!r} needs no default: it is always known", argument
                )
            if default not in dtypes.BY_NAME and default not in kinds:
                raise self.fail(
                    f"the default {default!r} is no dtype, and of no array that is always there",
                    argument,
                )
            if defaults.setdefault(argument.dtype, default) != default:
                raise self.fail(f"{argument.dtype!r} has two defaults", argument)
            allowed = rule.choices.get(argument.dtype, (default,))
            if default in dtypes.BY_NAME and default not in allowed:
                raise self.fail(f"{argument.dtype!r} cannot be its default {default}", argument)
        for argument in rule.inputs:
            if argument.dtype not in (*dtypes.BY_NAME, *kinds, *defaults):
                variable = argument.dtype
                raise self.fail(
                    f"no array that is always there says what dtype {variable!r} is; give a "
                    f"default, as in {argument.name}[…]:{variable}=float32?",
                    argument,
                )
        return set(defaults)

    def check_names(
        self,
        expression: Expression,
        dims: set[str],
        kinds: set[str],
        rule: Declaration,
        start: int,
    ) -> None:
        """Refuse unbound names in an expression, whose text begins at or after ``start``."""

        def at(name: str) -> int:
            match = re.compile(rf"\b{name}\b").search(self.text, start)
            return match.start() if match else start

        numbers = {a.name: a for a in rule.inputs if a.dims is None}
        countable = {name for name, number in numbers.items() if is_countable(number)}
        for name in sorted(expression.names - dims - countable):
            why = (
                f"{numbers[name]} is a float, and sizes depend on integers; declare {name}:int32"
                if name in numbers
                else f"{name!r} is a dtype variable; compare it: {name} == float16"
                if name in kinds
                else f"no input has the dim {name!r} by itself; they have "
                + (", ".join(sorted(dims)) or "none")
            )
            raise self.fail(why, at(name))
        for name in sorted(expression.variables - kinds):
            raise self.fail(f"no input that is always there has the dtype {name!r}", at(name))
        if expression.asks_kind:
            why = "shapes and conditions of a rule are the same on every device"
            raise self.fail(why, at("device"))
        arrays = {
            argument.name
            for argument in rule.inputs
            if argument.dims is not None and not argument.optional
        }
        for name in sorted(expression.arrays - arrays):
            raise self.fail(f"there is no input {name!r} that always has a shape", at(name))
