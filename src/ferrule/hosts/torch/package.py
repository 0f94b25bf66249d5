"""Packages of AOTInductor that hold ops, and run without ferrule: in Python, and in C++ without it.

A package is AOTInductor's own file, whose graph calls ops by name; beside that lies a library
(``operators.package``, ``packaged/ops.h``) which defines those ops when it is loaded, kernels
included. There an op's name carries a digest of its machine code as well as that of its content, so
two packages have an op of the same name only where it is the same in both; either may define it.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import math
import os
import re
import tempfile
import threading
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from ... import dtypes
from ...devices import protocol as devices
from ...errors import CompilerFailed, KernelError, KernelTypeError, ToolchainError
from ...operators import package as package_text
from ...operators.bodies import KernelBody
from ...operators.expressions import bound_dtype
from ...operators.file import full_name
from ...operators.op import Op
from ...operators.package import PackagedOp, Special
from ...operators.unit_steps import CudaUnit
from ...rules.expression import Expression
from ...rules.rule import Binding
from ...spec import MAX_THREADS, Input, Launch, Spec, clamped
from ...tools import toolchain
from .export import ops_of
from .schema import schema

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_MEMBER = re.compile(r"/data/ferrule/ops-([0-9a-f]{64})\.so$")
_FLAGS = ("-O2", "-fexceptions", "-fvisibility=hidden", "-pthread", "-w")
_SCHEMA = "1"  # raised when the same tables would make another library

_loaded: dict[str, ctypes.CDLL] = {}
_lock = threading.Lock()


def package(
    program: ExportedProgram,
    path: str | os.PathLike[str],
    *,
    architectures: Sequence[str] | None = None,
    options: Mapping[str, Any] | None = None,
) -> str:
    """Compile an exported program with AOTInductor to a package that needs no ferrule.

    It has the machine code of the kernels for the dtypes and ranks in the graph, and for every
    size: of the processor here, or of NVIDIA GPUs.

    Args:
        program: what is packaged.
        path: where to; ends in ``.pt2``.
        architectures: for a graph on NVIDIA GPUs those that it is to run on, such as
            ``["sm_80", "sm_90"]``; by default that of the GPU here.
        options: settings of inductor, as ``aoti_compile_and_package`` has them.

    Returns:
        The path.

    Raises:
        KernelError: an op has no kernel for the graph's device, such as one that only a Python
            function carries out; or depends on a size in a way that needs a compiler at run time;
            or has something that no package can hand over; says what.
        CompileError, DialectError, ToolchainError, DeviceError: a kernel cannot be compiled.
    """
    import torch

    path = os.fspath(path)
    if not isinstance(program, torch.export.ExportedProgram):
        raise KernelTypeError(
            f"package: got a {type(program).__name__}, expected what torch.export.export gives."
        )
    if not path.endswith(".pt2"):
        raise KernelError(f"package: got the path {path!r}, expected one that ends in '.pt2'.")
    packaged = _packaged(program, architectures)
    library = _library(packaged) if packaged else None
    by_name = {full_name(p.op): p for p in packaged}
    _compile(program, by_name, path, {**(options or {}), "aot_inductor.package": True})
    if library is not None:
        with zipfile.ZipFile(path, "a", zipfile.ZIP_STORED) as archive:
            root = archive.namelist()[0].partition("/")[0]
            digest = hashlib.sha256(library).hexdigest()
            archive.writestr(f"{root}/data/ferrule/ops-{digest}.so", library)
    return path


def load_package(path: str | os.PathLike[str], **more: Any) -> Any:
    """Load a package, after the library in it; both run what they hold.

    Args:
        path: what `package` wrote.
        more: what else ``torch._inductor.aoti_load_package`` takes.

    Returns:
        What ``torch._inductor.aoti_load_package`` returns: the model, a callable.

    Raises:
        KernelError: the file is damaged.
        ToolchainError: the system refuses the library: it was made for another one, or for another
            version of torch's C interface.
    """
    import torch

    path = os.fspath(path)
    try:
        with zipfile.ZipFile(path) as archive:
            for name in archive.namelist():
                match = _MEMBER.search(name)
                if match is not None:
                    _load(archive.read(name), match[1], path)
    except (zipfile.BadZipFile, EOFError) as error:
        raise KernelError(f"load_package: {path!r} is damaged: {error}.") from None
    return torch._inductor.aoti_load_package(path, **more)


def _load(library: bytes, digest: str, path: str) -> None:
    """Load the library of a package, once per process."""
    if hashlib.sha256(library).hexdigest() != digest:
        raise KernelError(
            f"load_package: the library of ops in {path!r} was altered; it is not loaded."
        )
    with _lock:
        if digest in _loaded:
            return
        with tempfile.TemporaryDirectory(prefix="ferrule-") as folder:  # mode 0700
            library_path = os.path.join(folder, f"ops-{digest}.so")
            with open(library_path, "wb") as library_file:
                library_file.write(library)
            try:
                _loaded[digest] = ctypes.CDLL(library_path, mode=os.RTLD_NOW | os.RTLD_GLOBAL)
            except OSError as error:
                raise ToolchainError(
                    f"load_package: the library of ops in {path!r} cannot be loaded: {error}."
                ) from None


class _OpCall(NamedTuple):
    """How a graph calls an op.

    Attributes:
        arrays: per input of the op, the tensor without values; None where it has none.
        numbers: the numbers that the rule's expressions may name.
    """

    op: Op
    arrays: tuple[Any, ...]
    numbers: dict[str, Any]


def _packaged(program: ExportedProgram, architectures: Sequence[str] | None) -> list[PackagedOp]:
    """Compile the ops of a graph for all of its calls."""
    by_op: dict[str, list[_OpCall]] = {}
    for call in _calls(program):
        by_op.setdefault(full_name(call.op), []).append(call)
    return [_packaged_op(calls, architectures) for calls in by_op.values()]


def _calls(program: ExportedProgram) -> Iterator[_OpCall]:
    """The calls of ops in a graph and the graphs in it."""
    import torch

    ops = ops_of(program)
    called: set[str] = set()
    for module in program.graph_module.modules():
        if not isinstance(module, torch.fx.GraphModule):
            continue
        for node in module.graph.nodes:
            name = _op_name(node.target)
            arguments: dict[str, Any] = {}
            if name in ops:
                input_names = [parameter.name for parameter in ops[name].rule.inputs]
                arguments = {**dict(zip(input_names, node.args, strict=False)), **node.kwargs}
                arguments = torch.fx.node.map_arg(arguments, lambda n: n.meta["val"])
            elif node.target is _functionalized():
                name = _op_name(node.args[0])
                if name not in ops:
                    continue
                arguments = _functionalized_arguments(node)
            else:
                continue
            called.add(name)
            op = ops[name]
            for parameter in op.rule.inputs:
                value = arguments.get(parameter.name)
                if type(value) is float and not math.isfinite(value):
                    raise KernelError(
                        f"package: the graph calls op {op.name!r} with {parameter.name!r} = "
                        f"{value}, and packages of AOTInductor hold finite numbers alone; declare "
                        f"an array, {parameter.name}[]:{parameter.dtype}, or let the body make the "
                        "number."
                    )
            inputs = op.rule.inputs
            arrays = [None if p.dims is None else arguments.get(p.name) for p in inputs]
            yield _OpCall(op, tuple(arrays), {n: arguments[n] for n in op.rule.numbers})
    for name in set(ops) - called:
        raise KernelError(
            f"package: the graph calls the op 'ferrule::{name}' through an operator that a package "
            "does not take, as run_decompositions may leave it; package the program that "
            "torch.export.export gave."
        )


def _functionalized() -> Any:
    """The operator that stands for a call of an op that writes in place, after decompositions.

    Its first version, which torch can be told to use, is not taken: where two views of one tensor
    are written, inductor of torch 2.13 leaves memory of which nobody wrote anything.
    """
    import torch

    return torch.ops.higher_order.auto_functionalized_v2


def _functionalized_arguments(node: Any) -> dict[str, Any]:
    """The inputs of an op that `auto_functionalized_v2` calls, by their names.

    It names not what is written, but of what that is a view, and how.
    """
    import torch
    from torch._higher_order_ops import auto_functionalize

    arguments: dict[str, Any] = dict(torch.fx.node.map_arg(node.kwargs, lambda n: n.meta["val"]))
    bases = arguments.pop("_all_bases")
    written = auto_functionalize.get_mutable_args(node.args[0])
    views = auto_functionalize.read_view_information_from_args(*written, arguments, bases)
    for name, view in views.items():
        arguments[name] = None if view is None else view.regenerate_view(bases)
    return arguments


def _op_name(target: Any) -> str:
    import torch

    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "ferrule":
        return ""
    return str(target._schema.name.split("::")[1].removesuffix("_raw"))


def _packaged_op(calls: list[_OpCall], architectures: Sequence[str] | None) -> PackagedOp:
    op = calls[0].op
    types = {array.device.type for call in calls for array in call.arrays if array is not None}
    if types not in ({"cpu"}, {"cuda"}):
        raise KernelError(
            f"package: the graph calls op {op.name!r} on {' and '.join(sorted(types))}; expected "
            "all on the CPU, or all on NVIDIA GPUs."
        )
    cuda = types == {"cuda"}
    bodies: list[KernelBody | CudaUnit] = []
    for body in op.implementations:
        if isinstance(body, (KernelBody, CudaUnit)) and (cuda or body.kind == "metal"):
            bodies.append(body)
            if body.when is None:
                break
    if not bodies:
        kinds = ", ".join(repr(body.kind) for body in op.implementations)
        place = "NVIDIA GPUs" if cuda else "the CPU"
        raise KernelError(
            f"package: op {op.name!r} has no kernel for {place}, but {kinds}. A package cannot "
            "hold a Python function; give the op a `metal` body, or save the program with "
            "ferrule.save, and load it where Python is."
        )
    compiled = []
    for body in bodies:
        specials: dict[object, Special] = {}
        for call in calls:
            special = _special(op, body, call, cuda, architectures)
            # Of calls that differ in sizes alone the first says for which there is a fast code.
            specials.setdefault(special._replace(codes=()), special)
        compiled.append((body, tuple(specials.values())))
    digest = _digest(op, compiled)
    return PackagedOp(f"{full_name(op)}_{digest}", schema(op), op, cuda, tuple(compiled))


def _special(
    op: Op, body: KernelBody | CudaUnit, call: _OpCall, cuda: bool,
    architectures: Sequence[str] | None,
) -> Special:  # fmt: skip
    """Compile a body for one call of the graph: its dtypes, ranks and template, and its code."""
    from .sizes import SymInts

    input_dtypes = tuple(None if array is None else dtypes.of(array.dtype) for array in call.arrays)
    shapes = [
        () if parameter.dims is None else None if array is None else tuple(array.shape)
        for parameter, array in zip(op.rule.inputs, call.arrays, strict=True)
    ]
    dtype_names = [None if dtype is None else dtype.name for dtype in input_dtypes]
    binding = op.rule.bind(op.name, shapes, dtype_names, SymInts, call.numbers)
    # Which GPU it will be is not known. Conditions and grids may depend on that all the same.
    binding.device = lambda: {":device": "cuda" if cuda else "cpu"}
    outputs = tuple(dtypes.BY_NAME[n] for _, n in op.rule.results(op.name, binding, SymInts))
    package_text.check(op, body, outputs)

    def number(expression: Expression) -> int:
        return _fixed(op, body, expression, binding)

    template = body.template_for(binding, number)
    values = tuple(number(e) for _, e in body.template if isinstance(e, Expression))
    ndims = tuple(
        len(parameter.dims or ()) if shape is None else len(shape)
        for parameter, shape in zip(op.rule.inputs, shapes, strict=True)
    )
    targets = (architectures or [_architecture()]) if cuda else []
    if isinstance(body, CudaUnit):
        unit = body.spec(template)
        codes = tuple(devices.packaged_unit(target, unit) for target in targets)
        special = Special(unit, input_dtypes, ndims, outputs, values, codes)
        return package_text.with_arrays(op, body, special, binding)
    inputs = [
        # As in a call: what is declared with dims is indexed, also where *S stands for none.
        Input(bound_dtype(p.dtype, binding), max(ndim, bool(p.dims)), value=cuda and p.dims is None)
        for p, ndim in zip(op.rule.inputs, ndims, strict=True)
        if not p.mutable
    ]
    inputs += [Input(dtypes.int32, 0, value=cuda)] * len(body.dims)
    written = [bound_dtype(p.dtype, binding) for p in op.rule.inputs if p.mutable]
    spec = Spec(body.kernel, tuple(inputs), (*outputs, *written), template)
    example = _example(op, body, shapes, dtype_names, call.numbers)
    if cuda:
        most = _most_threads(body)
        codes = tuple(
            code for target in targets for code in devices.get(target).packaged(spec, example, most)
        )
    else:
        codes = devices.get("cpu").packaged(spec, example, MAX_THREADS)
    return Special(spec, input_dtypes, ndims, outputs, values, codes)


def _fixed(op: Op, body: KernelBody | CudaUnit, expression: Expression, binding: Binding) -> int:
    """The value of a template's expression, which must be the same in all calls."""
    from .sizes import SymInts, dynamic_template, fixed

    size = fixed(op.rule.value(op.name, expression, binding, SymInts))
    if size is None:
        name = next(name for name, value in body.template if value == expression)
        raise KernelError(dynamic_template(op, body, name, expression, binding))
    return size


