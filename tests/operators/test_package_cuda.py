"""The libraries of packages for NVIDIA GPUs, on a driver whose GPUs are the host: what they send is
what the op itself sends. Compiled by NVRTC; torch's tensors on the CPU are said to be on a GPU."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import cuda_ops
import ferrule as fe
from fake_cuda import Copied, FakeCuda, Filled, Launched
from ferrule import KernelError, Op
from ferrule.operators import package as package_text
from ferrule.tools import fastcall, nvrtc

torch = pytest.importorskip("torch")
from ferrule.hosts.torch import arrays as torch_host  # noqa: E402
from ferrule.hosts.torch import op as torch_op  # noqa: E402
from ferrule.hosts.torch import package as torch_package  # noqa: E402
from ferrule.operators.file import full_name  # noqa: E402
from package_library import Library  # noqa: E402
from test_cuda_op import SIZES, Emulated, one_step  # noqa: E402

STREAM = 0x77
pytestmark = [
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.skipif(sys.platform != "linux", reason="links torch as Linux does"),
]


@pytest.fixture
def fake(
    fake_path: Path, library: nvrtc.Nvrtc, monkeypatch: pytest.MonkeyPatch
) -> Iterator[FakeCuda]:
    """torch's tensors are on cuda:0, whose driver is a fake."""
    found, empty = FakeCuda(fake_path), torch_host.empty
    monkeypatch.setattr(torch_host, "device_name", lambda tensor: "cuda:0")
    monkeypatch.setattr(torch_host, "stream", lambda given, device: STREAM)
    monkeypatch.setattr(torch_host, "empty", lambda shape, kind, device: empty(shape, kind, "cpu"))
    with found.installed():
        yield found
    found.library.cuCtxSetCurrent(None)  # a library leaves the GPU's current


PIECES, TWICE = cuda_ops.pieces(), cuda_ops.added()
SUM_OP, REDUCTION, ROTATION = cuda_ops.sum_op(), cuda_ops.reduction(), cuda_ops.rotation()
REVERSAL, CHOSEN, COUNTS = cuda_ops.reversal(), cuda_ops.chosen(), cuda_ops.counts()
HALVES = cuda_ops.halves()

BODY = "uint i = thread_position_in_grid.x; "
ADDED = fe.op(
    "scaled", "x[N,D]:T, b[D]:T?, s:float32, k:int64, c[N]:T! -> y[N,D]:T, n[N]:int32",
    metal=BODY + "T v = x[i] * s + k; if (has_b) v += b[i % D]; y[i] = v; if (i % D == 0) "
    "{ n[i / D] = i; c[i / D] = v; }",
    grid="x.size", threadgroup="min(x.size, 96)",
)  # fmt: skip
STRIDED = fe.op(
    "strided", "x[*S,D]:T, w[D]:T? -> y[*S,D]:T",
    metal="uint2 p = thread_position_in_grid.xy; y[p.y * D + p.x] = x[p.y * x_strides[0] + p.x] + "
    "x_shape[0] + (has_w ? w[w_strides[0]] : w_shape[0]);",
    grid=("D", "x.size // max(D, 1)"), threadgroup=(8, 4), ensure_row_contiguous=False,
)  # fmt: skip
SIMD = fe.op(
    "simd", "x[N]:float32 -> y[N]:float32", metal=BODY + "y[i] = simd_sum(x[i]);",
    grid="N", threadgroup=64,
)  # fmt: skip
LAST = "y[0] = x[(x_shape[0] - 1) * x_strides[0]];"
EITHER = fe.op(
    "either", "x[N]:float32 -> y[N]:float32",
    cuda=[
        fe.cuda_body(LAST, grid="N", threadgroup=32, when="N % 2 == 1"),
        fe.cuda_body(LAST, grid="N", threadgroup=64, ensure_row_contiguous=False),
    ],
)  # fmt: skip

