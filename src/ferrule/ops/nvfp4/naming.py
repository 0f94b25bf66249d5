"""What ModelOpt and compressed-tensors call the tensors of a quantized layer, and reading these.

=================  ==========================  =========================  ======================
what it is         ModelOpt                    compressed-tensors         state_dict of ferrule
=================  ==========================  =========================  ======================
elements           ``weight``, of uint8        ``weight_packed``          ``w_packed``
scales             ``weight_scale``            ``weight_scale``           ``w_scale``
scale of all       ``weight_scale_2``          ``weight_global_scale``,   ``w_scale_2``
                                               one over it
of activations     ``input_scale``             ``input_global_scale``,    ``input_scale``
                                               one over it
=================  ==========================  =========================  ======================

Sources: `unified_export_hf` of ModelOpt 0.47, `NVFP4PackedCompressor` of compressed-tensors 0.20.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch

import ferrule

from .checkpoint import FLOATS, Checkpoint, some
from .quantizing import GROUP, check_scale_2, has_nan

PARTS = ("w_packed", "w_scale", "w_scale_2", "input_scale")
SCHEMES = {
    "ModelOpt": ("weight", "weight_scale", "weight_scale_2", "input_scale"),
    "compressed-tensors": (
        "weight_packed",
        "weight_scale",
        "weight_global_scale",
        "input_global_scale",
    ),
    "ferrule": PARTS,
}

# What layers have that another rule than NVFP4's alone reads.
_OTHERS = {
    "pre_quant_scale": "AWQ's scales of inputs",
    "svdquant_lora_a": "SVDQuant's matrices",
    "weight_zero_point": "zero points",
    "weight_scale_inv": "FP8 in blocks",
    "qweight": "AWQ or GPTQ",
    "weight_g_idx": "GPTQ",
    "weight_shape": "packed integers",
}


class Layer(NamedTuple):
    """A quantized layer of a checkpoint.

    Attributes:
        name: of the layer.
        parts: the name of the tensor of each of PARTS that there is.
        inverse: whether the scales of float32 are one over what they are here.
        shape: N and K.
    """

    name: str
    parts: dict[str, str]
    inverse: bool
    shape: tuple[int, int]

    def read(self, checkpoint: Checkpoint, device: Any, inputs: bool) -> dict[str, Any]:
        """The tensors, as `NVFP4Linear` has them.

        Raises:
            KernelError: a scale is NaN; ``inputs``, and there is no scale of activations.
        """
        tensors = {
            part: checkpoint.read(name) for part, name in self.parts.items() if "scale" in part
        }
        scale = tensors["w_scale"] = tensors["w_scale"].view(torch.float8_e4m3fn)
        if has_nan(scale):
            nan = scale.view(torch.uint8) & 127 == 127
            row, column = (int(i) for i in nan.nonzero()[0])
            raise ferrule.KernelError(
                f"[load] tensor {self.parts['w_scale']!r} has {int(nan.sum())} scales that are "
                f"NaN, the first in row {row}, column {column}. The file is damaged, or the "
                "quantizer met NaN: quantize the layer again, or leave it out."
            )
        for part in ("w_scale_2", "input_scale"):
            if part in tensors:
                value = tensors[part].float()
                value = value.reshape(()) if value.numel() == 1 else value
                value = 1 / value if self.inverse else value
                for one in (value.amin(), value.amax()):
                    check_scale_2("load", f"tensor {self.parts[part]!r}", float(one))
                tensors[part] = value
        if not inputs:
            tensors.pop("input_scale", None)
        elif "input_scale" not in tensors:
            raise ferrule.KernelError(
                f"[load] layer {self.name!r} has no tensor 'input_scale' (or "
                "'input_global_scale'), which activations='nvfp4' needs. Leave activations out, or "
                "take a checkpoint whose activations were calibrated."
            )
        tensors = {part: tensor.to(device) for part, tensor in tensors.items()}
        return {"w_packed": checkpoint.read(self.parts["w_packed"], device), **tensors}


def find_layers(checkpoint: Checkpoint) -> tuple[dict[str, Layer], dict[str, str], list[str]]:
    """The layers in NVFP4, those in FP8 with a scale (each with that scale's name), and the names
    of tensors that are not quantized.

    Raises:
        KernelError: a layer lacks a tensor, a tensor has another shape or dtype, groups are of
            another size, or a layer is quantized in another format.
    """
    layers, of_fp8, plain = {}, {}, []
    grouped: dict[str, dict[str, str]] = defaultdict(dict)
    for name in checkpoint.tensors:
        prefix, _, suffix = name.rpartition(".")
        grouped[prefix][suffix] = name
    for prefix, names in grouped.items():
        kind = _kind(checkpoint, prefix, names)
        if kind in SCHEMES:
            layers[prefix] = _layer(checkpoint, prefix, names, kind)
        elif kind == "FP8":
            of_fp8[names["weight"]] = _checked_fp8(checkpoint, names)
            plain += [name for suffix, name in names.items() if suffix in ("weight", "bias")]
            continue
        used = set(layers[prefix].parts.values()) if kind in SCHEMES else set()
        plain += [name for name in names.values() if name not in used]
    sizes = checkpoint.group_sizes()
    if layers and sizes and GROUP not in sizes:
        first = next(iter(layers.values())).parts["w_scale"]
        raise ferrule.KernelError(
            f"[load] the configuration says group_size={some(sizes)}; NVFP4 has {GROUP}, and so "
            f"has tensor {first!r}. Correct the configuration, or take another checkpoint."
        )
    return layers, of_fp8, plain


def _kind(checkpoint: Checkpoint, prefix: str, names: Mapping[str, str]) -> str:
    """What a group of tensors is: one of SCHEMES, ``"FP8"``, or empty of what is not quantized."""
    dtypes = {suffix: checkpoint.tensors[name].dtype for suffix, name in names.items()}
    kind = ""
    if dtypes.get("weight_packed") == "U8":
        kind = "compressed-tensors"
    elif dtypes.get("w_packed") == "U8":
        kind = "ferrule"
    elif dtypes.get("weight") == "U8":
        kind = "ModelOpt"
    elif dtypes.get("weight", "").startswith("F8") and "weight_scale" in names:
        kind = "FP8"
    other = [f"{suffix} ({_OTHERS[suffix]})" for suffix in names if suffix in _OTHERS]
    known = "weight" in names or "weight_packed" in names or "qweight" in names
    stacked = [suffix for suffix in names if suffix.endswith("_proj_weight_scale")]
    strange = known and not kind and dtypes.get("weight", "BF16") not in FLOATS
    if (known and other) or strange or stacked:
        what = ", ".join([*other, *stacked]) or f"a weight of {dtypes.get('weight')}"
        raise ferrule.KernelError(
            f"[load] layer {prefix!r} is quantized in a format that is not read: it has {what}. "
            "NVFP4 without such, FP8 with one scale or one a row, and floats are read. Quantize "
            "the layer anew, or leave it unquantized."
        )
    if not kind and "weight_scale" in names:
        raise ferrule.KernelError(
            f"[load] layer {prefix!r} has tensor {names['weight_scale']!r}, and no packed weight: "
            f"expected {prefix}.weight of uint8 (ModelOpt) or {prefix}.weight_packed "
            f"(compressed-tensors), and found {some(sorted(names))}. Download the checkpoint again."
        )
    return kind


def _checked_fp8(checkpoint: Checkpoint, names: Mapping[str, str]) -> str:
    """The name of the scale of a weight in FP8, which is one, or one for each row."""
    weight, scale = (checkpoint.tensors[names[suffix]] for suffix in ("weight", "weight_scale"))
    rows = weight.shape[:1]
    if scale.dtype not in FLOATS or scale.shape not in ((), (1,), rows, (*rows, 1)):
        raise ferrule.KernelError(
            f"[load] tensor {names['weight_scale']!r} is of {scale.dtype} and has the shape "
            f"{scale.shape}; of a weight of {weight.dtype} and {weight.shape} one scale, or one "
            "for each row, is read. Dequantize the layer first, or leave it unquantized."
        )
    return names["weight_scale"]


def _layer(checkpoint: Checkpoint, prefix: str, names: Mapping[str, str], scheme: str) -> Layer:
    """A layer whose tensors fit each other."""
    parts = {
        part: names[suffix]
        for part, suffix in zip(PARTS, SCHEMES[scheme], strict=True)
        if suffix in names
    }
    for part, suffix in zip(PARTS[:3], SCHEMES[scheme], strict=False):
        if part not in parts:
            raise ferrule.KernelError(
                f"[load] layer {prefix!r} lacks tensor '{prefix}.{suffix}'; {scheme}'s NVFP4 has "
                f"{', '.join(SCHEMES[scheme][:3])}, and this has {some(sorted(names), 6)}. It is "
                "another format (MXFP4 has no second scale), or the checkpoint is not whole."
            )
    packed, scale, whole = (checkpoint.tensors[parts[part]] for part in PARTS[:3])
    if len(packed.shape) != 2 or packed.shape[1] * 2 % GROUP:
        raise ferrule.KernelError(
            f"[load] tensor {parts['w_packed']!r} has the shape {packed.shape}; expected [N, K / "
            f"2] with K a multiple of {GROUP}."
        )
    n, k = packed.shape[0], packed.shape[1] * 2
    if scale.shape != (n, k // GROUP):
        fits = len(scale.shape) == 2 and scale.shape[0] == n and scale.shape[1]
        group = f", groups of {k // scale.shape[1]}" if fits and k % scale.shape[1] == 0 else ""
        raise ferrule.KernelError(
            f"[load] tensor {parts['w_scale']!r} has the shape {scale.shape}{group}; expected "
            f"{(n, k // GROUP)}, a scale for {GROUP} of the {k} elements of each of {n} rows. It "
            "is of another format, or padded or swizzled for a kernel."
        )
    if scale.dtype not in ("F8_E4M3", "U8"):
        raise ferrule.KernelError(
            f"[load] tensor {parts['w_scale']!r} is of {scale.dtype}; expected F8_E4M3."
        )
    rows = [(n,)] if scheme == "ferrule" else []
    if whole.dtype != "F32" or whole.shape not in [(), (1,), *rows]:
        raise ferrule.KernelError(
            f"[load] tensor {parts['w_scale_2']!r} is of {whole.dtype} and has the shape "
            f"{whole.shape}; expected F32 and one element."
        )
    return Layer(prefix, parts, scheme == "compressed-tensors", (n, k))


def to_modelopt(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A state_dict with `NVFP4Linear` in it, by the names that ModelOpt writes.

    Raises:
        KernelError: a layer has a w_scale_2 for each row, or stacked experts are in it.
    """
    return _renamed(state_dict, "ModelOpt")


def to_compressed_tensors(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """A state_dict with `NVFP4Linear` in it, by the names that compressed-tensors writes. Scales of
    float32 become one over them, which rounds: coming back they may differ in the last bit.

    Raises:
        KernelError: a layer has a w_scale_2 for each row, or stacked experts are in it.
    """
    return _renamed(state_dict, "compressed-tensors")


def _renamed(state_dict: Mapping[str, Any], scheme: str) -> dict[str, Any]:
    suffixes = dict(zip(PARTS, SCHEMES[scheme], strict=True))
    renamed: dict[str, Any] = {}
    for name, tensor in state_dict.items():
        prefix, dot, part = name.rpartition(".")
        ours = part in PARTS and f"{prefix}{dot}w_packed" in state_dict
        stacked = part.startswith(("w13_", "w2_")) and f"{prefix}{dot}w13_packed" in state_dict
        if stacked or (ours and part == "w_scale_2" and tensor.numel() != 1):
            raise ferrule.KernelError(
                f"[to_{scheme.lower().replace('-', '_')}] {name!r} has the shape "
                f"{tuple(tensor.shape)}; {scheme} has one scale for a layer, and each expert and "
                "each of q, k and v as a layer. Give these apart."
            )
        if ours and part in ("w_scale_2", "input_scale"):
            inverse = scheme == "compressed-tensors"
            tensor = 1 / tensor.reshape(1) if inverse else tensor.reshape(())
        renamed[f"{prefix}{dot}{suffixes[part]}" if ours else name] = tensor
    return renamed
