"""What a compiler says of a kernel, in the author's terms: each complaint once, at its line."""

from __future__ import annotations

import itertools
import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ferrule
from ferrule.devices import diagnostics
from ferrule.devices.cpu import program as cpu
from ferrule.dtypes import BY_NAME
from ferrule.operators import text as op_text
from ferrule.operators.bodies import KernelBody
from ferrule.tools import nvrtc

F32 = np.dtype(np.float32)
I32 = np.dtype(np.int32)

FILLERS = ("", "// a remark", "int unused_%d = 3; (void)unused_%d;", "y[i] = x[i];")
SYNC = ("", "y[i] = simd_sum(1);", "threadgroup_barrier(mem_flags::mem_threadgroup);")
# What divides, and the wrong name in it: before a loop, a prepared divisor has its text once more.
DIVISORS = {
    "n.size": "size",
    "uint(n * wrong)": "wrong",
    "x_shap[0]": "x_shap",
    "(x_shape[0] + wrong[1])": "wrong",
    "n * wrong": "wrong",
}


def quoted(error: ferrule.CompileError) -> list[tuple[int, str]]:
    """The lines of the source that an error quotes: their numbers and texts."""
    said = str(error).splitlines()[1:]
    found = []
    for place, text in itertools.pairwise(said):
        match = re.match(r"  source line (\d+): ", place)
        if match:
            assert text.startswith("    |")
            found.append((int(match[1]), text[5:].strip()))
    return found


@settings(max_examples=8, deadline=None)
@given(data=st.data())
def test_only_lines_of_the_author_are_quoted(data: st.DataObject) -> None:
    """Wherever a divisor is prepared, and however often: its own line alone is quoted, once."""
    lines = ["uint i = thread_position_in_grid.x;", "uint n = x_shape[0];"]
    lines += data.draw(st.lists(st.sampled_from(FILLERS), max_size=3))
    lines.append(data.draw(st.sampled_from(SYNC)))
    divisor = data.draw(st.sampled_from(list(DIVISORS)))
    lines.append(
        f"y[i] = {data.draw(st.sampled_from(['x[i %% %s]', 'i / %s', 'i %% %s'])) % divisor};"
    )
    wrong = len(lines)
    lines += data.draw(st.lists(st.sampled_from(FILLERS), max_size=3))
    lines = [re.sub("%d", str(k), line) for k, line in enumerate(lines)]
    kernel = ferrule.metal_kernel("k", ["x"], ["y"], "\n".join(lines) + "\n")
    template = data.draw(st.sampled_from([None, [("T", F32)]]))
    with (
        cpu.running(data.draw(st.sampled_from(["auto", "fibers"]))),
        pytest.raises(ferrule.CompileError) as caught,
    ):
        kernel.compile("cpu", inputs=["int32[8]"], output_dtypes=[I32], template=template)
    assert {line for line, _ in quoted(caught.value)} == {wrong}, caught.value.log
    assert {text for _, text in quoted(caught.value)} == {lines[wrong - 1]}
    said = [one for one in str(caught.value).splitlines() if DIVISORS[divisor] + "'" in one]
    assert len(said) == 1, caught.value


UNKNOWN = "uint i = thread_position_in_grid.x;\ny[i] = missing(3) + x[i];\ndevice int* p = x;\n"


@pytest.mark.parametrize("template", [None, [("T", F32), ("N", 3)]], ids=["plain", "template"])
def test_an_unknown_function_is_told_once(template: list[tuple[str, object]] | None) -> None:
    """gcc looks such a name up twice in a template, and speaks of its own options."""
    kernel = ferrule.metal_kernel("k", ["x"], ["y"], UNKNOWN)
    with pytest.raises(ferrule.CompileError) as caught:
        kernel.compile("cpu", inputs=["int32[8]"], output_dtypes=[I32], template=template)
    said = str(caught.value)
    assert sorted(quoted(caught.value)) == [
        (2, "y[i] = missing(3) + x[i];"),
        (3, "device int* p = x;"),
    ]
    assert "'missing'" in said and "permissive" not in said
    assert not re.search(r"\[-\w", said)


