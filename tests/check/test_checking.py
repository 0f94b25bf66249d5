"""`ferrule.checking` as people use it: hosts, compiled functions, threads, what hangs."""

from __future__ import annotations

import os
import platform
import threading
import warnings
from typing import Any

import numpy as np
import pytest

import ferrule
from ferrule.devices import protocol as devices
from ferrule.errors import KernelError

OUTSIDE = """uint i = thread_position_in_grid.x;
y[i] = x[i + 1];
"""


def op(name: str = "shifted", source: str = OUTSIDE, **more: Any) -> Any:
    return ferrule.op(
        name, "x[N]:float32 -> y[N]:float32", metal=source, grid="N", threadgroup=32, **more
    )


def kernel(source: str, header: str = "", name: str = "k", **more: Any) -> Any:
    return ferrule.metal_kernel(name, ["x"], ["y"], source, header, **more)


def call(size: int = 64, group: int = 32, dtype: str = "float32", **more: Any) -> dict[str, Any]:
    return {
        "inputs": [np.arange(size).astype(dtype)],
        "grid": (size, 1, 1),
        "threadgroup": (group, 1, 1),
        "output_shapes": [(size,)],
        "output_dtypes": [dtype],
        **more,
    }


def told(findings: Any) -> list[tuple[str, int | None]]:
    return [(finding.kind, finding.line) for finding in findings]


def test_one_call_is_checked() -> None:
    assert told(op().check(np.ones(8, np.float32))) == [("bounds", 2)]
    (finding,) = kernel(OUTSIDE).check(**call())
    assert finding.message == (
        "reads x[64], 1 element past its end: 'x' (float32[64]) has 64 elements."
    )
    assert (finding.thread, finding.threadgroup) == ((31, 0, 0), (1, 0, 0))
    assert finding.launch == "grid (64, 1, 1), threadgroup (32, 1, 1), x float32[64], y float32[64]"
    assert finding.file is not None and finding.file.endswith("test_checking.py")


@pytest.mark.parametrize("library", ["numpy", "torch", "mlx.core"])
def test_repeated_calls_are_checked(library: str) -> None:
    """Calls like earlier ones are made in C, by memos that checks go around."""
    there = pytest.importorskip(library)
    make = there.tensor if library == "torch" else there.array
    x = make(np.ones(8, np.float32))
    shifted = op(f"shifted_{library.partition('.')[0]}")
    for _ in range(3):
        shifted(x)
    for _ in range(2):
        assert told(shifted.check(x)) == [("bounds", 2)]


def test_compiled_functions_of_torch() -> None:
    torch = pytest.importorskip("torch")
    shifted = op("shifted_compiled")
    compiled = torch.compile(lambda x: shifted(x) * 2, fullgraph=True)
    x = torch.ones(8)
    for _ in range(2):
        with ferrule.checking() as findings:
            compiled(x)
        assert told(findings) == [("bounds", 2)]
        compiled(x)


def test_compiled_functions_of_mlx() -> None:
    mx = pytest.importorskip("mlx.core")
    shifted = op("shifted_mlx")
    compiled = mx.compile(lambda x: shifted(x) * 2)
    mx.eval(compiled(mx.ones(8)))
    with ferrule.checking() as findings:
        y = compiled(mx.ones(8))
    mx.eval(y)
    assert told(findings) == [("bounds", 2)]
    with ferrule.checking() as findings, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that vmap calls it once per element
        mx.eval(mx.vmap(shifted)(mx.ones((2, 8))))
    assert told(findings) == [("bounds", 2)]


def test_derivatives_are_checked() -> None:
    torch = pytest.importorskip("torch")
    double = op("double", "uint i = thread_position_in_grid.x; y[i] = 2 * x[i];")
    double.def_vjp(
        ferrule.op(
            "double_vjp",
            "x[N]:float32, cotangent[N]:float32 -> x_grad[N]:float32",
            metal="uint i = thread_position_in_grid.x;\nx_grad[i] = 2 * cotangent[i + 1];",
            grid="N",
            threadgroup=32,
        )
    )
    with ferrule.checking() as findings:
        double(torch.ones(8, requires_grad=True)).sum().backward()
    assert [(f.kernel, f.kind, f.line) for f in findings] == [("double_vjp", "bounds", 2)]


