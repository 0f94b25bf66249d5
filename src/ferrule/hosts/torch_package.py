"""Packages of AOTInductor that hold ops, and run without ferrule: in Python, and in C++ without it.

A package is AOTInductor's own file, whose graph calls ops by name; beside that lies a library
(``package_text``, ``packaged/ops.h``) which defines those ops when it is loaded, kernels included.
In a package an op's name carries a digest of its machine code as well as that of its content. So
two packages have an op of the same name only where it is the same in both, and either may define
it.
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

from .. import dtypes, op_unit, package_text, toolchain
from ..cuda_steps import CudaUnit, Filled, Scratch
from ..devices import package_code
from ..dtypes import Dtype
from ..errors import CompilerFailed, KernelError, KernelTypeError, ToolchainError
from ..expression import Expression
from ..implementation import KernelBody, template_values
from ..op_declaration import Op
from ..op_file import full_name
from ..package_text import PackagedOp, Special
from ..rule import Argument, Binding
from ..spec import MAX_THREADS, Input, Launch, Spec
from .torch_export import ops_of

if TYPE_CHECKING:
    from torch.export import ExportedProgram

_MEMBER = re.compile(r"/data/ferrule/ops-([0-9a-f]{64})\.so$")
_FLAGS = ("-O2", "-fexceptions", "-fvisibility=hidden", "-pthread", "-w")
_SCHEMA = "1"  # raised when the same tables would make another library

_loaded: dict[str, ctypes.CDLL] = {}
_lock = threading.Lock()


def package(
    program: ExportedProgram, path: str | os.PathLike[str], *,
    architectures: Sequence[str] | None = None, options: Mapping[str, Any] | None = None,
) -> str:  # fmt: skip
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
    _compile(program, {full_name(one.op): one for one in packaged}, path, dict(options or {}))
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
                found = _MEMBER.search(name)
                if found is not None:
                    _load(archive.read(name), found[1], path)
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
            file = os.path.join(folder, f"ops-{digest}.so")
            with open(file, "wb") as opened:
                opened.write(library)
            try:
                _loaded[digest] = ctypes.CDLL(file, mode=os.RTLD_NOW | os.RTLD_GLOBAL)
            except OSError as error:
                raise ToolchainError(
                    f"load_package: the library of ops in {path!r} cannot be loaded: {error}."
                ) from None


class _Call(NamedTuple):
    """How a graph calls an op.

    Attributes:
        arrays: per input of the op, the tensor without values; None where it has none.
    """

    op: Op
    arrays: tuple[Any, ...]


def _packaged(program: ExportedProgram, architectures: Sequence[str] | None) -> list[PackagedOp]:
    """The ops of a graph with all that its calls need."""
    by_op: dict[str, list[_Call]] = {}
    for call in _calls(program):
        by_op.setdefault(full_name(call.op), []).append(call)
    return [_packaged_op(calls, architectures) for calls in by_op.values()]


def _calls(program: ExportedProgram) -> Iterator[_Call]:
    """The calls of ops in a graph and the graphs in it."""
    import torch

    ops = ops_of(program)
    found: set[str] = set()
    for module in program.graph_module.modules():
        if not isinstance(module, torch.fx.GraphModule):
            continue
        for node in module.graph.nodes:
            name = _op_name(node.target)
            given: dict[str, Any] = {}
            if name in ops:
                names = [one.name for one in ops[name].rule.inputs]
                given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
                given = torch.fx.node.map_arg(given, lambda one: one.meta["val"])
            elif node.target is _functionalized():
                name = _op_name(node.args[0])
                if name not in ops:
                    continue
                given = _given_to_functionalized(node)
            else:
                continue
            found.add(name)
            op = ops[name]
            for one in op.rule.inputs:
                value = given.get(one.name)
                if type(value) is float and not math.isfinite(value):
                    raise KernelError(
                        f"package: the graph calls op {op.name!r} with {one.name!r} = {value}, and "
                        "packages of AOTInductor hold finite numbers alone; declare an array, "
                        f"{one.name}[]:{one.dtype}, or let the body make the number."
                    )
            inputs = op.rule.inputs
            arrays = [None if one.dims is None else given.get(one.name) for one in inputs]
            yield _Call(op, tuple(arrays))
    for name in set(ops) - found:
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


def _given_to_functionalized(node: Any) -> dict[str, Any]:
    """The inputs of an op that `auto_functionalized_v2` calls, by their names.

    It names not what is written, but of what that is a view, and how.
    """
    import torch
    from torch._higher_order_ops import auto_functionalize

    given: dict[str, Any] = dict(torch.fx.node.map_arg(node.kwargs, lambda one: one.meta["val"]))
    bases = given.pop("_all_bases")
    written = auto_functionalize.get_mutable_args(node.args[0])
    views = auto_functionalize.read_view_information_from_args(*written, given, bases)
    for name, view in views.items():
        given[name] = None if view is None else view.regenerate_view(bases)
    return given


def _op_name(target: Any) -> str:
    import torch

    if not isinstance(target, torch._ops.OpOverload) or target.namespace != "ferrule":
        return ""
    return str(target._schema.name.split("::")[1].removesuffix("_raw"))


def _packaged_op(calls: list[_Call], architectures: Sequence[str] | None) -> PackagedOp:
    from .torch_op import schema

    op = calls[0].op
    devices = {one.device.type for call in calls for one in call.arrays if one is not None}
    if devices not in ({"cpu"}, {"cuda"}):
        raise KernelError(
            f"package: the graph calls op {op.name!r} on {' and '.join(sorted(devices))}; expected "
            "all on the CPU, or all on NVIDIA GPUs."
        )
    cuda = devices == {"cuda"}
    bodies: list[KernelBody | CudaUnit] = []
    for one in op.implementations:
        if isinstance(one, (KernelBody, CudaUnit)) and (cuda or one.kind == "metal"):
            bodies.append(one)
            if one.when is None:
                break
    if not bodies:
        kinds = ", ".join(repr(one.kind) for one in op.implementations)
        where = "NVIDIA GPUs" if cuda else "the CPU"
        raise KernelError(
            f"package: op {op.name!r} has no kernel for {where}, but {kinds}. A package cannot "
            "hold a Python function; give the op a `metal` body, or save the program with "
            "ferrule.save, and load it where Python is."
        )
    made = []
    for body in bodies:
        found: dict[object, Special] = {}
        for call in calls:
            special = _special(op, body, call, cuda, architectures)
            # Of calls that differ in sizes alone the first says for which there is a fast code.
            found.setdefault(special._replace(codes=()), special)
        made.append((body, tuple(found.values())))
    digest = _digest(op, made)
    return PackagedOp(f"{full_name(op)}_{digest}", schema(op), op, cuda, tuple(made))


def _special(
    op: Op, body: KernelBody | CudaUnit, call: _Call, cuda: bool,
    architectures: Sequence[str] | None,
) -> Special:  # fmt: skip
    """What a body must be compiled for, for one call of the graph, and the machine code."""
    from .torch_sizes import SymInts

    kinds = tuple(None if a is None else _dtype(op, a) for a in call.arrays)
    shapes = [
        () if one.dims is None else None if a is None else tuple(a.shape)
        for one, a in zip(op.rule.inputs, call.arrays, strict=True)
    ]
    names = [None if kind is None else kind.name for kind in kinds]
    said = op.rule.bind(op.name, shapes, names, SymInts)
    outputs = tuple(dtypes.BY_NAME[n] for _, n in op.rule.results(op.name, said, SymInts))
    package_text.check(op, body, outputs)
    template = template_values(
        op.name, op.rule, body.template, said, lambda one: _fixed(op, body, one, said)
    )
    values = tuple(_fixed(op, body, e, said) for _, e in body.template if isinstance(e, Expression))
    ndims = tuple(
        len(one.dims or ()) if shape is None else len(shape)
        for one, shape in zip(op.rule.inputs, shapes, strict=True)
    )
    targets = (architectures or [_architecture()]) if cuda else []
    if isinstance(body, CudaUnit):
        unit = body.spec(template)
        codes = tuple(package_code.for_unit(unit, one) for one in targets)
        special = Special(unit, kinds, ndims, outputs, values, codes)
        return _with_arrays(op, body, special, said)
    inputs = [
        # As in op_launch: what is declared with dims is indexed, also where *S stands for none.
        Input(_known(one, said), max(ndim, bool(one.dims)), value=cuda and one.dims is None)
        for one, ndim in zip(op.rule.inputs, ndims, strict=True)
        if not one.mutable
    ]
    inputs += [Input(dtypes.int32, 0, value=cuda)] * len(body.dims)
    written = [_known(one, said) for one in op.rule.inputs if one.mutable]
    spec = Spec(body.kernel, tuple(inputs), (*outputs, *written), template)
    example = _example(op, body, shapes, names)
    if cuda:
        most = _most_threads(body)
        codes = tuple(
            code for one in targets for code in package_code.for_cuda(spec, example, one, most)
        )
    else:
        codes = package_code.for_cpu(spec, example)
    return Special(spec, kinds, ndims, outputs, values, codes)


def _with_arrays(op: Op, unit: CudaUnit, special: Special, said: Binding) -> Special:
    """With the dtypes of a unit's scratch, and what its steps fill arrays with."""
    scratch = tuple(_known(one, said) for one in unit.scratch)
    kinds = dict(zip((one.name for one in op.rule.outputs), special.outputs, strict=True))
    kinds.update((one.name, _known(one, said)) for one in op.rule.inputs if one.mutable)
    kinds.update((one.name, kind) for one, kind in zip(unit.scratch, scratch, strict=True))
    patterns = tuple(
        op_unit.pattern(op.name, step, kinds[step.array]) if isinstance(step, Filled) else None
        for step in unit.steps
    )
    return special._replace(scratch=scratch, patterns=patterns)


