// Atomics that need no atomic instructions on the CPU: those of threadgroup memory, which one thread
// runs alone, and sums of integers, which each thread may begin on its own.
#pragma once

namespace fr {
namespace core {
// An atomic that no other thread sees.
template <class T> struct own_atomic : atomic<T> {};
}  // namespace core

// What threadgroup memory holds in place of atomics.
template <class T> struct owned { using type = T; };
template <class T> struct owned<core::atomic<T>> { using type = core::own_atomic<T>; };
template <class T> using owned_t = typename owned<T>::type;

// The first elements of an output that gets nothing but additions, added up by themselves for a part
// of a launch. Sums of integers do not depend on the order.
template <class T> struct tally {
  static constexpr size_t KEPT = 4096;
  core::atomic<T>* to;
  alignas(64) T sums[KEPT];

  explicit tally(void* output) : to(static_cast<core::atomic<T>*>(output)) {
    if constexpr (!detail::alone)
      for (size_t i = 0; i < KEPT; ++i) sums[i] = 0;
  }
  ~tally() {
    if constexpr (!detail::alone)
      for (size_t i = 0; i < KEPT; ++i)
        if (sums[i]) detail::atomic_add(&to[i].value, sums[i], metal::memory_order_relaxed);
  }
  tally(const tally&) = delete;

  FR_FN void add(size_t i, T v) {
    if constexpr (!detail::alone) {
      if (i < KEPT) sums[i] = detail::swap_add::call(sums[i], v);
      else detail::atomic_add(&to[i].value, v, metal::memory_order_relaxed);
    } else {
      to[i].value = detail::swap_add::call(to[i].value, v);
    }
  }
};
// What a body has in place of the output: a pointer, which a lambda may copy.
template <class T> struct tallied {
  tally<T>* of;

  struct place {
    tally<T>* of;
    size_t index;
    FR_FN place operator&() const { return *this; }
  };

  FR_FN tallied(tally<T>& t) : of(&t) {}
  template <class I> FR_FN place operator[](I i) const { return {of, size_t(i)}; }
};

namespace metal {
template <class P> FR_FN auto atomic_fetch_add_explicit(P place, decltype(place.of->sums[0] + 0) v, memory_order) {
  place.of->add(place.index, v);
}

template <class T> FR_FN T atomic_load_explicit(const volatile core::own_atomic<T>* p, memory_order) {
  return const_cast<const core::own_atomic<T>*>(p)->value;
}
template <class T>
FR_FN bool atomic_compare_exchange_weak_explicit(volatile core::own_atomic<T>* p, type_identity_t<T>* expected,
                                                 type_identity_t<T> desired, memory_order, memory_order) {
  T& now = const_cast<core::own_atomic<T>*>(p)->value;
  const bool same = detail::bits_of(now) == detail::bits_of(*expected);
  if (same) now = desired;
  else *expected = now;
  return same;
}
#define FR_OWN(R, NAME, VALUE)                                                                        \
  template <class T>                                                                                  \
  FR_FN R atomic_##NAME##_explicit(volatile core::own_atomic<T>* p, type_identity_t<T> v, memory_order) { \
    T& now = const_cast<core::own_atomic<T>*>(p)->value;                                              \
    const T before = now;                                                                             \
    now = static_cast<T>(VALUE);                                                                      \
    return R(before);                                                                                 \
  }
FR_OWN(T, fetch_add, detail::swap_add::call(before, v))
FR_OWN(T, fetch_sub, detail::swap_sub::call(before, v))
FR_OWN(T, fetch_and, before & v) FR_OWN(T, fetch_or, before | v) FR_OWN(T, fetch_xor, before ^ v)
FR_OWN(T, fetch_min, detail::fn_min::call(before, v)) FR_OWN(T, fetch_max, detail::fn_max::call(before, v))
FR_OWN(void, store, v) FR_OWN(T, exchange, v)
FR_OWN(void, min, detail::fn_min::call(before, v)) FR_OWN(void, max, detail::fn_max::call(before, v))
#undef FR_OWN
}  // namespace metal
}  // namespace fr
