"""Which implementation is chosen: conditions of each kind, and the author's order."""

from __future__ import annotations

import itertools
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ferrule
from ferrule import DeviceError, KernelError, KernelTypeError, Op, RuleError
from ferrule.operators import call as op_call

# Torch's own: its compiler uses what it deprecates.
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")

METAL = "uint i = thread_position_in_grid.x; y[i] = x[i] * 0 + NUMBER;"
CONDITIONS: dict[str | None, Callable[[int, str], bool]] = {
    "N < 4": lambda n, t: n < 4,
    "N % 2 == 0": lambda n, t: n % 2 == 0,
    "T == float32": lambda n, t: t == "float32",
    "x.size > 2 and T != int32": lambda n, t: n > 2 and t != "int32",
    None: lambda n, t: True,
}


def ten(x: Any) -> Any:
    return x * 0 + 10


def eleven(x: Any) -> Any:
    return x * 0 + 11


def twelve(x: Any) -> Any:
    return x * 0 + 12


def metal_body(number: int, when: str | None = None) -> Any:
    template = {"NUMBER": number}
    return ferrule.metal_body(METAL, grid="N", threadgroup=32, template=template, when=when)


def several(draw: Any, parts: list[Any], make: Callable[[Any, Any], Any]) -> list[tuple[Any, Any]]:
    """Some of the parts, each with a condition, of which the last alone may be always true."""
    count = draw(st.integers(0, len(parts)))
    conditions = st.sampled_from([c for c in CONDITIONS if c is not None])
    whens = [draw(conditions) for _ in range(count)]
    if count and draw(st.booleans()):
        whens[-1] = None
    return [(make(part, when), when) for part, when in zip(parts, whens, strict=False)]


@st.composite
def ops(draw: Any) -> tuple[Op, list[tuple[int, str | None]]]:
    """An op, and what its implementations give, with their conditions, in the order to be tried."""
    metal = several(draw, [1, 2], lambda number, when: metal_body(number, when))
    run = several(draw, [ten, eleven], lambda f, when: ferrule.run_function(f, when=when))
    reference = twelve if draw(st.booleans()) or not metal + run else None
    of_kind = {
        "metal": [(i + 1, when) for i, (_, when) in enumerate(metal)],
        "run": [(i + 10, when) for i, (_, when) in enumerate(run)],
        "reference": [(12, None)] if reference is not None else [],
    }
    there = [kind for kind, found in of_kind.items() if found]
    prefer = draw(st.permutations(there))[: draw(st.integers(0, len(there)))]
    op = ferrule.op(
        "preferred", "x[N]:T -> y[N]:T", metal=[m for m, _ in metal] or None,
        run=[r for r, _ in run] or None, reference=reference, prefer=prefer,
    )  # fmt: skip
    order = [*prefer, *(kind for kind in there if kind not in prefer)]
    return op, [one for kind in order for one in of_kind[kind]]


def chosen(order: list[tuple[int, str | None]], n: int, t: str) -> int | None:
    return next((number for number, when in order if CONDITIONS[when](n, t)), None)


def values(array: Any) -> Any:
    return array.tolist()  # evaluates MLX's


@settings(max_examples=25, deadline=None)
@given(
    ops(),
    st.lists(st.integers(1, 6), min_size=1, max_size=4),
    st.sampled_from(["float32", "int32"]),
)
def test_the_first_that_holds_is_taken_on_every_host(made: Any, sizes: list[int], t: str) -> None:
    op, order = made
    again = pickle.loads(pickle.dumps(op))  # noqa: S301
    saved = Op.from_json(op.to_json())
    assert again.digest == saved.digest == op.digest
    for n in sizes:
        want = chosen(order, n, t)
        x = np.zeros(n, t)
        arrays = (x, torch.from_numpy(x), mx.array(x))
        if want is None:
            for array in arrays:
                with pytest.raises((DeviceError, ValueError), match="nothing that runs on"):
                    values(op(array))
            continue
        for one, array in itertools.product((op, again), arrays):
            assert values(one(array)) == [want] * n
        if want < 10:  # a kernel, which the data has
            assert saved(x).tolist() == [want] * n
        else:
            with pytest.raises(KernelError, match="without its Python function"):
                saved(x)


def test_kernels_beside_functions_run_in_c_with_numpy(monkeypatch: pytest.MonkeyPatch) -> None:
    op = ferrule.op(
        "beside", "x[N]:T -> y[N]:T", metal=[metal_body(1, "N % 2 == 0"), metal_body(2)],
        run=ferrule.run_function(ten, when="N >= 6"), prefer="run",
    )  # fmt: skip
    x, large = np.zeros(4, np.float32), np.zeros(7, np.float32)
    assert op(x).tolist() == [1] * 4 and op(large).tolist() == [10] * 7
    assert op(x[:3]).tolist() == [2] * 3
    monkeypatch.setattr(op_call, "call", lambda op, values: "Python")
    assert op(x).tolist() == [1] * 4 and op(x[:3]).tolist() == [2] * 3
    assert op(large) == "Python"


def test_graphs_choose_at_each_call() -> None:
    op = ferrule.op(
        "graphs", "x[N]:T -> y[N]:T", metal=[metal_body(1, "N % 2 == 0"), metal_body(2)],
        run=ferrule.run_function(ten, when="N >= 6"), prefer="run",
    )  # fmt: skip
    compiled = torch.compile(
        lambda x: op(x + 1) + 1, fullgraph=True, dynamic=True, backend="aot_eager"
    )
    shapeless = mx.compile(lambda x: op(x + 1) + 1, shapeless=True)
    for n, want in ((3, 2), (4, 1), (5, 2), (6, 10), (8, 10), (2, 1)):
        assert compiled(torch.zeros(n)).tolist() == [want + 1] * n
        assert shapeless(mx.zeros(n)).tolist() == [want + 1] * n


