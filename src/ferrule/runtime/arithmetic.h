/* Arithmetic of rules on int64_t: division rounds down, as in Python, and no operands are undefined
 * behaviour. A division by zero, and a value that does not fit, is written to *status, where the
 * first one stays, and counts as 0 from then on: so one look at *status, at the end, is enough.
 * Valid as C11 and as C++17.
 */
#ifndef FERRULE_ARITHMETIC_H
#define FERRULE_ARITHMETIC_H

#include <stdint.h>

enum {
  FR_RULE_OK = 0,
  FR_RULE_MISMATCH = 1,      /* inputs contradict the rule, or an output's size would be < 0 */
  FR_RULE_ZERO_DIVISION = 2, /* an expression divides by zero */
  FR_RULE_OVERFLOW = 3,      /* the value of a part of an expression does not fit in int64_t */
  FR_RULE_LIMIT = 4          /* more than is handled here */
};

static inline int64_t fr_fault(int32_t* status, int32_t fault) {
  if (*status == FR_RULE_OK) *status = fault;
  return 0;
}

static inline int64_t fr_add(int64_t a, int64_t b, int32_t* status) {
  int64_t sum;
  return __builtin_add_overflow(a, b, &sum) ? fr_fault(status, FR_RULE_OVERFLOW) : sum;
}

static inline int64_t fr_sub(int64_t a, int64_t b, int32_t* status) {
  int64_t rest;
  return __builtin_sub_overflow(a, b, &rest) ? fr_fault(status, FR_RULE_OVERFLOW) : rest;
}

static inline int64_t fr_mul(int64_t a, int64_t b, int32_t* status) {
  int64_t product;
  return __builtin_mul_overflow(a, b, &product) ? fr_fault(status, FR_RULE_OVERFLOW) : product;
}

static inline int64_t fr_neg(int64_t a, int32_t* status) { return fr_sub(0, a, status); }

/* C rounds towards zero. A divisor of -1 stands apart because INT64_MIN / -1 does not fit, and the
 * processor traps on it, in a remainder as well. */
static inline int64_t fr_floordiv(int64_t a, int64_t b, int32_t* status) {
  if (b == 0) return fr_fault(status, FR_RULE_ZERO_DIVISION);
  if (b == -1) return fr_neg(a, status);
  return a / b - (a % b != 0 && (a < 0) != (b < 0));
}

static inline int64_t fr_ceildiv(int64_t a, int64_t b, int32_t* status) {
  if (b == 0) return fr_fault(status, FR_RULE_ZERO_DIVISION);
  if (b == -1) return fr_neg(a, status);
  return a / b + (a % b != 0 && (a < 0) == (b < 0));
}

static inline int64_t fr_mod(int64_t a, int64_t b, int32_t* status) {
  if (b == 0) return fr_fault(status, FR_RULE_ZERO_DIVISION);
  if (b == -1) return 0;
  int64_t rest = a % b;
  return rest != 0 && (rest < 0) != (b < 0) ? rest + b : rest;
}

static inline int64_t fr_min(int64_t a, int64_t b) { return b < a ? b : a; }
static inline int64_t fr_max(int64_t a, int64_t b) { return b > a ? b : a; }

/* The least power of 2 that is no less than a; 1 where a is less than 1. */
static inline int64_t fr_next_pow2(int64_t a, int32_t* status) {
  if (a <= 1) return 1;
  if (a > INT64_MAX / 2 + 1) return fr_fault(status, FR_RULE_OVERFLOW);
  return (int64_t)1 << (64 - __builtin_clzll((unsigned long long)(a - 1)));
}

#endif
