// What threads print on a GPU: records in a buffer of the module, which `ferrule.tools.gpu_printing` empties after the
// launch. For Metal bodies through print.h; for bodies and units in CUDA (FR_CUDA_PRINTF) it is their printf, too.
#pragma once

namespace fr_print {

// print_value of values.h.
struct value {
  enum : int { SIGNED, UNSIGNED, FLOAT, TEXT, POINTER };
  int kind, bytes;
  unsigned long long bits;
};

// Whose line it is, as fr_print_place of runtime/runtime.h.
struct place {
  unsigned long long group;
  unsigned thread, group_at[3], thread_at[3];
};

// Behind it stand the values, then texts that end with NUL: the format, a log's subsystem and category, and those
// of the values that are texts. Its size is a multiple of 8.
struct record {
  unsigned size;
  int level;
  unsigned long long launch, group;
  unsigned thread, group_at[3], thread_at[3], count;
};

constexpr unsigned ROOM = 1 << 20;
struct buffer {
  unsigned long long used, dropped;  // bytes that were asked for; records for which there was no room
  unsigned long long bytes[ROOM / 8];
};

}  // namespace fr_print

extern "C" {
__device__ fr_print::buffer fr_printed;
}

namespace fr_print {

__device__ inline unsigned length(const char* text) {
  unsigned n = 0;
  if (text)
    while (text[n]) ++n;
  return n + 1;
}

__device__ inline char* copied(char* to, const char* text) {
  while (text && *text) *to++ = *text++;
  *to++ = 0;
  return to;
}

__device__ inline void write(const place& at, int level, const char* subsystem, const char* category,
                             const char* format, const value* values, unsigned count) {
  unsigned size = sizeof(record) + count * sizeof(value) + length(format) + length(subsystem) + length(category);
  for (unsigned i = 0; i < count; ++i)
    if (values[i].kind == value::TEXT) size += length(reinterpret_cast<const char*>(values[i].bits));
  size = (size + 7) / 8 * 8;
  // What finds no room leaves what was used as it is: a smaller one may still fit.
  unsigned long long used = fr_printed.used, seen;
  do {
    seen = used;
    if (seen + size > ROOM) {
      atomicAdd(&fr_printed.dropped, 1ull);
      return;
    }
    used = atomicCAS(&fr_printed.used, seen, seen + size);
  } while (used != seen);
  char* to = reinterpret_cast<char*>(fr_printed.bytes) + seen;
  record& r = *reinterpret_cast<record*>(to);
  r.level = level, r.group = at.group, r.thread = at.thread, r.count = count;
  asm volatile("mov.u64 %0, %%gridid;" : "=l"(r.launch));
  for (int i = 0; i < 3; ++i) r.group_at[i] = at.group_at[i], r.thread_at[i] = at.thread_at[i];
  value* list = reinterpret_cast<value*>(to + sizeof(record));
  for (unsigned i = 0; i < count; ++i) list[i] = values[i];
  to = copied(copied(copied(reinterpret_cast<char*>(list + count), format), subsystem), category);
  for (unsigned i = 0; i < count; ++i)
    if (values[i].kind == value::TEXT) to = copied(to, reinterpret_cast<const char*>(values[i].bits));
  __threadfence();
  r.size = size;  // at last: what has none is not whole
}

#ifdef FR_CUDA_PRINTF
__device__ inline value made(int kind, int bytes, unsigned long long bits) { return {kind, bytes, bits}; }
__device__ inline value number(double v) { return made(value::FLOAT, 8, __double_as_longlong(v)); }

template <class T> __device__ inline value printed(const T& v) {
  if constexpr (__is_class(T) || __is_union(T)) return number(double(float(v)));  // __half, __nv_bfloat16 …
  else if constexpr (__is_enum(T)) return printed(static_cast<__underlying_type(T)>(v));
  else if constexpr (T(0.5) != T(0)) return number(double(v));
  else {
    const auto promoted = +v;
    return made(decltype(promoted)(-1) < decltype(promoted)(0) ? value::SIGNED : value::UNSIGNED,
                int(sizeof promoted), static_cast<unsigned long long>(promoted));
  }
}
__device__ inline value printed(const bool& v) { return made(value::SIGNED, 4, v); }
template <class T> __device__ inline value printed(T* const& v) {
  return made(value::POINTER, 8, reinterpret_cast<unsigned long long>(v));
}
__device__ inline value printed(const char* const& v) {
  return made(value::TEXT, 8, reinterpret_cast<unsigned long long>(v));
}
__device__ inline value printed(char* const& v) { return printed(static_cast<const char*>(v)); }
__device__ inline value printed(decltype(nullptr) const&) { return made(value::POINTER, 8, 0); }
#endif

}  // namespace fr_print

#ifdef FR_CUDA_PRINTF
template <class... A> __device__ inline int fr_printf(const char* format, A... values) {
  const fr_print::value list[] = {fr_print::printed(values)..., fr_print::value{}};
  const uint3 &b = blockIdx, &t = threadIdx;
  const fr_print::place at = {(b.z * static_cast<unsigned long long>(gridDim.y) + b.y) * gridDim.x + b.x,
                              (t.z * blockDim.y + t.y) * blockDim.x + t.x, {b.x, b.y, b.z}, {t.x, t.y, t.z}};
  fr_print::write(at, -1, nullptr, nullptr, format, list, sizeof...(A));
  return sizeof...(A);
}
#define printf(...) fr_printf(__VA_ARGS__)
#endif
