/* What is known of the ops of a package before any call: ferrule/operators/package.py writes it. */
#ifndef FERRULE_PACKAGED_TABLES_H
#define FERRULE_PACKAGED_TABLES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "op_calls.h"

#define FR_NAME(PLACE, NAME, BYTES) #NAME,
static const char* const fr_dtype_names[] = {FR_ALL_DTYPES(FR_NAME)};
#undef FR_NAME

/* A template parameter that is an expression: "K", "D + 1". */
typedef struct {
  const char *name, *text;
} fr_template;

/* What must hold of a launch for a machine code to be for it: a set of these. */
enum {
  FR_SMALL = 1,          /* CPU: the bits of fr_cpu_form */
  FR_SIMD_ROWS = 2,
  FR_GROUP_ROWS = 4,
  FR_WIDE = 8,
  FR_ONE_ROW = 16,       /* CUDA: threadgroups have one row of threads */
  FR_EVEN = 32,          /* the grid is full of whole threadgroups */
  FR_FULL = 64,          /* every simdgroup has 32 threads */
  FR_LANES_IN_X = 128,   /* threadgroups, the last ones too, are a multiple of 32 wide */
  FR_NEAR = 256,         /* no more threadgroups along y and z than a CUDA grid has */
  FR_SHALLOW = 512       /* no more threads along z than a block has */
};

/* How blocks of CUDA hold threads. */
enum { FR_LINES, FR_BOXES, FR_ANY };

/* A function of a cubin, and what it is on a GPU, once that has loaded it. */
enum { FR_MOST_GPUS = 32 };
typedef struct {
  void *kernel, *function;        /* CUDA's CUkernel and CUfunction */
  int32_t threads, fixed, allowed; /* a block's threads, its own shared memory, and the dynamic */
} fr_loaded;
typedef struct {
  const char* symbol;
  fr_loaded* on; /* FR_MOST_GPUS of them */
} fr_function;

typedef struct {
  const char* bytes; /* a shared library, or a cubin */
  size_t size;
  uint32_t needs;
  /* CUDA's: */
  uint8_t blocks;
  bool far_away;        /* threadgroups are counted through */
  uint16_t architecture; /* such as 90 */
  bool portable;        /* PTX, for newer GPUs, too */
  bool specific;        /* for this architecture alone, such as sm_90a */
  uint8_t each;         /* threadgroups that a block carries out; 1 but for large launches */
  bool aligned;         /* arrays begin at multiples of 16 bytes */
  uint32_t shared;      /* bytes of dynamic shared memory */
  fr_function* functions; /* a body's one, or those of a unit's steps */
  /* What is loaded of it. */
  fr_entry entry;
  bool over_grid, alone;
  void* library;
} fr_code;

/* What a step of a CUDA unit does. Arrays are numbered: inputs, outputs, scratch. */
enum { FR_RUN, FR_FILL, FR_COPY, FR_MATMUL };

/* What a function gets: an array's address, a number's bytes, or a value. */
enum {
  FR_GIVE_ARRAY, FR_GIVE_NUMBER, FR_GIVE_BOOL, FR_GIVE_INT32, FR_GIVE_UINT32, FR_GIVE_INT64,
  FR_GIVE_UINT64, FR_GIVE_TENSOR_MAP
};

/* A CUtensorMap, of 128 bytes. */
enum { FR_MAP_DIMS = 5, FR_MAP_WORDS = 16 };
typedef struct {
  uint8_t rank, swizzle, l2, fill;
  int16_t dims[FR_MAP_DIMS], strides[FR_MAP_DIMS], box[FR_MAP_DIMS]; /* values, the innermost first */
} fr_tensor_map;

typedef struct {
  uint8_t kind;
  int16_t index;    /* of an array, an input or a value */
  const char* text; /* a value, as it was declared */
  const fr_tensor_map* map;
} fr_argument_given;

/* Values of a launch: blocks, threads of a block, and blocks of a cluster, along three axes each,
 * and bytes of shared memory. */
enum { FR_BLOCKS = 0, FR_BLOCK = 3, FR_CLUSTER = 6, FR_SHARED_BYTES = 9, FR_LAUNCH_VALUES = 10 };

/* A matrix product, of the step's `source` by another array. */
typedef struct {
  int16_t by, workspace;     /* arrays */
  int16_t factors;           /* an array of alpha and beta; -1: what follows */
  bool transpose_a, transpose_b, tf32;
  int16_t alpha_of, beta_of; /* inputs that are float32 numbers; -1: what follows */
  float alpha, beta;
} fr_multiplied;

typedef struct {
  uint8_t kind;
  int16_t when;       /* a value; -1: always */
  int16_t to, source; /* of fills, copies and products: arrays */
  int16_t function;
  const char* label;  /* "gemm<T>" */
  int16_t launch[FR_LAUNCH_VALUES]; /* values; -1 where there is no cluster */
  const char* const* texts;         /* of each, as it was declared */
  const fr_argument_given* given;
  int32_t count;
  const fr_multiplied* multiplied;
  bool pdl; /* it may begin before the kernel ahead has ended */
} fr_step;

typedef struct {
  const char* name;
  const int16_t* dims;      /* values */
  const char* const* texts; /* as they were declared */
  int32_t ndim;
} fr_scratch;

/* A whole translation unit of CUDA. */
enum { FR_MOST_STEPS = 64, FR_MOST_GIVEN = 512, FR_MOST_SCRATCH = 32 };
typedef struct {
  const fr_step* steps;
  int32_t count;
  const fr_scratch* scratch;
  int32_t arrays; /* of scratch */
} fr_unit;

/* What a fill writes again and again. */
typedef struct {
  uint8_t size; /* 1, 2 or 4 bytes; 0: the step is none */
  uint32_t bytes;
} fr_pattern;

/* Machine code for one choice of dtypes, ranks and template values: a Spec. */
typedef struct {
  const int8_t *dtypes, *ndims; /* per input of the op; a dtype of -1: absent */
  const int64_t* templates;     /* per template parameter that is an expression */
  const char* const* fills;     /* per output, the bytes of an element; NULL: none, or a value */
  fr_code* codes;               /* the first that fits is taken */
  int32_t count;
  const int32_t* parameters;    /* CUDA's: kind and index of each, as in fr_table_entry */
  int32_t passed;
  const int8_t* scratch;      /* a unit's: the dtype of each array */
  const fr_pattern* patterns; /* of each step */
} fr_special;

/* What packages know of a body beyond the engine's fr_body, or of a unit. Numbers are places among the op's values; -1
 * stands for none. */
typedef struct {
  int16_t shared, fill;
  bool described; /* the body asks for the shape, strides or rank of an array */
  const char* const* texts; /* grid and threadgroup, as they were declared */
  const fr_template* templates;
  fr_special* specials;
  int32_t count;
  const fr_unit* unit; /* NULL: a body */
  bool pdl;            /* as of a step */
} fr_packaged_body;

typedef struct {
  const char *name, *label, *schema, *declared; /* "scale_0123_4567", "scale", …, the rule */
  fr_op* table;                                 /* the engine's */
  const char* const* input_names;
  const fr_packaged_body* bodies;
  bool cuda; /* where the graph runs */
} fr_packaged_op;

#endif
