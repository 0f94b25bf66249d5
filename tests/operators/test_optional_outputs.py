"""Outputs that only some calls have: ``dw[N]:float32 if w``, on every host."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ferrule
from ferrule import KernelError, Op
from ferrule.errors import KernelTypeError, RuleError
from ferrule.hosts.torch import package as torch_package
from ferrule.operators import file as op_file
from ferrule.rules.rule import Rule, parse_rule

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")

RULE = (
    "x[*S,N]:float32, w[N]:float32?, stats:bool"
    " -> y[*S,N]:float32, doubled[N]:float32 if w, rstd[*S]:float32~ if stats"
)
BODY = """
    uint row = thread_position_in_grid.y, lane = thread_position_in_grid.x;
    float sum = 0;
    for (uint k = lane; k < N; k += 32) sum += x[row * N + k] * x[row * N + k];
    const float r = metal::rsqrt(simd_sum(sum) / N);
    for (uint k = lane; k < N; k += 32) {
        const float v = x[row * N + k] * r;
        y[row * N + k] = has_w ? v * w[k] : v;
        if (has_doubled && row == 0) doubled[k] = 2 * w[k];
    }
    if (has_rstd && lane == 0) rstd[row] = r;
"""
CASES = [(weighted, stats) for weighted in (False, True) for stats in (False, True)]


def reference(x: Any, w: Any, stats: bool) -> Any:
    """In torch or MLX; what a call does not have is dropped."""
    r = (x * x).mean(-1) ** -0.5
    y = x * r[..., None]
    return (y if w is None else y * w), (None if w is None else 2 * w), r


def rms(**more: Any) -> Op:
    settings = {"metal": BODY, "grid": (32, "x.size // N"), "threadgroup": (32, 1), **more}
    op = ferrule.op("rms", RULE, **settings)

    @op.def_vjp
    def vjp(primals: Any, cotangents: Any, outputs: Any) -> Any:
        (x, w, stats), (c, c_doubled, c_rstd), (_, doubled, rstd) = primals, cotangents, outputs
        assert (c_doubled is None) == (doubled is None) == (w is None)
        assert (c_rstd is None) == (rstd is None) == (not stats)
        r = ((x * x).mean(-1) ** -0.5)[..., None]
        n, g = x * r, c if w is None else c * w
        x_grad = r * (g - n * (g * n).mean(-1)[..., None])
        if w is None:
            return x_grad, None, None
        return x_grad, (c * n).reshape(-1, x.shape[-1]).sum(0) + 2 * c_doubled, None

    @op.def_jvp
    def jvp(primals: Any, tangents: Any, outputs: Any) -> Any:
        (x, w, _), (dx, dw, _) = primals, tangents
        r = ((x * x).mean(-1) ** -0.5)[..., None]
        n = x * r
        d = 0 * n if dx is None else r * (dx - n * (dx * n).mean(-1)[..., None])
        if w is None:
            return d, None, None
        dw = 0 * w if dw is None else dw
        return d * w + n * dw, 2 * dw, None

    return op


NORM = rms()


def arrays(shape: tuple[int, ...] = (3, 5), seed: int = 0) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    return rng.normal(size=shape).astype("f"), rng.normal(size=shape[-1:]).astype("f")


def expect(outputs: Any, x: Any, w: Any, stats: bool) -> None:
    """Compare a call's outputs, of any library, with the reference."""
    y, doubled, rstd = reference(np.asarray(x), None if w is None else np.asarray(w), stats)
    expected = y, doubled, rstd if stats else None
    assert type(outputs) in (tuple, list)
    for output, value in zip(outputs, expected, strict=True):
        assert (output is None) == (value is None)
        if value is not None:
            output = output.detach() if isinstance(output, torch.Tensor) else output
            np.testing.assert_allclose(np.asarray(output), value, rtol=2e-5, atol=1e-6)


