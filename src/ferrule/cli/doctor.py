"""``ferrule doctor``: what is here, what is missing, and the command that would mend it."""

from __future__ import annotations

import contextlib
import json
import os
import platform
import re
import shlex
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
import time
import warnings
from collections.abc import Iterable, Iterator
from importlib import metadata
from typing import Any

import click
import numpy as np
from rich.console import Console
from rich.text import Text

import ferrule

from .. import FerruleError, KernelError, ToolchainError, _env, cache, float32, metal_kernel
from ..devices import protocol as devices
from ..spec import Input, Spec
from ..tools import binding, driver, fastcall, nvdisasm, nvrtc
from ..tools import toolchain as tools
from .faults import readable

_HOSTS = ("numpy", "ml_dtypes", "torch", "mlx", "cupy")
_CUPY = ("cupy-cuda13x", "cupy-cuda12x", "cupy")  # how its packages are called

_KERNEL = metal_kernel(
    name="doctor",
    input_names=["inp"],
    output_names=["out"],
    source="""
        uint i = thread_position_in_grid.x;
        out[i] = inp[i] + simd_sum(inp[i]);
    """,
)

# What a process prints that imports MLX, behind whatever MLX prints.
_LOOK = """
import json
from ferrule.hosts.mlx import build
print("\\0" + json.dumps(build.state()))
"""

Report = dict[str, Any]
Row = tuple[str, str, str]  # a label, a value and its style


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print it as JSON.")
def command(as_json: bool) -> None:
    """Say what ferrule finds on this machine, and how to get what is missing.

    At the end a small kernel is compiled and run. Exit code 1 says that this failed.
    """
    report = examine()
    if as_json:
        click.echo(json.dumps(report, indent=2))
    else:
        show(report, Console(soft_wrap=True, highlight=False))
    if not report["check"]["ok"]:
        raise SystemExit(1)


# -- looking ---------------------------------------------------------------------------------------


def examine() -> Report:
    """Everything that the command prints, made of JSON's types."""
    problems: list[Report] = []
    report: Report = {
        "ferrule": ferrule.__version__,
        "python": {"version": platform.python_version(), "path": sys.executable},
        "system": platform.platform(),
        "processors": os.cpu_count(),
        "cache": _cache(problems),  # first, for the others use it and would warn of it
        "devices": [],  # last, when it is known whether kernels run
        "compilers": _compilers(problems),
        "driver": _driver(),
        "nvrtc": _nvrtc(),
        "nvdisasm": _nvdisasm(),
        "hosts": {name: _version(name) for name in _HOSTS},
        "mlx": _mlx(),
        "environment": {name: _env.get(name) for name in _env.NAMES},
    }
    no_compiler = not any(compiler["used"] for compiler in report["compilers"])
    report["runtime"] = _runtime(problems, no_compiler)
    report["check"] = _check(problems)
    report["devices"] = _devices(report["driver"], report["check"])
    report["problems"] = problems
    return report


def _cache(problems: list[Report]) -> Report:
    disk = cache.default()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        reason = disk.reason_disabled
    if reason is not None:
        messages = [str(warning.message) for warning in caught]
        problems.append({"problem": messages[0] if messages else reason, "fix": None})
    entries = disk.entries()
    return {
        "path": str(disk.path),
        "usable": reason is None,
        "reason": reason,
        "entries": len(entries),
        "bytes": sum(entry.size for entry in entries),
        "max_bytes": disk.max_bytes,
    }


def _devices(nvidia: Report, check: Report) -> list[Report]:
    """Whether each device can run kernels; if not, why."""
    note = None if check["ok"] else _sentence(check["error"])
    cpu = {"name": "cpu", "runs": check["ok"], "note": note}
    gpus = [_gpu(f"cuda:{n}", gpu["name"]) for n, gpu in enumerate(nvidia["gpus"])]
    none = {"name": "cuda", "runs": False, "note": nvidia["error"] or "this process sees no GPU"}
    return [cpu, *(gpus or [none])]


def _gpu(name: str, model: str) -> Report:
    """A GPU, for which a kernel is compiled."""
    spec = Spec(_KERNEL.kernel, (Input(float32, 1),), (float32,))
    try:
        binary = devices.get(name).compile(spec)
    except FerruleError as error:
        note = str(error).removeprefix(f"kernel {_KERNEL.kernel.name!r}: ")
        return {"name": name, "runs": False, "note": f"{model}: {note}"}
    return {"name": name, "runs": True, "note": f"{model}, {binary.mode}"}


def _driver() -> Report:
    """NVIDIA's driver and the GPUs that this process sees."""
    try:
        libcuda = driver.driver()
        gpus = [
            {
                "name": libcuda.name(n),
                "capability": ".".join(map(str, libcuda.capability(n))),
                "threadgroup_memory": libcuda.shared_memory(n),
            }
            for n in range(libcuda.count)
        ]
    except FerruleError as error:
        return {"version": None, "gpus": [], "error": str(error)}
    return {"version": ".".join(map(str, libcuda.version)), "gpus": gpus, "error": None}


