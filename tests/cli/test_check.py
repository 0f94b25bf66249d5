"""``ferrule check``: options, exit codes and what is written where; what is found, tests say."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ferrule.check.reports.formats import from_json

FOLDERS = [Path(__file__).resolve().parents[1] / "check", *sys.path]
START = (
    "import stand_in; stand_in.install(); from ferrule.cli import main; main(prog_name='ferrule')"
)
FOUND = "import stand_in\nstand_in.found()\n"
CLEAN = "import stand_in\nstand_in.launch()\n"
SUMMARY = "1 finding in 1 kernel, 1 launch checked\n"


class Place:
    """A folder in which programs are checked."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def write(self, text: str, name: str = "script.py") -> None:
        (self.folder / name).write_text(text)

    def check(
        self, *arguments: object, script: str | None = None, **environment: str
    ) -> subprocess.CompletedProcess[str]:
        if script is not None:
            self.write(script)
            arguments = (*arguments, "script.py")
        return self.python("-c", START, "check", *arguments, **environment)

    def python(self, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join(map(str, FOLDERS))
        return subprocess.run(
            [sys.executable, *map(str, arguments)], capture_output=True, text=True, timeout=120,
            cwd=self.folder, env={**os.environ, "PYTHONPATH": path, **environment},
        )  # fmt: skip

    def read(self, name: str) -> str:
        return (self.folder / name).read_text()


@pytest.fixture
def place(tmp_path: Path) -> Place:
    return Place(tmp_path)


# -- exit codes ------------------------------------------------------------------------------------


def test_nothing_found(place: Place) -> None:
    done = place.check(script=f"{CLEAN}print('its own')")
    assert (done.returncode, done.stdout) == (0, "its own\n")
    assert done.stderr == "no findings, 1 launch checked\n"


def test_findings(place: Place) -> None:
    done = place.check(script=f"print('its own')\n{FOUND}")
    assert (done.returncode, done.stdout) == (1, "its own\n")
    assert done.stderr.startswith("error[race]: kernel 'softmax', line 7\n")
    assert done.stderr.endswith(SUMMARY)


def test_nothing_launched(place: Place) -> None:
    done = place.check(script="pass")
    assert done.returncode == 0
    assert "note: no kernel was launched, so nothing was checked\n" in done.stderr


@pytest.mark.parametrize(
    ("script", "status", "said"),
    [
        (f"{CLEAN}raise SystemExit(3)", 2, "Error: the program ended with status 3.\n"),
        (f"{FOUND}raise SystemExit(3)", 1, "Error: the program ended with status 3.\n"),
        (f"{CLEAN}raise SystemExit('no luck')", 2, "no luck\n"),
        (f"{CLEAN}raise SystemExit(0)", 0, "no findings"),
        (f"{FOUND}raise SystemExit", 1, SUMMARY),
        (f"{CLEAN}raise KeyboardInterrupt", 2, "KeyboardInterrupt\n"),
    ],
)
def test_programs_that_exit(place: Place, script: str, status: int, said: str) -> None:
    done = place.check(script=script)
    assert done.returncode == status and said in done.stderr


def test_programs_that_fail(place: Place) -> None:
    """Their traceback is Python's, and what was found until then is reported."""
    done = place.check(script=f"{FOUND}def f():\n    1 / 0\nf()\n")
    assert done.returncode == 2
    traceback, report = done.stderr.split("error[race]")
    assert traceback.startswith("Traceback (most recent call last):\n  File ")
    assert "script.py" in traceback.splitlines()[1]
    assert traceback.endswith("ZeroDivisionError: division by zero\n")
    assert report.endswith(f"{SUMMARY}Error: the program ended with an error.\n")


def test_threads_are_waited_for(place: Place) -> None:
    done = place.check(
        script="import stand_in, threading\nthreading.Timer(0.5, stand_in.found).start()"
    )
    assert done.returncode == 1 and SUMMARY in done.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "Missing argument 'PROGRAM', or --pytest."),
        (("nowhere.py",), "Error: There is no file 'nowhere.py'.\n"),
        (("json.tool", "a b"), "To run the module: ferrule check -m json.tool 'a b'\n"),
        (("-m", "no.such"), "Error: No module named 'no.such'.\n"),
        (("--kind", "races", "x.py"), "Error: 'races' is no kind of finding. Did you mean 'race'?"),
        (("--baseline", "no.json", "x.py"), "the baseline 'no.json' cannot be read: No such file"),
        (("--json", "-", "--sarif", "-", "x.py"), "cannot both write to stdout"),
        (("--sample", "0", "x.py"), "0 is not in the range x>=1"),
        (("--time-limit", "0", "x.py"), "0.0 is not in the range x>0"),
        (("--break", "a:b", "x.py"), "got 'a:b', expected [KERNEL:][header:]LINE[:THREAD][@N]"),
        (("--break", "3", "--pytest"), "--break is for a program, not for --pytest."),
    ],
)
def test_wrong_command_lines(place: Place, arguments: tuple[str, ...], said: str) -> None:
    done = place.check(*arguments)
    assert done.returncode == 2 and said in done.stderr
    assert "checked" not in done.stderr and "Traceback" not in done.stderr


