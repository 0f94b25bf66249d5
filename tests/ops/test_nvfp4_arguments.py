"""Calls of NVFP4's functions that do not fit: what is said names the function, the argument as its
user knows it, what was given, what was expected, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from ferrule import KernelError, KernelTypeError, ops
from ferrule.ops import NVFP4Experts, NVFP4Linear, quantize_nvfp4
from ferrule.ops.nvfp4 import arguments

E, H, INNER, M, K = 4, 64, 32, 5, 2
BYTE = torch.uint8
NAMES = "packed", "scale", "scale_2"
W = dict(zip((f"w_{name}" for name in NAMES), quantize_nvfp4(torch.randn(6, 64)), strict=True))
W13 = dict(
    zip(
        (f"w13_{name}" for name in NAMES), quantize_nvfp4(torch.randn(E, 2 * INNER, H)), strict=True
    )
)
W2 = dict(
    zip((f"w2_{name}" for name in NAMES), quantize_nvfp4(torch.randn(E, H, INNER)), strict=True)
)
SWAPPED = {
    "w13_" + name.partition("_")[2]: value for name, value in W2.items()
} | {"w2_" + name.partition("_")[2]: value for name, value in W13.items()}  # fmt: skip


def linear(**changed: Any) -> Any:
    return ops.nvfp4_linear(**{"x": torch.randn(3, 64), **W, **changed})


def moe(**changed: Any) -> Any:
    given = {"hidden_states": torch.randn(M, H), "topk_weights": torch.rand(M, K)}
    given["topk_ids"] = torch.randint(0, E, (M, K))
    return ops.nvfp4_moe(**{**given, **W13, **W2, **changed})


def batched(**changed: Any) -> Any:
    given = {"hidden_states": torch.randn(E, 3, H), "counts": torch.tensor([1, 2, 3, 0])}
    return ops.nvfp4_moe_batched(**{**given, **W13, **W2, **changed})


def mxfp4(**changed: Any) -> Any:
    given = {"x": torch.randn(3, 64), "w_packed": torch.zeros(6, 32, dtype=BYTE)}
    return ops.mxfp4_linear(**{**given, "w_scale": torch.zeros(6, 2, dtype=BYTE), **changed})


def mxfp4_moe(**changed: Any) -> Any:
    given = {"hidden_states": torch.randn(M, H), "topk_weights": torch.rand(M, K)}
    given |= {"topk_ids": torch.randint(0, E, (M, K)), "w13_packed": W13["w13_packed"]}
    given |= {"w13_scale": torch.zeros(E, 2 * INNER, 2, dtype=BYTE), "w2_packed": W2["w2_packed"]}
    return ops.mxfp4_moe(**{**given, "w2_scale": torch.zeros(E, H, 1, dtype=BYTE), **changed})


FLOATS = "expected float32, float16 or bfloat16 of shape"
ROUTER = "Give what the router's topk returns: weights are its values, ids its indices."
TOKENS = "Give a row for each token, in one of these dtypes: x.reshape(-1, H)."
CODES = "expected uint8 or float4_e2m1fn_x2 of shape"
BY_W13 = "H = 64 by w13_packed (4, 64, 32)"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (
            lambda: moe(hidden_states=torch.randn(H)),
            f"[nvfp4_moe] hidden_states is float32 of shape (64,); {FLOATS} [M, H], where "
            f"{BY_W13}. {TOKENS}",
        ),
        (
            lambda: moe(hidden_states=torch.randn(M, 80)),
            f"[nvfp4_moe] hidden_states is float32 of shape (5, 80); {FLOATS} [M, H], where "
            f"{BY_W13}. {TOKENS}",
        ),
        (
            lambda: moe(hidden_states=torch.randn(M, H).double()),
            f"[nvfp4_moe] hidden_states is float64 of shape (5, 64); {FLOATS} [M, H]. {TOKENS}",
        ),
        (
            lambda: moe(hidden_states=[[1.0] * H]),
            f"[nvfp4_moe] hidden_states is a list; expected an array of NumPy, torch or MLX, "
            f"{FLOATS.removeprefix('expected ')} [M, H]. {TOKENS}",
        ),
        (
            lambda: moe(topk_ids=torch.zeros(M, K)),
            "[nvfp4_moe] topk_ids is float32 of shape (5, 2); expected int32 or int64 of shape "
            f"[M, k]. {ROUTER}",
        ),
        (
            lambda: moe(topk_weights=torch.rand(M, 3)),
            "[nvfp4_moe] topk_weights is float32 of shape (5, 3); expected float32, float16, "
            "bfloat16 or float64 of shape [M, k], where M = 5 by hidden_states (5, 64) and k = 2 "
            f"by topk_ids (5, 2). {ROUTER}",
        ),
        (
            lambda: moe(topk_ids=torch.rand(M, K), topk_weights=torch.zeros(M, K).long()),
            "[nvfp4_moe] topk_ids is float32 of shape (5, 2); expected int32 or int64 of shape "
            "[M, k]. topk_ids and topk_weights look swapped.",
        ),
        (
            lambda: moe(**SWAPPED),
            f"[nvfp4_moe] w2_packed is uint8 of shape (4, 64, 32); {CODES} [E, H, I / 2], where "
            "E = 4, H = 32, I = 32 by w13_packed (4, 64, 16). w13_* and w2_* look swapped.",
        ),
        (
            lambda: moe(w13_scale=W13["w13_scale"].view(BYTE)),
            "[nvfp4_moe] w2_scale is float8_e4m3fn of shape (4, 64, 2), and w13_scale uint8; "
            "expected one dtype of both. Give the scales of 16 elements each, as the checkpoint "
            "has them, or their bytes: scale.view(torch.uint8).",
        ),
        (
            lambda: moe(w13_packed=W13["w13_packed"][:, : INNER + 1]),
            f"[nvfp4_moe] w13_packed is uint8 of shape (4, 33, 32); {CODES} [E, 2 * I, H / 2] or "
            "[E, 2, I, H / 2]. Give rows of the gate first, then as many for up.",
        ),
        (
            lambda: moe(w13_scale_2=torch.ones(E, 3)),
            "[nvfp4_moe] w13_scale_2 is float32 of shape (4, 3); expected float32 of shape [E] or "
            "[E, 2] or [E, 1], where E = 4 by w13_packed (4, 64, 32). Give one for each expert, or "
            "one of its gate and one for up.",
        ),
        (
            lambda: moe(w2_scale=W2["w2_scale"].to("meta")),
            "[nvfp4_moe] w2_scale is on meta, and w13_packed on cpu; expected one device. Move it: "
            ".to(device).",
        ),
        (
            lambda: moe(topk_ids=np.zeros((M, K), np.int64)),
            "[nvfp4_moe] topk_ids is an array of numpy, and w13_packed an array of torch; expected "
            "arrays of one library. Convert it.",
        ),
        (
            lambda: moe(expert_map=torch.zeros(6)),
            "[nvfp4_moe] expert_map is float32 of shape (6,); expected int32 or int64 of shape "
            "[G]. Give the place of each of G experts, -1 of none, or None.",
        ),
        (
            lambda: batched(counts=torch.ones(3)),
            "[nvfp4_moe_batched] counts is float32 of shape (3,); expected int32, int64, int8, "
            "int16, uint8, uint16, uint32 or uint64 of shape [E]. Give each expert that is here "
            "its count, which may be 0.",
        ),
        (
            lambda: batched(activation="relu"),
            "[nvfp4_moe_batched] activation='relu'; expected one of 'silu', 'gelu_tanh'.",
        ),
        (
            lambda: linear(w_packed=W["w_packed"].T),
            "[nvfp4_linear] w_packed is uint8 of shape (32, 6), so that K = 12; expected a "
            "multiple of 16, which share a scale. Pad with zeros before quantizing.",
        ),
        (
            lambda: linear(w_scale_2=torch.ones(5)),
            "[nvfp4_linear] w_scale_2 is float32 of shape (5,); expected float32 of shape [] or "
            "[1] or [N], where N = 6 by w_packed (6, 32). Give one scale, a number or a float32 "
            "array, or one for each row.",
        ),
        (
            lambda: linear(bias=torch.ones(6).half()),
            "[nvfp4_linear] bias is float16 of shape (6,), and x float32; expected one dtype of "
            "both. Give a vector of x's dtype, or None.",
        ),
        (
            lambda: mxfp4(w_scale=W["w_scale"]),
            "[mxfp4_linear] w_scale is float8_e4m3fn of shape (6, 4); expected float8_e8m0fnu or "
            "uint8 of shape [N, K / 32]. Give the scales of 32 elements each, as the checkpoint "
            "has them, or their bytes: scale.view(torch.uint8).",
        ),
        (
            lambda: mxfp4_moe(topk_ids=torch.zeros(M, K)),
            "[mxfp4_moe] topk_ids is float32 of shape (5, 2); expected int32 or int64 of shape "
            f"[M, k]. {ROUTER}",
        ),
        (
            lambda: NVFP4Linear(64, 6)(torch.zeros(3, 48)),
            f"[nvfp4_linear] x is float32 of shape (3, 48); {FLOATS} [*S, K], where K = 64 by "
            "w_packed (6, 32). Give rows of K elements, in one of these dtypes: "
            "x.to(torch.bfloat16).",
        ),
        (
            lambda: NVFP4Experts.from_tensors(**W13, w1=3),
            "[NVFP4Experts] from_tensors lacks w2_packed, w2_scale, w2_scale_2, and has no use for "
            "w1; expected w13_packed, w13_scale, w13_scale_2, w2_packed, w2_scale, w2_scale_2.",
        ),
        (
            lambda: NVFP4Experts.from_tensors(**{**W13, **W2, "w13_packed": torch.zeros(3)}),
            "[NVFP4Experts] w13_packed is a Tensor of shape (3,); expected a tensor "
            "[E, 2 * I, H / 2]. Stack the matrices of all experts.",
        ),
        (
            lambda: NVFP4Linear.from_tensors(*W.values(), bias=[1.0]),
            "[NVFP4Linear] bias is a list of shape (); expected a tensor of shape (6,), as "
            "w_packed has rows, or None.",
        ),
        (
            lambda: NVFP4Linear.from_linear(nn.Embedding(4, 16)),
            "[NVFP4Linear] from_linear got a layer Embedding; expected one with weight and bias, "
            "as torch.nn.Linear. Of a matrix alone give from_tensors(*quantize_nvfp4(matrix)).",
        ),
        (
            lambda: NVFP4Linear("64", 6),  # type: ignore[arg-type]
            "[NVFP4Linear] in_features='64'; expected a positive multiple of 16, since 16 "
            "neighbours share a scale. Leave this layer as it is, or pad it.",
        ),
    ],
    ids=range(27),
)  # fmt: skip
def test_what_is_said(call: Callable[[], Any], message: str) -> None:
    with pytest.raises((KernelError, KernelTypeError)) as error:
        call()
    assert str(error.value) == message


# What each argument may be given wrongly, whatever it is.
WRONG: dict[str, Callable[[Any], Any]] = {
    "list": lambda a: a.tolist(),
    "number": lambda a: 1j,
    "dtype": lambda a: torch.zeros(a.shape, dtype=torch.complex64),
    "more dims": lambda a: torch.stack([a] * 3),
    "meta": lambda a: a.to("meta"),
    "longer": lambda a: torch.cat([a, a[:1]]) if a.ndim else torch.stack([a] * 3),
    "wider": lambda a: torch.cat([a, a[..., :1]], -1) if a.ndim else a[None, None],
}


# Other rows of x, a number, and one number in two dims.
FITTING = {("x", "more dims"), ("x", "longer"), ("w_scale_2", "list"), ("w_scale_2", "wider")}


@pytest.mark.parametrize("wrong", WRONG)
@pytest.mark.parametrize("function", arguments.SIGNATURES)
def test_each_argument_is_named(function: str, wrong: str) -> None:
    """By its name as the function has it, or by another that it does not fit; never by a name that
    the op has for it."""
    calls = {"nvfp4_linear": linear, "mxfp4_linear": mxfp4, "nvfp4_moe": moe}
    calls |= {"mxfp4_moe": mxfp4_moe, "nvfp4_moe_batched": batched}
    given: dict[str, Any] = {}

    def note(**named: Any) -> Any:
        given.update(named)

    call, plain = calls[function], getattr(ops, function)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops, function, note)
        call()
    names = [wanted.name for wanted in arguments.SIGNATURES[function].arguments]
    for name, value in given.items():
        changed = WRONG[wrong](value.view(BYTE) if "float8" in str(value.dtype) else value)
        if (name, wrong) in FITTING:
            continue
        with pytest.raises((KernelError, KernelTypeError)) as error:
            plain(**given | {name: changed})
        text = str(error.value)
        assert text.startswith(f"[{function}] ") and "; expected" in text
        assert any(text.startswith(f"[{function}] {each} is") for each in names)
        assert name in text or "scale" in text


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("call", "changed"),
    [
        (moe, {"hidden_states": torch.randn(M, 80)}),
        (moe, {"hidden_states": torch.randn(M, H).double()}),
        (moe, {"topk_ids": torch.zeros(M, K)}),
        (moe, {"w13_packed": W13["w13_packed"][:, : INNER + 1]}),
        (moe, {"w13_packed": W13["w13_packed"][0]}),
        (moe, {"w13_scale": W13["w13_scale"].view(BYTE)}),
        (moe, {"expert_map": torch.zeros(6)}),
        (moe, SWAPPED),
        (mxfp4_moe, {"topk_weights": torch.rand(M, 3)}),
        (linear, {"x": torch.randn(3, 48)}),
        (linear, {"w_scale_2": torch.ones(5)}),
        (linear, {"bias": torch.ones(6).half()}),
        (linear, {"w_packed": W["w_packed"].T}),
        (mxfp4, {"w_scale": W["w_scale"]}),
    ],
    ids=range(14),
)
def test_what_is_said_while_torch_traces(
    call: Callable[..., Any], changed: dict[str, Any], dynamic: bool
) -> None:
    """The same, in torch's words around it; sizes are numbers, not symbols."""
    with pytest.raises(KernelError) as error:
        call(**changed)
    torch._dynamo.reset()
    compiled = torch.compile(call, fullgraph=True, dynamic=dynamic, backend="eager")
    with pytest.raises(Exception, match=r"KernelError\(") as traced:
        compiled(**changed)
    assert str(error.value) in str(traced.value)


def test_batches_are_compiled() -> None:
    torch._dynamo.reset()
    given = {"hidden_states": torch.randn(E, 3, H)}
    compiled = torch.compile(batched, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(**given), batched(**given))
    with pytest.raises(Exception, match=r"KernelError\(.\[nvfp4_moe_batched\] counts is float32"):
        compiled(**given, counts=torch.ones(E))


def test_others_are_as_they_were() -> None:
    """What is not of arguments' shapes, dtypes and places is said as by the op."""
    error = KernelError("[op] out of memory")
    given = {"x": torch.randn(3, 64), **W, "bias": None}
    arguments.explain(error, "nvfp4_linear", given)
    arguments.check("nvfp4_linear", given | {"w_scale_2": np.float32(2.0)})
