"""Matrices of simdgroups on the CPU: in one piece, or by lanes, with the same bits."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import ferrule
from ferrule.devices.cpu import program as cpu

Array = np.ndarray[Any, np.dtype[Any]]
F32 = np.dtype(np.float32)

# Each body multiplies 16x24 by 24x16 for each of two simdgroups; `s` is the simdgroup's number.
_START = (
    "uint s = simdgroup_index_in_threadgroup; const device T* p = a + s * 384, *q = b + s * 384;"
)
_ARRAYS = f"""
{_START}
simdgroup_matrix<float, 8, 8> c[2][2];
for (int r = 0; r < 2; ++r) for (int k = 0; k < 2; ++k) c[r][k] = simdgroup_matrix<float, 8, 8>(0);
for (int k = 0; k < 24; k += 8) {{
  simdgroup_matrix<T, 8, 8> x[2], z[2];
  for (int r = 0; r < 2; ++r) simdgroup_load(x[r], p + r * 192 + k, 24);
  for (int r = 0; r < 2; ++r) simdgroup_load(z[r], q + r * 192 + k, 24, ulong2(0, 0), true);
  for (int r = 0; r < 2; ++r) for (int l = 0; l < 2; ++l)
    simdgroup_multiply_accumulate(c[r][l], x[r], z[l], c[r][l]);
}}
STORE
"""
_PLAIN = "for (int r = 0; r < 2; ++r) for (int l = 0; l < 2; ++l) STORED"
_STORED = "simdgroup_store(c[r][l], y + s * 256 + r * 128 + l * 8, 16);"
_ONE = """
simdgroup_matrix<float, 8, 8> c;
for (int r = 0; r < 2; ++r) for (int l = 0; l < 2; ++l) {
  c = simdgroup_matrix<float, 8, 8>(0);
  for (int k = 0; k < 24; k += 8) {
    simdgroup_matrix<T, 8, 8> x, z;
    LOAD(x, p + r * 192 + k, 24);
    LOAD(z, q + l * 192 + k, 24, ulong2(0, 0), true);
    MULTIPLY
  }
  simdgroup_store(c, y + s * 256 + r * 128 + l * 8, 16);
}
"""
_MULTIPLY = "simdgroup_multiply_accumulate(c, x, z, c);"


def _one(load: str = "simdgroup_load", multiply: str = _MULTIPLY, before: str = "") -> str:
    return _START + before + _ONE.replace("LOAD", load).replace("MULTIPLY", multiply)


# By name: the body, and whether its products are of matrices that lie in one piece each.
BODIES: dict[str, tuple[str, bool]] = {
    "arrays": (_ARRAYS.replace("STORE", _PLAIN.replace("STORED", _STORED)), True),
    "one": (_one(), True),
    "elements": (
        _ARRAYS.replace(
            "STORE",
            """for (int r = 0; r < 2; ++r) for (int l = 0; l < 2; ++l) {
              c[r][l].thread_elements()[0] *= 3.0f;
              c[r][l].thread_elements() += float2(0.25f, 1.0f);
            }"""
            + _PLAIN.replace("STORED", _STORED),
        ),
        True,
    ),
    "some simdgroups": (
        _START
        + "".join(
            f"if (s == {n}) {{ {_ONE} }}\n".replace("LOAD", "simdgroup_load").replace(
                "MULTIPLY", _MULTIPLY
            )
            for n in (1, 0)
        ),
        True,
    ),
    "references": (
        _one(multiply="thread auto& sum = c; simdgroup_multiply_accumulate(sum, x, z, sum);"),
        False,
    ),
    "references of some simdgroups": (
        _one(
            multiply="""
            if (s == 1) { thread auto& sum = c; simdgroup_multiply_accumulate(sum, x, z, sum); }
            else { thread auto& sum = c; simdgroup_multiply_accumulate(sum, x, z, sum); }
            """
        ),
        False,
    ),
    "a lambda loads": (
        _one(
            load="load",
            before="""
            auto load = [&](thread simdgroup_matrix<T, 8, 8>& m, const device T* from, int next,
                            ulong2 at = ulong2(0, 0), bool across = false) {
              simdgroup_load(m, from, next, at, across);
            };""",
        ),
        True,  # but each lane loads for itself
    ),
    "an array as a whole": (
        _ARRAYS.replace("STORE", "auto row = c[1];" + _PLAIN.replace("STORED", _STORED)),
        False,
    ),
}
for _name, (_text, _) in BODIES.items():
    assert "STORE;" not in _text and "LOAD(" not in _text, _name


def _kernel(name: str) -> ferrule.MetalKernel:
    return ferrule.metal_kernel(
        "tiles", ["a", "b"], ["y"], BODIES[name][0], "#include <metal_simdgroup_matrix>"
    )


def _call(a: Array, b: Array) -> dict[str, Any]:
    return {
        "inputs": [a, b],
        "output_shapes": [(2, 16, 16)],
        "output_dtypes": [F32],
        "grid": (64, 1, 1),
        "threadgroup": (64, 1, 1),
        "template": [("T", a.dtype)],
    }


def _run(name: str, mode: str, a: Array, b: Array) -> Array:
    with cpu.running(mode):
        return np.asarray(_kernel(name)(**_call(a, b))[0])


@pytest.mark.parametrize("name", BODIES)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_the_ways_give_the_same_bits(name: str, dtype: Any) -> None:
    random = np.random.default_rng(7)
    a, b = (random.normal(size=(2, 16, 24)).astype(dtype) for _ in range(2))
    fibers = _run(name, "fibers", a, b)
    want = a.astype(F32) @ b.astype(F32).swapaxes(1, 2)
    if name == "elements":
        want = want * np.tile(np.array([3, 1], F32), 8) + np.tile(np.array([0.25, 1], F32), 8)
    np.testing.assert_allclose(fibers, want, rtol=1e-5, atol=1e-5)
    assert (_run(name, "split", a, b).view(np.uint32) == fibers.view(np.uint32)).all()


@pytest.mark.parametrize("name", BODIES)
def test_matrices_lie_in_one_piece_where_they_are_named(name: str) -> None:
    a = np.zeros((2, 16, 24), F32)
    text = str(_kernel(name).text("cpu", **_call(a, a)))
    assert ("::tile_multiply_accumulate(" in text) == BODIES[name][1]
    assert ("::simdgroup_multiply_accumulate(" in text) != BODIES[name][1]
