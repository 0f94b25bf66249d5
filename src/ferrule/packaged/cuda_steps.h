/* CUDA units: the steps of a call on NVIDIA GPUs. Included by ops.h alone.
 *
 * Does what `CudaUnit.launch_for`, operators/unit_call.py and devices/cuda/unit.py do in Python: works out all steps,
 * checks them all, and then starts them on torch's current stream.
 */
#ifndef FERRULE_PACKAGED_CUDA_STEPS_H
#define FERRULE_PACKAGED_CUDA_STEPS_H

enum { FR_ALIGNMENT = 256 }; /* bytes; where scratch arrays begin: ALIGNMENT of operators/unit_steps.py */
enum { FR_PORTABLE_CLUSTER = 8, FR_MOST_BLOCKS = 65535, FR_MOST_BLOCK = 1024, FR_MOST_DEEP = 64 };

#include "cuda_matmul.h"
#include "cuda_maps.h"

/* A step that is carried out: a launch with its sizes, memory that is filled or copied, or a product. */
typedef struct {
  const fr_step* step;
  uint32_t sizes[FR_LAUNCH_VALUES];
  bool fills, pdl;
  fr_pattern pattern;
  uint64_t to, source;
  size_t count;      /* patterns, or bytes */
  int32_t first;     /* its arguments, among all */
  fr_loaded* loaded;
  fr_product product;
} fr_started;

static bool fr_multiplies(const fr_started* s) { return s->step->kind == FR_MATMUL && !s->fills; }

typedef struct {
  fr_place places[FR_MAX_ARGUMENTS + FR_MOST_SCRATCH];
  fr_started started[FR_MOST_STEPS];
  int32_t count;
  uint64_t given[FR_MOST_GIVEN]; /* the bytes of arguments */
  int32_t gave;
  uint64_t written; /* a bit per array */
} fr_work;

/* "`blocks` of step 'gemm<T>': N is 70000 for x (70000,); expected …", of one of its values. */
static bool fr_bad_size(fr_packaged_call* c, const fr_step* step, int which, int64_t value,
                        const char* expected) {
  static const char* const names[] = {"blocks", "block", "cluster", "shared_memory"};
  char text[600];
  return fr_fail(c, "`%s of step '%s'`: %s is %lld for %s; expected %s.", names[which / 3],
                 step->label, step->texts[which], (long long)value, fr_shown(c, text, sizeof text),
                 expected);
}

/* Makes the memory that steps share, and says where each array of it lies. */
static bool fr_make_scratch(fr_packaged_call* c, const fr_unit* unit, const fr_special* special,
                            fr_place* places) {
  int64_t end = 0;
  int32_t status = 0;
  char text[600];
  for (int i = 0; i < unit->arrays; i++) {
    const fr_scratch* scratch = &unit->scratch[i];
    int64_t count = 1, size;
    fr_place_begin(&places[i], special->scratch[i]);
    for (int k = 0; k < scratch->ndim; k++) {
      if (!fr_value(c, scratch->dims[k], &size)) return false;
      if (size < 0)
        return fr_fail(c, "`scratch`: %s: %s is %lld for %s; expected 0 or more.", scratch->name,
                       scratch->texts[k], (long long)size, fr_shown(c, text, sizeof text));
      count = fr_mul(count, size, &status);
      fr_place_extend(&places[i], size);
    }
    end = fr_mul(fr_ceildiv(end, FR_ALIGNMENT, &status), FR_ALIGNMENT, &status);
    places[i].address = (uint64_t)end;
    places[i].count = count;
    end = fr_add(end, fr_mul(count, fr_item_bytes[special->scratch[i]], &status), &status);
  }
  int64_t bytes = fr_add(end, FR_ALIGNMENT - 1, &status);
  if (status)
    return fr_fail(c, "its scratch is too large for %s.", fr_shown(c, text, sizeof text));
  uint64_t base = 0; /* null pointers, where there is none */
  if (end) {
    void* at = NULL;
    if (!torch_make(&c->torch, 1, &bytes, FR_UINT8, &c->scratch, &at))
      return fr_fail(c, c->scratch ? "its scratch has no memory." : "torch could not allocate memory.");
    base = ((uint64_t)(uintptr_t)at + FR_ALIGNMENT - 1) / FR_ALIGNMENT * FR_ALIGNMENT;
  }
  for (int i = 0; i < unit->arrays; i++) places[i].address += base;
  return true;
}

