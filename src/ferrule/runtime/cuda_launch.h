/* Starting a kernel on an NVIDIA GPU with the functions that ferrule/tools/driver.py found in libcuda. */
#ifndef FERRULE_CUDA_LAUNCH_H
#define FERRULE_CUDA_LAUNCH_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

typedef int (*cuda_launcher)(void* function, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                             unsigned shared, void* stream, void** arguments, void** extra);

/* CUlaunchAttribute and CUlaunchConfig of cuda.h. */
typedef struct {
  int id, pad;
  uint32_t value[16];
} fr_launch_attribute;
typedef struct {
  uint32_t blocks[3], block[3], shared;
  void* stream;
  fr_launch_attribute* attributes;
  uint32_t count;
} fr_launch_config;
enum { FR_CLUSTER_DIMENSION = 4, FR_PROGRAMMATIC = 6 }; /* CUlaunchAttributeID */

typedef int (*cuda_config_launcher)(const fr_launch_config*, void* function, void** arguments, void** extra);

/* `State` of ferrule/tools/libcuda.py. */
typedef struct {
  cuda_launcher launch;
  cuda_config_launcher launch_config;
  int (*set_bytes)(uint64_t address, unsigned char value, size_t bytes, void* stream);
  int (*get_current)(void**);
  int (*push)(void*);
  int (*pop)(void**);
  int (*exchange_mode)(int*); /* of what threads may call while a stream is recorded */
  int32_t forked;
  uint32_t count;
  uint32_t last[8];
  int (*add_pending)(void* function, void* argument); /* Py_AddPendingCall, once a kernel prints, */
  void* show_printed;                                 /* and what shows that, given a stream */
} cuda_state;

/* A kernel on a GPU, and how it is launched. */
typedef struct {
  void *function, *context;
  uint32_t blocks[3], threads[3];
  uint32_t shared, device, number;
  uint32_t pdl; /* it may begin before the kernel ahead has ended */
  uint32_t prints;
} cuda_call;

/* What a parameter of a kernel gets. */
enum {
  FR_PASS_INPUT = 0, FR_PASS_VALUE = 1, FR_PASS_SHAPE = 2, FR_PASS_STRIDES = 3, FR_PASS_OUTPUT = 4,
  FR_PASS_LAUNCH = 5, FR_PASS_EXTENT = 6
};

/* Launches blocks and threads along three axes each; clusters where there are any. Returns a CUresult. */
static inline int cuda_launch_with(cuda_launcher launch, cuda_config_launcher launch_config, void* function,
                                   const uint32_t* blocks, const uint32_t* threads, const uint32_t* cluster, bool pdl,
                                   uint32_t shared, void* stream, void** arguments) {
  fr_launch_attribute attributes[2];
  fr_launch_config config = {{blocks[0], blocks[1], blocks[2]}, {threads[0], threads[1], threads[2]},
                             shared, stream, attributes, 0};
  memset(attributes, 0, sizeof attributes);
  if (cluster) {
    attributes[config.count].id = FR_CLUSTER_DIMENSION;
    memcpy(attributes[config.count++].value, cluster, 3 * sizeof *cluster);
  }
  if (pdl) {
    attributes[config.count].id = FR_PROGRAMMATIC;
    attributes[config.count++].value[0] = 1;
  }
  if (config.count) return launch_config(&config, function, arguments, NULL);
  return launch(function, blocks[0], blocks[1], blocks[2], threads[0], threads[1], threads[2], shared, stream,
                arguments, NULL);
}

/* Fills `zeroed[i]` bytes of each array with zeros and starts a kernel, if there is one, both on
 * `stream`. Returns a CUresult. */
static inline int cuda_start(cuda_state* cuda, const cuda_call* c, void* stream, int arrays,
                             void* const* array, const uint64_t* zeroed, void** arguments) {
  void* found = NULL;
  cuda->last[cuda->count++ % 8] = c->number;
  int status = cuda->get_current(&found);
  bool other = found != c->context;
  if (!status && other) status = cuda->push(c->context);
  if (status) return status;
  for (int i = 0; !status && i < arrays; i++)
    if (zeroed[i]) status = cuda->set_bytes((uintptr_t)array[i], 0, (size_t)zeroed[i], stream);
  if (!status && c->function)
    status = cuda_launch_with(cuda->launch, cuda->launch_config, c->function, c->blocks, c->threads, NULL, c->pdl,
                              c->shared, stream, arguments);
  if (other) cuda->pop(&found);
  if (!status && c->prints && cuda->add_pending) cuda->add_pending(cuda->show_printed, stream);
  return status;
}

#endif