def test_selections() -> None:
    shifted, x = op("picked"), np.ones(8, np.float32)
    for options, found in (
        ({"kinds": ["bounds"]}, 1),
        ({"kinds": ["race"]}, 0),
        ({"ignore": ["bounds"]}, 0),
        ({"kernels": ["pick*"]}, 1),
        ({"kernels": ["other"]}, 0),
    ):
        with ferrule.checking(**options) as findings:
            shifted(x)
        assert len(findings) == found, options
    assert not op("excused", OUTSIDE.replace(";\n", "; // ferrule: ignore[bounds]\n")).check(x)


@pytest.mark.parametrize("option", [{"kinds": ["bound"]}, {"sample": 0}, {"time_limit": -1}])
def test_wrong_options(option: dict[str, Any]) -> None:
    with pytest.raises(KernelError), ferrule.checking(**option):
        pass
    assert devices.watcher is None


def test_threadgroups_are_sampled() -> None:
    with ferrule.checking(sample=2) as findings:
        kernel(OUTSIDE)(**call(1024))
    assert told(findings) == [("bounds", 2)]
    assert findings.notes == ["kernel 'k': 2 of 32 threadgroups were checked."]


@pytest.mark.parametrize(
    "loop",
    [
        "uint v = uint(x[0]) * 2u; while (v != 1u) { v = v * 3u + 2u; v &= ~1u; } y[0] = v;",
        "while (atomic_load_explicit((device atomic_int*)&y[0], memory_order_relaxed) != 7) {}",
        "float v = x[0]; for (;;) { v = simd_sum(v) * 0.0f; if (v == 1) break; } y[0] = v;",
    ],
)
def test_what_hangs_is_found(loop: str) -> None:
    with ferrule.checking(time_limit=1, ignore=["uninitialised"]) as findings:
        kernel(f"uint i = thread_position_in_grid.x;\n{loop}")(**call(32, init_value=0))
    (finding,) = findings
    # A loop without accesses may have no line of its own in the machine code.
    assert finding.kind == "divergence" and finding.line in (2, None)
    assert "does not end" in finding.message


def test_results_that_depend_on_threadgroups() -> None:
    body = "y[thread_position_in_grid.x] = simd_sum(x[thread_position_in_grid.x]) + {};"
    with ferrule.checking(stress=True) as findings:
        kernel(body.format("threadgroup_position_in_grid.x"))(**call())
    assert told(findings) == [("lanes", None)]
    with ferrule.checking(stress=True) as findings:
        kernel(body.format("1"))(**call())
    assert not findings


def test_stores_of_the_same_value() -> None:
    body = "if (x[thread_position_in_grid.x] > 3) y[0] = 1;"
    for same_values, found in ((False, []), (True, [("race", 1)])):
        with ferrule.checking(same_values=same_values) as findings:
            kernel(body)(**call(output_shapes=[(1,)], init_value=0))
        assert told(findings) == found


def test_a_line_has_one_finding_that_names_all_arrays() -> None:
    pair = ferrule.metal_kernel(
        "pair", ["a", "b"], ["y"], "uint i = thread_position_in_grid.x; y[i] = a[i + 1] + b[i + 2];"
    )
    x = np.ones(8, np.float32)
    (finding,) = pair.check(inputs=[x, x], grid=(8, 1, 1), threadgroup=(8, 1, 1),
                            output_shapes=[(8,)], output_dtypes=["float32"])  # fmt: skip
    assert finding.message.endswith("The same line does so with b.") or finding.message.endswith(
        "The same line does so with a."
    )


def test_each_output_that_is_not_written_is_told() -> None:
    pair = ferrule.metal_kernel("pair", ["x"], ["a", "b"], "a[0] = x[0]; b[1] = x[1];")
    shapes: dict[str, Any] = {"output_shapes": [(4,), (4,)], "output_dtypes": ["float32"] * 2}
    for _ in range(2):
        found = pair.check(
            inputs=[np.ones(2, np.float32)], grid=(1, 1, 1), threadgroup=(1, 1, 1), **shapes
        )
        assert told(found) == [("unwritten", None)] * 2


