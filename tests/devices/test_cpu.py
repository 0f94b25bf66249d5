"""The CPU device: how launches are run, what is kept, and what a kernel may do wrong."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
import warnings
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import ferrule
from ferrule.devices.cpu import program as cpu

pytestmark = pytest.mark.optimised

F32 = np.dtype(np.float32)


def run(source: str, *inputs: Any, n: int = 64, shape: Any = None, **options: Any) -> Any:
    """One call over ``n`` threads with inputs x0, x1 … and the output y."""
    kernel = ferrule.metal_kernel(
        "k", [f"x{i}" for i in range(len(inputs))], ["y"], source, options.pop("header", "")
    )
    call = {
        "inputs": list(inputs),
        "output_shapes": [shape or (n,)],
        "output_dtypes": [options.pop("dtype", F32)],
        "grid": (n, 1, 1),
        "threadgroup": (min(n, 256), 1, 1),
        **options,
    }
    (y,) = kernel(**call)
    return y


def mode(source: str, header: str = "", threadgroup: Any = (256, 1, 1)) -> str:
    """How a kernel with one float input runs."""
    kernel = ferrule.metal_kernel("k", ["x"], ["y"], source, header)
    return kernel.compile(
        "cpu", inputs=["float32[1024]"], output_dtypes=[F32], output_shapes=[(1024,)],
        grid=(1024, 1, 1), threadgroup=threadgroup,
    ).mode  # fmt: skip


def test_modes() -> None:
    barrier = "threadgroup_barrier(mem_flags::mem_threadgroup);"
    assert mode("y[0] = x[0];") == "flat"
    assert mode("y[0] = simd_sum(x[0]);") == "split by simdgroups"
    assert mode(f"threadgroup float t[4]; t[0] = 1; {barrier} y[0] = t[0];") == (
        "split by threadgroups"
    )
    assert mode(f"threadgroup float t[4]; t[0] = 1; {barrier} y[0] = t[0];", "", (32, 1, 1)) == (
        "split by simdgroups"
    )
    assert mode("bool b = x[0] > 0 || simd_any(x[1] > 0); y[0] = b;").startswith("fibers (")
    own = "struct N { float a; N(const N&) = delete; N& operator=(const N&) = delete;"
    own += " N(float v) : a(v) {} }; inline N made(float v) { return N(v); }"
    assert mode("N n{x[0]}; y[0] = simd_sum(n.a) + n.a;", own) == "split by simdgroups"
    assert mode("auto n = made(x[0]); y[0] = simd_sum(n.a) + n.a;", own).startswith(
        "fibers (the split text does not compile: source line 1: "
    )
    helper = "inline float f(float v) { return simd_sum(v); }"
    assert mode("y[0] = f(x[0]);", helper) == "split by simdgroups"
    assert mode("y[0] = x[0];", helper) == "flat"  # nobody calls it


def test_how_kernels_run_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("DEBUG", "ferrule"):
        assert mode("y[0] = simd_min(x[0]);") == "split by simdgroups"
    assert caplog.messages == ["kernel 'k' runs on the CPU as: split by simdgroups"]


@given(
    st.integers(-(2**31), 2**31 - 1),
    st.integers(-(2**31), 2**31 - 1).filter(bool),
    st.sampled_from(["int32", "uint32"]),
    st.sampled_from(["int32", "uint32"]),
)
@settings(max_examples=300, deadline=None)
def test_prepared_divisors(a: int, b: int, left: str, right: str) -> None:
    """Quotients by what is uniform are C++'s own, for every sign and type."""
    x = np.array([a & 0xFFFFFFFF], np.uint32).view(left)
    d = np.array(b & 0xFFFFFFFF, np.uint32).view(right)
    if int(d) == -1 and int(x[0]) == -(2**31):
        return  # undefined in C++
    kernel = ferrule.metal_kernel(
        f"divide_{left}_{right}", ["x", "d"], ["q", "r"],
        f"uint i = thread_position_in_grid.x; auto v = x[i]; {right}_t n = d;"
        " q[i] = long(v / n); r[i] = long(v % n);",
    )  # fmt: skip
    q, r = kernel(
        inputs=[x, d], output_shapes=[(1,), (1,)], output_dtypes=[np.dtype(np.int64)] * 2,
        grid=(1, 1, 1), threadgroup=(1, 1, 1),
    )  # fmt: skip
    m, n = int(x[0]), int(d)
    if "uint32" in (left, right):
        m, n = m & 0xFFFFFFFF, n & 0xFFFFFFFF
    want = abs(m) // abs(n) * (1 if (m < 0) == (n < 0) else -1)
    assert int(q[0]) == want
    assert int(r[0]) == m - want * n


