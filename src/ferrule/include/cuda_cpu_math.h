// CUDA's mathematical functions and intrinsics on the CPU, in the global namespace. C's functions
// and their overloads for float come from the C++ library.
//
// Intrinsics that are approximations on a GPU (__expf, __fdividef …) are exact here, to the last bit
// or two. Integers wrap around.
#pragma once

// A C library may have functions of these names, which are then preferred.
#define FR_OWN template <class = void> inline

// ---- bits ---------------------------------------------------------------------------------------
FR_FN int __float_as_int(float a) { return __builtin_bit_cast(int, a); }
FR_FN unsigned __float_as_uint(float a) { return __builtin_bit_cast(unsigned, a); }
FR_FN float __int_as_float(int a) { return __builtin_bit_cast(float, a); }
FR_FN float __uint_as_float(unsigned a) { return __builtin_bit_cast(float, a); }
FR_FN long long __double_as_longlong(double a) { return __builtin_bit_cast(long long, a); }
FR_FN double __longlong_as_double(long long a) { return __builtin_bit_cast(double, a); }
FR_FN int __double2hiint(double a) { return int(__double_as_longlong(a) >> 32); }
FR_FN int __double2loint(double a) { return int(__double_as_longlong(a)); }
FR_FN double __hiloint2double(int high, int low) {
  return __longlong_as_double(((long long)high << 32) | unsigned(low));
}
FR_FN int __clz(int a) { return a ? __builtin_clz(unsigned(a)) : 32; }
FR_FN int __clzll(long long a) { return a ? __builtin_clzll((unsigned long long)a) : 64; }
FR_FN int __ffs(int a) { return __builtin_ffs(a); }
FR_FN int __ffsll(long long a) { return __builtin_ffsll(a); }
FR_FN int __popc(unsigned a) { return __builtin_popcount(a); }
FR_FN int __popcll(unsigned long long a) { return __builtin_popcountll(a); }
inline unsigned __brev(unsigned a) {
  unsigned r = 0;
  for (int i = 0; i < 32; ++i) r |= (a >> i & 1u) << (31 - i);
  return r;
}
inline unsigned long long __brevll(unsigned long long a) {
  return ((unsigned long long)__brev(unsigned(a)) << 32) | __brev(unsigned(a >> 32));
}
inline unsigned __byte_perm(unsigned x, unsigned y, unsigned selector) {
  const unsigned long long both = ((unsigned long long)y << 32) | x;
  unsigned r = 0;
  for (int i = 0; i < 4; ++i) r |= unsigned(both >> (selector >> (4 * i) & 7) * 8 & 0xff) << (8 * i);
  return r;
}
// The upper half of (high:low) << n, and the lower half of (high:low) >> n.
FR_FN unsigned __funnelshift_lc(unsigned low, unsigned high, unsigned n) {
  n = n < 32 ? n : 32;
  return unsigned(((((unsigned long long)high << 32) | low) << n) >> 32);
}
FR_FN unsigned __funnelshift_rc(unsigned low, unsigned high, unsigned n) {
  return unsigned((((unsigned long long)high << 32) | low) >> (n < 32 ? n : 32));
}
FR_FN unsigned __funnelshift_l(unsigned low, unsigned high, unsigned n) {
  return __funnelshift_lc(low, high, n & 31);
}
FR_FN unsigned __funnelshift_r(unsigned low, unsigned high, unsigned n) {
  return __funnelshift_rc(low, high, n & 31);
}