PARAMETERS = {
    "sums": "const T* x, float* out, int64_t n", "rotate": "const float* x, float* y",
    "reverse": "const T* x, T* y, int n", "f": "const float* x, float* y, int n, float scale",
    "count": "const int* x, int* bins, float* largest, int n",
    "plus": "float* c, const float* x, float* y, int n",
    "whole": "const float* partial, float* y, T* c, int d",
    "parts": "const T* x, const T* b, float s, half h, bf16 g, int64_t at, bool flip, "
    "float* partial, T* kept, uint32_t n, bool many, uint64_t all, double* seen",
}  # fmt: skip
# Of bodies: what `kernel_parameters` says, as what the driver's stand-in reads.
_EXTENTS, _SIZES = "list<long, 3> e{}", "fr::launch sizes"
BODIES = {
    "scaled": ("T* x", "T* b", "list<int, 1> s", "list<long, 1> k", "list<int, 1> d", "T* y",
               "int* n", "T* c", *(_EXTENTS.format(i) for i in range(5)), _SIZES),
    "strided": ("T* x", "list<int, 2> xs", "list<long, 2> xt", "T* w", "list<int, 1> ws",
                "list<long, 1> wt", "list<int, 1> d", "T* y",
                *(_EXTENTS.format(i) for i in range(3)), _SIZES),
    "simd": ("T* x", "T* y", _EXTENTS.format(0), _EXTENTS.format(1), _SIZES),
    "either": ("T* x", "list<int, 10> xs", "list<long, 10> xt", "T* y"),
}  # fmt: skip


@pytest.fixture(scope="module")
def packaged(fake_path: Path, library: nvrtc.Nvrtc) -> Library:
    try:
        nvrtc.find_headers(library)
    except fe.ToolchainError as missing:
        pytest.skip(str(missing))
    ints = torch.ones(3, dtype=torch.int32)
    given: dict[Op, tuple[Any, ...]] = {
        PIECES: (torch.ones(4, 3), None, torch.ones(4), 1.0, 1.0, 1.0, 1, True),
        TWICE: (torch.ones(3, 4), torch.ones(3, 4)),
        SUM_OP: (torch.ones(5), 1.0), REDUCTION: (torch.ones(4, 5),),
        ROTATION: (torch.ones(3, 4, 5),), REVERSAL: (torch.ones(3, 4),),
        CHOSEN: (torch.ones(5), 1.0), COUNTS: (ints, ints.clone()),
        HALVES: (torch.ones(4), 1.0, 1.0), SIMD: (torch.ones(5),), EITHER: (torch.ones(4),),
        ADDED: (torch.ones(4, 3), torch.ones(3), 1.0, 1, torch.ones(4)),
        STRIDED: (torch.ones(4, 3), None),
    }  # fmt: skip
    return Library(given, fake_path)


def sent(fake: FakeCuda, call: Any, values: tuple[Any, ...]) -> list[Any]:
    """What a call sends, with names for addresses; and what it returns and writes, in shape."""
    values = tuple(one.clone() if torch.is_tensor(one) and one.is_contiguous() else one
                   for one in values)  # fmt: skip
    fake.events.clear()
    found = call(*values)
    outputs = found if isinstance(found, (tuple, list)) else [found]
    named = {one.data_ptr(): f"input {i}" for i, one in enumerate(values)
             if torch.is_tensor(one) and one.numel()}  # fmt: skip
    named.update((one.data_ptr(), f"output {i}") for i, one in enumerate(outputs) if one.numel())
    others = [place for event in fake.events for place in _addresses(event)]
    others = [place for place in others if place and place not in named]
    first = min(others, default=0)  # of scratch; copies are anywhere
    copied = any(torch.is_tensor(one) and not one.is_contiguous() for one in values)

    def name(place: int) -> Any:
        elsewhere = "elsewhere" if copied else place - first
        return named.get(place, elsewhere if place else None)

    shapes = [(one.shape, one.dtype) for one in outputs]
    return [_named(event, name) for event in fake.events] + shapes + [first % 64]