@pytest.mark.parametrize("columns", [1, 3, 15, 16, 17, 64, 1000])
def test_rows(columns: int) -> None:
    """A body that divides its x into rows is run row by row, whatever the rows' length."""
    n = 5000
    y = run(
        "uint i = thread_position_in_grid.x; uint row = i / x0, column = i % x0;"
        " if (column == 1) return; y[i] = row * 1000 + column;",
        np.array(columns, np.uint32), n=n, dtype=np.dtype(np.uint32), init_value=7,
    )  # fmt: skip
    i = np.arange(n)
    want = np.where(i % columns == 1, 7, i // columns * 1000 + i % columns)
    np.testing.assert_array_equal(y, want)


def test_reading_outside_an_array_reads_something() -> None:
    x = np.ones(1 << 18, F32)
    # 16 TiB lower nothing is mapped; nearer there may be guard pages, which cannot be read at all.
    y = run("uint i = thread_position_in_grid.x; y[i] = x0[long(i) - (1l << 42)];", x, n=1 << 18)
    np.testing.assert_array_equal(y, np.zeros_like(x))
    y = run("uint i = thread_position_in_grid.x; y[i] = x0[i];", x, n=1 << 18)
    np.testing.assert_array_equal(y, x)


@pytest.mark.parametrize("way", ["auto", "fibers"])
@pytest.mark.parametrize("sync", ["", "y[i] = simd_sum(x0[i]);"])
@pytest.mark.parametrize(
    ("index", "said"),
    # 16 TiB lower nothing is mapped. 128 TiB higher is no address, or nothing is mapped there:
    # x86's processors tell only of addresses which one they did not find.
    [
        ("i - (1ul << 42)", r"\d+ bytes before"),
        ("i + (1ul << 45)", r"at an address|\d+ bytes past"),
    ],
)
def test_writing_outside_memory_is_an_error(way: str, sync: str, index: str, said: str) -> None:
    x = np.ones(4096, F32)
    source = f"uint i = thread_position_in_grid.x; {sync} y[{index}] = x0[i];"
    with cpu.running(way):
        with pytest.raises(
            ferrule.DeviceError, match=f"kernel 'k' .* outside its arrays, ({said})"
        ):
            run(source, x, n=4096)
        np.testing.assert_array_equal(
            run("y[thread_position_in_grid.x] = 2;", n=64), np.full(64, 2, F32)
        )


@pytest.mark.parametrize("way", ["auto", "fibers"])
def test_an_index_gigabytes_away_that_nobody_reaches(way: str) -> None:
    """A linker has no room for it; found by the fuzzer (seed 730618)."""
    body = (
        "uint l = thread_index_in_threadgroup; threadgroup int t[10]; y[l] = 7;"
        " if (1u + l >= 1u) return; t[l] = -3; int v = t[1u]; y[1] = v;"
    )
    with cpu.running(way):
        y = run(body, n=4, dtype=np.dtype(np.int32))
    np.testing.assert_array_equal(y, [7, 7, 7, 7])


@pytest.mark.parametrize("kind", ["int8", "uint8", "int16", "uint16", "int32", "uint32", "int64"])
def test_an_integer_division_by_zero_raises_nothing(kind: str) -> None:
    """Metal leaves the value open and goes on; what is right elsewhere stays right."""
    d = np.array([0, 1, 2, 0, 3, 0, 4, 5, 0] * 9, kind)  # more than a loop is unrolled by
    source = "uint i = thread_position_in_grid.x; auto a = x0[0]; a = 120;"
    want = 120 // np.where(d == 0, 1, d)
    y = run(source + " y[i] = a / x0[i];", d, n=len(d), dtype=d.dtype)
    np.testing.assert_array_equal(y[d != 0], want[d != 0])
    y = run(source + " y[i] = a % x0[i];", d, n=len(d), dtype=d.dtype)
    np.testing.assert_array_equal(y[d != 0], (120 % np.where(d == 0, 1, d))[d != 0])


@pytest.mark.parametrize("kind", ["int8", "int32", "int64"])
def test_the_least_integer_divided_by_minus_one_is_itself(kind: str) -> None:
    """Also where the processor traps, as where it multiplies instead."""
    least = np.iinfo(kind).min
    divisors = ["x0[i]", "x0[2 * i]", "x0[0]", "x0[7 - i / 8]", "a", "N"]
    lines = [f"y[{2 * k} * 40 + i] = v / {by}; y[{2 * k + 1} * 40 + i] = v % {by};"
             for k, by in enumerate(divisors)]  # fmt: skip
    source = f"uint i = thread_position_in_grid.x; auto a = x0[i], v = x1[i]; {''.join(lines)}"
    x0, x1 = np.full(80, -1, kind), np.full(40, least, kind)
    for before in ("", " if (simd_max(i) > 99) y[0] = 0;"):
        for way in ("auto", "fibers") if before else ("auto",):
            with cpu.running(way):
                y = run(source + before, x0, x1, n=40, shape=(12, 40), dtype=x0.dtype,
                        template=[("N", -1)])  # fmt: skip
            np.testing.assert_array_equal(y, np.full((12, 40), [[least], [0]] * 6, kind))


@pytest.mark.parametrize("by", ["N", "0", "(N - N)"])
@pytest.mark.parametrize("value", ["x0[i]", "simd_sum(x0[i])"])
def test_an_integer_division_by_a_zero_that_the_compiler_sees(by: str, value: str) -> None:
    x = np.arange(8, dtype=np.int32)
    source = f"int i = thread_position_in_grid.x; int v = {value}; y[i] = i == 99 ? v / {by} : v;"
    y = run(source, x, n=8, dtype=x.dtype, template=[("N", 0)])
    np.testing.assert_array_equal(y, x if value == "x0[i]" else np.full(8, 28))
    run(f"int i = thread_position_in_grid.x; y[i] = x0[i] % {by};", x, n=8, dtype=x.dtype,
        template=[("N", 0)])  # fmt: skip


def _child(code: str, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], env={**os.environ, **env},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip


def test_faults_outside_kernels_go_where_they_went() -> None:
    """A segmentation fault of someone else's still ends the process, by its signal."""
    done = _child("""
        import ctypes, numpy as np, ferrule
        k = ferrule.metal_kernel("k", ["x"], ["y"], "y[0] = x[0];")
        x = np.ones(1, np.float32)
        k(inputs=[x], output_shapes=[(1,)], output_dtypes=[x.dtype], grid=(1, 1, 1),
          threadgroup=(1, 1, 1))
        ctypes.string_at(16)
    """)
    assert done.returncode == -signal.SIGSEGV


def test_fork_after_the_first_launch() -> None:
    """The child of a fork launches kernels, old ones and new ones."""
    x = np.arange(100_000, dtype=F32)
    body = "uint i = thread_position_in_grid.x; y[i] = x0[i] + {};"
    want = run(body.format(1), x, n=x.size)
    reader, writer = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # pytest may have threads
        child = os.fork()
    if child == 0:
        ok = False
        try:
            same = np.array_equal(run(body.format(1), x, n=x.size), want)
            ok = same and np.array_equal(run(body.format(2), x, n=x.size), want + 1)
        finally:
            os.write(writer, b"1" if ok else b"0")
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        assert pipe.read() == b"1"
    os.waitpid(child, 0)


@pytest.mark.parametrize("threads", [1, 2])
def test_a_long_launch_can_be_interrupted(threads: int) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(f"""
            import numpy as np, ferrule
            ferrule.set_threads({threads})
            k = ferrule.metal_kernel("k", ["x"], ["y"], '''
                float s = 0;
                for (uint j = 0; j < 1000u; ++j) s += metal::sin(s + x[0]);
                y[thread_position_in_grid.x % 8] = s;
            ''')
            call = dict(inputs=[np.ones(8, np.float32)], output_shapes=[(8,)],
                        output_dtypes=[np.dtype(np.float32)], threadgroup=(32, 1, 1))
            k(grid=(32, 1, 1), **call)
            print("ready", flush=True)
            try:
                k(grid=(2_000_000_000, 1, 1), **call)
            except KeyboardInterrupt:
                print("interrupted", flush=True)
            print(k(grid=(32, 1, 1), **call)[0].shape)
        """)],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(0.5)
    process.send_signal(signal.SIGINT)
    out, _ = process.communicate(timeout=240)
    assert out == "interrupted\n(8,)\n"


