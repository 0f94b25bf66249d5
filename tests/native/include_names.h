// What holds at compile time: types of expressions, constants, and an author's own names beside ours.
#define SAME(T, ...) static_assert(is_same_v<T, decltype(__VA_ARGS__)>, #T " = " #__VA_ARGS__)
#define IS(...) static_assert(__VA_ARGS__, #__VA_ARGS__)
// literals, tables and constants are constants
constexpr half one_half = ::fr::half_lit(1.5);
constexpr bfloat table[4] = {0.5f, 1, ::fr::bfloat_lit(0.25), 2.0};
template <class T> constexpr T scale = T(0.5);
IS(one_half + 1 == 2.5f); IS(table[1] * 3 == 3); IS(float(scale<half>) == 0.5f);
IS(half(2048.0f) + ::fr::half_lit(0.5) == 2048);
IS(bfloat(256.6f) == 256); IS(half(65520.0f) == INFINITY); IS(half(5.9e-8f) > 0);
IS(is_same_v<half, float16_t> && is_same_v<bfloat, bfloat16_t> && sizeof(half) == 2);
// vectors
IS(sizeof(float3) == 16 && sizeof(packed_float3) == 12 && sizeof(half3) == 8 && sizeof(char3) == 4);
IS(sizeof(long3) == 32 && sizeof(bool4) == 4 && sizeof(packed_half3) == 6 && sizeof(float2) == 8);
constexpr float4 v = float4(float3(1, 2, 3), 4);
IS(v[3] == 4 && v.z == 3 && all(v == float4(1, float2(2, 3), 4)) && any(v > 3) && !any(v > 4));
IS(all(float4(half4(1)) == 1) && all(int3(2.7f) == 2) && float3(packed_float3(1, 2, 3)).z == 3);
IS(all(v.swz(ix<3, 2>{}) == float2(4, 3)) && v.swz(ix<1>{}) == 2);
SAME(float4, float4() * 2); SAME(half4, half4() * 2.0f); SAME(half4, half() * half4());
SAME(bool3, float3() < 1); SAME(uint2, 1 << uint2()); SAME(float3, packed_float3() + float3());
SAME(float3, packed_float3() * 2); SAME(bool2, !float2()); SAME(bool2, int2() && bool2());
SAME(float2, fma(2.0f, float2(), float2(-3))); SAME(half2, max(half2(), 0.0f));
SAME(half, pow(half(), 2)); SAME(float, pow(2.0f, 2)); SAME(float, sqrt(2)); SAME(double, exp(1.0));
SAME(uchar, max(uchar(), uchar())); SAME(int, max(uchar(), 1)); SAME(uint, min(1u, 2));
SAME(float, dot(float3(), packed_float3())); SAME(half, length(half3())); SAME(half3, cross(half3(), half3()));
SAME(float, metal::fast::exp(1.0f)); SAME(half, precise::exp(half())); SAME(bfloat, fast::tanh(bfloat()));
SAME(float, metal::precise::rsqrt(1.0f)); SAME(float4, metal::exp(float4())); SAME(bool, isnan(half()));
SAME(float4, clamp(float4(), 0.0f, 1.0f)); SAME(float4, select(0.0f, float4(), bool4()));
SAME(float2, true ? ::fr::pick<float2, float>(float2()) : ::fr::pick<float2, float>(1.0f));
SAME(float*, true ? ::fr::pick<float*, int>((float*)nullptr) : ::fr::pick<float*, int>(0));
SAME(complex64_t, true ? ::fr::pick<complex64_t, int>(complex64_t()) : ::fr::pick<complex64_t, int>(0));
SAME(int&, ::fr::pick<int&, int&>(metal::declval<int&>()));
SAME(half&, ::fr::pick<half&, half&>(metal::declval<half&>()));
// bits
IS(as_type<uint>(1.0f) == 0x3f800000u && as_type<ushort>(bfloat(1.0f)) == 0x3f80);
IS(as_type<uint>(half2(1, 2)) == 0x40003c00u && as_type<half2>(0x40003c00u).y == 2);
IS(as_type<float4>(uint4(0x3f800000u)).w == 1 && as_type<uint3>(float3(1)).z == 0x3f800000u);
IS(as_type<uchar4>(0x04030201u).w == 4 && as_type<long>(ulong(1)) == 1);
// limits
IS(numeric_limits<half>::max() == 65504 && numeric_limits<half>::lowest() == -65504);
IS(numeric_limits<half>::epsilon() == 0x1p-10f && numeric_limits<half>::min() == 0x1p-14f);
IS(numeric_limits<half>::denorm_min() == 0x1p-24f && HALF_MAX == 65504 && M_PI_H == 3.140625f);
IS(numeric_limits<bfloat>::max() == 0x1.fep127f && numeric_limits<bfloat>::epsilon() == 0x1p-7f);
IS(numeric_limits<float>::max() == FLT_MAX && numeric_limits<float>::min() == FLT_MIN);
IS(numeric_limits<float>::epsilon() == FLT_EPSILON && numeric_limits<float>::digits == 24);
IS(numeric_limits<double>::max() == 0x1.fffffffffffffp1023 && numeric_limits<double>::digits10 == 15);
IS(numeric_limits<float>::digits10 == FLT_DIG && numeric_limits<half>::digits10 == HALF_DIG);
IS(numeric_limits<float>::max_exponent10 == 38 && numeric_limits<float>::min_exponent10 == -37);
IS(numeric_limits<int>::max() == INT_MAX && numeric_limits<int64_t>::min() == LONG_MIN);
IS(numeric_limits<uchar>::max() == 255 && numeric_limits<char>::min() == -128);
IS(numeric_limits<bool>::max() && !numeric_limits<bool>::min() && numeric_limits<uint>::digits == 32);
IS(numeric_limits<float>::infinity() == INFINITY && INFINITY > FLT_MAX && NAN != NAN);
IS(Limits<float>::max == INFINITY && Limits<half>::finite_min == -65504 && Limits<int>::min == INT_MIN);
IS(Limits<bfloat16_t>::min == -INFINITY && Limits<bool>::max && Limits<complex64_t>::max.imag == INFINITY);
// ints
IS(max(1, 2) == 2 && clamp(5u, 0u, 3u) == 3 && popcount(7) == 3 && clz(1u) == 31 && ctz(0) == 32);
IS(is_same_v<make_unsigned_t<long>, unsigned long> && is_unsigned_v<uchar> && is_signed_v<char>);
IS(is_integral_v<const int> && is_floating_point_v<half> && !is_convertible_v<float*, int>);
IS(is_same_v<conditional_t<true, int, float>, int> && is_same<int, int>::value && is_class_v<half>);
// matrices
IS(determinant(float2x2(1, 2, 3, 4)) == -2 && determinant(float3x3(2.0f)) == 8);
IS(determinant(float4x4(float4(1, 2, 0, 0), float4(0, 1, 3, 0), float4(4, 0, 1, 0), float4(0, 0, 0, 2))) == 50);
IS(all(float2x3(1, 2, 3, 4, 5, 6) * float2(1, 10) == float3(41, 52, 63)));
IS(all(float3(1, 10, 100) * float2x3(1, 2, 3, 4, 5, 6) == float2(321, 654)));
IS(transpose(float2x3(1, 2, 3, 4, 5, 6))[2].y == 6 && (float2x2(1, 2, 3, 4) * float2x2(2.0f))[1][0] == 6);
IS((float2x2(1, 2, 3, 4) + float2x2(1.0f))[1].y == 5 && float2x2(half2x2(2.0f)) == 0.5f * float2x2(4.0f));
// MLX
IS(complex64_t(1.0f, 2.0f) * complex64_t(3.0f, 4.0f) == complex64_t(-5.0f, 10.0f));
IS(complex32_t(half(1), half(2)) + 1 == complex32_t(half(2), half(2)) && sizeof(complex32_t) == 4);
IS(WorkPerThread<half>::n == 4 && ceildiv(7, 3) == 3 && REDUCE_N_READS == 4 && RMS_LOOPED_LIMIT == 4096);
IS(is_same_v<ConditionalType<false, int, half>::type, half> && is_complex_v<complex64_t>);
IS(bfloat16_to_uint16(1.0f) == 0x3f80 && uint16_to_bfloat16(0x4000) == 2);
instantiate_kernel("name_float", some_kernel, float, 4)
instantiate_float_limit(half)

