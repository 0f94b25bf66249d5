//@ in x=np.arange(64, dtype=np.float32)
//@ out y:float32[64]
//@ run grid=(64,1,1) threadgroup=(64,1,1) template=[("N", 64), ("T", np.dtype("float32"))]
//@ want (y == (x[::-1] * 2 + x[0] + x.reshape(16, 4).sum(1)[np.arange(64) % 16])).all()
struct Pair { float a; uint n; };
//@ body
constexpr int W = N / 4;
threadgroup alignas(16) T tile[4][N / 4], spare[W]; // two dimensions, several per statement, sizes from the template
alignas(float4) threadgroup float4 quads[W];        // vector elements: reinterpretable as float
threadgroup Pair one;                               // a single struct
uint i = thread_position_in_threadgroup.x;
tile[i / W][i % W] = T(x[i]);
if (i < uint(W)) {
    quads[i] = float4(x[4 * i], x[4 * i + 1], x[4 * i + 2], x[4 * i + 3]);
    spare[i] = 0;
}
if (i == 0) { one.a = x[0]; one.n = 1; }
threadgroup_barrier(mem_flags::mem_threadgroup);
threadgroup const float* flat = (threadgroup const float*)quads;
float s = 0;
for (int k = 0; k < 4; ++k) s += flat[(i % W) * 4 + k];
threadgroup T* row = tile[(N - 1 - i) / W];
y[i] = float(row[(N - 1 - i) % W]) * 2 + one.a * float(one.n) + s + spare[i % W];
