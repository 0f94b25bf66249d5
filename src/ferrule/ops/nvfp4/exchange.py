"""Mixtures whose experts are in several processes: tokens go to them, and results come back.

Process r of W has the experts ``r * E`` to ``(r + 1) * E``, E of ``W * E``, and tokens of its own.
Both functions give it the layer of its tokens; all processes of the group must call the same one.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from torch.autograd.function import once_differentiable
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.functional import pad

import ferrule

from ..arrays import mapped_ids
from .moe import nvfp4_moe

if hasattr(collectives, "all_gather_single"):
    _all_gather = collectives.all_gather_single
else:  # torch before 2.13
    _all_gather = collectives.all_gather_tensor


def nvfp4_moe_all_to_all(
    hidden_states: Any,
    topk_weights: Any,
    topk_ids: Any,
    w13_packed: Any,
    w13_scale: Any,
    w13_scale_2: Any,
    w2_packed: Any,
    w2_scale: Any,
    w2_scale_2: Any,
    expert_map: Any = None,
    activation: str = "silu",
    apply_router_weight_on_input: bool = False,
    *,
    group: Any = None,
    backend: Any = None,
) -> Any:
    """`nvfp4_moe` of experts in all processes of a group, for many tokens (prefill, training).

    A token goes once to each process that has any of its experts, and one sum comes back from
    there. How many go where is exchanged first, for which the host waits once.

    Args:
        hidden_states: ``[M, H]``: the tokens of this process; M may differ between them, and be 0.
        topk_weights: ``[M, k]`` of any float dtype.
        topk_ids: ``[M, k]``: of ``W * E`` experts; others, as -1, add nothing.
        w13_packed, w13_scale, w13_scale_2, w2_packed, w2_scale, w2_scale_2: the E experts of this
            process, as `nvfp4_moe` takes them.
        expert_map: ``[G]``: ids count G experts, of which this says the place among the ``W * E``,
            or -1; the same in all processes.
        activation, apply_router_weight_on_input, backend: as of `nvfp4_moe`.
        group: a process group, or a mesh of one dim; None is that of all processes.

    Returns:
        ``[M, H]`` of hidden_states' dtype. What a process gives is rounded to that dtype; these are
        added in float32, in the order of processes.

    Raises:
        KernelError, KernelTypeError: as `nvfp4_moe` says; the mesh has several dims. There are
            first derivatives with respect to hidden_states and topk_weights, in all processes or
            in none.
    """
    _check("nvfp4_moe_all_to_all", hidden_states, topk_weights, topk_ids)
    group = group_of("nvfp4_moe_all_to_all", group)
    experts, size = w13_packed.shape[0], hidden_states.shape[0]
    ids = _mapped(topk_ids, expert_map)
    processes = torch.arange(group.size(), device=ids.device)
    goes = (_process_of(ids, experts, group.size()) == processes[:, None, None]).any(-1)
    sent, received = _counts(goes, group)
    order = torch.argsort(goes.reshape(-1).byte(), descending=True, stable=True)[: sum(sent)]
    process, tokens = order // max(size, 1), order % max(size, 1)
    rows = (_Rows.apply(part, tokens, sent) for part in (hidden_states, topk_weights))
    theirs = _local(ids[tokens], process[:, None] * experts, experts)
    x, weights, own = _Exchanged.apply(group, received, sent, *rows, theirs)
    w13, w2 = (w13_packed, w13_scale, w13_scale_2), (w2_packed, w2_scale, w2_scale_2)
    options = None, activation, apply_router_weight_on_input
    y = nvfp4_moe(x, weights, own, *w13, *w2, *options, backend=backend)
    (back,) = _Exchanged.apply(group, sent, received, y)
    return _Added.apply(back, tokens, sent, size)


def nvfp4_moe_all_gather(
    hidden_states: Any,
    topk_weights: Any,
    topk_ids: Any,
    w13_packed: Any,
    w13_scale: Any,
    w13_scale_2: Any,
    w2_packed: Any,
    w2_scale: Any,
    w2_scale_2: Any,
    expert_map: Any = None,
    activation: str = "silu",
    apply_router_weight_on_input: bool = False,
    *,
    group: Any = None,
    capacity: int | None = None,
    backend: Any = None,
) -> Any:
    """`nvfp4_moe` of experts in all processes of a group, for few tokens (decoding).

    No shape depends on data and the host waits for nothing: a CUDA graph can have it, and
    `torch.compile(fullgraph=True)`. Every process gets the tokens of all, and the results of each
    process's own come back to it in equal parts: two exchanges, of ``(W - 1) * C`` rows each of
    ``H`` elements, there with 4 bytes for each id and the weights besides.

    An all-to-all of tokens that drops none sends as much, and wants W copies of the tokens first.
    A reduce-scatter of results sends as much in their dtype, but rounds after each addition.

    Args:
        hidden_states: ``[M, H]``: the tokens of this process.
        topk_weights, topk_ids, w13_packed, w13_scale, w13_scale_2, w2_packed, w2_scale, w2_scale_2,
            expert_map, activation, apply_router_weight_on_input, group, backend: as of
            `nvfp4_moe_all_to_all`.
        capacity: C, the most tokens that a process has, where M is not the same in all: the same
            number in all of them. None is M.

    Returns, Raises: as `nvfp4_moe_all_to_all` says; KernelError, too, where M is above capacity.
    """
    _check("nvfp4_moe_all_gather", hidden_states, topk_weights, topk_ids)
    group = group_of("nvfp4_moe_all_gather", group)
    experts, size = w13_packed.shape[0], hidden_states.shape[0]
    capacity = size if capacity is None else capacity
    if size > capacity:
        raise ferrule.KernelError(
            f"[nvfp4_moe_all_gather] {size} tokens, of capacity={capacity}; expected no more. Give "
            "the most that any process has, or call nvfp4_moe_all_to_all in all of them."
        )
    more = (0, 0, 0, capacity - size)
    ids = pad(_mapped(topk_ids, expert_map), more, value=-1)
    x, weights, ids = _Gathered.apply(group, pad(hidden_states, more), pad(topk_weights, more), ids)
    own = _local(ids, group.rank() * experts, experts)
    w13, w2 = (w13_packed, w13_scale, w13_scale_2), (w2_packed, w2_scale, w2_scale_2)
    options = None, activation, apply_router_weight_on_input
    y = nvfp4_moe(x, weights, own, *w13, *w2, *options, backend=backend)
    (back,) = _Exchanged.apply(group, None, None, y)
    return _summed(back, group.size())[:size]


def group_of(function: str, group: Any) -> Any:
    """A process group of what users give.

    Raises:
        KernelError: it is a mesh of several dims.
    """
    if group is None:
        return dist.group.WORLD
    if not isinstance(group, DeviceMesh):
        return group
    if group.ndim != 1:
        raise ferrule.KernelError(
            f"[{function}] the mesh has {group.ndim} dims; expected one. Give that of expert "
            'parallelism: mesh["ep"].'
        )
    return group.get_group()


def _check(function: str, x: Any, weights: Any, ids: Any) -> None:
    """That rows can be sent; what else must fit `nvfp4_moe` says, in all processes.

    Raises:
        KernelError: these are no matrices with as many rows each, or ids are no ids.
    """
    if x.ndim != 2 or ids.ndim != 2 or weights.shape != ids.shape or len(ids) != len(x):
        shapes = ", ".join(str(tuple(array.shape)) for array in (x, weights, ids))
        raise ferrule.KernelError(
            f"[{function}] hidden_states, topk_weights and topk_ids have the shapes {shapes}; "
            "expected [M, H], [M, k] and [M, k]. Flatten what leads: hidden_states.flatten(0, -2)."
        )
    if ids.dtype not in (torch.int32, torch.int64):
        raise ferrule.KernelError(
            f"[{function}] topk_ids is of {ids.dtype}; expected int32 or int64. Give "
            "topk_ids.long()."
        )


# -- ids ------------------------------------------------------------------------------------------


def _mapped(ids: Any, expert_map: Any) -> Any:
    """Places among all experts, as int32; -1 of none."""
    ids = mapped_ids(ids, expert_map)
    if ids.dtype == torch.int64:  # of which int32 has not all
        ids = torch.where((ids >= 0) & (ids < 2**31), ids, -1)
    return ids.to(torch.int32)


def _process_of(ids: Any, experts: int, processes: int) -> Any:
    """The process of each id; -1 of none."""
    known = (ids >= 0) & (ids < experts * processes)
    return torch.where(known, ids // max(experts, 1), -1)


def _local(ids: Any, first: Any, experts: int) -> Any:
    """Ids as those of a process whose first expert is ``first``; -1 of experts elsewhere."""
    own = ids - first
    return torch.where((own >= 0) & (own < experts), own, -1).to(torch.int32)


def _counts(goes: Any, group: Any) -> tuple[list[int], list[int]]:
    """How many tokens go to each process, and come from each. The host waits for them."""
    sent = goes.sum(1)
    received = collectives.wait_tensor(collectives.all_to_all_single(sent, None, None, group))
    both = torch.stack([sent, received]).tolist()
    return both[0], both[1]


# -- rows, and their derivatives ------------------------------------------------------------------


class _Rows(torch.autograd.Function):  # type: ignore[misc]
    """The rows of tokens; ``sent`` of them go to each process, and none twice to one."""

    @staticmethod
    def forward(ctx: Any, x: Any, tokens: Any, sent: list[int]) -> Any:
        ctx.save_for_backward(tokens)
        ctx.sent, ctx.size = sent, x.shape[0]
        return x[tokens]

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, c: Any) -> Any:
        (tokens,) = ctx.saved_tensors
        return _added(c, tokens, ctx.sent, ctx.size), None, None


class _Added(torch.autograd.Function):  # type: ignore[misc]
    """The sum of each token's rows: `_Rows` turned round."""

    @staticmethod
    def forward(ctx: Any, rows: Any, tokens: Any, sent: list[int], size: int) -> Any:
        ctx.save_for_backward(tokens)
        return _added(rows, tokens, sent, size)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, c: Any) -> Any:
        return c[ctx.saved_tensors[0]], None, None, None