@given(
    st.lists(st.integers(1, 3), max_size=2), st.integers(1, 40), st.booleans(), st.booleans(),
    st.sampled_from([np.asarray, torch.from_numpy, mx.array]),
)  # fmt: skip
@settings(deadline=None)
def test_calls_have_the_outputs_that_they_ask_for(
    outer: list[int], n: int, weighted: bool, stats: bool, library: Any
) -> None:
    x, w = arrays((*outer, n), n)
    weight = library(w) if weighted else None
    expect(NORM(library(x), weight, stats), x, w if weighted else None, stats)
    expect(NORM(x=library(x), w=weight, stats=stats), x, w if weighted else None, stats)


def test_a_variant_shows_the_outputs_that_it_has() -> None:
    x, w = arrays()
    inputs = str(NORM.rule).partition(" -> ")[0]
    assert repr(NORM.variant(x, None, False)) == f"<ferrule.Op rms: {inputs} -> y[*S,N]:float32>"
    assert repr(NORM) == f"<ferrule.Op rms: {NORM.rule}>"
    shown = repr(NORM.variant(x, w, True))
    again = ferrule.op("rms", shown.removeprefix("<ferrule.Op rms: ")[:-1], grid="N",
                       threadgroup=1, metal="y[0] = has_w;")  # fmt: skip
    assert [o.name for o in again.rule.outputs] == ["y", "doubled", "rstd"]


# -- torch -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("weighted", "stats"), CASES)
def test_an_operator_of_torch_for_each_set_of_outputs(weighted: bool, stats: bool) -> None:
    x, w = (torch.from_numpy(array).requires_grad_() for array in arrays())
    weight = w if weighted else None
    operator = NORM.variant(x, weight, stats).torch_op
    torch.library.opcheck(operator, (x, weight, stats))
    y, doubled, rstd = NORM(x, weight, stats)
    loss = y.square().sum() if doubled is None else y.square().sum() + doubled.sum()
    loss.backward()
    got = x.grad, w.grad
    x.grad = w.grad = None
    y, doubled, _ = reference(x, weight, stats)
    loss = y.square().sum() if doubled is None else y.square().sum() + doubled.sum()
    loss.backward()
    torch.testing.assert_close(got, (x.grad, w.grad), rtol=1e-4, atol=1e-5)
    assert rstd is None or not rstd.requires_grad
    assert ferrule.check_grad(NORM, x, weight, stats).ok


@pytest.mark.parametrize("weighted", [False, True])
def test_compiled_graphs_and_exports_have_them(weighted: bool) -> None:
    def model(x: Any, w: Any, stats: bool) -> Any:
        y, *more = NORM(torch.sin(x), w, stats)
        return (y + 1, *[None if array is None else array * 2 for array in more])

    backend = "inductor" if weighted else "aot_eager"
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=backend)
    for rows, stats in ((3, True), (4, True), (4, False)):
        x, w = map(torch.from_numpy, arrays((rows, 5)))
        weight = w if weighted else None
        got, expected = compiled(x, weight, stats), model(x, weight, stats)
        assert [array is None for array in got] == [False, not weighted, not stats]
        torch.testing.assert_close(got, expected)

    class Model(torch.nn.Module):
        def forward(self, x: Any, w: Any) -> Any:
            return NORM(x, w if weighted else None, True)

    rows = torch.export.Dim("rows", min=2, max=64)
    program = torch.export.export(Model(), (x, w), dynamic_shapes=({0: rows}, None))
    x, w = map(torch.from_numpy, arrays((7, 5)))
    expect(program.module()(x, w), x, w if weighted else None, True)
    (packaged,) = torch_package._packaged(program, None)
    library = torch_package._library([packaged])
    torch_package._load(library, torch_package.hashlib.sha256(library).hexdigest(), "here")
    twin = getattr(torch.ops.ferrule, packaged.name).default
    present = [a for a in NORM(x, w if weighted else None, True) if a is not None]
    torch.testing.assert_close(list(twin(x, w if weighted else None, True)), present)


