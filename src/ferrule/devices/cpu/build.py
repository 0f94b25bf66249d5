"""From a kernel to its C++ text and its shared library."""

from __future__ import annotations

import re
from dataclasses import replace

from ...errors import CompilerFailed
from ...source import Note, NotSplittable, cpp, fibers
from ...source.loops import flat, split
from ...spec import Spec
from ...tools.toolchain import Compiler
from .. import portability
from ..diagnostics import compile_error
from ..digests import INCLUDE
from .form import Form

# The linker of a text with an index that the compiler knows, and that is gigabytes outside: in code
# that is never reached, as a rule. Without optimisation it is computed when it is used.
_TOO_FAR = re.compile(r"relocation (truncated to fit|.* out of range)")


class Build:
    """Builds a kernel that is not in the cache.

    Attributes:
        fuses_freely: the compiler may fuse products and sums beyond what the text says.
    """

    def __init__(self, spec: Spec, form: Form, mode: str, folder: str | None = None) -> None:
        """Rewrites the text.

        Args:
            form: of the launch.
            mode: one of `ferrule.devices.cpu.program.MODES`.
            folder: for a debugger, where the author's texts are (`debug.source_folder`).

        Raises:
            DialectError: it uses something that ferrule refuses.
        """
        self._prepared = cpp.prepare(spec)
        if folder is not None:
            self._prepared = replace(self._prepared, folder=folder, debug=True)
        self._form = form
        self._mode = mode
        self.fuses_freely = self._prepared.fuses_freely

    def notes(self) -> list[Note]:
        """What Apple refuses of it."""
        return portability.notes(self._prepared)

    def text(self) -> tuple[str, str]:
        """How the kernel runs, and the text for that."""
        p, form = self._prepared, self._form
        if p.debug:
            return "fibers (for a debugger)", self.fibers()
        if p.prints:
            return "fibers (it prints)", self.fibers()
        if self._mode == "flat" or (self._mode == "auto" and not p.synchronises):
            return "flat", flat.text(p)
        if self._mode == "fibers":
            return "fibers", self.fibers()
        simdgroup = form.small or not p.barriers
        rows = form.simd_rows if simdgroup else form.group_rows
        try:
            text = split.text(p, simdgroup=simdgroup, rows=rows, aligned=form.aligned)
        except (NotSplittable, RecursionError) as why:
            if self._mode == "split":
                raise
            deep = isinstance(why, RecursionError)
            return f"fibers ({'nested too deeply' if deep else why})", self.fibers()
        return f"split by {'simdgroups' if simdgroup else 'threadgroups'}", text

    def fibers(self) -> str:
        """The text for fibers, which run any control flow."""
        return fibers.text(self._prepared)

    def alone(self, text: str) -> bool:
        """Whether a text is for one CPU thread, which needs no atomic instructions."""
        threads = self._form.threads
        return threads == 1 or (threads > 1 and cpp.ROW_ADDITION in text)

    def compile(self, compiler: Compiler, text: str, flags: list[str]) -> bytes:
        """The shared library of a text.

        Raises:
            CompileError: the compiler refused the text; quotes the author's lines.
            ToolchainError: it crashed or hung.
        """
        options = [*flags, f"-I{INCLUDE}"]
        try:
            try:
                return compiler.compile(text, flags=options)
            except CompilerFailed as failed:
                if _TOO_FAR.search(failed.log) is None:
                    raise
                return compiler.compile(text, flags=[*options, "-O0"])
        except CompilerFailed as failed:
            name = f"{compiler.kind} {compiler.version}"
            raise compile_error(
                self._prepared.kernel, failed.log, name, self._prepared.scalars
            ) from None
