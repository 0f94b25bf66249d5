/* Calls of ops by torch's dispatcher, whose arguments and results are on a stack: what torch_calls.c and the libraries
 * of packages share. Reads a call's inputs for the engine (op_calls.h), copies those that a body wants otherwise, and
 * makes its outputs. Words no error.
 *
 * Whoever includes this defines `torch`, the functions of torch_abi.h. Valid as C11 and as C++17.
 */
#ifndef FERRULE_TORCH_STACK_H
#define FERRULE_TORCH_STACK_H

#include "op_calls.h"
#include "torch_abi.h"

static int32_t torch_cuda_type; /* torch's numbers of the CUDA device type and of dtypes */
static int32_t torch_dtype[FR_DTYPES];
static int8_t place_of_dtype[128]; /* the reverse of torch_dtype; -1 where there is none */

/* One call under way. */
typedef struct {
  fr_call of;
  TH array[FR_MAX_ARGUMENTS]; /* of inputs, ours to delete; NULL: absent, or a number */
  TH copy[FR_MAX_ARGUMENTS], output[FR_MAX_ARGUMENTS];
  void* memory[FR_MAX_ARGUMENTS]; /* of outputs */
  int64_t own_strides[FR_MAX_ARGUMENTS][FR_MAX_NDIM]; /* of copies */
  int32_t type, index; /* torch's numbers of the device */
  bool placed; /* an array has said which */
} torch_call;

/* Takes torch's numbers of all dtypes; -1: it has none. */
static void torch_learn_dtypes(const int32_t* codes) {
  memset(place_of_dtype, -1, sizeof place_of_dtype);
  for (int i = 0; i < FR_DTYPES; i++) {
    torch_dtype[i] = codes[i];
    if (codes[i] >= 0 && codes[i] < 128) place_of_dtype[codes[i]] = (int8_t)i;
  }
}

/* Takes the arguments off the stack. All that is taken is ours, also after an error. */
static void torch_take(torch_call* c, fr_op* op, int number, const SIV* stack) {
  fr_begin(&c->of, op, number);
  c->type = c->index = 0;
  c->placed = false;
  for (int i = 0; i < op->inputs; i++) {
    c->array[i] = c->copy[i] = NULL;
    if (op->input[i].kind != INPUT_ARRAY) continue;
    if (!op->input[i].optional) {
      c->array[i] = (TH)(uintptr_t)stack[i];
    } else if (stack[i]) { /* the address of a word that has the tensor */
      SIV* word = (SIV*)(uintptr_t)stack[i];
      c->array[i] = (TH)(uintptr_t)*word;
      torch.free_word(word); /* torch made it with `new` */
    }
  }
  for (int i = 0; i < op->outputs; i++) c->output[i] = NULL;
}

/* What may be wrong with an input. */
enum {
  TORCH_FITS,
  TORCH_MISFIT,    /* its declared dtype has no room for a number */
  TORCH_SILENT,    /* torch does not say what it is */
  TORCH_ELSEWHERE, /* it is on another device than the first */
  TORCH_DEEP,      /* it has too many dims */
  TORCH_STRANGE    /* its dtype is not known */
};

/* Fills in what the rule wants to know of an input. Whatever is wrong, all is filled in that is known. */
static int torch_read(torch_call* c, int i, SIV word) {
  fr_rule_input* in = &c->of.input[i];
  int kind = c->of.op->input[i].kind, wrong = TORCH_FITS;
  if (kind == INPUT_FLOAT) {
    double number;
    memcpy(&number, &word, sizeof number);
    return fr_give_float(&c->of, i, number) ? TORCH_FITS : TORCH_MISFIT;
  }
  if (kind != INPUT_ARRAY) {
    int64_t number = kind == INPUT_BOOL ? (uint8_t)word != 0 : (int64_t)word;
    return fr_give_integer(&c->of, i, number) ? TORCH_FITS : TORCH_MISFIT;
  }
  TH array = c->array[i];
  in->present = array != NULL;
  in->dtype = FR_NO_DTYPE;
  in->ndim = 0;
  in->sizes = NULL;
  c->of.pointer[i] = NULL;
  if (!array) return TORCH_FITS;
  int64_t ndim, *sizes, *strides;
  int32_t dtype, type, index;
  if (torch.get_dim(array, &ndim) || torch.get_sizes(array, &sizes) || torch.get_strides(array, &strides) ||
      torch.get_dtype(array, &dtype) || torch.get_device_type(array, &type) ||
      torch.get_device_index(array, &index) || torch.get_data_ptr(array, &c->of.pointer[i])) {
    torch.is_defined(array, &in->present); /* it is not where None was given and a tensor is declared */
    return TORCH_SILENT;
  }
  if (!c->placed) {
    c->placed = true;
    c->type = type;
    c->index = index;
  }
  if (type != c->type || index != c->index) wrong = TORCH_ELSEWHERE;
  c->of.host_device[2 * i] = type;
  c->of.host_device[2 * i + 1] = index;
  in->ndim = (int32_t)ndim;
  in->sizes = sizes; /* live as long as the tensor, as strides do */
  c->of.strides[i] = strides;
  if (!wrong && ndim > FR_MAX_NDIM) wrong = TORCH_DEEP;
  if (dtype >= 0 && dtype < 128) in->dtype = place_of_dtype[dtype];
  return !wrong && in->dtype < 0 ? TORCH_STRANGE : wrong;
}

