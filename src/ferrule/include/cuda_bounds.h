// Accesses to a kernel's arrays by an index that may lie outside: loads give zero there, stores and
// atomics do nothing. `source/cuda/bounds.py` writes these in place of subscripts. With FR_COUNTED, they are
// counted (cuda_counted.h).
#pragma once
#if defined(FR_COUNTED)
#include "cuda_counted.h"
#endif

namespace fr {

// The elements of an array: `count` of them, from `first` on, as subscripts count. Where a stride is
// negative, there are some before the one that the array's address names.
struct extent {
  int64_t first;
  uint64_t count;
  uint32_t narrow;  // the count, but 2^31 at most
  uint32_t unused;
};

namespace bounds {

#if defined(__CUDACC_RTC__)
__device__ const
#else
static const
#endif
    uint64_t zeros[2] = {};

// One element to be written, where it is `there`.
template <class T> struct slot {
  T* at;
  bool there;
#if defined(FR_COUNTED)
  counted::spot by;
  int64_t index;
#endif
  FR_FN T value() const { return there ? *at : T{}; }
  FR_FN T put(const T& v) const {
#if defined(FR_COUNTED)
    by.stores(v, index);
#endif
    if (there) *at = v;
    return v;
  }
  FR_FN T operator=(const T& v) const { return put(v); }
  template <class V> FR_FN T operator=(const V& v) const {
    T t;
    t = v;
    return put(t);
  }
#define FR_COMPOUND(OP)                                    \
  template <class V> FR_FN T operator OP(const V & v) const { \
    T t = value();                                         \
    t OP v;                                                \
    return put(t);                                         \
  }
  FR_COMPOUND(+=) FR_COMPOUND(-=) FR_COMPOUND(*=) FR_COMPOUND(/=) FR_COMPOUND(%=)
  FR_COMPOUND(&=) FR_COMPOUND(|=) FR_COMPOUND(^=) FR_COMPOUND(<<=) FR_COMPOUND(>>=)
#undef FR_COMPOUND
#define FR_STEP(OP)                       \
  FR_FN T operator OP() const {           \
    T t = value();                        \
    OP t;                                 \
    return put(t);                        \
  }                                       \
  FR_FN T operator OP(int) const {        \
    const T old = value();                \
    T t = old;                            \
    OP t;                                 \
    put(t);                               \
    return old;                           \
  }
  FR_STEP(++) FR_STEP(--)
#undef FR_STEP
};

// The address of an atomic; null where there is none.
template <class T> struct cell {
  metal::atomic<T>* at;
};

// An array with its elements. Where all that it is asked for is `known` to be inside, nothing is compared.
template <class T, bool SHIFTED> struct view {
  T* at;
  extent of;
  bool known;
  using value = metal::remove_const_t<T>;
#if defined(FR_COUNTED)
  counted::spot by;
  FR_FN view(T* p, const extent& e, bool k, const counted::spot& s) : at(p), of(e), known(k), by(s) {}
  FR_FN view fr_on(unsigned line) const { return {at, of, known, by.on(line)}; }
#else
  FR_FN view(T* p, const extent& e, bool k) : at(p), of(e), known(k) {}
#endif

  // An index has the type that it has in the author's own arithmetic: a negative one is outside, and an
  // unsigned one has wrapped already. Up to 32 bits are compared as such.
  FR_FN bool has(int i) const {
    if (SHIFTED) return has(static_cast<long long>(i));
    return known | (static_cast<unsigned>(i) < of.narrow);  // no branch: the access is predicated
  }
  FR_FN bool has(unsigned i) const { return has(static_cast<unsigned long long>(i)); }
  FR_FN bool has(unsigned long long i) const {
    return known | ((SHIFTED ? i - static_cast<unsigned long long>(of.first) : i) < of.count);
  }
  FR_FN bool has(long long i) const { return has(static_cast<unsigned long long>(i)); }
  FR_FN bool has(long i) const { return has(static_cast<unsigned long long>(i)); }
  FR_FN bool has(unsigned long i) const { return has(static_cast<unsigned long long>(i)); }

  // The same, of an access.
  template <bool WRITES, class I> FR_FN bool holds(I i) const {
    const bool there = has(i);
#if defined(FR_COUNTED)
    if (!there) by.note(WRITES ? counted::WRITE : counted::READ, static_cast<int64_t>(i), of.count);
    else if (!WRITES) by.loads(at[i]);
#endif
    return there;
  }

  template <class I> FR_FN value fr_load(I i) const {
    if (holds<false>(i)) return at[i];
    return value{};
  }
  // Where a load is in a branch already: another branch would keep the compiler from moving it.
  template <class I> FR_FN value fr_read(I i) const {
    const T* from = holds<false>(i) ? at + i : reinterpret_cast<const T*>(zeros);
    return *from;
  }
#if !defined(FR_COUNTED)
  FR_FN value fr_read(unsigned i) const {
    if (SHIFTED) return fr_read(static_cast<unsigned long long>(i));
    const bool all = of.count >> 32;  // then none is outside
    const T* from = known | all | (i < static_cast<unsigned>(of.count)) ? at + i : reinterpret_cast<const T*>(zeros);
    return *from;
  }
  template <class I> FR_FN slot<T> fr_put(I i) const { return {at + i, has(i)}; }
#else
  template <class I> FR_FN slot<T> fr_put(I i) const { return {at + i, holds<true>(i), by, static_cast<int64_t>(i)}; }
#endif
  // For what takes a reference, which lives as long as the expression.
  template <class I> FR_FN T& fr_at(I i, T&& outside = T{}) const { return holds<!metal::is_const_v<T>>(i) ? at[i] : outside; }
};

template <class T, bool SHIFTED> struct view<metal::atomic<T>, SHIFTED> : view<T, SHIFTED> {
#if defined(FR_COUNTED)
  FR_FN view(metal::atomic<T>* p, const extent& e, bool k, const counted::spot& s)
      : view<T, SHIFTED>(&p->value, e, k, s) {}
  FR_FN view fr_on(unsigned line) const {
    return {reinterpret_cast<metal::atomic<T>*>(this->at), this->of, this->known, this->by.on(line)};
  }
#else
  FR_FN view(metal::atomic<T>* p, const extent& e, bool k) : view<T, SHIFTED>(&p->value, e, k) {}
#endif
  template <class I> FR_FN cell<T> fr_cell(I i) const {
    return {this->template holds<true>(i) ? reinterpret_cast<metal::atomic<T>*>(this->at + i) : nullptr};
  }
};

// The largest that a number gets which is not negative; not `known` where it is, or beyond 31 bits,
// where an author's int would be negative.
struct most {
  unsigned value;
  bool known;
  FR_FN most(unsigned v, bool k) : value(v), known(k && v < 1u << 31) {}
  template <class T> FR_FN explicit most(T v)
      : value(static_cast<unsigned>(v)),
        known(!(v < T(0)) && static_cast<unsigned long long>(v) < 1ull << 31) {}
  // Of what is not negative, and less than this by a number; 0 where that cannot be.
  FR_FN most fr_below(unsigned n) const { return {value < n ? 0 : value - n, known}; }
  FR_FN most fr_last() const { return {value - 1, known}; }
  // By what is the same for all.
  FR_FN most fr_over(most n) const {
    const bool fine = known && n.known && n.value;
    return {fine ? value / n.value : 0, fine};
  }
  FR_FN most fr_rest(most n) const { return {n.value - 1, known && n.known}; }
  FR_FN most fr_less(most n) const { return {value - n.value, known && n.known && value >= n.value}; }
  // If another number is known, too.
  FR_FN most fr_if(most n) const { return {value, known && n.known}; }
  FR_FN bool fr_within(const extent& e) const { return known & (value < e.narrow); }
};
FR_FN most operator+(most a, most b) { return {a.value + b.value, a.known && b.known}; }
FR_FN most operator*(most a, most b) {
  const unsigned long long v = static_cast<unsigned long long>(a.value) * b.value;
  return {static_cast<unsigned>(v), a.known && b.known && !(v >> 31)};
}
FR_FN most fr_larger(most a, most b) { return {a.value < b.value ? b.value : a.value, a.known && b.known}; }
FR_FN most fr_smaller(most a, most b) { return {a.value < b.value ? a.value : b.value, a.known && b.known}; }

}  // namespace bounds
// What texts name; authors' macros may have any other name.
template <class T, bool SHIFTED> using fr_view = bounds::view<T, SHIFTED>;
using fr_extent = extent;
using fr_most = bounds::most;

namespace metal {
template <class T> FR_FN T atomic_load_explicit(bounds::cell<T> c, memory_order order) {
  return c.at ? atomic_load_explicit(c.at, order) : T{};
}
template <class T>
FR_FN bool atomic_compare_exchange_weak_explicit(bounds::cell<T> c, type_identity_t<T>* expected,
                                                 type_identity_t<T> desired, memory_order success,
                                                 memory_order failure) {
  if (c.at) return atomic_compare_exchange_weak_explicit(c.at, expected, desired, success, failure);
  const T zero{};  // what is there, so that a loop ends that tries again
  using B = detail::bits_t<T>;
  const bool same = __builtin_bit_cast(B, *expected) == __builtin_bit_cast(B, zero);
  *expected = zero;
  return same;
}
#define FR_CELL(R, name)                                                                           \
  template <class T>                                                                               \
  FR_FN R atomic_##name##_explicit(bounds::cell<T> c, type_identity_t<T> v, memory_order order) {  \
    return c.at ? atomic_##name##_explicit(c.at, v, order) : R();                                  \
  }
FR_CELL(T, exchange) FR_CELL(T, fetch_add) FR_CELL(T, fetch_sub) FR_CELL(T, fetch_and)
FR_CELL(T, fetch_or) FR_CELL(T, fetch_xor) FR_CELL(T, fetch_min) FR_CELL(T, fetch_max)
FR_CELL(void, store) FR_CELL(void, max) FR_CELL(void, min)
#undef FR_CELL
}  // namespace metal

}  // namespace fr
