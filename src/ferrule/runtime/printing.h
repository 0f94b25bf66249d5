/* What kernels print: kept while their job runs, in order when it ends. Included by runtime.c alone.
 *
 * Lines come out threadgroup by threadgroup, and thread by thread within each, whatever thread of the CPU ran
 * them. A job keeps about as many as its limit: those that come first in that order.
 */
#ifndef FERRULE_PRINTING_H
#define FERRULE_PRINTING_H

#include <stdarg.h>
#include <stdio.h>

/* -------------------------------------------------------------------------------- formats */

typedef struct {
  char* at;
  size_t bytes, room;
  bool failed; /* for want of memory */
} text_buffer;

static void text_add(text_buffer* out, const char* text, size_t bytes) {
  if (out->bytes + bytes + 1 > out->room) {
    size_t room = (out->bytes + bytes + 1) * 2;
    char* at = (char*)realloc(out->at, room);
    if (!at) {
      out->failed = true;
      return;
    }
    out->at = at;
    out->room = room;
  }
  memcpy(out->at + out->bytes, text, bytes);
  out->bytes += bytes;
  out->at[out->bytes] = 0;
}

/* Longest widths and precisions: what is wider is no line for a reader. */
enum { MOST_WIDE = 4096 };

/* One conversion: its flags, width, precision and letters. A width or precision of -1 is none. */
typedef struct {
  char flags[6];
  int width, precision;
  int bytes; /* of an integer, by h, l …; 0: as many as the value has */
  char letter;
  const fr_print_value* value; /* NULL where there is none left */
} conversion;

static void add_one(text_buffer* out, const conversion* c, const char* letters, ...) {
  char spec[48], text[512], wide[16] = "", precise[16] = "";
  if (c->width >= 0) snprintf(wide, sizeof wide, "%d", c->width);
  if (c->precision >= 0) snprintf(precise, sizeof precise, ".%d", c->precision);
  snprintf(spec, sizeof spec, "%%%s%s%s%s", c->flags, wide, precise, letters);
  va_list values, again;
  va_start(values, letters);
  va_copy(again, values);
  int bytes = vsnprintf(text, sizeof text, spec, values);
  if (bytes >= (int)sizeof text) {
    char* all = (char*)malloc((size_t)bytes + 1);
    if (all) vsnprintf(all, (size_t)bytes + 1, spec, again), text_add(out, all, (size_t)bytes);
    else out->failed = true;
    free(all);
  } else if (bytes > 0) {
    text_add(out, text, (size_t)bytes);
  }
  va_end(again);
  va_end(values);
}

static double as_double(const fr_print_value* v) {
  double number;
  if (v->kind == FR_PRINT_SIGNED) return (double)(int64_t)v->bits;
  if (v->kind != FR_PRINT_FLOAT) return (double)v->bits;
  memcpy(&number, &v->bits, sizeof number);
  return number;
}

/* The bits of an integer of this length; of a long one that is printed without `l` all of them. */
static uint64_t as_integer(const conversion* c, bool negative) {
  int bytes = c->bytes ? c->bytes : c->value->bytes > 4 ? 8 : 4;
  uint64_t bits = c->value->bits;
  int unused = 64 - 8 * bytes;
  return negative ? (uint64_t)((int64_t)(bits << unused) >> unused) : bits << unused >> unused;
}

/* A value that the letter is not for is shown with the letter, as is one that is not there. */
static void add_unfit(text_buffer* out, const conversion* c) {
  conversion plain = {"", -1, -1, 0, 0, c->value};
  const char letter[4] = {'%', '!', c->letter, '('};
  text_add(out, letter, 4);
  if (!c->value) text_add(out, "no value", 8);
  else if (c->value->kind == FR_PRINT_FLOAT) add_one(out, &plain, "g", as_double(c->value));
  else if (c->value->kind == FR_PRINT_TEXT) add_one(out, &plain, "s", (const char*)(uintptr_t)c->value->bits);
  else add_one(out, &plain, "lld", (long long)c->value->bits);
  text_add(out, ")", 1);
}

