"""`load`: puts a checkpoint in NVFP4 into a model of torch, in place.

First all is planned by the files' headers, so that what does not fit is found before the model is
touched; then tensors are read one by one.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import nn

import ferrule

from . import floats
from .checkpoint import DTYPES, Checkpoint, some
from .modules import ACTIVATIONS, NVFP4Experts, NVFP4Linear
from .naming import Layer, find_layers
from .places import Place, Places, check_linear, sizes_of_experts

# Scales of the cache of keys and values, and of activations: what W4A16 does not need.
_NOT_NEEDED = ("k_scale", "v_scale", "q_scale", "prob_scale", "input_scale", "input_global_scale")


def load(
    model: Any,
    path: Any,
    *,
    activations: str | None = None,
    device: Any = None,
    progress: bool | None = None,
) -> Any:
    """Load a checkpoint in NVFP4 into a model, whose quantized layers become NVFP4's.

    Args:
        model: any `torch.nn.Module` whose names match the checkpoint's, of Hugging Face or not. It
            may be on the meta device. What is not quantized keeps its dtype and device.
        path: a folder with safetensors, of ModelOpt or compressed-tensors (llm-compressor), in one
            file or several; or one such file. ``config.json`` and ``hf_quant_config.json`` may be
            missing: what is quantized is told by the tensors.
        activations: None: W4A16, for which ``input_scale`` is not needed. ``"nvfp4"``: the
            reference of W4A4, as of `NVFP4Linear`, which needs it.
        device: where what is on the meta device comes to be; None is the CPU.
        progress: whether a bar is shown; None: on a terminal.

    Returns:
        The model. Linear layers whose weights are quantized are `NVFP4Linear`, with the device of
        the layer before; stacked experts of transformers 5 are `NVFP4Experts`. A layer that the
        model fuses of several (``qkv_proj``, ``gate_up_proj``) has the scale of each in its rows,
        exactly. Layers in FP8 with one scale, or one for a row, are dequantized. Scales of the
        cache of keys and values are left out.

    Raises:
        KernelError: the files are not whole, are pickles, or are quantized otherwise; a tensor is
            missing, of another shape or dtype, or has scales that are NaN; a layer is none that can
            be replaced. The message names the tensor. The model is as it was, but where data itself
            was at fault: then it is half loaded.
        KernelTypeError: model is no module of torch.

    Example:
        >>> model = AutoModelForCausalLM.from_config(config)  # doctest: +SKIP
        >>> model = ferrule.ops.nvfp4.load(model, "a-model-NVFP4").cuda()  # doctest: +SKIP
    """
    if not isinstance(model, nn.Module):
        raise ferrule.KernelTypeError(
            f"[load] model is a {type(model).__name__}; expected a torch.nn.Module."
        )
    if activations not in ACTIVATIONS:
        raise ferrule.KernelError(
            f"[load] activations={activations!r}; expected None (W4A16) or 'nvfp4' (W4A4)."
        )
    with Checkpoint(path) as checkpoint:
        plan = _Plan(model, checkpoint, activations, device or "cpu")
        total = sum(job.size for job in plan.jobs)
        with _bar(total, progress) as advance, torch.no_grad():
            for job in plan.jobs:
                job.run()
                advance(job.size)
        plan.finish()
    return model


class _Job(NamedTuple):
    """A part of loading: how many bytes it reads, and what does it."""

    size: int
    run: Callable[[], None]


class _Plan:
    """What is to be done, in jobs: the layers first, since floats go into them."""

    def __init__(self, model: Any, checkpoint: Checkpoint, activations: Any, device: Any) -> None:
        self.model, self.checkpoint, self.device = model, checkpoint, device
        self.inputs = activations is not None
        self.places = Places(model)
        self.jobs: list[_Job] = []
        self.replaced: set[str] = set()
        self.unknown: list[str] = []
        layers, of_fp8, plain = find_layers(checkpoint)
        if not layers and not any(name.endswith(".w13_packed") for name in plain):
            raise ferrule.KernelError(
                f"[load] {checkpoint.path} has no layer in NVFP4: no tensor weight of uint8 "
                f"(ModelOpt) or weight_packed (compressed-tensors), among {len(plain)} tensors. "
                "Load it as the models' library does."
            )
        self._warn_of_ignored(layers)
        self._plan_layers(layers)
        plain = self._plan_stacked(plain)
        self.floats = floats.Floats(self.places, checkpoint, of_fp8, self.replaced, device)
        self.unknown += self.floats.plan(plain)
        self.jobs += [_Job(size, run) for size, run in self.floats.jobs()]
        self._say_unknown()

    def _warn_of_ignored(self, layers: dict[str, Layer]) -> None:
        wrong = [name for name in layers if self.checkpoint.ignores(name)]
        if wrong:
            warnings.warn(
                f"[load] the configuration says that {some(wrong)} are not quantized, and they "
                "are: they are loaded as they are.",
                ferrule.FerruleWarning,
                stacklevel=4,
            )

    def _plan_layers(self, layers: dict[str, Layer]) -> None:
        fused: dict[str, dict[int, Layer]] = defaultdict(dict)
        experts: dict[str, dict[tuple[int, str], Layer]] = defaultdict(dict)
        counts: dict[str, int] = {}
        for name, layer in layers.items():
            place = self.places.find(self.places.rename(f"{name}.weight").rpartition(".")[0])
            if place is None:
                self.unknown += layer.parts.values()
            elif place.expert is not None:
                experts[place.modules[0]][place.expert, str(place.part)] = layer
            elif len(place.modules) > 1:
                self._plan_split(place, layer)
            else:
                fused[place.modules[0]][int(place.part)] = layer
                counts[place.modules[0]] = place.parts
        for name, parts in fused.items():
            self._plan_linear(name, parts, counts[name])
        for name, found in experts.items():
            self._plan_experts(name, found)

    def _device_of(self, module: Any) -> Any:
        for tensor in [*module.parameters(), *module.buffers()]:
            return self.device if tensor.is_meta else tensor.device
        return self.device

    def _add(self, name: str, layers: list[Layer], make: Callable[[Any], Any]) -> None:
        """A job that puts in place of a module what is made of layers."""
        self.replaced.add(name)
        device = self._device_of(self.places.modules[name])
        names = [tensor for layer in layers for tensor in layer.parts.values()]

        def run() -> None:
            self.places.replace(name, make(device))

        self.jobs.append(_Job(sum(map(self.checkpoint.size, names)), run))

    def _linear(self, name: str, parts: list[dict[str, Any]]) -> NVFP4Linear:
        made = NVFP4Linear.from_tensors(**_joined(parts))
        made.bias = self.places.modules[name].bias
        return made

    def _plan_linear(self, name: str, parts: dict[int, Layer], count: int) -> None:
        module = self.places.modules[name]
        layers = [parts[i] for i in sorted(parts)]
        check_linear(name, module, layers[0].name)
        if len(layers) != count:
            raise ferrule.KernelError(
                f"[load] the model's {name!r} is {count} layers in one, of which "
                f"{some([layer.name for layer in layers])} are in NVFP4, and others are not. Take "
                "a model that has them apart, or quantize all or none."
            )
        rows = sum(layer.shape[0] for layer in layers)
        for layer in layers:
            self._check_size(name, layer, (rows, layer.shape[1]), module)

        def make(device: Any) -> Any:
            read = [layer.read(self.checkpoint, device, self.inputs) for layer in layers]
            return self._linear(name, read)

        self._add(name, layers, make)

    def _check_size(self, name: str, layer: Layer, found: tuple[int, int], module: Any) -> None:
        expected = (module.out_features, module.in_features)
        if found != expected:
            raise ferrule.KernelError(
                f"[load] tensor {layer.parts['w_packed']!r} is of a layer of {found[0]} rows and "
                f"{found[1]} columns; the model's {name!r} has {expected[0]} and {expected[1]}. "
                "Make the model of the checkpoint's own config.json."
            )

    def _plan_split(self, place: Place, layer: Layer) -> None:
        """A layer that the model has as several: each has its rows."""
        modules = [self.places.modules[name] for name in place.modules]
        for name, module in zip(place.modules, modules, strict=True):
            check_linear(name, module, layer.name)
        rows = sum(module.out_features for module in modules)
        widths = dict.fromkeys(module.in_features for module in modules)
        if layer.shape != (rows, *widths):
            raise ferrule.KernelError(
                f"[load] tensor {layer.parts['w_packed']!r} is of a layer of {layer.shape}; the "
                f"model's {', '.join(place.modules)} have {rows} rows of "
                f"{' or '.join(map(str, widths))} together. Make the model of the checkpoint's own "
                "config.json."
            )
        start = 0
        for name, module in zip(place.modules, modules, strict=True):
            some_rows = slice(start, start + module.out_features)
            start = some_rows.stop

            def make(device: Any, name: str = name, some_rows: slice = some_rows) -> Any:
                tensors = layer.read(self.checkpoint, device, self.inputs)
                for part, tensor in tensors.items():
                    if tensor.ndim:
                        tensors[part] = tensor[some_rows].clone()
                return self._linear(name, [tensors])

            self._add(name, [layer], make)

    def _plan_experts(self, name: str, found: dict[tuple[int, str], Layer]) -> None:
        module = self.places.modules[name]
        experts, hidden, inner, activation = sizes_of_experts(name, module)
        order = [(e, part) for e in range(experts) for part in ("gate", "up", "down")]
        lacking = [f"{e}.{part}" for e, part in order if (e, part) not in found]
        wanted = set(order)
        extra = [layer.name for key, layer in found.items() if key not in wanted]
        if lacking or extra:
            raise ferrule.KernelError(
                f"[load] the model's {name!r} has {experts} experts; of the checkpoint "
                f"{some(lacking) or 'none'} are missing or not in NVFP4, and "
                f"{some(extra) or 'none'} are too many. All experts of a layer must "
                "be quantized alike."
            )
        for (_, part), layer in found.items():
            expected = (hidden, inner) if part == "down" else (inner, hidden)
            if layer.shape != expected:
                raise ferrule.KernelError(
                    f"[load] tensor {layer.parts['w_packed']!r} is of a layer of {layer.shape}; "
                    f"experts of the model's {name!r} have {expected}. Make the model of the "
                    "checkpoint's own config.json."
                )

        def make(device: Any) -> Any:
            activations = "nvfp4" if self.inputs else None
            sizes = experts, hidden, inner, activation
            made = NVFP4Experts(*sizes, activations=activations, device=device)
            for e, part in order:
                tensors = found[e, part].read(self.checkpoint, device, self.inputs)
                _fill_expert(made, e, part, tensors)
            return made

        self._add(name, list(found.values()), make)

    def _plan_stacked(self, plain: list[str]) -> list[str]:
        """Experts as `NVFP4Experts.state_dict` has them; returns the other tensors."""
        ending = ".w13_packed"
        prefixes = [name.removesuffix(ending) for name in plain if name.endswith(ending)]
        for prefix in prefixes:
            name = self.places.rename(f"{prefix}.w13_packed").rpartition(".")[0]
            if name not in self.places.modules:
                continue
            e, h, i, activation = sizes_of_experts(name, self.places.modules[name])
            own = {
                each.rpartition(".")[2]: each for each in plain if each.startswith(f"{prefix}.w")
            }
            if not self.inputs:
                own = {part: each for part, each in own.items() if "input" not in part}

            self._check_stacked(prefix, own, NVFP4Experts(e, h, i, device="meta"))

            def make(device: Any, own: Any = own, activation: str = activation) -> Any:
                tensors = {part: self.checkpoint.read(each, device) for part, each in own.items()}
                return NVFP4Experts.from_tensors(activation, **tensors)

            self._add(name, [Layer(prefix, own, False, (0, 0))], make)
            plain = [each for each in plain if not each.startswith(f"{prefix}.w")]
        return plain

    def _check_stacked(self, prefix: str, own: dict[str, str], like: NVFP4Experts) -> None:
        for part in like.state_dict():
            if part not in own:
                raise ferrule.KernelError(
                    f"[load] experts {prefix!r} lack tensor '{prefix}.{part}', and have "
                    f"{some(sorted(own), 6)}. The checkpoint is not whole."
                )
            tensor = self.checkpoint.tensors[own[part]]
            dtype = DTYPES.get(tensor.dtype)
            like.check_buffer(
                f"{prefix}.", part, torch.empty(tensor.shape, dtype=dtype, device="meta")
            )

    def _say_unknown(self) -> None:
        """Warn, once, of tensors that the model has no place for, but of scales not needed."""
        unknown = [name for name in self.unknown if name.rpartition(".")[2] not in _NOT_NEEDED]
        if unknown:
            kinds = Counter(name.rpartition(".")[2] for name in unknown)
            counts = ", ".join(f"{count} of {kind}" for kind, count in kinds.most_common(4))
            warnings.warn(
                f"[load] the model has no place for {len(unknown)} tensors of the checkpoint "
                f"({counts}), which are left out: {some(unknown)}.",
                ferrule.FerruleWarning,
                stacklevel=4,
            )

    def finish(self) -> None:
        """What only a whole model can have."""
        self.floats.finish()


def _joined(parts: list[dict[str, Any]]) -> dict[str, Any]:
    """The tensors of several layers as one, whose rows have the scale of their own."""
    if len(parts) == 1:
        return parts[0]
    joined = {name: torch.cat([part[name] for part in parts]) for name in ("w_packed", "w_scale")}
    scales = [part["w_scale_2"] for part in parts]
    if all(scale.ndim == 0 and torch.equal(scale, scales[0]) for scale in scales):
        joined["w_scale_2"] = scales[0]
    else:
        rows = [
            scale.expand(part["w_packed"].shape[0])
            for scale, part in zip(scales, parts, strict=True)
        ]
        joined["w_scale_2"] = torch.cat(rows)
    if "input_scale" in parts[0]:  # of the same input: tools give all of them the same
        joined["input_scale"] = torch.stack([part["input_scale"] for part in parts]).amax()
    return joined


def _fill_expert(made: NVFP4Experts, e: int, part: str, tensors: dict[str, Any]) -> None:
    if part == "down":
        of, rows, column = "w2", slice(None), None
    else:
        column = ("gate", "up").index(part)
        of = "w13"
        rows = slice(column * made.intermediate_size, (column + 1) * made.intermediate_size)
    buffers = made._buffers
    buffers[f"{of}_packed"][e, rows] = tensors["w_packed"]
    buffers[f"{of}_scale"].view(torch.uint8)[e, rows] = tensors["w_scale"].view(torch.uint8)
    scale_2 = buffers[f"{of}_scale_2"]
    scale_2[e if column is None else (e, column)] = tensors["w_scale_2"]
    if "input_scale" in tensors:  # gate and up have the same input: tools give both the same
        inputs = buffers[f"{of}_input_scale"]
        given = tensors["input_scale"]
        inputs[e] = torch.maximum(inputs[e], given) if column == 1 else given


@contextmanager
def _bar(total: int, progress: bool | None) -> Iterator[Callable[[int], None]]:
    """What is called with how many bytes were read."""
    if not (sys.stderr.isatty() if progress is None else progress):
        yield lambda size: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TimeRemainingColumn

    columns = "loading", BarColumn(), DownloadColumn(), TimeRemainingColumn()
    with Progress(
        *columns, console=Console(stderr=True, force_terminal=progress), transient=True
    ) as bar:
        task = bar.add_task("loading", total=total)
        yield lambda size: bar.advance(task, size)
