//@ in x=np.arange(96, dtype=np.float32)
//@ out y:float32[96]
//@ run grid=(96,1,1) threadgroup=(48,1,1)
//@ want (y == x + np.arange(96) // 48 * 48).all()
#ifdef FERRULE
#define AHEAD 48
inline void ask(const device float* p) { ferrule::prefetch(p + AHEAD, 48); }
#else
error: never read here
#endif
//@ body
uint i = thread_position_in_grid.x;
#ifdef FERRULE
ask(x + i);
ferrule::prefetch(y + i, 1);
ferrule::prefetch(x + (long(i) << 40), 3);   // not mapped
ferrule::prefetch(x, 0);
ferrule::prefetch(x, -1 - int(i));
#endif
threadgroup float tile[48];
tile[thread_position_in_threadgroup.x] = x[i];
threadgroup_barrier(mem_flags::mem_threadgroup);
#ifdef FERRULE  // of threadgroup memory, too
if (i % 2) ferrule::prefetch(&tile[0], 48);
#endif
float sum = tile[0] + simd_max(thread_index_in_simdgroup) * 0;
y[i] = sum + x[i];
