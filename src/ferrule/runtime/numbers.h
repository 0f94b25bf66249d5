/* Numbers as the bytes of a dtype. Knows no array library; valid as C11 and as C++17. */
#ifndef FERRULE_NUMBERS_H
#define FERRULE_NUMBERS_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

/* Dtypes in the order of ferrule.dtypes.ALL, with the bytes of an element: integers, floats that a number may be,
 * and others. */
#define FR_ALL_DTYPES(F)                                                                                          \
  F(BOOL, bool, 1) F(UINT8, uint8, 1) F(UINT16, uint16, 2) F(UINT32, uint32, 4) F(UINT64, uint64, 8)              \
  F(INT8, int8, 1) F(INT16, int16, 2) F(INT32, int32, 4) F(INT64, int64, 8)                                       \
  F(FLOAT16, float16, 2) F(BFLOAT16, bfloat16, 2) F(FLOAT32, float32, 4) F(FLOAT64, float64, 8)                   \
  F(COMPLEX64, complex64, 8) F(FLOAT8_E4M3FN, float8_e4m3fn, 1) F(FLOAT8_E5M2, float8_e5m2, 1)                    \
  F(FLOAT8_E8M0FNU, float8_e8m0fnu, 1)
#define FR_PLACE(PLACE, NAME, BYTES) FR_##PLACE,
#define FR_BYTES(PLACE, NAME, BYTES) BYTES,
enum { FR_ALL_DTYPES(FR_PLACE) FR_DTYPES };
static const uint8_t fr_item_bytes[] = {FR_ALL_DTYPES(FR_BYTES)};
#undef FR_PLACE
#undef FR_BYTES

/* The bits of the float of 16 bits that is nearest to a value, of two the even one, as NumPy rounds.
 * `digits` of them stand behind the first binary digit; what is too large becomes infinite. */
static inline uint16_t fr_float16_bits(double value, int digits) {
  int bias = (1 << (14 - digits)) - 1, exponent;
  int32_t sign = signbit(value) ? 1 << 15 : 0, infinite = (2 * bias + 1) << digits;
  if (isnan(value)) return (uint16_t)(sign | infinite | 1 << (digits - 1));
  if (isinf(value)) return (uint16_t)(sign | infinite);
  frexp(value, &exponent); /* of the digit behind the first */
  if (exponent - 1 < 1 - bias || value == 0) exponent = 2 - bias; /* of subnormals */
  if (exponent - 1 > bias) return (uint16_t)(sign | infinite);
  /* The first digit, where there is one, counts the exponent up by one; so does a carry. */
  int32_t bits = (int32_t)rint(ldexp(fabs(value), digits + 1 - exponent));
  bits += (exponent - 2 + bias) << digits;
  return (uint16_t)(sign | bits);
}

/* The bytes of a number as a float dtype; false where that makes infinity of it. */
static inline bool fr_float_bytes(int dtype, double value, void* bytes) {
  if (dtype == FR_FLOAT64) {
    memcpy(bytes, &value, 8);
    return true;
  }
  if (dtype == FR_FLOAT32) {
    float as = (float)value;
    memcpy(bytes, &as, 4);
    return !isinf(as) || isinf(value);
  }
  bool half = dtype == FR_FLOAT16; /* a bfloat16 is made of a float, as ml_dtypes makes it */
  uint16_t as = half ? fr_float16_bits(value, 10) : fr_float16_bits((float)value, 7);
  memcpy(bytes, &as, 2);
  return (as & 0x7fff) != (half ? 0x7c00 : 0x7f80) || isinf(value);
}

/* The bytes of an integer as a dtype; false where it does not fit, and of dtypes that no number has. Floats are
 * made of a C float, as in Python's path. */
static inline bool fr_integer_bytes(int dtype, int64_t value, void* bytes) {
  if (dtype > FR_INT64) {
    if (dtype <= FR_FLOAT64) fr_float_bytes(dtype, (float)value, bytes);
    return dtype <= FR_FLOAT64;
  }
  if (dtype == FR_BOOL) value = value != 0;
  bool has_sign = dtype >= FR_INT8;
  int bits = 8 * fr_item_bytes[dtype] - has_sign;
  int64_t most = bits < 64 ? (int64_t)((UINT64_C(1) << bits) - 1) : INT64_MAX, least = has_sign ? -most - 1 : 0;
  memcpy(bytes, &value, fr_item_bytes[dtype]); /* the low ones come first */
  return value >= least && value <= most;
}

#endif
