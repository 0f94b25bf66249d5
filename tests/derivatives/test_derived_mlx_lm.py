"""Tangents and gradients of mlx-lm's recurrent kernels, from their text as it is installed."""

from __future__ import annotations

from typing import Any

import pytest

import ferrule

torch = pytest.importorskip("torch")
pytest.importorskip("mlx_lm")


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    """The kernels' bodies by name: mlx-lm makes them where Metal is there."""
    import importlib
    import sys

    import mlx.core as mx

    made: dict[str, str] = {}

    def make(name: str, *args: Any, **named: Any) -> None:
        made[name] = named.get("source") or args[2]

    names = ["mlx_lm.models.gated_delta", "mlx_lm.models.ssm"]
    before = {name: sys.modules.pop(name, None) for name in names}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mx.metal, "is_available", lambda: True)
        patch.setattr(mx.fast, "metal_kernel", make)
        for name in names:
            importlib.import_module(name)
    for name, module in before.items():
        sys.modules.pop(name, None)
        if module is not None:
            sys.modules[name] = module
    return made


def close(given: Any, wanted: Any) -> None:
    for one, other in zip(given, wanted, strict=True):
        error = (one.double() - other).abs().max() / other.abs().max()
        assert error < 5e-6, float(error)


def gradients(twin: Any, primals: Any, cotangents: Any) -> Any:
    wide = [x.double().requires_grad_() for x in primals]
    return torch.autograd.grad(twin(*wide), wide, [c.double() for c in cotangents])


def test_gated_delta_rule(texts: dict[str, str]) -> None:
    op = ferrule.op(
        "gated_delta",
        "q[B,L,HK,DK]:InT, k[B,L,HK,DK]:InT, v[B,L,HV,DV]:InT, g[B,L,HV]:InT, beta[B,L,HV]:InT, "
        "state_in[B,HV,DV,DK]:StT, T:int32 -> y[B,L,HV,DV]:InT, state_out[B,HV,DV,DK]:StT",
        metal=texts["gated_delta_step"],
        template={"Dk": "DK", "Dv": "DV", "Hk": "HK", "Hv": "HV"},
        grid=("32", "DV", "B*HV"),
        threadgroup=("32", "4", "1"),
    )
    derived = op.derive_jvp()
    assert [a.name for a in derived.rule.declared] == ["y_tangent", "state_out_tangent"]
    b, length, hk, hv, dk, dv = 2, 5, 2, 4, 64, 8
    generator = torch.Generator().manual_seed(0)

    def draw() -> list[Any]:
        shapes = [
            (b, length, hk, dk), (b, length, hk, dk), (b, length, hv, dv), (b, length, hv),
            (b, length, hv), (b, hv, dv, dk),
        ]  # fmt: skip
        return [0.3 * torch.randn(*shape, generator=generator) for shape in shapes]

    def twin(q: Any, k: Any, v: Any, g: Any, beta: Any, state: Any) -> Any:
        q, k = (x.repeat_interleave(hv // hk, 2) for x in (q, k))
        out = []
        for t in range(length):
            state = state * g[:, t, :, None, None]
            memory = (state * k[:, t, :, None]).sum(-1)
            delta = (v[:, t] - memory) * beta[:, t, :, None]
            state = state + k[:, t, :, None] * delta[..., None]
            out.append((state * q[:, t, :, None]).sum(-1))
        return torch.stack(out, 1), state

    primals, tangents = draw(), draw()
    wide = [tuple(x.double() for x in xs) for xs in (primals, tangents)]
    wanted = torch.func.jvp(twin, *wide)[1]
    close(derived(*primals, length, *tangents), wanted)
    cotangents = draw()[2], draw()[5]
    given = op.derive_vjp()(*primals, length, *cotangents)
    close(given[:6], gradients(twin, primals, cotangents))


def test_ssm_update(texts: dict[str, str]) -> None:
    op = ferrule.op(
        "ssm_update",
        "X[B,ONE,HEADS,D]:U, A_log[HEADS]:U, B[B,ONE,GROUPS,S]:U, C[B,ONE,GROUPS,S]:U, "
        "D[HEADS]:U, dt[B,ONE,HEADS]:U, state_in[B,HEADS,D,S]:U "
        "-> out[B,ONE,HEADS,D]:U, state_out[B,HEADS,D,S]:U".replace("[B,", "[N,").replace(
            ",D]", ",P]").replace(",D,", ",P,"),
        metal=texts["ssm_kernel"],
        template={"T": "U", "Dh": "P", "Ds": "S", "H": "HEADS", "G": "HEADS // GROUPS"},
        grid=("32", "P", "HEADS*N"),
        threadgroup=("32", "8", "1"),
    )  # fmt: skip
    derived = op.derive_jvp()
    n, heads, groups, p, s = 2, 4, 2, 8, 64
    generator = torch.Generator().manual_seed(0)

    def draw() -> list[Any]:
        shapes = [
            (n, 1, heads, p), (heads,), (n, 1, groups, s), (n, 1, groups, s), (heads,),
            (n, 1, heads), (n, heads, p, s),
        ]  # fmt: skip
        return [0.3 * torch.randn(*shape, generator=generator) for shape in shapes]

    def twin(x: Any, a_log: Any, b: Any, c: Any, d: Any, dt: Any, state: Any) -> Any:
        b, c = (each[:, 0].repeat_interleave(heads // groups, 1) for each in (b, c))
        step = dt[:, 0]
        decay = torch.exp(-torch.exp(a_log) * step)[..., None, None]
        state = state * decay + (x[:, 0] * step[..., None])[..., None] * b[:, :, None]
        return ((state * c[:, :, None]).sum(-1) + x[:, 0] * d[:, None])[:, None], state

    primals, tangents = draw(), draw()
    wide = [tuple(each.double() for each in xs) for xs in (primals, tangents)]
    wanted = torch.func.jvp(twin, *wide)[1]
    close(derived(*primals, *tangents), wanted)
    cotangents = draw()[0], draw()[6]
    given = op.derive_vjp()(*primals, *cotangents)
    close(given, gradients(twin, primals, cotangents))
