"""Exported graphs that hold ops: saved with them, read in any process, made for other devices.

torch.export writes an op by its name alone. `save` puts what the ops are beside the graph, in the
same file, and `load` defines them before torch reads the graph. The name of an op carries the
digest of its content, so that neither can change without the other.
"""

from __future__ import annotations

import copy
import os
import re
import zipfile
from collections.abc import Iterator, Mapping
from typing import IO, TYPE_CHECKING, Any

from ...errors import KernelError, KernelTypeError
from ...operators import file as op_file
from ...operators.op import Op

if TYPE_CHECKING:
    from torch.export import ExportedProgram

File = str | os.PathLike[str] | IO[bytes]

MEMBER = "ferrule.json"  # torch puts it at <name of the archive>/extra/
_NAMED = re.compile(rb"torch\.ops\.ferrule\.(\w+?)(?:_raw)?\.default")


def save(
    program: ExportedProgram,
    file: File,
    *,
    extra_files: Mapping[str, str] | None = None,
    **more: Any,
) -> None:
    """Write an exported program and the ops in it, as ``torch.export.save`` does.

    Args:
        program: what ``torch.export.export`` gave.
        file: a path, or a binary file.
        extra_files: texts to be kept beside it, by their names.
        more: what else ``torch.export.save`` takes.

    Raises:
        KernelTypeError: ``program`` is no exported program.
        KernelError: its graph has an op that is not defined in this process.
    """
    import torch

    if not isinstance(program, torch.export.ExportedProgram):
        raise KernelTypeError(
            f"save: got a {type(program).__name__}, expected what torch.export.export gives."
        )
    files = dict(extra_files or {})
    if MEMBER in files:
        raise KernelError(f"save: `extra_files` has {MEMBER!r}, where ferrule writes ops.")
    files[MEMBER] = op_file.write(ops_of(program).values())
    torch.export.save(program, _torch_file(file), extra_files=files, **more)


def load(file: File, *, extra_files: dict[str, Any] | None = None, **more: Any) -> ExportedProgram:
    """Read what `save` wrote; the ops in it are defined in this process.

    An op that is defined already stays as it is. Python functions are in no file: an op that
    nothing else carries out must be defined before; derivative rules that are functions are there
    as soon as the same op is defined, before or after.

    Args:
        file: a path, or a binary file that can be read from any place.
        extra_files: as ``torch.export.load`` has it: its values are replaced by what was kept.
        more: what else ``torch.export.load`` takes.

    Raises:
        KernelError: the file is damaged, or lacks an op; an op's content was altered since it was
            saved; an op that only a Python function carries out is not defined.
        RuleError: the ops in it are damaged, or were written by another ferrule.
    """
    import torch

    from .op import TorchOp

    named, text = _members(file)
    ops = {} if text is None else op_file.read(text)
    for op in ops.values():
        TorchOp(op)
    for name in sorted(named - set(ops)):
        if not hasattr(torch.ops.ferrule, name):  # of ferrule, or of a package
            reason = (
                f"was not written by ferrule.save (it has no extra/{MEMBER})"
                if text is None
                else f"does not say what that is (in extra/{MEMBER})"
            )
            raise KernelError(
                f"load: the graph in {_file_name(file)} has the op 'ferrule::{name}', and the file "
                f"{reason}. Write it with ferrule.save, or import what defines the op first."
            )
    if extra_files is not None:
        more["extra_files"] = extra_files
    program: ExportedProgram = torch.export.load(_torch_file(file), **more)
    return program