/* Where all arrays of a call lie. */
static bool fr_find_places(fr_packaged_call* c, const fr_unit* unit, const fr_special* special,
                           fr_place* places) {
  const fr_call* call = &c->torch.of;
  const fr_op* op = call->op;
  for (int i = 0; i < op->inputs; i++) {
    const fr_rule_input* input = &call->input[i];
    bool there = fr_is_array(call, i);
    fr_place_begin(&places[i], input->dtype);
    places[i].count = there ? fr_count(input->ndim, input->sizes) : 0;
    if (!there) continue;
    places[i].address = (uint64_t)(uintptr_t)call->pointer[i];
    for (int k = 0; k < input->ndim; k++) fr_place_extend(&places[i], input->sizes[k]);
  }
  for (int i = 0; i < op->outputs; i++) {
    const fr_rule_output* output = &c->result.outputs[i];
    fr_place* place = &places[op->inputs + i];
    fr_place_begin(place, output->dtype);
    place->address = (uint64_t)(uintptr_t)c->torch.memory[i];
    place->count = fr_count(output->ndim, output->sizes);
    for (int k = 0; k < output->ndim; k++) fr_place_extend(place, output->sizes[k]);
  }
  return fr_make_scratch(c, unit, special, &places[op->inputs + op->outputs]);
}

/* The arguments of a step's function, after those that are there. */
static bool fr_give(fr_packaged_call* c, const fr_step* step, fr_work* work) {
  char text[600];
  for (int i = 0; i < step->count; i++) {
    const fr_argument_given* given = &step->given[i];
    uint64_t* bytes = &work->given[work->gave++]; /* operators/package.py counted them all */
    int64_t value;
    *bytes = 0;
    if (given->kind == FR_GIVE_ARRAY) {
      *bytes = work->places[given->index].address;
      work->written |= UINT64_C(1) << given->index;
      continue;
    }
    if (given->kind == FR_GIVE_TENSOR_MAP) {
      work->gave += FR_MAP_WORDS - 1;
      work->written |= UINT64_C(1) << given->index;
      if (!fr_give_map(c, step, given, &work->places[given->index], bytes)) return false;
      continue;
    }
    if (given->kind == FR_GIVE_NUMBER) {
      *bytes = c->torch.of.value[given->index];
      continue;
    }
    if (!fr_value(c, given->index, &value)) return false;
    static const int dtypes[] = {FR_BOOL, FR_INT32, FR_UINT32, FR_INT64, FR_UINT64};
    int dtype = dtypes[given->kind - FR_GIVE_BOOL];
    if (!fr_integer_bytes(dtype, value, bytes))
      return fr_fail(c, "`arguments of step '%s'`: %s is %lld for %s, which does not fit into %s.",
                     step->label, given->text, (long long)value, fr_shown(c, text, sizeof text),
                     fr_dtype_names[dtype]);
  }
  return true;
}

