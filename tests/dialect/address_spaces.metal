//@ in x=np.arange(32, dtype=np.uint32) * 0x01010101; w=np.arange(16, dtype=np.float32)
//@ out y:float32[8]
//@ run grid=(8,1,1) threadgroup=(8,1,1)
//@ want (y == w[:8] + w[1:9] + np.arange(8) * 4 + LUT).all() if (LUT := np.array([0, .5, 1, 1.5, 2, 3, 4, 6], np.float32)) is not None else 0
constant float LUT[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
constant constexpr int SCALE = 1;
static constant uchar ORDER[] = {0, 1, 2, 3};
inline float at(constant float* t, uint i) { return t[i] * SCALE; }
inline void add(thread float* a, const thread float& b) { *a += b; }
//@ body
uint i = thread_position_in_grid.x;
const device uint8_t* bytes = (const device uint8_t*)x;      // a cast that names the space
device const uchar4* quads = (device const uchar4*)(bytes);
float2 p = *(const device packed_float2*)(w + i);            // unaligned pair
float acc = p.x + p.y;
for (int k = 0; k < 4; ++k) add(&acc, float(quads[i][ORDER[k]]));
y[i] = acc + at(LUT, i);
