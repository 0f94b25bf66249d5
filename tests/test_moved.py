"""Names that files have: where modules were, in pickles and in digests of Python functions."""

from __future__ import annotations

import contextlib
import pickle
import subprocess
import sys
from collections.abc import Iterator
from importlib.util import find_spec

import pytest

import ferrule
from ferrule.operators import identity

# Digests of Python functions say these of what they name; another name is another op.
NAMED = {
    "CudaKernel": "ferrule.cuda_call:CudaKernel",
    "DictionaryKernel": "ferrule.dictionary_call:DictionaryKernel",
    "Dtype": "ferrule.dtypes:Dtype",
    "KernelError": "ferrule.errors:KernelError",
    "MetalKernel": "ferrule.call:MetalKernel",
    "Op": "ferrule.op_declaration:Op",
    "adopt": "ferrule.adopting:adopt",
    "check_grad": "ferrule.op_checks:check_grad",
    "compare": "ferrule.op_checks:compare",
    "cuda_body": "ferrule.cuda_parts:cuda_body",
    "cuda_copy": "ferrule.cuda_parts:cuda_copy",
    "cuda_fill": "ferrule.cuda_parts:cuda_fill",
    "cuda_kernel": "ferrule.cuda_call:cuda_kernel",
    "cuda_step": "ferrule.cuda_parts:cuda_step",
    "cuda_unit": "ferrule.cuda_parts:cuda_unit",
    "get_threads": "ferrule.binding:get_threads",
    "metal_kernel": "ferrule.call:metal_kernel",
    "op": "ferrule.op_declaration:op",
    "set_compiler": "ferrule.toolchain:set_compiler",
    "set_threads": "ferrule.binding:set_threads",
}
OF_TORCH = {
    "export_for": "ferrule.hosts.torch_export:export_for",
    "load": "ferrule.hosts.torch_export:load",
    "load_package": "ferrule.hosts.torch_package:load_package",
    "package": "ferrule.hosts.torch_package:package",
    "save": "ferrule.hosts.torch_export:save",
}
OF_MLX = {
    "import_function": "ferrule.hosts.mlx_import:import_function",
    "install_mlx": "ferrule.mlx_install:install_mlx",
}


@pytest.mark.parametrize("name", [*NAMED, *OF_TORCH, *OF_MLX])
def test_digests_name_things_as_ever(name: str) -> None:
    if name in OF_TORCH:
        pytest.importorskip("torch")
    if name in OF_MLX:
        pytest.importorskip("mlx.core")
    expected = {**NAMED, **OF_TORCH, **OF_MLX}[name]
    assert identity.by_name(getattr(ferrule, name)) == expected


def test_an_object_is_named_by_its_class_as_ever() -> None:
    kernel = ferrule.metal_kernel("k", ["x"], ["y"], "y[0] = x[0];")

    def run(x: object) -> object:
        return kernel

    found = identity._FunctionReader(None, run).value(kernel, "it", False)
    assert found[:2] == ["some", "ferrule.call.MetalKernel"]


@pytest.mark.parametrize("name", NAMED)
def test_pickles_from_before_are_read(name: str) -> None:
    module, _, attribute = NAMED[name].partition(":")
    pickled = f"c{module}\n{attribute}\n.".encode()  # protocol 0: a global
    assert pickle.loads(pickled) is getattr(ferrule, name)  # noqa: S301


def test_old_names_are_imported_in_a_new_process() -> None:
    """Nothing is imported for them before they are asked for what is there."""
    code = (
        "import sys, ferrule\n"
        "before = set(sys.modules)\n"
        "import ferrule.op_declaration as o, ferrule.call as c\n"
        "assert not hasattr(o, '__file__') and set(sys.modules) == before\n"
        "assert c.MetalKernel is ferrule.MetalKernel and o.op is ferrule.op\n"
        "from ferrule.call import metal_kernel\n"
        "assert metal_kernel is ferrule.metal_kernel\n"
        "try: from ferrule.call import nothing\n"
        "except ImportError: print('ok')\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("ok\n", 0), done.stderr


def test_whoever_looks_through_all_modules_needs_no_library() -> None:
    """As pickle does for what says no module of its own, in torch's compiler for one."""
    code = (
        "import sys; sys.modules['mlx'] = sys.modules['mlx.core'] = None; import ferrule\n"
        "print([n for n, m in list(sys.modules.items()) if hasattr(m, 'no_such_name')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.returncode) == ("[]\n", 0), done.stderr


def test_other_names_in_pickles_are_read() -> None:
    for module, name in (("devices", "Binary"), ("rule", "Rule"), ("rule", "Argument")):
        found = pickle.loads(f"cferrule.{module}\n{name}\n.".encode())  # noqa: S301
        assert found.__name__ == name
    assert find_spec("ferrule.call") is not None


@pytest.mark.filterwarnings("ignore::ferrule.FerruleWarning")  # of tests imported before
def test_what_stands_in_mlxs_place_is_named() -> None:
    """Not read as code, of which any change would make another op."""
    mx = pytest.importorskip("mlx.core")
    with installed():
        for function in (mx.fast.metal_kernel, mx.fast.cuda_kernel):
            reader = identity._FunctionReader(None, test_what_stands_in_mlxs_place_is_named)
            kind, name = reader.value(function, "it", False)
            assert kind == "name" and name.split(":")[1].endswith("_kernel")


@contextlib.contextmanager
def installed() -> Iterator[None]:
    ferrule.install_mlx()
    try:
        yield
    finally:
        ferrule.uninstall_mlx()
