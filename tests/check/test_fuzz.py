"""`ferrule.fuzz`: planted bugs are found and made small, and what is right does not fail."""

from __future__ import annotations

import math
import os
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ferrule
import fuzzed_ops as ops
from ferrule import dtypes
from ferrule.check.fuzzing import recipes
from ferrule.check.fuzzing.draws import Draws
from ferrule.check.fuzzing.fuzz import FuzzResult
from ferrule.check.fuzzing.recipes import LAYOUTS, Fill, Recipe
from ferrule.check.fuzzing.redeclare import other_threadgroups, with_threadgroup

FOLDER = Path(__file__).parent


def fuzzed(op: ferrule.Op, reference: Callable[..., Any] | None = None, **more: Any) -> FuzzResult:
    return ferrule.fuzz(op, reference=reference, seed=0, **more)


def run_printed(result: FuzzResult, folder: Path) -> Callable[[], None]:
    """The printed test, as a function."""
    path = folder / "test_printed.py"
    path.write_text(result.test)
    (test,) = (v for name, v in runpy.run_path(str(path)).items() if name.startswith("test_"))
    return test


def failing(result: FuzzResult, kind: str, folder: Path) -> dict[str, Any]:
    """The inputs of the failing call, by name; its test fails, too."""
    assert result.failure is not None
    assert result.failure.kind == kind, result.failure.message
    with pytest.raises(AssertionError):
        run_printed(result, folder)()
    return dict(zip(result.failure.call.names, result.failure.call.inputs, strict=True))


# -- planted bugs ----------------------------------------------------------------------------------


def test_bounds_of_ragged_sizes(tmp_path: Path) -> None:
    result = fuzzed(ops.ragged, ops.doubled)
    assert failing(result, "findings", tmp_path)["x"].shape == (1,)
    assert {finding.kind for finding in result.failure.findings} >= {"bounds"}


def test_wrong_for_sizes_that_are_no_multiple(tmp_path: Path) -> None:
    x = failing(fuzzed(ops.multiples, ops.sums), "mismatch", tmp_path)["x"]
    assert x.shape == (1, 33)
    assert x.layout == "contiguous" and x.dtype == ferrule.float32


def test_threadgroups_of_another_size(tmp_path: Path) -> None:
    assert other_threadgroups(ops.eight_groups) == (128, 64, 32)
    result = fuzzed(ops.eight_groups, ops.sums)
    x = failing(result, "findings", tmp_path)["x"]
    assert x.shape == (1, 0)
    assert result.failure.call.threadgroup in (128, 64, 32)
    assert "with_threadgroup(eight_groups, " in result.test


def test_threadgroups_that_are_asked_for(tmp_path: Path) -> None:
    op = ferrule.op(
        "halves", "x[N]:float32 -> y[N]:float32",
        metal="uint i = threadgroup_position_in_grid.x * 64 + thread_position_in_threadgroup.x;"
        " y[i] = x[i];",
        grid="N", threadgroup=64,
    )  # fmt: skip
    assert fuzzed(op).failure is None
    x = failing(fuzzed(op, threadgroups=(16,)), "findings", tmp_path)["x"]
    assert x.shape == (17,)


def test_strides(tmp_path: Path) -> None:
    x = failing(fuzzed(ops.strides_ignored, ops.plus_one), "mismatch", tmp_path)["x"]
    assert x.layout not in ("contiguous", "offset")
    assert math.prod(x.shape) <= 4


def test_optional_input_that_is_absent(tmp_path: Path) -> None:
    def added(x: Any, bias: Any) -> Any:
        return x if bias is None else x + bias

    inputs = failing(fuzzed(ops.bias_taken_for_granted, added), "mismatch", tmp_path)
    assert inputs["bias"] is None
    assert math.prod(inputs["x"].shape) == 1


def test_reads_of_an_input_that_is_absent(tmp_path: Path) -> None:
    op = ferrule.op(
        "reads_absent", "x[N]:float32, bias[N]:float32? -> y[N]:float32",
        metal="uint i = thread_position_in_grid.x; y[i] = has_bias ? x[i] : x[i] + bias[0];",
        grid="N", threadgroup=32,
    )  # fmt: skip
    result = fuzzed(op)
    assert failing(result, "findings", tmp_path)["bias"] is None
    assert [finding.kind for finding in result.failure.findings] == ["bounds"]


def test_indices_need_a_range(tmp_path: Path) -> None:
    assert failing(fuzzed(ops.rows), "findings", tmp_path)["index"].shape == (1,)
    for index in ("0..V-1", lambda sizes: st.integers(0, sizes["V"] - 1)):
        assert fuzzed(ops.rows, ops.rows_of, inputs={"index": index}, examples=30).failure is None


