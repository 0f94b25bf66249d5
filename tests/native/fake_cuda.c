/* A stand-in for libcuda in tests: two GPUs whose memory is the host's. A launch is handed to a
 * function of the test, with all its arguments. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define API __attribute__((visibility("default")))

typedef int (*launched)(uintptr_t kernel, const unsigned* sizes, uintptr_t stream, uintptr_t context,
                        void** arguments);
typedef int (*filled)(uintptr_t address, size_t bytes, uintptr_t stream, uintptr_t context);

typedef int (*copied)(uintptr_t to, uintptr_t from, size_t bytes, uintptr_t stream, uintptr_t context);

enum { GPUS = 2, DEEP = 16, MOST = 4096 };
enum { INVALID = 1, NO_DEVICE = 101 };

static launched on_launch;
static filled on_fill;
static copied on_copy;
static int version = 13000, count = GPUS, refuse_init, refuse_image, most_threads = 1024;
static int capability = 9, static_bytes;  /* GPUs, and shared memory of every kernel */
static _Thread_local uintptr_t stack[DEEP];
static _Thread_local int depth, capture_mode;
static int queried; /* what cuStreamQuery says next; counts down */
static char symbols[MOST][256];
static int kernels, retained[GPUS], dynamic[MOST];

/* For tests. */
API void fake_on_launch(launched f) { on_launch = f; }
API void fake_on_fill(filled f) { on_fill = f; }
API void fake_on_copy(copied f) { on_copy = f; }
API void fake_capability(int major) { capability = major; }
API void fake_static(int bytes) { static_bytes = bytes; }
API void fake_set(int v, int n, int init, int image, int threads) {
  version = v, count = n, refuse_init = init, refuse_image = image, most_threads = threads;
}
API void fake_queried(int status) { queried = status; }
API const char* fake_symbol(uintptr_t kernel) { return symbols[kernel]; }
API int fake_dynamic(uintptr_t kernel) { return dynamic[kernel]; }
API int fake_depth(void) { return depth; }
API int fake_capture_mode(void) { return capture_mode; }
API int fake_retained(int gpu) { return retained[gpu]; }

