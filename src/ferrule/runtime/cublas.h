/* Matrix products by cuBLASLt, whichever of its versions a process has. Rows are contiguous here, and columns there:
 * what it is asked for is the transposed product, of the operands in the other order.
 */
#ifndef FERRULE_CUBLAS_H
#define FERRULE_CUBLAS_H

#include <dlfcn.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* cublasLt.h: descriptions and handles are pointers, results are 0 or a cublasStatus_t. */
typedef struct {
  int (*create)(void** handle);
  int (*operation)(void**, int compute, int scale);
  int (*set_operation)(void*, int, const void*, size_t);
  int (*end_operation)(void*);
  int (*layout)(void**, int type, uint64_t rows, uint64_t columns, int64_t leading);
  int (*set_layout)(void*, int, const void*, size_t);
  int (*end_layout)(void*);
  int (*preference)(void**);
  int (*set_preference)(void*, int, const void*, size_t);
  int (*end_preference)(void*);
  int (*choose)(void*, void*, void*, void*, void*, void*, void*, int, void*, int*);
  int (*start)(void*, void*, const void*, const void*, void*, const void*, void*, const void*, const void*, void*,
               void*, void*, const void*, void*, size_t, void*);
  const char* (*name)(int);
} fr_cublas;

enum { FR_CUDA_FLOAT32 = 0, FR_CUDA_FLOAT16 = 2, FR_CUDA_BFLOAT16 = 14 }; /* cudaDataType */
enum { FR_COMPUTE_FLOAT32 = 68, FR_COMPUTE_TF32 = 77 };                  /* cublasComputeType_t */
enum { FR_FACTORS_FROM = 2, FR_TRANSPOSE_FIRST = 3, FR_TRANSPOSE_SECOND = 4 }; /* attributes of an operation, */
enum { FR_BATCH_COUNT = 5, FR_BATCH_STEP = 6 };                          /* of a layout, */
enum { FR_MOST_WORKSPACE = 1, FR_ALIGNMENT_FIRST = 5 };                  /* and of a preference */
enum { FR_CUBLAS_WORKSPACE = 32 << 20 }; /* bytes; what NVIDIA advises for Hopper */
enum { FR_CUBLAS_UNSUPPORTED = 15 };

/* `Product` of ferrule/tools/cublas.py: out[m,n] = alpha * a[m,k] @ b[k,n] + beta * out, `batch` times. */
typedef struct {
  uint64_t a, b, out, workspace;        /* addresses; the last of FR_CUBLAS_WORKSPACE bytes */
  uint64_t factors;                     /* alpha and beta in the GPU's memory; 0: those below */
  int64_t m, n, k, batch, step_a, step_b; /* elements from one matrix to the next; 0: one for all */
  int32_t transpose_a, transpose_b;     /* it lies as a[k,m], as b[n,k] */
  int32_t type, out_type, compute;
  float alpha, beta;
} fr_product;

/* cublasLtMatmulHeuristicResult_t */
typedef struct {
  uint64_t algorithm[8];
  size_t workspace;
  int status;
  float waves;
  int reserved[4];
} fr_cublas_choice;

/* Finds the functions of a library that is loaded; the name of one that it lacks, else NULL. */
static const char* fr_cublas_find(void* library, fr_cublas* cublas) {
#define FR_FIND(MEMBER, NAME)                                     \
  *(void**)&cublas->MEMBER = dlsym(library, "cublasLt" NAME);     \
  if (!cublas->MEMBER) return "cublasLt" NAME;
  FR_FIND(create, "Create")
  FR_FIND(operation, "MatmulDescCreate")
  FR_FIND(set_operation, "MatmulDescSetAttribute")
  FR_FIND(end_operation, "MatmulDescDestroy")
  FR_FIND(layout, "MatrixLayoutCreate")
  FR_FIND(set_layout, "MatrixLayoutSetAttribute")
  FR_FIND(end_layout, "MatrixLayoutDestroy")
  FR_FIND(preference, "MatmulPreferenceCreate")
  FR_FIND(set_preference, "MatmulPreferenceSetAttribute")
  FR_FIND(end_preference, "MatmulPreferenceDestroy")
  FR_FIND(choose, "MatmulAlgoGetHeuristic")
  FR_FIND(start, "Matmul")
  FR_FIND(name, "GetStatusName")
#undef FR_FIND
  return NULL;
}

/* A matrix of rows of `columns`, as columns; `step` elements before the next of a batch. */
static int fr_cublas_layout(const fr_cublas* cublas, void** layout, int type, int64_t rows, int64_t columns,
                            int64_t batch, int64_t step) {
  int32_t count = (int32_t)batch;
  int status = cublas->layout(layout, type, (uint64_t)columns, (uint64_t)rows, columns);
  if (!status && batch > 1) status = cublas->set_layout(*layout, FR_BATCH_COUNT, &count, sizeof count);
  if (!status && batch > 1) status = cublas->set_layout(*layout, FR_BATCH_STEP, &step, sizeof step);
  return status;
}

