/* Launches on NVIDIA GPUs. Included by ops.h alone.
 *
 * libcuda and libtorch_cuda are looked up when the first op is called, so that one library serves
 * machines with and without them. Work goes to the stream that is current in torch.
 */
#ifndef FERRULE_PACKAGED_CUDA_OPS_H
#define FERRULE_PACKAGED_CUDA_OPS_H

/* cuda.h: handles are pointers, CUdeviceptr is 64 bits, results are 0 or an error. */
typedef void* fr_stream;
static struct {
  int (*get_device)(int*, int);
  int (*attribute)(int*, int, int);
  int (*retain)(void**, int);
  int (*current)(void**);
  int (*set_current)(void*);
  int (*load)(void**, const void*, void*, void*, unsigned, void*, void*, unsigned);
  int (*kernel)(void**, void*, const char*);
  int (*function)(void**, void*);
  int (*kernel_attribute)(int*, int, void*, int);
  int (*set_attribute)(int, int, void*, int);
  int (*capture_mode)(int*);
  int (*launch)(void*, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                fr_stream, void**, void**);
  int (*launch_config)(const fr_launch_config*, void*, void**, void**);
  int (*encode)(void*, int, uint32_t, void*, const uint64_t*, const uint64_t*, const uint32_t*, const uint32_t*, int,
                int, int, int);
  int (*copy)(uint64_t, uint64_t, size_t, fr_stream);
  int (*error_name)(int, const char**);
  int (*fill8)(uint64_t, uint8_t, size_t, fr_stream);
  int (*fill16)(uint64_t, uint16_t, size_t, fr_stream);
  int (*fill32)(uint64_t, uint32_t, size_t, fr_stream);
  int (*fill_columns)(uint64_t, size_t, uint32_t, size_t, size_t, fr_stream);
  int32_t (*stream)(int32_t, void**);
  int32_t (*torch_device)(int32_t*);
  int32_t (*guard)(int32_t, void**);
  int32_t (*leave)(void*);
  const char* missing; /* what was not found, after fr_find_cuda */
} fr_cuda;

enum { FR_BUSY = 2 * 132 * 256 }; /* _BUSY of source/cuda/launch.py */
enum { FR_CAPABILITY_MAJOR = 75, FR_CAPABILITY_MINOR = 76, FR_MOST_SHARED = 97, FR_MULTIPROCESSORS = 16, FR_BUS_WIDTH = 37 }; /* of a GPU */
enum { FR_MOST_THREADS = 0, FR_FIXED_SHARED = 1, FR_MOST_DYNAMIC_SHARED = 8 };     /* of a kernel */
enum { FR_CAPTURE_RELAXED = 2 };
enum { FR_SHARED_UNASKED = 48 << 10 }; /* bytes that a block may have without leave */

static void fr_find_cuda(void) {
  void* driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
  void* torch = dlopen("libtorch_cuda.so", RTLD_NOW | RTLD_NOLOAD);
  if (!driver || !torch) {
    fr_cuda.missing = driver ? "libtorch_cuda.so, which a torch for CUDA loads" : "libcuda.so.1";
    return;
  }
#define FR_FIND(MEMBER, LIBRARY, NAME)                       \
  *(void**)&fr_cuda.MEMBER = dlsym(LIBRARY, NAME);           \
  if (!fr_cuda.MEMBER) fr_cuda.missing = NAME;
  FR_FIND(get_device, driver, "cuDeviceGet")
  FR_FIND(attribute, driver, "cuDeviceGetAttribute")
  FR_FIND(retain, driver, "cuDevicePrimaryCtxRetain")
  FR_FIND(current, driver, "cuCtxGetCurrent")
  FR_FIND(set_current, driver, "cuCtxSetCurrent")
  FR_FIND(load, driver, "cuLibraryLoadData")
  FR_FIND(kernel, driver, "cuLibraryGetKernel")
  FR_FIND(function, driver, "cuKernelGetFunction")
  FR_FIND(kernel_attribute, driver, "cuKernelGetAttribute")
  FR_FIND(set_attribute, driver, "cuKernelSetAttribute")
  FR_FIND(capture_mode, driver, "cuThreadExchangeStreamCaptureMode")
  FR_FIND(launch, driver, "cuLaunchKernel")
  FR_FIND(launch_config, driver, "cuLaunchKernelEx")
  FR_FIND(encode, driver, "cuTensorMapEncodeTiled")
  FR_FIND(copy, driver, "cuMemcpyDtoDAsync_v2")
  FR_FIND(error_name, driver, "cuGetErrorName")
  FR_FIND(fill8, driver, "cuMemsetD8Async")
  FR_FIND(fill16, driver, "cuMemsetD16Async")
  FR_FIND(fill32, driver, "cuMemsetD32Async")
  FR_FIND(fill_columns, driver, "cuMemsetD2D32Async")
  FR_FIND(stream, torch, "aoti_torch_get_current_cuda_stream")
  FR_FIND(torch_device, torch, "aoti_torch_get_current_device_index")
  FR_FIND(guard, torch, "aoti_torch_create_device_guard")
  FR_FIND(leave, torch, "aoti_torch_delete_device_guard")
#undef FR_FIND
}

