"""Rules in C say what rules in Python say: by the interpreter, and as text that is compiled."""

from __future__ import annotations

import ctypes
import math
import os
import re
import shutil
import struct
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from hypothesis import given, settings
from hypothesis import strategies as st

import ferrule
from ferrule import dtypes
from ferrule.errors import KernelError, RuleError
from ferrule.rules import bytecode
from ferrule.rules.argument import Star
from ferrule.rules.bytecode import Opcode as Op
from ferrule.rules.bytecode import RuleProgram, compile_expression, compile_rule
from ferrule.rules.expression import Expression
from ferrule.rules.grammar import parse
from ferrule.rules.rule import Rule, parse_rule
from ferrule.tools import toolchain
from strategies import DIMS, LATE, NAMES, numbers, rules, stars

RUNTIME = Path(ferrule.__file__).parent / "runtime"
SOURCE = Path(__file__).parents[1] / "native" / "rule.c"
OK, MISMATCH, ZERO_DIVISION, OVERFLOW, LIMIT = range(5)
INT64 = range(-(2**63), 2**63)


class Input(ctypes.Structure):
    _fields_ = (
        ("sizes", ctypes.POINTER(ctypes.c_int64)), ("ndim", ctypes.c_int32),
        ("dtype", ctypes.c_int32), ("value", ctypes.c_int64), ("present", ctypes.c_bool),
    )  # fmt: skip


class Output(ctypes.Structure):
    _fields_ = (
        ("ndim", ctypes.c_int32), ("dtype", ctypes.c_int32),
        ("sizes", ctypes.c_int64 * bytecode.MAX_NDIM),
    )  # fmt: skip


class Result(ctypes.Structure):
    _fields_ = (
        ("symbols", ctypes.c_int64 * bytecode.MAX_SYMBOLS),
        ("dtypes", ctypes.c_int32 * bytecode.MAX_ARGUMENTS),
        ("outputs", Output * bytecode.MAX_ARGUMENTS),
    )


class Given:
    """One input, as a host gives it.

    Attributes:
        sizes: None of one that is absent.
        dtype: its number.
        ndim: its rank, which need not be the number of sizes where that is nonsense.
        value: of a number that is no float.
    """

    def __init__(
        self, sizes: Sequence[int] | None, dtype: int, ndim: int | None = None, value: int = 0
    ) -> None:
        self.sizes, self.dtype, self.value = sizes, dtype, value
        self.ndim = len(sizes or ()) if ndim is None else ndim


# ---- what is compiled ----------------------------------------------------------------------------


def compiler() -> str:
    found = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if found is None:
        pytest.skip("no C compiler")
    return found


def compiled(source: Path, path: Path, *flags: str) -> Path:
    command = [compiler(), "-std=c11", "-Wall", "-Wextra", "-Werror", f"-I{RUNTIME}", *flags, "-o"]
    subprocess.run([*command, str(path), str(source)], check=True, timeout=100)
    return path


class Interpreter:
    """``rule.h``, called through ctypes."""

    def __init__(self, path: Path) -> None:
        self.library = ctypes.CDLL(str(path))
        assert self.library.rule_bytes(0) == ctypes.sizeof(Input)
        assert self.library.rule_bytes(1) == ctypes.sizeof(Result)

    def bind(self, program: RuleProgram, inputs: Sequence[Given]) -> tuple[int, Result]:
        arrays = (Input * len(inputs))()
        for array, one in zip(arrays, inputs, strict=True):
            array.present = one.sizes is not None
            array.ndim, array.dtype, array.value = one.ndim, one.dtype, one.value
            if one.sizes:
                array.sizes = in_words(one.sizes)
        out = Result()
        ctypes.memset(ctypes.byref(out), 0xA5, ctypes.sizeof(out))
        return self.library.rule_bind(in_words(program.words), arrays, ctypes.byref(out)), out

    def value(self, program: RuleProgram, expression: int, found: Result) -> tuple[int, int]:
        value = ctypes.c_int64()
        words = in_words(program.words)
        at = ctypes.byref(found), ctypes.byref(value)
        return self.library.rule_value(words, expression, *at), value.value

    def evaluate(self, code: Sequence[int], symbols: Sequence[int]) -> tuple[int, int]:
        value = ctypes.c_int64()
        at = ctypes.byref(value)
        return self.library.rule_evaluate(in_words(code), in_words(symbols), at), value.value


