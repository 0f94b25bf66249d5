"""C++ programs against torch's own headers and libraries."""

from __future__ import annotations

import shutil
import subprocess
import zipfile
from collections.abc import Sequence
from pathlib import Path

import torch


def start_build(
    folder: Path, source: str, libraries: Sequence[str] = ("-ltorch", "-ltorch_cpu", "-lc10")
) -> subprocess.Popen[str] | None:
    """Start compiling ``folder/main``, which takes long enough to do something else meanwhile;
    None where there is no g++."""
    home, compiler = Path(torch.__file__).parent, shutil.which("g++")
    if compiler is None:
        return None
    (folder / "main.cpp").write_text(source, encoding="utf-8")
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
    building: subprocess.Popen[str], folder: Path, package: Path, timeout: float = 200
) -> str:
    """What ``folder/main`` prints for the library inside a package and the package, once it is
    built, within ``timeout`` seconds."""
    said = building.communicate(timeout=timeout)[1]
    assert building.returncode == 0, said[-3000:]
    with zipfile.ZipFile(package) as archive:
        (name,) = [n for n in archive.namelist() if "/data/ferrule/" in n]
        library = archive.extract(name, folder)
    done = subprocess.run(
        [str(folder / "main"), library, str(package)], capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, (done.returncode, done.stderr[-3000:])
    return done.stdout
