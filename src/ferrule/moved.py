"""Where modules were whose names are in files: in pickles, and in digests of Python functions.

Both name a class or function by the module that defines it. What was written under these names is
read under them still, and digests go on with them.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# The modules of public names: as they are called now, and as they were when names were first kept.
_NOW = {
    "adopting": "operators.adopt",
    "binding": "tools.binding",
    "call": "kernels.call kernels.metal",
    "cuda_call": "kernels.cuda",
    "cuda_parts": "operators.unit_parts",
    "dictionary_call": "kernels.dictionary",
    "expression": "rules.expression",
    "hosts.mlx_import": "hosts.mlx.reading",
    "hosts.mlx_matmul": "hosts.mlx.matmul",
    "hosts.torch_export": "hosts.torch.export",
    "hosts.torch_package": "hosts.torch.package",
    "mlx_install": "hosts.mlx.install",
    "op_checks": "operators.compare operators.gradcheck",
    "op_declaration": "operators.op operators.declaration",
    "rule": "rules.rule rules.argument rules.parser",
    "toolchain": "tools.toolchain",
}
_WAS = {
    f"ferrule.{module}": f"ferrule.{was}" for was, now in _NOW.items() for module in now.split()
}
_WAS["ferrule.devices.protocol"] = "ferrule.devices"  # a folder, which finds it itself


def was(module: str) -> str:
    """What a module of ferrule is called in files; another's name as it is."""
    return _WAS.get(module, module)


class _Moved(ModuleType):
    """Stands for modules of now where pickles look for the one that was."""

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):  # which what goes through all modules asks for
            for now in _NOW[self.__name__.removeprefix("ferrule.")].split():
                try:
                    module = importlib.import_module(f"ferrule.{now}")
                except ImportError as error:  # MLX or torch is not here; pickle goes on looking
                    raise AttributeError(f"{self.__name__}.{name}: {error}") from error
                if hasattr(module, name):
                    return getattr(module, name)
        raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")


def stand_in() -> None:
    """Have imports by the old names find what is there now."""
    for name in _NOW:
        module = _Moved(f"ferrule.{name}")
        module.__spec__ = ModuleSpec(module.__name__, None)
        sys.modules.setdefault(module.__name__, module)
