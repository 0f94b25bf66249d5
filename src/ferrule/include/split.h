// Kernels that synchronise, as loops over the lanes that are split at each barrier and operation.
//
// `source/loops/split.py` writes such loops: what a lane keeps from one loop to the next lies in arrays
// with one element per lane; operations of a simdgroup work on those arrays. A mask is an array of
// int, one per lane; a null mask means that all lanes are active.
#pragma once
#include "tiles.h"

extern "C" int sched_yield();

// An array with one element per lane begins where a vector does: a vector that was just stored is then
// loaded as it is, and not from two stores, for which processors wait.
#define FR_LANES alignas(64)

namespace fr {

// What holds a lane's variable of type T: without const, so that each lane can be initialised.
template <class T> using storage_t = metal::remove_const_t<T>;

// An array of them, one for each lane; memory alone where the type cannot be made from nothing.
template <class T, unsigned N, bool MADE = __is_constructible(storage_t<T>)> struct lanes_of {
  using type = storage_t<T>[N];
};
template <class T, unsigned N> struct raw {
  alignas(T) unsigned char bytes[N * sizeof(T)];
  FR_FN T& operator[](unsigned i) { return reinterpret_cast<T*>(bytes)[i]; }
};
template <class T, unsigned N> struct lanes_of<T, N, false> { using type = raw<storage_t<T>, N>; };
template <class T, unsigned N> struct lanes_of<metal::simdgroup_matrix<T, 8, 8>, N, true> {
  using type = split::tiles<T, N>;
};
template <class T, unsigned N> using lanes_t = typename lanes_of<storage_t<T>, N>::type;

// What `auto x = e;` makes of an expression's type.
template <class T> using value_t = detail::decay_t<T>;

// Names a type's object at the level of the group, for decltype alone; never read or written.
template <class T> struct named {
  alignas(T) static inline unsigned char bytes[sizeof(T)];
  static FR_FN T& get() { return *reinterpret_cast<T*>(bytes); }
};

// What `new` makes in a lane's variable: a value of a type that need not be one to assign to.
template <class T> struct made {
  T value;
  FR_FN static void* operator new(__SIZE_TYPE__, void* place) { return place; }
};

// A lane's reference: to what exists, or to a value that is kept.
template <class T> struct reference {
  storage_t<T> value;
  FR_FN void set(const T& v) { value = v; }
  FR_FN const T& get() const { return value; }
};
template <class T> struct reference<T&> {
  T* to;
  FR_FN void set(T& v) { to = &v; }
  FR_FN T& get() const { return *to; }
};

// What a loop takes of a lane's variable: a number itself, or else a reference. What was never set may
// be no bool.
namespace split {
template <class T>
using taken_t = metal::conditional_t<metal::is_arithmetic_v<T> && !metal::is_same_v<T, bool>, T, T&>;
}

struct at_lane {
  unsigned index;
};

namespace split {

FR_FN bool any(const int* mask, unsigned n) {
  int a = 0;
  for (unsigned i = 0; i < n; ++i) a |= mask[i];
  return a != 0;
}
FR_FN void all(int* mask, unsigned n) {
  for (unsigned i = 0; i < n; ++i) mask[i] = 1;
}
FR_FN void copy(int* mask, const int* from, unsigned n) {
  if (from) for (unsigned i = 0; i < n; ++i) mask[i] = from[i];
  else all(mask, n);
}
// The lanes of `from` where `condition` is true, and where it is not.
FR_FN void both(int* yes, int* no, const int* from, const int* condition, unsigned n) {
  for (unsigned i = 0; i < n; ++i) {
    const int active = from ? from[i] : 1;
    yes[i] = active & condition[i];
    no[i] = active & (condition[i] ^ 1);
  }
}

FR_FN bool each(const int* mask, unsigned n) {
  int a = 1;
  for (unsigned i = 0; i < n; ++i) a &= mask[i];
  return a != 0;
}
// One more than the last active lane.
FR_FN unsigned end(const int* mask, unsigned n) {
  while (n && !mask[n - 1]) --n;
  return n;
}

// The first active lane; n where there is none.
FR_FN unsigned first(const int* mask, unsigned n) {
  unsigned i = 0;
  if (mask) while (i < n && !mask[i]) ++i;
  return i;
}

// The rounds of `for (T i = a; i < bound; i += step)` where a counts up from lane to lane.
struct rounds {
  int64_t first, end, step;  // of the first lane, active or not
  bool together;             // in each round, the lanes that are left in the loop are the first ones
  FR_FN unsigned lanes(int64_t at, unsigned n) const { return end - at < n ? unsigned(end - at) : n; }
};
// `value` is that of lane `lane`. Where a number may wrap, each lane goes its own way.
template <class T, class B, class S>
FR_FN rounds rounds_of(T value, unsigned lane, unsigned n, B bound, S step) {
  using C = decltype(value + bound);
  if constexpr (!metal::is_integral_v<B> || !metal::is_integral_v<S>) return {0, 0, 0, false};
  else {
    constexpr int64_t far = int64_t(1) << 62;
    constexpr uint64_t last = uint64_t(metal::numeric_limits<T>::max());
    constexpr int64_t most = last < uint64_t(far) ? int64_t(last) : far;
    const int64_t a = int64_t(value) - int64_t(lane), b = int64_t(C(bound)), s = int64_t(step);
    const bool whole = metal::is_unsigned_v<C> && b < 0;  // more than an int64_t holds
    const bool together = a >= 0 && a <= most - n && s > 0 && s <= most - n && b <= most - n - s;
    return {a, b, s, together && !whole};
  }
}

// Ask for what is a page behind n elements. Processors do so by themselves, but not over the end of a
// page; often a row ends there, and the next unit's begins.
template <class T> FR_FN void fetch_ahead(T* p, unsigned n) {
  for (unsigned i = 0; i < n * sizeof(T); i += 64) ::fr::detail::prefetch_line(p, 4096 + i);
}

// The active lanes of the simdgroup that starts at lane `s`, as bits.
FR_FN unsigned bits_at(unsigned s, unsigned n, const int* mask) {
  const unsigned there = n - s >= 32 ? FULL_MASK : (1u << (n - s)) - 1;
  if (!mask) return there;
  unsigned b = 0;
  if (there == FULL_MASK) {
    for (unsigned i = 0; i < 32; ++i) b |= (unsigned(mask[s + i]) & 1u) << i;
  } else {
    for (unsigned i = s; i < n; ++i) b |= (unsigned(mask[i]) & 1u) << (i - s);
  }
  return b;
}

#define FR_EACH_SIMDGROUP                                     \
  for (unsigned s = 0; s < n; s += 32)                        \
    if (const unsigned m = bits_at(s, n, mask))

#define FR_OPERATION(PREFIX, NAME, ...)                                                    \
  template <class T> FR_FN void PREFIX##_##NAME(T* v, unsigned n, const int* mask) {       \
    FR_EACH_SIMDGROUP lanes::__VA_ARGS__(v + s, m);                                        \
  }
FR_OPERATIONS(simd, 32) FR_OPERATIONS(quad, 4)
#undef FR_OPERATION

#define FR_UNIFORM(PREFIX, LANES, NAME, OP)                                                \
  template <class T> FR_FN T uniform_simd_##NAME(T* v, unsigned n, const int* mask) {      \
    const unsigned m = bits_at(0, n, mask);                                                \
    return m ? lanes::reduced<OP>(v, m) : T();                                             \
  }
