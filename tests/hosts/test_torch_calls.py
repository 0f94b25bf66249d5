"""Calls of ops by torch in C: the same results and errors as in Python, and nothing lost."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ferrule
from ferrule import Op
from ferrule.devices.cpu import program as cpu
from ferrule.hosts.torch import calls as torch_calls
from processes import forked

I = "uint i = thread_position_in_grid.x; "  # noqa: E741

needs_library = pytest.mark.skipif(
    torch_calls.library() is None, reason="the C library was not built"
)
pytestmark = needs_library


def ops() -> dict[str, Op]:
    """An op per kind of thing that C does."""
    return {
        "affine": ferrule.op(
            "affine", "x[N,K]:T, b[K]:T?, s:float32, n:int8, flip:bool -> y[N,K]:T",
            metal=I + "T v = x[i] * T(s) + T(n); if (has_b) v += b[i % K]; "
            "y[i] = flip ? T(-v) : v;",
            grid="x.size", threadgroup=32,
        ),
        "stars": ferrule.op(
            "stars", "a[*S,D]:T, b[*S,D]:U, w[D]:T -> y[*S,D,2]:T, n[1]:int32",
            metal=I + "y[2 * i] = a[i] * w[i % D]; y[2 * i + 1] = T(b[i]); "
            "if (i == 0) n[0] = a_ndim * 100 + a_shape[a_ndim - 1];",
            grid="max(y.size // 2, 1)", threadgroup=(64, 1),
            template={"WIDE": "D > 4", "D2": "D * 2"},
        ),
        "strided": ferrule.op(
            "strided", "x[M,N]:T -> y[M,N]:T", ensure_row_contiguous=False,
            metal="uint2 p = thread_position_in_grid.xy; "
            "y[p.y * N + p.x] = x[p.y * x_strides[0] + p.x * x_strides[1]];",
            grid=("N", "M"), threadgroup=(8, 8),
        ),
        "sums": ferrule.op(
            "sums", "x[N]:float32 -> total[1]:float32",
            metal=I + "atomic_fetch_add_explicit(&total[0], x[i], memory_order_relaxed);",
            grid="N", threadgroup=64, atomic_outputs=True, init_value=0,
        ),
        "put": ferrule.op(
            "put", "c[B,L]:T!, v[B]:T, at:uint16 -> was[B]:T",
            metal=I + "was[i] = c[i * L + at]; c[i * L + at] = v[i];", grid="B", threadgroup=16,
        ),
    }  # fmt: skip


OPS = ops()
LAYOUTS = ("contiguous", "transposed", "sliced", "expanded")


def tensor(draw: Any, shape: list[int], dtype: torch.dtype) -> torch.Tensor:
    size = int(np.prod(shape))
    values = torch.arange(2 * size + 1)[1:] % 7
    layout = draw(st.sampled_from(LAYOUTS))
    if layout == "transposed" and len(shape) > 1:
        return values[:size].reshape(shape[::-1]).to(dtype).permute(*reversed(range(len(shape))))
    if layout == "sliced" and shape:
        return values.reshape(*shape[:-1], 2 * shape[-1])[..., ::2].to(dtype)
    if layout == "expanded" and shape and size:
        return values[: shape[-1]].to(dtype).expand(shape)
    return values[:size].reshape(shape).to(dtype)


@st.composite
def calls(draw: Any) -> tuple[str, list[Any]]:
    """An op and inputs, which are wrong now and then."""
    name = draw(st.sampled_from(sorted(OPS)))
    size = st.integers(0, 6)
    dtype = draw(st.sampled_from([torch.float32, torch.float16, torch.int32, torch.bool]))
    if dtype == torch.bool and name != "strided":
        dtype = torch.float32
    n, k = draw(size), draw(size)
    wrong = draw(st.sampled_from([0, 0, 0, 1]))
    if name == "affine":
        b = tensor(draw, [k + wrong], dtype) if draw(st.booleans()) else None
        values = [tensor(draw, [n, k], dtype), b, draw(st.floats(-2, 2, width=16)),
                  draw(st.integers(-140, 140)), draw(st.booleans())]  # fmt: skip
    elif name == "stars":
        lead = draw(st.lists(st.integers(0, 3), max_size=3))
        a, b = tensor(draw, [*lead, k], dtype), tensor(draw, [*lead, k + wrong], torch.int16)
        values = [a, b, tensor(draw, [k], dtype)]
    elif name == "strided":
        values = [tensor(draw, [n, k, 1][: 2 + wrong], dtype)]
    elif name == "sums":
        values = [tensor(draw, [n], torch.float64 if wrong else torch.float32)]
    else:
        c = torch.arange(2 * n * k).reshape(2 * n, k).to(dtype)
        c = c[::2] if draw(st.booleans()) else c[:n]
        values = [c, tensor(draw, [n + wrong], dtype), draw(st.integers(0, max(k - 1, 0)))]
    return name, values


def outcome(call: Any, values: list[Any]) -> Any:
    """What a call gives, and what it leaves in its inputs."""
    given = [v.clone() if isinstance(v, torch.Tensor) and v.is_contiguous() else v for v in values]
    if isinstance(values[0], torch.Tensor) and not values[0].is_contiguous():
        base = values[0]
        memory = torch.empty_strided(base.shape, base.stride(), dtype=base.dtype)
        given[0] = memory if 0 in base.stride() and base.numel() else memory.copy_(base)
        if 0 in base.stride() and base.numel():
            given[0] = base
    try:
        found = call(*given)
    except Exception as error:
        return type(error), str(error)
    outputs = found if isinstance(found, tuple) else (found,)
    return [
        (v.shape, v.dtype, v.stride(), v.tolist())
        for v in (*outputs, *given)
        if isinstance(v, torch.Tensor)
    ]


def test_a_grid_of_an_outputs_size_is_left_to_python() -> None:
    op = ferrule.op(
        "rows", "x[*S,K]:T -> y[*S]:T", metal=I + "y[i] = x[i * K];", grid="y.size", threadgroup=8
    )
    assert op(torch.arange(12.0).reshape(2, 3, 2)).tolist() == [[0, 2, 4], [6, 8, 10]]


@given(calls())
@settings(max_examples=150, deadline=None)
def test_as_in_python(call: tuple[str, list[Any]]) -> None:
    name, values = call
    if name == "put" and values[0].shape[1] == 0 and values[0].shape[0]:
        return  # there is no place to write to
    op = OPS[name]
    assert outcome(op, values) == outcome(op._operator.run if op._operator else _python(op), values)


def _python(op: Op) -> Any:
    return op.torch_op and op._operator.run


def test_it_is_c_that_carries_them_out() -> None:
    for op in OPS.values():
        assert op.torch_op is not None
        keys = torch._C._dispatch_dump(op.torch_op._schema.name)
        assert "\nCPU: registered at ferrule:0 " in keys
        assert any(one.op.digest == op.digest for one in torch_calls._bound)


def test_new_sizes_ask_python_nothing() -> None:
    op = ferrule.op(
        "sizes", "x[N]:float32 -> y[N]:float32", metal=I + "y[i] = 2 * x[i];", grid="N",
        threadgroup=256,
    )  # fmt: skip
    for n in (300, 400, 5000):
        assert op(torch.ones(n)).sum() == 2 * n
    (bound,) = (one for one in torch_calls._bound if one.op.digest == op.digest)
    assert bound.structure.entries == 1


def test_errors_of_compiled_and_direct_calls_have_the_text() -> None:
    op = OPS["strided"]
    with pytest.raises(RuntimeError, match=r"input 'x' of op 'strided': got the shape \(2,\)"):
        op.torch_op(torch.ones(2))
    with pytest.raises(ferrule.KernelError, match=r"input 'x' of op 'strided'"):
        op(torch.ones(2))
    with pytest.raises(
        RuntimeError, match="The size of tensor a"
    ):  # not the error of the call before
        torch.ones(2) + torch.ones(3)


def test_arrays_without_dims_and_absent_ones_look_as_in_python() -> None:
    op = ferrule.op(
        "described", "x[*S]:float32, b[N,M]:float32?, n[N,M]:int32 -> y[*S,6]:int32",
        metal="int s = 100 * x_ndim + 10 * x_shape[0] + x_strides[0]; y[0] = s; y[1] = b_ndim; "
        "y[2] = b_shape[0]; y[3] = b_strides[1]; y[4] = has_b; y[5] = 0;",
        grid=1, threadgroup=1,
    )  # fmt: skip
    n = torch.zeros(2, 3, dtype=torch.int32)
    for x in (torch.ones(()), torch.arange(2.0)[1], torch.ones(1)):
        for b in (None, torch.ones(2, 3)):
            assert op(x, b, n).flatten().tolist() == _python(op)(x, b, n).flatten().tolist()
    assert op(torch.ones(()), None, n).tolist() == [111, 2, 1, 1, 0, 0]


def test_sizes_that_a_body_cannot_read_are_refused() -> None:
    op = ferrule.op("long", "x[N]:int8 -> y[1]:int32", metal="y[0] = x_shape[0];", grid=1,
                    threadgroup=1, ensure_row_contiguous=False)  # fmt: skip
    x = torch.zeros(1, dtype=torch.int8)
    assert op(x.expand(2**31 - 1)).tolist() == [2**31 - 1]
    for call in (op, _python(op)):
        with pytest.raises(ferrule.KernelError, match=r"'x' of op 'long': .* at most 2147483647"):
            call(x.expand(2**31))
    with pytest.raises(ferrule.KernelError, match=r"'x' of op 'long': .* at most 2147483647"):
        op(np.broadcast_to(np.int8(0), (2**31,)))


def test_what_torch_does_not_take_is_named() -> None:
    op = ferrule.op(
        "named", "x[N]:float32, b[N]:float32?, c[N]:float32, n:uint64, s:float32 -> y[N]:float32",
        metal=I + "y[i] = has_b ? b[i] : x[i] + c[i] + n + s;", grid="N", threadgroup=32,
    )  # fmt: skip
    x = torch.ones(2)
    for wrong, text in [
        ((x, None, None, 1, 1.0), r"'c' of op 'named': got None, .*c\[N\]:float32"),
        ((None, None, x, 1, 1.0), "'x' of op 'named': got None"),
        ((None, None, None, 1, 1.0), "'x' of op 'named': got None"),
        ((x, None, x.to_sparse(), 1, 1.0), "'c' .* of the layout torch.sparse_coo"),
        ((x, None, x, 2**63, 1.0), "'n' .*torch's ops take integers of at most"),
        ((x, None, x, 2**64, 1.0), "'n' of op 'named': got 18446744073709551616, but n:uint64"),
        ((x, None, x, 1, 1e39), "'s' of op 'named': got 1e.39, which does not fit: s:float32"),
    ]:
        with pytest.raises((ferrule.KernelError, ferrule.KernelTypeError), match=text):
            op(*wrong)
    assert op(x, None, x, 2**63 - 1, float("inf")).tolist() == [float("inf")] * 2


def test_large_outputs_and_threads() -> None:
    op = ferrule.op(
        "large", "x[N]:float32 -> y[N]:float32", metal=I + "y[i] = x[i] + 1;", grid="N",
        threadgroup=256,
    )  # fmt: skip
    x = torch.arange(9_000_000, dtype=torch.float32)
    assert torch.equal(op(x), x + 1)
    wrong = []

    def work(n: int) -> None:
        x = torch.full((n,), float(n))
        wrong.extend(i for i in range(300) if not torch.equal(op(x), x + 1))

    threads = [threading.Thread(target=work, args=(n,)) for n in range(1, 9)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_memory_stays_flat() -> None:
    import resource

    op, x, b = OPS["affine"], torch.ones(64, 64).t(), torch.ones(64)

    def rounds(count: int) -> int:
        for _ in range(count):
            op(x, b, 1.0, 1, False)
            op(x, None, 1.0, 1, True)
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss

    before = rounds(500)
    assert rounds(5000) - before < 4096  # KB; a leak of a tensor a call would be 80 MB


def test_without_the_library_python_does_the_same() -> None:
    code = """