def test_an_integer_decides_in_a_graph_with_dynamic_numbers() -> None:
    op = ferrule.op(
        "some",
        "x[N]:T, k:int32 -> y[N]:T, index[N]:int32 if k > 2 and not k == 5",
        metal="uint i = thread_position_in_grid.x; y[i] = x[i] * T(k);"
        "if (has_index) index[i] = int(i);",
        grid="N",
        threadgroup=64,
    )
    compiled = torch.compile(
        lambda x, k: op(x, k), fullgraph=True, dynamic=True, backend="aot_eager"
    )
    for k in (1, 3, 4, 5, 6):
        y, index = compiled(torch.ones(4), k)
        assert y.tolist() == [k] * 4
        assert (None if index is None else index.tolist()) == (
            [0, 1, 2, 3] if k in (3, 4, 6) else None
        )


@pytest.mark.parametrize(("weighted", "stats"), CASES)
def test_batches_and_forward_derivatives(weighted: bool, stats: bool) -> None:
    x, w = map(torch.from_numpy, arrays((4, 3, 5)))
    weight = w if weighted else None
    if not weighted:  # `doubled` has no *S
        batched = torch.vmap(lambda x: tuple(a for a in NORM(x, None, stats) if a is not None))(x)
        each = reference(x, None, stats)[:: 2 if stats else 3]
        torch.testing.assert_close(batched, each, rtol=1e-4, atol=1e-5)
    tangent = torch.func.jvp(lambda x: NORM(x, weight, stats)[0], (x,), (x + 1,))[1]
    expected = torch.func.jvp(lambda x: reference(x, weight, stats)[0], (x,), (x + 1,))[1]
    torch.testing.assert_close(tangent, expected, rtol=1e-4, atol=1e-5)


# -- MLX -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("weighted", "stats"), CASES)
def test_nodes_of_mlx(weighted: bool, stats: bool, tmp_path: Path) -> None:
    x, w = map(mx.array, arrays())

    def call(x: Any, w: Any) -> Any:
        return [a for a in NORM(mx.sin(x), w if weighted else None, stats) if a is not None]

    def loss(function: Any) -> Any:
        return lambda x, w: sum(a.square().sum() for a in function(x, w)[: 1 + weighted])

    def expected(x: Any, w: Any) -> Any:
        return [a for a in reference(mx.sin(x), w if weighted else None, stats) if a is not None]

    for got in (call(x, w), mx.compile(call)(x, w)):
        assert len(got) == 1 + weighted + stats
        for value, right in zip(got, expected(x, w), strict=False):
            assert mx.allclose(value, right, 1e-4, 1e-5)
    gradients = mx.grad(loss(call), (0, 1))(x, w)
    for value, right in zip(gradients, mx.grad(loss(expected), (0, 1))(x, w), strict=True):
        assert mx.allclose(value, right, 1e-3, 1e-4)
    if not weighted:  # `doubled` has no *S
        stack = mx.stack([x, x + 1])
        batches = (mx.vmap(each, (0, None))(stack, w) for each in (call, expected))
        for value, right in zip(*batches, strict=False):
            assert mx.allclose(value, right, 1e-4, 1e-5)
    path = str(tmp_path / "norm.mlxfn")
    mx.export_function(path, call, x, w)
    for value, right in zip(ferrule.import_function(path)(x, w), call(x, w), strict=True):
        assert mx.allclose(value, right)


# -- functions, derivatives that are ops -----------------------------------------------------------


def test_functions_give_all_outputs_or_none_of_what_is_absent() -> None:
    x, w = arrays()

    def written(x: Any, w: Any, stats: bool, *, y: Any, doubled: Any, rstd: Any) -> None:
        assert ((doubled is None), (rstd is None)) == ((w is None), not stats)
        outputs = reference(x, w, stats)
        for array, value in zip((y, doubled, rstd), outputs, strict=True):
            if array is not None:
                array[...] = value

    for more in ({"run": reference}, {"run": written}, {"reference": reference, "metal": BODY}):
        op = rms(**{"metal": None, **more})
        for weighted, stats in CASES:
            weight = w if weighted else None
            expect(op(x, weight, stats), x, weight, stats)
            expect(op(torch.from_numpy(x), None, stats), x, None, stats)
            assert ferrule.compare(op, x, weight, stats).ok
    adopted = ferrule.adopt("adopted", RULE, run=reference)
    expect(adopted(x, None, True), x, None, True)


