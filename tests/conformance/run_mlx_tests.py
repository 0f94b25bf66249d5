"""Runs MLX's own tests of custom Metal kernels and exported functions with ferrule in MLX.

Usage: python run_mlx_tests.py PATH, where PATH is the folder python/tests of a checkout of MLX.
The tests are skipped, while they are imported, unless Metal seems to be there.
"""

from __future__ import annotations

import importlib
import sys
import unittest

import mlx.core as mx

import ferrule

# module -> class, what the names of its tests begin with, how many there are at least. Left out are
# test_fast's test_cuda_kernel_*, which want an NVIDIA GPU under MLX itself, and its other tests,
# which have no custom kernels. run_mlx_quantized.py has test_quantized.
TESTS = {
    "test_fast": ("TestFast", ("test_custom_kernel", "test_custom_metal_kernel"), 9),
    "test_export_import": ("TestExportImport", ("test_",), 22),
    "test_compile": ("TestCompile", ("test_",), 60),
    "test_eval": ("TestEval", ("test_eval_exception_does_not_corrupt_state",), 1),
}


def main(folder: str) -> int:
    sys.path.insert(0, folder)
    ferrule.install_mlx()
    assert mx.metal.is_available()

    loader = unittest.TestLoader()
    suite = unittest.TestSuite()
    for module, (case, prefixes, least) in TESTS.items():
        cases = getattr(importlib.import_module(module), case)
        names = [n for n in loader.getTestCaseNames(cases) if n.startswith(prefixes)]
        if len(names) < least:
            print(f"{module}: found {names}, expected {least} tests or more.")
            return 1
        suite.addTests(map(cases, names))
    result = unittest.TextTestRunner(sys.stdout, verbosity=2).run(suite)
    return 0 if result.wasSuccessful() and not result.skipped else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
