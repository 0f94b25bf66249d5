"""The cubins that a package needs of a kernel, for launches of every size."""

from __future__ import annotations

from collections.abc import Callable

from ...source import cpp
from ...source.cuda import text as cuda_text
from ...source.cuda.launch import Form, form_for, kernel_symbol, plain_form
from ...spec import Launch, Spec
from ..protocol import Binary, Code

# Threads in one row, threadgroups counted through, and nothing known of either.
_ANY = Form("line", far=True, aligned_arrays=False)
_BLOCKS = {"row": "lines", "line": "lines", "box": "boxes", "any": "any"}


def codes(
    spec: Spec,
    example: Launch | None,
    architecture: str,
    threads: int,
    shaped: Callable[[Spec, Launch, Form], Binary],
) -> tuple[Code, ...]:
    """The cubins of a kernel, that for the example's sizes first.

    Args:
        threads: how many a threadgroup may have.
        shaped: compiles a form, as `CudaDevice.shaped`.
    """
    # Registers are for the largest threadgroup, whatever the example's has.
    largest = Launch((threads, 1, 1), (threads, 1, 1), (), None, ())

    def code(form: Form, needs: tuple[str, ...]) -> Code:
        built = shaped(spec, largest, form)
        return Code(
            built.payload,
            needs,
            _BLOCKS[form.threads],
            form.far,
            architecture,
            built.shared,
            (kernel_symbol(spec),),
            form.each,
            form.aligned_arrays,
        )

    if spec.kernel.language == "cuda":
        return (code(Form("box", aligned_arrays=False), ()),)
    forms = [_ANY]
    lanes = False
    if example is not None:
        needs = cuda_text.needs_of(cpp.prepare(spec))
        lanes, form = needs.lanes, form_for(needs, example)
        # What the example's arrays and size allow, what its grid allows, and what is always right.
        forms = list(dict.fromkeys((form, plain_form(form), _ANY)))
    return tuple(code(form, () if form == _ANY else _needs(form, lanes)) for form in forms)


def _needs(form: Form, lanes: bool) -> tuple[str, ...]:
    """The conditions under which `form_for` gives this form."""
    needs = {
        "FR_ONE_ROW": form.threads in ("row", "any"),
        "FR_SHALLOW": form.threads == "box",
        "FR_EVEN": form.whole or (form.threads == "box" and lanes),
        "FR_NEAR": not form.far,
        "FR_FULL": form.full,
        "FR_LANES_IN_X": form.aligned,
    }
    return tuple(name for name, needed in needs.items() if needed)
