"""`grid_sample`: images and volumes, sampled at points."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import ferrule

from . import sampling_cuda as on_cuda
from . import sampling_texts as texts
from .rows import on_cpu
from .sampling_place import PLACE

TAPS = {"nearest": 1, "bilinear": 2, "bicubic": 4}  # pixels that count along one axis
PADDING_MODES = ("zeros", "border", "reflection")
# The axes of x and of the samples.
LAYOUTS = {
    "NHWC": ("B,H,W,C", "B,N,M,C"),
    "NCHW": ("B,C,H,W", "B,C,N,M"),
    "NDHWC": ("B,D,H,W,C", "B,L,N,M,C"),
    "NCDHW": ("B,C,D,H,W", "B,C,L,N,M"),
}
_FLOATS = "(float32, float16, bfloat16, float64)"


def grid_sample(
    x: Any,
    grid: Any,
    mode: str = "bilinear",
    padding_mode: str = "zeros",
    align_corners: bool = False,
    layout: str = "NHWC",
    deterministic: bool | None = None,
) -> Any:
    """Sample images or volumes at points, as ``torch.nn.functional.grid_sample`` does.

    Args:
        x: images ``[B, H, W, C]`` or volumes ``[B, D, H, W, C]``, of fewer than 2^31 pixels each;
            with the channels second where the layout says so. float32, float16, bfloat16, or
            float64 (not on Apple's GPUs).
        grid: where to sample: ``[B, N, M, 2]`` of column and row, ``[B, L, N, M, 3]`` of column,
            row and slice. From -1 to 1 is the whole image. Of the dtypes above, x's or another one:
            points of a large image want float32 where x is float16.
        mode: ``"bilinear"`` (of volumes: trilinear), ``"nearest"`` (halves to even), or
            ``"bicubic"`` (images alone).
        padding_mode: what is outside: ``"zeros"``; ``"border"``, the nearest pixel; or
            ``"reflection"``, the image mirrored again and again.
        align_corners: whether -1 and 1 are the centres of the outermost pixels, or their outer
            edges.
        layout: the axes of x and of the samples: ``"NHWC"``, ``"NCHW"``, ``"NDHWC"``,
            ``"NCDHW"``. Neither is copied to have another one.
        deterministic: whether the derivative by x has the same bits each time. Its terms are then
            sorted and added up in order, which is slower, instead of by atomics. None is what
            ``torch.are_deterministic_algorithms_enabled()`` says, of tensors of torch, and else
            False.

    Returns:
        The samples, ``[B, N, M, C]`` or ``[B, L, N, M, C]``, channels second where the layout says
        so, of x's dtype. Sums are in float32, of float64 in float64. A coordinate that is NaN is
        outside of the image, with padding at its first pixel; bicubic samples are NaN there.

    Raises:
        ferrule.KernelError: an argument has a value that is not allowed, or the arrays' shapes do
            not fit: says which.
        ferrule.KernelTypeError: an array is of a wrong type.

    Example:
        >>> import numpy as np, ferrule.ops
        >>> x = np.arange(4, dtype=np.float32).reshape(1, 2, 2, 1)
        >>> ferrule.ops.grid_sample(x, np.zeros((1, 1, 1, 2), np.float32)).item()
        1.5
    """
    flags = (("align_corners", align_corners, ""), ("deterministic", deterministic, ", None"))
    for name, flag, more in flags:
        if not (isinstance(flag, bool) or (more and flag is None)):
            raise ferrule.KernelError(
                f"[grid_sample] {name}={flag!r}; expected one of True, False{more}."
            )
    if deterministic is None:
        deterministic = _torch_is_deterministic(x)
    op = sampler(mode, padding_mode, align_corners, layout, deterministic)
    axes = len(layout)
    if getattr(x, "ndim", axes) != axes:
        raise ferrule.KernelError(
            f"[grid_sample] x has the shape {tuple(x.shape)}, of {x.ndim} axes; layout={layout!r} "
            f"has {axes}. Layouts are {', '.join(map(repr, LAYOUTS))}."
        )
    return op(x, grid)


def _torch_is_deterministic(x: Any) -> bool:
    """Whether x is a tensor of torch, which was told to be deterministic."""
    if not type(x).__module__.startswith("torch"):
        return False
    return bool(sys.modules["torch"].are_deterministic_algorithms_enabled())


@ferrule.family
def sampler(
    mode: str, padding_mode: str, align_corners: bool, layout: str, deterministic: bool
) -> ferrule.Op:
    """The op of some constants, with its derivatives."""
    _check(mode, padding_mode, layout)
    text = _Text(mode, padding_mode, align_corners, layout)
    op = text.op(
        "grid_sample",
        f"{text.inputs} -> out[{text.samples}]:T",
        texts.FORWARD,
        functions=texts.FEW_CHANNELS + texts.OF_POINTS,
        cuda=text.cuda_forward(),
        by_channels=True,
        batch=f"C {text.points} B",
    )
    backward, called = _derivative(text, deterministic)
    op.def_vjp(backward, version=" ".join(each.digest for each in called))
    op.def_jvp(
        text.op(
            "grid_sample_jvp",
            f"{text.inputs}, x_tangent[{text.image}]:T, grid_tangent[{text.coordinates}]:G"
            f" -> out_tangent[{text.samples}]:T",
            texts.TANGENT,
            batch="B",
        )
    )
    return op


def _check(mode: object, padding_mode: object, layout: object) -> None:
    """Refuse constants that are not known."""
    allowed = (
        ("mode", mode, TAPS),
        ("padding_mode", padding_mode, PADDING_MODES),
        ("layout", layout, LAYOUTS),
    )
    for name, value, values in allowed:
        if value not in values:
            raise ferrule.KernelError(
                f"[grid_sample] {name}={value!r}; expected one of {', '.join(map(repr, values))}."
            )
    if mode == "bicubic" and "D" in str(layout):
        raise ferrule.KernelError(
            f"[grid_sample] mode='bicubic' is for images; layout={layout!r} is of volumes. Use "
            "mode='bilinear' or 'nearest'."
        )


class _Text:
    """What the bodies of one choice of constants have in common.

    Attributes:
        image, samples, coordinates: the axes of x, of the samples and of the grid, for rules.
        channels: how many of them a thread of the forward pass has, at most.
        points: the names of the axes of points.
        inputs: the rule of ``x`` and ``grid``.
    """

    def __init__(self, mode: str, padding_mode: str, align_corners: bool, layout: str) -> None:
        self.dims = len(layout) - 2
        self.image, self.samples = LAYOUTS[layout]
        self.channels = texts.CHANNELS if layout[-1] == "C" else texts.PLANES
        self.points = "N M" if self.dims == 2 else "L N M"
        self.coordinates = f"B,{self.points.replace(' ', ',')},{self.dims}"
        self.inputs = f"x[{self.image}]:T, grid[{self.coordinates}]:G"
        taps = TAPS[mode]
        self._constants = {
            "CUBIC": mode == "bicubic",
            "NEAREST": mode == "nearest",
            "BORDER": padding_mode == "border",
            "REFLECTION": padding_mode == "reflection",
            "CORNERS": align_corners,
            "LAST": layout[-1] == "C",
            "DIMS": self.dims,
            "TAPS": taps,
            "ALL": taps**self.dims,
        }
        self.entries = f"{taps**self.dims} * {self.points.replace(' ', ' * ')}"

    def header(self, prefix: str, offset: str = "int", **more: int) -> str:
        """The constants as C++, and the text that says where points read."""
        lines = []
        if self.dims == 2:
            more = {"D": 1, "L": 1, **more}
        for name, value in {**self._constants, **more}.items():
            kind = "bool" if isinstance(value, bool) else "int"
            lines.append(f"{prefix}constexpr {kind} {name} = {int(value)};\n")
        lines.append(f"typedef {offset} Offset;\n")
        return "".join(lines) + PLACE

    def cuda_forward(self) -> list[Any]:
        """CUDA bodies, by how many channels a thread has and reads at once."""
        last = self._constants["LAST"]
        return [
            self._cuda(
                on_cuda.FORWARD,
                f"ceildiv(C, {own})" if own > 1 else "C",
                when,
                offset="int" if last and own > 1 else "long",  # converted once, where it is a place
                V=vector,
                OWN=own,
                LAST=last or own == 1,
            )
            for own, vector, when in (on_cuda.CHUNKS if last else on_cuda.PLANES)
        ]

    def cuda_backward(self) -> list[Any]:
        """The same of the derivative, by how many channels are a vector."""
        last = self._constants["LAST"]
        chunks = on_cuda.CHUNKS if last else on_cuda.PLANES_BACKWARD
        bodies = []
        for own, vector, when in chunks:
            split = (own, vector, when) == on_cuda.SPLIT
            of_planes = f"(ceildiv(C, {own}) + 1)" if split else "1"
            for once in (True, False) if vector > 1 else (False,):
                bodies.append(
                    self._cuda(
                        on_cuda.BACKWARD,
                        _lanes(f"C // {vector}") if last else of_planes,
                        f"{when} and C <= {32 * vector}" if once else when,
                        functions=on_cuda.ADD + on_cuda.ADD_PIXELS,
                        init_value=0,
                        V=vector,
                        OWN=own,
                        LAST=last or own == 1,
                        SPLIT=split,
                        ONCE=once,
                    )
                )
        return bodies

    def _cuda(
        self,
        body: str,
        threads: str,
        when: str,
        functions: str = "",
        init_value: int | None = None,
        offset: str = "int",
        **constants: int,
    ) -> Any:
        """A body with so many threads for each point."""
        count = f"B * {self.points.replace(' ', ' * ')} * ({threads})"
        when = when.replace("PIXELS", "H * W" if self.dims == 2 else "D * H * W")
        return ferrule.cuda_body(
            body,
            grid=count,
            threadgroup=256,
            when=f"{when} and G != float64 and {count} < 2147483648",
            init_value=init_value,
            header=self.header("", offset, PACK=1, **constants) + on_cuda.NEIGHBOURS + functions,
        )

    def op(
        self, name: str, rule: str, body: str, *, functions: str = "", by_channels: bool = False,
        packs: Sequence[int] = (texts.PACK, 1), grid: Any = None, init_value: int | None = None,
        **declared: Any,
    ) -> ferrule.Op:  # fmt: skip
        """An op with this body, for packs of points of such sizes: on the CPU, and on GPUs.

        Without a ``grid`` there are threads for packs of points, and, where it is ``by_channels``,
        for a number of channels.
        """
        bodies = []
        for pack in packs:
            channels = self.channels if pack > 1 else texts.FEW
            header = self.header(
                "constant ", PACK=pack, SLAB=texts.SLAB, CHANNELS=channels, OWNED=texts.OWNED
            )
            units = f"ceildiv({self.points.replace(' ', ' * ')}, {texts.SLAB * pack})"
            images = f"B * ceildiv(C, {channels})" if by_channels else "B"
            threads = grid or (texts.SLAB, units, images)
            bodies.append(
                ferrule.metal_body(
                    body,
                    grid=threads,
                    threadgroup=(threads[0], 32 if threads[0] < 32 else 1, 1),
                    when="device == cpu" if pack != packs[-1] else None,
                    init_value=init_value,
                    header=header + functions,
                )
            )
        sizes = ["H", "W", "D"][: self.dims]
        image = f"{' > 0, '.join(sizes)} > 0, {' * '.join(sizes)} < 2147483648"
        return ferrule.op(
            name, f"{rule} where T in {_FLOATS}, G in {_FLOATS}, {image}", metal=bodies, **declared
        )


def _lanes(chunks: str) -> str:
    """How many lanes have a point together: a power of 2 that is no less than the chunks, or 32."""
    lanes = "32"
    for n in (16, 8, 4, 2, 1):
        lanes = f"({n} if {chunks} <= {n} else {lanes})"
    return lanes


def _derivative(text: _Text, deterministic: bool) -> tuple[Any, list[ferrule.Op]]:
    """The derivative, and the ops that it calls: which of them depends on the device."""
    rule = (
        f"{text.inputs}, cotangent[{text.samples}]:T"
        f" -> x_grad[{text.image}]:T, grid_grad[{text.coordinates}]:G"
    )
    declared: dict[str, Any] = {
        "init_value": 0, "batch": "B", "partial_sums": f"C {text.points}",
    }  # fmt: skip
    points = text.points.replace(" ", " * ")
    behind = f"ceildiv({points}, {texts.SLAB * texts.PACK})"
    units = f"ceildiv(C, {texts.OWNED}) + ({behind} if C >= 8 or B < 8 else 0)"
    owning = text.op(
        "grid_sample_owning_vjp",
        rule,
        texts.OWNING,
        functions=texts.DOTS + texts.SCATTER,
        packs=[texts.PACK],
        grid=(1, units, "B"),
        **declared,
    )
    if deterministic:
        others, called = _gathering(text)
    else:
        others = text.op(
            "grid_sample_vjp",
            rule,
            texts.BACKWARD,
            functions=texts.DOTS,
            cuda=text.cuda_backward(),
            **declared,
        )
        second = _second(text)
        others.def_vjp(second)
        owning.def_vjp(second)
        called = [others]

    def backward(primals: Any, cotangents: Any, outputs: Any) -> Any:
        return (owning if on_cpu(primals[0]) else others)(*primals, *cotangents)

    return backward, [owning, *called]


def _second(text: _Text) -> ferrule.Op:
    """The derivative of the derivative."""
    return text.op(
        "grid_sample_vjp_vjp",
        f"{text.inputs}, cotangent[{text.samples}]:T, x_grad_cotangent[{text.image}]:T,"
        f" grid_grad_cotangent[{text.coordinates}]:G -> x_grad[{text.image}]:T,"
        f" grid_grad[{text.coordinates}]:G, cotangent_grad[{text.samples}]:T",
        texts.SECOND,
        init_value=0,
        batch="B",
    )


def _gathering(text: _Text) -> tuple[Any, list[ferrule.Op]]:
    """The derivative that sorts, and adds in order, and its ops. It has no derivative itself."""
    entries = text.op(
        "grid_sample_entries",
        f"{text.inputs}, cotangent[{text.samples}]:T"
        f" -> entries[B,{text.entries}]:int64, grid_grad[{text.coordinates}]:G",
        texts.ENTRIES,
        functions=texts.DOTS,
        batch="B",
    )
    pixels = "H * W" if text.dims == 2 else "D * H * W"
    gather = text.op(
        "grid_sample_gather",
        f"{text.inputs}, cotangent[{text.samples}]:T, entries[B,{text.entries}]:int64"
        f" -> x_grad[{text.image}]:T",
        texts.GATHER,
        packs=[1],
        grid=(256, f"ceildiv({pixels}, 256)", "B"),
        batch="B",
    )

    def backward(x: Any, grid: Any, cotangent: Any) -> tuple[Any, Any]:
        found, grid_grad = entries(x, grid, cotangent)
        return gather(x, grid, cotangent, _sorted(found)), grid_grad

    return backward, [entries, gather]


def _sorted(entries: Any) -> Any:
    """The entries of each image, in ascending order; no two are the same."""
    library = sys.modules[type(entries).__module__.partition(".")[0]]
    if library.__name__ == "torch":
        return library.sort(entries, dim=1).values
    return sys.modules["mlx.core"].sort(entries, axis=1)
