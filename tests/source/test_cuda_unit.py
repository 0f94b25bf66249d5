"""CUDA units without a GPU: their text, machine code, declarations, and what is wrong with them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import cuda_ops
import ferrule as fe
from cuda_ops import SUM, bound, compiled, sum_op
from ferrule import CompileError, DeviceError, KernelError, KernelTypeError, Op, RuleError, cache
from ferrule.source.cuda import unit as cuda_unit
from ferrule.tools import nvrtc
from test_readme import blocks

# -- units: text and machine code ------------------------------------------------------------------


def test_the_text(library: nvrtc.Nvrtc) -> None:
    op = sum_op(template={"BLOCK": "N", "WIDE": "N > 3", "U": fe.bfloat16}, headers={"a.h": "x"})
    unit: Any = op.implementations[0]
    spec = unit.spec(unit.launch_for(bound(op, [(4,), ()], ["float16", None])).template)
    lines = cuda_unit.text(spec).splitlines()
    assert lines[:8] == [
        "// sum", '#include "ferrule_unit.h"', "#include <cuda_fp16.h>", "#include <cuda_bf16.h>",
        "using T = __half;", "constexpr int BLOCK = 4;", "constexpr bool WIDE = true;",
        "using U = __nv_bfloat16;",
    ]  # fmt: skip
    start = lines.index('#line 1 "sum.source"') + 1
    assert "\n".join(lines[start:]).startswith(SUM)


def test_a_unit_is_compiled_once_per_machine(
    library: nvrtc.Nvrtc, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(cache, "default", lambda: kept)
    kept = cache.Cache(tmp_path)
    count = 0
    real = nvrtc.Nvrtc.compile_unit

    def counted(*given: Any) -> Any:
        nonlocal count
        count += 1
        return real(*given)

    monkeypatch.setattr(nvrtc.Nvrtc, "compile_unit", counted)
    first = compiled(sum_op(), [(4,), ()], ["float16", None])
    assert compiled(sum_op(), [(7,), ()], ["float16", None]) == first and count == 1
    assert first.payload.startswith(b"\x7fELF") and "registers" in first.log
    assert first.names == {"parts": "parts", "total": "total"}
    compiled(sum_op(), [(4,), ()], ["float32", None])
    compiled(sum_op(options=["-DX=1"]), [(4,), ()], ["float16", None])
    compiled(sum_op(headers={"x.h": ""}), [(4,), ()], ["float16", None])
    ptx = compiled(sum_op(), [(4,), ()], ["float16", None], "compute_90")
    assert count == 5 and b".entry parts" in ptx.payload
    with pytest.raises(DeviceError, match=r"unit 'sum': NVRTC .* does not compile for 'sm_9'"):
        compiled(sum_op(), [(4,), ()], ["float16", None], "sm_9")
    with pytest.raises(DeviceError, match="unit 'sum' runs on NVIDIA GPUs alone, not on 'cpu'"):
        compiled(sum_op(), [(4,), ()], ["float16", None], "cpu")


@pytest.mark.parametrize(
    ("op", "shapes", "kinds"),
    [
        (cuda_ops.reduction, [(4, 5)], ["float16"]), (cuda_ops.rotation, [(3, 4, 32)], ["float32"]),
        (cuda_ops.reversal, [(2, 9)], ["int32"]), (cuda_ops.counts, [(4,), (3,)], ["int32"] * 2),
    ],
)  # fmt: skip
def test_what_runs_on_a_gpu_compiles_without_one(
    library: nvrtc.Nvrtc, op: Any, shapes: list[Any], kinds: list[str | None]
) -> None:
    assert compiled(op(), shapes, kinds).payload.startswith(b"\x7fELF")


def test_what_one_architecture_alone_has(library: nvrtc.Nvrtc) -> None:
    source = """__global__ void f(float* y) {
    #if __CUDA_ARCH__ >= 900
      asm volatile("wgmma.fence.sync.aligned;");
    #endif
    }"""

    def op(specific: bool) -> Op:
        step = fe.cuda_step("f", ["y"], blocks=1, block=128)
        unit = fe.cuda_unit(source, steps=[step], specific=specific)
        return fe.op("wgmma", "x[N]:float32 -> y[N]:float32", cuda=unit)

    assert compiled(op(True), [(4,)], ["float32"]).mode == "sm_90a"
    assert compiled(op(True), [(4,)], ["float32"], "sm_80").mode == "sm_80"
    with pytest.raises(CompileError, match="wgmma"):
        compiled(op(False), [(4,)], ["float32"])


def test_headers_and_options(library: nvrtc.Nvrtc) -> None:
    source = """
    #include <cmath>
    static_assert(INFINITY > 3e38f && NAN != NAN && sizeof NAN == 4, "");
    #include <stdint.h>
    #include <cuda_runtime.h>
    #include <cooperative_groups.h>
    #include "kernels/tile.cuh"
    #if __cplusplus < 202002L || !defined(TWICE)
    #error the options were not given
    #endif
    __global__ void f(uint32_t const n, const __grid_constant__ float s, float* __restrict__ y,
                      const T* const x) { y[0] = twice(float(x[n])) + s; }"""
    unit = fe.cuda_unit(
        source, headers={"kernels/tile.cuh": "#pragma once\nfloat twice(float x) { TWICE }"},
        options=["-std=c++20", "-DTWICE=return x+x;", "--use_fast_math"],
        steps=[fe.cuda_step("f", ["N", "s", "y", "x"], blocks=1, block=1)],
    )  # fmt: skip
    op = fe.op("given", "x[N]:T, s:float32 -> y[N]:float32", cuda=unit)
    for kind in ("float32", "float8_e4m3fn"):
        made = compiled(op, [(4,), ()], [kind, None])
        assert made.names["f"].startswith("_Z1f")
    with pytest.raises(CompileError, match="source line 12: no suitable conversion"):
        compiled(op, [(4,), ()], ["complex64", None])


MISFITS: list[tuple[dict[str, Any], str, str]] = [
    ({"arguments": ["x", "y", "N"]}, "", r"step1: argument 3, N, is int32, and the function has"),
    ({"arguments": ["x", "y"]}, "", "step1: the step gives 2 arguments, and the function takes"),
    ({"arguments": ["x", "int64 N", "y"]}, "", "argument 2, N, is int64(.|\n)*argument 3, y, is a"),
    ({"function": "f<int>"}, "", r"step1: .*(.|\n)*\| f<int>\(x, y, N\)"),
    ({"function": "g"}, "", r'step1: identifier "g" is undefined\n    \| g\(x, y, N\)$'),
    ({"function": "x3"}, "int x3;", "step1: "),
    ({}, "\n\nint broken = 1 +;", r"source line 3: expected an expression\n    \| int broken = 1 "),
    ({}, '#include "own.h"', r"own.h line 2: .*zz.*\n    \| int h\(\) \{ return zz; \}$"),
    ({}, "#include <no/such.h>", r'source line 1: cannot open source file "no/such.h"'),
]


@pytest.mark.parametrize(("changed", "text", "message"), MISFITS)
def test_errors_quote_the_author(
    library: nvrtc.Nvrtc, changed: dict[str, Any], text: str, message: str
) -> None:
    step = {"function": "f", "arguments": ["x", "y", "int64 N"], "blocks": 1, "block": 1}
    source = f"{text}\n__global__ void f(const float* x, float* y, int64_t n) {{}}\n"
    unit = fe.cuda_unit(
        source, steps=[fe.cuda_step(**{**step, **changed})],
        headers={"own.h": "// own\nint h() { return zz; }"},
    )  # fmt: skip
    op = fe.op("misfit", "x[N]:float32 -> y[N]:float32", cuda=unit)
    with pytest.raises(CompileError, match=message) as caught:
        compiled(op, [(4,)], ["float32"])
    assert str(caught.value).startswith("unit 'misfit' does not compile (NVRTC ")
    assert "fr_unit" not in str(caught.value) and "__nv_name_map" not in str(caught.value)


def test_the_programs_of_the_page_are_compiled(library: nvrtc.Nvrtc) -> None:
    page = Path(__file__).resolve().parents[2] / "docs" / "cuda_kernel.md"
    found: dict[str, Any] = {}
    for block in blocks(page.read_text(encoding="utf-8")):
        if block.language == "python":
            exec(compile(block.text, f"cuda_kernel.md:{block.line}", "exec"), found)  # noqa: S102
    assert found["cubin"].startswith(b"\x7fELF")
    matmul, rms = found["matmul"], found["rms"]
    assert [str(one.when) for one in matmul.implementations] == ["M <= 16", "None"]
    few, many = (bound(matmul, [(m, 64), (32, 64)], ["float16"] * 2) for m in (1, 17))
    assert [one.holds(few) for one in matmul.implementations] == [True, True]
    assert [one.holds(many) for one in matmul.implementations] == [False, True]
    assert list(compiled(rms, [(70_000,), ()], ["bfloat16", None]).names) == [
        "squares<THREADS, T>", "scaled",
    ]  # fmt: skip
    assert (
        rms.implementations[0].launch_for(bound(rms, [(70_000,), ()], ["bfloat16", None])).memory
        == 72
    )
    doubled = found["doubled"], [(100, 72)], ["bfloat16"]
    ptx = compiled(*doubled, "compute_90").payload
    assert b"cp.async.bulk.tensor.2d.global" in ptx
    mlp = found["mlp"], [(2, 5, 64), (32, 64), (32, 16)], ["bfloat16"] * 3
    assert list(compiled(*mlp).names) == ["gelu"]
    assert mlp[0].implementations[0].launch_for(bound(*mlp)).memory == 768 + (32 << 20)


@settings(max_examples=200, deadline=None)
@given(
    kind=st.sampled_from(["", "int32", "uint32", "int64", "uint64"]),
    n=st.integers(0, 2**40), factor=st.integers(0, 2**25), less=st.integers(0, 2**62),
)  # fmt: skip
def test_integers_are_passed_as_declared_or_refused(
    kind: str, n: int, factor: int, less: int
) -> None:
    op = declared(arguments=["y", f"{kind} N*{factor} - {less}"])
    said = bound(op, [(n,), None, ()], ["float32", None, None])
    unit: Any = op.implementations[0]
    dtype, value = np.dtype(kind or "int32"), n * factor - less
    if np.iinfo(dtype).min <= value <= np.iinfo(dtype).max:
        ((step, run),) = unit.launch_for(said).steps
        assert step.arguments[0] == ("array", "y")
        assert run.arguments == (b"", np.array(value, dtype).tobytes())
    else:
        with pytest.raises(KernelError, match=rf"`arguments of step 'f'`.*is {value} for "):
            unit.launch_for(said)


# -- units: declarations ---------------------------------------------------------------------------

RULE = "x[N]:T, b[N]:T?, s:float32 -> y[N]:T"


def declared(**changed: Any) -> Op:
    step = {"function": "f", "arguments": ["x", "y"], "blocks": 1, "block": 1}
    step.update({k: changed.pop(k) for k in list(changed) if k in step})
    step.update({k: changed.pop(k) for k in ("cluster", "shared_memory") if k in changed})
    made = {"steps": [fe.cuda_step(**step)], **changed}
    source = made.pop("source", "__global__ void f(float*, float*) {}")
    return fe.op("declared", RULE, cuda=fe.cuda_unit(source, **made))


DECLARED: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"source": 3}, KernelTypeError, "`source`.*got int"),
    ({"source": "\0"}, KernelError, "NUL character in line 1"),
    ({"steps": "f"}, KernelTypeError, "`steps`: got 'f', expected a list of steps"),
    ({"steps": ["f"]}, KernelTypeError, "`steps`: got 'f' of type str, expected ferrule.cuda_step"),
    ({"steps": []}, KernelError, "no step writes output 'y'"),
    ({"steps": [fe.cuda_fill("z")]}, KernelError, r"step 1.*cannot fill 'z'; expected.*\(y\)"),
    ({"steps": [fe.cuda_fill("x")]}, KernelError, "cannot fill 'x'"),
    ({"steps": [fe.cuda_copy("x", "y")]}, KernelError, "cannot copy to 'x'"),
    ({"steps": [fe.cuda_copy("y", "b")]}, KernelError, "cannot copy 'b', which may be None"),
    ({"steps": [fe.cuda_fill("y", "0")]}, KernelTypeError, "got the value '0', expected a number"),  # type: ignore[arg-type]
    ({"steps": [fe.cuda_fill("y", when="N")]}, KernelError, "`when`.*expected a condition"),
    ({"function": "f; g"}, KernelError, "step 1 of op 'declared': got the function 'f; g'"),
    ({"function": ""}, KernelError, "got the function ''"),
    ({"arguments": "xy"}, KernelTypeError, "`arguments` of step 'f': got 'xy', expected a seq"),
    ({"arguments": ["x", "z"]}, KernelError, "no array, number or dim 'z', but b, x, y, s, N"),
    ({"arguments": ["x", "y", 0.5]}, KernelTypeError, "got 0.5 of type float.*`template`"),
    ({"arguments": ["x", "y", "int64 N > 1"]}, KernelError, "N > 1 as int64, expected a number"),
    ({"arguments": ["x", "y", "bool N"]}, KernelError, "N as bool, expected a condition"),
    ({"arguments": ["x", "y", "b.size"]}, RuleError, "no array 'b' that is always there"),
    ({"blocks": (1, 1, 1, 1)}, KernelError, "`blocks of step 'f'`.*got 4 sizes"),
    ({"block": "N >"}, RuleError, "`block of step 'f'`"),
    ({"cluster": 1.5}, KernelTypeError, "`cluster of step 'f'`.*got 1.5"),
    ({"shared_memory": "N > 1"}, KernelError, "got the condition N > 1, expected a size"),
    ({"scratch": "float32[N]"}, KernelTypeError, "`scratch`.*expected a dictionary"),
    ({"scratch": {"t": "float32"}}, KernelError, "`scratch`.*'float32' for 't'.*dtype.dims"),
    ({"scratch": {"t": "float31[N]"}}, KernelError, "'t' has the dtype 'float31'"),
    ({"scratch": {"t": "float32[N,]"}}, RuleError, r"`scratch\['t'\]`.*missing"),
    ({"scratch": {"t": "float32[N > 1]"}}, KernelError, "got the condition"),
    ({"scratch": {"x": "float32[N]"}}, KernelError, "`scratch` of op .*'x' is also an argument of"),
    ({"state": {"s": "float32[N]"}}, KernelError, "`state` of op 'declared': 's' is also an argum"),
    ({"scratch": {"N": "float32[N]"}}, KernelError, "'N' is also a dim"),
    ({"state": {"N": "float32[N]"}}, KernelError, "`state` of op 'declared': 'N' is also a dim"),
    ({"scratch": {"class": "float32[N]"}}, KernelError, "op. `scratch` of op .* reserved word"),
    ({"state": {"a b": "float32[N]"}}, KernelError, "`state` of op 'declared': 'a b' is not an id"),
    (
        {"scratch": {"u": "float32[N]"}, "state": {"u": "float32[N]"}},
        KernelError,
        "`state` of op 'declared': 'u' is also in `scratch`; rename one of them",
    ),
    ({"template": {"T": 3}}, KernelError, "two arguments called 'T'"),
    ({"template": {"has_b": 3}}, KernelError, "two arguments called 'has_b'"),
    ({"template": {"D": 0.5}}, KernelTypeError, r"template\['D'\]"),
    ({"headers": "x"}, KernelTypeError, "`headers`.*expected a dictionary"),
    ({"headers": {"step1": ""}}, KernelError, "`headers`.*got the name 'step1'"),
    ({"scratch": [("t", "float32[N]")]}, KernelTypeError, "`scratch`.*expected a dictionary"),
    ({"headers": {"../x": ""}}, KernelError, "`headers`.*got the name '../x'"),
    ({"headers": {"x.h": 3}}, KernelTypeError, "got int"),
    ({"specific": 1}, KernelTypeError, "`specific`.*got 1, expected a bool"),
    ({"options": "-DX"}, KernelTypeError, "`options`.*expected a list"),
    ({"options": ["-I/usr"]}, KernelError, "got '-I/usr', expected options.*go to `headers`"),
    ({"options": ["--gpu-architecture=sm_80"]}, KernelError, "got '--gpu-architecture"),
    ({"when": "N"}, KernelError, "`when`.*expected a condition"),
]


@pytest.mark.parametrize(("changed", "error", "message"), DECLARED)
def test_bad_declarations(changed: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        declared(**changed)


def test_all_of_a_unit_is_data_and_changes_the_digest() -> None:
    step = fe.cuda_step("f", ["x", "y"], blocks=1, block=1)
    changes: list[dict[str, Any]] = [
        {}, {"source": "__global__ void f(float*, float*) { }"}, {"function": "f<3>"},
        {"arguments": ["y", "x"]}, {"arguments": ["x", "y", "N"]},
        {"arguments": ["x", "y", "int64 N"]}, {"arguments": ["x", "y", "b", "s", "N > 1"]},
        {"blocks": 2}, {"blocks": ("N", 1, "x.size")}, {"block": 2}, {"cluster": 1},
        {"shared_memory": "N"}, {"when": "N > 1"}, {"template": {"D": "N"}}, {"options": ["-DX"]},
        {"template": {"D": fe.bfloat16}}, {"template": {"D": True}},
        {"specific": True}, {"headers": {"a.h": "b"}},
        {"scratch": {"t": "T[N,ceildiv(N,2)]"}}, {"scratch": {"t": "float32[N]"}},
        {"scratch": {"t": "float32[]", "u": "int8[3]"}},
        {"steps": [step, step]}, {"steps": [fe.cuda_fill("y"), step]},
        {"steps": [fe.cuda_fill("y", 1), step]}, {"steps": [fe.cuda_fill("y", 1.0)]},
        {"steps": [fe.cuda_fill("y", float("-inf"), when="N > 2"), step]},
        {"steps": [fe.cuda_copy("y", "x"), step]},
        {"steps": [fe.cuda_copy("y", "x", when="N < 2"), step]},
    ]  # fmt: skip
    digests = set()
    for changed in changes:
        op = declared(**changed)
        text = json.dumps(op.to_json(), allow_nan=False)
        again = Op.from_json(json.loads(text))
        assert again.to_json() == op.to_json() and again.digest == op.digest
        assert again.implementations[0].calls == op.implementations[0].calls  # type: ignore[union-attr]
        digests.add(op.digest)
    assert len(digests) == len(changes)
    data = declared().to_json()
    for damage in ({"steps": [{}]}, {"steps": [{"run": 3}]}, {"scratch": [["t", "float32"]]},
                   {"headers": [["a"]]}, {"when": ["name", "N"]}):  # fmt: skip
        broken = json.loads(json.dumps(data))
        broken["implementations"][0].update(damage)
        with pytest.raises((RuleError, KernelError, KernelTypeError)):
            Op.from_json(broken)
