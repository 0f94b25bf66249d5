"""Kernels in files of `mx.export_function`: what MLX records is what ferrule records, and both run
here again."""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import assume, example, given
from hypothesis import strategies as st

import ferrule
import on_cuda
from ferrule import KernelError, KernelTypeError
from ferrule.hosts.mlx import build as mlx_build
from ferrule.hosts.mlx import file as mlx_file
from ferrule.hosts.mlx import node as mlx_node
from mlx_files import (
    DTYPES,
    FEW,
    FLOATS,
    METADATA,
    SCALE,
    I,
    again,
    content,
    elsewhere,
    expected_scale,
    exported,
    kernels,
    level0,
    operations,
    path,
    same,
    scale,
    values,
)
from mlx_versions import needs_mlx

pytestmark = needs_mlx(0, 32)

# -- the record is MLX's -------------------------------------------------------------------------

NEGATIVE = [("M", -7)] * mlx_build.at_least(0, 32, 4)  # whose name had a minus sign before
BODIES = {
    "plain": I + "out[i] = a[i % 4];",
    "described": I + "out[i] = a_shape[0] + a_strides[0] + b_ndim;",
    "threads": "out[thread_index_in_threadgroup] = threads_per_threadgroup.x;",
    "none": "out[0] = 1;",
}


@FEW
@given(
    body=st.sampled_from(sorted(BODIES)), a=st.lists(st.integers(1, 4), max_size=3).map(tuple),
    kinds=st.tuples(*[st.sampled_from(DTYPES)] * 3), scalar=st.booleans(),
    template=st.lists(st.sampled_from([
        ("N", 3), *NEGATIVE, ("B", True), ("C", False), ("T", mx.bfloat16), ("U", mx.complex64),
    ]), unique=True),
    flags=st.fixed_dictionaries({
        "ensure_row_contiguous": st.booleans(), "atomic_outputs": st.booleans(),
        "header": st.sampled_from(["", "struct S { int a; };\n", "// über"]),
        "compile_options": st.sampled_from([None, {"math_mode": "fast"}, {"math_mode": "relaxed"}]),
    }),
    init=st.sampled_from([None, 0, 1.5, float("inf")]), shapeless=st.booleans(),
)  # fmt: skip
@example("described", (), (mx.float32,) * 3, True, [], {}, None, False)
@example("plain", (3,), (mx.float32,) * 3, True, [], {}, -0.0, False)
def test_the_record_is_what_mlx_records(
    body: str, a: tuple[int, ...], kinds: Any, scalar: bool, template: Any, flags: Any, init: Any,
    shapeless: bool,
) -> None:  # fmt: skip
    kind, other, out = kinds
    if out in (mx.complex64, mx.bool_) or (init is not None and init > 1 and out not in FLOATS):
        init = None

    def function(kernel: Callable[..., Any]) -> Any:
        made = kernel(name="k", input_names=["a", "b"], output_names=["out"], source=BODIES[body],
                      **flags)  # fmt: skip

        def f(x: mx.array) -> mx.array:
            given = [x, 2.5 if scalar else mx.zeros((3, 3), other)]
            call = {"inputs": given, "grid": (7, 2, 1), "threadgroup": (4, 1, 1)}
            (found,) = made(template=template, output_shapes=[(7, 2)], output_dtypes=[out],
                            init_value=init, **call)  # fmt: skip
            return found.reshape(-1)

        return f

    x = mx.zeros(a, kind)
    ours, theirs = function(ferrule.metal_kernel), function(mx.fast.metal_kernel)
    found, wanted = (
        operations(ours, x, shapeless=shapeless),
        operations(theirs, x, shapeless=shapeless),
    )
    assert [one for one in found if one["name"] == "CustomKernel"] == [
        one for one in wanted if one["name"] == "CustomKernel"
    ]
    (found,), (wanted,) = kernels(exported(ours, x)), kernels(exported(theirs, x))
    assert found.state == wanted.state  # init_value, too, which MLX's events do not tell of
    assert (found.device, found.stream) == (wanted.device, wanted.stream) == (mlx_file.GPU, -1)


