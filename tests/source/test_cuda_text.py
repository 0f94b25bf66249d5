"""The CUDA text: where threads stand, for every kind of launch, and how many instructions it is."""

from __future__ import annotations

import errno
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

import ferrule
from ferrule import cache, dtypes
from ferrule.cli import main, target
from ferrule.devices import protocol as devices
from ferrule.devices.cuda import build as cuda_build
from ferrule.devices.digests import INCLUDE
from ferrule.source import cpp
from ferrule.source.cuda import text as cuda_text
from ferrule.source.cuda.launch import Form, blocks_of, dealt
from ferrule.spec import Launch
from ferrule.tools import nvdisasm, nvrtc
from ferrule_bench import sass

F32 = ferrule.float32


def launch(grid: tuple[int, int, int], threadgroup: tuple[int, int, int]) -> Launch:
    group = tuple(min(g, t) for g, t in zip(grid, threadgroup, strict=True))
    return Launch(grid, group, (), None, ())  # type: ignore[arg-type]


def form(source: str, grid: tuple[int, int, int], threadgroup: tuple[int, int, int]) -> Any:
    kernel = ferrule.metal_kernel("k", ["x"], ["y"], source)
    spec, _ = kernel._builder.described(["float32[8]"], [F32], None, None, None, None, None, "cuda")
    return cuda_text.form_of(cpp.prepare(spec), launch(grid, threadgroup))


ANY = ("any", False, False, False, False)
PLAIN = "y[thread_position_in_grid.x] = x[0];"
SEEING = f"uint n = threadgroup_position_in_grid.x; {PLAIN}"
LANES = "y[thread_position_in_grid.x] = simd_sum(x[0]);"


@pytest.mark.parametrize(
    ("source", "grid", "threadgroup", "expected"),
    [
        (PLAIN, (1000, 1, 1), (256, 1, 1), ANY),
        (PLAIN, (1024, 1, 1), (32, 1, 1), ANY),
        (SEEING, (1024, 1, 1), (256, 1, 1), ("row",)),
        (LANES, (1000, 7, 3), (256, 1, 1), ("row",)),
        (LANES, (1024, 7, 3), (256, 1, 1), ("row", False, True, True, True)),
        (LANES, (992, 7, 3), (256, 1, 1), ("row", False, True, True)),  # the last one has 224
        (LANES, (96, 1, 1), (48, 1, 1), ("row",)),
        (LANES, (1000, 65536, 1), (256, 1, 1), ("row", True)),
        (LANES, (1, 65535, 65535), (1, 1, 1), ("row",)),
        (PLAIN, (20, 20, 1), (16, 16, 1), ("box",)),
        (LANES, (20, 20, 1), (16, 16, 1), ("line",)),
        (LANES, (48, 18, 1), (16, 16, 1), ("line", False, True)),
        (LANES, (32, 32, 1), (16, 16, 1), ("box", False, True, False, True)),
        (LANES, (32, 30, 1), (32, 8, 1), ("line", False, True, True)),
        (LANES, (64, 32, 1), (32, 8, 1), ("box", False, True, True, True)),
        (PLAIN, (32, 32, 2_000_000), (16, 16, 1), ("box", True)),
        (PLAIN, (1, 1, 500), (1, 1, 100), ("line",)),  # CUDA's blocks are 64 deep at most
        (LANES, (4, 4, 64), (4, 4, 64), ("box", False, True, False, True)),
        (PLAIN, (1 << 20, 1, 1), (256, 1, 1), (*ANY, 4)),
        (PLAIN, (1 << 20, 1, 1), (1, 1, 1), (*ANY, 4)),
        (SEEING, (1 << 20, 1, 1), (256, 1, 1), ("row", *ANY[1:], 4)),
        (SEEING, (1 << 20, 1, 1), (1024, 1, 1), ("row", *ANY[1:], 4)),
        (PLAIN, (8 * 132 * 256, 1, 1), (256, 1, 1), (*ANY, 4)),
        (PLAIN, (8 * 132 * 256 - 1, 1, 1), (256, 1, 1), ANY),
        (PLAIN, (7 * 256, 1 << 10, 1), (256, 1, 1), ANY),  # the second block would have three
        (PLAIN, (33 * 256, 1 << 10, 1), (256, 1, 1), (*ANY, 4)),
        (PLAIN, (1 << 10, 1 << 10, 1), (32, 8, 1), ("box", *ANY[1:], 4)),
        (PLAIN, (1 << 20, 65536, 1), (256, 1, 1), ("any", True)),
        (PLAIN, (2**31, 1, 1), (256, 1, 1), ("row",)),
        (PLAIN, (1 << 10, 1 << 5, 1 << 10), (4, 4, 65), ("line",)),
        (LANES, (1 << 20, 1, 1), (256, 1, 1), ("row", False, True, True, True)),
    ],
)
def test_forms(source: str, grid: Any, threadgroup: Any, expected: Any) -> None:
    assert form(source, grid, threadgroup) == Form(*expected)


@pytest.mark.parametrize(
    ("source", "dtype", "expected"),
    [
        ("y[i] = x[i];", "float32", 4),
        ("y[i] = x[i];", "int64", 4),
        ("y[i] = x[i];", "bfloat16", 8),
        ("y[i] = x[i];", "uint8", 8),
        ("y[i] = x[i]; // for all i, while there are some", "float32", 4),
        ("for (int j = 0; j < 4; ++j) y[4 * i + j] = x[4 * i + j];", "float32", 4),
        ("for (uint j = 0; j < N; j++) y[4 * i + j] = x[4 * i + j];", "float32", 4),
        ("for (int j = 0; j < 99; ++j) y[i] = x[i + 512 * j] + y[i] * 2 - x[i];", "float32", 1),
        ("for (uint j = 0; j < i; ++j) y[i] += x[j];", "float32", 1),
        ("for (int j = 0; j < 4; ) y[4 * i + j++] = x[i];", "float32", 1),
        ("for (int j = 0; j < x_shape[0]; ++j) y[i] = x[j];", "float32", 1),
        ("uint j = 0; while (j < 4) y[j++] = x[i];", "float32", 1),
        ("for (int j = 0; j < 1; ++j) if (x[0] == 0) --j;", "float32", 1),
        ("for (int j = 0; j < 1; ++j) if (x[0] == 0) j = -1;", "float32", 1),
        ("for (int j = 0; j < 4; ++j) y[i] += x[j] * (j == 2 && j <= 3);", "float32", 4),
        ("for (int j = 0; j < 2; ++j) y[j] = 1; for (int j = 0; j < 2; j++) y[j]++;", "float32", 4),
        ("y[i] = simd_sum(x[i]);", "float32", 1),
        ("y[i] = metal::sin(x[i]);", "float32", 1),
        ("y[i] = metal::exp(x[i]);", "float32", 4),
        ("threadgroup float t[9]; t[0] = x[i]; y[i] = t[0];", "float32", 1),
        ("volatile float v = x[i]; y[i] = v;", "float32", 1),
        ("y[i] = atomic_load_explicit(&a[i], memory_order_relaxed);", "int32", 1),
        ("y[i] = looped(x[i]);", "float32", 1),
        ("y[i] = " + " + ".join(["x[i]"] * 1000) + ";", "float32", 1),
    ],
)  # fmt: skip
def test_how_many_threadgroups_a_block_carries_out(source: str, dtype: str, expected: int) -> None:
    header = "float looped(float v) { for (;;) if ((v *= 2) > 9) return v; }"
    kernel = ferrule.metal_kernel(
        "k", ["x"], ["y"], f"uint i = thread_position_in_grid.x; {source}",
        header if "looped" in source else "",
    )  # fmt: skip
    kind = dtypes.BY_NAME[dtype]
    spec, _ = kernel._builder.described(
        [f"{dtype}[8]"], [kind], None, None, None, [("N", 4)], None, "cuda"
    )
    assert cuda_text.needs_of(cpp.prepare(spec)).each == expected


def test_words_that_macros_paste_together_may_be_anything() -> None:
    """Here simd_sum, whose lanes are those of the author's threadgroups."""
    source = "uint i = thread_position_in_grid.x; y[i] = LANES(sum)(x[i]);"
    kernel = ferrule.metal_kernel("k", ["x"], ["y"], source, "#define LANES(n) simd_##n")
    spec, _ = kernel._builder.described(["float32[8]"], [F32], None, None, None, None, None, "cuda")
    assert cuda_text.needs_of(cpp.prepare(spec)).lanes


def test_a_body_that_sees_no_threadgroup_has_blocks_of_our_choice() -> None:
    for threads in (1, 32, 300, 1024):
        sent = launch((5000, 3, 1), (threads, 1, 1))
        found = form(PLAIN, sent.grid, sent.threadgroup)
        assert blocks_of(found, sent) == ((20, 3, 1), (256, 1, 1))
        assert dealt(found, sent).threadgroup == (256, 1, 1)
        found = form(SEEING, sent.grid, sent.threadgroup)
        assert blocks_of(found, sent)[1] == (threads, 1, 1)
        assert dealt(found, sent) == sent
    few = launch((70, 1000, 1), (32, 1, 1))
    assert blocks_of(form(PLAIN, few.grid, few.threadgroup), few) == ((1, 1000, 1), (96, 1, 1))


def test_registers_are_limited_only_where_they_must_be(library: nvrtc.Nvrtc) -> None:
    sums = " + ".join(f"v[{n}] * v[{(7 * n + 3) % 90}]" for n in range(90))
    many = f"""
        float v[90];
        for (int n = 0; n < 90; ++n) v[n] = x[thread_position_in_threadgroup.x + n * 1024];
        for (int n = 0; n < x_shape[0]; ++n) for (int m = 0; m < 90; ++m) v[m] = v[m] * v[m] + n;
        y[thread_position_in_grid.x] = {sums};"""
    few = "y[thread_position_in_threadgroup.x] = x[0];"
    for source, at_most in ((many, 64), (few, 20)):
        kernel = ferrule.metal_kernel("k", ["x"], ["y"], source)
        binary = kernel.compile(
            "sm_90", inputs=["float32[8]"], output_dtypes=[F32], grid=(1024, 1, 1),
            threadgroup=(1024, 1, 1),
        )  # fmt: skip
        (used,) = re.findall(r"Used (\d+) registers", binary.log)
        assert int(used) <= at_most


def test_the_loads_of_several_threadgroups_are_under_way_together(library: nvrtc.Nvrtc) -> None:
    if nvdisasm.find_nvdisasm() is None:
        pytest.skip("no nvdisasm")
    for dtype, each in ((F32, 4), (ferrule.bfloat16, 8)):
        kernel = ferrule.metal_kernel(
            "k", ["x"], ["y"], "uint i = thread_position_in_grid.x; y[i] = metal::exp(x[i]);"
        )
        binary = kernel.compile(
            "sm_90", inputs=[f"{dtype.name}[8]"], output_dtypes=[dtype], grid=(1 << 20, 1, 1),
            threadgroup=(256, 1, 1),
        )  # fmt: skip
        found = re.findall(r"\b(LDG|STG|BRA)\b", nvdisasm.disassemble(binary.payload))
        whole = " ".join(["LDG"] * each + ["STG"] * each)
        assert whole in " ".join(found)


def test_neighbouring_elements_of_aligned_arrays_move_together(library: nvrtc.Nvrtc) -> None:
    if nvdisasm.find_nvdisasm() is None:
        pytest.skip("no nvdisasm")
    source = """
        uint i = thread_position_in_grid.x;
        for (int j = 0; j < 4; ++j) y[4 * i + j] = 2 * x[4 * i + j];"""
    kernel = ferrule.metal_kernel("k", ["x"], ["y"], source)
    spec, sent = kernel._builder.described(
        ["float32[8]"], [F32], None, (1024, 1, 1), (256, 1, 1), None, None, "cuda"
    )
    assert sent is not None
    for aligned, expected in ((True, ["LDG.E.128", "STG.E.128"]), (False, ["STG.E"] * 4)):
        binary = devices.get("sm_90").compile(spec, sent._replace(aligned=aligned))
        sass = nvdisasm.disassemble(binary.payload)
        # Checked accesses, where some are outside, follow.
        assert re.findall(r"\b(?:LDG\.E\.\d+|STG\S*)", sass)[: len(expected)] == expected


# -- where threads stand: the header's arithmetic, on the CPU -------------------------------------

HOST = r"""
#include "types.h"
#include "math.h"
#include "functions.h"
struct { unsigned x, y, z; } blockIdx, threadIdx, gridDim;
#include "cuda_grid.h"
extern "C" __attribute__((visibility("default"))) long run(
    const fr::launch* l, const unsigned* grid, const unsigned* block, unsigned* out) {
  long n = 0;
  gridDim = {grid[0], grid[1], grid[2]};
  for (blockIdx.z = 0; blockIdx.z < grid[2]; ++blockIdx.z)
  for (blockIdx.y = 0; blockIdx.y < grid[1]; ++blockIdx.y)
  for (blockIdx.x = 0; blockIdx.x < grid[0]; ++blockIdx.x)
  for (threadIdx.z = 0; threadIdx.z < block[2]; ++threadIdx.z)
  for (threadIdx.y = 0; threadIdx.y < block[1]; ++threadIdx.y)
  for (threadIdx.x = 0; threadIdx.x < block[0]; ++threadIdx.x) {
    const fr::group g(*l);
    const fr::metal::uint3 p = g.position();
    if (!g.holds(p)) continue;
    const fr::metal::uint3 at = g.threadgroup_position_in_grid, t = g.threads_per_threadgroup;
    const unsigned hardware = (threadIdx.z * block[1] + threadIdx.y) * block[0] + threadIdx.x;
    const unsigned row[] = {g.origin.x + p.x, g.origin.y + p.y, g.origin.z + p.z, g.index(p), at.x,
                            at.y, at.z, t.x, t.y, t.z, g.threads(), hardware};
    for (unsigned v : row) *out++ = v;
    ++n;
  }
  return n;
}
"""


@pytest.fixture(scope="module")
def host() -> Any:
    import ctypes

    from ferrule.tools import loader, toolchain

    compiler = toolchain.find_compiler()
    made: dict[tuple[str, ...], Any] = {}

    def run(said: tuple[str, ...], *arrays: Any) -> int:
        if said not in made:
            text = "".join(f"#define FR_{word.upper()} 1\n" for word in said) + HOST
            library = compiler.compile(text, flags=["-O1", "-w", f"-I{INCLUDE}"])
            made[said] = loader.load_library(library, "placement").run
            made[said].restype = ctypes.c_long
        pointers = [a.ctypes.data_as(ctypes.c_void_p) for a in arrays]
        return int(made[said](*pointers))

    return run


SIZE = st.integers(1, 40)


@settings(deadline=None, max_examples=300)
@given(
    grid=st.tuples(SIZE, SIZE, SIZE),
    threadgroup=st.tuples(st.integers(1, 40), st.integers(1, 9), st.integers(1, 5)),
    lanes=st.booleans(),
    spread=st.integers(1, 5),
    far=st.booleans(),
)
def test_threads_stand_where_metal_puts_them(
    host: Any, grid: Any, threadgroup: Any, lanes: bool, spread: int, far: bool
) -> None:
    """Exactly the grid's threads run, numbered within the threadgroups that there really are."""
    sent = launch(grid, threadgroup)
    found = form(LANES if lanes else PLAIN, grid, threadgroup)
    t = sent.threadgroup
    groups = [-(-g // n) for g, n in zip(grid, t, strict=True)]
    blocks = groups
    if far:  # any rectangle that is large enough
        blocks = [-(-int(np.prod(groups)) // spread), spread, 1]
    block = t if found.threads == "box" else (int(np.prod(t)), 1, 1)
    words = np.array([*grid, *t, *groups], np.uint32)
    out = np.zeros((int(np.prod(grid)) + 8, 12), np.uint32)
    said = (found.threads, *["far"] * far, *["whole"] * found.whole)
    n = host(said, words, np.array(blocks, np.uint32), np.array(block, np.uint32), out)
    assert n == np.prod(grid)
    rows = out[:n].astype(np.int64)
    places, index, group, threads, hardware = (
        rows[:, :3], rows[:, 3], rows[:, 4:7], rows[:, 10], rows[:, 11]
    )  # fmt: skip
    width, size = np.array(t), rows[:, 7:10]
    assert (places < grid).all()
    assert len(np.unique(np.ravel_multi_index(places.T, grid))) == n
    assert (group == places // width).all()
    assert (size == np.minimum(width, grid - group * width)).all()
    px, py, pz = (places % width).T
    tx, ty, _ = size.T
    assert (index == (pz * ty + py) * tx + px).all() and (threads == size.prod(1)).all()
    if lanes:  # a simdgroup is 32 threads that follow each other
        assert (hardware == index).all()
        assert not found.full or (threads % 32 == 0).all()
        assert not found.aligned or ((index % 32 == px % 32) & (tx % 32 == 0)).all()


# -- compiled, without a GPU ----------------------------------------------------------------------

ATTRIBUTES = "\n".join(
    [f"y[{i}] += {name};" for i, name in enumerate(sorted(
        ("thread_index_in_threadgroup", "simdgroup_index_in_threadgroup", "threads_per_simdgroup",
         "simdgroups_per_threadgroup", "quadgroups_per_threadgroup", "thread_index_in_quadgroup"),
    ))]
    + [f"y[{i}] += {name}.z;" for i, name in enumerate(
        ("thread_position_in_grid", "threads_per_threadgroup", "threadgroup_position_in_grid",
         "threadgroups_per_grid", "threads_per_grid", "thread_position_in_threadgroup"),
    )]
)  # fmt: skip


@pytest.mark.parametrize(
    ("grid", "threadgroup"),
    [((100, 1, 1), (32, 1, 1)), ((20, 20, 1), (16, 16, 1)), ((9, 9, 300), (1, 1, 128)),
     ((8, 70000, 1), (8, 1, 1)), ((8, 8, 70000), (8, 4, 1))],
)  # fmt: skip
def test_every_form_compiles(library: nvrtc.Nvrtc, grid: Any, threadgroup: Any) -> None:
    kernel = ferrule.metal_kernel("forms", ["x", "s"], ["y"], ATTRIBUTES + "y[7] = simd_sum(s);")
    for s in (1.5, "float32[]"):
        binary = kernel.compile(
            "cuda", inputs=["float32[8]", s], output_dtypes=[F32], grid=grid,
            threadgroup=threadgroup,
        )  # fmt: skip
        assert binary.payload.startswith(b"\x7fELF")
        assert ("const float fr_a_s" in binary.text) == (s == 1.5)


@pytest.mark.parametrize("name", sass.TWINS)
def test_simple_bodies_cost_what_cuda_by_hand_does(library: nvrtc.Nvrtc, name: str) -> None:
    needs_nvdisasm()
    mine, theirs = sass.counts(name, library)
    assert mine <= sass.most(theirs), (mine, theirs)


SM_90 = ["--gpu-architecture=sm_90", *cuda_build.FLAGS, f"-I{INCLUDE}"]


def test_whole_threadgroups_ask_nothing(library: nvrtc.Nvrtc) -> None:
    """Where every threadgroup is whole, no thread asks whether it is in the grid, nor how many
    threads its threadgroup has along each axis before it knows its lane."""
    needs_nvdisasm()
    source = (
        "uint row = thread_position_in_grid.y, x = thread_position_in_threadgroup.x;"
        "float s = simd_sum(a[row * 32 + x]); if (thread_index_in_simdgroup == 0) y[row] = s;"
    )
    kernel = ferrule.metal_kernel("rows", ["a"], ["y"], source)
    seen = {}
    for rows in (64, 63):
        binary = kernel.compile(
            "sm_90", inputs=["float32[64,32]"], output_dtypes=[F32], grid=(32, rows, 1),
            threadgroup=(32, 8, 1),
        )  # fmt: skip
        # Without the checks of accesses, which compare without a sign, too.
        plain = re.sub(
            r"fr_view<(.*?)> (\w+)\((\w+), fr_e_\w+, \w+\)",
            r"fr_view<\1> \2(\3, {}, true)",
            binary.text,
        )
        made, _ = library.compile(plain, "rows", SM_90)
        text = nvdisasm.disassemble(made)
        # What is asked is compared without a sign; what the body asks is about bits.
        seen[rows] = len(re.findall(r"ISETP\.\w+\.U32|VIMNMX", text))
    assert seen[64] == 0 < seen[63], seen


def needs_nvdisasm() -> None:
    if nvdisasm.find_nvdisasm() is None:
        pytest.skip("nvdisasm is not installed")


# -- ferrule inspect --cuda ------------------------------------------------------------------------

INSPECTED = """
import ferrule

tiles = ferrule.metal_kernel(
    "tiles", ["x"], ["y"],
    '''
    threadgroup float tile[256];
    uint i = thread_position_in_grid.x, j = thread_index_in_threadgroup;
    tile[j] = x[i];
    threadgroup_barrier(mem_flags::mem_threadgroup);
    y[i] = tile[255 - j];
    ''',
)
wrong = ferrule.metal_kernel("wrong", ["x"], ["y"], "y[0] = nothing;")
"""


def inspect(folder: Path, *arguments: str) -> Any:
    from click.testing import CliRunner

    from ferrule.cli import main

    (folder / "kernels.py").write_text(INSPECTED)
    return CliRunner().invoke(main, ["inspect", *arguments], catch_exceptions=False)


def test_inspect_shows_machine_code(library: nvrtc.Nvrtc, tmp_path: Path) -> None:
    needs_nvdisasm()
    done = inspect(tmp_path, f"{tmp_path}/kernels.py:tiles", "--cuda", "--arch", "sm_80")
    assert done.exit_code == 0, done.output
    for part in (
        'extern "C" __global__ void ferrule_tiles(', "==== PTX for sm_80 ====", ".target sm_80",
        "==== SASS for sm_80 ====", "EXIT", "registers, memory and spills", "0 bytes spill stores",
        "1024 bytes smem",
    ):  # fmt: skip
        assert part in done.output, part


def test_inspect_of_a_wrong_architecture_or_body(library: nvrtc.Nvrtc, tmp_path: Path) -> None:
    target = f"{tmp_path}/kernels.py"
    for arch, message in (
        ("sm_42", "does not compile for 'sm_42'; it knows sm_75"),
        ("sm_9x", "does not compile for 'sm_9x'"),
        ("hopper", "--arch: got 'hopper', expected an architecture such as sm_90"),
    ):
        done = inspect(tmp_path, f"{target}:tiles", "--cuda", "--arch", arch)
        assert done.exit_code == 2 and message in done.output
        assert "__global__" not in done.output
    done = inspect(tmp_path, f"{target}:wrong", "--cuda")
    assert done.exit_code == 2 and "source line 1: identifier" in done.output


def test_inspect_without_the_disassembler(
    library: nvrtc.Nvrtc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nvdisasm, "find_nvdisasm", lambda: None)
    done = inspect(tmp_path, f"{tmp_path}/kernels.py:tiles", "--cuda")
    assert done.exit_code == 0 and "==== PTX" in done.output
    assert "pip install nvidia-cuda-nvdisasm" in done.output and "registers" in done.output


def test_architectures_as_devices(library: nvrtc.Nvrtc) -> None:
    kernel = ferrule.metal_kernel("k", ["x"], ["y"], "y[0] = x[0];")
    call: dict[str, Any] = {"inputs": ["float32[8]"], "output_dtypes": [F32]}
    cubin, ptx = kernel.compile("sm_80", **call), kernel.compile("compute_80", **call)
    assert cubin.mode == "sm_80" and "registers" in cubin.log
    assert b".target sm_80" in ptx.payload
    assert kernel.compile("sm_80", **call) == cubin  # from the cache
    with pytest.raises(ferrule.DeviceError, match="does not compile for 'sm_1'"):
        kernel.compile("sm_1", **call)
    with pytest.raises(ferrule.DeviceError, match="expected 'cpu', 'cuda', or an architecture"):
        kernel.compile("gfx90a", **call)


@pytest.mark.parametrize("name", ["sm_90f", "sm_80a", "compute_80a", "sm_", "sm_９０", "sm_90x"])
def test_architectures_that_there_are_not(library: nvrtc.Nvrtc, name: str) -> None:
    kernel = ferrule.metal_kernel("k", ["x"], ["y"], PLAIN)
    with pytest.raises(ferrule.DeviceError, match=rf"does not compile for '{name}'; it knows .*90"):
        kernel.compile(name, inputs=["float32[8]"], output_dtypes=[F32])


@pytest.mark.parametrize("dtype", [d.name for d in dtypes.ALL if d.level0])
def test_every_dtype_has_a_name(library: nvrtc.Nvrtc, dtype: str) -> None:
    kernel = ferrule.metal_kernel("k", ["x", "s"], ["y"], "y[0] = T(x[0]); y[1] = s;")
    kind = dtypes.BY_NAME[dtype]
    binary = kernel.compile(
        "cuda", inputs=[f"{dtype}[8]", f"{dtype}[]"], output_dtypes=[kind], template=[("T", kind)]
    )
    assert binary.payload.startswith(b"\x7fELF")


# -- machine code that is carried ------------------------------------------------------------------

CARRIED = """
import ferrule
plain = ferrule.metal_kernel("plain", ["x"], ["y"], "y[thread_position_in_grid.x] = x[0];")
sums = ferrule.metal_kernel("sums", ["x", "s"], ["y"],
    "uint i = thread_position_in_grid.x; y[i] = simd_sum(x[i]) * s;")
own = ferrule.cuda_kernel("own", ["x"], ["y"], "y[threadIdx.x] = x[0];")
"""


@pytest.mark.parametrize("name", ["plain", "sums", "own"])
def test_carried_to_a_machine_without_nvrtc(
    library: nvrtc.Nvrtc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    file, carried = tmp_path / "kernels.py", tmp_path / "carried"
    file.write_text(CARRIED)
    monkeypatch.setenv("FERRULE_CACHE_DIR", str(tmp_path / "one"))
    options = ["--with", "s=2.5"] if name == "sums" else []
    built = CliRunner().invoke(
        main, ["build", f"{file}:{name}", *options, "--arch", "sm_90", "--to", str(carried)]
    )
    assert built.exit_code == 0, built.output
    assert "sm_90: " in built.stdout and str(carried) in built.stdout

    monkeypatch.setenv("FERRULE_CACHE_DIR", str(tmp_path / "other"))
    monkeypatch.setattr(nvrtc, "find_nvrtc", lambda: None)
    kernel = target.find_kernel(f"{file}:{name}")[1]
    given = ["float32[1024]", 2.5] if name == "sums" else ["float32[1024]"]

    def compiled(grid: Any, threadgroup: Any, device: str = "sm_90") -> Any:
        return kernel.compile(
            device, inputs=given, output_dtypes=[F32], grid=grid, threadgroup=threadgroup
        )

    with pytest.raises(ferrule.ToolchainError, match="ferrule build"):
        compiled((1024, 1, 1), (256, 1, 1))
    added = CliRunner().invoke(main, ["cache", "add", str(carried)])
    assert added.exit_code == 0, added.output
    for threads in (32, 100, 256, 300, 1024):
        for n in (threads, 7 * threads, 7 * threads + 32, 12345, 1 << 18, 12345 << 10):
            assert compiled((n, 1, 1), (threads, 1, 1)).payload.startswith(b"\x7fELF")
    with pytest.raises(ferrule.ToolchainError, match="ferrule build"):
        compiled((1024, 1, 1), (256, 1, 1), "sm_80")


def test_a_folder_that_is_full(
    library: nvrtc.Nvrtc, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody is told that machine code is where it is not."""
    (tmp_path / "kernels.py").write_text(CARRIED)
    build = ["build", f"{tmp_path}/kernels.py:own", "--arch", "sm_90", "--to"]
    carried, right = tmp_path / "carried", cache._write
    assert CliRunner().invoke(main, [*build, str(carried)]).exit_code == 0

    def write(folder: int, name: str, data: bytes) -> None:
        if len(data) > 2000:
            raise OSError(errno.ENOSPC, "No space left on device")
        right(folder, name, data)

    monkeypatch.setattr(cache, "_write", write)
    monkeypatch.setenv("FERRULE_CACHE_DIR", str(tmp_path / "other"))
    for words in ([*build, str(tmp_path / "full")], ["cache", "add", str(carried)]):
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            done = CliRunner().invoke(main, words)
        assert done.exit_code == 2 and "No space left on device" in done.stderr, done.output


def test_a_folder_that_others_can_write(tmp_path: Path) -> None:
    """Said once, and not in the words of the cache, which no variable moves here."""
    (tmp_path / "kernels.py").write_text(CARRIED)
    (tmp_path / "all").mkdir()
    (tmp_path / "all").chmod(0o777)
    build = ["build", f"{tmp_path}/kernels.py:plain", "--arch", "sm_90", "--to"]
    for words in ([*build, f"{tmp_path}/all"], ["cache", "add", f"{tmp_path}/all"]):
        done = CliRunner().invoke(main, words)
        assert done.exit_code == 2 and "other users can write to it" in done.stderr
        assert "FERRULE_CACHE_DIR" not in done.output


def test_what_cannot_be_carried(tmp_path: Path) -> None:
    kernel = ferrule.metal_kernel("k", ["x"], ["y"], "y[0] = x[0];")
    with pytest.raises(ferrule.DeviceError, match="to NVIDIA GPUs alone, not to 'cpu'"):
        kernel.compile("cpu", inputs=["float32[8]"], output_dtypes=[F32], carry_to=tmp_path / "new")
    file = tmp_path / "kernels.py"
    file.write_text(CARRIED)

    def said(*words: str) -> str:
        result = CliRunner().invoke(main, list(words))
        assert result.exit_code == 2
        return str(result.stderr)

    assert "expected an architecture" in said(
        "build", f"{file}:plain", "--arch", "90", "--to", str(tmp_path / "new")
    )
    assert "does not compile for 'sm_1'" in said(
        "build", f"{file}:plain", "--arch", "sm_1", "--to", str(tmp_path / "new")
    )
    (tmp_path / "empty").mkdir(mode=0o700)
    assert "has no entries" in said("cache", "add", str(tmp_path / "empty"))
    assert "with the action add" in said("cache", "add")
    assert "with the action add" in said("cache", "show", str(tmp_path))
