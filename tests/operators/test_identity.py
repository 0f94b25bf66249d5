"""What an op's digest covers of Python callables, and what is refused."""

from __future__ import annotations

import ctypes
import functools
import operator
import subprocess
import sys
import threading
import types
from collections import OrderedDict, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import ferrule
from adopted_ops import hadamard, quantised_linear
from ferrule import KernelError, Op
from ferrule.operators import identity

ONES = torch.ones(2)


def double(x: Any) -> Any:
    return x + x


def digest(function: Any) -> str:
    return identity.of_callable("`run`", function)


class Holder:
    def __init__(self, k: Any = 2) -> None:
        self.k = k

    def method(self, x: Any) -> Any:
        return x * self.k

    @staticmethod
    def static(x: Any) -> Any:
        return x

    @classmethod
    def of_class(cls, x: Any) -> Any:
        return x

    def __call__(self, x: Any) -> Any:
        return x


def closed(k: Any) -> Any:
    return lambda x: x * k


def test_digests_tell_functions_apart() -> None:
    found = {
        name: digest(function)
        for name, function in {
            "function": double, "lambda": lambda x: x, "other": lambda x: x + 1,
            "one": closed(1), "two": closed(2), "float": closed(1.0), "true": closed(True),
            "dtype": closed(np.dtype("int8")), "torch dtype": closed(torch.int8),
            "scalar": closed(np.float32(1)), "scalar64": closed(np.float64(1)),
            "device": closed(torch.device("cpu")), "function in": closed(double),
            "partial": functools.partial(double, 1), "partial 2": functools.partial(double, 2),
            "partial named": functools.partial(double, x=1), "builtin": abs,
            "operator": operator.neg,
            "static": Holder.static, "class": Holder.of_class, "ufunc": np.add, "ufunc 2": np.exp,
            "numpy": np.dot, "torch": torch.mm, "torch 2": torch.bmm,
            "functional": torch.nn.functional.linear, "functional 2": torch.nn.functional.relu,
            "overload": torch.ops.aten.mm.default, "overload 2": torch.ops.aten.mm.out,
            "packet": torch.ops.aten.mm, "method": torch.Tensor.add, "method 2": torch.Tensor.mul,
            "default": lambda x, k=1: x, "default 2": lambda x, k=2: x,
            "keyword": lambda x, *, k=1: x, "in": lambda x: x in (1, 2),
            "in 2": lambda x: x in {1, 2},
            "op": hadamard, "op 2": quantised_linear, "in op": closed(hadamard),
        }.items()
    }  # fmt: skip
    assert len(set(found.values())) == len(found)
    assert digest(closed(1)) == found["one"] and digest(closed((1, (2,)))) == digest(
        closed((1, (2,)))
    )


SCALE = 2


def helper(x: Any) -> Any:
    return x * SCALE


def of_globals(x: Any) -> Any:
    return helper(x)


def test_what_a_function_names_of_its_module_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    before = digest(of_globals)
    assert digest(of_globals) == before != digest(double)
    with monkeypatch.context() as change:
        change.setitem(globals(), "SCALE", 3)
        assert digest(of_globals) != before
    with monkeypatch.context() as change:
        change.setitem(globals(), "helper", hadamard)
        first = digest(of_globals)
        change.setitem(globals(), "helper", quantised_linear)
        assert len({before, first, digest(of_globals)}) == 3
    assert digest(of_globals) == before


def of_weights(x: Any) -> Any:
    return x * ONES


def of_weights_by_another(x: Any) -> Any:
    return of_weights(x)


def of_weights_inside(x: Any) -> Any:
    return [of_weights(part) for part in x]


@pytest.mark.parametrize("function", [of_weights, of_weights_by_another, of_weights_inside])
def test_arrays_of_the_module_are_refused(function: Any) -> None:
    """A notebook's weights are globals: as hidden there as in a closure."""
    with pytest.raises(KernelError, match=r"global 'ONES' is tensor\(.*Make arrays arguments"):
        ferrule.adopt("f", "x[N]:T -> y[N]:T", run=function)
    op = ferrule.adopt("f", "x[N]:T -> y[N]:T", run=double)
    with pytest.raises(KernelError, match=r"`def_vjp` of op 'f' .* the global 'ONES' is tensor"):
        op.def_vjp(function)
    ferrule.adopt("f", "x[N]:T -> y[N]:T", run=function, version=1)
    assert of_weights_inside([1])[0].tolist() == [1, 1]


