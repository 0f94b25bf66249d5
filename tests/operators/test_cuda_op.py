"""Calls of ops in CUDA, bodies and units: compiled by NVRTC, launched on a driver whose GPUs are
the host."""

from __future__ import annotations

import ctypes
import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ferrule as fe
from cuda_ops import SUM, bound, compiled, sum_op
from fake_cuda import Copied, FakeCuda, Filled, Launched
from ferrule import DeviceError, KernelError, KernelTypeError, Op, RuleError
from ferrule.devices import protocol as devices
from ferrule.hosts import numpy as numpy_host
from ferrule.hosts.torch import arrays as torch_host
from ferrule.spec import Facts
from ferrule.tools import driver, fastcall, nvrtc
from test_readme import blocks

F32 = np.dtype(np.float32)
STREAM = 0x77
I = "int i = blockIdx.x * blockDim.x + threadIdx.x; "  # noqa: E741


def array(address: int, count: int, dtype: Any = np.float32) -> Any:
    size = count * np.dtype(dtype).itemsize
    return np.frombuffer((ctypes.c_char * size).from_address(address), dtype)


def number(data: bytes, dtype: Any) -> Any:
    return np.frombuffer(data, dtype)[0].item()


@pytest.fixture
def gpu(
    fake_path: Path, library: nvrtc.Nvrtc, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeCuda]:
    """Arrays of NumPy and torch are on cuda:0, whose driver is a fake."""
    try:
        nvrtc.find_headers(library)
    except fe.ToolchainError as missing:
        pytest.skip(str(missing))
    fake = FakeCuda(fake_path)
    real, real_empty = numpy_host.facts, torch_host.empty

    def facts(array: Any) -> Facts | None:
        found = real(array)
        return found and found._replace(device="cuda:0")

    monkeypatch.setattr(numpy_host, "facts", facts)
    monkeypatch.setattr(numpy_host, "stream", lambda given, device: STREAM)
    monkeypatch.setattr(torch_host, "device_name", lambda tensor: "cuda:0")
    monkeypatch.setattr(torch_host, "stream", lambda given, device: STREAM)
    monkeypatch.setattr(
        torch_host, "empty", lambda shape, kind, device: real_empty(shape, kind, "cpu")
    )
    with fastcall.bypassed(), fake.installed():
        yield fake


class Emulated:
    """Carries out the functions of `SUM` on the fake."""

    def __init__(self, fake: FakeCuda, kind: Any = np.float32) -> None:
        fake.texts.update({"parts": SUM, "total": SUM})
        fake.on_launch = self
        self.kind = kind

    def __call__(self, one: Launched) -> None:
        given = one.arguments
        if one.symbol == "parts":
            n, blocks = number(given["n"], np.int64), one.blocks[0]
            x, partial = array(given["x"], n, self.kind), array(given["partial"], blocks)
            for block in range(blocks):
                partial[block] = x[block::blocks].astype(F32).sum()
        else:
            count = number(given["count"][:4], np.int32)
            partial = array(given["partial"], count)
            array(given["y"], 1)[0] = partial.sum() * number(given["scale"][:4], F32)


# -- bodies ----------------------------------------------------------------------------------------


def test_numbers_and_dims_are_values_in_a_body(gpu: FakeCuda) -> None:
    body = (
        I
        + """
        static_assert(sizeof(T) == 2 && WIDE && BLOCK == 3);
        if (i >= N * K) return;
        T v = x[i]; if (has_b) v += b[i % K];
        y[i] = flip ? T(float(v) * scale + add) : v; seen[i] += x_shape[1] + K;"""
    )
    op = fe.op(
        "affine",
        "x[N,K]:T, b[K]:T?, scale:float32, add:int64, flip:bool, seen[N,K]:int32! -> y[N,K]:T",
        cuda=fe.cuda_body(
            body, grid="x.size", threadgroup=128, template={"BLOCK": "K", "WIDE": "N > 1"},
            init_value=2, shared_memory="4*K",
        ),
    )  # fmt: skip
    unit: Any = op.implementations[0]
    assert unit.dims == ("N", "K") and unit.kernel.values == ("scale", "add", "flip", "N", "K")
    x, seen = np.ones((5, 3), np.float16), np.ones((5, 3), np.int32)
    texts: list[str] = []

    def run(one: Launched) -> None:
        texts.append(one.symbol)

    gpu.on_launch = run
    text = devices.get("sm_90").text(_spec(op, [(5, 3), None, (), (), (), (5, 3)], "float16"))
    gpu.texts["ferrule_affine"] = text
    y = op(x, None, 0.5, -(2**40), True, seen)
    (one,) = gpu.launches
    assert (y == 2).all() and texts == ["ferrule_affine"]
    assert (one.blocks, one.threads, one.shared) == ((1, 1, 1), (15, 1, 1), 12)
    given = one.arguments
    assert given["seen"] == seen.ctypes.data and given["b"] == 0
    assert number(given["scale"][:4], F32) == 0.5 and number(given["add"], np.int64) == -(2**40)
    assert given["flip"][0] == 1
    assert [number(given[n][:4], np.int32) for n in "NK"] == [5, 3]
    assert given["x_shape"][:2] == [5, 3]
    for line in ("constexpr bool has_b = false;", "using T = __half;", "constexpr int BLOCK = 3;"):
        assert line in text


