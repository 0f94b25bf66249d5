//@ in x=np.array([np.nan, -np.inf, 4.0, -2.0], dtype=np.float32)
//@ out y:float32[12]
//@ run grid=(1,1,1) threadgroup=(1,1,1)
//@ want (y[:9] == [1, 1, 0, 4, 0.5, 0.5, 2, 0, -np.inf]).all() and abs(y[9] - 1/np.e**2) < 1e-6 and y[10] == 3 and y[11] == 2
using namespace metal;
METAL_FUNC float squash(float v) { return precise::exp(v); }
//@ body
y[0] = isnan(x[0]); y[1] = metal::isinf(x[1]); y[2] = isfinite(x[1]);
y[3] = max(x[2], x[3]); y[4] = rsqrt(x[2]); y[5] = metal::precise::rsqrt(x[2]);
y[6] = abs(int(x[3]));
y[7] = fast::exp(x[1]); y[8] = -INFINITY;
y[9] = squash(x[3]);
y[10] = fast::max(x[2], x[3]) - 1.0f;
y[11] = metal::fmin(x[0], 2.0f);                      // fmin, fmax ignore a NaN