def test_files_of_mlx_hold_the_kernel(tmp_path: Path) -> None:
    op = ferrule.op(
        "in_file", "x[N]:T -> y[N]:T", metal=[metal_body(1, "N < 4"), metal_body(2)],
        run=ferrule.run_function(ten, when="N >= 6"), prefer="run",
    )  # fmt: skip
    path = str(tmp_path / "f.mlxfn")
    mx.export_function(path, lambda x: op(x), mx.zeros(8), shapeless=True)
    imported = ferrule.import_function(path)
    for n, want in ((2, 1), (3, 1), (4, 2), (8, 2)):
        assert imported(mx.zeros(n))[0].tolist() == [want] * n


def test_the_order_is_part_of_the_digest_and_costs_nothing_where_it_is_not_given() -> None:
    def made(**more: Any) -> Op:
        return ferrule.op(
            "digest", "x[N]:T -> y[N]:T", metal=METAL, run=ten, reference=twelve, grid="N",
            threadgroup=32, template={"NUMBER": 1}, **more,
        )  # fmt: skip

    plain = made()
    assert "when" not in plain.to_json()["implementations"][1]
    assert made(prefer="metal").digest == made(prefer=("metal", "run")).digest == plain.digest
    assert made(prefer="run").digest == plain.using("run", "metal", "reference").digest
    assert len({made(prefer=p).digest for p in ("metal", "run", "reference")}) == 3
    assert made(prefer="reference")(np.zeros(1)).tolist() == [12]


def test_adopted_with_a_condition() -> None:
    def make(*, device: str, T: str) -> Any:
        return lambda x: x + {"float32": 1, "float64": 2}[T]

    for more in ({"run": lambda x: x + 1}, {"make": make}):
        op = ferrule.adopt(
            "adopted", "x[N]:T -> y[N]:T", when="N % 2 == 0", reference=lambda x: x - 1, version=1,
            **more,
        )  # fmt: skip
        assert op(np.zeros(2, np.float32)).tolist() == [1, 1]
        assert op(np.zeros(1)).tolist() == [-1]
        assert op(torch.zeros(3)).tolist() == [-1] * 3
        assert op.digest != ferrule.adopt(
            "adopted", "x[N]:T -> y[N]:T", reference=lambda x: x - 1, version=1, **more
        ).digest  # fmt: skip
    alone = ferrule.adopt("alone", "x[N]:T -> y[N]:T", run=ten, when="N > 1")
    with pytest.raises(DeviceError, match="for these sizes: it has 'run' when N > 1"):
        alone(np.zeros(1))


def test_comparison_and_a_file_of_metal(tmp_path: Path) -> None:
    path = tmp_path / "k.metal"
    path.write_text(
        "kernel void f(device const float* x [[buffer(0)]], device float* y [[buffer(1)]],"
        " uint i [[thread_position_in_grid]]) { y[i] = x[i] + 5; }"
    )
    op = ferrule.op(
        "compared", "x[N]:float32 -> y[N]:float32",
        metal=[
            ferrule.metal_body(path, function="f", grid="N", threadgroup=1, when="N < 4"),
            "uint i = thread_position_in_grid.x; y[i] = x[i] + 5;",
        ],
        run=[ferrule.run_function(lambda x: x + 5, when="N == 2"), lambda x: x + 6],
        grid="N", threadgroup=32,
    )  # fmt: skip
    report = repr(ferrule.compare(op, np.zeros(3, np.float32)))
    assert "run        not run: it is for N == 2" in report
    assert "metal 2" in report and "WRONG" in report
    assert "WRONG" not in repr(ferrule.compare(op.using("metal"), np.zeros(3, np.float32)))


def function(when: str) -> Any:
    return ferrule.run_function(ten, when=when)


def body(source: Any = "", grid: Any = 1, **more: Any) -> Any:
    return ferrule.metal_body(source, grid=grid, threadgroup=1, **more)


@pytest.mark.parametrize(
    ("more", "error", "words"),
    [
        ({"prefer": "cuda"}, KernelError, "`prefer`: op 'f' has no .* 'cuda'; it has 'run'"),
        ({"prefer": ("run", "run")}, KernelError, "`prefer` of op 'f': .*expected each kind once"),
        ({"prefer": 3}, KernelTypeError, "`prefer` of op 'f': got 3, expected kinds"),
        ({"run": [ten, eleven]}, KernelError, "`run` of op 'f': number 1 of 2 has no `when`"),
        ({"run": [function("M < 3")]}, RuleError, "there is no dim 'M'"),
        ({"run": function("N")}, KernelError, "`when` of op 'f'.*a condition"),
        ({"run": 3}, KernelTypeError, "`run` of op 'f': got 3 of type int, expected a function"),
        ({"metal": [3]}, KernelTypeError, "`metal` of op 'f': got 3 .*or a metal_body"),
        ({"metal": [body(), body()]}, KernelError, "`metal` of op 'f': number 1 of 2"),
        ({"metal": body(), "function": "f"}, KernelError, "`function` of op 'f'.*no path"),
        ({"metal": body(grid=None)}, KernelError, "no `grid`"),
        ({"metal": body("k.metal")}, KernelError, "pathlib.Path"),
        ({"metal": body(function="f")}, KernelError, "the metal_body is of no path"),
    ],
)
def test_refusals(more: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        ferrule.op("f", "x[N]:T -> y[N]:T", **{"run": ten, **more})


def test_a_run_function_is_a_function() -> None:
    with pytest.raises(KernelTypeError, match="got 3 of type int, expected a function"):
        ferrule.run_function(3)  # type: ignore[arg-type]
