"""grid_sample in torch, with a derivative: two Metal kernels in one torch.autograd.Function.

The kernels are those of `ferrule demo`; ferrule/cli/grid_sample.py has their bodies.
"""

import torch

from ferrule.cli.grid_sample import sample, sample_vjp


class GridSample(torch.autograd.Function):
    """Samples images x [B, H, W, C] at the points of grid [B, gH, gW, 2]."""

    @staticmethod
    def forward(ctx, x, grid):
        ctx.save_for_backward(x, grid)
        return sample(x, grid)

    @staticmethod
    def backward(ctx, cotangent):
        return sample_vjp(*ctx.saved_tensors, cotangent)


torch.manual_seed(0)
x = torch.rand(2, 32, 40, 3, requires_grad=True)
grid = (2.4 * torch.rand(2, 24, 24, 2) - 1.2).requires_grad_()
out = GridSample.apply(x, grid)
weights = torch.rand_like(out)
x_grad, grid_grad = torch.autograd.grad((out * weights).sum(), (x, grid))

# torch has its own, with the channels first.
expected = torch.nn.functional.grid_sample(
    x.permute(0, 3, 1, 2), grid, align_corners=False
).permute(0, 2, 3, 1)
expected_grads = torch.autograd.grad((expected * weights).sum(), (x, grid))

names = ("out", "x_grad", "grid_grad")
pairs = zip((out, x_grad, grid_grad), (expected, *expected_grads), strict=True)
for name, (mine, theirs) in zip(names, pairs, strict=True):
    torch.testing.assert_close(mine, theirs, rtol=1e-4, atol=1e-4)
    print(f"{name:9} differs from torch's by {(mine - theirs).abs().max():.0e} at most")
