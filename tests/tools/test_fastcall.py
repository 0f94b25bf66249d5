"""Repeated calls by C against the long way: the same results, the same errors, no Python code."""

from __future__ import annotations

import gc
import signal
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd import forward_ad

import ferrule
from ferrule.kernels import arguments, entries
from ferrule.tools import fastcall

pytestmark = pytest.mark.skipif(fastcall.library() is None, reason="built without Python's headers")

ADD = ferrule.metal_kernel(
    name="fast_add",
    input_names=["a", "s"],
    output_names=["out"],
    source="uint i = thread_position_in_grid.x; out[i] = T(a[i]) + T(s);",
)
SHAPED = ferrule.metal_kernel(
    name="fast_shaped",
    input_names=["a"],
    output_names=["out", "sizes"],
    source="""
    uint i = thread_position_in_grid.x;
    out[i] = a[elem_to_loc(i, a_shape, a_strides, a_ndim)];
    for (int k = 0; i == 0 && k < a_ndim; ++k) {
      sizes[k] = a_shape[k]; sizes[k + a_ndim] = int(a_strides[k]);
    }
    """,
    ensure_row_contiguous=False,
)


def add(a: Any, s: Any, **more: Any) -> Any:
    call: dict[str, Any] = {
        "inputs": [a, s],
        "output_shapes": [a.shape],
        "output_dtypes": [a.dtype],
        "grid": (int(np.prod(a.shape)), 1, 1),
        "threadgroup": (32, 1, 1),
        "template": [("T", a.dtype)],
    }
    return ADD(**{**call, **more})[0]


def shaped(a: Any) -> list[Any]:
    int32 = torch.int32 if isinstance(a, torch.Tensor) else np.int32
    return SHAPED(
        inputs=[a],
        output_shapes=[a.shape, (2 * a.ndim,)],
        output_dtypes=[a.dtype, int32],
        grid=(int(np.prod(a.shape)), 1, 1),
        threadgroup=(32, 1, 1),
    )


@pytest.fixture
def by_c(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], None]]:
    """From its call on, the long way fails the test."""

    def forbid() -> None:
        def gather(*_: Any) -> Any:
            raise AssertionError("the long way was taken")

        monkeypatch.setattr(arguments, "gather", gather)

    yield forbid


def warm(function: Callable[[], Any]) -> Any:
    for _ in range(3):
        result = function()
    return result


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_repeated_calls_run_no_python(kind: str, by_c: Callable[[], None]) -> None:
    make: Any = np.arange if kind == "numpy" else torch.arange
    a = make(40.0).astype(np.float32) if kind == "numpy" else make(40.0)
    warm(lambda: add(a, 2.0))
    warm(lambda: shaped(a.reshape(5, 8).T if kind == "numpy" else a.reshape(5, 8).t()))
    by_c()
    assert np.array_equal(np.asarray(add(a + 1, -0.5)), np.arange(40, dtype=np.float32) + 0.5)
    given_ = a.reshape(5, 8).T if kind == "numpy" else a.reshape(5, 8).t()
    out, sizes = shaped(given_)
    assert type(out) is type(a)
    assert np.array_equal(np.asarray(out).reshape(8, 5), np.arange(40.0).reshape(5, 8).T)
    assert list(np.asarray(sizes)) == [8, 5, 1, 8]


DTYPES = ("float32", "float16", "bfloat16", "int32", "int64", "uint8", "uint32", "bool")


