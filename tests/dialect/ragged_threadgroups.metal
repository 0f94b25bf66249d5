//@ in x=np.arange(100, dtype=np.float32)
//@ out y:uint32[100,4]
//@ run grid=(100,1,1) threadgroup=(48,1,1)
//@ want (y[:,0] == np.r_[np.full(96, 48), np.full(4, 4)]).all() and (y[:,1] == np.arange(100) // 48).all() and (y[:,2] == np.arange(100) % 48 % 32).all() and (y[:,3] == 3).all()
//@ body
uint i = thread_position_in_grid.x;
y[i * 4 + 0] = threads_per_threadgroup.x;
y[i * 4 + 1] = threadgroup_position_in_grid.x;
y[i * 4 + 2] = thread_index_in_simdgroup;         // restarts in every threadgroup: lanes 0..31, then 0..15
y[i * 4 + 3] = threadgroups_per_grid.x;