@pytest.mark.parametrize("name", ["int32", "uint32", "int64", "uint16", "int8"])
def test_names_of_dtypes_are_the_authors(name: str) -> None:
    """They stand where the header keeps its own, which no author has heard of."""
    kernel = ferrule.metal_kernel("typed", ["x"], ["y"], "y = x;")
    x = np.ones(1, name)
    with pytest.raises(ferrule.CompileError) as error:
        kernel.compile(inputs=[x], output_shapes=[(1,)], output_dtypes=[F32])
    assert f"const {name}_t" in str(error.value)
    assert "::" not in str(error.value)


def test_words_of_compilers_options_are_left_out() -> None:
    said = "invalid conversion from 'const int*' to 'int*' [-fpermissive]"
    assert diagnostics.in_authors_terms(said) == said.replace(" [-fpermissive]", "")
    said = "narrowing conversion [-Wnarrowing]"
    assert diagnostics.in_authors_terms(said) == "narrowing conversion"
    said = "size of array 's[-1]' is negative"
    assert diagnostics.in_authors_terms(said) == said


def test_nvrtc_tells_each_once(library: nvrtc.Nvrtc) -> None:
    source = "uint i = thread_position_in_grid.x;\ny[i] = x[i] % 2.0f;\ndevice int* p = x;\n"
    kernels = [
        ferrule.metal_kernel("k", ["x"], ["y"], source),
        ferrule.cuda_kernel(
            "k",
            ["x"],
            ["y"],
            source.replace("uint i = thread_position_in_grid", "int i = threadIdx").replace(
                "device ", ""
            ),
        ),
    ]
    for kernel in kernels:
        with pytest.raises(ferrule.CompileError) as caught:
            kernel.compile("sm_90", inputs=["float32[8]"], output_dtypes=[F32])
        assert [line for line, _ in quoted(caught.value)] == [2, 3]


@pytest.mark.parametrize("device", ["cpu", "sm_90"])
def test_an_error_behind_the_last_line(device: str, library: nvrtc.Nvrtc) -> None:
    """What a body leaves open shows behind it: its last line is quoted."""
    for source in ("uint i = thread_position_in_grid.x;\ny[i] = x[i]\n\n", "y[0] =\n x[0],\n"):
        kernel = ferrule.metal_kernel("k", ["x"], ["y"], source)
        with pytest.raises(ferrule.CompileError) as caught:
            kernel.compile(device, inputs=["float32[8]"], output_dtypes=[F32])
        last = source.split("\n")[1].strip()
        assert quoted(caught.value)[:1] == [(2, last)], caught.value
        assert "no error lies in" not in str(caught.value)


def hinted(source: str, device: str = "cpu", *, header: str = "", **call: object) -> str:
    """What the error for a body says."""
    kernel = ferrule.metal_kernel("k", ["x"], ["y"], source, header)
    with pytest.raises(ferrule.FerruleError) as caught:
        kernel.compile(device, inputs=["float32[8]"], output_dtypes=[F32], **call)  # type: ignore[arg-type]
    return str(caught.value)


INDEX = "uint i = thread_position_in_grid.x;\n"
BOTH = pytest.mark.parametrize("device", ["cpu", "sm_90"])


@BOTH
@pytest.mark.parametrize(
    "head", ["kernel void", "[[kernel]] void", "template <typename T> kernel void"]
)
def test_a_whole_function_is_told_what_to_give(
    head: str, device: str, library: nvrtc.Nvrtc
) -> None:
    source = f"using namespace metal;\n{head} f(device float* y [[buffer(0)]]) {{ y[0] = 1; }}"
    said = hinted(source, device)
    assert "source line 2: a whole Metal function" in said
    assert 'metal=Path("k.metal")' in said


