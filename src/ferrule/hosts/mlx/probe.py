"""Whether kernels can be put into the CUDA graphs of this MLX directly.

That takes functions and facts that MLX's headers do not show (runtime/mlx_cuda.h). They are tried
out once per process, when the first kernel for a GPU is called: a kernel in PTX goes the way of all
others. Where it fails, MLX is asked to launch kernels, by `mx.fast.precompiled_cuda_kernel`.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np

from ... import dtypes
from ...devices.protocol import Native
from ...errors import FerruleWarning, warn
from ...kernels import entries
from ...kernels.entries import Bound, Request
from ...tools.driver import driver

_DIRECTLY, _BY_MLX = 1, 2  # of runtime/mlx_cuda.h
_COUNT = 1000

# y[i] = x[i] + 1
_PTX = b"""\
.version 6.0
.target sm_50
.address_size 64
.visible .entry ferrule_probe(.param .u64 x, .param .u64 y) {
  .reg .pred %out;
  .reg .b32 %n, %size, %at, %value;
  .reg .b64 %from, %to, %offset;
  mov.u32 %n, %ctaid.x;
  mov.u32 %size, %ntid.x;
  mov.u32 %at, %tid.x;
  mad.lo.s32 %at, %n, %size, %at;
  setp.ge.u32 %out, %at, 1000;
  @%out bra DONE;
  ld.param.u64 %from, [x];
  ld.param.u64 %to, [y];
  cvta.to.global.u64 %from, %from;
  cvta.to.global.u64 %to, %to;
  mul.wide.u32 %offset, %at, 4;
  add.s64 %from, %from, %offset;
  add.s64 %to, %to, %offset;
  ld.global.u32 %value, [%from];
  add.u32 %value, %value, 1;
  st.global.u32 [%to], %value;
DONE:
  ret;
}
\0"""


class _Probe(Bound):
    """The kernel, as C runs it."""

    def __init__(self) -> None:
        super().__init__()
        s = self.structure
        s.inputs = s.outputs = s.bodies = 1
        body = s.body[0]
        body.devices, body.when, body.contiguous = entries.CUDA, -1, 1

    def entry(self, request: Request) -> int:
        """The address of an entry for a request."""
        function = driver().load(request.device, _PTX, "ferrule_probe", 0)
        number = driver().number("ferrule_probe")
        blocks = -(-_COUNT // 256)
        call = (
            function.handle, function.context, blocks, 1, 1, 256, 1, 1, 0, request.device, number
        )  # fmt: skip
        return self.keep(Native(call=call, parameters=(("input", 0), ("output", 0)), keep=function))


def choose(native: ctypes.PyDLL, number_of: Callable[[Bound], int], *_: Any) -> tuple[()]:
    """Try it out, and tell the nodes which way kernels go.

    Args:
        native: the nodes.
        number_of: gives the probe the number by which nodes know it.
    """
    why = _wrong(native, number_of)
    native.fr_mlx_route(_BY_MLX if why else _DIRECTLY)
    if why:
        warn(
            f"MLX {mx.__version__} launches ferrule's kernels by "  # type: ignore[attr-defined]
            f"mx.fast.precompiled_cuda_kernel, which takes longer for each: {why}. A newer ferrule "
            "may know this MLX.",
            FerruleWarning,
        )
    return ()


def _wrong(native: ctypes.PyDLL, number_of: Callable[[Bound], int]) -> str:
    """Why kernels cannot be put into MLX's graphs directly; ``""`` where they can."""
    try:
        stream = mx.default_stream(mx.gpu)
        x = mx.arange(_COUNT, dtype=mx.uint32, stream=stream)
        mx.eval(x)
        difference: bytes | None = native.fr_mlx_look_gpu(x)
        if difference:
            return difference.decode()
        probe = _Probe()
        entries.kept.append(probe)
        outputs = (((_COUNT,), dtypes.ALL.index(dtypes.BY_NAME["uint32"])),)
        plan = native.fr_mlx_plan(
            ctypes.addressof(probe.structure), number_of(probe), entries.CUDA, b"a probe",
            _Probe, outputs, (_COUNT, 1, 1, 256, 1, 1), 0, None,
        )  # fmt: skip
        for _ in range(3):
            (x,) = native.fr_mlx_run(plan, (mx.multiply(x, 2, stream=stream),), stream)
        expected = np.arange(_COUNT, dtype=np.uint32)
        for _ in range(3):
            expected = expected * 2 + 1
        return "" if np.array_equal(np.array(x), expected) else "a kernel gave wrong numbers"
    except Exception as error:  # whatever MLX, the driver or the nodes have against it
        return f"a kernel could not be launched ({error})"
