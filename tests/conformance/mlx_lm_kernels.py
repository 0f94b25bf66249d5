"""The kernels of the installed mlx-lm, imported unmodified as on a Mac, made by ferrule.

mlx-lm makes its kernels while it is imported and where Metal is there, so the import runs with
`mx.metal.is_available`, `mx.default_device` and `mx.fast.metal_kernel` replaced. They are put
back at once; `MlxLm.metal` replaces them again for a call that asks which way to take.
"""

from __future__ import annotations

import ast
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any

import mlx.core as mx
import pytest

import ferrule

covered: set[str] = set()


def covers(*names: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Mark a test that runs exactly these kernels, none on fibers, and fail it if it does not."""

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        covered.update(names)

        @functools.wraps(test)
        def run(*args: Any, lm: MlxLm, **kwargs: Any) -> None:
            lm.ran.clear()
            test(*args, lm=lm, **kwargs)
            assert set(lm.ran) == set(names)
            assert not any(mode.startswith("fibers") for mode in lm.ran.values()), lm.ran

        return run

    return decorate


class MlxLm:
    """mlx-lm with its kernels.

    Attributes:
        sites: where its text makes a kernel: file in the package, line.
        reached: the sites that made a kernel during the import.
        made: the names of the kernels, and the file of each.
        ran: the names of the kernels that were called, and how the CPU ran the first call.
    """

    def __init__(self) -> None:
        spec = importlib.util.find_spec("mlx_lm")
        assert spec is not None and spec.origin is not None
        self.folder = Path(spec.origin).parent
        self.sites: set[tuple[str, int]] = set()
        self.reached: set[tuple[str, int]] = set()
        self.made: dict[str, str] = {}
        self.ran: dict[str, str] = {}
        self._modules: dict[str, ModuleType] = {}
        for path in sorted(self.folder.rglob("*.py")):
            text = path.read_text(encoding="utf-8")
            if "metal_kernel" in text:
                self._find(path, text)
        self._import()

    def __getattr__(self, name: str) -> ModuleType:
        """A module by the last part of its name, as in ``lm.rwkv7``."""
        try:
            return self._modules[name]
        except KeyError:
            raise AttributeError(name) from None

    def _find(self, path: Path, text: str) -> None:
        file = path.relative_to(self.folder).as_posix()
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func).endswith("metal_kernel"):
                self.sites.add((file, node.lineno))

    def _import(self) -> None:
        def ours() -> list[str]:
            return [n for n in sys.modules if n == "mlx_lm" or n.startswith("mlx_lm.")]

        before = {n: sys.modules.pop(n) for n in ours()}
        try:
            with self.metal():
                for file in sorted({file for file, _ in self.sites}):
                    parts = Path(file).with_suffix("").parts
                    name = ".".join(("mlx_lm", *parts))
                    self._modules[parts[-1]] = importlib.import_module(name)
        finally:
            for n in ours():
                del sys.modules[n]
            sys.modules.update(before)

    def _make(self, name: str, *args: Any, **kwargs: Any) -> Callable[..., Any]:
        """In place of `mx.fast.metal_kernel`."""
        caller = sys._getframe(1)
        file = Path(caller.f_code.co_filename)
        if file.is_relative_to(self.folder):
            site = file.relative_to(self.folder).as_posix()
            self.made[name] = site
            lines = [line for at, line in self.sites if at == site and line <= caller.f_lineno]
            self.reached.add((site, max(lines)))
        kernel = ferrule.metal_kernel(name, *args, **kwargs)

        def call(**arguments: Any) -> Any:
            outputs = kernel(**arguments)
            if name not in self.ran:
                self.ran[name] = kernel.compile("cpu", **arguments).mode  # from the cache
            return outputs

        return call

    @contextmanager
    def metal(self) -> Iterator[None]:
        """mlx-lm takes this machine for a Mac."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(mx.metal, "is_available", lambda: True)
            patch.setattr(mx, "default_device", lambda: mx.gpu)
            patch.setattr(mx.fast, "metal_kernel", self._make)
            yield
