//@ in x=np.arange(4, dtype=np.float32)
//@ out y:float32[4]
//@ run grid=(4,1,1) threadgroup=(4,1,1)
//@ want (y == (x + 1) * 6 + 3).all()
#include <metal_stdlib>
using namespace metal;
#define LOAD(p, i) (*((const device float*)(p) + (i)))
#define ROUNDS 3
struct Affine { float k, c; float operator()(float v) const { return v * k + c; } };
//@ body
// a comment that says thread_position_in_threadgroup adds that argument
uint index = thread_position_in_grid.x;               // a C library name as a local
threadgroup float tile[4];
auto put = [&](uint j, float v) { tile[j] = v; };
put(index, LOAD(x, index) + 1.0f);
threadgroup_barrier(mem_flags::mem_threadgroup);
float y0 = 0;
#pragma clang loop unroll(full)
for (int j = 0; j < ROUNDS; ++j) {
    _Pragma("clang loop unroll(full)")
    for (int n[2] = {j, 0}; n[1] < 2; ++n[1]) y0 += tile[index];
}
Affine f = {1.0f, 3.0f};
if constexpr (ROUNDS == 3) y[index] = f(y0);
