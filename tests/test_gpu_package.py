"""Packages for NVIDIA GPUs: in ferrule, in Python without it, and in C++ without Python."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import zipfile
from pathlib import Path
from typing import Any

import pytest

import ferrule
import on_cuda

torch = pytest.importorskip("torch")
from torch_cpp import start_build  # noqa: E402

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (on_cuda.available() and torch.cuda.is_available()), reason="there is no GPU for torch"
    ),
    pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),  # what torch warns of is its own
]

SIZES = (1, 2, 7, 300)

PYTHON = """
    import ctypes, sys, tempfile, zipfile
    import torch
    with zipfile.ZipFile(sys.argv[1]) as archive, tempfile.TemporaryDirectory() as folder:
        for name in archive.namelist():
            if "/data/ferrule/" in name:
                ctypes.CDLL(archive.extract(name, folder), mode=ctypes.RTLD_GLOBAL)
    model = torch._inductor.aoti_load_package(sys.argv[1])
    for n in (1, 2, 7, 300):
        x = torch.sin(torch.arange(n * 32, dtype=torch.float32)).reshape(n, 32).cuda()
        print(*map("{:.9g}".format, model(x).flatten().tolist()), end=" ")
    assert "ferrule" not in sys.modules
"""

CPP = """
#include <dlfcn.h>
#include <cstdio>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>
#include <torch/torch.h>

int main(int, char** given) {
  if (!dlopen(given[1], RTLD_NOW | RTLD_GLOBAL)) return fprintf(stderr, "%s", dlerror()), 1;
  torch::inductor::AOTIModelPackageLoader model(given[2]);
  c10::InferenceMode mode;
  for (int n : {1, 2, 7, 300}) {
    auto x = torch::sin(torch::arange(n * 32, torch::kFloat32)).reshape({n, 32}).to(torch::kCUDA);
    auto y = model.run({x})[0].flatten().cpu();
    for (int i = 0; i < y.numel(); i++) printf("%.9g ", y[i].item<float>());
  }
  return 0;
}
"""


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A package of a model, and what the model gives."""
    from test_torch_model import Model, batch

    model = Model().cuda()
    with torch.no_grad():
        expected = torch.cat([model(batch(n).cuda()).flatten() for n in SIZES])
        shapes = ({0: torch.export.Dim("B", min=1, max=4096)},)
        program = torch.export.export(model, (batch(3).cuda(),), dynamic_shapes=shapes)
    path = tmp_path_factory.mktemp("package") / "model.pt2"
    ferrule.package(program, path)
    return path, expected.cpu()


def close(printed: str, expected: Any) -> None:
    found = torch.tensor([*map(float, printed.split())])
    # The model's own linear layers run a Python function; the package has the kernel.
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)


def test_in_ferrule(package: Any) -> None:
    from test_torch_model import batch

    path, expected = package
    model = ferrule.load_package(path)
    found = torch.cat([model(batch(n).cuda()).flatten() for n in SIZES])
    torch.testing.assert_close(found.cpu(), expected, rtol=1e-4, atol=1e-5)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        again = model(batch(7).cuda()).flatten()
    stream.synchronize()
    torch.testing.assert_close(again.cpu(), model(batch(7).cuda()).flatten().cpu())


def test_in_python_without_ferrule(package: Any) -> None:
    path, expected = package
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(PYTHON), str(path)],
        capture_output=True, text=True, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    close(done.stdout, expected)


def test_in_cpp(package: Any, tmp_path: Path) -> None:
    path, expected = package
    cuda = ("-ltorch_cuda", "-lc10_cuda")
    libraries = ("-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10", *cuda)
    building = start_build(tmp_path, CPP, libraries)
    if building is None:
        pytest.skip("there is no g++")
    said = building.communicate(timeout=280)[1]
    assert building.returncode == 0, said[-3000:]
    with zipfile.ZipFile(path) as archive:
        (name,) = [n for n in archive.namelist() if "/data/ferrule/" in n]
        library = archive.extract(name, tmp_path)
    done = subprocess.run(
        [str(tmp_path / "main"), library, str(path)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, (done.returncode, done.stderr[-3000:])
    close(done.stdout, expected)


def test_made_for_a_gpu_by_export_for(tmp_path: Path) -> None:
    from test_torch_model import Model, batch

    model = Model()
    shapes = ({0: torch.export.Dim("B", min=1, max=4096)},)
    program = ferrule.export_for("cuda", model, (batch(3),), dynamic_shapes=shapes)
    saved = tmp_path / "saved.pt2"
    ferrule.save(program, saved)
    loaded = ferrule.load(saved).module(check_guards=False).cuda()
    with torch.no_grad():
        expected = Model().cuda()(batch(5).cuda())
        torch.testing.assert_close(loaded(batch(5).cuda()), expected, rtol=1e-4, atol=1e-5)
