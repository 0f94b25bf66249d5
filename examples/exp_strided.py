"""exp of an array that is not contiguous: the kernel reads it where it lies, without a copy."""

import numpy as np

import ferrule

myexp = ferrule.metal_kernel(
    name="myexp_strided",
    input_names=["inp"],
    output_names=["out"],
    source="""
        uint i = thread_position_in_grid.x;
        // The place of element i; signed, because strides may be negative.
        int64_t place = elem_to_loc<int64_t>(i, inp_shape, inp_strides, inp_ndim);
        out[i] = metal::exp(inp[place]);
    """,
    ensure_row_contiguous=False,
)


def exp(a: np.ndarray) -> np.ndarray:
    """exp(a); ``a`` may have any strides, the result is row-contiguous."""
    (out,) = myexp(
        inputs=[a],
        grid=(a.size, 1, 1),
        threadgroup=(256, 1, 1),
        output_shapes=[a.shape],
        output_dtypes=[a.dtype],
    )
    return out


a = np.linspace(-3, 0, 24, dtype=np.float32).reshape(4, 6)[::-1, ::2].T
print(a.strides, exp(a), sep="\n")
np.testing.assert_allclose(exp(a), np.exp(a), rtol=1e-6)