class _Exchanged(torch.autograd.Function):  # type: ignore[misc]
    """What other processes send of matrices with as many rows each, in one exchange."""

    @staticmethod
    def forward(ctx: Any, group: Any, received: Any, sent: Any, *matrices: Any) -> Any:
        ctx.group, ctx.received, ctx.sent = group, received, sent
        rows = collectives.all_to_all_single(_together(matrices), received, sent, group)
        return _apart(collectives.wait_tensor(rows), matrices)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *cotangents: Any) -> Any:
        floats = [c for c in cotangents if c.dtype.is_floating_point]
        rows = collectives.all_to_all_single(_together(floats), ctx.sent, ctx.received, ctx.group)
        parts = list(_apart(collectives.wait_tensor(rows), floats))
        found = [parts.pop(0) if c.dtype.is_floating_point else None for c in cotangents]
        return None, None, None, *found


class _Gathered(torch.autograd.Function):  # type: ignore[misc]
    """The rows of all processes of a matrix of floats, of weights and of ids, in one exchange."""

    @staticmethod
    def forward(ctx: Any, group: Any, x: Any, weights: Any, ids: Any) -> Any:
        ctx.group = group
        rows = _all_gather(_together((x, weights, ids)), 0, group)
        return _apart(collectives.wait_tensor(rows), (x, weights, ids))

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator]
    def backward(ctx: Any, of_x: Any, of_weights: Any, of_ids: Any) -> Any:
        given = of_x, of_weights
        rows = collectives.all_to_all_single(_together(given), None, None, ctx.group)
        x, weights = _apart(collectives.wait_tensor(rows), given)
        return None, _summed(x, ctx.group.size()), _summed(weights, ctx.group.size()), None


