/* What a rule says of one call: its inputs checked, its dims found, its outputs' shapes worked out.
 *
 * A program is a rule as a list of int64_t, written by ferrule/rules/bytecode.py, which has the same
 * numbers as the enums below. It is trusted; the inputs are not: whatever they are, there is an
 * answer, and it is that of `Rule.bind` and `Rule.results` of ferrule/rules/rule.py. Nothing here words
 * an error: on any answer but FR_RULE_OK the caller lets Python bind the same inputs, and say what
 * is wrong with them, or do what is too large for this file.
 *
 * Knows no Python and no array library, and allocates nothing. Valid as C11 and as C++17.
 */
#ifndef FERRULE_RULE_H
#define FERRULE_RULE_H

#include <assert.h>
#include <stdbool.h>
#include <stdint.h>

#include "arithmetic.h"

enum {
  FR_PROGRAM_FORMAT = 2,
  FR_MAX_ARGUMENTS = 32, /* inputs and outputs together */
  FR_MAX_NDIM = 16,
  FR_MAX_SYMBOLS = 64,
  FR_MAX_STACK = 128, /* values that an expression keeps at a time */
  FR_MAX_DTYPES = 63, /* so that a set of them is a word */
  FR_NO_DTYPE = -1,
  FR_NO_DEFAULT = 63 /* FR_MAX_DTYPES, which is no dtype */
};

/* One input of a call. */
typedef struct {
  const int64_t* sizes; /* `ndim` of them */
  int32_t ndim;         /* 0 of a number */
  int32_t dtype;        /* place in ferrule.dtypes.ALL; FR_NO_DTYPE of a number of whatever dtype */
  int64_t value;        /* of a number that is no float */
  bool present;         /* false: None was given, and nothing else is read */
} fr_rule_input;

typedef struct {
  int32_t ndim;
  int32_t dtype;
  int64_t sizes[FR_MAX_NDIM];
} fr_rule_output;

/* What a call's inputs say. It points to nothing outside. Has 5 KB, of which little is written. */
typedef struct {
  int64_t symbols[FR_MAX_SYMBOLS];  /* RuleProgram.symbols says which: dims, then x.size and others */
  int32_t dtypes[FR_MAX_ARGUMENTS]; /* of each dtype variable: RuleProgram.variables */
  fr_rule_output outputs[FR_MAX_ARGUMENTS];
} fr_rule_result;

/* --------------------------------------------------------------------- how a program is written */

/* The words that a program begins with. Where each extra expression begins, as a word's number,
 * follows at once. Expressions stand anywhere. From word FR_RECORDS on stand, without gaps: the
 * dtype variables, the inputs, the attributes, the checks, the conditions (the word where each
 * begins), and the outputs. */
enum {
  FR_FORMAT = 0,
  FR_INPUTS = 1, /* how many, as in all that follow but the last */
  FR_OUTPUTS = 2,
  FR_VARIABLES = 3,
  FR_ATTRIBUTES = 4,
  FR_CHECKS = 5,
  FR_CONDITIONS = 6,
  FR_EXTRAS = 7,
  FR_RECORDS = 8,
  FR_HEADER_WORDS = 9
};

/* A dtype variable: what it may be, a bit per dtype; and what it is where no input says it: a dtype,
 * -1 - the number of another variable, or FR_NO_DEFAULT. */
enum { FR_VARIABLE_CHOICES = 0, FR_VARIABLE_DEFAULT = 1, FR_VARIABLE_WORDS = 2 };

/* An input. A place is the number of a dim; one behind *S counts from the end: -1 is the last. */
enum {
  FR_INPUT_FLAGS = 0,
  FR_INPUT_DTYPE = 1,   /* the dtype, or -1 - variable */
  FR_INPUT_NDIM = 2,    /* without *S */
  FR_INPUT_STAR = 3,    /* which *S, or -1 */
  FR_INPUT_STAR_AT = 4, /* dims before it */
  FR_INPUT_NAMED = 5,   /* how many dims are a name: place and symbol of each follow */
  FR_INPUT_WORDS = 6
};
enum { FR_OPTIONAL = 1, FR_NUMBER = 2 };

/* The size or rank of an input, which becomes a symbol; or of an output, counted after the inputs,
 * which only extra expressions name; or, in place of an input, the dtype of a variable, or how many
 * elements a star has; or the value of an input that is a number. */
enum {
  FR_ATTRIBUTE_KIND = 0,
  FR_ATTRIBUTE_INPUT = 1,
  FR_ATTRIBUTE_SYMBOL = 2,
  FR_ATTRIBUTE_WORDS = 3
};
enum { FR_SIZE = 0, FR_NDIM = 1, FR_DTYPE = 2, FR_VALUE = 3, FR_STAR_SIZE = 4 };

