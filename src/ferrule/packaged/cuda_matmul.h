/* Matrix products of CUDA units, by the cuBLASLt that the process has. Included by cuda_steps.h alone.
 *
 * Does what operators/unit_matmul.py and tools/cublas.py do in Python.
 */
#ifndef FERRULE_PACKAGED_CUDA_MATMUL_H
#define FERRULE_PACKAGED_CUDA_MATMUL_H

/* An array of a unit, and how it is read as matrices: fewer than two dims are a matrix of one row. */
typedef struct {
  uint64_t address;
  int64_t count, matrices, rows, columns;
  int32_t dtype;
} fr_place;

/* A place of no dims yet, and with one more. */
static void fr_place_begin(fr_place* place, int32_t dtype) {
  place->address = 0;
  place->count = place->matrices = place->rows = place->columns = 1;
  place->dtype = dtype;
}
static void fr_place_extend(fr_place* place, int64_t size) { /* what is beyond 64 bits is refused by its bytes */
  place->matrices = (int64_t)((uint64_t)place->matrices * (uint64_t)place->rows);
  place->rows = place->columns;
  place->columns = size;
}

static struct {
  fr_cublas functions;
  void* handles[FR_MOST_GPUS];
  const char* missing; /* what was not found, after fr_find_products */
} fr_products;

static void fr_find_products(void) {
  static const char* const names[] = {"libcublasLt.so.13", "libcublasLt.so.12"};
  void* library = NULL;
  for (int i = 0; i < 4 && !library; i++) /* what torch has loaded, first */
    library = dlopen(names[i % 2], RTLD_NOW | (i < 2 ? RTLD_NOLOAD : RTLD_LOCAL));
  fr_products.missing = library ? fr_cublas_find(library, &fr_products.functions)
                                : "libcublasLt.so.13 or libcublasLt.so.12, which a torch for CUDA brings,";
}

static bool fr_cublas_failed(fr_packaged_call* c, int status, const fr_step* step) {
  return fr_fail(c, "the product '%s' cannot be started: cuBLAS says %s.", step->label,
                 fr_products.functions.name(status));
}

/* Works out what is multiplied. `k` of 0 is left to the caller. */
static bool fr_work_out_product(fr_packaged_call* c, const fr_step* step, const fr_place* places, fr_product* p) {
  const fr_multiplied* of = step->multiplied;
  fr_place a = places[step->source], b = places[of->by], out = places[step->to];
  char text[600];
  if (b.matrices == 1 && !of->transpose_a) {
    a.rows *= a.matrices;
    out.rows *= out.matrices;
    a.matrices = out.matrices = 1;
  }
  int64_t inner = of->transpose_b ? b.columns : b.rows;
  memset(p, 0, sizeof *p);
  p->m = of->transpose_a ? a.columns : a.rows;
  p->k = of->transpose_a ? a.rows : a.columns;
  p->n = of->transpose_b ? b.rows : b.columns;
  p->batch = out.matrices;
  if (p->k != inner || out.rows != p->m || out.columns != p->n || (a.matrices != 1 && a.matrices != out.matrices) ||
      (b.matrices != 1 && b.matrices != out.matrices))
    return fr_fail(c, "the shapes of the product '%s' do not fit: %lld of %lld x %lld, %lld of %lld x %lld and %lld of "
                   "%lld x %lld for %s.", step->label, (long long)a.matrices, (long long)a.rows, (long long)a.columns,
                   (long long)b.matrices, (long long)b.rows, (long long)b.columns, (long long)out.matrices,
                   (long long)out.rows, (long long)out.columns, fr_shown(c, text, sizeof text));
  if (p->m > INT32_MAX || p->n > INT32_MAX || p->k > INT32_MAX || p->batch > INT32_MAX)
    return fr_fail(c, "the product '%s' has more rows, columns or matrices than 2147483647 for %s.", step->label,
                   fr_shown(c, text, sizeof text));
  p->a = a.address;
  p->b = b.address;
  p->out = out.address;
  p->workspace = places[of->workspace].address;
  p->factors = of->factors < 0 ? 0 : places[of->factors].address;
  p->step_a = a.matrices > 1 ? a.rows * a.columns : 0;
  p->step_b = b.matrices > 1 ? b.rows * b.columns : 0;
  p->transpose_a = of->transpose_a;
  p->transpose_b = of->transpose_b;
  static const int types[] = {FR_CUDA_FLOAT32, FR_CUDA_FLOAT16, FR_CUDA_BFLOAT16};
  p->type = types[a.dtype == FR_FLOAT32 ? 0 : a.dtype == FR_FLOAT16 ? 1 : 2];
  p->out_type = out.dtype == FR_FLOAT32 ? FR_CUDA_FLOAT32 : p->type;
  p->compute = of->tf32 ? FR_COMPUTE_TF32 : FR_COMPUTE_FLOAT32;
  p->alpha = of->alpha;
  p->beta = of->beta;
  if (of->alpha_of >= 0) memcpy(&p->alpha, &c->torch.of.value[of->alpha_of], sizeof p->alpha);
  if (of->beta_of >= 0) memcpy(&p->beta, &c->torch.of.value[of->beta_of], sizeof p->beta);
  if (!p->k && p->m && p->n && p->batch && p->beta != 0 && p->beta != 1)
    return fr_fail(c, "the product '%s' sums over no elements, and `beta` is %g; expected 0 or 1 there.", step->label,
                   (double)p->beta);
  return true;
}

/* Finds cuBLAS, and what it is on this GPU. */
static bool fr_check_product(fr_packaged_call* c, const fr_step* step) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, fr_find_products);
  if (fr_products.missing)
    return fr_fail(c, "%s was not found, for the product '%s'.", fr_products.missing, step->label);
  if (c->torch.index >= FR_MOST_GPUS)
    return fr_fail(c, "a package knows of %d GPUs, not of cuda:%d.", FR_MOST_GPUS, (int)c->torch.index);
  int status = 0, mode = FR_CAPTURE_RELAXED;
  pthread_mutex_lock(&fr_loading);
  void** handle = &fr_products.handles[c->torch.index];
  if (!*handle && !fr_cuda.capture_mode(&mode)) {
    status = fr_products.functions.create(handle);
    fr_cuda.capture_mode(&mode);
  }
  pthread_mutex_unlock(&fr_loading);
  return !status || fr_cublas_failed(c, status, step);
}

/* Starts a product. It may load a kernel, which others forbid while they record a CUDA graph. */
static bool fr_start_one_product(fr_packaged_call* c, const fr_step* step, const fr_product* product, fr_stream stream) {
  int mode = FR_CAPTURE_RELAXED, status = fr_cuda.capture_mode(&mode);
  if (status) return fr_cuda_failed(c, status, "a product");
  status = fr_cublas_start(&fr_products.functions, fr_products.handles[c->torch.index], product, stream);
  fr_cuda.capture_mode(&mode);
  return !status || fr_cublas_failed(c, status, step);
}

#endif
