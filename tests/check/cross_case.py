"""One planted bug, or its twin, on an NVIDIA GPU: the process that compute-sanitizer watches.

    python cross_case.py bounds_read_past_end
    python cross_case.py --ferrule bounds_read_past_end

Kernels are compiled as ferrule compiles them, with the author's lines, and without the guards of
`source/cuda/bounds.py`, which keep accesses inside (``--guarded`` leaves them); with ``--debug``
they are not optimised. Each name prints one line of JSON. With ``--ferrule`` nothing needs a GPU:
`ferrule.checking` looks at them.

The cache's folder (FERRULE_CACHE_DIR) should be one for these processes alone: its keys do not
tell what has guards.
"""

from __future__ import annotations

import json
import os
from typing import Any

import click
import numpy as np

import ferrule
from catalogue import BUGS, Case, Planted
from ferrule.devices.cuda import build

CASES: dict[str, tuple[Planted, Case]] = {
    case.name: (planted, case) for planted in BUGS for case in (planted.bug, planted.clean)
}
# What torch has no tensors for.
IMPOSSIBLE = {"bounds_negative_stride": "strides of tensors are not negative"}


def unguarded(guards: bool, debug: bool = False) -> None:
    """Have kernels compiled with the author's lines, and mostly without guards."""
    lines = "--device-debug" if debug else "--generate-line-info"
    module: Any = build
    module.FLAGS = (*module.FLAGS, lines)
    ferrule.set_robust(guards)


def on_gpu(array: np.ndarray) -> Any:
    """A tensor with an array's strides, in memory of its own."""
    import torch

    root = array if array.base is None else array.base
    if not (isinstance(root, np.ndarray) and array.ndim and array.size):
        root = array
    flat = np.ascontiguousarray(root).reshape(-1)
    if flat.dtype.name == "bfloat16":
        tensor = torch.from_numpy(flat.view(np.int16)).cuda().view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(flat).cuda()
    if root is array:
        return tensor.reshape(array.shape)
    steps = [step // array.itemsize for step in array.strides]
    offset = array.__array_interface__["data"][0] - root.__array_interface__["data"][0]
    return tensor.as_strided(array.shape, steps, offset // array.itemsize)


def on_cpu(tensor: Any) -> np.ndarray:
    """A tensor's numbers, copied to the host, which initcheck looks at, too."""
    import torch

    tensor = tensor.cpu()
    return np.asarray(tensor.float() if tensor.dtype == torch.bfloat16 else tensor)


def outcome(case: Case) -> str:
    """What comes of a launch: ``"right"`` or ``"wrong"`` numbers.

    An error ends the process: torch's tensors cannot be freed once CUDA's context is lost.
    """
    import torch

    try:
        tensors = {name: on_gpu(array) for name, array in case.inputs().items()}
        dtypes = [getattr(torch, dtype.name) for dtype in case.output_dtypes]
        results = case.run(tensors, **({} if case.rule else {"output_dtypes": dtypes}))
        torch.cuda.synchronize()
        given = [on_cpu(y).astype(np.float64) for y in results]
    except Exception as fault:  # whatever a broken context makes of it
        words = (str(fault).splitlines() or [""])[0]
        tell({"name": case.name, "outcome": f"{type(fault).__name__}: {words}"})
        os._exit(9)
    pairs = zip(given, case.wanted(), strict=True)
    same = all(
        np.allclose(y, np.asarray(want, np.float64).reshape(y.shape), rtol=1e-5, atol=1e-30)
        for y, want in pairs
    )
    return "right" if same else "wrong"


def tell(result: dict[str, Any]) -> None:
    print("RESULT", json.dumps(result), flush=True)


def checked(planted: Planted, case: Case) -> dict[str, Any]:
    """What `ferrule.checking` finds, and whether it blames the bug's line."""
    from test_catalogue import told

    with ferrule.checking() as findings:
        case.run()
    right = [f for f in findings if f.kind == planted.kind and told(f, planted)]
    return {"found": [[f.kind, f.line, f.count] for f in findings], "told": bool(right)}


@click.command()
@click.option("--ferrule", "by_ferrule", is_flag=True, help="Check them on the CPU instead.")
@click.option("--guarded", is_flag=True, help="With the guards that ferrule writes.")
@click.option("--debug", is_flag=True, help="Without optimisation.")
@click.argument("names", nargs=-1, required=True)
def main(by_ferrule: bool, guarded: bool, debug: bool, names: tuple[str, ...]) -> None:
    """Run planted bugs and twins by name."""
    if not by_ferrule:
        unguarded(guarded, debug)
    for name in names:
        planted, case = CASES[name]
        if by_ferrule:
            told = checked(planted, case)
        elif planted.name in IMPOSSIBLE:
            told = {"outcome": IMPOSSIBLE[planted.name]}
        else:
            told = {"outcome": outcome(case)}
        tell({"name": name, **told})


if __name__ == "__main__":
    main()
