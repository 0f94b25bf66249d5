//@ in x=np.arange(32, dtype=np.int32)
//@ out y:int32[32]
//@ run grid=(32,1,1) threadgroup=(32,1,1)
//@ want (y == x[::-1] + np.arange(32) * 10).all()
template <typename T>
inline T pick(threadgroup const T* p, int n, thread int& calls) { calls += 1; return p[n]; }
inline int pick(const device int* p, int n) { return p[n]; }
//@ body
threadgroup uchar arena[32 * 8];
threadgroup int* ints = (threadgroup int*)arena;
threadgroup float* floats = reinterpret_cast<threadgroup float*>(arena + 32 * sizeof(int));
int l = thread_position_in_threadgroup.x, calls = 0;
ints[l] = pick(x, l);
floats[l] = float(l) * 10.0f;
threadgroup_barrier(mem_flags::mem_threadgroup);
y[l] = pick(ints, 31 - l, calls) + int(pick(floats, l, calls)) + (calls - 2);