def _example(
    op: Op,
    body: KernelBody,
    shapes: Sequence[Any],
    names: Sequence[str | None],
    numbers: Mapping[str, Any],
) -> Launch | None:
    """The launch for the sizes that a graph was traced with, where they are known."""

    def hint(size: Any) -> int:
        number = size if isinstance(size, int) else size.node.hint
        if not isinstance(number, int):
            raise LookupError
        return number

    try:
        sizes = [None if shape is None else tuple(map(hint, shape)) for shape in shapes]
        known = {name: hint(value) for name, value in numbers.items()}
        binding = op.rule.bind(op.name, sizes, names, numbers=known)
        op.rule.results(op.name, binding)
        config = body.launch_for(binding)
    except (LookupError, KernelError):  # the sizes are said at run time
        return None
    if 0 in config.grid:
        return None
    return Launch(config.grid, clamped(config.threadgroup, config.grid), (), None, ())


def _most_threads(body: KernelBody) -> int:
    """The number of threads that a threadgroup of a body may have."""
    if not all(axis.constant for axis in body.threadgroup):
        return MAX_THREADS
    return math.prod(int(axis.evaluate({})) for axis in body.threadgroup)


def _architecture() -> str:
    """The architecture of the current GPU."""
    import torch

    return "sm_{}{}".format(*torch.cuda.get_device_capability())