def test_race_without_reference(tmp_path: Path) -> None:
    op = ferrule.op(
        "last", "x[N]:float32 -> y[1]:float32 where N > 0",
        metal="y[0] = x[thread_position_in_grid.x];", grid="N", threadgroup=32,
    )  # fmt: skip
    result = fuzzed(op)
    assert failing(result, "findings", tmp_path)["x"].shape == (2,)
    assert result.failure.findings[0].kind == "race"


def test_order_of_threads(tmp_path: Path) -> None:
    """What atomics order is no race, and yet the threads' order shows."""
    op = ferrule.op(
        "order", "x[N]:uint32 -> y[N]:uint32, count[1]:uint32",
        metal="""
            uint place = atomic_fetch_add_explicit(&count[0], 1u, memory_order_relaxed);
            atomic_store_explicit(&y[place], thread_position_in_grid.x, memory_order_relaxed);
        """,
        grid="N", threadgroup=32, atomic_outputs=True, init_value=0,
    )  # fmt: skip
    result = fuzzed(op)
    assert failing(result, "mismatch", tmp_path)["x"].shape == (2,)
    assert "opposite order" in result.failure.message


def test_what_does_not_compile(tmp_path: Path) -> None:
    op = ferrule.op(
        "shifted", "x[N]:T -> y[N]:T where T in (int32, float32)",
        metal="y[thread_position_in_grid.x] = x[thread_position_in_grid.x] << 1;",
        grid="N", threadgroup=32,
    )  # fmt: skip
    result = fuzzed(op)
    assert result.failure is not None and result.failure.kind == "error"
    assert result.failure.call.inputs[0].dtype == ferrule.float32
    with pytest.raises(ferrule.CompileError):
        run_printed(result, tmp_path)()


def test_implementations_are_compared(tmp_path: Path) -> None:
    op = ferrule.op(
        "both", "x[N]:float32 -> y[N]:float32",
        metal="uint i = thread_position_in_grid.x; y[i] = i < 40 ? x[i] : 0;",
        reference=lambda x: x, grid="N", threadgroup=256,
    )  # fmt: skip
    x = failing(fuzzed(op), "mismatch", tmp_path)["x"]
    assert x.shape == (41,)


def test_written_in_place(tmp_path: Path) -> None:
    def wrong(x: Any, by: int) -> None:
        x *= x.dtype.type(by + (by == 3))

    inputs = failing(fuzzed(ops.in_place, wrong), "mismatch", tmp_path)
    assert inputs["by"] == 3 and inputs["x"].shape == (1,)


def test_outputs_that_are_there_in_some_calls(tmp_path: Path) -> None:
    op = ferrule.op(
        "some", "x[N]:T, w[N]:T? -> y[N]:T, d[N]:T if w",
        metal="""
            uint i = thread_position_in_grid.x;
            y[i] = x[i];
            if (has_w && has_d) { y[i] = x[i] * w[i]; d[i] = w[i]; }
        """,
        grid="N", threadgroup=64,
    )  # fmt: skip
    right = fuzzed(op, lambda x, w: (x, None) if w is None else (x * w, w), examples=20)
    assert right.failure is None
    result = fuzzed(op, lambda x, w: (x, None) if w is None else (x * w, w + w))
    assert failing(result, "mismatch", tmp_path)["w"].shape == (1,)
    assert result.failure.mismatch.output == "d"
    assert "[1]" in result.test


def test_complex_numbers(tmp_path: Path) -> None:
    op = ferrule.op(
        "squares", "x[N]:complex64 -> y[N]:complex64",
        metal="uint i = thread_position_in_grid.x; y[i] = x[i] * x[i];", grid="N", threadgroup=64,
    )  # fmt: skip
    assert fuzzed(op, lambda x: x * x, examples=20).failure is None
    assert failing(fuzzed(op, np.conj), "mismatch", tmp_path)["x"].shape == (1,)


# -- what is right ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("op", "reference"),
    [
        (ops.not_ragged, ops.doubled),
        (ops.whole_rows, ops.sums),
        (ops.any_groups, ops.sums),
        (ops.strides_obeyed, ops.plus_one),
        (ops.with_bias, ops.biased),
        (ops.unpacked, ops.unpack),
        (ops.in_place, ops.multiply),
        (ops.broadcast, np.add),
    ],
    ids=lambda value: getattr(value, "name", ""),
)
@pytest.mark.parametrize("compared", ["with a reference", "with each other"])
def test_nothing_is_wrong(op: ferrule.Op, reference: Any, compared: str) -> None:
    result = fuzzed(op, reference if "reference" in compared else None, examples=40)
    assert result.failure is None, result.failure and result.failure.message
    assert result.test == "" and result.examples >= 20
    assert not result.refused