FR_REDUCTIONS(FR_UNIFORM, simd, 32)
#undef FR_UNIFORM

// An operand that is one number for all lanes, or an array with one per lane.
FR_FN unsigned from(unsigned k, unsigned) { return k; }
FR_FN const unsigned* from(const unsigned* k, unsigned s) { return k + s; }

#define FR_MOVE(PREFIX, LANES, NAME, SOURCE)                                               \
  template <class T, class K>                                                              \
  FR_FN void PREFIX##_##NAME(T* v, K k, unsigned n, const int* mask) {                     \
    FR_EACH_SIMDGROUP lanes::NAME<LANES>(v + s, from(k, s), m);                            \
  }
FR_MOVES(FR_MOVE, simd, 32) FR_MOVES(FR_MOVE, quad, 4)
#undef FR_MOVE

#define FR_FILL(PREFIX, LANES, NAME, SOURCE, INSIDE)                                         \
  template <class T, class K, class M>                                                       \
  FR_FN void PREFIX##_##NAME(T* v, T* filling, K k, M modulo, unsigned n, const int* mask) { \
    FR_EACH_SIMDGROUP lanes::NAME<LANES>(v + s, filling + s, from(k, s), from(modulo, s), m); \
  }                                                                                          \
  template <class T, class K>                                                                \
  FR_FN void PREFIX##_##NAME(T* v, T* filling, K k, unsigned n, const int* mask) {           \
    PREFIX##_##NAME(v, filling, k, unsigned(LANES), n, mask);                                \
  }
FR_FILLS(FR_FILL, simd, 32) FR_FILLS(FR_FILL, quad, 4)
#undef FR_FILL

template <class T> FR_FN T uniform_simd_broadcast_first(T* v, unsigned n, const int* mask) {
  const unsigned m = bits_at(0, n, mask);
  return m ? v[__builtin_ctz(m)] : T();
}

