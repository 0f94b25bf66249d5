"""The command line, and the kernels that it shares with the examples."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import numpy as np
import pytest
import torch
from click.testing import CliRunner, Result
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

import ferrule
from ferrule import _env, cache, dtypes
from ferrule.cli import Fault, demo, grid_sample, main, readable
from ferrule.cli import target as target_of
from ferrule.tools import nvrtc

REPOSITORY = Path(__file__).resolve().parents[2]
MADE = """
import ferrule
print("made")
exp = ferrule.metal_kernel(
    name="myexp", input_names=["inp"], output_names=["out"],
    source="uint i = thread_position_in_grid.x;\\nT x = inp[i];\\nout[i] = metal::exp(x);")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache for all tests of a process: they compile the same kernels."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(autouse=True)
def own_place(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv(_env.CACHE_DIR, str(folder))
    monkeypatch.delenv(_env.CXX, raising=False)
    monkeypatch.delenv(_env.THREADS, raising=False)
    before = list(sys.path)
    yield
    sys.path[:] = before


def run(*arguments: object) -> Result:
    """The command line in this process; an exception that is no exit is a test's failure."""
    result = CliRunner().invoke(main, [str(a) for a in arguments], prog_name="ferrule")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def fault(*arguments: object) -> str:
    """What a wrong command line is told: one line, and exit code 2."""
    result = run(*arguments)
    assert result.exit_code == 2, result.output
    assert result.stderr.startswith("Error: ")
    assert result.stderr.count("\n") == 1
    return result.stderr.removeprefix("Error: ").rstrip("\n")


def process(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Python code in a process of its own."""
    return subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, timeout=120, env={**os.environ, **environment},
    )  # fmt: skip


def test_as_a_module() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ferrule", "--version"], capture_output=True, text=True, timeout=120
    )
    assert (done.returncode, done.stdout) == (0, f"ferrule, version {ferrule.__version__}\n")


@pytest.mark.parametrize("name", ["bench", "cache", "demo", "doctor", "inspect"])
def test_help(name: str) -> None:
    assert name in run("--help").output
    result = run(name, "--help")
    assert result.exit_code == 0
    assert f"Usage: ferrule {name}" in result.output


def test_unknown_command() -> None:
    result = run("demon")
    assert result.exit_code == 2
    assert "demon" in result.stderr


# -- grid_sample -----------------------------------------------------------------------------------

sizes = st.integers(1, 6)


@st.composite
def problems(draw: st.DrawFn) -> tuple[Any, Any, Any]:
    batch, height, width = draw(sizes), draw(sizes), draw(sizes)
    channels = draw(st.sampled_from([1, 2, 3, 31, 32, 33, 70]))
    rows, columns = draw(sizes), draw(sizes)
    random = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    x = random.normal(size=(batch, height, width, channels)).astype(np.float32)
    grid = random.uniform(-1.6, 1.6, (batch, rows, columns, 2)).astype(np.float32)
    cotangent = random.normal(size=(batch, rows, columns, channels)).astype(np.float32)
    return x, grid, cotangent


def close(actual: Any, expected: Any) -> None:
    limit = 3e-5 * max(1.0, float(np.abs(expected).max()))
    np.testing.assert_allclose(actual, expected, rtol=0, atol=limit)


@settings(max_examples=40, deadline=None)
@given(problems())
def test_kernels_agree_with_numpy(problem: tuple[Any, Any, Any]) -> None:
    x, grid, cotangent = problem
    close(grid_sample.sample(x, grid), grid_sample.sample_numpy(x, grid))
    grads = grid_sample.sample_vjp(x, grid, cotangent)
    for actual, expected in zip(
        grads, grid_sample.sample_vjp_numpy(x, grid, cotangent), strict=True
    ):
        assert actual.shape == expected.shape
        close(actual, expected)


@settings(max_examples=20, deadline=None)
@given(problems())
def test_numpy_agrees_with_torch(problem: tuple[Any, Any, Any]) -> None:
    torch = pytest.importorskip("torch")
    x, grid, cotangent = (torch.tensor(a.astype(np.float64)) for a in problem)
    x.requires_grad_()
    grid.requires_grad_()
    out = torch.nn.functional.grid_sample(x.permute(0, 3, 1, 2), grid, align_corners=False).permute(
        0, 2, 3, 1
    )
    expected = (out, *torch.autograd.grad((out * cotangent).sum(), (x, grid)))
    x, grid, cotangent = (a.astype(np.float64) for a in problem)
    actual = (
        grid_sample.sample_numpy(x, grid),
        *grid_sample.sample_vjp_numpy(x, grid, cotangent),
    )
    for mine, theirs in zip(actual, expected, strict=True):
        np.testing.assert_allclose(mine, theirs.detach().numpy(), rtol=1e-9, atol=1e-9)


# -- demo ------------------------------------------------------------------------------------------


def photograph(path: Path, mode: str = "RGB", size: tuple[int, int] = (40, 50)) -> Path:
    """A file with a smooth picture in it."""
    down, across = np.mgrid[: size[1], : size[0]] / max(size)
    bands = np.stack([down, across, np.sin(9 * down * across) / 2 + 0.5], axis=-1)
    Image.fromarray((255 * bands).astype(np.uint8)).convert(mode).save(path)
    return path


def test_demo_with_the_sample(tmp_path: Path) -> None:
    out = tmp_path / "demo.png"
    result = run("demo", "--out", out)
    assert result.exit_code == 0, result.output
    for word in ("forward", "VJP", "kernel", "NumPy", "ratio", "largest error", "512 x 600"):
        assert word in result.stdout
    with Image.open(out) as picture:
        assert picture.format == "PNG"
        assert picture.width > 2 * picture.height
        # Four panels side by side, each with a picture in it.
        panels = np.array_split(np.asarray(picture.convert("L"), np.float32), 4, axis=1)
        assert all(panel.std() > 20 for panel in panels)


def test_demo_on_two_devices(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a GPU that is none: tensors, and waiting for it."""
    waited = []
    gpu = demo.Place("Some GPU", torch.from_numpy, lambda: waited.append(1))
    real = demo.places
    monkeypatch.setattr(demo, "places", lambda: [*real(), gpu])
    result = run("demo", photograph(tmp_path / "photo.png"), "--out", tmp_path / "out.png")
    assert result.exit_code == 0, result.output
    assert result.stdout.count("Some GPU") == 2 and result.stdout.count("CPU, ") == 2
    assert len(waited) >= 8
    broken = gpu._replace(send=lambda array: torch.from_numpy(array * np.float32(1.01)))
    monkeypatch.setattr(demo, "places", lambda: [*real(), broken])
    result = run("demo", tmp_path / "photo.png", "--out", tmp_path / "out.png")
    assert result.exit_code == 1
    assert "on Some GPU; at most" in result.stderr and "on CPU" not in result.stderr


@pytest.mark.parametrize(
    ("mode", "size"),
    [("RGB", (40, 50)), ("RGBA", (90, 40)), ("L", (1, 1)), ("P", (3, 80)), ("1", (33, 32))],
)
def test_demo_with_a_photograph(tmp_path: Path, mode: str, size: tuple[int, int]) -> None:
    photo = photograph(tmp_path / "photo.png", mode, size)
    result = run("demo", photo, "--out", tmp_path / "out.png")
    assert result.exit_code == 0, result.output
    assert f"{size[0]} x {size[1]}" in result.stdout
    with Image.open(tmp_path / "out.png") as picture:
        picture.load()


def test_photographs_are_turned_and_made_smaller(tmp_path: Path) -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # lies on its side
    with Image.open(photograph(tmp_path / "a.png", size=(2000, 100))) as picture:
        picture.save(tmp_path / "b.jpg", exif=exif)
    x = demo.read_photo(str(tmp_path / "b.jpg"))
    assert x.dtype == np.float32
    assert (x.shape[0], x.shape[1], x.shape[3]) == (1, demo.LARGEST, 3)
    assert abs(x.shape[2] - demo.LARGEST / 20) <= 1
    assert 0 <= x.min() <= x.max() <= 1


@given(st.integers(1, 60), st.integers(1, 60))
def test_water_stays_near(height: int, width: int) -> None:
    grid = demo.water(height, width)
    assert grid.shape == (1, height, width, 2)
    assert grid.dtype == np.float32
    assert np.isfinite(grid).all()
    assert np.abs(grid).max() < 8


@settings(deadline=None)
@given(st.integers(2, 90), st.integers(2, 90))
def test_water_has_no_points_outside(height: int, width: int) -> None:
    """At the very edge samples drop to zero: derivatives there would be a bright frame."""
    grid = demo.water(height, width)[0]
    x, y = ((grid[..., 0] + 1) * width - 1) / 2, ((grid[..., 1] + 1) * height - 1) / 2
    assert (x > 0).all() and (x < width - 1).all()
    assert (y > 0).all() and (y < height - 1).all()


def test_the_wheel_has_the_hues_of_directions() -> None:
    """What lies to the right of its middle has the hue of vectors to the right, and so on."""
    wheel = demo._wheel()
    middle = wheel.shape[0] // 2
    for across, down in ((1, 0), (0, 1), (-1, 0), (0, -1)):
        shown = wheel[middle + int(0.7 * middle * down), middle + int(0.7 * middle * across)]
        told = demo._directions(np.full((2, 2, 2), (across, down), np.float32))[0, 0]
        np.testing.assert_allclose(shown[:3], told, atol=0.05)
        assert shown[3] == 1
    assert wheel[0, 0, 3] == wheel[middle, middle, 3] == 0


@pytest.mark.parametrize(("name", "kind"), [("a.jpg", "JPEG"), ("a.PNG", "PNG"), ("a", "PNG")])
def test_demo_writes_what_a_name_says(tmp_path: Path, name: str, kind: str) -> None:
    result = run("demo", photograph(tmp_path / "photo.png"), "--out", tmp_path / name)
    assert result.exit_code == 0, result.output
    with Image.open(tmp_path / name) as image:
        assert image.format == kind
    said = fault("demo", tmp_path / "photo.png", "--out", tmp_path / "a.xyz")
    assert "expected the name of a picture" in said and ".png" in said


@pytest.mark.parametrize(
    ("seconds", "shown"), [(3.4e-5, "34 µs"), (9.6e-4, "960 µs"), (1.04e-3, "1.0 ms")]
)  # fmt: skip
def test_times_of_the_demo_are_no_zeros(seconds: float, shown: str) -> None:
    assert demo._duration(seconds) == shown


def test_water_is_calm_at_the_borders() -> None:
    grid = demo.water(120, 100)
    for edge, still in ((grid[0, 0], -1), (grid[0, -1], 1)):
        np.testing.assert_allclose(edge[:, 1], still, atol=2 / 120)
    for edge, still in ((grid[0, :, 0], -1), (grid[0, :, -1], 1)):
        np.testing.assert_allclose(edge[:, 0], still, atol=2 / 100)


@pytest.mark.parametrize("wrong", ["sample", "sample_vjp"])
@pytest.mark.parametrize("by", [1e-3, float("nan")])
def test_demo_sees_wrong_results(
    wrong: str, by: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = getattr(grid_sample, wrong)

    def changed(*arrays: Any) -> Any:
        made = right(*arrays)
        (made if wrong == "sample" else made[1])[..., 0] += by
        return made

    monkeypatch.setattr(grid_sample, wrong, changed)
    photo = photograph(tmp_path / "photo.png")
    result = run("demo", photo, "--out", tmp_path / "out.png")
    assert result.exit_code == 1
    assert ("forward" if wrong == "sample" else "VJP") + ": the kernel differs" in result.stderr


def test_demo_faults(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    photo = photograph(tmp_path / "photo.png")
    text = tmp_path / "photo.txt"
    text.write_text("no picture")
    out = tmp_path / "out.png"
    assert "there is no such file" in fault("demo", tmp_path / "none.jpg", "--out", out)
    assert "cannot be read as a picture" in fault("demo", text, "--out", out)
    assert "cannot be read as a picture" in fault("demo", tmp_path, "--out", out)
    assert "there is no folder" in fault("demo", photo, "--out", tmp_path / "none" / "a.png")
    assert "is a folder" in fault("demo", photo, "--out", tmp_path)
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert "pip install 'ferrule[demo]'" in fault("demo", photo, "--out", out)
    assert not out.exists()


# -- doctor ----------------------------------------------------------------------------------------

DOCTOR = "from ferrule.cli import main; main(['doctor', '--json'])"
DOCTOR_SHOWN = DOCTOR.replace(", '--json'", "")


def test_doctor(folder: Path) -> None:
    code = (
        "import sys\nfrom ferrule.cli import main\n"
        "main(['doctor', '--json'], standalone_mode=False)\n"
        "assert not {'torch', 'mlx'} & set(sys.modules)"
    )
    done = process(code)
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["check"]["ok"] and report["problems"] == []
    assert [found["used"] for found in report["compilers"]].count(True) == 1
    assert len({found["path"] for found in report["compilers"]}) == len(report["compilers"])
    assert report["devices"][0] == {"name": "cpu", "runs": True, "note": None}
    assert report["hosts"]["numpy"] == np.__version__
    assert report["cache"]["path"] == str(folder) and report["cache"]["usable"]
    assert report["runtime"]["threads"] >= 1
    assert report["runtime"]["repeated calls"].startswith("by ")
    assert set(report["environment"]) == set(_env.NAMES)
    if report["hosts"]["mlx"]:
        assert report["mlx"] == {**report["mlx"], "version": report["hosts"]["mlx"]}


def test_doctor_for_readers() -> None:
    result = run("doctor")
    assert result.exit_code == 0, result.output
    for name in (*_env.NAMES, "cpu", "numpy", "torch", "mlx", "compile and run", "ok"):
        assert name in result.stdout


def test_doctor_without_a_compiler(tmp_path: Path) -> None:
    code = f"from ferrule.tools import toolchain\ntoolchain._zig_package = lambda: None\n{DOCTOR}"
    done = process(code, PATH=str(tmp_path), FERRULE_CACHE_DIR=str(tmp_path / "cache"))
    assert done.returncode == 1, done.stderr
    report = json.loads(done.stdout)
    assert report["compilers"] == [] and not report["check"]["ok"]
    assert "no C++ compiler works here" in report["problems"][0]["problem"]
    assert re.match(r"Run: .*pip install ziglang", report["problems"][0]["fix"])
    assert len(report["problems"]) == 1
    done = process(code.replace(DOCTOR, DOCTOR_SHOWN), PATH=str(tmp_path))
    (line,) = re.findall(r"^  cpu +(.*)", done.stdout, re.MULTILINE)
    assert line.rstrip() == "no C++ compiler works here."
    assert "not found: g++" in done.stdout.split("Problem")[1]


def test_doctor_with_wrong_variables(tmp_path: Path) -> None:
    done = process(DOCTOR, FERRULE_CXX="/nowhere/g++", FERRULE_THREADS="many")
    assert done.returncode == 1
    report = json.loads(done.stdout)
    assert report["problems"][0]["fix"] == "Run: unset FERRULE_CXX"
    assert report["environment"]["FERRULE_THREADS"] == "many"
    done = process(DOCTOR, FERRULE_THREADS="many")
    assert done.returncode == 1
    (problem,) = json.loads(done.stdout)["problems"]
    assert "'many'" in problem["problem"] and problem["fix"] == "Run: unset FERRULE_THREADS"


def test_doctor_with_an_open_cache(tmp_path: Path) -> None:
    open_to_all = tmp_path / "cache"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    done = process(DOCTOR, FERRULE_CACHE_DIR=str(open_to_all))
    assert done.returncode == 0, done.stderr  # kernels run all the same
    report = json.loads(done.stdout)
    assert not report["cache"]["usable"]
    (problem,) = report["problems"]
    assert f"Run: chmod 700 {open_to_all}" in problem["problem"]


# -- cache -----------------------------------------------------------------------------------------


def test_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_env.CACHE_DIR, str(tmp_path / "kernels"))
    assert run("cache", "path").stdout == f"{tmp_path / 'kernels'}\n"
    assert re.search(r"^entries +0$", run("cache").stdout, re.MULTILINE)
    disk = cache.default()
    disk.put("one", b"1" * 5000)
    disk.put("two", b"2")
    shown = run("cache", "show").stdout
    assert re.search(r"^entries +2$", shown, re.MULTILINE)
    assert f"{readable(disk.size())} of 1.0 GiB at most" in shown
    assert str(tmp_path / "kernels") in shown
    assert run("cache", "clear").stdout.startswith("Removed 2 entries (")
    assert disk.entries() == []
    assert run("cache", "melt").exit_code == 2


def test_cache_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    done = process(
        "from ferrule.cli import main; main(['cache'])", FERRULE_CACHE_DIR=str(tmp_path / "cache")
    )
    assert done.returncode == 0
    assert "unusable it is not a folder" in done.stdout
    assert done.stderr.startswith("warning: ") and done.stderr.count("\n") == 1


@given(st.integers(0, 2**60))
def test_readable_sizes(size: int) -> None:
    amount, unit = readable(size).split()
    scale = 1024 ** ["B", "KiB", "MiB", "GiB", "TiB"].index(unit)
    assert abs(float(amount) * scale - size) <= 0.05 * scale + 1e-9 * size
    assert float(amount) < 1024 or float(amount) == 1024.0 or unit == "TiB"


# -- inspect ---------------------------------------------------------------------------------------


@pytest.fixture
def made(tmp_path: Path) -> Path:
    path = tmp_path / "kernels.py"
    path.write_text(MADE)
    return path


def test_inspect_all(made: Path) -> None:
    result = run("inspect", f"{made}:exp", "--template", "T=float16", "--with", "inp=float16[4,16]")
    assert result.exit_code == 0, result.output
    assert result.stderr == "made\n"
    assert "exp(inp=float16[4,16]) -> out=float16\n" in result.stdout
    assert "==== Metal ====\ntemplate <typename T>\n[[kernel]] void" in result.stdout
    assert "==== C++ for the CPU ====\n" in result.stdout
    assert result.stdout.index("FR_FLAT") > result.stdout.index("==== C++")
    assert "note: compiles, and runs as: flat\n" in result.stdout


names = st.sampled_from([d.name for d in dtypes.ALL if d.level0])
shapes = st.lists(st.integers(0, 40), max_size=4).map(tuple)


@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(names, shapes, names, names)
def test_inspect_one_text(made: Path, inp: str, shape: tuple[int, ...], out: str, t: str) -> None:
    sizes = ",".join(map(str, shape))
    result = run(
        "inspect", made, "--metal", "--with", f"inp={inp}[{sizes}]", "--out", f"out={out}",
        "--template", f"T={t}",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    kernel = target_of.find_kernel(str(made))[1]
    assert isinstance(kernel, ferrule.MetalKernel)
    by_name = dtypes.BY_NAME
    assert result.stdout == kernel.text(
        "metal", inputs=[(shape, by_name[inp])], output_dtypes=[by_name[out]],
        template=[("T", by_name[t])],
    )  # fmt: skip


def test_inspect_a_module_and_how_it_runs() -> None:
    result = run("inspect", "ferrule.cli.grid_sample:vjp", "--cpp", "--template", "T=float32")
    assert result.exit_code == 0, result.output
    assert "atomic" in result.stdout and "note" not in result.stdout
    assert "x, grid, cotangent: taken as float32[1024]; see --with" in result.stderr
    assert "x_grad, grid_grad: taken as float32; see --out" in result.stderr
    assert "threads: taken as a long row" in result.stderr
    assert re.search(r"note: compiles, and runs as: split by \w+\n", result.stderr)


def test_inspect_finds_kernels(tmp_path: Path) -> None:
    path = tmp_path / "many.py"
    path.write_text(
        MADE
        + "class Box:\n    kernel = exp\n"
        + "def make():\n    return exp\n"
        + "def three():\n    return 3\n"
        + "def needs(x):\n    return x\n"
        + "old = ferrule.metal_kernel(name='old', source='b[0] = a[0] * e;')\n"
    )
    for name in ("exp", "Box.kernel", "make"):
        assert isinstance(target_of.find_kernel(f"{path}:{name}")[1], ferrule.MetalKernel)
    found = fault_of(f"{path}:nothing")
    assert found == f"there is no 'nothing' in {str(path)!r}; kernels there: exp, old."
    assert "has 2 kernels: exp, old; expected" in fault_of(str(path))
    assert "'three' in" in fault_of(f"{path}:three") and "builtins.int" in fault_of(f"{path}:three")
    assert "'needs' in" in (needs := fault_of(f"{path}:needs")) and "that takes x" in needs
    assert "is a builtins.type, not a kernel" in fault_of(f"{path}:Box")

    result = run(
        "inspect", f"{path}:old", "--metal", "--with", "a=int8[9]", "--with", "e=1.5",
        "--out", "b=int16",
    )  # fmt: skip
    assert result.exit_code == 0, result.output
    for part in ("const device int8_t* a", "const constant float& e", "device int16_t* b"):
        assert part in result.stdout


OPS = """
import ferrule, numpy as np
scale = ferrule.op(
    "scale", "x[*S,D]:T, w[D]:T, eps:float32, b[D]:T? -> y[*S,D]:T", grid="x.size",
    metal="uint i = thread_position_in_grid.x; T v = x[i] * w[i % D] + eps;"
    "if (has_b) v += b[i % D]; y[i] = v * K;",
    threadgroup=256, batch="D", template={"K": "D + 1"}, init_value=0, autocast="float32",
    reference=lambda x, w, eps, b: x * w)
"""
MORE = """
put = ferrule.op("put", "c[L]:T!, v[L]:T ->", metal="c[0] = v[0];", grid="L", threadgroup=8)
scale.def_vjp(lambda primals, cotangents, outputs: (None,) * 4)
add = ferrule.op("add", "x[N]:T -> y[N]:T", cuda="y[0] = x[0];", grid="N", threadgroup=1)
def run(x): return x
mine = ferrule.adopt("mine", "x[N]:T -> y[N]:T", make=lambda device, T, n: run,
    constants={"n": "2 * N"}, contiguous=True)
mine(np.arange(4.0)[::2])
"""


def test_inspect_an_op(tmp_path: Path) -> None:
    path = tmp_path / "ops.py"
    path.write_text(OPS)
    result = run("inspect", path)
    assert result.exit_code == 0, result.output
    digest = target_of.find_kernel(str(path), ops=True)[1].digest  # type: ignore[union-attr]
    for line in (
        "scale: op scale",
        "  rule         x[*S,D]:T, w[D]:T, eps:float32, b[D]:T? -> y[*S,D]:T",
        f"  digest       {digest}",
        "  metal        grid (x.size, 1, 1); threadgroup (256, 1, 1); reads D; template K = D + 1; "
        "filled with 0",
        "  vjp          none: such a derivative is refused",
        "  vmap         by the independent dims *S, D; call by call where an input without them is "
        "batched",
        "  autocast     float32",
        "  counts       no slower way was taken (calls in this process)",
        "note: no text: --with is not given for x[*S,D]:T, w[D]:T, eps:float32",
    ):
        assert line in result.stdout.splitlines()
    assert "  reference    `reference` (inspected.ops:<lambda>), digest " in result.stdout

    inputs = ["--with", "x=float16[4,6]", "--with", "w=float16[6]", "--with", "eps=1e-5"]
    result = run("inspect", path, *inputs)
    assert result.exit_code == 0, result.output
    assert "==== Metal ====\ntemplate <typename T, bool has_b, int K>\n" in result.stdout
    assert "note: compiles, and runs as: flat\n" in result.stdout
    result = run("inspect", path, "--metal", *inputs, "--with", "b=float16[6]")
    assert result.exit_code == 0 and result.stdout.startswith("template <typename T")
    assert "_float16_t_1_7" in result.stdout and "op scale" in result.stderr


def test_inspect_an_op_for_an_array_without_dims(tmp_path: Path) -> None:
    path = tmp_path / "ops.py"
    path.write_text(
        "import ferrule\n"
        'double = ferrule.op("double", "x[*S]:T -> y[*S]:T", grid="x.size", threadgroup=256,\n'
        '    metal="uint i = thread_position_in_grid.x; y[i] = x[i] + x[i];")\n'
    )
    result = run("inspect", path, "--with", "x=float32[]")
    assert result.exit_code == 0, result.output
    assert "const constant float* x" in result.stdout  # as a call of it has it
    assert "note: compiles, and runs as: flat\n" in result.stdout


def test_inspect_takes_the_body_whose_condition_holds(tmp_path: Path) -> None:
    path = tmp_path / "ops.py"
    path.write_text(
        "import ferrule as fe\n"
        'few = fe.metal_body("y[thread_position_in_grid.x] = 1;", grid="N", threadgroup="N",\n'
        '                    when="N <= 1024")\n'
        'many = fe.metal_body("y[thread_position_in_grid.x] = 2;", grid="N", threadgroup=256)\n'
        'op = fe.op("fill", "x[N]:T -> y[N]:T", metal=[few, many])\n'
    )
    for size, written in ((1024, 1), (2048, 2)):
        result = run("inspect", path, "--metal", "--with", f"x=float32[{size}]")
        assert result.exit_code == 0 and f"= {written};" in result.stdout, result.output


def test_inspect_ops_of_all_kinds(tmp_path: Path) -> None:
    path = tmp_path / "ops.py"
    path.write_text(OPS + MORE)
    assert (
        "  vjp          inspected.ops:<lambda>, digest " in run("inspect", f"{path}:scale").stdout
    )
    result = run("inspect", f"{path}:put", "--cpp", "--with", "c=int8[3]", "--with", "v=int8[3]")
    assert result.exit_code == 0 and "int8_t* c" in result.stdout, result.output
    result = run("inspect", f"{path}:mine")
    assert "`make` (inspected.ops:<lambda>), digest" in result.stdout
    assert "constants n = 2 * N, its inputs are made contiguous\n" in result.stdout
    assert "  vmap         call by call: no dim is declared independent\n" in result.stdout
    # The file is run again each time, and what it declares is one op in this process.
    assert re.search(r"  counts       copy \d, output copy \d \(calls in this", result.stdout)
    result = run("inspect", f"{path}:add", "--with", "x=float32[4]")
    assert result.exit_code == 0 and "==== CUDA ====" in result.stdout, result.output
    for arguments, message in (
        ((path, ), "has 4 ops: scale, put, add, mine; expected"),
        ((f"{path}:mine", "--metal"), "'mine' has no text for --metal: its impl"),
        ((f"{path}:add", "--metal"), "'add' has no text for --metal: its impl"),
        ((f"{path}:scale", "--metal"), "--with is not given for x[*S,D]:T, w[D]:T, eps:float32;"),
        ((f"{path}:scale", "--with", "q=1"), "'q': the op has no such input; its inputs: x, w,"),
        ((f"{path}:scale", "--grid", "1,1,1"), "an op declares its outputs, template, grid"),
        ((f"{path}:scale", "--with", "x=float99[3]"), "float8_e4m3fn"),
        (
            (f"{path}:scale", "--with", "x=float16[4,6]", "--with", "w=float16[7]", "--with",
             "eps=1"),
            "whose dim 0 is 7, but D is 6 by input 'x'",
        ),
        (
            (f"{path}:scale", "--with", "x=float16[4,6]", "--with", "w=3", "--with", "eps=1"),
            "input 'w' of op 'scale' is not described",
        ),
    ):  # fmt: skip
        assert message in fault("inspect", *arguments)


UNIT = """
text = "__global__ void twice(const T* x, T* y) { y[threadIdx.x] = x[threadIdx.x] * T(2); }"
def unit(**more):
    step = ferrule.cuda_step("twice", ["x", "y"], blocks=1, block="N")
    return ferrule.cuda_unit(text, steps=[step], **more)
rule = "x[N]:T -> y[N]:T"
twice = ferrule.op("twice", rule, cuda=unit())
few = ferrule.op("twice", rule, cuda=unit(when="N < 4"))
text = text.replace("threadIdx", "threadIndex")
wrong = ferrule.op("twice", rule, cuda=unit())
"""


def test_inspect_units(tmp_path: Path) -> None:
    path = tmp_path / "units.py"
    path.write_text("import ferrule\n" + UNIT)
    result = run("inspect", f"{path}:twice", "--with", "x=float16[8]")
    assert "  cuda         a unit in 1 step: twice\n" in result.stdout, result.output
    assert (
        "==== the unit ====\n// twice\n" in result.stdout and "using T = __half;" in result.stdout
    )
    assert "note: compiles" in result.stdout or "note: not compiled" in result.stdout
    result = run("inspect", f"{path}:twice", "--cuda", "--with", "x=float32[8]")
    assert result.exit_code == 0 and result.stdout.startswith("// twice\n"), result.output
    assert "op twice" in result.stderr
    message = fault("inspect", f"{path}:few", "--cuda", "--with", "x=float32[8]")
    assert "'few' has no implementation whose `when` holds for such inputs" in message
    message = fault("inspect", f"{path}:twice", "--cpp", "--with", "x=float32[8]")
    assert "'twice' has no text for --cpp: its implementations are cuda." in message
    if nvrtc.find_nvrtc() is None:
        return
    for options in ([], ["--cuda"]):
        result = run("inspect", f"{path}:wrong", *options, "--with", "x=float32[8]")
        assert result.exit_code == 2 and 'identifier "threadIndex" is undefined' in result.stderr
    result = run("inspect", f"{path}:twice", "--cuda", "--arch", "90", "--with", "x=float32[8]")
    assert result.exit_code == 2 and "--arch: got '90'" in result.stderr


def fault_of(target: str) -> str:
    with pytest.raises(Fault) as caught:
        target_of.find_kernel(target)
    assert "\n" not in caught.value.message
    return caught.value.message


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("1 / 0\n", "ZeroDivisionError: division by zero ({path}, line 1)"),
        (
            "import ferrule\nferrule.op('a', 'b')",
            "RuleError: [op] the rule of op 'a': a rule has '->' between its inputs and "
            "outputs b ^ ({path}, line 2)",
        ),
        ("x = 1\nthis is no Python\n", "SyntaxError: invalid syntax"),
        ("raise SystemExit('no,\\n thanks')\n", "SystemExit: no, thanks ({path}, line 1)"),
        ("import ferrule\nferrule.metal_kernel('a b', [], ['o'], '')\n", "KernelError: "),
    ],
)
def test_inspect_files_that_fail(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.py"
    path.write_text(text)
    told = fault("inspect", f"{path}:k")
    assert f"running {path} failed: {message.format(path=path)}" in told


def test_inspect_places_that_are_not(tmp_path: Path) -> None:
    assert "nowhere.py' does not exist" in fault("inspect", f"{tmp_path}/nowhere.py:k")
    assert "is a folder" in fault("inspect", f"{tmp_path}:k")
    assert "there is no file and no module 'no_such_module'" in fault("inspect", "no_such_module:k")
    assert "no module 'ferrule.nothing'" in fault("inspect", "ferrule.nothing:k")
    assert "neither a file nor the name of a module" in fault("inspect", "a b:k")
    assert "expected FILE:NAME" in fault("inspect", ":k")
    (tmp_path / "kernel.txt").write_text(MADE)
    assert "does not end in .py" in fault("inspect", tmp_path / "kernel.txt")


LISTED = ", ".join(d.name for d in dtypes.ALL if d.level0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--with", "inp"], 'at character 4, expected a name and "=", as in "inp=float16[4,16]".'),
        (["--with", "i?=int8"], 'at character 2, expected a name and "="'),
        (["--with", "inp=float99[4]"], f"at character 5, got 'float99', expected one of {LISTED}."),
        (["--with", "inp=float64[4]"], f"at character 5, got 'float64', expected one of {LISTED}."),
        (["--with", "inp="], "at character 5, got nothing, expected a dtype"),
        (["--with", "inp=[4]"], "at character 5, got '[4]', expected a dtype"),
        (["--with", "inp=int8[4,,5]"], "at character 12, got nothing, expected a size."),
        (["--with", "inp=int8[4,-5]"], "at character 12, got '-5', expected a size."),
        (["--with", "inp=int8[4,5"], 'at character 13, expected "]".'),
        (["--with", "inp=int8[4]x"], "at character 12, got 'x', expected nothing more."),
        (["--with", "inp=int8(4)"], "at character 9, got '(4)', expected a shape in brackets"),
        (["--with", "inp=1.2.3"], "at character 5, '1.2.3' is not a number."),
        (["--with", "foo=int8[4]"], "the kernel has no such input; its inputs: inp."),
        (["--out", "foo=int8"], "the kernel has no such output; its outputs: out."),
        (["--out", "out=int8[3]"], "at character 5, got 'int8[3]'"),
        (["--template", "T=flat"], "at character 3, got 'flat', expected an int, true, false or"),
        (["--grid", "4,a"], "at character 3, got 'a', expected a number of threads."),
        (["--grid", "1,2,3,4"], "got 4 numbers, expected three"),
        (["--grid", "4"], "--grid and --threadgroup are given together or not at all."),
        (["--grid", "9,1,1", "--threadgroup", "2000"], "2000 threads; at most 1024 are allowed."),
        (["--grid", "9", "--threadgroup", "0"], "got (0, 1, 1), expected three integers from 1 to"),
    ],
)  # fmt: skip
def test_inspect_faults(made: Path, arguments: list[str], message: str) -> None:
    result = run("inspect", made, *arguments)
    assert result.exit_code == 2
    assert "Traceback" not in result.output
    assert message in result.stderr.splitlines()[-1]
    assert result.stderr.splitlines()[-1].startswith("Error: ")


@given(st.one_of(st.text(), st.text("inp=float163284[], -.", max_size=20)).map(lambda t: f"inp{t}"))
def test_inputs_are_read_or_pointed_at(text: str) -> None:
    try:
        name, value = target_of.described_input(text)
    except Fault as error:
        place = re.search(r"at character (\d+), ", error.message)
        assert place is not None
        assert 1 <= int(place[1]) <= len(text) + 1
    else:
        assert name.isidentifier()
        if isinstance(value, str):
            dtype, _, rest = value.partition("[")
            assert dtypes.BY_NAME[dtype].level0
            assert re.fullmatch(r"(\d+(,\d+)*)?\]", rest)


@given(names, st.lists(st.integers(0, 9999), max_size=5))
def test_inputs_are_read(dtype: str, shape: list[int]) -> None:
    text = f"x = {dtype}[ {' , '.join(map(str, shape))} ]"
    assert target_of.described_input(text) == ("x", f"{dtype}[{','.join(map(str, shape))}]")


@given(st.one_of(st.integers(), st.floats(allow_nan=False), st.booleans()))
def test_numbers_are_read(value: float) -> None:
    text = str(value).lower() if isinstance(value, bool) else repr(value)
    name, read = target_of.described_input(f"eps={text}")
    assert (name, read, type(read)) == ("eps", value, type(value))


def test_inspect_quotes_the_line_that_does_not_compile(made: Path) -> None:
    result = run("inspect", made, "--cpp")  # T is not given
    assert result.exit_code == 2
    assert "metal::exp" in result.stdout  # the text is there all the same
    assert "source line 2:" in result.stderr and "| T x = inp[i];" in result.stderr
    assert result.stderr.endswith("A template parameter is given with --template NAME=VALUE.\n")


def test_inspect_says_what_apple_refuses(tmp_path: Path) -> None:
    path = tmp_path / "atomic.py"
    path.write_text(
        "import ferrule\n"
        "count = ferrule.metal_kernel(name='count', input_names=[], output_names=['out'],\n"
        "    source='atomic_fetch_add_explicit(&out[0], half(1), memory_order_relaxed);',\n"
        "    atomic_outputs=True)\n"
    )
    result = run("inspect", path, "--cpp", "--out", "out=float16")
    assert result.exit_code == 0, result.output
    assert "warning: kernel 'count', source line 1: atomics on float16" in result.stderr


def test_faults_are_click_exceptions() -> None:
    assert issubclass(Fault, click.ClickException) and Fault.exit_code == 2


# -- examples --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "path", sorted((REPOSITORY / "examples").glob("*.py")), ids=lambda path: path.stem
)
def test_examples(path: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(path)], capture_output=True, text=True, timeout=240, cwd=tmp_path
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()


def test_inspect_of_a_function_that_takes_arguments(tmp_path: Path) -> None:
    """The message is about the person's function, not about what called it."""
    path = tmp_path / "kernels.py"
    path.write_text(
        "import ferrule\n\ndef make(n, *, dtype, size=3):\n"
        "    return ferrule.metal_kernel('k', ['x'], ['y'], 'y[0] = x[0];')\n"
    )
    said = fault("inspect", f"{path}:make")
    assert f"is a function that takes n, dtype ({path}, line 3)" in said
    assert "give them defaults" in said and "target.py" not in said


def test_run_suggests_the_module(tmp_path: Path) -> None:
    done = process("from ferrule.cli import main; main(['run', 'json.tool', '--sort-keys', 'a b'])")
    assert done.returncode == 2
    assert "To run the module: ferrule run -m json.tool --sort-keys 'a b'" in done.stderr
    for name in ("no.such.module", "no_such", "json.tol"):
        done = process(f"from ferrule.cli import main; main(['run', {name!r}])")
        assert done.returncode == 2 and "ferrule run -m" not in done.stderr
