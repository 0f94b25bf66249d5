// Which lanes of a warp take part in an operation, where threads are fibers (fiber.h).
//
// An operation of CUDA names its lanes. It is carried out when all of them wait for it; those that
// have ended keep nobody waiting, and where in the text each of them stands does not matter. Where a
// lane that is named cannot come, a GPU hangs or gives anything: here those that are there go on,
// and `FR_ON_LANES` is told.
//
// Who wants to know defines FR_ON_LANES(what, lane, at) before: something is wrong with a lane of the
// warp; `what` is fr::on_cpu's. A checked text (checked.h) tells what watches it.
#pragma once

#ifndef FR_ON_LANES
#define FR_ON_LANES(WHAT, LANE, AT) (void)0
#endif

namespace fr {
namespace on_cpu {

// Where in the author's text something is called: the default of a last parameter.
struct here {
  const char* file;
  unsigned line;
  constexpr here(const char* file = __builtin_FILE(), unsigned line = __builtin_LINE())
      : file(file), line(line) {}
};

enum what {
  LANE_NOT_NAMED,      // a lane is not in the mask that it gives
  LANE_DOES_NOT_COME,  // a lane is named that waits elsewhere; threads that a barrier counts do
  LANE_NOT_THERE,      // a lane reads another that takes no part
  LANE_WAITS_FOREVER,  // a thread asks memory again and again, and nobody else goes on
  LANE_NOT_AT_BARRIER,  // as LANE_DOES_NOT_COME, to a barrier of the warp
};

// Something is wrong with a lane of the warp that runs, and `other`, which waits for it or is read by it.
FR_FN unsigned wrong_lane(what which, unsigned lane, unsigned other, here at) {
#if defined(FR_CHECKED)
  (void)at;
  return fr_watch_lanes(which, fr_fibers->first + lane, other, fr_fibers->count);
#else
  (void)which, (void)lane, (void)other, (void)at;
  FR_ON_LANES(which, lane, at);
  return 0;
#endif
}

// What a lane waits with: the first of its operands.
struct lane_call {
  unsigned named;  // the lanes it waits for; 0: those that happen to wait at the same place
  here at;
  bool barrier;
};

FR_QUIET inline lane_call& call_of(const fiber& f) { return *static_cast<lane_call*>(f.operands[0]); }

FR_QUIET inline bool meet(const fiber& a, const fiber& b) {
  if (b.state != fiber::AT_OPERATION || a.run != b.run) return false;
  const lane_call &x = call_of(a), &y = call_of(b);
  if (x.named != y.named) return false;
  return x.named || (x.at.line == y.at.line && x.at.file == y.at.file);
}

// The lanes that take part in what a lane waits for; 0 while one that is named is not there.
FR_QUIET inline unsigned complete(const fiber* lanes, unsigned count, unsigned lane) {
  const unsigned named = call_of(lanes[lane]).named;
  unsigned there = 1u << lane;
  for (unsigned i = 0; i < count; ++i) {
    if (i == lane || !(named >> i & 1) || lanes[i].state == fiber::DONE) continue;
    if (!meet(lanes[lane], lanes[i])) return 0;
    there |= 1u << i;
  }
  return there;
}

FR_QUIET inline bool carry_out(fiber* lanes, unsigned mask) {
  void** operands[32] = {};
  void (*run)(unsigned, void***) = nullptr;
  for (unsigned i = 0; i < 32; ++i)
    if (mask >> i & 1) {
      run = lanes[i].run;
      operands[i] = lanes[i].operands;
      lanes[i].state = fiber::READY;
    }
  run(mask, operands);
  return true;
}

// A lane cannot come to where another waits for it.
FR_QUIET inline void absent(const lane_call& call, unsigned lane, unsigned waits) {
  wrong_lane(call.barrier ? LANE_NOT_AT_BARRIER : LANE_DOES_NOT_COME, lane, waits, call.at);
}

// The operation of the first lane that waits for one, with those that are there.
FR_QUIET inline bool carry_out_some(fiber* lanes, unsigned count, bool named) {
  for (unsigned i = 0; i < count; ++i) {
    if (lanes[i].state != fiber::AT_OPERATION || (call_of(lanes[i]).named != 0) != named) continue;
    unsigned mask = 1u << i;
    for (unsigned k = i + 1; k < count; ++k)
      if (meet(lanes[i], lanes[k])) mask |= 1u << k;
    if (named)
      for (unsigned k = 0; k < count; ++k)
        if ((call_of(lanes[i]).named & ~mask) >> k & 1 && lanes[k].state != fiber::DONE)
          absent(call_of(lanes[i]), k, i);
    return carry_out(lanes, mask);
  }
  return false;
}

}  // namespace on_cpu

// Run the lanes of a warp until each is done or waits, then carry out an operation. False when there
// is none: each lane is done or waits at a barrier of the block.
FR_QUIET inline bool run_simdgroup(fibers* f, unsigned first, unsigned count) {
  fiber* lanes = f->all + first;
  f->first = first, f->count = count;
  bool ready = false;
  for (unsigned k = 0; k < count; ++k) {
    const unsigned i = turn(k, count);
    if (lanes[i].state != fiber::READY) continue;
    resume(f, lanes[i]);
    ready |= lanes[i].state == fiber::READY;  // it waits for memory
  }
  bool going = ready;
  for (unsigned i = 0; i < count; ++i) {
    if (lanes[i].state != fiber::AT_OPERATION || !on_cpu::call_of(lanes[i]).named) continue;
    if (const unsigned mask = on_cpu::complete(lanes, count, i)) going = on_cpu::carry_out(lanes, mask);
  }
  return going || on_cpu::carry_out_some(lanes, count, false) || on_cpu::carry_out_some(lanes, count, true);
}

}  // namespace fr
