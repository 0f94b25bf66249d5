"""exp of every element: a Metal kernel body on NumPy arrays."""

import numpy as np

import ferrule

myexp = ferrule.metal_kernel(
    name="myexp",
    input_names=["inp"],
    output_names=["out"],
    source="""
        uint i = thread_position_in_grid.x;
        T x = inp[i];
        out[i] = metal::exp(x);
    """,
)


def exp(a: np.ndarray) -> np.ndarray:
    """exp(a), computed in float32 whatever the dtype of ``a``."""
    (out,) = myexp(
        inputs=[a],
        template=[("T", ferrule.float32)],
        grid=(a.size, 1, 1),
        threadgroup=(256, 1, 1),
        output_shapes=[a.shape],
        output_dtypes=[a.dtype],
    )
    return out


a = np.linspace(-2, 2, 5, dtype=np.float16)
print(exp(a))
np.testing.assert_allclose(exp(a), np.exp(a), rtol=2e-3)
