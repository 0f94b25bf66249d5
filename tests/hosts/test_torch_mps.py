"""Ops on Apple's GPUs: what torch is told to compile and to launch. Nothing here runs Metal.

A stand-in for ``torch.mps.compile_shader`` reads the signature in the text, and compares each
argument with the buffer of its number: kind, dtype, and the bytes that torch makes of a number.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ferrule
from ferrule import CompileError, DeviceError, KernelError, Op, dtypes
from ferrule.hosts.torch import arrays as host
from ferrule.hosts.torch import mps as torch_mps
from ferrule.source.metal import prelude as metal_prelude

I = "uint i = thread_position_in_grid.x; "  # noqa: E741
INCLUDE = Path(ferrule.__file__).parent / "include"
_NATIVE = Path(__file__).parents[1] / "native"
TYPES = {kind.metal: host.TORCH[kind.name] for kind in dtypes.ALL if kind.level0}
TYPES |= {"int": torch.int32}
# By torch's csrc/mps/Module.cpp: what it makes of a number, as the bytes that the kernel sees.
CASTS = {"fp16": torch.float16, "bf16": torch.bfloat16, "int32": torch.int32,
         "int16": torch.int16, "int8": torch.int8, "uint8": torch.uint8}  # fmt: skip
_BUFFER = re.compile(r"  (.+?)([*&]) (\w+) \[\[buffer\((\d+)\)\]\]")


class Kernel:
    """A stand-in for what torch makes of a text; keeps what it is launched with."""

    max_threads_per_threadgroup = 1024

    def __init__(self, source: str, name: str) -> None:
        self.source = source
        signature = source[source.index(f"void {name}(") :].split(") {\n")[0]
        self.buffers = [(m[1], m[2], m[3]) for m in _BUFFER.finditer(signature)]
        assert [int(m[4]) for m in _BUFFER.finditer(signature)] == [*range(len(self.buffers))]
        self.launches: list[tuple[dict[str, Any], Any, Any]] = []

    def __call__(self, *args: Any, threads: Any, group_size: Any, arg_casts: Any) -> None:
        assert len(args) == len(self.buffers)
        assert all(type(n) is int and n > 0 for n in (*threads, *group_size))
        assert len(threads) == len(group_size) == 3
        seen = {}
        for i, ((kind, mark, name), value) in enumerate(zip(self.buffers, args, strict=True)):
            words = kind.replace("atomic<", "").replace(">", "").split()
            expected = TYPES[words[-1]]
            if isinstance(value, torch.Tensor):
                assert i not in arg_casts and value.dtype == expected
                assert mark == "*" or value.ndim == 0
                if mark == "*" and words[0] == "const":
                    assert (words[1] == "constant") == (value.numel() < 8), name
                seen[name] = value
                continue
            assert (mark == "*") == (type(value) is list)
            seen[name] = as_torch_would(value, arg_casts.get(i), expected)
        self.launches.append((seen, threads, group_size))


def as_torch_would(value: Any, cast: str | None, expected: torch.dtype) -> Any:
    """A number as the kernel sees it, by way of an int64 or float."""
    element = value[0] if isinstance(value, list) else value
    assert type(element) in (int, float)
    first = torch.tensor(value, dtype=torch.int64 if type(element) is int else torch.float32)
    made = first if cast is None else first.to(CASTS[cast])
    assert made.element_size() == expected.itemsize
    return made.view(expected).tolist()


class Library:
    def __init__(self, source: str) -> None:
        self._source = source
        self._kernels: dict[str, Kernel] = {}

    def __getattr__(self, name: str) -> Kernel:
        if name not in self._kernels:
            self._kernels[name] = Kernel(self._source, name)
        return self._kernels[name]


@pytest.fixture(autouse=True)
def apple(monkeypatch: pytest.MonkeyPatch) -> None:
    """CPU tensors are taken for tensors on mps."""
    monkeypatch.setattr(torch.mps, "compile_shader", Library)
    monkeypatch.setattr(torch_mps, "_kernels", {})
    monkeypatch.setattr(host, "device_name", lambda tensor: "mps:0")
    for name in ("empty", "full"):
        real = getattr(torch, name)
        on_cpu = lambda *a, real=real, device=None, **k: real(*a, **k)  # noqa: E731
        monkeypatch.setattr(torch, name, on_cpu)


def call(op: Op, *values: Any) -> Any:
    """A call as torch's dispatcher makes it for tensors on mps."""
    op.torch_op  # noqa: B018
    return op._operator.run(*values)


def launched() -> tuple[Kernel, dict[str, Any], Any, Any]:
    """The one kernel, and what it was launched with last."""
    (kernel,) = torch_mps._kernels.values()
    return kernel, *kernel.launches[-1]


