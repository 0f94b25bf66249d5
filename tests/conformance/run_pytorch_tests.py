"""Runs PyTorch's own tests of operators, with ops of ferrule in place of torch's.

Usage: python run_pytorch_tests.py PART PATH, where PATH is a checkout of PyTorch, of the version
that is installed or near it, and PART one of `PARTS`. Nothing of it is built: its tests are read.

A part is a module ``pytorch_<part>`` with

* ``FILE``: the tests, from the checkout's root;
* ``LEFT_OUT``: patterns of the names of tests that ops of ferrule have no part in, and why;
* ``LEAST``: how many tests have to pass at least, where there is no GPU;
* ``load(folder)``: imports the file, with ops of ferrule where torch's were, and returns the tests
  to run and the names of all that it holds, both as ``Class.test``;
* ``context()``: what is in place while they run.
"""

from __future__ import annotations

import importlib
import sys
import unittest
import warnings
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

PARTS = ("functorch", "custom_ops", "stable_abi", "aot_inductor", "sharding")


class Result(unittest.TextTestResult):
    """Counts what passed."""

    passed = 0

    def addSuccess(self, test: Any) -> None:
        super().addSuccess(test)
        self.passed += 1


def main(name: str, checkout: str) -> int:
    sys.path.insert(0, str(Path(__file__).parents[1]))  # the ops that all tests share
    warnings.simplefilter("ignore")  # torch's own, and that a batch is done call by call
    part = importlib.import_module(f"pytorch_{name}")
    path = Path(checkout, part.FILE)
    if not path.is_file():
        print(f"{path} is not there: expected a checkout of PyTorch.")
        return 1
    sys.path.insert(0, str(path.parent))
    tests, names = part.load(path)

    def known(one: str) -> bool:
        return any(fnmatch(one, pattern) for pattern in part.LEFT_OUT)

    both = sorted(one for one in tests if known(one))
    if both:
        print(f"to be run, and left out, too: {', '.join(both)}")
        return 1
    absent = sorted(
        pattern for pattern in part.LEFT_OUT if not any(fnmatch(n, pattern) for n in names)
    )
    if absent:
        print(f"left out, but not in this checkout: {', '.join(absent)}")
    new = sorted(one for one in names if one not in tests and not known(one))
    if new:
        print(f"in this checkout, but neither run nor left out: {', '.join(new)}")
    with part.context():
        runner = unittest.TextTestRunner(sys.stdout, verbosity=2, resultclass=Result)
        result = runner.run(unittest.TestSuite(tests.values()))
    print(f"{result.passed} of {len(tests)} passed, {len(result.skipped)} skipped")
    if result.passed < part.LEAST:
        print(f"expected {part.LEAST} or more to pass")
        return 1
    return 0 if result.wasSuccessful() else 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
