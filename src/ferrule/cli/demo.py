"""``ferrule demo``: warps a photograph with a kernel, differentiates that, and checks both."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from statistics import median
from typing import Any, NamedTuple, TypeVar

import click
import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from rich.table import Table

from .. import DeviceError
from ..tools import binding, driver
from . import grid_sample
from .faults import Fault

LARGEST = 1024  # pixels; photographs with a longer side are made smaller
TOLERANCE = 1e-4  # of the largest value: where many points meet, their sum has as many roundings

Floats = NDArray[np.floating[Any]]
_Result = TypeVar("_Result")


class Place(NamedTuple):
    """Where kernels are run: a device's name, how arrays get there, and how to wait for it."""

    device: str
    send: Callable[[Floats], Any]
    wait: Callable[[], object]


class Measured(NamedTuple):
    """One kernel against NumPy: times in seconds, error as a fraction of the largest value."""

    name: str
    device: str
    kernel: float
    numpy: float
    error: float


@click.command("demo")
@click.argument("photo", required=False, type=click.Path())
@click.option(
    "--out",
    default="demo.png",
    show_default=True,
    type=click.Path(),
    help="The picture to write: a PNG, unless its name says otherwise.",
)
def command(photo: str | None, out: str) -> None:
    """Warp a photograph with a Metal kernel, on this machine.

    PHOTO is a picture file; without it, a sample that comes with matplotlib is taken. The kernel
    is grid_sample, the larger example of MLX's documentation: it samples the picture at moved
    points, and a second kernel is its derivative (VJP). Both are compared with plain NumPy.

    Exit code 1 says that they differ.
    """
    x = read_photo(photo)
    _check_writable(out)
    console = Console()
    height, width = x.shape[1:3]
    grid = water(height, width)
    with console.status("running the kernels and NumPy"):
        where = places()
        (samples,), forward = compare(
            "forward", where, grid_sample.sample, grid_sample.sample_numpy, (x, grid)
        )
        cotangent = samples  # the derivative of half the sum of squares
        grads, backward = compare(
            "VJP", where, grid_sample.sample_vjp, grid_sample.sample_vjp_numpy, (x, grid, cotangent)
        )
    results = (*forward, *backward)
    try:
        draw(out, x[0], samples[0], grads[0][0], grads[1][0])
    except OSError as error:
        raise Fault(f"{out}: cannot be written: {error.strerror or error}") from error
    console.print(_table(results, f"grid_sample of {width} x {height} pixels, float32"))
    console.print(f"Wrote {out}", soft_wrap=True, highlight=False, markup=False)
    wrong = [result for result in results if not result.error <= TOLERANCE]
    for result in wrong:
        click.echo(
            f"{result.name}: the kernel differs from NumPy by {result.error:.1e} of the largest "
            f"value on {result.device}; at most {TOLERANCE:.0e} is right.",
            err=True,
        )
    if wrong:
        raise SystemExit(1)


def _table(results: tuple[Measured, ...], title: str) -> Table:
    table = Table(title=title)
    for heading in ("", "device"):
        table.add_column(heading)
    for heading in ("kernel", "NumPy", "ratio", "largest error"):
        table.add_column(heading, justify="right", no_wrap=True)
    for name, device, kernel, numpy, error in results:
        table.add_row(
            name,
            device,
            _duration(kernel),
            _duration(numpy),
            f"{numpy / kernel:.1f} x",
            f"{error:.1e}",
        )
    return table


def _duration(seconds: float) -> str:
    """A time as text, in milliseconds or microseconds."""
    return f"{seconds * 1e3:.1f} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} µs"


# -- the work --------------------------------------------------------------------------------------


def places() -> list[Place]:
    """The CPU, and the first NVIDIA GPU where torch has one."""
    threads = binding.get_threads()
    places = [
        Place(f"CPU, {threads} thread{'s' if threads > 1 else ''}", lambda a: a, lambda: None)
    ]
    with contextlib.suppress(ImportError, DeviceError):
        driver.driver()  # where there is none, torch need not be imported
        import torch

        if torch.cuda.is_available():
            device, name = torch.device("cuda", 0), torch.cuda.get_device_name(0)
            places.append(
                Place(
                    name,
                    lambda a: torch.from_numpy(a).to(device),
                    lambda: torch.cuda.synchronize(device),
                )
            )
    return places


