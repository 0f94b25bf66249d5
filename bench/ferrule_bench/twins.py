"""The kernels that are measured, written by hand in CUDA C++, and how they are launched.

Each has the algorithm and the threads of the Metal body that it is compared with.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

from ferrule.errors import ToolchainError
from ferrule.tools import nvrtc
from ferrule.tools.driver import Sizes, driver

# What ferrule's kernels are compiled with, but for --fmad=false, which a pragma in a body asks for.
FLAGS = ("--std=c++17", "--device-as-default-execution-space", "-w")

# T is float or half. cuda_fp16.h has half in the same instructions, but NVRTC may be without it.
_HEAD = """
#ifdef HALF
struct T { unsigned short bits; };
inline float load(const T* p) {
  float v;
  asm("cvt.f32.f16 %0, %1;" : "=f"(v) : "h"(p->bits));
  return v;
}
inline T narrow(float v) {
  T t;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(t.bits) : "f"(v));
  return t;
}
inline void add(T* p, float v) {
  asm volatile("red.add.noftz.f16 [%0], %1;" : : "l"(p), "h"(narrow(v).bits) : "memory");
}
#else
typedef float T;
inline float load(const T* p) { return *p; }
inline T narrow(float v) { return v; }
inline void add(T* p, float v) { atomicAdd(p, v); }
#endif
inline float warp_sum(float v) {
#pragma unroll
  for (int d = 16; d; d /= 2) v += __shfl_xor_sync(0xffffffffu, v, d);
  return v;
}
extern "C" __global__ void twin("""

# One thread an element.
EXP = """
    const float* __restrict__ x, float* __restrict__ out, unsigned n) {
  const unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) out[i] = expf(x[i]);
}"""

# One thread an element of the output.
FORWARD = """
    const T* __restrict__ x, const T* __restrict__ grid, T* __restrict__ out, int H, int W, int C,
    int gH, int gW, unsigned n) {
  const unsigned elem = blockIdx.x * blockDim.x + threadIdx.x;
  if (elem >= n) return;
  const unsigned point = elem / C, image = point / (gH * gW);
  const int first = image * H * W * C + elem % C;
  const float column = ((load(grid + 2 * point) + 1) * W - 1) / 2;
  const float row = ((load(grid + 2 * point + 1) + 1) * H - 1) / 2;
  const int west = int(floorf(column)), north = int(floorf(row));
  const float dx = column - west, dy = row - north;
  float sum = 0;
  for (int corner = 0; corner < 4; ++corner) {
    const int i = north + corner / 2, j = west + corner % 2;
    if (i >= 0 && i < H && j >= 0 && j < W) {
      const float across = corner % 2 ? dx : 1 - dx, down = corner / 2 ? dy : 1 - dy;
      sum += across * down * load(x + first + (i * W + j) * C);
    }
  }
  out[elem] = narrow(sum);
}
"""

# One thread a channel of a point; the channels are padded to whole warps.
VJP = """
    const T* __restrict__ x, const T* __restrict__ grid, const T* __restrict__ cotangent,
    T* __restrict__ x_grad, T* __restrict__ grid_grad, int H, int W, int C, int gH, int gW,
    unsigned n) {
  const unsigned elem = blockIdx.x * blockDim.x + threadIdx.x;
  if (elem >= n) return;
  const int padded = (C + 31) / 32 * 32, channel = elem % padded;
  const unsigned point = elem / padded, image = point / (gH * gW);
  float along_x = 0, along_y = 0;
  if (channel < C) {
    const int first = image * H * W * C + channel;
    const float column = ((load(grid + 2 * point) + 1) * W - 1) / 2;
    const float row = ((load(grid + 2 * point + 1) + 1) * H - 1) / 2;
    const int west = int(floorf(column)), north = int(floorf(row));
    const float dx = column - west, dy = row - north, cot = load(cotangent + point * C + channel);
    for (int corner = 0; corner < 4; ++corner) {
      const int i = north + corner / 2, j = west + corner % 2;
      if (i >= 0 && i < H && j >= 0 && j < W) {
        const float across = corner % 2 ? dx : 1 - dx, down = corner / 2 ? dy : 1 - dy;
        const int at = first + (i * W + j) * C;
        const float slope = load(x + at) * cot;
        along_x += corner % 2 ? slope * down : -slope * down;
        along_y += corner / 2 ? slope * across : -slope * across;
        add(x_grad + at, across * down * cot);
      }
    }
  }
  along_x = warp_sum(along_x);
  along_y = warp_sum(along_y);
  if (threadIdx.x % 32 == 0) {
    add(grid_grad + 2 * point, along_x * W / 2);
    add(grid_grad + 2 * point + 1, along_y * H / 2);
  }
}
"""

# Four lanes share a row of the state, 32 of its 128 elements each.
GATED_DELTA = """
    const T* __restrict__ q, const T* __restrict__ k, const T* __restrict__ v,
    const float* __restrict__ g, const T* __restrict__ beta, const float* __restrict__ before,
    T* __restrict__ y, float* __restrict__ after, int steps, int Hk, int Hv, int Dv) {
  constexpr int D = 128, N = 32;
  const int lane = threadIdx.x, own = lane % 4 * N;
  const int row = (blockIdx.y * blockDim.y + threadIdx.y) * 8 + lane / 4;
  const int batch = blockIdx.z / Hv, head = blockIdx.z % Hv;
  const int in = (batch * steps * Hk + head / (Hv / Hk)) * D + own;
  const int at = (blockIdx.z * Dv + row) * D + own;
  q += in, k += in;
  v += (batch * steps * Hv + head) * Dv + row, y += (batch * steps * Hv + head) * Dv + row;
  g += batch * steps * Hv + head, beta += batch * steps * Hv + head;
  float state[N];
#pragma unroll
  for (int i = 0; i < N; ++i) state[i] = before[at + i];
  for (int t = 0; t < steps; ++t) {
    const float decay = *g;
    float parts[8] = {};
#pragma unroll
    for (int i = 0; i < N; ++i) {
      state[i] *= decay;
      parts[i / 4] += state[i] * load(k + i);
    }
    float sum = parts[0] + parts[1] + (parts[2] + parts[3]) +
                (parts[4] + parts[5] + (parts[6] + parts[7]));
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    const float delta = (load(v) - sum) * load(beta);
#pragma unroll
    for (int i = 0; i < 8; ++i) parts[i] = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      state[i] += load(k + i) * delta;
      parts[i / 4] += state[i] * load(q + i);
    }
    sum = parts[0] + parts[1] + (parts[2] + parts[3]) +
          (parts[4] + parts[5] + (parts[6] + parts[7]));
    sum += __shfl_xor_sync(0xffffffffu, sum, 1);
    sum += __shfl_xor_sync(0xffffffffu, sum, 2);
    if (lane % 4 == 0) *y = narrow(sum);
    q += Hk * D, k += Hk * D, v += Hv * Dv, y += Hv * Dv, g += Hv, beta += Hv;
  }