def test_the_text_is_mlxs_after_what_that_needs() -> None:
    body = I + "y[i] = metal::exp(x[i]);"
    op = ferrule.op("e", "x[*S]:T -> y[*S]:T", metal=body, grid="x.size", threadgroup=256)
    x = torch.ones(3, 4)
    y = call(op, x)
    assert y.shape == (3, 4) and y.dtype == torch.float32
    kernel, seen, threads, group = launched()
    assert seen["x"] is x and seen["y"] is y
    assert (threads, group) == ((12, 1, 1), (12, 1, 1))
    alone = ferrule.metal_kernel("e", ["x"], ["y"], body)
    text = alone.text(
        "metal", inputs=[x], output_dtypes=[torch.float32], template=[("T", torch.float32)]
    )
    assert kernel.source == metal_prelude.stand_alone(text)
    assert kernel.source.endswith(f'#line 1 "kernel"\n{text}')
    assert "#include <metal_stdlib>" in kernel.source
    call(op, torch.ones(5, 4))
    assert len(torch_mps._kernels) == 1  # sizes make no kernel
    call(op, torch.ones(5, 1))
    assert len(torch_mps._kernels) == 2  # but fewer than 8 elements do


def test_arguments_of_every_kind_in_order() -> None:
    numbers = {kind.name: kind for kind in dtypes.ALL if kind.kind in "buif" and kind.level0}
    declared = ", ".join(f"n_{name}:{name}" for name in numbers)
    op = ferrule.op(
        "all", f"x[N,K]:T, b[K]:T?, z[]:T, c[N]:int32!, {declared} -> y[N]:T, w[K]:T",
        metal="y[0] = x_shape[0] + x_strides[1] + x_ndim + c[0] + K + N; if (has_b) w[0] = b[0];",
        grid=("N", "K"), threadgroup=(8, 4), ensure_row_contiguous=False, init_value=2,
    )  # fmt: skip
    values = {"bool": True, "uint8": 255, "uint16": 65535, "uint32": 2**32 - 1,
              "uint64": 2**64 - 1, "int8": -128, "int16": -(2**15), "int32": -(2**31),
              "int64": -(2**63), "float16": 0.5, "bfloat16": 1.5, "float32": 3}  # fmt: skip
    x, z = torch.arange(12.0).reshape(3, 4).t(), torch.tensor(7.0)
    c = torch.zeros(4, dtype=torch.int32)
    y, w = call(op, x, None, z, c, *(values[name] for name in numbers))
    assert y.tolist() == [2] * 4 and w.tolist() == [2] * 3
    kernel, seen, threads, group = launched()
    assert [name for _, _, name in kernel.buffers] == [
        "x", "x_shape", "x_strides", "x_ndim", "b", "z", *(f"n_{name}" for name in numbers),
        "N", "K", "y", "w", "c",
    ]  # fmt: skip
    assert seen["x"].data_ptr() == x.data_ptr() and seen["x"].stride() == (1, 4)
    assert (seen["x_shape"], seen["x_strides"], seen["x_ndim"]) == ([4, 3], [1, 4], 2)
    assert seen["b"].shape == (1,) and seen["z"] is z and (seen["N"], seen["K"]) == (4, 3)
    assert {name: seen[f"n_{name}"] for name in numbers} == values
    assert seen["y"] is y and seen["w"] is w and seen["c"] is c
    assert (threads, group) == ((4, 3, 1), (4, 3, 1))


@given(
    st.lists(st.integers(1, 4), max_size=4), st.sampled_from(sorted(TYPES)), st.booleans(),
    st.sets(st.sampled_from(["x_shape", "x_strides", "x_ndim"])), st.booleans(),
)  # fmt: skip
@settings(max_examples=50, deadline=None)
def test_any_input(
    shape: list[int], kind: str, contiguous: bool, named: set[str], transposed: bool
) -> None:
    torch_mps._kernels.clear()
    op = ferrule.op(
        "any", "x[*S]:T -> y[*S]:T", metal=f"y[0] = x[0]; /* {' '.join(sorted(named))} */",
        grid="x.size", threadgroup=32, ensure_row_contiguous=contiguous,
    )  # fmt: skip
    x = torch.zeros(shape, dtype=TYPES[kind])
    x = x.permute(tuple(reversed(range(x.ndim)))) if transposed else x
    call(op, x)
    _, seen, threads, _ = launched()
    assert seen["x"].shape == x.shape and threads[0] == x.numel()
    if contiguous:
        assert seen["x"].is_contiguous()
    if x.ndim:
        expected = {"x_shape": [*x.shape], "x_strides": [*seen["x"].stride()], "x_ndim": x.ndim}
        assert {name: seen[name] for name in named} == {n: expected[n] for n in named}


