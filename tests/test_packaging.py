"""What an installation contains, with a C compiler and without, and what the project declares."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest

import ferrule
from ferrule.tools import binding

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest brings it

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = Path(ferrule.__file__).resolve().parent
_TEXT = (REPOSITORY / "pyproject.toml").read_text("utf-8")
PROJECT: dict[str, Any] = tomllib.loads(_TEXT)["project"]

# Module: the distribution that brings it, where the names differ.
DISTRIBUTIONS = {
    "PIL": "matplotlib",
    "elftools": "pyelftools",
    "humming": "humming-kernels",
    "tomli": "pytest",
    "transformers": "mlx-lm",
}


def build(folder: Path, compiler: str | None, **more: str) -> tuple[Path, str]:
    """A wheel of a copy of the sources, and what building it printed."""
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    unwanted = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
    shutil.copytree(REPOSITORY / "src", source / "src", ignore=unwanted)
    environment = {**os.environ, "CFLAGS": "-O0", **more}  # what is built runs but little
    if compiler:
        environment |= {"CC": compiler, "CXX": compiler, "LDSHARED": compiler}
    code = "import sys; from setuptools import build_meta; build_meta.build_wheel(sys.argv[1])"
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder)],
        cwd=source, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    (wheel,) = folder.glob("*.whl")
    return wheel, done.stdout


@pytest.mark.parametrize("compiler", [None, "/bin/false"], ids=str)
def test_wheel(tmp_path: Path, compiler: str | None) -> None:
    if compiler is None and shutil.which("cc") is None:
        pytest.skip("there is no C compiler called cc")
    wheel, log = build(tmp_path, compiler)
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(site)  # noqa: S202
    ours = {name for name in names if name.startswith("ferrule/")}
    built = {name for name in ours if name.endswith(".so")}
    assert ours - built == {
        path.relative_to(PACKAGE.parent).as_posix()
        for pattern in ("*.py", "*.h", "*.metal", "*.c", "*.cpp", "*.pyi", "py.typed")
        for path in PACKAGE.rglob(pattern)
    }
    assert {name.split("/")[0] for name in names} == {
        "ferrule", "ferrule-0.1.0.dist-info", "_ferrule_mlx.py", "_ferrule_pytest.py",
        "ferrule-mlx.pth",
    }  # fmt: skip
    if sys.platform == "linux" and importlib.util.find_spec("mlx"):
        check_start(site)
    check_plugin(site, tmp_path)
    assert any(name.endswith("licenses/LICENSE") for name in names)
    if compiler is None:
        calls, runtime, torch_calls = sorted(built)  # _fastcall, _runtime, _torch_calls
        ready, found, operators = (str(site / name) for name in (runtime, calls, torch_calls))
    else:
        assert not built
        assert re.search('building extension "ferrule._runtime" failed', log)
        assert re.search('building extension "ferrule._fastcall" failed', log)
        assert re.search('building extension "ferrule._torch_calls" failed', log)
        ready = found = operators = "None"
    # What was installed imports, and finds the runtime that was built, or none.
    code = (
        "import ferrule, ferrule.cli; from ferrule.tools import binding, fastcall\n"
        "runtime = binding._installed(binding.FOLDER)\n"
        "calls = fastcall.library()\n"
        "from ferrule.hosts.torch import calls as torch_calls\n"
        "operators = torch_calls._installed()\n"
        "print(ferrule.__file__, runtime and runtime._name, calls and calls.__file__,\n"
        "      operators and operators._name)"
    )
    environment = {**os.environ, "PYTHONPATH": str(site)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        check=True, env=environment, capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert done.stdout.split() == [str(site / "ferrule" / "__init__.py"), ready, found, operators]


def test_sdist(tmp_path: Path) -> None:
    """What is published as source can be tested and measured."""
    source = tmp_path / "source"
    source.mkdir()
    unwanted = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info", ".hypothesis")
    rooms = ("src", "tests", "bench", "docs", "examples", ".ci")
    for room in rooms:
        shutil.copytree(REPOSITORY / room, source / room, ignore=unwanted)
    for path in REPOSITORY.glob("[A-Zps]*"):
        if path.is_file() and path.suffix in (".md", ".toml", ".py", ".in", ""):
            shutil.copy(path, source)
    expected = {path.relative_to(source).as_posix() for path in source.rglob("*") if path.is_file()}
    code = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        check=True, cwd=source, capture_output=True, timeout=200,
    )  # fmt: skip
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as tar:
        names = {name.partition("/")[2] for name in tar.getnames()}
    assert expected - names == set()
    assert any(name.startswith("tests/dialect/") for name in names)


def check_start(site: Path) -> None:
    """Installed, ferrule is in MLX where FERRULE_MLX says so, and costs nothing where not."""
    code = (
        "import site, sys; site.addsitedir(sys.argv[1])  # which reads ferrule-mlx.pth\n"
        "before = [name for name in sys.modules if 'ferrule' in name or name == 'numpy']\n"
        "import mlx.core as mx\n"
        "print(before, mx.metal.is_available(), 'ferrule' in sys.modules, mx.__spec__.loader)"
    )
    for value, expected in (("", "[] False False"), ("0", "[] False False"),
                            ("1", "['_ferrule_mlx'] True True")):  # fmt: skip
        environment = {**os.environ, "PYTHONPATH": str(site)}
        done = subprocess.run(
            [sys.executable, "-c", code, str(site)], check=True, capture_output=True, text=True,
            env={**environment, "FERRULE_MLX": value}, timeout=100,
        )  # fmt: skip
        assert done.stdout.startswith(f"{expected} <_frozen_importlib_external.Ext"), done.stdout


def check_plugin(site: Path, folder: Path) -> None:
    """Installed, pytest has the plugin, whether or not it is named as well."""
    for named in ([], ["-p", "_ferrule_pytest"]):
        done = subprocess.run(
            [sys.executable, "-m", "pytest", "-c", os.devnull, "--markers", *named],
            check=True, capture_output=True, text=True, cwd=folder, timeout=100,
            env={**os.environ, "PYTHONPATH": str(site)},
        )  # fmt: skip
        assert done.stdout.count("@pytest.mark.ferrule_check(") == 1, done.stdout


def test_versions_agree() -> None:
    assert PROJECT["version"] == ferrule.__version__ == "0.1.0"
    header = (binding.FOLDER / "runtime" / "runtime.h").read_text("utf-8")
    assert f"#define FR_VERSION {binding.VERSION}\n" in header


def test_license() -> None:
    text = (REPOSITORY / "LICENSE").read_text("utf-8")
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert PROJECT["license"] == "Apache-2.0"


def names_of(requirements: list[str]) -> set[str]:
    """The names of distributions, extras included: ``mlx[cpu]==1; …`` is ``mlx``."""
    found = set()
    for line in requirements:
        name = re.match(r"([\w.-]+)(?:\[(\w+)\])?", line)
        assert name is not None
        if name[1] == "ferrule":
            found |= names_of(PROJECT["optional-dependencies"][name[2]])
        found.add(name[1].lower().replace("_", "-"))
    return found


ALWAYS = names_of(PROJECT["dependencies"])
DEMO = names_of(PROJECT["optional-dependencies"]["demo"])
NVFP4 = names_of(PROJECT["optional-dependencies"]["nvfp4"])
FUZZ = names_of(PROJECT["optional-dependencies"]["fuzz"])
HUMMING = names_of(PROJECT["optional-dependencies"]["humming"])
TEST = names_of(PROJECT["optional-dependencies"]["test"])


def imports(folder: Path) -> dict[str, set[str]]:
    """The distributions of what is imported from outside the standard library, and where."""
    found: dict[str, set[str]] = {}
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            for top in {name.partition(".")[0] for name in names} - sys.stdlib_module_names:
                name = DISTRIBUTIONS.get(top, top).lower().replace("_", "-")
                found.setdefault(name, set()).add(path.relative_to(folder).as_posix())
    return found


def test_what_is_imported_is_required() -> None:
    # Theirs, never installed by us.
    users = {"torch", "mlx", "ferrule", "ferrule-bench", "-ferrule-mlx", "cupy"}
    of_extras = {
        "check/fuzzing/draws.py": FUZZ,
        "check/fuzzing/fuzz.py": FUZZ,
        "check/proofs/solver.py": {"z3"},  # of the extra `prove`
        "cli/check_pytest.py": {"pytest"},  # which its user has
        "cli/demo.py": DEMO,
        "ops/nvfp4/checkpoint.py": NVFP4,
        "ops/nvfp4/humming.py": HUMMING,
    }
    for name, where in imports(PACKAGE).items():
        if name not in users | ALWAYS:
            assert all(name in of_extras.get(file, ()) for file in where), (name, where)


def test_what_is_required_is_imported() -> None:
    assert ALWAYS - set(imports(PACKAGE)) == set()


def test_what_tests_import_is_required() -> None:
    tests = Path(__file__).parent
    own = {path.stem.replace("_", "-") for path in tests.rglob("*")} | {"ferrule-bench"}
    for name, where in imports(tests).items():
        by_some: set[str] = set()  # by files that GPU tests import, or tests skip without
        for file, packages in (
            ("triton_ops.py", {"triton"}),
            ("cute_ops.py", {"cuda", "cutlass"}),
            ("ops/nvfp4_oracles.py", {"modelopt", "compressed-tensors"}),
        ):
            by_some |= packages if where == {file} else set()
        assert name in own | ALWAYS | TEST | {"ferrule"} | by_some, (name, where)
