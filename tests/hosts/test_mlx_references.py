"""Rules in Python that give wrong things, many times: an error each time, and nothing is kept."""

from __future__ import annotations

import gc
import sys
import threading
import weakref
from collections.abc import Callable
from typing import Any

import mlx.core as mx
import pytest

import ferrule
from ferrule import KernelError
from ferrule.hosts.mlx import build as mlx_build
from ferrule.kernels import entries as op_entries
from mlx_files import I
from test_mlx_rules import asked, copied

X = mx.ones(3)
mx.eval(X)  # other threads cannot
MANY = 10_000


@pytest.fixture(scope="module", autouse=True)
def only_what_is_new() -> None:
    """Collections of garbage need not look at what other tests left, a million objects and more."""
    gc.collect()
    gc.freeze()


class Wrong:
    """What a rule gives, of which references are counted."""


WRONG = Wrong()


def raises() -> Any:
    raise KernelError("on purpose")


RULES: dict[str, Callable[[], Any]] = {
    "raises": raises,
    "no array": lambda: (WRONG,),
    "too many": lambda: (X, X, WRONG),
    "nothing": lambda: (),
    "none": lambda: None,
    "a number": lambda: 3,
    "text": lambda: "abc",
    "another shape": lambda: (mx.ones(4),),
}
CASES = [
    *[(kind, name, make) for kind in ("vjp", "jvp") for name, make in RULES.items()],
    *[("vmap", name, make) for name, make in RULES.items() if name != "another shape"],
    ("vmap", "outputs alone", lambda: ((WRONG,), (0,))),
    ("vmap", "axes of a wrong type", lambda: ((X,), (WRONG,))),
    ("vmap", "an axis that is none", lambda: ((X,), (2.5,))),
    ("vmap", "too few axes", lambda: ((X,), ())),
    ("vmap", "no tuple of axes", lambda: (X, WRONG)),
]  # fmt: skip
# What an input without a gradient gives; and a tuple around one array.
RIGHT = {("vjp", "none")}


