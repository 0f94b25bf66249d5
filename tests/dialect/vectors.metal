//@ in x=np.arange(8, dtype=np.float32)
//@ out y:float32[16]
//@ run grid=(1,1,1) threadgroup=(1,1,1)
//@ want (y == [0, 1, 2, 9, 3, 2, 14, 1, 0, 5, 5, 7, 12, 0, 1, 16]).all()
//@ body
float4 a = float4(x[0], x[1], x[2], x[3]);
float3 b = a.xyz;
float4 c = float4(b, 9.0f);
float2 d = a.wz;
bool4 big = a > 1.0f;
float4 e = select(float4(0.0f), a * 2.0f - 1.0f, big);
vec<float, 2> f = 5.0f;                              // splat
for (int i = 0; i < 4; ++i) y[i] = c[i];
y[4] = d.x; y[5] = d[1];
y[6] = dot(b, b) + dot(a, float4(0, 0, 0, 3));
y[7] = any(big) && !all(big) ? 1 : 0;
y[8] = e.x; y[9] = f.x; y[10] = e[3]; 
y[11] = fma(2.0f, f, float2(-3.0f)).y;
y[12] = uint4(uchar4(1, 2, 3, 250)).w - 238u;
y[13] = length(cross(float3(1, 0, 0), float3(2, 0, 0)));
y[14] = clamp(a, 0.0f, 1.0f).w;
y[15] = sizeof(float3);