def test_verbose_calls_print_the_text_and_are_recorded(capfd: pytest.CaptureFixture[str]) -> None:
    texts = []
    for kernel in (mx.fast.metal_kernel, ferrule.metal_kernel):
        made = kernel(name="k", input_names=["a"], output_names=["b"], source="b[0] = a[0];")

        def f(x: mx.array, made: Any = made) -> Any:
            return made(inputs=[x], grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[(1,)],
                        output_dtypes=[mx.float32], verbose=True)  # fmt: skip

        operations(f, mx.zeros(3))
        texts.append(capfd.readouterr().out)
    assert texts[0] == texts[1] != ""


@pytest.mark.skipif(on_cuda.mlx_has_cuda(), reason="this MLX has a GPU")
def test_mlx_reads_the_files_itself() -> None:
    """It cannot run them without Metal; it refuses the GPU the first time, as it always does."""
    file = exported(lambda x: SCALE(x, mx.ones(3), 1.0), mx.zeros((2, 3)))
    for attempt in range(2):
        try:
            imported = mx.import_function(file)
            break
        except ValueError as error:
            assert attempt == 0 and "gpu stream" in str(error)
    (y,) = imported(mx.zeros((2, 3)))
    assert y.shape == (2, 3)
    with pytest.raises(RuntimeError, match=r"GPU backend is not available|Invalid stream"):
        mx.eval(y)


# -- round trips ---------------------------------------------------------------------------------


@FEW
@given(
    shape=st.lists(st.integers(1, 5), min_size=2, max_size=3).map(tuple),
    kind=st.sampled_from([mx.float32, mx.float16, mx.bfloat16, mx.int32, mx.uint8]),
    shapeless=st.booleans(), stock=st.booleans(),
)  # fmt: skip
def test_kernels_come_back(shape: Any, kind: Any, shapeless: bool, stock: bool) -> None:
    writes = level0(mx.fast.metal_kernel if stock else ferrule.metal_kernel)
    x = values(shape, kind)
    found = again(writes, mx.zeros(shape, kind), shapeless=shapeless)(x)
    wanted = level0(ferrule.metal_kernel)(x)
    assert all(map(same, found, wanted))


def test_a_signature_that_mlx_closes_too_early_is_read_all_the_same() -> None:
    made = mx.fast.metal_kernel(name="two", input_names=["a"], output_names=["b", "c"],
                                source="b[0] = a_shape[0]; c[0] = a[1];")  # fmt: skip

    def f(x: mx.array) -> Any:
        return made(inputs=[x], grid=(1, 1, 1), threadgroup=(1, 1, 1),
                    output_shapes=[(1,), (1,)], output_dtypes=[mx.int32, x.dtype])  # fmt: skip

    assert ") {\n  device" in operations(f, mx.zeros(5))[0]["arguments"][1]
    b, c = again(f, mx.zeros(5))(values((5,)))
    assert (b.item(), c.item()) == (5, values((5,))[1].item())


@FEW
@given(
    lead=st.lists(st.integers(0, 4), max_size=2), d=st.integers(1, 9),
    by=st.floats(-8, 8, width=16), masked=st.booleans(), shapeless=st.booleans(),
    kind=st.sampled_from([mx.float32, mx.float16]),
    other=st.lists(st.integers(0, 4), min_size=2, max_size=2), grad=st.booleans(),
)  # fmt: skip
@example([], 3, 0.5, True, mx.float32, True, [0, 0], True)
@example([], 3, 0.5, True, mx.float16, False, [0, 0], False)
def test_ops_come_back(
    lead: list[int], d: int, by: float, masked: bool, kind: Any, shapeless: bool, other: list[int],
    grad: bool,
) -> None:  # fmt: skip
    assume(not grad or (kind == mx.float32 and 0 not in lead + other))

    def f(x: mx.array, w: mx.array, m: mx.array) -> Any:
        return SCALE(x, w, by, m if masked else None) * 2

    def g(x: mx.array, w: mx.array, m: mx.array) -> Any:
        return mx.grad(lambda *a: f(*a, m).sum(), argnums=(0, 1))(x, w)

    def given_for(lead: list[int], d: int) -> list[mx.array]:
        return [values((*lead, d), kind), values((d,), kind, 1), values(tuple(lead), kind, 2)]

    what = g if grad else f
    back = again(what, *given_for(lead, d), shapeless=shapeless)
    sizes = [(lead, d)]
    if shapeless:
        sizes.append((other[: len(lead)], d + 3))
    for one, size in sizes:
        arrays = given_for(one, size)
        wanted = what(*arrays)
        wanted = wanted if isinstance(wanted, (tuple, list)) else (wanted,)
        assert all(map(same, back(*arrays), wanted))
        if not grad:
            w, m = arrays[1], arrays[2]
            plain = expected_scale(arrays[0], w, by, m if masked else None)
            assert mx.allclose(back(*arrays)[0], 2 * plain, atol=0.1)


