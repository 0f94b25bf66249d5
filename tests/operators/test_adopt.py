"""Adopted callables as ops: what they get and give, their state, their identity; in torch, too."""

from __future__ import annotations

import ctypes
import pickle
import subprocess
import threading
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ferrule
from ferrule import KernelError, KernelTypeError, Op, RuleError
from ferrule.hosts.torch import arrays as torch_host

UTILITIES = (
    "test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_static",
    "test_aot_dispatch_dynamic",
)  # fmt: skip
RULE = "x[*S]:T -> y[*S]:T"


def double(x: Any) -> Any:
    return x + x


def arrays(*shape: int) -> list[Any]:
    """An array of each host that runs here."""
    x = np.arange(float(np.prod(shape)), dtype=np.float32).reshape(shape)
    return [x, torch.from_numpy(x.copy())]


class Calls(torch.nn.Module):
    """A module that calls an op."""

    def __init__(self, op: Op) -> None:
        super().__init__()
        self.op = op

    def forward(self, *values: Any) -> Any:
        return self.op(*values)


# -- what is declared ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("more", "error", "message"),
    [
        ({}, KernelError, "neither of `run` and `make`"),
        ({"run": double, "make": double}, KernelError, "both of `run` and `make`"),
        ({"run": double, "constants": {"K": 1}}, KernelError, "`constants` .* keywords of `make`"),
        ({"run": 3}, KernelError, "got 3, expected a function"),
        ({"make": lambda device: None}, KernelError, r"keywords device, T, .*unexpected keyword"),
        ({"make": lambda device, T, K: None}, KernelError, "missing a required argument: 'K'"),
        ({"make": lambda **k: None, "constants": {"T": 1}}, KernelError, "'T' is the device, a"),
        ({"make": lambda **k: None, "constants": {"device": 1}}, KernelError, "name of its own"),
        ({"make": lambda **k: None, "constants": {"a": "Q"}}, RuleError, "'Q' is neither a dtype"),
        ({"make": lambda **k: None, "constants": 3}, KernelTypeError, "`constants` of op 'f'"),
        ({"run": lambda x, y: 0, "batch": "Q"}, KernelError, "there is no dim 'Q'"),
        ({"run": double, "autocast": "up"}, KernelError, "'cast' or 'float32'"),
        ({"run": double, "version": 1.5}, KernelError, "`version` .* expected a str or int"),
    ],
)
def test_wrong_declarations(more: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        ferrule.adopt("f", RULE, **more)


def test_outputs_are_parameters_all_of_them_or_none() -> None:
    rule = "x[N]:T -> y[N]:T, z[N]:T"
    with pytest.raises(KernelError, match="parameter for output 'y', but none for 'z'"):
        ferrule.adopt("f", rule, run=lambda x, y: None)
    op = ferrule.adopt("f", rule, make=lambda device, T: lambda x, z: None)
    with pytest.raises(KernelError, match="parameter for output 'z', but none for 'y'"):
        op(np.zeros(2))


# -- what a callable gets --------------------------------------------------------------------------


def test_it_gets_plain_tensors_of_which_nothing_is_recorded() -> None:
    seen: list[Any] = []

    def run(x: Any, w: Any, n: int, stream: int) -> Any:
        seen.append((type(x), type(w), x.requires_grad, w.requires_grad, n, stream))
        seen.append((torch.compiler.is_compiling(), (x + w).dtype, x @ w))
        return torch.from_numpy(x.numpy() * w.numpy() * n)

    op = ferrule.adopt(
        "f", "x[N]:float32, w[N]:float32, n:int32 -> y[N]:float32", run=run, version=1
    )
    op.def_vjp(lambda primals, cotangents, outputs: (None, cotangents[0], None))

    class Sub(torch.Tensor):
        pass

    x, w = torch.ones(3), torch.nn.Parameter(torch.full((3,), 2.0))
    calls: list[Callable[[], Any]] = [
        lambda: op(x, w, 2),
        lambda: op(x.as_subclass(Sub), w, 2),
        lambda: torch.compile(op, backend="eager", fullgraph=True)(x, w, 2),
    ]
    for call in calls:
        with torch.autocast("cpu", torch.bfloat16), torch.device("meta"):
            assert call().tolist() == [4, 4, 4]
        plain, values = seen
        assert plain == (torch.Tensor, torch.Tensor, False, False, 2, 0)
        assert values[:2] == (False, torch.float32) and values[2].dtype == torch.float32
        seen.clear()


def test_frames_that_dynamo_skips_are_not_traced_further() -> None:
    seen = []

    def run(x: Any) -> Any:
        seen.append(torch.compiler.is_compiling())
        return x * 2

    op = ferrule.adopt("f", RULE, run=run, version="frames")

    def breaks(x: Any) -> Any:
        for _ in range(2):
            torch._dynamo.graph_break()
            x = op.torch_op(x)
        return x

    assert torch.compile(breaks, backend="eager")(torch.ones(2)).tolist() == [4, 4]
    assert not any(seen)


@pytest.mark.parametrize("i", [0, 1])
def test_contiguous_copies_what_is_not(i: int) -> None:
    x = arrays(3, 4)[i]
    seen = []

    def run(x: Any, y: Any) -> None:
        strides = x.stride() if isinstance(x, torch.Tensor) else [s // 4 for s in x.strides]
        seen.append(tuple(strides))
        y[...] = x

    version = f"contiguous {i}"
    plain = ferrule.adopt("f", RULE, run=run, version=version)
    copied = ferrule.adopt("f", RULE, run=run, version=version, contiguous=True)
    for op in (plain, copied):
        assert op(x.T).tolist() == x.T.tolist()
        op(x)
    assert seen == [(1, 4), (4, 1), (3, 1), (4, 1)]
    assert plain.counts == {} and copied.counts == {"copy": 1}
    assert plain.digest != copied.digest


@pytest.mark.parametrize("i", [0, 1])
@pytest.mark.parametrize("contiguous", [False, True])
def test_inputs_written_in_place(i: int, contiguous: bool) -> None:
    def run(cache: Any, row: Any) -> None:
        cache[0] = row

    op = ferrule.adopt(
        "put", "cache[L,D]:T!, row[D]:T ->", run=run, contiguous=contiguous, version=1
    )
    whole = arrays(4, 6)[i]
    part = whole[::2, ::2]
    before = whole.tolist()
    op(part, part[1] * 0 - 1)
    expected = np.array(before)
    expected[0, ::2] = -1
    assert whole.tolist() == expected.tolist()


def test_absent_inputs_and_numbers() -> None:
    def run(x: Any, b: Any, s: float) -> Any:
        return x * s if b is None else x * s + b

    op = ferrule.adopt("f", "x[N]:T, b[N]:T?, s:float32 -> y[N]:T", run=run)
    for x in arrays(3):
        assert op(x, None, 2).tolist() == [0, 2, 4]
        assert op(x, x, s=2).tolist() == [0, 3, 6]


# -- what it gives ---------------------------------------------------------------------------------

BUFFER = {"numpy": np.zeros(8, np.float32), "torch": torch.zeros(8)}
KEPT: list[Any] = []


def cached(x: Any) -> Any:
    buffer: Any = BUFFER["torch" if isinstance(x, torch.Tensor) else "numpy"]
    return buffer


def kept(x: Any) -> Any:
    y = x + 1
    KEPT.append(y)
    return y


@pytest.mark.parametrize("i", [0, 1])
@pytest.mark.parametrize(
    ("name", "run", "copies"),
    [
        ("itself", lambda x: x, 1),
        ("view", lambda x: x.reshape(2, 4).reshape(8), 1),
        ("part", lambda x: x[::-1] if isinstance(x, np.ndarray) else x.flip(0)[0:], None),
        ("cached", cached, 1),
        ("view of cached", lambda x: cached(x)[:8], 1),
        ("kept", kept, 1),
        ("new", lambda x: x * 2, 0),
        ("view of new", lambda x: (x * 2).reshape(2, 4)[:].reshape(8), 0),
    ],
)
def test_outputs_are_new(i: int, name: str, run: Any, copies: int | None) -> None:
    x = arrays(8)[i]
    op = ferrule.adopt(name.replace(" ", "_"), "x[8]:T -> y[8]:T", run=run, version=f"new {i}")
    y = op(x)
    if copies is not None:
        assert op.counts["output copy"] == copies
    held = [x, *BUFFER.values(), *KEPT]
    for one in held:
        if type(one) is type(y):
            shared = (
                np.shares_memory(one, y)
                if isinstance(y, np.ndarray)
                else one.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()
            )
            assert not shared
    expected = np.asarray(run(x)).copy()
    np.testing.assert_array_equal(np.asarray(y), expected)
    if i == 1:
        torch.library.opcheck(op.torch_op, (x,), test_utils=UTILITIES)
        with torch.inference_mode():
            np.testing.assert_array_equal(np.asarray(op(x)), expected)


def test_opcheck_finds_a_runner_that_writes_to_its_input() -> None:
    op = ferrule.adopt("writes", RULE, run=lambda x: x.mul_(2) + 1)
    with pytest.raises(Exception, match="x is not defined as mutable but was mutated"):
        torch.library.opcheck(op.torch_op, (torch.ones(3),))


def test_two_outputs_in_one_memory_are_apart() -> None:
    def run(x: Any) -> Any:
        y = x.repeat(2) if isinstance(x, torch.Tensor) else np.tile(x, 2)
        return y[: len(x)], y[len(x) :]

    op = ferrule.adopt("f", "x[N]:T -> y[N]:T, z[N]:T", run=run)
    for x in arrays(3):
        y, z = op(x)
        y[:] = 7
        assert z.tolist() == [0, 1, 2]
    torch.library.opcheck(op.torch_op, (torch.ones(3),), test_utils=UTILITIES)


def test_memory_that_is_not_torchs_is_copied() -> None:
    buffer = np.zeros(3, np.float32)

    def run(x: Any) -> Any:
        buffer[:] = x.numpy()
        return torch.from_numpy(buffer)

    op = ferrule.adopt("f", RULE, run=run, version="foreign")
    one, two = op(torch.ones(3)), op(torch.zeros(3))
    assert (one.tolist(), two.tolist()) == ([1, 1, 1], [0, 0, 0])
    assert op.counts == {"output copy": 2}


def test_outputs_in_another_order_of_memory_are_copied() -> None:
    op = ferrule.adopt("f", "x[N,M]:T -> y[M,N]:T", run=lambda x: (x + 0).T)
    y = op(torch.ones(2, 3))
    assert y.stride() == (2, 1) and op.counts == {"output copy": 1}
    conjugate = ferrule.adopt("g", "x[N]:complex64 -> y[N]:complex64", run=lambda x: (x + 0).conj())
    assert not conjugate(torch.ones(2) * 1j).is_conj()


def test_a_number_of_numpy_is_an_array_without_dims() -> None:
    op = ferrule.adopt("total", "x[N]:T -> y[]:T", run=lambda x: x.sum())
    for x in arrays(3):
        y = op(x)
        assert y.shape == () and float(y) == 3


WRONG: list[tuple[Any, str, str]] = [
    (lambda x: x[1:], "float32 of shape (2,)", "an array of shape (2,) and dtype float32"),
    (lambda x: x > 0, "bool of shape (3,)", "an array of shape (3,) and dtype bool"),
    (lambda x: None, "a NoneType", "None"),
    (lambda x: "text", "a str", "'text'"),
    (lambda x: [x], "a list", "[array("),
]


@pytest.mark.parametrize(("run", "torchs", "numpys"), WRONG)
def test_wrong_outputs_are_named(run: Any, torchs: str, numpys: str) -> None:
    op = ferrule.adopt("f", "x[N]:T -> y[N]:T", run=run)
    expected = "expected float32 of shape (3,) on cpu, by y[N]:T."
    for x, found in zip(arrays(3), (numpys, torchs), strict=True):
        with pytest.raises(KernelError) as caught:
            op(x)
        message = str(caught.value)
        start = f"[op] `run` (test_adopt:<lambda>) of op 'f' returned {found}"
        assert message.startswith(start), message
        assert f"for output 'y'; {expected}" in message


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda x: np.ma.masked_array(x * 2), "is a masked array"),
        (lambda x: x.astype(object), "has dtype object, expected one of"),
    ],
)
def test_outputs_that_are_no_array_of_the_library_are_named(run: Any, message: str) -> None:
    op = ferrule.adopt("f", "x[N]:T -> y[N]:T", run=run)
    start = r"^\[op\] output 'y' of `run` \(test_adopt:<lambda>\) of op 'f' "
    with pytest.raises(KernelTypeError, match=start + message):
        op(np.ones(3))