def _spec(op: Op, shapes: list[Any], kind: str) -> Any:
    """What a body is compiled from, as `operators.launch.prepare` makes it."""
    from ferrule.spec import Input, Spec

    body: Any = op.implementations[0]
    said = bound(op, shapes, [kind if s else None for s in shapes[:-1]] + ["int32"])
    named = {one.name: one for one in op.rule.inputs}
    inputs = []
    for name in body.kernel.input_names:
        one = named.get(name)
        value = one is None or one.dims is None
        dtype = fe.dtypes.BY_NAME[
            "int32" if one is None else one.dtype if one.dims is None else kind
        ]
        inputs.append(Input(dtype, 0 if one is None else len(one.dims or ()), value=value))
    outputs = (fe.dtypes.BY_NAME[kind], fe.int32)
    return Spec(body.kernel, tuple(inputs), outputs, body.launch_for(said).template)


def test_a_cuda_kernel_keeps_its_pointers(gpu: FakeCuda) -> None:
    kernel = fe.cuda_kernel("k", ["x", "s"], ["y"], "y[0] = x[0] * s[0] + N;")
    op = fe.op("k", "x[N]:float32, s:float32 -> y[N]:float32", cuda=kernel, grid=1, threadgroup=1)
    body: Any = op.implementations[0]
    assert body.kernel.values == ("N",)
    op(np.ones(4, F32), 2.0)
    assert gpu.launches[0].symbol == "ferrule_k"
    assert Op.from_json(json.loads(json.dumps(op.to_json()))).digest == op.digest


def test_the_first_body_whose_condition_holds_is_taken(gpu: FakeCuda) -> None:
    def body(text: str, when: str | None) -> Any:
        return fe.cuda_body(text, grid="M", threadgroup="min(M,1024)", when=when)

    op = fe.op(
        "chosen", "x[M]:float32 -> y[M]:float32",
        cuda=[body("y[0] = 1;", "M <= 16"), sum_unit("M > 100"), body("y[0] = 3;", "M > 16")],
        metal="y[thread_position_in_grid.x] = 4;", grid="M", threadgroup=32,
    )  # fmt: skip
    assert [one.kind for one in op.implementations] == ["cuda", "cuda", "cuda", "metal"]
    for size, chosen in ((16, 1), (17, 3), (100, 3), (101, 2), (3, 1)):
        gpu.launches.clear()
        op(np.zeros(size, F32))
        (one,) = gpu.launches
        assert (one.symbol == "mine") == (chosen == 2)
        assert one.threads[0] == (size if chosen != 2 else 32)
    metal = op.using("metal")
    gpu.launches.clear()
    metal(np.zeros(5, F32))
    assert gpu.launches[0].symbol == "ferrule_chosen"
    only = op.using("cuda")
    assert len(only.implementations) == 3


def test_dtypes_choose_bodies(gpu: FakeCuda) -> None:
    def body(text: str, threads: int, when: str | None) -> Any:
        return fe.cuda_body(text, grid=threads, threadgroup=threads, when=when)

    op = fe.op(
        "by_dtype", "x[M]:T, s[M]:U -> y[M]:T",
        cuda=[body("y[0] = 1;", 1, "T in (float16, bfloat16) and M > 2"),
              body("y[0] = 2;", 2, "T == float32 and U != int8"), body("y[0] = 3;", 3, None)],
    )  # fmt: skip
    again = Op.from_json(json.loads(json.dumps(op.to_json())))
    assert again.digest == op.digest
    half, bf16 = np.float16, ml_dtypes.bfloat16
    for x, s, size, chosen in (
        (half, F32, 3, 1), (bf16, F32, 3, 1), (half, F32, 2, 3), (F32, F32, 2, 2),
        (F32, half, 9, 2), (F32, np.int8, 9, 3), (np.int8, np.int8, 9, 3), (half, F32, 3, 1),
    ):  # fmt: skip
        for one in (op, again):
            gpu.launches.clear()
            one(np.zeros(size, x), np.zeros(size, s))
            assert gpu.launches[0].threads[0] == chosen
    with pytest.raises(RuleError, match=r"`when` of op 'wrong': there is no dtype variable 'V'"):
        fe.op("wrong", "x[M]:T -> y[M]:T", cuda=[body("y[0] = 1;", 1, "V == float16")])


def sum_unit(when: str | None = None) -> Any:
    return fe.cuda_unit(
        'extern "C" __global__ void mine(float* y) { y[0] = 2; }', when=when,
        steps=[fe.cuda_step("mine", ["y"], blocks=1, block=32)],
    )  # fmt: skip


def test_where_nothing_holds_the_conditions_are_said(gpu: FakeCuda) -> None:
    op = fe.op("none", "x[M]:float32 -> y[M]:float32", cuda=[sum_unit("M > 9 and M % 2 == 0")])
    message = r"'none' has nothing that runs on 'cuda:0'.*'cuda' when M > 9 and M % 2 == 0"
    with pytest.raises(DeviceError, match=message):
        op(np.zeros(3, F32))