@pytest.mark.filterwarnings("ignore:op 'scale")
def test_imported_functions_are_transformed_as_others_are() -> None:
    x, w = values((3, 4)), values((4,), seed=1)
    f = again(lambda x, w: mx.tanh(SCALE(mx.sin(x), w, 1.0)), x, w)

    def plain(x: mx.array, w: mx.array) -> mx.array:
        return mx.tanh(expected_scale(mx.sin(x), w, 1.0))

    def first(x: mx.array, w: mx.array) -> mx.array:
        return f(x, w)[0]

    batch = mx.stack([x, x + 1])
    changes: list[tuple[Callable[..., Any], mx.array]] = [
        (mx.compile, x), (lambda g: mx.vmap(g, in_axes=(0, None)), batch),
        (lambda g: mx.grad(lambda *a: g(*a).sum(), argnums=(0, 1)), x),
        (lambda g: mx.compile(mx.grad(lambda *a: (g(*a) ** 2).sum())), x),
        (lambda g: mx.vmap(mx.grad(lambda *a: g(*a).sum()), in_axes=(0, None)), batch),
    ]  # fmt: skip
    for change, one in changes:
        found, wanted = change(first)(one, w), change(plain)(one, w)
        several = found if isinstance(found, (tuple, list)) else [found]
        others = wanted if isinstance(wanted, (tuple, list)) else [wanted]
        for a, b in zip(several, others, strict=True):
            assert mx.allclose(a, b, atol=1e-5)
    assert same(mx.compile(f)(x, w)[0], f(x, w)[0])  # itself, a tuple
    twice = again(lambda x, w: f(x, w)[0] + 1, x, w)  # exported again
    assert same(twice(x, w)[0], f(x, w)[0] + 1)


def test_shapeless_files_follow_the_sizes() -> None:
    """Chains of kernels with operations of MLX between them, one function for all sizes."""
    rows = ferrule.op("rows", "x[N,D]:T -> y[N]:float32, z[N,2*D]:T",
                      metal="uint r = thread_position_in_grid.x; float s = 0;"
                      "for (int j = 0; j < D; j++) { s += x[r * D + j];"
                      "z[2 * r * D + j] = x[r * D + j]; z[(2 * r + 1) * D + j] = LEN; } y[r] = s;",
                      grid="N", threadgroup="min(N, 32)", template={"LEN": "N + 1"})  # fmt: skip

    def plain(x: mx.array) -> tuple[mx.array, ...]:
        def rows(x: mx.array) -> tuple[mx.array, mx.array]:
            more = mx.full(x.shape, x.shape[0] + 1, x.dtype)
            return x.sum(axis=1), mx.concatenate([x, more], axis=1)

        y, z = rows(mx.exp(x))
        y2, z2 = rows(z - 0.75)
        return y, y2 + y, z2

    def f(x: mx.array) -> tuple[mx.array, ...]:
        y, z = rows(mx.exp(x))
        y2, z2 = rows(SCALE(z - 1, z.sum(axis=0) * 0 + 1, 0.25))
        return y, y2 + y, z2

    back = again(f, values((3, 2)), shapeless=True)
    for shape in ((3, 2), (5, 7), (2, 1)):  # MLX itself crashes in sums over one row
        x = values(shape) / 9
        for found, wanted in zip(back(x), plain(x), strict=True):
            assert found.shape == wanted.shape and mx.allclose(found, wanted, atol=1e-4)
    traces = []

    def traced(x: mx.array) -> Any:
        traces.append(x.shape)
        return back(x)

    compiled = mx.compile(traced, shapeless=True)
    for shape in ((3, 2), (5, 7), (2, 1)):
        x = values(shape) / 9
        for found, wanted in zip(compiled(x), plain(x), strict=True):
            assert found.shape == wanted.shape and mx.allclose(found, wanted, atol=1e-4)
    assert traces == [(3, 2)]


