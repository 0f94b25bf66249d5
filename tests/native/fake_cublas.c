/* A stand-in for libcublasLt in tests: a product is handed to a function of the test. */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default")))
enum { INVALID = 7 };

typedef struct {
  int type, batch;
  uint64_t rows, columns;
  int64_t leading, step;
} layout;
typedef struct {
  int compute, scale, pointers, transpose[2]; /* pointers: alpha and beta are the GPU's */
} operation;
typedef struct {
  uint64_t workspace;
  uint32_t alignment[4];
} preference;
/* What a call of cublasLtMatmul is, in 64-bit words: see fake_cublas.py. */
typedef int (*multiplied)(const int64_t* words, float alpha, float beta);

static multiplied on_product;
static int handles, alive, found = 1;
API void fake_on_product(multiplied f) { on_product = f; }
API void fake_found(int n) { found = n; }
API int fake_handles(void) { return handles; }
API int fake_alive(void) { return alive; }

static int made(void** at, size_t size) {
  *at = calloc(1, size);
  alive++;
  return 0;
}
static int gone(void* at) {
  free(at);
  alive--;
  return 0;
}
API int cublasLtCreate(void** handle) { *handle = (void*)(uintptr_t)(0xab0 + ++handles); return 0; }
API const char* cublasLtGetStatusName(int status) {
  return status == 15 ? "CUBLAS_STATUS_NOT_SUPPORTED" : "CUBLAS_STATUS_INVALID_VALUE";
}
API int cublasLtMatmulDescCreate(void** at, int compute, int scale) {
  made(at, sizeof(operation));
  ((operation*)*at)->compute = compute;
  ((operation*)*at)->scale = scale;
  return 0;
}
API int cublasLtMatmulDescSetAttribute(void* at, int which, const void* value, size_t size) {
  if (which < 2 || which > 4 || size != 4) return INVALID;
  operation* const of = at;
  memcpy(which == 2 ? &of->pointers : &of->transpose[which - 3], value, size);
  return 0;
}
API int cublasLtMatmulDescDestroy(void* at) { return gone(at); }
API int cublasLtMatrixLayoutCreate(void** at, int type, uint64_t rows, uint64_t columns, int64_t leading) {
  made(at, sizeof(layout));
  layout one = {type, 1, rows, columns, leading, 0};
  memcpy(*at, &one, sizeof one);
  return leading < (int64_t)rows || !rows || !columns ? INVALID : 0;
}
API int cublasLtMatrixLayoutSetAttribute(void* at, int which, const void* value, size_t size) {
  if (which == 5 && size == 4) memcpy(&((layout*)at)->batch, value, size);
  else if (which == 6 && size == 8) memcpy(&((layout*)at)->step, value, size);
  else return INVALID;
  return 0;
}
API int cublasLtMatrixLayoutDestroy(void* at) { return gone(at); }
API int cublasLtMatmulPreferenceCreate(void** at) { return made(at, sizeof(preference)); }
API int cublasLtMatmulPreferenceSetAttribute(void* at, int which, const void* value, size_t size) {
  if (which == 1 && size == 8) memcpy(&((preference*)at)->workspace, value, size);
  else if (which >= 5 && which < 9 && size == 4) memcpy(&((preference*)at)->alignment[which - 5], value, size);
  else return INVALID;
  return 0;
}
API int cublasLtMatmulPreferenceDestroy(void* at) { return gone(at); }
API int cublasLtMatmulAlgoGetHeuristic(void* handle, void* o, void* a, void* b, void* c, void* d, void* p, int count,
                                       uint64_t* result, int* returned) {
  const preference* wanted = p;
  if (!handle || !o || !a || !b || c != d || count != 1) return INVALID;
  memset(result, 0, 96);
  result[0] = 0xa160; /* what cublasLtMatmul expects, with the alignments */
  for (int i = 0; i < 4; i++) result[1 + i] = wanted->alignment[i];
  result[8] = wanted->workspace;
  *returned = found;
  return 0;
}
API int cublasLtMatmul(void* handle, void* o, const float* alpha, const char* a, layout* al, const char* b, layout* bl,
                       const float* beta, const char* c, layout* cl, char* d, layout* dl, const uint64_t* algorithm,
                       void* workspace, size_t size, void* stream) {
  const operation* op = o;
  const char* places[] = {a, b, c, d};
  if (!handle || c != d || cl != dl || algorithm[0] != 0xa160 || !workspace || size != 32 << 20 || op->scale)
    return INVALID;
  for (int i = 0; i < 4; i++)
    if ((uintptr_t)places[i] % algorithm[1 + i]) return INVALID;
  int64_t words[32] = {(intptr_t)handle, (intptr_t)stream, op->compute, op->transpose[0], op->transpose[1],
                       (intptr_t)workspace};
  const layout* layouts[] = {al, bl, dl};
  for (int i = 0; i < 3; i++) {
    const layout* l = layouts[i];
    const int64_t of[] = {(intptr_t)places[i + (i == 2)], l->type, l->batch, (int64_t)l->rows, (int64_t)l->columns,
                          l->leading, l->step};
    memcpy(&words[6 + 7 * i], of, sizeof of);
  }
  words[27] = op->pointers;
  return on_product(words, *alpha, *beta);
}