def test_an_interrupted_compilation_leaves_nothing(tmp_path: Path) -> None:
    """Ctrl-C while a kernel compiles: KeyboardInterrupt, no child, no scratch, then it works."""
    compiler = tmp_path / "slow"
    compiler.write_text(
        f'#!/bin/sh\ncase "$*" in *kernel.cpp*) touch {tmp_path}/started; sleep 60;; esac\n'
        'exec g++ "$@"\n'
    )
    compiler.chmod(0o755)
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    code = f"""
        import numpy as np, ferrule, pathlib, sys
        k = ferrule.metal_kernel("k", ["x"], ["y"], "y[0] = x[0] + 41;")
        x = np.ones(1, np.float32)
        call = dict(inputs=[x], output_shapes=[(1,)], output_dtypes=[x.dtype], grid=(1, 1, 1),
                    threadgroup=(1, 1, 1))
        ferrule.set_compiler({str(compiler)!r})
        try:
            k(**call)
        except KeyboardInterrupt:
            ferrule.set_compiler("g++")
            print(k(**call)[0][0], sorted(p.name for p in pathlib.Path({str(scratch)!r}).iterdir()))
    """
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(code)],
        env={**os.environ, "FERRULE_CACHE_DIR": str(tmp_path / "cache"), "TMPDIR": str(scratch)},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    for _ in range(600):
        if (tmp_path / "started").exists():
            break
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert out.split("[")[0].strip() == "42.0", err
    assert out.strip().endswith("[]"), out


