"""The examples of the dialect: bodies with their inputs, launch and what must come out.

Format of ``tests/dialect/*.metal``: ``//@ in name=NumPy expression``,
``//@ out name:dtype[shape]``, ``//@ run`` launch and flags, ``//@ want`` a NumPy expression that is
true; what stands before ``//@ body`` is the header.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

FOLDER = Path(__file__).parent / "dialect"
_NAMES = {"np": np, "ml_dtypes": ml_dtypes}


@dataclass
class Block:
    """One example.

    Attributes:
        kernel: the arguments of `ferrule.metal_kernel`.
        call: the arguments of the call.
        want: the expression that must be true of inputs and outputs.
    """

    name: str
    kernel: dict[str, Any]
    call: dict[str, Any]
    inputs: dict[str, Any]
    want: str

    def check(self, outputs: list[Any]) -> bool:
        """Whether these outputs are what the example wants."""
        names = {
            **_NAMES,
            **self.inputs,
            **dict(zip(self.kernel["output_names"], outputs, strict=True)),
        }
        # The files are this project's own; an expression is the plainest way to say a result.
        return bool(eval(self.want, names))


def _arguments(text: str) -> dict[str, Any]:
    return dict(eval(f"dict({text})", dict(_NAMES)))


def read(path: Path) -> Block:
    """The example in a file."""
    header: list[str] = []
    body: list[str] = []
    said: dict[str, list[str]] = {"in": [], "out": [], "run": [], "want": []}
    part = header
    for line in path.read_text().splitlines():
        match = re.match(r"//@ (in|out|run|want|body)\b\s*(.*)", line)
        if match is None:
            part.append(line)
        elif match[1] == "body":
            part = body
        else:
            said[match[1]].append(match[2])
    inputs: dict[str, Any] = {}
    for text in said["in"]:
        for one in re.split(r";\s*(?=\w+=)", text):
            name, expression = one.split("=", 1)
            inputs[name.strip()] = eval(expression, {**_NAMES, **inputs})
    outputs: list[tuple[str, Any, tuple[int, ...]]] = []
    for text in said["out"]:
        for name, dtype, shape in re.findall(r"(\w+):(\w+)\[([\d,]*)\]", text):
            kind = ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype
            sizes = tuple(int(n) for n in shape.split(",") if n)
            outputs.append((name, np.dtype(kind), sizes))
    text = re.sub(
        r"(?<=\)) (?=\w+=)|(?<=\w) (?=\w+=)|(?<=\]) (?=\w+=)", ", ", " ".join(said["run"])
    )
    run = _arguments(text)
    kernel = {
        "name": path.stem,
        "input_names": list(inputs),
        "output_names": [o[0] for o in outputs],
        "source": "\n".join(body),
        "header": "\n".join(header),
    }
    for flag in ("ensure_row_contiguous", "atomic_outputs"):
        if flag in run:
            kernel[flag] = run.pop(flag)
    call = {
        "inputs": list(inputs.values()),
        "output_shapes": [o[2] for o in outputs],
        "output_dtypes": [o[1] for o in outputs],
        **run,
    }
    return Block(path.stem, kernel, call, inputs, " ".join(said["want"]))


BLOCKS = [read(path) for path in sorted(FOLDER.glob("*.metal"))]