def in_words(words: Sequence[int]) -> Any:
    return (ctypes.c_int64 * len(words))(*words)


@pytest.fixture(scope="session")
def interpreter(tmp_path_factory: pytest.TempPathFactory) -> Interpreter:
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "rule"
    folder.mkdir(exist_ok=True)
    path = folder / "rule.so"
    with FileLock(folder / "lock"):
        if not path.exists():
            made = compiled(SOURCE, folder / "new.so", "-O2", "-shared", "-fPIC")
            made.rename(path)
    return Interpreter(path)


# ---- expressions ---------------------------------------------------------------------------------


def exact(node: Any, values: Mapping[str, int]) -> int:
    """The value of a node, from left to right.

    Raises:
        OverflowError: that of one of its parts does not fit in 64 bits.
        ZeroDivisionError: a part divides by zero.
    """
    match node:
        case ("is", variable, name):
            found = int(values[f":{variable}"] in (name, number_of(name)))
        case ("if", condition, a, b):
            found = exact(a if exact(condition, values) else b, values)
        case ("and", a, b):
            found = exact(a, values) and exact(b, values)
        case ("or", a, b):
            found = exact(a, values) or exact(b, values)
        case ("bucket", n, *sizes):
            found = next((s for _, s in sizes if s >= exact(n, values)), sizes[-1][1])
        case (kind, *parts):
            if isinstance(parts[0], tuple):
                known = {str(i): exact(part, values) for i, part in enumerate(parts)}
                parts = [("name", name) for name in known]
                values = known
            found = int(Expression((kind, *parts)).evaluate(values))
    if found not in INT64:
        raise OverflowError
    return int(found)


def expected_of(one: Expression, values: Mapping[str, int]) -> tuple[int, int | None]:
    """The status and the value of an expression."""
    try:
        return OK, exact(one.node, values)
    except ZeroDivisionError:
        return ZERO_DIVISION, None
    except OverflowError:
        return OVERFLOW, None


EDGES = [0, 1, -1, 2, -2, 3, 2**31, 2**32 + 1, -(2**32), 2**62, 2**63 - 1, -(2**63), 1 - 2**63]
VALUES = st.lists(
    st.integers(-9, 40) | st.sampled_from(EDGES) | st.integers(INT64[0], INT64[-1]),
    min_size=5, max_size=5,
)  # fmt: skip
KINDS = st.sampled_from(dtypes.ALL).map(dtypes.ALL.index)
SYMBOLS = {name: i for i, name in enumerate([*NAMES, "x.size", "x.ndim", ":T"])}


def test_expressions_are_the_same_in_c(interpreter: Interpreter) -> None:
    seen = set()

    @settings(deadline=None, max_examples=15)
    @given(
        nodes=st.lists(numbers(), min_size=30, max_size=60),
        sets=st.lists(st.tuples(VALUES, KINDS), min_size=5, max_size=12),
    )
    def check(nodes: list[Any], sets: list[tuple[list[int], int]]) -> None:
        for one in map(Expression, nodes):
            code = compile_expression(one, SYMBOLS)
            for sizes, kind in sets:
                values = [*sizes, kind]
                status, value = expected_of(one, dict(zip(SYMBOLS, values, strict=True)))
                seen.add(status)
                found = interpreter.evaluate(code, values)
                assert found == (OK, value) if status == OK else found[0] == status, (one, values)

    check()
    assert seen == {OK, ZERO_DIVISION, OVERFLOW}


