"""The CUDA text of products of few rows, run on the CPU (tests/native/products.h): each tile, warps
with fewer of 16 rows, clusters, tails of K, bases that are not aligned."""

from __future__ import annotations

import ctypes
import itertools
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ferrule
import precompiled
from ferrule.ops import quantized_cuda
from ferrule.ops import quantized_persistent_dense_cuda as persistent
from ferrule.ops.quantized_cuda import Names
from ferrule.ops.quantized_cuda_texts import DENSE, FEW
from ferrule.ops.quantized_decode_cuda import AHEAD, MODES, TABLES
from ferrule.ops.quantized_machine_cuda import MACHINE
from ferrule.ops.quantized_tiles import TILES, TILES_OF_EXPERTS, Persistent, Tile
from ferrule.tools import toolchain

ml_dtypes = pytest.importorskip("ml_dtypes")
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="fibers are those of Linux")

MLX = quantized_cuda.named(False)
HEADER = Path(__file__).parent.parent / "native" / "products.h"
WARP_GROUPS = HEADER.with_name("warp_groups.h")
MAIN = """
extern "C" void run(const T* x, const uint32_t* w, const void* scales, const void* biases,
                    const float* factor, const T* added, T* y, int64_t N, int64_t K, int count,
                    int64_t* bytes, int split, int shared_bytes) {
  const void* const begins[] = {x, w, scales, biases, factor, added};
  arrays.clear();
  for (int i = 0; i < 6; ++i)
    arrays.push_back({(const char*)begins[i], (const char*)begins[i] + bytes[i]});
  kernel = [=] {
    dense(x, w, scales, (BIASES)biases, (WHOLE)factor, bytes[4] / 4, (OFFSET)added, y, N, K, count);
  };
  launch((N + ROWS - 1) / ROWS, split, WARPS * 32, shared_bytes + ROWS * 4);
}
"""
# Of blocks that stay: x in their order comes behind what is added, and there are `split` of them.
MAIN_OF_PERSISTENT = """
extern "C" void run(const T* x, const uint32_t* w, const void* scales, const void* biases,
                    const float* factor, const T* added, T* y, int64_t N, int64_t K, int count,
                    int64_t* bytes, int split, int shared_bytes) {
  std::vector<uint4> room((count + 7) / 8 * (padded(K) / BLOCK) * BLOCK * 8 * 2 / 16);
  T* const in_order = (T*)room.data();
  const void* const begins[] = {x, w, scales, biases, factor, added};
  arrays.clear();
  for (int i = 0; i < 6; ++i)
    arrays.push_back({(const char*)begins[i], (const char*)begins[i] + bytes[i]});
  arrays.push_back({(const char*)in_order, (const char*)(room.data() + room.size())});
  std::vector<float4> left(split * ROWS * TOK / 4, float4{NAN, NAN, NAN, NAN});
  std::vector<int> of_warps(split * WARPS, 1);
  float* const sums = (float*)left.data();
  int *const there = of_warps.data(), warps = of_warps.size();
  kernel = [=] { ordered(x, in_order, K, count, there, warps); };
  launch((count * (padded(K) / 8) + 255) / 256, 1, 256, 1024);
  kernel = [=] {
    persistent(in_order, w, scales, (BIASES)biases, (WHOLE)factor, bytes[4] / 4, (OFFSET)added, y,
               sums, there, N, K, count);
  };
  launch(split, 1, THREADS, shared_bytes);
}
"""
FORMATS = [
    ("nvfp4", 4, 16), ("mxfp4", 4, 32), ("affine", 4, 32), ("affine", 4, 128), ("affine", 8, 64),
    ("mxfp8", 8, 32),
]  # fmt: skip
DTYPES = {"bfloat16": ml_dtypes.bfloat16, "float16": np.dtype(np.float16)}
EVERY = list(dict.fromkeys((*TILES, *TILES_OF_EXPERTS)))
# Of few rows of x a tile whose last warps have fewer of 16 rows of w, and which may have tables.
SOME = [next(tile for tile in TILES if tile.tokens == n and tile.rows == 80) for n in (8, 16)]


# Memory of a block that is not counted at a launch, where the one of this emulation ends.
OF_ROWS = "__shared__ float of_row[ROWS];"
EMULATED = "float* const of_row = (float*)(shared + block_of_me().memory.size() - ROWS * 4);"


@pytest.fixture
def folders(tmp_path: Path, precompiled_headers: Path) -> tuple[Path, Path]:
    """Where a kernel is compiled, and where the header of all kernels lies."""
    return tmp_path, precompiled_headers


def compiled(
    form: tuple[str, int, int],
    tile: Tile | Persistent,
    bf16: bool,
    names: Names,
    folder: Path,
    headers: Path,
) -> Any:
    """The kernel of a tile, as it is launched."""
    mode, bits, group = form
    constants = {"MODE": MODES[mode], "BITS": bits, "GROUP": group, **tile.template}
    given = "".join(f"constexpr int {name} = {value};\n" for name, value in constants.items())
    text, main = TABLES + AHEAD + FEW + DENSE, MAIN
    if isinstance(tile, Persistent):
        given += f"constexpr int TOK = {tile.tokens};\n"
        begun = f'#include "{WARP_GROUPS}"\nconstexpr int NEAR = {tile.near}, SHARING = 100;\n'
        text, main = f"{begun}{persistent.NOTHING_LEFT}{persistent.DENSE}", MAIN_OF_PERSISTENT
        text += persistent.products(tile.widths) + persistent.PERSISTENT
    text = quantized_cuda._text(mode, names, text).replace(MACHINE, "").replace(OF_ROWS, EMULATED)
    source = folder / "kernel.cpp"
    begin = f"constexpr bool BF16 = {str(bf16).lower()};\n#include <cstdint>\n"
    begin += f'#include "{HEADER}"\n'
    library, compiler = folder / "kernel.so", toolchain.find_compiler()
    flags = ["-Og", "-w", "-std=c++20", "-shared", "-fPIC", precompiled.OWN_SYMBOLS]
    flags = [f"-I{precompiled.header(headers, compiler, flags, begin)}", *flags]
    source.write_text(f'#include "begin.h"\n{given}{text}{main}')
    subprocess.run([*compiler.argv, *flags, str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library)).run


def shifted(array: Any, by: int) -> Any:
    """A copy whose first byte is so many behind a multiple of 16."""
    memory = np.zeros(array.nbytes + 32, np.uint8)
    begin = -memory.ctypes.data % 16 + by
    copy = memory[begin : begin + array.nbytes].view(array.dtype).reshape(array.shape)
    copy[...] = array
    return copy


def check(
    form: tuple[str, int, int], tile: Tile | Persistent, dtype: str, sizes: tuple[int, int, int],
    split: int, by: int, folders: tuple[Path, Path], names: Names = MLX, factors: int = 0,
    bytes_by: int = 0,
) -> None:  # fmt: skip
    mode, bits, group = form
    tile = tile.of(*form)
    (m, n, k), kind = sizes, DTYPES[dtype]
    random = np.random.default_rng(n + k)
    dense = random.standard_normal((n, k)).astype(np.float32).astype(kind)
    how: dict[str, Any] = {"group_size": group, "bits": bits, "mode": mode}
    parts = list(ferrule.ops.quantize(dense, **how))
    if mode == "nvfp4":  # all scales, negative ones and subnormals too
        parts[1] = random.permutation(np.arange(n * k // group) % 255).reshape(n, -1) % 127
        parts[1] = (parts[1] + 128 * random.integers(0, 2, parts[1].shape)).astype(np.uint8)
    if mode == "mxfp4":
        parts[1] = random.choice([0, *range(110, 128)], parts[1].shape).astype(np.uint8)
    exact: dict[str, Any] = {} if mode == "affine" else {"dtype": "float32"}
    w = np.asarray(ferrule.ops.dequantize(*parts, **how, **exact)).astype(kind).astype(np.float64)
    x = random.standard_normal((m, k)).astype(kind)
    x[0] = 0
    x[0, random.integers(k)] = 1  # gives elements themselves
    nan = mode != "affine"
    if nan:
        parts[1][n - 1, -1] = 0x7F if mode == "nvfp4" else 255
    arrays = [shifted(np.asarray(a), by * np.asarray(a).itemsize) for a in (x, *parts)]
    if bytes_by:
        arrays[1] = shifted(arrays[1].view(np.uint8), bytes_by)
    arrays += [np.zeros(0, np.uint8)] * (4 - len(arrays))
    factor = random.uniform(0.5, 2, factors).astype(np.float32)
    added = random.standard_normal(n if names.added else 0).astype(kind)
    arrays += [factor, added]
    y = np.zeros((m, n), kind)
    sizes_of = (ctypes.c_int64 * 6)(*(a.nbytes for a in arrays))
    pointers = [ctypes.c_void_p(a.ctypes.data if a.nbytes else None) for a in (*arrays, y)]
    counts = ctypes.c_int64(n), ctypes.c_int64(k), ctypes.c_int(m)
    shared = ctypes.c_int(tile.shared_memory(*form))
    compiled(form, tile, dtype == "bfloat16", names, *folders)(
        *pointers, *counts, sizes_of, ctypes.c_int(split), shared
    )
    found, rows = y.astype(np.float64), slice(0, n - 1 if nan else n)
    assert np.isnan(found[:, rows.stop :]).all()
    expected, terms = x.astype(np.float64) @ w.T, np.abs(x.astype(np.float64)) @ np.abs(w).T
    exactly = expected[0].copy()  # elements, in float32 where they are multiplied
    if factors:
        expected, terms = expected * factor.astype(np.float64), terms * factor
        exactly = exactly.astype(np.float32) * factor
    if names.added:
        expected = expected + added.astype(np.float64)
        exactly = exactly.astype(np.float32) + added.astype(np.float32)
    rounding, least = (2.0**-8, 0) if dtype == "bfloat16" else (2.0**-11, 2.0**-24)
    bound = rounding * np.abs(expected) + k * 2.0**-24 * terms + least
    assert (np.abs(found - expected) <= bound)[:, rows].all()
    exactly = exactly.astype(np.float32).astype(kind)
    assert (found[0] == exactly.astype(np.float64))[rows].all()


def name_of(case: Any) -> str:
    form, tile, dtype, sizes, split, by = case
    shape = [tile.tokens, tile.rows, tile.stages, tile.warps]
    return "-".join(map(str, (*form, "tile", *shape, dtype, *sizes, "split", split, "by", by)))


def cases(pairs: Iterable[tuple[Tile, tuple[str, int, int]]]) -> list[Any]:
    """Tiles with formats, by turns with the dtypes, sizes, clusters and bases."""
    found = []
    for i, (tile, form) in enumerate(pairs):
        m = tile.tokens - (0, 3, 7)[i % 3]
        n = tile.rows + (1, tile.rows // 2, tile.rows - 3)[i % 3]
        k = (9 * form[2], 1024 + form[2], 2560)[i // 2 % 3]
        dtype = list(DTYPES)[i % 2]
        found.append((form, tile, dtype, (m, n, k), 1 + i // 3 % 2, int(i % 5 == 4)))
    return found


@pytest.mark.parametrize("case", cases(itertools.product(SOME, FORMATS)), ids=name_of)
def test_some_tiles(case: Any, folders: tuple[Path, Path]) -> None:
    check(*case, folders)


@pytest.mark.parametrize("mode", ["nvfp4", "mxfp4"])
@pytest.mark.parametrize("factors", [1, 0])
@pytest.mark.parametrize("added", ["", "bias"])
@pytest.mark.parametrize("bytes_by", [0, 3])
def test_factors_of_rows_and_what_is_added(
    mode: str, factors: int, added: str, bytes_by: int, folders: tuple[Path, Path]
) -> None:
    """One factor or one for each row, or of mxfp4 none; the matrix begins at any byte."""
    tile, n = SOME[0], SOME[0].rows + 13
    names = Names(factor="f" * (mode == "nvfp4"), by_row=True, added=added)
    form = next(form for form in FORMATS if form[0] == mode)
    count = (factors or n) * (mode == "nvfp4")
    case = form, tile, "bfloat16", (5, n, 1024 + form[2]), 1 + factors, 0
    check(*case, folders, names, count, bytes_by)


def persistent_cases() -> list[Any]:
    """Few blocks with several tiles each; the last of them have few rows of x and of w."""
    found = []
    for i, form in enumerate(FORMATS):
        tile = Persistent(
            ((8, 16), (16,))[i % 2], each=1 + i % 2, stages=2 + i % 3, x_stages=4, near=2
        )
        k = (9 * form[2], 1024 + form[2], 3 * form[2])[i % 3]
        sizes = 3 * tile.tokens + 5, tile.rows + (1, 130, 7)[i % 3], k
        found.append((form, tile, list(DTYPES)[i // 2 % 2], sizes, 3 - i % 2, i % 2))
    return found


@pytest.mark.parametrize("case", persistent_cases(), ids=lambda case: "-".join(map(str, case[0])))
def test_blocks_that_stay(case: Any, folders: tuple[Path, Path]) -> None:
    check(*case, folders)


@pytest.mark.parametrize("mode", ["nvfp4", "mxfp4"])
def test_blocks_that_stay_and_factors(mode: str, folders: tuple[Path, Path]) -> None:
    """A factor for each row of nvfp4, none of mxfp4; a bias; the matrix begins at any byte."""
    tile = Persistent((16,), each=2, x_stages=4, near=2)
    names = Names(factor="f" * (mode == "nvfp4"), by_row=True, added="bias")
    form = next(form for form in FORMATS if form[0] == mode)
    sizes = 19, tile.rows + 13, 160
    count = sizes[1] * (mode == "nvfp4")
    check(form, tile, "bfloat16", sizes, 2, 0, folders, names, count, bytes_by=3)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", cases(zip(EVERY, itertools.cycle(FORMATS), strict=False)), ids=name_of
)
def test_every_tile(case: Any, folders: tuple[Path, Path]) -> None:
    check(*case, folders)