def _known(one: Argument | Scratch, said: Binding) -> Dtype:
    """The dtype of an array or number in a call."""
    return dtypes.BY_NAME[said.dtypes.get(one.dtype, one.dtype)]


def _dtype(op: Op, array: Any) -> Dtype:
    return dtypes.of(array.dtype)


def _fixed(op: Op, body: KernelBody | CudaUnit, one: Expression, said: Binding) -> int:
    """An expression of a template, which must be the same in all calls."""
    from .torch_sizes import SymInts, dynamic_template, fixed

    value = fixed(op.rule.value(op.name, one, said, SymInts))
    if value is None:
        name = next(name for name, given in body.template if given == one)
        raise KernelError(dynamic_template(op, body, name, one, said))
    return value


def _example(
    op: Op, body: KernelBody, shapes: Sequence[Any], names: Sequence[str | None]
) -> Launch | None:
    """The launch for the sizes that a graph was traced with, where they are known."""

    def hint(size: Any) -> int:
        found = size if isinstance(size, int) else size.node.hint
        if not isinstance(found, int):
            raise LookupError
        return found

    try:
        sizes = [None if shape is None else tuple(map(hint, shape)) for shape in shapes]
        said = op.rule.bind(op.name, sizes, names)
        op.rule.results(op.name, said)
        sent = body.sent(said)
    except (LookupError, KernelError):  # the sizes are said at run time
        return None
    if 0 in sent.grid:
        return None
    x, y, z = (min(a, b) for a, b in zip(sent.threadgroup, sent.grid, strict=True))
    return Launch(sent.grid, (x, y, z), (), None, ())