# -- kernels, with nothing standing in -------------------------------------------------------------

KERNEL = """
import {imported}
(y,) = {maker}(
    name="shift", input_names=["x"], output_names=["y"],
    source='''
    uint i = thread_position_in_grid.x;
    y[i] = x[i + 1];
''')(
    inputs=[x], grid=(64, 1, 1), threadgroup=(32, 1, 1), output_shapes=[x.shape],
    output_dtypes=[x.dtype])
"""
NUMPY = KERNEL.format(
    imported="ferrule, numpy; x = numpy.ones(64, numpy.float32)", maker="ferrule.metal_kernel"
)
MLX = KERNEL.format(
    imported="mlx.core as mx; x = mx.ones(64)", maker="mx.fast.metal_kernel"
) + "mx.eval(y)\n"  # fmt: skip
SHIFT = re.compile(
    r"""error\[bounds\]: kernel 'shift', line 3
  --> script.py:7
   \|
 3 \|     y\[i\] = x\[i \+ 1\];
   \| +\^
""" + ".*1 finding in 1 kernel, 1 launch checked\n$", re.DOTALL,
)  # fmt: skip


def test_a_kernel(place: Place) -> None:
    place.write(NUMPY)
    done = place.python("-m", "ferrule", "check", "script.py")
    assert done.returncode == 1 and SHIFT.match(done.stderr), done.stderr
    done = place.python("script.py", FERRULE_CHECK="1")
    assert done.returncode == 1 and SHIFT.match(done.stderr), done.stderr
    place.write(NUMPY.replace("[i + 1]", "[i]"))
    assert place.python("-m", "ferrule", "check", "script.py").returncode == 0


def test_a_kernel_of_mlx(place: Place) -> None:
    pytest.importorskip("mlx.core")
    place.write(MLX)
    done = place.python("-m", "ferrule", "check", "--install-mlx", "script.py")
    assert done.returncode == 1 and SHIFT.match(done.stderr), done.stderr


STOP = re.compile(
    r"""stop: kernel 'shift', line 3, thread \(40, 0, 0\)
  --> script.py:7
    1 \|
    2 \|     uint i = thread_position_in_grid.x;
    3 >     y\[i\] = x\[i \+ 1\];
.*
    i  uint  40
.*
    x\[i \+ 1\]  reads   x\[41\] = 1
.*

error\[bounds\]""", re.DOTALL,
)  # fmt: skip


def test_a_thread_at_a_line(place: Place) -> None:
    place.write(f"{NUMPY}print('its own')")
    done = place.python("-m", "ferrule", "check", "--break", "shift:3:40", "script.py")
    assert (done.returncode, done.stdout) == (1, "its own\n")
    assert STOP.match(done.stderr), done.stderr
    done = place.python("-m", "ferrule", "check", "--break", "other:3", "script.py")
    assert "note: stop at 'other:3': no thread came there.\n" in done.stderr


def test_a_thread_of_mlx_at_a_line(place: Place) -> None:
    pytest.importorskip("mlx.core")
    place.write(MLX)
    options = ("--install-mlx", "--break", "3:40")
    done = place.python("-m", "ferrule", "check", *options, "script.py")
    assert done.returncode == 1 and STOP.match(done.stderr), done.stderr


def test_a_kernel_of_a_test(place: Place) -> None:
    place.write(f"def test_it():\n    exec({NUMPY!r})\n", "test_kernels.py")
    done = place.python("-m", "ferrule", "check", "--pytest", "-q", "-p", "no:cacheprovider")
    assert done.returncode == 1 and "1 failed" in done.stdout
    assert "error[bounds]: kernel 'shift', line 3\n" in done.stdout


# -- programs --------------------------------------------------------------------------------------

SHOW = "import sys\nprint(__name__, sys.argv)\n"


def test_arguments_are_the_programs(place: Place) -> None:
    place.write(SHOW)
    place.write(SHOW, "module.py")
    script = place.check("--kind", "race", "script.py", "--kind", "x", "-m", "--help")
    assert script.stdout == "__main__ ['script.py', '--kind', 'x', '-m', '--help']\n"
    for module in (("-m", "module"), ("-mmodule",)):
        done = place.check("--quiet", "--ignore", "nan", *module, "--json", "-")
        name = str(place.folder / "module.py")
        assert done.stdout == f"__main__ [{name!r}, '--json', '-']\n", done.stderr