/* A dim of an input that must be what an expression says. */
enum { FR_CHECK_INPUT = 0, FR_CHECK_PLACE = 1, FR_CHECK_CODE = 2, FR_CHECK_WORDS = 3 };

/* An output: its dtype, as of an input, and kind and value of each dim. What a star, and others after
 * it, left is broadcast with one that is marked so. */
enum { FR_OUTPUT_DTYPE = 0, FR_OUTPUT_NDIM = 1, FR_OUTPUT_WORDS = 2 };
enum { FR_DIM_SYMBOL = 0, FR_DIM_CODE = 1, FR_DIM_STAR = 2, FR_DIM_BROADCAST = 3, FR_DIM_WORDS = 2 };

/* Instructions of an expression, for a machine with a stack. Jumps only go forward. */
enum {
  FR_OP_END = 0,           /* the value is on the stack */
  FR_OP_INT = 1,           /* push the next word */
  FR_OP_SYMBOL = 2,        /* push the symbol that the next word says */
  FR_OP_JUMP = 3,          /* over as many words as the next word says */
  FR_OP_JUMP_IF_FALSE = 4, /* as JUMP, if what is popped is 0 */
  FR_OP_AND = 5,           /* as JUMP, if the top is 0; else pop it */
  FR_OP_OR = 6,            /* as JUMP, if the top is not 0; else pop it */
  FR_OP_NOT = 7,
  FR_OP_NEG = 8,
  FR_OP_ADD = 9,
  FR_OP_SUB = 10,
  FR_OP_MUL = 11,
  FR_OP_FLOORDIV = 12,
  FR_OP_MOD = 13,
  FR_OP_CEILDIV = 14,
  FR_OP_MIN = 15,
  FR_OP_MAX = 16,
  FR_OP_EQ = 17,
  FR_OP_NE = 18,
  FR_OP_LT = 19,
  FR_OP_LE = 20,
  FR_OP_GT = 21,
  FR_OP_GE = 22, /* ADD to GE take two values, and leave one */
  FR_OP_NEXT_POW2 = 23,
  FR_OP_BUCKET = 24 /* how many sizes there are, and the sizes, which ascend, follow */
};

/* ---------------------------------------------------------------------------------- expressions */

/* The value of the expression that begins at `code`. After a fault it runs on to its end, with a 0
 * for what it did not find, so that it asks for the status once instead of at each step. */
static inline int fr_evaluate(const int64_t* code, const int64_t* symbols, int64_t* value) {
  int64_t stack[FR_MAX_STACK];
  int64_t* end = stack; /* behind the top */
  int32_t status = FR_RULE_OK;
  for (;;) {
    assert(end <= stack + FR_MAX_STACK);
    int64_t op = *code++;
    if (op >= FR_OP_ADD && op <= FR_OP_GE) {
      int64_t b = *--end;
      int64_t a = end[-1];
      int64_t* result = end - 1;
      switch (op) {
        case FR_OP_ADD: *result = fr_add(a, b, &status); break;
        case FR_OP_SUB: *result = fr_sub(a, b, &status); break;
        case FR_OP_MUL: *result = fr_mul(a, b, &status); break;
        case FR_OP_FLOORDIV: *result = fr_floordiv(a, b, &status); break;
        case FR_OP_MOD: *result = fr_mod(a, b, &status); break;
        case FR_OP_CEILDIV: *result = fr_ceildiv(a, b, &status); break;
        case FR_OP_MIN: *result = fr_min(a, b); break;
        case FR_OP_MAX: *result = fr_max(a, b); break;
        case FR_OP_EQ: *result = a == b; break;
        case FR_OP_NE: *result = a != b; break;
        case FR_OP_LT: *result = a < b; break;
        case FR_OP_LE: *result = a <= b; break;
        case FR_OP_GT: *result = a > b; break;
        default: assert(op == FR_OP_GE); *result = a >= b;
      }
      continue;
    }
    switch (op) {
      case FR_OP_INT: *end++ = *code++; break;
      case FR_OP_SYMBOL: *end++ = symbols[*code++]; break;
      case FR_OP_JUMP: code += 1 + *code; break;
      case FR_OP_JUMP_IF_FALSE: code += 1 + (*--end ? 0 : *code); break;
      case FR_OP_AND:
      case FR_OP_OR:
        if ((end[-1] != 0) == (op == FR_OP_OR)) {
          code += 1 + *code;
        } else {
          end--;
          code++;
        }
        break;
      case FR_OP_NOT: end[-1] = !end[-1]; break;
      case FR_OP_NEG: end[-1] = fr_neg(end[-1], &status); break;
      case FR_OP_NEXT_POW2: end[-1] = fr_next_pow2(end[-1], &status); break;
      case FR_OP_BUCKET: {
        const int64_t* size = code + 1;
        code = size + *code;
        while (size + 1 < code && *size < end[-1]) size++;
        end[-1] = *size;
        break;
      }
      default:
        assert(op == FR_OP_END && end == stack + 1);
        *value = stack[0];
        return status;
    }
  }
}