def _digest(op: Op, compiled: Sequence[tuple[KernelBody | CudaUnit, tuple[Special, ...]]]) -> str:
    """The digest, in 16 hexadecimal digits, of all that decides what an op does in a package."""
    digest = hashlib.sha256(f"{_SCHEMA}{op.digest}{_sources()}".encode())
    for body, specials in compiled:
        digest.update(f"{body.kind}{len(specials)}".encode())
        for special in specials:
            without_code = special._replace(spec=None, codes=())  # type: ignore[arg-type]
            digest.update(repr(without_code).encode())
            for code in special.codes:
                digest.update(repr(code._replace(payload=b"")).encode())
                digest.update(hashlib.sha256(code.payload).digest())
    return digest.hexdigest()[:16]


def _sources() -> str:
    """The digest of the C texts that are the same in every package."""
    files = [path for folder in package_text.INCLUDES for path in sorted(folder.glob("*.[ch]"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()


def _library(packaged: Sequence[PackagedOp]) -> bytes:
    """The library that defines the ops."""
    import torch

    compiler = toolchain.find_compiler()
    torch_cpu = os.path.join(os.path.dirname(torch.__file__), "lib", "libtorch_cpu.so")
    flags = [*_FLAGS, *(f"-I{folder}" for folder in package_text.INCLUDES)]
    # Needed by name, so that its symbols are found although Python loads torch for itself alone.
    flags += ["-Wl,--no-as-needed", torch_cpu, "-ldl", "-lm"]
    try:
        return compiler.compile(package_text.text(packaged), flags=flags)
    except CompilerFailed as failed:
        raise ToolchainError(
            f"{compiler.path} ({compiler.kind} {compiler.version}) cannot build the library of a "
            f"package:\n{failed.log}"
        ) from failed


def _compile(
    program: ExportedProgram, packaged: Mapping[str, PackagedOp], path: str, options: dict[str, Any]
) -> None:
    """Have AOTInductor write the package, whose ops have their names there."""
    import torch
    from torch.export.pt2_archive._package import package_pt2

    if program.example_inputs is None:
        raise KernelError(
            "package: the program has no example inputs, which AOTInductor wants; export it again."
        )
    args, kwargs = program.example_inputs
    module = program.module(check_guards=False)
    with _renamed(packaged) as overloads:

        def renamed(target: Any) -> Any:
            return overloads.get(_op_name(target), target)

        for submodule in module.modules():
            if isinstance(submodule, torch.fx.GraphModule):
                for node in submodule.graph.nodes:
                    node.target = renamed(node.target)
                    if node.target is _functionalized():
                        node.args = (renamed(node.args[0]), *node.args[1:])
                submodule.recompile()
        with torch.no_grad():
            files = torch._inductor.aot_compile(module, args, kwargs, options=options)
    package_pt2(path, aoti_files={"model": files})


@contextlib.contextmanager
def _renamed(packaged: Mapping[str, PackagedOp]) -> Iterator[dict[str, Any]]:
    """Twins of ops under the names that they have in a package, while it is made."""
    import torch

    from .op import NAMESPACE, registered

    overloads: dict[str, Any] = {}
    with torch.library._scoped_library(NAMESPACE, "FRAGMENT") as library:
        for name, packaged_op in packaged.items():
            torch_op = registered(name)
            if torch_op is None:  # cannot be: the graph has it
                raise KernelError(f"package: torch has no op 'ferrule::{name}'.")
            qualified = f"{NAMESPACE}::{packaged_op.name}"
            if not torch._C._jit_get_schemas_for_operator(qualified):  # no loaded package has it
                tags = torch_op.overload.tags
                library.define(f"{packaged_op.name}{packaged_op.schema}", tags=tags)
                for key in ("CPU", "CUDA"):
                    library.impl(packaged_op.name, torch_op.run, key)
            torch.library.register_fake(qualified, torch_op.fake, lib=library)
            overloads[name] = getattr(getattr(torch.ops, NAMESPACE), packaged_op.name).default
        yield overloads
