"""`install_mlx`: what programs for MLX are told, and that everything is put back."""

from __future__ import annotations

import copy
import pickle
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn
import numpy as np
import pytest

import ferrule
from ferrule.hosts.mlx import build as mlx_build
from mlx_versions import needs_mlx

pytestmark = pytest.mark.skipif(mx.is_available(mx.gpu), reason="this MLX has a GPU")

PLACES: tuple[Any, ...] = (mx, mx.fast, mx.metal, mx.DeviceType, mx.Device, mx.Stream)
BEFORE = [dict(vars(place)) for place in PLACES]
SOURCE = "uint i = thread_position_in_grid.x; y[i] = x[i] + n;"


def same() -> bool:
    """Whether MLX is as it was imported."""
    return all(
        vars(place).keys() == before.keys()
        and all(vars(place)[name] is value for name, value in before.items())
        for place, before in zip(PLACES, BEFORE, strict=True)
    )


@pytest.fixture
def installed() -> Iterator[None]:
    before = mx.default_device()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ferrule.FerruleWarning)  # of other tests' modules
        ferrule.install_mlx()
    try:
        yield
    finally:
        ferrule.uninstall_mlx()
        mx.set_default_device(before)
        assert same()


def make(metal_kernel: Any = None) -> Any:
    made = (metal_kernel or mx.fast.metal_kernel)(
        name="plus", input_names=["x", "n"], output_names=["y"], source=SOURCE
    )

    def call(x: Any, n: Any, **more: Any) -> Any:
        (y,) = made(
            inputs=[x, n], grid=(x.size, 1, 1), threadgroup=(32, 1, 1), output_shapes=[x.shape],
            output_dtypes=[mx.float32], **more,
        )  # fmt: skip
        return y

    return call


@needs_mlx(0, 32, 3)  # mlx-lm needs a newer one than ferrule
@pytest.mark.parametrize("bits", [None, 4])
def test_expert_layers_of_mlx_lm_in_shapeless_functions(bits: int | None, installed: None) -> None:
    """MLX's own products keep the indices of the trace where one is left out."""
    switch_layers = pytest.importorskip("mlx_lm.models.switch_layers")
    mx.random.seed(3)
    layers = [
        switch_layers.SwitchGLU(64, 32, 6), switch_layers.SwitchMLP(64, 32, 6),
        switch_layers.SwitchLinear(64, 32, 6),
    ]  # fmt: skip
    for layer in layers:
        if bits:
            mlx.nn.quantize(layer, group_size=32, bits=bits)
            layer = layer.to_quantized(32, bits) if hasattr(layer, "to_quantized") else layer
        mx.eval(layer.parameters())

        def called(x: mx.array, chosen: mx.array, layer: Any = layer) -> mx.array:
            if not isinstance(layer, switch_layers.SwitchGLU | switch_layers.SwitchMLP):
                x = mx.expand_dims(x, (-2, -3))
            return layer(x, chosen)  # type: ignore[no-any-return]

        compiled = mx.compile(called, shapeless=True)
        gradient = mx.compile(mx.grad(lambda x, i: called(x, i).sum()), shapeless=True)
        for tokens in (1, 5, 3):
            x, chosen = mx.random.normal((tokens, 64)), mx.random.randint(0, 6, (tokens, 2))
            wanted = called(x, chosen)
            assert mx.allclose(compiled(x, chosen), wanted, atol=1e-4)
            wanted = mx.grad(lambda x, i: called(x, i).sum())(x, chosen)
            assert mx.allclose(gradient(x, chosen), wanted, atol=1e-4)


def test_products_with_an_index_left_out(installed: None) -> None:
    a, b = mx.random.normal((4, 3, 8)), mx.random.normal((4, 8, 5))
    w = mx.quantize(mx.random.normal((4, 64, 64)), 32, 4)
    mx.eval(a, b, w)
    gathered = mx.compile(lambda a, i: mx.gather_mm(a, b, rhs_indices=i), shapeless=True)
    quantized = mx.compile(
        lambda x, i: mx.gather_qmm(x, *w, rhs_indices=i, group_size=32, bits=4), shapeless=True
    )
    batched = mx.compile(
        lambda x: mx.quantized_matmul(x, *w, group_size=32, bits=4), shapeless=True
    )
    for n in (1, 3, 2):
        i, x = mx.arange(n)[::-1], mx.random.normal((n, 3, 64))
        assert mx.allclose(gathered(a[:n], i), a[:n] @ b[:n][::-1], atol=1e-5)
        full = mx.dequantize(*w, group_size=32, bits=4).swapaxes(-1, -2)
        assert mx.allclose(quantized(x, i), x @ full[:n][::-1], atol=1e-4)
        assert mx.allclose(batched(x[0]), x[0] @ full, atol=1e-4)
    assert mx.allclose(
        mx.vmap(lambda x: mx.gather_mm(x, b, rhs_indices=mx.array([1])))(a[:, :1]),
        (a[:, :1] @ b[1])[:, None], atol=1e-5,
    )  # fmt: skip


