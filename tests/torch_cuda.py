"""What the tests of ops in torch on a GPU share: when they run, and CUDA graphs that are checked.

Torch's warnings, and those of the libraries that are adopted, differ from version to version, so
only ferrule's own are errors in these tests.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import on_cuda

ON_GPU = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (on_cuda.available() and torch.cuda.is_available()), reason="there is no GPU for torch"
    ),
]
MARKS = [
    *ON_GPU,
    pytest.mark.filterwarnings(
        "ignore", "error::ferrule.FerruleWarning", "ignore::ferrule.PortabilityWarning",
        "ignore:op '.*' is called . times by vmap",
    ),
]  # fmt: skip
TWO_GPUS = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="there is one GPU")


def tensors(values: Any) -> list[torch.Tensor]:
    """All tensors in a structure."""
    leaves = torch.utils._pytree.tree_leaves(values)
    return [one for one in leaves if isinstance(one, torch.Tensor)]


def close(found: Any, expected: Any, limit: float = 1e-4) -> None:
    """Fail unless two results are nearly the same, in shape and dtype, too."""
    torch.testing.assert_close(found, expected, rtol=10 * limit, atol=limit)


def captured(function: Callable[[], Any]) -> tuple[Any, Any]:
    """A CUDA graph of a call, and what it gives at each replay."""
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = function()
    return graph, found


def poison(found: Any) -> None:
    """Write to outputs what no call gives: what a replay leaves alone is then seen."""
    for one in tensors(found):
        one.fill_(float("nan") if one.is_floating_point() else 77)


def check_replays(
    op: Callable[..., Any], reference: Callable[..., Any], given: tuple[Any, ...],
    limit: float = 1e-4,
) -> None:  # fmt: skip
    """Fail unless the replays of a CUDA graph of a call compute it, for inputs that change."""
    graph, found = captured(lambda: op(*given))
    starts = [one.clone() if isinstance(one, torch.Tensor) else one for one in given]
    for factor in (0.5, -0.25):
        for one, start in zip(given, starts, strict=True):
            if isinstance(one, torch.Tensor):
                one.copy_(start * factor if _is_plain(one) else start)
        expected = [one.clone() if isinstance(one, torch.Tensor) else one for one in given]
        poison(found)
        graph.replay()
        close(found, reference(*expected), limit)
        for one, value in zip(given, expected, strict=True):
            if _is_plain(one):
                close(one, value, limit)  # written in place, or not at all


def _is_plain(one: Any) -> bool:
    """Whether it has floats that can be multiplied; those of 8 bits cannot."""
    return isinstance(one, torch.Tensor) and one.is_floating_point() and one.element_size() > 1