def _together(matrices: Any) -> Any:
    """Matrices with as many rows each as one of bytes: one exchange takes as long as the next."""
    return torch.cat([_dense(matrix).view(torch.uint8) for matrix in matrices], 1)


def _dense(matrix: Any) -> Any:
    """A matrix with the strides of its shape, which "contiguous" does not say of one element."""
    if matrix.stride() == (matrix.shape[1], 1):
        return matrix
    return matrix.clone(memory_format=torch.contiguous_format)


def _apart(rows: Any, like: Any) -> tuple[Any, ...]:
    """The matrices of such bytes, in new memory, where they are aligned."""
    widths = [matrix.shape[1] * matrix.element_size() for matrix in like]
    parts = zip(rows.split(widths, 1), like, strict=True)
    new = torch.contiguous_format
    return tuple(
        part.clone(memory_format=new).view(matrix.dtype)
        if matrix.shape[1]
        else matrix.new_empty((rows.shape[0], 0))
        for part, matrix in parts
    )


def _added(rows: Any, tokens: Any, sent: list[int], size: int) -> Any:
    """The sum of each token's rows in float32, one process after another: of one token a process
    has but one row, so that the order of additions is always the same."""
    total = rows.new_zeros((size, rows.shape[1]), dtype=torch.float32)
    for part, at in zip(rows.split(sent), tokens.split(sent), strict=True):
        total.index_add_(0, at, part.float())
    return total.to(rows.dtype)


def _summed(rows: Any, processes: int) -> Any:
    """The sum of as many rows of each process, in float32."""
    # Dynamo of torch 2.11 knows no `unflatten`.
    parts = rows.reshape(processes, rows.shape[0] // processes, rows.shape[-1])
    return parts.float().sum(0).to(rows.dtype)
