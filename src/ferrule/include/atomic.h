// Atomics of the Metal dialect on memory that also has other names: atomic<T> lays out as T, so
// that a pointer to an output may be cast to it. Address spaces are gone: one function serves
// device and threadgroup memory.
#ifndef FR_ATOMIC_H
#define FR_ATOMIC_H

namespace fr {
namespace core {
template <class T> struct atomic {
  T value;  // no constructor: threadgroup memory is not initialised
};
}  // namespace core

namespace detail {
using metal::memory_order;
using metal::type_identity_t;

struct swap_add {
  template <class T> FR_FN static T call(T a, T b) { return static_cast<T>(num<T>::add(a, b)); }
};
struct swap_sub {
  template <class T> FR_FN static T call(T a, T b) { return static_cast<T>(num<T>::sub(a, b)); }
};

#if !FR_CUDA
// ---- CPU: the compiler's __atomic builtins ----------------------------------------------------
// The builtins want a constant order: relaxed, which nearly every kernel asks for, or the strongest.
#define FR_ORDERED(statement)                           \
  if (order == metal::memory_order_relaxed) {           \
    constexpr int o = __ATOMIC_RELAXED;                 \
    statement;                                          \
  } else {                                              \
    constexpr int o = __ATOMIC_SEQ_CST;                 \
    statement;                                          \
  }
// A launch on one thread is alone with its memory: plain operations do, and can be vectorised.
#if defined(FR_ALONE)
constexpr bool alone = true;
#else
constexpr bool alone = false;
#endif
// Exchanges go by the bits: g++ keeps ints in registers there, but sends floats through the stack.
template <class T> using alias_t __attribute__((may_alias)) = bits_t<T>;
template <class T> FR_FN volatile alias_t<T>* alias(volatile T* p) {
  return reinterpret_cast<volatile alias_t<T>*>(p);
}
template <class T>
FR_FN bool swap_bits(volatile T* p, bits_t<T>& expected, bits_t<T> desired, memory_order order) {
  FR_ORDERED(return __atomic_compare_exchange_n(alias(p), &expected, desired, true, o, o))
}
template <class T> FR_FN T atomic_read(const volatile T* p, memory_order order) {
  T r;
  FR_ORDERED(__atomic_load(const_cast<T*>(p), &r, o))
  return r;
}
template <class T> FR_FN bool swap(volatile T* p, T& expected, T desired, memory_order order) {
  if constexpr (alone) {
    T& now = *const_cast<T*>(p);
    const bool same = bits_of(now) == bits_of(expected);
    if (same) now = desired;
    else expected = now;
    return same;
  }
  bits_t<T> old = bits_of(expected);
  const bool done = swap_bits(p, old, bits_of(desired), order);
  if (!done) expected = from_bits<T>(old);
  return done;
}
// old = *p; *p = F(old, v); return old, as a loop: for what no instruction does.
template <class F, class T> FR_FN T swap_loop(volatile T* p, T v, memory_order order) {
  if constexpr (alone) {
    T& now = *const_cast<T*>(p);
    const T before = now;
    now = static_cast<T>(F::call(before, v));
    return before;
  }
  bits_t<T> old = __atomic_load_n(alias(p), __ATOMIC_RELAXED);
  for (;;) {
    const T before = from_bits<T>(old);
    if (swap_bits(p, old, bits_of(static_cast<T>(F::call(before, v))), order)) return before;
  }
}
template <class T> FR_FN void atomic_write(volatile T* p, T v, memory_order order) {
  FR_ORDERED(__atomic_store(const_cast<T*>(p), &v, o))
}
template <class T> FR_FN T atomic_swap(volatile T* p, T v, memory_order order) {
  T r;
  FR_ORDERED(__atomic_exchange(const_cast<T*>(p), &v, &r, o))
  return r;
}
#define FR_HOST(name)                                                                \
  template <class T> FR_FN T atomic_##name(volatile T* p, T v, memory_order order) { \
    FR_ORDERED(return __atomic_fetch_##name(p, v, o))                                \
  }
FR_HOST(and) FR_HOST(or) FR_HOST(xor)
#undef FR_HOST
#define FR_HOST(name)                                                                \
  template <class T> FR_FN T atomic_##name(volatile T* p, T v, memory_order order) { \
    if constexpr (alone || float_v<T> || is_same_v<T, bool>) {                       \
      return swap_loop<swap_##name>(p, v, order);                                    \
    } else {                                                                         \
      FR_ORDERED(return __atomic_fetch_##name(p, v, o))                              \
    }                                                                                \
  }
FR_HOST(add) FR_HOST(sub)
#undef FR_HOST
// A maximum seldom changes anything: look before writing.
template <class F, class T> FR_FN T atomic_extreme(volatile T* p, T v, memory_order order) {
  T old = atomic_read(p, order);
  for (;;) {
    T next = F::call(old, v);
    if (bits_of(next) == bits_of(old) || swap(p, old, next, order)) return old;
  }
}
template <class T> FR_FN T atomic_max(volatile T* p, T v, memory_order order) {
  return atomic_extreme<fn_max>(p, v, order);
}
template <class T> FR_FN T atomic_min(volatile T* p, T v, memory_order order) {
  return atomic_extreme<fn_min>(p, v, order);
}
#undef FR_ORDERED
#else
// ---- CUDA: its own atomics are relaxed; a stronger order fences on both sides -----------------
template <class T> struct device_word { using type = T; };
template <> struct device_word<long> { using type = long long; };
template <> struct device_word<unsigned long> { using type = unsigned long long; };
template <class T> using device_word_t = typename device_word<T>::type;
template <class T> using device_bits_t = device_word_t<bits_t<T>>;
template <class T> FR_FN device_word_t<T>* word(volatile T* p) {
  return reinterpret_cast<device_word_t<T>*>(const_cast<T*>(p));
}
template <class T> FR_FN device_bits_t<T>* bits(volatile T* p) {
  return reinterpret_cast<device_bits_t<T>*>(const_cast<T*>(p));
}
template <class T> FR_FN device_bits_t<T> to_bits(T v) {
  return __builtin_bit_cast(device_bits_t<T>, v);
}
struct fenced {
  memory_order order;
  FR_FN explicit fenced(memory_order o) : order(o) {
    if (order != metal::memory_order_relaxed) ::__threadfence();
  }
  FR_FN ~fenced() {
    if (order != metal::memory_order_relaxed) ::__threadfence();
  }
};
template <class T> FR_FN T cas(volatile T* p, T expected, T desired) {
  if constexpr (sizeof(T) == 1) {
    // No byte-wide instruction: swap the byte inside its word.
    size_t a = reinterpret_cast<size_t>(p);
    unsigned* w = reinterpret_cast<unsigned*>(a & ~size_t(3));
    unsigned s = unsigned(a & 3) * 8, m = 0xffu << s, e = unsigned(to_bits(expected)) << s;
    unsigned d = unsigned(to_bits(desired)) << s, now = *const_cast<volatile unsigned*>(w);
    while ((now & m) == e) {
      unsigned seen = ::atomicCAS(w, now, (now & ~m) | d);
      if (seen == now) break;
      now = seen;
    }
    return __builtin_bit_cast(T, static_cast<unsigned char>((now & m) >> s));
  } else {
    return __builtin_bit_cast(T, ::atomicCAS(bits(p), to_bits(expected), to_bits(desired)));
  }
}
template <class T> FR_FN T atomic_read(const volatile T* p, memory_order order) {
  fenced f(order);
  using B = device_bits_t<T>;
  return __builtin_bit_cast(T, static_cast<B>(*reinterpret_cast<const volatile B*>(p)));
}
template <class T> FR_FN void atomic_write(volatile T* p, T v, memory_order order) {
  fenced f(order);
  *const_cast<volatile device_bits_t<T>*>(bits(p)) = to_bits(v);
}
template <class T> FR_FN bool swap(volatile T* p, T& expected, T desired, memory_order order) {
  fenced f(order);
  T old = cas(p, expected, desired);
  bool same = to_bits(old) == to_bits(expected);
  expected = old;
  return same;
}
template <class F, class T> FR_FN T swap_loop(volatile T* p, T v, memory_order order) {
  fenced f(order);
  T old = atomic_read(p, metal::memory_order_relaxed);
  while (!swap(p, old, static_cast<T>(F::call(old, v)), metal::memory_order_relaxed)) {
  }
  return old;
}
struct swap_second {
  template <class T> FR_FN static T call(T, T b) { return b; }
};
template <class T> FR_FN T atomic_swap(volatile T* p, T v, memory_order order) {
  if constexpr (sizeof(T) < 4) {
    return swap_loop<swap_second>(p, v, order);
  } else {
    fenced f(order);
    return __builtin_bit_cast(T, ::atomicExch(bits(p), to_bits(v)));
  }
}
template <class T> FR_FN T atomic_add(volatile T* p, T v, memory_order order) {
  if constexpr (is_same_v<T, float> || is_same_v<T, double>) {
    fenced f(order);
    return ::atomicAdd(word(p), v);
  } else if constexpr (is_same_v<T, half>) {
    fenced f(order);
    uint16_t r;
    asm volatile("atom.add.noftz.f16 %0, [%1], %2;"
                 : "=h"(r) : "l"(const_cast<half*>(p)), "h"(v.bits) : "memory");
    return half::from_bits(r);
  } else if constexpr (int_v<T> && sizeof(T) >= 4) {
    fenced f(order);
    return static_cast<T>(::atomicAdd(bits(p), to_bits(v)));
  } else {
    return swap_loop<swap_add>(p, v, order);
  }
}
template <class T> FR_FN T atomic_sub(volatile T* p, T v, memory_order order) {
  if constexpr (int_v<T> && sizeof(T) >= 4) {
    return atomic_add(p, static_cast<T>(0 - static_cast<bits_t<T>>(v)), order);
  } else if constexpr (float_v<T>) {
    return atomic_add(p, num<T>::neg(v), order);
  } else {
    return swap_loop<swap_sub>(p, v, order);
  }
}
#define FR_DEVICE(name, call, F, WHERE, P, V)                                        \
  template <class T> FR_FN T atomic_##name(volatile T* p, T v, memory_order order) { \
    if constexpr ((WHERE) && sizeof(T) >= 4) {                                       \
      fenced f(order);                                                               \
      return static_cast<T>(::call(P, V));                                           \
    } else {                                                                         \
      return swap_loop<F>(p, v, order);                                              \
    }                                                                                \
  }
FR_DEVICE(and, atomicAnd, op_and, true, bits(p), to_bits(v))
FR_DEVICE(or, atomicOr, op_or, true, bits(p), to_bits(v))
FR_DEVICE(xor, atomicXor, op_xor, true, bits(p), to_bits(v))
FR_DEVICE(max, atomicMax, fn_max, int_v<T>, word(p), static_cast<device_word_t<T>>(v))
FR_DEVICE(min, atomicMin, fn_min, int_v<T>, word(p), static_cast<device_word_t<T>>(v))
#undef FR_DEVICE
#endif
}  // namespace detail

