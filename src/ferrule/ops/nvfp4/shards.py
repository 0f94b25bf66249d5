"""Layers whose buffers are DTensors: what each process makes of the part that it has.

The ops themselves take DTensors, too, and are run where the least is moved. A layer is run where
its weights are, and a bias beside parts of a sum is left to who adds these up.
"""

from __future__ import annotations

import math
from typing import Any

from torch.distributed.tensor import DTensor, Partial, Replicate, Shard

from .linear import nvfp4_linear
from .moe import nvfp4_moe


def linear(
    x: Any, w_packed: Any, w_scale: Any, w_scale_2: Any, bias: Any, backend: Any = None
) -> Any:
    """A product with a matrix of which each process has some rows, or some columns.

    Args:
        x: a DTensor ``[*S, K]``, moved to where it is wanted.
        w_packed, w_scale, w_scale_2, bias: DTensors on the same mesh of one dim.
        backend: as `nvfp4_linear` has it.

    Returns:
        A DTensor: ``[*S, N]`` with ``Shard(-1)`` of rows of w, and with the bias. Of columns a
        ``Partial`` without it, since each process would add it.
    """
    packed, scale, scale_2 = (part.to_local() for part in (w_packed, w_scale, w_scale_2))
    by_row = w_packed.placements == (Shard(0),)
    if by_row:
        local = _whole(x)
        bias = None if bias is None else bias.to_local()
    else:
        local, bias = x.redistribute(placements=[Shard(x.ndim - 1)]).to_local(), None
    y = nvfp4_linear(local, packed, scale, scale_2, bias, backend=backend)
    placement = Shard(y.ndim - 1) if by_row else Partial()
    return _placed(y, w_packed.device_mesh, placement, (*x.shape[:-1], w_packed.shape[0]))


def moe(x: Any, weights: Any, ids: Any, matrices: Any, activation: str, backend: Any = None) -> Any:
    """A mixture of experts of which each process has a part of I.

    Args:
        x, weights, ids: DTensors, as `nvfp4_moe` takes them.
        matrices: DTensors; ``w13_packed`` and ``w13_scale`` have 4 dims.
        activation, backend: as `nvfp4_moe` has them.

    Returns:
        A DTensor, ``Partial``.
    """
    w1, s1, f1, w2, s2, f2 = (part.to_local() for part in matrices)
    ids = ids.redistribute(placements=[Replicate()]).to_local()
    given = _whole(x), _whole(weights), ids, w1, s1, f1, w2, s2, f2, None, activation
    y = nvfp4_moe(*given, backend=backend)
    return _placed(y, x.device_mesh, Partial(), tuple(x.shape))


def _whole(x: Any) -> Any:
    """All of a DTensor, of whose derivative each process has a part of the sum."""
    return x.redistribute(placements=[Replicate()]).to_local(grad_placements=[Partial()])


def _placed(y: Any, mesh: Any, placement: Any, shape: tuple[int, ...]) -> Any:
    """The DTensor of this shape whose part here is y."""
    stride = tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))
    return DTensor.from_local(y, mesh, [placement], run_check=False, shape=shape, stride=stride)
