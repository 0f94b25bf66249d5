/* Starting the steps of a CUDA unit, of which all is known but the words that each call has: addresses and numbers. */
#ifndef FERRULE_CUDA_UNITS_H
#define FERRULE_CUDA_UNITS_H

#include "cublas.h"
#include "cuda_launch.h"

/* A kernel, or a matrix product. */
typedef struct {
  void* function; /* NULL: `product` is made */
  uint32_t blocks[3], threads[3], cluster[3]; /* cluster[0] is 0 where there is none */
  uint32_t shared, number, pdl, arguments;
  const int32_t* word;     /* which word an argument is, or -1 */
  const uint64_t* given;   /* arguments that are the same in each call */
  const fr_known_product* product;
} cuda_unit_step;

enum { FR_MOST_STEP_ARGUMENTS = 64, FR_RELAXED = 2 }; /* CUstreamCaptureMode */

static inline int cuda_start_kernel(cuda_state* cuda, const cuda_unit_step* step, uint64_t* word, void* stream) {
  void* arguments[FR_MOST_STEP_ARGUMENTS];
  for (uint32_t i = 0; i < step->arguments; i++)
    arguments[i] = step->word[i] < 0 ? (void*)&step->given[i] : (void*)&word[step->word[i]];
  cuda->last[cuda->count++ % 8] = step->number;
  return cuda_launch_with(cuda->launch, cuda->launch_config, step->function, step->blocks, step->threads,
                          step->cluster[0] ? step->cluster : NULL, step->pdl, step->shared, stream, arguments);
}

/* cuBLAS loads kernels when they are first used, which may be while a graph is recorded. */
static inline int cuda_start_product(cuda_state* cuda, const cuda_unit_step* step, const uint64_t* word,
                                     void* stream) {
  int mode = FR_RELAXED, status = cuda->exchange_mode(&mode);
  if (status) return status;
  status = fr_cublas_again(step->product, word, stream);
  cuda->exchange_mode(&mode);
  return status;
}

/* Starts the steps of a call one after the other. Returns a CUresult, or a cublasStatus_t where the last one tried is a
 * product; `*begun` is how many were tried. */
static inline int cuda_start_unit(cuda_state* cuda, void* context, const cuda_unit_step* step, int steps,
                                  uint64_t* word, void* stream, int* begun) {
  void* found = NULL;
  int status = cuda->get_current(&found);
  bool other = found != context;
  *begun = 0;
  if (!status && other) status = cuda->push(context);
  if (status) return status;
  for (; !status && *begun < steps; step++, ++*begun)
    status = step->function ? cuda_start_kernel(cuda, step, word, stream)
                            : cuda_start_product(cuda, step, word, stream);
  if (other) cuda->pop(&found);
  return status;
}

#endif