def test_a_cuda_implementation_needs_a_gpu() -> None:
    with pytest.raises(DeviceError, match=r"nothing that runs on 'cpu'.*'cuda'.*`metal`"):
        sum_op()(np.zeros(3, F32), 1.0)


BODIES: list[tuple[dict[str, Any], list[Any], str]] = [
    ({"grid": (1, 70000)}, [np.zeros(1, F32)], "65535 blocks along y at most, of 1 threads"),
    ({"grid": (1, 1, 99), "threadgroup": (1, 1, 99)}, [np.zeros(1, F32)], "64 threads along z"),
    ({"threadgroup": 2048}, [np.zeros(1, F32)], "1024 threads at most"),
    ({"source": "y[0] = x_strides[0];"}, [np.zeros((1,) * 11, F32)], "'x'.*hold 10 dims"),
]


@pytest.mark.parametrize(("changed", "given", "message"), BODIES)
def test_what_cuda_cannot_launch(
    gpu: FakeCuda, changed: dict[str, Any], given: list[Any], message: str
) -> None:
    made = {"source": "y[0] = 1;", "grid": 1, "threadgroup": 1, **changed}
    op = fe.op("far", "x[*S]:float32 -> y[]:float32", cuda=fe.cuda_body(**made))
    with pytest.raises(KernelError, match=message):
        op(*given)
    assert not gpu.launches


WRONG: list[tuple[Any, type[Exception], str]] = [
    ([sum_unit(), sum_unit()], KernelError, "number 1 of 2 has no `when`, so that those after"),
    (["y[0] = 1;", sum_unit()], KernelError, "number 1 of 2 has no `when`"),
    ([sum_unit("M > 1"), 3], KernelTypeError, "`cuda` of op 'wrong': got 3 of type int"),
    (3, KernelTypeError, "got 3 of type int, expected the text of a body.*a cuda_unit"),
    ([sum_unit("M")], KernelError, "`when` of op 'wrong': got 'M', expected a condition"),
    ([sum_unit("Q > 1")], RuleError, "no dim 'Q'"),
]


