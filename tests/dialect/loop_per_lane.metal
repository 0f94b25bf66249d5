//@ in x=np.arange(32, dtype=np.float32)
//@ out y:float32[32]
//@ run grid=(32,1,1) threadgroup=(32,1,1)
//@ want y[0] == 1 * 32 and y[31] == sum(32 - k for k in range(32)) and y[1] == 32 + 31
//@ body
uint lane = thread_index_in_simdgroup;
float acc = 0;
for (uint k = 0; k <= lane; ++k) acc += simd_sum(1.0f);   // k-th round: 32 - k lanes are left
y[lane] = acc;
