"""How many of a kernel's accesses to arrays are kept inside on CUDA: ``python tests/guarded.py``.

Counted are the places in the texts of the kernels of tests/conformance (MLX's documentation, and
mlx-lm's, where it is installed) and tests/dialect.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import ferrule
from ferrule.kernel import Kernel
from ferrule.kernels.call import MetalKernel
from ferrule.source import cpp
from ferrule.source.cuda import bounds
from ferrule.source.syntax import Tree, declared_name, walk
from ferrule.spec import Input, Spec

HERE = Path(__file__).parent


class Counts(NamedTuple):
    """How many places of a text access arrays.

    Attributes:
        guarded: each is checked.
        shown: one comparison before the body stands for all.
        derived: by another pointer, or not understood: not checked.
    """

    guarded: int = 0
    shown: int = 0
    derived: int = 0


def counts(p: cpp.Prepared, found: bounds.Bounded) -> Counts:
    """Of what became of a kernel's body."""
    inputs = zip(p.kernel.input_names, p.spec.inputs, strict=True)
    arrays = {name for name, one in inputs if one.ndim and not one.value}
    checked, shown = (len(re.findall(rf"\bfr_{kind}_\w+\.fr_\w+\(", found.source)) for kind in "bu")
    derived = _through_pointers(Tree(found.source, body=True), arrays | {*p.kernel.output_names})
    return Counts(checked, shown, derived + _through_pointers(Tree(p.text.header, body=False)))


def _through_pointers(tree: Tree, names: Collection[str] = ()) -> int:
    """Subscripts and dereferences of pointers that a text declares, or of `names`."""
    pointers, arrays = set(names), set()
    for node in walk(tree.root):
        if node.type not in (
            "declaration", "parameter_declaration", "optional_parameter_declaration"
        ):  # fmt: skip
            continue
        kind = node.child_by_field_name("type")
        deduced = kind is not None and kind.type == "placeholder_type_specifier"
        shared = "thread_local" in tree.text(node).split("=")[0].split()
        for d in node.children_by_field_name("declarator"):
            name = declared_name(d)
            if name is None:
                continue
            text = tree.data[d.start_byte : name.start_byte].decode()
            value = d.child_by_field_name("value")
            words = set(re.findall(r"\w+", tree.text(value))) if value is not None else set()
            if ("*" in text or (deduced and words & pointers)) and not shared:
                pointers.add(tree.text(name))
            elif "*" not in text:
                arrays.add(tree.text(name))
    pointers -= arrays - set(names)
    found = 0
    for node in walk(tree.root):
        if node.type == "subscript_expression" or (
            node.type == "pointer_expression" and node.children[0].type == "*"
        ):
            base = node.child_by_field_name("argument")
            text = tree.text(base) if base is not None else ""
            words = set(re.findall(r"\w+", text.split("[")[0]))
            found += bool(words & pointers) or "*" in text
    return found


def kernels() -> dict[str, list[Kernel]]:
    """The kernels, by where they are from."""
    for folder in (HERE, HERE / "conformance", HERE.parent / "bench"):
        sys.path.insert(0, str(folder))
    made = vars(importlib.import_module("test_mlx_docs")).values()
    documentation = [one.kernel for one in made if isinstance(one, MetalKernel)]
    blocks = importlib.import_module("dialect_blocks").BLOCKS
    found = {
        "MLX's documentation": documentation,
        "dialect": [ferrule.metal_kernel(**block.kernel).kernel for block in blocks],
    }
    try:
        from ferrule_bench import mlx_lm

        found["mlx-lm"] = [one.kernel for one in mlx_lm.imported()[1].values()]
    except ImportError:
        pass
    return found


def count(kernel: Kernel) -> Counts:
    """Of one kernel, for inputs with the dims that its body seems to expect."""

    def given(name: str) -> Input:
        used = re.search(
            rf"\b{name}\s*(?:\[|\+)|\*\s*{name}\b|\b{name}_(?:shape|strides)", kernel.source
        )
        passed = re.search(rf"[(,]\s*{name}\s*[,)]", kernel.source)
        return Input(ferrule.float32, 8) if used or passed else Input(ferrule.int32, 0, value=True)

    inputs = tuple(map(given, kernel.input_names))
    p = cpp.prepare(Spec(kernel, inputs, (ferrule.float32,) * len(kernel.output_names)))
    return counts(p, bounds.bounded(p, p.text.source))


def shares() -> dict[str, Counts]:
    """The accesses of each kind, by where the kernels are from."""
    return {
        name: Counts(*map(sum, zip(*map(count, found), strict=True)))
        for name, found in kernels().items()
        if found
    }


if __name__ == "__main__":
    rows = shares()
    rows["all"] = Counts(*map(sum, zip(*rows.values(), strict=True)))
    for where, row in rows.items():
        inside = row.guarded + row.shown
        print(
            f"{where}: {inside} of {sum(row)} ({inside / sum(row):.0%}), "
            f"{row.shown} by one comparison"
        )
