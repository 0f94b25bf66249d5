"""`nvfp4_moe` and `mxfp4_moe`: a mixture of experts, as checkpoints have their matrices."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import ferrule

from .. import formats
from ..arrays import cast, count, filled, library, mapped_ids
from ..quantized import gather_qmm
from . import arguments, experts_cuda, humming
from .linear import FORMATS, SCALES, as_bytes, checked_backend

BACKENDS = {"nvfp4": ("humming", "reference"), "mxfp4": ("reference",)}


def nvfp4_moe(
    hidden_states: Any,
    topk_weights: Any,
    topk_ids: Any,
    w13_packed: Any,
    w13_scale: Any,
    w13_scale_2: Any,
    w2_packed: Any,
    w2_scale: Any,
    w2_scale_2: Any,
    expert_map: Any = None,
    activation: str = "silu",
    apply_router_weight_on_input: bool = False,
    *,
    backend: Any = None,
) -> Any:
    """The weighted sum of what each token's experts make of it, of matrices in NVFP4 (W4A16).

    Expert e makes ``w2[e] @ (activation(gate) * up)`` of a token x, where ``gate`` and ``up`` are
    both halves of ``w13[e] @ x``.

    Args:
        hidden_states: ``[M, H]`` of bfloat16, float16 or float32; H is a multiple of 16.
        topk_weights: ``[M, k]`` of any float dtype.
        topk_ids: ``[M, k]`` of int32 or int64: the experts of each token. One that names none, as
            -1, adds nothing; one may be there twice.
        w13_packed: ``[E, 2 * I, H // 2]`` of uint8: rows of the gate first, then those for up; or
            ``[E, 2, I, H // 2]``. I is a multiple of 16.
        w13_scale: ``[E, 2 * I, H // 16]`` of float8_e4m3fn or its bytes, or with the 2 apart.
        w13_scale_2: ``[E]`` of float32, or ``[E, 2]``: of the gate, and for up.
        w2_packed: ``[E, H, I // 2]``.
        w2_scale: ``[E, H, I // 16]``.
        w2_scale_2: ``[E]``.
        expert_map: ``[G]`` of int32 or int64: ids count G experts, of which this says the place
            among the E that are here, or -1.
        activation: "silu" or "gelu_tanh".
        apply_router_weight_on_input: a token's weight multiplies it before the experts, not what
            they make of it.
        backend: None chooses by device and sizes; "reference" is array code and `gather_qmm`;
            "humming" is the package that `nvfp4_linear` says, with the same conditions, for experts
            whose gate and up have one second scale. What both halves of ``w13[e] @ x`` are, and
            what an expert makes, is then rounded to hidden_states' dtype, too.

    Returns:
        ``[M, H]`` of hidden_states' dtype. Products are of exact elements and block scales; sums,
        second scales, weights and the activation are in float32; what the second product is of is
        rounded to that dtype once, and the result.

    Raises:
        KernelError: shapes, dtypes or the activation do not fit: says which. There are derivatives
            with respect to hidden_states and topk_weights.
        KernelTypeError: an argument is no array.
    """
    matrices = [w13_packed, w13_scale, w13_scale_2, w2_packed, w2_scale, w2_scale_2]
    return _moe(
        "nvfp4", hidden_states, topk_weights, topk_ids, matrices,
        expert_map, activation, apply_router_weight_on_input, backend,
    )  # fmt: skip


def mxfp4_moe(
    hidden_states: Any,
    topk_weights: Any,
    topk_ids: Any,
    w13_packed: Any,
    w13_scale: Any,
    w2_packed: Any,
    w2_scale: Any,
    expert_map: Any = None,
    activation: str = "silu",
    apply_router_weight_on_input: bool = False,
    *,
    backend: Any = None,
) -> Any:
    """The same of matrices in MXFP4: as `nvfp4_moe`, but for scales.

    Args:
        w13_scale, w2_scale: ``[E, 2 * I, H // 32]`` and ``[E, H, I // 32]`` of float8_e8m0fnu, or
            bytes. H and I are multiples of 32. All others: as of `nvfp4_moe`.

    Returns, Raises: as `nvfp4_moe` says.
    """
    matrices = [w13_packed, w13_scale, None, w2_packed, w2_scale, None]
    return _moe(
        "mxfp4", hidden_states, topk_weights, topk_ids, matrices,
        expert_map, activation, apply_router_weight_on_input, backend,
    )  # fmt: skip


def nvfp4_moe_batched(
    hidden_states: Any,
    counts: Any,
    w13_packed: Any,
    w13_scale: Any,
    w13_scale_2: Any,
    w2_packed: Any,
    w2_scale: Any,
    w2_scale_2: Any,
    activation: str = "silu",
    *,
    backend: Any = None,
) -> Any:
    """What experts make of their own tokens: `nvfp4_moe` for tokens that were sent to them.

    Args:
        hidden_states: ``[E, C, H]``: up to C tokens of each expert.
        counts: ``[E]`` of integers: how many of these there are.
        w13_packed, w13_scale, w13_scale_2, w2_packed, w2_scale, w2_scale_2, activation, backend: as
            of `nvfp4_moe`.

    Returns:
        ``[E, C, H]``: zeros behind an expert's count. Nothing is weighted.

    Raises:
        KernelError, KernelTypeError: as `nvfp4_moe` says.
    """
    matrices = [w13_packed, w13_scale, w13_scale_2, w2_packed, w2_scale, w2_scale_2]
    given = _named(hidden_states, None, None, None, *matrices) | {"counts": counts}
    arguments.check("nvfp4_moe_batched", given)
    of = library(hidden_states)
    experts, capacity, width = hidden_states.shape
    place = count(capacity, hidden_states)[None]
    ids = of.where(place < counts[:, None], count(experts, hidden_states)[:, None], -1)
    ones = filled(1.0, hidden_states)[None] + cast(ids * 0, "float32").reshape(-1, 1)
    rows, ids = hidden_states.reshape(-1, width), ids.reshape(-1, 1)
    try:
        y = _mixture("nvfp4", rows, ones, ids, matrices, None, activation, False, backend)
    except Exception as error:
        arguments.explain(error, "nvfp4_moe_batched", given)
        raise
    return y.reshape(experts, capacity, width)


def _named(*given: Any) -> dict[str, Any]:
    """The arguments of a call by their names."""
    matrices = (f"w{w}_{part}" for w in (13, 2) for part in ("packed", "scale", "scale_2"))
    names = "hidden_states", "topk_weights", "topk_ids", "expert_map", *matrices
    return dict(zip(names, given, strict=True))


def _moe(
    mode: str,
    x: Any,
    weights: Any,
    ids: Any,
    matrices: list[Any],
    expert_map: Any,
    activation: Any,
    on_input: bool,
    backend: Any,
) -> Any:
    """The mixture; what is refused is told in the words of its function."""
    try:
        return _mixture(mode, x, weights, ids, matrices, expert_map, activation, on_input, backend)
    except Exception as error:
        given = _named(x, weights, ids, expert_map, *matrices)
        arguments.explain(error, f"{mode}_moe", given)
        raise


def _mixture(
    mode: str,
    x: Any,
    weights: Any,
    ids: Any,
    matrices: list[Any],
    expert_map: Any,
    activation: Any,
    on_input: bool,
    backend: Any,
) -> Any:
    function = f"{mode}_moe"
    checked_backend(function, backend, BACKENDS[mode])
    if activation not in (*ACTIVATIONS,):
        raise ferrule.KernelError(
            f"[{function}] activation={activation!r}; expected one of "
            f"{', '.join(map(repr, ACTIVATIONS))}."
        )
    w13, scale13, second13, w2, scale2, second2 = matrices
    given = [x, weights, ids, _halves(as_bytes(w13)), _halves(scale13)]
    if mode == "nvfp4":
        given.append(second13[:, None] if second13.ndim == 1 else second13)
    given += [as_bytes(w2), scale2]
    given += [second2] * (mode == "nvfp4") + [expert_map] * (expert_map is not None)
    options = mode, activation, bool(on_input), expert_map is not None
    if backend == "humming":
        humming.check(function, "hidden_states", x, w13)
        return moe_op(*options, backend, humming.deterministic())(*given)
    op = moe_op(*options)
    return (op.using(backend) if backend else op)(*given)


def _halves(array: Any) -> Any:
    """An array of both halves, ``[E, 2 * I, *]``, as ``[E, 2, I, *]``; others as they are."""
    if array.ndim != 3 or array.shape[1] % 2:
        return array
    experts, rows, width = array.shape
    return array.reshape(experts, 2, rows // 2, width)


@ferrule.family
def moe_op(
    mode: str,
    activation: str,
    on_input: bool,
    mapped: bool,
    backend: str = "",
    invariant: bool = False,
) -> ferrule.Op:
    """``x, weights, ids, w13_packed, w13_scale, w13_scale_2?, w2_packed, w2_scale, w2_scale_2?,
    expert_map? -> y``; backend and invariant as of `linear_op`."""
    form, scaled = FORMATS[mode], mode == "nvfp4"
    group = form.group
    rule = (
        "x[M,H]:T, weights[M,Q]:V, ids[M,Q]:J, "
        f"w13_packed[E,2,I,H//2]:uint8, w13_scale[E,2,I,H//{group}]:S"
        + ", w13_scale_2[E,A]:float32" * scaled
        + f", w2_packed[E,H,I//2]:uint8, w2_scale[E,H,I//{group}]:S"
        + ", w2_scale_2[E]:float32" * scaled
        + ", expert_map[N]:G" * mapped
        + f" -> y[M,H]:T where H % {group} == 0, I % {group} == 0"
        + ", A == 1 or A == 2" * scaled
        + f", {formats.T_IN_FLOATS}, V in (float32, float16, bfloat16, float64)"
        + ", J in (int32, int64)"
        + ", G in (int32, int64)" * mapped
        + f", S in {SCALES[mode]}"
    )
    parts = Parts(mode, activation, on_input)
    if backend == "humming":
        op = humming.experts("nvfp4_moe_humming", rule, activation, on_input, invariant)
    else:
        op = ferrule.op(
            f"{mode}_moe",
            rule,
            cuda=experts_cuda.units(form, activation, on_input, scaled, mapped),
            reference=parts.layer,
            batch="M",
            partial_sums="I",
            version=1,
        )
    op.def_vjp(parts.vjp, version=1)
    op.def_jvp(parts.jvp, version=1)
    tokens, weights = ("hidden_states", "topk_weights", "topk_ids"), op.rule.inputs[3:]
    op.explain = arguments.explained(f"{mode}_moe", [*tokens, *(p.name for p in weights)])
    return op


class _Slots:
    """The slots of a call, by expert, and what each matrix makes of them, in float32.

    Attributes:
        inside: ``[M, k]``: which of them have an expert.
        ids: ``[M * k]``: the experts, ascending; -1 is none.
        tokens: ``[M * k]``: the token of each.
    """

    def __init__(self, mode: str, ids: Any, expert_map: Any, experts: int) -> None:
        of = library(ids)
        ids = cast(mapped_ids(ids, expert_map), "int64")
        self.inside = (ids >= 0) & (ids < experts)
        flat = of.where(self.inside, ids, -1).reshape(-1)
        order = of.argsort(flat)
        self._mode, self._back, self._shape = mode, of.argsort(order), tuple(ids.shape)
        self.order, self.ids = order, flat[order]
        self.tokens = order // max(self._shape[1], 1)

    def product(self, rows: Any, w: Any, scale: Any, transpose: bool = True) -> Any:
        """``rows @ w[e].T``, or ``rows @ w[e]``, of each slot's expert; NaN of none."""
        w, scale = (
            array.reshape(array.shape[0], math.prod(array.shape[1:-1]), array.shape[-1])
            for array in (w, scale)
        )
        y = gather_qmm(
            rows[:, None], w, scale, rhs_indices=self.ids, transpose=transpose, mode=self._mode,
            sorted_indices=True,
        )  # fmt: skip
        return y[:, 0]

    def scale(self, second: Any) -> Any:
        """The second scales of each slot's expert, ``[M * k, 1]`` or ``[M * k, 2]``."""
        of = library(second)
        if not second.shape[0]:  # no experts
            return cast(self.ids * 0 + 1, "float32")[:, None]
        chosen = second[of.where(self.ids < 0, 0, self.ids)]
        return chosen[:, None] if chosen.ndim == 1 else chosen

    def of_slots(self, weights: Any) -> Any:
        """The weight of each slot, ``[M * k, 1]``."""
        return cast(weights, "float32").reshape(-1)[self.order][:, None]

    def by_token(self, rows: Any) -> Any:
        """``[M, k, *]`` of what each slot has, zeros where it has no expert."""
        of, placed = library(rows), rows[self._back].reshape(*self._shape, rows.shape[1])
        return of.where(self.inside[:, :, None], placed, 0)


class Parts(NamedTuple):
    """A layer in ordinary array code and products of gathered matrices, and its derivative."""

    mode: str
    activation: str
    on_input: bool

    def _first(self, primals: Any) -> tuple[_Slots, list[Any], Any, Any, Any]:
        """The slots, the matrices, the weight of each slot, and what both halves of w13 give."""
        x, weights, ids, *rest = primals
        scaled = self.mode == "nvfp4"
        expert_map = rest.pop() if len(rest) > (6 if scaled else 4) else None
        matrices = rest if scaled else [*rest[:2], None, *rest[2:], None]
        slots = _Slots(self.mode, ids, expert_map, matrices[0].shape[0])
        weight = slots.of_slots(weights)
        return slots, matrices, weight, *self._halves(slots, matrices, x)

    def _halves(self, slots: _Slots, matrices: list[Any], x: Any) -> tuple[Any, Any]:
        """What both halves of w13 give of tokens, by slot."""
        w13, scale13, second13 = matrices[:3]
        both = slots.product(cast(x, "float32")[slots.tokens], w13, scale13)
        gate, up = both[:, : w13.shape[2]], both[:, w13.shape[2] :]
        if second13 is not None:
            second = slots.scale(second13)
            gate, up = gate * second[:, :1], up * second[:, -1:]
        return gate, up

    def _down(self, slots: _Slots, matrices: list[Any], hidden: Any) -> Any:
        """What w2 gives of what it is multiplied with."""
        w2, scale2, second2 = matrices[3:]
        rows = slots.product(hidden, w2, scale2)
        return rows if second2 is None else rows * slots.scale(second2)

    def _hidden(self, gate: Any, up: Any, weight: Any, dtype: Any) -> Any:
        """What the second product is of, rounded, in float32."""
        if self.on_input:
            gate, up = gate * weight, up * weight
        value, _ = ACTIVATIONS[self.activation](library(gate), gate)
        return cast(cast(value * up, dtype), "float32")

    def layer(self, *primals: Any) -> Any:
        """The reference."""
        dtype = primals[0].dtype
        slots, matrices, weight, gate, up = self._first(primals)
        rows = self._down(slots, matrices, self._hidden(gate, up, weight, dtype))
        return cast(slots.by_token(rows if self.on_input else rows * weight).sum(1), dtype)

    def vjp(self, primals: Any, cotangents: Any, outputs: Any, wanted: Any) -> Any:
        """The derivative with respect to hidden states and weights.

        Raises:
            KernelError: another is asked for.
        """
        if any(wanted[2:]):
            raise self.no_derivative
        x, weights = primals[:2]
        slots, matrices, weight, gate, up = self._first(primals)
        w13, scale13, second13, w2, scale2, second2 = matrices
        c = cast(cotangents[0], "float32")[slots.tokens]
        of_hidden = slots.product(c, w2, scale2, transpose=False)
        if second2 is not None:
            of_hidden = of_hidden * slots.scale(second2)
        by = weight if self.on_input else weight * 0 + 1
        value, slope = ACTIVATIONS[self.activation](library(gate), gate * by)
        of_weight = of_hidden * self._hidden(gate, up, weight, x.dtype)
        of_hidden = of_hidden if self.on_input else of_hidden * weight
        of_gate, of_up = of_hidden * slope * up * by, of_hidden * value
        if self.on_input:
            of_weight = of_gate * gate + of_up * up
        gradients: list[Any] = [None] * len(primals)
        if wanted[1]:
            by_token = slots.by_token(of_weight.sum(1)[:, None])
            gradients[1] = cast(by_token[:, :, 0], weights.dtype)
        if wanted[0]:
            second = slots.scale(second13) if second13 is not None else weight * 0 + 1
            both = library(x).concatenate(
                [of_gate * by * second[:, :1], of_up * by * second[:, -1:]], axis=1
            )
            rows = slots.product(both, w13, scale13, transpose=False)
            gradients[0] = cast(slots.by_token(rows).sum(1), x.dtype)
        return gradients

    def jvp(self, primals: Any, tangents: Any, outputs: Any) -> Any:
        """The tangent of the layer, by those of hidden states and weights.

        Raises:
            KernelError: another input has one.
        """
        if any(tangent is not None for tangent in tangents[2:]):
            raise self.no_derivative
        slots, matrices, weight, gate, up = self._first(primals)
        of_weight = weight * 0 if tangents[1] is None else slots.of_slots(tangents[1])
        if tangents[0] is None:
            of_gate, of_up = gate * 0, up * 0
        else:
            of_gate, of_up = self._halves(slots, matrices, tangents[0])
        hidden = self._hidden(gate, up, weight, primals[0].dtype)
        if self.on_input:
            of_gate, of_up = of_gate * weight + gate * of_weight, of_up * weight + up * of_weight
            gate, up = gate * weight, up * weight
        value, slope = ACTIVATIONS[self.activation](library(gate), gate)
        rows = self._down(slots, matrices, slope * of_gate * up + value * of_up)
        if not self.on_input:
            rows = rows * weight
            if tangents[1] is not None:
                rows = rows + self._down(slots, matrices, hidden) * of_weight
        return (cast(slots.by_token(rows).sum(1), primals[0].dtype),)

    @property
    def no_derivative(self) -> ferrule.KernelError:
        return ferrule.KernelError(
            f"[op] op '{self.mode}_moe' has no derivative with respect to matrices and their "
            "scales. Differentiate with respect to hidden_states and topk_weights, and give the "
            "others as buffers, not parameters."
        )


def _silu(of: Any, v: Any) -> tuple[Any, Any]:
    """The value and the derivative."""
    small = of.exp(-of.abs(v))  # which does not overflow
    sigmoid = of.where(v < 0, small, 1 + small * 0) / (1 + small)
    return v * sigmoid, sigmoid * (1 + v * (1 - sigmoid))


def _gelu_tanh(of: Any, v: Any) -> tuple[Any, Any]:
    """The value and the derivative."""
    by = math.sqrt(2 / math.pi)
    tanh = of.tanh(by * (v + 0.044715 * v * v * v))
    slope = 0.5 * v * (1 - tanh * tanh) * by * (1 + 3 * 0.044715 * v * v)
    return 0.5 * v * (1 + tanh), 0.5 * (1 + tanh) + slope


ACTIVATIONS = {"silu": _silu, "gelu_tanh": _gelu_tanh}
