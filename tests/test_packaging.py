"""What an installation contains, with a C compiler and without, and what the project declares."""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
import zipfile
from importlib.metadata import distribution
from pathlib import Path

import pytest

import ferrule
from ferrule import binding, toolchain

REPOSITORY = Path(__file__).resolve().parent.parent
PACKAGE = Path(ferrule.__file__).resolve().parent
PROJECT = (REPOSITORY / "pyproject.toml").read_text(encoding="utf-8")

# Module: the distribution that brings it, where the names differ.
DISTRIBUTIONS = {"PIL": "matplotlib", "tree_sitter": "tree-sitter", "mlx": "mlx-lm"}


def build(folder: Path, compiler: str | None) -> tuple[Path, str]:
    """A wheel of a copy of the sources, and what building it printed."""
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    unwanted = shutil.ignore_patterns("*.so", "__pycache__", "*.egg-info")
    shutil.copytree(REPOSITORY / "src", source / "src", ignore=unwanted)
    environment = dict(os.environ)
    if compiler:
        environment |= {"CC": compiler, "CXX": compiler, "LDSHARED": compiler}
    argv = [sys.executable, "-m", "pip", "wheel", "--no-build-isolation", "--no-deps", "-v"]
    done = subprocess.run(
        [*argv, "--no-index", "-w", str(folder), str(source)],
        capture_output=True, text=True, env=environment, timeout=200,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("*.whl")
    return wheel, done.stdout


def run(site: Path, code: str) -> str:
    """What `code` prints with the wheel's ferrule, which it must not touch the user's cache for."""
    environment = {**os.environ, "PYTHONPATH": str(site), "FERRULE_CACHE_DIR": str(site / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=environment, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize("compiler", [None, "/bin/false", "/no/such/compiler"])
def test_wheel(tmp_path: Path, compiler: str | None) -> None:
    if compiler is None and shutil.which("cc") is None:
        pytest.skip("there is no C compiler called cc")
    wheel, log = build(tmp_path, compiler)
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        archive.extractall(site)
    ours = {name for name in names if name.startswith("ferrule/")}
    expected = {
        path.relative_to(PACKAGE.parent).as_posix()
        for pattern in ("*.py", "*.h", "*.c", "py.typed")
        for path in PACKAGE.rglob(pattern)
    }
    built = {name for name in ours if "_runtime" in name}
    assert ours - built == expected
    assert any(name.endswith("licenses/LICENSE") for name in names)
    assert not [name for name in names if name.startswith("tests")]
    assert run(site, "import ferrule; print(ferrule.__file__)").startswith(str(site))
    assert run(site, "from ferrule.cli import main; main(['--help'])").startswith("Usage:")
    if compiler is None:
        assert len(built) == 1
        code = (
            "from ferrule import binding, toolchain\n"
            "toolchain.find_compiler = lambda: 1 / 0\n"
            "print(binding.runtime()._name)"
        )
        assert run(site, code) == str(site / built.pop())
    else:
        assert not built
        assert "building extension" in log  # it was tried, and failed
        if compiler == "/bin/false":  # built by the C++ compiler that there is
            code = "from ferrule import binding; print(binding.get_threads())"
            assert int(run(site, code)) >= 1


def test_this_installation_has_its_runtime() -> None:
    """Where the tests run on an installation with a compiler, it was built, and is used."""
    found = sorted(PACKAGE.glob("_runtime*.so"))
    if not found:
        pytest.skip("not installed with a C compiler")
    binding.runtime()
    stale = binding._installed(PACKAGE) is None
    assert not stale, "the runtime's sources have changed: run pip install -e . again"


def test_versions_agree() -> None:
    assert re.search(r'^version = "(.*)"$', PROJECT, re.M)[1] == ferrule.__version__  # type: ignore[index]
    assert re.search(r"^#define FR_VERSION (\d+)$", runtime_header(), re.M)[1] == str(  # type: ignore[index]
        binding.VERSION
    )


def runtime_header() -> str:
    return (PACKAGE / "runtime" / "runtime.h").read_text(encoding="utf-8")


def requirements() -> dict[str, set[str]]:
    """The names of what is required: always under "", by an extra under its name."""
    found: dict[str, set[str]] = {}
    for line in distribution("ferrule").requires or ():
        name = re.match(r"[A-Za-z0-9_.-]+", line)
        extra = re.search(r"extra == ['\"](\w+)['\"]", line)
        assert name
        found.setdefault(extra[1] if extra else "", set()).add(name[0].lower().replace("_", "-"))
    return found


def third_party(folder: Path) -> dict[str, set[str]]:
    """Modules outside the standard library that are imported, and where."""
    found: dict[str, set[str]] = {}
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            for top in {name.partition(".")[0] for name in names} - sys.stdlib_module_names:
                found.setdefault(top, set()).add(path.relative_to(folder).as_posix())
    return found


def test_what_is_imported_is_required() -> None:
    declared = requirements()
    users = {"torch", "mlx"}  # their own, never installed by us
    for module, where in third_party(PACKAGE).items():
        name = DISTRIBUTIONS.get(module, module).lower().replace("_", "-")
        if module not in users | {"ferrule"}:
            always = name in declared[""]
            assert always or (name in declared["demo"] and where == {"cli/demo.py"}), (name, where)


def test_what_tests_import_is_required() -> None:
    declared = requirements()
    tests = Path(__file__).parent
    local = {path.stem for path in tests.rglob("*.py")} | {
        path.name for path in tests.rglob("*") if path.is_dir()
    }
    for module, where in third_party(tests).items():
        name = DISTRIBUTIONS.get(module, module).lower().replace("_", "-")
        if module not in local | {"ferrule", "pip"}:
            assert name in declared[""] | declared["test"] | declared["demo"], (name, where)


def test_what_is_required_is_imported() -> None:
    imported = {
        DISTRIBUTIONS.get(module, module).lower().replace("_", "-") for module in third_party(PACKAGE)
    }
    assert requirements()[""] - imported == set()


def test_no_compiler_is_asked_at_import() -> None:
    code = (
        "import ferrule.toolchain as t, ferrule.binding\n"
        "print(t._versions, ferrule.binding._runtime)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=100
    )
    assert done.stdout.strip() == "{} None"
    assert hasattr(toolchain, "_versions")
