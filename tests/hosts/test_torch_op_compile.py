"""Ops under torch.compile: one graph for all sizes, what is guarded, and how ops come to be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._dynamo.source import LocalSource
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

import ferrule
import processes
from ferrule import KernelError, Op
from torch_ops import CASES, EACH, Case, I, cloned, equal, held, is_float, rand

pytestmark = [  # torch's own: its compiler uses what they deprecate
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch._prims_common.check:FutureWarning"),
]
ALL = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def counting(backend: str = "aot_eager") -> Any:
    """A backend that counts graphs."""
    return CompileCounterWithBackend(backend)


# -- one graph for all sizes -----------------------------------------------------------------------


@ALL
@pytest.mark.parametrize("grad", [False, True])
def test_one_graph_for_all_sizes(case: Case, grad: bool) -> None:
    if grad and not case.orders:
        return
    counter = counting()
    compiled = torch.compile(case.op, fullgraph=True, dynamic=True, backend=counter)
    stance, count = "default", 0
    # the first are all different: torch takes equal ones for one size
    for sizes in ((7, 11), (2, 3), (5, 7), (3, 2), (4, 4), (19, 6)):
        inputs = case.sized(*sizes)
        found, expected = cloned(inputs), cloned(inputs)
        if grad:
            for one in (*found, *expected):
                if is_float(one):
                    one.requires_grad_()
        with torch.compiler.set_stance(stance):
            ours = compiled(*found)
        theirs = case.reference(*expected)
        equal(ours, theirs)
        if grad:
            for y in (ours, theirs):
                sum(one.sum() for one in (y if isinstance(y, tuple) else (y,))).backward()
            equal(*[[x.grad for x in xs if is_float(x)] for xs in (found, expected)])
        else:
            equal(found, expected)
        stance = "fail_on_recompile"
        count = count or counter.frame_count
    assert counter.frame_count == count <= 2  # Dynamo starts again where it meets a float


@ALL
def test_static_shapes_and_marked_dims(case: Case) -> None:
    counter = counting()
    static = torch.compile(case.op, fullgraph=True, dynamic=False, backend=counter)
    for sizes in ((2, 3), (2, 3), (4, 3)):
        inputs = case.sized(*sizes)
        equal(static(*cloned(inputs)), case.reference(*cloned(inputs)))
    assert counter.frame_count == 2
    torch.compiler.reset()
    counter = counting()
    marked = torch.compile(case.op, fullgraph=True, backend=counter)
    for batch in (6, 7, 19, 2):
        inputs = case.sized(batch, 3)
        given_ = cloned(inputs)
        for one in given_:
            if is_float(one) and one.shape[0] == batch and one.ndim > 1:
                torch._dynamo.mark_dynamic(one, 0)
        equal(marked(*given_), case.reference(*cloned(inputs)))
    assert counter.frame_count == 1


def test_numbers_do_not_recompile() -> None:
    counter = counting()
    compiled = torch.compile(EACH["put"].op, fullgraph=True, dynamic=True, backend=counter)
    for at in (3, 2, 5, 4):
        cache = torch.zeros(2, 8, 3)
        assert compiled(cache, torch.ones(2, 3), at).tolist() == [at + 1] * 2
        assert cache[:, at].sum() == cache.sum() == 6
    assert counter.frame_count == 1


def test_floats_are_constants_as_in_any_op_of_torch() -> None:
    counter = counting()
    compiled = torch.compile(EACH["affine"].op, fullgraph=True, backend=counter)
    x = rand(3, 4)
    for s in (0.5, 0.25, 0.5, 0.25):
        equal(compiled(x, None, s, 1, False), EACH["affine"].reference(x, None, s, 1, False))
    assert counter.frame_count <= 3


class Layer(torch.nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gate = torch.nn.Parameter(rand(width))
        self.scale = torch.nn.Parameter(rand(width) + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean, variance = EACH["moments"].op(x)
        x = (x - mean[..., None]) * torch.rsqrt(variance[..., None] + 1e-3) * self.scale
        return EACH["gate"].op(x, self.gate)


class Model(torch.nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList([Layer(8) for _ in range(layers)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def test_32_layers_are_one_graph() -> None:
    model = Model(32)
    assert len(model.state_dict()) == 64
    counter = counting()
    compiled = torch.compile(model, fullgraph=True, dynamic=True, backend=counter)
    for shape in ((2, 3, 8), (4, 5, 8)):
        x = rand(*shape)
        model.zero_grad()
        y = compiled(x)
        y.square().mean().backward()
        found = [one.grad for one in model.parameters()]
        model.zero_grad()
        expected = model(x)
        expected.square().mean().backward()
        equal(y, expected)
        equal(found, [one.grad for one in model.parameters()])
    assert counter.frame_count == 1
    targets = [node.target for node in counter.graphs[0].graph.nodes]
    assert targets.count(held(EACH["gate"].op)) == 32


# -- the whole compiler ----------------------------------------------------------------------------


def both(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = EACH["gate"].op(x.transpose(0, 1) * 2, w)
    mean, variance = EACH["moments"].op(y)
    return EACH["plain"].op(y, w) + mean[..., None] * variance[..., None]


@pytest.mark.parametrize("how", ["default", "cpp_wrapper", "reduce-overhead"])
def test_inductor(how: str) -> None:
    more: dict[str, Any] = {
        "default": {}, "cpp_wrapper": {"options": {"cpp_wrapper": True}},
        "reduce-overhead": {"mode": "reduce-overhead"},
    }[how]  # fmt: skip
    compiled = torch.compile(both, fullgraph=True, dynamic=how != "reduce-overhead", **more)
    for shape in ((2, 3, 4), (5, 2, 4))[: 1 if how == "reduce-overhead" else 2]:
        x, w = rand(*shape), rand(4)
        equal(compiled(x, w), both(x, w))


def test_in_place_writes_are_seen_in_order() -> None:
    def step(cache: torch.Tensor, row: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        before = cache.sum()
        EACH["put"].op(cache, row, 0)
        EACH["put"].op(cache.flip(1).clone(), row, 1)  # to something else
        EACH["put"].op(cache, 2 * row, 1)
        return before, cache.sum()

    row = torch.ones(2, 3)
    expected = torch.zeros(2, 4, 3)
    before, after = step(expected, row)
    assert (before.item(), after.item()) == (0, 18)
    for backend in ("eager", "aot_eager", "inductor"):
        torch.compiler.reset()
        cache = torch.zeros(2, 4, 3)
        equal(torch.compile(step, backend=backend, fullgraph=True)(cache, row), (before, after))
        equal(cache, expected)


def test_an_op_without_outputs_is_not_left_out() -> None:
    add = ferrule.op(
        "add", "c[L]:T!, v[L]:T ->", metal=I + "c[i] += v[i];", grid="L", threadgroup=8
    )

    def f(v: torch.Tensor) -> torch.Tensor:
        c = torch.zeros_like(v)
        add(c, v)
        add(c, v)
        return c

    v = rand(3)
    for backend in ("eager", "aot_eager", "inductor"):
        torch.compiler.reset()
        equal(torch.compile(f, backend=backend, fullgraph=True)(v), 2 * v)


# -- guards ----------------------------------------------------------------------------------------


def guards(op: Op, *inputs: Any, check: Any = None) -> list[str]:
    """What calling an op with tensors of unknown sizes makes torch assume about them."""
    env = ShapeEnv()
    mode = FakeTensorMode(shape_env=env)
    fakes = []
    for i, one in enumerate(inputs):
        if isinstance(one, torch.Tensor):
            dims = StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * one.ndim)
            one = mode.from_tensor(one, symbolic_context=dims, source=LocalSource(f"x{i}"))
        fakes.append(one)
    before = len(env.guards)
    with mode:
        found = op(*fakes)
    if check is not None:
        check(found)
    return sorted(str(one.expr) for one in env.guards[before:])


def declared(rule: str) -> Op:
    return ferrule.op("declared", rule, run=lambda *a: None, version=rule)


@pytest.mark.parametrize(
    ("rule", "shapes", "count"),
    [
        ("x[B,D]:T -> y[B,D]:T", [(5, 7)], 0),
        ("x[*S,D]:T -> y[*S]:T", [(5, 7, 9)], 0),
        ("x[B,D]:T, w[D]:T -> y[B,D]:T", [(5, 7), (7,)], 1),
        ("x[B,4]:T -> y[B]:T", [(5, 4)], 1),
        ("x[*S,D]:T, y[*S]:T -> z[*S]:T", [(5, 6, 7), (5, 6)], 2),
        ("x[B,H,W]:T -> y[B,ceildiv(H-2,2)+1,max(W//2,1),min(W,H*3)]:T", [(3, 8, 9)], 0),
        ("x[B,H]:T -> y[B if B < H else H, H % 4]:T", [(5, 7)], 0),
        ("x[B,H]:T -> y[bucket(B * H, 1, 8, 64), next_pow2(H) + 1]:T", [(5, 7)], 0),
        ("x[B,K]:T, w[N,K//2]:T -> y[B,N]:T", [(5, 8), (9, 4)], 1),
        ("x[B,K]:T -> y[B]:T where K % 4 == 0", [(5, 8)], 1),
        ("x[B,K]:T -> y[B]:T where K > 4 and B < K", [(5, 8)], 1),
        ("x[B,K]:T -> y[x.size, x.ndim]:T", [(5, 8)], 0),
    ],
)
def test_guards_are_what_the_rule_states(rule: str, shapes: Any, count: int) -> None:
    found = guards(declared(rule), *[torch.empty(shape) for shape in shapes])
    # of a size that is worked out, torch itself asks whether it is 0 or 1
    own = [one for one in found if not _about_0_or_1(one)]
    assert len(own) == count, found


def _about_0_or_1(guard: str) -> bool:
    return guard.startswith("Ne(") and guard.endswith((", 1)", ", 0)"))


@ALL
def test_guards_of_the_ops(case: Case) -> None:
    inputs = case.sized(5, 7)
    found = guards(case.op, *inputs)
    assert len(found) == case.equalities, found
    assert all(one.startswith("Eq(") for one in found)


@given(st.integers(2, 9), st.integers(2, 9), st.integers(1, 4))
@settings(max_examples=20, deadline=None)
def test_symbolic_shapes_are_what_real_ones_are(h: int, w: int, k: int) -> None:
    rule = (
        f"x[B,H,W]:T -> y[ceildiv(H, {k}), max(W - {k}, 1), H*W // {k}]:T, "
        f"z[(H if H > W else W), min(H, W, {k + 2}), x.size]:T, "
        f"p[bucket(H * W, 4, {8 * k}, 40), next_pow2(H * W // {k})]:T"
    )
    op = declared(rule)
    meta = torch.empty(3, h, w, device="meta")
    expected = [one.shape for one in op(meta)]

    def check(found: Any) -> None:
        hints = [[n if isinstance(n, int) else n.node.hint for n in one.shape] for one in found]
        assert hints == [list(shape) for shape in expected]

    guards(op, torch.empty(3, h, w), check=check)


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_sizes_that_depend_on_values(backend: str) -> None:
    def f(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        some = x[x[:, 0].nonzero().squeeze(-1)]
        mean, variance = EACH["moments"].op(some)
        return EACH["plain"].op(some, w).sum() + mean.sum() + variance.sum()

    compiled = torch.compile(f, fullgraph=True, backend=backend)
    for n in (3, 5):
        x = rand(6, 4)
        x[n:, 0] = 0
        equal(compiled(x, rand(4)), f(x, rand(4)))


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_sizes_that_depend_on_values_are_checked_when_they_are_known() -> None:
    op = ferrule.op("same", "x[N]:int64, y[N]:int64 -> z[N]:int64", run=lambda x, y: x + y)

    def f(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return op(x.nonzero().squeeze(-1), y.nonzero().squeeze(-1))

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    x = torch.tensor([1, 0, 1])
    assert compiled(x, x.flip(0)).tolist() == [0, 4]
    with pytest.raises((KernelError, RuntimeError)):
        compiled(x, torch.tensor([1, 1, 1]))


# -- how ops come to be ----------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_conditional_size_that_the_graph_reads(backend: str) -> None:
    op = conditional("8 if N > 4 else N")
    compiled = torch.compile(lambda x: op(x) * op(x).shape[0], fullgraph=True, backend=backend)
    for n in (3, 6, 9, 2):
        x, size = rand(n), 8 if n > 4 else n
        equal(compiled(x), x[torch.arange(size) % n] * size)


def conditional(size: str) -> Op:
    return ferrule.op(
        "conditional", f"x[N]:T -> y[{size}]:T", metal=I + "y[i] = x[i % N];", grid=size,
        threadgroup=8,
    )  # fmt: skip


def test_a_bucket_in_a_graph_of_all_sizes() -> None:
    op = conditional("bucket(N, 2, 5, 16) + next_pow2(N)")
    compiled = torch.compile(op, fullgraph=True, dynamic=True)
    for n in (3, 2, 9, 33):
        size = (2 if n <= 2 else 5 if n <= 5 else 16) + (1 << (n - 1).bit_length())
        assert compiled(rand(n)).shape == (size,)


@pytest.mark.parametrize("strict", [False, True])
def test_conditional_sizes_are_exported(strict: bool) -> None:
    """But for those that may be 0 or 1, of which torch's own operators want to know, too, where
    an export is not strict."""

    def export(f: Any) -> Any:
        class Model(torch.nn.Module):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return f(x)

        dynamic = ({0: torch.export.Dim("n", min=2, max=100)},)
        return torch.export.export(Model(), (rand(6),), dynamic_shapes=dynamic, strict=strict)

    for size, n, expected in (
        ("8 if N > 4 else N", 3, 3), ("8 if N > 4 else N", 40, 8),
        ("(8 if N > 4 else N) % 5 + 2", 3, 5), ("(8 if N > 4 else N) % 5 + 2", 40, 5),
    ):  # fmt: skip
        op = conditional(size)
        found = export(lambda x, op=op: op(x) * op(x).shape[0]).module()(x := rand(n))
        assert found.shape == (expected,)
        equal(found, x[torch.arange(expected) % n] * expected)
    for f in () if strict else (conditional("N % 5"), lambda x: torch.empty(x.shape[0] % 5)):
        with pytest.raises(Exception, match=r"Constraints violated|specialized|[Gg]uard"):
            export(f)


def run(script: str, *arguments: str) -> str:
    return processes.printed(script, *arguments, modules=processes.COMPILING)


def test_an_op_made_before_torch_is_imported() -> None:
    done = processes.run("""
        import sys
        import ferrule
        op = ferrule.op(
            "early", "x[N]:T -> y[N]:T", grid="N", threadgroup=8,
            metal="uint i = thread_position_in_grid.x; y[i] = x[i] + 1;",
        )
        early = ferrule.op(
            "early_grad", "x[N]:T, cotangent[N]:T -> x_grad[N]:T", grid="N", threadgroup=8,
            metal="uint i = thread_position_in_grid.x; x_grad[i] = cotangent[i] + 0 * x[i];",
        )
        op.def_vjp(early)
        import numpy as np
        assert op(np.ones(3, np.float32)).tolist() == [2, 2, 2]
        assert "torch" not in sys.modules
        try:
            op.torch_op
        except ferrule.KernelError as error:
            assert "import torch before" in str(error)
        else:
            raise AssertionError
        import torch
        # first called inside of fullgraph
        f = torch.compile(lambda x: op(x * 2).sum(), backend="aot_eager", fullgraph=True)
        x = torch.ones(3, requires_grad=True)
        f(x).backward()
        assert x.grad.tolist() == [2, 2, 2]
        assert op.torch_op.name() == "ferrule::early_" + op.digest
        torch.library.opcheck(op.torch_op, (torch.ones(3),))
        assert op(np.ones(3, np.float32)).tolist() == [2, 2, 2]
    """)
    assert done.returncode == 0, done.stderr


def test_an_op_first_called_inside_of_fullgraph() -> None:
    fresh = ferrule.op(
        "first_inside", "x[N]:T -> y[N]:T", metal=I + "y[i] = 3 * x[i];", grid="N", threadgroup=8
    )
    assert fresh._operator is None
    equal(torch.compile(lambda x: fresh(x), fullgraph=True, backend="eager")(rand(3)), 3 * rand(3))


def named(factor: int, slope: int | None = None) -> Op:
    op = ferrule.op(
        "redefined", "x[N]:T -> y[N]:T", metal=I + f"y[i] = {factor} * x[i];", grid="N",
        threadgroup=8,
    )  # fmt: skip
    if slope is not None:
        op.def_vjp(lambda primals, cotangents, outputs, slope=slope: slope * cotangents[0])
    return op


@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_an_op_with_the_name_of_another(backend: str) -> None:
    kept = {"op": named(2, 2)}
    compiled = torch.compile(lambda x: kept["op"](x) + 1, fullgraph=True, backend=backend)
    x = rand(3)
    equal(compiled(x), 2 * x + 1)
    for op, factor in ((named(3, 3), 3), (named(2, 2), 2), (named(2, 5), 2)):
        kept["op"] = op
        equal(compiled(x), factor * x + 1)
        equal(op(x), factor * x)
    # another derivative of the same function
    x.requires_grad_()
    compiled(x).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [5, 5, 5]


def test_a_rule_that_is_declared_later() -> None:
    op = named(4)
    compiled = torch.compile(lambda x: op(x).sum(), backend="aot_eager")
    x = rand(3)
    equal(compiled(x), 4 * x.sum())
    before = op.torch_op
    op.def_vjp(lambda primals, cotangents, outputs: 4 * cotangents[0])
    assert op.torch_op != before
    x.requires_grad_()
    compiled(x).backward()
    assert x.grad is not None and x.grad.tolist() == [4, 4, 4]


def test_a_derivative_that_is_another_in_the_next_process() -> None:
    script = """
        import torch, ferrule
        op = ferrule.op(
            "cached", "x[N]:T -> y[N]:T", grid="N", threadgroup=8,
            metal="uint i = thread_position_in_grid.x; y[i] = x[i];",
        )
        op.def_vjp(lambda primals, cotangents, outputs: SLOPE * cotangents[0])
        x = torch.ones(3, requires_grad=True)
        torch.compile(lambda x: op(x), fullgraph=True)(x).backward(torch.ones(3))
        print(x.grad.tolist()[0])
    """
    found = [run(script.replace("SLOPE", str(slope))).strip() for slope in (2, 5)]
    assert found == ["2.0", "5.0"]


def test_a_derivative_reads_the_state_of_its_own_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    script = """
import sys, torch, ferrule
class Config:
    table = {}
    def factor(self): return self.table["s"]