def test_sums_that_cancel_out_do_not_fail() -> None:
    """Where large numbers cancel each other out, the order of additions shows in all digits."""
    op = ferrule.op(
        "backwards", "x[N]:float32 -> y[1]:float32",
        metal="float sum = 0; for (int i = N - 1; i >= 0; --i) sum += x[i]; y[0] = sum;",
        grid=1, threadgroup=1,
    )  # fmt: skip
    inputs = {"x": st.sampled_from([1e4, -1e4, 0.1])}

    def forwards(x: Any) -> Any:
        return np.cumsum(x, dtype=np.float32)[-1:] if x.size else np.zeros(1, np.float32)

    assert fuzzed(op, forwards, inputs=inputs).failure is None
    assert fuzzed(op, forwards, inputs=inputs, rtol=0, atol=0).failure is not None


def test_infinities_are_drawn_on_request() -> None:
    def marked(x: Any) -> Any:
        return np.where(np.isfinite(x), 2 * x, 0)

    assert fuzzed(ops.not_ragged, marked).failure is None
    assert fuzzed(ops.not_ragged, marked, nonfinite=True).failure is not None


# -- calls -----------------------------------------------------------------------------------------

RULES = [
    "x[N]:T -> y[N]:T",
    "x[*S,D]:T, w[D]:U=bfloat16? -> y[*S,D]:T where T in (int32, bool), U in (bfloat16, complex64)",
    "a[M,K]:float16, b[K,N]:float16 -> c[M,N]:float16 where K % 32 == 0, N % 8 == 0, M <= 4",
    "x[H,W]:uint8, k:int32 -> y[H-k+1,W]:uint8 where H >= k, k > 0",
    "q[B,H,D]:T, kv[B,G,D]:T -> y[B,H,D]:T where H % G == 0, G > 0, D in_range",
    "x[*S]:T, y[*R]:T -> z[*broadcast(S,R)]:T",
    "x[N,K//16]:float8_e8m0fnu, w[K]:T -> y[N]:T where K % 16 == 0, K >= 64",
]


@pytest.mark.parametrize("rule", [rule.replace(", D in_range", "") for rule in RULES])
def test_rules_take_what_is_drawn(rule: str) -> None:
    op = ferrule.op("drawn", rule, run=lambda *inputs: None)
    shapes = set()

    @settings(max_examples=60, database=None, deadline=None)
    @given(Draws(op, {}, {}, False, ()).strategy())
    def check(call: Any) -> None:
        inputs = [value if isinstance(value, Recipe) else None for value in call.inputs]
        kinds = [value and value.dtype.name for value in inputs]
        pairs = zip(op.rule.inputs, inputs, call.inputs, strict=True)
        sizes = [v.shape if v else None if n is None else () for _, v, n in pairs]
        numbers = {n: dict(zip(call.names, call.inputs, strict=True))[n] for n in op.rule.numbers}
        op.rule.bind("drawn", sizes, kinds, numbers=numbers)
        shapes.add(tuple(sizes))

    check()
    assert len(shapes) >= 12


kinds = st.sampled_from([d for d in dtypes.ALL if d.name != "float8_e8m0fnu"])
fills = st.builds(
    Fill,
    st.sampled_from(["counting", "integers", "uniform", "choice", "normal"]),
    st.integers(0, 9),
    st.integers(0, 2),
    st.integers(2, 5),
    st.just((0.0, -0.0, 1.0, float("inf"), float("nan"), 3.0)),
)


@given(
    st.lists(st.integers(0, 4), max_size=3).map(tuple), kinds, fills, st.sampled_from(LAYOUTS),
    st.integers(0, 2),
)  # fmt: skip
@settings(deadline=None, max_examples=300)
def test_text_makes_the_same_array(
    shape: tuple[int, ...], dtype: Any, fill: Fill, layout: str, axis: int
) -> None:
    layout = layout if len(shape) else "contiguous"
    recipe = Recipe(shape, dtype, fill, layout, min(axis, max(len(shape) - 1, 0)))
    array, again = recipe.array(), recipe.array()
    assert array.shape == shape and array.dtype == dtype.numpy
    texts = [recipe.text()]
    if layout == "contiguous":
        texts += [recipe._constructed(), *recipe._written()]
    for text in texts:
        with np.errstate(all="ignore"):
            made = eval(text, {"np": np, "ml_dtypes": ml_dtypes})
        assert made.shape == shape and made.dtype == array.dtype
        assert made.strides == array.strides or 0 in shape
        np.testing.assert_array_equal(made.tobytes(), again.tobytes())


