//@ in x=np.arange(64, dtype=np.float32)
//@ out y:float32[64]
//@ run grid=(64,1,1) threadgroup=(64,1,1) init_value=0
//@ want (y[:40] == x[:40][::-1]).all() and (y[40:] == 0).all()
//@ body
threadgroup float buf[64];
uint i = thread_position_in_threadgroup.x;
if (i >= 40) return;
buf[i] = x[i];
threadgroup_barrier(mem_flags::mem_threadgroup);
y[i] = buf[39 - i];
