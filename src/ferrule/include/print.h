// printf, with CUDA's formats, and Metal's logs, in texts that name one of them (FR_PRINTS). On the CPU what is
// printed goes to the runtime, on a GPU into a buffer of the module; `ferrule.tools.printing` shows both.
#pragma once

#include "values.h"
#if FR_CUDA
#include "cuda_print.h"
#endif

namespace fr {
// Prints a message: printf's (level -1), or that of a log, which is a line.
FR_DECL inline void print(int level, const char* subsystem, const char* category, const char* format,
                   const print_value* values, unsigned count);

namespace metal {
// As CUDA's, it gives the number of values.
template <class... A> FR_FN int printf(const char* format, A... values) {
  const print_value list[] = {detail::printed(values)..., print_value{}};
  print(-1, nullptr, nullptr, format, list, sizeof...(A));
  return sizeof...(A);
}

enum os_log_type : int { os_log_type_debug, os_log_type_info, os_log_type_default, os_log_type_error, os_log_type_fault };

struct os_log {
  const char *subsystem, *category;
  FR_DECL constexpr os_log(const char* s, const char* c) : subsystem(s), category(c) {}
  template <class... A> FR_FN void log_with_type(os_log_type type, const char* format, A... values) const {
    const print_value list[] = {detail::printed(values)..., print_value{}};
    print(int(type), subsystem, category, format, list, sizeof...(A));
  }
#define FR_LOG(NAME, TYPE)                                                     \
  template <class... A> FR_FN void NAME(const char* format, A... values) const { \
    log_with_type(os_log_type_##TYPE, format, values...);                        \
  }
  FR_LOG(log_debug, debug) FR_LOG(log_info, info) FR_LOG(log, default) FR_LOG(log_error, error)
  FR_LOG(log_fault, fault)
#undef FR_LOG
};
static FR_DECL const os_log os_log_default(nullptr, nullptr);
}  // namespace metal

namespace mlx {
using metal::os_log;  // as MLX's own is with Metal 3.2
}

#if FR_CUDA
// The sizes of the launch, which each thread writes down before the body runs.
FR_DECL launch& printing_launch() {
  __shared__ launch l;
  return l;
}

FR_DECL inline void print(int level, const char* subsystem, const char* category, const char* format,
                          const print_value* values, unsigned count) {
  const group g(printing_launch());
  const metal::uint3 at = g.threadgroup_position_in_grid, p = g.position(), n = g.threadgroups_per_grid;
  const fr_print::place place = {
      (uint64_t(at.z) * n.y + at.y) * n.x + at.x, g.index(p), {at.x, at.y, at.z}, {p.x, p.y, p.z}};
  fr_print::write(place, level, subsystem, category, format, reinterpret_cast<const fr_print::value*>(values), count);
}
#else
// fr_print_place and fr_print_message of runtime/runtime.h.
struct print_place {
  uint64_t group;
  unsigned thread, group_at[3], thread_at[3];
};
struct print_message {
  print_place place;
  int level;
  unsigned count;
  const char *kernel, *format, *subsystem, *category;
  const print_value* values;
};

FR_QUIET __attribute__((noinline)) inline void print(int level, const char* subsystem, const char* category, const char* format,
                                            const print_value* values, unsigned count) {
  const group& g = *fr_fibers->where;
  const unsigned i = self().index;
  const metal::uint3 at = g.threadgroup_position_in_grid, p = g.position(i), n = g.threadgroups_per_grid;
  const print_message m = {
      {(uint64_t(at.z) * n.y + at.y) * n.x + at.x, i, {at.x, at.y, at.z}, {p.x, p.y, p.z}},
      level, count, FR_PRINTS, format, subsystem, category, values};
  g.runs->print(g.runs, &m);
}
#endif
}  // namespace fr
