//@ in x=np.arange(32, dtype=np.float32)
//@ out y:float32[32,2]
//@ run grid=(32,1,1) threadgroup=(32,1,1)
//@ want (y[:10,0] == x[:10].sum()).all() and (y[10:,0] == x.max()).all() and (y[:,1] == x.sum()).all()
//@ body
uint lane = thread_index_in_simdgroup;
float v = x[lane], r;
if (lane < 10) r = simd_sum(v);
else r = simd_max(v);
y[lane * 2] = r;
y[lane * 2 + 1] = simd_sum(v);                      // all 32 again
