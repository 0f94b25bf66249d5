/* What is known of the ops of a package before any call: ferrule/package_text.py writes it. */
#ifndef FERRULE_PACKAGED_TABLES_H
#define FERRULE_PACKAGED_TABLES_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "runtime.h"

/* An input of an op. Arrays that are written in place are outputs to a kernel. */
enum { FR_ARRAY, FR_BOOL_NUMBER, FR_INT_NUMBER, FR_FLOAT_NUMBER };
typedef struct {
  const char* name;
  uint8_t kind;
  bool optional, in_place;
  int8_t dtype; /* of a number: what the kernel reads, a place in ferrule.dtypes.ALL */
} fr_argument;

/* What a kernel reads, in order: an input of the op, or a value (a dim, as an int32). */
enum { FR_FROM_INPUT, FR_FROM_VALUE };
typedef struct {
  uint8_t from;
  int16_t index;
  bool described; /* it asks for the array's shape or strides */
} fr_source;

typedef struct {
  const char *name, *text; /* "K", "D + 1" */
  int16_t value;
} fr_template;

/* What must hold of a launch for a machine code to be for it: a set of these. */
enum {
  FR_SMALL = 1,          /* CPU: as Form of devices/cpu.py has them */
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
  const char* symbol;
  /* What is loaded of it. */
  fr_entry entry;
  bool over_grid, alone;
  void* function;
} fr_code;

typedef struct {
  uint8_t kind;   /* FR_PASS_… */
  int16_t index;  /* of the kernel's inputs or outputs */
} fr_parameter;
enum { FR_PASS_INPUT, FR_PASS_VALUE, FR_PASS_SHAPE, FR_PASS_STRIDES, FR_PASS_OUTPUT, FR_PASS_LAUNCH };

/* Machine code for one choice of dtypes, ranks and template values: a Spec. */
typedef struct {
  const int8_t *dtypes, *ndims; /* per input of the op; a dtype of -1: absent */
  const int64_t* templates;     /* per template parameter that is an expression */
  const char* const* fills;     /* per output, the bytes of an element; NULL: none, or a value */
  fr_code* codes;               /* the first that fits is taken */
  int32_t count;
  const fr_parameter* parameters; /* CUDA's */
  int32_t passed;
} fr_special;

/* A body. Numbers are places among the op's values; -1 stands for none. */
typedef struct {
  int16_t when, grid[3], threadgroup[3], shared, fill;
  bool filled;
  bool in_cuda; /* the body is CUDA, and gets shapes of 10 dims */
  const char* const* texts; /* grid and threadgroup, as they were declared */
  const fr_source* inputs;
  int32_t reads;
  const fr_template* templates;
  int32_t parameters;
  fr_special* specials;
  int32_t count;
} fr_body;

typedef struct {
  const char *name, *label, *schema, *declared; /* "scale_0123_4567", "scale", …, the rule */
  const int64_t* rule; /* with the values as its expressions */
  const fr_argument* inputs;
  const char* const* output_names;
  int32_t reads, makes;
  bool contiguous;
  fr_body* bodies;
  int32_t count;
  bool cuda; /* where the graph runs */
} fr_op;

#endif