def _addresses(event: Any) -> list[int]:
    if isinstance(event, Filled):
        return [event.address]
    if isinstance(event, Copied):
        return [event.to, event.source]
    return [one for one in event.arguments.values() if isinstance(one, int)]


def _named(event: Any, name: Any) -> Any:
    if isinstance(event, Filled):
        return event._replace(address=name(event.address), before=0)
    if isinstance(event, Copied):
        return event._replace(to=name(event.to), source=name(event.source))
    arguments = {k: name(v) if isinstance(v, int) else v for k, v in event.arguments.items()}
    return event._replace(arguments=arguments)


def same(fake: FakeCuda, packaged: Library, op: Op, *values: Any, forms: bool = True) -> list[Any]:
    """Fails unless an op sends in a package what it sends by itself; says what that is.

    Args:
        forms: whether blocks must be the same, too: a package has a kernel for the form of its
            example, and one for all.
    """
    op.torch_op  # noqa: B018
    eager: Any = torch_op.registered(full_name(op))
    for names in packaged.symbols[full_name(op)]:
        for function, symbol in names.items():
            fake.texts[symbol] = f"{symbol}({PARAMETERS[function.partition('<')[0]]})"
    calls = eager.run, packaged.overloads[full_name(op)]
    with fastcall.bypassed():  # for C the arrays are the CPU's, which has no stream
        found = [sent(fake, call, values) for call in calls]
    if not forms:
        found = [[_without_form(one) for one in events] for events in found]
    assert found[1] == found[0]
    return found[0]


def _without_form(event: Any) -> Any:
    if not isinstance(event, Launched):
        return event
    arguments = {name: value for name, value in event.arguments.items() if name != "sizes"}
    return event._replace(blocks=(), threads=(), arguments=arguments)


SMALL = st.integers(0, 9)
FLOATS = st.floats(-200, 200)
QUICK = settings(
    max_examples=40, deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)  # fmt: skip


@QUICK
@given(
    n=SMALL, d=SMALL, numbers=st.tuples(FLOATS, FLOATS, FLOATS),
    at=st.integers(-(2**63), 2**63 - 1), flip=st.booleans(),
)  # fmt: skip
def test_all_that_steps_can_say(
    fake: FakeCuda, packaged: Library, n: int, d: int, numbers: Any, at: int, flip: bool
) -> None:
    given = torch.randn(n, d), None, torch.ones(n), *numbers, at, flip
    same(fake, packaged, PIECES, *given)


def test_the_steps_of_one_call(fake: FakeCuda, packaged: Library) -> None:
    """What the comparison above compares: names, numbers, and what `when` leaves out."""
    given = torch.randn(3, 4), None, torch.ones(3), 0.5, 2.0, -1.0, -7, True
    *events, _, _, _, _, aligned = same(fake, packaged, PIECES, *given)
    kinds = [type(one) for one in events]
    assert kinds == [*[Filled] * 4, Copied, Launched, Launched, Filled, Filled]
    parts, whole = (one for one in events if isinstance(one, Launched))
    assert parts.arguments["x"] == "input 0" and parts.arguments["b"] is None
    assert parts.arguments["partial"] == 0 and parts.arguments["kept"] == 256
    assert parts.arguments["h"][:2] == np.float16(2).tobytes() and parts.shared == 32
    assert parts.arguments["many"][0] == 1 and aligned == 0
    assert whole.cluster == (4, 1, 1) and whole.stream == STREAM and whole.context == 0xC0
    given = torch.randn(4, 1), None, torch.ones(4), 0.5, 2.0, -1.0, -7, True
    events = same(fake, packaged, PIECES, *given)
    assert sum(isinstance(one, Launched) for one in events) == 1