@BOTH
@pytest.mark.parametrize(
    ("body", "word", "instead"),
    [
        ("int i = blockIdx.x * blockDim.x + threadIdx.x; y[i] = x[i];", "blockIdx", "threadgroup_"),
        (INDEX + "__syncthreads(); y[i] = x[i];", "__syncthreads", "threadgroup_barrier(mem_flags"),
        (INDEX + "__shared__ float s[4]; y[i] = x[i];", "__shared__", "threadgroup,"),
        (INDEX + "y[i] = __shfl_xor_sync(~0u, x[i], 1);", "__shfl_xor_sync", "simd_shuffle_xor"),
    ],
)  # fmt: skip
def test_cuda_in_a_metal_body(
    body: str, word: str, instead: str, device: str, library: nvrtc.Nvrtc
) -> None:
    """NVRTC would take some of it, and what comes out would run on one device alone."""
    said = hinted(body, device)
    assert f"source line {1 + body.count(chr(10))}: CUDA in a Metal body" in said
    assert f"found {word!r}" in said and f"write {instead}" in said and "`cuda=`" in said


@pytest.mark.parametrize(
    ("call", "word", "instead"),
    [
        ("atomicAdd(&y[0], x[i]);", "atomicAdd", "atomic_fetch_add_explicit, with `atomic_outputs"),
        ("int m = atomicMax((device int*)y, 3);", "atomicMax", "atomic_fetch_max_explicit"),
        ("if (atomicCAS(y, 0, 1)) y[i] = 2;", "atomicCAS", "atomic_compare_exchange_weak_explicit"),
    ],
)
def test_atomics_of_cuda_in_a_metal_body(call: str, word: str, instead: str) -> None:
    said = hinted(INDEX + call, "cpu")
    assert f"{word!r} is CUDA's: write {instead}" in said and "`cuda=`" in said


@BOTH
@pytest.mark.parametrize("when", ["#if 0", "#ifdef NO_SUCH_MACRO", "#ifndef __METAL_VERSION__"])
def test_a_text_for_cuda_and_metal(when: str, device: str, library: nvrtc.Nvrtc) -> None:
    """What the preprocessor leaves out is nobody's business."""
    body = f"{INDEX}\n{when}\natomicAdd(&y[0], 1.0f);\n#else\ny[i] = x[i];\n#endif"
    kernel = ferrule.metal_kernel("k", ["x"], ["y"], body)
    kernel.compile(device, inputs=["float32[8]"], output_dtypes=[F32])


OWN = [
    "uint3 threadIdx = thread_position_in_threadgroup; y[0] = threadIdx.x;",
    "vec<uint, 3> blockDim = threads_per_threadgroup; y[0] = blockDim.x;",
    "uint2 a = 1, blockIdx = 2; y[0] = a.x + blockIdx.y;",
    "#define gridDim threadgroups_per_grid\ny[0] = gridDim.x;",
    "struct s { int warpSize; }; s a = {3}; y[0] = a.warpSize;",
    "auto atomicAdd = [&](uint at, float v) { y[at] += v; };\natomicAdd(0, 1);",
]


@BOTH
@pytest.mark.parametrize("body", OWN)
def test_names_of_cuda_that_a_body_declares(body: str, device: str, library: nvrtc.Nvrtc) -> None:
    kernel = ferrule.metal_kernel("k", ["x"], ["y"], body)
    kernel.compile(device, inputs=["float32[8]"], output_dtypes=[F32])


@BOTH
@pytest.mark.filterwarnings("ignore::ferrule.PortabilityWarning")  # the CPU's compiler takes some
@pytest.mark.parametrize("size", ["D", "D * 2", "(D + 31) / 32"])
@pytest.mark.parametrize("space", ["threadgroup ", ""])
def test_an_array_whose_size_is_a_dim(
    size: str, space: str, device: str, library: nvrtc.Nvrtc
) -> None:
    op = ferrule.op(
        "o", "x[N,D]:float32 -> y[N,D]:float32", grid="N*D", threadgroup=64,
        metal=f"{INDEX}{space}float s[{size}];\ns[i % D] = x[i];\ny[i] = s[0];",
    )  # fmt: skip
    (body,) = op.implementations
    assert isinstance(body, KernelBody)
    kernel, call = op_text.described(op, body, {"x": ((4, 4), BY_NAME["float32"])})
    with pytest.raises(ferrule.CompileError) as caught:
        kernel.compile(device, **call)
    assert '`template={"D": "D"}` of an op' in str(caught.value)


