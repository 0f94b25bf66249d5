// What -fsanitize=undefined makes a compiler call: its own checks of arithmetic, of indices and of
// alignment.
#pragma once
#include "state.h"

#include <stdlib.h>

namespace {

struct source_location {
  const char* file;
  uint32_t line, column;
};
struct type_descriptor {
  uint16_t kind, info;
  char name[1];
};
struct typed_check {
  source_location at;
  const type_descriptor* type;
};
struct indexed_check {
  source_location at;
  const type_descriptor *array, *index;
};
struct aligned_check {
  source_location at;
  const type_descriptor* type;
  unsigned char log_alignment, kind;
};

bool ends_with(const char* text, const char* end) {
  const size_t n = strlen(text), m = strlen(end);
  return n >= m && !strcmp(text + n - m, end);
}
bool is_authors(const source_location& at) {
  return at.file && (ends_with(at.file, ".source") || ends_with(at.file, ".header"));
}

// An event of the place in the author's text, or, where the dialect's own header stands there, of the code's.
watch_event* add_at(watch_kind kind, const source_location& at, uintptr_t pc) {
  return is_authors(at) ? add(kind, -1, 0, 0, at.file, at.line, at.column) : add(kind, -1, pc);
}

// An operand as 64 bits, from how the check was given it.
uint64_t operand(const type_descriptor* type, uint64_t value) {
  const unsigned bits = 1u << (type->info >> 1);
  if (bits > 64) return *reinterpret_cast<const uint64_t*>(value);
  if (bits == 64) return value;
  const uint64_t low = value & ((uint64_t(1) << bits) - 1);
  return (type->info & 1) && (low >> (bits - 1)) ? low | (~uint64_t(0) << bits) : low;
}

void arithmetic(watch_kind kind, const typed_check* c, const char* what, uint64_t a, uint64_t b, uintptr_t pc) {
  if (fr_watch_current == NOBODY) return;
  if (kind == OVERFLOW_INT && !is_authors(c->at)) return;  // of the dialect's own header, which counts on wrapping
  watch_event* e = add_at(kind, c->at, pc);
  if (!e) return;
  e->value[0] = operand(c->type, a), e->value[1] = operand(c->type, b);
  copy_text(e->text, what);
}

// The number of threadgroup memory of a name; -1: there is none.
int shared_named(const char* name, size_t length) {
  for (unsigned i = 0; i < w.used; ++i)
    if (w.array[i].shared && strlen(w.told[i].name) == length && !memcmp(w.told[i].name, name, length)) return int(i);
  return -1;
}

// The array that is subscripted at a place of the text: its name there, a member's with what is before it.
struct subscripted {
  const char* name;
  size_t length;
  bool member;
  unsigned subscripts;  // up to this one, where the place tells
  int shared;           // as `shared_named`
};

subscripted subscripted_at(const source_location& at) {
  subscripted found{nullptr, 0, false, 0, -1};
  const char* p = ends_with(at.file, ".source") ? w.options.source : w.options.header;
  for (uint32_t line = 1; p && line < at.line; ++line) p = strchr(p, '\n'), p = p ? p + 1 : p;
  if (!p) return found;
  const char* const begin = p;
  p += at.column ? at.column - 1 : 0;
  const auto is_word = [](char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_'; };
  if (*p == '[') --p, ++found.subscripts;
  while (p > begin && *p == ']') {  // of another dimension
    unsigned depth = 0;
    ++found.subscripts;
    do depth += *p == ']', depth -= *p == '[', --p;
    while (p > begin && depth);
  }
  while (p > begin && is_word(p[-1])) --p;
  found.name = p;
  while (is_word(p[found.length])) ++found.length;
  found.member = p > begin && (p[-1] == '.' || p[-1] == '>');
  found.shared = shared_named(p, found.length);
  return found;
}

uint64_t first_extent(const char* type) {
  const char* p = strchr(type, '[');
  return p ? strtoull(p + 1, nullptr, 10) : 0;
}

void beyond_row(int array, uint64_t index, uint64_t length, uintptr_t pc) {
  if (watch_event* e = add(BOUNDS_ROW, array, pc)) e->value[0] = index, e->value[1] = length;
}

// Whether a type, such as `float [8]`, is that of less than a whole array: of one of its rows.
bool is_row(const char* type, const watch_array& whole) {
  uint64_t elements = 1;
  for (const char* p = strchr(type, '['); p; p = strchr(p + 1, '[')) elements *= strtoull(p + 1, nullptr, 10);
  return elements * whole.item < whole.bytes;
}

}  // namespace

HOOK void __ubsan_handle_add_overflow(const typed_check* c, uint64_t a, uint64_t b) {
  arithmetic(OVERFLOW_INT, c, "+", a, b, CALLER);
}
HOOK void __ubsan_handle_sub_overflow(const typed_check* c, uint64_t a, uint64_t b) {
  arithmetic(OVERFLOW_INT, c, "-", a, b, CALLER);
}
HOOK void __ubsan_handle_mul_overflow(const typed_check* c, uint64_t a, uint64_t b) {
  arithmetic(OVERFLOW_INT, c, "*", a, b, CALLER);
}
HOOK void __ubsan_handle_negate_overflow(const typed_check* c, uint64_t a) {
  arithmetic(OVERFLOW_INT, c, "negative", a, 0, CALLER);
}
HOOK void __ubsan_handle_divrem_overflow(const typed_check* c, uint64_t a, uint64_t b) {
  arithmetic(DIVISION, c, "/", a, b, CALLER);
}
HOOK void __ubsan_handle_shift_out_of_bounds(const indexed_check* c, uint64_t a, uint64_t b) {
  if (fr_watch_current == NOBODY || !is_authors(c->at)) return;
  (void)a;
  const uint64_t count = operand(c->index, b), bits = uint64_t(1) << (c->array->info >> 1);
  if (count < bits) return;  // of a negative number, or into the sign: Metal defines both
  if (watch_event* e = add(SHIFT, -1, 0, 0, c->at.file, c->at.line, c->at.column)) e->value[0] = bits, e->value[1] = count;
}
HOOK void __ubsan_handle_out_of_bounds(const indexed_check* c, uint64_t index) {
  if (fr_watch_current == NOBODY) return;
  if (is_authors(c->at)) {
    const subscripted of = subscripted_at(c->at);
    // A struct's last array of one element may stand for any number of them.
    if (of.member && ends_with(c->array->name, " [1]'")) return;
    if (of.shared >= 0) {
      // Of a whole array the access itself says more. `a[0][i]` takes all for one row.
      const bool whole = of.subscripts == 1 || !is_row(c->array->name, w.told[of.shared]);
      if (!whole && memcmp(of.name + of.length, "[0]", 3))
        beyond_row(of.shared, operand(c->index, index), first_extent(c->array->name), CALLER);
      return;
    }
  }
  watch_event* e = add_at(BOUNDS_PRIVATE, c->at, CALLER);
  if (e) {
    e->value[0] = operand(c->index, index);
    copy_text(e->text, c->array->name);
  }
  leave();  // an access of the stack cannot be led elsewhere
}
// What the compiler does not tell of `name[…][index]`: an object of a class one past its row is an end to it.
HOOK void fr_watch_row(const char* name, uint64_t index) {
  if (fr_watch_current == NOBODY) return;
  const int shared = shared_named(name, strlen(name));
  if (shared >= 0) return beyond_row(shared, index, index, CALLER);
  if (watch_event* e = add(BOUNDS_ROW, -1, CALLER)) {
    e->value[0] = e->value[1] = index;
    copy_text(e->text, name);
  }
  leave();
}
HOOK void __ubsan_handle_type_mismatch_v1(const aligned_check* c, uintptr_t address) {
  if (fr_watch_current == NOBODY) return;
  const uintptr_t alignment = uintptr_t(1) << c->log_alignment;
  const uint64_t number = (address - w.base) >> SLOT;
  const bool aligned = !(address & (alignment - 1));
  if (aligned && number < w.used) return;  // the access itself says more
  const watch_kind kind = aligned ? BOUNDS_PRIVATE : MISALIGNED;
  watch_event* e = add_at(kind, c->at, CALLER);
  if (e) {
    e->value[0] = aligned ? ~uint64_t(0) >> 1 : address, e->value[1] = alignment;
    if (number < w.used) e->array = int(number), e->index = int64_t(address - w.array[number].begin);
    copy_text(e->text, c->type->name);
  }
  leave();  // the processor may refuse the access, and the stack is no place for it
}