LEAST, MOST = INT64[0], INT64[-1]
EXTREME = [
    ("B // H", (LEAST, -1), OVERFLOW), ("ceildiv(B, H)", (LEAST, -1), OVERFLOW),
    ("next_pow2(B)", (2**62, 0), 2**62), ("next_pow2(B)", (2**62 + 1, 0), OVERFLOW),
    ("next_pow2(B)", (MOST, 0), OVERFLOW), ("next_pow2(B) + H", (LEAST, 1), 2),
    ("bucket(B, 3, 9) + H", (MOST, 1), 10), ("bucket(B, 3, 9) + H", (LEAST, 1), 4),
    ("bucket(B, 3)", (4, 0), 3), ("bucket(B // H, 3)", (4, 0), ZERO_DIVISION),
    ("B % H", (LEAST, -1), 0), ("-B", (LEAST, 0), OVERFLOW), ("B // H", (LEAST, 1), LEAST),
    ("ceildiv(B, H)", (LEAST, 1), LEAST), ("B % H", (LEAST, MOST), MOST - 1),
    ("B % H", (1, LEAST), 1 - 2**63), ("ceildiv(B, H)", (MOST, 2), 2**62),
    ("B * H - B * H", (2**32, 2**32), OVERFLOW), ("B - H", (0, LEAST), OVERFLOW),
    ("5 if H == 0 or B // H > 1 else 6", (5, 0), 5),
    ("5 if H != 0 and B // H > 1 else 6", (5, 0), 6),
    ("5 if B // H > 1 or H == 0 else 6", (5, 0), ZERO_DIVISION),
    ("7 if H < 1 else B * B", (2**40, 0), 7), ("7 if H < 1 else B * B", (2**40, 1), OVERFLOW),
    ("min(B // H, 3)", (5, 0), ZERO_DIVISION), ("min(B, H, 2) - max(B, H, 2)", (3, 1), -2),
]  # fmt: skip


@pytest.mark.parametrize(("text", "values", "expected"), EXTREME)
def test_extreme_values(
    interpreter: Interpreter, text: str, values: tuple[int, int], expected: int
) -> None:
    status, value = interpreter.evaluate(compile_expression(parse(text), SYMBOLS), values)
    assert (status or value) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("B+(" * 97 + "H" + ")" * 97, 2 * 97 + 3), ("+".join(["B*H"] * 97), 6 * 97),
        ("+".join(["(1 if B<H else 2)"] * 75), 75),
    ],
)  # fmt: skip
def test_whatever_is_read_has_room(interpreter: Interpreter, text: str, expected: int) -> None:
    code = compile_expression(parse(text), SYMBOLS)
    assert interpreter.evaluate(code, (2, 3)) == (OK, expected)


def test_what_no_text_says_is_refused(interpreter: Interpreter) -> None:
    node: Any = ("name", "B")
    for _ in range(bytecode.MAX_STACK - 1):
        node = ("+", ("name", "B"), node)
    code = compile_expression(Expression(node), SYMBOLS)
    assert interpreter.evaluate(code, (2,)) == (OK, 2 * bytecode.MAX_STACK)
    with pytest.raises(RuleError, match="nested too deeply"):
        compile_expression(Expression(("+", ("name", "B"), node)), SYMBOLS)
    with pytest.raises(RuleError, match="does not fit in 64 bits"):
        compile_expression(Expression(("int", 2**63)), SYMBOLS)


# ---- rules ---------------------------------------------------------------------------------------

EXTRA = (
    "A * B + 1", "ceildiv(all.size, 256)", "C // D", "all.ndim", "max(A, 1) * 2000000000 * C",
    "A if T in (float16, int8) else 3", "max(L * 2, A - L)",
)  # fmt: skip


def number_of(dtype: str | None) -> int:
    return bytecode.NO_DTYPE if dtype is None else dtypes.ALL.index(dtypes.BY_NAME[dtype])


def expressions_of(rule: Rule, shapes: Sequence[Any]) -> list[Expression]:
    """What binding evaluates for these inputs, but for dims that are a name."""
    present = [one for one, s in zip(rule.inputs, shapes, strict=True) if s is not None]
    dims = [dim for one in (*present, *rule.outputs) for dim in one.dims or ()]
    return [*(dim for dim in dims if isinstance(dim, Expression)), *rule.conditions]