@BOTH
@pytest.mark.parametrize(
    "call", ["atomic_fetch_add_explicit(&y[0], ", "atomic_store_explicit(y + i, "]
)
def test_atomics_on_a_plain_output(call: str, device: str, library: nvrtc.Nvrtc) -> None:
    said = hinted(f"{INDEX}{call}x[i], memory_order_relaxed);", device)
    assert "Output 'y' is no atomic: `atomic_outputs=True`" in said


@BOTH
@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("thread_positon_in_grid.x", "thread_position_in_grid"),
        ("thread_idx_in_threadgroup", "thread_index_in_threadgroup"),
        ("threads_per_threadgrp.x", "threads_per_threadgroup"),
        ("x_shap[0]", "x_shape"),
    ],
)  # fmt: skip
def test_misspelt_attributes(wrong: str, right: str, device: str, library: nvrtc.Nvrtc) -> None:
    assert f"did you mean '{right}'?" in hinted(f"y[0] = {wrong};", device)
    assert "did you mean" not in hinted("y[0] = thing;", "sm_90")


@pytest.mark.parametrize(
    ("line", "hints"),
    [
        ("y[i] = expf(x[i]) + fmaxf(x[i], powf(x[i], 2));",
         ["'expf' is a name of C and CUDA: write metal::exp,", "metal::fmax,", "metal::pow,"]),
        ("y[i] = __expf(x[i]) + rsqrtf(x[i]);", ["write metal::exp,", "write metal::rsqrt,"]),
    ],
)  # fmt: skip
def test_math_of_c(line: str, hints: list[str]) -> None:
    """NVRTC knows these names, and takes them."""
    for said in (hinted(INDEX + line), hinted(INDEX, header=f"float f(float v) {{\n {line} }}")):
        assert all(hint in said for hint in hints), said
    assert "metal::" not in hinted("y[0] = offf(3) + leaf(2);")


@BOTH
@pytest.mark.parametrize("name", ["gid", "tid", "idx", "i", "index", "thread_id", "globalIdx"])
def test_names_of_a_threads_number(name: str, device: str, library: nvrtc.Nvrtc) -> None:
    said = hinted(f"y[0] = 1;\ny[{name}] = x[{name}];", device)
    told = f"Nothing is called {name!r} here: a thread's place in the grid is thread_position_in_gr"
    assert "source line 2: " in said and said.count(told) == (name != "i")


@BOTH
@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("uint i = thread_position_in_grid;", "thread_position_in_grid.x"),
        ("int i = thread_position_in_threadgroup;", "thread_position_in_threadgroup.x"),
        ("y[thread_position_in_grid] = x[0];", "thread_position_in_grid.x"),
        ("uint2 i = thread_position_in_grid;", "thread_position_in_grid.xy"),
        ("uint3 p = thread_position_in_grid; uint i = p.x + missing;", ""),
        ("uint i = thread_position_in_grid.x; uint3 q = i; uint j = q;", ""),
    ],
)
def test_a_vector_where_a_number_is_expected(
    line: str, told: str, device: str, library: nvrtc.Nvrtc
) -> None:
    said = hinted(f"\n{line}", device)
    assert "source line 2: " in said and ("is a uint3: write" in said) == bool(told)
    assert told in said


def test_torch_is_told_of_ops() -> None:
    torch = pytest.importorskip("torch")
    kernel = ferrule.metal_kernel("k", ["x"], ["y"], INDEX + "y[i] = x[i];")

    def call(x: object) -> object:
        return kernel(
            inputs=[x], output_shapes=[(4,)], output_dtypes=[torch.float32], grid=(4, 1, 1),
            threadgroup=(4, 1, 1),
        )[0]  # fmt: skip

    with pytest.raises(
        ferrule.KernelError, match=r"requires grad.*Declare the kernel with ferrule\.op"
    ):
        call(torch.ones(4, requires_grad=True))
    with pytest.raises(Exception, match=r"declared with ferrule\.op"):
        torch.compile(call, fullgraph=True, backend="eager")(torch.ones(4))


def test_a_binary_is_shown_in_one_line() -> None:
    kernel = ferrule.metal_kernel("k", ["x"], ["y"], INDEX + "y[i] = x[i];")
    binary = kernel.compile("cpu", inputs=["float32[8]"], output_dtypes=[F32])
    assert repr(binary) == f"<ferrule.Binary flat: {len(binary.payload)} bytes>"
