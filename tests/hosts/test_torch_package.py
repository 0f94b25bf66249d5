"""Packages: their library of ops against the ops; loaded without ferrule, and in C++."""

from __future__ import annotations

import copy
import math
import shutil
import signal
import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ferrule
import processes
from ferrule import KernelError, Op
from ferrule.operators import package as package_text

torch = pytest.importorskip("torch")
from ferrule.hosts.torch import package as torch_package  # noqa: E402
from ferrule.operators.file import full_name  # noqa: E402
from ferrule.source.cuda import launch as cuda_launch  # noqa: E402
from torch_cpp import run_built, start_build  # noqa: E402

Dim = torch.export.Dim
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::ferrule.PortabilityWarning"),  # of float64
    pytest.mark.skipif(sys.platform != "linux", reason="links torch as Linux does"),
]

I = "uint i = thread_position_in_grid.x; "  # noqa: E741


def op(name: str, rule: str, metal: str, grid: Any, threadgroup: Any = 64, **more: Any) -> Op:
    return ferrule.op(name, rule, metal=metal, grid=grid, threadgroup=threadgroup, **more)


SCALE = op("scale", "x[*S,D]:T, w[D]:T -> y[*S,D]:T", I + "y[i] = x[i] * w[i % D];", "x.size", 256)
AFFINE = op(
    "affine", "x[N,K]:T, b[K]:T?, s:float32, n:int16, flip:bool, big:float64 -> y[N,K]:T",
    I + "T v = x[i] * s + n; if (has_b) v += b[i % K]; y[i] = flip ? -v : v + (big > 1);",
    "y.size", 32,
)  # fmt: skip
PUT = op(
    "put", "cache[B,L,D]:T!, row[B,D]:T, at:int64 -> n[B]:int32",
    I + "cache[(i / D * L + at) * D + i % D] = row[i]; if (i % D == 0) n[i / D] = at + 1;", "B*D",
)  # fmt: skip
ADD = op("add", "c[L]:T!, v[L]:T ->", I + "c[i] += v[i];", "L", 8)
SUMS = op(
    "sums", "x[N]:float32 -> total[1]:float32, count[N//2]:int32",
    I + "atomic_fetch_add_explicit(&total[0], x[i], memory_order_relaxed);",
    "N", 32, atomic_outputs=True, init_value=3,
)  # fmt: skip
BLANK = op(
    "blank", "x[N]:float32 -> a[N]:float16, b[N]:bfloat16, c[N]:int64, d[N]:float64, e[N]:bool",
    "a[0] = 5;", 1, "min(N, 64)", init_value=2.3,
)  # fmt: skip
FILLED = op(
    "filled", "x[N,M]:T -> y[N]:T, z[M]:int8", I + "if (i < y_last) y[i / 3] = x[0];",
    "min(3, y.size)", init_value="y.size", header="constant constexpr uint y_last = 1;",
)  # fmt: skip
ROWS = op(
    "rows", "x[R,C]:float32 -> y[R]:float32",
    """
    threadgroup float part[32];
    float sum = 0;
    for (uint c = thread_position_in_threadgroup.x; c < C; c += threads_per_threadgroup.x)
        sum += x[threadgroup_position_in_grid.x * C + c];
    sum = simd_sum(sum);
    if (thread_index_in_simdgroup == 0) part[simdgroup_index_in_threadgroup] = sum;
    threadgroup_barrier(mem_flags::mem_threadgroup);
    if (thread_position_in_threadgroup.x == 0) {
        float all = 0;
        for (uint s = 0; s < simdgroups_per_threadgroup; s++) all += part[s];
        y[threadgroup_position_in_grid.x] = all;
    }
    """,
    "R * min(C, 100)", "min(C, 100)",
)  # fmt: skip
STRIDED = op(
    "strided", "x[A,B]:T -> y[A,B]:T",
    "uint2 p = thread_position_in_grid.xy; "
    "y[p.y * x_shape[1] + p.x] = x[p.y * x_strides[0] + p.x * x_strides[1]] + x_ndim;",
    ("B", "A"), (8, 4), ensure_row_contiguous=False,
)  # fmt: skip
TILED = op(
    "tiled", "x[N,D]:T -> y[N]:int32", I + "y[i] = TILE + 100 * WIDE;", "N",
    template={"TILE": "D if D <= 8 else 8", "WIDE": "D > 4", "U": True},
)  # fmt: skip
BY_DTYPE = op(
    "by_dtype", "x[N,D]:T -> y[N, D // 2 if T == float16 else D]:int32",
    I + "y[i] = PART * 1000 + threads_per_threadgroup.x;", "y.size",
    "32 if T in (float16, int8) else min(N + 1, 64)", template={"PART": "2 if T != float32 else 1"},
)  # fmt: skip
CUBE = op(
    "cube", "x[A,B,C]:int32 -> y[A,B,C]:int32",
    "uint3 p = thread_position_in_grid; y[(p.z * B + p.y) * C + p.x] = "
    "x[(p.z * B + p.y) * C + p.x] * 2 + int(threads_per_threadgroup.x == 0);",
    ("C", "B", "A"), (4, 3, 2),
)  # fmt: skip
HALVES = op(
    "halves", "x[N]:T, h:float16, g:bfloat16 -> a[2]:float16, b[2]:bfloat16, y[1]:float32",
    "a[0] = h; b[0] = g; y[0] = x[0] * float(h) + float(g);", 1, init_value="N",
)  # fmt: skip
DOUBLED = op(
    "doubled", "x[*S]:T -> y[*S]:T", I + "y[i] = x[i] * 2 + x_ndim;", "x.size", "min(x.size, 64)"
)
HEAD = op(
    "head", "x[N]:T, k:int64, from_end:bool -> y[k]:T, n[k // 2]:int32 where k <= N",
    I + "y[i] = END ? x[N - k + i] : x[i]; if (i < uint(k / 2)) n[i] = threads_per_threadgroup.x;",
    "k", "min(k + 1, 64)", template={"END": "from_end == 1"},
)  # fmt: skip
PLACED = op(
    "placed", "x[N]:float32 -> y[3]:int32",
    I + "y[i] = ON_CPU ? int(threads_per_grid.x) + N : 0;", "3 * min(sm_count, 1) + capability", 1,
    template={"ON_CPU": "device == cpu"},
)  # fmt: skip
PADDED = op(
    "padded", "x[N]:T, m[L]:T?, k[L]:T? -> y[N+L]:T",
    I + "T v = i < uint(N) ? x[i] : T(L); if (has_m && i >= uint(N)) v += m[i - N]; "
    "if (has_k && i >= uint(N)) v -= k[i - N]; y[i] = v;",
    "N + L", "min(L + 1, 64)",
)  # fmt: skip
PLUS = op(
    "plus", "x[*S]:T, y[*R]:T -> z[*broadcast(S,R)]:T",
    I + """
    uint at_x = 0, at_y = 0, step_x = 1, step_y = 1, rest = i;
    for (int d = 1; d <= metal::max(x_ndim, y_ndim); d++) {
        uint n = d <= x_ndim ? x_shape[x_ndim - d] : 1, m = d <= y_ndim ? y_shape[y_ndim - d] : 1;
        uint at = rest % metal::max(n, m);
        if (n > 1) at_x += at * step_x;
        if (m > 1) at_y += at * step_y;
        rest /= metal::max(n, m), step_x *= n, step_y *= m;
    }
    z[i] = x[at_x] + y[at_y];
    """,
    "z.size",
)  # fmt: skip