#pragma unroll
  for (int i = 0; i < N; ++i) after[at + i] = state[i];
}
"""

# One warp a row of the state, 4 of its 128 elements a lane; B and C belong to all heads.
SSM = """
    const T* __restrict__ x, const T* __restrict__ a_log, const T* __restrict__ b,
    const T* __restrict__ c, const T* __restrict__ d, const float* __restrict__ dt,
    const float* __restrict__ before, T* __restrict__ out, float* __restrict__ after, int H,
    int Dh) {
  constexpr int D = 128, N = D / 32;
  const int row = blockIdx.y * blockDim.y + threadIdx.y, own = threadIdx.x * N;
  const int head = blockIdx.z % H, group = blockIdx.z / H * D + own;
  const float time = dt[blockIdx.z], decay = __expf(-__expf(load(a_log + head)) * time);
  const float value = load(x + blockIdx.z * Dh + row);
  const int at = (blockIdx.z * Dh + row) * D + own;
  float sum = 0;
#pragma unroll
  for (int i = 0; i < N; ++i) {
    const float state = decay * before[at + i] + value * time * load(b + group + i);
    after[at + i] = state;
    sum += state * load(c + group + i);
  }
  sum = warp_sum(sum);
  if (threadIdx.x == 0) out[blockIdx.z * Dh + row] = narrow(sum + value * load(d + head));
}
"""

# One warp a row of the state, 2 of its 64 elements a lane.
WKV7 = """
    const T* __restrict__ r, const T* __restrict__ w, const T* __restrict__ k,
    const T* __restrict__ v, const T* __restrict__ a, const T* __restrict__ b,
    const T* __restrict__ before, T* __restrict__ y, T* __restrict__ after, int steps, int H) {
  constexpr int D = 64, N = D / 32;
  const int row = blockIdx.y * blockDim.y + threadIdx.y, own = threadIdx.x * N;
  const int start = (blockIdx.z / H * steps * H + blockIdx.z % H) * D;
  const int at = (blockIdx.z * D + row) * D + own;
  float state[N];
#pragma unroll
  for (int i = 0; i < N; ++i) state[i] = load(before + at + i);
  for (int t = 0, from = start; t < steps; ++t, from += H * D) {
    float kept = 0, sum = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) {
      kept += state[i] * load(a + from + own + i);
      state[i] *= load(w + from + own + i);
    }
    kept = warp_sum(kept);
    const float value = load(v + from + row);
#pragma unroll
    for (int i = 0; i < N; ++i) {
      state[i] += load(k + from + own + i) * value + kept * load(b + from + own + i);
      sum += state[i] * load(r + from + own + i);
    }
    sum = warp_sum(sum);
    if (threadIdx.x == 0) y[from + row] = narrow(sum);
  }
