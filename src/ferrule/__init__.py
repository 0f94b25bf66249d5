"""ferrule: GPU kernels written by hand, at home in NumPy, PyTorch and MLX, on any machine.

Importing this module imports NumPy, and nothing else of weight.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

from . import _env as _environment
from . import moved as _moved
from . import registry as _registry
from .dtypes import (
    Dtype,
    bfloat16,
    bool_,
    complex64,
    float8_e4m3fn,
    float8_e5m2,
    float8_e8m0fnu,
    float16,
    float32,
    float64,
    int8,
    int16,
    int32,
    int64,
    uint8,
    uint16,
    uint32,
    uint64,
)
from .errors import (
    CacheWarning,
    CompileError,
    DeviceError,
    DialectError,
    FerruleError,
    FerruleWarning,
    KernelError,
    KernelTypeError,
    PortabilityWarning,
    RuleError,
    ToolchainError,
)
from .kernels.call import MetalKernel
from .kernels.cuda import CudaKernel, cuda_kernel
from .kernels.dictionary import DictionaryKernel
from .kernels.metal import metal_kernel

_registry.register(lambda: importlib.import_module(".ops", __name__))
_moved.stand_in()

if TYPE_CHECKING:
    from . import mlx as mlx
    from .check.checking import checking as checking
    from .check.fuzzing.fuzz import fuzz as fuzz
    from .check.proofs.prove import prove as prove
    from .check.reports.findings import Finding as Finding
    from .devices.cpu.debug import set_debug as set_debug
    from .devices.cuda.robust import set_robust as set_robust
    from .hosts.mlx.install import install_mlx as install_mlx
    from .hosts.mlx.install import uninstall_mlx as uninstall_mlx
    from .hosts.mlx.reading import import_function as import_function
    from .hosts.torch.export import export_for as export_for
    from .hosts.torch.export import load as load
    from .hosts.torch.export import save as save
    from .hosts.torch.package import load_package as load_package
    from .hosts.torch.package import package as package
    from .operators.adopt import adopt as adopt
    from .operators.choices import Choices as Choices
    from .operators.choices import choices as choices
    from .operators.choices import measure_choices as measure_choices
    from .operators.compare import compare as compare
    from .operators.conditional import metal_body as metal_body
    from .operators.conditional import run_function as run_function
    from .operators.declaration import op as op
    from .operators.family import Family as Family
    from .operators.family import family as family
    from .operators.gradcheck import check_grad as check_grad
    from .operators.op import Op as Op
    from .operators.unit_maps import cuda_tensor_map as cuda_tensor_map
    from .operators.unit_parts import cuda_body as cuda_body
    from .operators.unit_parts import cuda_copy as cuda_copy
    from .operators.unit_parts import cuda_fill as cuda_fill
    from .operators.unit_parts import cuda_matmul as cuda_matmul
    from .operators.unit_parts import cuda_step as cuda_step
    from .operators.unit_parts import cuda_unit as cuda_unit
    from .tools.binding import get_threads as get_threads
    from .tools.binding import set_threads as set_threads
    from .tools.printing import printing as printing
    from .tools.toolchain import set_compiler as set_compiler

# Loaded when first used: they need ctypes, compilers, the C runtime, or a parser of rules.
_MODULES = ("mlx", "ops")
_LAZY = {
    "Op": "operators.op",
    "op": "operators.declaration",
    "check_grad": "operators.gradcheck",
    **dict.fromkeys(("Choices", "choices", "measure_choices"), "operators.choices"),
    "compare": "operators.compare",
    **dict.fromkeys(("metal_body", "run_function"), "operators.conditional"),
    **dict.fromkeys(("Family", "family"), "operators.family"),
    "cuda_tensor_map": "operators.unit_maps",
    **dict.fromkeys(
        ("cuda_body", "cuda_copy", "cuda_fill", "cuda_matmul", "cuda_step", "cuda_unit"),
        "operators.unit_parts",
    ),
    **dict.fromkeys(("get_threads", "set_threads"), "tools.binding"),
    "printing": "tools.printing",
    **dict.fromkeys(("export_for", "load", "save"), "hosts.torch.export"),
    **dict.fromkeys(("load_package", "package"), "hosts.torch.package"),
    **dict.fromkeys(("install_mlx", "uninstall_mlx"), "hosts.mlx.install"),
    "import_function": "hosts.mlx.reading",
    "adopt": "operators.adopt",
    "set_compiler": "tools.toolchain",
    "checking": "check.checking",
    "Finding": "check.reports.findings",
    "set_debug": "devices.cpu.debug",
    "set_robust": "devices.cuda.robust",
    "fuzz": "check.fuzzing.fuzz",
    "prove": "check.proofs.prove",
}

__all__ = [
    "CacheWarning",
    "Choices",
    "CompileError",
    "CudaKernel",
    "DeviceError",
    "DialectError",
    "DictionaryKernel",
    "Dtype",
    "Family",
    "FerruleError",
    "FerruleWarning",
    "Finding",
    "KernelError",
    "KernelTypeError",
    "MetalKernel",
    "Op",
    "PortabilityWarning",
    "RuleError",
    "ToolchainError",
    "__version__",
    "adopt",
    "bfloat16",
    "bool_",
    "check_grad",
    "checking",
    "choices",
    "compare",
    "complex64",
    "cuda_body",
    "cuda_copy",
    "cuda_fill",
    "cuda_kernel",
    "cuda_matmul",
    "cuda_step",
    "cuda_tensor_map",
    "cuda_unit",
    "export_for",
    "family",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e8m0fnu",
    "float16",
    "float32",
    "float64",
    "fuzz",
    "get_threads",
    "import_function",
    "install_mlx",
    "int8",
    "int16",
    "int32",
    "int64",
    "load",
    "load_package",
    "measure_choices",
    "metal_body",
    "metal_kernel",
    "op",
    "package",
    "printing",
    "prove",
    "run_function",
    "save",
    "set_compiler",
    "set_debug",
    "set_robust",
    "set_threads",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES and name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f".{_LAZY.get(name, name)}", __name__)
    except ModuleNotFoundError as error:
        from .errors import without_mlx

        raise without_mlx(name, error) from None
    if name in _MODULES:
        return module
    globals()[name] = getattr(module, name)
    return globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if (_setting := _environment.checked()) is not None:
    importlib.import_module(".check.at_exit", __name__).start(_setting)
