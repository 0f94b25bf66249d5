// Watches a kernel that the compiler has instrumented (-fsanitize=thread, and some of undefined): this
// is compiled without that, and linked into the library in place of the sanitizers' own runtimes.
//
// Arrays lie far apart in address space that nothing else uses, so each address says which array is
// meant, however far it misses. What is outside finds zeros, and what is written there is nobody's.
// For each few bytes of outputs and of threadgroup memory a cell keeps who wrote and read them last.
// Threads run one after the other, so time is a number (`epoch`) that each barrier, fence and
// threadgroup raises; two accesses race if nothing ordered their epochs.
#include "watch.h"

#include <dlfcn.h>
#include <link.h>
#include <signal.h>
#include <string.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#define HOOK extern "C" __attribute__((visibility("hidden"), noinline))
#define API extern "C" __attribute__((visibility("default")))
#define CALLER (reinterpret_cast<uintptr_t>(__builtin_return_address(0)))
#define LIKELY(x) __builtin_expect(!!(x), 1)

extern "C" {
__attribute__((visibility("hidden"))) unsigned fr_watch_current = ~0u;  // see include/checked.h
__attribute__((visibility("hidden"))) unsigned fr_watch_reversed;
__attribute__((visibility("hidden"))) unsigned fr_watch_rounds[1024];
__attribute__((visibility("hidden"))) void fr_watch_leave();
}

