/* What interprets rules, for tests/rules/test_bytecode.py: as a library, and as a program that binds what
 * it reads, which a sanitizer may watch. */
#include <stdio.h>
#include <stdlib.h>

#include "rule.h"

int rule_bind(const int64_t* program, const fr_rule_input* inputs, fr_rule_result* out) {
  return fr_rule_bind(program, inputs, out);
}

int rule_value(const int64_t* program, int expression, const fr_rule_result* found, int64_t* value) {
  return fr_rule_value(program, expression, found, value);
}

int rule_evaluate(const int64_t* code, const int64_t* symbols, int64_t* value) {
  return fr_evaluate(code, symbols, value);
}

size_t rule_bytes(int what) { return what ? sizeof(fr_rule_result) : sizeof(fr_rule_input); }

/* `count` words from standard input in memory of their own, where a sanitizer sees what is read
 * behind them. */
static int64_t* words(int64_t count) {
  size_t bytes = (size_t)count * sizeof(int64_t);
  int64_t* found = count ? malloc(bytes) : NULL;
  if (count && fread(found, 1, bytes, stdin) != bytes) exit(2);
  return found;
}

static int64_t word(void) {
  int64_t* one = words(1);
  int64_t value = *one;
  free(one);
  return value;
}

/* Reads calls: how many words a program has, the program, and of each input whether it is there,
 * rank, dtype, the value of a number, how many sizes there are, and the sizes. Prints a line per call: the status, then
 * that and value of each extra expression, and rank, dtype and sizes of each output. */
int main(void) {
  for (int c = getchar(); c != EOF; c = getchar()) {
    ungetc(c, stdin);
    int64_t* program = words(word());
    size_t count = (size_t)fr_rule_inputs(program);
    fr_rule_input* inputs = malloc(count * sizeof *inputs);
    for (size_t i = 0; i < count; i++) {
      inputs[i].present = word() != 0;
      inputs[i].ndim = (int32_t)word();
      inputs[i].dtype = (int32_t)word();
      inputs[i].value = word();
      inputs[i].sizes = words(word());
    }
    fr_rule_result* out = malloc(sizeof *out);
    int status = fr_rule_bind(program, inputs, out);
    printf("%d", status);
    for (int i = 0; !status && i < program[FR_EXTRAS]; i++) {
      int64_t value = 0;
      int found = fr_rule_value(program, i, out, &value);
      printf(" %d %lld", found, found ? 0LL : (long long)value);
    }
    for (int64_t i = 0; !status && i < fr_rule_outputs(program); i++) {
      const fr_rule_output* one = &out->outputs[i];
      printf(" %d %d", (int)one->ndim, (int)one->dtype);
      for (int32_t d = 0; d < one->ndim; d++) printf(" %lld", (long long)one->sizes[d]);
    }
    putchar('\n');
    for (size_t i = 0; i < count; i++) free((void*)inputs[i].sizes);
    free(inputs);
    free(program);
    free(out);
  }
  return 0;
}