def test_other_wrong_outputs() -> None:
    two = ferrule.adopt("f", "x[N]:T -> y[N]:T, z[N]:T", run=lambda x: (x, x, x))
    one = ferrule.adopt("f", "x[N]:T -> y[N]:T, z[N]:T", run=lambda x: x)
    meta = ferrule.adopt("f", RULE, run=lambda x: torch.empty(3, device="meta"))
    sparse = ferrule.adopt("f", RULE, run=lambda x: x.to_sparse())
    numpy = ferrule.adopt("f", RULE, run=lambda x: x.numpy())
    ignores = ferrule.adopt("f", RULE, run=lambda x, y: x * 2)
    resizes = ferrule.adopt("f", RULE, run=lambda x, y: (y.resize_(5), None)[1])
    x = torch.ones(3)
    for op, message in (
        (two, r"`run` \(test_adopt:.*\) of op 'f' returned 3 values; expected 2 arrays \(y\[N\]"),
        (one, "returned a Tensor; expected 2 arrays"),
        (meta, r"float32 of shape \(3,\) on meta for output 'y'; expected .* on cpu"),
        (sparse, "layout torch.sparse_coo"),
        (numpy, "returned a ndarray for output 'y'"),
        (ignores, "has parameters for the outputs 'y', and yet returned an array"),
    ):
        with pytest.raises(KernelError, match=message):
            op(x)
    with pytest.raises((KernelError, RuntimeError), match=r"shape \(5,\)|resiz"):
        resizes(x)