def made(name: str, text: str, file: str | None = None) -> types.ModuleType:
    """A module, imported."""
    found = sys.modules[name] = types.ModuleType(name)
    if file is not None:
        found.__file__ = file
    exec(text, found.__dict__)  # noqa: S102
    return found


@pytest.fixture
def modules(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Modules that a test makes are gone when it ends."""
    with monkeypatch.context() as change:
        change.setattr(sys, "modules", dict(sys.modules))
        yield


def test_helpers_of_other_modules_count(modules: None) -> None:
    """Each change of what a runner leads to makes another digest; no other change does."""
    deep = "SCALE = 2\ndef half(x): return x / SCALE\nunused = 1\n"
    middle = """
import functools, deep_m
from deep_m import half
@functools.lru_cache
def table(n): return n + 1
cache, log = {}, object()
def scale(x, keep=cache): return half(x) + deep_m.half(x) + table(1) + log.k
unused = half
"""
    runner = """
import middle_m, numpy as np
def run(x): return middle_m.scale(np.abs(x)) + middle_m.deep_m.SCALE
"""

    def found(*changes: tuple[str, str]) -> str:
        texts = [deep, middle, runner]
        for old, new in changes:
            assert any(old in text for text in texts)
            texts = [text.replace(old, new) for text in texts]
        made("deep_m", texts[0])
        made("middle_m", texts[1])
        return digest(made("runner_m", texts[2]).run)

    before = found()
    assert found() == before
    for change in [
        ("SCALE = 2", "SCALE = 4"), ("x / SCALE", "x * SCALE"), ("n + 1", "n + 2"),
        ("half(x) + deep_m.half(x)", "half(x)"), ("numpy as np", "math as np"),
    ]:  # fmt: skip
        assert found(change) != before, change
    for change in [
        ("unused = 1", "unused = 2"), ("unused = half", "unused = None"), ("{}", "{1: 2}"),
    ]:  # fmt: skip
        assert found(change) == before, change


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_a_change_counts_wherever_a_runner_leads(data: st.DataObject) -> None:
    """Functions of several modules that call each other, in circles too."""
    count = data.draw(st.integers(1, 8))
    calls = [data.draw(st.lists(st.integers(0, count - 1), max_size=3)) for _ in range(count)]
    place = [data.draw(st.integers(0, 2)) for _ in range(count)]

    def found(changed: int | None) -> str:
        known = [made(f"made_{m}", "") for m in range(3)]
        for module in known:
            module.__dict__.update({other.__name__: other for other in known})
        for i in range(count):
            called = [
                f"f{j}(x)" if place[j] == place[i] else f"made_{place[j]}.f{j}(x)" for j in calls[i]
            ]
            body = " + ".join([str(100 + i + 50 * (i == changed)), *called])
            exec(f"def f{i}(x): return {body}", known[place[i]].__dict__)  # noqa: S102
        return digest(known[place[0]].f0)

    reached, rest = {0}, [0]
    while rest:
        new = set(calls[rest.pop()]) - reached
        reached |= new
        rest += new
    kept = dict(sys.modules)
    try:
        before = found(None)
        for i in range(count):
            assert (found(i) != before) == (i in reached)
    finally:
        for name in set(sys.modules) - set(kept):
            del sys.modules[name]


def test_installed_packages_count_by_name(modules: None, tmp_path: Path) -> None:
    place = str(tmp_path / "site-packages" / "others" / "__init__.py")
    text = "K = 1\ndef scale(x): return x * K\n"

    def found(others: str, runner: str, name: str = "runner_m", file: str | None = None) -> str:
        made("others", others, place)
        return digest(made(name, runner, file).run)

    for runner in (
        "import others\ndef run(x): return others.scale(x)\n",
        "from others import scale\ndef run(x): return scale(x)\n",
        "from others import scale as run",
        "import functools, others\nrun = functools.partial(others.scale)",
    ):
        same = runner.endswith("run") or "partial" in runner  # then the package is the runner's own
        before = found(text, runner)
        assert (found(text.replace("K = 1", "K = 2"), runner) == before) is not same, runner
    inside = "from others import scale\ndef run(x): return scale(x)\n"
    names = ("others.ops", place.replace("__init__", "ops"))
    assert found(text, inside, *names) != found(text.replace("K = 1", "K = 2"), inside, *names)


def test_what_is_named_only_need_not_be_known(modules: None) -> None:
    """Objects that a runner names, or that helpers hold, are no reason to refuse it."""
    made("helpers_m", "lock = object()\ndef scale(x, by=lock): return by\n")
    run = made(
        "runner_m", "import helpers_m\ndef run(x): return helpers_m.scale(helpers_m.lock)"
    ).run
    assert digest(run)
    with pytest.raises(KernelError, match="a default is <object"):
        digest(sys.modules["helpers_m"].scale)
    sys.modules["helpers_m"].lock = np.ones(2)  # type: ignore[attr-defined]
    with pytest.raises(KernelError, match=r"the global 'helpers_m.lock' is array.*Make arrays arg"):
        digest(run)


def test_reading_asks_no_object_for_attributes(modules: None) -> None:
    text = """
class Lazy:
    def __getattr__(self, name): raise RuntimeError(name)
def __getattr__(name): raise RuntimeError(name)
lazy = Lazy()
"""
    made("lazy_m", text)
    assert digest(
        made("runner_m", "import lazy_m\ndef run(x): return lazy_m.lazy.a + lazy_m.absent").run
    )


def test_too_many_functions_are_refused(modules: None) -> None:
    text = "".join(f"def f{i}(x): return f{i + 1}(x)\n" for i in range(2100))
    run = made("many_m", text).f0
    with pytest.raises(KernelError, match=r"`run` leads to more than 2000 functions.*`version=`"):
        digest(run)
    assert identity.of_callable("`run`", run, version=1)
    assert digest(sys.modules["many_m"].f200)


def test_ops_are_found_where_digests_lead(modules: None) -> None:
    module = made("rules_m", "def again(x): return again(x), op(x)\n")
    module.op = hadamard  # type: ignore[attr-defined]
    run = made("runner_m", "import rules_m\ndef run(x): return rules_m.again(x)").run
    assert identity.ops_in(run) == [hadamard]
    before = digest(run)
    module.op = quantised_linear  # type: ignore[attr-defined]
    assert digest(run) != before


def test_only_plain_containers_have_a_digest() -> None:
    class Other(dict):  # type: ignore[type-arg]
        pass

    class Partial(functools.partial):  # type: ignore[type-arg]
        pass

    for value in (defaultdict(int), Other(), Partial(double, 1)):
        with pytest.raises(KernelError, match="cannot be told from others like it"):
            digest(closed(value))
    assert digest(closed({1: 2})) != digest(closed(OrderedDict({1: 2})))


class device:
    """No device of torch's, for all its name."""


class Jit:
    """As many JITs' objects are: it carries its function's name, and can be found under it."""

    def __init__(self, function: Any) -> None:
        functools.update_wrapper(self, function)
        self.function = function

    def __call__(self, x: Any) -> Any:
        return self.function(x)


@Jit
def jitted(x: Any) -> Any:
    return x


@functools.lru_cache
def remembered(x: Any) -> Any:
    return x


LIBM = ctypes.CDLL(None)


def with_default(x: Any, w: Any = ONES) -> Any:
    return x


@pytest.mark.parametrize(
    "function",
    [
        jitted, closed(device()), Jit(lambda x: x), remembered, Holder(), Holder(3).method,
        closed(np.ones(2)),
        closed(torch.ones(2)), closed(jitted), functools.partial(jitted), [].append,
        LIBM.abs, closed(LIBM), torch.nn.Linear(2, 2), torch.nn.Linear(2, 2).forward,
        with_default,
    ],
    ids=lambda f: type(f).__name__,
)  # fmt: skip
def test_what_has_no_known_content_is_refused(function: Any) -> None:
    for what in ({"run": function}, {"run": double, "reference": function}):
        with pytest.raises(KernelError) as caught:
            ferrule.adopt("f", "x[N]:T -> y[N]:T", **what)
        message = str(caught.value)
        assert message.startswith(f"[op] `{list(what)[-1]}` of op 'f' cannot be told from others")
        assert "Make arrays arguments" in message and "give `version=`, a str or int" in message
    one, two, same = (
        ferrule.adopt("f", "x[N]:T -> y[N]:T", run=function, version=v) for v in (1, "1", 1)
    )
    assert one.digest == same.digest != two.digest


def test_digests_are_the_same_in_each_process(tmp_path: Path) -> None:
    """Also where sets are in another order, and where a module is read from its bytecode."""
    (tmp_path / "mine.py").write_text(
        "import numpy as np, ferrule\n"
        "k = {'a', 'b', 'cc'}\n"
        "def close(k):\n"
        "    def run(x, mode='a'):\n"
        "        try:\n"
        "            return x * 2 if mode in {'a', 'b', 'cc', 'ddd'} else (1, 2, ('e', (3, 4)))\n"
        "        except ValueError:\n"
        "            return k\n"
        "    return run\n"
        "op = ferrule.adopt('f', 'x[N]:T -> y[N]:T', run=close((k, (1, 2), (1, 2))))\n"
        "print(op.digest)\n"
    )
    found = set()
    for seed in ("0", "1", "2", "2"):
        done = subprocess.run(
            [sys.executable, "-c", "import mine"], cwd=tmp_path, check=True, capture_output=True,
            text=True, timeout=120, env={**ENVIRONMENT, "PYTHONHASHSEED": seed},
        )  # fmt: skip
        found.add(done.stdout)
    assert len(found) == 1


ENVIRONMENT = {
    "PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(path for path in sys.path if path),
}  # fmt: skip


def test_a_version_that_was_not_changed_is_told() -> None:
    x = torch.ones(2)
    first = ferrule.adopt("stale", "x[*S]:T -> y[*S]:T", run=lambda x: x * 2, version="1")
    again = ferrule.adopt("stale", "x[*S]:T -> y[*S]:T", run=lambda x: x * 2, version="1")
    other = ferrule.adopt("stale", "x[*S]:T -> y[*S]:T", run=lambda x: x * 3, version="1")
    assert first(x).tolist() == again(x).tolist() == [2, 2]
    assert first.torch_op is again.torch_op and first.counts is again.counts
    with pytest.warns(ferrule.FerruleWarning, match=r"op 'stale' has been declared .* the version"):
        assert other(x).tolist() == [2, 2]


def test_an_op_whose_rule_calls_itself_has_one_digest_in_all_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def declared() -> Any:
        op = ferrule.adopt("twice", "x[*S]:T -> y[*S]:T", run=double)
        op.def_vjp(lambda primals, cotangents, outputs: (op(cotangents[0]),))
        return op

    expected, op, to_json = declared().digest, declared(), Op.to_json

    def slow(self: Op) -> Any:
        threading.Event().wait(0.05)  # the others come
        return to_json(self)

    monkeypatch.setattr(Op, "to_json", slow)
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(op.digest)) for _ in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert found == [expected] * 4


