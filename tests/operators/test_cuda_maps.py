"""Tensor maps as arguments of steps of CUDA units: what calls and packages send to a driver whose
GPUs are the host, and what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ferrule as fe
from cuda_ops import compiled
from fake_cuda import FakeCuda, Mapped
from ferrule import CompileError, DeviceError, KernelError, KernelTypeError, Op
from ferrule.operators.file import full_name
from ferrule.tools import nvrtc
from test_cuda_op import gpu  # noqa: F401

torch = pytest.importorskip("torch")
from package_library import Library, skip_unless_built  # noqa: E402
from test_package_cuda import fake  # noqa: E402, F401

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
SOURCE = """
#include <cuda.h>
extern "C" __global__ void f(const __grid_constant__ CUtensorMap m, const T* x, int n,
                             const __grid_constant__ CUtensorMap o,
                             const __grid_constant__ CUtensorMap s, float* y) {}
"""
PARAMETERS = "f(CUtensorMap m, const T* x, int n, CUtensorMap o, CUtensorMap s, float* y)"
# A map of all dims, one of other dims and strides than the array's, and one of scratch.
MAPS = [
    fe.cuda_tensor_map("x", ("min(M, 64)", 8), swizzle="128B", l2="256B", fill="nan"),
    fe.cuda_tensor_map("y", (2, 1, 4), dims=(2, "M", "K // 2"), strides=("K // 2", "K")),
    fe.cuda_tensor_map("t", (16,)),
]


def mapped(**more: Any) -> Op:
    step = fe.cuda_step("f", [MAPS[0], "x", "M", *MAPS[1:], "y"], blocks="M", block=1)
    unit = fe.cuda_unit(SOURCE, scratch={"t": "int8[M * 16]"}, steps=[step], **more)
    return fe.op("mapped", "x[M,K]:T -> y[M,K]:float32", cuda=unit)


def expected(m: int, k: int, x: int, y: int, t: int, kind: int, size: int) -> list[Mapped]:
    return [
        Mapped(x, (k * size,), (k, m), (8, min(m, 64)), (kind, 0, 3, 3, 1)),
        Mapped(y, (4 * k, 2 * k), (k // 2, m, 2), (4, 1, 2), (7, 0, 0, 0, 0)),
        Mapped(t, (), (16 * m,), (16,), (0, 0, 0, 0, 0)),
    ]


@settings(
    max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(m=st.integers(1, 300), k=st.sampled_from([8, 16, 40]), half=st.booleans())
def test_calls(gpu: FakeCuda, m: int, k: int, half: bool) -> None:  # noqa: F811
    gpu.texts["f"] = PARAMETERS
    gpu.launches.clear()
    x = np.ones((m, k), np.float16 if half else np.float32)
    y = mapped()(x)
    (one,) = gpu.launches
    found = [one.arguments[name] for name in "mos"]
    places = x.ctypes.data, y.ctypes.data, found[2].address
    assert found == expected(m, k, *places, *((6, 2) if half else (7, 4)))
    assert found[2].address % 256 == 0
    assert (one.arguments["x"], one.arguments["y"]) == places[:2]
    assert int.from_bytes(one.arguments["n"][:4], "little") == m


def test_nothing_is_mapped_where_there_are_no_blocks(gpu: FakeCuda) -> None:  # noqa: F811
    assert mapped()(np.ones((0, 8), np.float32)).shape == (0, 8)
    assert not gpu.launches


WRONG = [
    ((4, 6), r"the tensor map of x has strides \(6,\) of float32; expected multiples of 16 bytes"),
    ((4, 0), r"the tensor map of x has dims \(4, 0\); expected 1 to 2\*\*31 each"),
]


@pytest.mark.parametrize(("shape", "message"), WRONG)
def test_sizes_that_no_map_has(gpu: FakeCuda, shape: Any, message: str) -> None:  # noqa: F811
    with pytest.raises(KernelError, match=f"`arguments of step 'f'` of op 'mapped': {message}"):
        mapped()(np.ones(shape, np.float32))
    assert not gpu.events


BOXES: list[tuple[dict[str, Any], str]] = [
    ({"box": ("M + 253", 8)}, r"the box \(257, 8\); expected 1 to 256 along each dim"),
    ({"box": ("M - 4", 8)}, r"the box \(0, 8\)"),
    ({"box": (1, 6)}, r"the box \(1, 6\) of float32; expected rows of a multiple of 16 bytes\."),
    ({"box": (1, 16), "swizzle": "32B"}, "16 bytes, 32 at most with this swizzle"),
    ({"array": "i", "box": (1, 8), "fill": "nan"}, "the fill 'nan' for int32; expected 'zeros'"),
    ({"box": (1, 8), "dims": ("M", "K"), "strides": (2,)}, r"strides \(2,\) of float32"),
]


@pytest.mark.parametrize(("how", "message"), BOXES)
def test_boxes_that_no_map_has(gpu: FakeCuda, how: Any, message: str) -> None:  # noqa: F811
    one = fe.cuda_tensor_map(**{"array": "x", **how})
    step = fe.cuda_step("f", [one], blocks=1, block=1)
    unit = fe.cuda_unit("", steps=[fe.cuda_fill("y"), step])
    op = fe.op("boxes", "x[M,K]:float32, i[M,K]:int32 -> y[]:float32", cuda=unit)
    with pytest.raises(KernelError, match=message):
        op(np.ones((4, 8), np.float32), np.ones((4, 8), np.int32))
    assert not gpu.events


def test_arrays_begin_where_maps_can(gpu: FakeCuda) -> None:  # noqa: F811
    x = np.ones(16 * 8 + 4, np.float32)
    shift = (4 - x.ctypes.data // 4) % 4
    assert mapped()(x[shift : shift + 128].reshape(16, 8)).shape == (16, 8)
    gpu.events.clear()
    with pytest.raises(KernelError, match="the tensor map of x is for arrays that begin at a mult"):
        mapped()(x[shift + 1 : shift + 129].reshape(16, 8))
    assert not gpu.events


def test_gpus_without_them(gpu: FakeCuda) -> None:  # noqa: F811
    gpu.library.fake_capability(8)
    op = fe.op(
        "old", "x[N]:float32 -> y[N]:float32",
        cuda=fe.cuda_unit(
            '#include <cuda.h>\nextern "C" __global__ void f(const CUtensorMap m) {}',
            steps=[fe.cuda_fill("y"), fe.cuda_step("f", [fe.cuda_tensor_map("y", (4,))], blocks=1,
                                                   block=1)],
        ),
    )  # fmt: skip
    with pytest.raises(DeviceError, match=r"step 'f' .* Fake GPU 0 has no tensor maps, which came"):
        op(np.ones(4, np.float32))
    assert not gpu.events


DECLARED: list[tuple[Any, str]] = [
    (fe.cuda_tensor_map("z", (4,)), r"there is no tensor map of 'z'; expected .* \(s, t, x, y\)"),
    (fe.cuda_tensor_map("b", (4, 4)), "there is no tensor map of 'b'"),
    (fe.cuda_tensor_map("x", (4,)), "`box` has 1 sizes for 2 dims; expected 2"),
    (fe.cuda_tensor_map("x", (4, 4), strides=(4, 1)), "`strides` has 2 sizes for 2 dims; expected"),
    (fe.cuda_tensor_map("s", (4, 4)), "'s' has a dim of several, so say `dims`"),
    (fe.cuda_tensor_map("x", (300, 4)), "`box` has the size 300; expected 1 to 256 along each"),
    (fe.cuda_tensor_map("x", (4, 0)), "`box` has the size 0; expected 1 to 256 along each dim"),
    (fe.cuda_tensor_map("x", ("2 * 150", 4)), "`box` has the size 2 [*] 150; expected 1 to 256"),
    (fe.cuda_tensor_map("x", "4"), "`box` is '4'; expected sizes such as"),
    (fe.cuda_tensor_map("x", (4, "M > 3")), "`box` has the condition M > 3; expected a size"),
    (fe.cuda_tensor_map("x", (1,) * 6, dims=(1,) * 6), "it has 6 dims; expected 1 to 5"),
]


@pytest.mark.parametrize(("value", "message"), DECLARED)
def test_what_is_refused_when_it_is_declared(value: Any, message: str) -> None:
    step = fe.cuda_step("f", [value, "y"], blocks=1, block=1)
    unit = fe.cuda_unit("", steps=[step], scratch={"t": "float32[4]"})
    rule = "x[M,K]:float32, s[*S,K]:float32, b[M,K]:float32? -> y[M,K]:float32"
    with pytest.raises((KernelError, KernelTypeError), match=message):
        fe.op("wrong", rule, cuda=unit)


@pytest.mark.parametrize(
    ("choice", "message"),
    [
        ({"swizzle": "100B"}, "`swizzle` is '100B'; expected one of 'none', '32B'"),
        ({"fill": 0}, "`fill` is 0; expected one of 'zeros', 'nan'"),
        ({"l2": 3}, "`l2` is 3; expected one of 'none', '64B'"),
    ],
)
def test_choices_are_refused_where_they_are_written(choice: Any, message: str) -> None:
    with pytest.raises(KernelError, match=f"the tensor map of 'x': {message}"):
        fe.cuda_tensor_map("x", (4, 4), **choice)
    damaged = replace(fe.cuda_tensor_map("x", (4, 4)), **choice)  # as of a file
    unit = fe.cuda_unit("", steps=[fe.cuda_step("f", [damaged, "y"], blocks=1, block=1)])
    with pytest.raises(KernelError, match=f"of op 'wrong'.*{message}"):
        fe.op("wrong", "x[M,K]:float32 -> y[M,K]:float32", cuda=unit)


@pytest.mark.parametrize("taken", ["const float* m", "int m", "float m"])
def test_functions_take_a_map_where_one_is_given(library: nvrtc.Nvrtc, taken: str) -> None:
    step = fe.cuda_step("f", [fe.cuda_tensor_map("y", (4,))], blocks=1, block=1)
    unit = fe.cuda_unit(f"__global__ void f({taken}) {{}}", steps=[step])
    op = fe.op("taken", "x[N]:float32 -> y[N]:float32", cuda=unit)
    with pytest.raises(CompileError, match="argument 1, the tensor map of y, is a CUtensorMap by"):
        compiled(op, [(4,)], ["float32"])


def test_files_have_maps() -> None:
    op = mapped()
    unit: Any = op.implementations[0]
    read = type(unit).from_json(op.name, op.rule, json.loads(json.dumps(unit.to_json())))
    assert read.to_json() == unit.to_json()
    assert [*map(str, read.steps[0].arguments[3].value.strides)] == ["K // 2", "K"]


@pytest.fixture(scope="module")
def packaged(fake_path: Path, library: nvrtc.Nvrtc) -> Library:
    skip_unless_built(library)
    return Library({mapped(): (torch.ones(20, 8),)}, fake_path)


def test_packages(fake: FakeCuda, packaged: Library) -> None:  # noqa: F811
    fake.texts["f"] = PARAMETERS
    call = packaged.overloads[full_name(mapped())]
    for m, k in ((1, 8), (300, 40), (17, 16)):
        fake.launches.clear()
        x = torch.ones(m, k)
        y = call(x)
        (one,) = fake.launches
        found = [one.arguments[name] for name in "mos"]
        assert found == expected(m, k, x.data_ptr(), y.data_ptr(), found[2].address, 7, 4)
        assert one.arguments["x"] == x.data_ptr() and one.arguments["y"] == y.data_ptr()
    fake.launches.clear()
    assert call(torch.ones(0, 8)).shape == (0, 8)
    with pytest.raises(RuntimeError, match="map of x cannot be: a stride is no multiple"):
        call(torch.ones(4, 6))
    with pytest.raises(RuntimeError, match="map of x cannot be: it begins at no multiple of 16"):
        call(torch.ones(33)[1:].view(4, 8))
    assert not fake.launches