static bool fr_cuda_failed(fr_packaged_call* c, int status, const char* what) {
  const char* name = NULL;
  if (fr_cuda.error_name(status, &name) || !name) name = "an unknown error";
  return fr_fail(c, "%s: CUDA says %d, %s.", what, status, name);
}

static void fr_find_cuda_once(void) {
  static pthread_once_t once = PTHREAD_ONCE_INIT;
  pthread_once(&once, fr_find_cuda);
}

/* What launches may depend on of a GPU: see fr_give_device. */
static int fr_tell_gpu(int32_t gpu, int32_t* facts) {
  int device = 0, major = 0, minor = 0, count = 0, bus = 0;
  fr_find_cuda_once();
  if (fr_cuda.missing || fr_cuda.get_device(&device, gpu) || fr_cuda.attribute(&major, FR_CAPABILITY_MAJOR, device) ||
      fr_cuda.attribute(&minor, FR_CAPABILITY_MINOR, device) ||
      fr_cuda.attribute(&count, FR_MULTIPROCESSORS, device) ||
      fr_cuda.attribute(&bus, FR_BUS_WIDTH, device))
    return 1;
  facts[FR_SM_COUNT] = count;
  facts[FR_CAPABILITY] = 10 * major + minor;
  facts[FR_MEMORY_BUS] = bus;
  return 0;
}

/* Makes the call's GPU current in this thread, which may be its first act on CUDA. */
static bool fr_enter_cuda(fr_packaged_call* c, fr_stream* stream, void** guard) {
  fr_find_cuda_once();
  *guard = NULL;
  if (fr_cuda.missing) return fr_fail(c, "%s was not found.", fr_cuda.missing);
  int32_t now = -1;
  if (fr_cuda.torch_device(&now) || (now != c->torch.index && fr_cuda.guard(c->torch.index, guard)))
    return fr_fail(c, "torch cannot make cuda:%d current.", (int)c->torch.index);
  void* context = NULL;
  int device = 0, status = fr_cuda.current(&context);
  if (!status && !context) { /* torch's, which lives as long as the process */
    status = fr_cuda.get_device(&device, c->torch.index);
    if (!status) status = fr_cuda.retain(&context, device);
    if (!status) status = fr_cuda.set_current(context);
  }
  if (status) return fr_cuda_failed(c, status, "no context on its GPU");
  if (fr_cuda.stream(c->torch.index, stream)) return fr_fail(c, "torch does not tell its stream.");
  return true;
}

static bool fr_fill_outputs(fr_packaged_call* c, const fr_packaged_body* body, const fr_special* special,
                            fr_stream stream) {
  for (int i = 0; i < c->torch.of.op->outputs; i++) {
    const fr_rule_output* output = &c->result.outputs[i];
    uint64_t room = 0, at = (uint64_t)(uintptr_t)c->torch.memory[i];
    size_t count = (size_t)fr_count(output->ndim, output->sizes);
    const char* element = fr_fill(c, body, special, i, &room);
    if (!element) return false;
    if (!count) continue;
    uint8_t one;
    uint16_t two;
    uint32_t four, next;
    int status;
    switch (fr_item_bytes[output->dtype]) {
      case 1:
        memcpy(&one, element, 1);
        status = fr_cuda.fill8(at, one, count, stream);
        break;
      case 2:
        memcpy(&two, element, 2);
        status = fr_cuda.fill16(at, two, count, stream);
        break;
      case 4:
        memcpy(&four, element, 4);
        status = fr_cuda.fill32(at, four, count, stream);
        break;
      default: /* two columns of 4 bytes */
        memcpy(&four, element, 4);
        memcpy(&next, element + 4, 4);
        status = fr_cuda.fill_columns(at, 8, four, 1, count, stream);
        if (!status) status = fr_cuda.fill_columns(at + 4, 8, next, 1, count, stream);
    }
    if (status) return fr_cuda_failed(c, status, "its output cannot be filled");
  }
  return true;
}