/* ---------------------------------------------------------------------------------------- rules */

static inline int64_t fr_rule_inputs(const int64_t* program) { return program[FR_INPUTS]; }
static inline int64_t fr_rule_outputs(const int64_t* program) { return program[FR_OUTPUTS]; }

/* What has been found out in the middle of fr_rule_bind; bit k: whether number k has a value. */
typedef struct {
  uint64_t symbols, variables, stars;
  struct {
    const int64_t* sizes;
    int32_t ndim;
  } star[FR_MAX_ARGUMENTS];
} fr_rule_found;

static inline bool fr_rule_bind_dtype(int64_t declared, int32_t dtype, const int64_t* variables,
                                      fr_rule_found* found, fr_rule_result* out) {
  if (declared >= 0) return dtype == declared;
  int64_t variable = -1 - declared;
  uint64_t bit = UINT64_C(1) << variable;
  if (found->variables & bit) return out->dtypes[variable] == dtype;
  int64_t choices = variables[FR_VARIABLE_WORDS * variable + FR_VARIABLE_CHOICES];
  if (dtype < 0 || dtype >= FR_MAX_DTYPES || !(choices >> dtype & 1)) return false;
  found->variables |= bit;
  out->dtypes[variable] = dtype;
  return true;
}

/* Gives those dtype variables that no input has bound what they are by default. */
static inline bool fr_rule_bind_defaults(const int64_t* variables, int64_t count,
                                         fr_rule_found* found, fr_rule_result* out) {
  for (int64_t v = 0; v < count; v++) {
    int64_t dtype = variables[FR_VARIABLE_WORDS * v + FR_VARIABLE_DEFAULT];
    if ((found->variables >> v & 1) || dtype == FR_NO_DEFAULT) continue;
    if (dtype < 0) dtype = out->dtypes[-1 - dtype];
    if (!fr_rule_bind_dtype(-1 - v, (int32_t)dtype, variables, found, out)) return false;
  }
  return true;
}

static inline bool fr_rule_bind_star(int64_t star, const int64_t* sizes, int32_t ndim,
                                     fr_rule_found* found) {
  uint64_t bit = UINT64_C(1) << star;
  if (!(found->stars & bit)) {
    found->stars |= bit;
    found->star[star].sizes = sizes;
    found->star[star].ndim = ndim;
    return true;
  }
  if (found->star[star].ndim != ndim) return false;
  for (int32_t i = 0; i < ndim; i++)
    if (found->star[star].sizes[i] != sizes[i]) return false;
  return true;
}

static inline int fr_rule_bind_input(const int64_t* record, const fr_rule_input* input,
                                     const int64_t* variables, fr_rule_found* found,
                                     fr_rule_result* out) {
  int64_t flags = record[FR_INPUT_FLAGS];
  int64_t least = record[FR_INPUT_NDIM], star = record[FR_INPUT_STAR];
  int32_t ndim = input->ndim;
  const int64_t* named = record + FR_INPUT_WORDS;
  if (!input->present) {
    /* A dim that no input gives is 0; another input may still give it. */
    for (int64_t i = 0; i < record[FR_INPUT_NAMED]; i++, named += 2)
      if (!(found->symbols >> named[1] & 1)) out->symbols[named[1]] = 0;
    return flags & FR_OPTIONAL ? FR_RULE_OK : FR_RULE_MISMATCH;
  }
  if (ndim > FR_MAX_NDIM) return FR_RULE_LIMIT;
  if (star < 0 ? ndim != least : ndim < least) return FR_RULE_MISMATCH;
  bool any = (flags & FR_NUMBER) && input->dtype == FR_NO_DTYPE;
  if (!any && !fr_rule_bind_dtype(record[FR_INPUT_DTYPE], input->dtype, variables, found, out))
    return FR_RULE_MISMATCH;
  for (int32_t i = 0; i < ndim; i++)
    if (input->sizes[i] < 0) return FR_RULE_MISMATCH; /* no array has such a size */
  if (star >= 0) {
    /* With no dims at all, sizes may be NULL, to which C does not even add 0. */
    const int64_t* starred = ndim ? input->sizes + record[FR_INPUT_STAR_AT] : input->sizes;
    if (!fr_rule_bind_star(star, starred, ndim - (int32_t)least, found)) return FR_RULE_MISMATCH;
  }
  for (int64_t i = 0; i < record[FR_INPUT_NAMED]; i++, named += 2) {
    int64_t size = input->sizes[named[0] < 0 ? named[0] + ndim : named[0]], symbol = named[1];
    uint64_t bit = UINT64_C(1) << symbol;
    if (!(found->symbols & bit)) {
      found->symbols |= bit;
      out->symbols[symbol] = size;
    } else if (out->symbols[symbol] != size) {
      return FR_RULE_MISMATCH;
    }
  }
  return FR_RULE_OK;
}

