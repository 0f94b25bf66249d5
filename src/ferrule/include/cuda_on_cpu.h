// CUDA texts for g++, clang and zig: each thread of a block is a fiber (fiber.h). A text defines what
// it names (see cuda_kernel.h) and then includes this; source/cuda/on_cpu.py writes it.
//
// This one includes the C++ library: the author's text is in the global namespace, where CUDA has
// C's functions, too.
#pragma once
#define lerp fr_std_lerp  // C++20's <math.h> has it in the global namespace, where CUDA has none
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <float.h>
#include <limits.h>
#if defined(FR_STD_ARRAY)
#include <array>
#endif
#if defined(FR_STD_TUPLE)
#include <tuple>
#endif
#if defined(FR_STD_COMPLEX)
#include <complex>
#endif
#if defined(FR_STD_LIMITS)
#include <limits>
#endif
#if defined(FR_STD_TYPE_TRAITS)
#include <type_traits>
#include <utility>
#endif
// What names something of cuda::std that is not listed asks for all parts.
#if defined(FR_STD_ARRAY) && defined(FR_STD_TUPLE) && defined(FR_STD_COMPLEX) && \
    defined(FR_STD_LIMITS) && defined(FR_STD_TYPE_TRAITS)
#include <algorithm>
#include <bit>
#include <functional>
#include <initializer_list>
#include <numeric>
#include <optional>
#include <span>
#endif
#undef lerp
#undef assert
#undef INFINITY
#undef NAN

#define FR_FIBERS 1
#define FR_CUDA_LANES 1
#include "checked.h"
#include "types.h"
#include "math.h"
#include "functions.h"
#include "arithmetic.h"
#include "atomic.h"
#include "barrier.h"
#include "cpu.h"
#include "matrix.h"
#include "simd.h"
#include "fiber.h"
#undef INFINITY
#undef NAN
#define INFINITY __builtin_inff()
#define NAN __builtin_nanf("")

#include "cuda_cpu_types.h"
#include "cuda_cpu_math.h"
#ifdef FR_FP8
#undef FR_FP8
#include "cuda_cpu_fp8.h"
#endif
#include "cuda_cpu_warps.h"
#include "cuda_cpu_memory.h"
#include "cuda_cpu_atomics.h"
#include "cuda_cpu_groups.h"
#include "cuda_cpu_ptx.h"
#include "cuda_cpu_std.h"

// ---- what nvcc knows by itself --------------------------------------------------------------------
#if defined(FR_CHECKED)  // what is inlined is blamed on the author's line that calls it
#define __global__ __attribute__((noinline, flatten))
#else
#define __global__
#endif
#define __device__
#define __host__
#define __constant__
#define __managed__
#define __grid_constant__
#define __forceinline__ inline
#define __noinline__
#define __launch_bounds__(...)
#define __maxnreg__(...)
#define __cluster_dims__(...)
#define __align__(N) __attribute__((aligned(N)))
#define __builtin_align__(N) __attribute__((aligned(N)))
#define __CUDACC__ 1
#define __CUDACC_RTC__ 1
// The oldest GPU that has what most authors ask for, and of what is not here but little.
#define __CUDA_ARCH__ 800
#define CUDART_INF_F INFINITY
#define CUDART_NAN_F NAN
#define CUDART_INF __builtin_inf()
#define CUDART_PI_F 3.141592654f
#define CUDART_MAX_NORMAL_F 3.402823466e+38f
#define __builtin_assume(...) (void)0
#define __assume(...) (void)0

#define threadIdx (::fr::on_cpu::thread_index())
#define blockIdx (::fr::on_cpu::block_index())
#define blockDim (::fr::on_cpu::block_size())
#define gridDim (::fr::on_cpu::grid_size())

// Shared memory: a block has what its threads share on one thread of the CPU.
#define FR_SHARED_ALIGN 16
#define __shared__ static FR_PER_THREAD __attribute__((aligned(FR_SHARED_ALIGN)))

#ifdef FR_CHECKED
#include "asserts.h"
// The compiler sees no accesses of these.
#define memcpy fr_memcpy
#define memmove fr_memmove
#define memset fr_memset
#else
#define assert(...) (void)0
#endif
