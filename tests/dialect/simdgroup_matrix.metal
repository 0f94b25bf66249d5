//@ in a=np.arange(64, dtype=np.float32).reshape(8, 8); b=np.eye(8, dtype=np.float32)[::-1].copy()
//@ out y:float32[8,8]; e:float32[8,8]
//@ run grid=(32,1,1) threadgroup=(32,1,1)
//@ want np.allclose(y, a @ b + 1) and np.allclose(e, a)
#include <metal_simdgroup_matrix>
//@ body
simdgroup_matrix<float, 8, 8> A, B, C = make_filled_simdgroup_matrix<float, 8, 8>(1.0f);
simdgroup_load(A, a, 8);
simdgroup_load(B, b, 8, ulong2(0, 0), false);
simdgroup_multiply_accumulate(C, A, B, C);
simdgroup_store(C, y, 8);
uint lane = thread_index_in_simdgroup, q = lane / 4;
uint r = (q & 4) + (lane / 2) % 4, c = (q & 2) * 2 + (lane % 2) * 2;
e[r * 8 + c] = A.thread_elements()[0];
e[r * 8 + c + 1] = A.thread_elements()[1];