@settings(deadline=None, max_examples=120)
@given(
    data=st.data(),
    library=st.sampled_from(["numpy", "torch"]),
    name=st.sampled_from(DTYPES),
    shape=st.lists(st.integers(0, 5), max_size=3).map(tuple),
    scalar=st.sampled_from([0, 1, -3, 2**31, True, False, 0.5, -0.0, float("inf"), 2**40]),
    fill=st.sampled_from([None, 0, 0.0, 1, True, 3.7]),
)
def test_any_call_is_what_the_long_way_gives(
    data: st.DataObject, library: str, name: str, shape: tuple[int, ...], scalar: Any, fill: Any
) -> None:
    values = np.arange(int(np.prod(shape)) or 1)[: int(np.prod(shape))].reshape(shape)
    a: Any
    if library == "numpy":
        a = values.astype(ml_dtypes.bfloat16 if name == "bfloat16" else name)
    else:
        a = torch.from_numpy(values).to(getattr(torch, name))
    if a.ndim > 1 and data.draw(st.booleans()):
        a = a.swapaxes(0, 1)

    def run() -> list[Any]:
        grid = (int(np.prod(shape)), 1, 1)
        got = [add(a, scalar, grid=grid, init_value=fill)]
        return got if 0 in grid or not a.ndim else [*got, *shaped(a)]

    try:
        with fastcall.bypassed():
            want = run()
    except ferrule.FerruleError as error:
        for _ in range(3):
            with pytest.raises(type(error)) as again:
                run()
            assert str(again.value) == str(error)
        return
    for _ in range(3):
        for g, w in zip(run(), want, strict=True):
            assert g.dtype == w.dtype and tuple(g.shape) == tuple(w.shape)
            if library == "torch":
                assert torch.equal(g, w) or (g != g).equal(w != w)
            else:
                assert g.tobytes() == w.tobytes()


def test_what_a_call_differs_in_is_seen() -> None:
    a, b = np.arange(64, dtype=np.float32), np.arange(64, dtype=np.int32)
    for _ in range(4):  # the same sizes, other dtypes, scalars, fills and templates
        assert add(a, 1.5)[1] == 2.5
        assert add(b, 1)[1] == 2 and add(b, 2**40 + 1)[1] == 2
        assert add(a, True)[1] == 2.0
        assert add(a, 1, template=[("T", np.int32)])[1] == 2.0
        half = add(a, 1.0, grid=(32, 1, 1), init_value=9)
        assert half[31] == 32 and half[32] == 9
        other = add(a, 1.0, grid=(32, 1, 1), init_value=9.0)
        assert other[32] == 9
        assert add(a, 1.0, output_dtypes=[np.float16]).dtype == np.float16
        assert add(a, 1.0, output_shapes=[(8, 8)]).shape == (8, 8)


@pytest.mark.parametrize("name", [d.name for d in ferrule.dtypes.FLOAT8])
@pytest.mark.parametrize("library", [np, torch])
def test_8_bit_floats_are_not_taken_for_bytes(library: Any, name: str) -> None:
    a = library.ones(9, dtype=library.uint8)
    floats = a.view(getattr(ml_dtypes if library is np else torch, name))
    call = {"output_dtypes": [library.uint8], "template": [("T", library.uint8)]}
    warm(lambda: add(a, 1, **call))
    for _ in range(3):
        with pytest.raises(ferrule.KernelError, match=f"input 'a' of .*: {name} is a type"):
            add(floats, 1, **call)
        assert add(floats.view(library.uint8), 1, **call).tolist() == [2] * 9


def test_more_shapes_than_a_table_holds() -> None:
    for _ in range(3):
        for n in range(1, 200):
            a = np.arange(n, dtype=np.float32)
            assert np.array_equal(add(a, 1.0), a + 1)


def test_inputs_that_need_a_copy_still_get_one() -> None:
    a = np.arange(64, dtype=np.float32)
    t = torch.arange(64.0)
    bytes_ = np.zeros(65 * 4, np.uint8)
    crooked = bytes_[1 : 1 + 64 * 4].view(np.float32)
    crooked[:] = a
    swapped = a.astype(">f4")
    warm(lambda: add(a, 1.0))
    warm(lambda: add(t, 1.0))
    for _ in range(3):
        assert np.array_equal(add(crooked, 1.0), a + 1)
        assert np.array_equal(
            add(swapped, 1.0, template=[("T", np.float32)], output_dtypes=[np.float32]), a + 1
        )
        assert np.array_equal(add(a.reshape(8, 8).T, 1.0), a.reshape(8, 8).T + 1)
        imaginary = torch.complex(t, t).conj().imag
        assert imaginary.is_neg() and torch.equal(add(imaginary, 1.0), imaginary + 1)


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_tensors_that_must_be_refused_are_after_a_call_that_was_not() -> None:
    t = torch.arange(64.0)
    parameter = torch.nn.Parameter(t)
    warm(lambda: add(t, 1.0))
    with torch.no_grad():
        warm(lambda: add(parameter, 1.0))
    for _ in range(2):
        for bad in (t.clone().requires_grad_(), parameter):
            with pytest.raises(ferrule.KernelError, match="requires grad"):
                add(bad, 1.0)
        with pytest.raises(ferrule.KernelError, match="two libraries"):
            add(t, np.ones(1, np.float32))
        with forward_ad.dual_level(), pytest.raises(ferrule.KernelError, match="tangent"):
            add(forward_ad.make_dual(t, t), 1.0)
        with pytest.raises(ferrule.FerruleError):
            torch.func.grad(lambda x: add(x, 1.0).sum())(t)
        with FakeTensorMode(allow_non_fake_inputs=True), pytest.raises(ferrule.FerruleError):
            add(t, 1.0)
        assert torch.equal(add(t, 1.0), t + 1)


