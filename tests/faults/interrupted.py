"""Driver: compiles with the compiler of argument 1 and waits to be interrupted."""

from __future__ import annotations

import sys
import tempfile

from ferrule.tools import toolchain

if __name__ == "__main__":
    tempfile.tempdir = sys.argv[2]
    compiler = toolchain.find_compiler(sys.argv[1])
    try:
        compiler.compile("int f() { return 1; }", timeout=100)
    except KeyboardInterrupt:
        print("interrupted")