import torch, ferrule
from ferrule.hosts.torch import calls as torch_calls
torch_calls.library = lambda: None
op = ferrule.op("d", "x[N]:float32 -> y[N]:float32", grid="N", threadgroup=32,
                metal="uint i = thread_position_in_grid.x; y[i] = 2 * x[i];")
assert op(torch.ones(3)).tolist() == [2, 2, 2] and not torch_calls._bound
print("ok")
"""
    done = forked(code)
    assert done.stdout == "ok\n", done.stderr


OLD = """
import sys, numpy as np, torch, ferrule
torch.__version__ = type(torch.__version__)("2.9.1+cpu")
op = ferrule.op("d", "x[N]:float32 -> y[N]:float32", grid="N", threadgroup=32,
                metal="uint i = thread_position_in_grid.x; y[i] = 2 * x[i];")
"""


def test_an_older_torch_takes_ops_by_python() -> None:
    code = f"""{OLD}
assert op(torch.ones(3)).tolist() == [2, 2, 2] and op.counts["Python path"] == 1
assert torch.compile(op, fullgraph=True, backend="aot_eager")(torch.ones(3)).tolist() == [2, 2, 2]
print("ok")
"""
    done = forked(code)
    assert done.stdout == "ok\n", done.stderr


def test_a_torch_that_is_too_old_is_named() -> None:
    code = f"""{OLD}
