"""Kernels and ops as nodes of MLX's graphs on an NVIDIA GPU: the same cases as on the CPU."""

from __future__ import annotations

import mlx.core as mx
import pytest

import test_mlx_node
from test_mlx_node import *  # noqa: F403

pytestmark = [
    pytest.mark.gpu,
    test_mlx_node.pytestmark,
    pytest.mark.skipif(
        not mx.is_available(mx.gpu) or mx.metal.is_available(), reason="MLX has no CUDA here"
    ),
]
