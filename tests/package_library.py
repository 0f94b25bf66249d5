"""The library of a package with some ops, made and loaded without AOTInductor.

On a GPU as it is; elsewhere on a driver whose GPUs are the host, and whose tensors are torch's on
the CPU.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import ferrule as fe
from ferrule import Op
from ferrule.hosts.torch import package as torch_package
from ferrule.operators import package as package_text
from ferrule.operators.file import full_name
from ferrule.operators.unit_steps import CudaUnit
from ferrule.tools import nvrtc

Dim = torch.export.Dim


def skip_unless_built(library: nvrtc.Nvrtc) -> None:
    """Skip where a library cannot be made: off Linux, or without CUDA's headers."""
    if sys.platform != "linux":
        pytest.skip("links torch as Linux does")
    try:
        nvrtc.find_headers(library)
    except fe.ToolchainError as missing:
        pytest.skip(str(missing))


# What stands in front of a library's text: its driver is the fake, its GPUs hold torch's tensors on
# the CPU, and instead of libtorch_cuda it asks what is here.
BEFORE = """
#include <dlfcn.h>
#include <stdint.h>
#include <string.h>

#define HERE __attribute__((visibility("protected"))) /* each library its own */
extern "C" {
struct TorchLibraryOpaque;
struct AtenTensorOpaque;
int32_t aoti_torch_library_init_impl(const char*, const char*, const char*, uint32_t,
                                     struct TorchLibraryOpaque**);
HERE int32_t here_gpu = 0, here_guards = 0;
static void* driver;
static int (*set_current)(void*);

static int32_t here_stream(int32_t device, void** stream) {
  *stream = (void*)(uintptr_t)(0x77 + device);
  return 0;
}
static int32_t here_device(int32_t* device) { *device = 0; return 0; }
static int32_t here_guard(int32_t device, void** guard) {
  here_guards++;
  *guard = driver;
  return set_current((void*)(uintptr_t)(0xc0 + device));
}
static int32_t here_leave(void* guard) {
  here_guards--;
  return guard == driver ? set_current((void*)(uintptr_t)0xc0) : 1;
}
static void* here_open(const char* name, int flags) {
  if (!strcmp(name, "libtorch_cuda.so")) return (void*)1;
  if (!strncmp(name, "libcublasLt.so", 14)) return dlopen(FAKE_CUBLAS, RTLD_NOW);
  if (strcmp(name, "libcuda.so.1")) return dlopen(name, flags);
  driver = dlopen(FAKE_DRIVER, RTLD_NOW);
  *(void**)&set_current = dlsym(driver, "cuCtxSetCurrent");
  return driver;
}
static void* here_find(void* library, const char* name) {
  if (library != (void*)1) return dlsym(library, name);
  return !strcmp(name, "aoti_torch_get_current_cuda_stream")    ? (void*)here_stream
         : !strcmp(name, "aoti_torch_get_current_device_index") ? (void*)here_device
         : !strcmp(name, "aoti_torch_create_device_guard")      ? (void*)here_guard
                                                                : (void*)here_leave;
}
int32_t here_implement(const char* ns, const char* key, const char* file, uint32_t line,
                       struct TorchLibraryOpaque** ret) {
  return aoti_torch_library_init_impl(ns, strcmp(key, "CUDA") ? key : "CPU", file, line, ret);
}
int32_t here_index(struct AtenTensorOpaque* tensor, int32_t* ret) {
  (void)tensor;
  *ret = here_gpu;
  return 0;
}
}
#define dlopen here_open
#define dlsym here_find
#define aoti_torch_device_type_cuda aoti_torch_device_type_cpu
#define aoti_torch_library_init_impl here_implement
#define aoti_torch_get_device_index here_index
"""


class Library:
    """The library of a package.

    Attributes:
        loaded: the library.
        overloads: its ops, by the names that they have outside of packages.
        symbols: per op what its units' functions are called in the machine code.
    """

    def __init__(
        self,
        ops: dict[Op, tuple[Any, ...]],
        driver: Path | None = None,
        cublas: Path = Path("/no/cublas"),
    ) -> None:
        """Exports a call of each op, all of whose dims are dynamic, for CUDA.

        Args:
            ops: with the inputs of a call each, on the CPU.
            driver, cublas: the fake ones; without a driver for the GPU here.
        """

        class Model(torch.nn.Module):
            def forward(self, *inputs: tuple[Any, ...]) -> Any:
                found = [op(*given) for op, given in zip(ops, inputs, strict=True)]
                return [one for one in found if one is not None]

        given = tuple(ops.values())
        shapes = torch.utils._pytree.tree_map(
            lambda one: dict.fromkeys(range(one.ndim), Dim.AUTO) if torch.is_tensor(one) else None,
            given,
        )
        program = fe.export_for("cuda", Model(), given, dynamic_shapes=(shapes,))
        packaged = torch_package._packaged(program, None if driver is None else ["sm_90"])
        real, before = package_text.text, ""
        if driver is not None:  # what torch has under these names must not be taken for the GPU's
            packaged = [one._replace(name=f"{one.name}_fake") for one in packaged]
            before = f'#define FAKE_DRIVER "{driver}"\n#define FAKE_CUBLAS "{cublas}"\n{BEFORE}'
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(package_text, "text", lambda given: before + real(given))
            made = torch_package._library(packaged)
        digest = torch_package.hashlib.sha256(made).hexdigest()
        torch_package._load(made, digest, "here")
        self.loaded = torch_package._loaded[digest]
        self.overloads = {
            full_name(one.op): getattr(torch.ops.ferrule, one.name).default for one in packaged
        }
        self.symbols = {
            full_name(one.op): [
                dict(zip(special.spec.functions, special.codes[0].symbols, strict=True))
                for body, specials in one.bodies
                if isinstance(body, CudaUnit)
                for special in specials
            ]
            for one in packaged
        }

    def __call__(self, op: Op, *values: Any) -> Any:
        return self.overloads[full_name(op)](*values)
