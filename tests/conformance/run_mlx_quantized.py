"""Runs MLX's own tests of gathering and quantized products with `ferrule.mlx` in MLX's place.

Usage: python run_mlx_quantized.py PATH, where PATH is the folder python/tests of a checkout of MLX.
Tests that need a GPU are skipped there, as they are without ferrule.
"""

from __future__ import annotations

import importlib
import sys
import unittest

import mlx.core as mx

import ferrule.mlx

# module -> class, words in the names of its tests, how many there are at least
TESTS = {
    "test_quantized": ("TestQuantized", ("qmm", "qmv", "qvm", "gather", "mode", "throw"), 25),
    "test_compile": ("TestCompile", ("gather",), 3),
    "test_export_import": ("TestExportImport", ("quantized",), 1),
    "test_blas": ("TestBlas", ("gather",), 4),
}
# Of the GPU alone in MLX, or about functions that ferrule.mlx does not have.
MAY_SKIP = 4


def main(folder: str) -> int:
    sys.path.insert(0, folder)
    calls = dict.fromkeys(ferrule.mlx.__all__, 0)

    def counted(name: str) -> object:
        function = getattr(ferrule.mlx, name)

        def call(*args: object, **kwargs: object) -> object:
            calls[name] += 1
            return function(*args, **kwargs)

        return call

    for name in ferrule.mlx.__all__:
        setattr(mx, name, counted(name))

    loader = unittest.TestLoader()
    suite = unittest.TestSuite()
    for module, (case, words, least) in TESTS.items():
        cases = getattr(importlib.import_module(module), case)
        names = [n for n in loader.getTestCaseNames(cases) if any(word in n for word in words)]
        if len(names) < least:
            print(f"{module}: found {names}, expected {least} tests or more.")
            return 1
        suite.addTests(map(cases, names))
    result = unittest.TextTestRunner(sys.stdout, verbosity=2).run(suite)
    print(calls)
    good = result.wasSuccessful() and len(result.skipped) <= MAY_SKIP and all(calls.values())
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