def test_a_warm_process_runs_no_compiler_and_parses_nothing(tmp_path: Path) -> None:
    code = """
        import sys, numpy as np, ferrule
        k = ferrule.metal_kernel("k", ["x"], ["y"], "y[0] = simd_sum(x[0]);")
        x = np.ones(1, np.float32)
        k(inputs=[x], output_shapes=[(1,)], output_dtypes=[x.dtype], grid=(1, 1, 1),
          threadgroup=(1, 1, 1))
        import json
        print(json.dumps([m in sys.modules for m in ("subprocess", "tree_sitter")]))
    """
    folder = str(tmp_path / "cache")
    assert json.loads(_child(code, FERRULE_CACHE_DIR=folder).stdout) == [True, True]
    assert json.loads(_child(code, FERRULE_CACHE_DIR=folder).stdout) == [False, False]


def test_portability_is_said_on_a_warm_start_too(tmp_path: Path) -> None:
    code = """
        import warnings, numpy as np, ferrule
        k = ferrule.metal_kernel("k", ["x"], ["y"], "double d = x[0];\\ny[0] = d;")
        x = np.ones(1, np.float32)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            for _ in range(2):
                k(inputs=[x], output_shapes=[(1,)], output_dtypes=[x.dtype], grid=(1, 1, 1),
                  threadgroup=(1, 1, 1))
        print([str(w.message) for w in said])
    """
    folder = str(tmp_path / "cache")
    cold, warm = (_child(code, FERRULE_CACHE_DIR=folder).stdout for _ in range(2))
    assert cold == warm
    assert "kernel 'k', source line 1: the type double runs here" in cold
    assert cold.count("double") == 1