def test_a_kernel_with_numbers_keeps_the_shapes_of_its_inputs() -> None:
    f = level0(ferrule.metal_kernel)
    back = again(f, mx.zeros((2, 3)), shapeless=True)
    assert all(map(same, back(values((2, 3))), f(values((2, 3)))))
    with pytest.raises(KernelError, match=r"'lean': input 'inp' has the shape \(2, 4\).*\(2, 3\)"):
        back(values((2, 4)))


def test_keywords_signatures_metadata_constants() -> None:
    kinds = {one: values((2, 3), one) for one in DTYPES}
    kinds[mx.bool_] = values((2, 3)) > 0
    kinds[mx.complex64] = values((2, 3)) + 1j
    everything = [*kinds.values(), mx.zeros((0, 3), mx.int64), mx.array(float("nan"), mx.bfloat16)]
    mx.eval(everything)
    w = values((3,), seed=4)

    def f(x: mx.array, *, z: mx.array | None = None, a: mx.array | None = None) -> Any:
        y = SCALE(x, w, 2.0)
        if a is not None and z is not None:
            y = y - a + 10 * z
        return [y, x, *everything, y]

    file, x = path(), values((4, 3))
    with mx.exporter(file, f, **METADATA) as exporter:
        exporter(mx.zeros((4, 3)))
        exporter(mx.zeros((2, 3)))
        exporter(mx.zeros((4, 3)), z=mx.zeros((4, 3)), a=mx.zeros(3))
    back, metadata = ferrule.import_function(file, return_metadata=True)
    assert metadata == METADATA.get("metadata", "")
    a, z = values((3,), seed=7), values((4, 3), seed=8)
    for one in (x, values((2, 3))):
        assert all(map(same, back(one), f(one)))
    for found in (back(x, a=a, z=z), back((x,), {"a": a, "z": z})):
        assert all(map(same, found, f(x, a=a, z=z)))
    assert all(map(same, back([x]), f(x)))
    only = ferrule.import_function(exported(lambda a, b: SCALE(a, b, 1.0), a=x, b=w))
    assert same(only(b=w, a=x)[0], only({"b": w, "a": x})[0])
    with pytest.raises(
        KernelError,
        match=r"no function for these arrays[^$]*"
        r"Called with \(float32\[5,3\]\)\n  It has one for \(float32\[4,3\]\)",
    ):
        back(values((5, 3)))  # fmt: skip
    for wrong in ((1,), (x, 2), ("a",), ()):
        with pytest.raises(KernelError, match=r"Inputs can either be|no function"):
            back(*wrong)


def test_files_without_kernels_and_without_inputs() -> None:
    back = again(lambda x: [mx.exp(x), mx.zeros((2, 2)), x], values((2,)))
    assert all(
        map(same, back(values((2,))), [mx.exp(values((2,))), mx.zeros((2, 2)), values((2,))])
    )
    made = ferrule.metal_kernel(name="count", input_names=[], output_names=["o"],
                                source=I + "o[i] = i;")  # fmt: skip

    def f(x: mx.array) -> mx.array:
        (found,) = made(inputs=[], grid=(4, 1, 1), threadgroup=(4, 1, 1), output_shapes=[(4,)],
                        output_dtypes=[mx.int32])  # fmt: skip
        return x + found

    assert [one["name"] for one in operations(f, mx.zeros(4, mx.int32))] == ["CustomKernel", "Add"]
    assert again(f, mx.zeros(4, mx.int32))(mx.ones(4, mx.int32))[0].tolist() == [1, 2, 3, 4]