def compare(
    name: str,
    where: list[Place],
    kernel: Callable[..., Any],
    numpy: Callable[..., Any],
    arrays: tuple[Floats, ...],
) -> tuple[tuple[Floats, ...], list[Measured]]:
    """Time two ways to make the same arrays, the kernel's on each device.

    Returns:
        The arrays that the kernel made on the first device, and how each compares with NumPy.
    """
    expected, numpy_time = timed(lambda: numpy(*arrays), most=5)
    outputs: list[tuple[Floats, ...]] = []
    results = []
    for device, send, wait in where:
        arguments = [send(array) for array in arrays]

        def call(arguments: list[Any] = arguments, wait: Callable[[], object] = wait) -> Any:
            output = kernel(*arguments)
            wait()
            return output

        output, kernel_time = timed(call, most=15)
        outputs.append(tuple(map(_numpy, _several(output))))
        errors = [
            np.abs(a - b).max(initial=0) / max(np.abs(b).max(initial=0), 1e-30)
            for a, b in zip(outputs[-1], _several(expected), strict=True)
        ]
        error = float(np.max(errors))  # unlike Python's max, keeps a NaN
        results.append(Measured(name, device, kernel_time, numpy_time, error))
    return outputs[0], results


def _several(arrays: Any) -> tuple[Any, ...]:
    return arrays if isinstance(arrays, tuple) else (arrays,)


def _numpy(array: Any) -> Floats:
    """An array in the memory of the CPU."""
    values: Floats = array if isinstance(array, np.ndarray) else array.cpu().numpy()
    return values


def timed(work: Callable[[], _Result], most: int) -> tuple[_Result, float]:
    """What `work` returns, and the median time of a call in seconds, after one that warms up.

    Calls it up to ``most`` times, but no longer than about a second.
    """
    result = work()
    times: list[float] = []
    while len(times) < most and (len(times) < 3 or sum(times) < 1):
        start = time.perf_counter()
        result = work()
        times.append(time.perf_counter() - start)
    return result, median(times)


def water(height: int, width: int) -> Floats:
    """Where to sample a picture so that it seems to lie under rippled water.

    Rings around a point above the centre move the points along the radius and around it, by
    turns outwards and inwards; towards the borders they fade. All points lie inside the picture,
    for at its very edge its samples drop to zero, and derivatives there would outshine all others.

    Returns:
        A grid, [1, height, width, 2], float32.
    """
    across = (2 * np.arange(width) + 1) / width - 1
    down = (2 * np.arange(height) + 1) / height - 1
    short = min(height, width)
    centre = -0.3 * height / short
    u, v = np.meshgrid(across * width / short, down * height / short - centre)
    radius = np.hypot(u, v)
    edges = np.outer(_ramp((1 - abs(down)) / 0.25), _ramp((1 - abs(across)) / 0.25))
    wave = np.sin(7 * np.pi * radius) * edges
    stretch = 1 + 0.025 * wave * _ramp(radius / 0.3) / np.maximum(radius, 0.2)
    turn = 0.12 * wave * _ramp(radius / 0.7)
    x = stretch * (u * np.cos(turn) - v * np.sin(turn))
    y = stretch * (u * np.sin(turn) + v * np.cos(turn)) + centre
    inside = np.maximum(1 - 1.02 / np.array([width, height]), 0)
    grid = np.clip(np.stack([x * short / width, y * short / height], axis=-1), -inside, inside)
    return grid[None].astype(np.float32)


def _ramp(t: Floats) -> Floats:
    """0 up to 0, 1 from 1 on, smooth in between."""
    t = np.clip(t, 0, 1)
    ramp: Floats = t * t * (3 - 2 * t)
    return ramp


# -- pictures --------------------------------------------------------------------------------------


def read_photo(path: str | None) -> Floats:
    """A picture as [1, H, W, 3], float32 from 0 to 1, made smaller where it is very large.

    Raises:
        Fault: Pillow or matplotlib is not installed, or the file is no picture.
    """
    try:
        import matplotlib
        from PIL import Image, ImageOps
    except ImportError as error:
        raise Fault(
            f"the demo draws with matplotlib and Pillow, but {error.name} is not installed. "
            "Run: pip install 'ferrule[demo]'"
        ) from error
    if path is None:
        path = os.path.join(matplotlib.get_data_path(), "sample_data", "grace_hopper.jpg")
        if not os.path.isfile(path):
            raise Fault("this matplotlib has no sample photograph; give one: ferrule demo PHOTO")
    try:
        with Image.open(path) as file:
            image = ImageOps.exif_transpose(file).convert("RGB")
    except FileNotFoundError:
        raise Fault(f"{path}: there is no such file.") from None
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise Fault(f"{path}: cannot be read as a picture: {error}") from error
    if max(image.size) > LARGEST:
        image.thumbnail((LARGEST, LARGEST))
    return np.asarray(image, np.float32)[None] / 255