/* A launch as CUDA has it. */
typedef struct {
  uint32_t grid[3], threadgroup[3], groups[3];
  uint32_t facts;
  bool aligned; /* all arrays begin where the compiler was told */
} fr_sizes;

static fr_sizes fr_sizes_of(const fr_packaged_call* c) {
  fr_sizes sizes;
  uint32_t edge[3];
  bool even = true, full = true;
  memcpy(sizes.grid, c->torch.of.grid, sizeof sizes.grid);
  memcpy(sizes.threadgroup, c->torch.of.grid + 3, sizeof sizes.threadgroup);
  const uint32_t* t = sizes.threadgroup;
  for (int axis = 0; axis < 3; axis++) {
    uint32_t all = sizes.grid[axis];
    sizes.groups[axis] = (all + t[axis] - 1) / t[axis]; /* both fit into 31 bits */
    edge[axis] = all % t[axis] ? all % t[axis] : t[axis];
    even = even && edge[axis] == t[axis];
  }
  for (int corner = 0; corner < 8; corner++)
    full = full && (corner & 1 ? edge[0] : t[0]) * (corner & 2 ? edge[1] : t[1]) *
                       (corner & 4 ? edge[2] : t[2]) % 32 == 0;
  sizes.facts = (t[1] == 1 && t[2] == 1 ? FR_ONE_ROW : 0) | (even ? FR_EVEN : 0) | (full ? FR_FULL : 0) |
               (t[0] % 32 == 0 && edge[0] % 32 == 0 ? FR_LANES_IN_X : 0) |
               (sizes.groups[1] <= 65535 && sizes.groups[2] <= 65535 ? FR_NEAR : 0) | (t[2] <= 64 ? FR_SHALLOW : 0);
  sizes.aligned = torch_inputs_aligned(&c->torch) && torch_outputs_aligned(&c->torch);
  return sizes;
}

/* Threads along x of the threadgroups that a body gets that cannot tell how it is grouped. */
static uint32_t fr_any_threadgroup(const fr_sizes* sizes) {
  uint32_t whole = sizes->grid[0] > 256 ? 256 : (sizes->grid[0] + 31) / 32 * 32;
  return whole ? whole : 32;
}

/* Whether a launch keeps a GPU busy with so many threadgroups in each block: `many` of
 * source/cuda/launch.py. */
static bool fr_many(const fr_code* code, const fr_sizes* sizes) {
  uint64_t each = code->each, threads = (uint64_t)sizes->grid[0] * sizes->grid[1] * sizes->grid[2];
  uint32_t t = code->blocks == FR_ANY ? fr_any_threadgroup(sizes) : 0;
  uint64_t groups = t ? (sizes->grid[0] + t - 1) / t : sizes->groups[0];
  return threads >= each * FR_BUSY && (groups % each == 0 || groups >= 8 * each) &&
         sizes->grid[0] <= INT32_MAX;
}

/* The machine code for this GPU and, of a body, for these sizes and arrays; NULL after an error. */
static fr_code* fr_find_code(fr_packaged_call* c, fr_special* special, const fr_sizes* sizes, int device) {
  int major = 0, minor = 0;
  if (fr_cuda.attribute(&major, FR_CAPABILITY_MAJOR, device) ||
      fr_cuda.attribute(&minor, FR_CAPABILITY_MINOR, device)) {
    fr_fail(c, "CUDA does not tell what GPU cuda:%d is.", (int)c->torch.index);
    return NULL;
  }
  for (int i = 0; i < special->count; i++) {
    fr_code* code = &special->codes[i];
    int of = code->architecture;
    bool fits = code->portable   ? 10 * major + minor >= of
                : code->specific ? 10 * major + minor == of
                                 : major == of / 10 && minor >= of % 10;
    if (!fits) continue;
    if (sizes && ((code->needs & ~sizes->facts) || (code->aligned && !sizes->aligned))) continue;
    if (sizes && code->each > 1 && !fr_many(code, sizes)) continue;
    return code;
  }
  fr_fail(c, "the package has no machine code for a GPU of compute capability %d.%d.", major, minor);
  return NULL;
}

