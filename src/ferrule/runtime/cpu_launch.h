/* How a kernel on the CPU is launched. Knows no array library; valid as C11 and as C++17. */
#ifndef FERRULE_CPU_LAUNCH_H
#define FERRULE_CPU_LAUNCH_H

#include <stdbool.h>
#include <stdint.h>

enum { FR_SLICE = 200000000 }; /* nanoseconds after which Python sees its signals */

/* `fr::launch` of include/cpu.h. */
typedef struct {
  void* const* buffers;
  const int* const* shapes;
  const int64_t* const* strides;
  const int* ndims;
  uint32_t grid[3], threadgroup[3], groups[3], block;
} fr_cpu_launch;

/* `form_of` of devices/cpu/program.py as bits. */
static inline uint32_t fr_cpu_form(const uint32_t* grid, const uint32_t* threadgroup) {
  uint32_t x = threadgroup[0], y = threadgroup[1], z = threadgroup[2];
  bool row = y == 1 && z == 1;
  bool whole = row || (x % 32 == 0 && (!x || grid[0] % x % 32 == 0)); /* divides where it must */
  return (x * y * z <= 32) | (uint32_t)whole << 1 |
         (uint32_t)row << 2 | (uint32_t)(x % 32 == 0) << 3;
}

/* Fills in the sizes of a launch whose block is known. Returns how many units of work it has: blocks
 * of the grid's rows, or threadgroups. */
static inline uint64_t fr_cpu_units(fr_cpu_launch* l, const uint32_t* grid, const uint32_t* threadgroup,
                                    bool over_grid) {
  for (int i = 0; i < 3; i++) {
    l->grid[i] = grid[i];
    l->threadgroup[i] = threadgroup[i];
    l->groups[i] = threadgroup[i] == 1 ? grid[i] : (grid[i] + threadgroup[i] - 1) / threadgroup[i];
  }
  uint64_t along_x = over_grid ? (grid[0] + l->block - 1) / l->block : l->groups[0];
  return over_grid ? along_x * grid[1] * grid[2] : along_x * l->groups[1] * l->groups[2];
}

#endif