del torch.library.register_vmap
assert op(np.ones(3, np.float32)).tolist() == [2, 2, 2]
for call in (lambda: op(torch.ones(3)), lambda: op.torch_op):
    try:
        call()
    except ferrule.KernelError as error:
        print(error)
"""
    done = forked(code)
    first, second = done.stdout.splitlines()
    assert first == second
    assert first.startswith("[op] ops of torch's tensors need torch 2.10 or later; this is 2.9.1")
    assert "register_vmap" in first


def test_the_pool_is_large_and_what_does_not_fit_goes_on_in_python() -> None:
    code = """
import torch, ferrule
from ferrule.kernels import entries
from ferrule.hosts.torch import calls as torch_calls
def make(n):
    return ferrule.op(f"n{n}", "x[N]:float32 -> y[N]:float32", grid="N", threadgroup=32,
                      metal=f"uint i = thread_position_in_grid.x; y[i] = {n} + x[i];")
library = torch_calls.library()
spare = entries.OpTable()
import ctypes
while (taken := library.fr_torch_take(ctypes.byref(spare))) < 2046: torch_calls._bound.append(None)
torch_calls._bound.append(None)
found = [make(n)(torch.ones(1)).item() for n in range(3)]
assert found == [1, 2, 3], found
assert len([one for one in torch_calls._bound if one]) == 1
print("ok")
"""
    done = forked(code)
    assert done.stdout == "ok\n", done.stderr


AGAIN = """
import gc, resource, threading, weakref
import torch, ferrule
from ferrule.hosts.torch import calls as torch_calls, op as torch_op
def make(n):
    op = ferrule.op("again", "x[N]:float32 -> y[N]:float32", grid="N", threadgroup=32,
                    metal="uint i = thread_position_in_grid.x; y[i] = 2 * x[i];")
    op.def_vjp(lambda primals, cotangents, outputs: (cotangents[0] * n,), version=n)
    return op
