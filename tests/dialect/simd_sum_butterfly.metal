//@ in x=np.random.default_rng(0).normal(size=64).astype(np.float32) * np.float32(1e3)
//@ out y:float32[64,2]
//@ run grid=(64,1,1) threadgroup=(64,1,1)
//@ want (y[:,0].view(np.uint32) == y[:,1].view(np.uint32)).all()
//@ body
uint i = thread_position_in_grid.x;
float t = x[i];
for (ushort d = 1; d < 32; d <<= 1) t += simd_shuffle_xor(t, d);
y[i * 2] = simd_sum(x[i]);
y[i * 2 + 1] = t;
