"""A text prints where it names printf or a log in what is compiled."""

from __future__ import annotations

import pytest

import ferrule
from ferrule.source import printing


@pytest.mark.parametrize(
    ("text", "prints"),
    [
        ('printf("x");', True),
        ("y[0] = sprintf_like + printfs;", False),
        ("// printf(1)\n/* printf\n printf */ y = 1;", False),
        ('f("//"); printf("x");', True),
        ('f("/*"); printf("x"); /* */', True),
        ("#ifdef DEBUG\nprintf(1);\n#endif", False),
        ("#define DEBUG 0\n#if DEBUG\nprintf(1);\n#endif", True),
        ("#if defined(DEBUG)\nprintf(1);\n#else\ny;\n#endif", False),
        ("#ifndef DEBUG\nprintf(1);\n#endif", True),
        ("#ifdef DEBUG\ny;\n#else\nprintf(1);\n#endif", True),
        ("#if 0\nprintf(1);\n#endif\ny;", False),
        ("#if 1\nprintf(1);\n#endif\ny;", True),
        ("#if 0\ny;\n#elif DEBUG\nprintf(1);\n#endif", True),
        ("#if 1\ny;\n#elif DEBUG\nprintf(1);\n#endif", False),
        ("#if DEBUG > 2\nprintf(1);\n#endif", True),
        ("#ifdef __CUDA_ARCH__\nprintf(1);\n#endif", True),
        ("#ifdef A\n#if 1\nprintf(1);\n#endif\n#endif", False),
        ("#ifdef A\n#define SAY(x) \\\n  printf(x)\n#endif", False),
        ("#define SAY(x) \\\n  printf(x)", True),
        ("#endif\nprintf(1);", True),
    ],
)
def test_what_is_compiled(text: str, prints: bool) -> None:
    assert printing.prints(text, printing.CUDA) is prints


def test_logs_are_metals() -> None:
    for text in ("os_log_default.log(1);", "mlx::os_log l;"):
        assert printing.prints(text, printing.METAL) and not printing.prints(text, printing.CUDA)


def test_a_printf_for_debugging_costs_nothing() -> None:
    source = """
    uint i = thread_position_in_grid.x;
    #ifdef DEBUG
    printf("%u\\n", i);
    #endif
    y[i] = x[i];
    """
    spec = {"inputs": ["float32[8]"], "output_dtypes": [ferrule.float32]}
    kernel = ferrule.metal_kernel("k", ["x"], ["y"], source)
    assert kernel.compile("cpu", **spec).mode == "flat"
    assert b"fr_printed" not in kernel.compile("cuda", **spec).payload
    kernel = ferrule.metal_kernel("k", ["x"], ["y"], source, "#define DEBUG\n")
    assert kernel.compile("cpu", **spec).mode.startswith("fibers")
    assert b"fr_printed" in kernel.compile("cuda", **spec).payload


def test_portable_kernels_log() -> None:
    spec = {"inputs": ["float32[8]"], "output_dtypes": [ferrule.float32]}
    kernel = ferrule.metal_kernel("k", ["x"], ["y"], 'printf("x"); y[0] = 0;', portable=True)
    with pytest.raises(ferrule.DialectError, match=r"printf \(Metal has os_log_default.log\)"):
        kernel.compile("cpu", **spec)
    text = 'metal::os_log_default.log("x"); y[0] = 0;'
    ferrule.metal_kernel("k", ["x"], ["y"], text, portable=True).compile("cpu", **spec)
