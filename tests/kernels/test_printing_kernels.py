"""printf and Metal's logs in bodies: whose lines come out, in what order, and where."""

from __future__ import annotations

import ctypes
import io
import signal
import subprocess
import sys
import textwrap
import threading
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ferrule
from ferrule.devices.cpu.program import running

_LIBC = ctypes.CDLL(None)


def say(source: str, name: str = "say", header: str = "") -> Any:
    """A kernel with one input and one output of the same shape."""
    return ferrule.metal_kernel(name, ["x"], ["y"], source, header)


def call(kernel: Any, x: Any, grid: Any = 0, threadgroup: Any = 32, **options: Any) -> Any:
    grid = grid if isinstance(grid, tuple) else (grid or len(x), 1, 1)
    threadgroup = threadgroup if isinstance(threadgroup, tuple) else (threadgroup, 1, 1)
    return kernel(inputs=[x], grid=grid, threadgroup=threadgroup, output_shapes=[x.shape],
                  output_dtypes=[x.dtype], **options)[0]  # fmt: skip


def printed(run: Any, **options: Any) -> str:
    out = io.StringIO()
    with ferrule.printing(to=out, **options):
        run()
    return out.getvalue()


LINE = say('uint i = thread_position_in_grid.x; printf("%u: %g\\n", i, float(x[i])); y[i] = x[i];')
ZEROS = np.zeros(1, np.float32)

FORMATS = ferrule.metal_kernel(
    "formats",
    ["a", "b", "c", "d", "e"],
    ["o"],
    r"""
    int i = a[0]; uint u = b[0]; long l = c[0]; half h = d[0]; float f = e[0]; uchar k = uchar(u);
    bfloat16_t g = bfloat16_t(f); short s = short(i); bool t = u > 9; enum { FEW = 7 };
    printf("%d|%5i|%-12d|%+d|%05d\n", i, i, i, i, i);
    printf("%u|%x|%#X|%o|%hu|%hhu\n", u, u, u, u, u, k);
    printf("%ld|%lld|%lu|%llx|%zu|%jd\n", l, l, ulong(l), l, size_t(l), l);
    printf("%f|%.3e|%g|%10.2f|%a\n", f, f, f, f, f);
    printf("%g|%g|%*.*f|%c|%s|%%\n", h, g, 9, 2, f, 'c', "text");
    printf("%hd|%d|%d|%d\n", s, t, FEW, k);
    o[0] = 1;
    """,
)


def c_format(message: str, *values: object) -> str:
    room = ctypes.create_string_buffer(2000)
    size = _LIBC.snprintf(room, ctypes.c_size_t(2000), message.encode(), *values)
    return room.raw[:size].decode()


@settings(max_examples=50, deadline=None)  # the first call compiles
@given(st.integers(-(1 << 31), (1 << 31) - 1), st.integers(0, (1 << 32) - 1),
       st.integers(-(1 << 63), (1 << 63) - 1), st.floats(width=16, allow_nan=False),
       st.floats(width=32, allow_nan=False))  # fmt: skip
def test_formats_are_cs(i: int, u: int, n: int, h: float, f: float) -> None:
    dtypes = (np.int32, np.uint32, np.int64, np.float16, np.float32)
    inputs = [np.array([v], d) for v, d in zip((i, u, n, h, f), dtypes, strict=True)]
    text = printed(
        lambda: FORMATS(inputs=inputs, grid=(1, 1, 1), threadgroup=(1, 1, 1),
                        output_shapes=[(1,)], output_dtypes=[np.int32])
    )  # fmt: skip
    number, half = ctypes.c_double(f), ctypes.c_double(h)
    with np.errstate(over="ignore"):
        brain = ctypes.c_double(float(np.float32(f).astype(ml_dtypes.bfloat16)))
    long, unsigned = ctypes.c_long(n), ctypes.c_uint(u)
    assert text.splitlines() == [
        c_format("%d|%5i|%-12d|%+d|%05d", *[ctypes.c_int(i)] * 5),
        c_format("%u|%x|%#X|%o|%hu|%hhu", *[unsigned] * 6),
        c_format("%ld|%lld|%lu|%llx|%zu|%jd", *[long] * 6),
        c_format("%f|%.3e|%g|%10.2f|%a", *[number] * 5),
        c_format("%g|%g|%*.*f|%c|%s|%%", half, brain, 9, 2, number, ord("c"), b"text"),
        c_format("%hd|%d|%d|%d", ctypes.c_int(i), int(u > 9), 7, u % 256),
    ]


