// What -fsanitize=undefined makes a compiler call: its own checks of arithmetic, of indices and of
// alignment.
#pragma once
#include "state.h"

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

// Whether what stands before this place of the text is the name of threadgroup memory.
bool names_shared(const source_location& at) {
  const char* p = ends_with(at.file, ".source") ? w.options.source : w.options.header;
  for (uint32_t line = 1; p && line < at.line; ++line) p = strchr(p, '\n'), p = p ? p + 1 : p;
  if (!p) return false;
  const char* const begin = p;
  p += at.column ? at.column - 1 : 0;
  const auto is_word = [](char c) { return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_'; };
  if (*p == '[') --p;
  while (p > begin && *p == ']') {  // of another dimension
    unsigned depth = 0;
    do depth += *p == ']', depth -= *p == '[', --p;
    while (p > begin && depth);
  }
  while (p > begin && is_word(p[-1])) --p;
  size_t n = 0;
  while (is_word(p[n])) ++n;
  for (unsigned i = 0; i < w.used; ++i)
    if (w.array[i].shared && strlen(w.told[i].name) == n && !memcmp(w.told[i].name, p, n)) return true;
  return false;
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
  if (is_authors(c->at) && names_shared(c->at)) return;  // the access itself says more
  watch_event* e = add_at(BOUNDS_PRIVATE, c->at, CALLER);
  if (e) {
    e->value[0] = operand(c->index, index);
    copy_text(e->text, c->array->name);
  }
  leave();  // an access of the stack cannot be led elsewhere
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