/* The sizes of a step's launch. */
static bool fr_launch_sizes(fr_packaged_call* c, const fr_step* step, uint32_t* sizes) {
  int64_t threads = 1, blocks = 1;
  for (int i = 0; i < FR_LAUNCH_VALUES; i++) {
    int64_t value = 0, least = i >= FR_BLOCK && i < FR_SHARED_BYTES;
    if (step->launch[i] >= 0 && !fr_value(c, step->launch[i], &value)) return false;
    sizes[i] = (uint32_t)value;
    if (step->launch[i] < 0) continue; /* no cluster */
    bool narrow = i == FR_BLOCKS + 1 || i == FR_BLOCKS + 2;
    if (value < least || value > (narrow ? FR_MOST_BLOCKS : INT32_MAX))
      return fr_bad_size(c, step, i, value, narrow ? "0 to 65535 blocks along this axis"
                                            : least ? "a positive int32" : "0 to 2147483647");
    if (i >= FR_BLOCK && i < FR_CLUSTER) threads = value > FR_MOST_BLOCK ? value : threads * value;
    if (threads > FR_MOST_BLOCK || (i == FR_BLOCK + 2 && value > FR_MOST_DEEP))
      return fr_bad_size(c, step, i, value, "1024 threads at most, and 64 along z");
    if (i < FR_CLUSTER || i >= FR_SHARED_BYTES) continue;
    blocks = value > FR_PORTABLE_CLUSTER ? value : blocks * value;
    if (blocks > FR_PORTABLE_CLUSTER)
      return fr_bad_size(c, step, i, value,
                         "8 blocks at most, for which every GPU with clusters has room");
    if (sizes[i - FR_CLUSTER] % value)
      return fr_bad_size(c, step, i, value, "sizes that divide the blocks");
  }
  return true;
}

/* Works out a step; adds it to what is carried out, if it is not left out. */
static bool fr_add_step(fr_packaged_call* c, const fr_step* step, fr_pattern pattern, fr_work* work) {
  int64_t holds = 1;
  if (step->when >= 0 && !fr_value(c, step->when, &holds)) return false;
  if (!holds) return true;
  fr_started* started = &work->started[work->count];
  started->step = step;
  if (step->kind == FR_RUN) {
    started->first = work->gave;
    started->fills = false;
    if (!fr_launch_sizes(c, step, started->sizes)) return false;
    if (!started->sizes[0] || !started->sizes[1] || !started->sizes[2]) return true;
    work->count++;
    return fr_give(c, step, work);
  }
  const fr_place *to = &work->places[step->to], *source = &work->places[step->source];
  work->written |= UINT64_C(1) << step->to;
  started->to = to->address;
  started->fills = step->kind == FR_FILL;
  if (step->kind == FR_MATMUL) {
    fr_product* product = &started->product;
    if (!fr_work_out_product(c, step, work->places, product)) return false;
    started->fills = !product->k && product->beta == 0; /* sums of nothing */
    started->pattern.size = 1;
    started->pattern.bytes = 0;
    started->count = (size_t)to->count * (product->k || started->fills) * fr_item_bytes[to->dtype];
  } else if (step->kind == FR_FILL) {
    started->pattern = pattern;
    started->count = (size_t)to->count * fr_item_bytes[to->dtype] / pattern.size;
  } else {
    if (to->count != source->count || to->dtype != source->dtype)
      return fr_fail(c, "a step copies %lld elements of %s to %lld elements of %s; expected as many "
                     "of the same dtype.", (long long)source->count, fr_dtype_names[source->dtype],
                     (long long)to->count, fr_dtype_names[to->dtype]);
    started->source = source->address;
    started->count = (size_t)to->count * fr_item_bytes[to->dtype];
  }
  work->count += started->count != 0;
  return true;
}

/* Finds a launch's function, and refuses what this GPU cannot launch. */
static bool fr_check_step(fr_packaged_call* c, fr_code* code, fr_started* started, int device) {
  const fr_step* step = started->step;
  const uint32_t* sizes = started->sizes;
  uint32_t threads = sizes[FR_BLOCK] * sizes[FR_BLOCK + 1] * sizes[FR_BLOCK + 2];
  int major = 0;
  started->loaded = fr_function_of(c, code, step->function, device);
  started->pdl = step->pdl && fr_programmatic(device);
  if (!started->loaded) return false;
  if (threads > (uint32_t)started->loaded->threads)
    return fr_fail(c, "step '%s': a block of %u threads needs more registers than the GPU has, or "
                   "than __launch_bounds__ says; %d threads fit.", step->label, threads,
                   (int)started->loaded->threads);
  if (sizes[FR_CLUSTER]) {
    int status = fr_cuda.attribute(&major, FR_CAPABILITY_MAJOR, device);
    if (status) return fr_cuda_failed(c, status, "its GPU");
    if (major < 9)
      return fr_fail(c, "step '%s': cuda:%d has no clusters, which came with compute capability "
                     "9.0.", step->label, (int)c->torch.index);
  }
  return fr_allow(c, started->loaded, (int32_t)sizes[FR_SHARED_BYTES], device);
}