def chosen(number: int, when: str | None = None) -> Any:
    return ferrule.metal_body(I + f"y[i] = {number};", grid="N", threadgroup=64, when=when)


CHOSEN = ferrule.op(
    "chosen", "x[N]:T -> y[N]:T", metal=[chosen(1, "N % 2 == 0"), chosen(2)],
    run=ferrule.run_function(lambda x: x * 0 + 3, when="N > 5"), prefer="run",
)  # fmt: skip
EMPTY = op("empty", "x[N]:float32 -> y[3]:float32", I + "y[i] = 1;", "min(N, 3)")


class Everything(torch.nn.Module):
    """Calls of all these ops, some with several dtypes."""

    def forward(self, x: Any, w: Any, cache: Any, c: Any, ints: Any) -> Any:
        SCALE(x.double(), w.double())
        ADD(c, w)
        first = AFFINE(x, w, 2.0, 3, False, 1.0), AFFINE(x, None, 2.0, 3, True, 1.0)
        return (
            SCALE(x, w), SCALE(x.half(), w.half()), *first, PUT(cache, x, 1), SUMS(x.select(0, 0)),
            FILLED(x), ROWS(x), STRIDED(x.t()), TILED(x), CUBE(ints), EMPTY(w),
            BLANK(w), HALVES(w, 1.0, 1.0), DOUBLED(x), DOUBLED(x.sum()),
            BY_DTYPE(x), BY_DTYPE(x.half()), HEAD(w, 3, False), HEAD(w, 2, True), PLACED(w),
            PLUS(x, w), PLUS(w, x),
            PADDED(x.select(1, 0), None, w), PADDED(x.select(1, 0), None, None),
            PLUS(x, x.select(1, 0)[:, None]), CHOSEN(w),
        )  # fmt: skip


