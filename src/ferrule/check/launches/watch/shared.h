// What check/launches/watched.py and this folder share: plain structures, laid out alike by both.
#pragma once
#include <stddef.h>
#include <stdint.h>

enum { MOST_COPIES = 8, MOST_ARRAYS = 256, MOST_EVENTS = 512, MOST_ORIGINS = 4, MOST_CALLERS = 6, TEXT = 48 };

// An array of the launch, or the shape or strides of one. Threadgroup arrays are added as they appear.
struct watch_array {
  uint64_t bytes, item;  // item: bytes of an element
  uint32_t output;       // may be written
  uint32_t written;      // has values before the launch
  uint32_t floats;       // 1 half, 2 bfloat, 3 float, 4 double: of what its elements are; 5: a struct; else 0
  uint32_t shared;       // threadgroup memory: line of its declaration
  uint64_t address;      // where it lies: told by fr_watch_open
  uint64_t unwritten, first_unwritten;  // elements that no thread wrote: told by fr_watch_close
  char name[TEXT];
};

enum watch_kind : uint32_t {
  BOUNDS_READ,       // index: bytes from the array's begin
  BOUNDS_WRITE,
  WILD,              // value: the address
  BOUNDS_PRIVATE,    // value: the index; text: the type
  RACE,              // other_*: the access that came first; value: which of both write, and whether groups differ
  UNINITIALISED,
  DIVERGENCE,        // other_thread, other_pc: who does not come; value: whether it has returned
  LANE,              // value: the lane, and how many there are; text: the operation
  NAN_STORED,        // value: the bits
  INFINITY_STORED,
  OVERFLOW_INT,      // text: the operator; value: both operands
  DIVISION,
  SHIFT,             // value: the bits of the type, the count
  HALF_OVERFLOW,     // value: the bits of the float
  MISALIGNED,        // value: the address, and the alignment; text: the type
  WRITE_TO_INPUT,
  GAVE_UP,           // a thread that did not end
  ASSERTION,         // text: the condition; value: size operands
  CRASH,             // a fault: a stack that overflowed, or is overwritten
  UNSET,             // text: a local variable that is read, and has no value
  NO_ROOM,           // more arrays than can be watched
  NOT_NAMED,         // in CUDA: a lane is not in the mask that it gives
  ABSENT,            // other_thread is in it, and does not come
  TRAP,              // a thread ends the launch
  BOUNDS_ROW,        // of an array of several dims: value: the index, and the row's length; text: a private array
};

struct watch_event {
  uint32_t kind;
  int32_t array;  // -1: none
  uint64_t count, pc, other_pc;  // from where the library is loaded; 0: none
  uint32_t thread, threads, other_thread, other_threads;  // index in the threadgroup, and its size
  uint64_t group, other_group;
  int64_t index;
  uint64_t size;
  uint64_t value[2];
  uint32_t operand_kind[2];  // of an assertion's: 0 signed, 1 unsigned, 2 a double's bits
  uint64_t caller[MOST_CALLERS];  // pc's, and their callers'
  int32_t later;                  // of a race: rounds of loops that this access is ahead of the other one
  uint64_t origin[MOST_ORIGINS];  // of a NaN or an infinity: operations that made some
  uint32_t operation[MOST_ORIGINS];  // what each is: x86-64's code; 1, 2: a function of so many arguments; 0: not known
  double operand[MOST_ORIGINS][2];
  const char* file;  // of the compiler's own checks: what `#line` says
  uint32_t line, column;
  char text[TEXT];
};

struct watch_options {
  uint32_t cells;  // whether anything is kept of accesses
  uint32_t races, uninitialised, floats, same_values;  // what to look for; same_values: also of equal stores
  uint32_t reversed;
  uint32_t may_be_infinite, may_be_nan;  // an input is, or the author writes it: then so may outputs be. Of
                                         // infinities a bit for each sign: 1 positive, 2 negative
  // What one operation gives instead: each byte of what lanes get from others that are not there, or, not 0, a
  // half's largest number for an infinity.
  uint32_t stray_bytes;
  uint32_t copy, copies;  // this library's number among those that share the launch
  uint32_t unused;
  uint64_t base;          // where copy 0 has put the arrays
  uint64_t strays_of;
  uint64_t launch_begin, launch_end;     // memory of what the entry is given
  const char *source, *header;           // as the author wrote them
};

// Some of a launch's threadgroups, for one copy of the library.
struct watch_launch {
  void (*run)(const watch_launch*, void* worker);     // the copy's fr_watch_entry
  int (*trap)(int number, void* info, void* context);  // its fr_watch_signal
  void (*entry)(const void* launch, uint64_t begin, uint64_t end, void* worker);
  const void* launch;
  const uint64_t* units;
  uint64_t count;
};
