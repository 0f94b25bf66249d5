//@ in x=np.array([1.0, 2.0, 3.0, 2049.0, 0.1, 65504.0, 7.0, 8.0], dtype=np.float16)
//@ out y:float16[8]; z:float32[8]; b:bfloat16[4]; u:uint32[4]
//@ run grid=(1,1,1) threadgroup=(1,1,1) template=[("T", np.dtype("float16"))]
//@ want (y[:3] == [3.5, 2.0, 2048.0]).all() and z[0] == np.float32(np.float16(0.1)) * 3 and z[1] == 2.5 and (b.astype(np.float32)[:2] == [1.0, 256.0]).all() and u[0] == 0x3f800000 and u[1] == 0x40003c00 and u[2] == 2 and u[3] == 0x3f80
//@ body
half h = x[0], g = 1.5h;
y[0] = h + g + T(1);
bool t = x[1] > x[0];
y[1] = t ? x[1] : 0.0h;
y[2] = half(2048.0h + 0.5h);                          // rounds: a half has 11 bits
z[0] = x[4] * 3.0f;                                   // float
z[1] = max(float(x[0]), 2.5f) + (t ? 0.0f : float(x[1]));
bfloat16_t one = bfloat16_t(1.0f), q = static_cast<bfloat16_t>(256.6f);
b[0] = one; b[1] = q;
u[0] = as_type<uint>(float(one));
u[1] = as_type<uint>(half2(1.0h, 2.0h));
u[2] = uint(as_type<half2>(uint(0x40003c00)).y);
u[3] = as_type<ushort>(one);