// ---- integers -----------------------------------------------------------------------------------
FR_FN int __mulhi(int a, int b) { return int((long long)a * b >> 32); }
FR_FN unsigned __umulhi(unsigned a, unsigned b) { return unsigned((unsigned long long)a * b >> 32); }
FR_FN long long __mul64hi(long long a, long long b) { return (long long)((__int128)a * b >> 64); }
FR_FN unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return (unsigned long long)((unsigned __int128)a * b >> 64);
}
FR_FN int __mul24(int a, int b) { return int(unsigned(a << 8 >> 8) * unsigned(b << 8 >> 8)); }
FR_FN unsigned __umul24(unsigned a, unsigned b) { return (a & 0xffffff) * (b & 0xffffff); }
FR_FN unsigned __sad(int a, int b, unsigned c) { return c + (a > b ? unsigned(a) - b : unsigned(b) - a); }
FR_FN unsigned __usad(unsigned a, unsigned b, unsigned c) { return c + (a > b ? a - b : b - a); }
FR_FN int __hadd(int a, int b) { return int(((long long)a + b) >> 1); }
FR_FN int __rhadd(int a, int b) { return int(((long long)a + b + 1) >> 1); }
FR_FN unsigned __uhadd(unsigned a, unsigned b) { return unsigned(((unsigned long long)a + b) >> 1); }
FR_FN unsigned __urhadd(unsigned a, unsigned b) { return unsigned(((unsigned long long)a + b + 1) >> 1); }
inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 32; i += 8) c = int(unsigned(c) + unsigned((signed char)(a >> i) * (signed char)(b >> i)));
  return c;
}
inline unsigned __dp4a(unsigned a, unsigned b, unsigned c) {
  for (int i = 0; i < 32; i += 8) c += (a >> i & 0xff) * (b >> i & 0xff);
  return c;
}
inline int __dp2a_lo(int a, int b, int c) {
  for (int i = 0; i < 2; ++i) c = int(unsigned(c) + unsigned(short(a >> 16 * i) * (signed char)(b >> 8 * i)));
  return c;
}
inline int __dp2a_hi(int a, int b, int c) { return __dp2a_lo(a, b >> 16, c); }
// Each of four bytes and of two halves.
#define FR_EACH(NAME, T, BITS, EXPRESSION)                                                      \
  inline unsigned NAME(unsigned p, unsigned q) {                                                \
    unsigned r = 0;                                                                             \
    for (int i = 0; i < 32; i += BITS) {                                                        \
      const int a = T(p >> i), b = T(q >> i);                                                   \
      r |= (unsigned(EXPRESSION) & ((1u << BITS) - 1)) << i;                                    \
    }                                                                                           \
    return r;                                                                                   \
  }
