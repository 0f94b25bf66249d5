"""quantized_matmul, gather_qmm and gather_mm, against products in float64 of MLX's weights."""

from __future__ import annotations

import io
import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ferrule
from ferrule import KernelError, KernelTypeError, ops
from mlx_products import MODES, stacked
from quantized_arrays import (
    BF16,
    DTYPES,
    HOSTS,
    assert_same,
    codes_of,
    mlx_quantize,
    to_mlx,
    to_numpy,
    to_torch,
)

pytestmark = [
    pytest.mark.together,
    # torch's own: its forward mode and its compiler use what they deprecate
    pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*torch._prims_common.check:FutureWarning"),
]

F32, F16, _ = DTYPES
# Half a unit in the last place, and the half of the smallest number
ROUNDING = {F32: (0.0, 0.0), F16: (2.0**-11, 2.0**-25), BF16: (2.0**-8, 0.0)}
MANY = settings(deadline=None, max_examples=80)
Shape = tuple[int, ...]


class Form(NamedTuple):
    """How matrices are stored; "float": not quantized, for gather_mm."""

    mode: str
    group: int
    bits: int
    dtype: np.dtype
    transpose: bool = True

    def __str__(self) -> str:
        return f"{self.mode}-{self.group}-{self.bits}-{self.dtype}{'' if self.transpose else '-kn'}"

    @property
    def stored(self) -> dict[str, Any]:
        return {"group_size": self.group, "bits": self.bits, "mode": self.mode}

    def matrices(self, batch: Shape, k: int, n: int, seed: int = 1) -> list[np.ndarray]:
        """What an op is given of matrices (k, n)."""
        turned = self.transpose and self.mode != "float"
        w = normal((*batch, n, k) if turned else (*batch, k, n), self.dtype, seed)
        return [w] if self.mode == "float" else mlx_quantize(w, *self[1:3], self.mode)

    def dense(self, matrices: Any) -> np.ndarray:
        """Their values (*batch, k, n), as MLX rounds them, in float64."""
        if self.mode == "float":
            return matrices[0].astype(np.float64)
        packed, scales, *_ = matrices
        w = np.zeros((*packed.shape[:-1], scales.shape[-1] * self.group))
        if w.size:
            made = mx.dequantize(
                *map(to_mlx, matrices), **self.stored, dtype=getattr(mx, self.dtype.name)
            )
            w = to_numpy(made).astype(np.float64)
        return w.swapaxes(-1, -2) if self.transpose else w

    def call(self, x: Any, matrices: Any, *indices: Any, **more: Any) -> Any:
        """The product by ferrule: gathered, if there are indices."""
        if self.mode == "float":
            return ops.gather_mm(x, *matrices, *indices, **more)
        if not indices:
            return ops.quantized_matmul(
                x, *matrices, **self.stored, transpose=self.transpose, **more
            )
        biases = [] if self.mode == "affine" else [None]
        return ops.gather_qmm(
            x, *matrices, *biases, *indices, **self.stored, transpose=self.transpose, **more
        )