@pytest.mark.parametrize("mode", ["affine", "mxfp4"])
@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_half_floats_are_added_up_in_float32(dtype: Any, mode: str, installed: None) -> None:
    """MLX's kernels for CPUs add them up in half floats; unmodified layers have ferrule's."""
    mx.random.seed(0)
    kind = {"group_size": 32, "bits": 4, "mode": mode}
    layer = mlx.nn.Linear(512, 64, bias=False)
    layer.set_dtype(dtype)
    layer = layer.to_quantized(**kind)
    parts = layer.weight, layer.scales, layer.get("biases")
    w = np.array(mx.dequantize(*parts, **kind, dtype=dtype).astype(mx.float32), np.float64)
    compiled = mx.compile(layer), mx.compile(layer, shapeless=True)
    for rows in (1, 3, 32):
        x = mx.random.normal((rows, 512)).astype(dtype)
        exact = np.array(x.astype(mx.float32), np.float64)
        bound = 2.0**-8 * np.abs(exact @ w.T) + 512 * 2.0**-24 * (np.abs(exact) @ np.abs(w.T))
        for call in (layer, *compiled):
            y = call(x)
            assert y.dtype == dtype
            error = np.abs(np.array(y.astype(mx.float32), np.float64) - exact @ w.T)
            assert (error <= bound).all()
        gradient = mx.grad(lambda x: layer(x).astype(mx.float32).sum())(x)
        wanted = np.broadcast_to(w.sum(axis=0), x.shape)
        assert np.allclose(np.array(gradient.astype(mx.float32)), wanted, rtol=2**-7, atol=1e-2)