def compare(
    interpreter: Interpreter, rule: Rule, shapes: Sequence[Any], kinds: Sequence[str | None],
    extra: Sequence[str] = (), number: int = 0,
) -> tuple[int, Any]:  # fmt: skip
    """The status, and the outputs; fails where C and Python disagree."""
    outputs = [f"{one.name}.{what}" for one in rule.outputs for what in ("size", "ndim")]
    more = [parse(text) for text in (*extra, *outputs)]
    program = compile_rule(rule, more)
    assert program is not None and all(word in INT64 for word in program.words)
    given = [Given(s, number_of(k), value=number) for s, k in zip(shapes, kinds, strict=True)]
    status, out = interpreter.bind(program, given)
    try:
        said = rule.bind("op", shapes, kinds, numbers=dict.fromkeys(rule.numbers, number))
        results = rule.results("op", said)
    except KernelError:
        assert status != OK
        return status, None
    every = [(one, said.values(one)) for one in expressions_of(rule, shapes)]
    statuses = {expected_of(*one)[0] for one in every}
    known = {**said.dims, **said.numbers}
    for one in (*more, *(one for one, _ in every)):
        known.update(said.values(one))
    known = {
        name: number_of(known[name]) if name.startswith(":") else known[name]
        for name in program.symbols
    }
    if OVERFLOW in statuses or any(value not in INT64 for value in known.values()):
        assert status == OVERFLOW
        return status, None
    assert status == OK
    values = dict(zip(program.symbols, out.symbols, strict=False))
    assert values == known and said.dims.keys() <= known.keys()
    kinds_found = dict(zip(program.variables, out.dtypes, strict=False))
    assert {name: dtypes.ALL[n].name for name, n in kinds_found.items()} == said.dtypes
    for i, one in enumerate(more):
        expected = expected_of(one, values)
        found = interpreter.value(program, i, out)
        assert found == expected if expected[0] == OK else found[0] == expected[0]
    assert interpreter.value(program, len(more), out)[0] == LIMIT
    assert interpreter.value(program, -1, out)[0] == LIMIT
    found = [
        (tuple(one.sizes[: one.ndim]), dtypes.ALL[one.dtype].name)
        for one in out.outputs[: len(rule.outputs)]
    ]
    assert found == results
    return status, found


@st.composite
def calls(draw: Any) -> tuple[Rule, list[Any], list[str | None], int]:
    """A rule and inputs, most of which it allows, and the value of its number."""
    rule = parse_rule(draw(rules(faults=True)))
    size = st.integers(0, 6) | st.sampled_from([2**31, 2**40, 2**62])
    small = draw(st.booleans())
    values = {name: draw(st.integers(0, 6) if small else size) for name in DIMS}
    star = draw(stars())
    values["all.size"] = math.prod([*values.values(), *star["S"]])
    values["all.ndim"] = len(DIMS) + len(star["S"])
    values["number"] = draw(st.integers(0, 6) if small else st.integers(0, 1) | size)
    absent = [one.optional and draw(st.booleans()) for one in rule.inputs]
    there = [one for one, left_out in zip(rule.inputs, absent, strict=True) if not left_out]
    late = any(parse(LATE) in (one.dims or ()) for one in there)
    values[LATE] = draw(st.integers(0, 6)) if late else 0
    variables = {"T": draw(st.sampled_from(["float32", "float16", "int8"])), "U": "int8"}
    shapes: list[Any] = []
    kinds: list[str | None] = []
    for one, left_out in zip(rule.inputs, absent, strict=True):
        if left_out:
            shapes.append(None)
            kinds.append(None)
            continue
        shape: list[int] = []
        for dim in one.dims or ():
            if isinstance(dim, Star):
                shape += star[dim.name]
            else:
                status, value = expected_of(dim, values)
                shape.append(max(0, value or 0) if status == OK else 3)
        shapes.append(tuple(shape))
        plain = one.dims is None and draw(st.booleans())
        kinds.append(None if plain else variables.get(one.dtype, one.dtype))
    return rule, shapes, kinds, values["number"]


@st.composite
def spoilt(draw: Any) -> tuple[Rule, list[Any], list[str | None], int]:
    """As `calls`, and one thing is different."""
    rule, shapes, kinds, number = draw(calls())
    i = draw(st.integers(0, len(shapes) - 1))
    what = draw(st.sampled_from(["size", "rank", "dtype", "absent"]))
    shape = shapes[i]
    if what == "absent" or shape is None:
        shapes[i] = kinds[i] = None
    elif what == "dtype":
        kinds[i] = draw(st.sampled_from(["uint8", "bfloat16", "float32"]))
    elif what == "rank" or not shape:
        shapes[i] = draw(st.sampled_from([shape[1:], (*shape, 1), (2, *shape)]))
    else:
        at = draw(st.integers(0, len(shape) - 1))
        shapes[i] = (*shape[:at], draw(st.integers(0, 6)), *shape[at + 1 :])
    return rule, shapes, kinds, number


