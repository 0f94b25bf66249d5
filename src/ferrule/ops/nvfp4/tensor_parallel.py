"""Styles for `torch.distributed.tensor.parallel.parallelize_module`, of layers in NVFP4.

They stand in a plan beside torch's own. Each process keeps its part of what it has already, and
nothing is sent for that: all processes must have loaded the same checkpoint.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel

import ferrule

from .modules import NVFP4Experts, NVFP4Linear
from .quantizing import GROUP


class NVFP4ColwiseParallel(ColwiseParallel):  # type: ignore[misc]
    """`ColwiseParallel` of an `NVFP4Linear`: each process has some rows of w, and of the bias.

    Modules that are no `NVFP4Linear` get torch's style, so that one plan does for models of which
    some layers are not quantised.

    Args:
        input_layouts: a placement of the input, ``Replicate()`` unless given.
        output_layouts: a placement of the output, ``Shard(-1)`` unless given.
        use_local_output: whether the output is the tensor that this process has, not a DTensor.

    Raises (as it is applied):
        KernelError: the layer is W4A4, or sharded already; the mesh has several dims.
    """

    def _apply(self, module: Any, device_mesh: Any) -> Any:
        if not isinstance(module, NVFP4Linear):
            return super()._apply(module, device_mesh)
        _check("NVFP4ColwiseParallel", module, device_mesh)
        by_row = {"w_packed": 0, "w_scale": 0}
        if module.w_scale_2.numel() == module.out_features and module.w_scale_2.ndim:
            by_row["w_scale_2"] = 0
        return distribute_module(
            module,
            device_mesh,
            partial(_shard_linear, by_row, 0),
            partial(self._prepare_input_fn, self.input_layouts, (Replicate(),)),
            partial(self._prepare_output_fn, self.output_layouts, self.use_local_output),
        )


class NVFP4RowwiseParallel(RowwiseParallel):  # type: ignore[misc]
    """`RowwiseParallel` of an `NVFP4Linear`: each process has some columns of w, a part of K.

    The bias is whole in all of them, and added once, to the sum. Modules that are no `NVFP4Linear`
    get torch's style.

    Args:
        input_layouts: a placement of the input, ``Shard(-1)`` unless given: what comes of
            `NVFP4ColwiseParallel`, or of `ColwiseParallel`.
        output_layouts: a placement of the output: ``Replicate()`` unless given, an all-reduce;
            ``Shard(i)`` is a reduce-scatter.
        use_local_output: whether the output is the tensor that this process has, not a DTensor.

    Raises (as it is applied):
        KernelError: K is no multiple of 16 times the processes; the layer is W4A4, or sharded
            already; the mesh has several dims.
    """

    def _apply(self, module: Any, device_mesh: Any) -> Any:
        if not isinstance(module, NVFP4Linear):
            return super()._apply(module, device_mesh)
        _check("NVFP4RowwiseParallel", module, device_mesh, in_features=module.in_features)
        return distribute_module(
            module,
            device_mesh,
            partial(_shard_linear, {"w_packed": 1, "w_scale": 1}, None),
            partial(self._prepare_input_fn, self.input_layouts, (Shard(-1),)),
            partial(_sum_and_bias, self.output_layouts, self.use_local_output),
        )


class NVFP4ExpertsParallel(ParallelStyle):  # type: ignore[misc]
    """Of `NVFP4Experts` each process has a part of I: of the gate, of up and of w2 alike.

    The buffers ``w13_packed`` and ``w13_scale`` are DTensors ``[E, 2, I, …]`` with ``Shard(2)``:
    with gate and up in one dim, a part of it would be of one of them.

    Args:
        input_layouts: a placement of hidden states, ids and weights: ``Replicate()`` unless given;
            ``Shard(0)``, tokens, is an all-gather.
        output_layouts: a placement of the result: ``Replicate()`` unless given, an all-reduce;
            ``Shard(0)`` is a reduce-scatter.
        use_local_output: whether the output is the tensor that this process has, not a DTensor.

    Raises (as it is applied):
        KernelError: I is no multiple of 16 times the processes; the experts are W4A4, or sharded
            already; the mesh has several dims; the module is no `NVFP4Experts`.
    """

    def __init__(
        self,
        *,
        input_layouts: Any = None,
        output_layouts: Any = None,
        use_local_output: bool = True,
    ) -> None:
        super().__init__()
        self.input_layouts = (input_layouts or Replicate(),)
        self.output_layouts = (output_layouts or Replicate(),)
        self.use_local_output = use_local_output

    def _apply(self, module: Any, device_mesh: Any) -> Any:
        if type(module) is not NVFP4Experts:  # what is one, too, calls something else
            raise ferrule.KernelError(
                f"[NVFP4ExpertsParallel] the module is {type(module).__name__}; expected "
                "NVFP4Experts. Give the name of the experts in the plan, not of their block."
            )
        _check(
            "NVFP4ExpertsParallel", module, device_mesh, intermediate_size=module.intermediate_size
        )
        module.register_forward_pre_hook(
            partial(_place_inputs, self.input_layouts, device_mesh), with_kwargs=True
        )
        return distribute_module(
            module,
            device_mesh,
            _shard_experts,
            None,
            partial(_sum, self.output_layouts, self.use_local_output),
        )


def _check(style: str, module: Any, mesh: Any, **sizes: int) -> None:
    """That a layer can be sharded so.

    Raises:
        KernelError: it cannot.
    """
    if mesh.ndim != 1:
        raise ferrule.KernelError(
            f"[{style}] the mesh has {mesh.ndim} dims; expected one. Give that of tensor "
            'parallelism: mesh["tp"].'
        )
    module.check_whole(style)
    if module.sharded:
        raise ferrule.KernelError(
            f"[{style}] the buffers of this {type(module).__name__} are DTensors; expected whole "
            "ones. Does a plan name the layer twice?"
        )
    if module.activations is not None:
        raise ferrule.KernelError(
            f"[{style}] the layer has activations={module.activations!r}; expected None. Load the "
            "model without, as W4A16: the reference of W4A4 is for one process."
        )
    for name, size in sizes.items():
        if size % (GROUP * mesh.size()):
            raise ferrule.KernelError(
                f"[{style}] {name}={size}, of {mesh.size()} processes; expected a multiple of "
                f"{GROUP} for each, since {GROUP} neighbours share a scale. Use a number of "
                f"processes that divides {size // GROUP}, or shard the rows: NVFP4ColwiseParallel."
            )


def _part(tensor: Any, mesh: Any, dim: int | None) -> Any:
    """A DTensor of what this process has whole, from its part: float8 that gloo does not send."""
    whole = tensor.detach()
    if dim is None:
        return DTensor.from_local(whole, mesh, [Replicate()], run_check=False)
    parts, rank = whole.chunk(mesh.size(), dim), mesh.get_local_rank()
    part = parts[rank] if rank < len(parts) else whole.narrow(dim, 0, 0)
    return DTensor.from_local(
        part.clone(),  # so that the whole is freed
        mesh,
        [Shard(dim)],
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )


def _shard_linear(dims: Any, dim_of_bias: int | None, name: str, module: Any, mesh: Any) -> None:
    for buffer in module.packed:
        part = _part(module.get_buffer(buffer), mesh, dims.get(buffer))
        module.register_buffer(buffer, part)
    if module.bias is not None:
        bias = _part(module.bias, mesh, dim_of_bias)
        module.bias = nn.Parameter(bias, module.bias.requires_grad)
    module.sharded = True


def _shard_experts(name: str, module: Any, mesh: Any) -> None:
    for buffer in module.packed:
        whole = module.get_buffer(buffer)
        if buffer in ("w13_packed", "w13_scale"):
            whole = whole.unflatten(1, (2, -1))
        dim = None if buffer.endswith("scale_2") else 2
        module.register_buffer(buffer, _part(whole, mesh, dim))
    module.sharded = True


def _place_inputs(layouts: Any, mesh: Any, module: Any, args: Any, kwargs: Any) -> Any:
    """Hidden states, ids and weights as DTensors, however they are given."""

    def placed(value: Any) -> Any:
        if isinstance(value, DTensor):
            return value
        return DTensor.from_local(value, mesh, layouts, run_check=False)

    return tuple(map(placed, args)), {name: placed(value) for name, value in kwargs.items()}


def _sum(layouts: Any, use_local: bool, module: Any, y: Any, mesh: Any) -> Any:
    """The parts of a sum added up."""
    y = y.redistribute(placements=layouts)
    return y.to_local() if use_local else y


def _sum_and_bias(layouts: Any, use_local: bool, module: Any, y: Any, mesh: Any) -> Any:
    """The parts of a sum added up, and the bias."""
    y = y.redistribute(placements=layouts)
    if module.bias is not None:
        y = y + module.bias
    return y.to_local() if use_local else y
