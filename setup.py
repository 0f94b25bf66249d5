"""Builds the C libraries where there is a C compiler. All else is in pyproject.toml."""

import sysconfig
from hashlib import sha256
from pathlib import Path

from setuptools import Extension, setup

FOLDER = Path("src", "ferrule", "runtime")
CALLS = FOLDER / "fastcall.c"
FILES = sorted(file for file in FOLDER.glob("*.[ch]") if file != CALLS)


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
        *(
            [
                Extension(
                    "ferrule._fastcall",
                    [str(CALLS)],
                    define_macros=[digest([CALLS, FOLDER / "runtime.h"])],
                    depends=[str(FOLDER / "runtime.h")],
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