config = Config(); config.table["s"] = float(sys.argv[1])
op = ferrule.op("st", "x[*S]:T -> y[*S]:T", grid="x.size", threadgroup=64,
                metal="uint i = thread_position_in_grid.x; y[i] = x[i];")
op.def_vjp(lambda p, c, o: (c[0] * config.factor(),))
x = torch.zeros(5, requires_grad=True)
torch.compile(lambda x: op(x.sin()), fullgraph=True)(x).sum().backward(); print(x.grad[0].item())
"""
    assert [run(script, s).strip() for s in ("2", "5")] == ["2.0", "5.0"]


# What no digest of a function sees, or sees too early: each rule scales by `s`, which is set last.
READ = """
import sys, types, torch, ferrule
from torch._dynamo.utils import counters

class Config:
    s, table = 0.0, {}
    def factor(self): return self.s
    def rule(self, p, c, o): return c[0] * self.s
    def __call__(self, p, c, o): return c[0] * self.s

config, values, held, inside = Config(), {}, {}, types.ModuleType("inside")
sys.modules["inside"] = inside
SCALE = 0.0
def constant(p, c, o): return c[0] * SCALE
def imports(p, c, o):
    import inside
    return c[0] * inside.s
def names_a_function(p, c, o):
    from inside import factor
    return c[0] * factor()
