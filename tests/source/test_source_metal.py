"""The Metal text is MLX's own: compared with the installed MLX, byte for byte.

MLX writes the text while it exports a graph, with or without a Metal device.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import mlx.core as mx
import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from ferrule import dtypes
from ferrule.dtypes import Dtype
from ferrule.kernel import ATTRIBUTES, MATH_MODES, Kernel
from ferrule.source.metal import text as metal
from ferrule.spec import Input, Shape, Spec, TemplateValue
from strategies import (
    IN_MLX,
    LEVEL0,
    identifiers,
    level0_dtypes,
    make_spec,
    shapes,
    template_values,
    texts,
)

Scalar = bool | int | float | complex


@dataclass(frozen=True)
class Call:
    """One call as both libraries see it: an input is a dtype with a shape, or a Python scalar."""

    kernel: Kernel
    inputs: tuple[tuple[Dtype, Shape] | Scalar, ...] = ()
    outputs: tuple[Dtype, ...] = (dtypes.float32,)
    template: tuple[tuple[str, TemplateValue], ...] = ()

    @property
    def spec(self) -> Spec:
        return make_spec(
            self.kernel,
            [a if isinstance(a, tuple) else (scalar_dtype(a), ()) for a in self.inputs],
            self.outputs,
            self.template,
        )


def scalar_dtype(value: Scalar) -> Dtype:
    if isinstance(value, bool):
        return dtypes.bool_
    if isinstance(value, int):
        return dtypes.int32 if -(2**31) <= value < 2**31 else dtypes.int64
    return dtypes.complex64 if isinstance(value, complex) else dtypes.float32


def mlx_dtype(dtype: Dtype) -> Any:
    return getattr(mx, "bool_" if dtype is dtypes.bool_ else dtype.name)


def from_mlx(call: Call, verbose: bool = False) -> tuple[str, str]:
    """The name and the text that MLX makes for ``call``."""
    kernel = call.kernel
    function: Any = mx.fast.metal_kernel(
        name=kernel.name,
        input_names=list(kernel.input_names),
        output_names=list(kernel.output_names),
        source=kernel.source,
        header=kernel.header,
        ensure_row_contiguous=kernel.ensure_row_contiguous,
        atomic_outputs=kernel.atomic_outputs,
        compile_options={"math_mode": kernel.math_mode},
    )
    inputs = [mx.zeros(a[1], mlx_dtype(a[0])) if isinstance(a, tuple) else a for a in call.inputs]
    template = [(n, mlx_dtype(v) if isinstance(v, Dtype) else v) for n, v in call.template]
    found: list[Sequence[Any]] = []

    def on_event(event: Mapping[str, Any]) -> None:
        if event["type"] == "primitive" and event["name"] == "CustomKernel":
            found.append(event["arguments"])

    mx.export_function(
        on_event,
        lambda _: function(
            inputs=inputs,
            template=template,
            grid=(1, 1, 1),
            threadgroup=(1, 1, 1),
            output_shapes=[(4,)] * len(call.outputs),
            output_dtypes=[mlx_dtype(d) for d in call.outputs],
            verbose=verbose,
        ),
        mx.zeros((1,)),
    )
    ((name, text, *_),) = found
    return name, text


def malformed_in_mlx(spec: Spec) -> bool:
    """Whether MLX ends the signature too early, as the docstring of `metal` tells."""
    kernel = spec.kernel
    extra = any(
        arg.ndim > 0 and any(kernel.wants(name))
        for name, arg in zip(kernel.input_names, spec.inputs, strict=True)
    )
    return extra and len(spec.outputs) > 1 and not kernel.attributes


def signature(spec: Spec, text: str) -> list[str]:
    """The lines of the arguments in ``text``, up to the body."""
    kernel = spec.kernel
    assert text.startswith(kernel.header)
    text = text.removeprefix(kernel.header)
    opening = f"[[kernel]] void {metal.kernel_name(spec)}(\n"
    head, found, rest = text.partition(opening)
    assert found
    assert head == "" or re.fullmatch(r"template <.*>\n", head)
    body = f"{kernel.source}\n}}\n"
    if spec.template:
        rest, _, instance = rest.rpartition("\ntemplate [[host_name(")
        assert instance
    assert rest.endswith(body)
    return rest.removesuffix(body).splitlines()


def assert_like_mlx(call: Call) -> None:
    spec = call.spec
    name, text = from_mlx(call)
    ours = metal.text(spec)
    assert metal.kernel_name(spec) == name
    if malformed_in_mlx(spec):
        assert ours != text
        mended = re.sub(r"\]\]\) \{\n(?=  device )", "]],\n", text)
        assert ours == mended
    else:
        assert ours == text
    lines = signature(spec, ours)
    assert all(line.endswith("]],") for line in lines[:-1])
    assert lines[-1].endswith("]]) {")
    buffers = [int(i) for line in lines for i in re.findall(r"\[\[buffer\((\d+)\)\]\]", line)]
    assert buffers == list(range(len(lines) - len(spec.kernel.attributes)))


def kernel_of(
    source: str = "", inputs: Sequence[str] = (), outputs: Sequence[str] = ("out",), **rest: Any
) -> Kernel:
    return Kernel("k", tuple(inputs), tuple(outputs), source, **rest)


@st.composite
def calls(draw: st.DrawFn) -> Call:
    # A `Kernel` is made without `make_kernel`: what it refuses still has a text.
    names = draw(st.lists(identifiers(), unique=True, min_size=1, max_size=9))
    cut = draw(st.integers(max(0, len(names) - 4), len(names) - 1))
    kernel = Kernel(
        name=draw(st.from_regex(r"[A-Za-z0-9_]{1,12}", fullmatch=True)),
        input_names=tuple(names[:cut]),
        output_names=tuple(names[cut:]),
        source=draw(texts(names)),
        header=draw(texts(names)),
        ensure_row_contiguous=draw(st.booleans()),
        atomic_outputs=draw(st.booleans()),
        math_mode=draw(st.sampled_from(MATH_MODES)),
    )
    scalars = st.one_of(
        st.booleans(),
        st.integers(-(2**63), 2**63 - 1),
        st.sampled_from([-(2**31) - 1, -(2**31), 2**31 - 1, 2**31]),
        st.floats(),
        st.complex_numbers(),
    )
    arrays = st.tuples(level0_dtypes(), shapes())
    return Call(
        kernel,
        tuple(draw(scalars if draw(st.integers(0, 4)) == 0 else arrays) for _ in range(cut)),
        tuple(draw(level0_dtypes()) for _ in names[cut:]),
        tuple(draw(st.lists(st.tuples(identifiers(), template_values()), max_size=4))),
    )


@settings(max_examples=400, deadline=None)
@given(calls())
def test_generated_calls(call: Call) -> None:
    event(f"malformed in MLX: {malformed_in_mlx(call.spec)}")
    event(f"attributes: {bool(call.kernel.attributes)}")
    assert_like_mlx(call)


@settings(max_examples=150, deadline=None)
@given(
    st.integers(1, 3),
    st.integers(2, 4),
    st.sets(st.sampled_from(["_shape", "_strides", "_ndim"])),
    st.sampled_from([(), (7,), (2, 4)]),
    st.booleans(),
)
def test_several_outputs_with_shape_arguments(
    inputs: int, outputs: int, suffixes: set[str], shape: Shape, attribute: bool
) -> None:
    words = [f"i0{s}" for s in sorted(suffixes)] + ["grid_size"] * attribute
    kernel = kernel_of(
        " ".join(words), [f"i{n}" for n in range(inputs)], [f"o{n}" for n in range(outputs)]
    )
    f32 = dtypes.float32
    assert_like_mlx(Call(kernel, ((f32, shape),) * inputs, (f32,) * outputs))


@pytest.mark.parametrize("dtype", IN_MLX, ids=repr)
def test_every_dtype(dtype: Dtype) -> None:
    template = (("T", dtype),)
    if dtype not in LEVEL0:
        assert_like_mlx(Call(kernel_of(), template=template))
        return
    for shape in [(), (0,), (1,), (7,), (8,), (2, 4), (0, 9)]:
        for atomic in (False, True):
            kernel = kernel_of("x_shape", ["x"], atomic_outputs=atomic)
            assert_like_mlx(Call(kernel, ((dtype, shape),), (dtype,), template))


@pytest.mark.parametrize("dtype", dtypes.FLOAT8, ids=repr)
def test_8_bit_floats_are_bytes(dtype: Dtype) -> None:
    def text_of(kind: Dtype) -> str:
        return metal.text(make_spec(kernel_of("", ["x"]), [(kind, (9,))], [kind], [("T", kind)]))

    assert text_of(dtype) == text_of(dtypes.uint8)


@pytest.mark.parametrize("attribute", ATTRIBUTES)
def test_every_attribute(attribute: str) -> None:
    for source in (attribute, f"// {attribute}", f"_{attribute}_", attribute[:-1], attribute[1:]):
        assert_like_mlx(Call(kernel_of(source)))
        assert_like_mlx(Call(kernel_of(header=source)))


def test_all_attributes_at_once() -> None:
    assert_like_mlx(Call(kernel_of(" ".join(reversed(ATTRIBUTES)))))


@pytest.mark.parametrize("value", [-3, -(2**31), 2**31 - 1, 0, True, False], ids=repr)
def test_template_values(value: TemplateValue) -> None:
    assert_like_mlx(Call(kernel_of(), template=(("N", value), ("M", value))))


def test_a_zero_d_input_is_small_whatever_the_spec_says() -> None:
    spec = make_spec(kernel_of("", ["x"]), [(dtypes.float32, ())])
    large = replace(spec, inputs=(Input(dtypes.float32, 0, small=False),))
    assert metal.text(large) == metal.text(spec)


def test_counts_that_differ_are_refused() -> None:
    spec = make_spec(kernel_of("", ["x"]), [(dtypes.float32, (8,))])
    with pytest.raises(ValueError, match="zip"):
        metal.text(replace(spec, inputs=()))
    with pytest.raises(ValueError, match="zip"):
        metal.text(replace(spec, outputs=(dtypes.float32,) * 2))


def test_mlx_still_ends_this_signature_too_early() -> None:
    f32 = dtypes.float32
    call = Call(kernel_of("x_shape", ["x"], ["a", "b"]), ((f32, (8,)),), (f32, f32))
    spec = call.spec
    _, theirs = from_mlx(call)
    assert signature(spec, theirs) == [
        "  const device float* x [[buffer(0)]],",
        "  const constant int* x_shape [[buffer(1)]],",
        "  device float* a [[buffer(2)]]) {",
        "  device float* b [[buffer(3)]]) {",
    ], "if MLX has mended it, drop `malformed_in_mlx` and the exception in metal's docstring"
    assert signature(spec, metal.text(spec)) == [
        "  const device float* x [[buffer(0)]],",
        "  const constant int* x_shape [[buffer(1)]],",
        "  device float* a [[buffer(2)]],",
        "  device float* b [[buffer(3)]]) {",
    ]


def test_verbose_text(capfd: pytest.CaptureFixture[str]) -> None:
    f32 = dtypes.float32
    for call in (
        Call(kernel_of()),
        Call(kernel_of("out[0] = x[0];\n", ["x"], header="// é\n"), ((f32, (8,)),)),
        Call(
            kernel_of("x_ndim thread_position_in_grid", ["x", "y"], ["a", "b"]),
            ((f32, (3, 4)), 2.0),
            (f32, dtypes.bool_),
            (("N", -3), ("T", dtypes.bfloat16), ("B", True)),
        ),
    ):
        capfd.readouterr()
        from_mlx(call, verbose=True)
        name, text = call.spec.kernel.name, metal.text(call.spec)
        expected = f"Generated source code for `{name}`:\n```\n{text}\n```\n"
        assert capfd.readouterr().out == expected


def test_make_spec_counts_elements() -> None:
    for shape in [(), (0,), (7,), (8,), (2, 2, 2), (0, 9)]:
        (arg,) = make_spec(kernel_of("", ["x"]), [(dtypes.int8, shape)]).inputs
        assert arg == Input(dtypes.int8, len(shape), math.prod(shape) < 8)
