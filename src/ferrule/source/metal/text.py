"""The Metal text of a kernel, byte for byte as MLX 0.32.4 writes it for `mx.fast.metal_kernel`.

Nothing here compiles or launches: the text goes to a host that has a Metal compiler, or to a
reader. MLX puts its own utility headers in front of it when it compiles; they are no part of it.

Differences from MLX
--------------------
One, where MLX's text cannot compile. After each output MLX decides between a comma and the end of
the signature by comparing the output's buffer index with the count of inputs and outputs, which
forgets the ``_shape``, ``_strides`` and ``_ndim`` buffers. A kernel with two or more outputs, at
least one such buffer and no thread attribute then gets a signature that ends too early::

    const constant int* x_shape [[buffer(1)]],
    device float* a [[buffer(2)]]) {
    device float* b [[buffer(3)]]) {

Here the line of ``a`` ends in a comma, and the rest is the same.

Text that the author's own names or header make illegal stays as MLX writes it: an input ``x_shape``
beside an ``x`` whose shape the body asks for, an argument named like a thread attribute, a header
whose last line is a comment or a directive without a line break.
"""

from __future__ import annotations

from ...dtypes import Dtype
from ...kernel import ATTRIBUTES
from ...spec import Spec, TemplateValue
from .. import PARTS, described


def kernel_name(spec: Spec) -> str:
    """The name of the function in the text of ``spec``.

    It tells apart the calls of one kernel by template values, dtypes, and whether an input is 0-d
    or small. It is no key for a cache: it leaves out the body, and ``1`` and ``True`` as template
    values give the same name.
    """
    name = f"custom_kernel_{spec.kernel.name}"
    if spec.template:
        # A minus sign cannot be in a name: -3 becomes _3.
        name += "__" + "_".join(_value(v) for _, v in spec.template).replace("-", "_")
    for input_ in spec.inputs:
        name += f"_{input_.dtype.metal}"
        if input_.ndim == 0:
            name += "s"
        elif input_.small:
            name += "c"
    for dtype in spec.outputs:
        name += f"_{dtype.metal}"
    return name


def text(spec: Spec, function: str = "") -> str:
    """The Metal source for ``spec``: header, template, signature, body, instantiation.

    ``function`` is what the function is called, `kernel_name` where it is empty. ``spec`` must have
    one input per input name, one dtype per output name, and template integers of 32 bits, as MLX
    demands of a call; a count that differs is a `ValueError`. A 0-d input is small, whatever
    ``spec`` says of it.
    """
    kernel = spec.kernel
    name = function or kernel_name(spec)
    head, tail = "", ""
    if spec.template:
        parameters = ", ".join(f"{_kind(v)} {n}" for n, v in spec.template)
        instance = f"{name}<{', '.join(_value(v) for _, v in spec.template)}>"
        head = f"template <{parameters}>\n"
        tail = f'\ntemplate [[host_name("{name}")]] [[kernel]] decltype({instance}) {instance};\n'
    arguments = ",\n".join(f"  {a}" for a in _arguments(spec))
    # No line break after the header: MLX adds none.
    signature = f"{head}[[kernel]] void {name}(\n{arguments}) {{\n"
    return f"{kernel.header}{signature}{kernel.source}\n}}\n{tail}"


def _arguments(spec: Spec) -> list[str]:
    """The declarations in the signature: inputs, outputs, thread attributes."""
    kernel = spec.kernel
    buffers: list[str] = []
    for name, input_, parts in described(spec):
        space = "constant" if input_.small or input_.ndim == 0 else "device"
        # Without dims it is a reference; it has no shape, so naming its shape adds nothing.
        buffers.append(f"const {space} {input_.dtype.metal}{'*' if input_.ndim else '&'} {name}")
        buffers += [f"const constant {PARTS[part]} {name}_{part}" for part in parts]
    for name, dtype in zip(kernel.output_names, spec.outputs, strict=True):
        element = f"atomic<{dtype.metal}>" if kernel.atomic_outputs else dtype.metal
        buffers.append(f"device {element}* {name}")
    return [f"{b} [[buffer({i})]]" for i, b in enumerate(buffers)] + [
        f"{ATTRIBUTES[a]} {a} [[{a}]]" for a in kernel.attributes
    ]


def _kind(value: TemplateValue) -> str:
    """How the template declares a parameter with this value."""
    if isinstance(value, Dtype):
        return "typename"
    return "bool" if isinstance(value, bool) else "int"


def _value(value: TemplateValue) -> str:
    """How the text spells a template value: a type, or an integer (0 or 1 for a bool)."""
    return value.metal if isinstance(value, Dtype) else str(int(value))