@pytest.mark.parametrize("way", ["auto", "fibers"])
def test_threadgroup_memory_beyond_apples_limit(way: str) -> None:
    source = "threadgroup float a[4096];\nthreadgroup float b[4097], c;\n" + (
        "uint i = thread_position_in_threadgroup.x; a[i] = i; b[i] = 1; c = 2;\n"
        "threadgroup_barrier(mem_flags::mem_threadgroup);\n y[i] = a[63 - i] + b[i] + c;"
    )
    call: dict[str, Any] = {
        "inputs": [], "output_shapes": [(64,)], "output_dtypes": [F32],
        "grid": (64, 1, 1), "threadgroup": (64, 1, 1),
    }  # fmt: skip
    with cpu.running(way):
        kernel = ferrule.metal_kernel(f"large_{way}", [], ["y"], source)
        with pytest.warns(ferrule.PortabilityWarning, match=r"line 2: 32776 bytes of threadgroup"):
            (y,) = kernel(**call)
        np.testing.assert_array_equal(y, np.arange(63, -1, -1) + 3)
        strict = ferrule.metal_kernel(f"large_{way}", [], ["y"], source, portable=True)
        with pytest.raises(ferrule.DialectError, match=r"line 2: 32776 bytes.*portable=True"):
            strict(**call)