def overloads(program: Any) -> dict[str, Any]:
    """The ops of a program's package, defined in this process, by their short names."""
    packaged = torch_package._packaged(program, None)
    library = torch_package._library(packaged)
    torch_package._load(library, torch_package.hashlib.sha256(library).hexdigest(), "here")
    return {one.op.name: getattr(torch.ops.ferrule, one.name).default for one in packaged}


@pytest.fixture(scope="module")
def ops() -> dict[str, Any]:
    b = Dim("B", min=1, max=4096)
    inputs = (
        torch.randn(3, 4), torch.randn(4), torch.zeros(3, 5, 4), torch.zeros(4),
        torch.zeros(2, 3, 4, dtype=torch.int32),
    )  # fmt: skip
    shapes = ({0: b}, None, {0: b}, None, {0: Dim("P", min=1), 1: Dim("Q", min=1)})
    return overloads(torch.export.export(Everything(), inputs, dynamic_shapes=shapes))


def both(op: Op, packaged: Any, *values: Any) -> None:
    """Compares an op and its twin of the library, in what they return and what they write."""
    twins = copy.deepcopy(values)  # strides and all
    expected, found = op(*values), packaged(*twins)
    for one in (expected, found), (values, twins):
        torch.testing.assert_close(one[1], one[0], rtol=0, atol=0, equal_nan=True)


sizes = st.one_of(st.integers(0, 70), st.sampled_from([255, 256, 257, 4096]))