def test_a_barrier_that_orders_something_else_is_named() -> None:
    (finding,) = kernel(
        "threadgroup float t[32];\nuint i = thread_position_in_threadgroup.x;\nt[i] = x[i];\n"
        "threadgroup_barrier(mem_flags::mem_none);\ny[thread_position_in_grid.x] = t[31 - i];\n"
    ).check(**call())
    assert (finding.kind, finding.line, finding.other_line) == ("race", 5, 3)
    assert "without mem_flags::mem_threadgroup" in finding.message
    assert finding.other_text == "t[i] = x[i];"


def test_structs_may_have_bytes_that_nobody_writes() -> None:
    padded = kernel(
        "threadgroup P t[32];\nuint i = thread_position_in_threadgroup.x;\n"
        "t[i].v = x[i]; t[i].h = half(1);\nthreadgroup_barrier(mem_flags::mem_threadgroup);\n"
        "P p = t[31 - i]; y[thread_position_in_grid.x] = p.v + p.h;",
        "struct P { float v; half h; };",
    )
    assert not padded.check(**call())


@pytest.mark.parametrize(
    "body",
    [
        "y[i] = x[i] > 2 ? NAN : x[i];",
        "float s = 1 / (x[i] - x[i]); y[i] = x[i] > 2 ? -INFINITY : min(s, 1.0f);",
        "y[i] = as_type<float>(0x7fc00000u);",
    ],
)
def test_what_the_author_writes_is_not_made(body: str) -> None:
    assert not kernel(f"uint i = thread_position_in_grid.x; {body}").check(**call())


def test_arrays_that_are_absent_look_as_without_a_check() -> None:
    look = ferrule.op(
        "look", "x[N]:float32, b[N,M]:float32?, n[N,M]:int32 -> y[4]:int32",
        metal="y[0] = b_ndim; y[1] = b_shape[0]; y[2] = int(b_strides[0]); y[3] = has_b;",
        grid=1, threadgroup=1,
    )  # fmt: skip
    given = np.ones(2, np.float32), None, np.ones((2, 3), np.int32)
    unchecked = look(*given)
    with ferrule.checking() as findings:
        np.testing.assert_array_equal(look(*given), unchecked)
    assert not findings