@QUICK
@given(shape=st.lists(st.integers(0, 40), min_size=2, max_size=2), n=st.integers(1, 2000))
def test_the_units_of_the_other_tests(
    fake: FakeCuda, packaged: Library, shape: list[int], n: int
) -> None:
    same(fake, packaged, REDUCTION, torch.randn(shape))
    same(fake, packaged, REDUCTION, torch.randn(shape).t())
    same(fake, packaged, CHOSEN, torch.randn(n), 0.5)
    same(fake, packaged, COUNTS, torch.ones(n).int(), torch.ones(shape[0] + 1).int())
    if shape[1]:
        same(fake, packaged, ROTATION, torch.randn(shape[0], n % 8 + 1, shape[1]))
        same(fake, packaged, REVERSAL, torch.randn(*shape))
    same(fake, packaged, TWICE, torch.randn(*shape), torch.randn(*shape))


@QUICK
@given(shape=st.tuples(st.integers(1, 40), st.integers(1, 300)), s=FLOATS, k=st.integers(-9, 9))
def test_what_bodies_get(
    fake: FakeCuda, packaged: Library, shape: tuple[int, int], s: float, k: int
) -> None:
    for name, parameters in BODIES.items():
        fake.texts[f"ferrule_{name}"] = f"ferrule_{name}({', '.join(parameters)})"
    n, d = shape
    s = float(np.float32(s))
    x, b = torch.randn(n, d), torch.randn(d)
    same(fake, packaged, ADDED, x, b, s, k, torch.zeros(n))
    same(fake, packaged, ADDED, torch.randn(d, n).t(), b, s, k, torch.zeros(2 * n)[::2])
    offset = torch.randn(n, d + 1)[:, 1:]  # begins anywhere
    same(fake, packaged, STRIDED, offset, None, forms=False)
    same(fake, packaged, STRIDED, torch.randn(d, n).t(), None, forms=False)
    same(fake, packaged, SIMD, torch.randn(n * d))
    events = same(fake, packaged, EITHER, torch.randn(2 * d)[::2])
    assert events[0].arguments["xs"] == [d] + 9 * [0]
    assert (events[0].arguments["x"] == "input 0") == (d % 2 == 0 or d == 1)  # else rows are wanted


def test_large_launches_of_bodies(fake: FakeCuda, packaged: Library) -> None:
    for name, parameters in BODIES.items():
        fake.texts[f"ferrule_{name}"] = f"ferrule_{name}({', '.join(parameters)})"
    x = torch.ones(300_000, 2)
    same(fake, packaged, ADDED, x, x[0], 1.0, 1, torch.zeros(300_000), forms=False)
    same(fake, packaged, SIMD, x.view(-1))
    many = torch.ones(1, 1).expand(300_000, 8)  # in 75,000 threadgroups along y
    same(fake, packaged, STRIDED, many, None, forms=False)


def test_one_of_several_implementations_is_chosen(fake: FakeCuda, packaged: Library) -> None:
    seen = []
    for n in (1, 16, 17, 1000, 1001):
        launched = same(fake, packaged, CHOSEN, torch.randn(n), 0.5)[0]
        seen.append((launched.symbol, launched.blocks[0], launched.threads[0]))
    first, last = "ferrule_chosen", "ferrule_chosen"
    assert [one[1:] for one in seen] == [(1, 1), (1, 16), (1, 64), (16, 64), (8, 128)]
    assert [one[0] for one in seen] == [first, first, seen[2][0], seen[2][0], last]
    assert "f" in seen[2][0] and seen[2][0] != first


def test_shared_memory_is_asked_for_as_it_grows(fake: FakeCuda, packaged: Library) -> None:
    allowed = []
    for n in (100, 12 * 1024, 12 * 1024 + 1, 40_000, 20_000):
        packaged(REVERSAL, torch.ones(2, n))
        allowed.append(fake.dynamic["reverse"])
    assert allowed == [0, 0, 49156, 160_000, 160_000]
    fake.events.clear()
    with pytest.raises(RuntimeError, match=r"232452 bytes of shared memory.* has 232448 at most"):
        packaged(REVERSAL, torch.ones(1, 58113))
    assert not fake.events


