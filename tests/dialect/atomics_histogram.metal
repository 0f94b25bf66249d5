//@ in x=np.arange(256, dtype=np.float32) % 7
//@ out sum:float32[1]; hist:float32[8]
//@ run grid=(256,1,1) threadgroup=(64,1,1) atomic_outputs=True init_value=0
//@ want sum[0] == x.sum() and (hist[:7] == np.bincount(x.astype(int))).all() and hist[7] == 4 * 64
//@ body
threadgroup atomic_uint bins[8];
threadgroup atomic_int seen;
uint l = thread_position_in_threadgroup.x, i = thread_position_in_grid.x;
if (l < 8) atomic_store_explicit(&bins[l], 0u, memory_order_relaxed);
if (l == 0) atomic_store_explicit(&seen, 0, memory_order_relaxed);
threadgroup_barrier(mem_flags::mem_threadgroup);
atomic_fetch_add_explicit(&bins[uint(x[i])], 1u, memory_order_relaxed);
atomic_fetch_add_explicit(&seen, 1, metal::memory_order_relaxed);
atomic_fetch_add_explicit(&sum[0], x[i], memory_order_relaxed);
threadgroup_barrier(mem_flags::mem_threadgroup);
if (l < 7) atomic_fetch_add_explicit(&hist[l], float(atomic_load_explicit(&bins[l], memory_order_relaxed)), memory_order_relaxed);
if (l == 0) atomic_fetch_add_explicit(&hist[7], float(atomic_load_explicit(&seen, memory_order_relaxed)), memory_order_relaxed);
