"""The C runtime is found or built, runs every unit once, and holds under the sanitizers."""

from __future__ import annotations

import ctypes
import functools
import os
import re
import runpy
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import ferrule
from ferrule import _env, cache
from ferrule.errors import KernelError, KernelTypeError, ToolchainError
from ferrule.tools import binding, loader, toolchain

NATIVE = Path(__file__).resolve().parents[1] / "native"

# The entry counts the runs of each unit in `seen`, after `flag` is set, and notes the threads.
ENTRY = """
#include <cstdint>
#include "runtime.h"
struct launch { uint32_t* seen; uint64_t* threads; volatile uint32_t* flag; };
extern "C" __attribute__((visibility("default")))
void entry(const void* data, uint64_t begin, uint64_t end, fr_worker* worker) {
  const launch* l = static_cast<const launch*>(data);
  while (!*l->flag) {}
  for (uint64_t i = begin; i < end; ++i) l->seen[i]++;
  __atomic_fetch_or(l->threads, uint64_t(1) << worker->index, __ATOMIC_RELAXED);
}
"""


@pytest.fixture(autouse=True)
def default_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(_env.THREADS, raising=False)
    yield
    monkeypatch.undo()
    binding.set_threads(None)


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A process that has not loaded the runtime, installed without one, with a cache of its own.

    Returns the package's folder.
    """
    folder = tmp_path / "ferrule"
    shutil.copytree(binding.FOLDER / "runtime", folder / "runtime")
    monkeypatch.setattr(binding, "FOLDER", folder)
    monkeypatch.setattr(binding, "_runtime", None)
    monkeypatch.setattr(binding, "_threads", None)
    monkeypatch.setattr(toolchain, "_versions", {})
    monkeypatch.setenv(_env.CACHE_DIR, str(tmp_path / "cache"))
    binding.source_digest.cache_clear()
    return folder


@pytest.fixture(autouse=True)
def fresh_digest() -> Iterator[None]:
    yield
    binding.source_digest.cache_clear()


@functools.cache
def entry() -> int:
    folder = Path(ferrule.__file__).resolve().parent / "runtime"
    payload = toolchain.find_compiler().compile(ENTRY, flags=["-O1", f"-I{folder}"])
    address = ctypes.cast(loader.load_library(payload, "entry").entry, ctypes.c_void_p).value
    assert address is not None
    return address


class Job:
    def __init__(self, units: int, flag: int = 1) -> None:
        self.seen = np.zeros(units, np.uint32)
        self.threads = np.zeros(1, np.uint64)
        self.flag = np.array([flag], np.uint32)
        parts = (self.seen, self.threads, self.flag)
        self.launch = (ctypes.c_void_p * 3)(*(part.ctypes.data for part in parts))
        self.units = units

    def run(self, threads: int = 0) -> int:
        launch = ctypes.addressof(self.launch)
        return int(binding.runtime().fr_run(entry(), launch, self.units, threads))


def test_header_and_binding_agree() -> None:
    header = (binding.FOLDER / "runtime" / "runtime.h").read_text()
    defined = dict(re.findall(r"#define (FR_\w+) (\d+)", header))
    assert defined == {
        "FR_VERSION": str(binding.VERSION),
        "FR_MAX_THREADS": str(binding.MAX_THREADS),
        "FR_MAX_PARTS": str(binding.MAX_PARTS),
    }
    assert binding.runtime().fr_version() == binding.VERSION
    assert binding.runtime().fr_digest() == binding.source_digest().encode()


def test_what_is_installed_is_of_the_same_sources() -> None:
    """Else the library that setup.py builds would never be taken."""
    setup = binding.FOLDER.parents[1] / "setup.py"
    if not setup.is_file():
        pytest.skip("there is no setup.py")
    pytest.importorskip("setuptools")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(setup.parent)
        patch.setattr("setuptools.setup", lambda **_: None)
        files = runpy.run_path(str(setup))["FILES"]
    assert tuple(file.name for file in files) == binding.SOURCES


@given(st.integers(0, 3000), st.integers(0, 5))
@settings(deadline=None)
def test_every_unit_runs_once(units: int, threads: int) -> None:
    job = Job(units)
    assert job.run(threads) == 0
    assert (job.seen == 1).all()
    assert int(job.threads[0]) < 1 << max(threads or binding.get_threads(), 1)


def test_callers_of_several_threads() -> None:
    def run(seed: int) -> bool:
        job = Job(100 * seed)
        return all(job.run(3) == 0 for _ in range(50)) and bool((job.seen == 50).all())

    with ThreadPoolExecutor(6) as pool:
        assert all(pool.map(run, range(1, 7)))


def test_other_threads_run_meanwhile() -> None:
    """The job ends only when Python code in another thread has set the flag."""
    for threads in (1, 2):
        job = Job(4, flag=0)

        def release(job: Job = job) -> None:
            time.sleep(0.01)
            job.flag[0] = 1

        helper = threading.Thread(target=release)
        helper.start()
        assert job.run(threads) == 0
        helper.join()
        assert (job.seen == 1).all()


def test_failures_have_codes() -> None:
    run = binding.runtime().fr_run
    assert run(None, None, 1, 1) == 2
    assert run(entry(), None, 2**63, 1) == 2


def test_fork() -> None:
    """A child of a process that has used the workers has workers of its own."""
    script = """