def test_two_threads_check_at_once() -> None:
    found: dict[int, Any] = {}
    both = threading.Barrier(2)

    def check(size: int) -> None:
        both.wait()
        with ferrule.checking() as findings:
            both.wait()
            kernel(OUTSIDE, name=f"k{size}")(**call(size))
            both.wait()
        found[size] = [(f.kernel, f.kind) for f in findings]

    threads = [threading.Thread(target=check, args=(size,)) for size in (32, 64)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {32: [("k32", "bounds")], 64: [("k64", "bounds")]}
    assert devices.watcher is None


def test_checks_within_checks() -> None:
    with ferrule.checking() as outer:
        with ferrule.checking() as inner:
            kernel(OUTSIDE, name="inner")(**call())
        kernel(OUTSIDE, name="outer")(**call())
    assert [f.kernel for f in inner] == ["inner"] and [f.kernel for f in outer] == ["outer"]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_after_a_fork() -> None:
    shifted = kernel(OUTSIDE)
    assert shifted.check(**call())
    child = os.fork()
    if child == 0:
        os._exit(0 if told(shifted.check(**call())) == [("bounds", 2)] else 1)
    assert os.waitpid(child, 0)[1] == 0


def test_a_stack_that_overflows() -> None:
    with ferrule.checking() as findings:
        kernel(
            "y[0] = f(uint(x[1]) + 1u);",
            "float f(uint n) { volatile float a[64]; a[n % 64] = n; "
            "return n == 0 ? a[0] : f(n + 1u) + a[n % 64]; }",
        )(**call(8, 8))
    assert findings[0].kind == "bounds" and "stack" in findings[0].message


def test_many_arrays() -> None:
    names = [f"x{i}" for i in range(40)]
    many = ferrule.metal_kernel(
        "many", names, ["y"], "y[0] = " + " + ".join(f"{n}[0]" for n in names) + ";"
    )
    with pytest.warns(ferrule.PortabilityWarning):
        findings = many.check(
            inputs=[np.ones(1, np.float32)] * 40,
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
            output_shapes=[(1,)],
            output_dtypes=["float32"],
        )
    assert not findings


@pytest.mark.parametrize(
    "declared",
    [
        "threadgroup alignas(16) float t[32]",
        "alignas(float4) threadgroup float t[32]",
        "volatile threadgroup float t[32]",
        "threadgroup decltype(x[0] + 1) t[32]",
    ],
)
def test_all_that_may_stand_beside_threadgroup_declares_memory(declared: str) -> None:
    """With and without a check: what stood behind `threadgroup` once made a thread's own array."""
    shift = kernel(f"""{declared};
uint i = thread_position_in_threadgroup.x;
t[i] = x[i];
threadgroup_barrier(mem_flags::mem_threadgroup);
y[i] = t[i + 1];""")
    given = call(32)
    assert (shift(**given)[0][:31] == np.arange(1, 32)).all()
    (finding,) = shift.check(**given)
    assert (finding.kind, finding.line) == ("bounds", 5) and "'t' (32 elements)" in finding.message


def test_columns_are_those_of_the_author() -> None:
    source = """\
threadgroup half t[2][32];
uint i = thread_position_in_grid.x;
uint l = i % 32;
float v, s;
float w[2];
if (i < 60) v = 1;
w[0] = x[i];
t[l / 32][l] = half(w[0]);
s = w[0] + v + w[0];
s = w[0] + w[1] + w[0];
s = w[0] + float(t[l / 32][l + 1]);
y[i] = s + w[0] + x[i + 1];
"""
    found = kernel(source).check(**call())
    upto = {f.line: source.splitlines()[f.line - 1][: f.column] for f in found if f.line}
    assert upto == {
        9: "s = w[0] + v",
        10: "s = w[0] + w[",
        11: "s = w[0] + float(t[l / 32][",
        12: "y[i] = s + w[0] + x[i + 1]",
    }


@pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="x86-64's instructions")
@pytest.mark.parametrize(
    ("expression", "told"),
    [
        ("(x[i] - x[0]) / (x[0] - x[i])", "It computes 0 / 0."),
        ("x[i + 1] / (x[i] - x[i])", "It computes 1 / 0."),
        ("-3.5f / x[2 * i - i]", "It computes -3.5 / 0."),
        ("(x[i] + 1) * 2e38f * 3", "It computes 2e+38 * 3."),
        ("(x[i] - 3e38f) - 2e38f", "It computes -3e+38 - 2e+38."),
        ("float(half(x[i]) / half(x[i]))", "It computes 0 / 0."),
        ("metal::log(-1 - x[i])", "Its argument is -1."),
        ("metal::fmod(x[i] + 2, x[i])", "Its arguments are 2 and 0."),
    ],
)
def test_what_makes_a_nan_is_told_with_its_numbers(expression: str, told: str) -> None:
    source = f"uint i = thread_position_in_grid.x;\ny[i] = i == 0 ? {expression} : 0;"
    (finding,) = kernel(source).check(**call())
    assert (finding.kind, finding.line) == ("nan", 2)
    assert finding.message.endswith(f"it is stored to y[0]. {told}")


@pytest.mark.parametrize(
    ("declared", "store", "read", "told"),
    [
        (
            "float t[8][4]",
            "t[i / 4][i % 4] = i",
            "t[i / 4][4]",
            "index 4 of threadgroup memory 't'",
        ),
        ("half t[8][4]", "t[i / 4][i % 4] = i", "t[i / 4][4]", "index 4 of threadgroup memory 't'"),
        ("float4 t[8]", "t[i % 8] = 1", "t[i + 9].x", "reads t[36], 5 elements past its end: "),
        ("float t[32]", "t[i] = i", "t[i + 9]", "reads t[32], 1 element past its end: "),
    ],
)
def test_rows_and_whole_arrays_in_words(declared: str, store: str, read: str, told: str) -> None:
    source = f"""\
threadgroup {declared};
uint i = thread_position_in_grid.x;
{store};
threadgroup_barrier(mem_flags::mem_threadgroup);
y[i] = {read};
"""
    (finding,) = kernel(source).check(**call(32))
    assert (finding.kind, finding.line) == ("bounds", 5)
    assert finding.message.startswith(told)