def _sentence(error: str) -> str:
    """An error's first line, without what only leads to the next."""
    return re.sub(r"(\.)\s[^.]*:$", r"\1", error.partition("\n")[0])


def _compilers(problems: list[Report]) -> list[Report]:
    """Every C++ compiler that is found, once each; the one that is used comes first."""
    reports: dict[str, Report] = {}
    try:
        chosen = tools.find_compiler()
        reports[os.path.realpath(chosen.path)] = _described(chosen, used=True)
    except FerruleError as error:
        variable = _env.get(_env.CXX)
        fix = f"Run: unset {_env.CXX}" if variable is not None else tools.remedy()
        problems.append({"problem": str(error).removesuffix(tools.remedy()).rstrip(), "fix": fix})
    for _, argv in tools.candidates():
        if argv is None or os.path.realpath(argv[0]) in reports:
            continue
        try:
            report = _described(tools.find_compiler(shlex.join(argv)), used=False)
        except FerruleError as error:
            report = {"path": argv[0], "used": False, "error": _sentence(str(error))}
        reports[os.path.realpath(argv[0])] = report
    return list(reports.values())


def _described(compiler: tools.Compiler, used: bool) -> Report:
    return {
        "kind": compiler.kind,
        "version": compiler.version,
        "path": shlex.join(compiler.argv),
        "used": used,
    }


def _runtime(problems: list[Report], no_compiler: bool) -> Report | None:
    """The C runtime: where it is from, and the threads that run kernels."""
    try:
        library = binding.runtime()
    except FerruleError as error:
        # That there is no compiler, and so no runtime, was said already.
        if not (isinstance(error, ToolchainError) and no_compiler):
            unset = f"Run: unset {_env.THREADS}" if isinstance(error, KernelError) else None
            problems.append({"problem": str(error), "fix": unset})
        return None
    installed = str(library._name).startswith(str(binding.FOLDER))
    return {
        "built": "with the package" if installed else "on this machine, kept in the cache",
        "threads": binding.get_threads(),
        "repeated calls": _repeated(),
    }


def _repeated() -> str:
    """Whether C or Python makes repeated calls."""
    if fastcall.library() is not None:
        return "by C"
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "by Python, because this Python has no stable interface for C"
    return "by Python, which takes 10 µs more: reinstall ferrule with a C compiler and Python.h"


def _nvrtc() -> Report | None:
    library = nvrtc.find_nvrtc()
    if library is None:
        return None
    try:
        headers, missing = list(nvrtc.find_headers(library).folders), None
    except ToolchainError as error:
        headers, missing = [], str(error)
    return {
        "version": ".".join(map(str, library.version)),
        "path": library.path,
        "architectures": library.architectures(),
        "headers": headers,
        "headers_missing": missing,
    }


def _nvdisasm() -> Report | None:
    path = nvdisasm.find_nvdisasm()
    return None if path is None else {"path": path}


def _version(package: str) -> str | None:
    """The version that is installed, found without importing it."""
    for name in _CUPY if package == "cupy" else (package,):
        with contextlib.suppress(metadata.PackageNotFoundError):
            return metadata.version(name)
    return None


def _mlx() -> Report | None:
    """ferrule's nodes of MLX's graphs: where they are from, or why they cannot be had; None without
    MLX. It is imported in a process of its own, which it may end."""
    version = _version("mlx")
    if version is None:
        return None
    report: Report = {"version": version, "nodes": None, "error": None}
    try:
        done = subprocess.run(
            [sys.executable, "-c", _LOOK], check=False, capture_output=True, text=True, timeout=60
        )
        report["nodes"], report["error"] = json.loads(done.stdout.rpartition("\0")[2])
    except (OSError, subprocess.TimeoutExpired) as fault:
        report["error"] = f"{sys.executable} does not answer: {fault}"
    except ValueError:
        why = done.stderr.strip().rpartition("\n")[2] or f"Python ended with {done.returncode}"
        report["error"] = f"MLX cannot be imported: {why}"
    return report


def _check(problems: list[Report]) -> Report:
    """Compile a kernel afresh, run it, and look at what it computed."""
    x = np.arange(64, dtype=np.float32)
    expected = x + np.repeat(x.reshape(2, 32).sum(axis=1), 32)
    start = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="ferrule-doctor-") as folder:
        cache.set_default(folder)  # an empty one, so that the compiler has to work
        try:
            (out,) = _KERNEL(
                inputs=[x],
                grid=(64, 1, 1),
                threadgroup=(32, 1, 1),
                output_shapes=[x.shape],
                output_dtypes=[x.dtype],
            )
        except FerruleError as error:
            if not problems:
                problems.append({"problem": str(error), "fix": None})
            return {"ok": False, "error": str(error), "seconds": None}
        finally:
            cache.set_default(None)
    seconds = round(time.perf_counter() - start, 3)
    if not np.array_equal(out, expected):
        wrong = f"a kernel gave wrong numbers: {out.tolist()}, expected {expected.tolist()}"
        problems.append({"problem": wrong, "fix": None})
        return {"ok": False, "error": wrong, "seconds": seconds}
    return {"ok": True, "error": None, "seconds": seconds}