static int fr_start_step(const fr_started* s, uint64_t* given, fr_stream stream) {
  void* arguments[FR_MOST_GIVEN];
  const uint32_t *n = s->sizes, shared = s->sizes[FR_SHARED_BYTES];
  if (s->step->kind == FR_COPY) return fr_cuda.copy(s->to, s->source, s->count, stream);
  if (s->fills)
    return s->pattern.size == 1   ? fr_cuda.fill8(s->to, (uint8_t)s->pattern.bytes, s->count, stream)
           : s->pattern.size == 2 ? fr_cuda.fill16(s->to, (uint16_t)s->pattern.bytes, s->count, stream)
                                  : fr_cuda.fill32(s->to, s->pattern.bytes, s->count, stream);
  uint64_t* next = &given[s->first];
  for (int i = 0; i < s->step->count; i++) {
    arguments[i] = next;
    next += s->step->given[i].kind == FR_GIVE_TENSOR_MAP ? FR_MAP_WORDS : 1;
  }
  return fr_launch_with(s->loaded, n, n[FR_CLUSTER] ? n + FR_CLUSTER : NULL, s->pdl, shared, stream, arguments);
}

/* Checks all steps, then starts them, one after the other; waits for nothing. */
static bool fr_start_steps(fr_packaged_call* c, fr_special* special, fr_work* work, fr_stream stream) {
  int device = 0, status = fr_cuda.get_device(&device, c->torch.index);
  if (status) return fr_cuda_failed(c, status, "its GPU is not there");
  fr_code* code = fr_find_code(c, special, NULL, device);
  if (!code) return false;
  for (int i = 0; i < work->count; i++) {
    fr_started* started = &work->started[i];
    if (started->step->kind == FR_RUN && !fr_check_step(c, code, started, device)) return false;
    if (fr_multiplies(started) && !fr_check_product(c, started->step)) return false;
  }
  for (int i = 0; i < work->count; i++) {
    const fr_started* started = &work->started[i];
    if (fr_multiplies(started)) {
      if (!fr_start_one_product(c, started->step, &started->product, stream)) return false;
      continue;
    }
    status = fr_start_step(started, work->given, stream);
    if (!status) continue;
    char what[300];
    snprintf(what, sizeof what, "step '%s' cannot be started", started->step->label);
    return fr_cuda_failed(c, status, what);
  }
  return true;
}

static bool fr_run_unit(fr_packaged_call* c, const fr_unit* unit, fr_special* special) {
  const fr_op* op = c->torch.of.op;
  fr_work work; /* 22 KB, of which little is written */
  work.count = work.gave = 0;
  work.written = 0;
  if (!fr_find_places(c, unit, special, work.places)) return false;
  for (int i = 0; i < unit->count; i++)
    if (!fr_add_step(c, &unit->steps[i], special->patterns[i], &work)) return false;
  for (int i = 0; i < op->outputs; i++)
    if (!(work.written >> (op->inputs + i) & 1) && work.places[op->inputs + i].count)
      return fr_fail(c, "the steps that have blocks and whose `when` holds write nothing to output "
                     "'%s', which is not empty.", op->output_name[i]);
  if (!work.count) return true;
  fr_stream stream;
  void* guard;
  bool done = fr_enter_cuda(c, &stream, &guard) && fr_start_steps(c, special, &work, stream);
  if (guard) fr_cuda.leave(guard);
  return done;
}

#endif
