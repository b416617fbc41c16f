/* A loop that reads memory in order, with negligible arithmetic: what products with one token are measured by.
 *
 * Threads are torch's: the addresses of its OpenMP functions are arguments.
 */
#include <stdint.h>

typedef uint64_t line __attribute__((vector_size(64), aligned(1)));

typedef struct {
  const uint8_t *at;
  int64_t lines;
  int (*thread_num)(void);
  int (*num_threads)(void);
} job;

uint64_t seen[64 * 8]; /* stored, so that the compiler cannot drop the loop */

static void part(const job *j, int64_t thread, int64_t count) {
  const line *from = (const line *)j->at + j->lines * thread / count, *to = (const line *)j->at + j->lines * (thread + 1) / count;
  line a = {0}, b = {0};
  for (; from + 1 < to; from += 2) a ^= from[0], b ^= from[1];
  a ^= b;
  seen[thread % 64 * 8] = a[0] ^ a[1] ^ a[2] ^ a[3] ^ a[4] ^ a[5] ^ a[6] ^ a[7];
}

static void in_team(void *context) {
  const job *j = context;
  part(j, j->thread_num(), j->num_threads());
}

void read_in_order(const void *at, int64_t bytes, int threads, void (*parallel)(void (*)(void *), void *, unsigned, unsigned),
                   int (*thread_num)(void), int (*num_threads)(void)) {
  job j = {at, bytes / 64, thread_num, num_threads};
  if (threads > 1 && parallel)
    parallel(in_team, &j, (unsigned)threads, 0);
  else
    part(&j, 0, 1);
}
