// simdgroup_matrix and simd_vote: what a lane holds, the same on every device that an author can see.
#pragma once

namespace fr {
namespace metal {

// A set of lanes, as simd_ballot gives it.
struct simd_vote {
  typedef unsigned long vote_t;
  vote_t v;
  simd_vote() = default;
  explicit constexpr simd_vote(vote_t bits) : v(bits) {}
  explicit constexpr operator vote_t() const { return v; }
  constexpr bool all() const { return v == 0xffffffffu; }
  constexpr bool any() const { return v != 0; }
};
typedef simd_vote quad_vote;

// An 8x8 tile spread over a simdgroup: each lane holds two neighbouring elements of one row.
template <class T, int R, int C> struct simdgroup_matrix {
  static_assert(R == 8 && C == 8, "simdgroup_matrix is 8x8");
  typedef vec<T, 2> storage_type;
  vec<T, 2> elements;
  simdgroup_matrix() = default;
  explicit FR_FN simdgroup_matrix(T diagonal);
  FR_FN vec<T, 2>& thread_elements() { return elements; }
  FR_FN const vec<T, 2>& thread_elements() const { return elements; }
};
typedef simdgroup_matrix<float, 8, 8> simdgroup_float8x8;
typedef simdgroup_matrix<half, 8, 8> simdgroup_half8x8;
typedef simdgroup_matrix<bfloat, 8, 8> simdgroup_bfloat8x8;

template <class T, int R, int C = R> FR_FN simdgroup_matrix<T, R, C> make_filled_simdgroup_matrix(T value) {
  simdgroup_matrix<T, R, C> m;
  m.elements = vec<T, 2>(value, value);
  return m;
}
template <class T> FR_FN simdgroup_matrix<T, 8, 8> make_filled_simdgroup_matrix(T value) {
  return make_filled_simdgroup_matrix<T, 8, 8>(value);
}

}  // namespace metal

namespace lanes {

#if defined(FR_TILES)
// Where nobody asks what a lane holds, matrices lie as NVIDIA's tensor cores want them.
FR_FN unsigned matrix_row(unsigned lane) { return lane / 4; }
FR_FN unsigned matrix_column(unsigned lane) { return lane % 4 * 2; }
FR_FN unsigned matrix_lane(unsigned row, unsigned column) { return row * 4 + column / 2; }
#else
FR_FN unsigned matrix_row(unsigned lane) { return ((lane / 4) & 4) + (lane / 2) % 4; }
FR_FN unsigned matrix_column(unsigned lane) { return ((lane / 4) & 2) * 2 + (lane % 2) * 2; }
// The lane that holds an element; it holds the one beside it too.
FR_FN unsigned matrix_lane(unsigned row, unsigned column) {
  return ((column >> 1) & 1) | ((row & 3) << 1) | (((column >> 2) & 1) << 3) | (((row >> 2) & 1) << 4);
}
#endif

template <class T, class P, class S>
FR_FN void matrix_load(unsigned lane, metal::simdgroup_matrix<T, 8, 8>& m, const P* p, S stride,
                       metal::ulong2 origin, bool transpose) {
  const size_t r = matrix_row(lane), c = matrix_column(lane);
  for (unsigned i = 0; i < 2; ++i)
    m.elements[i] = transpose ? T(p[(c + i + origin.y) * size_t(stride) + r + origin.x])
                              : T(p[(r + origin.y) * size_t(stride) + c + i + origin.x]);
}
template <class T, class P, class S>
FR_FN void matrix_store(unsigned lane, const metal::simdgroup_matrix<T, 8, 8>& m, P* p, S stride,
                        metal::ulong2 origin, bool transpose) {
  const size_t r = matrix_row(lane), c = matrix_column(lane);
  for (unsigned i = 0; i < 2; ++i)
    if (transpose) p[(c + i + origin.y) * size_t(stride) + r + origin.x] = P(m.elements[i]);
    else p[(r + origin.y) * size_t(stride) + c + i + origin.x] = P(m.elements[i]);
}

}  // namespace lanes

// The lane that runs now; split texts, which cannot know, make such matrices of 0 alone.
#if FR_CUDA
FR_FN unsigned matrix_own_lane();
#elif defined(FR_FIBERS)
inline unsigned matrix_own_lane();
#else
FR_FN unsigned matrix_own_lane() { return 0; }
#endif

namespace metal {
template <class T, int R, int C> FR_FN simdgroup_matrix<T, R, C>::simdgroup_matrix(T diagonal) {
  const unsigned lane = matrix_own_lane();
  const unsigned row = lanes::matrix_row(lane), column = lanes::matrix_column(lane);
  elements = vec<T, 2>(row == column ? diagonal : T(0), row == column + 1 ? diagonal : T(0));
}
}  // namespace metal
}  // namespace fr
