"""What the tests of CUDA units share: a unit of two steps, and its machine code without a GPU."""

from __future__ import annotations

from typing import Any

import ferrule as fe
from ferrule import Op, devices
from ferrule.devices import UnitBinary

# A sum in two steps. `test_cuda_op.Emulated` carries both functions out.
SUM = """
extern "C" __global__ void parts(const T* x, float* partial, int64_t n) {
  float sum = 0;
  for (int64_t i = blockIdx.x; i < n; i += gridDim.x) sum += float(x[i]);
  partial[blockIdx.x] = sum;
}
extern "C" __global__ void total(const float* partial, float* y, int count, float scale) {
  float sum = 0;
  for (int i = 0; i < count; ++i) sum += partial[i];
  y[0] = sum * scale;
}
"""
PARTS = fe.step("parts", ["x", "partial", "int64 N"], blocks="min(N,7)", block=1)
TOTAL = fe.step("total", ["partial", "y", "min(N,7)", "scale"], blocks=1, block=1)
SUM_RULE = "x[N]:T, scale:float32 -> y[]:float32 where T in (float32, float16)"


def sum_op(name: str = "sum", **more: Any) -> Op:
    given = {"steps": [PARTS, TOTAL], "scratch": {"partial": "float32[7]"}, **more}
    return fe.op(name, SUM_RULE, cuda=fe.cuda_unit(SUM, **given))


def bound(op: Op, shapes: list[Any], kinds: list[str | None]) -> Any:
    said = op.rule.bind(op.name, shapes, kinds)
    op.rule.results(op.name, said)
    return said


def compiled(op: Op, shapes: list[Any], kinds: list[str | None], arch: str = "sm_90") -> UnitBinary:
    """A unit's machine code for these inputs."""
    unit: Any = op.implementations[0]
    return devices.compile_unit(arch, unit.spec(unit.sent(bound(op, shapes, kinds)).template))
