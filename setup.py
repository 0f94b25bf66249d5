"""Builds the C libraries where there is a C compiler. All else is in pyproject.toml."""

import sysconfig
from hashlib import sha256
from pathlib import Path

from setuptools import Extension, setup

FOLDER = Path("src", "ferrule", "runtime")
CALL_FILES = [FOLDER / name for name in ("fastcall.c", "cuda_launch.h", "runtime.h")]
OP_FILES = ("arithmetic.h", "arrays.h", "cuda_launch.h", "rule.h", "runtime.h")
TORCH_FILES = [FOLDER / name for name in ("torch_calls.c", *OP_FILES)]
FILES = [FOLDER / name for name in ("faults.h", "platform.h", "runtime.c", "runtime.h")]


def digest(files: list[Path]) -> tuple[str, str]:
    """Built in: a library is used only while this is the digest of the sources beside it."""
    text = b"".join(file.read_bytes() for file in files)
    return "FR_DIGEST", f'"{sha256(text).hexdigest()}"'


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
                    py_limited_api=True,
                    optional=True,
                )
            ]
            if ANY_VERSION
            else []
        ),
    ],
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if ANY_VERSION else {},
)
