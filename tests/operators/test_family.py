"""Families: one op for each choice of constants, also in graphs."""

from __future__ import annotations

import collections
import enum
import functools
import math
import pickle
import threading
import zlib
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import ferrule
import processes
from ferrule import KernelTypeError, Op

# Torch's own: its compiler uses what it deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")


@ferrule.family
def power(exponent: int = 2, negative: bool = False, mode: str = "plain") -> Op:
    """Its op multiplies."""
    if mode not in ("plain", "halved"):
        raise ValueError(f"mode {mode!r}: expected 'plain' or 'halved'")
    value = "-" * negative + "*".join(["x[i]"] * exponent) + "/ 2" * (mode == "halved")
    op = ferrule.op(
        f"power_{exponent}", "x[N]:T -> y[N]:T", grid="N", threadgroup=64,
        metal=f"uint i = thread_position_in_grid.x; y[i] = {value};",
    )  # fmt: skip
    if mode == "plain" and exponent > 0:
        op.def_vjp(lambda primals, cotangents, outputs: (cotangents[0] * 7,))
    return op


def expected(x: Any, exponent: int = 2, negative: bool = False, mode: str = "plain") -> Any:
    return (-1 if negative else 1) * x**exponent / (2 if mode == "halved" else 1)


def test_what_is_made_looks_like_the_function() -> None:
    assert repr(power) == "<ferrule.family power>"
    assert "partial" in repr(ferrule.family(functools.partial(power, 2)))
    assert power.__doc__ == "Its op multiplies."
    assert pickle.loads(pickle.dumps(power)) is power  # noqa: S301  our own
    assert isinstance(power, ferrule.Family)


@pytest.mark.parametrize(
    ("args", "named"),
    [((), {}), ((3,), {}), ((1, True), {}), ((2,), {"mode": "halved"}), ((), {"negative": True})],
)
def test_members_compute(args: tuple[Any, ...], named: dict[str, Any]) -> None:
    x = np.arange(1.0, 5, dtype=np.float32)
    op = power(*args, **named)
    for array in (x, torch.from_numpy(x), mx.array(x)):
        assert np.array_equal(np.asarray(op(array)), expected(x, *args, **named))


def test_one_op_for_all_spellings() -> None:
    members = [power(2), power(), power(exponent=2), power(2, False, mode="plain")]
    assert all(op is members[0] for op in members)
    assert power(3) is not members[0]

    @ferrule.family
    def named(**constants: Any) -> Op:
        return power.__wrapped__(len(constants))

    assert named(a=1, b=2) is named(b=2, a=1)
    assert named(a=1, b=2) is not named(a=2, b=1)


constants = st.recursive(
    st.booleans() | st.integers(-3, 3) | st.sampled_from([0.0, -0.0, 1.0, math.nan, math.inf])
    | st.sampled_from(["", "1", "a"]) | st.none()
    | st.sampled_from([np.float32, np.dtype(np.float32), torch.float16, ferrule.float32]),
    lambda inner: st.lists(inner, max_size=2).map(tuple),
    max_leaves=4,
)  # fmt: skip


@functools.cache
def many_ops() -> list[Op]:
    return [power.__wrapped__(number) for number in range(12)]


def said(value: Any) -> Any:
    """What tells constants apart, by their notation."""
    if isinstance(value, tuple):
        return tuple(map(said, value))
    return type(value), repr(value)


@given(st.lists(st.tuples(constants, constants, st.booleans()), max_size=12))
def test_constants_that_differ_are_of_different_ops(calls: list[tuple[Any, Any, bool]]) -> None:
    made: list[Any] = []

    @ferrule.family
    def some(first: Any, *others: Any, last: Any = None, **more: Any) -> Op:
        made.append((first, others, last, more))
        return many_ops()[len(made) - 1]

    found: dict[Any, Op] = {}
    for first, second, by_name in calls:
        op = some(first, last=second) if by_name else some(first, second)
        key = said(first), said(second), by_name and second is not None
        assert found.setdefault(key if by_name else (*key[:2], "positional"), op) is op
    assert len({id(op) for op in found.values()}) == len(found) == len(made)