def test_steps_are_carried_out_in_order(fake: FakeCuda, packaged: Library) -> None:
    Emulated(fake)
    for n in (1, 6, 7, 8, 1000):
        x = torch.randint(9, (n,)).float()
        assert float(packaged(SUM_OP, x, 0.5)) == float(x.sum()) / 2
    assert float(packaged(SUM_OP, torch.ones(0), 1.0)) == 0


def test_what_is_written_in_place_is_copied_back_and_kept_apart(
    fake: FakeCuda, packaged: Library
) -> None:
    (names,) = packaged.symbols[full_name(TWICE)]
    fake.texts[names["plus"]] = f"{names['plus']}({PARAMETERS['plus']})"

    def run(one: Launched) -> None:
        given = one.arguments
        n = int.from_bytes(given["n"][:4], "little")
        c, x, y = ((ctypes.c_float * n).from_address(given[k]) for k in "cxy")
        for i in range(n):
            y[i] = c[i]
            c[i] += 2 * x[i]

    fake.on_launch = run
    for call in (torch_op.registered(full_name(TWICE)).run, packaged.overloads[full_name(TWICE)]):  # type: ignore[union-attr]
        whole, x = torch.zeros(3, 4), torch.randn(2, 3).t()
        before = call(whole[:, ::2], x)
        assert not before.any() and torch.equal(whole[:, ::2], 2 * x)
        assert not whole[:, 1::2].any()
        c = torch.arange(6.0).reshape(2, 3)
        before = call(c, c)  # reads what was there before
        assert torch.equal(c, 3 * before) and before.flatten().tolist() == [*range(6)]
    with pytest.raises(RuntimeError, match="'c' is written in place, but has many elements in one"):
        packaged(TWICE, torch.zeros(3, 1).expand(3, 4), torch.zeros(3, 4))


def test_another_gpu_is_made_current_and_left(fake: FakeCuda, packaged: Library) -> None:
    gpu, guards = (ctypes.c_int32.in_dll(packaged.loaded, f"here_{n}") for n in ("gpu", "guards"))
    try:
        for gpu.value in (1, 0, 1):
            fake.events.clear()
            packaged(REVERSAL, torch.ones(2, 20_000))
            (one,) = fake.events
            assert (one.context, one.stream) == (0xC0 + gpu.value, STREAM + gpu.value)
        assert guards.value == 0 and fake.dynamic["reverse"] == 80_000
        gpu.value = 40
        with pytest.raises(RuntimeError, match=r"32 GPUs, not of cuda:40|GPU is not there"):
            packaged(REVERSAL, torch.ones(2, 3))
    finally:
        gpu.value = 0


@pytest.mark.parametrize("value", [0.1, -65504.0, 6e-8, 65519.0, 2049.0, float("inf"), 1e-30])
def test_numbers_of_16_bits(fake: FakeCuda, packaged: Library, value: float) -> None:
    packaged(HALVES, torch.ones(3), value, value)
    fake.texts["ferrule_halves"] = "ferrule_halves(const float* x, half h, bf16 g)"
    fake.events.clear()
    y = packaged(HALVES, torch.ones(3), value, value)
    given = fake.events[-1].arguments
    assert given["h"][:2] == np.float16(value).tobytes() and (y == 3).all()
    bits = torch.tensor(value).bfloat16().view(torch.int16).item()
    assert int.from_bytes(given["g"][:2], "little", signed=True) == bits


# -- what is refused -------------------------------------------------------------------------------

