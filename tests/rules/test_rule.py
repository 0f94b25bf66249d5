"""Rules: what is read, what calls bind, what is refused and how, and that nothing is lost."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ferrule.errors import KernelError, RuleError
from ferrule.rules.argument import Broadcast, Star
from ferrule.rules.expression import Ints
from ferrule.rules.grammar import parse
from ferrule.rules.rule import Rule, parse_rule
from strategies import DIMS, LATE, rules, stars

SAMPLE = "x[B,H,W,C]:T, grid[B,N,M,2]:T -> out[B,N,M,C]:T"
LINEAR = (
    "x[*S,K]:bfloat16, w[N,K//2]:uint8, scale[N,K//16]:float16, bias[N]:bfloat16? -> "
    "y[*S,N]:bfloat16 where K % 16 == 0"
)
CACHE = "cache[B,L,D]:T!, new[B,D]:T, at:int32 -> out[B,D]:T where T in (float32, float16)"


def bind(text: str, *shapes: Any, kinds: Any = "float32", **numbers: int) -> Any:
    rule = parse_rule(text)
    given = [kinds] * len(shapes) if isinstance(kinds, str) else kinds
    kinds = [None if shape is None else kind for shape, kind in zip(shapes, given, strict=True)]
    every = {**dict.fromkeys(rule.numbers, 0), **numbers}
    return rule, rule.bind("op", shapes, kinds, numbers=every)


def test_a_call_says_what_dims_are() -> None:
    rule, said = bind(SAMPLE, (4, 8, 9, 3), (4, 5, 6, 2), kinds="float16")
    assert said.dims == {"B": 4, "H": 8, "W": 9, "C": 3, "N": 5, "M": 6}
    assert said.dtypes == {"T": "float16"}
    assert rule.results("op", said) == [((4, 5, 6, 3), "float16")]


@pytest.mark.parametrize("kind", ["float8_e4m3fn", "float8_e5m2", "float8_e8m0fnu"])
def test_8_bit_floats(kind: str) -> None:
    text = f"x[N]:float32, w[N,K//16]:{kind}, s[K]:T -> y[N]:{kind}, z[K]:T where T in ({kind})"
    rule, said = bind(text, (4,), (4, 2), (32,), kinds=["float32", kind, kind])
    assert rule.results("op", said) == [((4,), kind), ((32,), kind)]
    with pytest.raises(KernelError, match=rf"input 'w' .* got uint8, expected w\[N,K//16\]:{kind}"):
        bind(text, (4,), (4, 2), (32,), kinds=["float32", "uint8", kind])


@pytest.mark.parametrize("name", ["float8", "float8_e4m3", "float8_e5m2fnuz", "float8_e4m3fn_"])
def test_other_8_bit_floats_are_no_variables(name: str) -> None:
    with pytest.raises(RuleError, match=f"no dtype '{name}'; expected .*float8_e4m3fn"):
        parse_rule(f"x[N]:{name} -> y[N]:float32")


@pytest.mark.parametrize("lead", [(), (7,), (2, 0, 3)])
@pytest.mark.parametrize("bias", [None, (8,)])
def test_stars_expressions_and_optional_inputs(lead: Any, bias: Any) -> None:
    kinds = ["bfloat16", "uint8", "float16", "bfloat16"]
    rule, said = bind(LINEAR, (*lead, 32), (8, 16), (8, 2), bias, kinds=kinds)
    assert said.stars == {"S": lead} and said.dims == {"K": 32, "N": 8}
    assert rule.results("op", said) == [((*lead, 8), "bfloat16")]


def test_the_order_of_inputs_does_not_matter() -> None:
    _, said = bind("half[K//2]:float32, x[K]:float32 -> y[ceildiv(K,3)]:float32", (4,), (8,))
    assert said.dims == {"K": 8}


def test_marks_and_numbers() -> None:
    rule = parse_rule(CACHE)
    cache, new, at = rule.inputs
    assert cache.mutable and not new.mutable and at.dims is None
    kinds = ["float32", "float32", None]
    said = rule.bind("op", [(2, 9, 4), (2, 4), ()], kinds, numbers={"at": 3})
    assert rule.results("op", said) == [((2, 4), "float32")]


def test_numbers_are_named_like_dims() -> None:
    given = "x[N]:T, w[k]:T?, k:int32, flip:bool"
    text = f"{given} -> v[k]:T, i[2*k+flip]:int32 where k <= N or flip == 1"
    kinds = ["float32", "float32", None, None]
    rule, said = bind(text, (9,), (3,), (), (), kinds=kinds, k=3, flip=True)
    assert said.dims == {"N": 9} and said.numbers == {"k": 3, "flip": 1}
    assert rule.dim_names == ("N",) and rule.numbers == ("k", "flip")
    assert rule.results("op", said) == [((3,), "float32"), ((7,), "int32")]
    for shapes, k, message in (
        ([(9,), (4,), (), ()], 3, r"input 'w' .* dim 0 is 4, but k is 3 by number 'k'"),
        (
            [(2,), None, (), ()],
            3,
            "wants k <= N or flip == 1, .* say N = 2, flip = 0, k = 3",
        ),
    ):
        with pytest.raises(KernelError, match=message):
            bind(text, *shapes, kinds=kinds, k=k, flip=0)
    with pytest.raises(KernelError, match=r"output 'v' of op 'op': k is -1 for x \(9,\), k = -1"):
        rule.results("op", bind(text, (9,), None, (), (), kinds=kinds, k=-1)[1])


def test_sizes_and_ranks() -> None:
    rule, said = bind("x[*S]:float32 -> y[x.size // 2, x.ndim]:int32", (4, 3))
    assert rule.results("op", said) == [((6, 2), "int32")]


def test_symbolic_sizes_get_the_rules_own_equalities_alone() -> None:
    import torch
    from torch._dynamo.source import ConstantSource
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    env = ShapeEnv(duck_shape=False)

    def size(name: str, value: int) -> Any:
        return env.create_symintnode(env.create_symbol(value, ConstantSource(name)), hint=value)

    b, h, c, n = (size(*one) for one in (("b", 4), ("h", 8), ("c", 3), ("n", 5)))
    rule = parse_rule("x[B,H,C]:T, g[B,N]:T -> out[B, N * C, ceildiv(H, 2)]:T")
    said = rule.bind("op", [(b, h, c), (b, n)], ["float32", "float32"])
    ((shape, _),) = rule.results("op", said)
    assert env.guards == [] and [int(s) for s in shape] == [4, 15, 4]
    env.guards.clear()
    other = size("other", 4)
    rule.bind("op", [(b, h, c), (other, n)], ["float32", "float32"])
    assert len(env.guards) == 1
    assert isinstance(shape[1], torch.SymInt)


def test_what_compares_sizes_is_asked_for_every_dim() -> None:
    class Counted(Ints):
        asked = 0

        @staticmethod
        def minimum(a: int, b: int) -> int:
            Counted.asked += 1
            return min(a, b)

    rule = parse_rule("x[B,H]:T, w[min(B,H)]:T -> y[min(B,7)]:T")
    said = rule.bind("op", [(4, 3), (3,)], ["float32", "float32"], Counted)
    assert Counted.asked == 1
    assert rule.results("op", said, Counted) == [((4,), "float32")] and Counted.asked == 2


@pytest.mark.parametrize(
    ("text", "shapes", "kinds", "message"),
    [
        (SAMPLE, [(4, 8, 9), (4, 5, 6, 2)], "float32",
         r"input 'x' of op 'op': got the shape \(4, 8, 9\), expected x\[B,H,W,C\]:T, with 4 dims"),
        (SAMPLE, [(4, 8, 9, 3), (5, 5, 6, 2)], "float32",
         r"input 'grid' .* \(5, 5, 6, 2\) .* dim 0 is 5, but B is 4 by input 'x' of shape "
         r"\(4, 8, 9, 3\)"),
        (SAMPLE, [(4, 8, 9, 3), (4, 5, 6, 3)], "float32", r"dim 3 is 3, but expected 2"),
        (SAMPLE, [(4, 8, 9, 3), None], "float32", r"input 'grid' of op 'op': got None"),
        (SAMPLE, [(4, 8, 9, 3), (4, 5, 6, 2)], ["float32", "float16"],
         r"input 'grid' .* got float16, but T is float32 by input 'x'"),
        (LINEAR, [(3, 32), (8, 15), (8, 2), None], ["bfloat16", "uint8", "float16", None],
         r"input 'w' .* dim 1 is 15, but K // 2 is 16 by input 'x' of shape \(3, 32\)"),
        (LINEAR, [(3, 40), (8, 20), (8, 2), None], ["bfloat16", "uint8", "float16", None],
         r"wants K % 16 == 0, and the inputs say K = 40"),
        (LINEAR, [(3, 32), (8, 16), (8, 2), (9,)], ["bfloat16", "uint8", "float16", "bfloat16"],
         r"input 'bias' .* dim 0 is 9, but N is 8 by input 'w'"),
        (LINEAR, [(), (8, 16), (8, 2), None], ["bfloat16", "uint8", "float16", None],
         r"x\[\*S,K\]:bfloat16, with 1 dim or more"),
        (LINEAR, [(32,), (8, 16), (8, 2), None], ["float32", "uint8", "float16", None],
         r"input 'x' .* got float32, expected x\[\*S,K\]:bfloat16"),
        (CACHE, [(2, 9, 4), (2, 4), ()], ["float64", "float64", None],
         r"got float64, expected cache.* where T is one of float32, float16"),
        ("a[*S]:T, b[*S]:T -> c[*S]:T", [(2, 3), (2, 4)], "float32",
         r"input 'b' .* so \*S is \(2, 4\), but input 'a' of shape \(2, 3\)"),
        ("x[*S]:T, w[x.size]:T -> z[1]:T", [(2, 3), (5,)], "float32",
         r"dim 0 is 5, but x.size is 6 by input 'x' of shape \(2, 3\)"),
        ("x[*S]:T -> z[1]:T where x.ndim == 2", [(3,)], "float32",
         r"wants x.ndim == 2, and the inputs say x.ndim = 1: x \(3,\)"),
        ("x[N]:T -> z[1]:T where T == float16 or N % 2 == 0", [(3,)], "float32",
         r"wants T == float16 or N % 2 == 0, and the inputs say N = 3, T is float32: x \(3,\)"),
        ("x[N]:T -> z[N - 5 if T == float32 else N]:T", [(3,)], "float32",
         r"N - 5 if T == float32 else N is -2 for x \(3,\), T is float32\."),
        ("x[N]:T, s[2 if T == float32 else 1]:int8 -> z[1]:T", [(3,), (1,)], ["float32", "int8"],
         r"dim 0 is 1, but 2 if T == float32 else 1 is 2 by T is float32\."),
        ("x[N]:float32 -> y[N - 3]:float32", [(2,)], "float32", r"N - 3 is -1 for x \(2,\)"),
        ("x[N,M]:float32 -> y[N // M]:float32", [(2, 0)], "float32", r"N // M .* divides by zero"),
    ],
)  # fmt: skip
def test_what_a_call_contradicts(text: str, shapes: Any, kinds: Any, message: str) -> None:
    with pytest.raises(KernelError, match=message):
        rule, said = bind(text, *shapes, kinds=kinds)
        rule.results("op", said)


@pytest.mark.parametrize(
    ("text", "at", "message"),
    [
        ("x[B]:T", 6, "has '->'"),
        ("x[B]:T -> y[B]:T -> z[B]:T", 17, "has one '->'"),
        ("x[B]:T ->", 9, "has an output"),
        ("x[B:T -> y[B]:T", 1, "bracket is not closed"),
        ("x[min(B,2]:T -> y[B]:T", 9, r"expected '\)' before"),
        ("x[B]:T -> y[B:T", 11, "bracket is not closed"),
        ("x]:T -> y[1]:T", 1, "closes nothing"),
        ("x[B] -> y[B]:float32", 4, "expected ':' and a dtype"),
        ("x[B]:T, [B]:T -> y[B]:T", 8, "expected an array"),
        ("x[B]:T, , z[B]:T -> y[B]:T", 8, "expected an array"),
        ("x[B]:T, x[C]:T -> y[B]:T", 8, "two arrays called 'x'"),
        ("x[B]:T -> y[B,Q]:T", 14, "has the dim 'Q' by itself; they have B"),
        ("x[B+1]:T -> y[3]:T", 2, "has the dim 'B' by itself"),
        ("x[B]:T, w[C+1]:T? -> y[C]:T", 10, "no input has the dim 'C' by itself; they have B"),
        ("x[B]:T, w[B]:T? -> y[w.size]:T", 21, "no input 'w' that always has a shape"),
        ("x[B]:T, w[*R]:T? -> y[*R]:T", 10, r"always there says what \*R is"),
        ("x[B]:T -> y[B]:U", 10, "what dtype 'U' is"),
        ("x[B]:T? -> y[3]:float32", 0, "always there says what dtype 'T'"),
        ("x[B]:T, n:float32 -> y[n]:T", 23, "n:float32 is a float, .*; declare n:int32"),
        ("x[B]:T -> y[z.size]:T", 12, "no input 'z' that always has a shape"),
        ("x[*S,*R]:T -> y[1]:T", 1, "one starred dim at most"),
        ("x[*S]:T -> y[*R]:T", 13, r"what \*R is"),
        ("x[*S]:T -> y[*broadcast(S,R)]:T", 13, r"what \*R is"),
        ("x[*S]:T, z[*R]:T? -> y[*broadcast(S, R)]:T", 11, r"what \*R is"),
        ("x[*S]:T -> y[*broadcast(S)]:T", 13, "expected two starred dims or more, each once"),
        ("x[*S]:T -> y[*broadcast(S,S)]:T", 13, "expected two starred dims or more, each once"),
        ("x[*S]:T -> y[*broadcast(S,1)]:T", 13, "expected two starred dims or more, each once"),
        ("x[*S]:T, z[*R]:T -> y[*broadcast(S,R),*S]:T", 21, "one starred dim at most"),
        ("x[*S]:T, z[*R]:T, v[*broadcast(S,R)]:T -> y[1]:T", 20, "is for outputs; an input has"),
        ("x[B]:B -> y[B]:B", 0, "'B' is two things"),
        ("x[B]:T -> y:T", 10, "output 'y' has no shape"),
        ("x[B]:T -> y[B]:T?", 10, "marks of inputs"),
        ("x[B]:float -> y[B]:float", 5, "no dtype 'float'; expected .*float32"),
        ("x[B]:T -> y[B]:float24", 15, "no dtype 'float24'"),
        ("x[B]:f32 -> y[B]:f32", 5, "no dtype 'f32'; expected .*float32"),
        ("x[B]:bf16 -> y[B]:bf16", 5, "no dtype 'bf16'"),
        ("x[B]:double -> y[B]:double", 5, "no dtype 'double'"),
        ("x[B]:T w[B]:T -> y[B]:T", 7, "expected ',' before the next array"),
        ("x[B]:T -> y[B]:T where B % 4 = 0", 29, "compared by '=='"),
        ("x[B]:T?? -> y[B]:T", 6, "a mark stands twice"),
        ("n:int32? -> y[1]:int32", 0, "marks of arrays"),
        ("x[B]:T, s:T -> y[B]:T", 8, "as in s:float32; 'T' is a variable"),
        ("x[B]:T, in[B]:T -> y[B]:T", 8, "'in' is a word of Python"),
        ("x[B]:T -> None[B]:T", 10, "'None' is a word of Python"),
        ("x[B]:T -> y[B/2]:T", 12, "write // for whole"),
        ("x[B]:T -> y[B < 2]:T", 12, "a condition stands where a size"),
        ("x[B]:T -> y[B]:T where B", 22, "expected a condition"),
        ("x[B]:T -> y[B]:T where T in (floaty)", 29, "no dtype 'floaty'"),
        ("x[B]:T -> y[B]:T where U in (float32)", 22, "no input has the dtype 'U'"),
        ("x[B]:T where B > 2 -> y[B]:T", 7, "at the end of a rule"),
        ("a[B]:x, x[B]:x -> y[B]:x", 8, "'x' is two things: an array and a dtype"),
        ("x[n]:T, n:float32 -> y[1]:T", 8, "'n' is two things: a number of float32 and a dim"),
        ("x[B):T] -> y[B]:T", 3, r"expected '\]' before '\)'"),
        ("x[B]:T -> y[B[0]]:T", 12, "not allowed in a rule"),
        ("x[B]:T\u00b2 -> y[B]:T", 4, "expected ':' and a dtype"),
        ("x[B]:T -> y[B]:T where T in (float32, floaty)", 38, "no dtype 'floaty'"),
    ],
)  # fmt: skip
def test_errors_point_at_the_character(text: str, at: int, message: str) -> None:
    with pytest.raises(RuleError, match=message) as raised:
        parse_rule(text)
    assert raised.value.position == at
    assert str(raised.value).endswith(f"\n  {text}\n  {' ' * at}^")


@settings(deadline=None, max_examples=150)
@given(text=rules(), data=st.data())
def test_rules_survive_and_bind_what_they_were_made_of(text: str, data: Any) -> None:
    rule = parse_rule(text)
    assert parse_rule(str(rule)) == rule and str(parse_rule(str(rule))) == str(rule)
    again = Rule.from_json(json.loads(json.dumps(rule.to_json())))
    assert again == rule
    absent = [one.optional and data.draw(st.booleans()) for one in rule.inputs]
    there = [one for one, left_out in zip(rule.inputs, absent, strict=True) if not left_out]
    late = any(parse(LATE) in one.dims for one in there)
    sizes = {name: data.draw(st.integers(0, 9)) for name in DIMS}
    star = data.draw(stars())
    every = [*sizes.values(), *star["S"]]
    sizes[LATE] = data.draw(st.integers(0, 9)) if late else 0
    kinds = {"T": data.draw(st.sampled_from(["float32", "float16"])), "U": "int8"}

    def shape(one: Any) -> tuple[int, ...]:
        found: list[int] = []
        for dim in one.dims:
            if isinstance(dim, Star):
                found += star[dim.name]
            elif isinstance(dim, Broadcast):
                found += np.broadcast_shapes(*(star[name] for name in dim.names))
            else:
                values = {**sizes, "all.size": 1, ":T": kinds["T"]}
                for n in every:
                    values["all.size"] *= n
                found.append(dim.evaluate(values))
        return tuple(found)

    shapes = [None if left_out else shape(one)
              for one, left_out in zip(rule.inputs, absent, strict=True)]  # fmt: skip
    given = [None if s is None else kinds.get(one.dtype, one.dtype)
             for s, one in zip(shapes, rule.inputs, strict=True)]  # fmt: skip
    said = again.bind("op", shapes, given)
    assert said.dims == sizes and said.stars == star
    expected = [(shape(one), kinds.get(one.dtype, one.dtype)) for one in rule.outputs]
    assert again.results("op", said) == expected


def test_what_begins_like_choices() -> None:
    start = "x[N]:T, y[N]:U -> z[N]:T where "
    for text in (
        "T in (float16, float32) or U in (int8, int16)", "T in (float16, float32) and (N > 2)",
        "T in (int8,) or N > 2", "T not in (float16,)", "T != float16",
    ):  # fmt: skip
        rule = parse_rule(start + text)
        assert not rule.choices and len(rule.conditions) == 1
        assert parse_rule(str(rule)) == rule
    for text in ("T in (float16,)", "T in (float16 , )", "T in (float16)"):
        assert parse_rule(start + text).choices == {"T": ("float16",)}
    for text in ("T in ()", "T in (,)", "T in (float16,,)"):
        with pytest.raises(RuleError, match="there is no dtype ''"):
            parse_rule(start + text)
    with pytest.raises(RuleError, match="'T' is a dtype variable; compare it: T == float16"):
        parse_rule("x[N]:T -> y[T]:T")


def test_the_order_of_choices_does_not_matter() -> None:
    start = "x[B]:T, y[B]:U -> z[B]:T where "
    one = parse_rule(f"{start}T in (float32), U in (float16)")
    other = parse_rule(f"{start}U in (float16), T in (float32)")
    assert one == other and hash(one) == hash(other) and str(one) == str(other)


def test_json_that_would_be_read_as_something_else_is_refused() -> None:
    data = parse_rule("x[B]:T, eps:float32 -> y[B]:T where T in (float32)").to_json()
    assert Rule.from_json(data).to_json() == data
    names = {"T in (float32), T": ["float32"]}
    for changed in (
        {**data, "choices": {"T": ["float32, float16"]}}, {**data, "choices": names},
        {**data, "inputs": [data["inputs"][0], ["eps", "", "float32", False, False]]},
    ):  # fmt: skip
        with pytest.raises(RuleError):
            Rule.from_json(changed)


@pytest.mark.parametrize(
    "data", [None, [], {}, {"inputs": []}, {"inputs": [1], "outputs": [], "choices": {},
                                             "conditions": []}]
)  # fmt: skip
def test_damaged_json_is_refused(data: Any) -> None:
    with pytest.raises(RuleError):
        Rule.from_json(data)