def closed(k):
    def rule(p, c, o): return c[0] * k
    def change(to):
        nonlocal k
        k = to
    return rule, change
cell, change = closed(0.0)
def has_attribute(p, c, o): return c[0] * has_attribute.s
has_attribute.s = 0.0
rules = {
    "attribute": lambda p, c, o: c[0] * config.s,
    "content": lambda p, c, o: c[0] * values["s"],
    "method": lambda p, c, o: c[0] * config.factor(),
    "container": lambda p, c, o: c[0] * held["function"](),
    "constant": constant, "imports": imports, "imported": names_a_function, "cell": cell,
    "function": has_attribute,
}
ops = {}
for name, rule in rules.items():
    ops[name] = ferrule.op("read_" + name, "x[*S]:T -> y[*S]:T", grid="x.size", threadgroup=64,
                           metal="uint i = thread_position_in_grid.x; y[i] = x[i];")
    ops[name].def_vjp(rule)
# A rule of the rule, and one that an op in a function has.
inner = ops["attribute"]
outer = ferrule.op("read_outer", "x[*S]:T -> y[*S]:T", grid="x.size", threadgroup=64,
                   metal="uint i = thread_position_in_grid.x; y[i] = x[i] * x[i];")
outer.def_vjp(lambda p, c, o: 2 * inner(p[0]) * c[0], version=1)

