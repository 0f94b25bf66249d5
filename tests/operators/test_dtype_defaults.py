"""Dtype variables that optional inputs alone have, and dtypes as values of templates."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch

import ferrule
from ferrule import KernelError, Op
from ferrule.errors import RuleError
from ferrule.hosts.torch import package as torch_package
from ferrule.operators import file as op_file
from ferrule.rules.rule import Rule, parse_rule

KINDS = ("float32", "float16", "float64", "int32")


def sized(default: str, template: Any = None) -> Op:
    """Gives the sizes in bytes of what dtype variables and template types are."""
    return ferrule.op(
        "sized",
        f"x[N]:T, w[N]:W={default}? -> y[N]:int32, z[N]:W where W in (float32, float16, float64)",
        metal="uint i = thread_position_in_grid.x; y[i] = int(sizeof(W)) + 16 * int(sizeof(A));"
        "z[i] = has_w ? w[i] : W(1);",
        grid="N",
        threadgroup=64,
        template={"A": "T"} if template is None else template,
    )


def size_of(kind: str) -> int:
    return int(np.dtype(kind).itemsize)


@pytest.mark.parametrize("default", ["T", "float16"])
@pytest.mark.parametrize("kind", ["float32", "float16"])
@pytest.mark.parametrize("weight", [None, "float32", "float16"])
def test_a_default_is_taken_where_no_input_says_it(
    default: str, kind: str, weight: str | None
) -> None:
    op = sized(default)
    expected = weight or (kind if default == "T" else default)
    for make in (np.ones, lambda n, k: torch.ones(n, dtype=getattr(torch, k)),
                 lambda n, k: mx.ones(n, getattr(mx, k))):  # fmt: skip
        y, z = op(make(3, kind), weight and make(3, weight))
        assert np.asarray(y).tolist() == [size_of(expected) + 16 * size_of(kind)] * 3
        assert str(z.dtype).endswith(expected)
        assert np.asarray(z).tolist() == [1] * 3
    x = torch.ones(3, dtype=getattr(torch, kind))
    if (default, kind, weight) == ("T", "float16", None):
        torch.library.opcheck(op.torch_op, (x, None), test_utils="test_faketensor")


def test_a_default_that_may_not_be_is_refused() -> None:
    op = sized("T")
    words = r"op 'sized': W is int32, as no input says .* expected one of float32, float16, float64"
    for x in (np.ones(2, np.int32), torch.ones(2, dtype=torch.int32), mx.ones(2, mx.int32)):
        with pytest.raises(KernelError, match=words):
            op(x, None)


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("x[N]:T, w[N]:W? -> y[N]:T", "give a default, as in w[…]:W=float32?"),
        ("x[N]:T, w[N]:W=float32 -> y[N]:T", "a default is for the dtype variable of an input"),
        ("x[N]:T, w[N]:float16=float32? -> y[N]:T", "a default is for the dtype variable"),
        ("x[N]:T, w[N]:T=float32? -> y[N]:T", "'T' needs no default"),
        ("x[N]:T, w[N]:W=V?, v[N]:V=T? -> y[N]:T", "the default 'V' is no dtype, and of no array"),
        ("x[N]:T, w[N]:W=T?, v[N]:W=float32? -> y[N]:T", "'W' has two defaults"),
        ("x[N]:T, w[N]:W=int8? -> y[N]:T where W in (float32,)", "cannot be its default int8"),
    ],
)
def test_defaults_that_cannot_be(rule: str, words: str) -> None:
    with pytest.raises(RuleError) as error:
        parse_rule(rule)
    assert words in str(error.value)


def test_rules_are_read_as_they_are_written() -> None:
    text = "x[N]:T, w[N]:W=T?!, b[N]:W? -> y[N]:W where W in (float32, float16)"
    rule = parse_rule(text)
    assert str(rule) == text
    assert Rule.from_json(rule.to_json()) == rule


@pytest.mark.filterwarnings("ignore::ferrule.PortabilityWarning")
@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("float64 if T == float64 else float32", lambda kind: 8 if kind == "float64" else 4),
        ("float32 if T in (float16, int32) else T", lambda kind: max(size_of(kind), 4)),
        (
            "float64 if N > 4 else int8 if T == int32 else int32",
            lambda kind: 1 if kind == "int32" else 4,
        ),
        ("int8", lambda kind: 1),
        ("T", size_of),
    ],
)  # fmt: skip
def test_dtypes_in_templates(template: str, expected: Any) -> None:
    op = sized("float32", {"A": template})
    for kind in KINDS:
        for make in (np.ones, lambda n, k: torch.ones(n, dtype=getattr(torch, k))):
            y, _ = op(make(3, kind), None)
            assert y.tolist() == [4 + 16 * expected(kind)] * 3
    if "N" in template:
        assert op(np.ones(5, np.int32), None)[0].tolist() == [4 + 16 * 8] * 5
    (again,) = op_file.read(op_file.write([op])).values()
    restored = Op.from_json(op.to_json())
    assert restored.digest == again.digest == op.digest
    assert restored(np.ones(3, np.int32), None)[0].tolist() == [4 + 16 * expected("int32")] * 3


def test_a_package_knows_defaults_and_dtypes_of_templates() -> None:
    op = sized("T", {"A": "float32 if T == float16 else T"})

    class Model(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return op(x, None)

    x, rows = torch.ones(3, dtype=torch.float16), torch.export.Dim("rows", min=2, max=64)
    program = torch.export.export(Model(), (x,), dynamic_shapes=({0: rows},))
    (packaged,) = torch_package._packaged(program, None)
    library = torch_package._library([packaged])
    torch_package._load(library, torch_package.hashlib.sha256(library).hexdigest(), "here")
    y, z = getattr(torch.ops.ferrule, packaged.name).default(x[:2], None)
    assert (y.tolist(), z.dtype) == ([2 + 16 * 4] * 2, torch.float16)


def test_dtypes_are_refused_elsewhere() -> None:
    for template in ("float32 if N > 4 else 3", "3 if N > 4 else T"):
        with pytest.raises(RuleError, match="a dtype and a number cannot take turns"):
            sized("T", {"A": template})
    for template in ("flot32 if T == float16 else T", "T if T == float16 else flot32"):
        with pytest.raises(RuleError, match="'flot32' is neither a dtype nor a dtype variable"):
            sized("T", {"A": template})
    with pytest.raises(RuleError, match="there is no dim 'float32'"):
        sized("T", {"A": "1 + float32"})
    for template, hint in (("flot32", "did you mean 'float32'?"), ("M", "the rule binds N")):
        with pytest.raises(RuleError) as error:
            sized("T", {"A": template})
        said = f"`template['A']` of op 'sized': {template!r} is neither a dtype nor a dim; {hint}\n"
        assert said in str(error.value)
    with pytest.raises(RuleError, match="'T' is a dtype variable; compare it"):
        ferrule.op("wrong", "x[N]:T -> y[N]:T", metal="y[0] = 0;", grid="T", threadgroup=1)


def test_constants_of_functions_may_be_dtypes() -> None:
    def make(*, device: str, T: str, total: str) -> Any:
        return lambda x: x.astype(total).sum(keepdims=True)

    op = ferrule.adopt(
        "total", "x[N]:T -> y[1]:float64", make=make,
        constants={"total": "float64 if T != int32 else T"},
    )  # fmt: skip
    assert op(np.ones(3, np.float16)).tolist() == [3.0]
    with pytest.raises(KernelError, match="and dtype int64"):
        op(np.ones(3, np.int32))