def test_rules_are_the_same_in_c(interpreter: Interpreter) -> None:
    seen = set()

    @settings(deadline=None, max_examples=600)
    @given(call=calls() | spoilt())
    def check(call: Any) -> None:
        *given, number = call
        seen.add(compare(interpreter, *given, EXTRA, number)[0])

    check()
    assert seen == {OK, MISMATCH, ZERO_DIVISION, OVERFLOW}


LARGE = 2**40


@pytest.mark.parametrize(
    ("text", "shapes", "kinds", "expected"),
    [
        ("x[N,D]:T -> y[N,D]:T", [(3, 0)], "float16", [((3, 0), "float16")]),
        ("x[]:T -> y[]:T", [()], "int8", [((), "int8")]),
        ("x[]:T -> y[]:T", [(1,)], "int8", MISMATCH),
        ("-> y[4,2]:float32", [], "", [((4, 2), "float32")]),
        ("n:int32 -> y[4]:int8", [()], None, [((4,), "int8")]),
        ("n:int32 -> y[4]:int8", [()], "int32", [((4,), "int8")]),
        ("n:int32 -> y[4]:int8", [()], "int64", MISMATCH),
        ("n:int32 -> y[4]:int8", [(1,)], None, MISMATCH),
        ("x[A]:T, n:int8 -> y[A]:T", [(2,), ()], ["int8", None], [((2,), "int8")]),
        ("n:int8, x[A]:T -> y[A]:T", [(), (2,)], ["uint8", "uint8"], MISMATCH),
        ("x[A,*S,B]:T -> y[B,*S,A]:T", [(2, 3)], "int8", [((3, 2), "int8")]),
        ("x[A,*S,B]:T -> y[B,*S,A]:T", [(2, 5, 6, 3)], "int8", [((3, 5, 6, 2), "int8")]),
        ("x[A,*S,B]:T -> y[B,*S,A]:T", [(2,)], "int8", MISMATCH),
        ("x[*S,A,2]:T -> y[*S]:T", [(7, 8, 9, 2)], "int8", [((7, 8), "int8")]),
        ("x[*S,A,2]:T -> y[*S]:T", [(7, 2, 9, 3)], "int8", MISMATCH),
        ("x[*S]:T, w[*R]:T -> y[2,*broadcast(S,R),3]:T", [(4, 1), (5,)], "int8",
         [((2, 4, 5, 3), "int8")]),
        ("x[*S]:T, w[*R]:T -> y[*broadcast(S,R)]:T", [(), (5, 0)], "int8", [((5, 0), "int8")]),
        ("x[*S]:T, w[*R]:T -> y[*broadcast(S,R)]:T", [(1,), (0,)], "int8", [((0,), "int8")]),
        ("x[*S]:T, w[*R]:T -> y[*broadcast(S,R)]:T", [(2,), (0,)], "int8", MISMATCH),
        ("x[*S]:T, w[*R]:T -> y[*broadcast(S,R)]:T", [(3, 2), (2, 2)], "int8", MISMATCH),
        ("x[*S]:T, w[*R]:T, v[*Q]:T -> y[*broadcast(S,R,Q)]:T", [(3, 1), (1, 2), (4, 1, 1)],
         "int8", [((4, 3, 2), "int8")]),
        ("x[*S]:T, w[*R]:T, v[*Q]:T -> y[*broadcast(S,R,Q)]:T", [(3, 1), (1, 2), (4,)],
         "int8", MISMATCH),
        ("x[*S]:T, w[*S,2]:T -> y[*S]:T", [(), (2,)], "int8", [((), "int8")]),
        ("x[*S]:T, w[*S,2]:T -> y[*S]:T", [(3, 1), (3, 4, 2)], "int8", MISMATCH),
        ("x[*S]:T, w[*S,2]:T -> y[*S]:T", [(3,), (2,)], "int8", MISMATCH),
        ("w[N,K//2]:uint8, x[K]:T -> y[N]:T", [(5, 3), (7,)], ["uint8", "int8"],
         [((5,), "int8")]),
        ("w[N,K//2]:uint8, x[K]:T -> y[N]:T", [(5, 4), (7,)], ["uint8", "int8"], MISMATCH),
        ("w[K//N]:T, x[K,N]:T -> y[1]:T", [(5,), (0, 0)], "int8", ZERO_DIVISION),
        ("b[N]:T?, x[N]:T -> y[N]:T", [None, (4,)], [None, "int8"], [((4,), "int8")]),
        ("b[N]:T?, x[N]:T -> y[N]:T", [(4,), (4,)], "int8", [((4,), "int8")]),
        ("b[N]:T?, x[N]:T -> y[N]:T", [(5,), (4,)], "int8", MISMATCH),
        ("b[N+1]:T?, x[N]:T -> y[N]:T", [None, (4,)], [None, "int8"], [((4,), "int8")]),
        ("b[N]:T?, x[N]:T -> y[N]:T", [(4,), None], ["int8", None], MISMATCH),
        ("b[L]:T?, x[N]:T -> y[N+L]:T", [None, (4,)], [None, "int8"], [((4,), "int8")]),
        ("b[L]:T?, x[N]:T -> y[N+L]:T", [(3,), (4,)], "int8", [((7,), "int8")]),
        ("b[L]:T?, c[L]:T?, x[N]:T -> y[L]:T", [None, (3,), (4,)], [None, "int8", "int8"],
         [((3,), "int8")]),
        ("b[L]:T?, c[L]:T?, x[N]:T -> y[L]:T", [(3,), None, (4,)], ["int8", None, "int8"],
         [((3,), "int8")]),
        ("b[L]:T?, c[L]:T?, x[N]:T -> y[L]:T", [(3,), (2,), (4,)], "int8", MISMATCH),
        ("b[L]:T?, x[L+1]:T -> y[L]:T", [None, (4,)], [None, "int8"], MISMATCH),
        ("b[L]:T?, x[L+1]:T -> y[L]:T", [None, (1,)], [None, "int8"], [((0,), "int8")]),
        ("b[L]:T?, x[N]:T -> y[N]:T where N % L == 0", [None, (4,)], [None, "int8"],
         ZERO_DIVISION),
        ("x[*S]:T -> y[x.size,x.ndim]:T", [(3, 0, 5)], "int8", [((0, 3), "int8")]),
        ("x[*S]:T -> y[x.size,x.ndim]:T", [()], "int8", [((1, 0), "int8")]),
        ("x[*S]:T -> y[x.size]:T", [(LARGE, LARGE, 0)], "int8", [((0,), "int8")]),
        ("x[*S]:T -> y[x.size]:T", [(LARGE, LARGE)], "int8", OVERFLOW),
        ("x[N]:T -> y[N-3]:T", [(2,)], "int8", MISMATCH),
        ("x[N]:T -> y[N-3]:T", [(3,)], "int8", [((0,), "int8")]),
        ("x[N]:T -> y[N*N]:T", [(LARGE,)], "int8", OVERFLOW),
        ("x[N]:T -> y[7//N if N > 0 else 0]:T", [(0,)], "int8",
         [((0,), "int8")]),
        ("x[N]:T -> y[N]:T where N % 4 == 0", [(6,)], "int8", MISMATCH),
        ("x[N]:T -> y[N]:T where N % 4 == 0, T in (int8, bool)", [(8,)], "bool",
         [((8,), "bool")]),
        ("x[N]:T -> y[N]:T where T in (int8, bool)", [(8,)], "float32", MISMATCH),
        ("x[N]:T -> y[N]:T where 8 // N > 1", [(0,)], "int8", ZERO_DIVISION),
        ("x[N]:T -> y[N]:float64", [(2,)], "complex64", [((2,), "float64")]),
        ("x[N]:T, w[M]:U -> y[N]:U, z[M]:T", [(1,), (2,)], ["int8", "bool"],
         [((1,), "bool"), ((2,), "int8")]),
    ],
)  # fmt: skip
def test_calls(interpreter: Interpreter, text: str, shapes: Any, kinds: Any, expected: Any) -> None:
    given = [kinds] * len(shapes) if kinds is None or isinstance(kinds, str) else kinds
    status, found = compare(interpreter, parse_rule(text), shapes, given)
    assert (status or found) == expected


