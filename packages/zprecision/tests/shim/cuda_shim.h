/* CUDA keywords for a C compiler, so that the tests run zk_gpu.cu on a CPU.  Included before its text.
 *
 * Blocks run one after the other.  The 256 threads of a block are fibers (shim.c) that switch at barriers and
 * shuffles, so the tests cover the text itself: its indices, its reductions, its barriers.
 * Misaligned vector accesses trap (-fsanitize=alignment), as they would on a GPU.
 */
#ifndef CUDA_SHIM_H
#define CUDA_SHIM_H
#include <stdint.h>

typedef struct { uint32_t x[4]; } __attribute__((aligned(16))) shim_16;
typedef struct { uint32_t x[2]; } __attribute__((aligned(8))) shim_8;
typedef struct { uint32_t x; } shim_index;

extern shim_index threadIdx, blockIdx; /* of the running fiber */

void __syncthreads(void);
uint32_t __shfl_xor_sync(uint32_t mask, uint32_t value, int distance);

/* If set, it is told of the kernels' loads and stores: tools/simulated_cuda checks their order with it. */
extern void (*shim_touch)(uint64_t address, int bytes, int writes);
static inline void shim_tell(uint64_t address, int bytes, int writes) {
  if (shim_touch != 0) shim_touch(address, bytes, writes);
}

/* Runs `body(args)` as every thread of every block.  Returns 0, or 1 if threads wait for others that have ended. */
int shim_run(void (*body)(const void *), int64_t num_blocks, const void *args);

#define ZK_KERNEL(blocks, name, type)                                                        \
  static void name##_body(const type a);                                                     \
  static void name##_thread(const void *args) { name##_body(*(const type *)args); }          \
  int name(int64_t num_blocks, const void *args) { return shim_run(name##_thread, num_blocks, args); } \
  static void name##_body(const type a)
#define ZK_SHARED static
#define ZK_UNROLL
#define ZK_UNROLL_16
#define ZK_NO_UNROLL
#define ZK_FENCE
#define zk_lower_halves(a, b) (((a) & 0xffffu) | (b) << 16)
#define zk_upper_halves(a, b) ((a) >> 16 | ((b) & 0xffff0000u))
static inline __attribute__((unused)) uint32_t zk_odd_bytes(uint32_t a, uint32_t b) {
  return (a >> 8 & 255u) | (a >> 24) << 8 | (b >> 8 & 255u) << 16 | (b >> 24) << 24;
}

/* The sanitizer checks the alignment of these. */
static inline __attribute__((unused)) void zk_load16(uint64_t from, uint32_t *x) {
  shim_tell(from, 16, 0);
  shim_16 y = *(const shim_16 *)from;
  for (int k = 0; k < 4; k++) x[k] = y.x[k];
}
static inline __attribute__((unused)) void zk_load8(uint64_t from, uint32_t *x) {
  shim_tell(from, 8, 0);
  shim_8 y = *(const shim_8 *)from;
  for (int k = 0; k < 2; k++) x[k] = y.x[k];
}
static inline __attribute__((unused)) void zk_load4(uint64_t from, uint32_t *x) { shim_tell(from, 4, 0); *x = *(const uint32_t *)from; }
static inline __attribute__((unused)) void zk_store16(uint64_t to, const uint32_t *x) {
  shim_tell(to, 16, 1);
  shim_16 y = {{x[0], x[1], x[2], x[3]}};
  *(shim_16 *)to = y;
}
static inline __attribute__((unused)) void zk_store8(uint64_t to, const uint32_t *x) {
  shim_tell(to, 8, 1);
  shim_8 y = {{x[0], x[1]}};
  *(shim_8 *)to = y;
}
static inline __attribute__((unused)) void zk_store4(uint64_t to, const uint32_t *x) { shim_tell(to, 4, 1); *(uint32_t *)to = *x; }

#endif
