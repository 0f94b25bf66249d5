"""Where in a model the layers of a checkpoint belong: a module of that name, rows of a module that
several layers are fused into, several modules that one layer is split into, or an expert."""

from __future__ import annotations

import re
import sys
from collections import defaultdict
from typing import Any, NamedTuple

import ferrule

from .modules import NVFP4Experts, NVFP4Linear

# Modules that are several layers, one below the other.
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "Wqkv": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
# What the layers of an expert are called, and which they are.
_OF_EXPERT = {
    "gate_proj": "gate",
    "up_proj": "up",
    "down_proj": "down",
    "w1": "gate",
    "w3": "up",
    "w2": "down",
}
_EXPERT = re.compile(rf"(.+)\.(\d+)\.({'|'.join(_OF_EXPERT)})")


class Place(NamedTuple):
    """Where a layer belongs.

    Attributes:
        modules: the name of the module, or those that the layer is split into.
        part: which of several layers in the module it is: 0, 1, …; of an expert "gate", "up" or
            "down".
        parts: how many there are.
        expert: which, of stacked experts.
    """

    modules: tuple[str, ...]
    part: int | str = 0
    parts: int = 1
    expert: int | None = None


class Places:
    """The places of a model."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.names = {*model.state_dict(keep_vars=True)}
        self._paths: dict[int, list[str]] = defaultdict(list)
        for path, module in self.modules.items():
            self._paths[id(module)].append(path)
        self._renamings = _renamings(model)
        self._base = getattr(model, "base_model_prefix", "")

    def rename(self, name: str) -> str:
        """What a tensor of the checkpoint is called in this model: as there, as transformers
        renames it for this kind of model, or with the prefix of its base more or less."""
        if name in self.names:
            return name
        renamed = name
        for renaming in self._renamings:
            renamed = renaming.rename_source_key(renamed)[0]
        candidates = [name, renamed]
        if self._base:
            candidates += [f"{self._base}.{each}" for each in (name, renamed)]
            candidates += [each.removeprefix(f"{self._base}.") for each in (name, renamed)]
        for each in candidates:
            if each in self.names:
                return each
        for each in candidates:
            if self.find(each.rpartition(".")[0]) is not None:
                return each
        return name

    def find(self, layer: str) -> Place | None:
        """The place of a layer, by the name that it has in the model; None where there is none."""
        if layer in self.modules:
            return Place((layer,))
        parent, _, leaf = layer.rpartition(".")
        dot = f"{parent}." if parent else ""
        for fused, leaves in FUSED.items():
            if leaf in leaves and f"{dot}{fused}" in self.modules:
                return Place((f"{dot}{fused}",), leaves.index(leaf), len(leaves))
            if leaf == fused and f"{dot}{leaves[0]}" in self.modules:
                return Place(tuple(f"{dot}{name}" for name in leaves))
        match = _EXPERT.fullmatch(layer)
        if match and is_stacked(self.modules.get(match[1])):
            return Place((match[1],), _OF_EXPERT[match[3]], 3, int(match[2]))
        return None

    def replace(self, name: str, module: Any) -> None:
        """Put a module in the place of another, wherever the model has that."""
        old = self.modules[name]
        module.train(old.training)
        paths = self._paths.pop(id(old))
        self._paths[id(module)] = paths
        for path in paths:
            parent, _, leaf = path.rpartition(".")
            self.modules[parent]._modules[leaf] = module
            self.modules[path] = module


def _renamings(model: Any) -> list[Any]:
    """How transformers renames what checkpoints of such a model have, where it is one of its."""
    mapping = sys.modules.get("transformers.conversion_mapping")
    if mapping is None or not hasattr(model, "config"):
        return []
    try:
        found = mapping.get_model_conversion_mapping(model)
    except (AttributeError, TypeError, ValueError):  # of another kind, or another version
        return []
    return [each for each in found if type(each).__name__ == "WeightRenaming"]


def is_stacked(module: Any) -> bool:
    """Whether a module has the weights of all experts in one tensor."""
    if isinstance(module, NVFP4Experts):
        return True
    return getattr(getattr(module, "down_proj", None), "ndim", 0) == 3


def sizes_of_experts(name: str, module: Any) -> tuple[int, int, int, str]:
    """E, H, I and the activation of stacked experts that `NVFP4Experts` can stand for.

    Raises:
        KernelError: they are of another kind.
    """
    if isinstance(module, NVFP4Experts):
        sizes = module.num_experts, module.hidden_size, module.intermediate_size
        return *sizes, module.activation
    gate_up = getattr(module, "gate_up_proj", None)
    experts, hidden, inner = module.down_proj.shape
    faults = []
    if gate_up is None or tuple(gate_up.shape) != (experts, 2 * inner, hidden):
        faults.append("no gate_up_proj of [E, 2 * I, H] beside down_proj of [E, H, I]")
    faults += [f"{flag}=True" for flag in ("is_transposed", "has_bias") if getattr(module, flag, 0)]
    if not getattr(module, "is_concatenated", True):
        faults.append("rows of gate and up in turn")
    gate = getattr(type(module), "_apply_gate", None)
    if gate is not None and gate.__name__ != "_default_apply_gate":
        faults.append("its own _apply_gate")
    activation = type(getattr(module, "act_fn", None)).__name__
    if activation not in ("SiLU", "SiLUActivation"):
        faults.append(f"the activation {activation}")
    if faults:
        raise ferrule.KernelError(
            f"[load] experts {name!r} are a {type(module).__name__} with {'; '.join(faults)}. "
            "NVFP4Experts has gate rows, then up rows, no biases, and SiLU. Give the model with a "
            "list of experts, each of linear layers, or leave these unquantized."
        )
    return experts, hidden, inner, "silu"


def check_linear(name: str, module: Any, layer: str) -> None:
    """That a module can be replaced by `NVFP4Linear`.

    Raises:
        KernelError: it is no linear layer.
    """
    if isinstance(module, NVFP4Linear):
        return
    if not name:
        raise ferrule.KernelError(
            f"[load] the model is a {type(module).__name__} itself, in whose place nothing can be "
            "put. Wrap it: torch.nn.Sequential(model), and names begin with '0.'."
        )
    if type(module).__name__ == "Embedding" or not (
        hasattr(module, "in_features") and hasattr(module, "out_features")
    ):
        raise ferrule.KernelError(
            f"[load] layer {layer!r} is quantized, and the model's {name!r} is a "
            f"{type(module).__name__}; expected torch.nn.Linear. Others are not read as NVFP4."
        )
