"""A C++ program that runs packaged models by torch's own loader, without Python."""

from __future__ import annotations

import shutil
import subprocess
import zipfile
from collections.abc import Sequence
from pathlib import Path

import torch

# Few headers: torch/torch.h alone takes 20 s longer to compile.
_PROGRAM = """
#include <dlfcn.h>
#include <cstdio>
#include <cstdlib>
#include <vector>
#include <ATen/ops/from_blob.h>
#include <c10/core/InferenceMode.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

// Arguments: a library, a package, a device, and of each input the file, the rows and the columns.
int main(int count, char** argument) {
  if (!dlopen(argument[1], RTLD_NOW | RTLD_GLOBAL)) return fprintf(stderr, "%s", dlerror()), 1;
  torch::inductor::AOTIModelPackageLoader model(argument[2]);
  c10::InferenceMode mode;
  for (int i = 4; i + 2 < count; i += 3) {
    const int64_t rows = atoi(argument[i + 1]), columns = atoi(argument[i + 2]);
    std::vector<float> values(rows * columns);
    FILE* file = fopen(argument[i], "rb");
    if (!file || fread(values.data(), 4, values.size(), file) != values.size()) return 2;
    fclose(file);
    const at::Tensor x = at::from_blob(values.data(), {rows, columns}, at::kFloat);
    const at::Tensor y = model.run({x.to(argument[3])})[0].cpu().contiguous();
    for (int64_t k = 0; k < y.numel(); k++) printf("%.9g ", y.data_ptr<float>()[k]);
  }
  return 0;
}
"""


def start_build(
    folder: Path, libraries: Sequence[str] = ("-ltorch", "-ltorch_cpu", "-lc10")
) -> subprocess.Popen[str] | None:
    """Start compiling ``folder/main``, which takes long enough to do something else meanwhile;
    None where there is no g++."""
    home, compiler = Path(torch.__file__).parent, shutil.which("g++")
    if compiler is None:
        return None
    (folder / "main.cpp").write_text(_PROGRAM, encoding="utf-8")
    return subprocess.Popen(
        [
            compiler, "-std=c++20", "-O0", "main.cpp", "-o", "main", f"-I{home}/include",
            f"-I{home}/include/torch/csrc/api/include",
            f"-D_GLIBCXX_USE_CXX11_ABI={int(torch._C._GLIBCXX_USE_CXX11_ABI)}",
            f"-L{home}/lib", f"-Wl,-rpath,{home}/lib", *libraries, "-ldl",
        ],
        cwd=folder, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def run_built(
    building: subprocess.Popen[str], folder: Path, package: Path, inputs: Sequence[torch.Tensor],
    device: str = "cpu", timeout: float = 200,
) -> torch.Tensor:  # fmt: skip
    """What a package's model gives in ``folder/main``, flat, for float32 matrices.

    Args:
        timeout: seconds until it must be built.
    """
    errors = building.communicate(timeout=timeout)[1]
    assert building.returncode == 0, errors[-3000:]
    with zipfile.ZipFile(package) as archive:
        (name,) = [n for n in archive.namelist() if "/data/ferrule/" in n]
        library = archive.extract(name, folder)
    arguments = [library, str(package), device]
    for i, x in enumerate(inputs):
        x.numpy().tofile(file := folder / f"{i}.bin")
        arguments += [str(file), *map(str, x.shape)]
    done = subprocess.run([str(folder / "main"), *arguments], capture_output=True, timeout=200)
    assert done.returncode == 0, (done.returncode, done.stderr[-3000:])
    return torch.tensor([*map(float, done.stdout.split())])