def test_derivatives_that_are_ops_are_told_what_is_absent() -> None:
    op = ferrule.op(
        "scaled",
        "x[N]:float32, w[N]:float32? -> y[N]:float32, z[N]:float32 if w",
        metal="uint i = thread_position_in_grid.x; y[i] = 3 * x[i];"
        "if (has_w && has_z) z[i] = x[i] * w[i];",
        grid="N",
        threadgroup=64,
    )
    by_grid = {"grid": "N", "threadgroup": 64}
    with pytest.raises(KernelError, match=r"input 'z_cotangent' .* declare it .*\?, and ask has_z"):
        op.def_vjp(
            ferrule.op(
                "scaled_vjp",
                "y_cotangent[N]:float32, z_cotangent[N]:float32 -> x_grad[N]:float32",
                metal="x_grad[0] = 1;",
                **by_grid,
            )
        )
    op.def_vjp(
        ferrule.op(
            "scaled_vjp",
            "x[N]:float32, w[N]:float32?, y_cotangent[N]:float32, z_cotangent[N]:float32?"
            " -> x_grad[N]:float32, w_grad[N]:float32 if w",
            metal="uint i = thread_position_in_grid.x;"
            "x_grad[i] = 3 * y_cotangent[i];"
            "if (has_w && has_z_cotangent) x_grad[i] += w[i] * z_cotangent[i];"
            "if (has_w_grad) w_grad[i] = has_z_cotangent ? x[i] * z_cotangent[i] : 0;",
            **by_grid,
        )
    )
    x, w = (torch.arange(4.0) + i for i in range(2))
    assert ferrule.check_grad(op, x, w).ok
    assert ferrule.check_grad(op, x, None).ok
    assert ferrule.check_grad(op, mx.array(x.numpy()), mx.array(w.numpy())).ok
    saved = op_file.read(op_file.write([op.variant(x, w)]))
    (again,) = saved.values()
    torch.testing.assert_close(again(x, w), op(x, w))


def test_batched_ops_and_rules_of_batches() -> None:
    rule = "x[N]:float32, w[N]:float32? -> y[N]:float32, z[N]:float32 if w"
    batched = "x[B,N]:float32, w[B,N]:float32? -> y[B,N]:float32, z[B,N]:float32 if w"
    body = "uint i = thread_position_in_grid.x; y[i] = x[i]; if (has_z) z[i] = has_w ? w[i] : 0;"
    launch = {"metal": body, "grid": "x.size", "threadgroup": 64}
    op, other = ferrule.op("one_row", rule, **launch), ferrule.op("one_row", rule, **launch)
    op.def_vmap(ferrule.op("rows", batched, **launch))

    @other.def_vmap
    def _(size: int, axes: Any, primals: Any) -> Any:
        x, w = (
            None if a is None else a.movedim(at, 0) for a, at in zip(primals, axes, strict=True)
        )
        return (x, w), (0, 0)

    x, w = torch.ones(3, 4), torch.arange(12.0).view(3, 4)
    for each in (op, other):
        torch.testing.assert_close(torch.vmap(each)(x, w), (x, w))
        torch.testing.assert_close(torch.vmap(lambda x: each(x, None)[0])(x), x)  # noqa: B023
        assert not each.counts


# -- what is refused, saved and told apart ---------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("x[N]:T, w[N]:T? -> y[N]:T if w", "has an output that is always there"),
        ("x[N]:T if 1 == 1 -> y[N]:T", "`if` is for outputs"),
        ("x[N]:T -> y[N]:T, z[N]:T if N > 3", "'N' cannot say whether an output is there"),
        ("x[N]:T -> y[N]:T, z[N]:T if x.size > 3", "'x' cannot say"),
        ("x[N]:T -> y[N]:T, z[N]:T if T == float16", "'T' cannot say"),
        ("x[N]:T, e:float32 -> y[N]:T, z[N]:T if e", "'e' cannot say"),
        ("x[N]:T, k:int32 -> y[N]:T, z[N]:T if k + 1", "expected a condition"),
        ("x[N]:T, k:int32 -> y[N]:T, z[N]:T if", "an expression is missing"),
    ],
)
def test_conditions_that_are_none(rule: str, words: str) -> None:
    with pytest.raises(RuleError) as error:
        ferrule.op("wrong", rule, metal="", grid=1, threadgroup=1)
    assert words in str(error.value)