@pytest.mark.parametrize("mode", ["auto", "flat", "split", "fibers"])
@pytest.mark.parametrize(("n", "threadgroup"), [(1, 1), (7, 3), (100, 32), (5000, 64)])
def test_lines_come_in_the_order_of_threads(mode: str, n: int, threadgroup: int) -> None:
    x = np.arange(n, dtype=np.float32)
    wanted = "".join(f"{i}: {i:g}\n" for i in range(n))
    with running(mode):
        assert printed(lambda: call(LINE, x, n, threadgroup), limit=None) == wanted


def test_a_launch_that_lasts_is_one_launch() -> None:
    n = 60000  # it comes back to Python in between
    text = printed(lambda: call(LINE, np.zeros(n, np.float32)), limit=None)
    assert text == "".join(f"{i}: 0\n" for i in range(n))


def test_threads_come_in_metals_order_and_each_whole() -> None:
    kernel = say("""
        uint3 p = thread_position_in_threadgroup, g = threadgroup_position_in_grid;
        printf("%u%u%u/%u%u%u", g.x, g.y, g.z, p.x, p.y, p.z);
        threadgroup_barrier(mem_flags::mem_threadgroup);
        float s = simd_sum(1.0f);
        printf(" %g\\n", s);
        y[0] = 0;
    """)
    grid, group = (4, 3, 2), (3, 2, 1)
    text = printed(lambda: call(kernel, ZEROS, grid, group))
    wanted = []
    for gz, gy, gx in np.ndindex(2, 2, 2):
        sizes = (min(3, 4 - 3 * gx), min(2, 3 - 2 * gy))
        for y, x in np.ndindex(sizes[1], sizes[0]):
            wanted.append(f"{gx}{gy}{gz}/{x}{y}0 {sizes[0] * sizes[1]}")
    assert text.splitlines() == wanted


def test_logs_have_levels_and_sources() -> None:
    kernel = say(
        """
        metal::os_log_default.log("plain %d", 1);
        os_log_default.log_with_type(metal::os_log_type_fault, "typed");
        own.log_debug("debug %.1f", half(1.5h)); own.log_info("info"); own.log_error("error");
        own.log_fault("fault\\n");
        constexpr mlx::os_log logger("mlx", "kernel");
        logger.log_debug("a message %d", 3);
        y[0] = 0;
        """,
        header='#include <metal_logging>\nconstant metal::os_log own("net", "conv");\n',
    )
    text = printed(lambda: call(kernel, ZEROS), prefix=True)
    place = "say: thread (0, 0, 0) of threadgroup (0, 0, 0): "
    assert text.replace(place, "").splitlines() == [
        "plain 1", "typed", "[net:conv] debug 1.5", "[net:conv] info", "[net:conv] error",
        "[net:conv] fault", "[mlx:kernel] a message 3",
    ]  # fmt: skip


def test_functions_lambdas_and_macros_print() -> None:
    kernel = say(
        "auto f = [&](uint v) { SAY(v); }; f(1); tell(2.5h); (S{3}).tell(); y[0] = 0;",
        header="""
        #define SAY(v) printf("macro %u\\n", v)
        template <class T> void tell(T v) { printf("function %g\\n", v); }
        struct S { int k; void tell() const { printf("method %d\\n", k); } };
        """,
    )
    text = printed(lambda: call(kernel, ZEROS))
    assert text == "macro 1\nfunction 2.5\nmethod 3\n"