def test_sizes_below_zero_and_unknown_dtypes_are_refused(interpreter: Interpreter) -> None:
    program = compile_rule(parse_rule("x[N]:T, y[N]:int8 -> z[N]:T"))
    assert program is not None
    for sizes, dtype, expected in (
        ((4,), 2, OK), ((-4,), 2, MISMATCH), ((4,), -1, MISMATCH), ((4,), -(2**31), MISMATCH),
        ((4,), 2**31 - 1, MISMATCH), ((4,), len(dtypes.ALL), MISMATCH),
    ):  # fmt: skip
        other = Given(sizes, number_of("int8"))
        assert interpreter.bind(program, [Given(sizes, dtype), other])[0] == expected
    assert interpreter.bind(program, [Given((4,), 2), Given((4,), -1)])[0] == MISMATCH


def test_what_is_too_large_goes_the_slow_way(interpreter: Interpreter) -> None:
    for dims in ("2,*S", "*S,2"):
        program = compile_rule(parse_rule(f"x[*S]:T -> y[{dims}]:T"))
        assert program is not None
        assert interpreter.bind(program, [Given((1,) * 15, 0)])[0] == OK
        assert interpreter.bind(program, [Given((1,) * 16, 0)])[0] == LIMIT
        assert interpreter.bind(program, [Given((1,) * 17, 0)])[0] == LIMIT

    def rule(inputs: int, ndim: int) -> Rule:
        dims = [f"d{i}" for i in range(inputs * ndim)]
        given = [f"x{i}[{','.join(dims[i * ndim : (i + 1) * ndim])}]:T" for i in range(inputs)]
        return parse_rule(f"{', '.join(given)} -> y[1]:T")

    assert compile_rule(rule(31, 2)) and not compile_rule(rule(32, 2))
    assert compile_rule(rule(4, 16)) and not compile_rule(rule(5, 16))
    assert compile_rule(rule(1, 16)) and not compile_rule(rule(1, 17))
    assert not compile_rule(rule(4, 16), [parse("x0.size")])
    wide = compile_rule(parse_rule("x[*S]:T, w[*R]:T -> y[1,*broadcast(S,R)]:T"))
    assert wide is not None
    for ranks, status in (((15, 2), OK), ((2, 15), OK), ((2, 16), LIMIT), ((16, 2), LIMIT)):
        assert interpreter.bind(wide, [Given((1,) * rank, 0) for rank in ranks])[0] == status
    newer = program._replace(words=(bytecode.FORMAT + 1, *program.words[1:]))
    assert interpreter.bind(newer, [Given((), 0)])[0] == LIMIT