/* Loads a function on the call's GPU. What is asked here may wait for the GPU, which others forbid
 * while they record a CUDA graph; it is no part of what is recorded. */
static int fr_load_on_cuda(const fr_code* code, void** library, const char* symbol,
                           fr_loaded* loaded, int device) {
  int mode = FR_CAPTURE_RELAXED, status = fr_cuda.capture_mode(&mode);
  void* function = NULL;
  if (status) return status;
  if (!*library) status = fr_cuda.load(library, code->bytes, NULL, NULL, 0, NULL, NULL, 0);
  if (!status) status = fr_cuda.kernel(&loaded->kernel, *library, symbol);
  if (!status)
    status = fr_cuda.kernel_attribute(&loaded->threads, FR_MOST_THREADS, loaded->kernel, device);
  if (!status)
    status = fr_cuda.kernel_attribute(&loaded->fixed, FR_FIXED_SHARED, loaded->kernel, device);
  /* Brings it to the GPU now, not at the first launch, which may be recorded. */
  if (!status) status = fr_cuda.function(&function, loaded->kernel);
  fr_cuda.capture_mode(&mode);
  loaded->allowed = loaded->fixed < FR_SHARED_UNASKED ? FR_SHARED_UNASKED - loaded->fixed : 0;
  if (!status) loaded->function = function;
  return status;
}

/* A function of the code on the call's GPU, loaded; NULL after an error. */
static fr_loaded* fr_function_of(fr_packaged_call* c, fr_code* code, int which, int device) {
  if (c->torch.index >= FR_MOST_GPUS) {
    fr_fail(c, "a package knows of %d GPUs, not of cuda:%d.", FR_MOST_GPUS, (int)c->torch.index);
    return NULL;
  }
  fr_function* function = &code->functions[which];
  fr_loaded* loaded = &function->on[c->torch.index];
  pthread_mutex_lock(&fr_loading);
  int status = loaded->function
                   ? 0
                   : fr_load_on_cuda(code, &code->library, function->symbol, loaded, device);
  pthread_mutex_unlock(&fr_loading);
  if (!status) return loaded;
  fr_cuda_failed(c, status, "its machine code cannot be loaded");
  return NULL;
}

/* Lets a function have so much dynamic shared memory, which CUDA wants to be asked for. */
static bool fr_allow(fr_packaged_call* c, fr_loaded* loaded, int32_t shared, int device) {
  int most = 0, status = 0;
  pthread_mutex_lock(&fr_loading); /* another thread may allow more */
  if (shared > loaded->allowed) {
    status = fr_cuda.attribute(&most, FR_MOST_SHARED, device);
    if (!status && (int64_t)shared + loaded->fixed <= most) {
      int mode = FR_CAPTURE_RELAXED;
      status = fr_cuda.capture_mode(&mode);
      if (!status) {
        status = fr_cuda.set_attribute(FR_MOST_DYNAMIC_SHARED, shared, loaded->kernel, device);
        fr_cuda.capture_mode(&mode);
      }
      if (!status) loaded->allowed = shared;
    }
  }
  bool allowed = shared <= loaded->allowed;
  pthread_mutex_unlock(&fr_loading);
  if (status) return fr_cuda_failed(c, status, "its shared memory");
  return allowed || fr_fail(c, "a block wants %d bytes of shared memory, and has %d of its own, but "
                            "a block of cuda:%d has %d at most.", (int)shared, (int)loaded->fixed,
                            (int)c->torch.index, most);
}

/* Blocks and threads, as blocks_of of source/cuda/launch.py has them. A body that cannot tell how
 * its threads are grouped gets threadgroups of our choice. */