API int cuInit(unsigned flags) { return flags ? INVALID : refuse_init; }
API int cuDriverGetVersion(int* v) { *v = version; return 0; }
API int cuDeviceGetCount(int* n) { *n = count; return 0; }
API int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return ordinal < count ? 0 : NO_DEVICE;
}
API int cuDeviceGetName(char* name, int room, int device) {
  snprintf(name, (size_t)room, "Fake GPU %d", device);
  return 0;
}
API int cuDeviceGetAttribute(int* value, int attribute, int device) {
  (void)device;
  if (attribute == 75) *value = capability;
  else if (attribute == 76) *value = 0;
  else if (attribute == 97) *value = 227 * 1024;
  else return INVALID;
  return 0;
}
API int cuDevicePrimaryCtxRetain(void** context, int device) {
  retained[device]++;
  *context = (void*)(uintptr_t)(0xc0 + device);
  return 0;
}
API int cuCtxGetCurrent(void** context) {
  *context = (void*)(depth ? stack[depth - 1] : 0);
  return 0;
}
API int cuCtxSetCurrent(void* context) {
  if (depth) depth--;
  if (context) stack[depth++] = (uintptr_t)context;
  return 0;
}
API int cuCtxPushCurrent_v2(void* context) {
  if (depth == DEEP) return INVALID;
  stack[depth++] = (uintptr_t)context;
  return 0;
}
API int cuCtxPopCurrent_v2(void** context) {
  if (!depth) return INVALID;
  *context = (void*)stack[--depth];
  return 0;
}
static unsigned limit;  /* registers of a thread, as the last image was loaded; 0 is any number */
API unsigned fake_limit(void) { return limit; }
API int cuLibraryLoadData(void** library, const void* image, int* options, void** values, unsigned n,
                          void* d, void* e, unsigned f) {
  if (n > 1 || !options != !n || !values != !n || (n && *options) || d || e || f) return INVALID;
  limit = n ? (unsigned)(uintptr_t)*values : 0;
  if (capture_mode != 2) return 900;
  if (refuse_image || !image) return refuse_image;
  *library = (void*)0x11b;
  return 0;
}
API int cuLibraryGetKernel(void** kernel, void* library, const char* name) {
  if (library != (void*)0x11b || kernels + 1 == MOST) return INVALID;
  snprintf(symbols[++kernels], sizeof *symbols, "%s", name);
  *kernel = (void*)(uintptr_t)kernels;
  return 0;
}
API int cuKernelGetAttribute(int* value, int attribute, void* kernel, int device) {
  if (!kernel || device >= count || (attribute && attribute != 1)) return INVALID;
  if (attribute) *value = static_bytes;
  else *value = limit && most_threads < 65536 / (int)limit ? 65536 / (int)limit : most_threads;
  return 0;
}
API int cuKernelSetAttribute(int attribute, int value, void* kernel, int device) {
  if (attribute != 8 || device >= count || capture_mode != 2) return INVALID;
  dynamic[(uintptr_t)kernel] = value;
  return 0;
}
API int cuKernelGetFunction(void** function, void* kernel) {
  *function = kernel;
  return depth && capture_mode == 2 ? 0 : INVALID;
}
API int cuThreadExchangeStreamCaptureMode(int* mode) {
  const int old = capture_mode;
  capture_mode = *mode;
  *mode = old;
  return 0;
}
API int cuLaunchKernel(void* kernel, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                       unsigned bz, unsigned shared, void* stream, void** arguments, void** extra) {
  const unsigned sizes[11] = {gx, gy, gz, bx, by, bz, shared};  /* no cluster */
  if (extra || !depth) return INVALID;
  return on_launch((uintptr_t)kernel, sizes, (uintptr_t)stream, stack[depth - 1], arguments);
}
typedef struct {
  int id, pad;
  unsigned value[16];
} attribute;
typedef struct {
  unsigned sizes[7];
  void* stream;
  attribute* attributes;
  unsigned count;
} config;
_Static_assert(sizeof(attribute) == 72 && sizeof(config) == 56, "as in cuda.h");
API int cuLaunchKernelEx(const config* c, void* kernel, void** arguments, void** extra) {
  if (extra || !depth || !c->count || c->count > 2) return INVALID;
  unsigned sizes[11] = {0};
  memcpy(sizes, c->sizes, sizeof c->sizes);
  for (unsigned i = 0; i < c->count; i++) {
    const attribute* a = &c->attributes[i];
    if (a->id != 4 && (a->id != 6 || a->value[0] != 1)) return INVALID;
    if (a->id == 4) memcpy(sizes + 7, a->value, 3 * sizeof *sizes);
    else sizes[10] = 1;
  }
  return on_launch((uintptr_t)kernel, sizes, (uintptr_t)c->stream, stack[depth - 1], arguments);
}
API int cuMemsetD8Async(uint64_t address, unsigned char value, size_t bytes, void* stream) {
  if (!depth || !address || !bytes) return INVALID;
  int status = on_fill((uintptr_t)address, bytes, (uintptr_t)stream, stack[depth - 1]);
  if (!status) memset((void*)(uintptr_t)address, value, bytes);
  return status;
}
API int cuMemsetD16Async(uint64_t address, unsigned short value, size_t n, void* stream) {
  if (!depth || !address || !n || address % sizeof value) return INVALID;
  int status = on_fill((uintptr_t)address, n * sizeof value, (uintptr_t)stream, stack[depth - 1]);
  for (size_t i = 0; !status && i < n; i++) ((unsigned short*)(uintptr_t)address)[i] = value;
  return status;
}
API int cuMemsetD32Async(uint64_t address, unsigned value, size_t n, void* stream) {
  if (!depth || !address || !n || address % sizeof value) return INVALID;
  int status = on_fill((uintptr_t)address, n * sizeof value, (uintptr_t)stream, stack[depth - 1]);
  for (size_t i = 0; !status && i < n; i++) ((unsigned*)(uintptr_t)address)[i] = value;
  return status;
}
API int cuMemsetD2D32Async(uint64_t address, size_t pitch, unsigned value, size_t width, size_t rows,
                           void* stream) {
  if (!depth || !address || !width || !rows || address % sizeof value) return INVALID;
  int status = on_fill((uintptr_t)address, rows * pitch, (uintptr_t)stream, stack[depth - 1]);
  for (size_t i = 0; !status && i < width * rows; i++)
    *(unsigned*)(uintptr_t)(address + i / width * pitch + i % width * sizeof value) = value;
  return status;
}
/* A tensor map holds what it was made of: address, strides, then dims, box and six numbers. */
API int cuTensorMapEncodeTiled(void* map, int type, unsigned rank, void* address, const uint64_t* dims,
                               const uint64_t* strides, const unsigned* box, const unsigned* steps, int interleave,
                               int swizzle, int l2, int fill) {
  struct {
    uint64_t address, strides[4];
    uint32_t dims[5], box[5], numbers[6];
  } made = {(uintptr_t)address, {0}, {0}, {0}, {(unsigned)type, rank, (unsigned)interleave, (unsigned)swizzle,
                                               (unsigned)l2, (unsigned)fill}};
  if (!rank || rank > 5 || (uintptr_t)map % 128 || (uintptr_t)address % 16) return INVALID;
  for (unsigned i = 0; i < rank; i++) {
    if (steps[i] != 1 || !box[i] || box[i] > 256) return INVALID;
    made.dims[i] = (uint32_t)dims[i];
    made.box[i] = box[i];
    if (i && strides[i - 1] % 16) return INVALID;
    if (i) made.strides[i - 1] = strides[i - 1];
  }
  _Static_assert(sizeof made <= 128, "it fits");
  memset(map, 0, 128);
  memcpy(map, &made, sizeof made);
  return 0;
}
API int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void* stream) {
  if (!depth || !to || !from || !bytes) return INVALID;
  int status = on_copy((uintptr_t)to, (uintptr_t)from, bytes, (uintptr_t)stream, stack[depth - 1]);
  if (!status) memmove((void*)(uintptr_t)to, (void*)(uintptr_t)from, bytes);
  return status;
}
API int cuMemAlloc_v2(void** at, size_t bytes) {
  *at = calloc(bytes, 1);
  return *at ? 0 : 2;
}
API int cuMemFree_v2(void* at) { free(at); return 0; }
API int cuMemcpyHtoD_v2(void* to, const void* from, size_t n) { memcpy(to, from, n); return 0; }
API int cuMemcpyDtoH_v2(void* to, const void* from, size_t n) { memcpy(to, from, n); return 0; }
API int cuStreamSynchronize(void* stream) { (void)stream; return 0; }
API int cuMemcpyDtoHAsync_v2(void* to, const void* from, size_t n, void* stream) {
  (void)stream;
  memcpy(to, from, n);
  return 0;
}
API int cuStreamIsCapturing(void* stream, int* status) {
  (void)stream;
  *status = 0;
  return 0;
}
API int cuCtxSynchronize(void) { return 0; }
API int cuStreamQuery(void* stream) { return stream ? INVALID : queried ? queried-- : 0; }
API int cuGetErrorName(int status, const char** text) {
  *text = status == 700 ? "CUDA_ERROR_ILLEGAL_ADDRESS" : status == 2 ? "CUDA_ERROR_OUT_OF_MEMORY" : "CUDA_ERROR_X";
  return 0;
}
API int cuGetErrorString(int status, const char** text) {
  *text = status == 700 ? "an illegal memory access was encountered" : "some error";
  return 0;
}

/* torch's tensors on the CPU, said to be on the GPU: its DLPack exchange table with two functions
 * replaced (runtime/fastcall.c says what is in it). */
typedef struct {
  void* data;
  int32_t device_type, device_id;
} tensor_head;
typedef struct {
  uint32_t major, minor;
  void *older, *allocator, *from, *to;
  int (*tensor_from_object)(void*, tensor_head*);
  int (*current_work_stream)(int32_t, int32_t, void**);
} exchange;

static exchange fake, real;
static int gpu;

static int from_object(void* object, tensor_head* t) {
  int status = real.tensor_from_object(object, t);
  t->device_type = 2;
  t->device_id = gpu;
  return status;
}
static int work_stream(int32_t type, int32_t device, void** stream) {
  *stream = (void*)(uintptr_t)(0x500 + device);
  return type == 2 ? 0 : -1;
}
API void fake_exchange(exchange* table) {
  fake = real = *table;
  fake.tensor_from_object = from_object;
  fake.current_work_stream = work_stream;
}
API exchange* fake_table(void) { return &fake; }
API void fake_gpu(int ordinal) { gpu = ordinal; }