NONE = fe.op(
    "none", "x[N]:float32 -> y[2]:float32",
    cuda=fe.cuda_unit(
        'extern "C" __global__ void f(float* y) {}',
        steps=[fe.cuda_step("f", ["y"], blocks="N", block=1, when="N != 3")],
    ),
)  # fmt: skip
COPIES = fe.op(
    "copies", "x[N]:float32, z[M]:float32 -> y[M]:float32",
    cuda=fe.cuda_unit("", steps=[fe.cuda_copy("y", "x")]),
)  # fmt: skip
LARGE = fe.op(
    "large", "x[N]:float32 -> y[N]:float32",
    cuda=fe.cuda_unit("", scratch={"t": "int64[N * 4611686018427387904]", "u": "int8[N - 1]"},
                      steps=[fe.cuda_fill("y"), fe.cuda_fill("t")]),
)  # fmt: skip
CLUSTER = one_step(cluster=2)


@pytest.fixture(scope="module")
def bad(fake_path: Path, library: nvrtc.Nvrtc) -> tuple[Library, list[Op]]:
    ops = [one_step(**changed) for changed, _, _ in SIZES]
    given: dict[Op, tuple[Any, ...]] = {
        op: (torch.zeros(8, dtype=torch.uint8), 1) for op in (*ops, CLUSTER)
    }
    given[NONE] = given[LARGE] = (torch.zeros(7),)
    given[COPIES] = (torch.zeros(4), torch.zeros(5))
    return Library(given, fake_path), ops


@pytest.mark.parametrize("which", range(len(SIZES)))
def test_errors_come_before_anything_is_started(
    fake: FakeCuda, bad: tuple[Library, list[Op]], which: int
) -> None:
    packaged, ops = bad
    fake.set(most=512)
    message = r"op 'one': .*(step 'f'|divides by zero|300000 bytes of shared memory)"
    with pytest.raises(RuntimeError, match=message):
        packaged(ops[which], torch.zeros(6, dtype=torch.uint8), 1)
    assert not fake.events


def test_what_only_a_call_shows(fake: FakeCuda, bad: tuple[Library, list[Op]]) -> None:
    packaged, _ = bad
    for n in (0, 3):
        with pytest.raises(RuntimeError, match=r"op 'none': the steps .* nothing to output 'y'"):
            packaged(NONE, torch.zeros(n))
    with pytest.raises(RuntimeError, match="copies 4 elements of float32 to 3 elements of float32"):
        packaged(COPIES, torch.zeros(4), torch.zeros(3))
    with pytest.raises(RuntimeError, match="'large': its scratch is too large for x float32"):
        packaged(LARGE, torch.zeros(1))
    with pytest.raises(RuntimeError, match=r"`scratch`: u: N - 1 is -1 for x float32 \(0,\)"):
        packaged(LARGE, torch.zeros(0))
    x = torch.zeros(6, dtype=torch.uint8)
    fake.library.fake_capability(8)
    with pytest.raises(RuntimeError, match=r"no machine code for a GPU of .* 8\.0"):
        packaged(CLUSTER, x, 1)
    assert not fake.events
    fake.library.fake_capability(9)
    fake.status = 2
    with pytest.raises(RuntimeError, match=r"'fill y' cannot .* 2, CUDA_ERROR_OUT_OF_MEMORY"):
        packaged(CLUSTER, x, 1)


def test_what_cannot_be_packaged_is_refused(library: nvrtc.Nvrtc) -> None:
    def refused(unit: Any, message: str) -> None:
        op = fe.op("much", "x[N]:float32 -> y[N]:float64", cuda=unit)

        class Model(torch.nn.Module):
            def forward(self, x: Any) -> Any:
                return op(x)

        program = fe.export_for("cuda", Model(), (torch.ones(3),))
        with pytest.raises(KernelError, match=message):
            torch_package._packaged(program, ["sm_90"])

    fill = fe.cuda_fill("y")
    refused(fe.cuda_unit("", steps=[fill] * 65), "op 'much' has .* 65 steps; .* room for 64")
    scratch = {f"s{i}": "int8[N]" for i in range(33)}
    refused(fe.cuda_unit("", steps=[fill], scratch=scratch), "with 33 scratch arrays; .* 32")
    step = fe.cuda_step("f", ["N"] * 300, blocks=1, block=1)
    refused(fe.cuda_unit("", steps=[fill, step, step]), "with 600 arguments of steps; .* 512")
    refused(fe.cuda_unit("", steps=[fe.cuda_fill("y", 0.1)]), "which no memset does")