def test_literals() -> None:
    numbers = [1.5, -math.inf, math.nan, True, 3, complex(1, math.inf)]
    written = recipes.literal(numbers)
    assert written == "[1.5, -np.inf, np.nan, True, 3, complex(1.0, np.inf)]"


def test_with_threadgroup() -> None:
    x = np.ones((3, 50), np.float32)
    for threads in (32, 64, 512):
        assert with_threadgroup(ops.any_groups, threads)(x).tolist() == [50, 50, 50]
    assert other_threadgroups(ops.not_ragged) == ()  # nothing in its body depends on it
    two = ferrule.op("two", "x[N]:T -> y[N]:T", metal="y[0] = x[0];", grid=1, threadgroup=(8, 2))
    with pytest.raises(ferrule.KernelError, match="declare one as a number of threads along x"):
        with_threadgroup(two, 32)


# -- tests that are printed ------------------------------------------------------------------------


def test_pytest_runs_what_is_printed(tmp_path: Path) -> None:
    """As a file of its own, with the op and the reference imported."""
    result = fuzzed(ops.multiples, ops.sums)
    assert "from fuzzed_ops import multiples, sums" in result.test
    (tmp_path / "test_printed.py").write_text(result.test)
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "test_printed.py"],
        capture_output=True, text=True, timeout=120, cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": ":".join([str(FOLDER), *sys.path])},
    )  # fmt: skip
    assert done.returncode == 1, done.stdout + done.stderr
    assert "1 failed" in done.stdout and "Not equal to tolerance" in done.stdout


def test_printed_test_passes_once_the_op_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result = fuzzed(ops.multiples, ops.sums)
    monkeypatch.setattr(ops, "multiples", ops.whole_rows)
    run_printed(result, tmp_path)()


def test_op_without_a_module_is_written_out(tmp_path: Path) -> None:
    op = ops.by_fours("i + 4")
    result = fuzzed(op)
    assert "ferrule.Op.from_json(" in result.test
    failing(result, "findings", tmp_path)


# -- limits and errors -----------------------------------------------------------------------------


def test_seed_draws_the_same() -> None:
    assert fuzzed(ops.ragged).test == fuzzed(ops.ragged).test


def test_time_limit() -> None:
    """No call is begun after that."""
    assert fuzzed(ops.not_ragged, seconds=1e-9).examples == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"inputs": {"z": "0..1"}}, "has no input 'z', but x"),
        ({"inputs": {"x": "0"}}, "the range '0' of input 'x': there is no '..'"),
        ({"inputs": {"x": "0..Q"}}, "Q is no dim of the op"),
        ({"dtypes": {"T": ["float32"]}}, "one of the op's dtype variables (it has none)"),
        ({"examples": 0}, "`examples`: got 0, expected 1 or more"),
        ({"ignore": ("races",)}, "'races' is no kind of finding. Did you mean 'race'?"),
    ],
)
def test_errors(arguments: Any, message: str) -> None:
    with pytest.raises(ferrule.KernelError) as caught:
        ferrule.fuzz(ops.not_ragged, **arguments)
    assert message in str(caught.value)


def test_kernel_without_a_rule_is_refused() -> None:
    kernel = ferrule.metal_kernel("k", ["x"], ["y"], "y[0] = x[0];")
    with pytest.raises(ferrule.KernelTypeError, match="expected an op: calls are drawn from"):
        ferrule.fuzz(kernel)


def test_reference_that_raises() -> None:
    def broken(x: Any) -> Any:
        raise ZeroDivisionError("no")

    with pytest.raises(ferrule.KernelError, match="the reference raised ZeroDivisionError: no"):
        fuzzed(ops.not_ragged, broken)


def test_op_that_refuses_all() -> None:
    op = ferrule.op(
        "refuses", "x[N]:float32 -> y[N]:float32 where N > 0", metal="y[0] = x[0];",
        grid="N", threadgroup="N-N",
    )  # fmt: skip
    with pytest.raises(ferrule.KernelError, match="refused all"):
        fuzzed(op, examples=10)


def test_rule_without_sizes() -> None:
    op = ferrule.op(
        "none", "x[N]:float32 -> y[N]:float32 where N > 5, N < 3", metal="y[0] = x[0];",
        grid="N", threadgroup=32,
    )  # fmt: skip
    with pytest.raises(ferrule.KernelError, match="no sizes were found that the rule"):
        fuzzed(op)


def test_without_hypothesis(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hypothesis", None)
    with pytest.raises(ferrule.KernelError, match=r"pip install 'ferrule\[fuzz\]'"):
        fuzzed(ops.not_ragged)