// None of these names may clash with ours, be hidden by them or be preferred against C++'s rules.
#if FR_CUDA
#define FR_GLOBAL __device__
#else
#define FR_GLOBAL static
#endif
FR_GLOBAL float y0 = 1, j1 = 2, gamma = 3, index = 4, div = 5, norm = 6, half_of = 7, comp = 8, mask = 9;
METAL_FUNC float log1p(float x) { return -x; }
METAL_FUNC float exp10(float x) { return x; }
template <typename T> METAL_FUNC T mix(T a, T b, T c) { return a; }
template <typename T> METAL_FUNC T lift(T a) { return a; }
METAL_FUNC float4 cross(float4 a, float4 b) { return a; }
template <typename T, int N> struct array_of { T at[N]; };
struct Pair { float a; uint n; half h; float3 v; };
template <typename T> METAL_FUNC T squash(T x) { return metal::precise::exp(x) + fast::max(x, T(0)); }
METAL_FUNC half4 author(half h, bfloat b, float4 f, Pair p) {
  half t = lift(mix(h, h, h));
  bfloat s = lift(b) + squash(b);
  float u = log1p(2.0f) + exp10(t) + metal::log2(1.0f) + s;
  array_of<half, 4> many = {{1, 2.0f, h}};
  p.v.swr(ix<0, 1>{}) = float2(u);
  auto w = vec<half, 4>(many.at[1]) * squash(t);
  return cross(f, f).x > 0 ? ::fr::pick<half4, half>(w) : ::fr::pick<half4, half>(t);
}
METAL_FUNC void through_volatile(volatile half* p, const volatile bfloat* b, half* q) {
  half x = p[0];
  bfloat y = b[0];
  p[1] = x;
  q[0] = p[2];
  float sum = p[0] + 1.0f + y;
  q[1] = q[2] = sum;
}
METAL_FUNC metal::half4 qualified(metal::uint u, metal::size_t n, metal::packed_float3 p) {
  return metal::half4(metal::float3(p) * u, metal::half(n));
}