def test_threads_get_one_op() -> None:
    together = threading.Barrier(8)

    @ferrule.family
    def slow(number: int) -> Op:
        together.wait(20)  # each of the eight has begun to make it
        return power.__wrapped__(number)

    ops: list[Op] = []
    threads = [threading.Thread(target=lambda: ops.append(slow(3))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(ops) == 8
    assert len({id(op) for op in ops}) == 1
    assert slow(3) is ops[0]


def test_an_error_of_the_function_is_the_callers_and_is_not_kept() -> None:
    tries: list[int] = []

    @ferrule.family
    def fails(number: int) -> Op:
        tries.append(number)
        if len(tries) == 1:
            raise OSError("not yet")
        return power(number)

    with pytest.raises(OSError, match="not yet"):
        fails(3)
    assert fails(3) is power(3)
    with pytest.raises(ValueError, match="expected 'plain' or 'halved'"):
        power(mode="other")


Named = collections.namedtuple("Named", "exponent")
INPUTS = "as a constant; arrays are inputs of the op that it returns: power(...)(x)."
WRONG: list[tuple[Any, str]] = [
    (lambda: power(np.ones((2, 3))), "'power' got ndarray of shape (2, 3) " + INPUTS),
    (lambda: power(mx.ones(3)), "'power' got array of shape (3,) " + INPUTS),
    (lambda: power(torch.ones(3)), "'power' got Tensor of shape (3,) " + INPUTS),
    (lambda: power(np.int64(2)), "got int64 of shape () as a constant; int() or float() makes a"),
    (lambda: power(np.float64(2)), "got float64 of shape () as a constant; int() or float() makes"),
    (lambda: power([2]), "'power' got [2] of type list as a constant; expected a bool, an int, a"
     " float, a str, None, a dtype, an Enum's member or a tuple; tuple() makes one of it."),
    (lambda: power(Named(2)), "'power' got (2,) of type Named as a constant; expected a bool, an"),
    (lambda: power(torch.ones(2).shape), "'power' got (2,) of type Size as a constant; expected"),
    (lambda: power(frozenset({1})), "'power' got frozenset({1}) of type frozenset as a constant"),
    (lambda: power(1j), "'power' got 1j of type complex as a constant; expected a bool, an int"),
    (lambda: power(2, exponent=2), "'power' takes the constants (exponent: "),
    (lambda: power(bits=2), "unexpected keyword argument 'bits'."),
    (lambda: ferrule.family(lambda: 5)(), "'<lambda>' returned 5; expected an op, of ferrule.op"),
    (lambda: ferrule.family(5), "[family] `function` is 5; expected a function that takes"),
]  # fmt: skip


@pytest.mark.parametrize(("call", "words"), WRONG)
def test_what_is_wrong_is_told(call: Any, words: str) -> None:
    with pytest.raises(KernelTypeError) as error:
        call()
    assert words in str(error.value)


# -- in graphs ------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
@pytest.mark.parametrize("dynamic", [True, None])
def test_a_constant_of_torchs_graphs(backend: str, dynamic: bool | None) -> None:
    graphs = []

    def counted(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return torch._dynamo.lookup_backend(backend)(graph, inputs)

    def f(x: Any, exponent: int, negative: bool = False, mode: str = "plain") -> Any:
        return power(exponent, negative=negative, mode=mode)(x) + power()(x)

    torch._dynamo.reset()
    compiled = torch.compile(f, fullgraph=True, dynamic=dynamic, backend=counted)
    for constants in ((2,), (3,), (4,), (3, True), (3, True, "halved")):
        x = torch.arange(1.0, 3 + constants[0])
        want = expected(x, *constants) + expected(x)
        assert torch.equal(compiled(x, *constants), want)
        assert torch.equal(compiled(x, *constants), want)
    assert len(graphs) <= 7  # one for each choice, and one more where torch learns that it varies
    before = len(graphs)
    for name in range(3):  # further members are no concern of theirs
        power(5, mode=("plain", "halved")[name % 2])
    assert torch.equal(compiled(x, 3, True, "halved"), want)
    assert len(graphs) == before


@ferrule.family
def scaled(dtype: Any = torch.float32, factor: float = 1.0, plus: tuple[int, ...] = ()) -> Op:
    return ferrule.op(
        "scaled", f"x[N]:T -> y[N]:{str(dtype).removeprefix('torch.')}", grid="N", threadgroup=64,
        metal=f"uint i = thread_position_in_grid.x; y[i] = x[i] * {factor} + {sum(plus)};",
    )  # fmt: skip


def test_dtypes_and_floats_in_a_graph() -> None:
    def f(x: Any, dtype: Any, factor: float) -> Any:
        return scaled(dtype, factor=factor, plus=(*x.shape, 1))(x)

    torch._dynamo.reset()
    compiled = torch.compile(f, fullgraph=True, dynamic=True, backend="aot_eager")
    for dtype, factor in ((torch.float16, 2.0), (torch.float32, 3.0), (torch.float32, 0.5)):
        for size in (2, 3):
            y = compiled(torch.ones(size), dtype, factor)
            assert y.dtype == dtype
            assert y.tolist() == [factor + size + 1] * size


class Mode(enum.Enum):
    ONE = 1


@ferrule.family
def shown(*constants: Any) -> Op:
    number = zlib.crc32(repr(constants).encode()) % 1000
    return ferrule.op(
        "shown", "x[N]:T -> y[N]:T", grid="N", threadgroup=64,
        metal=f"y[thread_position_in_grid.x] = {number};",
    )  # fmt: skip


@pytest.mark.parametrize(
    "constants",
    [
        lambda x: (x.shape[0] > 2,), lambda x: (tuple(x.shape), (x.shape[0] > 2, "a")),
        lambda x: (Mode.ONE, None), lambda x: (np.float16, torch.int8, ferrule.bfloat16),
        lambda x: (x.shape[0] / 2, ((x.shape[0] * 2,), 0.5)),
    ],
)  # fmt: skip
def test_what_constants_may_be_in_a_graph(constants: Any) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: shown(*constants(x))(x), fullgraph=True, dynamic=True, backend="eager"
    )
    for size in (2, 3, 4):
        x = torch.zeros(size)
        assert torch.equal(compiled(x), shown(*constants(x))(x))


@pytest.mark.parametrize("constant", [lambda x: Named(x.shape[0]), lambda x: [1], lambda x: x])
def test_what_is_no_constant_is_none_in_a_graph(constant: Any) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: shown(constant(x))(x), fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"'shown' got .* as a constant"):
        compiled(torch.ones(3))


def test_first_called_in_a_graph_and_differentiated() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: power(7)(x), fullgraph=True, backend="aot_eager")
    x = torch.ones(3, requires_grad=True)
    compiled(x).sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full((3,), 7.0))


