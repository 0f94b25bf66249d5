"""ferrule: GPU kernels written by hand, at home in NumPy, PyTorch and MLX, on any machine.

Importing this module imports NumPy, and nothing else of weight.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

from .call import MetalKernel, metal_kernel
from .cuda_call import CudaKernel, cuda_kernel
from .dictionary_call import DictionaryKernel
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

if TYPE_CHECKING:
    from . import mlx as mlx
    from .adopting import adopt as adopt
    from .binding import get_threads as get_threads
    from .binding import set_threads as set_threads
    from .cuda_parts import cuda_body as cuda_body
    from .cuda_parts import cuda_copy as cuda_copy
    from .cuda_parts import cuda_fill as cuda_fill
    from .cuda_parts import cuda_step as cuda_step
    from .cuda_parts import cuda_unit as cuda_unit
    from .hosts.mlx_import import import_function as import_function
    from .hosts.torch_export import export_for as export_for
    from .hosts.torch_export import load as load
    from .hosts.torch_export import save as save
    from .hosts.torch_package import load_package as load_package
    from .hosts.torch_package import package as package
    from .mlx_install import install_mlx as install_mlx
    from .mlx_install import uninstall_mlx as uninstall_mlx
    from .op_checks import check_grad as check_grad
    from .op_checks import compare as compare
    from .op_declaration import Op as Op
    from .op_declaration import op as op
    from .toolchain import set_compiler as set_compiler

# Loaded when first used: they need ctypes, compilers, the C runtime, or a parser of rules.
_LAZY = {
    **dict.fromkeys(("Op", "op"), "op_declaration"),
    **dict.fromkeys(("check_grad", "compare"), "op_checks"),
    **dict.fromkeys(
        ("cuda_body", "cuda_copy", "cuda_fill", "cuda_step", "cuda_unit"), "cuda_parts"
    ),
    **dict.fromkeys(("get_threads", "set_threads"), "binding"),
    **dict.fromkeys(("export_for", "load", "save"), "hosts.torch_export"),
    **dict.fromkeys(("load_package", "package"), "hosts.torch_package"),
    **dict.fromkeys(("install_mlx", "uninstall_mlx"), "mlx_install"),
    "import_function": "hosts.mlx_import", "adopt": "adopting", "set_compiler": "toolchain",
}  # fmt: skip

__all__ = [
    "CacheWarning",
    "CompileError",
    "CudaKernel",
    "DeviceError",
    "DialectError",
    "DictionaryKernel",
    "Dtype",
    "FerruleError",
    "FerruleWarning",
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
    "compare",
    "complex64",
    "cuda_body",
    "cuda_copy",
    "cuda_fill",
    "cuda_kernel",
    "cuda_step",
    "cuda_unit",
    "export_for",
    "float8_e4m3fn",
    "float8_e5m2",
    "float8_e8m0fnu",
    "float16",
    "float32",
    "float64",
    "get_threads",
    "import_function",
    "install_mlx",
    "int8",
    "int16",
    "int32",
    "int64",
    "load",
    "load_package",
    "metal_kernel",
    "op",
    "package",
    "save",
    "set_compiler",
    "set_threads",
    "uint8",
    "uint16",
    "uint32",
    "uint64",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name != "mlx" and name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        module = importlib.import_module(f".{_LAZY.get(name, name)}", __name__)
    except ModuleNotFoundError as error:
        if not (error.name or "").startswith("mlx"):
            raise
        raise ModuleNotFoundError(
            f"ferrule.{name} needs MLX, which is not installed here: pip install 'mlx[cpu]' on "
            "Linux, or 'mlx[cuda13]' for NVIDIA GPUs; mlx on a Mac.", name=error.name
        ) from None  # fmt: skip
    if name != "mlx":
        globals()[name] = getattr(module, name)
    return module if name == "mlx" else globals()[name]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