x = torch.ones(4)
"""


def test_thousands_of_ops_in_one_process() -> None:
    """More than the pool has functions for, defined and dropped while other threads call them."""
    code = f"""{AGAIN}
old, wrong, ended = [], [], threading.Event()
def work():
    while not ended.wait(0.01):
        wrong.extend(o for o in old[-50:] if o(x).tolist() != [2.0] * 4)
threads = [threading.Thread(target=work) for _ in range(2)]
for thread in threads: thread.start()
slow = []
for n in range(2150):
    op = make(n)
    assert op(x).tolist() == [2.0] * 4
    slow.append(op.counts["Python path"])
    old.append(op.torch_op)
    if n % 500 == 0: gc.collect()
ended.set()
for thread in threads: thread.join()
del op; gc.collect()
assert not wrong and slow[:2048] == [0] * 2048 and min(slow[2048:]) >= 1, slow[2040:2060]
assert len(torch_calls._bound) == 2048 and len(set(map(str, old))) == 2150
for n in (0, 1, 1000, 2047, 2048, 2149):  # what a graph holds goes on
    y = x.clone().requires_grad_()
    old[n](y).sum().backward()
    assert y.grad.tolist() == [n] * 4, n
print("ok")
"""
    done = forked(code)
    assert done.stdout == "ok\n", done.stderr


def test_an_op_that_is_defined_again_unchanged_takes_nothing_more() -> None:
    code = f"""{AGAIN}