// What each lane of `part`, of its group, is told.
#define FR_VOTE(PREFIX, LANES, NAME, R, RESULT, BITS, ...)                                   \
  FR_FN void PREFIX##_##NAME(R* r, __VA_ARGS__ unsigned n, const int* mask) {                \
    FR_EACH_SIMDGROUP {                                                                      \
      const unsigned b = BITS;                                                               \
      for (unsigned i = 0; i < 32; ++i) {                                                    \
        const unsigned part = lanes::part_of<LANES>(b, i);                                   \
        r[s + i] = RESULT;                                                                   \
      }                                                                                      \
    }                                                                                        \
  }
#define FR_VOTES(PREFIX, LANES)                                                                \
  FR_VOTE(PREFIX, LANES, any, bool, part != 0, lanes::bits(v + s, m), const int* v,)           \
  FR_VOTE(PREFIX, LANES, all, bool, part == 0, m & ~lanes::bits(v + s, m), const int* v,)      \
  FR_VOTE(PREFIX, LANES, ballot, metal::simd_vote, metal::simd_vote(part),                     \
          lanes::bits(v + s, m), const int* v,)                                                \
  FR_VOTE(PREFIX, LANES, active_threads_mask, metal::simd_vote, metal::simd_vote(part), m)     \
  FR_VOTE(PREFIX, LANES, is_first, bool, (part & ((1u << (i & (LANES - 1))) - 1)) == 0, m)
FR_VOTES(simd, 32) FR_VOTES(quad, 4)
#undef FR_VOTES
#undef FR_VOTE

FR_FN bool uniform_simd_any(const int* v, unsigned n, const int* mask) {
  return lanes::bits(v, bits_at(0, n, mask)) != 0;
}
FR_FN bool uniform_simd_all(const int* v, unsigned n, const int* mask) {
  const unsigned m = bits_at(0, n, mask);
  return (m & ~lanes::bits(v, m)) == 0;
}
FR_FN metal::simd_vote uniform_simd_ballot(const int* v, unsigned n, const int* mask) {
  return metal::simd_vote(lanes::bits(v, bits_at(0, n, mask)));
}
FR_FN metal::simd_vote uniform_simd_active_threads_mask(unsigned n, const int* mask) {
  return metal::simd_vote(bits_at(0, n, mask));
}

// Matrices of a whole simdgroup: operands by lane, as pointers. Lanes that take no part have none.
template <class D, class A, class B>
FR_FN void simdgroup_multiply(D** d, const A** a, const B** b, unsigned n, const int* mask) {
  FR_EACH_SIMDGROUP if (m == FULL_MASK)
    lanes::matrix_multiply<D, A, B, D>(d + s, a + s, b + s, nullptr);
}
template <class D, class A, class B, class C>
FR_FN void simdgroup_multiply_accumulate(D** d, const A** a, const B** b, const C** c, unsigned n,
                                         const int* mask) {
  FR_EACH_SIMDGROUP if (m == FULL_MASK)
    lanes::matrix_multiply<D, A, B, C>(d + s, a + s, b + s, c + s);
}

// Atomic additions of neighbouring lanes to neighbouring elements: v[i] to p[i]. A locked instruction
// costs as much for one element as for a whole word, so as many are changed together as fit.
template <class A> struct element_of;
template <class T> struct element_of<core::atomic<T>> { using type = T; };
template <class A> using element_t = typename element_of<A>::type;

#if defined(__GCC_HAVE_SYNC_COMPARE_AND_SWAP_16)
using wide __attribute__((may_alias)) = unsigned __int128;
#else
using wide __attribute__((may_alias)) = uint64_t;
#endif

template <class T>
FR_FN void atomic_add(core::atomic<T>* p, const T* v, unsigned n, const int* mask) {
  if constexpr (detail::alone) {
    if (mask) {
      for (unsigned i = 0; i < n; ++i)
        if (mask[i]) p[i].value = detail::swap_add::call(p[i].value, v[i]);
    } else {
      for (unsigned i = 0; i < n; ++i) p[i].value = detail::swap_add::call(p[i].value, v[i]);
    }
    return;
  }
  constexpr unsigned many = sizeof(wide) / sizeof(T);
  struct values {
    T at[many];
  };
  for (unsigned i = 0; i < n;) {
    if (reinterpret_cast<size_t>(p + i) % sizeof(wide) != 0 || n - i < many) {
      if (!mask || mask[i]) detail::atomic_add(&p[i].value, v[i], metal::memory_order_relaxed);
      ++i;
      continue;
    }
    int asked = mask ? 0 : 1;
    if (mask) for (unsigned k = 0; k < many; ++k) asked |= mask[i + k];
    volatile wide* word = reinterpret_cast<wide*>(p + i);
    for (wide old = *word; asked;) {
      values now = __builtin_bit_cast(values, old);
      for (unsigned k = 0; k < many; ++k)
        if (!mask || mask[i + k]) now.at[k] = detail::swap_add::call(now.at[k], v[i + k]);
      const wide seen = __sync_val_compare_and_swap(word, old, __builtin_bit_cast(wide, now));
      if (seen == old) break;
      old = seen;
    }
    i += many;
  }
}

