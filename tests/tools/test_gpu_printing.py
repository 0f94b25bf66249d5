"""What threads of a GPU print: the records that the header writes are read back as lines.

The header runs on the CPU here, thread by thread, and NVRTC compiles the same.
"""

from __future__ import annotations

import contextlib
import ctypes
import io
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import cuda_ops
import ferrule
from ferrule.devices.digests import INCLUDE
from ferrule.tools import gpu_printing, printing, toolchain
from ferrule.tools.driver import LoadedFunction
from ferrule.tools.libcuda import State
from ferrule.tools.printing import Printed

_GRID_ID = 'asm volatile("mov.u64 %0, %%gridid;" : "=l"(r.launch));'
_PROLOGUE = """
#include <cstring>
#define __device__
#define FR_CUDA_PRINTF 1
struct uint3 { unsigned x, y, z; };
static uint3 threadIdx, blockIdx, blockDim{3, 2, 1}, gridDim{2, 1, 2};
static unsigned long long launch_now;
static void __threadfence() {}
static long long __double_as_longlong(double v) { long long b; memcpy(&b, &v, 8); return b; }
static void atomicAdd(unsigned long long* at, unsigned long long v) { *at += v; }
static unsigned long long atomicCAS(unsigned long long* at, unsigned long long was,
                                    unsigned long long v) {
  auto before = *at;
  if (before == was) *at = v;
  return before;
}
struct half { float v; operator float() const { return v; } };
enum letters : unsigned char { A = 200 };
"""
_EPILOGUE = """
extern "C" void* buffer() { return &fr_printed; }
extern "C" void run(unsigned long long launch) {
  launch_now = launch;
  for (unsigned b = 4; b--;)
    for (unsigned t = 6; t--;) {  // the last one first
      blockIdx = {b % 2, 0, b / 2}, threadIdx = {t % 3, t / 3, 0};
      kernel(b, t);
    }
}
"""


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Any]:
    """Compiles `kernel(b, t)`, whose body is given, with the header."""
    folder = tmp_path_factory.mktemp("printing")
    count = iter(range(100))

    def compiled(body: str) -> Any:
        header = (INCLUDE / "cuda_print.h").read_text()
        assert _GRID_ID in header
        header = header.replace(_GRID_ID, "r.launch = launch_now;").replace("#pragma once", "")
        path = Path(folder, f"k{next(count)}.cpp")
        function = f"static void kernel(unsigned b, unsigned t) {{ {body} }}"
        path.write_text(f"{_PROLOGUE}{header}\n{function}{_EPILOGUE}")
        command = [*toolchain.find_compiler().argv, "-std=c++17", "-shared", "-fPIC", "-w"]
        library = path.with_suffix(".so")
        subprocess.run([*command, str(path), "-o", str(library)], check=True)
        loaded = ctypes.CDLL(str(library))
        loaded.buffer.restype = ctypes.c_void_p
        loaded.run.argtypes = [ctypes.c_uint64]
        return loaded

    return compiled


def taken(library: Any) -> tuple[list[list[Printed]], int]:
    used, dropped = (ctypes.c_uint64 * 2).from_address(library.buffer())
    data = ctypes.string_at(library.buffer() + 16, used)
    return gpu_printing.launches_of(data), dropped


def test_records_are_read_back_in_the_order_of_threads(emulated: Callable[[str], Any]) -> None:
    library = emulated(r"""
        printf("%u/%u %s", b, t, t % 2 ? "odd" : "even");
        if (printf(" %5.2f %c%%|%d\n", half{1.5f}, 'x', A) != 3) printf("wrong");
    """)
    for launch in (7, 3):
        library.run(launch)
    launches, dropped = taken(library)
    assert dropped == 0 and len(launches) == 2
    wanted = "".join(
        f"{b}/{t} {'odd' if t % 2 else 'even'}  1.50 x%|200\n" for b in range(4) for t in range(6)
    )
    for records in launches:
        out = io.StringIO()
        with ferrule.printing(to=out):
            printing.show("k", records)
        assert out.getvalue() == wanted
    last = launches[0][-1]
    assert (last.threadgroup, last.thread) == ((1, 0, 1), (2, 1, 0))


def test_every_kind_of_value(emulated: Callable[[str], Any]) -> None:
    library = emulated(r"""
        if (b || t) return;
        const char* none = nullptr; char text[] = "own";
        printf("%d %d %u %ld %hhd %g %s %s %p %p\n", true, short(-3), 4000000000u, -5l,
               (signed char)-7, 0.25, text, none, nullptr, (void*)16);
        printf("no value\n");
        printf("%d %s\n", 1);
    """)
    library.run(1)
    launches, _ = taken(library)
    assert [record.text for record in launches[0]] == [
        "1 -3 4000000000 -5 -7 0.25 own  (nil) 0x10\n",
        "no value\n",
        "1 %!s(no value)\n",
    ]


def test_what_has_no_room_is_counted(emulated: Callable[[str], Any]) -> None:
    library = emulated(r'for (int i = 0; i < 1000; ++i) printf("%d %s\n", i, "a longer text");')
    library.run(1)
    launches, dropped = taken(library)
    assert len(launches[0]) + dropped == 24000 and len(launches[0]) > 5000
    library.run(2)
    assert taken(library)[1] == dropped + 24000


