// A simdgroup's 32 numbers of 4 bytes as vectors of the processor: reductions and prefix sums of full
// simdgroups, by the same operations in the same order as the plain loops of simd.h.
#pragma once
#include "operations.h"

namespace fr {
namespace lanes {

// Numbers of 4 bytes in a vector.
#if defined(__AVX2__)
#define FR_VECTOR 8
#else
#define FR_VECTOR 4
#endif
constexpr int VECTOR = FR_VECTOR;
constexpr int VECTORS = 32 / VECTOR;

template <class T> struct vector_type {
  typedef T type __attribute__((vector_size(VECTOR * 4)));
};
template <class T> using vector_t = typename vector_type<T>::type;

// Whether numbers are put into vectors.
template <class T> inline constexpr bool in_vectors = false;
template <> inline constexpr bool in_vectors<float> = true;
template <> inline constexpr bool in_vectors<int> = true;
template <> inline constexpr bool in_vectors<unsigned> = true;

// A simdgroup's numbers. Vector by vector: compilers copy an array in smaller pieces, and a vector that
// is loaded from several recent stores waits for them.
template <class T> struct simdgroup {
  vector_t<T> at[VECTORS];
  FR_FN explicit simdgroup(const T* v) {
#pragma GCC unroll 8
    for (int r = 0; r < VECTORS; ++r) __builtin_memcpy(&at[r], v + r * VECTOR, sizeof at[r]);
  }
  FR_FN void store(T* v) const {
#pragma GCC unroll 8
    for (int r = 0; r < VECTORS; ++r) __builtin_memcpy(v + r * VECTOR, &at[r], sizeof at[r]);
  }
};

// The signs of a vector's numbers, as bits.
#if FR_VECTOR == 8
FR_FN int signs(vector_t<float> a) { return __builtin_ia32_movmskps256(a); }
#elif defined(__SSE2__)
FR_FN int signs(vector_t<float> a) { return __builtin_ia32_movmskps(a); }
#endif

// The elements of two vectors, one behind the other, that F::at says for each place.
template <class F, class V> FR_FN V pick(V a, V b) {
#if defined(__clang__)
#define FR_PICK(...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define FR_PICK(...) __builtin_shuffle(a, b, vector_t<int>{__VA_ARGS__})
#endif
#if FR_VECTOR == 8
  return FR_PICK(F::at(0), F::at(1), F::at(2), F::at(3), F::at(4), F::at(5), F::at(6), F::at(7));
#else
  return FR_PICK(F::at(0), F::at(1), F::at(2), F::at(3));
#endif
#undef FR_PICK
}
struct even {
  static constexpr int at(int i) { return 2 * i; }
};
struct odd {
  static constexpr int at(int i) { return 2 * i + 1; }
};
template <int D> struct partner {
  static constexpr int at(int i) { return i ^ D; }
};
// The elements that stand D places before those of the second vector.
template <int D> struct before {
  static constexpr int at(int i) { return VECTOR - D + i; }
};
// The first D elements of the first vector, then those of the second.
template <int D> struct headed {
  static constexpr int at(int i) { return i < D ? i : VECTOR + i; }
};

// The first element of the butterfly over one vector.
template <class OP, int D, class V> FR_FN V across(V a) {
  if constexpr (D < VECTOR) return across<OP, 2 * D>(OP::each(a, pick<partner<D>>(a, a)));
  return a;
}
// The butterfly's tree: neighbours first.
template <class OP, int N, class V> FR_FN V folded(const V* a) {
  if constexpr (N == 1) {
    return across<OP, 1>(a[0]);
  } else {
    V next[N / 2];
#pragma GCC unroll 8
    for (int i = 0; i < N / 2; ++i) {
      const V x = a[2 * i], y = a[2 * i + 1];
      next[i] = OP::each(pick<even>(x, y), pick<odd>(x, y));
    }
    return folded<OP, N / 2>(next);
  }
}
template <class OP, class T> FR_FN T vector_tree(const T* v) {
  return folded<OP, VECTORS>(simdgroup<T>(v).at)[0];
}

// The steps of a prefix sum from distance D on.
template <class OP, int D, class T> FR_FN void scan_steps(simdgroup<T>& s) {
  if constexpr (D < 32) {
#pragma GCC unroll 8
    for (int r = VECTORS - 1; r >= 0; --r) {
      if constexpr (D < VECTOR) {
        const auto x = OP::each(pick<before<D>>(s.at[r ? r - 1 : 0], s.at[r]), s.at[r]);
        s.at[r] = r ? x : pick<headed<D>>(s.at[0], x);
      } else if (r >= D / VECTOR) {
        s.at[r] = OP::each(s.at[r - D / VECTOR], s.at[r]);
      }
    }
    scan_steps<OP, 2 * D>(s);
  }
}
template <class OP, bool EXCLUSIVE, class T> FR_FN void vector_scan(T* v) {
  simdgroup<T> s(v);
  scan_steps<OP, 1>(s);
  if constexpr (EXCLUSIVE) {
#pragma GCC unroll 8
    for (int r = VECTORS - 1; r > 0; --r) s.at[r] = pick<before<1>>(s.at[r - 1], s.at[r]);
    s.at[0] = pick<before<1>>(vector_t<T>{} + T(OP::identity), s.at[0]);
  }
  s.store(v);
}

}  // namespace lanes
}  // namespace fr