/* A tensor that lies row by row, and its memory. Where torch has none, no tensor, or a tensor and no memory. */
static bool torch_make(const torch_call* c, int32_t ndim, const int64_t* sizes, int32_t dtype, TH* tensor,
                       void** memory) {
  int64_t strides[FR_MAX_NDIM];
  fr_row_strides(ndim, sizes, strides);
  *memory = NULL;
  return !torch.empty_strided(ndim, sizes, strides, torch_dtype[dtype], c->type, c->index, tensor) &&
         !torch.get_data_ptr(*tensor, memory);
}

/* Gives the body a copy of an input that lies row by row. */
static bool torch_copy_input(torch_call* c, int i) {
  const fr_rule_input* in = &c->of.input[i];
  if (!torch_make(c, in->ndim, in->sizes, in->dtype, &c->copy[i], &c->of.pointer[i]) ||
      torch.copy_(c->copy[i], c->array[i], 0))
    return false;
  fr_row_strides(in->ndim, in->sizes, c->own_strides[i]);
  c->of.strides[i] = c->own_strides[i];
  return true;
}

/* Copies back what was written to the copy of an input, if it is written in place. */
static bool torch_copy_back(const torch_call* c, int i) {
  return !c->copy[i] || !c->of.op->input[i].mutable_ || !torch.copy_(c->array[i], c->copy[i], 0);
}

enum { TORCH_HUGE_PAGES_FROM = 32 << 20 }; /* bytes */

static bool torch_make_output(torch_call* c, int i, const fr_rule_output* out) {
  if (!torch_make(c, out->ndim, out->sizes, out->dtype, &c->output[i], &c->memory[i])) return false;
  size_t bytes = fr_item_bytes[out->dtype] * (size_t)fr_count(out->ndim, out->sizes);
  if (c->of.request.device_type == CPU && bytes >= TORCH_HUGE_PAGES_FROM) fr_use_huge_pages(c->memory[i], bytes);
  return true;
}

/* Whether arrays begin where CUDA's texts for aligned ones want them. */
static bool torch_inputs_aligned(const torch_call* c) {
  for (int i = 0; i < c->of.op->inputs; i++)
    if (c->of.op->input[i].kind == INPUT_ARRAY && (uintptr_t)c->of.pointer[i] % 16) return false;
  return true;
}

static bool torch_outputs_aligned(const torch_call* c) {
  for (int i = 0; i < c->of.op->outputs; i++)
    if ((uintptr_t)c->memory[i] % 16) return false;
  return true;
}

/* Lets go of inputs and of their copies, and leaves the outputs on the stack if all went well. A GPU may be using
 * copies still: torch's allocator gives their memory to later work on the same stream alone. */
static void torch_finish(torch_call* c, SIV* stack, bool good) {
  for (int i = 0; i < c->of.op->inputs; i++) {
    if (c->copy[i]) torch.delete_tensor_object(c->copy[i]);
    if (c->array[i]) torch.delete_tensor_object(c->array[i]);
  }
  for (int i = 0; i < c->of.op->outputs; i++) {
    if (!good && c->output[i]) torch.delete_tensor_object(c->output[i]);
    stack[i] = (SIV)(uintptr_t)c->output[i];
  }
}

#endif