class Memory:
    """A driver whose GPU's memory is the host's."""

    def __init__(self) -> None:
        self.waited: list[int | None] = []
        self.recorded = False
        self.state = State()

    @contextlib.contextmanager
    def current(self, context: int) -> Iterator[None]:
        yield

    def records(self, stream: int) -> bool:
        return self.recorded

    def wait(self, stream: int | None) -> None:
        self.waited.append(stream)

    def take(self, address: int, size: int, stream: int) -> bytes:
        return ctypes.string_at(address, size)

    def clear(self, address: int, size: int, stream: int) -> None:
        ctypes.memset(address, 0, size)


def test_a_buffer_is_emptied_after_a_launch_and_where_a_block_ends(
    emulated: Callable[[str], Any], capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    monkeypatch.setattr(gpu_printing, "_known", {})
    monkeypatch.setattr(printing, "_more", [])
    library: Any = emulated(r'if (!b && !t) printf("launch %d\n", int(launch_now));')
    memory: Any = Memory()
    function = LoadedFunction(1, 0, 1, 0, 1024, printed=library.buffer())
    gpu_printing.know(memory, function, "k")
    library.run(1)
    gpu_printing.show(memory, function, "k", 5)
    assert capsys.readouterr().out == "launch 1\n" and memory.waited == [5]
    memory.recorded = True  # a CUDA graph, whose launches come later
    gpu_printing.show(memory, function, "k", 5)
    assert memory.waited == [5]
    memory.recorded = False
    out = io.StringIO()
    with ferrule.printing(to=out):
        for launch in (2, 3):
            library.run(launch)
    assert out.getvalue() == "launch 2\nlaunch 3\n" and memory.waited == [5, None]
    printing.show_waiting()
    assert capsys.readouterr().out == ""
    library.run(4)  # by C, which has the main thread show it
    add = ctypes.PYFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
    add(memory.state.add_pending)(memory.state.show_printed, 7)
    assert capsys.readouterr().out == "launch 4\n" and memory.waited[-1] == 7


def test_a_record_that_is_being_written_is_waited_for(emulated: Callable[[str], Any]) -> None:
    library: Any = emulated(r'printf("%u\n", t);')
    library.run(1)
    used = ctypes.c_uint64.from_address(library.buffer())
    data = bytearray(ctypes.string_at(library.buffer() + 16, used.value))
    assert gpu_printing._is_whole(bytes(data))
    data[len(data) // 24 * 5 : len(data) // 24 * 5 + 4] = bytes(4)
    assert not gpu_printing._is_whole(bytes(data))


METAL = r"""
    uint i = thread_position_in_grid.x;
    threadgroup float tile[4];
    tile[i % 4] = x[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    printf("thread %u: %5.2f %s %c|%-8d|%lu\n", i, x[i], "text", 'c', int(i) - 3, ulong(i) << 40);
    if (i == 2) metal::os_log_default.log_error("log %f %d %d", x[i], short(i), true);
    tell(x[i]); tell(half(2)); tell(bfloat16_t(2));
    mlx::os_log own("a", "b"); own.log_debug("q");
    assert(i < 3 && "text");
    y[i] = x[i] + simd_sum(1.0f);
"""
HEADER = r"""
    constant metal::os_log mine("net", "conv");
    template <class T> void tell(T v) { printf("%f\n", v); mine.log_info("x %d", 3); }
"""
CUDA = r"""
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (printf("%d: %f %s %p %c %zu\n", i, x[i], "text", x, 'c', sizeof(int)) > 3) y[i] = x[i];
    printf("no values\n"); ::printf("%d\n", true);
    assert(i < 3);
"""


@pytest.mark.parametrize("architecture", ["sm_90", "compute_90"])
@pytest.mark.parametrize("dtype", [ferrule.float32, ferrule.float16, ferrule.bfloat16])
@pytest.mark.parametrize("language", ["metal", "cuda"])
def test_nvrtc_compiles_what_prints(architecture: str, dtype: ferrule.Dtype, language: str) -> None:
    if language == "metal":
        kernel: Any = ferrule.metal_kernel("says", ["x"], ["y"], METAL, HEADER)
    else:
        kernel = ferrule.cuda_kernel("says", ["x"], ["y"], CUDA)
    binary = kernel.compile(architecture, inputs=[f"{dtype.name}[6]"], output_dtypes=[dtype])
    assert b"fr_printed" in binary.payload and b"vprintf" not in binary.payload


def test_units_print() -> None:
    text = cuda_ops.SUM.replace("y[0] =", 'printf("%d: %f %f\\n", count, x_of(sum), sum); y[0] =')
    header = 'template <class V> __device__ V x_of(V v) { ::printf("in a header\\n"); return v; }'
    unit = ferrule.cuda_unit(
        f'#include <cstdio>\n#include "own.h"\n{text}',
        steps=[cuda_ops.PARTS, cuda_ops.TOTAL],
        scratch={"partial": "float32[7]"},
        headers={"own.h": header},
    )
    op = ferrule.op("told_sum", cuda_ops.SUM_RULE, cuda=unit)
    binary = cuda_ops.compiled(op, [(4,), ()], ["float16", None])
    assert b"fr_printed" in binary.payload and b"vprintf" not in binary.payload
    quiet = cuda_ops.compiled(cuda_ops.sum_op(), [(4,), ()], ["float16", None])
    assert b"fr_printed" not in quiet.payload


def test_other_kernels_have_no_buffer() -> None:
    kernel = ferrule.metal_kernel("quiet", ["x"], ["y"], "uint i = 0; assert(i < 3); y[i] = x[i];")
    binary = kernel.compile("cuda", inputs=["float32[6]"], output_dtypes=[ferrule.float32])
    assert b"fr_printed" not in binary.payload
