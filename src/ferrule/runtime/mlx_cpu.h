/* Kernels that run on the threads of MLX's CPU streams, without Python. */
#ifndef FERRULE_MLX_CPU_H
#define FERRULE_MLX_CPU_H

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <mutex>

#include "mlx/allocator.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/scheduler.h"

#include "canary.h"
#include "mlx_plan.h"

namespace {

/* A kernel that a stream's thread will run, with all that it needs. */
struct Job {
  Work work;
  fr_cpu_job cpu;
  std::string name;
  /* Kept alive. Not the arrays: letting go of the last of one, on this thread, would race with the thread
   * that evaluates, and with Python. */
  std::vector<std::shared_ptr<mx::array::Data>> memory;
  struct Written {
    char* at;
    size_t bytes;
    const char* name; /* NULL where it has none */
    mx::Shape shape;
  };
  std::vector<Written> outputs;
  std::vector<std::function<void()>> first; /* what comes before the kernel: fills, copies of inputs */
};

/* Jobs that are done, to be used again: each is of many kB, which is dear to allocate on one thread and
 * free on another. The list lives for ever, since streams run until the process ends. */
struct Jobs {
  std::mutex mutex;
  std::vector<Job*> done;
};
constexpr size_t most_jobs = 128; /* MLX lets so many be under way */

std::shared_ptr<Job> new_job() {
  static Jobs& jobs = *new Jobs;
  Job* job = nullptr;
  {
    std::lock_guard<std::mutex> guard(jobs.mutex);
    if (!jobs.done.empty()) {
      job = jobs.done.back();
      jobs.done.pop_back();
    }
  }
  return std::shared_ptr<Job>(job ? job : new Job, [](Job* job) {
    job->memory.clear();
    job->outputs.clear();
    job->first.clear();
    std::lock_guard<std::mutex> guard(jobs.mutex);
    if (jobs.done.size() < most_jobs)
      jobs.done.push_back(job);
    else
      delete job;
  });
}

/* Whether so much memory can be had. What MLX cannot get, it counts as used for ever, and then may wait for ever
 * until less is used; so large sizes are tried before. */
bool can_be_had(uint64_t bytes) {
  if (bytes < (UINT64_C(1) << 30)) return true;
  void* volatile tried = std::malloc(bytes + 64); /* volatile: compilers take memory that is not used for had */
  std::free(tried);
  return tried != nullptr;
}

/* Gives an array memory, with `more` bytes behind it. MLX gives none where there is not as much, and takes what 64 bits cannot count for
 * little. */
template <class What>
void allocate_on_host(mx::array& a, What what, size_t more = 0) {
  uint64_t bytes = a.itemsize();
  bool empty = false, countable = true;
  for (int64_t size : a.shape()) {
    empty = empty || size == 0;
    countable = !__builtin_mul_overflow(bytes, static_cast<uint64_t>(size), &bytes) && countable;
  }
  countable = countable && bytes < INT64_MAX - 64 - more;
  if (empty || (countable && can_be_had(bytes))) {
    a.set_data(mx::allocator::malloc((empty ? 0 : bytes) + more));
    if (a.buffer().ptr()) return;
  }
  throw std::runtime_error(what() + " has the shape " + shown(a.shape()) + ", which is " +
                           (countable ? std::to_string(bytes) : std::string("more than 9223372036854775807")) +
                           " bytes of memory; this machine does not have them.");
}

/* A row-contiguous copy of an array that is not empty. */
void copy_strided(const char* from, char* to, size_t item, const mx::Shape& sizes, const mx::Strides& strides) {
  int ndim = static_cast<int>(sizes.size());
  if (ndim == 0) {
    memcpy(to, from, item);
    return;
  }
  int64_t at[FR_MAX_NDIM] = {0}, inner = sizes[ndim - 1], step = strides[ndim - 1] * (int64_t)item;
  for (;;) {
    const char* row = from;
    for (int d = 0; d < ndim - 1; d++) row += at[d] * strides[d] * (int64_t)item;
    if (step == (int64_t)item) {
      memcpy(to, row, inner * item);
    } else {
      switch (item) {
        case 1: for (int64_t i = 0; i < inner; i++) to[i] = row[i * step]; break;
        case 2: for (int64_t i = 0; i < inner; i++) memcpy(to + 2 * i, row + i * step, 2); break;
        case 4: for (int64_t i = 0; i < inner; i++) memcpy(to + 4 * i, row + i * step, 4); break;
        default: for (int64_t i = 0; i < inner; i++) memcpy(to + item * i, row + i * step, item);
      }
    }
    to += inner * item;
    int d = ndim - 2;
    for (; d >= 0; d--) {
      if (++at[d] < sizes[d]) break;
      at[d] = 0;
    }
    if (d < 0) return;
  }
}

/* Fills an array with an element. */
void fill(char* at, size_t count, const std::string& element) {
  size_t n = element.size();
  if (element.find_first_not_of('\0') == std::string::npos) {
    memset(at, 0, count * n);
  } else {
    for (size_t i = 0; i < count; i++) memcpy(at + i * n, element.data(), n);
  }
}

/* What a code of the runtime means; `outside` is the output of FR_E_OUTSIDE. */
std::string failure(const Job& job, int status, size_t outside) {
  const fr_cpu_launch& l = job.cpu.launch;
  auto triple = [](const uint32_t* s) {
    return "(" + std::to_string(s[0]) + ", " + std::to_string(s[1]) + ", " + std::to_string(s[2]) + ")";
  };
  std::string where = job.name + " (grid " + triple(l.grid) + ", threadgroup " + triple(l.threadgroup) + ")";
  switch (status) {
    case FR_E_FAULT:
      return where + " accessed memory outside its arrays. Check the indices against the shapes; the "
                     "outputs are lost, the inputs are as they were unless the kernel wrote to other memory first.";
    case FR_E_DIVISION:
      return where + " divided an integer by zero, which Metal leaves undefined. Guard the division.";
    case FR_E_ABANDONED: /* as errors.abandoned says it */
      return where + " was abandoned at the second interrupt, in the middle of units that did not end; its outputs, "
                     "and what it writes in place, are lost.";
    case FR_E_MEMORY: return where + " could not get memory for its threads' stacks.";
    case FR_E_OUTSIDE: { /* as hosts.wrote_outside says it */
      const Job::Written& out = job.outputs[outside];
      int past = fr_past_end(out.at + out.bytes, FR_CANARY);
      return where + " wrote outside output " + (out.name ? std::string("'") + out.name + "'" : std::to_string(outside + 1)) +
             " of shape " + shown(out.shape) + ", " + std::to_string(past) + (past == 1 ? " byte" : " bytes") +
             " past the end. Check the indices against the shape; the outputs are lost, and what lies farther "
             "outside may be damaged.";
    }
    default: return where + ": the CPU runtime failed with code " + std::to_string(status) + ".";
  }
}

/* Whether an error on a stream's thread reaches who evaluates. In versions where it would end the
 * process, the next call of a kernel, or its evaluation, raises it. */
template <class S>
constexpr bool carries_errors = requires(S& s, mx::Stream t) { s.check_error(t); };
std::mutex late_mutex;
std::atomic<bool> late{false};
std::string late_text;

void raise_late() {
  if (!late.load(std::memory_order_relaxed)) return;
  std::lock_guard<std::mutex> guard(late_mutex);
  late = false;
  throw std::runtime_error("an earlier " + std::exchange(late_text, ""));
}

void run(Job& job) {
  for (const auto& step : job.first) step();
  if (!job.work.entry) return;
  fr_progress progress;
  progress.parts = 0;
  int status = job.cpu.run(job.cpu.entry, &job.cpu.launch, job.cpu.units, job.cpu.limit, 0, &progress);
  size_t outside = 0;
  if (status == FR_OK) {
    while (outside < job.outputs.size() && !fr_past_end(job.outputs[outside].at + job.outputs[outside].bytes, FR_CANARY)) outside++;
    if (outside == job.outputs.size()) return;
    status = FR_E_OUTSIDE;
  }
  std::string text = failure(job, status, outside);
  /* MLX hands out what is in an array after the error, too: np.array asks a second time. Floats are NaN. */
  for (const Job::Written& out : job.outputs) memset(out.at, 0xff, out.bytes);
  if constexpr (carries_errors<mx::scheduler::Scheduler>) {
    throw std::runtime_error(text);
  } else {
    std::lock_guard<std::mutex> guard(late_mutex);
    late_text = text;
    late = true;
    fprintf(stderr, "ferrule: %s\n", late_text.c_str());
  }
}

}  // namespace

#endif
