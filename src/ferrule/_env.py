"""The only place where ferrule reads environment variables.

Each variable has an argument or a function that does the same; ``ferrule doctor`` prints them.

==================  =====================================================================
FERRULE_CACHE_DIR   folder of the disk cache (``ferrule.cache.Cache(path)``)
FERRULE_CHECK       1, or a JSON file to write: kernels run checked (``ferrule.checking()``)
FERRULE_CXX         C++ compiler for the CPU (``ferrule.set_compiler(path)``)
FERRULE_DEBUG       1: kernels on the CPU are for a debugger (``ferrule.set_debug(True)``)
FERRULE_MLX         1: kernels of packages for MLX run (``ferrule.install_mlx()``)
FERRULE_ROBUST      0: no guards of accesses on GPUs (``ferrule.set_robust(False)``)
FERRULE_THREADS     threads that run CPU kernels (``ferrule.set_threads(n)``)
==================  =====================================================================

FERRULE_MLX is read when Python starts, by one line of text in site-packages (``setup.py`` writes
it), so that ferrule need not be imported to find it unset. NO_COLOR is everybody's: reports have no
colours then.
"""

from __future__ import annotations

import os
import sys

CACHE_DIR = "FERRULE_CACHE_DIR"
CHECK = "FERRULE_CHECK"
CXX = "FERRULE_CXX"
DEBUG = "FERRULE_DEBUG"
MLX = "FERRULE_MLX"
ROBUST = "FERRULE_ROBUST"
THREADS = "FERRULE_THREADS"
NAMES = (CACHE_DIR, CHECK, CXX, DEBUG, MLX, ROBUST, THREADS)


def get(name: str) -> str | None:
    """The value of one of ``NAMES``, or None where it is unset or empty."""
    if name not in NAMES:
        raise KeyError(name)
    return os.environ.get(name) or None


def checked() -> str | None:
    """What FERRULE_CHECK asks for: None for nothing, as ``0`` does."""
    setting = get(CHECK)
    return None if setting == "0" else setting


def no_color() -> bool:
    """Whether the user wants no colours."""
    return bool(os.environ.get("NO_COLOR"))


def install_mlx_in_children() -> None:
    """Have Pythons that this process starts install ferrule in MLX, as it has."""
    os.environ[MLX] = "1"


def search_path() -> str:
    """The folders that are searched for compilers."""
    return os.environ.get("PATH", os.defpath)


def child_environment() -> dict[str, str]:
    """The environment for a compiler: the caller's, with messages in English."""
    return {**os.environ, "LC_ALL": "C"}


def with_bytecode() -> dict[str, str]:
    """The environment for a Python that keeps the bytecode of what it imports, as pip does."""
    return {k: v for k, v in os.environ.items() if k != "PYTHONDONTWRITEBYTECODE"}


def user_cache_folder() -> str | None:
    """The user's folder for caches, by the XDG standard or macOS's; None without a home."""
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    if sys.platform != "darwin" and os.path.isabs(chosen):
        return chosen
    home = os.path.expanduser("~")
    if not os.path.isabs(home):
        return None
    return os.path.join(home, *(("Library", "Caches") if sys.platform == "darwin" else (".cache",)))


def cuda_homes() -> list[str]:
    """The folders that the user names as CUDA's."""
    return [home for name in ("CUDA_HOME", "CUDA_PATH") if (home := os.environ.get(name))]