import os, sys, warnings
sys.path[:0] = sys.argv[1:]
import test_binding
for threads in (1, 3, 3):
    assert test_binding.Job(500).run(threads) == 0
warnings.simplefilter("ignore")
child = os.fork()
job = test_binding.Job(500)
assert job.run(3) == 0 and (job.seen == 1).all()
if not child:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    argv = [sys.executable, "-c", script, *filter(None, sys.path)]
    subprocess.run(argv, check=True, timeout=120)


# Threads


def test_set_threads() -> None:
    default = binding.get_threads()
    assert 1 <= default <= binding.runtime().fr_cpu_count()
    ferrule.set_threads(np.int64(3))
    assert binding.get_threads() == 3
    ferrule.set_threads(None)
    assert binding.get_threads() == default


@given(st.integers(1, 1024))
def test_set_threads_takes_all_in_range(n: int) -> None:
    ferrule.set_threads(n)
    assert binding.get_threads() == n


@given(st.one_of(st.integers(max_value=0), st.integers(min_value=1025)))
def test_set_threads_refuses_numbers(n: int) -> None:
    before = binding.get_threads()
    with pytest.raises(KernelError, match=rf"set_threads: n: got {n}, expected .* from 1 to 1024"):
        ferrule.set_threads(n)
    assert binding.get_threads() == before


@pytest.mark.parametrize("value", [True, 2.0, "2", [2], float("nan")], ids=repr)
def test_set_threads_refuses_types(value: object) -> None:
    message = re.escape(f"set_threads: n: got {value!r}, expected an int from 1 to 1024")
    with pytest.raises(KernelTypeError, match=message):
        ferrule.set_threads(value)  # type: ignore[arg-type]


