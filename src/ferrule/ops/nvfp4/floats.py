"""What a checkpoint has beside layers in NVFP4: floats, and layers in FP8, which become floats."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn

import ferrule

from .checkpoint import FLOATS, Checkpoint, some
from .places import Place, Places


class _Source(NamedTuple):
    """A tensor of the checkpoint, and which part of a parameter it is: an order within it, an
    expert, and the rows of the tensor that are meant."""

    name: str
    order: int = 0
    expert: int | None = None
    rows: slice | None = None


class Floats:
    """How parameters and buffers of floats are filled.

    Args:
        places: of the model.
        checkpoint: where tensors are.
        of_fp8: the name of the scale of each weight in FP8.
        replaced: modules whose weights are quantized.
        device: where what is on the meta device comes to be.
    """

    def __init__(
        self,
        places: Places,
        checkpoint: Checkpoint,
        of_fp8: dict[str, str],
        replaced: set[str],
        device: Any,
    ) -> None:
        self.places, self.checkpoint, self.of_fp8 = places, checkpoint, of_fp8
        self.replaced, self.device = replaced, device
        self.model = places.model
        self.own = {
            **dict(self.model.named_parameters(remove_duplicate=False)),
            **dict(self.model.named_buffers(remove_duplicate=False)),
        }
        self.sources: dict[str, list[_Source]] = defaultdict(list)
        self.names_of: dict[int, list[str]] = {}

    def plan(self, names: list[str]) -> list[str]:
        """Find what each tensor fills; returns those that have no place.

        Raises:
            KernelError: shapes do not fit, or a parameter has no tensor.
        """
        unknown = [name for name in names if not self._place(name)]
        for target, sources in self.sources.items():
            sources.sort(key=lambda source: (source.expert or 0, source.order))
            self._check(target, sources)
        self._check_missing()
        # What is replaced goes when it is, one by one.
        self.own = {name: own for name, own in self.own.items() if not self._is_replaced(name)}
        self.names_of = self._aliases()
        return unknown

    def _place(self, name: str) -> bool:
        """Note what a tensor fills: whether there is such."""
        renamed = self.places.rename(name)
        if renamed in self.own:
            if self._is_replaced(renamed):
                return False
            self.sources[renamed].append(_Source(name))
            return True
        layer, _, suffix = renamed.rpartition(".")
        place = self.places.find(layer)
        if place is None or place.modules == (layer,):
            return False
        if place.expert is not None:
            return self._place_expert(name, place, suffix)
        start = 0
        for module in place.modules:
            target = f"{module}.{suffix}"
            if target not in self.own or self._is_replaced(target):
                return False
            rows = slice(start, start + self.own[target].shape[0])
            start = rows.stop
            split = len(place.modules) > 1
            self.sources[target].append(
                _Source(name, int(place.part), None, rows if split else None)
            )
        shape = self.checkpoint.tensors[name].shape
        if len(place.modules) > 1 and shape[:1] != (start,):
            raise ferrule.KernelError(
                f"[load] tensor {name!r} has the shape {shape}; the model's "
                f"{', '.join(place.modules)} have {start} rows together. Make the model of the "
                "checkpoint's own config.json."
            )
        return True

    def _place_expert(self, name: str, place: Place, suffix: str) -> bool:
        order = ("gate", "up", "down").index(str(place.part))
        target = f"{place.modules[0]}.{'down_proj' if order == 2 else 'gate_up_proj'}"
        if suffix != "weight" or target not in self.own or self._is_replaced(target):
            return False
        self.sources[target].append(_Source(name, order, place.expert))
        return True

    def _is_replaced(self, name: str) -> bool:
        """Whether the parameter goes with the module that it is of: biases stay."""
        module, _, suffix = name.rpartition(".")
        return module in self.replaced and suffix != "bias"

    def _shape(self, source: _Source) -> tuple[int, ...]:
        shape = self.checkpoint.tensors[source.name].shape
        if source.rows is None:
            return shape
        return (max(0, min(source.rows.stop, shape[0]) - source.rows.start), *shape[1:])

    def _check(self, target: str, sources: list[_Source]) -> None:
        """That tensors are as large as what they fill."""
        own = self.own[target]
        shapes = [self._shape(source) for source in sources]
        for source in sources:
            tensor = self.checkpoint.tensors[source.name]
            read = tensor.dtype in FLOATS or source.name in self.of_fp8
            if own.is_floating_point() and not read:
                raise ferrule.KernelError(
                    f"[load] tensor {source.name!r} is of {tensor.dtype}; the model's {target!r} "
                    f"is of {own.dtype}. It is quantized in a format that is not read."
                )
        experts = {source.expert for source in sources}
        if experts == {None}:
            rows = sum(shape[0] for shape in shapes) if own.ndim else 0
            fits = (
                shapes[0] == tuple(own.shape)
                if len(shapes) == 1
                else rows == own.shape[0] and {s[1:] for s in shapes} == {tuple(own.shape[1:])}
            )
            per_expert = ""
        else:
            per_expert = f" for {own.shape[0]} experts"
            rows = own.shape[1] // (1 if target.endswith("down_proj") else 2)
            fits = experts == set(range(own.shape[0]))
            fits &= set(shapes) == {(rows, own.shape[2])}
            fits &= len(sources) == own.shape[0] * (own.shape[1] // rows)
        if not fits:
            raise ferrule.KernelError(
                f"[load] tensor {some([source.name for source in sources])} has the shape "
                f"{some(dict.fromkeys(shapes))}; the model's {target!r} has {tuple(own.shape)}"
                f"{per_expert}. Make the model of the checkpoint's own config.json; of a layer in "
                "several tensors all must be there."
            )

    def _aliases(self) -> dict[int, list[str]]:
        """The names of each parameter: of tied weights several."""
        names: dict[int, list[str]] = defaultdict(list)
        for name, tensor in self.own.items():
            names[id(tensor)].append(name)
        return names

    def _tied(self) -> set[str]:
        """Parameters that transformers ties to others, though they are not the same yet."""
        tied = getattr(self.model, "all_tied_weights_keys", None)
        if not tied or not getattr(
            getattr(self.model, "config", None), "tie_word_embeddings", False
        ):
            return set()
        return {name for pair in dict(tied).items() for name in pair}

    def _check_missing(self) -> None:
        tied = self._tied()
        parameters = dict(self.model.named_parameters(remove_duplicate=False))
        missing = []
        for names in self._aliases().values():
            left = [name for name in names if not self._is_replaced(name)]
            if not left or any(name in self.sources for name in names):
                continue
            buffer = left[0] not in parameters
            if buffer and (left[0] not in self.places.names or not self.own[left[0]].is_meta):
                continue
            missing += [] if left[0] in tied else left[:1]
        if missing:
            raise ferrule.KernelError(
                f"[load] the checkpoint has no tensor for {some(missing)} of the model. It is "
                "not whole, or its names are others: they must be the model's, or, of models of "
                "Hugging Face, those that transformers renames."
            )

    def jobs(self) -> Iterator[tuple[int, Callable[[], None]]]:
        """For each parameter the bytes that are read, and what reads them."""
        for target, sources in self.sources.items():
            size = sum(self.checkpoint.size(source.name) for source in sources)
            yield size, partial(self._fill, target, sources)

    def _fill(self, target: str, sources: list[_Source]) -> None:
        own = self.own[target]
        if own.is_meta:
            own = self._materialised(own)
        start = 0
        for source in sources:
            value = self._read(source, own.device)
            if source.expert is not None:
                at = (value.shape[0] if source.order == 1 else 0, source.expert)
                own[at[1], at[0] : at[0] + value.shape[0]].copy_(value)
            elif len(sources) > 1:
                own[start : start + value.shape[0]].copy_(value)
                start += value.shape[0]
            else:
                own.copy_(value)

    def _read(self, source: _Source, device: Any) -> Any:
        """What is copied from: the mapped file itself, where nothing is computed."""
        if source.name in self.of_fp8:
            value = self.checkpoint.read(source.name, device)
            scale = self.checkpoint.read(self.of_fp8[source.name], device).float()
            value = value.float() * scale.reshape(-1, 1)
        else:
            value = self.checkpoint.mapped(source.name)
        return value if source.rows is None else value[source.rows]

    def _materialised(self, meta: Any) -> Any:
        """A tensor in the place, or the places, of one on the meta device."""
        made = torch.empty_like(meta, device=self.device)
        if isinstance(meta, nn.Parameter):
            made = nn.Parameter(made, meta.requires_grad)
        for name in self.names_of[id(meta)]:
            module, _, leaf = name.rpartition(".")
            owner = self.places.modules[module]
            if leaf in owner._parameters:
                owner._parameters[leaf] = made
            elif leaf in owner._buffers:
                owner._buffers[leaf] = made
            self.own[name] = made
        return made

    def finish(self) -> None:
        """Tie what transformers ties, and have buffers that no file has made anew.

        Raises:
            KernelError: one is on the meta device still.
        """
        tied = self._tied()
        if tied and any(self.own[name].is_meta for name in tied if name in self.own):
            self.model.tie_weights()
        initialise = getattr(self.model, "_init_weights", None)
        for name, module in self.places.modules.items():
            meta = [
                key
                for key, buffer in module._buffers.items()
                if buffer is not None and buffer.is_meta
            ]
            for key in meta:
                module._buffers[key] = torch.empty_like(module._buffers[key], device=self.device)
            if not meta:
                continue
            if initialise is None or any(True for _ in module.parameters()):
                raise ferrule.KernelError(
                    f"[load] buffers {some(f'{name}.{key}' for key in meta)} are on the meta "
                    "device, and in no file. Make the model with torch.device('cpu') for "
                    "these, or off the meta device."
                )
            initialise(module)
