"""The shared libraries that a package needs of a kernel, for launches of every size."""

from __future__ import annotations

from collections.abc import Callable

from ...spec import Launch, Spec
from ..protocol import Code
from .form import Form, form_of

# Names of packaged/ops.h, for what `Form` says.
_NEEDS = {
    "small": "FR_SMALL",
    "simd_rows": "FR_SIMD_ROWS",
    "group_rows": "FR_GROUP_ROWS",
    "aligned": "FR_WIDE",
}
_ANY = Form(small=False, simd_rows=False, group_rows=False, aligned=False)


def codes(
    spec: Spec, example: Launch | None, payload: Callable[[Spec, Form], bytes]
) -> tuple[Code, ...]:
    """The shared libraries of a kernel, that for the example's sizes first.

    Args:
        payload: compiles a form.
    """
    codes = [Code(payload(spec, _ANY))]
    if example is not None:
        form = form_of(example)
        special = payload(spec, form)
        if special != codes[0].payload:
            needs = tuple(need for name, need in _NEEDS.items() if getattr(form, name))
            codes.insert(0, Code(special, needs))
    return tuple(codes)