def rounds(count):
    found = []
    for _ in range(count):
        op = make(1)
        op(x)
        found.append(weakref.ref(op))
    del op
    gc.collect()
    alive = [one for one in found if one() is not None]
    return alive, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
first = make(1)(x)
before = rounds(300)[1]
alive, after = rounds(2000)
assert not alive and after - before < 8192, (len(alive), after - before)  # KB
assert len(torch_calls._bound) == 1 and len(torch_op._registered) == 1
print("ok")
"""
    done = forked(code)
    assert done.stdout == "ok\n", done.stderr


def test_an_interrupt_ends_a_long_launch() -> None:
    code = """
import signal, time, torch, ferrule
op = ferrule.op("slow", "x[N]:float32 -> y[N]:float32", grid="N", threadgroup=32, metal='''
    uint i = thread_position_in_grid.x; float v = x[i];
    for (int j = 0; j < 400000; j++) v = metal::fma(v, 0.5f, 1.0f);
    y[i] = v;''')
ferrule.set_threads(1)
op(torch.ones(0))
class Stop(Exception): pass
def stop(number, frame): raise Stop("stopped")
signal.signal(signal.SIGALRM, stop)
signal.setitimer(signal.ITIMER_REAL, 2.0)
start = time.monotonic()
try:
    op(torch.ones(1 << 20))
except Stop as error:
    print(error, time.monotonic() - start < 60)
"""
    done = forked(code)
    assert done.stdout == "stopped True\n" and not done.stderr, done


def test_an_interpreter_that_ends_leaves_a_daemon_thread_in_its_op() -> None:
    # Python before 3.14 unwinds the thread where it wants the interpreter's lock again, and torch's
    # C++ calls std::terminate then.
    code = """
import threading, torch, ferrule
op = ferrule.op("slow", "x[N]:float32, n:int32, begun[1]:int32! -> y[N]:float32", grid="N",
                threadgroup=32, metal='''
    uint i = thread_position_in_grid.x; float v = x[i];
    begun[0] = 1;
    for (int j = 0; j < n; j++) v = metal::fma(v, 0.5f, 1.0f);
    y[i] = v;''')
ferrule.set_threads(2)
x, begun = torch.ones(1 << 20), torch.zeros(1, dtype=torch.int32)
op(x, 1, begun)
begun.zero_()
threading.Thread(target=lambda: op(x, 40000, begun), daemon=True).start()
while not begun.item():
    pass
print("ok")
"""
    done = forked(code, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "ok\n", "")


def test_the_thread_that_ends_the_interpreter_still_calls_ops() -> None:
    code = """
import atexit, torch, ferrule
op = ferrule.op("two", "x[N]:float32 -> y[N]:float32", grid="N", threadgroup=32,
                metal="uint i = thread_position_in_grid.x; y[i] = 2 * x[i];")
op(torch.ones(1))
# What is registered here runs before torch takes its operators away.
atexit.register(lambda: print(tuple(op(torch.ones(3)).shape), tuple(op(torch.ones(5)).shape)))
"""
    done = forked(code, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "(3,) (5,)\n", "")


def test_the_chosen_way_of_running_reaches_them() -> None:
    op = ferrule.op(
        "ways", "x[N]:float32 -> y[N]:float32", metal=I + "y[i] = simd_sum(x[i]);", grid="N",
        threadgroup=64,
    )  # fmt: skip
    x = torch.ones(64)
    found = set()
    for mode in ("auto", "split", "fibers", "auto"):
        with cpu.running(mode):
            assert op(x).tolist() == [32.0] * 64
        (bound,) = (one for one in torch_calls._bound if one.op.digest == op.digest)
        (program,) = bound.op.implementations[0].programs.values()  # type: ignore[union-attr]
        found |= {mode for mode, _ in program._forms}  # type: ignore[attr-defined]
        assert mode in found and bound.structure.entries == 0
    assert found == {"auto", "split", "fibers"}
    op(x)
    assert bound.structure.entries == 1 and not torch_calls.fastcall.bypasses


def test_many_dims_are_refused() -> None:
    with pytest.raises(ferrule.KernelError, match="expected 16 dims at most"):
        OPS["stars"](torch.ones([1] * 17), torch.ones([1] * 17), torch.ones(1))