/* Chooses how: what cuBLASLt's own cache remembers. */
static int fr_cublas_choose(const fr_cublas* cublas, void* handle, const fr_product* p, void* operation,
                            void** layouts, fr_cublas_choice* choice) {
  const uint64_t addresses[] = {p->b, p->a, p->out, p->out}, workspace = FR_CUBLAS_WORKSPACE;
  void* preference = NULL;
  int found = 0, status = cublas->preference(&preference);
  if (!status) status = cublas->set_preference(preference, FR_MOST_WORKSPACE, &workspace, sizeof workspace);
  for (int i = 0; i < 4 && !status; i++) {
    uint32_t alignment = 256;
    while (addresses[i] % alignment) alignment /= 2;
    status = cublas->set_preference(preference, FR_ALIGNMENT_FIRST + i, &alignment, sizeof alignment);
  }
  if (!status)
    status = cublas->choose(handle, operation, layouts[0], layouts[1], layouts[2], layouts[2], preference, 1, choice,
                            &found);
  if (preference) cublas->end_preference(preference);
  return status ? status : found ? choice->status : FR_CUBLAS_UNSUPPORTED;
}

/* A product as cuBLASLt describes it, and how it is made. */
typedef struct {
  void *operation, *layouts[3]; /* of b, a, out */
  fr_cublas_choice choice;
} fr_described;

static void fr_cublas_forget(const fr_cublas* cublas, fr_described* d) {
  for (int i = 0; i < 3; i++)
    if (d->layouts[i]) cublas->end_layout(d->layouts[i]);
  if (d->operation) cublas->end_operation(d->operation);
}

/* Describes a product, and chooses how. What is described is to be forgotten, also after an error. */
static int fr_cublas_describe(const fr_cublas* cublas, void* handle, const fr_product* p, fr_described* d) {
  const int32_t first = p->transpose_b, second = p->transpose_a; /* CUBLAS_OP_T is 1 */
  const int32_t device = 1; /* CUBLASLT_POINTER_MODE_DEVICE */
  memset(d, 0, sizeof *d);
  int status = cublas->operation(&d->operation, p->compute, FR_CUDA_FLOAT32);
  if (!status) status = cublas->set_operation(d->operation, FR_TRANSPOSE_FIRST, &first, sizeof first);
  if (!status) status = cublas->set_operation(d->operation, FR_TRANSPOSE_SECOND, &second, sizeof second);
  if (!status && p->factors)
    status = cublas->set_operation(d->operation, FR_FACTORS_FROM, &device, sizeof device);
  if (!status)
    status = fr_cublas_layout(cublas, &d->layouts[0], p->type, first ? p->n : p->k, first ? p->k : p->n, p->batch,
                              p->step_b);
  if (!status)
    status = fr_cublas_layout(cublas, &d->layouts[1], p->type, second ? p->k : p->m, second ? p->m : p->k, p->batch,
                              p->step_a);
  if (!status) status = fr_cublas_layout(cublas, &d->layouts[2], p->out_type, p->m, p->n, p->batch, p->m * p->n);
  if (!status) status = fr_cublas_choose(cublas, handle, p, d->operation, d->layouts, &d->choice);
  return status;
}

/* Starts a product that was described, with the addresses of `p`. */
static int fr_cublas_multiply(const fr_cublas* cublas, void* handle, const fr_product* p, const fr_described* d,
                              void* stream) {
  void *a = (void*)(uintptr_t)p->a, *b = (void*)(uintptr_t)p->b, *out = (void*)(uintptr_t)p->out;
  const float* factors = (const float*)(uintptr_t)p->factors;
  return cublas->start(handle, d->operation, factors ? factors : &p->alpha, b, d->layouts[0], a, d->layouts[1],
                       factors ? factors + 1 : &p->beta, out, d->layouts[2], out, d->layouts[2], d->choice.algorithm,
                       (void*)(uintptr_t)p->workspace, FR_CUBLAS_WORKSPACE, stream);
}

/* Starts a product on a stream, with the handle of the current GPU; waits for nothing. */
static int fr_cublas_start(const fr_cublas* cublas, void* handle, const fr_product* p, void* stream) {
  fr_described d;
  int status = fr_cublas_describe(cublas, handle, p, &d);
  if (!status) status = fr_cublas_multiply(cublas, handle, p, &d, stream);
  fr_cublas_forget(cublas, &d);
  return status;
}

/* A product that is made again and again, with other addresses. */
typedef struct {
  const fr_cublas* cublas;
  void* handle; /* of its GPU */
  fr_product product;
  int32_t word[5]; /* which words of a call a, b, out, workspace and factors are; the last is -1 where there are none */
  fr_described described; /* for addresses that are multiples of 256, as what libraries allocate is */
} fr_known_product;

/* Describes it. 0, or a status; it is to be forgotten in any case. */
static int fr_cublas_know(fr_known_product* known) {
  fr_product* p = &known->product;
  p->a = p->b = p->out = p->workspace = 256;
  p->factors = known->word[4] < 0 ? 0 : 256;
  return fr_cublas_describe(known->cublas, known->handle, p, &known->described);
}

/* Starts it with the words of a call. */
static int fr_cublas_again(const fr_known_product* known, const uint64_t* word, void* stream) {
  fr_product p = known->product;
  p.a = word[known->word[0]], p.b = word[known->word[1]], p.out = word[known->word[2]];
  p.workspace = word[known->word[3]];
  if (known->word[4] >= 0) p.factors = word[known->word[4]];
  if ((p.a | p.b | p.out) % 256) return fr_cublas_start(known->cublas, known->handle, &p, stream);
  return fr_cublas_multiply(known->cublas, known->handle, &p, &known->described, stream);
}

#endif