def test_a_parameter_without_grad_mode_is_fast(by_c: Callable[[], None]) -> None:
    parameter = torch.nn.Parameter(torch.arange(64.0))
    with torch.no_grad():
        warm(lambda: add(parameter, 1.0))
        by_c()
        assert torch.equal(add(parameter, 1.0), parameter + 1)


def test_wrong_arguments_of_a_remembered_call() -> None:
    a = np.arange(64, dtype=np.float32)
    warm(lambda: add(a, 1.0))
    bad: list[tuple[type[Exception], dict[str, Any]]] = [
        (ferrule.KernelError, {"grid": (64, 1)}),
        (ferrule.KernelError, {"grid": (-1, 1, 1)}),
        (ferrule.KernelError, {"threadgroup": (0, 1, 1)}),
        (ferrule.KernelTypeError, {"grid": (64.0, 1, 1)}),
        (ferrule.KernelError, {"output_shapes": [(64,), (64,)]}),
        (ferrule.KernelTypeError, {"output_shapes": 64}),
        (ferrule.KernelTypeError, {"template": "T"}),
        (ferrule.KernelTypeError, {"output_dtypes": [object()]}),
        (ferrule.KernelTypeError, {"init_value": "zero"}),
        (ferrule.KernelTypeError, {"verbose": 1}),
        (ferrule.KernelTypeError, {"stream": 7}),
        (ferrule.KernelError, {"inputs": [a]}),
        (ferrule.KernelError, {"inputs": [a, "one"]}),
    ]
    for kind, change in bad:
        for _ in range(2):
            with pytest.raises((ferrule.KernelError, ferrule.KernelTypeError)) as caught:
                add(a, 1.0, **change)
        assert isinstance(caught.value, (kind, ferrule.KernelTypeError))
    assert add(a, 1.0)[0] == 1


WILD = ferrule.metal_kernel(
    name="fast_wild",
    input_names=["step"],
    output_names=["out"],
    source="out[long(thread_position_in_grid.x) * long(step)] = 1;",
)


def test_a_failure_names_what_the_long_way_names() -> None:
    def run(step: int) -> Any:
        return WILD(
            inputs=[step], output_shapes=[(4,)], output_dtypes=[np.float32],
            grid=(4, 1, 1), threadgroup=(4, 1, 1),
        )[0]  # fmt: skip

    a = np.zeros((), np.int64)

    def by_array(step: int) -> Any:
        return WILD(
            inputs=[a + step], output_shapes=[(4,)], output_dtypes=[np.float32],
            grid=(4, 1, 1), threadgroup=(4, 1, 1),
        )[0]  # fmt: skip

    for call in (run, by_array):
        warm(lambda call=call: call(1))
        with pytest.raises(ferrule.DeviceError, match=r"outside its arrays|null pointer"):
            call(2**40)
        assert list(call(1)) == [1, 1, 1, 1]


def test_nothing_is_kept_of_a_call() -> None:
    t = torch.arange(64.0)
    shape = (64,)

    def run(x: torch.Tensor) -> torch.Tensor:
        return add(x, 1.0, output_shapes=[shape])

    warm(lambda: run(t))
    before = sys.getrefcount(t), sys.getrefcount(shape), sys.getrefcount(torch.float32)
    for _ in range(50):
        run(t)
    after = sys.getrefcount(t), sys.getrefcount(shape), sys.getrefcount(torch.float32)
    assert after == before
    out = run(t)
    gone = weakref.ref(out)
    del out
    assert gone() is None


