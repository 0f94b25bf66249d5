"""Matrix products as steps of CUDA units, in calls and in packages: on a driver and a cuBLAS whose
GPUs are the host."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import ferrule as fe
from fake_cublas import FakeCublas, Multiplied
from fake_cuda import FakeCuda
from ferrule import DeviceError, KernelError, KernelTypeError, Op, ToolchainError
from ferrule.operators.file import full_name
from ferrule.tools import cublas, driver, fastcall, nvrtc
from test_cuda_op import STREAM, gpu  # noqa: F401

torch = pytest.importorskip("torch")
from package_library import Library, skip_unless_built  # noqa: E402
from test_package_cuda import fake  # noqa: E402, F401

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
QUICK = settings(
    max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)


def one_product(rule: str, *, name: str = "product", before: Any = (), **given: Any) -> Op:
    """An op of one step that is ``y = a @ b``."""
    steps = [*before, fe.cuda_matmul("y", "a", "b", **given)]
    return fe.op(name, rule, cuda=fe.cuda_unit("", steps=steps))


@pytest.fixture
def blas(gpu: FakeCuda, fake_cublas_path: Path) -> Iterator[FakeCublas]:  # noqa: F811
    with FakeCublas(fake_cublas_path, gpu.events).installed() as found:
        yield found
        assert found.leaked == 0


# Of a and b, by whether they are transposed.
DIMS = {"a": ("M,K", "K,M"), "b": ("K,N", "N,K")}
OPS = {
    (ta, tb): one_product(
        f"a[*A,{DIMS['a'][ta]}]:T, b[*B,{DIMS['b'][tb]}]:T, alpha:float32 -> "
        "y[*broadcast(A,B),M,N]:T, z[*broadcast(A,B),M,N]:float32",
        name=f"product_{ta:d}{tb:d}",
        transpose_a=ta, transpose_b=tb, alpha="alpha",
        before=[
            fe.cuda_fill("z", 1),
            fe.cuda_matmul("z", "a", "b", transpose_a=ta, transpose_b=tb, beta=-2),
        ],
    )
    for ta in (False, True)
    for tb in (False, True)
}  # fmt: skip


@QUICK
@given(
    sizes=st.tuples(st.integers(0, 5), st.integers(0, 5), st.integers(1, 5)),
    batch=st.integers(0, 3),
    has=st.tuples(st.booleans(), st.booleans()), transposed=st.tuples(st.booleans(), st.booleans()),
    kind=st.sampled_from([np.float32, np.float16, ml_dtypes.bfloat16]),
    alpha=st.sampled_from([1.0, -0.5]),
)  # fmt: skip
def test_products_are_those_of_numpy(
    blas: FakeCublas, sizes: Any, batch: int, has: Any, transposed: Any, kind: Any,
    alpha: float,
) -> None:  # fmt: skip
    m, n, k = sizes
    shapes = [(k, m) if transposed[0] else (m, k), (n, k) if transposed[1] else (k, n)]
    a, b = (
        np.random.randn(*((batch,) if batched else ()), *shape).astype(kind)
        for batched, shape in zip(has, shapes, strict=True)
    )
    op = OPS[transposed]
    (y, z) = op(a, b, alpha)
    left, right = (x.astype(np.float32) for x in (a, b))
    left = left.swapaxes(-1, -2) if transposed[0] else left
    right = right.swapaxes(-1, -2) if transposed[1] else right
    expected = left @ right
    assert y.dtype == kind and y.shape == expected.shape
    rough = 1e-5 if kind == np.float32 else 2e-2
    np.testing.assert_allclose(y.astype(np.float32), alpha * expected, rtol=rough, atol=rough)
    np.testing.assert_allclose(z, expected - 2, rtol=1e-4, atol=1e-4)
    for one in blas.products:
        assert one.stream == STREAM and one.workspace % 256 == 0 and one.compute == 68


def test_factors_that_the_gpu_reads(blas: FakeCublas) -> None:
    """Not the numbers of another call; the memory is looked at when a product runs."""
    op = one_product(
        "a[M,K]:float32, b[K,N]:float32, f[two]:float32 -> y[M,N]:float32 where two == 2",
        factors="f",
    )
    a, b = np.ones((2, 3), np.float32), np.ones((3, 4), np.float32)
    for alpha in (2.0, -1.5):
        factors = np.array([alpha, 0], np.float32)
        np.testing.assert_array_equal(op(a, b, factors), np.full((2, 4), 3 * alpha))
        assert blas.products[-1].on_gpu and blas.products[-1].alpha == alpha
    one_product("a[M,K]:float32, b[K,N]:float32 -> y[M,N]:float32")(a, b)
    assert not blas.products[-1].on_gpu
    unit: Any = op.implementations[0]
    read = type(unit).from_json(op.name, op.rule, json.loads(json.dumps(unit.to_json())))
    assert read.steps == unit.steps
    np.testing.assert_array_equal(op(a[:, :0], b[:0], factors), np.zeros((2, 4)))


def test_sums_of_nothing(blas: FakeCublas) -> None:
    a, b = np.ones((2, 0), np.float32), np.ones((0, 3), np.float32)
    rule = "a[M,K]:float32, b[K,N]:float32, beta:float32 -> y[M,N]:float32"
    op = one_product(rule, beta="beta", before=[fe.cuda_fill("y", 4)])
    assert not op(a, b, 0.0).any() and (op(a, b, 1.0) == 4).all()
    with pytest.raises(KernelError, match=r"sums over no elements, and `beta` is 0\.5; expected"):
        op(a, b, 0.5)
    assert not blas.products


def test_scratch_and_rows_of_many_dims(blas: FakeCublas, gpu: FakeCuda) -> None:  # noqa: F811
    """A layer of two products, with what lies between them in scratch, of another shape."""
    op = fe.op(
        "layer", "x[*S,K]:T, w[H,K]:T, v[H,N]:T -> y[*S,N]:float32", cuda=fe.cuda_unit(
            "", scratch={"h": "T[x.size // max(K, 1), H]"},
            steps=[
                fe.cuda_matmul("h", "x", "w", transpose_b=True, tf32=True),
                fe.cuda_matmul("y", "h", "v", alpha=2),
            ],
        ),
    )  # fmt: skip
    for shape in ((3,), (2, 3), (4, 2, 3)):
        x, w, v = (np.random.randn(*s).astype(np.float32) for s in (shape, (5, 3), (5, 6)))
        y = op(x, w, v)
        np.testing.assert_allclose(y, 2 * (x @ w.T) @ v, rtol=1e-4, atol=1e-5)
    first, second = blas.products[-2:]
    assert (first.compute, second.compute) == (77, 77 - 9)
    assert [layout[2] for layout in first.layouts] == [1, 1, 1]  # one matrix, of all rows
    assert first.layouts[2][0] == second.layouts[1][0] and first.workspace == second.workspace
    assert gpu.events == blas.products


def test_products_come_in_order_and_only_where_their_condition_holds(blas: FakeCublas) -> None:
    op = fe.op(
        "sometimes", "a[N,N]:float32 -> y[N,N]:float32", cuda=fe.cuda_unit(
            "",
            steps=[
                fe.cuda_copy("y", "a"),
                fe.cuda_matmul("y", "a", "a", when="N > 2"),
                fe.cuda_matmul("y", "a", "a", beta=1, when="N > 4"),
            ],
        ),
    )  # fmt: skip
    unit: Any = op.implementations[0]
    for n in (2, 3, 5):
        a = np.random.randn(n, n).astype(np.float32)
        expected = a if n == 2 else a @ a if n == 3 else 2 * a @ a
        np.testing.assert_allclose(op(a), expected, rtol=1e-4, atol=1e-5)
        bound = op.rule.bind(op.name, [(n, n)], ["float32"])
        op.rule.results(op.name, bound)
        assert unit.launch_for(bound).memory == (32 << 20) * (n > 2)
    assert len(blas.products) == 3


def test_a_unit_without_functions_is_loaded_once(
    blas: FakeCublas, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads = []
    real = driver.Driver.load_all
    monkeypatch.setattr(
        driver.Driver, "load_all", lambda *given: loads.append(given) or real(*given)
    )
    op = one_product("a[M,K]:float32, b[K,N]:float32 -> y[M,N]:float32", name="once")
    for n in (3, 4, 5):
        op(np.ones((2, n), np.float32), np.ones((n, 2), np.float32))
    assert len(loads) == 1 and len(blas.products) == 3


def test_torch(blas: FakeCublas) -> None:
    op = OPS[False, True]
    a, b = torch.randn(3, 4, 5), torch.randn(6, 5)
    for x in (a, a.transpose(0, 1), a[:, 1:], a.bfloat16()):  # copied where they have gaps
        y, _ = op(x, b.to(x.dtype), 0.5)
        torch.testing.assert_close(y, (x @ b.to(x.dtype).T) * 0.5, rtol=2e-2, atol=2e-2)


def test_what_cublas_says(blas: FakeCublas) -> None:
    op = one_product("a[M,K]:float32, b[K,N]:float32 -> y[M,N]:float32")
    a, b = np.ones((2, 3), np.float32), np.ones((3, 4), np.float32)
    blas.library.fake_found(0)
    message = (
        r"the product y = a @ b of unit 'product' \(2x3 @ 3x4, 1 of them, float32\) was not "
        r"started: cuBLAS \(.*\) says CUBLAS_STATUS_NOT_SUPPORTED\."
    )
    with pytest.raises(DeviceError, match=message):
        op(a, b)
    blas.library.fake_found(1)
    blas.status = 7
    with pytest.raises(DeviceError, match="CUBLAS_STATUS_INVALID_VALUE"):
        op(a, b)


def test_no_cublas(gpu: FakeCuda, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:  # noqa: F811
    broken = tmp_path / "libcublasLt.so.13"
    broken.write_text("none")
    for tried in ([], [str(broken)], [str(gpu.path)]):
        cublas.cublas.cache_clear()
        monkeypatch.setattr(cublas, "candidates", lambda *_, tried=tried: iter(tried))
        op = one_product("a[M,K]:float32, b[K,N]:float32 -> y[M,N]:float32",
                         before=[fe.cuda_fill("y")])  # fmt: skip
        with pytest.raises(ToolchainError, match=r"so\.13 or .*`pip install nvidia-cublas` inst"):
            op(np.ones((2, 3), np.float32), np.ones((3, 4), np.float32))
    cublas.cublas.cache_clear()
    assert not gpu.events


MISFITS = [
    ({}, (3, 4), (5, 6), (3, 6)), ({}, (3, 4), (4, 6), (3, 5)), ({}, (3, 4), (4, 6), (6, 3)),
    ({"transpose_a": True}, (3, 4), (3, 6), (3, 6)),
    ({"transpose_b": True}, (3, 4), (4, 6), (3, 6)),
    ({}, (2, 3, 4), (3, 4, 6), (3, 3, 6)), ({}, (2, 3, 4), (2, 4, 6), (3, 6)),
    ({"transpose_a": True}, (2, 4, 3), (4, 6), (3, 6)),
]  # fmt: skip


@pytest.mark.parametrize(("how", "a", "b", "y"), MISFITS)
def test_shapes_that_do_not_fit(blas: FakeCublas, how: Any, a: Any, b: Any, y: Any) -> None:
    dims = ",".join(map(str, y))
    op = one_product(f"a[*A]:float32, b[*B]:float32 -> y[{dims}]:float32", **how)
    with pytest.raises(KernelError, match=r"shapes of a product, 'a' \(.*expected \(…, ., .\)"):
        op(np.zeros(a, np.float32), np.zeros(b, np.float32))
    assert not blas.events


@pytest.mark.parametrize(
    ("a", "b", "y"),
    [("float32", "float16", "float32"), ("int32", "int32", "int32"),
     ("float16", "float16", "bfloat16"), ("float64", "float64", "float64")],
)  # fmt: skip
def test_dtypes_that_are_not_multiplied(blas: FakeCublas, a: str, b: str, y: str) -> None:
    op = one_product("a[M,K]:A, b[K,N]:B, c[]:C -> y[M,N]:C")
    arrays = [np.zeros((2, 2), fe.dtypes.BY_NAME[kind].numpy) for kind in (a, b)]
    arrays.append(np.zeros((), fe.dtypes.BY_NAME[y].numpy))
    message = f"multiplies 'a' of {a} and 'b' of {b} to 'y' of {y}; expected two of float32, fl"
    with pytest.raises(KernelError, match=message):
        op(*arrays)
    assert not blas.events
    with pytest.raises(KernelError, match=message):
        one_product(f"a[M,K]:{a}, b[K,N]:{b} -> y[M,N]:{y}")
    with pytest.raises(KernelError, match="multiplies 'a' of A and 'b' of B to 'y' of C; expected"):
        one_product(
            "a[M,K]:A, b[K,N]:B, c[]:C -> y[M,N]:C"
            f" where A in ({a}, int8), B in ({b}, int64), C in ({y}, int16)"
        )


@pytest.mark.parametrize(
    ("how", "dims"),
    [
        ({}, ("N", "N", "N")), ({}, ("M,N", "N", "M")), ({}, ("M,3", "4,N", "M,N")),
        ({}, ("*S,3", "4,N", "*S,N")), ({"transpose_b": True}, ("M,K", "3,K", "M,2 + 2")),
        ({}, ("M,K", "K,N", "N")), ({"transpose_a": True}, ("B,K,3", "B,K,N", "B,4,N")),
        ({}, ("4,K", "K,N", "5,N")), ({}, ("M,K", "K,N", "M")),
        ({}, ("2,M,K", "3,K,N", "*S,M,N")), ({}, ("2,M,K", "2,K,N", "3,M,N")),
        ({}, ("B,M,K", "2,2,K,N", "5,M,N")), ({}, ("2,3,K", "K,N", "7,N")),
        ({"transpose_a": True}, ("2,K,M", "K,N", "M,N")),
    ],
)  # fmt: skip
def test_products_that_never_fit(how: Any, dims: Any) -> None:
    a, b, y = dims
    words = r"shapes of a product, 'a' \(.*\), 'b' \(.*\), 'y' \(.*\), do not fit; expected \(…"
    with pytest.raises(KernelError, match=words):
        one_product(
            f"n[M,K,N,B]:float32, s[*S]:float32, a[{a}]:float32, b[{b}]:float32 -> y[{y}]:float32",
            **how,
        )


@pytest.mark.parametrize(
    ("how", "dims"),
    [
        ({}, ("K", "K,N", "N")), ({}, ("M,1", "N", "M,N")), ({}, ("*S", "*S", "*S")),
        ({}, ("2,3,K", "K,N", "3,2,N")), ({}, ("M,K", "L,N", "M,N")), ({}, ("M,3", "K,N", "M,N")),
        ({"transpose_b": True}, ("*S,K", "K", "*S,1")), ({}, ("3,K", "B,K,3", "B,3,3")),
        ({"transpose_a": True}, ("K", "N", "K,N")), ({}, ("M,K", "K,1", "M,1")),
        ({}, ("1,M,K", "2,2,K,N", "4,M,N")), ({}, ("2,M,K", "B,K,N", "3,M,N")),
        ({}, ("2,M,K", "1,K,N", "B,M,N")), ({"transpose_a": True}, ("K,M", "K,N", "4,M,N")),
    ],
)  # fmt: skip
def test_products_that_may_fit(how: Any, dims: Any) -> None:
    a, b, y = dims
    rule = f"n[M,K,N,B,L]:T, s[*S]:T, a[{a}]:T, b[{b}]:T -> y[{y}]:T"
    assert one_product(rule, **how).implementations


@pytest.mark.parametrize(
    ("step", "message"),
    [
        (fe.cuda_matmul("x", "a", "b"), "step 1 of op 'wrong': cannot write a product to 'x'; exp"),
        (fe.cuda_matmul("a", "b", "b"), "cannot write a product to 'a'; expected one of what is w"),
        (fe.cuda_matmul("y", "a", "c"), "cannot multiply 'c', which may be None"),
        (fe.cuda_matmul("y", "a", "s"), "cannot multiply 's'; expected one of the arrays"),
        (fe.cuda_matmul("y", "y", "b"), "'y' is multiplied, and is the product"),
        (fe.cuda_matmul("y", "a", "b", alpha="t"), r"`alpha` is 't'; expected a float.*\(s\)"),
        (fe.cuda_matmul("y", "a", "b", beta="k"), r"`beta` is 'k'; expected a float, or one of"),
        (fe.cuda_matmul("y", "a", "b", beta=float("nan")), "`beta` is nan, which float32 does"),
        (fe.cuda_matmul("y", "a", "b", alpha=1e39), "`alpha` is 1e[+]39, which float32 does not"),
        (fe.cuda_matmul("y", "a", "b", alpha=True), "`alpha` is True; expected a float"),
        (fe.cuda_matmul("y", "a", "b", factors="k"), "cannot multiply 'k'; expected one of the ar"),
        (fe.cuda_matmul("y", "a", "b", factors="a"), "`factors` of a product is 'a' of T, .*two e"),
        (fe.cuda_matmul("y", "a", "b", factors="f", alpha=2), "got alpha=2, beta=0.0 and factors="),
        (fe.cuda_matmul("y", "a", "b", tf32=1), "`tf32` is 1; expected a bool"),  # type: ignore[arg-type]
    ],
)
def test_what_is_refused_when_it_is_declared(step: Any, message: str) -> None:
    rule = "a[M,K]:T, b[K,N]:T, c[K,N]:T?, f[2]:float32, s:float32, k:int32 -> y[M,N]:T"
    unit = fe.cuda_unit("", steps=[step, fe.cuda_fill("y")])
    with pytest.raises((KernelError, KernelTypeError), match=message):
        fe.op("wrong", rule, cuda=unit)


def test_files_have_products() -> None:
    op = OPS[True, False]
    unit: Any = op.implementations[0]
    read = type(unit).from_json(op.name, op.rule, json.loads(json.dumps(unit.to_json())))
    assert read.steps == unit.steps and read.scratch == unit.scratch
    one, other = (one_product("a[N,N]:T, b[N,N]:T -> y[N,N]:T", alpha=alpha) for alpha in (2, 3))
    assert one.digest != other.digest


# -- packages --------------------------------------------------------------------------------------

LAYER = fe.op(
    "layer", "x[*S,K]:T, w[H,K]:T, v[H,N]:T, s:float32 -> y[*S,N]:T", cuda=fe.cuda_unit(
        "", scratch={"h": "T[x.size // max(K, 1), H]"},
        steps=[
            fe.cuda_matmul("h", "x", "w", transpose_b=True, when="H > 0"),
            fe.cuda_fill("y", 2),
            fe.cuda_matmul("y", "h", "v", alpha="s", beta=0.5, when="H > 1"),
        ],
    ),
)  # fmt: skip
SUMS = one_product(
    "a[M,K]:float32, b[K,N]:float32, beta:float32 -> y[M,N]:float32", beta="beta",
    before=[fe.cuda_fill("y", 4)], name="sums",
)  # fmt: skip
ANY = one_product("a[M,K]:float32, b[L,N]:float32 -> y[M,N]:float32", name="any")
SCALED = one_product(
    "a[M,K]:float32, b[K,N]:float32, f[2]:float32 -> y[M,N]:float32", factors="f", name="scaled"
)


@pytest.fixture(scope="module")
def packaged(fake_path: Path, fake_cublas_path: Path, library: nvrtc.Nvrtc) -> Library:
    skip_unless_built(library)
    calls: dict[Op, tuple[Any, ...]] = {
        op: (torch.ones(2, *((5, 3) if ta else (3, 5))), torch.ones(2, *((4, 5) if tb else (5, 4))),
             1.0)
        for (ta, tb), op in OPS.items()
    }  # fmt: skip
    calls[LAYER] = (torch.ones(6, 2, 3), torch.ones(4, 3), torch.ones(4, 5), 1.0)
    calls[SUMS] = (torch.ones(6, 3), torch.ones(3, 4), 1.0)
    calls[ANY] = (torch.ones(6, 3), torch.ones(3, 4))
    calls[SCALED] = (torch.ones(6, 3), torch.ones(3, 4), torch.ones(2))
    return Library(calls, fake_path, fake_cublas_path)


@pytest.fixture
def fake_blas(fake: FakeCuda, fake_cublas_path: Path) -> Iterator[FakeCublas]:  # noqa: F811
    with FakeCublas(fake_cublas_path, fake.events).installed() as found:
        yield found


def sent(blas: FakeCublas, call: Any, given: Any) -> tuple[Any, list[Any]]:
    """What a call returns, and what it multiplies, without addresses."""
    blas.products.clear()
    found = call(*given)

    def plain(one: Multiplied) -> Any:
        layouts = [layout[1:] for layout in one.layouts]
        return one._replace(workspace=one.workspace % 256, layouts=tuple(layouts))  # type: ignore[arg-type]

    return found, [plain(one) for one in blas.products]


@QUICK
@given(
    sizes=st.tuples(*[st.integers(0, 4)] * 3, st.integers(1, 4)), which=st.sampled_from(list(OPS)),
    s=st.sampled_from([0.0, 1.0, 0.25]),
)  # fmt: skip
def test_packages_multiply_what_calls_do(
    fake_blas: FakeCublas, packaged: Library, sizes: Any, which: Any, s: float
) -> None:
    b, m, n, k = sizes
    x = torch.randn(b, *((k, m) if which[0] else (m, k)))
    y = torch.randn(b, *((n, k) if which[1] else (k, n)))
    for op, values in (
        (OPS[which], (x, y, s)),
        (LAYER, (torch.randn(b, m, k), torch.randn(n, k), torch.randn(n, m), s)),
        (SUMS, (torch.randn(m, k), torch.randn(k, n), float(s > 0))),
        (SCALED, (torch.randn(m, k), torch.randn(k, n), torch.tensor([s, 0.0]))),
    ):
        op.torch_op  # noqa: B018
        with fastcall.bypassed():  # for C the arrays are the CPU's, which has no stream
            eager, expected = sent(fake_blas, op, values)
        found, products = sent(fake_blas, packaged.overloads[full_name(op)], values)
        assert products == expected
        torch.testing.assert_close(found, list(eager) if isinstance(found, list) else eager)


def test_what_packages_refuse(fake_blas: FakeCublas, packaged: Library, fake: FakeCuda) -> None:  # noqa: F811
    with pytest.raises(
        RuntimeError, match=r"'y = a @ b' sums over no elements, and `beta` is 0\.5"
    ):
        packaged(SUMS, torch.ones(2, 0), torch.ones(0, 3), 0.5)
    with pytest.raises(RuntimeError, match="'y = a @ b' do not fit: 1 of 2 x 3, 1 of 4 x 5"):
        packaged(ANY, torch.ones(2, 3), torch.ones(4, 5))
    assert not fake.events
    fake_blas.library.fake_found(0)
    with pytest.raises(RuntimeError, match=r"'y = a @ b' .* says CUBLAS_STATUS_NOT_SUPPORTED\."):
        packaged(SUMS, torch.ones(2, 3), torch.ones(3, 3), 1.0)
    fake_blas.library.fake_found(1)
    assert fake_blas.leaked == 0