def test_its_exception_arrives_unchanged() -> None:
    error = ArithmeticError("blew up")

    def inner() -> None:
        raise error

    def run(x: Any) -> Any:
        inner()

    op = ferrule.adopt("f", RULE, run=run, version="raises")
    compiled = torch.compile(op, backend="aot_eager", fullgraph=True)
    for call, x in ((op, np.ones(2)), (op, torch.ones(2)), (compiled, torch.ones(2))):
        with pytest.raises(ArithmeticError, match=r"^blew up$") as caught:
            call(x)
        assert caught.value is error
        names = [frame.name for frame in traceback.extract_tb(error.__traceback__)]
        assert names[-2:] == ["run", "inner"]
        error.__traceback__ = None


# -- state -----------------------------------------------------------------------------------------


def test_make_gets_device_dtypes_and_constants_once_each() -> None:
    made: list[Any] = []

    def make(device: Any, **more: Any) -> Any:
        made.append((device, more))
        return lambda x, w: x * 1

    op = ferrule.adopt(
        "f", "x[N]:T, w[M]:U -> y[N]:T", make=make, version=1,
        constants={
            "block": 64, "small": "N <= 4", "N2": "2 * N", "fast": True, "kind": np.float16
        },
    )  # fmt: skip
    for x in (np.zeros(3, np.float32), np.ones(3, np.float32), torch.zeros(3)):
        op(x, x)
    more = {"T": "float32", "U": "float32", "block": 64, "small": True, "N2": 6, "fast": True}
    assert made == [("cpu", {**more, "kind": "float16"})]
    assert made[0][1]["small"] is True and list(made[0][1])[:2] == ["T", "U"]
    op(torch.zeros(5, dtype=torch.bfloat16), torch.zeros(1))
    op(torch.zeros(5, dtype=torch.bfloat16), torch.zeros(2))
    more.update(T="bfloat16", small=False, N2=10)
    assert made[1:] == [("cpu", {**more, "kind": "float16"})]