@pytest.mark.parametrize("text", ["Q", "b.size", "n.size", "n", "z.ndim"])
def test_extra_expressions_name_what_every_call_has(text: str) -> None:
    rule = parse_rule("x[N]:T, b[N]:T?, n:float32 -> y[N]:T")
    with pytest.raises(RuleError, match=f"{text}.* which the inputs do not say"):
        compile_rule(rule, [parse(f"N + {text}")])


def test_symbols_are_in_a_fixed_order() -> None:
    rule = parse_rule("w[K//2,N]:U, x[*S,K]:T -> y[*S,N]:T where x.ndim > w.ndim")
    program = compile_rule(rule, [parse("x.size")])
    assert program is not None
    assert program.symbols == ("N", "K", "w.ndim", "x.size", "x.ndim")
    assert program.variables == ("U", "T")
    assert compile_rule(rule, [parse("x.size")]) == program


def test_the_numbers_are_those_of_the_headers() -> None:
    text = "".join((RUNTIME / name).read_text("utf-8") for name in ("arithmetic.h", "rule.h"))
    numbers = {name: int(n) for name, n in re.findall(r"\bFR_(\w+) = (-?\d+)", text)}
    ops = {name[3:]: n for name, n in numbers.items() if name.startswith("OP_")}
    assert ops == {one.name: one.value for one in Op}
    for name in (
        "MAX_ARGUMENTS", "MAX_NDIM", "MAX_SYMBOLS", "MAX_STACK", "MAX_DTYPES", "NO_DTYPE",
        "NO_DEFAULT", "OPTIONAL", "NUMBER", "SIZE", "NDIM", "DTYPE", "VALUE", "STAR_SIZE",
        "DIM_SYMBOL", "DIM_CODE", "DIM_STAR", "DIM_BROADCAST",
    ):  # fmt: skip
        assert numbers[name] == getattr(bytecode, name), name
    assert numbers["PROGRAM_FORMAT"] == bytecode.FORMAT
    statuses = ("RULE_OK", "RULE_MISMATCH", "RULE_ZERO_DIVISION", "RULE_OVERFLOW", "RULE_LIMIT")
    assert [numbers[name] for name in statuses] == [OK, MISMATCH, ZERO_DIVISION, OVERFLOW, LIMIT]
    assert len(dtypes.ALL) <= bytecode.MAX_DTYPES


