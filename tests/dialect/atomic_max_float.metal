//@ in x=np.array([3, -5, 8, 1, 7, -2, 6, 0], dtype=np.float32)
//@ out y:uint32[2]
//@ run grid=(8,1,1) threadgroup=(8,1,1) init_value=0
//@ want y.view(np.float32)[0] == 8 and y[1] == 8
inline void atomic_max_float(volatile device atomic_uint* p, float v) {
    uint old = atomic_load_explicit(p, memory_order_relaxed);
    while (as_type<float>(old) < v && !atomic_compare_exchange_weak_explicit(p, &old, as_type<uint>(v), memory_order_relaxed, memory_order_relaxed)) {}
}
//@ body
uint i = thread_position_in_grid.x;
atomic_max_float((volatile device atomic_uint*)&y[0], x[i]);
atomic_fetch_add_explicit((device metal::atomic<uint>*)(y + 1), 1u, metal::memory_order_relaxed);