def test_make_is_called_once_where_threads_meet() -> None:
    made = []
    begin = threading.Barrier(8)

    def make(device: str, T: str) -> Any:
        made.append(T)
        for _ in range(3):  # let the others come
            threading.Event().wait(0.01)
        return lambda x: x * 2

    op = ferrule.adopt("f", RULE, make=make, version=1)
    results: list[Any] = []

    def work(i: int) -> None:
        begin.wait()
        results.append(
            op(np.full(2, i, np.float32 if i % 2 else np.float64)).tolist() == [2 * i] * 2
        )

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert results == [True] * 8 and sorted(made) == ["float32", "float64"]


def test_make_that_fails_is_called_again() -> None:
    tries = []

    def make(device: str, T: str) -> Any:
        tries.append(T)
        if len(tries) == 1:
            raise OSError("no compiler")
        return len if len(tries) == 2 else 3

    op = ferrule.adopt("f", "x[N]:T -> y[N]:T", make=make, version=1)
    with pytest.raises(OSError, match="no compiler"):
        op(np.ones(2))
    with pytest.raises(KernelError, match=r"`make` \(.*make\) of op 'f' returned"):
        op(np.ones(2))  # len gives no array
    with pytest.raises(KernelTypeError, match="`make` of op 'f' gave 3 for cpu, T = float32"):
        op(np.ones(2, np.float32))


