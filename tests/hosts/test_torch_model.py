"""A model of 32 layers: linear layers that are a Python function beside a kernel, and activations
that are a kernel. One graph, training, export, a new process, and C++ without Python."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend
from torch.export import Dim

import ferrule
import processes
from torch_cpp import run_built, start_build
from torch_ops import held

# What torch warns of is its own.
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

LAYERS, WIDTH = 32, 32


def unpacked(w: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Weights ``[N,K]`` of 4 bits, the lower half of a byte first, a scale for 16 of them."""
    q = torch.stack((w & 15, w >> 4), -1).flatten(-2).to(scale.dtype) - 8
    return q * scale.repeat_interleave(16, -1)


linear = ferrule.op(
    "model_linear",
    "x[*S,K]:T, w[N,K//2]:uint8, scale[N,K//16]:T -> y[*S,N]:T where K % 16 == 0",
    run=lambda x, w, scale: x @ unpacked(w, scale).T,
    metal="""
        uint i = thread_position_in_grid.x;
        uint m = i / N, n = i % N;
        float sum = 0;
        for (int k = 0; k < K / 2; k++) {
            uint pair = w[n * (K / 2) + k];
            float low = float(pair & 15) - 8, high = float(pair >> 4) - 8;
            float both = low * float(x[m * K + 2 * k]) + high * float(x[m * K + 2 * k + 1]);
            sum += both * float(scale[n * (K / 16) + k / 8]);
        }
        y[i] = T(sum);""",
    grid="y.size",
    threadgroup=64,
    version=1,
)


@linear.def_vjp
def _(primals: Any, cotangents: Any, outputs: Any) -> Any:
    _, w, scale = primals
    return cotangents[0] @ unpacked(w, scale), None, None


adopted = linear.using("run", "metal")  # a package, which can hold no Python, has the kernel

gated = ferrule.op(
    "model_gated", "x[*S,D]:T, g[D]:T -> y[*S,D]:T",
    metal="""
        uint i = thread_position_in_grid.x;
        y[i] = x[i] / (1 + metal::exp(-x[i])) * g[i % D];""",
    grid="x.size", threadgroup=256,
)  # fmt: skip


@gated.def_vjp
def _(primals: Any, cotangents: Any, outputs: Any) -> Any:
    (x, g), (cotangent,) = primals, cotangents
    sigmoid = torch.sigmoid(x)
    slope = sigmoid * (1 + x * (1 - sigmoid))
    return cotangent * g * slope, (cotangent * x * sigmoid).flatten(0, -2).sum(0)


class Layer(torch.nn.Module):
    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        w = torch.randint(0, 256, (WIDTH, WIDTH // 2), dtype=torch.uint8, generator=generator)
        self.register_buffer("w", w)
        self.register_buffer("scale", torch.rand(WIDTH, WIDTH // 16, generator=generator) / 64)
        self.gate = torch.nn.Parameter(torch.rand(WIDTH, generator=generator) + 0.5)


class Model(torch.nn.Module):
    def __init__(self, *, reference: bool = False) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.layers = torch.nn.ModuleList(Layer(generator) for _ in range(LAYERS))
        self.reference = reference

    def forward(self, x: Any) -> Any:
        for layer in self.layers:
            if self.reference:
                h = x @ unpacked(layer.w, layer.scale).T
                x = x + torch.nn.functional.silu(h) * layer.gate
            else:
                x = x + gated(adopted(x, layer.w, layer.scale), layer.gate)
        return x


def batch(n: int) -> torch.Tensor:
    return torch.sin(torch.arange(n * WIDTH, dtype=torch.float32)).reshape(n, WIDTH)


def test_one_graph_trains_as_the_reference_does() -> None:
    ours, theirs = Model(), Model(reference=True)
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(ours, fullgraph=True, dynamic=True, backend=counter)
    optimisers = [torch.optim.SGD(model.parameters(), lr=0.01) for model in (ours, theirs)]
    for n in (5, 6, 9):
        losses = []
        for model, optimiser in zip((compiled, theirs), optimisers, strict=True):
            optimiser.zero_grad()
            loss = (model(batch(n)) ** 2).mean()
            loss.backward()
            optimiser.step()
            losses.append(loss.detach())
        torch.testing.assert_close(*losses, rtol=1e-5, atol=1e-6)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert counter.frame_count == 1
    nodes = [node.target for node in counter.graphs[0].graph.nodes]
    assert nodes.count(held(adopted)) == nodes.count(held(gated)) == LAYERS


FRESH = """
import sys
import torch, ferrule
import test_torch_model as home  # the function that the linear layers run
home.adopted.torch_op
model = ferrule.load(sys.argv[1]).module(check_guards=False)
for n in (2, 7):
    print(*map("{:.9g}".format, model(home.batch(n)).flatten().tolist()), end=" ")
"""


@pytest.mark.slow
def test_exported_in_a_new_process_and_in_cpp(tmp_path: Path) -> None:
    building = start_build(tmp_path)
    model = Model()
    with torch.no_grad():
        expected = torch.cat([model(batch(n)).flatten() for n in (2, 7)])
        shapes = ({0: Dim("B", min=1, max=4096)},)
        program = torch.export.export(model, (batch(3),), dynamic_shapes=shapes)
    assert {"layers.31.w", "layers.0.gate"} < program.state_dict.keys()

    saved = tmp_path / "saved.pt2"
    ferrule.save(program, saved)
    printed = processes.printed(FRESH, saved, modules=processes.COMPILING)
    torch.testing.assert_close(torch.tensor([*map(float, printed.split())]), expected)

    package = tmp_path / "model.pt2"
    ferrule.package(program, package)
    if not building:
        pytest.skip("no g++, so not in C++")
    found = run_built(building, tmp_path, package, [batch(2), batch(7)])
    torch.testing.assert_close(found, expected)