def test_files_of_a_machine_with_a_gpu_run_here() -> None:
    """All their operations are on its GPU, of which MLX would need one to read them."""
    file = exported(lambda x: SCALE(mx.sin(x), mx.ones(3), 1.0) * 2, mx.zeros((2, 3)))
    before = content(file)
    moved = [one._replace(device=mlx_file.GPU, stream=0) for one in before.functions[0].operations]
    data = Path(file).read_bytes()
    for old, new in zip(before.functions[0].operations, moved, strict=True):
        name = struct.pack("<Q", len(old.name)) + old.name.encode()
        data = data.replace(
            struct.pack("<iii", old.stream, old.device, 0) + name,
            struct.pack("<iii", new.stream, new.device, 0) + name,
        )
    Path(file).write_bytes(data)
    assert {one.device for one in content(file).functions[0].operations} == {mlx_file.GPU}
    x = values((2, 3))
    (found,) = ferrule.import_function(file)(x)
    assert mx.allclose(found, (mx.sin(x) + 1) * 2)


def test_another_process_runs_the_file_without_the_op() -> None:
    op = scale(batch="D")
    op.def_jvp(lambda primals, tangents, outputs: [tangents[0]], version=1)
    file = exported(lambda x: op(x, mx.ones(3), 2.0), mx.zeros((2, 3)), shapeless=True)
    lines = elsewhere(
        "print(f(mx.ones((1, 3)))[0].tolist())\n"
        "print(mx.grad(lambda x: f(x)[0].sum())(mx.ones((1, 3))).tolist())\n"
        "try: print(mx.jvp(lambda x: f(x)[0], [mx.ones((1, 3))], [mx.ones((1, 3))]))\n"
        "except ValueError as error: print(error)\n",
        file,
    )
    assert lines[:2] == ["[[3.0, 3.0, 3.0]]", "[[1.0, 1.0, 1.0]]"]
    assert "read from a file, without its jvp rule" in lines[2]


def test_an_op_with_a_function_too_has_its_kernel_in_the_file() -> None:
    def run(x: Any) -> Any:
        raise AssertionError("not in a file")

    op = ferrule.op("both", "x[N]:T -> y[N]:T", metal=I + "y[i] = -x[i];", grid="N",
                    threadgroup=8, run=run, version=1).using("run", "metal")  # fmt: skip
    assert same(again(op, mx.zeros(3))(values((3,)))[0], -values((3,)))


def test_derivatives_that_are_functions_are_in_the_file() -> None:
    op = ferrule.op("cube", "x[N]:T -> y[N]:T", metal=I + "y[i] = x[i] * x[i] * x[i];", grid="N",
                    threadgroup=8)  # fmt: skip
    op.def_vjp(
        lambda primals, cotangents, outputs: [3 * primals[0] ** 2 * cotangents[0]], version=1
    )
    op.def_jvp(lambda primals, tangents, outputs: [3 * primals[0] ** 2 * tangents[0]], version=1)
    x = values((5,))
    grad = mx.grad(lambda x: op(x * 2).sum())
    assert same(again(grad, x)(x)[0], grad(x))

    def second(x: mx.array) -> mx.array:
        return mx.jvp(op, [x], [x + 1])[1][0]

    assert same(again(second, x)(x)[0], second(x))


@pytest.mark.filterwarnings("ignore:op 'scale' is called")
@pytest.mark.parametrize("axes", [(0, None, 0), (1, 0, None), (None, 0, 1)])
def test_batches_in_files(axes: tuple[int | None, ...]) -> None:
    x, w, m = values((2, 2, 3)), values((2, 3), seed=1), values((2, 2), seed=2)
    arrays = [
        array if axis is not None else array[0] for array, axis in zip((x, w, m), axes, strict=True)
    ]
    f = mx.vmap(lambda x, w, m: SCALE(x, w, 1.0, m), in_axes=axes)
    assert same(again(f, *arrays)(*arrays)[0], f(*arrays))