@given(sizes, sizes)
@settings(max_examples=30, deadline=None)
def test_every_size(ops: dict[str, Any], n: int, d: int) -> None:
    d %= 300 if n < 300 else 9
    x, w = torch.randn(n, d), torch.randn(d)
    both(SCALE, ops["scale"], x, w)
    both(SCALE, ops["scale"], x.half(), w.half())
    both(SCALE, ops["scale"], x.double(), w.double())
    both(AFFINE, ops["affine"], x, w, 0.5, -7, True, 1.0000001)
    both(AFFINE, ops["affine"], x, None, 2**0.5, 7, False, 0.0)
    both(BY_DTYPE, ops["by_dtype"], x)
    both(BY_DTYPE, ops["by_dtype"], x.half())
    both(ROWS, ops["rows"], torch.randint(9, (n, max(d, 1))).float())
    both(STRIDED, ops["strided"], x.t())
    both(STRIDED, ops["strided"], torch.randn(n, 2 * d + 1)[:, ::2])
    both(CUBE, ops["cube"], torch.randint(9, (n % 7, d % 11, d), dtype=torch.int32))
    both(SUMS, ops["sums"], torch.randint(9, (n,)).float())
    both(HEAD, ops["head"], w, d // 3, True)
    both(HEAD, ops["head"], w, d, False)
    both(PLACED, ops["placed"], w)
    both(DOUBLED, ops["doubled"], x)
    both(DOUBLED, ops["doubled"], torch.tensor(float(n)))
    both(PADDED, ops["padded"], x.reshape(-1), None, w)
    both(PADDED, ops["padded"], w, None, None)
    both(PLUS, ops["plus"], x, w)
    both(PLUS, ops["plus"], w[:1], x)
    both(PLUS, ops["plus"], x, x[:, :1])
    both(CHOSEN.using("metal"), ops["chosen"], w)
    if n and d > 2:
        both(PUT, ops["put"], torch.zeros(n, 3, d), x, 2)
        both(PUT, ops["put"], torch.zeros(n, 6, d)[:, ::2], x, 1)
    if n and d:
        both(BLANK, ops["blank"], w)
        both(ADD, ops["add"], torch.randn(n), torch.randn(n))
        both(FILLED, ops["filled"], torch.randn(n % 100 + 1, d))
        both(EMPTY, ops["empty"], torch.randn(n + 3))


@given(
    st.floats(width=64) | st.floats(-1e5, 1e5) | st.floats(-1e-4, 1e-4),
    st.floats(width=64) | st.floats(-1e5, 1e5) | st.floats(-1e-37, 1e-37),
    st.sampled_from([1, 2049, 4097, 70_000]),
)
@settings(max_examples=60, deadline=None)
def test_numbers_and_fills_of_16_bits(ops: dict[str, Any], h: float, g: float, n: int) -> None:
    """Ties and subnormals among them: the sums lie between two numbers, or nearly so."""
    for one in (h, float(np.float16(np.clip(h, -6e4, 6e4))) * (1 + 2**-11)):
        values = torch.ones(n), one, g
        try:
            HALVES(*values)
        except KernelError:
            with pytest.raises(RuntimeError, match=r"does not fit into b?float16"):
                ops["halves"](*values)
        else:
            both(HALVES, ops["halves"], *values)


def test_what_is_read_is_what_was_there_before_a_write(ops: dict[str, Any]) -> None:
    for call in (ADD, ops["add"]):
        c = torch.arange(6.0)
        call(c, c)
        assert torch.equal(c, 2 * torch.arange(6.0))
        call(c[1:], c[:-1])
        assert c.tolist() == [0, 2, 6, 10, 14, 18]
        call(c[::2], c[1::2])  # side by side, and not shared
        assert c.tolist() == [2, 2, 16, 10, 32, 18]
        cache = torch.arange(24.0).reshape(2, 3, 4)
        (PUT if call is ADD else ops["put"])(cache, cache[:, 0], 2)
        assert torch.equal(cache[:, 2], cache[:, 0])
    with pytest.raises(RuntimeError, match="input 'c' is written in place, but has many elements"):
        ops["add"](torch.ones(1).expand(4), torch.ones(4))


def test_many_calls_from_many_threads_leak_nothing(ops: dict[str, Any]) -> None:
    import resource
    import threading

    x, w = torch.randn(64, 256), torch.randn(256)
    expected = x * w

    def calls() -> None:
        for _ in range(300):
            assert torch.equal(ops["scale"](x, w), expected)
            ops["affine"](x.t(), w[:64], 1.0, 0, False, 0.0)
            with pytest.raises(RuntimeError):
                ops["scale"](x, w[:5])

    def run() -> None:
        threads = [threading.Thread(target=calls) for _ in range(3)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()

    run()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    run()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 20_000  # KB


@pytest.mark.parametrize(
    ("name", "values", "message"),
    [
        ("scale", (torch.ones(2, 3), torch.ones(4)),
         r"op 'scale': the inputs x float32 \(2, 3\), w float32 \(4,\) contradict its rule, x"),
        ("scale", (torch.ones(2, 3, 4), torch.ones(4)),
         r"has no machine code for x float32 \(2, 3, 4\), w"),
        ("scale", (torch.ones(2, 3).bfloat16(), torch.ones(3).bfloat16()),
         r"no machine code for x bfloat16 \(2, 3\), w bfloat16 \(3,\); it has what its graph"),
        ("affine", (torch.ones(2, 3), None, 1.0, 40000, False, 1.0),
         "input 'n' is 40000, which does not fit into int16"),
        ("tiled", (torch.ones(2, 3),),
         r"parameter 'TILE' is D if D <= 8 else 8, which is 3 for x float32 \(2, 3\); .* 4 alone"),
        ("tiled", (torch.ones(2, 9),), r"parameter 'TILE' is D if"),
        ("empty", (torch.ones(0),), r"`grid` is \(0, 1, 1\), which runs no thread, but output 'y'"),
        ("blank", (torch.ones(0),), r"`threadgroup`: min\(N, 64\) is 0 for x .*; expected 1 to"),
        ("filled", (torch.ones(200, 4),), "`init_value` is 200, which does not fit into output"),
        ("scale", (torch.ones(2, 3, device="meta"), torch.ones(3)), "Meta tensors"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(
    ops: dict[str, Any], name: str, values: tuple[Any, ...], message: str
) -> None:
    with pytest.raises((RuntimeError, NotImplementedError), match=message):
        ops[name](*values)


@pytest.mark.slow
def test_a_kernel_that_faults_raises() -> None:
    bad = op("bad", "x[N]:float32 -> y[N]:float32", I + "y[i + (1ul << 40)] = x[i];", "N")

    class Model(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return bad(x)

    found = overloads(torch.export.export(Model(), (torch.ones(3),)))["bad"]
    for _ in range(2):
        with pytest.raises(RuntimeError, match="op 'bad': its kernel accessed memory outside"):
            found(torch.ones(3))
        with pytest.raises(ferrule.DeviceError, match="outside its arrays"):
            bad(torch.ones(3))  # the other runtime in this process


@pytest.mark.slow
def test_a_fault_elsewhere_ends_a_process_with_two_runtimes() -> None:
    code = """
        import ctypes, faulthandler, sys, torch
        sys.path[:0] = sys.argv[1:]
        import test_torch_package as here
        faulthandler.enable()
        program = torch.export.export(here._Scaled(), (torch.ones(2, 4),))
        packaged = here.overloads(program)["scale"]
        for _ in range(3):
            here.both(here.SCALE, packaged, torch.ones(2, 4), torch.ones(4))
        ctypes.string_at(8)
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *filter(None, sys.path)],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode == -signal.SIGSEGV
    assert done.stderr.count("Fatal Python error: Segmentation fault") == 1
    assert "in string_at" in done.stderr


def test_names_carry_what_was_compiled() -> None:
    def names(*inputs: Any) -> set[str]:
        class Model(torch.nn.Module):
            def forward(self, *inputs: Any) -> Any:
                return [SCALE(x, torch.ones_like(x[0])) for x in inputs]

        program = torch.export.export(Model(), inputs)
        return {one.name for one in torch_package._packaged(program, None)}

    (one,), (other,) = names(torch.ones(2, 3)), names(torch.ones(2, 3).half())
    assert one != other and one.startswith(f"scale_{SCALE.digest}_")
    assert names(torch.ones(2, 3)) == {one}


def first_version() -> Any:
    """Has torch decompose calls of ops that write in place as it did before views were kept."""
    import torch._export.config

    return torch._export.config.patch(enable_auto_functionalized_v2_for_export=False)


@pytest.mark.slow
def test_a_model_is_packaged_again_where_its_package_is_loaded(tmp_path: Path) -> None:
    class Model(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return SCALE(x, 2 * x.select(0, 0))

    x, path = torch.randn(3, 7), tmp_path / "model.pt2"
    program = torch.export.export(Model(), (x,))
    overloads(program)  # what loading a package does
    ferrule.package(program, path)
    torch.testing.assert_close(ferrule.load_package(path)(x), Model()(x))


def test_what_cannot_be_packaged_is_refused(tmp_path: Path) -> None:
    def program(function: Any, *inputs: Any, **more: Any) -> Any:
        class Model(torch.nn.Module):
            def forward(self, *inputs: Any) -> Any:
                return function(*inputs)

        return torch.export.export(Model(), inputs, **more)

    x, path = torch.ones(3), tmp_path / "model.pt2"
    runner = ferrule.op("twice", "x[N]:T -> y[N]:T", run=lambda x: 2 * x)
    with pytest.raises(KernelError, match=r"op 'twice' has no kernel for the CPU, but 'run'.*save"):
        ferrule.package(program(runner, x), path)
    with pytest.raises(KernelError, match=r"op 'twice' has nothing but Python functions.*save"):
        torch._inductor.aoti_compile_and_package(program(runner, x), package_path=str(path))
    assert not path.exists()
    cuda = ferrule.op("there", "x[N]:T -> y[N]:T", cuda="y[0] = x[0];", grid=1, threadgroup=1,
                      reference=lambda x: x + 0)  # fmt: skip
    with pytest.raises(KernelError, match="op 'there' has no kernel for the CPU, but 'cuda', 'ref"):
        ferrule.package(program(cuda, x), path)
    step = ferrule.cuda_step("first", ["y"], blocks=1, block=1)
    unit = ferrule.cuda_unit("__global__ void first(float* y) {}", steps=[step])
    steps = ferrule.op("steps", "x[N]:float32 -> y[N]:float32", cuda=unit)
    with pytest.raises(KernelError, match="op 'steps' has no kernel for the CPU, but 'cuda'"):
        ferrule.package(program(steps, x), path)
    small = op("small", "x[N]:float32, s:float8_e5m2 -> y[N]:float32", I + "y[i] = x[i];", "N")
    with pytest.raises(KernelError, match="input 's' is a number of float8_e5m2"):
        ferrule.package(program(lambda x: small(x, 2.0), x), path)
    fill = op("fill", "x[N]:T -> y[N]:float8_e5m2", "y[0] = 0;", 1, init_value="N")
    with pytest.raises(KernelError, match=r"its `init_value` is N, which .* 'y' of float8_e5m2"):
        ferrule.package(program(fill, x), path)
    with first_version():
        decomposed = program(lambda c, v: ADD(c, v), x, x.clone()).run_decompositions()
    with pytest.raises(KernelError, match=r"an operator that .*torch\.export\.export gave"):
        ferrule.package(decomposed, path)
    endless = program(lambda x: AFFINE(x[None], None, -math.inf, 0, False, 0.0), x)
    with pytest.raises(KernelError, match=r"op 'affine' with 's' = -inf, .* array, s\[\]:float32"):
        ferrule.package(endless, path)
    good = program(lambda x: SCALE(x, x), x)
    with pytest.raises(KernelError, match=r"ends in '\.pt2'"):
        ferrule.package(good, tmp_path / "model.zip")
    with pytest.raises(ferrule.KernelTypeError, match="got a GraphModule"):
        ferrule.package(good.module(), path)
    assert not path.exists()


@pytest.mark.slow
def test_the_text_for_cuda_is_written() -> None:
    """Compiled as C, with a cubin that is none."""
    from ferrule.devices.protocol import Code

    (packaged,) = torch_package._packaged(torch.export.export(_Scaled(), (torch.ones(2, 4),)), None)
    ((body, (special,)),) = packaged.bodies
    code = Code(
        b'none?\0"\\', ("FR_NEAR", "FR_ONE_ROW"), "any", True, "sm_90a", 16, ("ferrule_scale",)
    )
    spec = special.spec
    inputs = tuple(one._replace(value=one.ndim == 0) for one in spec.inputs)
    spec = type(spec)(spec.kernel, inputs, spec.outputs, spec.template)
    other = special._replace(spec=spec, codes=(code, code._replace(architecture="compute_80")))
    there = packaged._replace(cuda=True, name="there", bodies=((body, (other,)),))
    text = package_text.text([there])
    assert "FR_PASS_LAUNCH" in text and "FR_PASS_VALUE" in text and '"none\\077\\000' in text
    assert torch_package._library([there])


@pytest.mark.slow
def test_machine_code_for_gpus(library: object) -> None:
    there = ferrule.op(
        "there", "x[N]:T, k:int32 -> y[N]:T", grid="N", threadgroup="min(N, 64)",
        cuda="int i = blockIdx.x * blockDim.x + threadIdx.x; if (i < 64) y[i] = x[i];",
        metal="y[0] = 0;", shared_memory="4 * N", init_value=1,
    )  # fmt: skip

    class Model(torch.nn.Module):
        def forward(self, x: Any, ints: Any) -> Any:
            return SCALE(x, x.select(0, 0)), ROWS(x), CUBE(ints), there(x.select(0, 0), 3)

    inputs = torch.ones(3, 64), torch.zeros(2, 3, 4, dtype=torch.int32)
    program = ferrule.export_for("cuda", Model(), inputs, dynamic_shapes=({0: Dim("B")}, None))
    packaged = torch_package._packaged(program, ["sm_80", "sm_90"])
    assert all(one.cuda for one in packaged)
    found = {one.op.name: one.bodies[0] for one in packaged}
    for body, specials in found.values():
        for special in specials:
            for architecture in ("sm_80", "sm_90"):
                codes = [one for one in special.codes if one.architecture == architecture]
                assert codes and codes[-1].needs == () and b"ELF" in codes[-1].payload[:4]
                assert len(codes) == (1 if body.kind == "cuda" else 3)
                assert not codes[-1].aligned and codes[0].aligned == (body.kind != "cuda")
    assert found["there"][0].kind == "cuda"
    shapes = {name: body[1][0].codes[0].blocks for name, body in found.items()}
    assert shapes == {"scale": "any", "rows": "lines", "cube": "boxes", "there": "boxes"}
    assert "FR_FULL" in found["rows"][1][0].codes[0].needs
    assert torch_package._library(packaged)


def test_the_c_interface_is_torchs() -> None:
    compiler = shutil.which("g++")
    if compiler is None:
        pytest.skip("no g++")
    text = """
        #include <torch/csrc/inductor/aoti_torch/c/shim.h>
        #include <torch/csrc/stable/c/shim.h>
        #include "torch_abi.h"  // a function of C has one type
    """
    folders = Path(torch.__file__).parent / "include", *package_text.INCLUDES
    for line, right in (
        ("", True),
        ('extern "C" int32_t aoti_torch_get_dim(TH, int32_t*);', False),
    ):
        flags = "-std=c++20", "-fsyntax-only", "-xc++", *(f"-I{one}" for one in folders)
        done = subprocess.run(
            [compiler, *flags, "-"],
            input=text + line, capture_output=True, text=True, timeout=120,
        )  # fmt: skip
        assert (done.returncode == 0) == right, done.stderr


# -- whole packages --------------------------------------------------------------------------------


class _Scaled(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(4, 4)
        self.w = torch.nn.Parameter(torch.arange(1.0, 5))
        with torch.no_grad():
            self.linear.weight.copy_(torch.eye(4) * 2)
            self.linear.bias.fill_(1)

    def forward(self, x: Any) -> Any:
        return SCALE(self.linear(x), self.w.to(x.dtype)).cos().sum(-1)


def test_damaged_packages_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "damaged.pt2"
    path.write_bytes(b"no zip file" * 10)
    with pytest.raises(KernelError, match=r"damaged\.pt2' is damaged"):
        ferrule.load_package(path)
    digest = torch_package.hashlib.sha256(b"library").hexdigest()
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"model/data/ferrule/ops-{digest}.so", b"another")
    with pytest.raises(KernelError, match="was altered"):
        ferrule.load_package(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr(f"model/data/ferrule/ops-{digest}.so", b"library")
    with pytest.raises(ferrule.ToolchainError, match="cannot be loaded"):
        ferrule.load_package(path)


LOAD = """
    import ctypes, sys, tempfile, zipfile
    import torch

    def load(path):
        with zipfile.ZipFile(path) as archive, tempfile.TemporaryDirectory() as folder:
            for name in archive.namelist():
                if "/data/ferrule/" in name:
                    ctypes.CDLL(archive.extract(name, folder))
        return torch._inductor.aoti_load_package(path)
"""

PYTHON = """
    models = [load(path) for path in sys.argv[1:]]  # two packages with the same op
    w = torch.arange(1., 5)
    for n in (1, 3, 64, 4096):
        x = torch.randn(n, 4)
        for model in models:
            torch.testing.assert_close(model(x), ((2 * x + 1) * w).cos().sum(-1))
    assert "ferrule" not in sys.modules
"""


@pytest.mark.slow
def test_a_package_in_ferrule_in_python_without_it_and_in_cpp(tmp_path: Path) -> None:
    building = start_build(tmp_path)
    package = tmp_path / "model.pt2"
    shapes = ({0: Dim("B", min=1, max=4096)},)
    program = torch.export.export(_Scaled(), (torch.randn(3, 4),), dynamic_shapes=shapes)
    assert ferrule.package(program, package) == str(package)

    model, ours = ferrule.load_package(package), _Scaled()
    for n in (1, 3, 1000):
        x = torch.randn(n, 4)
        with torch.no_grad():
            torch.testing.assert_close(model(x), ours(x))

    twin = tmp_path / "twin.pt2"
    shutil.copy(package, twin)
    processes.printed(LOAD + PYTHON, package, twin, modules=processes.COMPILING)

    if not building:
        pytest.skip("no g++, so not in C++")
    inputs = [torch.randn(n, 4) for n in (1, 3, 1000)]
    with torch.no_grad():
        expected = torch.cat([ours(x) for x in inputs])
    found = run_built(building, tmp_path, package, inputs)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


class _Cached(torch.nn.Module):
    """Writes in place: to a buffer, an input, and views of both."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("cache", torch.zeros(2, 5, 4))

    def forward(self, x: Any, c: Any, at: Any) -> Any:
        n = PUT(self.cache, x, 1)
        ADD(c[1], x[0])
        ADD(c.view(-1), c.view(-1) * 2)
        ADD(self.cache[1, 2], at)
        ADD(self.cache[0].view(-1)[4:8], at)
        return self.cache * 2, n


@pytest.mark.slow
@pytest.mark.parametrize("decomposed", [False, True])
def test_what_is_written_in_place_in_a_package(tmp_path: Path, decomposed: bool) -> None:
    """Buffers are as they were at the export, then the package's own."""
    b = Dim("C", min=2, max=64)
    inputs = torch.randn(2, 4), torch.randn(3, 4), torch.ones(4)
    program = torch.export.export(_Cached(), inputs, dynamic_shapes=(None, {0: b}, None))
    if decomposed:
        program = program.run_decompositions()
    package = tmp_path / "model.pt2"
    ferrule.package(program, package)
    model, ours = ferrule.load_package(package), _Cached()
    for n in (3, 2, 9):
        x, c, at = torch.randn(2, 4), torch.randn(n, 4), torch.randn(4)
        values = x.clone(), c.clone(), at.clone()
        torch.testing.assert_close(model(*values), ours(x, c, at))
        torch.testing.assert_close(values, (x, c, at), rtol=0, atol=0)
    # Its ops are defined now, by the library in the package; it can be made again.
    packaged = {full_name(one.op): one for one in torch_package._packaged(program, None)}
    for _ in range(2):
        with torch_package._renamed(packaged) as overloads:
            assert {str(one) for one in overloads.values()} == {
                f"ferrule.{one.name}.default" for one in packaged.values()
            }


def test_a_busy_gpu_is_the_same_in_packages() -> None:
    text = (Path(ferrule.__file__).parent / "packaged" / "cuda_ops.h").read_text("utf-8")
    assert "enum { FR_BUSY = 2 * 132 * 256 };" in text
    assert cuda_launch._BUSY == 2 * 132 * 256