def test_options_reach_the_checks(place: Place) -> None:
    script = "import stand_in\nprint(stand_in.asked)\n"
    done = place.check(script=script)
    assert done.stdout == "[{'kinds': None, 'kernels': None, 'sample': None, 'stop_at': ()}]\n"
    stops = ("--break", "7", "--break", "soft*:header:3:5@2")
    checked = ("--kind", "nan", "--kernel", "a*", "--sample", "64")
    done = place.check(*checked, *stops, script=script)
    assert done.stdout == (
        "[{'kinds': frozenset({'nan'}), 'kernels': ('a*',), 'sample': 64, "
        "'stop_at': ('7', 'soft*:header:3:5@2')}]\n"
    )


def test_selection(place: Place) -> None:
    script = f"{FOUND}stand_in.found('nan', 'gather')\n"
    for options, summary in (
        (("--kind", "nan"), "1 finding in 1 kernel, 2 launches checked\n"),
        (("--ignore", "nan", "--kernel", "g*"), "no findings, 2 launches checked\n"),
        (("--kernel", "g*", "--kernel", "soft*"), "2 findings in 2 kernels, 2 launches checked\n"),
    ):
        done = place.check(*options, script=script)
        assert done.stderr.endswith(summary)
        assert done.returncode == (not summary.startswith("no"))


# -- outputs ---------------------------------------------------------------------------------------


def test_files(place: Place) -> None:
    done = place.check("--quiet", "--json", "a.json", "--sarif", "a.sarif", script=FOUND)
    assert (done.returncode, done.stderr) == (1, SUMMARY)
    assert from_json(place.read("a.json")).launches == 1
    (run,) = json.loads(place.read("a.sarif"))["runs"]
    assert [result["ruleId"] for result in run["results"]] == ["race"]


def test_stdout_and_annotations(place: Place) -> None:
    done = place.check("--json", "-", "--github", script=FOUND)
    assert [f.kind for f in from_json(done.stdout).findings] == ["race"]
    assert done.stderr.splitlines()[-1].startswith("::error title=race in kernel 'softmax'")


def test_files_that_cannot_be_written(place: Place) -> None:
    done = place.check("--json", "no/a.json", script=FOUND)
    assert done.returncode == 2 and SUMMARY in done.stderr
    assert "Error: the report 'no/a.json' cannot be written: " in done.stderr


def test_baseline(place: Place) -> None:
    script = f"{FOUND}stand_in.found('nan', 'gather', line=2)\n"
    done = place.check("--write-baseline", "known.json", script=script)
    assert done.returncode == 0
    assert done.stderr.endswith("2 findings written to known.json\n")
    done = place.check("--baseline", "known.json", script=script)
    assert done.returncode == 0
    assert done.stderr == "no findings (2 known, not shown), 2 launches checked\n"
    done = place.check("--baseline", "known.json", script=f"{FOUND}stand_in.found('bounds')\n")
    assert done.returncode == 1
    assert done.stderr.startswith("error[bounds]")
    assert "note: baseline 'known.json': 1 entry found no more; write it anew" in done.stderr
    assert "1 finding in 1 kernel (1 known, not shown), 2 launches checked\n" in done.stderr


def test_baselines_of_part_of_a_program(place: Place) -> None:
    """What was cut short neither calls entries stale nor takes their place."""
    place.check("--write-baseline", "known.json", script=FOUND)
    before = place.read("known.json")
    done = place.check("--baseline", "known.json", script=f"{CLEAN}1 / 0")
    assert done.returncode == 2 and "found no more" not in done.stderr
    done = place.check("--write-baseline", "known.json", script=f"{CLEAN}1 / 0")
    assert done.returncode == 2 and place.read("known.json") == before
    assert "the program ended with an error, so 'known.json' was not written" in done.stderr


# -- the time limit --------------------------------------------------------------------------------

OVER = "Error: the time limit of 1.0 s is over, and the program was ended.\n"


@pytest.mark.parametrize(
    "rest",
    [
        "import time\nwhile True: time.sleep(60)",
        "import time\ntry: time.sleep(60)\nexcept KeyboardInterrupt: pass",
        "import signal\nsignal.signal(signal.SIGINT, signal.SIG_IGN)\nwhile True: pass",
        "import time\nwhile True:\n    try: time.sleep(60)\n    except KeyboardInterrupt: pass",
        "import threading, time\nthreading.Thread(target=time.sleep, args=(600,)).start()",
    ],
    ids=["asleep", "ends by itself", "ignores", "goes on", "threads"],
)
def test_time_limit(place: Place, rest: str) -> None:
    done = place.check("--time-limit", "1", "--json", "a.json", script=f"{FOUND}{rest}\n")
    assert done.returncode == 2
    assert done.stderr.endswith(f"{SUMMARY}{OVER}")
    assert "Traceback" not in done.stderr
    assert len(from_json(place.read("a.json")).findings) == 1


