"""What is measured of the ready ops: a line per work. Who else does it is each host's to say.

A new row is a new size; a new op is a new `Work`, and its peers in the modules of the hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple


class Array(NamedTuple):
    """An input.

    Attributes:
        kind: ``"normal"`` and ``"uniform"`` (from -1 to 1) are numbers of the row's dtype,
            ``"ids"`` int32 from 0 to below ``high``.
        shape: its shape.
        high: one more than the largest id.
    """

    kind: str
    shape: tuple[int, ...]
    high: int = 0


class Work(NamedTuple):
    """What an op is asked to do, in several sizes.

    Attributes:
        op: its name in `ferrule.ops`.
        title: what rows say, with the sizes in braces.
        arrays: the inputs, of a tuple of sizes.
        ours: calls the op, which is its first argument, with the inputs.
        sizes: by device, and ``"quick"`` for a check.
        dtypes: of the numbers, by device.
        peers: under which name hosts have the peers; the op's where it is empty.
        backward: the derivative of all inputs that are numbers, without the forward pass.
        bound: whether what it reads and writes is what limits it: each input once, and the result.
        wanted: of which passes the project wants what peers' targets say.
    """

    op: str
    title: str
    arrays: Callable[..., Sequence[Array]]
    ours: Callable[..., Any]
    sizes: Mapping[str, Sequence[tuple[int, ...]]]
    dtypes: Mapping[str, Sequence[str]] = {"cpu": ("float32",), "cuda": ("float32", "bfloat16")}
    peers: str = ""
    backward: bool = False
    bound: bool = False
    wanted: Sequence[str] = ("forward",)

    @property
    def inputs(self) -> int:
        """How many inputs there are."""
        return len(self.arrays(*self.sizes["quick"][0]))

    def named(self, sizes: tuple[int, ...], dtype: str) -> str:
        """What a row says."""
        return f"{self.title.format(*sizes)} {dtype}"


class Other(NamedTuple):
    """Who else does it, on one host.

    Attributes:
        name: who.
        function: does it, with the row's inputs; a constant of the work is its own.
        target: the ratio that the project wants; None where it wants none.
        on: the device that `target` is for; both where it is empty.
        given: gives the inputs as `function` is at its best with, before anything is timed.
        compiled: whether torch.compile makes it of `function`.
        compared: whether its results must be ours.
        coarse: whether its derivatives in 16 bits are not: they are too coarse.
        fits: says whether it can do it with such inputs; None where it always can.
    """

    name: str
    function: Callable[..., Any]
    target: float | None = None
    on: str = ""
    given: Callable[..., Sequence[Any]] | None = None
    compiled: bool = False
    compared: bool = True
    coarse: bool = False
    fits: Callable[[Sequence[Any]], bool] | None = None


FLOATS = {"cpu": ("float32",), "cuda": ("float32", "float16", "bfloat16")}
EPS, BASE = 1e-5, 10000.0
TOP, BINS, LOW, HIGH, SEGMENTS = 32, 256, -3.0, 3.0, 4096

# 64 MB and more on a GPU, in 16 bits, too.
_ROWS = {
    "cpu": [(2048, 1024)],
    "cuda": [(32768, 1024), (8192, 4096), (2048, 16384)],
    "quick": [(8, 96)],
}
_SAMPLES = {  # images, their height and width, channels, and height and width of the points
    "cpu": [(4, 64, 64, 128), (4, 256, 64, 128), (4, 256, 3, 256), (4, 256, 1, 256)],
    "cuda": [(8, 1024, 64, 256)],
    "quick": [(2, 8, 4, 5)],
}
_OTHER_SAMPLES = {
    "cpu": [(4, 256, 3, 256), (4, 256, 1, 256)],
    "cuda": [(8, 1024, 64, 256), (8, 1024, 3, 1024)],
    "quick": [(1, 6, 3, 7)],
}
_VOLUMES = {
    "cpu": [(2, 48, 3, 40), (2, 48, 1, 40)],
    "cuda": [(2, 128, 64, 64), (2, 128, 3, 128)],
    "quick": [(1, 6, 3, 5)],
}
_FEW_CHANNELS, _MANY_POINTS = [(8, 1024, c, 1024) for c in (1, 3, 4)], [(8, 256, 64, 1024)]


def _normal(*shape: int) -> Array:
    return Array("normal", shape)


def _vectors(m: int, n: int) -> list[Array]:
    return [_normal(m, n)]


def _weighted(m: int, n: int) -> list[Array]:
    return [_normal(m, n), _normal(n)]


def _images(batch: int, side: int, channels: int, points: int) -> list[Array]:
    return [_normal(batch, side, side, channels), Array("uniform", (batch, points, points, 2))]


def _planes(batch: int, side: int, channels: int, points: int) -> list[Array]:
    return [_normal(batch, channels, side, side), Array("uniform", (batch, points, points, 2))]


def _volumes(batch: int, side: int, channels: int, points: int) -> list[Array]:
    grid = (batch, points, points, points, 3)
    return [_normal(batch, side, side, side, channels), Array("uniform", grid)]


def _one(
    sizes: Mapping[str, Sequence[tuple[int, ...]]],
) -> dict[str, Sequence[tuple[int, ...]]]:
    return {device: of[:1] for device, of in sizes.items()}


_ONE = {"cpu": ("float32",), "cuda": ("float32",)}
_SMOOTH = (  # those whose derivatives are measured, too
    Work(
        "rms_norm", "rms_norm, ({}, {})", _weighted, lambda op, x, w: op(x, w, EPS), _ROWS,
        bound=True,
    ),
    Work(
        "layer_norm", "layer_norm, ({}, {})", lambda m, n: [*_weighted(m, n), _normal(n)],
        lambda op, x, w, b: op(x, w, b, EPS), _ROWS, bound=True,
    ),
    Work("softmax", "softmax, ({}, {})", _vectors, lambda op, x: op(x), _ROWS, bound=True),
    Work("log_softmax", "log_softmax, ({}, {})", _vectors, lambda op, x: op(x), _ROWS, bound=True),
    Work(
        "rope", "rope, ({}, {}, {}, {})", lambda *shape: [_normal(*shape)],
        lambda op, x: op(x, x.shape[-1]),
        {
            "cpu": [(4, 32, 1024, 64)],
            "cuda": [(4, 32, 1024, 64), (8, 32, 4096, 64)],
            "quick": [(1, 2, 5, 64)],
        }, bound=True,
    ),
    Work(
        "grid_sample", "grid_sample, ({0}, {1}, {1}, {2}) at {3}²", _images,
        lambda op, x, grid: op(x, grid), _SAMPLES, FLOATS, wanted=("forward", "backward"),
    ),
    Work(
        "grid_sample", "grid_sample NCHW, ({0}, {2}, {1}, {1}) at {3}²", _planes,
        lambda op, x, grid: op(x, grid, layout="NCHW"),
        _SAMPLES, FLOATS, "grid_sample NCHW", wanted=("forward", "backward"),
    ),
    Work(
        "grid_sample", "grid_sample, ({0}, {1}, {1}, {2}) at {3}²", _images,
        lambda op, x, grid: op(x, grid),
        {"cpu": [], "cuda": [*_FEW_CHANNELS, *_MANY_POINTS], "quick": [(1, 6, 3, 7)]},
        wanted=("forward", "backward"),
    ),
    *(
        Work(
            "grid_sample", f"grid_sample {mode}, ({{0}}, {{1}}, {{1}}, {{2}}) at {{3}}²", _images,
            lambda op, x, grid, mode=mode: op(x, grid, mode=mode),
            _OTHER_SAMPLES, _ONE, f"grid_sample {mode}", wanted=("forward", "backward"),
        )
        for mode in ("bicubic", "nearest")
    ),
    Work(
        "grid_sample", "grid_sample of volumes, ({0}, {1}, {1}, {1}, {2}) at {3}³", _volumes,
        lambda op, x, grid: op(x, grid, layout="NDHWC"),
        _VOLUMES, _ONE, "grid_sample of volumes", wanted=("forward", "backward"),
    ),
)  # fmt: skip

WORKS = (
    *_SMOOTH,
    Work(
        "rms_norm", "rms_norm of a sum, ({}, {})", lambda m, n: [*_weighted(m, n), _normal(m, n)],
        lambda op, x, w, r: op(x, w, EPS, residual=r), _ROWS, peers="rms_norm of a sum", bound=True,
    ),
    Work(
        "topk", f"topk, {TOP} of ({{}}, {{}})", _vectors, lambda op, x: op(x, TOP),
        {"cpu": [(1024, 4096)], "cuda": [(1024, 4096), (16384, 4096)], "quick": [(4, 100)]}, _ONE,
    ),
    Work(
        "histogram", f"histogram, {BINS} bins of {{}}", lambda n: [_normal(n)],
        lambda op, x: op(x, BINS, LOW, HIGH),
        {"cpu": [(1 << 20,)], "cuda": [(1 << 20,), (1 << 26,)], "quick": [(1000,)]}, _ONE,
    ),
    Work(
        "segment_sum", f"segment_sum, ({{}}, {{}}) into {SEGMENTS}",
        lambda m, n: [_normal(m, n), Array("ids", (m,), SEGMENTS)],
        lambda op, x, ids: op(x, ids, SEGMENTS),
        {"cpu": [(1 << 16, 64)], "cuda": [(1 << 18, 64)], "quick": [(50, 8)]}, _ONE,
    ),
    Work(
        "matmul", "matmul, ({0}, {2}) x ({2}, {1})",
        lambda m, n, k: [_normal(m, k), _normal(k, n)], lambda op, a, b: op(a, b),
        {"cpu": [(256, 256, 256)], "cuda": [(256, 256, 256)], "quick": [(9, 10, 11)]}, FLOATS,
    ),
    *(
        work._replace(
            title=work.title.replace(",", " backward,", 1), backward=True, bound=False,
            sizes=work.sizes if work.op == "grid_sample" else _one(work.sizes),
        )
        for work in _SMOOTH
    ),
)  # fmt: skip