namespace {

constexpr unsigned SLOT = 37;                           // 128 GiB for each array
constexpr uint64_t ROOM = uint64_t(1) << SLOT;
constexpr uint64_t BEFORE = uint64_t(40) << 30;         // of which this much lies before it
constexpr unsigned NOBODY = ~0u;
constexpr unsigned MOST_THREADS = 1024;
constexpr unsigned MOST_PAGES = 256;
constexpr uint64_t PAGE = 4096;

enum : unsigned { TO_DEVICE = 1, TO_THREADGROUP = 2 };  // metal::mem_flags

// An access: when, by whom, where in the program, and whether it was atomic.
struct record {
  uint64_t epoch : 26, round : 6, thread : 10, pc : 21, atomic : 1;
};
struct cell {
  record write, read, other;  // `other`: by a thread that is not `read`'s
  uint8_t written, write_bytes, read_bytes, other_bytes;  // bits, a byte each
  uint32_t apart;
};
static_assert(sizeof(record) == 8 && sizeof(cell) == 32, "as small as they can be");

struct array_state {
  uint64_t begin, end;
  cell* cells;
  unsigned grain;  // a cell's bytes as a power of two
  bool output, written, shared;
  unsigned floats;
  const void* key;
};

struct pending_store {
  uintptr_t address;
  unsigned size, array;
  uintptr_t pc;
  bool conflicts;
  record other;
  unsigned char before[16];
};

struct fault_origin {  // where a thread made NaNs or infinities first: calls of functions [0], instructions
  uintptr_t pc[MOST_ORIGINS];
  bool any() const { return pc[0] || pc[1]; }
};

struct state {
  bool open;
  uint64_t base;
  unsigned used;  // arrays
  array_state array[MOST_ARRAYS];
  watch_array* told;
  watch_options options;
  uintptr_t image_begin, image_end, stack_begin, stack_end, fibers_begin, fibers_end, scratch_begin, scratch_end;
  unsigned threads;
  uint64_t group;
  uint32_t epoch, group_first, device_since, shared_since, released, acquired;
  uint32_t simd_device[MOST_THREADS / 32], simd_shared[MOST_THREADS / 32];
  bool left[MOST_THREADS];
  struct {
    uint64_t place;
    unsigned flags;
    uintptr_t pc;
  } barrier[MOST_THREADS];
  uintptr_t operation[MOST_THREADS];
  fault_origin invalid[MOST_THREADS + 1], infinite[MOST_THREADS + 1];  // the last: of the whole launch
  pending_store store;
  void* page[MOST_PAGES];
  unsigned pages, next_page;
  void* dirty;  // a page outside that was written to
  uint64_t ended;  // threads that could not go on
  volatile uint32_t stop;
  unsigned events;
  watch_event event[MOST_EVENTS];
  uint32_t* group_epoch;  // the first of each threadgroup that has run
  uint64_t* group_unit;
  unsigned* group_threads;
  uint64_t groups, most_groups;
  struct {
    uintptr_t address;
    uint32_t epoch;
  } published[256];
  struct sigaction fpe_before;
  bool disarmed;
  unsigned trapped;
} w;

// -- events ---------------------------------------------------------------------------------------

uint64_t offset(uintptr_t pc) { return pc ? pc - w.image_begin : 0; }

// Who called whom, up to this access: frames are linked (-fno-omit-frame-pointer).
void note_callers(watch_event& e, uintptr_t pc) {
  const uintptr_t* frame = static_cast<const uintptr_t*>(__builtin_frame_address(0));
  const auto on_stack = [](uintptr_t at) { return at >= w.fibers_begin && at + 16 <= w.fibers_end; };
  bool found = !pc;
  for (unsigned n = 0; n < MOST_CALLERS && on_stack(uintptr_t(frame));) {
    const uintptr_t at = frame[1];
    found = found || at == pc;
    if (at < w.image_begin || at >= w.image_end) return;
    if (found) e.caller[n++] = offset(at);
    const uintptr_t* next = reinterpret_cast<const uintptr_t*>(frame[0]);
    if (next <= frame) return;
    frame = next;
  }
}

// The event of this kind at this place, where it is a new one; else it is counted.
watch_event* add(watch_kind kind, int array, uintptr_t pc, uintptr_t other_pc = 0, const char* file = nullptr,
                 uint32_t line = 0, uint32_t column = 0) {
  const uint64_t at = offset(pc), other = offset(other_pc);
  for (unsigned i = 0; i < w.events; ++i) {
    watch_event& e = w.event[i];
    if (e.kind == kind && e.array == array && e.pc == at && e.other_pc == other && e.file == file && e.line == line &&
        e.column == column) {
      ++e.count;
      return nullptr;
    }
  }
  if (w.events == MOST_EVENTS) return nullptr;
  watch_event& e = w.event[w.events++];
  memset(&e, 0, sizeof e);
  e.kind = kind, e.array = array, e.pc = at, e.other_pc = other, e.count = 1;
  e.file = file, e.line = line, e.column = column;
  e.thread = fr_watch_current, e.threads = w.threads, e.group = w.group;
  note_callers(e, pc);
  return &e;
}

void copy_text(char* to, const char* from) {
  strncpy(to, from, TEXT - 1);
  to[TEXT - 1] = 0;
}

// The thread that runs cannot go on: what it would do next has no meaning.
void leave() {
  w.left[fr_watch_current] = true;
  ++w.ended;
  fr_watch_leave();
}

void check_stop(uintptr_t pc) {
  if (LIKELY(!w.stop)) return;
  add(GAVE_UP, -1, pc);
  leave();
}

// -- NaN and infinity -----------------------------------------------------------------------------
// The processor says which instruction makes one: it traps, is noted, and goes on without traps until
// the thread's next access.

constexpr unsigned MOST_TRAPS = 4096;

void arm() {
  w.disarmed = false;
#if defined(__x86_64__)
  if (w.trapped < MOST_TRAPS && w.options.floats)
    __builtin_ia32_ldmxcsr((__builtin_ia32_stmxcsr() & ~0x3fu) & ~0x680u);  // invalid, by zero, overflow
#endif
}

void disarm() {
#if defined(__x86_64__)
  __builtin_ia32_ldmxcsr((__builtin_ia32_stmxcsr() & ~0x3fu) | 0x1f80u);
#endif
}

void note(fault_origin& from, uintptr_t pc) {
  for (unsigned i = 1; i < MOST_ORIGINS && from.pc[i] != pc; ++i)
    if (!from.pc[i]) from.pc[i] = pc;
}

#if defined(__x86_64__)
// Conversions to integers and comparisons make no NaN.
bool makes_floats(const unsigned char* p) {
  while (*p == 0xf3 || *p == 0xf2 || *p == 0x66 || (*p & 0xf0) == 0x40) ++p;
  unsigned op = 0;
  if (*p == 0x0f) op = p[1];
  else if (*p == 0xc5) op = p[2];
  else if (*p == 0xc4 && (p[1] & 31) == 1) op = p[3];
  else if (*p == 0x62 && (p[1] & 7) == 1) op = p[4];
  return op != 0x2c && op != 0x2d && op != 0x2e && op != 0x2f && op != 0x5b && op != 0xe6 && op != 0xc2 &&
         op != 0x78 && op != 0x79 && op != 0x7a && op != 0x7b;
}
#endif

void on_trap(int number, siginfo_t* info, void* context) {
#if defined(__x86_64__)
  const bool floats = info->si_code == FPE_FLTINV || info->si_code == FPE_FLTDIV || info->si_code == FPE_FLTOVF;
  if (w.open && floats) {
    ucontext_t* u = static_cast<ucontext_t*>(context);
    const uintptr_t pc = uintptr_t(u->uc_mcontext.gregs[REG_RIP]);
    u->uc_mcontext.fpregs->mxcsr = (u->uc_mcontext.fpregs->mxcsr & ~0x3fu) | 0x1f80u;
    w.disarmed = true;
    ++w.trapped;
    if (fr_watch_current != NOBODY && makes_floats(reinterpret_cast<const unsigned char*>(pc))) {
      fault_origin* all = info->si_code == FPE_FLTINV ? w.invalid : w.infinite;
      note(all[fr_watch_current], pc + 1);
      note(all[MOST_THREADS], pc + 1);
    }
    return;
  }
#endif
  if (w.fpe_before.sa_flags & SA_SIGINFO) w.fpe_before.sa_sigaction(number, info, context);
  else if (w.fpe_before.sa_handler != SIG_DFL && w.fpe_before.sa_handler != SIG_IGN) w.fpe_before.sa_handler(number);
  else signal(number, SIG_DFL);
}

// -- outside of all arrays ------------------------------------------------------------------------

// Lets an access outside go on: it finds zeros. What was written outside before is nobody's.
void serve(uintptr_t address, unsigned size, bool write) {
  if (w.dirty) memset(w.dirty, 0, PAGE), w.dirty = nullptr;
  for (uintptr_t p = address & ~(PAGE - 1); p < address + size; p += PAGE) {
    void* page = reinterpret_cast<void*>(p);
    bool there = false;
    for (unsigned i = 0; i < w.pages && !there; ++i) there = w.page[i] == page;
    if (!there) {
      if (w.pages == MOST_PAGES) {  // the oldest makes room
        mmap(w.page[w.next_page], PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
      }
      if (mmap(page, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) == MAP_FAILED)
        leave();
      w.page[w.next_page] = page;
      w.next_page = (w.next_page + 1) % MOST_PAGES;
      if (w.pages < MOST_PAGES) ++w.pages;
    }
    if (write) w.dirty = page;
  }
}

// The pages that an array shares with what is outside are mapped already.
bool is_array_page(const array_state& a, uintptr_t page) {
  return page >= (a.begin & ~(PAGE - 1)) && page < ((a.end + PAGE - 1) & ~(PAGE - 1));
}

void outside(unsigned number, uintptr_t address, unsigned size, bool write, uintptr_t pc) {
  const array_state& a = w.array[number];
  if (watch_event* e = add(write ? BOUNDS_WRITE : BOUNDS_READ, int(number), pc)) {
    e->index = int64_t(address - a.begin);
    e->size = size;
  }
  const uintptr_t last = (address + size - 1) & ~(PAGE - 1);
  for (uintptr_t p = address & ~(PAGE - 1); p <= last; p += PAGE)
    if (!is_array_page(a, p)) serve(p < address ? address : p, 1, write);
}

// What of an access that crosses an array's end is inside of it.
bool inside(const array_state& a, uintptr_t& address, unsigned& size) {
  const uintptr_t from = address < a.begin ? a.begin : address, to = address + size < a.end ? address + size : a.end;
  if (from >= to) return false;
  address = from, size = unsigned(to - from);
  return true;
}

void foreign(uintptr_t address, uintptr_t pc) {
  const auto in = [&](uintptr_t begin, uintptr_t end) { return address >= begin && address < end; };
  if (in(w.fibers_begin, w.fibers_end) || in(w.scratch_begin, w.scratch_end) || in(w.stack_begin, w.stack_end) ||
      in(w.image_begin, w.image_end) || in(uintptr_t(&w), uintptr_t(&w + 1)))
    return;
  if (in(w.options.launch_begin, w.options.launch_end)) return;
  if (watch_event* e = add(WILD, -1, pc)) e->value[0] = address;
  leave();
}

// -- who accessed what ----------------------------------------------------------------------------

bool in_this_group(record r) { return r.epoch >= w.group_first; }

// Whether nothing orders an earlier access of another thread before what the current one does now.
bool concurrent(const array_state& a, record r) {
  if (!in_this_group(r)) return !a.shared && r.epoch > w.acquired;
  if (r.thread == fr_watch_current) return false;
  if (r.epoch < (a.shared ? w.shared_since : w.device_since)) return false;
  const unsigned simdgroup = fr_watch_current / 32;
  const uint32_t since = a.shared ? w.simd_shared[simdgroup] : w.simd_device[simdgroup];
  return r.thread / 32 != simdgroup || r.epoch >= since;
}

uint64_t group_of(record r, unsigned* threads) {
  uint64_t low = 0, high = w.groups;
  while (high - low > 1) {
    const uint64_t middle = (low + high) / 2;
    (w.group_epoch[middle] <= r.epoch ? low : high) = middle;
  }
  *threads = w.group_threads[low];
  return w.group_unit[low];
}

void race(unsigned number, uintptr_t address, unsigned size, uintptr_t pc, record r, unsigned what) {
  watch_event* e = add(RACE, int(number), pc, w.image_begin + r.pc);
  if (!e) return;
  e->index = int64_t(address - w.array[number].begin);
  e->size = size;
  e->other_thread = r.thread;
  e->other_group = group_of(r, &e->other_threads);
  e->value[0] = what;  // 1: the later one writes; 2: the earlier one
  e->value[1] = e->other_group != e->group;
  const unsigned ahead = (fr_watch_rounds[fr_watch_current] - r.round) & 63;
  e->later = e->value[1] ? 0 : ahead < 32 ? int(ahead) : int(ahead) - 64;
}

// What could not be known before the last store was made: its value.
void settle() {
  pending_store& s = w.store;
  const array_state& a = w.array[s.array];
  if (s.conflicts && (w.options.same_values || memcmp(s.before, reinterpret_cast<void*>(s.address), s.size)))
    race(s.array, s.address, s.size, s.pc, s.other, 3);
  s.conflicts = false;
  if (a.floats) {
    const unsigned item = a.floats == 4 ? 8 : a.floats == 3 ? 4 : 2;
    for (unsigned i = 0; i + item <= s.size; i += item) {
      uint64_t bits = 0;
      memcpy(&bits, reinterpret_cast<char*>(s.address) + i, item);
      const uint64_t infinite = a.floats == 4 ? 0x7ff0000000000000 : a.floats == 3 ? 0x7f800000 : a.floats == 2 ? 0x7f80 : 0x7c00;
      const uint64_t magnitude = bits & (~uint64_t(0) >> (65 - 8 * item));
      if (LIKELY(magnitude < infinite)) continue;
      const bool nan = magnitude > infinite;
      if (nan ? w.options.may_be_nan : w.options.may_be_infinite) continue;
      const fault_origin* all = nan ? w.invalid : w.infinite;
      // What came from another thread was made by that one.
      const fault_origin& from = all[all[fr_watch_current].any() ? fr_watch_current : MOST_THREADS];
      if (!from.any() && !nan) continue;  // an infinity that the author wrote
      if (watch_event* e = add(nan ? NAN_STORED : INFINITY_STORED, int(s.array), s.pc)) {
        for (unsigned k = 0; k < MOST_ORIGINS; ++k) e->origin[k] = offset(from.pc[k]);
        e->index = int64_t(s.address - a.begin);
        e->size = item;
        e->value[0] = bits;
      }
    }
  }
  s.size = 0;
}

void touch(unsigned number, array_state& a, cell& c, unsigned bytes, uintptr_t address, unsigned size, bool write,
           bool atomic, uintptr_t pc) {
  record me;
  me.epoch = w.epoch, me.thread = fr_watch_current, me.pc = pc - w.image_begin, me.atomic = atomic;
  me.round = fr_watch_rounds[fr_watch_current];
  if (a.shared && c.apart != w.group_first) {  // what an earlier threadgroup left is not there any more
    memset(&c, 0, sizeof c);
    c.apart = w.group_first;
  }
  if (!write && !a.written && (c.written & bytes) != bytes && w.options.uninitialised) {
    if (watch_event* e = add(UNINITIALISED, int(number), pc)) e->index = int64_t(address - a.begin), e->size = size;
    c.written |= bytes;  // told once
  }
  if (w.options.races) {
    const auto conflicts = [&](record r, unsigned touched) {
      return r.epoch && (touched & bytes) && !(atomic && r.atomic) && concurrent(a, r);
    };
    if (write) {
      if (conflicts(c.read, c.read_bytes)) race(number, address, size, pc, c.read, 1);
      else if (conflicts(c.other, c.other_bytes)) race(number, address, size, pc, c.other, 1);
      if (conflicts(c.write, c.write_bytes)) {
        if (atomic || c.write.atomic) race(number, address, size, pc, c.write, 3);
        else w.store.conflicts = true, w.store.other = c.write;
      }
    } else {
      if (conflicts(c.write, c.write_bytes)) race(number, address, size, pc, c.write, 2);
      const bool mine = c.read.epoch && in_this_group(c.read) && c.read.thread == me.thread;
      if (mine || !c.read.epoch || (in_this_group(c.read) && !concurrent(a, c.read))) {
        c.read_bytes = uint8_t(mine ? c.read_bytes | bytes : bytes);
        c.read = me;
      } else {
        c.other_bytes = uint8_t(bytes);
        c.other = me;
      }
    }
  }
  if (write) {
    const bool mine = in_this_group(c.write) && c.write.thread == me.thread && c.write.epoch == me.epoch;
    c.write_bytes = uint8_t(mine ? c.write_bytes | bytes : bytes);
    c.write = me;
    c.written |= bytes;
  }
}

void watched(unsigned number, array_state& a, uintptr_t address, unsigned size, bool write, bool atomic, uintptr_t pc) {
  if (write && !atomic) {
    w.store.address = address, w.store.size = size < 16 ? size : 16, w.store.array = number, w.store.pc = pc;
    w.store.conflicts = false;
    memcpy(w.store.before, reinterpret_cast<void*>(address), w.store.size);
  }
  const uint64_t begin = address - a.begin, end = begin + size, grain = uint64_t(1) << a.grain;
  for (uint64_t c = begin >> a.grain; c <= (end - 1) >> a.grain; ++c) {
    const uint64_t first = c << a.grain, from = begin > first ? begin - first : 0;
    const uint64_t to = end < first + grain ? end - first : grain;
    const unsigned bytes = ((1u << to) - 1) & ~((1u << from) - 1);
    touch(number, a, a.cells[c], bytes, address, size, write, atomic, pc);
  }
}

void access(uintptr_t address, unsigned size, bool write, bool atomic, uintptr_t pc) {
  if (fr_watch_current == NOBODY) return;
  if (write && w.store.size) settle();  // a copy is announced as a write, then a read, and is made then
  check_stop(pc);
  if (w.disarmed) arm();
  const uint64_t number = (address - w.base) >> SLOT;
  if (LIKELY(number < w.used)) {
    array_state& a = w.array[number];
    if (LIKELY(address >= a.begin && address + size <= a.end)) {
      if (a.cells) watched(unsigned(number), a, address, size, write, atomic, pc);
      else if (write)
        if (watch_event* e = add(WRITE_TO_INPUT, int(number), pc)) e->index = int64_t(address - a.begin), e->size = size;
      return;
    }
    outside(unsigned(number), address, size, write, pc);
    if (a.cells && inside(a, address, size)) watched(unsigned(number), a, address, size, write, atomic, pc);
    return;
  }
  foreign(address, pc);
}

void access_range(uintptr_t address, uint64_t size, bool write, uintptr_t pc) {
  for (uint64_t i = 0; i < size; i += 16) access(address + i, unsigned(size - i < 16 ? size - i : 16), write, false, pc);
}

// What this thread did before a fence is ordered before what others do who read its atomic afterwards.
void pass_on(uintptr_t address) {
  auto& p = w.published[(address >> 2) % 256];
  if (p.address == address && p.epoch > w.acquired) w.acquired = p.epoch;
  if (!w.released) return;
  if (p.address != address || p.epoch < w.released) p.address = address, p.epoch = w.released;
}

void atomic_access(uintptr_t address, unsigned size, bool read, bool write, uintptr_t pc) {
  if (fr_watch_current == NOBODY) return;
  pass_on(address);
  if (read) access(address, size, false, true, pc);
  if (write) access(address, size, true, true, pc);
}

void order(unsigned flags) {
  ++w.epoch;
  if (flags & TO_DEVICE) w.device_since = w.epoch, w.released = w.epoch - 1;
  if (flags & TO_THREADGROUP) w.shared_since = w.epoch;
}

// -- of the compiler's own checks ------------------------------------------------------------------

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
  const bool authors = is_authors(c->at);
  if (!authors && kind == OVERFLOW_INT) return;  // of the dialect's own header, which counts on wrapping
  watch_event* e = authors ? add(kind, -1, 0, 0, c->at.file, c->at.line, c->at.column) : add(kind, -1, pc);
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

int find_image(dl_phdr_info* info, size_t, void*) {
  const uintptr_t here = uintptr_t(&w);
  uintptr_t low = ~uintptr_t(0), high = 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    if (info->dlpi_phdr[i].p_type != PT_LOAD) continue;
    const uintptr_t begin = info->dlpi_addr + info->dlpi_phdr[i].p_vaddr, end = begin + info->dlpi_phdr[i].p_memsz;
    low = begin < low ? begin : low, high = end > high ? end : high;
  }
  if (here < low || here >= high) return 0;
  w.image_begin = info->dlpi_addr, w.image_end = high;
  return 1;
}

bool map_array(unsigned number, uint64_t bytes, uint64_t align) {
  array_state& a = w.array[number];
  a.begin = w.base + number * ROOM + BEFORE, a.end = a.begin + bytes;
  (void)align;  // pages are
  const uint64_t length = (bytes + PAGE - 1) & ~(PAGE - 1);
  return !length || mmap(reinterpret_cast<void*>(a.begin), length, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0) != MAP_FAILED;
}

bool map_cells(array_state& a, uint64_t item) {
  a.grain = item % 4 == 0 ? 2 : item % 2 == 0 ? 1 : 0;
  const uint64_t count = ((a.end - a.begin) >> a.grain) + 1;
  void* cells = mmap(nullptr, count * sizeof(cell), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  a.cells = cells == MAP_FAILED ? nullptr : static_cast<cell*>(cells);
  return a.cells != nullptr;
}

void unmap() {
  for (unsigned i = 0; i < w.used; ++i)
    if (w.array[i].cells) munmap(w.array[i].cells, (((w.array[i].end - w.array[i].begin) >> w.array[i].grain) + 1) * sizeof(cell));
  if (w.base) munmap(reinterpret_cast<void*>(w.base), MOST_ARRAYS * ROOM);
  if (w.group_epoch) munmap(w.group_epoch, w.most_groups * sizeof(uint32_t));
  if (w.group_unit) munmap(w.group_unit, w.most_groups * sizeof(uint64_t));
  if (w.group_threads) munmap(w.group_threads, w.most_groups * sizeof(unsigned));
}

template <class T> bool map_table(T*& table, uint64_t count) {
  void* at = mmap(nullptr, count * sizeof(T), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  table = at == MAP_FAILED ? nullptr : static_cast<T*>(at);
  return table != nullptr;
}

}  // namespace

// -- what Python calls -----------------------------------------------------------------------------

// Makes room for the arrays and tells where each lies. False where there is no memory.
API int fr_watch_open(watch_array* arrays, unsigned count, const watch_options* options, uint64_t groups) {
  unmap();
  memset(&w, 0, sizeof w);
  w.told = arrays, w.options = *options, w.most_groups = groups + 1;
  dl_iterate_phdr(find_image, nullptr);
  void* base = mmap(nullptr, MOST_ARRAYS * ROOM, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) return 0;
  w.base = uint64_t(base);
  if (!map_table(w.group_epoch, w.most_groups) || !map_table(w.group_unit, w.most_groups) ||
      !map_table(w.group_threads, w.most_groups))
    return 0;
  for (w.used = 0; w.used < count; ++w.used) {
    watch_array& told = arrays[w.used];
    array_state& a = w.array[w.used];
    a.output = told.output, a.written = told.written, a.floats = told.floats;
    if (!map_array(w.used, told.bytes, 0) || (a.output && !map_cells(a, told.item))) return 0;
    told.address = a.begin;
  }
  fr_watch_reversed = options->reversed;
  fr_watch_current = NOBODY;
  w.open = true;
  return 1;
}

// Asks the launch, from another thread, to come to an end.
API void fr_watch_stop() { w.stop = 1; }

API void fr_watch_entry(const watch_launch* l, uint64_t begin, uint64_t end, void* worker) {
  const uintptr_t frame = uintptr_t(__builtin_frame_address(0));
  w.stack_begin = frame - (uintptr_t(1) << 20), w.stack_end = frame + (uintptr_t(1) << 14);
  struct sigaction ours;
  memset(&ours, 0, sizeof ours);
  ours.sa_sigaction = on_trap;
  ours.sa_flags = SA_SIGINFO | SA_NODEFER | SA_ONSTACK;
  sigaction(SIGFPE, &ours, &w.fpe_before);
  for (uint64_t u = begin; u < end && !w.stop; ++u) l->entry(l->launch, l->units[u], l->units[u] + 1, worker);
  fr_watch_current = NOBODY;
  disarm();
  sigaction(SIGFPE, &w.fpe_before, nullptr);
}

// How many events there are, and how many threads could not go on; what was not written is told
// with the arrays. Their memory stays until the next `fr_watch_open` or `fr_watch_close`.
API unsigned fr_watch_results(const watch_event** events, uint64_t* ended, unsigned* arrays) {
  for (unsigned i = 0; i < w.used; ++i) {
    const array_state& a = w.array[i];
    watch_array& told = w.told[i];
    told.unwritten = 0;
    if (!a.output || a.written || a.shared || !told.item) continue;
    const unsigned whole = (1u << (1u << a.grain)) - 1;
    const uint64_t cells = told.item >> a.grain;
    for (uint64_t k = 0, n = told.bytes / told.item; k < n; ++k) {
      bool all = true;
      for (uint64_t c = k * cells; c < (k + 1) * cells; ++c) all = all && (a.cells[c].written & whole) == whole;
      if (!all && !told.unwritten++) told.first_unwritten = k;
    }
  }
  *events = w.event, *ended = w.ended, *arrays = w.used;
  return w.events;
}

API void fr_watch_close() {
  unmap();
  memset(&w, 0, sizeof w);
}

// -- what a text calls (include/checked.h) ----------------------------------------------------------

HOOK void fr_watch_group(unsigned long unit, unsigned threads, const void* scratch, unsigned long bytes,
                         const char* stacks, unsigned long stack_bytes) {
  w.scratch_begin = uintptr_t(scratch), w.scratch_end = w.scratch_begin + bytes;
  w.fibers_begin = uintptr_t(stacks), w.fibers_end = w.fibers_begin + stack_bytes;
  w.group = unit, w.threads = threads;
  w.group_first = w.device_since = w.shared_since = ++w.epoch;
  w.released = 0;
  w.group_epoch[w.groups] = w.epoch, w.group_unit[w.groups] = unit, w.group_threads[w.groups] = threads;
  if (w.groups + 1 < w.most_groups) ++w.groups;
  for (unsigned s = 0; s < MOST_THREADS / 32; ++s) w.simd_device[s] = w.simd_shared[s] = w.epoch;
  memset(fr_watch_rounds, 0, threads * sizeof fr_watch_rounds[0]);
  memset(w.left, 0, threads * sizeof w.left[0]);
  memset(w.invalid, 0, threads * sizeof w.invalid[0]);
  memset(w.infinite, 0, threads * sizeof w.infinite[0]);
  arm();
}

HOOK void fr_watch_thread_done(unsigned) {
  if (w.store.size) settle();
}

HOOK void fr_watch_barrier(unsigned long place, unsigned flags) {
  if (w.store.size) settle();
  w.barrier[fr_watch_current].place = place;
  w.barrier[fr_watch_current].flags = flags;
  w.barrier[fr_watch_current].pc = CALLER;
  check_stop(CALLER);
}

// The barrier lets the threads that wait there go on; all others are done.
HOOK void fr_watch_release(const unsigned char* states, unsigned long stride, unsigned threads, unsigned char done) {
  unsigned first = NOBODY, missing = NOBODY, flags = 0;
  for (unsigned i = 0; i < threads; ++i) {
    if (states[i * stride] == done) {
      if (missing == NOBODY && !w.left[i]) missing = i;
      continue;
    }
    flags |= w.barrier[i].flags;
    if (first == NOBODY) first = i;
    else if (w.barrier[i].place != w.barrier[first].place) {
      if (watch_event* e = add(DIVERGENCE, -1, w.barrier[i].pc, w.barrier[first].pc))
        e->thread = i, e->other_thread = first, e->other_threads = threads;
    }
  }
  if (first == NOBODY) return;
  if (missing != NOBODY)
    if (watch_event* e = add(DIVERGENCE, -1, w.barrier[first].pc))
      e->thread = first, e->other_thread = missing, e->other_threads = threads, e->value[0] = 1;
  order(flags);
}

HOOK void fr_watch_operation() {
  if (w.store.size) settle();
  w.operation[fr_watch_current] = CALLER;
  check_stop(CALLER);
}

HOOK void fr_watch_simd_fence(unsigned first, unsigned count, unsigned mask, unsigned flags) {
  const unsigned simdgroup = first / 32, all = count == 32 ? ~0u : (1u << count) - 1;
  for (unsigned i = 0; i < count && mask != all; ++i) {
    if (((mask >> i) & 1) || w.left[first + i]) continue;
    const unsigned waits = first + unsigned(__builtin_ctz(mask));
    if (watch_event* e = add(DIVERGENCE, -1, w.operation[waits]))
      e->thread = waits, e->other_thread = first + i, e->other_threads = w.threads, e->value[0] = 2;
    break;
  }
  ++w.epoch;
  if (flags & TO_DEVICE) w.simd_device[simdgroup] = w.epoch, w.released = w.epoch - 1;
  if (flags & TO_THREADGROUP) w.simd_shared[simdgroup] = w.epoch;
}

HOOK void fr_watch_lane(unsigned thread, unsigned from, unsigned lanes, const char* operation) {
  if (watch_event* e = add(LANE, -1, w.operation[thread])) {
    e->thread = thread, e->value[0] = from, e->value[1] = lanes;
    copy_text(e->text, operation);
  }
}

HOOK void* fr_watch_shared(const void* key, unsigned line, const char* name, unsigned long bytes, unsigned long item,
                           unsigned long, int floats) {
  for (unsigned i = 0; i < w.used; ++i)
    if (w.array[i].key == key) return reinterpret_cast<void*>(w.array[i].begin);
  if (w.used == MOST_ARRAYS) leave();
  array_state& a = w.array[w.used];
  watch_array& told = w.told[w.used];
  a.key = key, a.shared = a.output = true, a.floats = unsigned(floats);
  told.bytes = bytes, told.item = item, told.shared = line, told.output = 1, told.floats = unsigned(floats);
  copy_text(told.name, name);
  if (!map_array(w.used, bytes, 0) || !map_cells(a, item)) leave();
  return reinterpret_cast<void*>(w.array[w.used++].begin);
}

HOOK void fr_watch_shift(unsigned bits, long count) {
  if (fr_watch_current == NOBODY) return;
  if (watch_event* e = add(SHIFT, -1, CALLER)) e->value[0] = bits, e->value[1] = uint64_t(count);
}

HOOK void fr_watch_half(float value) {
  if (fr_watch_current == NOBODY) return;
  if (watch_event* e = add(HALF_OVERFLOW, -1, CALLER)) memcpy(&e->value[0], &value, 4);
}

HOOK void fr_watch_made(float value) {
  if (fr_watch_current == NOBODY) return;
  fault_origin* all = value != value ? w.invalid : w.infinite;
  if (!all[fr_watch_current].pc[0]) all[fr_watch_current].pc[0] = CALLER;
  if (!all[MOST_THREADS].pc[0]) all[MOST_THREADS].pc[0] = CALLER;
}

HOOK void fr_watch_assert(const char* condition, unsigned, double left, double right) {
  if (fr_watch_current == NOBODY) return;
  if (watch_event* e = add(ASSERTION, -1, CALLER)) {
    copy_text(e->text, condition);
    memcpy(&e->value[0], &left, 8), memcpy(&e->value[1], &right, 8);
  }
}

// -- what the compiler's instrumentation calls -------------------------------------------------------

HOOK void __tsan_init() {}
HOOK void __tsan_func_entry(void*) {}
HOOK void __tsan_func_exit() {}
HOOK void __tsan_vptr_update(void**, void*) {}
HOOK void __tsan_vptr_read(void**) {}

#define ACCESS(BITS, BYTES)                                                                                   \
  HOOK void __tsan_read##BITS(void* p) { access(uintptr_t(p), BYTES, false, false, CALLER); }                 \
  HOOK void __tsan_write##BITS(void* p) { access(uintptr_t(p), BYTES, true, false, CALLER); }                 \
  HOOK void __tsan_unaligned_read##BITS(void* p) { access(uintptr_t(p), BYTES, false, false, CALLER); }       \
  HOOK void __tsan_unaligned_write##BITS(void* p) { access(uintptr_t(p), BYTES, true, false, CALLER); }       \
  HOOK void __tsan_volatile_read##BITS(void* p) { access(uintptr_t(p), BYTES, false, false, CALLER); }        \
  HOOK void __tsan_volatile_write##BITS(void* p) { access(uintptr_t(p), BYTES, true, false, CALLER); }        \
  HOOK void __tsan_unaligned_volatile_read##BITS(void* p) { access(uintptr_t(p), BYTES, false, false, CALLER); } \
  HOOK void __tsan_unaligned_volatile_write##BITS(void* p) { access(uintptr_t(p), BYTES, true, false, CALLER); }  \
  HOOK void __tsan_read_write##BITS(void* p) {                                                                \
    access(uintptr_t(p), BYTES, false, false, CALLER), access(uintptr_t(p), BYTES, true, false, CALLER);      \
  }                                                                                                           \
  HOOK void __tsan_unaligned_read_write##BITS(void* p) {                                                      \
    access(uintptr_t(p), BYTES, false, false, CALLER), access(uintptr_t(p), BYTES, true, false, CALLER);      \
  }
