"""The conditions under which accesses on CUDA are plain ones: they hold of no launch in which such
an access is outside.

Random bodies, whose every access is found by running all threads of small launches here.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from typing import Any, NamedTuple

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ferrule
from ferrule.source import cpp
from ferrule.source.cuda import bounds
from ferrule.spec import Input, Spec

HUGE = 1 << 40
NUMBERS = [*range(-3, 10), 31, 100, 2**30, 2**31 - 8, 2**31 - 1, -(2**31)]
FIRST = "uint i = thread_position_in_grid.x, t = thread_position_in_threadgroup.x; float s = 0;"
HEADER = """
inline void moved(thread int& v, int by) { v += by; }
inline int half_of(int v) { if (v < 0) return 0; return v / 2; }
"""


# -- a small language, as text and as what it does -------------------------------------------------


class Value(NamedTuple):
    """A number of 32 bits."""

    number: int
    unsigned: bool

    @staticmethod
    def of(number: int, unsigned: bool) -> Value:
        number &= 2**32 - 1
        return Value(number if unsigned or number < 2**31 else number - 2**32, unsigned)


class Stop(Exception):
    """The thread ends, or it is not defined what it does."""


class Continue(Exception):
    pass


class Thread:
    """One thread of a launch.

    Attributes:
        found: the accesses: the line of each, its array and its index.
    """

    def __init__(self, names: dict[str, Value]) -> None:
        self.names, self.found, self.steps = dict(names), list[tuple[int, str, int]](), 0

    def value(self, tree: tuple[Any, ...]) -> Value:
        kind, *parts = tree
        if kind == "number":
            return Value.of(parts[0], parts[1])
        if kind == "name":
            return self.names[parts[0]]
        if kind == "cast":
            return Value.of(self.value(parts[1]).number, parts[0] == "uint")
        if kind == "?":
            # What either gives is converted to the type of both.
            chosen = self.value(parts[1] if self.holds(parts[0]) else parts[2])
            return Value.of(chosen.number, self.type(parts[1]) or self.type(parts[2]))
        if kind == "half_of":
            v = Value.of(self.value(parts[0]).number, False).number
            return Value(0 if v < 0 else v // 2, False)
        a, b = self.value(parts[0]), self.value(parts[1])
        unsigned = a.unsigned or b.unsigned
        x, y = Value.of(a.number, unsigned).number, Value.of(b.number, unsigned).number
        if kind in ("/", "%"):
            if y == 0 or (x, y) == (-(2**31), -1):
                raise Stop
            q = abs(x) // abs(y) * (1 if (x < 0) == (y < 0) else -1)
            return Value.of(q if kind == "/" else x - y * q, unsigned)
        made = {"+": x + y, "-": x - y, "*": x * y, "min": min(x, y), "max": max(x, y)}
        return Value.of(made[kind], unsigned)

    def type(self, tree: tuple[Any, ...]) -> bool:
        """Whether an expression is unsigned."""
        kind, *parts = tree
        if kind == "number":
            return bool(parts[1])
        if kind == "name":
            return self.names[parts[0]].unsigned
        if kind == "cast":
            return bool(parts[0] == "uint")
        if kind == "half_of":
            return False
        return any(map(self.type, parts[-2:]))

    def holds(self, tree: tuple[Any, ...]) -> bool:
        kind, *parts = tree
        if kind == "!":
            return not self.holds(parts[0])
        if kind == "&&":
            return self.holds(parts[0]) and self.holds(parts[1])
        if kind == "||":
            return self.holds(parts[0]) or self.holds(parts[1])
        a, b = self.value(parts[0]), self.value(parts[1])
        unsigned = a.unsigned or b.unsigned
        x, y = Value.of(a.number, unsigned).number, Value.of(b.number, unsigned).number
        less, equal = x < y, x == y
        return {"<": less, "<=": less or equal, ">": not (less or equal), ">=": not less,
                "==": equal, "!=": not equal}[kind]  # fmt: skip

    def run(self, statements: list[Any]) -> None:
        for kind, line, *parts in statements:
            self.steps += 1
            if self.steps > 400:
                raise Stop
            if kind == "declare" or kind == "assign":
                type_, name, value = parts
                unsigned = type_ == "uint" if type_ else self.names[name].unsigned
                self.names[name] = Value.of(self.value(value).number, unsigned)
            elif kind == "access":
                self.found.append((line, parts[0], self.value(parts[1]).number))
            elif kind == "step":  # x[v++]
                self.found.append((line, parts[0], self.names[parts[1]].number))
                old = self.names[parts[1]]
                self.names[parts[1]] = Value.of(old.number + 1, old.unsigned)
            elif kind == "moved":
                by = Value.of(self.value(parts[1]).number, False).number
                self.names[parts[0]] = Value.of(self.names[parts[0]].number + by, False)
            elif kind == "if":
                self.run(parts[1] if self.holds(parts[0]) else parts[2])
            elif kind == "return" and self.holds(parts[0]):
                raise Stop
            elif kind == "continue" and self.holds(parts[0]):
                raise Continue
            elif kind == "loop":
                type_, name, start, end, step, body = parts
                self.names[name] = Value.of(self.value(start).number, type_ == "uint")
                while self.holds(end):
                    with contextlib.suppress(Continue):
                        self.run(body)
                    by = self.value(step).number
                    v = self.names[name]
                    self.names[name] = Value.of(v.number + by, v.unsigned)


def text_of(tree: tuple[Any, ...]) -> str:
    kind, *parts = tree
    if kind == "number":
        number = str(parts[0]) if parts[0] != -(2**31) else "(-2147483647 - 1)"
        return number + "u" * parts[1] if parts[0] >= 0 else f"({number})"
    if kind == "name":
        return str(parts[0])
    if kind == "cast":
        return f"{parts[0]}({text_of(parts[1])})"
    if kind == "?":
        return f"({text_of(parts[0])} ? {text_of(parts[1])} : {text_of(parts[2])})"
    if kind == "!":
        return f"!({text_of(parts[0])})"
    if kind in ("min", "max"):
        return f"{kind}({text_of(parts[0])}, {text_of(parts[1])})"
    if kind == "half_of":
        return f"half_of({text_of(parts[0])})"
    return f"({text_of(parts[0])} {kind} {text_of(parts[1])})"


class Writer:
    """Bodies at random: as text, and as statements with their lines."""

    def __init__(self, draw: Any) -> None:
        self.draw, self.lines, self.count = draw, list[str](), 0
        self.types = {"i": "uint", "t": "uint", "n": "int", "m": "int", "x_shape[0]": "int"}
        self.fixed = {*self.types}

    def pick(self, *choices: Any) -> Any:
        return self.draw(st.sampled_from(choices))

    def expression(self, depth: int = 2) -> tuple[Any, ...]:
        kind = self.pick("name", "name", "number") if not depth else self.pick(
            "name", "name", "number", "+", "+", "-", "*", "/", "%", "min", "max", "cast", "?",
            "half_of",
        )  # fmt: skip
        if kind == "name":
            return "name", self.pick(*self.types)
        if kind == "number":
            return "number", self.pick(0, 1, 1, 2, 3, 4, 7, 32), self.pick(False, False, True)
        if kind == "cast":
            return "cast", self.pick("int", "uint"), self.expression(depth - 1)
        if kind == "?":
            return "?", self.condition(depth - 1), self.expression(depth - 1), self.expression(0)
        if kind == "half_of":
            return "half_of", self.expression(depth - 1)
        a, b = self.expression(depth - 1), self.expression(depth - 1)
        if kind in ("min", "max"):  # Metal has none of two types
            type_ = self.pick("int", "uint")
            a, b = ("cast", type_, a), ("cast", type_, b)
        return kind, a, b

    def bound(self) -> tuple[Any, ...]:
        """What is the same for all threads."""
        name = self.pick("n", "n", "m", "x_shape[0]", "")
        return ("name", name) if name else ("number", self.pick(0, 1, 4, 7), False)

    def likely(self) -> tuple[Any, ...]:
        """A variable, or what is near to one."""
        own = [name for name in self.types if name not in ("n", "m", "t", "x_shape[0]")]
        name = "name", self.pick(*own[-3:])
        return self.pick(name, name, name, (self.pick("+", "-"), name, self.bound()))

    def condition(self, depth: int = 1) -> tuple[Any, ...]:
        if self.pick(True, True, False):
            compared = self.pick("<", "<", "<=", ">", ">="), self.likely(), self.bound()
            if depth and self.pick(True, False):
                natural = ">=", compared[1], ("number", 0, False)
                return self.pick("&&", "&&", "||"), natural, compared
            return compared
        kind = self.pick("<", "<", "<=", ">", ">=", "==", "!=", *(["&&", "&&", "||", "!"] * depth))
        if kind == "!":
            return "!", self.condition(0)
        if kind in ("&&", "||"):
            return kind, self.condition(0), self.condition(0)
        return kind, self.expression(1), self.expression(1)

    def write(self, line: str) -> int:
        self.lines.append(line)
        return len(self.lines)

    def statements(self, depth: int, in_loop: bool = False) -> list[Any]:
        return [self.statement(depth, in_loop) for _ in range(self.draw(st.integers(1, 4)))]

    def scope(self, depth: int, in_loop: bool = False) -> list[Any]:
        types = dict(self.types)
        made = self.statements(depth, in_loop)
        self.types = types
        self.write("}")
        return made

    def statement(self, depth: int, in_loop: bool) -> Any:
        kind = self.pick(
            "declare", "declare", "access", "access", "access", "step", "assign", "moved", "return",
            *(["continue"] * in_loop), *(["if", "loop", "loop"] * (depth > 0)),
        )  # fmt: skip
        own = [name for name in self.types if name not in self.fixed]
        if kind in ("assign", "step", "moved") and not own:
            kind = "declare"
        if kind == "moved" and not any(self.types[name] == "int" for name in own):
            kind = "assign"
        if kind == "declare":
            type_, value = self.pick("int", "uint"), self.expression()
            self.count += 1
            name = f"v{self.count}"
            line = self.write(f"{type_} {name} = {text_of(value)};")
            self.types[name] = type_
            return kind, line, type_, name, value
        if kind == "assign":
            name, value = self.pick(*own), self.expression()
            return kind, self.write(f"{name} = {text_of(value)};"), "", name, value
        if kind == "moved":
            name = self.pick(*(name for name in own if self.types[name] == "int"))
            by = self.expression(1)
            return kind, self.write(f"moved({name}, {text_of(by)});"), name, by
        if kind in ("access", "step"):
            array = self.pick("x", "y")
            at: Any = self.pick(*own) if kind == "step" else (
                self.likely() if self.pick(True, True, False) else self.expression()
            )  # fmt: skip
            index = f"{at}++" if kind == "step" else text_of(at)
            return (
                kind,
                self.write(f"y[{index}] = 1;" if array == "y" else f"s += x[{index}];"),
                array,
                at,
            )
        if kind in ("return", "continue"):
            condition = self.condition()
            return kind, self.write(f"if ({text_of(condition)}) {kind};"), condition
        if kind == "if":
            condition = self.condition()
            line = self.write(f"if ({text_of(condition)}) {{")
            one = self.scope(depth - 1, in_loop)
            other = []
            if self.pick(False, True):
                self.write("else {")
                other = self.scope(depth - 1, in_loop)
            return kind, line, condition, one, other
        return self.loop(depth)

    def loop(self, depth: int) -> Any:
        before = dict(self.types)
        type_, step = self.pick("int", "int", "uint"), self.pick(self.bound(), self.expression(0))
        start = self.pick(self.bound(), ("name", "i"), self.expression(1))
        self.count += 1
        name = f"v{self.count}"
        self.types[name] = type_
        end = self.pick("<", "<", "<=", "!="), ("name", name), self.bound()
        if self.pick(False, False, True):
            end = self.condition()
        if self.pick(True, False):
            step = "number", 1, False
        line = self.write(
            f"for ({type_} {name} = {text_of(start)}; {text_of(end)}; {name} += {text_of(step)}) {{"
        )
        self.fixed |= {name} if self.pick(True, True, False) else set()
        body = self.scope(depth - 1, True)
        self.types = before
        return "loop", line, type_, name, start, end, step, body


# -- what the conditions say -----------------------------------------------------------------------


class Most:
    """``fr_most`` of include/cuda_bounds.h."""

    def __init__(self, value: int, known: bool | None = None) -> None:
        if known is None:
            known = 0 <= value < 2**31
        self.value = value & (2**32 - 1)
        self.known = known and self.value < 2**31

    def __add__(self, b: Most) -> Most:
        return Most(self.value + b.value, self.known and b.known)

    def __mul__(self, b: Most) -> Most:
        product = self.value * b.value
        return Most(product, self.known and b.known and not product >> 31)

    def fr_below(self, n: int) -> Most:
        return Most(max(self.value - n, 0), self.known)

    def fr_last(self) -> Most:
        return Most(self.value - 1, self.known)

    def fr_over(self, n: Most) -> Most:
        fine = self.known and n.known and n.value > 0
        return Most(self.value // n.value if fine else 0, fine)

    def fr_rest(self, n: Most) -> Most:
        return Most(n.value - 1, self.known and n.known)

    def fr_less(self, n: Most) -> Most:
        return Most(self.value - n.value, self.known and n.known and self.value >= n.value)

    def fr_if(self, n: Most) -> Most:
        return Most(self.value, self.known and n.known)

    def fr_within(self, count: int) -> bool:
        return self.known and self.value < count


def larger(a: Most, b: Most) -> Most:
    return Most(max(a.value, b.value), a.known and b.known)


def smaller(a: Most, b: Most) -> Most:
    return Most(min(a.value, b.value), a.known and b.known)


class Launch(NamedTuple):
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    groups: tuple[int, int, int]


def fits(condition: str, names: dict[str, Any]) -> bool:
    """Whether a launch meets a condition."""
    python = condition.replace("::fr::bounds::fr_", "").replace("::fr::fr_most", "Most")
    python = re.sub(r"\b(\d+)u\b", r"\1", python.replace("&&", "and").replace("true", "True"))
    return bool(eval(python, {"Most": Most, "larger": larger, "smaller": smaller, **names}))


def prepared(source: str, **kernel: Any) -> cpp.Prepared:
    made = ferrule.metal_kernel("k", ["x", "n", "m"], ["y"], source, **kernel)
    number = Input(ferrule.int32, 0, value=True)
    inputs = Input(ferrule.float32, 1), number, number
    return cpp.prepare(Spec(made.kernel, inputs, (ferrule.float32,), ()))


def threads(grid: int, group: int) -> Iterator[tuple[int, int]]:
    return ((i, i % group) for i in range(grid))


def check(source: str, statements: list[Any], launches: list[tuple[int, ...]]) -> int:
    """The number of plain accesses; they are inside wherever the condition holds."""
    p = prepared(source, header=HEADER)
    found = bounds.bounded(p, p.text.source)
    plain = {line for line, text in enumerate(found.source.split("\n"), 1) if "fr_u_" in text}
    if not plain:
        return 0
    for grid, group, n, m, size in launches:
        given = {"n": Value.of(n, False), "m": Value.of(m, False), "x_shape[0]": Value(size, False)}
        accesses: set[tuple[str, int]] = set()
        for i, t in threads(grid, group):
            thread = Thread({"i": Value(i, True), "t": Value(t, True), **given})
            with contextlib.suppress(Stop):
                thread.run(statements)
            accesses |= {(a, index) for line, a, index in thread.found if line in plain}
        groups = -(-grid // group), 1, 1
        names = {"fr_l": Launch((grid, 1, 1), (group, 1, 1), groups), "n": n, "m": m,
                 "x_shape": [size]}  # fmt: skip
        for array in "xy":
            counts = {"fr_e_x": HUGE, "fr_e_y": HUGE}
            if not fits(found.fits, names | counts):
                continue
            least, most = 0, HUGE  # the smallest array of which the condition holds
            while least < most:
                middle = (least + most) // 2
                if fits(found.fits, names | counts | {f"fr_e_{array}": middle}):
                    most = middle
                else:
                    least = middle + 1
            outside = [i for a, i in accesses if a == array and not 0 <= i < least]
            assert not outside, (found.fits, grid, group, n, m, size, least, outside)
    return len(plain)


SMALL = st.sampled_from(NUMBERS)
LAUNCHES = st.lists(
    st.tuples(st.integers(1, 12), st.sampled_from([1, 4, 8]), SMALL, SMALL, st.integers(0, 9)),
    min_size=3, max_size=6,
)  # fmt: skip


@st.composite
def bodies(draw: Any) -> tuple[str, list[Any]]:
    writer = Writer(draw)
    writer.write(FIRST)
    statements = writer.statements(2)
    writer.write("y[0] = s;")
    return "\n".join(writer.lines), statements


@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
@given(bodies(), LAUNCHES)
def test_random_bodies(body: tuple[str, list[Any]], launches: list[Any]) -> None:
    check(*body, launches)


NAMES = [("name", name) for name in ("n", "m", "x_shape[0]", "i", "t")]
COUNTER = "name", "v"


def numbers(*values: int) -> list[tuple[Any, ...]]:
    zero = "number", 0, False
    return [("number", n, False) if n >= 0 else ("-", zero, ("number", -n, False)) for n in values]


@st.composite
def counting_loops(draw: Any) -> tuple[str, list[Any]]:
    """An access in a loop that counts, perhaps where a condition holds."""

    def pick(*choices: Any) -> Any:
        return draw(st.sampled_from(choices))

    type_ = pick("int", "int", "uint")
    start, end = pick(*numbers(-2, 0, 0, 1, 3), *NAMES), pick(*numbers(5, 40), *NAMES[:3])
    by = pick(*numbers(1, 1, 1, 2, -1, 2**30), *NAMES[:2])
    other = pick(*numbers(1, 2, 3), *NAMES)
    index = pick(
        COUNTER, COUNTER, ("+", COUNTER, other), ("-", COUNTER, other), ("-", other, COUNTER),
        ("*", COUNTER, other), ("+", ("*", COUNTER, other), pick(*NAMES)), ("%", COUNTER, other),
        ("/", COUNTER, other), ("min", ("cast", "int", COUNTER), ("cast", "int", other)),
        ("?", ("<", COUNTER, other), COUNTER, pick(*NAMES)), ("max", ("cast", "int", COUNTER),
        ("cast", "int", other)),
    )  # fmt: skip
    array, guard = pick("x", "y"), pick(None, index, COUNTER)
    loop = pick("<", "<", "<", "<=", "!=", ">"), COUNTER, end
    head = f"{type_} v = {text_of(start)}; {text_of(loop)}; v += {text_of(by)}"
    lines = [FIRST, f"for ({head}) {{"]
    body: list[Any] = []
    if guard is not None:
        limit = pick(">=", ">", "<"), guard, pick(*numbers(0, 0, 1), other)
        upper = pick("<", "<", "<=", ">"), guard, pick(end, *NAMES[:3])
        conditions = [limit, upper, ("&&", limit, upper), ("||", limit, upper)]
        stay = pick(*conditions, ("&&", limit, upper))
        lines.append(f"if (!({text_of(stay)})) continue;")
        body.append(("continue", len(lines), ("!", stay)))
    at = text_of(index)
    lines.append(f"y[{at}] = 1;" if array == "y" else f"s += x[{at}];")
    body.append(("access", len(lines), array, index))
    lines += ["}", "y[0] = s;"]
    return "\n".join(lines), [("loop", 2, type_, "v", start, loop, by, body)]


@settings(max_examples=300, deadline=None, suppress_health_check=list(HealthCheck))
@given(counting_loops(), LAUNCHES)
def test_counting_loops(body: tuple[str, list[Any]], launches: list[Any]) -> None:
    check(*body, launches)