def test_c_has_the_same_table_of_dtypes() -> None:
    rows = re.findall(r"F\((\w+), (\w+), (\d)\)", (RUNTIME / "numbers.h").read_text("utf-8"))
    assert rows == [(d.name.upper(), d.name, str(d.itemsize)) for d in dtypes.ALL]


def test_the_headers_are_cpp_too() -> None:
    toolchain.find_compiler().compile('#include "rule.h"\n', flags=[f"-I{RUNTIME}", "-Wall"])


# ---- under a sanitizer ---------------------------------------------------------------------------


@st.composite
def nonsense(draw: Any) -> tuple[Rule, list[Given]]:
    """A rule and inputs such as no host gives."""
    rule, shapes, kinds, number = draw(calls())
    every = st.integers(0, 6) | st.sampled_from([-1, MOST, LEAST, 2**32])
    found = []
    for shape, kind in zip(shapes, kinds, strict=True):
        given = Given(shape, number_of(kind), value=number)
        match draw(st.sampled_from(["as it is", "as it is", "sizes", "rank", "dtype"])):
            case "sizes":
                given = Given([draw(every) for _ in shape or ()], given.dtype)
            case "rank":
                rank = draw(st.integers(-2, 20) | st.sampled_from([-(2**31), 2**31 - 1]))
                given = Given([draw(every) for _ in range(rank if rank < 99 else 0)], 0, rank)
            case "dtype":
                given.dtype = draw(st.integers(-(2**31), 2**31 - 1) | st.integers(-20, 70))
        found.append(given)
    return rule, found


def line_of(interpreter: Interpreter, program: RuleProgram, inputs: Sequence[Given]) -> str:
    """What main of native/rule.c prints for a call."""
    status, out = interpreter.bind(program, inputs)
    words = [status]
    if status == OK:
        for i in range(len(EXTRA)):
            found = interpreter.value(program, i, out)
            words += [found[0], 0 if found[0] else found[1]]
        for one in out.outputs[: program.words[2]]:
            words += [one.ndim, one.dtype, *one.sizes[: one.ndim]]
    return " ".join(map(str, words))


def test_no_input_is_undefined_behaviour(interpreter: Interpreter, tmp_path: Path) -> None:
    sanitized = tmp_path / "rule"
    flags = ["-g", "-O1", "-fsanitize=undefined,address", "-fno-sanitize-recover=all"]
    try:
        compiled(SOURCE, sanitized, *flags)
    except subprocess.CalledProcessError:
        pytest.skip("the compiler has no sanitizers")
    words: list[int] = []
    lines: list[str] = []

    @settings(deadline=None, max_examples=500)
    @given(call=nonsense())
    def collect(call: Any) -> None:
        rule, inputs = call
        program = compile_rule(rule, [parse(text) for text in EXTRA])
        assert program is not None
        words.extend([len(program.words), *program.words])
        for one in inputs:
            sizes = one.sizes or ()
            words.extend([one.sizes is not None, one.ndim, one.dtype, one.value])
            words.extend([len(sizes), *sizes])
        lines.append(line_of(interpreter, program, inputs))

    collect()
    done = subprocess.run(
        [sanitized], input=struct.pack(f"{len(words)}q", *words), capture_output=True, timeout=100
    )
    assert done.returncode == 0, done.stderr.decode()
    assert done.stdout.decode().splitlines() == lines
    assert {line.partition(" ")[0] for line in lines} >= {str(OK), str(MISMATCH), str(LIMIT)}
