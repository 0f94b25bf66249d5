"""Models of many layers in NVFP4 as one graph: compiled, and exported."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import nn

from ferrule.ops import NVFP4Experts, NVFP4Linear, quantize_nvfp4

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
H, HEADS, EXPERTS, INNER = 32, 2, 4, 16
DEPTHS = [2, pytest.param(32, marks=pytest.mark.slow)]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(H)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (linear(H, H) for _ in range(4))

    def forward(self, x: Any) -> Any:
        y = self.norm(x)
        projections = self.q_proj, self.k_proj, self.v_proj
        q, k, v = (p(y).unflatten(-1, (HEADS, -1)).transpose(0, 1) for p in projections)
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.o_proj(y.transpose(0, 1).flatten(1))


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(H)
        self.gate_proj, self.up_proj, self.down_proj = linear(H, 64), linear(H, 64), linear(64, H)

    def forward(self, x: Any) -> Any:
        y = self.norm(x)
        return x + self.down_proj(nn.functional.silu(self.gate_proj(y)) * self.up_proj(y))


class Mixture(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.router = nn.RMSNorm(H), nn.Linear(H, EXPERTS, bias=False)
        self.experts = experts()

    def forward(self, x: Any) -> Any:
        y = self.norm(x)
        weights, ids = torch.softmax(self.router(y), -1).topk(2)
        return x + self.experts(y, ids, weights)


def linear(k: int, n: int) -> NVFP4Linear:
    return NVFP4Linear.from_linear(nn.Linear(k, n, bias=False))


def experts() -> NVFP4Experts:
    tensors: dict[str, Any] = {}
    for name, shape in (("w13", (EXPERTS, 2 * INNER, H)), ("w2", (EXPERTS, H, INNER))):
        parts = zip(("packed", "scale", "scale_2"), quantize_nvfp4(torch.randn(shape)), strict=True)
        tensors |= {f"{name}_{part}": tensor for part, tensor in parts}
    return NVFP4Experts.from_tensors(**tensors)


def model(kind: str, depth: int) -> nn.Module:
    """Tokens ``[M, H]`` in and out."""
    torch.manual_seed(0)
    second = {"dense": Mlp, "mixture": Mixture}[kind]
    return nn.Sequential(*[part() for _ in range(depth) for part in (Attention, second)]).eval()


def calls_of_ferrule(graph: Any) -> Counter[str]:
    """How often each op is in a graph, by its name without the digest."""
    names = (str(node.target).removeprefix("ferrule.") for node in graph.nodes)
    return Counter(
        name.rpartition("_")[0] for name in names if name.startswith(("nvfp4_", "mxfp4_"))
    )


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("kind", ["dense", "mixture"])
def test_compiled_as_one_graph(kind: str, depth: int) -> None:
    """With one call of an op for each layer, and no other graph for another number of tokens."""
    whole, graphs = model(kind, depth), []

    def backend(module: Any, inputs: Any) -> Any:
        graphs.append(module.graph)
        return module.forward

    compiled = torch.compile(whole, fullgraph=True, dynamic=True, backend=backend)
    with torch.no_grad():
        for tokens in (5, 2, 9, 64):
            x = torch.randn(tokens, H)
            torch.testing.assert_close(compiled(x), whole(x))
    assert len(graphs) == 1
    assert calls_of_ferrule(graphs[0]).total() == sum(
        isinstance(layer, (NVFP4Linear, NVFP4Experts)) for layer in whole.modules()
    )


@pytest.mark.parametrize("depth", DEPTHS)
@pytest.mark.parametrize("kind", ["dense", "mixture"])
def test_exported_as_one_program(kind: str, depth: int, tmp_path: Any) -> None:
    """Whose state_dict is that of the model: the tensors that a checkpoint has, as they are."""
    whole, x = model(kind, depth), torch.randn(5, H)
    tokens = torch.export.Dim("tokens", min=2, max=100)
    with torch.no_grad():
        program = torch.export.export(whole, (x,), dynamic_shapes=({0: tokens},))
    torch.export.save(program, tmp_path / "model.pt2")
    loaded = torch.export.load(tmp_path / "model.pt2")
    own = whole.state_dict()
    for state in (program.state_dict, loaded.state_dict):
        assert state.keys() == own.keys()
        for name, tensor in own.items():
            assert state[name].dtype == tensor.dtype
            assert torch.equal(as_bytes(state[name]), as_bytes(tensor))
    assert not loaded.constants
    layers = sum(isinstance(layer, (NVFP4Linear, NVFP4Experts)) for layer in whole.modules())
    assert calls_of_ferrule(loaded.graph).total() == layers
    with torch.no_grad():
        for more in (x, torch.randn(9, H)):
            torch.testing.assert_close(loaded.module()(more), whole(more))


def as_bytes(tensor: Any) -> Any:
    """Something to compare, of which torch compares no float8."""
    return tensor.view(torch.uint8) if tensor.ndim else tensor