static void add_conversion(text_buffer* out, const conversion* c) {
  const fr_print_value* v = c->value;
  char letters[4] = {c->letter, 0, 0, 0}, wide[4] = {'l', 'l', c->letter, 0};
  bool number = v && (v->kind == FR_PRINT_SIGNED || v->kind == FR_PRINT_UNSIGNED);
  if (number && strchr("di", c->letter)) add_one(out, c, wide, (long long)as_integer(c, true));
  else if (number && strchr("uxXo", c->letter)) add_one(out, c, wide, (unsigned long long)as_integer(c, false));
  else if (number && c->letter == 'c') add_one(out, c, letters, (int)v->bits);
  else if (v && v->kind != FR_PRINT_TEXT && v->kind != FR_PRINT_POINTER && strchr("fFeEgGaA", c->letter))
    add_one(out, c, letters, as_double(v));
  else if (v && v->kind == FR_PRINT_TEXT && c->letter == 's')
    add_one(out, c, letters, v->bits ? (const char*)(uintptr_t)v->bits : "(null)");
  else if (v && v->kind != FR_PRINT_FLOAT && c->letter == 'p') add_one(out, c, letters, (void*)(uintptr_t)v->bits);
  else add_unfit(out, c);
}

typedef struct {
  const fr_print_value *next, *end;
} value_list;

static const fr_print_value* next_value(value_list* values) {
  return values->next < values->end ? values->next++ : NULL;
}

/* Digits, or the value that a `*` stands for. */
static int read_number(const char** at, value_list* values) {
  long number = 0;
  if (**at == '*') {
    const fr_print_value* v = next_value(values);
    ++*at;
    number = v ? (long)(int32_t)v->bits : 0;
  } else {
    for (; **at >= '0' && **at <= '9'; ++*at)
      if (number <= MOST_WIDE) number = number * 10 + (**at - '0');
  }
  if (number > MOST_WIDE) return MOST_WIDE;
  return number < -MOST_WIDE ? -MOST_WIDE : (int)number;
}

static void add_flag(conversion* c, char flag) {
  size_t n = strlen(c->flags);
  if (n < sizeof c->flags - 1 && !strchr(c->flags, flag)) c->flags[n] = flag;
}

/* Reads what follows a `%`; its value is taken from the list. */
static conversion read_conversion(const char** at, value_list* values) {
  conversion c = {"", -1, -1, 0, 0, NULL};
  for (; **at && strchr("-+ #0", **at); ++*at) add_flag(&c, **at);
  if (**at == '*' || (**at >= '1' && **at <= '9')) {
    c.width = read_number(at, values);
    if (c.width < 0) {
      add_flag(&c, '-');
      c.width = -c.width;
    }
  }
  if (**at == '.') {
    ++*at;
    c.precision = read_number(at, values); /* none where it is negative */
  }
  for (; **at && strchr("hljztLq", **at); ++*at)
    c.bytes = **at != 'h' ? 8 : c.bytes == 2 ? 1 : 2;
  c.letter = **at;
  if (**at) ++*at;
  return c;
}

static void add_text(text_buffer* out, const char* format, const fr_print_value* values, uint32_t count) {
  value_list list = {values, values + count};
  while (*format) {
    const char* percent = strchr(format, '%');
    if (!percent) {
      text_add(out, format, strlen(format));
      return;
    }
    text_add(out, format, (size_t)(percent - format));
    const char* at = percent + 1;
    conversion c = read_conversion(&at, &list);
    if (c.letter == '%') text_add(out, "%", 1);
    else if (!c.letter || !strchr("diuxXocspfFeEgGaAn", c.letter)) text_add(out, percent, (size_t)(at - percent));
    else {
      c.value = next_value(&list);
      if (c.letter != 'n') add_conversion(out, &c);
    }
    format = at;
  }
}

int64_t fr_format(const char* format, const fr_print_value* values, uint32_t count, char* out, uint64_t room) {
  text_buffer text = {NULL, 0, 0, false};
  add_text(&text, format, values, count);
  size_t bytes = text.bytes < room ? text.bytes : room;
  if (bytes) memcpy(out, text.at, bytes);
  free(text.at);
  return text.failed ? -1 : (int64_t)text.bytes;
}

