"""Whether pointers lead to a thread's own variables: where that is not certain, they do."""

from __future__ import annotations

import pytest

from ferrule import dtypes
from ferrule.kernel import make_kernel
from ferrule.source.cpp import prepare
from ferrule.source.private_memory import is_pointed_to
from ferrule.spec import Input, Spec


def asked(body: str, header: str = "") -> bool:
    kernel = make_kernel("k", ["x"], ["y"], body, header)
    return is_pointed_to(prepare(Spec(kernel, (Input(dtypes.float32, 1),), (dtypes.float32,), ())))


@pytest.mark.parametrize(
    "body",
    [
        "float s[4]; for (int k = 0; k < 4; ++k) s[k] = x[k]; y[0] = s[3];",
        "float s[2][4]; s[1][2] = x[0]; y[0] = s[1][2];",
        "auto p = x + 3; y[0] = p[1];",
        "threadgroup float s[8]; s[0] = x[0]; y[0] = s[0];",
        "constexpr float c[] = {1, 2}; y[0] = c[1];",
    ],
)
def test_elements_alone(body: str) -> None:
    assert not asked(body)


@pytest.mark.parametrize(
    ("header", "body"),
    [
        ("", "float s[4] = {0}; thread float* p = s; y[0] = p[1];"),
        ("", "float s[4] = {0}; thread float* p = &s[1]; y[0] = p[1];"),
        ("", "float v = 0; thread float* p = &v; y[0] = p[1];"),
        ("float g(thread float* p) { return p[9]; }", "float s[4] = {0}; y[0] = g(s);"),
        ("", "float s[2][4] = {{0}}; thread float* p = s[1]; y[0] = p[1];"),
        ("", "using V = float[4]; V v = {0}; thread float* p = v; y[0] = p[1];"),
        ("typedef float V[4];", "V v = {0}; thread float* p = v; y[0] = p[1];"),
        ("struct S { float a[4]; };", "S s = {{0}}; y[0] = s.a[1];"),
        ("", "float4 v = 0; y[0] = v[int(x[0])];"),
        ("#define P(a) &a", "float v = 0; thread float* p = P(v); y[0] = p[1];"),
        ("", "float s[16000]; s[0] = 1; y[0] = s[0];"),  # its stack may be too small
        ("constant int N = 4;", "float s[N]; s[0] = 1; y[0] = s[0];"),  # how large is not read
    ],
)
def test_what_may_be_pointed_to(header: str, body: str) -> None:
    assert asked(body, header)