namespace metal {
using core::atomic;
using atomic_int = atomic<int>;
using atomic_uint = atomic<uint>;
using atomic_long = atomic<int64_t>;
using atomic_ulong = atomic<uint64_t>;
using atomic_bool = atomic<bool>;
using atomic_float = atomic<float>;

// The value comes as T itself (type_identity): a literal 1 adds to a uint.
template <class T> FR_FN T atomic_load_explicit(const volatile atomic<T>* p, memory_order order) {
  return detail::atomic_read(&p->value, order);
}
template <class T>
FR_FN bool atomic_compare_exchange_weak_explicit(volatile atomic<T>* p, type_identity_t<T>* expected,
                                                 type_identity_t<T> desired, memory_order success,
                                                 memory_order failure) {
  memory_order order = success == memory_order_relaxed ? failure : success;
  return detail::swap(&p->value, *expected, desired, order);
}
#define FR_EXPLICIT(R, name, function)                                                  \
  template <class T>                                                                    \
  FR_FN R name##_explicit(volatile atomic<T>* p, type_identity_t<T> v, memory_order order) { \
    return R(detail::function(&p->value, v, order));                                    \
  }
#define FR_FETCH(name) FR_EXPLICIT(T, atomic_fetch_##name, atomic_##name)
FR_FETCH(add) FR_FETCH(sub) FR_FETCH(and) FR_FETCH(or) FR_FETCH(xor) FR_FETCH(min) FR_FETCH(max)
FR_EXPLICIT(void, atomic_store, atomic_write) FR_EXPLICIT(T, atomic_exchange, atomic_swap)
// Metal 3.1's 64-bit forms without a result.
FR_EXPLICIT(void, atomic_max, atomic_max) FR_EXPLICIT(void, atomic_min, atomic_min)
#undef FR_FETCH
#undef FR_EXPLICIT
}  // namespace metal
}  // namespace fr

#endif
