"""``ferrule bench quantized``: its peers multiply with the same matrices. No times."""

from __future__ import annotations

import itertools
import json
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest
import torch

import on_cuda
from ferrule import ops
from ferrule_bench import quantized, quantized_peers
from ferrule_bench.timing import Bench
from test_bench import run, silent

BLOCK = 8


class HummingLayer:
    """In place of humming's, which needs a GPU: takes what that takes, and dequantizes."""

    made: int = 0

    def __init__(
        self, n: int, k: int, *, weight_config: Any, num_experts: int | None, torch_dtype: Any
    ) -> None:
        type(self).made += 1
        self.shape, self.experts, self.config = (n, k), num_experts, weight_config
        assert torch_dtype == torch.bfloat16

    def to(self, device: Any) -> HummingLayer:
        return self

    def load_from_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        tensors = dict(tensors)
        weight, scale = tensors.pop("weight"), tensors.pop("weight_scale")
        mode = {"modelopt": "nvfp4", "mxfp4": "mxfp4"}[self.config["quant_method"]]
        assert weight.dtype == torch.uint8 and weight.shape[-1] == self.shape[1] // 2
        if mode == "nvfp4":
            assert scale.dtype == torch.float8_e4m3fn
            assert tensors.pop("weight_scale_2").tolist() == [1.0] * (self.experts or 1)
        assert not tensors
        parts = weight.view(torch.uint32), scale.view(torch.uint8)
        self.dense = ops.dequantize(*parts, mode=mode, dtype="bfloat16")

    def transform(self) -> None:
        self.humming_config = self

    def __call__(self, x: Any, *, tuning_config: str, **moe: Any) -> torch.Tensor:
        rows, kind = json.loads(tuning_config)["for"]
        if self.experts is None:
            assert (rows, kind) == (len(x), "dense") and not moe
            return x @ self.dense.mT
        top, ids, experts = moe["top_k"], moe["sorted_ids"], moe["expert_ids"]
        assert (rows, kind) == (len(x) * top, "indexed")
        assert json.loads(moe["compute_config"]) == {"gemm_type": kind}
        assert moe["num_tokens_padded"].tolist() == [len(ids)] == [len(experts) * BLOCK]
        y = torch.full((rows, self.shape[0]), float("nan"), dtype=x.dtype)
        for at, place in enumerate(ids.tolist()):
            if place < rows:
                y[place] = x[place // top] @ self.dense[experts[at // BLOCK]].mT
        return y


@pytest.fixture
def humming(monkeypatch: pytest.MonkeyPatch) -> None:
    def get_heuristics_config(layer: Any, *, shape_m: int, gemm_type: str) -> dict[str, Any]:
        return {"for": [shape_m, gemm_type], "block_shape": [BLOCK, 64, 64]}

    contents: dict[str, dict[str, Any]] = {
        "humming": {"__version__": "0"},
        "humming.layer": {"HummingLayer": HummingLayer},
        "humming.tune": {"get_heuristics_config": get_heuristics_config},
    }
    for name, content in contents.items():
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)


def arrays(name: str, *shape: int) -> tuple[dict[str, Any], Any]:
    mode, group, bits = quantized.FORMATS[name]
    torch.manual_seed(0)
    parts = ops.quantize(torch.randn(*shape).bfloat16() / 8, group, bits, mode)
    return {"group_size": group, "bits": bits, "mode": mode}, parts


def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Bench:
    monkeypatch.setattr(mx, "is_available", lambda device: True)
    bench = silent()
    bench.device = "cuda"
    return bench