/* ---------------------------------------------------------------------------------- a job's lines */

/* What a line costs; a piece without an end costs 1, so that lines may be made of as many pieces. */
enum { LINE = 64 };

typedef struct print_store print_store;
struct print_store {
  fr_print_record* records;
  size_t count, room;
  uint64_t cost, limit, order, dropped; /* `limit` of the cost; lines that were dropped */
  fr_print_place last;                  /* where `full`: what comes there or later is dropped */
  bool full;
  char* kernel;
  print_store* next; /* in the queue of those that Python's main thread shows */
};

static pthread_mutex_t printing = PTHREAD_MUTEX_INITIALIZER;
static fr_printer printer;
static int (*add_pending)(int (*)(void*), void*);
static pthread_t main_thread; /* Python's */
static int64_t print_limit = 1000;
static print_store* waiting; /* shown by Python's main thread; oldest first */

static int compare_places(const fr_print_place* a, const fr_print_place* b) {
  if (a->group != b->group) return a->group < b->group ? -1 : 1;
  return a->thread < b->thread ? -1 : a->thread > b->thread;
}

static int compare_records(const void* a, const void* b) {
  const fr_print_record *x = (const fr_print_record*)a, *y = (const fr_print_record*)b;
  int places = compare_places(&x->place, &y->place);
  return places ? places : x->order < y->order ? -1 : x->order > y->order;
}

static uint32_t lines_of(const char* text, int32_t level) {
  uint32_t lines = level >= 0;
  if (!lines)
    for (; *text; text++) lines += *text == '\n';
  return lines;
}

static uint64_t cost_of(uint32_t lines) { return lines ? (uint64_t)lines * LINE : 1; }

/* Sorts what a job printed and drops what is beyond its limit. */
static void cut_store(print_store* s) {
  uint64_t cost = 0;
  size_t kept = 0;
  qsort(s->records, s->count, sizeof *s->records, compare_records);
  while (kept < s->count && cost + cost_of(s->records[kept].lines) <= s->limit)
    cost += cost_of(s->records[kept++].lines);
  if (kept < s->count) {
    s->full = true;
    s->last = s->records[kept].place;
  }
  for (size_t i = kept; i < s->count; i++) {
    s->dropped += s->records[i].lines;
    free(s->records[i].text);
  }
  s->count = kept;
  s->cost = cost;
}

static print_store* store_new(const char* kernel) {
  print_store* s = (print_store*)calloc(1, sizeof *s);
  if (!s) return NULL;
  s->limit = print_limit < 0 ? UINT64_MAX / 4 : (uint64_t)print_limit * LINE;
  size_t bytes = strlen(kernel) + 1;
  s->kernel = (char*)malloc(bytes);
  if (s->kernel) memcpy(s->kernel, kernel, bytes);
  return s;
}

static void store_free(print_store* s) {
  for (size_t i = 0; i < s->count; i++) free(s->records[i].text);
  free(s->records);
  free(s->kernel);
  free(s);
}

/* Adds a record, whose text becomes the store's. Called under the lock. */
static void store_add(print_store* s, fr_print_record* r) {
  if (s->count == s->room) {
    size_t room = s->room ? s->room * 2 : 64;
    fr_print_record* records = (fr_print_record*)realloc(s->records, room * sizeof *records);
    if (!records) {
      s->dropped += r->lines;
      free(r->text);
      return;
    }
    s->records = records;
    s->room = room;
  }
  r->order = s->order++;
  s->records[s->count++] = *r;
  s->cost += cost_of(r->lines);
  if (s->cost / 2 > s->limit + LINE) cut_store(s);
}

