"""The language of bodies and headers: functions, structs, templates, operators, macros, tables."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from metal_harness import Slots, run

pytestmark = pytest.mark.optimised

f32 = np.float32


def test_helper_functions_in_every_address_space() -> None:
    header = """
    #include <metal_stdlib>
    using namespace metal;
    float twice(float v);
    inline float first(const device float* p) { return p[0]; }
    inline float second(device const float* p) { return p[1]; }
    float third(float device const* p) { return p[2]; }
    static inline float at(constant float* t, uint i) { return t[i]; }
    METAL_FUNC float pick(const constant float& v) { return v; }
    inline void add(thread float* a, const thread float& b) { *a += b; }
    inline void both(thread float& a, thread int* b) { a += 1; *b += 2; }
    void three(thread float a[3]) { a[0] = 1; a[1] = 2; a[2] = 3; }
    template <int N> float total(thread float (&a)[N]) { float s = 0;
    for (int k = 0; k < N; ++k) s += a[k]; return s; }
    inline float overloaded(float v) { return v; }
    inline float overloaded(int v) { return v * 10; }
    inline float overloaded(float2 v) { return v.x * 100; }
    inline float overloaded(half v) { return v * 1000; }
    float defaulted(float v, float k = 2, int n = 3) { return v * k + n; }
    float twice(float v) { return v * 2; }
    int even(int n); int odd(int n) { return n == 0 ? 0 : even(n - 1); }
    int even(int n) { return n == 0 ? 1 : odd(n - 1); }
    constexpr int square(int v) { return v * v; }
    inline void store(device float* p, uint i, float v) { p[i] = v; }
    inline void store(thread float* p, float v) { *p = v; }
    namespace mine { constant float K = 0.5f; inline float scale(float v) { return v * K; }
    namespace inner { inline int id(int v) { return v; } } }
    [[maybe_unused]] static float unused(float v) { return v; }
    inline __attribute__((always_inline)) float forced(float v) { return v + 1; }
    inline float2 pair(float a, float b) { return {a, b}; }
    """
    x = np.array([3, 5, 7, 9, 11, 13, 15, 17], f32)
    s = Slots(n=8, inputs={"x": x, "few": x[:3]}, header=header, each="float v = x[i];")
    for text, want in [
        ("first(x) + second(x + 1) + third(&x[i - i])", 3 + 7 + 7), ("first(x + i)", x),
        ("at(few, 1)", 5), ("pick(few[2])", 7),
        ("twice(v)", x * 2), ("overloaded(v)", x), ("overloaded(3)", 30),
        ("overloaded(float2(v))", x * 100),
        ("overloaded(2.0h)", 2000),
        ("defaulted(v) + defaulted(v, 1) + defaulted(v, 1, 0)", x * 4 + 6),
        ("odd(int(i))", np.arange(8) % 2), ("mine::scale(v)", x / 2), ("mine::inner::id(4)", 4),
        ("forced(v)", x + 1),
        ("pair(v, 2).y", 2), ("square(5)", 25),
    ]:  # fmt: skip
        s.expr("float", text, want)
    s.stmt("float", "add(&v, 2.0f); OUT = v;", x + 2)
    s.stmt("float", "int n = 1; both(v, &n); OUT = v + n;", x + 4)
    s.stmt("float", "float a[3]; three(a); OUT = total(a) + a[2];", 9)
    s.stmt("float", "float a[square(2)] = {1, 2}; OUT = total(a) + sizeof(a);", 19)
    s.stmt("float", "store(&v, 4); OUT = v;", 4)
    s.stmt("float", "store(o_float, 0, 0); OUT = 5;", 5)
    s.slots[-1].text = "float w = 5; store(&w, w + 1); OUT = w;"
    s.slots[-1].want = 6
    s.check()


def test_structs_classes_and_operators() -> None:
    header = """
    struct Affine { float k, c; float operator()(float v) const { return v * k + c; } };
    struct Complex {
        float re, im;
        Complex(float r, float i) : re(r), im(i) {}
        Complex(float r) : Complex(r, 0) {}
        Complex operator*(Complex o) const { return Complex(re * o.re - im * o.im,
            re * o.im + im * o.re); }
        Complex operator-() const { return Complex(-re, -im); }
        thread Complex& operator+=(const thread Complex& o) thread { re += o.re; im += o.im;
        return *this; }
        bool operator==(Complex o) const { return re == o.re && im == o.im; }
        operator float() const { return re; }
        float operator[](int k) const { return k ? im : re; }
        static Complex unit() { return Complex(0, 1); }
    };
    inline Complex operator+(Complex a, Complex b) { return Complex(a.re + b.re, a.im + b.im); }
    inline Complex operator*(float s, Complex c) { return Complex(s * c.re, s * c.im); }
    class Stack {
    public:
        Stack() : n(0) {}
        void push(float v) { items[n++] = v; }
        float pop() { return items[--n]; }
        int size() const { return n; }
    private:
        float items[8];
        int n;
    };
    template <typename T, int N> struct Tile {
        using value_type = T;
        static constexpr constant int size = N;
        T v[N];
        thread T& operator[](int k) thread { return v[k]; }
        T sum() const { T s = 0; for (int k = 0; k < N; ++k) s += v[k]; return s; }
    };
    struct Base { int n = 4; int get() const { return n; } };
    struct Derived : Base { int m = 5; int both() const { return n + m; } };
    union Bits { float f; uint u; };
    enum Mode { ADD, MULTIPLY = 5, LAST };
    enum class Kind : uchar { small = 1, large = 200 };
    struct Max { template <typename T> T operator()(T a, T b) { return a > b ? a : b; }
    static constexpr constant float init = -1e30f; };
    struct Sum { template <typename T> T operator()(T a, T b) { return a + b; }
    static constexpr constant float init = 0; };
    template <typename Op> float fold(thread const float* p, int n, Op op = Op()) {
        float r = Op::init; for (int k = 0; k < n; ++k) r = op(r, p[k]); return r; }
    struct Row { const device float* data; int width;
    float at(int r, int c) const { return data[r * width + c]; } };
    typedef struct { int a; float b; } Old;
    inline Mode mode_of(int k) { return k ? MULTIPLY : ADD; }
    """
    x = np.arange(1, 9, dtype=f32)
    s = Slots(
        n=8, inputs={"x": x}, header=header, each="float v = x[i]; float list[4] = {v, 2, -3, 4};"
    )
    for text, want in [
        ("Affine f = {2.0f, 3.0f}; OUT = f(v);", x * 2 + 3), ("OUT = Affine{1, v}(0);", x),
        ("Complex a(v, 2), b = Complex(3, -1); Complex c = a * b + a; OUT = c.re * 100 + c.im;",
         (x * 3 + 2 + x) * 100 + 6 - x + 2),
        ("Complex a(v, 1); a += Complex::unit(); a += a; OUT = a.im + a[0] + float(-a);", 4),
        ("Complex a = v; OUT = (2.0f * a).re + (a == Complex(v));", x * 2 + 1),
        ("Stack t; t.push(v); t.push(2); float a = t.pop(); OUT = a + t.pop() * 10 + t.size();",
         x * 10 + 2),
        ("Tile<float, 4> t = {{1, 2, 3, v}}; t[0] += 5; OUT = t.sum() + t.size + Tile<int,"
         " 7>::size;", x + 6 + 5 + 11),
        ("Tile<half, 2> t; t[0] = 1; t[1] = half(v); typename Tile<half, 2>::value_type k ="
         " t.sum(); OUT = k;", x + 1),
        ("Derived d; d.n += 1; OUT = d.both() + d.get();", 15),
        ("Bits b; b.f = 1.0f; OUT = b.u >> 23;", 127),
        ("OUT = MULTIPLY + LAST * 10 + mode_of(0) + mode_of(1);", 5 + 60 + 0 + 5),
        ("Kind k = Kind::large; OUT = uchar(k) + (k == Kind::small);", 200),
        ("OUT = fold<Max>(list, 4) * 100 + fold<Sum>(list, 4);", np.maximum(x, 4) * 100 + x + 3),
        ("OUT = fold(list, 4, Max());", np.maximum(x, 4)),
        ("Row r = {x, 2}; OUT = r.at(i / 4, i % 2);", x[np.arange(8) // 4 * 2 + np.arange(8) % 2]),
        ("Old o = {1, 2.5f}; Old p = o; p.a = 4; OUT = o.a + p.a + p.b;", 7.5),
        ("struct Inner { float a[2]; float sum() { return a[0] + a[1]; } } n = {{v, 1}}; OUT ="
         " n.sum();", x + 1),
        ("Affine t[2] = {{1, 2}, {3, 4}}; thread Affine* p = t + 1; p->k = v; OUT = t[1](1) +"
         " p[-1].c;", x + 4 + 2),
        ("Affine a = {1, 2}, b; b = a; b.k = 9; OUT = a.k + b.k + b.c;", 12),
        ("Affine a{}; OUT = a.k + a.c;", 0),
        ("switch (mode_of(i % 2)) { case ADD: OUT = 1; break; default: OUT = 2; }",
         np.arange(8) % 2 + 1),
    ]:  # fmt: skip
        s.stmt("float", text, want)
    s.check()


def test_templates() -> None:
    header = """
    template <typename T> T identity(T v) { return v; }
    template <typename T, int N = 4> T power(T v) { T r = 1; for (int k = 0; k < N; ++k) r *= v;
    return r; }
    template <bool B> int choose() { if constexpr (B) return 1; else return 2; }
    template <typename T> struct Name { static constexpr constant int id = 0; };
    template <> struct Name<float> { static constexpr constant int id = 1; };
    template <> struct Name<half> { static constexpr constant int id = 2; };
    template <typename T> struct Name<vec<T, 4>> {
        static constexpr constant int id = 100 + Name<T>::id; };
    template <typename T, typename U> using bigger = metal::conditional_t<(sizeof(T) > sizeof(U)),
        T, U>;
    template <typename T, metal::enable_if_t<metal::is_floating_point_v<T>,
        bool> = true> int sort_of(T) { return 1; }
    template <typename T, metal::enable_if_t<metal::is_integral_v<T>,
        bool> = true> int sort_of(T) { return 2; }
    template <typename... Ts> int count_of(Ts... v) { return sizeof...(v); }
    template <typename T> T sum_of(T v) { return v; }
    template <typename T, typename... Ts> T sum_of(T v, Ts... rest) { return v + sum_of(rest...); }
    template <int N> struct Factorial { enum { value = N * Factorial<N - 1>::value }; };
    template <> struct Factorial<0> { enum { value = 1 }; };
    template <typename F> float apply(F f, float v) { return f(v); }
    template <typename T> constexpr constant T half_of = T(0.5);
    template <typename T> inline float load(const device T* p, uint i) { return float(p[i]); }
    template <> inline float load<uchar>(const device uchar* p, uint i) { return p[i] * 100; }
    template <typename T, int R, int C> struct Matrix { T m[R][C]; T trace() { T t = 0;
    for (int k = 0; k < R && k < C; ++k) t += m[k][k]; return t; } };
    template <int A, int B> constexpr int ceil_div() { return (A + B - 1) / B; }
    """
    x = np.arange(1, 9, dtype=f32)
    arguments = [("T", np.float16), ("U", np.int32), ("N", 3), ("FLAG", True), ("NEG", -7)]
    s = Slots(
        n=8,
        inputs={"x": x, "b": np.arange(8, dtype=np.uint8)},
        header=header,
        each="float v = x[i];",
        flags={"template": arguments},
    )
    for text, want in [
        ("OUT = identity(v) + identity<int>(2.5f);", x + 2),
        ("OUT = power(v) + power<int, 3>(2);", x**4 + 8),
        ("OUT = choose<true>() * 10 + choose<FLAG && (N > 5)>();", 12),
        ("OUT = Name<float>::id + Name<T>::id * 10 + Name<half4>::id + Name<U>::id;", 1 + 20 + 102),
        ("OUT = sizeof(bigger<char, int>) + sizeof(bigger<T, uchar>);", 6),
        ("OUT = sort_of(v) * 10 + sort_of(3u);", 12),
        ("OUT = count_of(1, v, 2.0h) + sum_of(v, 2, 3);", x + 8),
        ("OUT = Factorial<5>::value;", 120),
        ("OUT = apply([](float w) { return w * 3; }, v);", x * 3),
        ("OUT = half_of<float> + float(half_of<half>);", 1),
        ("OUT = load(x, i) + load(b, 2) + load<float>(x, 0);", x + 200 + 1),
        ("Matrix<float, 2, 3> m = {{{1, 2, 3}, {4, v, 6}}}; OUT = m.trace();", 1 + x),
        ("OUT = ceil_div<N * 3, 4>();", 3),
        ("T t = T(v) + T(0.5f); U u = U(t); OUT = float(t) * 10 + u;", (x + 0.5) * 10 + x),
        ("OUT = NEG + N;", -4),
        ("float a[N] = {}; for (int k = 0; k < N; ++k) a[k] = k * v; OUT = a[N - 1];", x * 2),
        ("OUT = FLAG ? 1 : 2; if (FLAG) OUT += 5; if (!FLAG) OUT = 0;", 6),
        ("constexpr auto k = N * 2; static_assert(k == 6); OUT = k;", 6),
        ("auto f = [=](auto a, auto b) { return a * b; }; OUT = f(v, 2) + f(3, 4);", x * 2 + 12),
        ("auto g = [&v](int k) mutable { v += k; }; g(3); OUT = v;", x + 3),
        ("auto r = [](float w) -> int { return int(w); }(v + 0.5f); OUT = r;", x),
        ("decltype(v) w = 4; const auto& q = w; OUT = q;", 4),
    ]:  # fmt: skip
        s.stmt("float", text, want)
    s.check()


def test_constant_tables() -> None:
    header = """
    constant float LUT[8] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f};
    constant constexpr int SCALE = 3;
    static constant uchar ORDER[] = {3, 2, 1, 0};
    constexpr constant float WEIGHTS[2][3] = {{1, 2, 3}, {4, 5, 6}};
    const constant half4 COLOURS[2] = {half4(1, 2, 3, 4), half4(5, 6, 7, 8)};
    struct Step { int dx, dy; float w; };
    constant Step STEPS[] = {{1, 0, 0.5f}, {0, 1, 0.25f}, {-1, -1, 2}};
    constant float EPSILON = 1e-5;
    static constexpr constant uint PRIMES[4] = {2, 3, 5, 7};
    constant bool FLAGS[2] = {true, false};
    constant float3 AXIS = float3(1, 2, 3);
    constant char NAME[] = "abc";
    constant int NEGATIVE[3] = {-1, -2, -3};
    constant uint64_t BIG = 0x123456789abcdef0ul;
    constant float NESTED[2][2][2] = {{{1, 2}, {3, 4}}, {{5, 6}, {7, 8}}};
    #define COUNT (sizeof(ORDER) / sizeof(ORDER[0]))
    inline float at(constant float* t, uint i) { return t[i] * SCALE; }
    inline float step(constant Step& s) { return s.dx + s.w; }
    inline float row(constant float (&w)[2][3], int r) { return w[r][0] + w[r][2]; }
    """
    i = np.arange(8)
    lut = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], f32)
    s = Slots(n=8, header=header)
    for text, want in [
        ("LUT[i]", lut), ("at(LUT, 7 - i)", lut[::-1] * 3),
        ("LUT[ORDER[i % COUNT]]", lut[3 - i % 4]),
        ("WEIGHTS[i % 2][i % 3]", np.array([[1, 2, 3], [4, 5, 6]])[i % 2, i % 3]),
        ("row(WEIGHTS, 1)", 10),
        ("COLOURS[i % 2].w", np.where(i % 2, 8, 4)),
        ("STEPS[i % 3].w + STEPS[2].dy", np.array([0.5, 0.25, 2])[i % 3] - 1),
        ("step(STEPS[0])", 1.5), ("EPSILON", f32(1e-5)),
        ("PRIMES[i % 4]", np.array([2, 3, 5, 7])[i % 4]),
        ("FLAGS[i % 2]", 1 - i % 2), ("AXIS.zy.x + AXIS.x", 4), ("NAME[1]", 98),
        ("NEGATIVE[i % 3]", -1 - i % 3),
        ("BIG >> 60", 1), ("NESTED[1][i % 2][0]", np.where(i % 2, 7, 5)), ("SCALE * 2", 6),
        ("sizeof(LUT)", 32),
    ]:  # fmt: skip
        s.expr("float", text, want)
    s.stmt("float", "constant float* p = LUT + 2; OUT = p[i % 4];", lut[2 + i % 4])
    s.stmt("float", "constant auto& t = WEIGHTS; OUT = t[0][1];", 2)
    s.stmt("float", "constexpr float local[3] = {1, 2, 3}; OUT = local[i % 3];", i % 3 + 1)
    s.stmt("float", "const int local[] = {5, 6}; OUT = local[i & 1];", i % 2 + 5)
    s.stmt(
        "float", "static constexpr constant float local[2] = {7, 8}; OUT = local[i & 1];", i % 2 + 7
    )
    s.stmt("float", "const constant Step* p = STEPS; OUT = (p + 1)->w;", 0.25)
    s.check()


PREPROCESSOR = r"""
#include <metal_stdlib>
#include <metal_math>
#  include <metal_simdgroup>
using namespace metal;
#define LOAD(p, i) (*((const device float*)(p) + (i)))
#define ROUNDS 3
#define JOIN(a, b) a##b
#define TEXT(a) #a
#define MANY(...) many(__VA_ARGS__)
#define LONG(v) \
    do {        \
        v += 1; \
        v *= 2; \
    } while (0)