@pytest.mark.parametrize(("cuda", "error", "message"), WRONG)
def test_wrong_implementations(cuda: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fe.op("wrong", "x[M]:float32 -> y[M]:float32", cuda=cuda, grid=1, threadgroup=1)


def test_the_bodies_of_the_page(gpu: FakeCuda) -> None:
    found: dict[str, Any] = {}
    page = Path(__file__).resolve().parents[2] / "docs" / "cuda_kernel.md"
    text = next(
        b.text for b in blocks(page.read_text(encoding="utf-8")) if "fe.cuda_body" in b.text
    )
    exec(compile(text, "cuda_kernel.md", "exec"), found)  # noqa: S102
    for m, launched in ((16, ((4, 1, 1), (256, 1, 1))), (17, ((1, 17, 1), (32, 1, 1)))):
        found["matmul"](np.ones((m, 64), F32), np.ones((32, 64), F32))
        assert (gpu.launches[-1].blocks, gpu.launches[-1].threads) == launched


# -- units: calls ----------------------------------------------------------------------------------


@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(n=st.integers(0, 40), scale=st.floats(-8, 8, width=32), half=st.booleans())
def test_a_sum_in_two_steps(gpu: FakeCuda, n: int, scale: float, half: bool) -> None:
    kind = np.float16 if half else np.float32
    gpu.launches.clear(), gpu.events.clear()
    Emulated(gpu, kind)
    x = np.arange(n).astype(kind)
    y = sum_op()(x, scale)
    assert y.shape == () and y.dtype == F32
    np.testing.assert_allclose(y, x.astype(F32).sum() * np.float32(scale), rtol=1e-5)
    # Without elements the first step has no blocks, and is left out.
    assert [one.symbol for one in gpu.launches] == ["parts", "total"][n == 0 :]
    for one in gpu.launches:
        assert (one.stream, one.context, one.shared, one.cluster) == (STREAM, 0xC0, 0, None)
        assert one.arguments["partial"] % 256 == 0
    assert len({one.arguments["partial"] for one in gpu.launches}) == 1


AGAIN = """
extern "C" __global__ void one(
    const float* x, const float* b, float* part, float scale, long long add, bool flip, int n) {}
extern "C" __global__ void two(const float* part, float* y, long long add, long long twice) {}
"""


@lru_cache(maxsize=1)
def again_op(gpu: FakeCuda) -> Op:
    steps = [
        fe.cuda_step("one", ["x", "b", "part", "scale", "add", "flip", "int32 N"], blocks="N",
                     block=32, shared_memory="60000 * N", when="N < 3"),
        fe.cuda_step("two", ["part", "y", "add", "int64 2 * N"], blocks=(2, "N"), block=(32, 2),
                     cluster=2),
    ]  # fmt: skip
    return fe.op(
        "again",
        "x[N]:float32, b[N]:float32?, scale:float32, add:int64, flip:bool -> y[N]:float32",
        cuda=fe.cuda_unit(AGAIN, scratch={"part": "float32[N + 7]"}, steps=steps),
    )


INT64 = st.integers(-(2**63), 2**63 - 1)


def address(array: Any) -> int:
    return int(array.ctypes.data if isinstance(array, np.ndarray) else array.data_ptr())


CALLS = st.lists(
    st.tuples(
        st.integers(1, 3), st.booleans(), st.floats(-8, 8, width=32), INT64, st.booleans(),
        st.sampled_from(["", "one", "two"]),
    ),
    min_size=1, max_size=8,
)  # fmt: skip


def check_calls(gpu: FakeCuda, make: Any, calls: Any, streams: set[int]) -> None:
    """What sizes decide is kept; all else is of the call, also behind one that failed."""
    op = again_op(gpu)
    gpu.texts.update(one=AGAIN, two=AGAIN)
    for i, (n, has_b, size, add, flip, fails) in enumerate(call for c in calls for call in [c] * 5):
        scale = -size if i % 2 else size  # 0.0 and -0.0 after each other
        gpu.launches.clear()

        def run(one: Launched, fails: str = fails) -> None:
            gpu.status = 912 * (one.symbol == fails)

        gpu.on_launch = run
        x, b = make(np.ones(n, F32)), make(np.ones(n, F32)) if has_b else None
        if fails == "two" or (fails == "one" and n < 3):
            with pytest.raises(DeviceError, match=rf"step '{fails}' of unit 'again'.*cuda:0"):
                op(x, b, scale, add, flip)
        else:
            y = op(x, b, scale, add, flip)
            assert type(y) is type(x) and y.shape == (n,) and not getattr(y, "requires_grad", False)
            assert gpu.launches[-1].arguments["y"] == address(y) not in (0, address(x))
        gpu.status = 0
        assert [launch.symbol for launch in gpu.launches] == [
            *["one"] * (n < 3), *["two"] * (n == 3 or fails != "one"),
        ]  # fmt: skip
        for launch in gpu.launches:
            passed = launch.arguments
            assert number(passed["add"], np.int64) == add and launch.stream in streams
            assert passed["part"] % 256 == 0 < passed["part"]
            assert passed["part"] == gpu.launches[0].arguments["part"]
            if launch.symbol == "two":
                assert (launch.blocks, launch.threads) == ((2, n, 1), (32, 2, 1))
                assert (launch.shared, launch.cluster) == (0, (2, 1, 1))
                assert number(passed["twice"], np.int64) == 2 * n
                continue
            assert (launch.blocks, launch.threads) == ((n, 1, 1), (32, 1, 1))
            assert (launch.shared, launch.cluster) == (60000 * n, None)
            assert gpu.dynamic["one"] >= 60000 * n
            assert (passed["x"], passed["b"]) == (address(x), 0 if b is None else address(b))
            assert passed["scale"][:4] == np.float32(scale).tobytes()
            assert passed["flip"][0] == flip and number(passed["n"][:4], np.int32) == n


@pytest.mark.parametrize("make", [np.asarray, torch.asarray], ids=["numpy", "torch"])
@settings(
    max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(CALLS)
def test_each_call_gives_its_own_arrays_and_numbers(gpu: FakeCuda, make: Any, calls: Any) -> None:
    check_calls(gpu, make, calls, {STREAM})


@pytest.mark.parametrize("make", [np.asarray, torch.asarray], ids=["numpy", "torch"])
def test_numbers_that_do_not_fit_are_refused_in_each_call(gpu: FakeCuda, make: Any) -> None:
    op, x = again_op(gpu), make(np.ones(2, F32))
    gpu.texts.update(one=AGAIN, two=AGAIN)
    for _ in range(4):
        op(x, None, 1.5, 3, True)
    for _ in range(2):
        with pytest.raises(KernelError, match="1e\\+300, which does not fit"):
            op(x, None, 1e300, 3, True)


def test_kernels_of_many_arguments(gpu: FakeCuda) -> None:
    names = [f"a{i}" for i in range(70)]
    parameters = ", ".join(f"int {name}" for name in names)
    text = f'extern "C" __global__ void many({parameters}, int* y) {{}}'
    gpu.texts["many"] = text
    steps = [fe.cuda_step("many", [*(f"int32 N + {i}" for i in range(70)), "y"], blocks=1, block=1)]
    op = fe.op("many", "x[N]:int32 -> y[N]:int32", cuda=fe.cuda_unit(text, steps=steps))
    for _ in range(2):
        y = op(np.zeros(5, np.int32))
        passed = gpu.launches[-1].arguments
        assert [number(passed[name][:4], np.int32) for name in names] == list(range(5, 75))
        assert passed["y"] == y.ctypes.data


def test_state_is_zeroed_once_and_kept(gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch) -> None:
    source = """__global__ void f(const float* x, int* locks, float* part, float* y, int n) {}"""
    op = fe.op(
        "locked", "x[N]:float32 -> y[N]:float32",
        cuda=fe.cuda_unit(
            source, scratch={"part": "float32[N]"}, state={"locks": "int32[N + 1]"},
            steps=[fe.cuda_step("f", ["x", "locks", "part", "y", "N"], blocks=1, block=32)],
        ),
    )  # fmt: skip
    again = Op.from_json(json.loads(json.dumps(op.to_json())))
    assert again.digest == op.digest != fe.op("locked", str(op.rule), cuda=fe.cuda_unit(
        source, scratch={"part": "float32[N]", "locks": "int32[N + 1]"},
        steps=[fe.cuda_step("f", ["x", "locks", "part", "y", "N"], blocks=1, block=32)],
    )).digest  # fmt: skip
    symbol = compiled(op, [(4,)], ["float32"]).names["f"]
    gpu.texts[symbol] = f"{symbol}(T* x, T* locks, T* part, T* y, int n) {{"
    seen = []

    def run(one: Launched) -> None:
        n = number(one.arguments["n"][:4], np.int32)
        locks = array(one.arguments["locks"], n + 1, np.int32)
        seen.append((one.arguments["locks"], locks.tolist()))
        array(one.arguments["part"], n)[:] = 7  # scratch is elsewhere
        locks += 1

    gpu.on_launch = run
    for n in (4, 4, 2):
        again(np.ones(n, np.float32))
    assert [each[1] for each in seen] == [[0] * 5, [1] * 5, [2] * 3]
    assert len({each[0] for each in seen}) == 1
    assert not any(isinstance(one, Filled) for one in gpu.events)
    monkeypatch.setattr(numpy_host, "capturing", lambda device: True, raising=False)
    for n in (4, 2):  # a graph zeroes what it has itself
        again(np.ones(n, np.float32))
    assert [each[1] for each in seen[3:]] == [[0] * 5, [0] * 3]
    assert seen[3][0] != seen[0][0]
    assert sum(isinstance(one, Filled) for one in gpu.events) == 2


def test_steps_come_in_order_with_what_was_declared(gpu: FakeCuda) -> None:
    source = """
    namespace a { template <int D, class U> __global__ void
    f(const U* x, U* s, double* t, U* c, unsigned a, uint64_t b, bool p, __half h, const int* none)
    {} }"""
    op = fe.op(
        "steps", "x[N,K]:T, c[N,K]:T!, h:float16, none[N]:int32? -> y[N,K]:T",
        cuda=fe.cuda_unit(
            source, scratch={"s": "T[N,K+1]", "t": "float64[3]", "u": "int8[0]"},
            template={"D": "K if K < 64 else 64"},
            steps=[
                fe.cuda_fill("s", float("-inf")),
                fe.cuda_copy("y", "x"),
                fe.cuda_fill("u", 1),
                fe.cuda_step("a::f<D, T>", ["x", "s", "t", "c", "uint32 N*K", "uint64 x.size",
                                            "N > 1", "h", "none"], blocks=("N", 2),
                             block=(32, "K"), shared_memory="48*1024*N", cluster=("N", 1, 1)),
                fe.cuda_step("a::f<D + 1, T>", ["y", "s", "t", "c", "uint32 3", "uint64 4",
                                                "K == 3", "h", "none"], blocks=1, block=1,
                             when="N > 100"),
                fe.cuda_fill("t"),
                fe.cuda_copy("c", "y", when="K == 3"),
            ],
        ),
    )  # fmt: skip
    made = compiled(op, [(2, 3), (2, 3), (), None], ["bfloat16", "bfloat16", None, None])
    assert list(made.names) == ["a::f<D, T>", "a::f<D + 1, T>"]
    symbol = made.names["a::f<D, T>"]
    assert symbol != made.names["a::f<D + 1, T>"] and symbol.encode() in made.payload
    types = "T* x, T* s, T* t, T* c, int a, int b, int p, int h, T* none"
    gpu.texts[symbol] = f"{symbol}({types}) {{"
    bf16 = fe.bfloat16.numpy
    x, c = np.arange(6).reshape(2, 3).astype(bf16), np.zeros((2, 3), bf16)

    def run(one: Launched) -> None:
        scratch = array(one.arguments["s"], 8, np.uint16)
        assert (scratch == 0xFF80).all()  # -inf
        # The empty `u` lies here, too, and its fill is of no bytes. What was here is anything.
        assert not (array(one.arguments["t"], 24, np.uint8) == 1).all()

    gpu.on_launch = run
    y = op(x, c, 0.5)
    infinite, first, ran, zero, last = gpu.events
    assert isinstance(infinite, Filled) and isinstance(first, Copied) and isinstance(last, Copied)
    assert isinstance(ran, Launched) and isinstance(zero, Filled)
    assert (first.to, first.source, first.size) == (y.ctypes.data, x.ctypes.data, 12)
    assert (last.to, last.source, last.size) == (c.ctypes.data, y.ctypes.data, 12)
    assert (ran.blocks, ran.threads, ran.cluster) == ((2, 2, 1), (32, 3, 1), (2, 1, 1))
    assert ran.shared == 96 * 1024 and gpu.dynamic[symbol] == 96 * 1024
    assert (infinite.size, zero.size, zero.address) == (16, 24, infinite.address + 256)
    given = ran.arguments
    assert (given["s"], given["t"]) == (infinite.address, zero.address)
    assert (given["x"], given["c"], given["none"]) == (x.ctypes.data, c.ctypes.data, 0)
    assert number(given["a"], np.uint64) == 6 and number(given["b"], np.uint64) == 6
    assert given["p"][0] == 1 and number(given["h"][:2], np.float16) == 0.5
    assert all(one.stream == STREAM for one in gpu.events)
    np.testing.assert_array_equal(y, x)
    np.testing.assert_array_equal(c, x)


def test_what_is_not_contiguous_is_copied_and_written_back(gpu: FakeCuda) -> None:
    source = 'extern "C" __global__ void add(float* c, const float* x, int n) {}'
    op = fe.op(
        "add", "c[N,K]:float32!, x[N,K]:float32 ->", cuda=fe.cuda_unit(
            source, steps=[fe.cuda_step("add", ["c", "x", "N*K"], blocks="N*K", block=1)]
        ),
    )  # fmt: skip
    gpu.texts["add"] = source

    def run(one: Launched) -> None:
        given, n = one.arguments, one.blocks[0]
        array(given["c"], n)[:] += array(given["x"], n)

    gpu.on_launch = run
    whole, x = np.zeros((3, 4), F32), np.arange(6, dtype=F32).reshape(2, 3).T
    assert op(whole[:, ::2], x) is None
    np.testing.assert_array_equal(whole[:, ::2], x)
    assert whole[:, 1::2].sum() == 0 and op.counts["copy"] == 2


def test_shared_memory_is_asked_for_as_it_grows(gpu: FakeCuda) -> None:
    source = 'extern "C" __global__ void f(float* y) { extern __shared__ float t[]; y[0] = t[0]; }'
    step = fe.cuda_step("f", ["y"], blocks=1, block=1, shared_memory="4*N")
    op = fe.op("grows", "x[N]:float32 -> y[]:float32", cuda=fe.cuda_unit(source, steps=[step]))
    gpu.library.fake_static(16)
    seen = []
    for n in (10, 12 * 1024 - 4, 12 * 1024, 40_000, 20_000):
        op(np.zeros(n, F32))
        seen.append(gpu.dynamic["f"])
    assert seen == [0, 0, 48 * 1024, 160_000, 160_000]
    assert [one.shared for one in gpu.launches] == [40, 49136, 49152, 160_000, 80_000]
    with pytest.raises(DeviceError, match=r"232448 bytes and 16 of the function's own, but a block "
                       r"of cuda:0 \(Fake GPU 0\) has 232448 at most"):  # fmt: skip
        op(np.zeros(58112, F32))
    assert len(gpu.launches) == 5


def one_step(**changed: Any) -> Op:
    """An op of one step, after a fill that must not happen where the step cannot run."""
    made = {"function": "f", "arguments": ["y", "N"], "blocks": "N", "block": 32, **changed}
    source = 'extern "C" __global__ void f(float* y, int n) {}'
    unit = fe.cuda_unit(source, steps=[fe.cuda_fill("y"), fe.cuda_step(**made)])
    return fe.op("one", "x[N]:uint8, n:int64 -> y[4]:float32", cuda=unit)


SIZES: list[tuple[dict[str, Any], type[Exception], str]] = [
    (
        {"block": 1025},
        KernelError,
        r"`block of step 'f'` of op 'one': got \(1025, 1, 1\); expected 1024",
    ),
    ({"block": (1, 1, 65)}, KernelError, "64 along z"),
    ({"block": "N-6"}, KernelError, "positive sizes"),
    ({"blocks": "N-7"}, KernelError, r"`blocks of step 'f'` of op 'one': N - 7 is -1 for x \(6,\)"),
    ({"blocks": (1, 65536)}, KernelError, "0 to 65535 blocks along this axis"),
    ({"blocks": "N // (N - 6)"}, KernelError, r"divides by zero"),
    ({"shared_memory": "-N"}, KernelError, "-N is -6.*0 to 2147483647 bytes"),
    ({"arguments": ["y", "N * 2147483647"]}, KernelError, 'int32.*write "int64 N \\* 2147483647"'),
    ({"cluster": 3, "blocks": 10}, KernelError, r"divide the blocks, \(10, 1, 1\)"),
    ({"cluster": (4, 4), "blocks": (4, 4)}, KernelError, "8 blocks at most.*every GPU"),
    ({"cluster": 0}, KernelError, r"cluster.*\(0, 1, 1\).*positive"),
    ({"shared_memory": 300_000}, DeviceError, "shared_memory=300000 bytes, but a block of cuda:0"),
    ({"block": 1024}, DeviceError, "1024 threads needs more registers.*512 threads fit"),
]


@pytest.mark.parametrize(("changed", "error", "message"), SIZES)
def test_errors_come_before_anything_is_started(
    gpu: FakeCuda, changed: dict[str, Any], error: type[Exception], message: str
) -> None:
    gpu.set(most=512)
    with pytest.raises(error, match=message):
        one_step(**changed)(np.zeros(6, np.uint8), 1)
    assert not gpu.events


def test_a_gpu_without_clusters(gpu: FakeCuda) -> None:
    gpu.library.fake_capability(8)
    with pytest.raises(DeviceError, match=r"Fake GPU 0 has no clusters.*9\.0"):
        one_step(cluster=2)(np.zeros(6, np.uint8), 1)
    assert not gpu.events


def test_a_refused_launch_names_the_step(gpu: FakeCuda) -> None:
    op = one_step(cluster=2)
    gpu.status = 2
    with pytest.raises(DeviceError, match="cuMemsetD8Async"):
        op(np.zeros(6, np.uint8), 1)
    gpu.status = 0
    gpu.on_launch = lambda one: setattr(gpu, "status", 912)
    message = (
        r"step 'f' of unit 'one' \(blocks \(6, 1, 1\), block \(32, 1, 1\), cluster \(2, 1, 1\)"
    )
    with pytest.raises(DeviceError, match=message):
        op(np.zeros(6, np.uint8), 1)


def test_an_output_that_no_step_writes_is_refused(gpu: FakeCuda) -> None:
    source = 'extern "C" __global__ void f(float* y) {}'
    unit = fe.cuda_unit(
        source, steps=[fe.cuda_step("f", ["y"], blocks="N", block=1, when="N != 3")]
    )
    op = fe.op("none", "x[N]:float32 -> y[2]:float32", cuda=unit)
    for n in (0, 3):
        with pytest.raises(
            KernelError, match=r"output 'y' of shape \(2,\).*ferrule.cuda_fill\('y'\)"
        ):
            op(np.zeros(n, F32))
    same = fe.op("same", "x[N]:float32 -> y[N]:float32", cuda=unit)
    assert same(np.zeros(0, F32)).shape == (0,)
    assert not gpu.launches


FILLS = [
    ("float32", 1.5), ("float16", float("-inf")), ("bfloat16", 3), ("float8_e4m3fn", 1.0),
    ("int8", -3), ("uint16", 65535), ("int32", -(2**31)), ("uint64", 0), ("float64", 0.0),
    ("complex64", 0), ("bool", 1), ("int64", -1), ("float32", float("nan")), ("float32", -0.0),
]  # fmt: skip


@pytest.mark.parametrize(("dtype", "value"), FILLS)
def test_fills(gpu: FakeCuda, dtype: str, value: float) -> None:
    unit = fe.cuda_unit("", steps=[fe.cuda_fill("y", value)])
    y = fe.op("filled", f"x[N]:int8 -> y[N]:{dtype}", cuda=unit)(np.zeros(5, np.int8))
    expected = np.full(5, value).astype(fe.dtypes.BY_NAME[dtype].numpy)
    assert y.tobytes() == expected.tobytes()
    (one,) = gpu.events
    assert isinstance(one, Filled) and one.size == y.nbytes


@pytest.mark.parametrize(
    ("dtype", "value", "message"),
    [("int64", 1, "halves of its 8 bytes differ"), ("uint8", 256, "expected a number from 0 to"),
     ("int32", float("nan"), "from -2147483648"), ("bool", 2, "from 0 to 1"),
     ("float16", 1e5, "which it does not hold"), ("float8_e4m3fn", 1000, "does not hold")],
)  # fmt: skip
def test_what_no_memset_fills(gpu: FakeCuda, dtype: str, value: float, message: str) -> None:
    unit = fe.cuda_unit("", steps=[fe.cuda_fill("y", value)])
    op = fe.op("filled", f"x[N]:int8 -> y[N]:{dtype}", cuda=unit)
    with pytest.raises(KernelError, match=f"fills 'y', of {dtype}, with .*{message}"):
        op(np.zeros(5, np.int8))


def test_copies_are_of_one_size_and_dtype(gpu: FakeCuda) -> None:
    def op(output: str) -> Op:
        return fe.op("copied", f"x[N]:T -> {output}", cuda=fe.cuda_unit("", steps=[COPY]))

    x = np.arange(3, dtype=np.int16)
    np.testing.assert_array_equal(op("y[1,N]:T")(x), x[None])
    for wrong in ("y[N+1]:T", "y[N]:uint16"):
        with pytest.raises(KernelError, match="copies 'x', 3 elements of int16, to 'y', "):
            op(wrong)(x)


COPY = fe.cuda_copy("y", "x")


# -- units: in torch -------------------------------------------------------------------------------


def test_torch(gpu: FakeCuda) -> None:
    op, x = sum_op("sum_of_torch"), torch.arange(9, dtype=torch.float32)
    Emulated(gpu)
    assert op(x, 2.0).item() == 72
    compiled_op: Callable[..., Any] = torch.compile(
        lambda x: op(x * 2, 0.5) + 1, fullgraph=True, backend="aot_eager"
    )
    assert compiled_op(x).item() == 37
    assert all(one.stream == STREAM for one in gpu.launches)
    torch.library.opcheck(op.torch_op, (x, 2.0))


def test_one_graph_of_torch_chooses_when_it_runs(gpu: FakeCuda) -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    def unit(name: str, when: str | None) -> Any:
        source = f'extern "C" __global__ void {name}(const float* x, float* y, int64_t n) {{}}'
        gpu.texts[name] = source
        step = fe.cuda_step(name, ["x", "y", "int64 M*N"], blocks="M*N", block=1)
        return fe.cuda_unit(source, steps=[step], when=when)

    def run(one: Launched) -> None:
        given, n = one.arguments, number(one.arguments["n"], np.int64)
        array(given["y"], n)[:] = array(given["x"], n) + (1 if one.symbol == "few" else 2)

    gpu.on_launch = run
    cuda = [unit("few", "M <= 16"), unit("many", None)]
    op = fe.op("graph", "x[M,N]:float32 -> y[M,N]:float32", cuda=cuda)
    counter = CompileCounterWithBackend("aot_eager")
    compiled_op = torch.compile(lambda x: op(x) * 2, fullgraph=True, dynamic=True, backend=counter)
    for m, added in ((20, 2), (3, 1), (16, 1), (17, 2)):
        x = torch.randn(m, 5)
        torch.testing.assert_close(compiled_op(x), (x + added) * 2)
    assert counter.frame_count == 1


def test_what_torch_writes_in_place(gpu: FakeCuda) -> None:
    source = 'extern "C" __global__ void plus(float* c, const float* x, float* y, int n) {}'
    gpu.texts["plus"] = source

    def run(one: Launched) -> None:
        given, n = one.arguments, one.blocks[0]
        array(given["y"], n)[:] = array(given["c"], n)
        array(given["c"], n)[:] += array(given["x"], n)

    gpu.on_launch = run
    step = fe.cuda_step("plus", ["c", "x", "y", "N*K"], blocks="N*K", block=1)
    op = fe.op(
        "plus", "c[N,K]:float32!, x[N,K]:float32 -> y[N,K]:float32",
        cuda=fe.cuda_unit(source, steps=[step]),
    )  # fmt: skip
    whole, x = torch.zeros(3, 4), torch.randn(2, 3).t()
    c = whole[:, ::2]
    version = c._version
    before = op(c, x)
    assert bool((before == 0).all()) and c._version > version
    torch.testing.assert_close(c, x)
    assert float(whole[:, 1::2].abs().sum()) == 0
    torch.library.opcheck(op.torch_op, (c, x))


# -- the driver ------------------------------------------------------------------------------------


def test_the_drivers_structures_are_those_of_its_header(
    library: nvrtc.Nvrtc, tmp_path: Path
) -> None:
    """NVIDIA's own cuda.h says how a launch with attributes lies in memory."""
    folders = nvrtc.find_headers(library).folders
    folder = next((f for f in folders if (Path(f) / "cuda.h").is_file()), None)
    compiler = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if folder is None or compiler is None:
        pytest.skip("there is no cuda.h, or no C compiler")
    numbers = {
        "CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION": driver._CLUSTER_DIMENSION,
        "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION": driver._PROGRAMMATIC,
        "CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK": driver._KERNEL_THREADS,
        "CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES": driver._KERNEL_STATIC,
        "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES": driver._KERNEL_DYNAMIC,
        "CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN": driver._SHARED_OPTIN,
        "sizeof(CUlaunchConfig)": ctypes.sizeof(driver._Config),
        "offsetof(CUlaunchConfig, sharedMemBytes)": driver._Config.sizes.offset + 24,
        "offsetof(CUlaunchConfig, hStream)": driver._Config.stream.offset,
        "offsetof(CUlaunchConfig, attrs)": driver._Config.attributes.offset,
        "offsetof(CUlaunchConfig, numAttrs)": driver._Config.count.offset,
        "sizeof(CUlaunchAttribute)": ctypes.sizeof(driver._Attribute),
        "offsetof(CUlaunchAttribute, id)": driver._Attribute.id.offset,
        "offsetof(CUlaunchAttribute, value.clusterDim)": driver._Attribute.value.offset,
    }
    functions = {
        "cuLaunchKernelEx": "CUresult (*)(const CUlaunchConfig*, CUfunction, void**, void**)",
        "cuMemsetD16Async": "CUresult (*)(CUdeviceptr, unsigned short, size_t, CUstream)",
        "cuMemsetD32Async": "CUresult (*)(CUdeviceptr, unsigned int, size_t, CUstream)",
        "cuMemcpyDtoDAsync_v2": "CUresult (*)(CUdeviceptr, CUdeviceptr, size_t, CUstream)",
    }
    lines = ["#include <stddef.h>", "#include <cuda.h>"]
    lines += [f'_Static_assert({name} == {n}, "{name}");' for name, n in numbers.items()]
    lines += [
        f'_Static_assert(_Generic(&{name}, {kind}: 1, default: 0), "{name}");'
        for name, kind in functions.items()
    ]
    text = tmp_path / "driver.c"
    text.write_text("\n".join([*lines, ""]))
    command = [compiler, "-std=c11", "-fsyntax-only", f"-I{folder}", str(text)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=60)
    assert done.returncode == 0, done.stderr