def test_nothing_is_made_while_tracing() -> None:
    from torch._subclasses import FakeTensorMode

    made = []

    def make(device: str, T: str) -> Any:
        made.append((device, T))
        return lambda x: x * 2

    op = ferrule.adopt("f", RULE, make=make, version="tracing")
    with FakeTensorMode():
        assert op(torch.ones(3)).shape == (3,)
    assert op(torch.ones(3, device="meta")).device.type == "meta"
    torch.export.export(Calls(op), (torch.ones(3),))
    torch.fx.experimental.proxy_tensor.make_fx(op, tracing_mode="symbolic")(torch.ones(3))
    assert made == []
    compiled = torch.compile(op, backend="aot_eager", fullgraph=True)
    assert compiled(torch.ones(3)).tolist() == [2, 2, 2]
    assert made == [("cpu", "float32")]


def test_make_in_a_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    op = ferrule.adopt("f", RULE, make=lambda device, T: lambda x: x * 2, version="capture")
    monkeypatch.setattr(torch_host, "capturing", lambda device: True)
    with pytest.raises(
        KernelError, match=r"for cpu, T = float32 for the first time, while a CUDA graph .* before"
    ):
        op(torch.ones(3))
    monkeypatch.undo()
    op(torch.ones(3))
    monkeypatch.setattr(torch_host, "capturing", lambda device: True)
    assert op(torch.ones(3)).tolist() == [2, 2, 2]
    with pytest.raises(KernelError, match="T = float64 for the first time"):
        op(torch.ones(3, dtype=torch.float64))


def test_a_capture_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not torch_host.capturing("cpu")
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert torch_host.capturing("cuda:0") and not torch_host.capturing("cpu")


# -- callables of other makers ---------------------------------------------------------------------


def test_a_c_function(tmp_path: Path) -> None:
    source = tmp_path / "scale.c"
    source.write_text(
        "void scale(const float *x, float k, float *y, long n) "
        "{ for (long i = 0; i < n; i++) y[i] = k * x[i]; }\n"
    )
    library = tmp_path / "scale.so"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", library, source], check=True, timeout=60)

    def make(device: str) -> Any:
        scale = ctypes.CDLL(str(library)).scale
        scale.argtypes = [ctypes.c_void_p, ctypes.c_float, ctypes.c_void_p, ctypes.c_long]
        scale.restype = None

        def run(x: Any, k: float, y: Any) -> None:
            if isinstance(x, torch.Tensor):
                scale(x.data_ptr(), k, y.data_ptr(), x.numel())
            else:
                scale(x.ctypes.data, k, y.ctypes.data, x.size)

        return run

    rule = "x[*S]:float32, k:float32 -> y[*S]:float32"
    op = ferrule.adopt("scale", rule, make=make, contiguous=True, version="1.0")
    for x in arrays(2, 3):
        assert op(x, 2).tolist() == op(x.T, 2).T.tolist() == (x * 2).tolist()
    assert op.counts == {"copy": 2}
    torch.library.opcheck(op.torch_op, (torch.rand(3, 2).T, 0.5), test_utils=UTILITIES)


def test_torchs_own_functions() -> None:
    x, w = torch.rand(2, 3), torch.rand(4, 3)
    rule = "x[*S,K]:T, w[N,K]:T -> y[*S,N]:T"
    for run in (torch.nn.functional.linear, torch.ops.aten.linear.default):
        op = ferrule.adopt("linear", rule, run=run)
        torch.testing.assert_close(op(x, w), torch.nn.functional.linear(x, w))
        torch.library.opcheck(op.torch_op, (x, w), test_utils=UTILITIES)
        assert op.counts == {}