def test_printf_gives_the_number_of_values() -> None:
    kernel = say('y[0] = printf("%d %s\\n", 1, "two"); y[1] = printf("none\\n");')
    with ferrule.printing(to=io.StringIO()):
        assert call(kernel, np.zeros(2, np.float32), 1).tolist() == [2, 0]


@pytest.mark.parametrize("limit", [0, 1, 7, 1000, 5000, None])
def test_the_limit_is_of_each_launch(limit: int | None) -> None:
    x, n = np.zeros(3000, np.float32), 3000
    for _ in range(3):
        lines = printed(lambda: call(LINE, x), limit=limit).splitlines()
        kept = n if limit is None else min(n, limit)
        assert lines[:kept] == [f"{i}: 0" for i in range(kept)]
        rest = [f"… {n - kept} more lines of kernel 'say' not shown"] if kept < n else []
        assert lines[kept:] == rest


def test_a_loop_that_prints_keeps_to_the_limit() -> None:
    kernel = say('for (int i = 0; i < 200000; ++i) printf("%d\\n", i); y[0] = 0;')
    lines = printed(lambda: call(kernel, ZEROS)).splitlines()
    assert lines[:1000] == [str(i) for i in range(1000)]
    assert lines[1000:] == ["… 199000 more lines of kernel 'say' not shown"]


def test_pieces_make_lines() -> None:
    kernel = say("""
        uint r = thread_position_in_grid.x;
        for (int k = 0; k < 200; ++k) printf("%d ", k + int(r));
        printf("\\n"); y[0] = 0;
    """)
    lines = printed(lambda: call(kernel, ZEROS, 3), limit=2).splitlines()
    wanted = [" ".join(str(k + r) for k in range(200)) + " " for r in range(2)]
    assert lines == [*wanted, "… 1 more lines of kernel 'say' not shown"]


def test_stdout_without_a_block(capsys: pytest.CaptureFixture[str]) -> None:
    call(LINE, np.zeros(1500, np.float32))
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "0: 0" and out[1000:] == ["… 500 more lines of kernel 'say' not shown"]


