//@ in a=np.arange(12, dtype=np.float32).reshape(3,4).T; s=np.array(2.5, dtype=np.float32)
//@ out y:float32[4,3]
//@ run grid=(12,1,1) threadgroup=(256,1,1) ensure_row_contiguous=False template=[("T", np.dtype("float32")), ("N", 3), ("FLIP", True)]
//@ want np.allclose(y, a * 2.5 + 3)
//@ body
uint i = thread_position_in_grid.x;
auto loc = elem_to_loc(i, a_shape, a_strides, a_ndim);
T v = a[loc] * s;                                   // s is a reference, used without []
y[i] = FLIP ? v + T(N) : v;