#define FR_LANES(N, U, S, BITS)                                                                 \
  FR_EACH(__vadd##N, U, BITS, a + b) FR_EACH(__vsub##N, U, BITS, a - b)                         \
  FR_EACH(__vmaxs##N, S, BITS, a > b ? a : b) FR_EACH(__vmins##N, S, BITS, a < b ? a : b)       \
  FR_EACH(__vmaxu##N, U, BITS, a > b ? a : b) FR_EACH(__vminu##N, U, BITS, a < b ? a : b)       \
  FR_EACH(__vabsdiffu##N, U, BITS, a > b ? a - b : b - a)                                       \
  FR_EACH(__vcmpeq##N, U, BITS, a == b ? -1 : 0) FR_EACH(__vcmpne##N, U, BITS, a != b ? -1 : 0) \
  FR_EACH(__vcmpgts##N, S, BITS, a > b ? -1 : 0) FR_EACH(__vcmpgtu##N, U, BITS, a > b ? -1 : 0) \
  FR_EACH(__vcmplts##N, S, BITS, a < b ? -1 : 0) FR_EACH(__vcmpltu##N, U, BITS, a < b ? -1 : 0)
FR_LANES(4, (unsigned char), (signed char), 8)
FR_LANES(2, (unsigned short), (short), 16)
#undef FR_LANES
#undef FR_EACH

#define FR_EXTREMES(A, B, R)                                                                    \
  FR_FN constexpr R min(A a_, B b_) { const R a = a_, b = b_; return a < b ? a : b; }           \
  FR_FN constexpr R max(A a_, B b_) { const R a = a_, b = b_; return a > b ? a : b; }
#define FR_MIXED(S, U) FR_EXTREMES(S, S, S) FR_EXTREMES(U, U, U) FR_EXTREMES(S, U, U) FR_EXTREMES(U, S, U)
FR_MIXED(int, unsigned) FR_MIXED(long, unsigned long) FR_MIXED(long long, unsigned long long)
#undef FR_MIXED
#undef FR_EXTREMES
FR_FN float min(float a, float b) { return __builtin_fminf(a, b); }
FR_FN float max(float a, float b) { return __builtin_fmaxf(a, b); }
FR_FN double min(double a, double b) { return __builtin_fmin(a, b); }
FR_FN double max(double a, double b) { return __builtin_fmax(a, b); }
FR_FN double min(float a, double b) { return __builtin_fmin(a, b); }
FR_FN double max(float a, double b) { return __builtin_fmax(a, b); }
FR_FN double min(double a, float b) { return __builtin_fmin(a, b); }
FR_FN double max(double a, float b) { return __builtin_fmax(a, b); }
FR_FN unsigned umin(unsigned a, unsigned b) { return min(a, b); }
FR_FN unsigned umax(unsigned a, unsigned b) { return max(a, b); }
FR_FN long long llmin(long long a, long long b) { return min(a, b); }
FR_FN long long llmax(long long a, long long b) { return max(a, b); }
FR_FN unsigned long long ullmin(unsigned long long a, unsigned long long b) { return min(a, b); }
FR_FN unsigned long long ullmax(unsigned long long a, unsigned long long b) { return max(a, b); }

// ---- functions that C has not -------------------------------------------------------------------
#define FR_REAL(NAME, ...)                                                                      \
  FR_OWN double NAME(double x) { return __VA_ARGS__; }                                          \
  FR_OWN float NAME(float x_) { const double x = x_; return float(__VA_ARGS__); }               \
  FR_OWN float NAME##f(float x_) { const double x = x_; return float(__VA_ARGS__); }
FR_REAL(rsqrt, 1 / ::sqrt(x))
FR_REAL(rcbrt, 1 / ::cbrt(x))
FR_REAL(exp10, ::pow(10.0, x))
FR_REAL(sinpi, ::sin(3.14159265358979323846 * ::remainder(x, 2.0)))
FR_REAL(cospi, ::cos(3.14159265358979323846 * ::remainder(x, 2.0)))
FR_REAL(tanpi, ::tan(3.14159265358979323846 * ::remainder(x, 1.0)))
FR_REAL(normcdf, 0.5 * ::erfc(-x * 0.70710678118654752440))
FR_REAL(erfcx, x < 25 ? ::exp(x * x) * ::erfc(x) : 0.56418958354775628695 / x)
#undef FR_REAL
FR_OWN float rhypotf(float x, float y) { return float(1 / ::sqrt(double(x) * x + double(y) * y)); }
FR_OWN double rhypot(double x, double y) { return 1 / ::hypot(x, y); }
FR_OWN float norm3df(float x, float y, float z) {
  return float(::sqrt(double(x) * x + double(y) * y + double(z) * z));
}
FR_OWN float rnorm3df(float x, float y, float z) { return 1 / norm3df(x, y, z); }
FR_OWN float norm4df(float x, float y, float z, float w) { return norm3df(norm3df(x, y, z), w, 0); }
FR_OWN void sincos(double x, double* s, double* c) { *s = ::sin(x), *c = ::cos(x); }
FR_OWN void sincos(float x, float* s, float* c) { *s = ::sinf(x), *c = ::cosf(x); }
FR_OWN void sincosf(float x, float* s, float* c) { *s = ::sinf(x), *c = ::cosf(x); }
FR_OWN void sincospif(float x, float* s, float* c) { *s = sinpif(x), *c = cospif(x); }
FR_OWN void sincospi(double x, double* s, double* c) { *s = sinpi(x), *c = cospi(x); }
FR_OWN float fdividef(float a, float b) { return a / b; }
FR_FN float __saturatef(float a) { return a > 0 ? a < 1 ? a : 1 : 0; }
FR_FN float saturate(float a) { return __saturatef(a); }
FR_OWN int __isnanf(float a) { return a != a; }
FR_OWN int __isinff(float a) { return __builtin_isinf_sign(a) != 0; }

// ---- fast ones ----------------------------------------------------------------------------------
// Macros: some C libraries declare functions of these names, which nobody can call.
#define __expf expf
#define __exp10f exp10f
#define __logf logf
#define __log2f log2f
#define __log10f log10f
#define __sinf sinf
#define __cosf cosf
#define __tanf tanf
#define __tanhf tanhf
#define __powf powf
#define __sincosf sincosf
FR_FN float __fdividef(float a, float b) { return a / b; }

// ---- rounding -----------------------------------------------------------------------------------
namespace fr {
namespace on_cpu {
enum rounding { nearest, to_zero, up, down };

// What is next to a number, towards infinity or minus infinity.
inline float beside(float f, bool above) {
  return __builtin_nextafterf(f, above ? __builtin_inff() : -__builtin_inff());
}
inline double beside(double f, bool above) {
  return __builtin_nextafter(f, above ? __builtin_inf() : -__builtin_inf());
}
// A number that is `error` more than `f`, in one of the directions.
template <class T, class E> inline T directed(T f, E error, rounding mode) {
  if (mode == nearest || !(error > 0 || error < 0) || f - f != 0) return f;
  const bool above = error > 0;
  const bool wrong = mode == up ? above : mode == down ? !above : f != 0 && above != (f > 0);
  return wrong ? beside(f, above) : f;
}
template <class T> inline T sum(T a, T b, rounding mode) {
  const T s = a + b, bb = s - a;
  return directed(s, (a - (s - bb)) + (b - bb), mode);
}
template <class T> inline T product(T a, T b, rounding mode) {
  const T p = a * b;
  return directed(p, T(__builtin_fma(double(a), double(b), -double(p))), mode);
}
inline float fused_of(float a, float b, float c, rounding mode) {
  const double exact = fused(a, b, c);
  const float r = mode == nearest ? __builtin_fmaf(a, b, c) : float(exact);
  return directed(r, exact - double(r), mode);
}
inline float quotient(float a, float b, rounding mode) {
  const float q = a / b;
  return directed(q, __builtin_fma(-double(q), double(b), double(a)) * (b < 0 ? -1.0 : 1.0), mode);
}
inline float root(float a, rounding mode) {
  const float r = __builtin_sqrtf(a);
  return directed(r, double(a) - double(r) * double(r), mode);
}
// What a conversion to an integer gives: the nearest that there is, and 0 for NaN (for 64 bits, and
// of doubles, the lowest).
template <class I, class F> inline I whole(F f) {
  constexpr bool is_signed = I(-1) < I(0);
  constexpr I most = is_signed ? I((((I(1) << (sizeof(I) * 8 - 2)) - 1) << 1) + 1) : I(-1);
  constexpr I least = is_signed ? I(-most - 1) : I(0);
  if (f != f) return sizeof(I) == 8 || sizeof(F) == 8 ? I(1) << (sizeof(I) * 8 - 1) : I(0);
  const double edge = __builtin_ldexp(1.0, sizeof(I) * 8 - is_signed);
  if (f >= edge) return most;
  if (f <= double(least)) return least;
  return I(f);
}
}  // namespace on_cpu
}  // namespace fr

#define FR_MODES(X) X(rn, nearest) X(rz, to_zero) X(ru, up) X(rd, down)
#define FR_ROUNDED(MODE, NAME)                                                                  \
  inline float __fadd_##MODE(float a, float b) { return fr::on_cpu::sum(a, b, fr::on_cpu::NAME); } \
  inline float __fsub_##MODE(float a, float b) { return fr::on_cpu::sum(a, -b, fr::on_cpu::NAME); } \
  inline float __fmul_##MODE(float a, float b) { return fr::on_cpu::product(a, b, fr::on_cpu::NAME); } \
  inline float __fdiv_##MODE(float a, float b) { return fr::on_cpu::quotient(a, b, fr::on_cpu::NAME); } \
  inline float __frcp_##MODE(float a) { return fr::on_cpu::quotient(1.0f, a, fr::on_cpu::NAME); } \
  inline float __fsqrt_##MODE(float a) { return fr::on_cpu::root(a, fr::on_cpu::NAME); }        \
  inline float __fmaf_##MODE(float a, float b, float c) {                                       \
    return fr::on_cpu::fused_of(a, b, c, fr::on_cpu::NAME);                                     \
  }                                                                                             \
  inline double __dadd_##MODE(double a, double b) { return fr::on_cpu::sum(a, b, fr::on_cpu::NAME); } \
  inline double __dsub_##MODE(double a, double b) { return fr::on_cpu::sum(a, -b, fr::on_cpu::NAME); } \
  inline double __dmul_##MODE(double a, double b) { return fr::on_cpu::product(a, b, fr::on_cpu::NAME); } \
  inline float __double2float_##MODE(double a) {                                                \
    return fr::on_cpu::directed(float(a), a - double(float(a)), fr::on_cpu::NAME);              \
  }                                                                                             \
  inline float __int2float_##MODE(int a) { return __double2float_##MODE(a); }                   \
  inline float __uint2float_##MODE(unsigned a) { return __double2float_##MODE(a); }             \
  inline float __ll2float_##MODE(long long a) {                                                 \
    const float f = float(a);                                                                   \
    return fr::on_cpu::directed(f, double((__int128)a - (__int128)f), fr::on_cpu::NAME);        \
  }                                                                                             \
  inline float __ull2float_##MODE(unsigned long long a) {                                       \
    const float f = float(a);                                                                   \
    return fr::on_cpu::directed(f, double((__int128)a - (__int128)f), fr::on_cpu::NAME);        \
  }
FR_MODES(FR_ROUNDED)
#undef FR_ROUNDED
FR_FN double __fma_rn(double a, double b, double c) { return __builtin_fma(a, b, c); }
FR_FN double __ddiv_rn(double a, double b) { return a / b; }
FR_FN double __drcp_rn(double a) { return 1 / a; }
FR_FN double __dsqrt_rn(double a) { return ::sqrt(a); }
FR_FN float __frsqrt_rn(float a) { return float(1 / ::sqrt(double(a))); }
FR_FN double __int2double_rn(int a) { return a; }
FR_FN double __uint2double_rn(unsigned a) { return a; }
FR_FN double __ll2double_rn(long long a) { return double(a); }
FR_FN double __ull2double_rn(unsigned long long a) { return double(a); }

#define FR_TO_WHOLE(FROM, F, TO, I)                                                             \
  inline I __##FROM##2##TO##_rn(F a) { return fr::on_cpu::whole<I>(F(__builtin_rint(a))); }        \
  inline I __##FROM##2##TO##_rz(F a) { return fr::on_cpu::whole<I>(a); }                        \
  inline I __##FROM##2##TO##_ru(F a) { return fr::on_cpu::whole<I>(F(__builtin_ceil(a))); }        \
  inline I __##FROM##2##TO##_rd(F a) { return fr::on_cpu::whole<I>(F(__builtin_floor(a))); }
#define FR_WHOLES(FROM, F)                                                                      \
  FR_TO_WHOLE(FROM, F, int, int) FR_TO_WHOLE(FROM, F, uint, unsigned)                           \
  FR_TO_WHOLE(FROM, F, ll, long long) FR_TO_WHOLE(FROM, F, ull, unsigned long long)
FR_WHOLES(float, float) FR_WHOLES(double, double)
#undef FR_WHOLES
#undef FR_TO_WHOLE
#undef FR_MODES

// ---- loads and stores that say how they are cached ---------------------------------------------
#define FR_LOAD(NAME) template <class T> FR_FN T NAME(const T* p) { return *p; }
#define FR_STORE(NAME)                                                                          \
  template <class T> FR_FN void NAME(T* p, ::fr::metal::type_identity_t<T> v) { *p = v; }
FR_LOAD(__ldg) FR_LOAD(__ldca) FR_LOAD(__ldcg) FR_LOAD(__ldcs) FR_LOAD(__ldlu) FR_LOAD(__ldcv)
FR_STORE(__stwb) FR_STORE(__stcg) FR_STORE(__stcs) FR_STORE(__stwt)
#undef FR_LOAD
#undef FR_STORE
