"""`metal_kernel` calls in files of `mx.export_function`, whose sizes are expressions or numbers."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ferrule
import on_cuda
from ferrule import KernelError
from ferrule.hosts.mlx.export import MARK, with_sizes
from mlx_files import FEW, I, again, altered, exported, kernels, level0, same, values, write
from mlx_versions import needs_mlx

pytestmark = needs_mlx(0, 32)

ROWS = ferrule.metal_kernel(
    name="rows", input_names=["x", "by"], output_names=["y", "sums"],
    source="uint i = thread_position_in_grid.x; uint j = thread_position_in_grid.y;"
    "y[j * D + i] = T(x[j * D + i] + by + x_shape[0]);"
    "if (i == 0) { T s = 0; for (int k = 0; k < D; k++) s += x[j * D + k]; sums[j] = s + B; }",
)  # fmt: skip
SIZES: dict[str, Any] = {
    "grid": ("x.shape[-1]", "sums.size", 1),
    "threadgroup": ("min(x.shape[1], 8)", 2, 1),
    "output_shapes": ["x.shape", ("x.size // x.shape[-1]",)],
}


def rows(x: mx.array, by: float = 2.5) -> list[mx.array]:
    return ROWS(
        inputs=[mx.exp(x), by], template=[("D", "x.shape[1]"), ("T", x.dtype), ("B", True)],
        output_dtypes=[x.dtype] * 2, init_value=3, **SIZES,
    )  # fmt: skip


def plain(x: mx.array, by: float = 2.5) -> list[mx.array]:
    e = mx.exp(x)
    return [e + by + x.shape[0], e.sum(axis=1) + 1]


def close(found: Any, wanted: Any) -> bool:
    return all(
        a.shape == b.shape and mx.allclose(a, b, rtol=1e-4).item()
        for a, b in zip(found, wanted, strict=True)
    )


@settings(FEW, max_examples=25)
@given(
    first=st.tuples(st.integers(1, 9), st.integers(1, 9)),
    others=st.lists(st.tuples(st.integers(1, 40), st.integers(1, 40)), min_size=1, max_size=4),
    by=st.floats(-4, 4, width=16), compiled=st.booleans(), twice=st.booleans(),
)  # fmt: skip
def test_expressions_follow_in_shapeless_files(
    first: tuple[int, int], others: list[tuple[int, int]], by: float, compiled: bool, twice: bool
) -> None:
    f: Callable[..., Any] = again(lambda x: rows(x, by), values(first) / 9, shapeless=True)
    if twice:  # exported again, for other sizes
        f = again(f, values(others[0]) / 9, shapeless=True)
    if compiled:
        f = mx.compile(f, shapeless=True)
    arrays = [values(shape) / 9 for shape in [first, *others, first]]
    results = [f(x) for x in arrays]  # all of them before one is evaluated
    for x, found in zip(arrays, results, strict=True):
        assert close(found, plain(x, by))


def test_expressions_in_files_of_fixed_shapes() -> None:
    back = again(rows, values((3, 4)))
    x = values((3, 4)) / 9
    assert close(back(x), plain(x))
    with pytest.raises(KernelError, match="no function for these arrays"):
        back(values((3, 5)))


def test_sizes_that_cannot_be_in_a_shapeless_file_are_said() -> None:
    def f(x: mx.array) -> mx.array:
        return ROWS(
            inputs=[x, 1], grid=("x.size", 1, 1), threadgroup=("x.size", 1, 1),
            output_shapes=["x.shape", ("x.size - 2",)], output_dtypes=[mx.float32] * 2,
            template=[("D", 1), ("T", mx.float32), ("B", 0)],
        )[0]  # fmt: skip

    back = again(f, values((2, 2)), shapeless=True)
    with pytest.raises(KernelError, match="4096 threads; at most 1024"):
        back(values((64, 64)))
    with pytest.raises(KernelError, match=r"`output_shapes`.*'sums'.*non-negative"):
        back(values((1, 1)))


def test_a_body_in_cuda_has_its_expressions_in_the_file() -> None:
    made = ferrule.cuda_kernel(name="lean", input_names=["x"], output_names=["y"],
                               source="y[blockIdx.x] = x[0] * N;")  # fmt: skip

    def f(x: mx.array) -> mx.array:
        (y,) = made(inputs=[x], grid=("x.size", 1, 1), threadgroup=(1, 1, 1),
                    template=[("N", "x.ndim")], output_shapes=["x.shape"],
                    output_dtypes=[x.dtype])  # fmt: skip
        return y

    file = exported(f, mx.zeros((2, 3)), shapeless=True)
    imported = ferrule.import_function(file)  # read, and checked
    if on_cuda.mlx_has_cuda():
        assert imported(mx.full((4, 5), 3.0))[0].tolist() == [[6.0] * 5] * 4
        return
    with pytest.raises(ferrule.DeviceError, match="lean"):
        imported(mx.zeros((4, 5)))


def test_the_expressions_are_a_comment_behind_the_text() -> None:
    (one,) = kernels(exported(rows, values((3, 4)), shapeless=True))
    text = one.state.decode(errors="replace")
    (comment,) = re.findall(re.escape(MARK) + r"(\{.*\})", text)
    assert json.loads(comment) == {
        "digest": json.loads(comment)["digest"],
        "sizes": {
            "grid": ["x.shape[1]", "sums.size", "1"],
            "threadgroup": ["min(x.shape[1], 8)", "2", "1"],
            "output_shapes": [["x.shape[0]", "x.shape[1]"], ["x.size // x.shape[1]"]],
            "template": {"D": "x.shape[1]"},
        },
    }


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (b'["x.shape[1]", "sums.size", "1"]', b'["x.shape[0]", "sums.size", "1"]', "grid"),
        (b'"min(x.shape[1], 8)"', b'"min(x.shape[1], 3)"', "threadgroup"),
        (b'["x.size // x.shape[1]"]', b'["x.size // x.shape[0]"]', "grid"),
        (b'["x.shape[0]", "x.shape[1]"]', b'["x.shape[1]", "x.shape[0]"]', "output shapes"),
        (b'{"D": "x.shape[1]"}', b'{"D": "x.shape[0]"}', "template"),
        (b'{"D": "x.shape[1]"}', b'{"E": "x.shape[1]"}', "sizes cannot be read: .*template"),
        (b'{"D": "x.shape[1]"}', b'{"D": "x.shape[7]"}', "names dim 7"),
        (b'{"D": "x.shape[1]"}', b'{"D": 123456789012}', "a size is no text"),
        (b'"threadgroup": [', b'"threadgrouq": [', "sizes cannot be read: 'threadgroup'"),
        (b'["x.shape[1]", "sums.size", "1"]', b'["x.shape[1]", "sums.size + 10"]', "three sizes"),
    ],
)  # fmt: skip
def test_expressions_that_were_altered_are_refused(old: bytes, new: bytes, said: str) -> None:
    unsigned = altered(exported(rows, values((3, 4)), shapeless=True), old, new, once=True)
    changed = Path(unsigned).read_bytes()
    start, mark, rest = changed.partition(MARK.encode())
    comment = rest[: rest.index(b"}}") + 2]
    begin = start.rindex(b"template <int D")
    text = start[begin:].decode()
    signed = with_sizes(text, json.loads(comment)["sizes"]).partition(MARK)[2].encode()
    signed = start + mark + signed + rest[len(comment) :]
    for file, why in ((unsigned, "not what its digest says"), (write(signed), said)):
        with pytest.raises(KernelError, match=why) as caught:
            ferrule.import_function(file)
        assert repr(file) in str(caught.value)
        assert "kernel 'custom_kernel_rows" in str(caught.value)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (b'{"digest"', b'{"digesT"', "not what its digest says"),
        (b'"sizes"', b'"sizeS"', "its op cannot be read"),
        (b'"sizes":', b'"sizes",', "cannot be read"),
        (b"T(x[j * D", b"T(x[j + D", "not what its digest says"),
        (struct.pack("<6i", 4, 3, 1, 4, 2, 1), struct.pack("<6i", 4, 5, 1, 4, 2, 1), "grid"),
    ],
)
def test_what_stands_around_them_too(old: bytes, new: bytes, said: str) -> None:
    file = altered(exported(rows, values((3, 4)), shapeless=True), old, new, once=True)
    with pytest.raises(KernelError, match=said):
        ferrule.import_function(file)


@pytest.mark.parametrize("make", [ferrule.metal_kernel, mx.fast.metal_kernel])
@pytest.mark.parametrize("compiled", [False, True])
def test_numbers_are_refused_as_in_a_shapeless_trace(make: Any, compiled: bool) -> None:
    f = level0(ferrule.metal_kernel)
    back = again(level0(make), mx.zeros((2, 3)), shapeless=True)
    if compiled:
        back = mx.compile(back, shapeless=True)
    x = values((2, 3))
    assert all(map(same, back(x), f(x)))
    traced = mx.compile(f, shapeless=True)
    traced(x)
    with pytest.raises(ValueError) as wanted:
        mx.eval(traced(values((2, 4))))
    with pytest.raises(ValueError) as found:
        mx.eval(back(values((2, 4))))
    name, _, said = str(found.value).partition(": input")  # MLX 0.32.0 writes more into a name
    assert "kernel 'lean" in name and said == str(wanted.value).partition(": input")[2]
    for part in ("input 'inp'", "(2, 4)", "(2, 3)", "ferrule.op", '"inp.size"'):
        assert part in str(found.value)
    assert all(map(same, back(x), f(x)))


def test_numbers_whose_inputs_keep_their_shapes_work_beside_sizes_that_change() -> None:
    made = ferrule.metal_kernel("state", ["s"], ["t"], I + "t[i] = s[i] + 1;")

    def f(x: mx.array, s: mx.array) -> Any:
        (t,) = made(inputs=[s], grid=(s.size, 1, 1), threadgroup=(8, 1, 1),
                    output_shapes=[s.shape], output_dtypes=[s.dtype])  # fmt: skip
        return mx.exp(x), t

    back = again(f, values((2, 3)), mx.zeros(4), shapeless=True)
    for shape in ((2, 3), (5, 1), (1, 7)):
        x, t = back(values(shape) / 9, mx.ones(4))
        assert x.shape == shape and t.tolist() == [2] * 4