#pragma unroll
  for (int i = 0; i < N; ++i) after[at + i] = narrow(state[i]);
}
"""

# One warp makes four outputs of one row of x: a byte holds a weight of each.
BITLINEAR = """
    const T* __restrict__ x, const unsigned char* __restrict__ weights, const T* __restrict__ scale,
    T* __restrict__ out, int inputs, int outputs) {
  const int batch = blockIdx.y / (outputs / 4), row = blockIdx.y % (outputs / 4);
  x += batch * inputs, weights += row * inputs;
  float sums[4] = {};
  for (int i = threadIdx.x * 4; i < inputs; i += 128) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      const float value = load(x + i + j);
      const int packed = weights[i + j];
#pragma unroll
      for (int n = 0; n < 4; ++n) sums[n] += value * (((packed >> 2 * n) & 3) - 1);
    }
  }
#pragma unroll
  for (int n = 0; n < 4; ++n) {
    sums[n] = warp_sum(sums[n]);
    const int at = batch * outputs + row + n * (outputs / 4);
    if (threadIdx.x == 0) out[at] = narrow(sums[n] * load(scale));
  }
}
"""


def compiled(text: str, architecture: str, *, half: bool = False) -> bytes:
    """One of the texts above as a cubin (PTX for ``compute_…``), with T float or half.

    Raises:
        ToolchainError: there is no NVRTC.
    """
    library = nvrtc.find_nvrtc()
    if library is None:
        raise ToolchainError("NVRTC was not found; `pip install nvidia-cuda-nvrtc` installs it.")
    flags = [*FLAGS, f"--gpu-architecture={architecture}", *(["-DHALF"] if half else [])]
    return library.compile(_HEAD + text.lstrip("\n"), "twin.cu", flags)[0]


class Twin:
    """A kernel by hand on the first GPU, launched through the driver as ferrule's are."""

    def __init__(self, text: str, architecture: str, *, half: bool = False) -> None:
        image = compiled(text, architecture, half=half)
        self._driver = driver()
        self._function = self._driver.load(0, image, "twin", 0)
        self._number = self._driver.number("twin")

    def __call__(self, arguments: Sequence[Any], blocks: Sizes, block: Sizes) -> None:
        """Launch it on torch's current stream.

        Args:
            arguments: torch tensors, and ints of 32 bits.
            blocks, block: as for CUDA.

        Raises:
            DeviceError: the launch was refused.
        """
        import torch

        values: list[Any] = [
            ctypes.c_int32(a) if isinstance(a, int) else ctypes.c_uint64(a.data_ptr())
            for a in arguments
        ]
        table = (ctypes.c_uint64 * len(values))(*map(ctypes.addressof, values))
        status = self._driver.launch(
            self._function, self._number, blocks, block, ctypes.addressof(table),
            torch.cuda.current_stream().cuda_stream,
        )  # fmt: skip
        if status:
            raise self._driver.failure(status, "the kernel by hand")


ALL = {
    "forward": FORWARD, "VJP": VJP, "gated delta": GATED_DELTA, "SSM": SSM, "WKV7": WKV7,
    "BitLinear": BITLINEAR,
}  # fmt: skip
