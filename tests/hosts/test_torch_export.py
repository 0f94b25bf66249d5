"""Exported graphs with ops: saved, read in other processes, altered, made for other devices."""

from __future__ import annotations

import io
import json
import textwrap
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ferrule
import processes
from ferrule import KernelError, Op, RuleError
from ferrule.operators import file as op_file

torch = pytest.importorskip("torch")
Dim = torch.export.Dim
pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")

I = "uint i = thread_position_in_grid.x; "  # noqa: E741
RULE = "x[*S,D]:T, w[D]:T -> y[*S,D]:T"
SCALE = I + "y[i] = x[i] * w[i % D];"


def scale(**more: Any) -> Op:
    return ferrule.op("scale", RULE, metal=SCALE, grid="x.size", threadgroup=256, **more)


def with_vjp(**more: Any) -> Op:
    op = scale(**more)
    op.def_vjp(
        ferrule.op(
            "scale_vjp", "w[D]:T, cotangent[*S,D]:T -> x_grad[*S,D]:T",
            metal=I + "x_grad[i] = cotangent[i] * w[i % D];", grid="cotangent.size",
            threadgroup=64,
        )
    )  # fmt: skip
    return op


class Scaled(torch.nn.Module):
    def __init__(self, op: Any, d: int = 4) -> None:
        super().__init__()
        self.op = op
        self.linear = torch.nn.Linear(d, d)
        self.w = torch.nn.Parameter(torch.arange(1.0, d + 1))
        self.register_buffer("shift", torch.ones(d))

    def forward(self, x: Any) -> Any:
        return self.op(self.linear(x), self.w) + self.shift


def exported(model: Any, *args: Any, strict: bool = False) -> Any:
    shapes = ({0: Dim("B", max=64), 1: Dim("L", max=512)}, *[None] * (len(args) - 1))
    return torch.export.export(model, args, dynamic_shapes=shapes, strict=strict)


def saved(program: Any) -> io.BytesIO:
    file = io.BytesIO()
    ferrule.save(program, file)
    file.seek(0)
    return file


def edited(file: io.BytesIO, member: str, change: Callable[[bytes], bytes | None]) -> io.BytesIO:
    """A zip file with one member changed, or left out."""
    result = io.BytesIO()
    with zipfile.ZipFile(file) as old, zipfile.ZipFile(result, "w") as new:
        for info in old.infolist():
            data: bytes | None = old.read(info)
            if info.filename.endswith(member):
                data = change(data or b"")
            if data is not None:
                new.writestr(info, data)
    result.seek(0)
    return result


def moved(program: Any, device: str) -> Any:
    passes = pytest.importorskip("torch.export.passes")
    return passes.move_to_device_pass(program, device)


def in_a_new_process(code: str, *args: object) -> str:
    return processes.printed(code, *args, modules=processes.COMPILING)


# -- the same process ------------------------------------------------------------------------------


@pytest.mark.parametrize("strict", [False, True])
def test_weights_stay_arguments_and_the_op_survives_decompositions(strict: bool) -> None:
    op, x = scale(), torch.randn(3, 5, 4)
    model = Scaled(op)
    program = exported(model, x, strict=strict)
    assert set(program.state_dict) == {"linear.weight", "linear.bias", "w", "shift"}
    assert len(program.range_constraints) == 2
    for one in (program, program.run_decompositions()):
        assert any(node.target is op.torch_op for node in one.graph.nodes)
        for shape in ((3, 5, 4), (7, 1, 4), (1, 512, 4)):
            other = torch.randn(shape)
            with torch.no_grad():
                torch.testing.assert_close(one.module()(other), model(other))


