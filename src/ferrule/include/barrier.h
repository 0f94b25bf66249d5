// The flags and scopes that Metal's barriers and fences name; every barrier makes all threads wait,
// whatever its flags.
#pragma once

namespace fr {
namespace metal {
enum class mem_flags : unsigned {
  mem_none = 0,
  mem_device = 1,
  mem_threadgroup = 2,
  mem_texture = 4,
  mem_threadgroup_imageblock = 8,
  mem_object_data = 16,
};
FR_FN constexpr mem_flags operator|(mem_flags a, mem_flags b) {
  return mem_flags(unsigned(a) | unsigned(b));
}
FR_FN constexpr mem_flags operator&(mem_flags a, mem_flags b) {
  return mem_flags(unsigned(a) & unsigned(b));
}
enum thread_scope : int {
  thread_scope_thread = 0,
  thread_scope_simdgroup = 1,
  thread_scope_threadgroup = 2,
  thread_scope_device = 3,
};
// Orders this thread's own accesses; nobody waits.
FR_FN void atomic_thread_fence(mem_flags, memory_order order, thread_scope = thread_scope_device) {
#if FR_CUDA
  if (order != memory_order_relaxed) ::__threadfence();
#else
  if (order != memory_order_relaxed) __atomic_thread_fence(__ATOMIC_SEQ_CST);
#endif
}
}  // namespace metal
}  // namespace fr