static bool fr_blocks(fr_packaged_call* c, const fr_code* code, fr_sizes* sizes, uint32_t* blocks,
                      uint32_t* block) {
  if (code->blocks == FR_ANY) {
    sizes->threadgroup[0] = fr_any_threadgroup(sizes);
    sizes->groups[0] = (sizes->grid[0] + sizes->threadgroup[0] - 1) / sizes->threadgroup[0];
  }
  const uint32_t* t = sizes->threadgroup;
  bool box = code->blocks == FR_BOXES;
  block[0] = box ? t[0] : t[0] * t[1] * t[2];
  block[1] = box ? t[1] : 1;
  block[2] = box ? t[2] : 1;
  memcpy(blocks, sizes->groups, sizeof sizes->groups);
  if (!code->far_away) {
    blocks[0] = (blocks[0] + code->each - 1) / code->each;
    return true;
  }
  uint64_t plane = (uint64_t)sizes->groups[0] * sizes->groups[1], most = (uint64_t)INT32_MAX * 65535;
  if (plane > most / sizes->groups[2])
    return fr_fail(c, "its grid has more threadgroups than CUDA can launch.");
  uint64_t count = plane * sizes->groups[2], rows = (count + INT32_MAX - 1) / INT32_MAX;
  blocks[0] = (uint32_t)((count + rows - 1) / rows);
  blocks[1] = (uint32_t)rows;
  blocks[2] = 1;
  return true;
}

/* Whether kernels of a GPU can begin before the one ahead has ended. */
static bool fr_programmatic(int device) {
  int major = 0;
  return !fr_cuda.attribute(&major, FR_CAPABILITY_MAJOR, device) && major >= 9;
}

/* Launches blocks and threads along three axes each, `n`; clusters where there are any. */
static int fr_launch_with(const fr_loaded* loaded, const uint32_t* n, const uint32_t* cluster, bool pdl,
                          uint32_t shared, fr_stream stream, void** arguments) {
  return cuda_launch_with(fr_cuda.launch, fr_cuda.launch_config, loaded->function, n, n + 3, cluster, pdl, shared,
                          stream, arguments);
}

static bool fr_launch(fr_packaged_call* c, int b, fr_special* special, fr_stream stream) {
  fr_call* call = &c->torch.of;
  uint32_t blocks[3], block[3];
  int device = 0;
  int64_t shared = 0;
  int status = fr_cuda.get_device(&device, c->torch.index);
  if (status) return fr_cuda_failed(c, status, "its GPU is not there");
  if (!fr_check_reads(c, b) || !fr_value(c, c->op->bodies[b].shared, &shared)) return false;
  fr_sizes sizes = fr_sizes_of(c);
  fr_code* code = fr_find_code(c, special, &sizes, device);
  if (!code || !fr_blocks(c, code, &sizes, blocks, block)) return false;
  fr_loaded* loaded = fr_function_of(c, code, 0, device);
  if (!loaded) return false;
  if (shared < 0 || shared > INT32_MAX)
    return fr_fail(c, "`shared_memory` is %lld bytes.", (long long)shared);
  if (!shared) shared = code->shared;
  if (!fr_allow(c, loaded, (int32_t)shared, device)) return false;
  fr_table_entry entry; /* 3 KB, of which little is written */
  entry.parameters = special->passed;
  memcpy(entry.parameter, special->parameters, 2 * sizeof *entry.parameter * (size_t)special->passed);
  memcpy(entry.sizes, &sizes, sizeof entry.sizes); /* how it begins */
  fr_gpu_job job;
  fr_prepare_gpu(call, &entry, &call->op->body[b], &c->result, c->torch.memory, &job);
  const uint32_t launched[] = {blocks[0], blocks[1], blocks[2], block[0], block[1], block[2]};
  bool pdl = c->op->bodies[b].pdl && fr_programmatic(device);
  status = fr_launch_with(loaded, launched, NULL, pdl, (uint32_t)shared, stream, job.arguments);
  return !status || fr_cuda_failed(c, status, "its kernel cannot be launched");
}

static bool fr_on_cuda(fr_packaged_call* c, int b, fr_special* special) {
  fr_stream stream;
  void* guard;
  bool done = fr_enter_cuda(c, &stream, &guard) &&
              (!c->torch.of.op->body[b].zeroed || fr_fill_outputs(c, &c->op->bodies[b], special, stream)) &&
              (fr_no_thread(&c->torch.of) || fr_launch(c, b, special, stream));
  if (guard) fr_cuda.leave(guard);
  return done;
}

#endif