def test_threads_from_the_environment(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(_env.THREADS, "5")
    assert binding.get_threads() == 5
    ferrule.set_threads(2)  # goes first
    assert binding.get_threads() == 2
    ferrule.set_threads(None)
    assert binding.get_threads() == 5


@pytest.mark.parametrize("value", ["many", "0", "-2", "1025", "2.5"])
def test_bad_threads_in_the_environment(
    alone: Path, monkeypatch: pytest.MonkeyPatch, value: str
) -> None:
    monkeypatch.setenv(_env.THREADS, value)
    with pytest.raises(KernelError, match=rf"variable FERRULE_THREADS: got '?{value}'?, expected"):
        binding.runtime()


def test_threads_set_before_the_first_launch(alone: Path) -> None:
    ferrule.set_threads(7)
    assert binding._runtime is None  # setting builds and loads nothing
    assert binding.get_threads() == 7


# Finding and building


def build(folder: Path, digest: str, version: int = binding.VERSION) -> Path:
    """What an installation leaves beside the package."""
    text = (
        f'#define FR_DIGEST "{digest}"\n#include "runtime.h"\n#undef FR_VERSION\n'
        f'#define FR_VERSION {version}\n#include "runtime.c"\n'
    )
    path = folder / "_runtime.abi3.so"
    path.write_bytes(toolchain.find_compiler().compile(text, flags=[f"-I{folder / 'runtime'}"]))
    return path


def test_installed_copy_is_used(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = build(alone, binding.source_digest())
    monkeypatch.setattr(toolchain, "find_compiler", lambda: pytest.fail("no compiler is needed"))
    assert binding.runtime()._name == str(path)
    assert binding.runtime() is binding.runtime()


@pytest.mark.parametrize("fault", ["digest", "version", "garbage", "another library", "empty"])
def test_installed_copy_that_does_not_fit(alone: Path, fault: str) -> None:
    path = alone / "_runtime.abi3.so"
    if fault == "digest":
        build(alone, "0" * 64)
    elif fault == "version":
        build(alone, binding.source_digest(), binding.VERSION + 1)
    elif fault == "garbage":
        path.write_bytes(b"not a library" * 100)
    elif fault == "another library":
        path.write_bytes(toolchain.find_compiler().compile("int other;"))
    else:
        path.touch()
    built = binding.runtime()
    assert built._name != str(path)
    assert built.fr_version() == binding.VERSION


def test_changed_sources_are_built_anew(alone: Path) -> None:
    build(alone, binding.source_digest())
    with (alone / "runtime" / "runtime.c").open("a") as file:
        file.write("int changed;\n")
    binding.source_digest.cache_clear()
    assert binding.runtime().fr_digest() == binding.source_digest().encode()
    assert str(alone) not in binding.runtime()._name


def test_build_is_cached(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = binding.runtime()
    monkeypatch.setattr(binding, "_runtime", None)
    monkeypatch.setattr(toolchain.Compiler, "compile", lambda *_, **__: pytest.fail("built again"))
    assert binding.runtime() is not first


def test_threads_load_one_runtime(alone: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        loaded = list(pool.map(lambda _: binding.runtime(), range(8)))
    assert len({id(library) for library in loaded}) == 1


def test_no_compiler(alone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_env, "search_path", lambda: str(alone))
    monkeypatch.setattr(toolchain, "_zig_package", lambda: None)
    monkeypatch.delenv(_env.CXX, raising=False)
    ferrule.set_threads(2)  # needs none
    with pytest.raises(ToolchainError) as caught:
        binding.runtime()
    text = str(caught.value)
    assert "the C runtime that runs kernels on the CPU was not built when ferrule was" in text
    assert "no C++ compiler works here" in text
    assert "Run:" in text
    assert not cache.default().entries()


def test_compiler_refuses(alone: Path) -> None:
    (alone / "runtime" / "platform.h").write_text("#error an odd system\n")
    with pytest.raises(ToolchainError, match=r"(?s)cannot build the C runtime .*an odd system"):
        binding.runtime()


# The runtime's own tests, which are in C


def probe(flags: tuple[str, ...], folder: Path) -> str | None:
    """Why a program built with these flags does not work here, or None."""
    text = folder / "probe.c"
    text.write_text("int main(void) { return 0; }\n")
    for argv in (
        [*toolchain.find_compiler().argv, *flags, str(text), "-o", str(folder / "probe")],
        [str(folder / "probe")],
    ):
        done = subprocess.run(argv, capture_output=True, text=True, timeout=100)
        if done.returncode:
            return (done.stderr.splitlines() or ["no message"])[-1]
    return None


def run_native(folder: Path, runtime: Path, *flags: str) -> subprocess.CompletedProcess[str]:
    sanitizer = tuple(flag for flag in flags if flag.startswith("-fsanitize"))
    if sanitizer and (reason := probe(sanitizer, folder)):
        pytest.skip(f"{' '.join(sanitizer)} does not work here: {reason}")
    program = folder / "pool"
    argv = [*toolchain.find_compiler().argv, *flags, "-g", "-Wall", "-Wextra", "-Werror"]
    argv += [f"-I{runtime}", str(NATIVE / "pool.c"), "-o", str(program), "-pthread", "-lm"]
    subprocess.run(argv, check=True, timeout=200)
    scratch = folder / "scratch"
    scratch.mkdir()
    environment = {**os.environ, "TSAN_OPTIONS": "die_after_fork=0"}
    return subprocess.run(
        [str(program), str(scratch)], capture_output=True, text=True, env=environment, timeout=280
    )


C, CXX = ("-xc", "-std=c11"), ("-xc++", "-std=c++17")
PORTABLE = "-DFR_PORTABLE"


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param((*CXX, "-O2", "-U_FORTIFY_SOURCE", "-D_FORTIFY_SOURCE=2"), id="plain"),
        pytest.param((*C, "-O2", PORTABLE), id="portable"),
        pytest.param((*C, "-O1", "-fsanitize=address,undefined"), id="address"),
        pytest.param(
            (*CXX, "-O1", "-fsanitize=address,undefined", PORTABLE), id="address-portable"
        ),
        pytest.param((*C, "-O1", "-fsanitize=thread"), id="thread"),
        pytest.param((*CXX, "-O1", "-fsanitize=thread", PORTABLE), id="thread-portable"),
    ],
)
def test_native(tmp_path: Path, flags: tuple[str, ...]) -> None:
    done = run_native(tmp_path, binding.FOLDER / "runtime", *flags)
    assert (done.returncode, done.stdout) == (0, "ok\n"), done.stderr


@pytest.mark.parametrize(
    ("flags", "right", "wrong", "message"),
    [
        ("-fsanitize=thread", "__atomic_exchange_n(p, v, __ATOMIC_ACQ_REL)",
         "__atomic_exchange_n(p, v, __ATOMIC_RELAXED)", "data race"),
        ("-fsanitize=address,undefined", "round_up(bytes, 4 * KIB))) {",
         "bytes)) {", "heap-buffer-overflow"),
        ("-O2", "> chunk ? *begin + chunk", "> chunk ? *begin + chunk + 1", "does not hold"),
        ("-O2", "STORE(&pool.busy, 0u);\n  holding =", "holding =",
         "does not hold"),
    ],
    ids=["race", "overflow", "run twice", "fork"],
)  # fmt: skip
def test_native_tests_see_faults(
    tmp_path: Path, flags: str, right: str, wrong: str, message: str
) -> None:
    """Each planted fault is found."""
    runtime = tmp_path / "runtime"
    shutil.copytree(binding.FOLDER / "runtime", runtime)
    texts = {path: path.read_text() for path in runtime.iterdir()}
    assert sum(text.count(right) for text in texts.values()) == 1
    for path, text in texts.items():
        path.write_text(text.replace(right, wrong))
    done = run_native(tmp_path, runtime, *C, "-O1", flags)
    assert done.returncode != 0
    assert message in done.stderr