def test_time_limit_that_is_kept(place: Place) -> None:
    assert place.check("--time-limit", "100", script=CLEAN).returncode == 0


# -- pytest ----------------------------------------------------------------------------------------

TESTS = """
import stand_in
def test_race(): stand_in.found()
def test_again(): stand_in.found()
def test_fine(): stand_in.launch("a note")
"""


def test_pytest(place: Place) -> None:
    place.write(TESTS, "test_kernels.py")
    done = place.check("--json", "a.json", "--pytest", "-q", "-p", "no:cacheprovider")
    assert done.returncode == 1
    assert "2 failed, 1 passed" in done.stdout and "error[race]" in done.stdout
    assert done.stderr.endswith("note: a note\n1 finding in 1 kernel, 3 launches checked\n")
    results = from_json(place.read("a.json"))
    assert (results.launches, results.findings[0].count) == (3, 2)
    done = place.check("--kind", "nan", "--pytest", "-q", "-p", "no:cacheprovider")
    assert done.returncode == 0 and "3 passed" in done.stdout, done.stdout


def test_pytest_with_workers_and_a_baseline(place: Place) -> None:
    place.write(TESTS, "test_kernels.py")
    place.write("import stand_in\nstand_in.install()\n", "conftest.py")
    pytest_options = ("--pytest", "-q", "-n", "2", "-p", "no:cacheprovider")
    done = place.check("--write-baseline", "known.json", *pytest_options)
    assert done.returncode == 0, done.stdout
    done = place.check("--baseline", "known.json", *pytest_options)
    assert done.returncode == 0 and "3 passed" in done.stdout
    assert done.stderr.endswith("no findings (1 known, not shown), 3 launches checked\n")


@pytest.mark.parametrize(
    ("text", "arguments", "status", "said"),
    [
        (f"{TESTS}\ndef test_wrong(): assert 0", (), 1, "pytest ended with status 1"),
        ("def test_wrong(): assert 0", (), 2, "pytest ended with status 1"),
        (TESTS, ("-k", "none"), 2, "pytest ended with status 5"),
        (TESTS, ("--no-such-option",), 2, "pytest ended with status 4"),
    ],
)
def test_pytest_that_fails(
    place: Place, text: str, arguments: tuple[str, ...], status: int, said: str
) -> None:
    place.write(text, "test_kernels.py")
    done = place.check("--pytest", "-p", "no:cacheprovider", *arguments)
    assert done.returncode == status and said in done.stderr


# -- FERRULE_CHECK ---------------------------------------------------------------------------------

AT_EXIT = """
import atexit, sys
atexit.register(print, "registered before")
import stand_in; stand_in.install()
import ferrule
"""


@pytest.mark.parametrize(
    ("rest", "status"),
    [
        ("stand_in.found()", 1),
        ("stand_in.launch()", 0),
        ("stand_in.found(); sys.exit(3)", 3),
        ("stand_in.launch(); sys.exit(3)", 3),
        ("stand_in.found(); 1 / 0", 1),
        ("stand_in.found(); sys.exit()", 1),
    ],
)
def test_programs_that_one_cannot_edit(place: Place, rest: str, status: int) -> None:
    place.write(f"{AT_EXIT}{rest}\n")
    done = place.python("script.py", FERRULE_CHECK="1")
    assert (done.returncode, done.stdout) == (status, "registered before\n")
    assert done.stderr.endswith(SUMMARY) == ("found" in rest)
    assert place.python("script.py", FERRULE_CHECK="0").returncode in (0, 1, 3)


def test_a_file_per_process(place: Place) -> None:
    place.write(f"{AT_EXIT}stand_in.found()\nimport os; os.fork() or os._exit(0)\n")
    done = place.python("script.py", FERRULE_CHECK="found-%p.json")
    assert done.returncode == 1
    (path,) = place.folder.glob("found-*.json")
    assert path.stem.partition("-")[2].isdecimal()
    assert len(from_json(path.read_text()).findings) == 1
    done = place.python("script.py", FERRULE_CHECK="no/found.json")
    assert "Error: FERRULE_CHECK: the file 'no/found.json' cannot be written: " in done.stderr


def test_the_command_reports_alone(place: Place) -> None:
    done = place.check(script=FOUND, FERRULE_CHECK="1")
    assert done.returncode == 1 and done.stderr.count("checked\n") == 1