ACCESS(1, 1) ACCESS(2, 2) ACCESS(4, 4) ACCESS(8, 8) ACCESS(16, 16)
#undef ACCESS

HOOK void __tsan_read_range(void* p, size_t n) { access_range(uintptr_t(p), n, false, CALLER); }
HOOK void __tsan_write_range(void* p, size_t n) { access_range(uintptr_t(p), n, true, CALLER); }
HOOK void* __tsan_memcpy(void* to, const void* from, size_t n) {
  access_range(uintptr_t(from), n, false, CALLER), access_range(uintptr_t(to), n, true, CALLER);
  return memcpy(to, from, n);
}
HOOK void* __tsan_memmove(void* to, const void* from, size_t n) {
  access_range(uintptr_t(from), n, false, CALLER), access_range(uintptr_t(to), n, true, CALLER);
  return memmove(to, from, n);
}
HOOK void* __tsan_memset(void* to, int v, size_t n) {
  access_range(uintptr_t(to), n, true, CALLER);
  return memset(to, v, n);
}

#define FETCH(BITS, T, NAME, OPERATION)                                                       \
  HOOK T __tsan_atomic##BITS##_fetch_##NAME(volatile T* p, T v, int) {                        \
    atomic_access(uintptr_t(p), sizeof(T), true, true, CALLER);                               \
    const T old = *p;                                                                         \
    *p = T(OPERATION);                                                                        \
    return old;                                                                               \
  }
