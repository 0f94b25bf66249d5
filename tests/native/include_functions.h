// Loops over the dialect's functions that tests call through ctypes.
extern "C" void geometry(const packed_float3* a, const packed_float3* b, float* y, int n) {
  for (int i = 0; i < n; ++i, y += 24) {
    float3 u = a[i], v = b[i], w = normalize(v);
    float3 results[6] = {cross(u, v), reflect(u, w), refract(normalize(u), w, 0.7f),
                         faceforward(u, v, w), normalize(u), float3(half3(cross(half3(u), half3(v))))};
    for (int k = 0; k < 6; ++k) {
      for (int j = 0; j < 3; ++j) y[3 * k + j] = results[k][j];
    }
    y[18] = dot(u, v); y[19] = length(u); y[20] = fast::distance(u, v); y[21] = length_squared(a[i]);
    y[22] = distance_squared(a[i], v); y[23] = dot(half3(u), half3(v));
  }
}
extern "C" void places(const uint* e, const int* shape, const int64_t* s, const int64_t* r,
                       int64_t* y, int n, int ndim) {
  int inner = shape[ndim - 1], middle = shape[ndim - 2];
  for (int i = 0; i < n; ++i, y += 9) {
    uint3 p = uint3(e[i] % inner, e[i] / inner % middle, e[i] / inner / middle);
    y[0] = elem_to_loc(e[i], shape, s, ndim);
    y[1] = elem_to_loc<int64_t>(e[i], shape, s, ndim);
    y[2] = elem_to_loc(p, shape, s, ndim);
    long2 two = elem_to_loc_2_nd(p, shape, s, r, ndim);
    y[3] = two.x; y[4] = two.y;
    vec<uint, 3> three = elem_to_loc_3_nd<uint>(p, shape, s, r, s, ndim);
    y[5] = three.x; y[6] = three.y; y[7] = three.z;
    y[8] = elem_to_loc_1(e[i], s[ndim - 1]) + elem_to_loc_2(p.swz(ix<0, 1>{}), s + ndim - 2) +
           elem_to_loc_3(p, s + ndim - 3);
  }
}
template <class L> void walk(L looper, const int* shape, const int64_t* s, const int* steps, int n, int64_t* y) {
  for (int i = 0; i < n; ++i) {
    y[i] = int64_t(looper.location());
    if (steps[i] == 1) looper.next(shape, s);
    else looper.next(steps[i], shape, s);
  }
}
extern "C" void loopers(const int* shape, const int64_t* s, const int* steps, int64_t* y, int n, int ndim) {
  walk(LoopedElemToLoc<1>(ndim), shape, s, steps, n, y);
  walk(LoopedElemToLoc<2>(ndim), shape, s, steps, n, y + n);
  walk(LoopedElemToLoc<3, int64_t>(ndim), shape, s, steps, n, y + 2 * n);
  walk(LoopedElemToLoc<4, uint>(ndim), shape, s, steps, n, y + 3 * n);
  if (ndim == 2) walk(LoopedElemToLoc<2, int64_t, false>(ndim), shape, s, steps, n, y + 4 * n);
}
extern "C" void complexes(const complex64_t* a, const complex64_t* b, const float* f, complex64_t* y, int n) {
  for (int i = 0; i < n; ++i, y += 12) {
    y[0] = a[i] + b[i]; y[1] = a[i] - b[i]; y[2] = a[i] * b[i]; y[3] = a[i] / b[i];
    y[4] = f[i] + a[i]; y[5] = a[i] - f[i]; y[6] = f[i] * a[i]; y[7] = f[i] / a[i]; y[8] = -a[i];
    y[9] = a[i]; y[9] += b[i]; y[9] *= 2;
    y[10] = complex64_t((a[i] < b[i]) + 2 * (a[i] >= b[i]) + 4 * (a[i] == a[i]), cast_to<bool>(a[i]) + 2 * (a[i] != b[i]));
    y[11] = log1p(a[i]);
  }
}
extern "C" void rests(const complex64_t* a, const complex64_t* b, complex64_t* y, int n) {
  for (int i = 0; i < n; ++i) y[i] = a[i] % b[i];
}
extern "C" void logs(const float* x, float* y, int n) {
  for (int i = 0; i < n; ++i) y[i] = log1p(x[i]);
}
extern "C" void truths(const float* x, const half* h, const bfloat* b, uchar* y, int n) {
  for (int i = 0; i < n; ++i) {
    y[i] = cast_to<bool>(x[i]) + 2 * cast_to<bool>(h[i]) + 4 * cast_to<bool>(b[i]) +
           8 * (cast_to<int>(2.5f) == 2);
  }
}
extern "C" void packs(const packed_float4* x, uint* y, packed_float4* z, int n) {
  for (int i = 0; i < n; ++i, y += 4, z += 4) {
    float4 v = x[i];
    y[0] = pack_float_to_unorm4x8(v); y[1] = pack_float_to_snorm4x8(v);
    y[2] = pack_float_to_unorm2x16(v.swz(ix<0, 1>{})); y[3] = pack_half_to_snorm2x16(half2(v.swz(ix<2, 3>{})));
    z[0] = unpack_unorm4x8_to_float(y[0]); z[1] = unpack_snorm4x8_to_float(y[1]);
    z[2] = float4(unpack_unorm2x16_to_float(y[2]), 0, 0); z[3] = float4(float2(unpack_snorm2x16_to_half(y[3])), 0, 0);
  }
}
