"""Builds the C runtime where there is a C compiler. All else is in pyproject.toml."""

import sysconfig
from hashlib import sha256
from pathlib import Path

from setuptools import Extension, setup

FOLDER = Path("src", "ferrule", "runtime")
FILES = sorted(FOLDER.glob("*.[ch]"))
# ferrule.binding uses the library only while this is the digest of the sources beside it.
DIGEST = sha256(b"".join(file.read_bytes() for file in FILES)).hexdigest()
# The library knows nothing of Python, so one wheel serves every version.
ANY_VERSION = not sysconfig.get_config_var("Py_GIL_DISABLED")

setup(
    ext_modules=[
        Extension(
            "ferrule._runtime",
            [str(FOLDER / "runtime.c")],
            depends=[str(file) for file in FILES],
            define_macros=[("FR_DIGEST", f'"{DIGEST}"')],
            extra_compile_args=["-std=c11", "-O2", "-fvisibility=hidden", "-pthread"],
            extra_link_args=["-pthread"],
            libraries=["m"],
            py_limited_api=ANY_VERSION,
            optional=True,
        )
    ],
    options={"bdist_wheel": {"py_limited_api": "cp310"}} if ANY_VERSION else {},
)
