"""`NVFP4ParallelExperts`: the layer whose experts are in several processes."""

from __future__ import annotations

from typing import Any

import ferrule

from .exchange import group_of, nvfp4_moe_all_gather, nvfp4_moe_all_to_all
from .modules import NVFP4Experts


class NVFP4ParallelExperts(NVFP4Experts):
    """`NVFP4Experts` of which each process of a group has as many: expert parallelism.

    It is called with the tokens of its own process, and with ids that count the experts of all.
    The buffers, ``num_experts`` and the state_dict are of the experts here. All processes of the
    group must call it, those without tokens, too.

    Attributes:
        group: the process group; None is that of all processes.
        capacity: None: `nvfp4_moe_all_to_all`, for any number of tokens. A number: the most tokens
            that a process has, by `nvfp4_moe_all_gather`, which CUDA graphs can have. It may be
            set between calls, alike in all processes.

    Raises:
        KernelError: as `NVFP4Experts` says.
    """

    group: Any = None
    capacity: int | None = None
    whole = False

    def _forward(self, hidden_states: Any, top_k_index: Any, top_k_weights: Any) -> Any:
        call = hidden_states, top_k_weights, top_k_index
        w13 = self.w13_packed, self.w13_scale, self.w13_scale_2
        w2 = self.w2_packed, self.w2_scale, self.w2_scale_2
        given = *call, *w13, *w2, None, self.activation
        how = {"group": self.group, "backend": self.backend}
        if self.capacity is None:
            return nvfp4_moe_all_to_all(*given, **how)
        return nvfp4_moe_all_gather(*given, **how, capacity=self.capacity)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, capacity={self.capacity}"


def expert_parallel(module: Any, group: Any = None, capacity: int | None = None) -> Any:
    """Leave to each process its part of a model's experts, in place: expert parallelism.

    Args:
        module: a model, of which every `NVFP4Experts` becomes an `NVFP4ParallelExperts` with the
            experts of this process, ``E / W`` in their order; or an `NVFP4Experts` itself.
        group: a process group, or a mesh of one dim; None is that of all processes.
        capacity: as of `NVFP4ParallelExperts`.

    Returns:
        The module; of an `NVFP4Experts`, the new one.

    Raises:
        KernelError: E is no multiple of the processes; experts are W4A4, or DTensors; there are
            none in the module.
    """
    group = group_of("expert_parallel", group)
    for child in module.modules():
        if isinstance(child, NVFP4Experts):
            child.check_whole("expert_parallel")
    places = [
        (parent, name, child)
        for parent in module.modules()
        for name, child in parent.named_children()
        if isinstance(child, NVFP4Experts)
    ]
    if isinstance(module, NVFP4Experts):
        return _own_experts(module, group, capacity)
    if not places:
        raise ferrule.KernelError(
            f"[expert_parallel] {type(module).__name__} has no NVFP4Experts; expected one at "
            "least. Load a checkpoint of a mixture first: ferrule.ops.nvfp4.load."
        )
    made: dict[Any, Any] = {}  # one module may be in several places
    for parent, name, child in places:
        if child not in made:
            made[child] = _own_experts(child, group, capacity)
        setattr(parent, name, made[child])
    return module


def _own_experts(experts: NVFP4Experts, group: Any, capacity: int | None) -> NVFP4ParallelExperts:
    """The layer with the experts of this process.

    Raises:
        KernelError: they cannot be shared out.
    """
    count, processes = experts.num_experts, group.size()
    refused = experts.activations is not None or experts.sharded
    if refused or isinstance(experts, NVFP4ParallelExperts) or count % processes:
        raise ferrule.KernelError(
            f"[expert_parallel] {experts}, for {processes} processes; expected as many experts "
            "for each, activations=None, and experts that are whole in every process. Load the "
            "model anew, for a number of processes that divides its experts."
        )
    each = count // processes
    first = group.rank() * each
    parts = {name: experts.get_buffer(name) for name in experts.packed}
    layer = NVFP4ParallelExperts.from_tensors(
        experts.activation,
        **{name: part[first : first + each].clone() for name, part in parts.items()},
    )
    layer.group, layer.capacity, layer.backend = group, capacity, experts.backend
    return layer.train(experts.training)  # type: ignore[no-any-return]