def test_a_kernel_goes_with_all_that_it_remembered() -> None:
    kernel = ferrule.metal_kernel(
        name="fast_gone", input_names=["a"], output_names=["out"],
        source="out[thread_position_in_grid.x] = a[thread_position_in_grid.x];",
    )  # fmt: skip
    a = np.ones(8, np.float32)
    for _ in range(3):
        kernel(
            inputs=[a], output_shapes=[(8,)], output_dtypes=[np.float32], grid=(8, 1, 1),
            threadgroup=(8, 1, 1),
        )  # fmt: skip
    gone = weakref.ref(kernel)
    del kernel
    gc.collect()
    assert gone() is None


def test_torch_modes_take_the_long_way() -> None:
    t = torch.arange(64.0)
    warm(lambda: add(t, 1.0))
    given_: list[Any] = [t, 1.0]

    class Meddling(torch.overrides.TorchFunctionMode):
        """Takes the inputs away while a call looks at them."""

        def __torch_function__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            given_[:] = [torch.arange(64.0)]
            gc.collect(0)  # of all that a worker holds it takes seconds
            return func(*args, **(kwargs or {}))

    def run() -> Any:
        return ADD(
            inputs=given_, output_shapes=[(64,)], output_dtypes=[torch.float32], grid=(64, 1, 1),
            threadgroup=(32, 1, 1), template=[("T", torch.float32)],
        )[0]  # fmt: skip

    warm(run)
    with Meddling():
        assert torch.equal(run(), t + 1)
    given_[:] = [t, 1.0]
    with torch.device("cpu"):
        assert torch.equal(run(), t + 1)


def test_an_exception_inside_a_mode_is_not_lost() -> None:
    parameter = torch.nn.Parameter(torch.arange(64.0))

    class Failing(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, *_: Any, **__: Any) -> Any:
            raise SystemExit(3)

    with torch.no_grad():
        warm(lambda: add(parameter, 1.0))
        with Failing(), pytest.raises(SystemExit):
            add(parameter, 1.0)


def test_outputs_without_memory_are_refused() -> None:
    t = torch.zeros(64)
    for fill in (None, 0, 7):
        warm(lambda fill=fill: add(t, 1.0, init_value=fill))
        with pytest.raises(ferrule.KernelError, match=r"output 'out' of kernel 'fast_add'"):
            torch.func.functionalize(lambda x, f=fill: x + add(t, 1.0, init_value=f))(t)


def test_exceptions_of_signal_handlers_arrive() -> None:
    class Timeout(Exception):
        pass

    def ring(*_: Any) -> None:
        nonlocal raised
        raised += 1
        raise Timeout

    a = np.zeros(4096, np.float32)
    raised = caught = 0
    warm(lambda: add(a, 1.0, init_value=7))
    before = signal.signal(signal.SIGALRM, ring)
    try:
        while caught < 300:
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0002)
                while True:
                    add(a, 1.0, init_value=7)
            except Timeout:
                caught += 1
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert caught == raised


@pytest.mark.parametrize("size", [1000, 1 << 16, 1 << 24])
@pytest.mark.parametrize("fill", [None, 0, 1])
def test_torch_outputs_are_no_views(size: int, fill: float | None) -> None:
    t = torch.zeros(size)

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = add(x.detach(), 1.0, init_value=fill)
            return out

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return grads[0]

    for _ in range(3):
        y = cast(Any, Function).apply(t.clone().requires_grad_())
        assert not y._is_view()
        y += 1
        assert float(y.detach()[-1]) == 2
        with torch.no_grad():
            out = add(t, 1.0, init_value=fill)
        out.mul_(torch.ones(1, requires_grad=True))
        if size < 1 << 23:
            out.detach().untyped_storage().resize_(0)


def test_lists_that_iterate_otherwise() -> None:
    class Reversed(list):  # type: ignore[type-arg]
        def __iter__(self) -> Any:
            return reversed([self[i] for i in range(len(self))])

    a, s = np.full(8, 5, np.float32), np.ones(8, np.float32)
    subtract = ferrule.metal_kernel(
        name="fast_subtract", input_names=["a", "b"], output_names=["out"],
        source="uint i = thread_position_in_grid.x; out[i] = a[i] - b[i];",
    )  # fmt: skip
    for _ in range(4):
        for inputs, want in (([a, s], 4), (Reversed([a, s]), -4)):
            (out,) = subtract(
                inputs=inputs, output_shapes=[(8,)], output_dtypes=[np.float32], grid=(8, 1, 1),
                threadgroup=(8, 1, 1),
            )  # fmt: skip
            assert out[0] == want