@pytest.mark.parametrize(("kind", "name", "make"), CASES, ids=[f"{k}: {n}" for k, n, _ in CASES])
def test_wrong_rules_are_errors_that_keep_nothing(
    kind: str, name: str, make: Callable[[], Any]
) -> None:
    op = copied(kind, lambda *given: make())

    def once() -> None:
        if (kind, name) in RIGHT:
            asked(kind, op, X)
            return
        with pytest.raises(ValueError, match=r"on purpose|op 'copied'"):
            asked(kind, op, X)

    for _ in range(50):
        once()
    gc.collect()
    before = sys.getrefcount(WRONG), sys.getrefcount(X), sys.getallocatedblocks()
    for _ in range(MANY // len(CASES)):
        once()
    gc.collect()
    after = sys.getrefcount(WRONG), sys.getrefcount(X), sys.getallocatedblocks()
    assert after[:2] == before[:2]
    assert after[2] - before[2] < 100


# -- ops go ----------------------------------------------------------------------------------------


class Held:
    """What a rule or function closes over."""

    factor = 2.0


def ruled(content: Held) -> ferrule.Op:
    made = ferrule.op("times", "x[*S]:T -> y[*S]:T", metal=I + "y[i] = x[i] * 2;", grid="x.size",
                      threadgroup=8)  # fmt: skip
    made.def_vjp(lambda primals, cots, outputs: (cots[0] * content.factor,), version="held")
    return made


def adopted(content: Held) -> ferrule.Op:
    made = ferrule.adopt(
        "times", "x[*S]:T -> y[*S]:T", run=lambda x: x * content.factor, version="held"
    )
    made.def_vjp(lambda primals, cots, outputs: (cots[0] * content.factor,), version="held")
    return made


def alive(*references: weakref.ref[Any]) -> list[bool]:
    gc.collect()
    return [one() is not None for one in references]


@pytest.fixture
def without_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """What torch has registered lives as long as the process."""
    monkeypatch.setitem(sys.modules, "torch", None)  # type: ignore[arg-type]


def called(op: Any) -> None:
    mx.eval(op(X))


def lazy(op: Any) -> Any:
    y = op(X + 1)
    return lambda x: y - 1 if x is X else y + 1


def compiled(op: Any, shapeless: bool = False) -> Any:
    known = weakref.ref(op)
    f = mx.compile(lambda x: known()(x) + 1, shapeless=shapeless)  # type: ignore[misc]
    f(X)
    return f


def shapeless(op: Any) -> Any:
    return compiled(op, True)


def differentiated(op: Any) -> None:
    assert mx.grad(lambda x: op(x).sum())(X).tolist() == [2, 2, 2]
    assert mx.vmap(op)(mx.ones((2, 3))).tolist() == [[2] * 3] * 2


def elsewhere(op: Any) -> None:
    found: list[mx.array] = []

    def run() -> None:
        with mx.stream(mx.new_stream(mx.cpu)):
            found.append(op(X) + op(X))
            mx.eval(found)
            assert found.pop().tolist() == [4, 4, 4]

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert not found


@pytest.mark.parametrize("make", [ruled, adopted])
@pytest.mark.parametrize("use", [called, lazy, compiled, shapeless, differentiated, elsewhere])
@pytest.mark.filterwarnings("ignore:.*called 2 times:ferrule.FerruleWarning")
def test_an_op_goes_with_its_last_node(
    make: Callable[[Held], ferrule.Op], use: Callable[[Any], Any], without_torch: None
) -> None:
    content = Held()
    op = make(content)
    references = weakref.ref(op), weakref.ref(content)
    kept = use(op)
    del op, content
    if kept is not None:
        assert alive(*references) == [True, True]
        for _ in range(3):
            assert kept(X).tolist() == [3, 3, 3]
            assert kept(X + 1).tolist() == [5, 5, 5]
    del kept
    assert alive(*references) == [False, False]


def test_a_rule_that_is_declared_after_calls_is_taken() -> None:
    op: Any = adopted(Held())
    assert op(X).tolist() == [2, 2, 2]
    lazy = op(X)
    op.def_vjp(lambda primals, cots, outputs: (cots[0] * 5,))
    assert mx.grad(lambda x: op(x).sum())(X).tolist() == [5, 5, 5]
    gc.collect()
    assert lazy.tolist() == [2, 2, 2]


@pytest.mark.parametrize("use", [called, compiled, differentiated])
def test_nothing_is_left_of_ops(use: Callable[[Any], Any], without_torch: None) -> None:
    """Neither what C has of each call, nor a number by which nodes know an op."""

    def there() -> tuple[int, int]:
        gc.collect()
        entries = sum(type(one) is op_entries.Entry for one in gc.get_objects())
        return entries, len(mlx_build.bound)

    use(ruled(Held()))  # its derivative is an op that stays
    before = there()
    for _ in range(20):
        use(ruled(Held()))
    assert there() == before


def test_ops_that_are_first_called_by_many_threads_at_once(without_torch: None) -> None:
    """Each is known by a number of its own: none is carried out for another."""
    ops = [
        ferrule.op(f"add{i}", "x[N]:float32 -> y[N]:float32", grid="N", threadgroup=32,
                   metal=f"uint i = thread_position_in_grid.x; y[i] = x[i] + {i};")
        for i in range(4)
    ]  # fmt: skip
    found: list[tuple[int, list[float]]] = []
    ready = threading.Barrier(8)

    def run(i: int) -> None:
        ready.wait()
        with mx.stream(mx.cpu):
            found.append((i % 4, ops[i % 4](X).tolist()))

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=run, args=(i,)) for i in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert sorted(found) == [(i // 2, [1 + i // 2] * 3) for i in range(8)]


def test_ops_that_come_and_go_on_many_threads(without_torch: None) -> None:
    """Each drops its ops while others call theirs."""
    references: list[weakref.ref[Any]] = []

    def run(number: int) -> None:
        for _ in range(30):
            op: Any = (ruled, adopted)[number % 2](content := Held())
            references.extend((weakref.ref(op), weakref.ref(content)))
            y = X
            with mx.stream(mx.cpu):
                for _ in range(5):
                    y = op(y)
                assert y.tolist() == [32] * 3
                assert mx.grad(lambda x, op=op: op(x).sum())(X).tolist() == [2] * 3

    threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not any(alive(*references))
