/* Fibers for the threads of a CUDA block; see cuda_shim.h. */
#include "cuda_shim.h"
#include <stdlib.h>
#include <ucontext.h>

#define THREADS 256
#define WARP 32
#define STACK_BYTES (64 * 1024)

enum state { READY, AT_BARRIER, IN_SHUFFLE, DONE };

shim_index threadIdx, blockIdx;
void (*shim_touch)(uint64_t address, int bytes, int writes);

static ucontext_t scheduler, fibre[THREADS];
static enum state state[THREADS];
static uint32_t slot[2][THREADS]; /* values of a shuffle; two, so that the next one may begin */
static unsigned char turn[THREADS];
static void (*current_body)(const void *);
static const void *current_args;

static void wait_as(enum state why) {
  const uint32_t me = threadIdx.x;
  state[me] = why;
  swapcontext(&fibre[me], &scheduler);
}

void __syncthreads(void) { wait_as(AT_BARRIER); }

uint32_t __shfl_xor_sync(uint32_t mask, uint32_t value, int distance) {
  const uint32_t me = threadIdx.x;
  uint32_t *values = slot[turn[me]];
  (void)mask; /* all 32, always */
  turn[me] ^= 1;
  values[me] = value;
  wait_as(IN_SHUFFLE);
  return values[me ^ (uint32_t)distance];
}

static void thread_main(void) {
  current_body(current_args);
  state[threadIdx.x] = DONE; /* and on to the scheduler, by uc_link */
}

/* Makes threads from..to ready if all wait for the same event; returns whether it did. */
static int release(enum state why, int from, int to) {
  for (int t = from; t < to; t++)
    if (state[t] != why) return 0;
  for (int t = from; t < to; t++) state[t] = READY;
  return 1;
}

static int run_ready(void) {
  int num_run = 0;
  for (int t = 0; t < THREADS; t++)
    if (state[t] == READY) {
      threadIdx.x = (uint32_t)t;
      swapcontext(&scheduler, &fibre[t]);
      num_run++;
    }
  return num_run;
}

static int run_block(char *stacks) {
  for (int t = 0; t < THREADS; t++) {
    getcontext(&fibre[t]);
    fibre[t].uc_stack.ss_sp = stacks + (size_t)t * STACK_BYTES;
    fibre[t].uc_stack.ss_size = STACK_BYTES;
    fibre[t].uc_link = &scheduler;
    makecontext(&fibre[t], thread_main, 0);
    state[t] = READY;
    turn[t] = 0;
  }
  while (run_ready()) {
    for (int t = 0; t < THREADS; t += WARP) release(IN_SHUFFLE, t, t + WARP);
    release(AT_BARRIER, 0, THREADS);
  }
  for (int t = 0; t < THREADS; t++)
    if (state[t] != DONE) return 1;
  return 0;
}

int shim_run(void (*body)(const void *), int64_t num_blocks, const void *args) {
  char *stacks = malloc((size_t)THREADS * STACK_BYTES);
  int failed = stacks == 0;
  current_body = body;
  current_args = args;
  for (int64_t block = 0; block < num_blocks && !failed; block++) {
    blockIdx.x = (uint32_t)block;
    failed = run_block(stacks);
  }
  free(stacks);
  return failed;
}
