"""Every exception and warning that ferrule raises, in one tree.

::

    FerruleError
    ├── KernelError (ValueError)          a kernel or a call was given a bad value
    │   ├── DialectError                  a body uses what ferrule refuses, with its line
    │   └── RuleError                     an op's declaration cannot be understood
    ├── KernelTypeError (TypeError)       a kernel or a call was given a value of a wrong type
    ├── CompileError (RuntimeError)       the compiler refused a kernel
    ├── ToolchainError (RuntimeError)     no compiler, or one that crashed or hung
    └── DeviceError (RuntimeError)        a device is missing or failed
    FerruleWarning (UserWarning)
    ├── PortabilityWarning                runs here, but Apple's compiler refuses it
    └── CacheWarning                      the disk cache cannot be used

Each class also derives from the builtin that MLX raises for the same fault, so that handlers
written for MLX go on working.
"""

from __future__ import annotations

import sys
import warnings


class FerruleError(Exception):
    """Base of every exception of this library."""


class KernelError(FerruleError, ValueError):
    """A kernel or a call was given a value that is not allowed."""


class KernelTypeError(FerruleError, TypeError):
    """A kernel or a call was given a value of a type that is not allowed."""


class DialectError(KernelError):
    """A body or header uses a construct that ferrule does not run.

    Attributes:
        kernel: the kernel's name.
        where: ``"source"`` or ``"header"``.
        line: 1-based line in that text.
        construct: what was found.
    """

    def __init__(
        self, message: str, *, kernel: str = "", where: str = "", line: int = 0, construct: str = ""
    ) -> None:
        super().__init__(message)
        self.kernel = kernel
        self.where = where
        self.line = line
        self.construct = construct

    @classmethod
    def at(cls, kernel: str, where: str, line: int, construct: str, problem: str) -> DialectError:
        """An error whose message says where in the kernel's texts it is."""
        message = f"kernel {kernel!r}, {where} line {line}: {problem}"
        return cls(message, kernel=kernel, where=where, line=line, construct=construct)


class RuleError(KernelError):
    """An op's declaration cannot be understood, or contradicts itself.

    Attributes:
        text: the declaration.
        position: the character in it that the message is about, from 0.
    """

    def __init__(self, message: str, *, text: str = "", position: int = 0) -> None:
        super().__init__(message)
        self.text = text
        self.position = position

    @classmethod
    def at(cls, message: str, text: str, position: int) -> RuleError:
        """An error whose message shows the text, and points at a character of it."""
        position = min(max(position, 0), len(text))
        start = text.rfind("\n", 0, position) + 1
        line = text[start:].split("\n", 1)[0]
        shown = f"{message}\n  {line}\n  {' ' * (position - start)}^"
        return cls(shown, text=text, position=position)


class CompileError(FerruleError, RuntimeError):
    """The compiler refused a kernel's text.

    Attributes:
        kernel: the kernel's name.
        log: the compiler's whole output.
    """

    def __init__(self, message: str, *, kernel: str = "", log: str = "") -> None:
        super().__init__(message)
        self.kernel = kernel
        self.log = log


class ToolchainError(FerruleError, RuntimeError):
    """No usable compiler was found, or it crashed, hung or printed without end."""


class DeviceError(FerruleError, RuntimeError):
    """A device is not there, or failed."""


class FerruleWarning(UserWarning):
    """Base of every warning of this library."""


class PortabilityWarning(FerruleWarning):
    """A kernel runs here, but Apple's compiler or GPU would refuse it."""


class CacheWarning(FerruleWarning):
    """The disk cache cannot be used, so kernels are compiled anew in each process."""


class CompilerFailed(Exception):
    """A compiler read a text and refused it. Internal: devices turn it into a `CompileError`.

    Attributes:
        log: the compiler's output, its first MB at most.
    """

    def __init__(self, log: str) -> None:
        super().__init__(log)
        self.log = log


def without_mlx(name: str, error: ModuleNotFoundError) -> ModuleNotFoundError:
    """What is raised where a name of this library needs MLX, for what an import of it raised."""
    if not (error.name or "").startswith("mlx"):
        return error
    return ModuleNotFoundError(
        f"ferrule.{name} needs MLX, which is not installed here: pip install 'mlx[cpu]' on Linux, "
        "or 'mlx[cuda13]' for NVIDIA GPUs; mlx on a Mac.",
        name=error.name,
    )


ABANDONED = 7  # FR_E_ABANDONED of runtime/runtime.h


def abandoned(launch: str) -> str:
    """What is said of a launch that was given up."""
    return (
        f"{launch} was abandoned at the second interrupt, in the middle of units that did not end; "
        "its outputs, and what it writes in place, are lost"
    )


# What stands between a person's line and a kernel: ferrule, and the libraries that call it.
_BETWEEN = frozenset({"ferrule", "_ferrule_mlx", "contextlib", "functools", "torch", "mlx"})


def warn(message: str, category: type[Warning]) -> None:
    """Warn of something at the person's line that led to it."""
    levels = 2  # of what called this, for want of a better one
    level, frame = 1, sys._getframe(0)
    while frame.f_back is not None:
        level, frame = level + 1, frame.f_back
        # What torch writes and runs is of no module, or says so by its file.
        module = frame.f_globals.get("__name__", "torch").partition(".")[0]
        written = not frame.f_code.co_filename.startswith("<eval_with_key>")
        if module not in _BETWEEN and written:
            levels = level
            break
    warnings.warn(message, category, stacklevel=levels)