def test_two_threads_never_number_two_programs_alike() -> None:
    programs = entries.Numbered()
    numbers: dict[str, int] = {}

    class Program:
        """One whose hash, which is asked for in the middle, lets another thread number its own."""

        def __hash__(self) -> int:
            if not second.ident:
                second.start()
                second.join(0.3)
            return 1

    other = object()
    second = threading.Thread(target=lambda: numbers.update(second=programs.number(other)))
    program = Program()
    numbers["first"] = programs.number(program)
    second.join()
    assert programs.objects[numbers["first"]] is program
    assert programs.objects[numbers["second"]] is other


def test_threads_and_settings() -> None:
    histogram = ferrule.metal_kernel(
        name="fast_histogram", input_names=["a"], output_names=["out"], atomic_outputs=True,
        source="""
        uint i = thread_position_in_grid.x;
        atomic_fetch_add_explicit(&out[a[i] % 16], 1, memory_order_relaxed);
        """,
    )  # fmt: skip
    a = np.arange(4096, dtype=np.uint32)

    def run(_: int = 0) -> bool:
        (out,) = histogram(
            inputs=[a], output_shapes=[(16,)], output_dtypes=[np.int32], grid=(4096, 1, 1),
            threadgroup=(64, 1, 1), init_value=0,
        )  # fmt: skip
        return bool((out == 256).all())

    try:
        for threads in (1, 2, 8, 1, 3, None):
            ferrule.set_threads(threads)
            assert all(run() for _ in range(4))
            with ThreadPoolExecutor(4) as pool:
                assert all(pool.map(run, range(64)))
    finally:
        ferrule.set_threads(None)


def test_an_argument_that_changes_while_the_kernel_runs() -> None:
    a = [np.full(1 << 16, 1, np.float32), 1.0]
    shapes, stop = [(1 << 16,)], threading.Event()

    def spoil() -> None:
        while not stop.is_set():
            a[0] = np.full(1 << 16, 1, np.float32)

    other = threading.Thread(target=spoil)
    other.start()
    try:
        for _ in range(200):
            (out,) = ADD(
                inputs=a, output_shapes=shapes, output_dtypes=[np.float32],
                grid=(1 << 16, 1, 1), threadgroup=(256, 1, 1), template=[("T", np.float32)],
            )  # fmt: skip
            assert (out == 2).all()
    finally:
        stop.set()
        other.join()


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fastcall, "library", lambda: None)
    kernel = ferrule.metal_kernel(
        name="fast_add", input_names=["a", "s"], output_names=["out"], source=ADD.kernel.source
    )
    a = np.arange(64, dtype=np.float32)
    for _ in range(3):
        (out,) = kernel(
            inputs=[a, 1], output_shapes=[a.shape], output_dtypes=[a.dtype], grid=(64, 1, 1),
            threadgroup=(32, 1, 1), template=[("T", np.float32)],
        )  # fmt: skip
        assert np.array_equal(out, a + 1)
    with fastcall.bypassed():
        assert add(a, 1.0)[1] == 2


@pytest.mark.parametrize(("count", "in_c"), [(31, True), (32, False), (40, False)])
@pytest.mark.filterwarnings("ignore:.*more than 31 buffers:ferrule.PortabilityWarning")
def test_kernels_of_more_buffers_than_c_has_room_for(
    count: int, in_c: bool, by_c: Callable[[], None]
) -> None:
    names = [f"x{i}" for i in range(count)]
    kernel = ferrule.metal_kernel(
        f"sum_of_{count}", names, ["y"],
        f"uint i = thread_position_in_grid.x; y[i] = {' + '.join(f'{n}[i]' for n in names)};",
    )  # fmt: skip

    def run(size: int) -> list[float]:
        (y,) = kernel(
            inputs=[np.full(size, i, np.float32) for i in range(count)], output_shapes=[(size,)],
            output_dtypes=[np.float32], grid=(size, 1, 1), threadgroup=(4, 1, 1),
        )  # fmt: skip
        return list(y)

    for size in (3, 4, 5):
        assert run(size) == [sum(range(count))] * size
    by_c()
    if in_c:
        assert run(6) == [sum(range(count))] * 6
    else:
        with pytest.raises(AssertionError, match="the long way"):
            run(6)


@pytest.mark.parametrize("fill", [None, 0, 7])
@pytest.mark.parametrize("library", [np, torch])
def test_other_sizes_run_no_python(library: Any, fill: Any, by_c: Callable[[], None]) -> None:
    """Grids of another form ask for machine code, strides for nothing."""

    def made(shape: tuple[int, ...]) -> Any:
        return library.arange(int(np.prod(shape)), dtype=library.float32).reshape(shape)

    for _ in range(3):
        add(made((4,)), 1.0, init_value=fill)
        shaped(made((3, 4)))
    add(made((4,)), 1.0, init_value=fill, threadgroup=(33, 1, 1))  # its only thread's form
    by_c()
    for n in (1, 2, 31, 32, 33, 100, 9000, 20000):
        x = made((n,))
        assert bool((add(x, 1.0, init_value=fill) == x + 1).all())
        for threadgroup in ((1, 1, 1), (3, 1, 1), (256, 1, 1), (1024, 1, 1), (4, 2, 1)):
            y = add(x, 2.0, init_value=fill, threadgroup=threadgroup)
            assert bool((y == x + 2).all())
    for shape in ((1, 1), (2, 3), (7, 5), (64, 33)):
        x = made(shape)
        for given_ in (x, x.T, x[::2], x[:, 1:]):
            if 0 in given_.shape:
                continue
            out, sizes = shaped(given_)
            assert out.shape == given_.shape and bool((out == given_).all())
            steps = given_.stride() if library is torch else [s // 4 for s in given_.strides]
            assert sizes.tolist() == [*given_.shape, *steps]


def test_sizes_out_of_range_are_refused_in_the_same_words() -> None:
    """As before C made such calls."""
    a = np.arange(64, dtype=np.float32)
    warm(lambda: add(a, 1.0))
    wrong: list[dict[str, Any]] = [
        {"grid": (0, 1, 1)},
        {"grid": (2**31, 1, 1)},
        {"threadgroup": (1025, 1, 1)},
        {"threadgroup": (32, 32, 2)},
        {"threadgroup": (2**32 + 1, 1, 1)},
        {"output_shapes": [(-1,)]},
        {"output_shapes": [(2**62, 2)]},
        {"output_shapes": [(2**62,)]},
        {"output_shapes": [(2**64,)]},
        {"output_shapes": [(0, 2**40, 2**40)]},
        {"init_value": 10**400},
    ]
    for change in wrong:
        with fastcall.bypassed(), pytest.raises(ferrule.FerruleError) as first:
            add(a, 1.0, **change)
        for _ in range(2):
            with pytest.raises(type(first.value)) as again:
                add(a, 1.0, **change)
            assert str(again.value) == str(first.value)
    assert add(a, 1.0)[0] == 1


@pytest.mark.parametrize("library", [np, torch])
def test_what_is_remembered_keeps_no_array(library: Any) -> None:
    gone = []
    for n in range(1, 6):
        x = library.ones(n, dtype=library.float32)
        y = add(x, 1.5, init_value=0.25)
        gone += [weakref.ref(x), weakref.ref(y)]
    del x, y
    gc.collect()
    assert [ref() for ref in gone] == [None] * len(gone)


def test_torch_that_is_still_being_imported_is_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    kernel = ferrule.metal_kernel(
        "count", ["x"], ["y"], "atomic_fetch_add_explicit(&y[0], x[0], memory_order_relaxed);",
        atomic_outputs=True,
    )  # fmt: skip
    x = np.ones(1, np.int32)

    def total() -> int:
        (y,) = kernel(
            inputs=[x], output_shapes=[(1,)], output_dtypes=[x.dtype], grid=(8, 1, 1),
            threadgroup=(8, 1, 1), init_value=0,
        )  # fmt: skip
        return int(y[0])

    assert total() == total() == 8
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    assert total() == 8
