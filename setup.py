"""Builds the C libraries where there is a C compiler, and writes the line that Python reads when it
starts. All else is in pyproject.toml.

FERRULE_PREBUILD_MLX names folders with a package ``mlx`` each (site-packages, or what `pip install
--target` has filled), separated as those of PATH are: a wheel then also holds the compiled nodes
for these versions of MLX.
"""

import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from hashlib import sha256
from pathlib import Path
from typing import Any

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

PACKAGE = Path("src", "ferrule")
FOLDER = PACKAGE / "runtime"


def alone(*path: str) -> Any:
    """A module of ferrule that needs neither its package nor other libraries."""
    spec = importlib.util.spec_from_file_location(path[-1], PACKAGE.joinpath(*path).resolve())
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


fastcall = alone("tools", "fastcall.py")
CALL_FILES = [FOLDER / name for name in fastcall.SOURCES]
TORCH_FILES = [FOLDER / name for name in fastcall.TORCH_SOURCES]
FILES = [FOLDER / name for name in fastcall.RUNTIME_SOURCES]


def digest(files: list[Path]) -> tuple[str, str]:
    """Built in: a library is used only while this is the digest of the sources beside it."""
    text = b"".join(file.read_bytes() for file in files)
    return "FR_DIGEST", f'"{sha256(text).hexdigest()}"'


# FERRULE_MLX=1 puts ferrule into MLX once a program imports that. It is asked for here, because
# importing a module to ask would cost every start of Python more than this line.
AT_START = (
    "import os; os.environ.get('FERRULE_MLX', '0') not in ('', '0') "
    "and __import__('_ferrule_mlx').when_imported()\n"
)


def prebuild(home: Path, package: Path) -> None:
    """Compile the nodes for the MLX in this folder into that folder of ferrule."""
    mlx = alone("hosts", "mlx", "sources.py")
    if not mlx.has_headers(home):
        sys.exit(f"FERRULE_PREBUILD_MLX: MLX's headers are not in {home / 'include'}")
    target = package / "prebuilt" / mlx.prebuilt(mlx.version(home)).name
    target.parent.mkdir(parents=True, exist_ok=True)
    command = [*shlex.split(os.environ.get("CXX", "c++")), "-shared", "-fPIC", *mlx.flags(home)]
    if sys.platform == "linux":  # else libraries of one process share variables of templates
        command += ["-fno-gnu-unique", "-s"]
    with tempfile.TemporaryDirectory() as folder:
        text = Path(folder, "nodes.cpp")
        text.write_text(mlx.text(home), encoding="utf-8")
        subprocess.run([*command, str(text), "-o", str(target)], check=True)
    # What loads MLX's own library must be able to load this one.
    if sys.platform == "linux":
        for name in ("GLIBC_2", "GLIBCXX_3.4"):
            needs, has = (newest(file, name) for file in (target, home / "lib" / "libmlx.so"))
            if needs > has:
                sys.exit(
                    f"FERRULE_PREBUILD_MLX: the nodes that {command[0]} built need {name}.{needs}, "
                    f"and MLX only {name}.{has}. Build the wheel on an older system."
                )


def newest(library: Path, name: str) -> int:
    """The newest version of some symbols, such as GLIBC_2.35, that a library needs."""
    found = re.findall(re.escape(name).encode() + rb"\.(\d+)", library.read_bytes())
    return max(map(int, found), default=0)


class BuildPy(build_py):
    """Adds ferrule-mlx.pth to site-packages, and nodes that are wanted ahead of time."""

    def run(self) -> None:
        super().run()
        folder = self.build_lib
        if self.editable_mode:
            folder = self.get_finalized_command("install").install_lib
        Path(folder).mkdir(parents=True, exist_ok=True)
        Path(folder, "ferrule-mlx.pth").write_text(AT_START, encoding="utf-8")
        if self.editable_mode:
            return
        earlier = Path(folder, "ferrule", "prebuilt")
        shutil.rmtree(earlier, ignore_errors=True)
        for place in filter(None, os.environ.get("FERRULE_PREBUILD_MLX", "").split(os.pathsep)):
            prebuild(Path(place, "mlx").resolve(), Path(folder, "ferrule"))


# The runtime knows nothing of Python, and the other library keeps to Python's stable interface, so
# one wheel serves every version.
ANY_VERSION = not sysconfig.get_config_var("Py_GIL_DISABLED")

setup(
    ext_modules=[
        Extension(
            "ferrule._runtime",
            [str(FOLDER / "runtime.c")],
            depends=[str(file) for file in FILES],
            define_macros=[digest(FILES)],
            extra_compile_args=["-std=c11", "-O2", "-fvisibility=hidden", "-pthread"],
            extra_link_args=["-pthread"],
            libraries=["m"],
            py_limited_api=ANY_VERSION,
            optional=True,
        ),
        Extension(
            "ferrule._torch_calls",
            [str(TORCH_FILES[0])],
            depends=[str(file) for file in TORCH_FILES],
            define_macros=[digest(TORCH_FILES)],
            # Errors are C++ exceptions of torch, which pass through these functions.
            extra_compile_args=["-std=gnu11", "-O2", "-fvisibility=hidden", "-fexceptions"],
            libraries=["m"],
            py_limited_api=ANY_VERSION,
            optional=True,
        ),
        *(
            [
                Extension(
                    "ferrule._fastcall",
                    [str(CALL_FILES[0])],
                    define_macros=[digest(CALL_FILES)],
                    depends=[str(file) for file in CALL_FILES],
                    extra_compile_args=["-std=c11", "-O2", "-fvisibility=hidden"],
                    libraries=["m"],
                    py_limited_api=True,
                    optional=True,
                )
            ]
            if ANY_VERSION
            else []
        ),
    ],
    cmdclass={"build_py": BuildPy},
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if ANY_VERSION else {},
)
