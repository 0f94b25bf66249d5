//@ in x=np.arange(64, dtype=np.float32)
//@ out y:float32[64]
//@ run grid=(64,1,1) threadgroup=(32,1,1)
//@ want (y == x.reshape(2, 32)[:, ::-1].ravel() + 1).all()
//@ body
threadgroup float t[32];
uint l = thread_index_in_threadgroup, g = threadgroup_position_in_grid.x;
t[l] = x[g * 32 + l];
simdgroup_barrier(mem_flags::mem_threadgroup);
float v = t[31 - l];
threadgroup_barrier(mem_flags::mem_device | mem_flags::mem_threadgroup);
t[l] = v + 1.0f;
threadgroup_barrier(metal::mem_flags::mem_none);
y[g * 32 + l] = t[l];
