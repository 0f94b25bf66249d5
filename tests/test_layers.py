"""Who may import whom, and what no module may do: read from the sources, not from a running module.

The table is the design. A module that is not in it fails, so a new one must find its place first.
"""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ferrule

PACKAGE = Path(ferrule.__file__).resolve().parent

NOUNS = "errors _env dtypes kernel spec"

# Module: what of ferrule it may import, and of other packages. A package's name stands for all
# modules in it, "ferrule" for the public names. The standard library is everybody's.
MAY_IMPORT = {
    "errors": "",
    "_env": "",
    "dtypes": "errors numpy ml_dtypes",
    "kernel": "errors dtypes",
    "spec": "errors dtypes kernel",
    "unit": "spec",
    "expression": "errors",
    "rule": "errors dtypes expression",
    "bytecode": "errors dtypes expression rule",
    # Text: knows no device, no host, no compiler.
    "source": "",
    "source.analysis": f"{NOUNS} source tree_sitter",
    "source.arithmetic": f"{NOUNS} source tree_sitter",
    "source.cpp": f"{NOUNS} source",
    "source.cuda": f"{NOUNS} source",
    "source.cuda_body": f"{NOUNS} source",
    "source.cuda_by_pointer": f"{NOUNS} source",
    "source.cuda_launch": f"{NOUNS}",
    "source.cuda_unit": f"{NOUNS} unit",
    "source.dialect": "",
    "source.fibers": f"{NOUNS} source tree_sitter",
    "source.flat": f"{NOUNS} source tree_sitter",
    "source.functions": f"{NOUNS} source tree_sitter",
    "source.inline": f"{NOUNS} source tree_sitter",
    "source.lexer": "errors",
    "source.macros": f"{NOUNS} source",
    "source.bounds": f"{NOUNS} source tree_sitter",
    "source.largest": f"{NOUNS} source tree_sitter",
    "source.masks": f"{NOUNS} source tree_sitter",
    "source.matrices": "source tree_sitter",
    "source.metal": f"{NOUNS} source",
    "source.metal_prelude": "",
    "source.metal_read": f"{NOUNS} source",
    "source.mlx_cuda": f"{NOUNS}",
    "source.names": "source",
    "source.operations": f"{NOUNS} source tree_sitter",
    "source.regions": f"{NOUNS} source tree_sitter",
    "source.returns": "source tree_sitter",
    "source.rewrite": f"{NOUNS} source",
    "source.rows": "source tree_sitter",
    "source.shared": f"{NOUNS} source",
    "source.split": f"{NOUNS} source tree_sitter",
    "source.syntax": "errors tree_sitter tree_sitter_cpp",
    "source.uniform": "errors source tree_sitter",
    "source.unportable": f"{NOUNS} source",
    # Tools: know no kernel.
    "cache": "errors _env",
    "loader": "errors",
    "waiting": "",
    "toolchain": "errors _env cache waiting",
    "nvrtc": "errors _env cache",
    "nvdisasm": "errors _env nvrtc",
    "driver": "errors",
    "binding": "errors _env cache loader toolchain",
    "_fastcall": "",
    "fastcall": "_fastcall",
    # Devices compile and launch, and never see an array; hosts have arrays, and never see a device.
    "devices": f"{NOUNS} unit cache driver devices",
    "devices.cpu": f"{NOUNS} source cache fastcall loader toolchain binding devices",
    "devices.cpu_build": f"{NOUNS} source toolchain devices",
    "devices.cuda": f"{NOUNS} source cache driver nvrtc devices",
    "devices.cuda_build": f"{NOUNS} source nvrtc devices",
    "devices.cuda_program": f"{NOUNS} source driver fastcall devices",
    "devices.cuda_unit": f"{NOUNS} unit source cache driver nvrtc devices",
    "devices.cuda_unit_build": f"{NOUNS} unit source nvrtc devices",
    "devices.diagnostics": f"{NOUNS}",
    "devices.digests": "cache",
    "devices.package_code": f"{NOUNS} unit source devices",
    "devices.portability": f"{NOUNS} source",
    "hosts": f"{NOUNS} hosts numpy",
    "hosts.numpy": f"{NOUNS} hosts fastcall _fastcall numpy",
    "hosts.torch": f"{NOUNS} hosts driver fastcall numpy torch",
    "hosts.mlx": f"{NOUNS} hosts numpy mlx",
    "hosts.cupy": f"{NOUNS} hosts cupy numpy",
    "hosts.exchange": f"{NOUNS} hosts torch",
    # The call joins them.
    "arguments": f"{NOUNS} hosts numpy",
    "call_sizes": f"{NOUNS} arguments expression rule",
    "call": f"{NOUNS} arguments call_sizes dictionary_call fastcall source.metal hosts devices",
    "dictionary_call": f"{NOUNS} call hosts devices",
    "cuda_call": f"{NOUNS} hosts call devices",
    "mlx_install": "errors kernel call cuda_call hosts mlx numpy",
    # An op: what it declares, what carries it out, and its derivatives.
    "identity": "errors dtypes numpy",
    "implementation": f"{NOUNS} identity expression rule source.names devices",
    "metal_file": f"{NOUNS} implementation rule source.lexer",
    "derivatives": "errors dtypes identity rule op_declaration",
    "batching": "errors rule sharding op_declaration",
    "sharding": "errors expression rule op_declaration",
    "cuda_parts": "errors implementation rule",
    "cuda_steps": f"{NOUNS} unit expression rule implementation cuda_parts devices numpy",
    "op_launch": f"{NOUNS} identity implementation rule devices numpy",
    "op_unit": f"{NOUNS} unit cuda_steps rule hosts devices numpy",
    "op_call": f"{NOUNS} arguments hosts implementation cuda_steps op_declaration op_launch "
    "op_unit rule numpy",
    "op_checks": f"{NOUNS} derivatives hosts implementation cuda_steps op_call op_declaration "
    "rule numpy",
    "op_settings": "errors rule",
    "op_declaration": "errors call kernel identity metal_file rule implementation cuda_parts "
    "cuda_steps derivatives op_call op_settings sharding hosts.torch_op",
    "op_text": "errors dtypes rule spec unit call cuda_call cuda_steps devices implementation "
    "op_declaration op_launch source numpy",
    "adopting": "errors implementation op_declaration op_settings sharding",
    "hosts.torch_op": f"{NOUNS} arguments fastcall batching expression implementation cuda_steps "
    "op_declaration op_call op_entries op_launch op_settings op_unit rule hosts torch",
    "op_entries": f"{NOUNS} bytecode expression fastcall implementation op_call op_declaration "
    "op_launch hosts devices",
    "hosts.torch_calls": "errors dtypes binding driver fastcall op_call op_declaration op_entries "
    "hosts.torch torch",
    "hosts.mlx_build": "errors dtypes binding cache fastcall loader op_entries toolchain waiting "
    "hosts.mlx_probe hosts.mlx_sources mlx",
    "hosts.mlx_probe": "errors dtypes driver op_entries devices numpy mlx",
    "hosts.mlx_sources": "",  # setup.py reads it, too
    "hosts.mlx_node": f"{NOUNS} arguments batching bytecode call_sizes derivatives op_call "
    "op_declaration op_entries op_launch implementation hosts devices numpy mlx",
    "hosts.mlx_batches": "errors derivatives op_declaration hosts.mlx hosts.mlx_build mlx",
    "hosts.mlx_gpu": f"{NOUNS} arguments cache cuda_steps driver implementation op_call "
    "op_declaration op_entries op_launch op_unit rule hosts devices numpy mlx",
    "hosts.mlx_export": f"{NOUNS} arguments call_sizes identity implementation op_call "
    "op_declaration op_file op_launch source.metal source.mlx_cuda hosts numpy mlx",
    "hosts.mlx_file": "errors",
    "hosts.mlx_import": f"{NOUNS} call call_sizes cuda_call implementation op_declaration op_file "
    "source.metal_read source.mlx_cuda hosts numpy mlx",
    "hosts.mlx_sizes": "errors hosts.mlx_build hosts.mlx_node mlx",
    "hosts.mlx_matmul": "errors hosts.mlx hosts.mlx_build hosts.mlx_node hosts.mlx_sizes mlx",
    "mlx": "hosts.mlx_matmul",
    "hosts.torch_sharding": "errors op_declaration sharding torch",
    "hosts.torch_mps": "errors dtypes implementation op_launch rule spec source.metal "
    "source.metal_prelude hosts torch",
    "hosts.torch_kernels": "batching errors op_declaration hosts torch",
    "hosts.torch_autograd": "binding derivatives errors op_declaration hosts torch",
    "hosts.torch_sizes": "errors cuda_steps expression implementation op_declaration rule torch",
    "op_file": "errors identity op_declaration",
    "hosts.torch_export": "errors op_declaration op_file hosts.torch_op torch",
    "package_text": "errors dtypes arguments bytecode cuda_steps expression implementation "
    "op_declaration rule spec unit source.cuda_launch devices.package_code numpy",
    "hosts.torch_package": f"{NOUNS} cuda_steps devices.package_code expression implementation "
    "op_declaration op_file op_unit package_text rule toolchain hosts.torch_export hosts.torch_op "
    "hosts.torch_sizes torch",
    # What other code calls.
    "compat": "",
    "compat.runners": "errors hosts torch",
    "ferrule": "errors adopting dtypes call dictionary_call cuda_call cuda_parts binding "
    "mlx_install op_checks op_declaration toolchain mlx hosts.mlx_import hosts.torch_export "
    "hosts.torch_package",
    # The benchmarks use what users have, and what they are measured against.
    "bench": "",
    "bench.by_ops": "torch",
    "bench.cpu": "ferrule bench cli numpy torch mlx",
    "bench.cuda": "ferrule bench cli devices numpy torch cupy mlx",
    "bench.mlx_graph": "ferrule bench mlx",
    "bench.mlx_lm": "ferrule bench numpy mlx mlx_lm",
    "bench.ops": "ferrule bench torch",
    "bench.report": "errors bench binding driver nvrtc matplotlib",
    "bench.sass": "ferrule bench nvdisasm nvrtc",
    "bench.startup": "ferrule bench _env cli cache loader numpy torch",
    "bench.timing": "numpy",
    "bench.triton_exp": "torch triton",
    "bench.twins": "errors driver nvrtc torch",
    # The command line uses what users have, and asks the tools how they are.
    "cli": "ferrule cli click",
    "cli.bench": "ferrule cli bench binding driver click torch matplotlib",
    "cli.build": "ferrule cli click",
    "cli.cache": "ferrule cli cache click",
    "cli.demo": "ferrule cli binding driver numpy torch click rich matplotlib PIL",
    "cli.doctor": "ferrule cli _env spec devices driver cache toolchain binding fastcall nvdisasm "
    "nvrtc numpy click rich",
    "cli.grid_sample": "ferrule numpy",
    "cli.inspect": "ferrule cli nvdisasm op_text click",
    "cli.inspect_op": "ferrule cli cuda_steps dtypes identity implementation op_text rule click",
    "cli.run": "cli _env _ferrule_mlx click",
    "cli.target": "ferrule cli dtypes click",
    "__main__": "cli",
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


def imported(module: str, tree: ast.Module, known: set[str]) -> Iterator[tuple[int, str]]:
    """Line and name of each import, wherever it stands: ``spec``, ``source.cpp``, ``numpy``."""
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
                yield node.lineno, first
                continue
            while rest and rest not in known:  # from a module down to what it defines
                rest = rest.rpartition(".")[0]
            yield node.lineno, rest or "ferrule"


def violations(module: str, text: str, known: set[str] | None = None) -> list[str]:
    """What breaks the rules, each with its line."""
    if module not in MAY_IMPORT:
        return [f"{module} is not in the table of tests/test_layers.py: give it a place"]
    tree = ast.parse(text)
    found = []
    allowed = set(MAY_IMPORT[module].split())
    for line, name in imported(module, tree, known or set(SOURCES)):
        if name in sys.stdlib_module_names:
            if name in MODULES:
                found.append(f"{module}:{line} imports {name}, which runs what it reads")
        elif name not in allowed and name.partition(".")[0] not in allowed and name != module:
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
        elif isinstance(node, ast.alias):
            name = node.name
        if name in SHELLS:
            found.append(f"{module}:{node.lineno} uses {name}: it runs a shell")
        if name in ENVIRONMENT and module != "_env":
            found.append(f"{module}:{node.lineno} uses {name}: only _env reads the environment")
        if name == "import_module" and module != "ferrule":
            found.append(
                f"{module}:{node.lineno} uses {name}: this test cannot see what it imports"
            )
    return found


@pytest.mark.parametrize("module", SOURCES)
def test_rules(module: str) -> None:
    assert violations(module, SOURCES[module]) == []


def test_table_names_what_exists() -> None:
    assert set(MAY_IMPORT) - set(SOURCES) == set()


@pytest.mark.parametrize(
    ("module", "text", "fault"),
    [
        ("spec", "from . import cache", "imports cache"),
        ("spec", "from .hosts import Host", "imports hosts"),
        ("spec", "def f():\n    import torch", "spec:2 imports torch"),
        ("spec", "if TYPE_CHECKING:\n    from .call import MetalKernel", "imports call"),
        ("hosts.numpy", "from .. import devices", "imports devices"),
        ("hosts.numpy", "from ..devices.cpu import device", "imports devices.cpu"),
        ("hosts.numpy", "import torch.nn", "imports torch"),
        ("hosts", "from ferrule.source import cpp", "imports source.cpp"),
        ("devices.cpu", "from ..hosts import numpy", "imports hosts.numpy"),
        ("source.cpp", "import ferrule.toolchain as t", "imports toolchain"),
        ("source.metal", "from ... import anything", "imports ferrule"),
        ("cli", "from ..source import cpp", "imports source.cpp"),
        ("call", "from .source import cpp, metal", "imports source.cpp"),
        ("newcomer", "", "not in the table"),
        ("cache", "import pickle", "imports pickle"),
        ("cache", "from marshal import loads", "imports marshal"),
        ("cache", "import dill", "imports dill"),
        ("cache", "x = eval(text)", "calls eval"),
        ("cache", "exec(text)", "calls exec"),
        ("cache", "__import__('torch')", "calls __import__"),
        ("toolchain", "subprocess.run(c, shell=True)", "runs a shell"),
        ("toolchain", "subprocess.run(c, shell=chosen)", "runs a shell"),
        ("toolchain", "os.system(c)", "uses system"),
        ("toolchain", "from subprocess import getoutput as g", "uses getoutput"),
        ("cache", "os.environ['HOME']", "uses environ"),
        ("cache", "from os import getenv", "uses getenv"),
        ("cache", "importlib.import_module(n)", "uses import_module"),
        ("call", "from .arguments import _found", "the private _found"),
    ],
)
def test_rules_are_seen_broken(module: str, text: str, fault: str) -> None:
    assert any(fault in found for found in violations(module, text))


@pytest.mark.parametrize(
    ("module", "text"),
    [
        ("hosts.torch", "import torch\nimport torch.utils._pytree\nfrom torch import nn"),
        (
            "hosts.torch",
            "from . import numpy\nfrom ..spec import Facts\nfrom .. import dtypes, _env",
        ),
        ("devices", "from .cpu import device"),
        (
            "cli",
            "import ferrule as fe\nfrom ferrule import metal_kernel\nfrom .. import CompileError",
        ),
        ("toolchain", "re.compile(p)\nsubprocess.run(c, shell=False)\nmx.eval(a)\nimport os"),
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
