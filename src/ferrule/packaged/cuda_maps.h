/* Tensor maps as arguments of the steps of CUDA units. Included by cuda_steps.h alone.
 *
 * Does what operators/unit_maps.py and `Driver.tensor_map` do in Python.
 */
#ifndef FERRULE_PACKAGED_CUDA_MAPS_H
#define FERRULE_PACKAGED_CUDA_MAPS_H

/* CUtensorMapDataType: of other dtypes that of unsigned integers with as many bytes. */
static int fr_mapped_type(int dtype) {
  static const int by_bytes[] = {0, 0, 1, 1, 2, 2, 2, 2, 4};
  switch (dtype) {
    case FR_INT32: return 3;
    case FR_INT64: return 5;
    case FR_FLOAT16: return 6;
    case FR_FLOAT32: return 7;
    case FR_FLOAT64: return 8;
    case FR_BFLOAT16: return 9;
    default: return by_bytes[fr_item_bytes[dtype]];
  }
}

/* Encodes a map in FR_MAP_WORDS words. */
static bool fr_give_map(fr_packaged_call* c, const fr_step* step, const fr_argument_given* given,
                        const fr_place* place, uint64_t* words) {
  const fr_tensor_map* map = given->map;
  uint64_t dims[FR_MAP_DIMS], strides[FR_MAP_DIMS] = {0}, item = fr_item_bytes[place->dtype];
  uint32_t box[FR_MAP_DIMS], ones[FR_MAP_DIMS];
  const char* wrong = place->address && place->address % 16 == 0 ? NULL : "it begins at no multiple of 16 bytes";
  char text[600];
  for (int i = 0; i < map->rank; i++) {
    int64_t dim, stride = 0, length;
    if (!fr_value(c, map->dims[i], &dim) || !fr_value(c, map->box[i], &length)) return false;
    if (i && !fr_value(c, map->strides[i - 1], &stride)) return false;
    if (dim < 1 || dim > INT64_C(1) << 31) wrong = "a dim is not from 1 to 2**31";
    if (length < 1 || length > 256) wrong = "a size of its box is not from 1 to 256";
    const int64_t most = (INT64_C(1) << 40) / (int64_t)item; /* as bytes */
    if (i && (stride < 1 || stride >= most || stride * (int64_t)item % 16))
      wrong = "a stride is no multiple of 16 bytes below 2**40";
    dims[i] = (uint64_t)dim;
    box[i] = (uint32_t)length;
    ones[i] = 1;
    if (i) strides[i - 1] = (uint64_t)stride * item;
  }
  static const uint64_t widest[] = {UINT64_MAX, 32, 64, 128};
  if (!wrong && (box[0] * item % 16 || box[0] * item > widest[map->swizzle]))
    wrong = "rows of its box are no multiple of 16 bytes, or longer than its swizzle";
  if (wrong)
    return fr_fail(c, "`arguments of step '%s'`: %s cannot be: %s, for %s.", step->label, given->text, wrong,
                   fr_shown(c, text, sizeof text));
  struct {
    uint64_t words[FR_MAP_WORDS];
  } made __attribute__((aligned(128))); /* where CUDA writes it */
  fr_find_cuda_once();
  if (fr_cuda.missing) return fr_fail(c, "%s was not found.", fr_cuda.missing);
  int status = fr_cuda.encode(&made, fr_mapped_type(place->dtype), map->rank, (void*)(uintptr_t)place->address, dims,
                              strides, box, ones, 0, map->swizzle, map->l2, map->fill);
  if (status) return fr_cuda_failed(c, status, given->text);
  memcpy(words, made.words, sizeof made.words);
  return true;
}

#endif