#define ATOMICS(BITS, T)                                                                      \
  HOOK T __tsan_atomic##BITS##_load(const volatile T* p, int) {                               \
    atomic_access(uintptr_t(p), sizeof(T), true, false, CALLER);                              \
    return *p;                                                                                \
  }                                                                                           \
  HOOK void __tsan_atomic##BITS##_store(volatile T* p, T v, int) {                            \
    atomic_access(uintptr_t(p), sizeof(T), false, true, CALLER);                              \
    *p = v;                                                                                   \
  }                                                                                           \
  HOOK T __tsan_atomic##BITS##_exchange(volatile T* p, T v, int) {                            \
    atomic_access(uintptr_t(p), sizeof(T), true, true, CALLER);                               \
    const T old = *p;                                                                         \
    *p = v;                                                                                   \
    return old;                                                                               \
  }                                                                                           \
  HOOK int __tsan_atomic##BITS##_compare_exchange_strong(volatile T* p, T* c, T v, int, int) { \
    atomic_access(uintptr_t(p), sizeof(T), true, true, CALLER);                               \
    const T old = *p;                                                                         \
    if (old == *c) {                                                                          \
      *p = v;                                                                                 \
      return 1;                                                                               \
    }                                                                                         \
    *c = old;                                                                                 \
    return 0;                                                                                 \
  }                                                                                           \
  HOOK int __tsan_atomic##BITS##_compare_exchange_weak(volatile T* p, T* c, T v, int, int) {  \
    atomic_access(uintptr_t(p), sizeof(T), true, true, CALLER);                               \
    const T old = *p;                                                                         \
    if (old == *c) {                                                                          \
      *p = v;                                                                                 \
      return 1;                                                                               \
    }                                                                                         \
    *c = old;                                                                                 \
    return 0;                                                                                 \
  }                                                                                           \
  HOOK T __tsan_atomic##BITS##_compare_exchange_val(volatile T* p, T c, T v, int, int) {      \
    atomic_access(uintptr_t(p), sizeof(T), true, true, CALLER);                               \
    const T old = *p;                                                                         \
    if (old == c) *p = v;                                                                     \
    return old;                                                                               \
  }                                                                                           \
  FETCH(BITS, T, add, old + v) FETCH(BITS, T, sub, old - v) FETCH(BITS, T, and, old & v)      \
  FETCH(BITS, T, or, old | v) FETCH(BITS, T, xor, old ^ v) FETCH(BITS, T, nand, ~(old & v))