def test_the_structures_are_those_of_the_drivers_header(
    library: nvrtc.Nvrtc, tmp_path: Path
) -> None:
    folders = nvrtc.find_headers(library).folders
    folder = next((f for f in folders if (Path(f) / "cuda.h").is_file()), None)
    compiler = shutil.which("g++") or shutil.which("clang++")
    if folder is None or compiler is None:
        pytest.skip("there is no cuda.h, or no C++ compiler")
    pairs = {
        "FR_CLUSTER_DIMENSION": "CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION",
        "FR_PROGRAMMATIC": "CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION",
        "FR_CAPTURE_RELAXED": "CU_STREAM_CAPTURE_MODE_RELAXED",
        "FR_MOST_THREADS": "CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK",
        "FR_FIXED_SHARED": "CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES",
        "FR_MOST_DYNAMIC_SHARED": "CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES",
        "FR_MOST_SHARED": "CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN",
        "FR_CAPABILITY_MAJOR": "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR",
        "FR_CAPABILITY_MINOR": "CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR",
        "sizeof(fr_launch_config)": "sizeof(CUlaunchConfig)",
        "sizeof(fr_launch_attribute)": "sizeof(CUlaunchAttribute)",
        "offsetof(fr_launch_attribute, value)": "offsetof(CUlaunchAttribute, value.clusterDim)",
    }
    members = {"blocks": "gridDimX", "block": "blockDimX", "shared": "sharedMemBytes",
               "stream": "hStream", "attributes": "attrs", "count": "numAttrs"}  # fmt: skip
    pairs.update(
        {
            f"offsetof(fr_launch_config, {own})": f"offsetof(CUlaunchConfig, {theirs})"
            for own, theirs in members.items()
        }
    )
    functions = {
        "launch": "cuLaunchKernel", "copy": "cuMemcpyDtoDAsync_v2", "fill16": "cuMemsetD16Async",
        "function": "cuKernelGetFunction", "kernel_attribute": "cuKernelGetAttribute",
        "set_attribute": "cuKernelSetAttribute", "launch_config": "cuLaunchKernelEx",
        "capture_mode": "cuThreadExchangeStreamCaptureMode", "attribute": "cuDeviceGetAttribute",
    }  # fmt: skip
    # Handles are pointers and enums are ints to us, so how many bytes each parameter has.
    head = """
    #include <cuda.h>
    #include <cstddef>
    template <class... A> struct sizes { static constexpr size_t of[] = {sizeof(A)..., 0}; };
    template <class R, class... A> sizes<R, A...> in(R (*)(A...));
    template <class A, class B> constexpr bool same(A, B) {
      bool found = sizeof A::of == sizeof B::of;
      for (size_t i = 0; found && A::of[i]; i++) found = A::of[i] == B::of[i];
      return found;
    }
    """
    lines = [f'static_assert(size_t({a}) == size_t({b}), "{a}");' for a, b in pairs.items()]
    lines += [
        f'static_assert(same(decltype(in(fr_cuda.{a})){{}}, decltype(in(&{b})){{}}), "{a}");'
        for a, b in functions.items()
    ]
    text = tmp_path / "driver.cpp"
    text.write_text("\n".join([package_text.text([]), head, *lines, ""]))
    flags = [f"-I{one}" for one in (folder, *package_text.INCLUDES)]
    command = [compiler, "-std=c++17", "-fsyntax-only", "-w", *flags, str(text)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr
