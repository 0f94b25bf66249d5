"""The lanes that operations of a simdgroup name on CUDA: each launch carried out warp by warp."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import ferrule
import warps
from dialect_blocks import BLOCKS, Block
from ferrule.devices.cpu import program as cpu
from ferrule.tools import nvrtc
from fuzz import harness
from fuzz import program as p
from fuzz.generate import Generator
from fuzz.operations import Invalid
from split_cases import INPUTS, Case, branches, loops, masks
from test_ways import kernel_of

pytestmark = pytest.mark.together

I32 = np.dtype(np.int32)
WORDS = ("simd_", "quad_", "simdgroup_barrier", "quadgroup_barrier")


@pytest.mark.parametrize("block", BLOCKS, ids=lambda b: b.name)
def test_examples_of_the_dialect(block: Block) -> None:
    call = dict(block.call)
    outputs, asked, text = warps.launch(
        ferrule.metal_kernel(**block.kernel), call.pop("inputs"), **call
    )
    assert block.check(outputs), "\n".join(map(str, outputs))
    named = any(word in block.kernel["source"] for word in WORDS)
    assert ("fr_m0" in text) == named
    assert asked == 0


# Lanes and what they leave, each with what must be written of it.
LEAVES = {
    "return": ("if (i % 5 == 3) return;", "else fr_m0 = fr_s1.no"),
    "return, and more": ("if (i % 5 == 3) { y[i] = 7; return; }", "else fr_m0 = fr_s1.no"),
    "return, and variables": (
        "if (i % 5 == 3) { int z = i * 2; for (int k = 0; k < 3; ++k) { int w = k; z += w; }"
        " if (z > 40) { y[i] = z; } y[i] += 7; return; }",
        "else fr_m0 = fr_s1.no",
    ),
    "return, of variables": (
        "int z = 1; if (i % 5 != 3) { int z = i % 7, u = z; if (u < 3) return; v += simd_sum(u); }"
        " if (z) v += simd_sum(z);",
        "if (z) v += simd_sum(fr_m0, z)",
    ),
    "return or not": (
        "if (i % 5 == 3) { y[i] = 7; return; } else v += simd_sum(2);",
        "{ fr_m0 = fr_s1.no; v += simd_sum(fr_m0, 2); }",
    ),
    "return in an else": ("if (i % 5 == 3) v += simd_sum(1); else if (i % 5 == 2) return;", "goto"),
    "return in a branch": (
        "if (i % 3 == 1) { v += simd_sum(1); if (i % 5 == 3) return; v += simd_sum(1); }", "goto",
    ),
    "return in a loop": ("for (int k = 0; k < 9; ++k) if (k == i) return;", "goto"),
    "return in a loop that operates": (
        "for (int k = 0; k < 9; ++k) { if (k == i) return; v += simd_sum(k); }", "else fr_m0 =",
    ),
    "return in a loop of some": (
        "for (int k = 0; k < i % 7; ++k) { if (k * 9 == i) return; v += simd_sum(k); }", "goto",
    ),
    "break": (
        "for (int k = 0; k < 9; ++k) { if (k == i % 11) break; v += simd_sum(k); }",
        "else fr_l",
    ),
    "break in a branch": (
        "for (int k = 0; k < 9; ++k) { if (i % 2) { v += simd_sum(1); if (k == i % 11) break; }"
        " v += simd_sum(k); }",
        "fr_leave = 2",
    ),
    "break in a while": (
        "int k = 0; while (true) { if (k == i % 11) break; v += simd_sum(k); ++k; }", "else fr_l",
    ),
    "continue": (
        "for (int k = 0; k < 9; ++k) { if (k % 3 == i % 3) continue; v += simd_sum(k); }",
        "fr_r",
    ),
    "continue in a while": (
        "int k = 0; while (k < i % 9) { ++k; if (k % 3 == i % 3) continue; v += simd_sum(k); }",
        "fr_r",
    ),
    "continue in a do": (
        "int k = 0; do { ++k; if (k % 3 == i % 3) continue; v += simd_sum(k); } while (k < i % 9);",
        "fr_r",
    ),
    "continue, break and return": (
        "for (int k = 0; k < 9; ++k) { if (k % 3 == i % 3) continue; v += simd_sum(k);"
        " if (i % 4 == 1) { if (k == i % 11) break; v += simd_sum(1); if (k == i % 13) return; }"
        " v += simd_sum(k); }",
        "fr_leave == 1",
    ),
    "break of all": (
        "for (int k = 0; k < 9; ++k) { if (k % 2 == i % 2) continue; v += simd_sum(k);"
        " if (k == 5) break; v += simd_sum(1); }",
        "fr_leave = 2",
    ),
    "loops in loops": (
        "for (int k = 0; k < i % 4; ++k) for (int j = 0; j < 5; ++j) {"
        " if (j == i % 7) break; if ((k + j) % 4 == i % 4) continue; v += simd_sum(k + j); }",
        "fr_r",
    ),
    "a switch": (
        "switch (i % 4) { case 0: v = 1; break; case 1: return; default: v = 2; }", "goto",
    ),
    "a loop of simdgroups": (
        "for (uint k = 0; k < simdgroup_index_in_threadgroup; ++k) v += simd_sum(1);",
        "k < simdgroup_index_in_threadgroup; ++k) v += simd_sum(fr_m0, 1)",
    ),
    "all or none": ("if (simd_any(i == 40)) return;", "if (simd_any(fr_m0, i == 40)) return;"),
    "a function": ("v += helped(i, v); if (i % 3 == 1) v += helped(v, i);", "simd_sum(fr_s"),
    "a macro": ("v += TWICE(i); if (i % 3 == 1) { v += TWICE(2); }", "simd_sum(fr_s1.yes"),
    "operands": (
        "bool b = (i > 3 && simd_sum(1) == 5) || simd_is_first();"
        "v += i % 3 == 1 ? simd_sum(i) : i % 5 ? simd_max(i) : simd_sum(b && simd_any(i > 9));",
        "fr_b2 = ::fr::warp::branch(fr_m0, (i > 3) ? true : false)).taken && simd_sum(fr_b2.yes",
    ),
    "operands that all evaluate": (
        "v += simd_any(i == 9) && simd_all(i > 3) ? simd_sum(i) : 2;", "? simd_sum(fr_m0, i) : 2",
    ),
    "a condition with operands": (
        "while (v < 9 && simd_any(v < i % 9)) { if (i % 4 == 1 || simd_any(v == 3)) ++v; v += 2; }",
        "fr_l1, ((fr_b1 = ",
    ),
    "unrolled": (
        "if (i > 40) return;\n#pragma unroll\nfor (int k = 0; k < 4; ++k) {"
        " if (k == i % 7) break; v += simd_sum(k); }",
        "mask fr_l",
    ),
}  # fmt: skip
HEADER = """
inline int helped(int a, int b) {
  if (a < 20) return simd_sum(b);
  int t = simd_max(a);
  for (int k = 0; k < b % 3; ++k) t += simd_sum(1);
  return t;
}
#define TWICE(A) (simd_sum(A) + simd_max(A))
"""


@pytest.mark.parametrize("name", LEAVES)
def test_lanes_that_leave_are_named_no_more(library: nvrtc.Nvrtc, name: str) -> None:
    body, written = LEAVES[name]
    source = f"""int i = thread_position_in_grid.x; int v = 0;
    {body}
    v += simd_sum(1) * 100; if (v > 5) v += 1000 * simd_sum(i);
    y[i] += v;"""
    kernel = ferrule.metal_kernel("leaves", [], ["y"], source, HEADER)
    for grid, threadgroup in (((128, 1, 1), (64, 1, 1)), ((75, 1, 1), (40, 1, 1))):
        call: dict[str, Any] = {
            "output_shapes": [(128,)], "output_dtypes": [I32], "grid": grid,
            "threadgroup": threadgroup, "init_value": 0,
        }  # fmt: skip
        (got,), asked, text = warps.launch(kernel, [], **call)
        assert written in text and asked == 0, text
        with cpu.running("fibers"):
            (want,) = kernel(inputs=[], **call)
        np.testing.assert_array_equal(got, want, text)
    del call["init_value"]
    assert kernel.compile("cuda", inputs=[], **call).payload.startswith(b"\x7fELF")


SPLIT = [
    case
    for case in (*branches.CASES, *loops.CASES, *masks.CASES)
    if any(word in case.body + case.header for word in WORDS)
]


@pytest.mark.parametrize("case", SPLIT, ids=lambda case: case.name)
def test_what_is_easy_to_get_wrong_in_loops_over_lanes(case: Case) -> None:
    kernel = kernel_of(case)
    shape = case.shapes[-1]
    call: dict[str, Any] = {
        "inputs": [INPUTS[n] for n in kernel.kernel.input_names],
        "output_shapes": [(math.prod(shape.grid),)], "output_dtypes": [I32], "grid": shape.grid,
        "threadgroup": shape.threadgroup, "template": list(case.template) or None, "init_value": 0,
    }  # fmt: skip
    (got,), _, text = warps.launch(kernel, **call)
    with cpu.running("fibers"):
        (want,) = kernel(**call)
    np.testing.assert_array_equal(got, want, text)


# Operations that name no lanes; where it can be, those of the mask meet before them.
ASKS = {
    "lambda": ("auto f = [&](int a) { return simd_sum(a); }; y[i] = f(i);", True),
    "method": ("struct S { int step(int v) { return simd_sum(v); } } s; y[i] = s.step(i);", True),
    "function as an operand": ("if (i > 3 && total(2) > 1) y[i] = 1;", True),
    "beside one": (
        "if (i > 3 && total(2) > 1) y[i] = 1; y[i] += total(i); y[i] += total(y[i]);", True,
    ),
    "switch": ("switch (i & 1) { case 0: y[i] = simd_sum(1); break; default: y[i] = 2; }", True),
    "switch that some leave": (
        "switch (i & 3) { case 0: y[i] = simd_sum(1); break; case 1: return; default: y[i] = 2; }"
        " y[i] += simd_sum(10);",
        True,
    ),
    "preprocessor": ("#if __cplusplus\ny[i] = simd_sum(i);\n#endif", False),
}  # fmt: skip


@pytest.mark.parametrize("name", ASKS)
def test_what_names_no_lanes_asks_who_is_there(library: nvrtc.Nvrtc, name: str) -> None:
    body, meets = ASKS[name]
    source = f"int i = thread_position_in_grid.x;\n{body}"
    header = "inline int total(int v) { return simd_sum(v); }"
    kernel = ferrule.metal_kernel("asks", [], ["y"], source, header)
    call: dict[str, Any] = {
        "output_shapes": [(64,)], "output_dtypes": [I32], "grid": (64, 1, 1),
        "threadgroup": (64, 1, 1), "init_value": 0,
    }  # fmt: skip
    (got,), asked, text = warps.launch(kernel, [], **call)
    with cpu.running("fibers"):
        (want,) = kernel(inputs=[], **call)
    np.testing.assert_array_equal(got, want)
    assert asked > 0 and ("warp::meet(" in text) == meets
    del call["init_value"]
    assert kernel.compile("cuda", inputs=[], **call).payload.startswith(b"\x7fELF")


@pytest.mark.parametrize("arch", [750, 900])
@pytest.mark.parametrize("kind", ["char", "ushort", "int", "uint", "long", "half", "bfloat"])
def test_reductions_of_every_type(kind: str, arch: int) -> None:
    """With all lanes, and with some; integers by one instruction where there is one."""
    ops = ("sum", "product", "max", "min", *(("and", "or", "xor") if kind[0] in "ciul" else ()))
    source = f"uint i = thread_position_in_grid.x; {kind} v = {kind}(int(x[i]));" + "".join(
        f"y[i * {2 * len(ops)} + {2 * k}] = float(simd_{op}(v));"
        f"y[i * {2 * len(ops)} + {2 * k + 1}] = float(quad_{op}(v));" for k, op in enumerate(ops)
    )  # fmt: skip
    kernel = ferrule.metal_kernel("reductions", ["x"], ["y"], source)
    x = np.random.default_rng(3).integers(-100, 100, 64).astype(np.float32)
    for n in (64, 41):
        call: dict[str, Any] = {
            "output_shapes": [(64 * 2 * len(ops),)], "output_dtypes": [np.dtype(np.float32)],
            "grid": (n, 1, 1), "threadgroup": (64, 1, 1), "init_value": 0,
        }  # fmt: skip
        (got,), _, _ = warps.launch(kernel, [x], **call, arch=arch)
        with cpu.running("fibers"):
            (want,) = kernel(inputs=[x], **call)
        np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize("kind", ["ushort", "int", "half"])
def test_moves_of_every_lane(library: nvrtc.Nvrtc, kind: str) -> None:
    """With all lanes and with some; distances known and not known."""
    names = [
        f"{width}_{move}"
        for width in ("simd", "quad")
        for move in ("shuffle", "broadcast", *(f"shuffle_{m}" for m in (
            "up", "down", "xor", "rotate_up", "rotate_down", "and_fill_up", "and_fill_down",
        )))
    ]  # fmt: skip
    calls = [
        f"{n}(v, {'f, ' if 'fill' in n else ''}{k})" for n in names for k in ("1", "k", "k + 2")
    ]
    calls += [f"{n}(v, f, 1, 2)" for n in names if "fill" in n]
    source = f"uint i = thread_position_in_grid.x; {kind} v = i * 3, f = i + 100;"
    source += "ushort k = x[0];" + "".join(
        f"y[i * {len(calls)} + {n}] = float({text});" for n, text in enumerate(calls)
    )
    kernel = ferrule.metal_kernel("moves", ["x"], ["y"], source)
    for n, k in ((64, 1), (41, 2), (64, 40)):
        call: dict[str, Any] = {
            "output_shapes": [(64 * len(calls),)], "output_dtypes": [np.dtype(np.float32)],
            "grid": (n, 1, 1), "threadgroup": (64, 1, 1), "init_value": 0,
        }  # fmt: skip
        x = np.full(8, k, np.int32)
        (got,), asked, _ = warps.launch(kernel, [x], **call)
        with cpu.running("fibers"):
            (want,) = kernel(inputs=[x], **call)
        wrong = np.flatnonzero(got != want)
        assert not len(wrong), [(w, calls[w % len(calls)], got[w], want[w]) for w in wrong[:5]]
        assert asked == 0
    del call["init_value"]
    assert kernel.compile("cuda", inputs=[x], **call).payload.startswith(b"\x7fELF")


def _fuzzed(seeds: range) -> list[int]:
    found = []
    for seed in seeds:
        program = Generator(seed, frozenset()).program()
        text = program.body_text() + program.header_text()
        if any(word in text for word in WORDS):
            found.append(seed)
    return found


@pytest.mark.parametrize("seed", _fuzzed(range(60, 90)))
def test_fuzzed_programs(seed: int) -> None:
    program = Generator(seed, frozenset()).program()
    try:
        wanted = harness.expected(program)
    except Invalid:
        pytest.skip("no defined result")
    how, want = program.launches[-1], wanted[-1]
    template = [
        (v.name, np.dtype(x.dtype) if isinstance(x, p.Type) else x) for v, x in program.template
    ]
    outputs, _, _ = warps.launch(
        harness.build(program), program.arrays(how.data), grid=how.grid,
        threadgroup=how.threadgroup, template=template or None, init_value=program.init,
        output_shapes=[(per * math.prod(how.grid) or 16,) for _, per in program.outputs],
        output_dtypes=[np.dtype(v.type.dtype) for v, _ in program.outputs],
    )  # fmt: skip
    for (var, _), a, b in zip(program.outputs, want, outputs, strict=True):
        np.testing.assert_array_equal(a, b.reshape(-1), var.name)


def test_a_fill_of_shorts_has_masks() -> None:
    """`modulo` may be left out: the mask before a short is no value."""
    kernel = ferrule.metal_kernel(
        "fills", ["x"], ["y"],
        "uint i = thread_position_in_grid.x; ushort v = x[i];"
        "y[i] = simd_shuffle_and_fill_up(v, v, 1) + simd_shuffle_and_fill_down(v, v, ushort(2));"
        "y[i] += quad_shuffle_and_fill_up(v, v, 1) + quad_shuffle_and_fill_down(v, v, 1, 2);",
    )  # fmt: skip
    binary = kernel.compile("compute_90", inputs=["uint16[64]"], output_dtypes=[ferrule.float32])
    assert "simd_shuffle_and_fill_up(fr_m0, v, v, 1)" in binary.text
