// The matrices of simdgroups in split loops: each lies in one piece, row after row, so that the
// operations of whole simdgroups are vector code. A lane's two elements are neighbours in it.
#pragma once

namespace fr {
namespace split {

template <class T> struct tile {
  using lane_type = metal::simdgroup_matrix<T, 8, 8>;
  alignas(64) lane_type pairs[32];

  FR_FN lane_type& of(unsigned lane) {
    return pairs[lanes::matrix_row(lane) * 4 + lanes::matrix_column(lane) / 2];
  }
  FR_FN T* elements() { return reinterpret_cast<T*>(pairs); }
  FR_FN const T* elements() const { return reinterpret_cast<const T*>(pairs); }
};

// A variable of each lane that is a matrix.
template <class T, unsigned N> struct tiles {
  tile<T> at[(N + 31) / 32];
  FR_FN metal::simdgroup_matrix<T, 8, 8>& operator[](unsigned i) { return at[i / 32].of(i % 32); }
};

// The same for an array of matrices, which is only ever indexed down to one of them.
template <class M> struct tiled {};
template <class T> struct tiled<metal::simdgroup_matrix<T, 8, 8>> { using type = tile<T>; };
template <class M, size_t K> struct tiled<M[K]> { using type = typename tiled<M>::type[K]; };

template <class A> struct tiles_of_lane;
template <class T, size_t K> struct tiles_of_lane<tile<T>[K]> {
  tile<T>* tiles;
  unsigned lane;
  FR_FN metal::simdgroup_matrix<T, 8, 8>& operator[](size_t i) const { return tiles[i].of(lane); }
};
template <class A, size_t J, size_t K> struct tiles_of_lane<A[J][K]> {
  A (*tiles)[K];
  unsigned lane;
  FR_FN tiles_of_lane<A[K]> operator[](size_t i) const { return {tiles[i], lane}; }
};
template <class M, unsigned N> struct tile_arrays {
  using array = typename tiled<M>::type;
  array at[(N + 31) / 32];
  FR_FN tiles_of_lane<array> operator[](unsigned i) { return {at[i / 32], i % 32}; }
};
template <class M> using lane_tiles = tiles_of_lane<typename tiled<M>::type>;

// What stands for a simdgroup of fewer than 32 lanes is undefined in Metal; here each lane loads and
// stores its own elements, and nothing is multiplied.
template <class T, class P, class S = int>
FR_FN void tile_load(tile<T>& m, unsigned n, const P* p, S stride = 8,
                     metal::ulong2 origin = metal::ulong2(0, 0), bool transpose = false) {
  if (n < 32) {
    for (unsigned i = 0; i < n; ++i) lanes::matrix_load(i, m.of(i), p, stride, origin, transpose);
    return;
  }
  const size_t next = size_t(stride);
  const P* from = p + (origin.y * next + origin.x);
  T* to = m.elements();
  if (transpose) {
    for (unsigned c = 0; c < 8; ++c)
      for (unsigned r = 0; r < 8; ++r) to[r * 8 + c] = T(from[c * next + r]);
  } else {
#pragma GCC unroll 8
    for (unsigned r = 0; r < 8; ++r)
      for (unsigned c = 0; c < 8; ++c) to[r * 8 + c] = T(from[r * next + c]);
  }
}
template <class T, class P, class S = int>
FR_FN void tile_store(tile<T>& m, unsigned n, P* p, S stride = 8,
                      metal::ulong2 origin = metal::ulong2(0, 0), bool transpose = false) {
  if (n < 32) {
    for (unsigned i = 0; i < n; ++i) lanes::matrix_store(i, m.of(i), p, stride, origin, transpose);
    return;
  }
  const size_t next = size_t(stride);
  P* to = p + (origin.y * next + origin.x);
  const T* from = m.elements();
  if (transpose) {
    for (unsigned c = 0; c < 8; ++c)
      for (unsigned r = 0; r < 8; ++r) to[c * next + r] = P(from[r * 8 + c]);
  } else {
#pragma GCC unroll 8
    for (unsigned r = 0; r < 8; ++r)
      for (unsigned c = 0; c < 8; ++c) to[r * next + c] = P(from[r * 8 + c]);
  }
}

typedef float row __attribute__((vector_size(32), aligned(4), may_alias));

// One element in all places. g++ would load a vector from each row instead, and take it apart.
FR_FN row spread(const float* p) {
#if defined(__AVX__)
  row r;
  asm("vbroadcastss %1, %0" : "=x"(r) : "m"(*p));
  return r;
#else
  const float x = *p;
  return row{x, x, x, x, x, x, x, x};
#endif
}
FR_FN row mad(row a, row b, row c) {
  row r;
  for (unsigned i = 0; i < 8; ++i) r[i] = detail::mad(a[i], b[i], c[i]);
  return r;
}

// The elements of a matrix as floats: where they are, or in `room`.
template <class T> FR_FN const float* floats(const tile<T>& m, float* room) {
  for (unsigned i = 0; i < 64; ++i) room[i] = float(m.elements()[i]);
  return room;
}
FR_FN const float* floats(const tile<float>& m, float*) { return m.elements(); }

// d = a * b (+ c), each element added up in the order of `lanes::matrix_multiply`.
template <class D, class A, class B, class C>
FR_FN void tile_product(tile<D>& d, const tile<A>& a, const tile<B>& b, const tile<C>* c) {
  alignas(64) float of_a[64], of_b[64], of_c[64];
  const float *x = floats(a, of_a), *y = floats(b, of_b), *start = c ? floats(*c, of_c) : nullptr;
  asm volatile("" : "+r"(x));  // else g++ keeps 64 addresses in memory, for all rounds of a loop
  row z[8];
#pragma GCC unroll 8
  for (unsigned i = 0; i < 8; ++i) z[i] = start ? reinterpret_cast<const row*>(start)[i] : row{};
#pragma GCC unroll 8
  for (unsigned k = 0; k < 8; ++k) {
    const row next = reinterpret_cast<const row*>(y)[k];
#pragma GCC unroll 8
    for (unsigned i = 0; i < 8; ++i) z[i] = mad(spread(x + i * 8 + k), next, z[i]);
  }
  if constexpr (metal::is_same_v<D, float>) {
#pragma GCC unroll 8
    for (unsigned i = 0; i < 8; ++i) reinterpret_cast<row*>(d.elements())[i] = z[i];
  } else {
    for (unsigned i = 0; i < 8; ++i)
      for (unsigned j = 0; j < 8; ++j) d.elements()[i * 8 + j] = D(z[i][j]);
  }
}
template <class D, class A, class B>
FR_FN void tile_multiply(tile<D>& d, const tile<A>& a, const tile<B>& b) {
  tile_product<D, A, B, D>(d, a, b, nullptr);
}
template <class D, class A, class B, class C>
FR_FN void tile_multiply_accumulate(tile<D>& d, const tile<A>& a, const tile<B>& b, const tile<C>& c) {
  tile_product(d, a, b, &c);
}

}  // namespace split
}  // namespace fr