@pytest.mark.filterwarnings("ignore:op 'fma' is called")
def test_arrays_without_dims_in_batches_and_derivatives() -> None:
    op = ferrule.op("fma", "a[*S]:T, b[*S]:T, c[]:T -> y[*S]:T, z[]:T", threadgroup=8,
                    metal=I + "y[i] = a[i] * b[i] + c; if (i == 0) z[0] = c;", grid="a.size",
                    )  # fmt: skip
    op.def_vjp(lambda p, c, o: [p[1] * c[0], p[0] * c[0], c[0].sum() + c[1]], version=1)
    a, b, c = mx.array(2.0), mx.array(3.0), mx.array(4.0)
    assert [one.tolist() for one in again(op, a, b, c, shapeless=True)(a, b, c)] == [10, 4]
    grads = again(lambda *x: mx.grad(lambda *x: sum(op(*x)), argnums=(0, 1, 2))(*x), a, b, c)
    assert [one.tolist() for one in grads(a, b, c)] == [3, 2, 2]
    many = mx.vmap(op, in_axes=(0, None, 0))
    for size in (1, 3):
        one = mx.arange(size).astype(mx.float32)
        assert all(map(same, again(many, one, b, one)(one, b, one), many(one, b, one)))


# -- what is refused ------------------------------------------------------------------------------


def test_what_files_cannot_hold_is_refused_by_name() -> None:
    x = mx.zeros(3)

    def run(x: Any) -> Any:
        return x

    op = ferrule.op("python", "x[N]:T -> y[N]:T", run=run)
    with pytest.raises(
        KernelError, match=r"'python' cannot be exported.*the Python function of `run`"
    ):
        exported(op, x)
    unit = ferrule.cuda_unit('extern "C" __global__ void f(float* y) {}',
                             steps=[ferrule.cuda_step("f", ["y"], blocks=1, block=32)])  # fmt: skip
    op = ferrule.op("unit", "x[N]:float32 -> y[N]:float32", cuda=unit)
    with pytest.raises(KernelError, match=r"'unit' cannot be exported.*a CUDA unit alone"):
        exported(op, x)
    op = ferrule.op("place", "x[N]:T! ->", metal=I + "x[i] = 1;", grid="N", threadgroup=8)
    with pytest.raises(KernelError, match="'place' writes its inputs in place"):
        exported(op, x)
    op = ferrule.op("fill", "x[N]:T -> y[N]:int32", metal="", grid="N", threadgroup=8,
                    init_value=2**24 + 1)  # fmt: skip
    with pytest.raises(
        KernelError, match=r"kernel 'fill' has the `init_value` 16777217, .* 16777216"
    ):
        exported(op, x)
    op = ferrule.op("wide", "x[N]:T, by:float64 -> y[N]:T", metal="", grid="N", threadgroup=8,
                    init_value=0)  # fmt: skip
    with pytest.raises(KernelError, match="'wide' has arguments of float64, which Metal has not"):
        exported(lambda x: op(x, 1.0), x)
    with pytest.raises(KernelTypeError, match=r"input 'w' of op 'scale': got \[1\] of type list"):
        exported(lambda x: SCALE(x, [1], 1.0), x)
    with pytest.raises(KernelError, match=r"input 'w' of op 'scale'"):
        exported(lambda x: SCALE(x, mx.zeros(4), 1.0), x)
    with pytest.raises(ValueError, match="has no derivative: a metal_kernel call has none"):
        exported(mx.grad(lambda x: level0(ferrule.metal_kernel)(x)[0].sum()), mx.zeros((2, 2)))


def test_the_cpu_is_refused_as_mlx_refuses_it() -> None:
    for make in (mx.fast.metal_kernel, ferrule.metal_kernel):
        made = make(name="k", input_names=["a"], output_names=["b"], source="b[0] = a[0];")

        def f(x: mx.array, stream: Any, made: Any = made) -> Any:
            return made(inputs=[x], grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[(1,)],
                        output_dtypes=[mx.float32], stream=stream)  # fmt: skip

        for stream in (mx.cpu, mx.Device(mx.cpu), mx.default_stream(mx.cpu)):
            with pytest.raises(ValueError, match="Only supports the GPU"):
                exported(lambda x, s=stream, f=f: f(x, s), mx.zeros(3))
        for stream in (None, mx.gpu, mx.Device(mx.gpu)):
            assert kernels(exported(lambda x, s=stream, f=f: f(x, s), mx.zeros(3)))[0].stream == -1
        with mx.stream(mx.cpu):
            assert kernels(exported(lambda x, f=f: f(x, None), mx.zeros(3)))[0].stream == -1


