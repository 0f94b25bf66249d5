"""Programmatic dependent launch (`pdl`) of bodies and of steps: what is sent to a driver whose GPUs
are the host, by calls and by packages, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import ferrule as fe
from cuda_ops import compiled
from fake_cuda import FakeCuda, Launched
from ferrule import KernelError, KernelTypeError, Op
from ferrule.operators.file import full_name
from ferrule.tools import nvrtc
from test_cuda_op import gpu  # noqa: F401

torch = pytest.importorskip("torch")
from package_library import Library, skip_unless_built  # noqa: E402
from test_package_cuda import fake  # noqa: E402, F401

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
WAITS = "cudaGridDependencySynchronize(); "
ASM = """
#if __CUDA_ARCH__ >= 900
asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
"""
KERNELS = f"""
extern "C" __global__ void first(float* y) {{ cudaTriggerProgrammaticLaunchCompletion(); }}
extern "C" __global__ void second(float* y) {{ {WAITS} }}
"""


def unit(**more: Any) -> Op:
    """Steps of which the second, third and last wait themselves for the one ahead."""

    def step(function: str, **how: Any) -> Any:
        return fe.cuda_step(function, ["y"], blocks=2, block=32, **how)

    steps = [
        step("first"), step("second", pdl=True), step("second", cluster=2, pdl=True),
        fe.cuda_fill("y"), step("first", cluster=2), step("second", pdl=True),
    ]  # fmt: skip
    unit = fe.cuda_unit(KERNELS, steps=steps, **more)
    return fe.op("waits", "x[N]:float32 -> y[N]:float32", cuda=unit)


def body(**more: Any) -> Op:
    text = f"{WAITS} int i = threadIdx.x; if (i < N) y[i] = x[i];"
    of = fe.cuda_body(text, grid="N", threadgroup=32, pdl=True, **more)
    return fe.op("waiting", "x[N]:float32 -> y[N]:float32", cuda=of)


def sent(fake: FakeCuda) -> list[tuple[str, Any, bool]]:  # noqa: F811
    return [(one.symbol, one.cluster, one.pdl) for one in fake.events if isinstance(one, Launched)]


OF_UNIT = [
    ("first", None, False), ("second", None, True), ("second", (2, 1, 1), True),
    ("first", (2, 1, 1), False), ("second", None, True),
]  # fmt: skip


def test_calls(gpu: FakeCuda) -> None:  # noqa: F811
    x = np.ones(20, np.float32)
    unit()(x)
    assert sent(gpu) == OF_UNIT
    gpu.events.clear()
    body()(x)
    body(init_value=1)(x)
    assert [pdl for _, _, pdl in sent(gpu)] == [True, True]


def test_without_what_a_gpu_does_not_have(gpu: FakeCuda) -> None:  # noqa: F811
    gpu.library.fake_capability(8)
    body()(np.ones(20, np.float32))
    assert [pdl for _, _, pdl in sent(gpu)] == [False]


def test_calls_in_c_are_told(gpu: FakeCuda) -> None:  # noqa: F811
    op = body()
    op(np.ones(20, np.float32))
    (program,) = op.implementations[0].programs.values()  # type: ignore[union-attr]
    real: Any = program
    launch, facts = _launch(real)
    assert real.native(*facts, launch).call[-1] == 1
    gpu.library.fake_capability(8)
    assert real.native(*facts, launch).call[-1] == 0


def _launch(program: Any) -> Any:
    """A launch of a program, as calls prepare it."""
    from ferrule.spec import Facts, Launch

    fact = Facts(fe.float32, (20,), (1,), 64, "cuda:0")
    number = Facts(fe.int32, (), (), 64, "cuda:0", value=True)
    launch = Launch((20, 1, 1), (20, 1, 1), ((20,),), None, ())
    return launch, ([fact, number][: len(program._spec.inputs)], [fact])


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
@pytest.mark.parametrize("text", [WAITS, ASM])
def test_texts_compile_for_gpus_with_and_without_it(
    library: nvrtc.Nvrtc, text: str, architecture: str
) -> None:
    source = f'extern "C" __global__ void f(float* y) {{ {text} y[0] = 1; }}'
    step = fe.cuda_step("f", ["y"], blocks=1, block=1, pdl=True)
    op = fe.op("f", "x[N]:float32 -> y[N]:float32", cuda=fe.cuda_unit(source, steps=[step]))
    target = architecture.replace("sm", "compute")
    ptx = compiled(op, [(4,)], ["float32"], target).payload
    assert (b"griddepcontrol.wait" in ptx) == (architecture == "sm_90")
    kernel = fe.cuda_kernel("f", ["x"], ["y"], f"{text} y[0] = 1;")
    made = kernel.compile(target, inputs=["float32[4]"], output_dtypes=[fe.float32]).payload
    assert (b"griddepcontrol.wait" in made) == (architecture == "sm_90")


def test_a_text_that_never_waits_is_refused() -> None:
    text = "y[0] = 1; // cudaGridDependencySynchronize()"
    source = f'extern "C" __global__ void f(float* y) {{ {text}\n}}'
    message = r"`pdl{}` of op 'no': .* never waits for that; call cudaGridDependencySynchronize\(\)"
    rule = "x[N]:float32 -> y[N]:float32"
    with pytest.raises(KernelError, match=message.format("")):
        fe.op("no", rule, cuda=fe.cuda_body(text, grid=1, threadgroup=1, pdl=True))
    step = fe.cuda_step("f", ["y"], blocks=1, block=1, pdl=True)
    with pytest.raises(KernelError, match=message.format(" of step 'f'")):
        fe.op("no", rule, cuda=fe.cuda_unit(source, steps=[step]))
    unit = fe.cuda_unit(source, headers={"wait.h": f"void wait() {{ {WAITS} }}"}, steps=[step])
    fe.op("no", rule, cuda=unit)  # where the wait is in what it includes


@pytest.mark.parametrize("pdl", [1, "yes", None])
def test_what_is_no_bool_is_refused_where_it_is_written(pdl: Any) -> None:
    with pytest.raises(
        KernelTypeError, match=rf"\[cuda_body\] `pdl`: got {pdl!r}, expected a bool"
    ):
        fe.cuda_body(WAITS, grid=1, threadgroup=1, pdl=pdl)
    with pytest.raises(KernelTypeError, match=f"`pdl` of step 'f': got {pdl!r}, expected a bool"):
        fe.cuda_step("f", ["y"], blocks=1, block=1, pdl=pdl)


def test_files_have_it() -> None:
    for op in (unit(), body()):
        made: Any = op.implementations[0]
        data = json.loads(json.dumps(made.to_json()))
        assert type(made).from_json(op.name, op.rule, data).to_json() == made.to_json()
        assert '"pdl": true' in json.dumps(data)


@pytest.fixture(scope="module")
def packaged(fake_path: Path, library: nvrtc.Nvrtc) -> Library:
    skip_unless_built(library)
    return Library({unit(): (torch.ones(20),), body(): (torch.ones(20),)}, fake_path)


def test_packages(fake: FakeCuda, packaged: Library) -> None:  # noqa: F811
    of_unit, of_body = (packaged.overloads[full_name(op)] for op in (unit(), body()))
    of_unit(torch.ones(20))
    assert sent(fake) == OF_UNIT
    fake.events.clear()
    of_body(torch.ones(20))
    assert [pdl for _, _, pdl in sent(fake)] == [True]