def set_to(s):
    global SCALE
    config.s = values["s"] = inside.s = SCALE = has_attribute.s = s
    held["function"] = inside.factor = eval(f"lambda: {s}")
    change(s)

def gradient(op):
    x = torch.zeros(5, requires_grad=True)
    op(x.sin()).sum().backward()
    return x.grad[0].item()

def second(op):
    return torch.func.grad(torch.func.grad(op))(torch.tensor(1.0))
"""


def test_what_a_derivative_reads_is_never_another_processs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    script = (
        READ
        + """
set_to(float(sys.argv[1]))
assert all(op.traces_python() for op in (*ops.values(), outer))
xs = [torch.zeros(5, requires_grad=True) for _ in ops]
compiled = torch.compile(lambda *xs: sum(op(x) for op, x in zip(ops.values(), xs)), fullgraph=True)
compiled(*xs).sum().backward()
found = [x.grad[0].item() for x in xs]
found.append(torch.compile(second)(outer).item() / 2)
print(*zip([*ops, "outer"], found), sep="\\n")
"""
    )
    for s in ("2.0", "5.0"):
        wrong = [line for line in run(script, s).splitlines() if not line.endswith(f" {s})")]
        assert not wrong


def test_a_derivative_is_frozen_when_it_is_traced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A compiled graph keeps what its rules read; eager code, and the next graph, read again."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    script = (
        READ
        + """