FLOATS = [Form("float", 1, 32, dtype) for dtype in DTYPES]
ALL = [Form(*MODES[i], DTYPES[(i + i // 6) % 3]) for i in range(len(MODES))]
ALL += [form._replace(transpose=False) for form in ALL if form.group == 64 or form in ALL[18:]]
# Of them: each kind of scale, and elements that lie in words in each way
AFFINE, STORED = Form("affine", 64, 4, F32), Form("nvfp4", 16, 4, F32, False)
NVFP4, MXFP8 = Form("nvfp4", 16, 4, BF16), Form("mxfp8", 32, 8, F16)
BITS6, BITS5 = Form("affine", 64, 6, BF16), Form("affine", 64, 5, F16, False)
SOME = [AFFINE, BITS6, BITS5, MXFP8, Form("mxfp4", 32, 4, F32, False), NVFP4, STORED]
assert set(SOME) - {STORED} <= set(ALL)


def normal(shape: Shape, dtype: Any, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=shape).astype(dtype)


def assert_product(found: Any, x: np.ndarray, dense: np.ndarray, rounded: float = 0) -> None:
    """What float32 adds up, rounded once; NaN where the product in float64 is.

    Args:
        rounded: what each weight may differ by, too, as a part of it.
    """
    found, left = to_numpy(found), x.astype(np.float64)
    exact, sizes = left @ dense, np.abs(left) @ np.abs(dense)
    half, least = ROUNDING[found.dtype]
    bound = (x.shape[-1] * 2.0**-23 + rounded) * sizes + half * np.abs(exact) + least
    assert found.shape == exact.shape
    with np.errstate(invalid="ignore"):  # NaNs of MLX
        error = np.abs(found.astype(np.float64) - exact)
    assert (np.isnan(exact) == np.isnan(error)).all()
    assert (error <= bound)[~np.isnan(exact)].all()


# -- quantized_matmul ------------------------------------------------------------------------------


@pytest.mark.parametrize("form", [*ALL, STORED], ids=str)
def test_each_format(form: Form) -> None:
    matrices = form.matrices((), 128, 128)
    dense = form.dense(matrices)
    given = [to_torch(array) for array in matrices]
    one_hot = to_torch(np.eye(128).astype(form.dtype))
    expected = to_torch(dense.astype(form.dtype))
    assert torch.equal(form.call(one_hot, given), expected)
    assert torch.equal(form.call(one_hot[5], given), expected[5])
    for rows in (1, 40):
        x = normal((rows, 128), form.dtype)
        assert_product(form.call(to_torch(x), given), x, dense)


@pytest.mark.parametrize("form", [*SOME, *FLOATS], ids=str)
def test_rows_of_one_in_batches(form: Form) -> None:
    matrices = form.matrices((3,), 128, 128)
    eye = to_torch(np.eye(128).astype(form.dtype))
    experts = np.arange(128, dtype=np.int32) % 3
    dense = form.dense(matrices).astype(form.dtype)
    given = [to_torch(array) for array in matrices]
    for rhs in (experts, np.sort(experts)):
        for promise in (False, True):
            found = form.call(eye[:, None], given, None, to_torch(rhs), sorted_indices=promise)
            assert_same(found[:, 0], dense[rhs, np.arange(128)])
    if form.mode != "float":
        assert_same(form.call(eye.expand(3, 128, 128), given), dense)


SIZES = st.sampled_from([0, 1, 2, 3, 8, 17, 33, 70])


@st.composite
def sizes(draw: Any, form: Form) -> tuple[int, int, int]:
    """Rows, K and N, of which the one along which groups lie is a multiple of theirs."""
    groups = max(form.group, 32) * draw(st.sampled_from([0, 1, 1, 2, 3]))
    if form.mode == "float":
        return draw(SIZES), draw(SIZES), draw(SIZES)
    free = draw(SIZES)
    return draw(SIZES), *((groups, free) if form.transpose else (free, groups))


@st.composite
def parts(draw: Any, common: Shape) -> Shape:
    """A shape that broadcasts to a common one."""
    kept = common[draw(st.integers(0, len(common))) :]
    return tuple(draw(st.sampled_from([size, size, 1])) for size in kept)


BATCHES = st.lists(st.integers(0, 3), max_size=2).map(tuple)
HOST = st.sampled_from(sorted(HOSTS))


@MANY
@given(st.data(), st.sampled_from(SOME), HOST)
def test_quantized_matmul(data: Any, form: Form, host: str) -> None:
    rows, k, n = data.draw(sizes(form))
    common = data.draw(BATCHES)
    w_batch = data.draw(parts(common))
    x_batch = data.draw(parts(common)) if w_batch else common
    x = normal((*x_batch, rows, k) if w_batch or data.draw(st.booleans()) else (k,), form.dtype)
    matrices = form.matrices(w_batch, k, n)
    found = form.call(HOSTS[host](x), [HOSTS[host](array) for array in matrices])
    assert_product(found, x, form.dense(matrices))
    assert to_numpy(found).dtype == x.dtype


@pytest.mark.parametrize("kinds", [(F32, F16), (F16, F32), (BF16, F32), (F16, BF16)], ids=str)
def test_x_of_another_dtype_than_scales(kinds: Any) -> None:
    """Whether weights are rounded to the one dtype or the other is left open."""
    matrices = Form("affine", 64, 4, kinds[1]).matrices((), 64, 9)
    dense = Form("affine", 64, 4, F32).dense([matrices[0], *(a.astype(F32) for a in matrices[1:])])
    x = normal((3, 64), kinds[0])
    found = to_numpy(AFFINE.call(to_torch(x), [to_torch(array) for array in matrices]))
    assert found.dtype == F32
    left = x.astype(np.float64)
    assert (np.abs(found - left @ dense) <= 2.0**-7 * (np.abs(left) @ np.abs(dense) + 1)).all()
    of_fp4 = ops.quantized_matmul(x, *NVFP4.matrices((), 64, 9), mode="nvfp4")
    assert of_fp4.dtype == x.dtype


@pytest.mark.parametrize("form", [MXFP8, NVFP4], ids=str)
def test_other_views_of_the_same_bits(form: Form) -> None:
    kind = torch.float8_e4m3fn if form.mode == "nvfp4" else torch.float8_e8m0fnu
    packed, scales = (to_torch(array) for array in form.matrices((2,), 64, 64))
    x, order = to_torch(normal((2, 3, 64), form.dtype)), torch.tensor([1, 0])
    for indices in ((), (None, order)):
        expected = form.call(x, [packed, scales], *indices)
        for view in (torch.uint8, torch.int32):
            given = [packed.view(view), scales.view(kind)]
            assert torch.equal(form.call(x, given, *indices), expected)
        turned = [a.mT.contiguous().mT for a in (x, packed, scales)]
        assert torch.equal(form.call(turned[0], turned[1:], *indices), expected)


AMAX = np.array([0.5, 3, 700], np.float32)


def scaled(dtype: Any) -> tuple[Form, list[torch.Tensor], np.ndarray]:
    """Matrices of which each has a global scale, and their values, rounded to a dtype."""
    form = Form("nvfp4", 16, 4, dtype)
    matrices = form.matrices((3,), 64, 9)
    packed, scales = map(to_mlx, matrices)
    dense = np.stack([
        to_numpy(mx.dequantize(packed[i], scales[i], mode="nvfp4", global_scale=mx.array(amax)))
        for i, amax in enumerate(AMAX)
    ])  # fmt: skip
    values = dense.astype(dtype).astype(np.float64).swapaxes(-1, -2)
    return form, [to_torch(array) for array in matrices], values


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_global_scale(dtype: Any) -> None:
    """Of each matrix, of one, a number; whether weights are rounded with it is left open."""
    form, given, dense = scaled(dtype)
    x, order, amax = normal((3, 5, 64), dtype), torch.tensor([2, 0, 1]), torch.from_numpy(AMAX)
    rounded = ROUNDING[dtype][0]
    found = form.call(to_torch(x), given, global_scale=amax)
    assert_product(found, x, dense, rounded)
    found = form.call(to_torch(x), given, None, order, global_scale=amax)
    assert_product(found, x, dense[order], rounded)
    one = [array[1] for array in given]
    for scale in (3.0, torch.tensor(3.0)):
        assert_product(form.call(to_torch(x), one, global_scale=scale), x, dense[1], rounded)


# -- gathers ---------------------------------------------------------------------------------------


def places(draw: Any, batch: Shape, shape: Shape) -> np.ndarray:
    """Indices of a shape into a batch."""
    count = math.prod(batch)
    kind = draw(st.sampled_from(["any", "any", "sorted", "same", "outside"]))
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    low, high = (-2, count + 2) if kind == "outside" or not count else (0, count)
    found = rng.integers(low, high, shape)
    if kind == "sorted":
        found = np.sort(found, None).reshape(shape)
    if kind == "same" and found.size:
        found = np.full(shape, found.flat[0])
    return np.asarray(found, np.int32)  # others would each be a kernel


def taken(array: np.ndarray, index: np.ndarray | None) -> np.ndarray:
    """The matrices of a batch at indices; of NaN, where there is none."""
    if index is None:
        return array.astype(np.float64)
    count = math.prod(array.shape[:-2])
    found = np.full((*index.shape, *array.shape[-2:]), np.nan)
    inside = (index >= 0) & (index < count)
    found[inside] = array.reshape(count, *array.shape[-2:])[index[inside]]
    return found


def assert_gathered(found: Any, x: Any, dense: Any, lhs: Any, rhs: Any) -> None:
    assert_product(found, taken(x, lhs), taken(dense, rhs))
    assert to_numpy(found).dtype == x.dtype


@MANY
@given(st.data(), st.sampled_from([*SOME, *FLOATS]), HOST, st.booleans())
def test_gathers(data: Any, form: Form, host: str, sort: bool) -> None:
    rows, k, n = data.draw(sizes(form).filter(lambda found: found[1] > 0))
    common, omitted = data.draw(BATCHES), data.draw(st.sampled_from(["", "lhs", "rhs", "lhs rhs"]))
    batches, indices = [], []
    for name in ("lhs", "rhs"):
        shape = data.draw(parts(common))
        gone = name in omitted
        batches.append(shape if gone else data.draw(BATCHES))
        indices.append(None if gone else places(data.draw, batches[-1], shape))
    x, matrices = normal((*batches[0], rows, k), form.dtype), form.matrices(batches[1], k, n)
    given = [HOSTS[host](array) for array in (x, *matrices)]
    of_host = [None if index is None else HOSTS[host](index) for index in indices]
    found = form.call(given[0], given[1:], *of_host, sorted_indices=sort)
    assert_gathered(found, x, form.dense(matrices), *indices)


@pytest.mark.parametrize("kind", [np.int32, np.uint32, np.int64])
@pytest.mark.parametrize("form", [AFFINE, NVFP4, FLOATS[0]], ids=str)
def test_indices_outside(form: Form, kind: Any) -> None:
    x, matrices = normal((3, 2, 64), form.dtype), form.matrices((2,), 64, 64)
    limits = np.iinfo(kind)
    rhs = np.array([1, 2, limits.max, limits.min, 0, 1], kind)  # the lowest of uint32 is there
    lhs = np.array([0, 1, 2, 0, 3, 2], kind)
    for to in HOSTS.values():
        given = [to(array) for array in matrices]
        found = form.call(to(x), given, to(lhs), to(rhs))
        assert_gathered(found, x, form.dense(matrices), lhs, rhs)
        found = form.call(to(x), given, None, to(rhs[:3]))
        assert_gathered(found, x, form.dense(matrices), None, rhs[:3])


# -- derivatives -----------------------------------------------------------------------------------


def values(form: Form, matrices: Any, host: Any) -> Callable[..., Any]:
    """Float32 weights [*W, K, N] as a function of affine scales and biases; else a constant."""
    if form.mode != "affine":
        dense = host(form.dense(matrices).astype(np.float32))
        return lambda: dense
    codes = host(codes_of(matrices[0], form.bits).astype(np.float32))

    def of(scales: Any, biases: Any) -> Any:
        groups = codes.reshape(*scales.shape, form.group)
        w = (groups * scales[..., None] + biases[..., None]).reshape(codes.shape)
        return w.swapaxes(-1, -2) if form.transpose else w

    return of


WITH_DERIVATIVES = [AFFINE, AFFINE._replace(transpose=False), STORED, FLOATS[0]]
LHS, RHS = np.array([[0, 1], [3, 1]], np.int32), np.array([[2, 0], [1, 2]], np.int32)


def both_ways(form: Form, host: Any, gathers: bool, rows: int = 5) -> tuple[Any, Any, list[Any]]:
    """A product by ferrule and by the host, as functions of what has derivatives, and that."""
    matrices = form.matrices((3,) if gathers else (), 64, 128)
    x = host(normal((4, rows, 64), F32))
    indices = [host(LHS), host(RHS)] if gathers else []
    given = [host(array) for array in matrices]
    kept = [] if form.mode == "float" else given[:1] if form.mode == "affine" else given
    weights = (lambda w: w) if form.mode == "float" else values(form, matrices, host)

    def ours(x: Any, *varied: Any) -> Any:
        return form.call(x, [*kept, *varied], *indices)

    def theirs(x: Any, *varied: Any) -> Any:
        dense = weights(*varied)
        return x[host(LHS)] @ dense[host(RHS)] if gathers else x @ dense

    return ours, theirs, [x, *given[len(kept) :]]


@pytest.mark.parametrize("gathers", [False, True], ids=["all", "gathered"])
@pytest.mark.parametrize("form", WITH_DERIVATIVES, ids=str)
def test_derivatives_in_torch(form: Form, gathers: bool) -> None:
    if form.mode == "float" and not gathers:
        pytest.skip("that is matmul")
    ours, theirs, varied = both_ways(form, to_torch, gathers)
    varied = [array.requires_grad_() for array in varied]
    y, expected = ours(*varied), theirs(*varied)
    torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-4)
    cotangent = torch.randn_like(y)
    torch.testing.assert_close(
        torch.autograd.grad(y, varied, cotangent), torch.autograd.grad(expected, varied, cotangent),
        rtol=1e-4, atol=1e-3,
    )  # fmt: skip
    given = tuple(array.detach() for array in varied)
    tangents = tuple(torch.randn_like(array) for array in given)
    for found, right in zip(*(torch.func.jvp(f, given, tangents) for f in (ours, theirs)),
                            strict=True):  # fmt: skip
        torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-3)

    def curved(f: Any) -> Any:
        return torch.func.grad(lambda x: (f(x, *given[1:]) ** 2).sum())

    _, found = torch.func.jvp(curved(ours), given[:1], tangents[:1])
    _, right = torch.func.jvp(curved(theirs), given[:1], tangents[:1])
    torch.testing.assert_close(found, right, rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize("gathers", [False, True], ids=["all", "gathered"])
@pytest.mark.parametrize("form", WITH_DERIVATIVES, ids=str)
def test_derivatives_in_mlx(form: Form, gathers: bool) -> None:
    if form.mode == "float" and not gathers:
        pytest.skip("that is matmul")
    ours, theirs, varied = both_ways(form, to_mlx, gathers)
    tangents = [mx.cos(array) for array in varied]
    argnums = list(range(len(varied)))

    def gradients(f: Any) -> Any:
        return mx.grad(lambda *given: mx.sin(f(*given)).sum(), argnums=argnums)

    expected = gradients(theirs)(*varied)
    for found in (gradients(ours)(*varied), mx.compile(gradients(ours), shapeless=True)(*varied)):
        for one, other in zip(found, expected, strict=True):
            assert np.allclose(one, other, rtol=1e-3, atol=1e-2)
    (_, (found,)), (_, (right,)) = (mx.jvp(f, varied, tangents) for f in (ours, theirs))
    assert np.allclose(found, right, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("gathers", [False, True], ids=["all", "gathered"])
@pytest.mark.parametrize("form", [*WITH_DERIVATIVES[:2], FLOATS[0]], ids=str)
def test_derivatives_of_derivatives_in_torch(form: Form, gathers: bool) -> None:
    """With respect to all that is varied, of the gradients of all; and batches of gradients."""
    if form.mode == "float" and not gathers:
        pytest.skip("that is matmul")
    ours, theirs, varied = both_ways(form, to_torch, gathers)
    every = tuple(range(len(varied)))

    def gradients(f: Any) -> Any:
        return torch.func.grad(lambda *given: (f(*given) / 8).sin().sum(), every)

    def again(f: Any) -> Any:
        return torch.func.grad(
            lambda *given: sum(g.sin().sum() for g in gradients(f)(*given)), every
        )

    tangents = tuple(array.cos() for array in varied)
    pairs = [torch.stack([array, array / 2]) for array in varied]
    for found, right in (
        [again(f)(*varied) for f in (ours, theirs)],
        [torch.func.jvp(gradients(f), tuple(varied), tangents)[1] for f in (ours, theirs)],
        [torch.func.vmap(gradients(f))(*pairs) for f in (ours, theirs)],
    ):
        for one, other in zip(found, right, strict=True):
            assert (one - other).abs().max() <= 1e-4 * other.abs().max()


def test_derivatives_of_global_scales() -> None:
    form, given, _ = scaled(F32)
    x, order = to_torch(normal((4, 5, 64), F32)), torch.tensor([2, 0, 1, 2])
    amax = torch.from_numpy(AMAX.copy()).requires_grad_()
    plain = form.call(x, given, None, order) / 2688
    y = form.call(x, given, None, order, global_scale=amax)
    cotangent = torch.randn_like(y)
    (found,) = torch.autograd.grad(y, amax, cotangent)
    each = (cotangent * plain).sum((1, 2))
    torch.testing.assert_close(found, torch.zeros(3).index_add(0, order, each))
    _, found = torch.func.jvp(
        lambda scale: form.call(x, given, None, order, global_scale=scale),
        (amax.detach(),), (torch.tensor([1.0, 2.0, 3.0]),),
    )  # fmt: skip
    torch.testing.assert_close(found, plain * (order + 1)[:, None, None])
    one = torch.tensor(3.0, requires_grad=True)
    y = form.call(x, [array[1] for array in given], global_scale=one)
    (found,) = torch.autograd.grad(y.sum(), one)
    torch.testing.assert_close(found, y.detach().sum() / 3, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("form", [BITS6, NVFP4], ids=str)
def test_derivatives_of_16_bits(form: Form) -> None:
    matrices = form.matrices((3,), 64, 64)
    x = normal((6, 1, 64), form.dtype)
    rhs, cotangent = np.array([2, 2, 0, 1, 0, 2], np.int32), normal((6, 1, 64), form.dtype, 5)
    given = to_torch(x).requires_grad_()
    y = form.call(given, [to_torch(array) for array in matrices], None, to_torch(rhs))
    (found,) = torch.autograd.grad(y, given, to_torch(cotangent))
    assert_product(found, cotangent, form.dense(matrices)[rhs].swapaxes(-1, -2))


# -- transformations -------------------------------------------------------------------------------


class Case(NamedTuple):
    """A function of arrays alone, and those."""

    function: Callable[..., Any]
    arrays: list[np.ndarray]


def case_of(
    form: Form, gathers: bool, tokens: int = 4, experts: int = 3, omitted: str = ""
) -> Case:
    matrices = form.matrices((experts,) if gathers else (), 64, 64)
    x = normal((tokens, 1, 64), form.dtype)
    rng = np.random.default_rng(7)
    indices = [
        rng.integers(0, count, tokens).astype(np.int32)
        for name, count in (("lhs", tokens), ("rhs", experts))
        if gathers and name not in omitted
    ]
    count = len(matrices)

    def function(x: Any, *more: Any) -> Any:
        left = list(more[count:])
        given = [None if name in omitted else left.pop(0) for name in ("lhs", "rhs") if gathers]
        return form.call(x, more[:count], *given)

    return Case(function, [x, *matrices, *indices])


def expected_of(form: Form, case: Case, omitted: str = "") -> np.ndarray:
    count = {"float": 1, "affine": 3}.get(form.mode, 2)
    x, matrices, left = case.arrays[0], case.arrays[1 : 1 + count], case.arrays[1 + count :]
    left = list(left)
    lhs, rhs = (None if name in omitted else left.pop(0) for name in ("lhs", "rhs"))
    return taken(x, lhs) @ taken(form.dense(matrices), rhs)


TRANSFORMED = [
    (AFFINE, False),
    (AFFINE, True),
    (STORED, False),
    (STORED, True),
    (FLOATS[0], True),
]


@pytest.mark.parametrize(("form", "gathers"), TRANSFORMED, ids=str)
def test_batches_along_each_argument(form: Form, gathers: bool) -> None:
    function, arrays = case_of(form, gathers)
    pairs = [np.stack([a, np.roll(a, 1, 0)]) for a in arrays]  # valid in each mode
    for chosen in [{i} for i in range(len(arrays))] + [set(range(len(arrays)))]:
        given = [pairs[i] if i in chosen else a for i, a in enumerate(arrays)]
        axes = tuple(0 if i in chosen else None for i in range(len(arrays)))
        each = [
            function(*[to_torch(a[at] if axis == 0 else a)
                       for a, axis in zip(given, axes, strict=True)])
            for at in range(2)
        ]  # fmt: skip
        found = torch.func.vmap(function, axes)(*map(to_torch, given))
        torch.testing.assert_close(found, torch.stack(each))
        in_mlx = list(map(to_mlx, given))
        found = mx.vmap(function, in_axes=axes)(*in_mlx)
        assert np.allclose(found, stacked(function, axes)(*in_mlx), atol=1e-5)
    last = torch.func.vmap(function, (-1, *[None] * (len(arrays) - 1)), -1)
    x = to_torch(np.stack([arrays[0], arrays[0] * 2], -1))
    y = function(*map(to_torch, arrays))
    torch.testing.assert_close(last(x, *map(to_torch, arrays[1:])), torch.stack([y, y * 2], -1))


@pytest.mark.parametrize("omitted", ["", "lhs", "rhs"])
@pytest.mark.parametrize("form", [AFFINE, STORED, FLOATS[0]], ids=str)
def test_one_graph_of_torch(form: Form, omitted: str) -> None:
    function = case_of(form, True, omitted=omitted).function

    def loss(*arrays: Any) -> Any:
        return function(*arrays).sin().sum()

    torch.compiler.reset()  # it counts the functions that were made of one text
    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens, experts in ((4, 3), (6, 5), (9, 2)):
        experts = tokens if omitted == "rhs" else experts
        x, *rest = map(to_torch, case_of(form, True, tokens, experts, omitted).arrays)
        x.requires_grad_()
        (found,) = torch.autograd.grad(compiled(x, *rest), x)
        (expected,) = torch.autograd.grad(loss(x, *rest), x)
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


class Model(torch.nn.Module):
    def __init__(self, form: Form, gathers: bool) -> None:
        super().__init__()
        self.form, self.gathers = form, gathers
        _, (_, *arrays) = case_of(form, gathers)
        for i, array in enumerate(arrays[: len(arrays) - 2 * gathers]):
            self.register_buffer(f"matrices_{i}", to_torch(array))

    def forward(self, x: Any, *indices: Any) -> Any:
        return self.form.call(x, list(self.buffers()), *indices)


@pytest.mark.parametrize(("form", "gathers"), TRANSFORMED, ids=str)
def test_export_and_operators(form: Form, gathers: bool) -> None:
    model, tokens = Model(form, gathers), torch.export.Dim("tokens", min=2, max=64)
    axes = [{0: tokens}, {0: tokens}, {0: tokens}]

    def arguments(tokens: int) -> tuple[Any, ...]:
        _, arrays = case_of(form, gathers, tokens)
        return tuple(map(to_torch, [arrays[0], *arrays[len(arrays) - 2 * gathers :]]))

    shapes = (axes[0], tuple(axes[1:])) if gathers else (axes[0],)
    given = arguments(4)
    program = torch.export.export(model, given, dynamic_shapes=shapes)
    file = io.BytesIO()
    ferrule.save(program, file)
    file.seek(0)
    again = ferrule.load(file)
    for count in (4, 7):
        longer = arguments(count)
        torch.testing.assert_close(again.module()(*longer), model(*longer))

    checked = []

    class Checks(torch.fx.Interpreter):
        def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
            if getattr(target, "namespace", "") == "ferrule":
                checked.append(target)
                torch.library.opcheck(target, args, kwargs)
            return super().call_function(target, args, kwargs)

    Checks(program.module()).run(given[0].requires_grad_(), *given[1:])
    assert checked


@pytest.mark.parametrize("omitted", [None, "", "lhs", "rhs", "lhs rhs"], ids=str)
@pytest.mark.parametrize("form", [AFFINE, STORED, FLOATS[0]], ids=str)
def test_one_shapeless_graph_of_mlx(form: Form, omitted: str | None, tmp_path: Any) -> None:
    """First with one expert: what MLX itself takes for the number of experts ever after.

    Args:
        omitted: the indices that are not given; None: nothing is gathered.
    """
    if form.mode == "float" and omitted is None:
        pytest.skip("that is matmul")

    def case(tokens: int, experts: int) -> Case:
        return case_of(form, omitted is not None, tokens, experts, omitted or "")

    function, arrays = case(5, 1)
    path = str(tmp_path / "product.mlxfn")
    mx.export_function(path, function, *map(to_mlx, arrays), shapeless=True)
    compiled, imported = mx.compile(function, shapeless=True), ferrule.import_function(path)
    more = [(4, 4), (7, 7)] if "rhs" in (omitted or "") else [(3, 4), (7, 2)]
    for sizes in ((5, 1), *more, (5, 1)):
        other = case(*sizes)
        given = list(map(to_mlx, other.arrays))
        expected = expected_of(form, other, "lhs rhs" if omitted is None else omitted)
        for found in (compiled(*given), imported(*given)[0]):
            assert np.allclose(found, expected, atol=1e-3)


# -- what is refused -------------------------------------------------------------------------------


@pytest.mark.parametrize("op", ["quantized_matmul", "gather_qmm"])
@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ({"mode": "int4"}, ["int4", "affine", "mxfp4", "mxfp8", "nvfp4"]),
        ({"bits": 7}, ["7", "2", "3", "4", "5", "6", "8"]),
        ({"group_size": 48}, ["48", "32", "64", "128"]),
        ({"biases": None}, ["biases"]),
        ({"global_scale": 1.0}, ["global_scale", "affine", "nvfp4"]),
        ({"x": np.ones((2, 3, 32), F32)}, ["32", "64"]),
        ({"x": np.ones((2, 3, 64), np.int32)}, ["int32"]),
        ({"scales": np.ones((2, 9, 2), F32)}, ["(2, 9, 2)"]),
        ({"w": np.ones((2, 9, 8), F32)}, ["float32"]),
    ],
)
def test_what_is_refused(op: str, changed: Any, names: list[str]) -> None:
    w, scales, biases = AFFINE.matrices((2,), 64, 9)
    given = {"x": normal((2, 3, 64), F32), "w": w, "scales": scales, "biases": biases} | changed
    with pytest.raises((KernelError, KernelTypeError)) as error:
        getattr(ops, op)(**given)
    assert all(name in str(error.value) for name in names), str(error.value)


@pytest.mark.parametrize("form", [AFFINE, NVFP4, FLOATS[0]], ids=str)
def test_indices_that_are_refused(form: Form) -> None:
    x, matrices = normal((2, 3, 64), form.dtype), form.matrices((2,), 64, 64)
    with pytest.raises((KernelError, KernelTypeError), match="float32"):
        form.call(x, matrices, None, np.ones(2, F32))
    with pytest.raises((KernelError, KernelTypeError), match=r"\(3,\)"):
        form.call(x, matrices, np.zeros(2, np.int32), np.zeros(3, np.int32))
    if form.mode != "float":  # the scales of other matrices
        with pytest.raises((KernelError, KernelTypeError), match=r"\(2, 64, "):
            form.call(x, [matrices[0][0], *matrices[1:]], np.zeros(2, np.int32), None)


@pytest.mark.parametrize("kind", ["tokens", "right", "left", "both"])
def test_transformations_by_the_way_of_gpus(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs indices become one for each result and side before the product."""
    monkeypatch.setattr(ops.gathers, "on_cpu", lambda x: False)
    parts = ops.quantize(torch.randn(5, 128, 64).bfloat16(), 32, 4)
    dense = ops.dequantize(*parts, 32, 4).float().mT
    x = torch.randn(4, 3, 1, 1, 64).bfloat16()
    x = x if kind == "tokens" else x[:, :, 0]
    rhs = torch.tensor([[3, 0], [1, 1], [4, 2]]) if kind == "tokens" else torch.tensor([3, 0, 4])
    lhs = torch.tensor([[2], [0]])
    names = {"rhs_indices": rhs} if kind != "left" else {}
    names |= {"lhs_indices": lhs} if kind in ("left", "both") else {}

    def call(x: Any, **more: Any) -> Any:
        return ops.gather_qmm(x, *parts, group_size=32, **(names | more))

    def expected(x: Any, lhs: Any = lhs, rhs: Any = rhs) -> Any:
        left = x if kind in ("tokens", "right") else x[lhs]
        return left.float() @ (dense if kind == "left" else dense[rhs])

    close = partial(torch.testing.assert_close, rtol=2e-2, atol=0.1)
    found = torch.vmap(call)(x)
    close(found.float(), torch.stack([expected(one) for one in x]))
    y, tangent = torch.func.jvp(call, (x[0],), (x[1],))
    close(y.float(), expected(x[0]))
    close(tangent.float(), expected(x[1]))
    leaf, wide = x[0].clone().requires_grad_(), x[0].float().requires_grad_()
    c = torch.randn_like(y)
    close(
        torch.autograd.grad(call(leaf), leaf, c)[0].float(),
        torch.autograd.grad(expected(wide), wide, c.float())[0],
    )
    for name, index in names.items():
        batch = torch.stack([index, 2 - index.clamp(max=2)])
        found = torch.vmap(lambda one, name=name: call(x[0], **{name: one}))(batch)
        for y, one in zip(found, batch, strict=True):
            close(y.float(), expected(x[0], **{name[:3]: one}))


def test_what_is_no_array_or_no_view() -> None:
    w, scales = ops.quantize(torch.randn(8, 64), mode="nvfp4")
    x, kind = torch.randn(2, 64), {"mode": "nvfp4"}
    for call, words in (
        (lambda: ops.quantized_matmul([[1.0]], w, scales, **kind), "x is a list; expected an arr"),
        (lambda: ops.quantized_matmul(x, w, None, **kind), "scales is a NoneType; expected an arr"),
        (lambda: ops.gather_mm(None, x), "a is a NoneType; expected an array of NumPy, torch or"),
        (lambda: ops.quantize([1.0]), "w is a list; expected an array"),
        (
            lambda: ops.dequantize(w, scales, global_scale=[1], **kind),
            "global_scale is a list; exp",
        ),
    ):
        with pytest.raises(KernelTypeError, match=words):
            call()
    gaps = w.view(torch.uint8).repeat_interleave(2, -1)[:, ::2]
    with pytest.raises(KernelError, match="w of uint8 cannot be read as uint32 without a copy"):
        ops.quantized_matmul(x, gaps, scales, **kind)
    with pytest.raises(KernelError, match=r"'scales'.*got float8_e5m2, expected .*uint8"):
        ops.quantized_matmul(x, w, scales.view(torch.float8_e5m2), **kind)
