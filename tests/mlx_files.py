"""Functions, in files of `mx.export_function` and out of them again."""

from __future__ import annotations

import atexit
import itertools
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from hypothesis import HealthCheck, settings

import ferrule
from ferrule import Op
from ferrule.hosts.mlx import arrays as mlx_host
from ferrule.hosts.mlx import build as mlx_build
from ferrule.hosts.mlx import file as mlx_file

I = "uint i = thread_position_in_grid.x; "  # noqa: E741
FOLDER = Path(tempfile.mkdtemp(prefix="ferrule-export-"))
NUMBERS = itertools.count()
FEW = settings(deadline=None, max_examples=15, suppress_health_check=[HealthCheck.too_slow])
FLOATS = [mx.float32, mx.float16, mx.bfloat16]
# MLX 0.32.0 has none in files.
METADATA = {"metadata": "größe"} if "metadata" in (mx.export_function.__doc__ or "") else {}
DTYPES = [one for one in mlx_host.DTYPES.values() if one != mx.float64]


atexit.register(shutil.rmtree, FOLDER, ignore_errors=True)


def path() -> str:
    return str(FOLDER / f"{next(NUMBERS)}.mlxfn")


def write(data: bytes) -> str:
    """A new file of these bytes."""
    file = path()
    Path(file).write_bytes(data)
    return file


def altered(file: str, old: bytes, new: bytes, once: bool = False) -> str:
    """A new file, like another but for what stands there everywhere, or just ``once``."""
    data = Path(file).read_bytes()
    assert (data.count(old) == 1 if once else data.count(old) >= 1) and len(old) == len(new)
    return write(data.replace(old, new))


def elsewhere(lines: str, file: str) -> list[str]:
    """What another process prints, in which ``f`` is the function of a file."""
    script = (
        "import sys, mlx.core as mx, ferrule\nf = ferrule.import_function(sys.argv[1])\n" + lines
    )
    done = subprocess.run([sys.executable, "-c", script, file], check=True, capture_output=True,
                          text=True, timeout=300)  # fmt: skip
    return done.stdout.splitlines()


def exported(f: Callable[..., Any], *args: Any, **kwargs: Any) -> str:
    """A new file with a function."""
    file = path()
    mx.export_function(file, f, *args, **kwargs)
    return file


def again(f: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A function, out of a file and in again."""
    return ferrule.import_function(exported(f, *args, **kwargs))


def events(f: Callable[..., Any], *args: Any, **kwargs: Any) -> list[dict[str, Any]]:
    """What MLX says that it would write of a function."""
    found: list[dict[str, Any]] = []
    mx.export_function(found.append, f, *args, **kwargs)
    return found


def operations(f: Callable[..., Any], *args: Any, **kwargs: Any) -> list[dict[str, Any]]:
    return [one for one in events(f, *args, **kwargs) if one["type"] == "primitive"]


def content(file: str) -> mlx_file.File:
    """What stands in a file."""
    lines = mlx_build.loaded().fr_mlx_layout().decode().splitlines()
    with Path(file).open("rb") as opened:
        return mlx_file.read(file, opened, dict(one.split(" ") for one in lines), "")


def kernels(file: str) -> list[mlx_file.Operation]:
    functions = content(file).functions
    return [one for f in functions for one in f.operations if one.name == "CustomKernel"]


def same(a: mx.array, b: mx.array) -> bool:
    return (a.dtype, a.shape) == (b.dtype, b.shape) and bool(mx.array_equal(a, b, equal_nan=True))


def values(shape: tuple[int, ...], dtype: Any = mx.float32, seed: int = 0) -> mx.array:
    found = np.random.default_rng(seed).integers(-9, 9, shape).astype(np.float32)
    return mx.array(found).astype(dtype)


def scale(**more: Any) -> Op:
    op = ferrule.op(
        "scale", "x[*S,D]:T, w[D]:T, by:float32, m[*S]:T? -> y[*S,D]:T", threadgroup=64,
        metal=I + "T m_ = has_m ? m[i / D] : T(1); y[i] = x[i] * w[i % D] * m_ + T(by);",
        grid="x.size", **more,
    )  # fmt: skip
    grad = ferrule.op(
        "scale_vjp",
        "x[*S,D]:T, w[D]:T, by:float32, m[*S]:T?, cotangent[*S,D]:T -> x_grad[*S,D]:T, w_grad[D]:T",
        metal=I + """
            T m_ = has_m ? m[i / D] : T(1);
            atomic_store_explicit(&x_grad[i], cotangent[i] * w[i % D] * m_, memory_order_relaxed);
            atomic_fetch_add_explicit(&w_grad[i % D], cotangent[i] * x[i] * m_,
                memory_order_relaxed);
        """,
        grid="x.size", threadgroup=64, atomic_outputs=True, init_value=0,
    )  # fmt: skip
    op.def_vjp(grad)
    return op


SCALE = scale()


def expected_scale(x: mx.array, w: mx.array, by: float, m: mx.array | None = None) -> mx.array:
    return x * w * (1 if m is None else m[..., None]) + by


def level0(kernel: Callable[..., Any], **more: Any) -> Callable[..., Any]:
    made = kernel(
        name="lean", input_names=["inp", "by"], output_names=["out", "sizes"],
        source=I + "T v = inp[i]; out[i] = v * N + by; if (i < 2) sizes[i] = inp_shape[i];",
        **more,
    )  # fmt: skip

    def f(x: mx.array) -> list[mx.array]:
        found = made(inputs=[x * 2, 3], grid=(x.size, 1, 1), threadgroup=(32, 1, 1),
                     template=[("T", x.dtype), ("N", -2)], output_shapes=[x.shape, (4,)],
                     output_dtypes=[x.dtype, mx.int32], init_value=7)  # fmt: skip
        return [found[0] + 1, found[1]]

    return f