def test_what_is_written_in_place_to_a_copy_is_brought_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    op = ferrule.op("p", "c[N]:T!, v[N]:T ->", metal=I + "c[i] = v[i];", grid="N", threadgroup=8)
    whole = torch.zeros(8)
    monkeypatch.setattr(
        Kernel, "__call__", lambda self, v, c, **_: c.copy_(v)  # what the body does
    )  # fmt: skip
    assert call(op, whole[::2], torch.arange(4.0)) is None
    assert whole.tolist() == [0, 0, 1, 0, 2, 0, 3, 0]


def test_grids_without_threads_launch_nothing() -> None:
    op = ferrule.op("e", "x[N]:T -> y[N]:T", metal="y[0] = x[0];", grid="N", threadgroup=8)
    assert call(op, torch.ones(0)).shape == (0,)
    assert not torch_mps._kernels
    op = ferrule.op("e", "x[N]:T -> y[1]:T", metal="y[0] = x[0];", grid="N", threadgroup=8)
    with pytest.raises(KernelError, match="runs no thread"):
        call(op, torch.ones(0))


def test_a_python_function_runs_as_it_is() -> None:
    op = ferrule.op("r", "x[N]:T -> y[N]:T", run=lambda x: x + 1)
    assert call(op, torch.ones(2)).tolist() == [2, 2]


def test_what_apple_cannot_do_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones(20)
    double = ferrule.op(
        "d", "x[N]:float32 -> y[N]:float64", metal="y[0] = x[0];", grid="N", threadgroup=8
    )
    with pytest.raises(KernelError, match="op 'd' has arguments of float64, which Metal has not"):
        call(double, x)
    cuda = ferrule.op("c", "x[N]:T -> y[N]:T", cuda="y[0] = x[0];", grid="N", threadgroup=8)
    with pytest.raises(DeviceError, match="nothing that runs on 'mps:0'"):
        call(cuda, x)
    wide = ferrule.op("w", "x[N]:T -> y[N]:T", metal="y[0] = x[0];", grid="N", threadgroup=16)
    monkeypatch.setattr(Kernel, "max_threads_per_threadgroup", 8)
    with pytest.raises(DeviceError, match=r"`threadgroup` of op 'w' is \(16, 1, 1\).* 8 threads"):
        call(wide, x)
    kernel = ferrule.metal_kernel("k", ["x"], ["y"], "y[0] = x[0];")
    monkeypatch.setattr(host, "stream", lambda given, device: 0)
    with pytest.raises(DeviceError, match="for ops alone: declare one with"):
        kernel(inputs=[x], grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[(1,)],
               output_dtypes=[torch.float32])  # fmt: skip


