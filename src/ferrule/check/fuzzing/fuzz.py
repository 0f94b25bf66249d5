"""`fuzz`: calls that an op's rule allows are drawn, checked, compared, and the smallest failing one
is shown as a test."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any, NoReturn

from ...errors import FerruleError, KernelError, KernelTypeError
from ...operators.op import Op
from ..reports.select import selection
from .judge import Failure, Judge, Refused, Tolerance, runs_here
from .recipes import Call
from .redeclare import other_threadgroups
from .written_test import Origins, written_test

# What edge cases make is no fault: large numbers overflow.
_IGNORED = ("nan",)


@dataclass(frozen=True)
class FuzzResult:
    """What `fuzz` found.

    Attributes:
        op: the op's name.
        examples: how many calls were carried out before one failed, or in all.
        refused: how many calls the op refused although its rule allows them.
        failure: the smallest call that fails, and why; None where none does.
        test: a test of pytest's that makes this call, and fails; empty where none does.
        threadgroups: other threadgroups than the declared one that calls were launched with.
        seconds: that it took.
    """

    op: str
    examples: int
    refused: int
    failure: Failure | None
    test: str
    threadgroups: tuple[int, ...]
    seconds: float


def fuzz(
    op: Op,
    *,
    reference: Callable[..., Any] | None = None,
    examples: int = 100,
    seconds: float | None = None,
    seed: int | None = None,
    rtol: float | None = None,
    atol: float | None = None,
    inputs: Mapping[str, Any] | None = None,
    dtypes: Mapping[str, Sequence[str]] | None = None,
    threadgroups: Sequence[int] | None = None,
    nonfinite: bool = False,
    ignore: Sequence[str] = _IGNORED,
    origins: Origins | None = None,
) -> FuzzResult:
    """Look for a call that an op's rule allows and that fails.

    Sizes, dtypes, numbers, strides, values and which optional inputs are there are drawn from the
    rule, with hypothesis. Each call runs checked, as in `checking`. Its outputs are compared with
    those of the reference or, where none is given, of the op's other implementations, of the other
    forms in which its body runs on the CPU, and of threads in the opposite order. A call that fails
    is made as small as possible.

    Args:
        op: the op; what is checked are its Metal bodies, where it has some.
        reference: a function of NumPy's arrays and numbers, in the rule's order, None for those
            that are absent, which gives the outputs.
        examples: how many calls are drawn.
        seconds: after which no more are; None: no end of them.
        seed: of what is drawn; None: another one each time.
        rtol, atol: how far outputs may be apart. None: half of the digits of an output's dtype, and
            what inputs change that are off by one unit in the last place; 0 for integers.
        inputs: what inputs are like, by name: a strategy of hypothesis of their elements, a range
            such as ``"0..V-1"`` with ends that may name dims, or a function of a dictionary of the
            call's sizes that gives one of these. Indices need it.
        dtypes: for dtype variables, what they may be; else what the rule says, or float32, float16
            and bfloat16.
        threadgroups: numbers of threads along x to launch with as well. None: parts of the declared
            one, where a body asks how large its threadgroup is and names no number.
        nonfinite: also draw infinities and NaN.
        ignore: kinds of findings that are none.
        origins: where a test imports the op and the reference from; None: found by their modules.

    Raises:
        KernelTypeError: this is no op: a kernel without a rule.
        KernelError: an argument is wrong; the op refuses all calls, or cannot run on the CPU; the
            reference raises something.
        ToolchainError: there is no compiler.
    """
    _check(op, examples)
    selection(None, ignore, None)
    from .draws import Draws  # needs hypothesis

    sizes = other_threadgroups(op) if threadgroups is None else tuple(threadgroups)
    draws = Draws(op, inputs or {}, dtypes or {}, nonfinite, sizes)
    judge = Judge(op, reference, Tolerance(rtol, atol), ignore)
    search = _Search(judge, seconds)
    search.run(draws.strategy(), examples, seed)
    failure = search.smallest
    if failure is None and not search.passed and search.refused:
        raise KernelError(
            f"[fuzz] op {op.name!r} refused all {search.refused} calls that were drawn; one of "
            f"them: {search.last_refusal}"
        )
    test = "" if failure is None else written_test(judge, failure, reference, origins)
    return FuzzResult(
        op.name, search.passed, search.refused, failure, test, sizes, search.elapsed()
    )


def _check(op: object, examples: int) -> None:
    if not isinstance(op, Op):
        raise KernelTypeError(
            f"[fuzz] got a {type(op).__qualname__}, expected an op: calls are drawn from the rule "
            "that an op declares, and a kernel without one says nothing of its sizes. Declare it "
            "with ferrule.op(name, rule, metal=…, grid=…, threadgroup=…)."
        )
    if examples < 1:
        raise KernelError(f"[fuzz] `examples`: got {examples}, expected 1 or more.")
    if not runs_here(op):
        raise KernelError(
            f"[fuzz] op {op.name!r} has nothing that runs on the CPU: it needs `metal`, `run` or "
            "`reference`."
        )
    if find_spec("hypothesis") is None:
        raise KernelError(
            "[fuzz] calls are drawn by hypothesis, which is not installed: pip install "
            "'ferrule[fuzz]'."
        )


class _Failed(Exception):
    """A call failed; hypothesis makes smaller ones."""


class _Search:
    """A search for a call that fails.

    Attributes:
        smallest: the last failure that hypothesis was told of: at the end, the smallest.
        passed: calls that were carried out before one failed.
        refused, last_refusal: calls that the op refused, and what it said.
    """

    def __init__(self, judge: Judge, seconds: float | None) -> None:
        self._judge, self._seconds = judge, seconds
        self._start = time.monotonic()
        self._known: dict[Call, Failure | None] = {}
        self._wrong: Exception | None = None
        self.smallest: Failure | None = None
        self.passed = self.refused = 0
        self.last_refusal = ""

    def elapsed(self) -> float:
        """Seconds since the search began."""
        return time.monotonic() - self._start

    def run(self, calls: Any, examples: int, seed: int | None) -> None:
        """Draw calls until one fails, and make that smaller.

        Raises:
            KernelError, ToolchainError: what is not the op's own fault.
        """
        import hypothesis

        try:
            draw(calls, self._one, examples, seed)
        except _Failed:
            pass
        except hypothesis.errors.Unsatisfiable:
            if not self.refused:
                raise KernelError(
                    f"[fuzz] no sizes were found that the rule of op {self._judge.op.name!r} "
                    f"allows: {self._judge.op.rule.shown()}."
                ) from None
        if self._wrong is not None:
            raise self._wrong

    def _one(self, call: Call) -> None:
        import hypothesis

        if call not in self._known:
            if self._wrong is not None:
                return
            if self._seconds is not None and self.elapsed() > self._seconds:
                return  # all that is drawn from now on passes
            try:
                self._known[call] = self._judge.judge(call)
            except Refused as error:
                self.refused += 1
                self.last_refusal = str(error)
                hypothesis.reject()
            except FerruleError as error:
                self._wrong = error
                return
            self.passed += self.smallest is None and self._known[call] is None
        failure = self._known[call]
        if failure is not None:
            self.smallest = failure
            _fail()


def draw(calls: Any, take: Callable[[Call], None], examples: int, seed: int | None) -> None:
    """Draw calls, and give them to a function; where that raises, smaller ones, too.

    Args:
        calls: the strategy.
        take: the function.
        examples: how many are drawn.
        seed: the same draws the same; None: others each time.
    """
    import hypothesis
    from hypothesis import HealthCheck, Phase, Verbosity

    settings = hypothesis.settings(
        max_examples=examples,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        report_multiple_bugs=False,
        suppress_health_check=list(HealthCheck),
        verbosity=Verbosity.quiet,
        print_blob=False,
    )

    def test(call: Call) -> None:
        take(call)

    search = settings(hypothesis.given(call=calls)(test))
    if seed is not None:
        search = hypothesis.seed(seed)(search)
    search()


def _fail() -> NoReturn:
    raise _Failed