def _most_threads(body: KernelBody) -> int:
    """How many threads a threadgroup of a body may have."""
    threads = 1
    for axis in body.threadgroup:
        if axis.names or axis.arrays:
            return MAX_THREADS
        threads *= int(axis.evaluate({}))
    return threads


def _architecture() -> str:
    """Of the GPU that is current."""
    import torch

    major, minor = torch.cuda.get_device_capability()
    return f"sm_{major}{minor}"


def _digest(op: Op, made: Sequence[tuple[KernelBody | CudaUnit, tuple[Special, ...]]]) -> str:
    """16 hexadecimal digits of all that decides what the op does in a package."""
    found = hashlib.sha256(f"{_SCHEMA}{op.digest}{_sources()}".encode())
    for body, specials in made:
        found.update(f"{body.kind}{len(specials)}".encode())
        for one in specials:
            found.update(repr(one._replace(spec=None, codes=())).encode())  # type: ignore[arg-type]
            for code in one.codes:
                found.update(repr(code._replace(payload=b"")).encode())
                found.update(hashlib.sha256(code.payload).digest())
    return found.hexdigest()[:16]


def _sources() -> str:
    """The digest of the C texts that are the same in every package."""
    files = [one for folder in package_text.INCLUDES for one in sorted(folder.glob("*.[ch]"))]
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
    program: ExportedProgram, packaged: Mapping[str, PackagedOp], path: str,
    options: dict[str, Any],
) -> None:  # fmt: skip
    """Have AOTInductor write the package, with the ops' names there."""
    import torch
    from torch.export.pt2_archive._package import package_pt2

    if program.example_inputs is None:
        raise KernelError(
            "package: the program has no example inputs, which AOTInductor wants; export it again."
        )
    args, kwargs = program.example_inputs
    module = program.module(check_guards=False)
    with _renamed(packaged) as overloads:

        def renamed(one: Any) -> Any:
            return overloads.get(_op_name(one), one)

        for one in module.modules():
            if isinstance(one, torch.fx.GraphModule):
                for node in one.graph.nodes:
                    node.target = renamed(node.target)
                    if node.target is _functionalized():
                        node.args = (renamed(node.args[0]), *node.args[1:])
                one.recompile()
        with torch.no_grad():
            files = torch._inductor.aot_compile(
                module, args, kwargs, options={**options, "aot_inductor.package": True}
            )
    package_pt2(path, aoti_files={"model": files})


@contextlib.contextmanager
def _renamed(packaged: Mapping[str, PackagedOp]) -> Iterator[dict[str, Any]]:
    """Twins of ops under the names that they have in a package, while it is made."""
    import torch

    from .torch_op import NAMESPACE, registered

    found: dict[str, Any] = {}
    with torch.library._scoped_library(NAMESPACE, "FRAGMENT") as library:
        for name, one in packaged.items():
            known = registered(name)
            if known is None:  # cannot be: the graph has it
                raise KernelError(f"package: torch has no op 'ferrule::{name}'.")
            qualified = f"{NAMESPACE}::{one.name}"
            if not torch._C._jit_get_schemas_for_operator(qualified):  # no loaded package has it
                library.define(f"{one.name}{one.schema}", tags=known.overload.tags)
                for key in ("CPU", "CUDA"):
                    library.impl(one.name, known.run, key)
            torch.library.register_fake(qualified, known.fake, lib=library)
            found[name] = getattr(getattr(torch.ops, NAMESPACE), one.name).default
        yield found