def test_numba() -> None:
    numba = pytest.importorskip("numba")

    @numba.njit
    def add_rows(x: Any, y: Any) -> None:
        for i in range(x.shape[0]):
            y[i] = 0
            for j in range(x.shape[1]):
                y[i] += x[i, j]

    rule = "x[N,K]:T -> y[N]:T"
    with pytest.raises(KernelError, match="give `version=`"):
        ferrule.adopt("rows", rule, run=add_rows)
    op = ferrule.adopt("rows", rule, run=add_rows, version=1)  # its parameter y gets the output
    x = np.random.default_rng(0).random((3, 4))
    np.testing.assert_allclose(op(x), x.sum(1))

    def run(x: Any, y: Any) -> None:
        add_rows(x.numpy(), y.numpy())

    in_torch = ferrule.adopt("rows", rule, run=run, version=1)
    torch.testing.assert_close(in_torch(torch.from_numpy(x)), torch.from_numpy(x).sum(1))
    torch.library.opcheck(in_torch.torch_op, (torch.from_numpy(x).T,), test_utils=UTILITIES)


def test_warp(monkeypatch: pytest.MonkeyPatch) -> None:
    wp = pytest.importorskip("warp")
    wp.config.quiet = True

    def make(device: str) -> Any:
        wp.init()

        @wp.kernel
        def scale(x: wp.array(dtype=float), k: float, y: wp.array(dtype=float)):  # type: ignore
            i = wp.tid()
            y[i] = k * x[i]

        def run(x: Any, k: float, y: Any) -> None:
            wp.launch(
                scale, dim=x.numel(), inputs=[wp.from_torch(x), k], outputs=[wp.from_torch(y)],
                device="cpu",
            )  # fmt: skip

        return run

    rule = "x[N]:float32, k:float32 -> y[N]:float32"
    op = ferrule.adopt("warp_scale", rule, make=make, contiguous=True, version=1)
    x = torch.arange(4.0)
    assert op(x, 3).tolist() == [0, 3, 6, 9]
    assert torch.compile(op, backend="aot_eager", fullgraph=True)(x, 3).tolist() == [0, 3, 6, 9]
    torch.library.opcheck(op.torch_op, (x, 2.0), test_utils=UTILITIES)
    assert "output copy" not in op.counts


@pytest.mark.parametrize(
    ("run", "message"),
    [
        (lambda x: x, r"the inputs, \(x, k\), but .*lambda>\(x\) does not take them: too many"),
        (lambda x, k, out: x, "missing a required argument: 'out'.* called like the outputs, y"),
        (lambda x, *, k: x, "too many positional arguments"),
    ],
)  # fmt: skip
def test_a_function_that_cannot_be_called_with_the_inputs(run: Any, message: str) -> None:
    with pytest.raises(KernelError, match=rf"`run` \(.*\) of op 'f' is called with .*{message}"):
        ferrule.adopt("f", "x[N]:T, k:int32 -> y[N]:T", run=run)


# -- functions that draw random numbers ------------------------------------------------------------