# -- showing ---------------------------------------------------------------------------------------


def show(report: Report, console: Console) -> None:
    """Print a report for a reader, one line a fact."""
    console.print(Text(f"ferrule {report['ferrule']}", style="bold"))
    _print_rows(_system_rows(report), console)
    for title, rows_of in _SECTIONS:
        if rows := [*rows_of(report)]:
            console.print(Text(f"\n{title}", style="bold"))
            _print_rows(rows, console)
    for problem in report["problems"]:
        console.print(Text("\nProblem", style="bold"))
        console.print(Text(textwrap.indent(problem["problem"], "  "), style="yellow"))
        if problem["fix"]:
            console.print(Text(f"  {problem['fix']}", style="bold"))


def _print_rows(rows: Iterable[Row], console: Console) -> None:
    for label, value, style in rows:
        console.print(Text.assemble(f"  {label:<20}", (value, style)))


def _system_rows(report: Report) -> Iterator[Row]:
    python = report["python"]
    yield "Python", f"{python['version']}, {python['path']}", ""
    yield "system", f"{report['system']}, {report['processors']} processors", ""


def _device_rows(report: Report) -> Iterator[Row]:
    for device in report["devices"]:
        if device["runs"]:
            note = f" ({device['note']})" if device["note"] else ""
            yield device["name"], f"runs kernels{note}", "green"
        else:
            yield device["name"], device["note"], "dim"


def _compiler_rows(report: Report) -> Iterator[Row]:
    if not report["compilers"]:
        yield "none", "", "red"
    for compiler in report["compilers"]:
        path = compiler["path"]
        if "error" in compiler:
            yield "unusable", f"{path}: {compiler['error']}", "yellow"
        else:
            kind = "zig, clang" if compiler["kind"] == "zig" else compiler["kind"]
            used, style = (" (used)", "green") if compiler["used"] else ("", "")
            yield f"{kind} {compiler['version']}", f"{path}{used}", style


def _runtime_rows(report: Report) -> Iterator[Row]:
    if report["runtime"] is None:
        yield "missing", "", "red"
    else:
        yield from [(label, str(value), "") for label, value in report["runtime"].items()]


def _driver_rows(report: Report) -> Iterator[Row]:
    if report["driver"]["error"] is not None:
        return
    yield "CUDA", report["driver"]["version"], ""
    for n, gpu in enumerate(report["driver"]["gpus"]):
        architecture = f"sm_{gpu['capability'].replace('.', '')}"
        memory = f"{readable(gpu['threadgroup_memory'])} of threadgroup memory"
        yield f"cuda:{n}", f"{gpu['name']}, {architecture}, {memory}", ""


def _nvrtc_rows(report: Report) -> Iterator[Row]:
    library, disassembler = report["nvrtc"], report["nvdisasm"]
    if library is None:
        needed = "needed for NVIDIA GPUs alone: pip install nvidia-cuda-nvrtc"
        yield "not found", needed, "dim"
    else:
        missing = library["headers_missing"]
        headers = missing or ", ".join(library["headers"])
        yield library["version"], library["path"], ""
        yield "architectures", f"sm_: {', '.join(map(str, library['architectures']))}", ""
        yield "CUDA's headers", headers, "dim" if missing else ""
    if disassembler is None:
        yield "nvdisasm", f"not found; to see machine code: {nvdisasm.REMEDY}", "dim"
    else:
        yield "nvdisasm", disassembler["path"], ""


def _host_rows(report: Report) -> Iterator[Row]:
    for name, version in report["hosts"].items():
        yield name, version or "not installed", "" if version else "dim"
        if name == "mlx" and report["mlx"]:
            nodes, error = report["mlx"]["nodes"], report["mlx"]["error"]
            later = "not built yet: the first call with MLX's arrays does, once, in some seconds"
            yield "  ferrule's nodes", error or nodes or later, "yellow" if error else ""


def _cache_rows(report: Report) -> Iterator[Row]:
    disk = report["cache"]
    usable = "yes, private to this user" if disk["usable"] else f"no: {disk['reason']}"
    size = f"{readable(disk['bytes'])} of {readable(disk['max_bytes'])}"
    yield "folder", disk["path"], ""
    yield "usable", usable, "" if disk["usable"] else "red"
    yield "entries", f"{disk['entries']}, {size}", ""


def _environment_rows(report: Report) -> Iterator[Row]:
    for name, value in report["environment"].items():
        yield name, value or "not set", "" if value else "dim"


def _check_rows(report: Report) -> Iterator[Row]:
    if report["check"]["ok"]:
        yield "compile and run", f"ok, {report['check']['seconds']:.2f} s", "green"
    else:
        yield "compile and run", "failed: see below", "red"


# A section without rows is left out.
_SECTIONS = (
    ("Devices", _device_rows),
    ("C++ compilers", _compiler_rows),
    ("C runtime", _runtime_rows),
    ("NVIDIA's driver", _driver_rows),
    ("NVRTC", _nvrtc_rows),
    ("Array libraries", _host_rows),
    ("Cache", _cache_rows),
    ("Environment", _environment_rows),
    ("Check", _check_rows),
)