def test_each_thread_of_python_has_its_block() -> None:
    texts: dict[int, str] = {}

    def work(n: int) -> None:
        x = np.zeros(n, np.float32)
        texts[n] = printed(lambda: [call(LINE, x) for _ in range(10)])

    workers = [threading.Thread(target=work, args=(n,)) for n in range(1, 9)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert texts == {n: "".join(f"{i}: 0\n" for i in range(n)) * 10 for n in range(1, 9)}


def test_what_cannot_be_printed_is_refused() -> None:
    for value in ("float4(1)", "x + 1 > x ? float2(1) : float2(2)"):
        kernel = say(f'printf("%f\\n", {value}); y[0] = 0;')
        with pytest.raises(ferrule.CompileError, match="vector's components one by one") as error:
            call(kernel, ZEROS)
        assert "source line 1" in str(error.value)


def test_a_fault_shows_what_was_printed_before() -> None:
    kernel = say('printf("before\\n"); *(device int*)ulong(x[0]) = 1; y[0] = 0;')
    out = io.StringIO()
    with pytest.raises(ferrule.DeviceError), ferrule.printing(to=out):
        call(kernel, ZEROS)
    assert out.getvalue() == "before\n"


def test_other_kernels_run_as_they_did() -> None:
    spec = {"inputs": ["float32[8]"], "output_dtypes": [ferrule.float32]}
    kernel = say("uint i = thread_position_in_grid.x; assert(i < 8); y[i] = x[i];")
    assert kernel.compile("cpu", **spec).mode == "flat"
    assert LINE.compile("cpu", **spec).mode.startswith("fibers")


@pytest.mark.parametrize("mode", ["flat", "split", "fibers"])
def test_assertions_are_read_and_not_evaluated(mode: str) -> None:
    kernel = say("""
        uint i = thread_position_in_grid.x; int n = 0;
        assert(++n < 0 && "never"); assert((i < 2, false)); assert(simd_sum(1.0f) > 1e9f);
        y[i] = n;
    """)
    with running("auto" if mode == "flat" else mode):
        assert call(kernel, np.ones(4, np.float32)).tolist() == [0, 0, 0, 0]
    with pytest.raises(ferrule.CompileError, match="nothing"):
        call(say("assert(nothing > 3); y[0] = 0;"), ZEROS)


def test_an_op_prints_from_every_host(capsys: pytest.CaptureFixture[str]) -> None:
    torch, mx = pytest.importorskip("torch"), pytest.importorskip("mlx.core")
    op = ferrule.op(
        "told", "x[N]:T -> y[N]:T", grid="N", threadgroup=4,
        metal='uint i = thread_position_in_grid.x; printf("%u\\n", i); y[i] = x[i];',
    )  # fmt: skip
    wanted = "0\n1\n2\n3\n4\n"
    for x in (np.zeros(5, np.float32), torch.zeros(5), mx.zeros(5)):
        for _ in range(4):  # from the third on in C
            with mx.stream(mx.cpu):
                y = op(x)
                if isinstance(y, mx.array):
                    mx.eval(y)
            assert capsys.readouterr().out == wanted
            assert printed(lambda x=x: _evaluated(mx, op, x)) == wanted


def _evaluated(mx: Any, op: Any, x: Any) -> None:
    with mx.stream(mx.cpu):
        y = op(x)
        if isinstance(y, mx.array):
            mx.eval(y)


def test_mlx_shows_lines_where_it_waits_with_pythons_lock(
    capsys: pytest.CaptureFixture[str],
) -> None:
    mx = pytest.importorskip("mlx.core")
    for ask in (np.array, mx.array.tolist, repr, str, lambda y: y[0].item(), mx.eval):
        ask(call(LINE, mx.zeros(3), 3, stream=mx.cpu))
        assert capsys.readouterr().out == "0: 0\n1: 0\n2: 0\n"


def test_torch_compile_prints(capsys: pytest.CaptureFixture[str]) -> None:
    torch = pytest.importorskip("torch")
    op = ferrule.op(
        "compiled_told", "x[N]:T -> y[N]:T", grid="N", threadgroup=4,
        metal='uint i = thread_position_in_grid.x; printf("%u\\n", i); y[i] = x[i];',
    )  # fmt: skip
    run = torch.compile(lambda x: op(x) + 1, backend="eager")
    for _ in range(3):
        run(torch.zeros(3))
        assert capsys.readouterr().out == "0\n1\n2\n"


ENDLESS = """
    import os, signal, threading, time
    import numpy as np, ferrule
    BODY = '''printf("before\\\\n");
        volatile device int* seen = *(volatile device int* const device*)p;
        seen[1] = 1; while (seen[0] == 0) {} y[0] = 1;'''
    kernel = ferrule.metal_kernel("endless", ["p"], ["y"], BODY)
    words = np.zeros(2, np.int32)
    def run():
        p = np.array([words.ctypes.data], np.int64)
        kernel(inputs=[p], output_shapes=[(1,)], output_dtypes=[np.float32], grid=(1, 1, 1),
               threadgroup=(1, 1, 1))
    words[0] = 1
    for _ in range(3):
        run()
    words[:] = 0
    def stop():
        while not words[1]:
            time.sleep(0.01)
        for _ in range(2):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.3)
    threading.Thread(target=stop, daemon=True).start()
    try:
        run()
    except KeyboardInterrupt:
        print("interrupted")
"""


def test_an_interrupt_shows_what_was_printed_before() -> None:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(ENDLESS)],
        capture_output=True, text=True, timeout=100,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    assert done.stdout.split() == ["before"] * 4 + ["interrupted"], done.stderr
