"""Which room may import which, and what no module may do: read from the sources, not from a running
module.

The table is the design. A room that is not in it fails, so a new one must find its place first.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from importlib.util import find_spec
from pathlib import Path

import pytest

import ferrule

PACKAGE = Path(ferrule.__file__).resolve().parent

# Room: the rooms and other packages that it may import. Rooms are the package's folders; the files
# at its root are the nouns, which everybody knows, but for those of the door: what users import.
# The standard library is everybody's.
MAY_IMPORT = {
    "nouns": "numpy ml_dtypes",
    "rules": "nouns",
    "tools": "nouns",
    "source": "nouns tree_sitter tree_sitter_cpp",
    "source.metal": "nouns source",
    "source.loops": "nouns source tree_sitter",
    "source.accesses": "nouns source source.loops tree_sitter",
    "source.derivatives": "nouns source source.loops source.accesses tree_sitter",
    "source.cuda": "nouns source source.loops source.accesses tree_sitter",
    "devices": "nouns tools source",
    "devices.cpu": "nouns tools source source.cuda source.loops devices",
    "devices.cuda": "nouns tools source source.cuda devices",
    "hosts": "nouns tools numpy cupy",
    "kernels": "nouns tools rules source.metal devices hosts numpy",
    "operators": "nouns tools rules source source.derivatives source.cuda devices hosts kernels "
    "numpy",
    "hosts.torch": "nouns tools rules source.metal devices hosts kernels operators numpy torch",
    "hosts.mlx": "nouns tools rules source.metal source.cuda devices devices.cuda hosts kernels "
    "operators numpy mlx",
    "ops": "door",  # the public names alone
    "ops.nvfp4": "door ops numpy torch mlx safetensors rich humming",  # these when used
    "ops.door": "ops ops.nvfp4",
    "compat": "nouns hosts hosts.torch torch",
    "check.reports": "nouns click",
    "check.launches": "nouns tools source source.accesses source.cuda devices devices.cpu "
    "check.reports numpy elftools",
    "check.stops": "nouns source devices devices.cpu kernels check.reports check.launches numpy",
    "check": "nouns tools rules source source.cuda devices devices.cpu hosts kernels operators "
    "check.reports check.launches check.stops numpy",
    "check.proofs": "nouns rules source source.accesses operators kernels numpy z3",
    "check.fuzzing": "nouns rules devices.cpu hosts operators check check.reports check.proofs "
    "numpy hypothesis",
    "door": "check check.reports check.fuzzing check.proofs nouns tools devices devices.cpu "
    "devices.cuda hosts kernels operators hosts.torch hosts.mlx",
    "cli": "check check.reports check.stops check.fuzzing check.proofs nouns tools rules devices "
    "operators door numpy torch matplotlib PIL click rich ferrule_bench _ferrule_mlx pytest",
}
ROOM_OF = {
    "ferrule": "door",
    "mlx": "door",
    "__main__": "cli",
    "_fastcall": "tools",
    "registry": "door",
    "ops": "ops.door",
}

BUILTINS = {"eval", "exec", "compile", "__import__"}
MODULES = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
SHELLS = {"system", "popen", "getoutput", "getstatusoutput", "create_subprocess_shell"}
ENVIRONMENT = {"environ", "environb", "getenv", "putenv", "getenvb", "unsetenv"}


def sources() -> dict[str, str]:
    """The text of each module, by its name without ``ferrule.``; packages by their own name."""
    found = {}
    for path in sorted([*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.pyi")]):
        parts = path.relative_to(PACKAGE).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        found[name or "ferrule"] = path.read_text(encoding="utf-8")
    return found


SOURCES = sources()
PACKAGES = {name.rpartition(".")[0] for name in SOURCES} - {""}


def imported(module: str, tree: ast.Module, known: set[str]) -> Iterator[tuple[int, str, bool]]:
    """Line and name of each import, wherever it stands: ``spec``, ``source.cpp``, ``numpy``; and
    whether it is of ferrule."""
    home = [] if module == "ferrule" else module.split(".")
    if module not in PACKAGES and module != "ferrule":
        home.pop()
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = home[: len(home) - node.level + 1]
                base = ".".join(["ferrule", *above, *([base] if base else [])])
            names = [f"{base}.{alias.name}" for alias in node.names]
        for name in names:
            first, _, rest = name.partition(".")
            if first != "ferrule":
                yield node.lineno, first, False
                continue
            while rest and rest not in known:  # from what it defines to the module
                rest = rest.rpartition(".")[0]
            yield node.lineno, rest or "ferrule", True


def room_of(module: str) -> str:
    """The room of a module: its folder's name, ``"nouns"`` or ``"door"``."""
    if module in ROOM_OF:
        return ROOM_OF[module]
    return module if module in PACKAGES else module.rpartition(".")[0] or "nouns"