def test_what_the_compiler_refuses_is_said_in_its_words(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(source: str) -> Any:
        assert source.isascii()  # torch reads it so
        raise SyntaxError("kernel:4:1: error: unknown type name 'What'")

    monkeypatch.setattr(torch.mps, "compile_shader", refuse)
    op = ferrule.op(
        "s", "x[N]:T -> y[N]:T", metal="y[0] = x[0]; // µ", grid="N", threadgroup=8
    )  # fmt: skip
    with pytest.raises(CompileError, match=r"kernel 's'.*\n.*unknown type name 'What'"):
        call(op, torch.ones(2))


def test_ops_have_a_kernel_for_mps() -> None:
    op = ferrule.op(
        "k", "x[N]:T -> y[N]:T", metal="y[0] = x[0];", grid="N", threadgroup=8, autocast="cast"
    )
    name = op.torch_op.name()
    for key in ("MPS", "AutocastMPS"):
        assert torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
    raw = f"{name}_raw"
    assert torch._C._dispatch_has_kernel_for_dispatch_key(raw, "MPS")


def test_the_page_says_that_it_was_never_run() -> None:
    page = Path(__file__).parents[2].joinpath("docs", "pytorch.md").read_text(encoding="utf-8")
    section = page.split("## Apple's GPUs\n")[1].split("\n## ")[0]
    assert "never run on Apple hardware" in section
    (block,) = re.findall(r"^```python\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    subprocess.run([sys.executable, "-c", f"{block}\nassert y.shape == (2, 3)"], check=True)


# -- the words of MLX -----------------------------------------------------------------------------

_PROGRAM = r"""
#include <cstdio>
#include "types.h"
#include "math.h"
#include "functions.h"
#include "atomic.h"
#define device
#define thread
#define threadgroup
#define constant
#define FR_SPACES(X) X()
namespace fr {
namespace metal {
#define FR_STUB(name) template <class T> T name(T v, ushort) { return v; }
FR_STUB(simd_shuffle) FR_STUB(simd_shuffle_up) FR_STUB(simd_shuffle_down) FR_STUB(simd_shuffle_xor)
#define FR_STUB_FILL(name) template <class T> T name(T v, T, ushort) { return v; }
FR_STUB_FILL(simd_shuffle_and_fill_up) FR_STUB_FILL(simd_shuffle_and_fill_down)
#define FR_STUB_SUM(name) template <class T> T name(T v) { return v; }
FR_STUB_SUM(simd_sum) FR_STUB_SUM(simd_product) FR_STUB_SUM(simd_min) FR_STUB_SUM(simd_max)
FR_STUB_SUM(simd_prefix_inclusive_sum) FR_STUB_SUM(simd_prefix_exclusive_sum)
FR_STUB_SUM(simd_prefix_inclusive_product) FR_STUB_SUM(simd_prefix_exclusive_product)
}
PRELUDE
}
using namespace fr;
using namespace fr::metal;
int main() {
  int shape[4] = {2, 3, 4, 5};
  int64_t a[4] = {-60, 20, 5, 1}, b[4] = {1, 2, 6, 24}, c[4] = {0, 1, 0, 3};
  LoopedElemToLoc<1> one(4);
  LoopedElemToLoc<3> three(4);
  LoopedElemToLoc<1, int64_t, false> flat(1);
  for (int i = 0; i < 120; i += 1 + i % 5) {
    uint3 at(i % 5, i / 5 % 4, i / 20);
    auto two = elem_to_loc_2_nd<int64_t>(at, shape, a, b, 4);
    auto all = elem_to_loc_3_nd<int64_t>(at, shape, a, b, c, 4);
    int64_t places[] = {elem_to_loc<int64_t>(i, shape, a, 4), elem_to_loc(at, shape, b, 4), two.x,
                        two.y, all.x, all.z, int64_t(one.location()), int64_t(three.location()),
                        flat.location(), elem_to_loc_1(i, a[2]), elem_to_loc_2(uint2(i, 3), a),
                        elem_to_loc_3(at, b)};
    for (int64_t place : places) std::printf("%ld ", long(place));
    std::printf("\n");
    one.next(1 + i % 5, shape, b); three.next(1 + i % 5, shape, b); flat.next(shape, a);
  }
  complex64_t z(1.5f, -2.0f), w(0.5f, 3.0f), v = z;
  v += w; v *= z; v -= 1; v /= w;
  complex64_t many[] = {z + w, z - w, z * w, z / w, z * 2.0f, 3.0f - z, -z, v, complex64_t(2),
                        z % w, w % 2, 7.0f % z, Limits<complex64_t>::min};
  for (complex64_t k : many) std::printf("%.6g %.6g %d%d%d %.6g\n", k.real, k.imag, k < z, k >= w,
                                         k == z + w, float(k));
  float sizes[] = {0, 1e-9f, -0.25f, 3, 1e30f, -1, INFINITY};
  for (float x : sizes) std::printf("%.6g %.6g\n", log1p(x), float(log1p(half(x))));
  std::printf("%g %g %g %g %d %d\n", Limits<float>::max, Limits<float>::finite_min,
              float(Limits<bfloat>::finite_max), float(Limits<half>::min), Limits<int>::max,
              int(Limits<bool>::max));
  std::printf("%d %d %d %d %d\n", ceildiv(7, 2), int(ceildiv(8u, 4)), WorkPerThread<half>::n,
              REDUCE_N_READS, int(bfloat16_to_uint16(uint16_to_bfloat16(77))));
  std::printf("%d %d %d %d\n", int(cast_to<bool>(1e-45f)), int(cast_to<bool>(-0.0f)),
              cast_to<int>(2.75f), int(cast_to<bool>(complex64_t(0.0f, 1.0f))));
#if OURS
  std::printf("%g %g %ld %d\n", float(metal::exp(bfloat(1.0f))),
              float(metal::max(bfloat(1), bfloat(2))), long(fr::simd_shuffle(int64_t(-5), 1)),
              int(fr::simd_shuffle(true, 1)));
#else
  std::printf("2.71875 2 -5 1\n");
#endif
}
"""


@pytest.mark.skipif(not shutil.which("g++"), reason="there is no g++")
def test_the_words_of_mlx_mean_what_they_mean_elsewhere(tmp_path: Path) -> None:
    """include/mlx.metal as C++, after the dialect's header in place of Metal's, against mlx.h."""
    every = "bfloat complex Limits elem_to_loc log1p cast_to simd_sum"
    ours = metal_prelude.stand_alone(f"// {every}\n").rsplit("#line", 1)[0]
    ours = (
        re.sub(r"#include <.*>", "", ours)
        .replace("typedef half", "//")
        .replace("typedef bfloat", "//")
    )
    found = []
    for name, prelude in (("ours", ours), ("theirs", '}\n#include "mlx.h"\nnamespace fr {')):
        source = tmp_path / f"{name}.cpp"
        source.write_text(_PROGRAM.replace("PRELUDE", prelude))
        options = ["-std=c++20", "-w", "-O1", "-ffp-contract=off", f"-I{INCLUDE}"]
        options += [f"-DOURS={int(name == 'ours')}", "-o", str(tmp_path / name)]
        done = subprocess.run(["g++", *options, str(source)], capture_output=True, text=True)
        assert not done.returncode, done.stderr[:3000]
        found.append(subprocess.run([tmp_path / name], capture_output=True, text=True).stdout)
    assert found[0] == found[1]
    assert found[0].count("\n") > 50


# Each of the words, used as bodies use them.
_WORDS = """
    complex64_t v = z[i];
    v += z[i]; v *= 3; v = v / z[i] - complex64_t(x[i]) % 2;
    LoopedElemToLoc<3> l(4);
    l.next(x_shape, x_strides); l.next(3, x_shape, x_strides);
    LoopedElemToLoc<1, int64_t, false> m(1);
    m.next(x_shape, x_strides);
    uint3 at = thread_position_in_grid;
    int64_t place = elem_to_loc(at, x_shape, x_strides, x_ndim) + l.location() + m.location()
        + elem_to_loc<int64_t>(i, x_shape, x_strides, x_ndim) + elem_to_loc_1(i, x_strides[0])
        + elem_to_loc_2(at.xy, x_strides) + elem_to_loc_3(at, x_strides)
        + elem_to_loc_2_nd(at, x_shape, x_strides, x_strides, 4).x
        + elem_to_loc_3_nd(at, x_shape, x_strides, x_strides, x_strides, 4).z;
    if (cast_to<bool>(v) && v < z[i] && has_b) place += ceildiv(N, 2) + n;
    T t = x[place] + simd_shuffle(int64_t(5), 1) + simd_shuffle_up(v == 2, 1) + s;
    t += Limits<float>::max + Limits<complex64_t>::min.real + WorkPerThread<T>::n + log1p(t);
    y[place] = t + REDUCE_N_READS;
    bfloat16_t h = uint16_to_bfloat16(3);
    h = metal::exp(h); h = metal::max(h, metal::precise::sqrt(h)); h = simd_max(h);
    w[i] = simd_shuffle_down(v * float(h), 1) + simd_sum(h);
    w[i] = z[i]; w[i] = 1.0f;"""


def clang() -> list[str] | None:
    if shutil.which("clang"):
        return ["clang"]
    return [sys.executable, "-m", "ziglang", "clang"] if find_spec("ziglang") else None


@pytest.mark.skipif(clang() is None, reason="there is no clang")
def test_a_compiler_with_address_spaces_reads_the_text(tmp_path: Path) -> None:
    """OpenCL C++ has Metal's address spaces, and clang reads it."""
    op = ferrule.op(
        "words", "x[N,K]:T, z[N]:complex64, b[N]:T?, s:float32, n:int32 -> y[N]:T, w[N]:complex64",
        metal=I + _WORDS, grid="N", threadgroup=8, ensure_row_contiguous=False,
    )  # fmt: skip
    call(op, torch.ones(20, 4), torch.ones(20, dtype=torch.complex64), torch.ones(20), 1.0, 2)
    text = launched()[0].source
    # What Metal writes as a call, OpenCL writes as a cast.
    text = re.sub(r"\b(vec<IdxT, \d>|float2)\((?=elem|v\.)", r"(\1)(", text)
    text = re.sub(r"#include <.*>|\[\[[^\]]*\]\]", "", text)
    (tmp_path / "opencl-c-base.h").write_text("")  # clang includes it by itself
    source = tmp_path / "kernel.clcpp"
    source.write_text(f'#include "{_NATIVE / "metal_words.h"}"\n{text}')
    options = ["-target", "spir64", "-x", "cl", "-cl-std=clc++", "-fsyntax-only", "-w"]
    done = subprocess.run(
        [*clang(), *options, f"-I{tmp_path}", str(source)], capture_output=True, text=True
    )
    assert not done.returncode, done.stderr[:3000]