/* How many elements an array has: 0 where any size is 0, however large the others are. */
static inline int64_t fr_rule_size(int32_t ndim, const int64_t* sizes, int32_t* status) {
  int64_t size = 1;
  int32_t large = FR_RULE_OK;
  for (int32_t i = 0; i < ndim; i++) {
    if (sizes[i] == 0) return 0;
    size = fr_mul(size, sizes[i], &large);
  }
  return large ? fr_fault(status, large) : size;
}

/* Broadcasts the last dims, from `first` on, with these sizes, by NumPy's rules. */
static inline int fr_rule_broadcast(const int64_t* sizes, int32_t count, int32_t first,
                                    int32_t* ndim, int64_t* out) {
  int32_t more = count - (*ndim - first);
  if (more > 0) {
    if (*ndim + more > FR_MAX_NDIM) return FR_RULE_LIMIT;
    for (int32_t k = *ndim - 1; k >= first; k--) out[k + more] = out[k];
    for (int32_t k = 0; k < more; k++) out[first + k] = 1;
    *ndim += more;
  }
  int64_t* last = out + *ndim - count;
  for (int32_t k = 0; k < count; k++) {
    if (last[k] == 1)
      last[k] = sizes[k];
    else if (sizes[k] != 1 && sizes[k] != last[k])
      return FR_RULE_MISMATCH;
  }
  return FR_RULE_OK;
}

static inline int fr_rule_make_output(const int64_t* program, const int64_t* record,
                                      const fr_rule_found* found, const fr_rule_result* known,
                                      fr_rule_output* output) {
  int64_t dtype = record[FR_OUTPUT_DTYPE];
  output->dtype = dtype >= 0 ? (int32_t)dtype : known->dtypes[-1 - dtype];
  int32_t ndim = 0, star = 0; /* where the last star begins */
  const int64_t* dim = record + FR_OUTPUT_WORDS;
  for (int64_t i = 0; i < record[FR_OUTPUT_NDIM]; i++, dim += FR_DIM_WORDS) {
    if (dim[0] == FR_DIM_BROADCAST) {
      int status = fr_rule_broadcast(found->star[dim[1]].sizes, found->star[dim[1]].ndim, star,
                                     &ndim, output->sizes);
      if (status) return status;
      continue;
    }
    if (dim[0] == FR_DIM_STAR) {
      star = ndim;
      if (ndim + found->star[dim[1]].ndim > FR_MAX_NDIM) return FR_RULE_LIMIT;
      for (int32_t k = 0; k < found->star[dim[1]].ndim; k++)
        output->sizes[ndim++] = found->star[dim[1]].sizes[k];
      continue;
    }
    if (ndim == FR_MAX_NDIM) return FR_RULE_LIMIT;
    int64_t size;
    if (dim[0] == FR_DIM_SYMBOL) {
      size = known->symbols[dim[1]];
    } else {
      int status = fr_evaluate(program + dim[1], known->symbols, &size);
      if (status) return status;
    }
    if (size < 0) return FR_RULE_MISMATCH;
    output->sizes[ndim++] = size;
  }
  output->ndim = ndim;
  return FR_RULE_OK;
}

/* Checks the inputs of a call, fr_rule_inputs(program) of them, and fills `out`. Returns FR_RULE_OK
 * or what is wrong, after which nothing in `out` means anything. An `x.size` that the rule or an
 * extra expression names must fit, whether its value is asked for or not. */