#ifdef ROUNDS
#define DEFINED 1
#else
#error "never seen"
#endif
#if ROUNDS > 2 && !defined(NOTHING)
constant int LEVEL = 2;
#elif ROUNDS > 1
constant int LEVEL = 1;
#else
constant int LEVEL = 0;
#endif
#undef NOTHING
#if defined(__METAL__) || defined(__METAL_VERSION__)
constant int METAL = 1;
#else
constant int METAL = 0;
#endif
#if __METAL_VERSION__ >= 310
constant int HAS_BFLOAT = 1;
#else
constant int HAS_BFLOAT = 0;
#endif
#ifdef __FAST_MATH__
constant int FAST = 1;
#else
constant int FAST = 0;
#endif
#define FOR(k, n) for (int k = 0; k < (n); ++k)
#define GENERATE(name, T) inline T JOIN(name, _of)(T v) { return v + T(1); }
GENERATE(next, int)
GENERATE(succ, half)
#define THREAD_POINTER(T) thread T*
#define CONSTANT constant
#define PI_2 M_PI_2_F
#define H 0.5h
inline int many(int a, int b = 0, int c = 0) { return a + b * 10 + c * 100; }
inline void grow(THREAD_POINTER(float) p) { *p += 1; }
CONSTANT float TABLE[2] = {1, 2};
"""


@pytest.mark.parametrize("place", ["header", "source"])
def test_the_preprocessor(place: str) -> None:
    x = np.arange(8, dtype=f32)
    if place == "source":
        # A body can hold all but functions and includes.
        keep = [
            t
            for t in PREPROCESSOR.splitlines()
            if not t.startswith(("inline", "GENERATE(", "using", "#  inc", "#inc"))
        ]
        s = Slots(n=8, inputs={"x": x},
         prologue="\n".join(["", *keep, ""]).replace("constant int", "const int")
                  .replace("CONSTANT float TABLE", "const float TABLE"),
                  header="inline int many(int a, int b = 0, int c = 0) { return a + b * 10 + c *"
                         " 100; }"
                  " inline int next_of(int v) { return v + 1; } inline half succ_of(half v) {"
                  " return v + 1; } inline void grow(thread float* p) { *p += 1; }")  # fmt: skip
    else:
        s = Slots(n=8, inputs={"x": x}, header=PREPROCESSOR)
    for text, want in [
        ("LOAD(x, i) + LOAD(x + 1, 0)", x + 1), ("JOIN(ROU, NDS)", 3),
        ("MANY(1, 2, 3) + MANY(4)", 325), ("DEFINED + LEVEL", 3),
        ("METAL", 1), ("HAS_BFLOAT", 1), ("FAST", 0), ("next_of(4)", 5),
        ("float(succ_of(1.5h))", 2.5), ("TABLE[1]", 2),
        ("sizeof(TEXT(abc))", 4), ("PI_2", f32(np.pi / 2)), ("float(H * 2)", 1),
        ("__LINE__ > 0", 1),
    ]:  # fmt: skip
        s.expr("float", text, want)
    s.stmt("float", "float v = x[i]; LONG(v); OUT = v;", (x + 1) * 2)
    s.stmt("float", "float v = 0; FOR(k, ROUNDS) v += k; OUT = v;", 3)
    s.stmt("float", "float v = 1; grow(&v); OUT = v;", 2)
    s.stmt("float", "float v = 1; THREAD_POINTER(float) p = &v; *p = 7; OUT = v;", 7)
    s.check()


def test_loops_and_their_pragmas() -> None:
    s = Slots(n=4, each="int r = 0;")
    for text, want in [
        ("#pragma unroll\nfor (int k = 0; k < 4; ++k) r += k;", 6),
        ("#pragma clang loop unroll(full)\nfor (int k = 0; k < 4; ++k) r += k;", 6),
        ("_Pragma(\"clang loop unroll(full)\") for (int k = 0; k < 4; ++k) r += k;", 6),
        ("#pragma unroll(4)\nfor (int k = 0; k < 4; ++k) r += k;", 6),
        ("#pragma clang loop unroll_count(2)\nfor (int k = 0; k < 4; ++k) r += k;", 6),
        ("#pragma nounroll\nfor (int k = 0; k < 4; ++k) r += k;", 6),
        ("[[unroll]] for (int k = 0; k < 4; ++k) r += k;", 6),
        ("MLX_MTL_PRAGMA_UNROLL\nfor (int k = 0; k < 4; ++k) r += k;", 6),
        ("#pragma clang diagnostic push\n#pragma clang diagnostic ignored \"-Wunused\"\nr ="
         " 1;\n#pragma clang diagnostic pop\n", 1),
        ("for (int n[2] = {0, 0}; n[1] < 2; ++n[1]) r += 5;", 10),
        ("for (uint k = 3; k-- > 0;) r = r * 10 + k;", 210),
        ("int k = 0; while (true) { if (++k > 5) break; if (k & 1) continue; r += k; }", 6),
        ("do r++; while (r < 3);", 3),
        ("for (int a = 0, b = 9; a < b; ++a, --b) r++;", 5), ("int k = 5; while (k --> 0) r++;", 5),
        ("switch (i) { case 0: r = 1; case 1: r += 10; break; case 2: case 3: r = 7; break;"
         " default: r = -1; }", [11, 10, 7, 7]),
        ("const int a[] = {1, 2, 3}; for (int v : a) r += v;", 6),
        ("for (auto c = 'a'; c < 'd'; ++c) r++;", 3),
        ("if (int k = 3; k > 2) r = k;", 3), ("{ int r = 5; (void)r; } r += 1;", 1),
        ("r = (1, 2, 3);", 3), ("r = i > 1 ? i > 2 ? 3 : 2 : 1;", [1, 1, 2, 3]),
        ("goto done; r = 5; done: r += 2;", 2), ("; ; {} r = 4;;", 4),
        ("if (i) {} else r = 1;", [1, 0, 0, 0]),
        ("if (i > 0) if (i > 1) r = 2; else r = 1;", [0, 1, 2, 2]),
        ("int a[3][2] = {{1, 2}, {3}, {}}; for (auto& t : a) r += t[0] + t[1];", 6),
        ("uint a[2] = {i, 3}; r = a[1] + int(sizeof a);", 11),
        ("int a = 1, *p = &a, &q = a; *p += 1; q += 1; r = a;", 3),
        ("bool b = false; b |= true; b &= i < 2; r = b;", [1, 1, 0, 0]),
        ("r = !i + ~0 + -(-3) + +2;", [5, 4, 4, 4]),
        ("float f = 7.9f; r = (int)f + int(-f) + (short)3.5;", 3),
        ("long n = 1; n <<= 33; r = n >> 31;", 4), ("r = 'b' - 'a' + \"xyz\"[0];", 121),
        ("size_t n = 5; ptrdiff_t d = -2; r = int(n) + int(d);", 3),
        ("uint u = 5; r = -int(u);", -5), ("volatile int w = 3; r = w + 1;", 4),
        ("auto t = i; t += 1; r = t;", [1, 2, 3, 4]),
        ("unsigned k = 2; unsigned int j = 3; signed q = -1; r = k + j + q;", 4),
        ("register_value: r = 1;", 1), ("const thread int& q = r; r = 6; r += q;", 12),
        ("r = sizeof(int[4]) + sizeof r;", 20),
        ("int2 v = int2(1, 2); thread int2& w = v; w.x += 4; r = v.x * 10 + w.y;", 52),
        ("r = int(i) - 2 < 0 ? -1 : 1;", [-1, -1, 1, 1]),
        ("using std_int = int; typedef float real; std_int a = 3; real b = 1.5; r = a + int(b *"
         " 2);", 6), ("r = 1 ? 2 : 3;", 2),
        ("alignas(16) float a[4] = {1, 2, 3, 4}; r = int(a[2]);", 3),
        ("r = 0x7fffffff; r = int(uint(r) + 1u) < 0;", 1), ("(void)i; r = __LINE__ > 1;", 1),
    ]:  # fmt: skip
        s.stmt("int", f"\n{text}\nOUT = r;", np.array(want))
    s.check()


def test_names_that_other_languages_own() -> None:
    """Locals, globals, functions and inputs may be called what C and C++ libraries call theirs."""
    names = [
        "y0",
        "j1",
        "index",
        "gamma",
        "norm",
        "div",
        "signal",
        "time",
        "log1",
        "round_",
        "pipe",
        "data",
        "out_",
        "mask",
        "block",
        "warp",
        "lane",
        "tid",
        "grid_",
        "self",
        "main",
        "string",
        "vector",
        "list",
        "array_",
        "N1",
        "T1",
        "inp",
        "blockIdx",
        "threadIdx",
        "exit",
        "free",
        "read",
        "write",
        "link",
        "hash",
        "swap",
        "move",
        "next",
        "begin",
        "end",
        "size",
        "function",
        "thread_id",
        "device_id",
        "constants",
        "threadgroups",
        "val",
        "assert_",
        "std_",
        "fr",
        "core",
        "detail",
    ]
    header = """
    constant float y1 = 2;
    constant int yn = 3, j0 = 4;
    inline int index_of(int v) { return v; }
    struct div_t { int q; };
    inline float gamma(float v) { return v; }
    inline int abort() { return 5; }
    """
    header += "\n".join(f"inline int f_{n}(int {n}) {{ return {n} + 1; }}" for n in names)
    s = Slots(n=4, header=header)
    for name in names:
        s.stmt(
            "int",
            f"int {name} = i; {name} += f_{name}({name}); OUT = {name};",
            np.arange(4) * 2 + 1,
        )
    s.expr("int", "int(y1) + yn + j0 + abort() + int(gamma(2))", 16)
    s.check()


@pytest.mark.parametrize(
    "name",
    [
        "T",
        "N",
        "index",
        "mask",
        "x",
        "data",
        "size",
        "shape",
        "i",
        "fr",
        "core",
        "grid",
        "inputs",
        "array",
    ],
)
def test_inputs_of_any_name(name: str) -> None:
    body = f"uint k = thread_position_in_grid.x; out[k] = {name}[k] * 2;"
    x = np.arange(9, dtype=f32)
    assert (run(body, {name: x}, {"out": ("float", (9,))}, 9, 9)["out"] == x * 2).all()


def test_comments_strings_and_white_space() -> None:
    body = (
        "\r\n// thread device constant threadgroup float t[4]; half h = 1.0h; v.xy\r\n"
        "uint i = thread_position_in_grid.x; /* threadgroup_barrier(mem_flags::mem_threadgroup);"
        " \r\n return; */\r\n"
        "\tfloat v = x[i]/* in the middle */+ 1; // trailing \\\n continues: v = 0;\n"
        'constant const char* s = "// no comment, 1.0h v.xy threadgroup \\" "; \n'
        "y[i] = v + (s[0] == '/') + ('\"' == 34) + ('\\'' == 39)\n;\n\n"
        "#define A 1 /* comment */ + 1 // another\n y[i] += A; // no line end"
    )
    x = np.arange(5, dtype=f32)
    y = run(body, {"x": x}, {"y": ("float", (5,))}, 5, 5)["y"]
    assert (y == x + 1 + 3 + 2).all()


def test_a_comment_over_lines_in_a_directive() -> None:
    body = "#define A 1 /* comment\n over lines */ + 1\ny[0] = A;"
    assert run(body, {}, {"y": ("int", (1,))}, 1, 1)["y"][0] == 2


def test_math_modes_and_macros_they_define() -> None:
    body = """
    uint i = thread_position_in_grid.x;
    #ifdef __FAST_MATH__
    y[i] = 1;
    #else
    y[i] = 0;
    #endif
    """
    for options, want in [
        (None, 0),
        ({"math_mode": "safe"}, 0),
        ({"math_mode": "relaxed"}, 0),
        ({"math_mode": "fast"}, 1),
    ]:
        flags: dict[str, Any] = {} if options is None else {"compile_options": options}
        assert (run(body, {}, {"y": ("int", (2,))}, 2, 2, **flags)["y"] == want).all(), options


@pytest.mark.parametrize(
    "pragma",
    [
        "#pragma METAL fp contract(off)",
        "#pragma clang fp contract(off)",
        "# pragma  METAL  fp  contract( off )",
    ],
)
@pytest.mark.parametrize("place", ["header", "source"])
def test_the_pragma_that_stops_contraction(pragma: str, place: str) -> None:
    rng = np.random.default_rng(81)
    a = (1 + rng.integers(1, 2**12, 256) * 2.0**-12).astype(f32)
    b = (1 + rng.integers(1, 2**12, 256) * 2.0**-14).astype(f32)
    c = -(a * b)
    fused = (a.astype(np.float64) * b.astype(np.float64) + c.astype(np.float64)).astype(f32)
    assert (fused != 0).sum() > 100, "the test has nothing to see"
    body = """
    uint i = thread_position_in_grid.x;
    y[i] = a[i] * b[i] + c[i];
    float p = a[i] * b[i];
    z[i] = p - -c[i];
    w[i] = (float4(a[i]) * b[i] + c[i]).z;
    f[i] = fma(a[i], b[i], c[i]);
    """
    parts = {"header": (pragma + "\n", body), "source": ("", pragma + "\n" + body)}[place]
    outs: dict[str, Any] = dict.fromkeys("yzwf", ("float", (256,)))
    out = run(parts[1], {"a": a, "b": b, "c": c}, outs, 256, 64, header=parts[0])
    for name in "yzw":
        assert (out[name] == 0).all(), name
    assert (out["f"] == fused).all(), "fma is fused whatever the pragma says"
    plain = run(body, {"a": a, "b": b, "c": c}, outs, 256, 64)
    assert (plain["f"] == fused).all()
    assert ((plain["y"] == 0) | (plain["y"] == fused)).all()