ATOMICS(8, uint8_t) ATOMICS(16, uint16_t) ATOMICS(32, uint32_t) ATOMICS(64, uint64_t)
#undef ATOMICS
#undef FETCH

HOOK void __tsan_atomic_thread_fence(int) {
  if (fr_watch_current == NOBODY) return;
  ++w.epoch;
  w.released = w.epoch - 1;
}
HOOK void __tsan_atomic_signal_fence(int) {}

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
  const bool authors = is_authors(c->at);
  if (authors && names_shared(c->at)) return;  // the access itself says more
  watch_event* e = authors ? add(BOUNDS_PRIVATE, -1, 0, 0, c->at.file, c->at.line, c->at.column)
                           : add(BOUNDS_PRIVATE, -1, CALLER);
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
  const bool authors = is_authors(c->at);
  watch_event* e = authors ? add(kind, -1, 0, 0, c->at.file, c->at.line, c->at.column) : add(kind, -1, CALLER);
  if (e) {
    e->value[0] = aligned ? ~uint64_t(0) >> 1 : address, e->value[1] = alignment;
    if (number < w.used) e->array = int(number), e->index = int64_t(address - w.array[number].begin);
    copy_text(e->text, c->type->name);
  }
  leave();  // the processor may refuse the access, and the stack is no place for it
}

#include "stops.h"