@pytest.mark.parametrize(
    "condition",
    ["w", "not w", "k", "k > 2", "w and k != 3", "not (w or k == 1)", "True", "False"],
)
def test_rules_are_read_as_they_are_written(condition: str) -> None:
    text = f"x[N]:T, w[N]:T?, k:int32 -> y[N]:T, z[N]:T~ if {condition}"
    rule = parse_rule(text)
    assert str(rule) == text
    assert Rule.from_json(rule.to_json()) == rule
    assert len(rule.presences) == (condition not in ("True", "False"))


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(KernelError, match=r"output 'rstd' .* never asks `has_rstd`"):
        rms(metal=BODY.replace("has_rstd && ", ""))
    with pytest.raises(KernelError, match=r"several operators of torch; op\.variant"):
        _ = NORM.torch_op
    with pytest.raises(KernelTypeError, match=r"input 'stats'.* expected a Python number"):
        NORM(np.ones((2, 3), "f"), None, np.ones(3))
    with pytest.raises(KernelError, match=r"there is no array 'rstd' that is always there"):
        rms(grid=(32, "rstd.size"))
    kernel = ferrule.metal_kernel("k", ["x", "w", "stats"], ["y", "doubled", "rstd"], BODY)
    with pytest.raises(KernelError, match="a metal_kernel has all outputs"):
        rms(metal=kernel)
    with pytest.raises(KernelError, match="have 5 conditions"):
        outputs = "".join(f", o{i}[N]:T if k > {i}" for i in range(5))
        ferrule.op("many", f"x[N]:T, k:int32 -> y[N]:T{outputs}", metal="", grid=1, threadgroup=1)


def test_ops_are_known_by_their_digests_and_pickled() -> None:
    op = ferrule.op("plain", RULE, metal=BODY, grid=(32, "x.size // N"), threadgroup=(32, 1))
    again = pickle.loads(pickle.dumps(op))  # noqa: S301
    x, w = arrays()
    expect(again(x, w, True), x, w, True)
    assert again.digest == op.digest
    assert len({op.digest, *(member.digest for member in op.members)}) == 5
    metal = op.using("metal")
    expect(metal(x, None, False), x, None, False)
    before = op.digest
    op.def_vjp(lambda primals, cotangents, outputs: (None, None, None))
    assert op.digest != before
    assert ferrule.op("plain", RULE.replace(" if w", " if w and stats"), metal=BODY,
                      grid=1, threadgroup=1).digest != before  # fmt: skip


@pytest.mark.parametrize("stats", [False, True])
def test_errors_show_outputs_as_they_are_declared(stats: bool) -> None:
    rule = "x[N]:T, stats:bool -> y[N]:T, z[N]:T if stats"
    x = np.ones(3, np.float32)
    too_few = ferrule.op("too_few", rule, run=lambda x, stats: x)
    absent = "; give None for 'z', which this call does not have." if not stats else "."
    with pytest.raises(KernelError) as caught:
        too_few(x, stats)
    assert str(caught.value).endswith(f"expected 2 arrays (y[N]:T, z[N]:T){absent}")
    other = ferrule.op("other", rule, run=lambda x, stats: (x, x[:1]))
    if stats:
        with pytest.raises(KernelError, match=r"by z\[N\]:T\.$"):
            other(x, stats)
    for call in (other, other.variant):
        for number in (1, "yes", None):
            words = r"input 'stats' of op 'other': got .* of type .*, expected True or False"
            with pytest.raises(KernelTypeError, match=words):
                call(x, number)
    assert other.variant(x, np.bool_(stats)) is other.variant(x, stats)