def violations(module: str, text: str, known: set[str] | None = None) -> list[str]:
    """What breaks the rules, each with its line."""
    room = room_of(module)
    if room not in MAY_IMPORT:
        return [f"{room} is not in the table of tests/test_layers.py: give it a place"]
    tree = ast.parse(text)
    found = []
    known = known or set(SOURCES)
    allowed = {room, *MAY_IMPORT[room].split()}
    for line, name, ours in imported(module, tree, known):
        if not ours and name in sys.stdlib_module_names:
            if name in MODULES:
                found.append(f"{module}:{line} imports {name}, which runs what it reads")
        elif (room_of(name) if ours else name) not in allowed:
            found.append(f"{module}:{line} imports {name}, which its room may not")
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.level:
            found += [
                f"{module}:{node.lineno} imports the private {alias.name}"
                for alias in node.names
                if alias.name.startswith("_") and alias.name not in ("_env", "_fastcall")
            ]
        if isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in BUILTINS:
                found.append(f"{module}:{node.lineno} calls {node.func.id}")
            for keyword in node.keywords:
                if keyword.arg == "shell" and not (
                    isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                ):
                    found.append(f"{module}:{node.lineno} runs a shell")
        name = ""
        if isinstance(node, ast.Attribute):
            name = node.attr
            door = isinstance(node.value, ast.Name) and node.value.id == "ferrule"
            if room.startswith("ops") and door and name not in ferrule.__all__:
                found.append(f"{module}:{node.lineno} uses ferrule.{name}, which is not public")
        elif isinstance(node, ast.alias):
            name = node.name
        if name in SHELLS:
            found.append(f"{module}:{node.lineno} uses {name}: it runs a shell")
        if name in ENVIRONMENT and module != "_env":
            found.append(f"{module}:{node.lineno} uses {name}: only _env reads the environment")
        if name == "import_module" and module not in ("ferrule", "moved"):
            found.append(
                f"{module}:{node.lineno} uses {name}: this test cannot see what it imports"
            )
    return found


@pytest.mark.parametrize("module", SOURCES)
def test_rules(module: str) -> None:
    assert violations(module, SOURCES[module]) == []


def test_table_names_what_exists() -> None:
    rooms = set(map(room_of, SOURCES))
    assert set(MAY_IMPORT) == rooms
    assert len(MAY_IMPORT) <= 29
    named = {name for line in MAY_IMPORT.values() for name in line.split()}
    assert {name for name in named - rooms if find_spec(name) is None} <= {
        "cupy",
        "humming",
        "triton",
        "z3",
    }


