"""Expressions of rules: the same on ints, on torch's symbolic ints, as text and as JSON.

`test_bytecode` compares them with what C makes of them.
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrule import dtypes
from ferrule.errors import RuleError
from ferrule.rules.expression import Expression, Ints
from ferrule.rules.grammar import parse
from strategies import NAMES, numbers

VALUES = {"B": 3, "H": 7, "W": 128, "x.size": 2688, "x.ndim": 3, ":T": "float16"}


def ceildiv(a: int, b: int) -> int:
    return -(-a // b)


def next_pow2(n: int) -> int:
    return 1 << (n - 1).bit_length() if n > 1 else 1


def bucket(n: int, *sizes: int) -> int:
    return next((size for size in sizes if size >= n), sizes[-1])


def python(text: str, values: dict[str, Any]) -> Any:
    """What Python itself makes of an expression."""
    x = type("x", (), {"size": values["x.size"], "ndim": values["x.ndim"]})
    known: dict[str, Any] = {"next_pow2": next_pow2, "bucket": bucket}
    known |= {"min": min, "max": max, "ceildiv": ceildiv, "x": x, **{n: values[n] for n in NAMES}}
    known |= {"T": values[":T"], **{name: name for name in dtypes.BY_NAME}}
    return eval(text, {"__builtins__": {}}, known)


@pytest.mark.parametrize(
    "text",
    [
        "B", "42", "B * H * W", "B*H - W // 2 % 5", "-B + -(-H)", "ceildiv(W, 32) * 32",
        "W if W <= 128 else 128", "min(B, H, W)", "max(1, B - H)", "x.size // x.ndim",
        "1 if 1 <= B < H <= 7 and not H == W or W != 2 else 0", "(B + H) * (W - 1)",
        "B - (H - W)", "(1 if B > 2 else 2) * 3", "1 if B > 2 else 2 if H > 2 else 3", "-7 // B",
        "bucket(B, 1, 2, 4, 8)", "bucket(W // 2 + 1, 1, 16, 64) * B", "bucket(H, 5)",
        "next_pow2(W) - next_pow2(H * 100)", "next_pow2(bucket(B, 3, 9) - 5)",
        "-7 % B", "-(W // 2)", "(-W) // 5", "B if (B > 1) else (0)",
        "B if T == float16 else H", "B if T != float16 else H", "B if (T == float16) else H",
        "1 if T in (bool, float16) and B > 2 else 2",
        "1 if T not in (float16,) else 2", "(1 if T in (float16, bool) or T == int8 else 2)",
        "1 if not T in (int8, float16,) else 2",
        "1 if B < 2 or T not in (bool, float32) else 2",
    ],
)  # fmt: skip
def test_against_python(text: str) -> None:
    assert parse(text).evaluate(VALUES) == python(text, VALUES)


SIZES = st.fixed_dictionaries(
    {**{n: st.integers(0, 40) for n in NAMES}, "x.size": st.integers(0, 999), "x.ndim":
     st.integers(0, 5), ":T": st.sampled_from(["float32", "float16", "int8"])}
)  # fmt: skip


@settings(deadline=None, max_examples=400)
@given(node=numbers(), values=SIZES)
def test_text_and_json_say_the_same(node: Any, values: dict[str, Any]) -> None:
    one = Expression(node)
    again = parse(str(one))
    assert Expression.from_json(json.loads(json.dumps(one.to_json()))) == one
    try:
        expected = one.evaluate(values)
    except ZeroDivisionError:
        with pytest.raises(ZeroDivisionError):
            python(str(one), values)
        return
    assert again.evaluate(values) == expected == python(str(one), values)
    assert str(parse(str(again))) == str(again)


def test_symbolic_ints_are_given_no_guard() -> None:
    import torch
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    class Symbolic(Ints):
        minimum = staticmethod(torch.sym_min)
        maximum = staticmethod(torch.sym_max)

        @staticmethod
        def choose(condition: Any, then: Any, otherwise: Any) -> Any:
            a, b = then(), otherwise()
            if isinstance(a, int) != isinstance(b, int):  # torch wants both to be symbolic
                a, b = (v if isinstance(v, torch.SymInt) else w.node.wrap_int(v)
                        for v, w in ((a, b), (b, a)))  # fmt: skip
                a, b = (v if isinstance(v, torch.SymInt) else torch.SymInt(v) for v in (a, b))
            return torch.sym_ite(condition, a, b)

        @staticmethod
        def both(a: Any, b: Any) -> Any:
            return a & b()

        @staticmethod
        def either(a: Any, b: Any) -> Any:
            return a | b()

        @staticmethod
        def negated(a: Any) -> Any:
            return torch.sym_not(a)

    env = ShapeEnv()
    from torch._dynamo.source import ConstantSource

    sizes = {}
    for name, value in (("B", 3), ("H", 7), ("W", 128)):
        symbol = env.create_symbol(value, ConstantSource(name))
        sizes[name] = env.create_symintnode(symbol, hint=value)
    sizes["x.size"] = sizes["B"] * sizes["H"] * sizes["W"]
    texts = ("B * H + W // 2", "min(B, H, W)", "W if W <= 128 else 128", "ceildiv(x.size, 256)",
             "1 if B < H and not W == 5 or B > 9 else 2", "max(B - H, 0) % 3")  # fmt: skip
    for text in texts:
        found = parse(text).evaluate(sizes, Symbolic)
        assert env.guards == [], text
        assert int(found) == python(text, VALUES)
        env.guards.clear()


@pytest.mark.parametrize(
    ("text", "at", "message"),
    [
        ("", 0, "an expression is missing"),
        ("  ", 2, "an expression is missing"),
        ("B +", 3, "this is no expression"),
        ("B / 2", 0, "write // for whole numbers"),
        ("B ** 2", 0, "expected one of"),
        ("B[0]", 0, "not allowed in a rule"),
        ("1.5", 0, "not allowed in a rule"),
        ("True", 0, "True and False are the numbers 1 and 0 here"),
        ("B if H == True else 2", 10, "True and False are the numbers 1 and 0 here"),
        ("'B'", 0, "not allowed in a rule"),
        ("B + x.shape", 4, "expected x.size or x.ndim"),
        ("B + prod(x)", 4, "no function 'prod'"),
        ("min(B)", 0, "min got 1 arguments, expected 2 or more"),
        ("next_pow2(B, H)", 0, "next_pow2 got 2 arguments, expected 1 argument"),
        ("bucket(B)", 0, "bucket got 1 arguments, expected 2 or more"),
        ("2 + bucket(B, 8, 4)", 4, "takes a number, then integers that ascend"),
        ("bucket(B, 4, 4)", 0, "takes a number, then integers that ascend"),
        ("bucket(B, 4, H)", 0, "takes a number, then integers that ascend"),
        ("bucket(B < 2, 4)", 7, "a condition stands where a number"),
        ("ceildiv(B, H, W)", 0, "ceildiv got 3 arguments, expected 2 arguments"),
        ("2 * (B < H)", 5, "a condition stands where a number"),
        (
            "1 if B else 2",
            5,
            "a number stands where a condition is expected; compare it, as in B != 0",
        ),
        ("B in H", 0, "expected a comparison"),
        ("(lambda: 1)()", 0, "not allowed in a rule"),
        ("B.__class__", 0, "expected B.size"),
        ("B\n+ H", 1, "unexpected character"),
        ("B # H", 2, "unexpected character"),
        ("B × H", 2, "unexpected character"),
        ("B\0", 1, "unexpected character"),
        ("B +\r H", 3, "unexpected character"),
        ("B if B<128else 2", 7, "128else is no integer"),
        ("B + 0xfor", 4, "0xfor is no integer"),
        ("9223372036854775808", 0, "the largest size"),
        ("B if T < float16 else 2", 5, "a dtype variable is compared as in T == float16"),
        ("B if T == float16 == U else 2", 5, "a dtype variable is compared as in T == float16"),
        ("B if B * 2 == float16 else 2", 5, "a dtype variable is compared as in T == float16"),
        ("B if T in () else 2", 5, "expected a comparison"),
        ("B if float16 == T else 2", 5, "'float16' is a dtype; the variable stands first"),
        ("B if T in (float16, half) else 2", 20, "'half' is no dtype, as float16 is"),
        ("B if T in (float16, 2) else 2", 20, "this is no dtype, as float16 is"),
        ("(" * 300 + "B" + ")" * 300, 0, "nested too deeply|no expression"),
        ("B" + " + B" * 600, 0, "at most 2000"),
    ],
)
def test_errors_point_at_the_character(text: str, at: int, message: str) -> None:
    with pytest.raises(RuleError, match=message) as raised:
        parse(text)
    if not text.startswith("(("):
        assert raised.value.position == at
    with pytest.raises(RuleError) as raised:
        parse(text, whole=f"x[{text}]:T", at=2)
    if not text.startswith("(("):
        assert raised.value.position == at + 2


@pytest.mark.parametrize("n", [50, 99, 100, 101, 300, 900])
@pytest.mark.parametrize("text", ["B{}", "min({}B)", "{}B", "B if {}B < 2 else 3"])
def test_what_is_read_can_be_read_again(text: str, n: int) -> None:
    text = text.format({"B{}": "+B", "min({}B)": "B,"}.get(text, "-") * n)
    try:
        one = parse(text)
    except RuleError as error:
        assert n > 97 and ("nested too deeply" in str(error) or "2000" in str(error))
        return
    assert parse(str(one)) == one == Expression.from_json(json.loads(json.dumps(one.to_json())))
    assert one.evaluate(VALUES) == python(text, VALUES)


def test_chained_comparisons_in_each_other_take_no_time() -> None:
    text = "B"
    for _ in range(80):
        text = f"(1 if 0<{text}<9 else 2)"
    with pytest.raises(RuleError, match=r"nested too deeply|too long"):
        parse(text)
    assert parse("(1 if 0<(1 if 0<B<9 else 2)<9 else 2)").evaluate(VALUES) == 1


@pytest.mark.parametrize(
    "data",
    [
        None, 3, [], ["int"], ["int", -1], ["int", True], ["int", 2**63], ["name", 3],
        ["name", "a b"], ["is", "T"], ["is", "T", "half"], ["is", "a b", "bool"],
        ["is", "T", ["bool"]], ["is", "T", {}], ["is", "bool", "bool"],
        ["+", ["int", 1]], ["nope", ["int", 1]],
        ["if", ["int", 1], ["int", 1], ["int", 1]], ["name", "if"], ["name", "\u00e9"],
        ["+", ["<", ["int", 1], ["int", 2]], ["int", 2]], ["and", ["int", 1], ["int", 2]],
    ],
)  # fmt: skip
def test_damaged_json_is_refused(data: Any) -> None:
    with pytest.raises(RuleError, match="damaged"):
        Expression.from_json(data)