def test_what_was_called_before_the_export_is_refused_until_it_is_evaluated() -> None:
    w = SCALE(values((2, 3)), mx.ones(3), 1.0)
    with pytest.raises(ValueError, match=r"op.'scale'.\(evaluate.it.before.mx.export_function\)"):
        exported(lambda x: x + w, mx.zeros((2, 3)))
    mx.eval(w)
    assert same(again(lambda x: x + w, mx.zeros((2, 3)))(w)[0], w + w)


def test_calls_with_constants_alone_stand_in_the_file() -> None:
    w = values((2, 3))

    def f(x: mx.array) -> mx.array:
        return x + SCALE(w, mx.ones(3), 1.0)

    file = exported(f, mx.zeros((2, 3)))
    assert len(kernels(file)) == 1
    assert same(ferrule.import_function(file)(w)[0], f(w))


def test_one_thread_exports_while_others_run() -> None:
    # On the CPU from the first: MLX's CUDA backend (0.32.4) moves what a GPU wrote when it is read
    # there, and several threads do so at once.
    with mx.stream(mx.cpu):
        x, w = values((3, 4)), mx.ones(4)
        wanted = SCALE(x, w, 1.0)
        mx.eval(x, w, wanted)
    wrong: list[object] = []
    done = threading.Event()

    def run() -> None:
        while not done.is_set():
            found = SCALE(x, w, 1.0)
            compiled = mx.compile(lambda x: SCALE(x, w, 1.0))(x)
            if not (same(found, wanted) and same(compiled, wanted)):
                wrong.append(found)

    def guarded() -> None:
        try:
            with mx.stream(mx.new_stream(mx.cpu)):
                run()
        except Exception as error:
            wrong.append(error)

    threads = [threading.Thread(target=guarded) for _ in range(3)]
    for one in threads:
        one.start()
    try:
        for _ in range(30):
            file = exported(lambda x: SCALE(x, w, 1.0), x)
            assert [one.stream for one in kernels(file)] == [-1]
    finally:
        done.set()
        for one in threads:
            one.join()
    assert wrong == []


def test_outside_of_the_trace_calls_run() -> None:
    assert not mlx_node.exporting()
    mx.eval(SCALE(values((2, 3)), mx.ones(3), 1.0))
    with pytest.raises(ZeroDivisionError):
        exported(lambda x: 1 / 0, mx.zeros(3))
    assert not mlx_node.exporting()
    assert (
        mx.grad(lambda x: SCALE(x, mx.ones(3), 1.0).sum())(values((2, 3))).tolist() == [[1] * 3] * 2
    )


# -- CUDA -----------------------------------------------------------------------------------------

CUDA = """
auto i = cg::this_grid().thread_rank();
if (i < inp_shape[0]) out[i] = T(float(inp[i]) * N + by[0]);
"""
CUDA_TEXT = """
#include "mlx/backend/cuda/device/utils.cuh"

#include <cooperative_groups.h>

// header
namespace mlx::core::cu {

namespace cg = cooperative_groups;

__global__ void custom_kernel_lean_3_t___half_float16_t(
    const __half* inp,
    const __grid_constant__ Shape inp_shape,
    const float* by,
    __half* out) {
  constexpr int N = 3;
  constexpr bool B = true;
  using T = __half;

BODY
}

} // namespace mlx::core::cu
"""


def cuda_kernel() -> ferrule.CudaKernel:
    return ferrule.cuda_kernel(name="lean", input_names=["inp", "by"], output_names=["out"],
                               source=CUDA, header="// header\n", shared_memory=64)  # fmt: skip


