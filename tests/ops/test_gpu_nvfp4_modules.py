"""NVFP4's quantiser, modules and loader with tensors on a real GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
import nvfp4_files as files  # noqa: E402
from ferrule.ops import NVFP4Linear, dequantize_nvfp4, nvfp4, quantize_nvfp4  # noqa: E402
from torch_cuda import ON_GPU  # noqa: E402

pytestmark = ON_GPU


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_quantises_as_the_processor_does(dtype: Any) -> None:
    """Codes and scales to the byte, given the scale of all, for which torch divides by a number:
    on a GPU it multiplies by one over it."""
    w = torch.randn(64, 256, dtype=dtype)
    scale_2 = quantize_nvfp4(w)[2]
    torch.testing.assert_close(quantize_nvfp4(w.cuda())[2].cpu(), scale_2, rtol=2**-23, atol=0)
    here, there = quantize_nvfp4(w, scale_2), quantize_nvfp4(w.cuda(), scale_2.cuda())
    for a, b in zip(here[:2], there[:2], strict=True):
        assert torch.equal(a.view(torch.uint8), b.cpu().view(torch.uint8))
    assert torch.equal(dequantize_nvfp4(*here), dequantize_nvfp4(*there).cpu())


def test_modules_move() -> None:
    layer = NVFP4Linear.from_linear(torch.nn.Linear(64, 32))
    moved = NVFP4Linear(64, 32, device="cuda")
    moved.load_state_dict(layer.state_dict())
    assert moved.w_scale.is_cuda
    x = torch.randn(3, 64)
    for other in (moved, NVFP4Linear.from_linear(torch.nn.Linear(64, 32)).cuda()):
        other.load_state_dict(layer.state_dict())
        half = other.half()
        assert (half.w_scale.dtype, half.w_scale_2.dtype) == (torch.float8_e4m3fn, torch.float32)
        torch.testing.assert_close(
            half(x.cuda().half()).cpu().float(), layer(x), rtol=1e-2, atol=1e-2
        )
    assert torch.equal(moved.cpu().w_packed, layer.w_packed)


@pytest.mark.parametrize("way", ["model on the GPU", "meta", "moved after"])
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_models_are_loaded(kind: str, way: str, tmp_path: Path) -> None:
    pytest.importorskip("transformers", minversion="5.0")
    model = files.tiny(kind)
    tensors = files.quantized(files.floats_of(model))
    files.write(tmp_path, tensors)
    expected = nvfp4.load(model, tmp_path)
    with torch.device("meta" if way == "meta" else "cpu"):
        other = type(model)(model.config).to(torch.bfloat16).eval()
    other = other.cuda() if way == "model on the GPU" else other
    other = nvfp4.load(other, tmp_path, device="cuda").cuda()
    for a, b in zip(expected.state_dict().values(), other.state_dict().values(), strict=True):
        assert b.is_cuda
        assert torch.equal(a.cpu().float(), b.cpu().float())
    start = torch.arange(8)[None]
    with torch.no_grad():
        a, b = expected(start).logits, other(start.cuda()).logits.cpu()
    assert (a - b).norm() < 0.02 * a.norm()
