"""The sources and flags of ferrule's part of MLX's graphs, for any MLX.

Users' machines compile it when it is first needed (`hosts.mlx.build`), setup.py ahead of time for
versions whose nodes are packed into a wheel; it reads this file alone, which imports no ferrule.
"""

from __future__ import annotations

import hashlib
import platform
import re
import sys
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[2] / "runtime"
PREBUILT = FOLDER.parent / "prebuilt"
SOURCES = (
    "mlx_node.cpp", "mlx_cpu.h", "mlx_cuda.h", "mlx_export.h", "mlx_nodes.h", "mlx_plan.h",
    "mlx_python.h", "mlx_matmul.cpp", "op_calls.h", "arithmetic.h", "arrays.h", "canary.h",
    "cpu_launch.h", "cuda_launch.h", "numbers.h", "rule.h", "runtime.h",
)  # fmt: skip
FLAGS = ("-std=c++20", "-O2", "-fvisibility=hidden", "-Wno-address")
OTHER_LIBRARY = "the C++ library is not that of MLX"
# The library is named before the text that needs it, which a linker may take for no need.
LINK = ("-lmlx",) if sys.platform == "darwin" else ("-Wl,--no-as-needed", "-lmlx", "-ldl")


def digest() -> str:
    """The SHA-256 of the sources."""
    return hashlib.sha256(b"".join((FOLDER / name).read_bytes() for name in SOURCES)).hexdigest()


def has_headers(home: Path) -> bool:
    """Whether the headers of MLX are in the folder of the package ``mlx``."""
    return (home / "include" / "mlx" / "array.h").is_file()


def text(home: Path) -> str:
    """The translation unit for the MLX in this folder."""
    return guarded(f'{_primitives(home)}\n#include "mlx_node.cpp"\n#include "mlx_matmul.cpp"\n')


def guarded(code: str) -> str:
    """C++ that a compiler with another C++ library than MLX's refuses."""
    return (
        "#include <cstddef>\n#if defined(_LIBCPP_VERSION) && !defined(__APPLE__)\n#error "
        f"{OTHER_LIBRARY}\n#else\n{code}#endif\n"
    )


def flags(home: Path) -> list[str]:
    """The compiler's flags for it, but for those that every shared library wants."""
    return [*FLAGS, f"-I{FOLDER}", f"-I{home / 'include'}", f"-L{home / 'lib'}", *LINK]


def _primitives(home: Path) -> str:
    """The classes of MLX's headers, for runtime/mlx_export.h."""
    entries = []
    for header, space in (("primitives.h", "core"), ("fast_primitives.h", "core::fast")):
        content = (home / "include" / "mlx" / header).read_text(encoding="utf-8")
        names = re.findall(r"^class (?:MLX_API )?(\w+)(?: final)? : public ", content, re.MULTILINE)
        entries += [f"X(mlx::{space}, {name})" for name in names]
    return f"#define FR_PRIMITIVES(X) {' '.join(entries)}"


def version(home: Path) -> str:
    """The version of the MLX in this folder, by its headers."""
    content = (home / "include" / "mlx" / "version.h").read_text(encoding="utf-8")
    numbers = dict(re.findall(r"^#define MLX_VERSION_(\w+) (\d+)$", content, re.MULTILINE))
    return ".".join(numbers[name] for name in ("MAJOR", "MINOR", "PATCH"))


def prebuilt(version: str) -> Path:
    """Where a wheel has the compiled nodes for a version of MLX, built of these sources."""
    return PREBUILT / f"mlx-{version}-{sys.platform}-{platform.machine()}-{digest()[:16]}.so"