def circle(graph: Mapping[str, Iterable[str]]) -> list[str]:
    """A way from a node of a graph back to it; empty where there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def graph_of(sources: Mapping[str, str]) -> dict[str, set[str]]:
    """What each module imports of the others, wherever it stands."""
    return {
        module: {
            name
            for _, name, ours in imported(module, ast.parse(text), set(sources))
            if ours and name != module
        }
        for module, text in sources.items()
    }


def test_rooms_have_no_circle() -> None:
    assert (
        circle({room: set(line.split()) & set(MAY_IMPORT) for room, line in MAY_IMPORT.items()})
        == []
    )


def test_modules_have_no_circle() -> None:
    assert circle(graph_of(SOURCES)) == []


@pytest.mark.parametrize(
    ("module", "line"),
    [
        ("kernel", "from . import spec"),
        ("errors", "def f():\n    from .dtypes import Dtype"),
        ("dtypes", "if TYPE_CHECKING:\n    from .spec import Spec"),
        ("hosts.protocol", "from .numpy import name"),
    ],
)
def test_circles_are_seen(module: str, line: str) -> None:
    """One import the wrong way, in a function or for types as well, closes a circle."""
    altered = {**SOURCES, module: f"{SOURCES[module]}\n{line}\n"}
    assert module in circle(graph_of(altered))


@pytest.mark.parametrize(
    ("module", "text", "fault"),
    [
        ("spec", "from .tools import loader", "imports tools.loader"),
        ("spec", "from .hosts.protocol import Host", "imports hosts.protocol"),
        ("spec", "def f():\n    import torch", "spec:2 imports torch"),
        (
            "spec",
            "if TYPE_CHECKING:\n    from .kernels.call import MetalKernel",
            "imports kernels.call",
        ),
        ("hosts.numpy", "from .. import devices", "imports devices"),
        ("hosts.numpy", "from ..devices.cpu.program import device", "imports devices.cpu.program"),
        ("hosts.numpy", "import torch.nn", "imports torch"),
        ("hosts.cupy", "from ferrule.source import cpp", "imports source.cpp"),
        ("devices.cpu.program", "from ...hosts import numpy", "imports hosts.numpy"),
        ("source.cpp", "import ferrule.tools.toolchain as t", "imports tools.toolchain"),
        ("source.metal.text", "from ... import anything", "imports ferrule"),
        ("cli", "from ..source import cpp", "imports source.cpp"),
        ("kernels.call", "from ..source import cpp, metal", "imports source.cpp"),
        ("newcomer.first", "", "newcomer is not in the table"),
        ("cache", "import pickle", "imports pickle"),
        ("cache", "from marshal import loads", "imports marshal"),
        ("cache", "import dill", "imports dill"),
        ("cache", "x = eval(text)", "calls eval"),
        ("cache", "exec(text)", "calls exec"),
        ("cache", "__import__('torch')", "calls __import__"),
        ("ops.norms", "import ferrule\ndef f() -> ferrule.CudaBody: ...", "is not public"),
        ("tools.toolchain", "subprocess.run(c, shell=True)", "runs a shell"),
        ("tools.toolchain", "subprocess.run(c, shell=chosen)", "runs a shell"),
        ("tools.toolchain", "os.system(c)", "uses system"),
        ("tools.toolchain", "from subprocess import getoutput as g", "uses getoutput"),
        ("cache", "os.environ['HOME']", "uses environ"),
        ("cache", "from os import getenv", "uses getenv"),
        ("cache", "importlib.import_module(n)", "uses import_module"),
        ("kernels.call", "from .arguments import _found", "the private _found"),
    ],
)
def test_rules_are_seen_broken(module: str, text: str, fault: str) -> None:
    assert any(fault in found for found in violations(module, text))


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("hosts.torch.arrays", "import torch\nimport torch.utils._pytree\nfrom torch import nn"),
        (
            "hosts.torch.arrays",
            "from .. import numpy\nfrom ...spec import Facts\nfrom ... import dtypes, _env",
        ),
        ("devices.cpu.program", "from ..protocol import Device"),
        (
            "cli",
            "import ferrule as fe\nfrom ferrule import metal_kernel\nfrom .. import CompileError",
        ),
        ("tools.toolchain", "re.compile(p)\nsubprocess.run(c, shell=False)\nmx.eval(a)\nimport os"),
        ("_env", "import os\nos.environ.get('X')"),
    ],
)
def test_rules_allow_what_is_right(module: str, text: str) -> None:
    assert violations(module, text) == []


def imports_of(code: str) -> set[str]:
    """The top-level modules, outside the standard library, that `code` loads in a new process."""
    script = (
        "import json, sys\n"
        "def tops(): return {name.partition('.')[0] for name in list(sys.modules)}\n"
        f"before = tops()\n{code}\n"
        "print(json.dumps(sorted(tops() - before - set(sys.stdlib_module_names))))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], check=True, capture_output=True, text=True, timeout=120
    )
    return set(json.loads(done.stdout.splitlines()[-1]))


def test_import_is_cheap() -> None:
    assert imports_of("import ferrule") == {"ferrule", "numpy"}


@pytest.mark.parametrize("module", ["click", "tree_sitter"])
def test_dear_imports_are_seen(module: str) -> None:
    assert imports_of(f"import ferrule, {module}") >= {"ferrule", "numpy", module}


def test_writing_text_imports_no_framework() -> None:
    code = (
        "import ferrule\n"
        "k = ferrule.metal_kernel('copy', ['a'], ['b'],"
        " 'b[thread_position_in_grid.x] = a[thread_position_in_grid.x];')\n"
        "assert 'a[' in k.text('metal', inputs=['float32[9]'], output_shapes=[(9,)],"
        " output_dtypes=[ferrule.float32], grid=(9, 1, 1), threadgroup=(9, 1, 1))\n"
    )
    assert not imports_of(code) & {"torch", "mlx", "click", "rich", "cuda"}


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: p.stem)
def test_files_are_small(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 700, "two modules in one?"