def test_without_mlx() -> None:
    """One line that says what to install, wherever MLX is asked for."""
    code = (
        "import sys; sys.modules['mlx'] = sys.modules['mlx.core'] = None; import ferrule\n"
        "for ask in ('ferrule.install_mlx', 'ferrule.uninstall_mlx', 'ferrule.mlx.gather_mm',"
        " 'ferrule.import_function', 'import ferrule.mlx', 'from ferrule.mlx import gather_mm'):\n"
        "    try: exec(ask)\n"
        "    except ImportError as e: print(e, e.__cause__ is None and e.__suppress_context__)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    names = ["install_mlx", "uninstall_mlx", "mlx", "import_function", "mlx", "mlx"]
    assert done.stdout == "".join(
        f"ferrule.{name} needs MLX, which is not installed here: pip install 'mlx[cpu]' on Linux, "
        "or 'mlx[cuda13]' for NVIDIA GPUs; mlx on a Mac. True\n"
        for name in names
    ), done.stderr


def test_importing_ferrule_changes_nothing() -> None:
    code = (
        "import mlx.core as mx; a, b = dict(vars(mx)), dict(vars(mx.fast))\n"
        "import ferrule; k = ferrule.metal_kernel('k', ['x'], ['y'], 'y[0] = x[0];')\n"
        "k(inputs=[mx.ones(1)], grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[(1,)],"
        " output_dtypes=[mx.float32])\n"
        "print(a == vars(mx) and b == vars(mx.fast))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "True\n", done.stderr


@pytest.mark.parametrize("name", ["step_b1_0.9_eps_1e-08", "a b", "größe", "", "x" * 300])
def test_kernels_that_mlx_names(installed: None, name: str) -> None:
    """MLX takes every text for a name, and Metal looks at it when the kernel runs."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        kernel = mx.fast.metal_kernel(name, ["x"], ["y"], "y[0] = x[0] + 1;")
    (y,) = kernel(
        inputs=[mx.ones(1)], grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[(1,)],
        output_dtypes=[mx.float32],
    )  # fmt: skip
    assert y.tolist() == [2.0]
    refused = [str(one.message) for one in seen if one.category is ferrule.FerruleWarning]
    if name.isascii() and all(c.isalnum() or c == "_" for c in name):
        assert not refused  # nor by Metal
    else:
        assert len(refused) == 1 and "Metal" in refused[0] and repr(name) in refused[0], refused
        assert seen[0].filename == __file__


def test_names_of_no_kernel(installed: None) -> None:
    with pytest.raises(TypeError, match="`name`"):
        mx.fast.metal_kernel(3, ["x"], ["y"], "y[0] = x[0];")  # type: ignore[arg-type]


def test_gates(installed: None) -> None:
    gpu, device = mx.gpu, mx.default_device()
    assert mx.metal.is_available() and mx.is_available(gpu) and mx.device_count(gpu) == 1
    for one in (gpu, mx.Device(gpu), mx.DeviceType.gpu, device):
        assert device == one and one == device
        assert (device != one, one != device) == (False, False)
    for one in (mx.cpu, mx.Device(mx.cpu), 1, None):
        assert device != one and one != device
        assert (device == one, one == device) == (False, False)
    assert device.type == gpu and device.type != mx.cpu
    assert str(device) == "Device(gpu, 0)"
    assert hash(device) == hash(gpu) and {gpu: 1}[device] == 1
    assert isinstance(device, mx.Device)
    assert copy.deepcopy(device) == gpu and pickle.loads(pickle.dumps(device)) == gpu  # noqa: S301
    info = mx.device_info()
    assert info["max_recommended_working_set_size"] <= info["memory_size"]
    assert "memory_size" not in mx.device_info(mx.cpu)


def test_wrong_arguments_are_refused_by_mlx_names(installed: None) -> None:
    missing = "missing 1 required positional argument"
    for function, arguments, message in (
        (
            mx.metal.is_available,
            (1,),
            "is_available() takes 0 positional arguments but 1 was given",
        ),
        (mx.stream, (), f"stream() {missing}: 's'"),
        (mx.is_available, (), f"is_available() {missing}: 'device'"),
        (mx.new_stream, (), f"new_stream() {missing}: 'device'"),
    ):
        with pytest.raises(TypeError) as caught:
            function(*arguments)
        assert str(caught.value) == message


def test_the_cpu_on_purpose(installed: None) -> None:
    mx.set_default_device(mx.cpu)
    assert mx.default_device() == mx.cpu and mx.default_device() != mx.gpu
    with mx.stream(mx.gpu):
        assert mx.default_device() == mx.gpu
        with mx.stream(mx.cpu):
            assert mx.default_device() == mx.cpu
        assert mx.default_device() == mx.gpu
    assert mx.default_device() == mx.cpu
    before = mx.default_device()
    mx.set_default_device(mx.gpu)
    assert mx.default_device() == mx.gpu
    saved = mx.default_device()  # as MLX's own tests restore it
    mx.set_default_device(before)
    assert mx.default_device() == mx.cpu
    mx.set_default_device(saved)
    assert mx.default_device() == mx.gpu
    with pytest.raises(ZeroDivisionError), mx.stream(mx.cpu):
        _ = 1 // 0
    assert mx.default_device() == mx.gpu


@pytest.mark.parametrize("make_stream", ["new_stream", "new_thread_local_stream"])
def test_streams(installed: None, make_stream: str) -> None:
    if not hasattr(mx, make_stream):
        pytest.skip(f"MLX {mlx_build.VERSION} has no {make_stream}")
    make_one = getattr(mx, make_stream)
    for_cpu = make_one(mx.cpu)
    for device in (mx.gpu, mx.Device(mx.gpu), mx.default_device()):
        stream = make_one(device)
        with mx.stream(stream):
            assert mx.default_device() == mx.gpu
            assert (mx.arange(3) + 1).tolist() == [1, 2, 3]
        assert make()(mx.arange(3), 1, stream=stream).tolist() == [1, 2, 3]
        mx.synchronize(stream)
    with mx.stream(for_cpu):
        assert mx.default_device() == mx.cpu
        assert isinstance(stream, mx.Stream) is (make_stream != "new_thread_local_stream")
        if isinstance(stream, mx.Stream):
            assert stream.device == mx.gpu and stream.device != mx.cpu
    if isinstance(for_cpu, mx.Stream):
        assert for_cpu.device == mx.cpu and for_cpu.device != mx.gpu
    for device in (mx.gpu, mx.default_device()):
        stream = mx.default_stream(device)
        assert stream.device == mx.gpu and mx.gpu == stream.device and stream.device != mx.cpu
        assert str(stream.device) == "Device(gpu, 0)"
        assert mx.exp(mx.zeros(2), stream=stream).tolist() == [1, 1]
    assert mx.default_stream(mx.cpu).device == mx.cpu != mx.default_stream(mx.gpu).device
    assert mx.default_stream(mx.gpu) == mx.default_stream(mx.cpu)
    mx.synchronize(mx.default_stream(mx.gpu))
    if mlx_build.at_least(0, 32):  # which takes devices, too
        mx.synchronize(mx.gpu)


@pytest.mark.parametrize("what", ["none", "gpu", "cpu", "device", "default"])
def test_kernels(installed: None, what: str) -> None:
    stream = {
        "none": None, "gpu": mx.gpu, "cpu": mx.cpu, "device": mx.Device(mx.gpu),
        "default": mx.default_device(),
    }[what]  # fmt: skip
    y = make()(mx.arange(5), 2.5, stream=stream)
    assert y.tolist() == [2.5, 3.5, 4.5, 5.5, 6.5]


@pytest.mark.parametrize("x", [np.arange(4, dtype=np.float32), mx.arange(4)], ids=["numpy", "mlx"])
@pytest.mark.parametrize("n", [1, 1.0, np.float32(1), mx.array(1), np.array([1])[0]], ids=repr)
def test_inputs_as_mlx_takes_them(installed: None, x: Any, n: Any) -> None:
    y = make()(x, n)
    assert isinstance(y, mx.array)
    assert y.tolist() == [1, 2, 3, 4]


def test_cuda_kernels_are_made_and_refused_when_called(installed: None) -> None:
    kernel = mx.fast.cuda_kernel(
        name="one", input_names=["x"], output_names=["y"], source="y[0] = x[0];"
    )
    assert "__global__" in kernel.text(inputs=["float32[1]"], output_dtypes=[mx.float32])
    with pytest.raises(ferrule.DeviceError, match="NVIDIA"):
        kernel(
            inputs=[mx.ones(1)], grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[(1,)],
            output_dtypes=[mx.float32],
        )  # fmt: skip


def test_from_other_threads(installed: None) -> None:
    found: list[Any] = []

    def work() -> None:
        found.append((mx.default_device() == mx.gpu, make()(mx.arange(4), 1).tolist()))

    threads = [threading.Thread(target=work) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert found == [(True, [1, 2, 3, 4])] * 4


def test_names_taken_before_and_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    early = types.ModuleType("early_names")
    early.metal_kernel, early.d = mx.fast.metal_kernel, mx.default_device  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "early_names", early)
    theirs = early.metal_kernel
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ferrule.FerruleWarning)
        ferrule.install_mlx()
        ferrule.install_mlx()
    try:
        assert early.metal_kernel is mx.fast.metal_kernel is not theirs
        assert early.d() == mx.gpu
        assert make(early.metal_kernel)(mx.arange(2), 1).tolist() == [1, 2]
        late = types.ModuleType("late_names")
        late.made = mx.fast.metal_kernel  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, "late_names", late)
    finally:
        ferrule.uninstall_mlx()
        ferrule.uninstall_mlx()
    assert late.made is early.metal_kernel is theirs
    assert early.d() == mx.cpu
    assert same()


def test_put_there_and_back_by_many_threads() -> None:
    failed: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(20):
                ferrule.install_mlx()
                ferrule.uninstall_mlx()
        except BaseException as error:
            failed.append(error)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ferrule.FerruleWarning)
        threads = [threading.Thread(target=work) for _ in range(6)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
    assert not failed
    assert same()


@needs_mlx(0, 32)
def test_files_of_functions(installed: None, tmp_path: Path) -> None:
    """A file that was written here can be read here, by a program that knows only of MLX."""
    file, plus = str(tmp_path / "f.mlxfn"), make()
    mx.export_function(file, lambda x: plus(mx.exp(x), 1), mx.zeros(3))
    (y,) = mx.import_function(file)(mx.zeros(3))
    assert y.tolist() == [2, 2, 2]
    mx.export_function(file, mx.exp, mx.zeros(3), shapeless=True)
    assert mx.import_function(file)(mx.zeros(2))[0].tolist() == [1, 1]
    with pytest.raises(ValueError, match="no_such"):
        mx.import_function(str(tmp_path / "no_such.mlxfn"))


def test_modules_imported_before_are_named(tmp_path: Path) -> None:
    (tmp_path / "toolate.py").write_text(
        "import mlx.core as mx\n"
        "kernel = mx.fast.metal_kernel if mx.metal.is_available() else None\n", "utf-8"
    )  # fmt: skip
    (tmp_path / "innocent.py").write_text("import mlx.core as mx\n", "utf-8")
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\nimport innocent, toolate, ferrule, warnings\n"
        "with warnings.catch_warnings(record=True) as said:\n"
        "    warnings.simplefilter('always'); ferrule.install_mlx()\n"
        "print(*(w.message for w in said), *(w.filename for w in said))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, timeout=120
    )
    assert "after toolate had been imported" in done.stdout, done.stdout + done.stderr
    assert done.stdout.endswith("<string>\n")


PROGRAM = """
import sys
print(__name__, sys.argv, 'ferrule' in sys.modules and 'mlx.core' in sys.modules)
import beside
import mlx.core as mx
import ferrule
k = mx.fast.metal_kernel(name="k", input_names=["x"], output_names=["y"], source="y[0] = x[0] + 1;")
print(k(inputs=[mx.ones(1)], grid=(1, 1, 1), threadgroup=(1, 1, 1), output_shapes=[(1,)],
        output_dtypes=[mx.float32]))
sys.exit(3)
"""


@pytest.mark.parametrize("module", [False, True])
def test_run(tmp_path: Path, module: bool) -> None:
    (tmp_path / "program.py").write_text(PROGRAM, "utf-8")
    (tmp_path / "beside.py").write_text("", "utf-8")
    name = ["-m", "program"] if module else [str(tmp_path / "program.py")]
    done = subprocess.run(
        [sys.executable, "-m", "ferrule", "run", *name, "-m", "--flag", "x"],
        capture_output=True, text=True, timeout=120, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 3, done.stderr
    shown = str(tmp_path / "program.py")
    assert done.stdout.splitlines() == [
        f"__main__ {[shown, '-m', '--flag', 'x']} False", "[array([2], dtype=float32)]",
    ]  # fmt: skip


def test_programs_may_look_for_mlx_before_they_import_it() -> None:
    code = (
        "import importlib.util, sys, _ferrule_mlx\n"
        "_ferrule_mlx.when_imported(); before = len(sys.meta_path)\n"
        "for _ in range(2): assert importlib.util.find_spec('mlx.core') is not None\n"
        "import mlx.core as mx\n"
        "print(mx.metal.is_available(), before - len(sys.meta_path), mx.__loader__ is"
        " mx.__spec__.loader, 'ferrule' in type(mx.__loader__).__module__)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "True 1 True False\n", done.stderr


@pytest.mark.parametrize(
    "text",
    [
        "import warnings, ferrule\nwarnings.warn('look')\nraise ferrule.KernelError('wrong')\n",
        "def f():\n    1 / 0\ntry:\n    f()\nexcept ZeroDivisionError:\n    open('/no/such')\n",
        "def f(:\n",
        "import sys\nsys.exit('no')\n",
    ],
)
def test_errors_and_warnings_of_a_program_are_its_own(tmp_path: Path, text: str) -> None:
    (tmp_path / "program.py").write_text(text, "utf-8")
    command = [sys.executable, str(tmp_path / "program.py")]
    plain = subprocess.run(command, capture_output=True, text=True, timeout=120)
    command[1:1] = ["-m", "ferrule", "run"]
    ours = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert ours.returncode == plain.returncode == 1
    assert ours.stderr == plain.stderr != ""


@pytest.mark.parametrize(
    ("given", "said"),
    [
        (["no_such.py", "-x"], "no_such.py"), (["empty"], "no file __main__.py"),
        (["-m", "no_such"], "No module named 'no_such'"), (["-mno_such.one"], "'no_such.one'"),
        (["-m", "xml.no_such"], "'xml.no_such'"), (["-m", "xml"], "'xml.__main__'"),
        ([], "PROGRAM"), (["-m"], "PROGRAM"), (["-x", "program.py"], "-x"),
        (["--modul", "program"], "--modul"), (["-c", "print(1)"], "-c"),
    ],
)  # fmt: skip
def test_run_of_what_cannot_be_run(tmp_path: Path, given: list[str], said: str) -> None:
    (tmp_path / "empty").mkdir()
    done = subprocess.run(
        [sys.executable, "-m", "ferrule", "run", *given],
        capture_output=True, text=True, timeout=120, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "Error: " in done.stderr and said in done.stderr
    assert "Traceback" not in done.stderr


def test_run_passes_on_all_that_follows_the_program(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text("import sys; print(sys.argv[1:])", "utf-8")
    for start in (["program.py"], ["-m", "program"], ["-mprogram"]):
        given = ["--help", "-h", "--", "-m", "a b", "--x=1", ""]
        done = subprocess.run(
            [sys.executable, "-m", "ferrule", "run", *start, *given],
            capture_output=True, text=True, timeout=120, cwd=tmp_path,
        )  # fmt: skip
        assert done.stdout == f"{given}\n", done.stderr