static inline int fr_rule_bind(const int64_t* program, const fr_rule_input* inputs,
                               fr_rule_result* out) {
  if (program[FR_FORMAT] != FR_PROGRAM_FORMAT) return FR_RULE_LIMIT;
  assert(program[FR_INPUTS] + program[FR_OUTPUTS] <= FR_MAX_ARGUMENTS);
  const int64_t* variables = program + program[FR_RECORDS];
  const int64_t* record = variables + FR_VARIABLE_WORDS * program[FR_VARIABLES];
  fr_rule_found found;
  found.symbols = found.variables = found.stars = 0;
  int32_t status = FR_RULE_OK;
  for (int64_t i = 0; i < program[FR_INPUTS]; i++) {
    status = fr_rule_bind_input(record, &inputs[i], variables, &found, out);
    if (status) return status;
    record += FR_INPUT_WORDS + 2 * record[FR_INPUT_NAMED];
  }
  if (!fr_rule_bind_defaults(variables, program[FR_VARIABLES], &found, out))
    return FR_RULE_MISMATCH;
  const int64_t* attributes = record;
  for (int64_t i = 0; i < program[FR_ATTRIBUTES]; i++, record += FR_ATTRIBUTE_WORDS) {
    if (record[FR_ATTRIBUTE_KIND] == FR_DTYPE) {
      out->symbols[record[FR_ATTRIBUTE_SYMBOL]] = out->dtypes[record[FR_ATTRIBUTE_INPUT]];
      continue;
    }
    if (record[FR_ATTRIBUTE_KIND] == FR_STAR_SIZE) {
      int64_t star = record[FR_ATTRIBUTE_INPUT];
      out->symbols[record[FR_ATTRIBUTE_SYMBOL]] =
          fr_rule_size(found.star[star].ndim, found.star[star].sizes, &status);
      continue;
    }
    if (record[FR_ATTRIBUTE_INPUT] >= program[FR_INPUTS]) continue; /* an output's */
    const fr_rule_input* input = &inputs[record[FR_ATTRIBUTE_INPUT]];
    out->symbols[record[FR_ATTRIBUTE_SYMBOL]] =
        record[FR_ATTRIBUTE_KIND] == FR_VALUE  ? input->value
        : record[FR_ATTRIBUTE_KIND] == FR_NDIM ? input->ndim
                                               : fr_rule_size(input->ndim, input->sizes, &status);
  }
  if (status) return status;
  int64_t value;
  for (int64_t i = 0; i < program[FR_CHECKS]; i++, record += FR_CHECK_WORDS) {
    const fr_rule_input* input = &inputs[record[FR_CHECK_INPUT]];
    if (!input->present) continue;
    int64_t place = record[FR_CHECK_PLACE];
    status = fr_evaluate(program + record[FR_CHECK_CODE], out->symbols, &value);
    if (status) return status;
    if (value != input->sizes[place < 0 ? place + input->ndim : place]) return FR_RULE_MISMATCH;
  }
  for (int64_t i = 0; i < program[FR_CONDITIONS]; i++, record++) {
    status = fr_evaluate(program + *record, out->symbols, &value);
    if (status) return status;
    if (!value) return FR_RULE_MISMATCH;
  }
  for (int64_t i = 0; i < program[FR_OUTPUTS]; i++) {
    status = fr_rule_make_output(program, record, &found, out, &out->outputs[i]);
    if (status) return status;
    record += FR_OUTPUT_WORDS + FR_DIM_WORDS * record[FR_OUTPUT_NDIM];
  }
  record = attributes;
  for (int64_t i = 0; i < program[FR_ATTRIBUTES]; i++, record += FR_ATTRIBUTE_WORDS) {
    int64_t number = record[FR_ATTRIBUTE_INPUT] - program[FR_INPUTS];
    bool of_array = record[FR_ATTRIBUTE_KIND] != FR_DTYPE && record[FR_ATTRIBUTE_KIND] != FR_STAR_SIZE;
    if (number < 0 || !of_array) continue;
    const fr_rule_output* output = &out->outputs[number];
    out->symbols[record[FR_ATTRIBUTE_SYMBOL]] =
        record[FR_ATTRIBUTE_KIND] == FR_NDIM ? output->ndim
                                             : fr_rule_size(output->ndim, output->sizes, &status);
  }
  return status;
}

/* The value of an extra expression of the program, for what fr_rule_bind has found. FR_RULE_LIMIT
 * where there is no such expression. */
static inline int fr_rule_value(const int64_t* program, int expression, const fr_rule_result* found,
                                int64_t* value) {
  if (expression < 0 || expression >= program[FR_EXTRAS]) return FR_RULE_LIMIT;
  return fr_evaluate(program + program[FR_HEADER_WORDS + expression], found->symbols, value);
}

#endif