def test_one_kernel_from_many_threads() -> None:
    """Compiled once, run by all, right in each."""
    x = np.arange(10_000, dtype=F32)
    kernel = ferrule.metal_kernel(
        "many", ["x", "s"], ["y"],
        "uint i = thread_position_in_grid.x; y[i] = x[i] * s + simd_sum(1.0f);",
    )  # fmt: skip
    results: dict[int, NDArray[np.float32]] = {}

    def work(n: int) -> None:
        for _ in range(20):
            (results[n],) = kernel(
                inputs=[x, n], output_shapes=[x.shape], output_dtypes=[F32],
                grid=(x.size, 1, 1), threadgroup=(64, 1, 1),
            )  # fmt: skip

    threads = [threading.Thread(target=work, args=(n,)) for n in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    whole = x.size // 64 * 64
    for n, y in results.items():
        np.testing.assert_array_equal(y[:whole], x[:whole] * n + 32)


def test_compile_errors_quote_the_author() -> None:
    with pytest.raises(ferrule.CompileError) as caught:
        run("uint i = thread_position_in_grid.x;\n\n  y[i] = x0[i] + nothing(half2(1, 2).yx);",
            np.ones(64, F32))  # fmt: skip
    text = str(caught.value)
    assert "kernel 'k' does not compile" in text
    assert "source line 3" in text
    assert "| y[i] = x0[i] + nothing(half2(1, 2).yx);" in text
    with pytest.raises(ferrule.CompileError, match=r"header line 2: .*\n.*\| int g\(\) { return z"):
        run("y[0] = g();", np.ones(64, F32), header="\nint g() { return z; }")


def test_an_input_without_dims_is_a_value() -> None:
    x, two = np.ones(64, F32), np.array(2, F32)
    hint = r"Input 'x1' has no dims, and so is a value in Metal, not a pointer: write x1 for"
    for body in ("y[0] = x0[0] * x1[0];", "y[0] = x0[0] * *x1;", "y[0] = x0[0] *\n  x1 [0];"):
        for value in (two, 2.0):
            with pytest.raises(ferrule.CompileError, match=hint) as caught:
                run(body, x, value)
            assert str(caught.value).count("has no dims") == 1
    with pytest.raises(ferrule.CompileError) as caught:
        run("y[0] = x0[0] * x1 + nothing;", x, two)
    assert "has no dims" not in str(caught.value)
    with pytest.raises(ferrule.CompileError) as caught:
        run("y[0] = x0[0] * x1[0] + nothing;", x, np.ones(1, F32))
    assert "has no dims" not in str(caught.value)


def test_text_compiles_nothing() -> None:
    kernel = ferrule.metal_kernel("k", ["x"], ["y"], "this is no C++")
    text = kernel.text("cpu", inputs=["float32[8]"], output_dtypes=[F32])
    assert "this is no C++" in text


DEEP = {
    "else if": "if (i == 1000) y[i] = 1;"
    + "".join(f" else if (i == {k}) y[i] = {k};" for k in range(700)),
    "sum": "y[i] = " + " + ".join(["1"] * 3000) + ";",
    "brackets": "y[i] = " + "(" * 200 + "i" + ")" * 200 + ";",
    "ifs": "if (i < 100) { " * 200 + "y[i] = 7;" + " }" * 200,
}


@pytest.mark.parametrize("name", DEEP)
@pytest.mark.parametrize("sync", ["", "float f = simd_sum(1.0f);"])
def test_deep_bodies(name: str, sync: str) -> None:
    i = np.arange(8)
    want = {"else if": i, "sum": np.full(8, 3000), "brackets": i, "ifs": np.full(8, 7)}[name]
    y = run(f"uint i = thread_position_in_grid.x; {sync} {DEEP[name]}", n=8)
    np.testing.assert_array_equal(y, want.astype(F32))


def test_a_body_that_is_too_deep_is_an_error_of_the_kernel() -> None:
    source = "uint i = thread_position_in_grid.x; y[i] = " + "(" * 3000 + "i" + ")" * 3000 + ";"
    for text in (source, source + " y[i] += simd_sum(1.0f);"):
        with contextlib.suppress(ferrule.DialectError, ferrule.CompileError):
            run(text, n=8)


def test_warnings_point_at_the_call() -> None:
    kernel = ferrule.metal_kernel(
        "far_away", [], ["y"], "\n\nuint i = 0; y[i];", atomic_outputs=True
    )
    with pytest.warns(
        ferrule.PortabilityWarning, match="source line 3: atomics on float16"
    ) as caught:
        kernel(
            inputs=[], output_shapes=[(1,)], output_dtypes=[np.float16], grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
        )  # fmt: skip
    assert caught[0].filename == __file__


def test_writing_an_input_is_said_in_words() -> None:
    with pytest.raises(ferrule.CompileError, match="assignment to 'x0', which is an input"):
        run("x0[thread_position_in_grid.x] = 1;", np.ones(8, F32), n=8)


@pytest.mark.parametrize(
    "text", ["raytracing::ray r;", "tensor<device float, dextents<int, 2>> t;"]
)
def test_ray_tracing_and_tensors_are_refused(text: str) -> None:
    with pytest.raises(ferrule.DialectError, match="source line 2"):
        run(f"uint i = 0;\n{text} y[i] = 1;", n=8)


def test_devices_that_there_are_not() -> None:
    kernel = ferrule.metal_kernel("k", [], ["y"], "y[0] = 1;")
    with pytest.raises(ferrule.KernelTypeError, match="device: got None"):
        kernel.text(cast(Any, None), inputs=[], output_dtypes=[np.float32])
    with pytest.raises(ferrule.DeviceError, match="compiled by MLX"):
        kernel.compile("metal", inputs=[], output_dtypes=[np.float32])


@pytest.mark.parametrize("other", ["", "y[i] = float(half(1));", "y[i] = simd_sum(1.0f);"])
@pytest.mark.parametrize(
    "text",
    [
        "x0[1] >> ((thread_index_in_simdgroup < 29u ? 1u : i >> 5) & 7u)",
        "x0[1] >> ((thread_position_in_grid.x < 29u ? 1u : i >> 5) & 7u)",
        "x0[1] >> (j < 29u ? 1u : i > (5u))",
        "x0[1] >> (c.x < 29u ? 1u : i > (5u))",
        "x0[1] >> at(i < 29u ? 1u : i >> 5)",
    ],
)
def test_a_comparison_is_no_template(text: str, other: str) -> None:
    """The parser takes `a < b ? c : d >` for a template with its argument."""
    source = (
        f"uint i = thread_position_in_grid.x, j = i; uint2 c = uint2(i, j); {other} y[i] = {text};"
    )
    y = run(
        source, np.array([0, 34], np.int32), n=16, header="inline uint at(uint p) { return p; }"
    )
    np.testing.assert_array_equal(y, np.full(16, 17, F32))