def test_saved_and_loaded() -> None:
    program = exported(Scaled(scale()), torch.randn(2, 3, 4))
    kept = {"note.txt": ""}
    file = io.BytesIO()
    ferrule.save(program, file, extra_files={"note.txt": "from here"})
    file.seek(0)
    again = ferrule.load(file, extra_files=kept)
    assert kept["note.txt"] == "from here"
    x = torch.randn(5, 2, 4)
    with torch.no_grad():
        torch.testing.assert_close(again.module()(x), program.module()(x))
    with pytest.raises(KernelError, match="where ferrule writes ops"):
        ferrule.save(program, io.BytesIO(), extra_files={"ferrule.json": ""})
    with pytest.raises(ferrule.KernelTypeError, match="got a Linear"):
        ferrule.save(torch.nn.Linear(1, 1), io.BytesIO())  # type: ignore[arg-type]


def test_a_graph_without_ops_of_ferrule_loads() -> None:
    program = torch.export.export(torch.nn.Linear(2, 2), (torch.ones(1, 2),))
    file = io.BytesIO()
    torch.export.save(program, file)
    file.seek(0)
    ferrule.load(file)
    ferrule.load(saved(program))


def test_ops_in_graphs_of_graphs_and_in_place_are_saved() -> None:
    op = scale(init_value=0)
    put = ferrule.op("put", "c[L]:T!, v[L]:T ->", metal=I + "c[i] = v[i];", grid="L", threadgroup=8)

    class Branches(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("cache", torch.zeros(4))

        def forward(self, x: Any, w: Any) -> Any:
            put(self.cache, w)
            return torch.cond(x.sum() > 0, lambda x, w: op(x, w), lambda x, w: x + w, (x, w))

    program = torch.export.export(Branches(), (torch.ones(2, 4), torch.ones(4)))
    for one in (program, program.run_decompositions()):
        with zipfile.ZipFile(saved(one)) as archive:
            (name,) = [n for n in archive.namelist() if n.endswith("extra/ferrule.json")]
            ops = json.loads(archive.read(name))["ops"]
        assert {n.rpartition("_")[0] for n in ops} == {"scale", "put"}


def test_an_op_that_is_given_a_rule_later_is_another_one() -> None:
    op = scale(init_value=2)
    program = exported(Scaled(op), torch.randn(2, 3, 4))
    before = op.torch_op
    op.def_vjp(lambda primals, cotangents, outputs: (cotangents[0], None))
    assert op.torch_op is not before
    ferrule.load(saved(program))  # as it was when it was exported
    y = before(torch.ones(2, 4, requires_grad=False), torch.ones(4))
    assert y.sum() == 8
    with pytest.raises(KernelError, match="has no derivative"):
        before(torch.ones(2, 4, requires_grad=True), torch.ones(4)).sum().backward()


# -- what is refused -------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def file() -> bytes:
    return saved(exported(Scaled(with_vjp(init_value=3)), torch.randn(2, 3, 4))).getvalue()


@pytest.mark.parametrize("what", ["scale", "scale_vjp"])
def test_an_altered_text_is_refused_by_name(file: bytes, what: str) -> None:
    def change(data: bytes) -> bytes:
        content = json.loads(data)
        (name,) = [n for n in content["ops"] if n.rpartition("_")[0] == what]
        content["ops"][name]["implementations"][0]["source"] += " "
        return json.dumps(content).encode()

    with pytest.raises(KernelError, match=rf"saved op '{what}_[0-9a-f]{{16}}' was altered"):
        ferrule.load(edited(io.BytesIO(file), "ferrule.json", change))


def test_damaged_files_are_refused(file: bytes, tmp_path: Path) -> None:
    for part in (b"", file[: len(file) // 2], b"no zip file" * 10):
        path = tmp_path / "damaged.pt2"
        path.write_bytes(part)
        with pytest.raises(KernelError, match=r"damaged\.pt2' is damaged"):
            ferrule.load(path)
    for text in (b"{", b"[]", b'{"format": 1, "ops": 3}', b'{"format": 2, "ops": {}}'):
        with pytest.raises(RuleError, match=r"damaged|format 2"):
            ferrule.load(edited(io.BytesIO(file), "ferrule.json", lambda _, text=text: text))
    with pytest.raises(FileNotFoundError):
        ferrule.load(tmp_path / "nowhere.pt2")


def test_every_byte_of_what_an_op_is_counts() -> None:
    text = op_file.write([with_vjp(template={"K": "D + 1"}, batch="D")])
    content = json.loads(text)
    changed = 0

    def walk(node: Any, path: tuple[Any, ...]) -> None:
        nonlocal changed
        items = node.items() if isinstance(node, dict) else enumerate(node)
        for key, value in list(items):
            if isinstance(value, (dict, list)):
                walk(value, (*path, key))
            else:
                node[key] = "other" if value is None else [value]
                with pytest.raises(KernelError, match="was altered"):
                    op_file.read(json.dumps(content))
                node[key] = value
                changed += 1

    walk(content["ops"], ())
    renamed = {name.replace("scale", "skale"): one for name, one in content["ops"].items()}
    with pytest.raises(KernelError, match="was altered: its content is that of 'scale'"):
        op_file.read(json.dumps({**content, "ops": renamed}))
    assert changed > 50
    assert op_file.read(json.dumps(content))


def test_a_graph_whose_op_is_not_in_the_file(file: bytes) -> None:
    def forget(data: bytes) -> bytes:
        content = json.loads(data)
        content["ops"] = {}
        return json.dumps(content).encode()

    def rename(data: bytes) -> bytes:
        return data.replace(b"ferrule.scale_", b"ferrule.nowhere_")

    renamed = edited(io.BytesIO(file), "models/model.json", rename)
    with pytest.raises(KernelError, match=r"has the op 'ferrule::nowhere_.* does not say"):
        ferrule.load(renamed)
    ferrule.load(edited(io.BytesIO(file), "ferrule.json", forget))  # they are defined here
    renamed.seek(0)
    with pytest.raises(KernelError, match=r"was not written by ferrule\.save"):
        ferrule.load(edited(renamed, "ferrule.json", lambda _: None))


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("D if D <= 8 else 8", r"parameter 'K' of its metal body is D if D <= 8 else 8, and D is"),
        ("D > 8", r"is D > 8, and D is dynamic"),
        ("x.size", r"is x\.size, and x\.size is dynamic"),
    ],
)
def test_a_template_of_a_dynamic_size_is_refused(template: str, message: str, strict: bool) -> None:
    op = scale(template={"K": template})

    class Model(torch.nn.Module):
        def forward(self, x: Any, w: Any) -> Any:
            return op(x, w)

    d = Dim("D", min=2, max=64)
    with pytest.raises(Exception, match=message):
        torch.export.export(
            Model(), (torch.randn(3, 4), torch.randn(4)), dynamic_shapes=({1: d}, {0: d}),
            strict=strict,
        )  # fmt: skip


def test_a_cuda_unit_is_exported_and_read_again() -> None:
    unit = ferrule.cuda_unit(
        "template <int K> __global__ void first(const float* x, float* y) {}",
        steps=[ferrule.cuda_step("first<K>", ["x", "y"], blocks="N", block=32)],
        template={"K": "D"},
    )  # fmt: skip
    op = ferrule.op("unit", "x[N,D]:float32 -> y[N,D]:float32", cuda=unit)

    class Model(torch.nn.Module):
        def forward(self, x: Any) -> Any:
            return op(x)

    x = torch.ones(3, 4)
    program = ferrule.export_for("cuda", Model(), (x,), dynamic_shapes=({0: Dim("N")},))
    ferrule.load(saved(program))
    assert Op.from_json(json.loads(json.dumps(op.to_json()))).digest == op.digest
    with pytest.raises(KernelError, match="parameter 'K' of its cuda body is D, and D is dynamic"):
        ferrule.export_for("cuda", Model(), (x,), dynamic_shapes=({1: Dim("D")},))


def test_a_template_that_is_the_same_for_all_dynamic_sizes_is_allowed() -> None:
    op = scale(template={"K": "min(D, 8)", "B": "D >= 16", "C": "D if D <= 8 else 8", "F": 3})

    class Model(torch.nn.Module):
        def forward(self, x: Any, w: Any) -> Any:
            return op(x, w)

    d = Dim("D", min=16, max=64)
    args = torch.randn(3, 20), torch.randn(20)
    torch.export.export(Model(), args, dynamic_shapes=({1: d}, {0: d}))
    torch.export.export(Model(), args, dynamic_shapes=({0: Dim("B")}, None))
    with torch.no_grad():  # compiled, it runs: a kernel for each size
        compiled = torch.compile(Model(), dynamic=True, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(*args), args[0] * args[1])


def test_parameters_that_could_be_trained_do_not_keep_an_op_from_export() -> None:
    op = scale(init_value=1)  # no vjp
    program = exported(Scaled(op), torch.randn(2, 3, 4))
    y = program.module()(torch.randn(3, 3, 4))
    with pytest.raises(KernelError, match="has no derivative"):
        y.sum().backward()


# -- ops of files ----------------------------------------------------------------------------------


def test_an_op_read_from_a_file_has_the_same_digest() -> None:
    op = scale(reference=lambda x, w: x * w, template={"K": "D", "B": True})
    op.def_vjp(lambda primals, cotangents, outputs: (None, None))
    op.def_jvp(lambda primals, tangents, outputs: tangents[0])
    op.def_vmap(lambda size, axes, primals: (primals[0], 0))
    again = Op.from_json(json.loads(json.dumps(op.to_json())))
    assert again.digest == op.digest and again.partial and not op.partial
    x = np.ones((2, 3), np.float32)
    np.testing.assert_array_equal(again(x, x[0]), x)
    with pytest.raises(KernelError, match=r"Python function test_torch_export:.*lambda"):
        again.using("reference")(x, x[0])
    vjp = again.rules["vjp"]
    assert vjp.function((x, x), (x,), (x,)) == (None, None)  # the other's, which is the same op
    alone = Op.from_json({**op.to_json(), "name": "alone"})
    with pytest.raises(KernelError, match=r"op 'alone' was read from a file, without its vjp rule"):
        alone.rules["vjp"].function((x, x), (x,), (x,))
    own = scale()
    own.def_vmap(own)
    assert Op.from_json(own.to_json()).digest == own.digest


# -- other processes -------------------------------------------------------------------------------

HERE = """
    import sys, torch, ferrule
    I = "uint i = thread_position_in_grid.x; "
    def op():
        made = ferrule.op("scale", "x[*S,D]:T, w[D]:T -> y[*S,D]:T", grid="x.size", threadgroup=64,
                          metal=I + "y[i] = x[i] * w[i % D];")
        made.def_vjp(lambda primals, cotangents, outputs: (cotangents[0] * primals[1], None))
        return made
    def run(x, y):
        torch.mul(x, 2, out=y)
    def runner():
        return ferrule.op("twice", "x[N]:T -> y[N]:T", run=run)
"""


def test_a_new_process_loads_what_another_saved(tmp_path: Path) -> None:
    (tmp_path / "home.py").write_text(textwrap.dedent(HERE), encoding="utf-8")
    path = tmp_path / "model.pt2"
    in_a_new_process(
        """
        import sys; sys.path.insert(0, sys.argv[1])
        from home import *
        made = op()
        class Model(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.w = torch.nn.Parameter(torch.tensor([1., 2., 3.]))
            def forward(self, x):
                return made(x, self.w)
        B = torch.export.Dim("B", max=64)
        program = torch.export.export(Model(), (torch.ones(2, 3),), dynamic_shapes=({0: B},))
        ferrule.save(program, sys.argv[2])
        twice = runner()
        class Twice(torch.nn.Module):
            def forward(self, x):
                return twice(x)
        ferrule.save(torch.export.export(Twice(), (torch.ones(3),)), sys.argv[2] + ".run")
        """,
        tmp_path, path,
    )  # fmt: skip
    in_a_new_process(
        """
        import sys; sys.path.insert(0, sys.argv[1])
        import ferrule, torch
        model = ferrule.load(sys.argv[2]).module()
        w = torch.tensor([1., 2., 3.])
        for n in (1, 2, 7):
            x = torch.randn(n, 3)
            assert torch.equal(model(x), x * w)
        x = torch.randn(2, 3, requires_grad=True)
        def grad():
            return torch.autograd.grad(model(x).sum(), x)[0]
        try:
            grad()
            raise SystemExit("a gradient from nowhere")
        except ferrule.KernelError as error:
            assert "without its vjp rule" in str(error), error
        from home import op, runner
        made = op()
        assert torch.equal(grad(), w.expand(2, 3))
        try:
            ferrule.load(sys.argv[2] + ".run")
            raise SystemExit("a function from nowhere")
        except ferrule.KernelError as error:
            assert "the Python function 'home:run' alone" in str(error), error
            assert "import home first" in str(error), error
        twice = runner()
        assert ferrule.load(sys.argv[2] + ".run").module()(torch.ones(3)).tolist() == [2, 2, 2]
        """,
        tmp_path, path,
    )  # fmt: skip
    in_a_new_process(  # defined before, and never called
        """
        import sys; sys.path.insert(0, sys.argv[1])
        from home import *
        made = op()
        model = ferrule.load(sys.argv[2]).module()
        x = torch.randn(2, 3, requires_grad=True)
        model(x).sum().backward()
        assert torch.equal(x.grad, torch.tensor([1., 2., 3.]).expand(2, 3))
        """,
        tmp_path, path,
    )  # fmt: skip


# -- other devices ---------------------------------------------------------------------------------


class Shared(Scaled):
    """With parameters that are one, and a tensor that is a mere attribute."""

    def __init__(self, op: Any) -> None:
        super().__init__(op)
        self.other = torch.nn.Linear(4, 4, bias=False)
        self.other.weight = self.linear.weight
        self.constant = torch.full((4,), 3.0)
        self.register_buffer("hidden", torch.full((4,), 5.0), persistent=False)

    def forward(self, x: Any) -> Any:
        return super().forward(self.other(x) * self.constant) + self.hidden


@pytest.mark.parametrize("kind", ["metal", "cuda"])
def test_export_for_cuda_without_a_gpu(kind: str) -> None:
    body = SCALE if kind == "metal" else "int i = blockIdx.x * blockDim.x + threadIdx.x; y[i] = 0;"
    op = ferrule.op(
        "there", RULE, **{kind: body}, reference=lambda x, w: x * w, grid="x.size", threadgroup=64
    )
    model = Shared(op)
    x = torch.randn(3, 5, 4)
    shapes = ({0: Dim("B", max=64), 1: Dim("L", max=512)},)
    program = ferrule.export_for("cuda", model, (x,), dynamic_shapes=shapes)
    (node,) = [n for n in program.graph.nodes if n.target is op.torch_op]
    assert node.meta["val"].device.type == "cuda"
    assert isinstance(node.meta["val"].shape[0], torch.SymInt)
    for name, one in model.state_dict(keep_vars=True).items():
        assert program.state_dict[name] is one
    again = ferrule.load(saved(program))
    (node,) = [n for n in again.graph.nodes if n.target is op.torch_op]
    assert node.meta["val"].device.type == "cuda"
    here = moved(again, "cpu")
    for shape in ((3, 5, 4), (2, 9, 4)):
        x = torch.randn(shape)
        with torch.no_grad():
            torch.testing.assert_close(here.module()(x), model(x))


def test_export_for_keeps_the_values_of_other_tensors() -> None:
    class Hidden(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.tables = [torch.tensor([5.0, 7.0])]

        def forward(self, x: Any) -> Any:
            return x * self.tables[0].to(x.device) + torch.tensor([1.0, 2.0], device=x.device)

    program = ferrule.export_for("cuda", Hidden(), (torch.ones(2),))
    here = moved(ferrule.load(saved(program)), "cpu")
    assert here.module()(torch.ones(2)).tolist() == [6, 9]
