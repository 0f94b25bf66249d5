//@ in x=np.arange(64, dtype=np.float32)
//@ out y:float32[64]
//@ run grid=(64,1,1) threadgroup=(64,1,1) init_value=-1
//@ want (y[:32] == 496).all() and (y[32:45] == x[32:45].sum()).all() and (y[45:] == -1).all()
//@ body
uint i = thread_position_in_grid.x;
if (i >= 45) return;
y[i] = simd_sum(x[i]);