op, found = ops["content"], []
compiled = torch.compile(op, fullgraph=True)
for s in (2.0, 5.0):
    set_to(s)
    found += [gradient(op), gradient(compiled)]
torch._dynamo.reset()
found.append(gradient(torch.compile(op, fullgraph=True)))
print(found)
"""
    )
    assert run(script).strip() == "[2.0, 2.0, 5.0, 2.0, 5.0]"


def test_a_derivative_is_not_compiled_by_the_operators_name_alone() -> None:
    """torch would keep on disk what it traced of a rule in Python."""
    op = named(7)
    op.def_vjp(lambda primals, cotangents, outputs: 7 * cotangents[0])
    by_name = op.torch_op
    compiled = torch.compile(lambda x: by_name(x), fullgraph=True, backend="aot_eager")
    x = rand(3)
    equal(compiled(x), 7 * x)  # nothing is traced but the operator
    equal(by_name(x.requires_grad_()), 7 * x)
    with pytest.raises(Exception, match=r"op '\w+' is called by its `torch_op` .*`version=`"):
        compiled(x)
    known = named(7)
    known.def_vjp(lambda primals, cotangents, outputs: 7 * cotangents[0], version=1)
    by_name = known.torch_op
    torch.compile(lambda x: by_name(x), fullgraph=True, backend="aot_eager")(x).sum().backward()
    assert x.grad is not None and x.grad.tolist() == [7, 7, 7]


RULES = {
    "an op": "op.def_vjp(slope)",
    "a function": "op.def_vjp(lambda p, c, o: (slope(p[0], c[0]),), version=1)",
    "by a name": "def call(x, c): return slope(x, c)\n"
    "op.def_vjp(lambda p, c, o: call(p[0], c[0]), version=1)",
    "a closure": "def rule(ops): return lambda p, c, o: ops['slope'](p[0], c[0])\n"
    "op.def_vjp(rule({'slope': slope}), version=1)",
}


@pytest.mark.parametrize("rule", RULES)
def test_a_compiled_backward_that_another_process_left_behind(
    rule: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch takes it from its cache: nothing is traced that would name the ops in it."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    script = """
        import torch, ferrule
        from torch._dynamo.utils import counters
        how = dict(grid="N", threadgroup=8)
        I = "uint i = thread_position_in_grid.x; "
        op = ferrule.op("kept", "x[N]:T -> y[N]:T", metal=I + "y[i] = 3 * x[i];", **how)
        slope = ferrule.op(
            "kept_vjp", "x[N]:T, cotangent[N]:T -> x_grad[N]:T",
            metal=I + "x_grad[i] = 3 * cotangent[i] + 0 * x[i];", **how,
        )
        exec(RULE)
        x = torch.ones(3, requires_grad=True)
        torch.compile(lambda x: op(x), fullgraph=True)(x).backward(torch.ones(3))
        print(x.grad.tolist(), counters["aot_autograd"]["autograd_cache_hit"])
    """.replace("RULE", repr(RULES[rule]))
    assert [run(script).strip() for _ in range(2)] == ["[3.0, 3.0, 3.0] 0", "[3.0, 3.0, 3.0] 1"]
