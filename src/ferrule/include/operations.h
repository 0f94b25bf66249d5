// The operations of a simdgroup (simd_..., 32 lanes) and of a quadgroup (quad_..., 4 lanes), as tables:
// simd.h, fiber.h, split.h and cuda.h make their functions of them.
#pragma once

// On one value, by FR_OPERATION(PREFIX, NAME, what computes it).
#define FR_REDUCTIONS(X, PREFIX, LANES)                                               \
  X(PREFIX, LANES, sum, op::sum) X(PREFIX, LANES, product, op::product)               \
  X(PREFIX, LANES, max, op::max) X(PREFIX, LANES, min, op::min)                       \
  X(PREFIX, LANES, and, op::bit_and) X(PREFIX, LANES, or, op::bit_or)                 \
  X(PREFIX, LANES, xor, op::bit_xor)
#define FR_REDUCTION(PREFIX, LANES, NAME, OP) FR_OPERATION(PREFIX, NAME, reduce<OP, LANES>)
#define FR_OPERATIONS(PREFIX, LANES)                                                  \
  FR_REDUCTIONS(FR_REDUCTION, PREFIX, LANES)                                          \
  FR_OPERATION(PREFIX, prefix_inclusive_sum, scan<op::sum, false, LANES>)             \
  FR_OPERATION(PREFIX, prefix_exclusive_sum, scan<op::sum, true, LANES>)              \
  FR_OPERATION(PREFIX, prefix_inclusive_product, scan<op::product, false, LANES>)     \
  FR_OPERATION(PREFIX, prefix_exclusive_product, scan<op::product, true, LANES>)      \
  FR_OPERATION(PREFIX, broadcast_first, broadcast_first<LANES>)

// Moves by d: the lane that lane j reads. A group's lanes count from 0 to w.
#define FR_MOVES(X, PREFIX, LANES)                                                    \
  X(PREFIX, LANES, broadcast, d) X(PREFIX, LANES, shuffle, d)                         \
  X(PREFIX, LANES, shuffle_up, j - d) X(PREFIX, LANES, shuffle_down, j + d)           \
  X(PREFIX, LANES, shuffle_xor, j ^ d)                                                \
  X(PREFIX, LANES, shuffle_rotate_up, (j - d) & w)                                    \
  X(PREFIX, LANES, shuffle_rotate_down, (j + d) & w)

// Moves by d in parts of m lanes: the lane of its part that lane j reads, and whether its value; the
// lanes that a shift leaves without a source take the filling of the part's other end.
#define FR_FILLS(X, PREFIX, LANES)                                                    \
  X(PREFIX, LANES, shuffle_and_fill_up, j >= d ? j - d : (j + m - d % m) % m, j >= d) \
  X(PREFIX, LANES, shuffle_and_fill_down, (j + d) % m, j + d < m)

namespace fr {

// An operation of two values. Some, of a whole warp's integers, are one instruction of NVIDIA's GPUs,
// whose result does not depend on any order.
#if __CUDA_ARCH__ >= 800
#define FR_TOGETHER(INSTRUCTION)         \
  static constexpr bool together = true; \
  template <class T> static FR_FN T of_all(unsigned bits, T v) { return T(INSTRUCTION(bits, v)); }
#else
#define FR_TOGETHER(INSTRUCTION) static constexpr bool together = false;
#endif
// `each` is the same of the elements of two vectors.
#define FR_OP(NAME, VALUE, EACH, ...)                                  \
  struct NAME {                                                        \
    template <class T> static FR_FN T of(T a, T b) { return VALUE; }   \
    template <class V> static FR_FN V each(V a, V b) { return EACH; }  \
    __VA_ARGS__                                                        \
  };
namespace op {
FR_OP(sum, T(a + b), a + b, static constexpr int identity = 0; FR_TOGETHER(__reduce_add_sync))
FR_OP(product, T(a * b), a * b, static constexpr int identity = 1; static constexpr bool together = false;)
FR_OP(max, metal::max(a, b), ((a > b) | (b != b)) ? a : b, FR_TOGETHER(__reduce_max_sync))
FR_OP(min, metal::min(a, b), ((a < b) | (b != b)) ? a : b, FR_TOGETHER(__reduce_min_sync))
FR_OP(bit_and, T(a & b), a & b, FR_TOGETHER(__reduce_and_sync))
FR_OP(bit_or, T(a | b), a | b, FR_TOGETHER(__reduce_or_sync))
FR_OP(bit_xor, T(a ^ b), a ^ b, FR_TOGETHER(__reduce_xor_sync))
}  // namespace op
#undef FR_OP
#undef FR_TOGETHER

// bfloat16 reductions of a simdgroup go through float and round once, as MLX's overloads do.
template <class T, unsigned LANES = 32> struct wide { using type = T; };
template <> struct wide<bfloat, 32> { using type = float; };

}  // namespace fr
