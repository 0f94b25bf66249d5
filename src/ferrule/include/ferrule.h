// The Metal dialect for g++, clang, zig and NVRTC: one header, without a single #include of a
// library. A kernel's text defines one of FR_FLAT, FR_ROWS, FR_SPLIT, FR_FIBERS and FR_CUDA_KERNEL first.
#pragma once
#define FERRULE 1  // for an author's #ifdef: not Apple's compiler
#define __METAL__ 1
#define __METAL_VERSION__ 320  // what MLX compiles for on macOS 15
#include "checked.h"
#include "types.h"
#include "math.h"
#include "functions.h"
#include "arithmetic.h"
#include "atomic.h"
#include "mlx.h"
#include "barrier.h"
#include "prefetch.h"
#if FR_CUDA
#include "matrix.h"
#include "cuda_grid.h"
#include "cuda_bounds.h"
#include "cuda.h"
#else
#include "cpu.h"
#include "tally.h"
#include "divide.h"
#include "matrix.h"
#include "simd.h"
#if defined(FR_FIBERS)
#include "fiber.h"
#include "stops.h"
#elif defined(FR_SPLIT) || defined(FR_ROWS)
#include "split.h"
#endif
#endif
#ifdef FR_PRINTS
#include "print.h"
#endif
#include "asserts.h"