def export_for(
    device: str,
    model: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None = None,
    *,
    dynamic_shapes: Any = None,
    strict: bool = False,
) -> ExportedProgram:
    """Export a model for a device that this machine need not have.

    The graph says ``device`` wherever the model and its arguments lie; its weights are the model's
    own, where they are. In the process that runs it, bring ``program.module()`` to the device.

    Args:
        device: where the graph is to run, such as ``"cuda"``.
        model: a ``torch.nn.Module``.
        args, kwargs, dynamic_shapes, strict: as ``torch.export.export`` has them.

    Raises:
        KernelError: a tensor of the model is none of its parameters, buffers or attributes, so that
            it is not known what stands for it.
    """
    import torch
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import ShapeEnv
    from torch.utils import _pytree as pytree

    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    twins: dict[int, Any] = {}  # of tensors, by their id

    def twin(tensor: Any) -> Any:
        """A tensor like another, on the device, without values."""
        if not isinstance(tensor, torch.Tensor):
            return tensor
        if id(tensor) not in twins:
            shape, strides = tensor.shape, tensor.stride()
            fake = torch.empty_strided(shape, strides, dtype=tensor.dtype, device=device)
            # A gradient's accumulator would want a build of torch for the device.
            parameter = isinstance(tensor, torch.nn.Parameter)
            twins[id(tensor)] = torch.nn.Parameter(fake, False) if parameter else fake
        return twins[id(tensor)]

    real = dict(_tensors(model))
    with mode:
        fake_inputs = pytree.tree_map(twin, (args, kwargs or {}))
        for tensor in real.values():
            twin(tensor)
    fake_model = copy.deepcopy(model, dict(twins))
    with mode:
        program: ExportedProgram = torch.export.export(
            fake_model, *fake_inputs, dynamic_shapes=dynamic_shapes, strict=strict
        )
    for table in (program.state_dict, program.constants):
        for name, tensor in table.items():
            if name in real:
                table[name] = real[name]
            elif isinstance(tensor, FakeTensor):
                raise KernelError(
                    f"export_for: the graph reads a tensor, there called {name!r}, of shape "
                    f"{tuple(tensor.shape)}, which is no parameter, buffer or attribute of a "
                    "module; make it a buffer (register_buffer)."
                )
    program._example_inputs = (args, kwargs or {})
    return program


def ops_of(program: ExportedProgram) -> dict[str, Op]:
    """The ops in a graph and the graphs in it, by ``<name>_<digest>``.

    Raises:
        KernelError: one of them is not defined in this process.
    """
    from .op import registered

    ops: dict[str, Op] = {}
    for name in _names(program):
        torch_op = registered(name)
        if torch_op is None:
            raise KernelError(
                f"the graph has the op 'ferrule::{name}', which ferrule has not defined in this "
                "process; import what defines it first."
            )
        ops[name] = torch_op.op
    return ops


def _names(program: ExportedProgram) -> Iterator[str]:
    """The ops in a graph, as targets, and as arguments of what calls them."""
    import torch
    from torch.fx.node import map_aggregate

    names: dict[str, None] = {}

    def see(value: Any) -> Any:
        if isinstance(value, torch._ops.OpOverload) and value.namespace == "ferrule":
            names[value._schema.name.split("::")[1].removesuffix("_raw")] = None
        return value

    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                see(node.target)
                map_aggregate((node.args, node.kwargs), see)
    return iter(names)


def _tensors(model: Any) -> Iterator[tuple[str, Any]]:
    """The parameters, buffers and other tensors that a model's modules have, by their names."""
    import torch

    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)
    for path, module in model.named_modules(remove_duplicate=False):
        for name, value in vars(module).items():
            if isinstance(value, torch.Tensor):
                yield f"{path}.{name}".lstrip("."), value


def _members(file: File) -> tuple[set[str], str | None]:
    """The ops that a file's graphs name, and the text of `operators.file.write` in it."""
    start = None if isinstance(file, (str, os.PathLike)) else file.tell()
    try:
        with zipfile.ZipFile(file) as archive:
            texts = [n for n in archive.namelist() if n.endswith(f"/extra/{MEMBER}")]
            members = [n for n in archive.namelist() if re.search(r"/models/[^/]*\.json$", n)]
            graphs = map(archive.read, members)
            named = {name.decode() for graph in graphs for name in _NAMED.findall(graph)}
            text = archive.read(texts[0]).decode() if texts else None
    except (zipfile.BadZipFile, UnicodeDecodeError, EOFError) as error:
        raise KernelError(
            f"load: {_file_name(file)} is damaged, or was not written by ferrule.save: {error}."
        ) from None
    if start is not None:
        file.seek(start)  # type: ignore[union-attr]
    return named, text


def _torch_file(file: File) -> Any:
    return os.fspath(file) if isinstance(file, os.PathLike) else file


def _file_name(file: File) -> str:
    return repr(os.fspath(file)) if isinstance(file, (str, os.PathLike)) else "the file"