def noise(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rand(x.shape, dtype=x.dtype, device=x.device)


def random_op(rule: str = "x[*S]:T -> y[*S]:T", **more: Any) -> ferrule.Op:
    op = ferrule.adopt("noise", rule, run=noise, tags="nondeterministic_seeded", **more)
    op.def_vjp(lambda primals, cotangents, outputs: cotangents[0] * outputs[0] / primals[0])
    return op


def test_tags_are_torchs() -> None:
    op = random_op()
    assert op.tags == ("nondeterministic_seeded",)
    assert torch.Tag.nondeterministic_seeded in op.torch_op.tags
    plain = ferrule.adopt("noise", "x[*S]:T -> y[*S]:T", run=noise)
    assert "tags" not in plain.to_json() and plain.digest != op.digest
    both = (torch.Tag.pointwise, "nondeterministic_seeded")
    same = [ferrule.adopt("n", "x[N]:T -> y[N]:T", run=noise, tags=t) for t in (both, both[::-1])]
    assert same[0].digest == same[1].digest and same[0].tags == tuple(sorted(same[1].tags))
    metal = ferrule.op(
        "tagged", "x[N]:T -> y[N]:T", grid="N", threadgroup=8, tags=[torch.Tag.pointwise],
        metal="uint i = thread_position_in_grid.x; y[i] = x[i];",
    )  # fmt: skip
    pickled = pickle.loads(pickle.dumps(metal))  # noqa: S301
    for one in (metal.using("metal"), Op.from_json(metal.to_json()), pickled):
        assert one.tags == ("pointwise",) and one.digest == metal.digest
    for tags, error, words in (
        ("seeded", KernelError, "torch has no tag 'seeded', but .*nondeterministic_seeded"),
        ([3], KernelTypeError, "got 3 of type int, expected tags of torch"),
        (3, KernelTypeError, "got 3 of type int, expected tags of torch"),
    ):
        with pytest.raises(error, match=rf"`tags` of op 'n': {words}"):
            ferrule.adopt("n", "x[N]:T -> y[N]:T", run=noise, tags=tags)


@pytest.mark.filterwarnings("ignore:`torch.jit.*is deprecated:DeprecationWarning")  # torch's own
@pytest.mark.parametrize("backend", [None, "aot_eager", "inductor"])
def test_checkpoint_draws_the_same_again(backend: str | None) -> None:
    """The gradient of what was drawn, not of what the recomputation would draw anew. (With the
    backend "eager" torch's own operators draw anew, too.)"""
    op, x = random_op(), torch.full((64,), 2.0, requires_grad=True)

    def f(x: torch.Tensor) -> torch.Tensor:
        return torch.utils.checkpoint.checkpoint(
            lambda x: op(x.sin()).cos(), x, use_reentrant=False
        )

    torch.manual_seed(0)
    y = (f if backend is None else torch.compile(f, fullgraph=True, backend=backend))(x)
    (given,) = torch.autograd.grad(y.sum(), x)
    drawn = torch.acos(y.detach()) / x.detach().sin()
    expected = -torch.sin(drawn * x.detach().sin()) * drawn * x.detach().cos()
    torch.testing.assert_close(given, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("way", ["eager", "compiled"])
@pytest.mark.parametrize("declared", ["star", "dim", "loop"])
@pytest.mark.parametrize("where", ["batched", "the same for all"])
@pytest.mark.filterwarnings("ignore:op 'noise' is called . times by vmap:ferrule.FerruleWarning")
def test_vmap_randomness(where: str, declared: str, way: str) -> None:
    """As torch's own random operators have it."""
    op = {
        "star": lambda: random_op(),
        "dim": lambda: random_op("x[N]:T -> y[N]:T", batch="N"),
        "loop": lambda: random_op("x[N]:T -> y[N]:T"),
    }[declared]()
    x = torch.ones(6, 5) if where == "batched" else torch.ones(5)

    def f(randomness: str, function: Any) -> torch.Tensor:
        def one(i: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
            return function(x) + 0 * i

        def call(x: torch.Tensor) -> torch.Tensor:
            axis = 0 if where == "batched" else None
            return torch.vmap(one, (0, axis), randomness=randomness)(torch.zeros(6), x)

        return call(x) if way == "eager" else torch.compile(call, backend="aot_eager")(x)

    for function in (op, lambda x: torch.bernoulli(x * 0.5)):
        assert f("different", function).shape == (6, 5)
        with pytest.raises(RuntimeError, match="random"):
            f("error", function)
    assert len({tuple(row.tolist()) for row in f("different", op)}) == 6
    if where == "batched":
        for function in (op, lambda x: torch.bernoulli(x * 0.5)):
            with pytest.raises(RuntimeError, match="same"):
                f("same", function)
    else:
        assert len({tuple(row.tolist()) for row in f("same", op)}) == 1


@pytest.mark.parametrize("way", ["eager", "compiled"])
def test_vmap_randomness_of_several_levels(way: str) -> None:
    op, x = random_op(), torch.ones(5)

    def f(inner: str, outer: str) -> torch.Tensor:
        def within(a: torch.Tensor) -> torch.Tensor:
            return torch.vmap(lambda b: op(x) + a * b, randomness=inner)(torch.zeros(3))

        def call(a: torch.Tensor) -> torch.Tensor:
            return torch.vmap(within, randomness=outer)(a)

        return (call if way == "eager" else torch.compile(call, backend="aot_eager"))(
            torch.zeros(2)
        )

    for inner, outer, count in (
        ("same", "same", 1), ("different", "same", 3), ("same", "different", 2),
        ("different", "different", 6),
    ):  # fmt: skip
        found = f(inner, outer)
        assert found.shape == (2, 3, 5)
        assert len({tuple(row.tolist()) for row in found.flatten(0, 1)}) == count