static fr_print_record make_record(const fr_print_message* m) {
  text_buffer text = {NULL, 0, 0, false};
  fr_print_record r;
  memset(&r, 0, sizeof r);
  add_text(&text, m->format, m->values, m->count);
  r.place = m->place;
  r.level = m->level;
  r.bytes = (uint32_t)text.bytes;
  if (m->subsystem) {
    text_add(&text, m->subsystem, strlen(m->subsystem));
    text_add(&text, ":", 1);
    text_add(&text, m->category, strlen(m->category));
    r.source_bytes = (uint32_t)text.bytes - r.bytes;
  }
  if (!text.at) text_add(&text, "", 0);
  r.lines = text.at ? lines_of(text.at, m->level) : 0;
  r.text = text.at;
  return r;
}

/* Keeps what a thread prints in its job's store. */
static void print_into(print_store** store, const fr_print_message* m) {
  pthread_mutex_lock(&printing);
  print_store* s = *store;
  bool dropped = s && s->full && compare_places(&m->place, &s->last) >= 0;
  if (dropped) s->dropped += lines_of(m->format, m->level);
  pthread_mutex_unlock(&printing);
  if (dropped) return;
  fr_print_record r = make_record(m);
  if (!r.text) return;
  pthread_mutex_lock(&printing);
  if (!*store) *store = store_new(m->kernel);
  if (*store) store_add(*store, &r);
  else free(r.text);
  pthread_mutex_unlock(&printing);
}

/* ------------------------------------------------------------------------------------ showing them */

/* To C's standard output: in a program without Python. */
static void show_alone(const print_store* s) {
  for (size_t i = 0; i < s->count; i++) {
    const fr_print_record* r = &s->records[i];
    fwrite(r->text, 1, r->bytes, stdout);
    if (r->level >= 0 && (!r->bytes || r->text[r->bytes - 1] != '\n')) fputc('\n', stdout);
  }
  if (s->dropped)
    fprintf(stdout, "\xe2\x80\xa6 %llu more lines of kernel '%s' not shown\n", (unsigned long long)s->dropped,
            s->kernel ? s->kernel : "");
  fflush(stdout);
}

static void show(print_store* s) {
  fr_printer shown_by = __atomic_load_n(&printer, __ATOMIC_ACQUIRE);
  if (shown_by) shown_by(s->kernel ? s->kernel : "", s->records, s->count, s->dropped);
  else show_alone(s);
  store_free(s);
}

void fr_show_waiting(void) {
  for (;;) {
    pthread_mutex_lock(&printing);
    print_store* s = waiting;
    if (s) waiting = s->next;
    pthread_mutex_unlock(&printing);
    if (!s) return;
    show(s);
  }
}

static int show_pending(void* nothing) {
  (void)nothing;
  fr_show_waiting();
  return 0;
}

/* Shows what a job printed. A thread that Python does not know must not wait for Python, as whoever waits for
 * that thread may hold Python's lock; and Python's main thread may have been interrupted, which would end a
 * function that is called here. So the main thread shows what both have printed, as soon as it runs Python's code. */
static void finish_store(print_store* s, bool of_python) {
  cut_store(s);
  bool in_main = of_python && pthread_equal(pthread_self(), __atomic_load_n(&main_thread, __ATOMIC_ACQUIRE));
  if (!__atomic_load_n(&add_pending, __ATOMIC_ACQUIRE) || (of_python && !in_main)) {
    show(s);
    return;
  }
  pthread_mutex_lock(&printing);
  print_store** end = &waiting;
  while (*end) end = &(*end)->next;
  s->next = NULL;
  *end = s;
  pthread_mutex_unlock(&printing);
  add_pending(show_pending, NULL); /* where that has no room, the next one shows this, too */
}

void fr_set_printer(fr_printer shown_by, int (*pending)(int (*)(void*), void*), uint64_t main_id) {
  __atomic_store_n(&main_thread, (pthread_t)(uintptr_t)main_id, __ATOMIC_RELEASE);
  __atomic_store_n(&add_pending, pending, __ATOMIC_RELEASE);
  __atomic_store_n(&printer, shown_by, __ATOMIC_RELEASE);
}

void fr_set_print_limit(int64_t lines) { __atomic_store_n(&print_limit, lines, __ATOMIC_RELAXED); }

#endif