def test_a_triton_function_is_refused() -> None:
    triton = pytest.importorskip("triton")

    @triton.jit
    def kernel(x, y):  # type: ignore[no-untyped-def]
        pass

    with pytest.raises(KernelError, match=r"of type triton\..*give `version=`"):
        ferrule.adopt("f", "x[N]:T -> y[N]:T", run=kernel)


def test_functions_of_no_module_have_an_identity() -> None:
    """As those that `exec` makes, where its globals have no name."""
    found: dict[str, Any] = {}
    exec("def make(x):\n    return x + 1", found)  # noqa: S102
    found["make"].__module__ = None
    assert identity.of_callable("it", found["make"])


def test_versions_of_functions_that_a_function_makes() -> None:
    def scaled(factor: Any, helper: Any = None, power: int = 1) -> Op:
        op = ferrule.op("scaled_by", "x[N]:T -> y[N]:T", run=lambda x: x + 0, version=1)

        def vjp(primals: Any, cotangents: Any, outputs: Any, exponent: int = power) -> Any:
            return cotangents[0] * (helper() if helper else factor) ** exponent

        op.def_vjp(vjp, version=1)
        return op

    def gradient(op: Op) -> float:
        x = torch.ones(1, requires_grad=True)
        op(x).sum().backward()
        return float(x.grad)

    # Closures and defaults tell them apart: each keeps its own derivative.
    ops = [scaled(2), scaled(3), scaled((2,)), scaled(2, power=3)]
    assert len({op.digest for op in ops}) == 4
    assert scaled(2).digest == ops[0].digest
    assert [gradient(ops[i]) for i in (0, 1, 3, 0)] == [2, 3, 8, 2]
    partial = [identity.of_callable("f", functools.partial(max, n), version=1) for n in (1, 2, 1)]
    assert partial[0] == partial[2] != partial[1]
    # Of what else they read the version speaks; that it was forgotten is told.
    first, second = scaled(2, lambda: 5), scaled(2, lambda: 7)
    assert first.digest == second.digest
    assert gradient(first) == 5
    with pytest.warns(ferrule.FerruleWarning, match=r"op 'scaled_by' .* other code in `def_vjp`"):
        assert gradient(second) == 5
    boxes = [types.SimpleNamespace(factor=n) for n in (2, 3)]  # whose content is not known
    first, second = (scaled(box, lambda: 9) for box in boxes)
    assert gradient(first) == 9
    with pytest.warns(ferrule.FerruleWarning, match=r"other code in `def_vjp`"):
        gradient(second)
