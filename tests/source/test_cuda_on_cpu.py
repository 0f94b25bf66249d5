"""CUDA texts on the CPU, against NumPy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import cuda_on_cpu
import ferrule as fe
from cuda_bodies import BODIES, Body


def launched(body: Body) -> list[Any]:
    count = 2 if "more" in body.source else 1
    names = ["a", "b", "c"][: len(body.inputs)]
    kernel = fe.cuda_kernel(
        "k", names, ["out", "more"][:count], body.source, header=body.header,
        shared_memory=body.shared,
    )  # fmt: skip
    size = int(np.prod(body.grid))
    return cuda_on_cpu.launch(
        kernel, body.inputs, grid=body.grid, threadgroup=body.threadgroup,
        output_shapes=[(size,)] * count, output_dtypes=[np.float32] * count,
        template=body.template, init_value=body.init,
    )  # fmt: skip


@pytest.mark.parametrize("name", BODIES)
def test_bodies(name: str) -> None:
    body = BODIES[name]
    outputs, want = launched(body), body.want(*body.inputs)
    for out, expected in zip(outputs, want if isinstance(want, list) else [want], strict=True):
        expected = np.asarray(expected, np.float32)
        if body.exact:
            np.testing.assert_array_equal(out[: expected.size], expected)
        else:
            np.testing.assert_allclose(out, expected, rtol=2e-5, atol=2e-3)