@pytest.mark.skipif(on_cuda.available(), reason="what stands in for humming is for CPUs")
@pytest.mark.parametrize("name", ["nvfp4", "mxfp4", "affine 4", "affine 8"])
def test_peers_of_a_gpu(name: str, humming: None, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = as_on_a_gpu(monkeypatch)
    form, parts = arrays(name, 64, 128)
    x = torch.randn(3, 128).bfloat16()
    HummingLayer.made = 0
    peers = quantized_peers.dense(bench, x, parts, form, 4)
    assert HummingLayer.made == (4 if "fp4" in name else 0)
    bench.compare("dense", lambda: ops.quantized_matmul(x, *parts, **form), peers, 2e-2)
    batch = "many calls and one eval"
    expected = [f"MLX {mx.__version__}, {batch}", f"ferrule, MLX's arrays, {batch}"]  # type: ignore[attr-defined]
    extra = {"affine 4": ["torch's _weight_int4pack_mm"], "affine 8": []}.get(name, ["humming 0"])
    assert [row.peer for row in bench.rows] == expected + extra and not bench.failed
    assert all(row.right and row.error is not None for row in bench.rows)

    bench.rows.clear()
    form, parts = arrays(name, 5, 64, 128)
    for tokens in (3, 40):  # the latter are sorted
        x = torch.randn(tokens, 1, 1, 128).bfloat16()
        routings = [torch.rand(tokens, 5).topk(2).indices.int() for _ in range(3)]
        peers = quantized_peers.gathers(bench, x, parts, form, routings)

        def ours(x: Any = x, chosen: Any = routings[0]) -> Any:
            return ops.gather_qmm(x, *parts, rhs_indices=chosen, **form)

        bench.compare(f"{tokens}", ours, peers, 2e-2)
    by_mlx = f"MLX {mx.__version__}, rows sorted before, {batch}"  # type: ignore[attr-defined]
    extra = ["humming 0, rows sorted before"] if "fp4" in name else []
    assert [r.peer for r in bench.rows if r.work == "3"] == expected + extra
    assert [r.peer for r in bench.rows if r.work == "40"] == [*expected, by_mlx, *extra]
    assert all(row.right and row.error is not None for row in bench.rows) and not bench.left_out


def test_times_of_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call's share of those that are evaluated together, of all copies by turns."""
    bench = as_on_a_gpu(monkeypatch)
    called: list[int] = []

    def call(which: int) -> Any:
        called.append(which)
        return mx.zeros(3) + which

    calls = quantized_peers.Lazily([lambda i=i: call(i) for i in range(5)])  # type: ignore[misc]
    monkeypatch.setattr(Bench, "wall", lambda self, function: function() or 7.0)
    for bench.quick, count in ((True, 5), (False, 35)):
        seconds = calls.ready(bench)
        called.clear()
        assert seconds() == 7.0 / count and called == list(
            itertools.islice(itertools.cycle(range(5)), count)
        )


def test_rows_by_experts() -> None:
    chosen = torch.tensor([[3, 0], [3, 1], [0, 3]])
    ids, experts, count = quantized_peers.by_experts(chosen, 5, 2)
    assert ids.tolist() == [1, 4, 3, 6, 0, 2, 5, 6] and experts.tolist() == [0, 1, 3, 3]
    assert count.tolist() == [8] and {ids.dtype, experts.dtype, count.dtype} == {torch.int32}


def test_who_cannot_is_left_out(humming: None, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = as_on_a_gpu(monkeypatch)
    form, parts = arrays("nvfp4", 64, 128)

    def refused(*_: Any, **more: Any) -> None:
        raise AssertionError

    monkeypatch.setattr(HummingLayer, "__init__", refused)
    monkeypatch.setattr(mx, "is_available", lambda device: False)
    assert not quantized_peers.dense(bench, torch.randn(3, 128).bfloat16(), parts, form, 1)
    assert bench.left_out[0] == "mlx has no CUDA: its rows are left out"
    assert "humming_dense cannot be made and is left out: AssertionError" in bench.left_out[1]


def test_on_the_cpu() -> None:
    done = run("quantized", "--quick", "--device", "cpu", "--only", "affine 4", "--json", "-")
    assert done.exit_code == 0, done.output
    rows = json.loads(done.stdout)["rows"]
    peers = {row["peer"] for row in rows if row["group"] == "quantized affine 4"}
    version = mx.__version__  # type: ignore[attr-defined]
    assert peers == {"F.linear of floats", f"MLX {version}", "torch's _weight_int4pack_mm"}
    assert all(row["right"] for row in rows)