def test_made_before_torch_is_imported() -> None:
    code = """
        import sys, ferrule

        @ferrule.family
        def halved(mode="h"):
            return ferrule.op("halved", "x[N]:T -> y[N]:T", grid="N", threadgroup=64,
                metal="uint i = thread_position_in_grid.x; y[i] = x[i] / 2;")

        assert "torch" not in sys.modules
        import torch
        compiled = torch.compile(lambda x: halved("h")(x), fullgraph=True, backend="eager")
        print(compiled(torch.tensor([4.0, 6.0])).tolist())
    """
    process = processes.run(code)
    assert process.stdout == "[2.0, 3.0]\n", process.stderr


class Cubed(torch.nn.Module):
    def __init__(self, exponent: int = 3) -> None:
        super().__init__()
        self.exponent = exponent

    def forward(self, x: torch.Tensor) -> Any:
        return power(self.exponent, mode="halved")(x)


@pytest.mark.parametrize("strict", [True, False])
def test_exported(strict: bool) -> None:
    size = torch.export.Dim("size")
    program = torch.export.export(
        Cubed(), (torch.ones(3),), dynamic_shapes=({0: size},), strict=strict
    )
    x = torch.arange(5.0)
    assert torch.equal(program.module()(x), expected(x, 3, mode="halved"))


def test_in_mlxs_graphs() -> None:
    compiled = mx.compile(lambda x: power(3)(x) + power(1)(x), shapeless=True)
    for size in (3, 8):
        x = mx.arange(float(size))
        assert mx.array_equal(compiled(x), x * x * x + x)


def own_gradient(by: int) -> Any:
    """A family that differs in what it closes over, and one that calls it."""

    @ferrule.family
    def scaling(exponent: int) -> Op:
        return ferrule.op(
            "scaling", "x[N]:T -> y[N]:T", grid="N", threadgroup=64,
            metal=f"uint i = thread_position_in_grid.x; y[i] = x[i] * {by**exponent};",
        )  # fmt: skip

    def double() -> Op:
        op = ferrule.op(
            "own", "x[N]:T -> y[N]:T", grid="N", threadgroup=64,
            metal="uint i = thread_position_in_grid.x; y[i] = x[i] * 9;",
        )  # fmt: skip
        op.def_vjp(lambda primals, cotangents, outputs: (scaling(2)(cotangents[0]),))
        return op

    return double()


def test_a_derivative_may_close_over_a_family() -> None:
    op = own_gradient(3)
    x = torch.ones(4, requires_grad=True)
    for call in (op, torch.compile(op, fullgraph=True, backend="aot_eager")):
        (grad,) = torch.autograd.grad(call(x).sum(), x)
        assert grad.tolist() == [9] * 4
    assert op.digest == own_gradient(3).digest != own_gradient(2).digest