def call_cuda(x: mx.array) -> mx.array:
    (found,) = cuda_kernel()(inputs=[x, 2.0], grid=(x.size, 1, 1), threadgroup=(32, 1, 1),
                             template=[("N", 3), ("B", True), ("T", x.dtype)],
                             output_shapes=[x.shape], output_dtypes=[x.dtype])  # fmt: skip
    return found


def test_cuda_kernels_are_recorded_with_the_text_that_mlx_writes() -> None:
    (one,) = operations(call_cuda, mx.zeros(5, mx.float16))
    name, text, *numbers = one["arguments"]
    name_of = "custom_kernel_lean_3_t_float16_t"
    assert name == name_of
    assert text == CUDA_TEXT.replace("custom_kernel_lean_3_t___half_float16_t", name_of).replace(
        "BODY", CUDA
    )
    assert numbers == [
        5,
        1,
        1,
        32,
        1,
        1,
        [(True, False, False), (False,) * 3],
        True,
        [],
        False,
        64,
        0,
    ]


def test_cuda_kernels_of_a_file_need_cuda() -> None:
    file = exported(call_cuda, mx.zeros(5, mx.float16))
    imported = ferrule.import_function(file)  # read, and checked
    if on_cuda.mlx_has_cuda():
        x = mx.arange(5, dtype=mx.float16)
        assert imported(x)[0].tolist() == call_cuda(x).tolist() == [2, 5, 8, 11, 14]
        with mx.stream(mx.cpu), pytest.raises(ferrule.DeviceError, match=r"'lean'.*stream=mx\.gpu"):
            mx.eval(call_cuda(x))
        return
    with pytest.raises(ferrule.DeviceError, match="lean"):
        imported(mx.zeros(5, mx.float16))
    with pytest.raises(ferrule.DeviceError, match="lean"):  # and outside of exports nothing changed
        call_cuda(mx.zeros(5))


def test_ops_in_cuda_get_numbers_and_dims_as_values() -> None:
    op = ferrule.op(
        "values", "x[*S,D]:T, c[]:T, by:float32 -> y[*S,D]:T", grid="x.size", threadgroup=64,
        cuda="int i = blockIdx.x; y[i] = x[i] * D + by + c[0] + c_ndim + x_shape[0];",
        shared_memory="4 * D",
    )  # fmt: skip
    (one,) = operations(lambda x: op(x, mx.array(1.0), 2.0), mx.zeros((2, 5)))[-1:]
    name, text, *numbers = one["arguments"]
    assert name == "custom_kernel_values_float"
    signature = text[text.index("(\n") : text.index("int i")]
    assert (
        signature
        == """(
    const float* x,
    const __grid_constant__ Shape x_shape,
    const float* c,
    const float* fr_a_by,
    const int32_t* fr_a_D,
    float* y) {
  using T = float;

  constexpr int c_ndim = 0;
  const float by = *fr_a_by;
  const int32_t D = *fr_a_D;
"""
    )
    assert numbers[6] == [(True, False, False), *[(False,) * 3] * 3]
    assert numbers[-2] == 20
    file = exported(lambda x: op(x, mx.array(1.0), 2.0), mx.zeros((2, 5)), shapeless=True)
    imported = ferrule.import_function(file)
    if on_cuda.mlx_has_cuda():
        (y,) = imported(mx.arange(4.0).reshape(2, 2))
        assert y[0, 0].item() == 0 * 2 + 2 + 1 + 0 + 2
        return
    with pytest.raises(ferrule.DeviceError, match="'values' has nothing that runs on 'cpu'"):
        imported(mx.zeros((4, 5)))


def test_an_op_with_both_has_metal_in_the_file_and_cuda_with_it() -> None:
    op = ferrule.op("pair", "x[N]:T -> y[N]:T", metal=I + "y[i] = x[i] + 1;",
                    cuda="y[threadIdx.x] = 1;", grid="N", threadgroup=8)  # fmt: skip
    file = exported(op, mx.zeros(3))
    (one,) = kernels(file)
    assert b"[[kernel]]" in one.state and b"y[threadIdx.x] = 1;" in one.state
    assert ferrule.import_function(file)(mx.zeros(3))[0].tolist() == [1, 1, 1]