def _check_writable(path: str) -> None:
    """Say now, and not after the work, that a file cannot be written."""
    folder = os.path.dirname(path) or "."
    if not os.path.isdir(folder):
        raise Fault(f"{path}: there is no folder {folder}.")
    if os.path.isdir(path):
        raise Fault(f"{path}: is a folder, expected the name of a PNG file.")
    formats = _formats()
    if _format(path) not in formats:
        raise Fault(
            f"{path}: expected the name of a picture, one of .{', .'.join(sorted(formats))}."
        )
    if not os.access(path if os.path.exists(path) else folder, os.W_OK):
        raise Fault(f"{path}: cannot be written.")


def _formats() -> set[str]:
    """The kinds of pictures that matplotlib writes."""
    from matplotlib.figure import Figure

    return set(Figure().canvas.get_supported_filetypes())


def _format(path: str) -> str:
    """The kind of picture that a name asks for."""
    return os.path.splitext(path)[1][1:].lower() or "png"


def draw(path: str, x: Floats, out: Floats, x_grad: Floats, grid_grad: Floats) -> None:
    """Draw a picture, its samples, and the two gradients.

    Args:
        path: the file.
        x, out, x_grad: pictures, [H, W, 3].
        grid_grad: the gradient with respect to the grid, [H, W, 2].
    """
    from matplotlib.figure import Figure

    height, width = x.shape[:2]
    rows, columns = (1, 4) if width <= 1.25 * height else (2, 2)
    panel = 4.0  # inches
    tall = panel * height / width
    high = rows * (tall + 0.7) + 0.55
    figure = Figure(figsize=(columns * panel, high), dpi=120, facecolor="#14161a")
    pictures = (
        ("x", "the photograph", x),
        ("out", "grid_sample(x, grid)", out),
        ("x_grad", "how the loss grows with each pixel of x", x_grad),
        ("grid_grad", "and with each point: the wheel says which way", _directions(grid_grad)),
    )
    for i, (name, caption, picture) in enumerate(pictures):
        axes = figure.add_subplot(rows, columns, i + 1)
        axes.imshow(np.clip(np.nan_to_num(picture), 0, 1))
        axes.set_axis_off()
        axes.set_title(name, color="white", fontsize=15, family="monospace", pad=24)
        axes.text(
            0.5,
            1.015,
            caption,
            transform=axes.transAxes,
            ha="center",
            va="bottom",
            color="#aab2bf",
            fontsize=10.5,
        )
    # The key: what moves to the right has the hue at the wheel's right, and so on.
    wheel = axes.inset_axes((0.03, 0.03, 0.17, 0.17 * width / height))
    wheel.imshow(_wheel(), interpolation="antialiased")
    wheel.set_axis_off()
    figure.suptitle(
        "A Metal kernel and its VJP, run on the CPU by ferrule.   loss = ½ sum(out²)",
        color="#aab2bf",
        fontsize=12,
        y=0.15 / high,
        va="bottom",
    )
    figure.subplots_adjust(
        left=0.01,
        right=0.99,
        top=1 - 0.7 / high,
        bottom=0.55 / high,
        wspace=0.03,
        hspace=0.7 / tall,
    )
    figure.savefig(path, format=_format(path), facecolor=figure.get_facecolor())


def _wheel() -> Floats:
    """A disc of every direction in its hue, [96, 96, 4], clear around it."""
    across = np.linspace(-1.04, 1.04, 96)
    field = np.stack(np.meshgrid(across, across), axis=-1)
    length = np.hypot(field[..., 0], field[..., 1])
    picture = _directions(field / np.maximum(length, 1e-30)[..., None])
    ring = np.clip(24 * (1 - length), 0, 1) * np.clip(24 * (length - 0.45), 0, 1)
    return np.concatenate([picture, ring[..., None]], axis=-1)


def _directions(field: Floats) -> Floats:
    """A picture of a field of vectors: hue is direction, brightness is length."""
    from matplotlib.colors import hsv_to_rgb

    field = np.nan_to_num(field)
    length = np.hypot(field[..., 0], field[..., 1])
    bright = np.clip(length / max(float(np.percentile(length, 99)), 1e-30), 0, 1) ** 0.45
    hue = np.arctan2(field[..., 1], field[..., 0]) / (2 * np.pi) % 1
    picture: Floats = hsv_to_rgb(np.stack([hue, np.full_like(hue, 0.6), bright], axis=-1))
    return picture