// The same where nothing in the kernel touches the array but additions: then a lock for each page of
// memory does, with plain additions under it, which are vectorised. A thread keeps the lock that it
// took last until it needs another, or its unit of work ends.
constexpr size_t page = 4096;  // bytes; a page is mapped as a whole or not
struct alignas(64) page_lock {
  uint8_t taken;
};
static page_lock locks[1024];

FR_FN void let_go(worker* w) {
  uint8_t* l = w->held;
  if (!l) return;
  w->held = nullptr;
  __atomic_store_n(l, uint8_t(0), __ATOMIC_RELEASE);
}
FR_FN void hold(worker* w, const void* p) {
  uint8_t* l = &locks[reinterpret_cast<size_t>(p) / page % 1024].taken;
  if (w->held == l) return;
  let_go(w);
  const uint8_t mine = w->holding;
  for (unsigned turns = 0; __atomic_exchange_n(l, mine, __ATOMIC_ACQUIRE) == mine;)
    while (__atomic_load_n(l, __ATOMIC_RELAXED) == mine)
      if (++turns % 256 == 0) ::sched_yield();  // its holder may have lost its CPU
  w->held = l;
}

template <class T>
FR_FN void locked_add(worker* w, core::atomic<T>* p, const T* v, unsigned n, const int* mask) {
  if constexpr (detail::alone) {
    atomic_add(p, v, n, mask);
    return;
  }
  for (unsigned i = 0; i < n;) {
    const size_t left = (page - reinterpret_cast<size_t>(p + i) % page) / sizeof(T);
    const unsigned stop = n - i < left ? n : i + (left ? unsigned(left) : 1u);
    hold(w, p + i);
    if (mask) {
      for (unsigned k = i; k < stop; ++k)
        if (mask[k]) p[k].value = detail::swap_add::call(p[k].value, v[k]);
    } else {
      for (unsigned k = i; k < stop; ++k) p[k].value = detail::swap_add::call(p[k].value, v[k]);
    }
    i = stop;
  }
}
// For lanes one by one.
template <class T>
FR_FN T locked_fetch_add(worker* w, core::atomic<T>* p, metal::type_identity_t<T> v,
                         metal::memory_order order) {
  if constexpr (detail::alone) return detail::atomic_add(&p->value, v, order);
  hold(w, p);
  const T before = p->value;
  p->value = detail::swap_add::call(before, v);
  return before;
}

// Whether the lanes of a unit lie in one row of this length.
FR_FN bool in_row(const group& g, unsigned first, unsigned n, unsigned length) {
  if (length == 0) return false;
  const unsigned x = g.origin.x + g.position(first).x, last = x + n - 1;
  return last >= x && last <= 0x7fffffffu && x / length == last / length;
}

// Run `body(group, first thread, threads)` for each simdgroup, or each threadgroup as a whole.
template <class BODY>
FR_FN void simdgroups(const launch* l, uint64_t begin, uint64_t end, worker* w, BODY body) {
  group g(l);
  g.runs = w;
  for (uint64_t u = begin; u < end; ++u) {
    g.move_to(u);
    for (unsigned s = 0; s < g.n; s += 32) body(g, s, g.n - s < 32 ? g.n - s : 32u);
    let_go(w);
  }
}
template <class BODY>
FR_FN void threadgroups(const launch* l, uint64_t begin, uint64_t end, worker* w, BODY body) {
  group g(l);
  g.runs = w;
  for (uint64_t u = begin; u < end; ++u) {
    g.move_to(u);
    body(g, 0u, g.n);
    let_go(w);
  }
}

#undef FR_EACH_SIMDGROUP
}  // namespace split

namespace metal {
template <class T, class Q, class S = int>
FR_FN void simdgroup_load(fr::at_lane lane, simdgroup_matrix<T, 8, 8>& m, const Q* p, S stride = 8,
                          ulong2 origin = ulong2(0, 0), bool transpose = false) {
  lanes::matrix_load(lane.index, m, p, stride, origin, transpose);
}
template <class T, class Q, class S = int>
FR_FN void simdgroup_store(fr::at_lane lane, const simdgroup_matrix<T, 8, 8>& m, Q* p, S stride = 8,
                           ulong2 origin = ulong2(0, 0), bool transpose = false) {
  lanes::matrix_store(lane.index, m, p, stride, origin, transpose);
}
}  // namespace metal
}  // namespace fr
