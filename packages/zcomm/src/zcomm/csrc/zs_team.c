/* Threads and instruction sets of sign codes.
 *
 * The threads are torch's: Python looks up GOMP_parallel in the process and passes its address, so nothing links an
 * OpenMP runtime; without it the caller does the work.  Threads take runs one after the other, and no sum crosses a
 * run, so results do not depend on their number.
 */
#include <stdatomic.h>
#include <string.h>

#include "zs_api.h"

typedef void signs_function(const zs_signs_job *, const zs_signs *, double *);
#define DECLARE(level)                                                                          \
  signs_function zs_signs_encode_##level, zs_signs_average_##level, zs_signs_decode_##level,    \
      zs_signs_settle_##level;                                                                  \
  static signs_function *const level##_functions[] = {zs_signs_encode_##level, zs_signs_average_##level, \
                                                      zs_signs_decode_##level, zs_signs_settle_##level};
DECLARE(base)
#ifdef ZS_HAS_X86
DECLARE(v3)
DECLARE(v4)
static signs_function *const *const levels[] = {base_functions, v3_functions, v4_functions};
#else
static signs_function *const *const levels[] = {base_functions};
#endif

static void (*gomp_parallel)(void (*)(void *), void *, unsigned, unsigned);

void zs_set_omp(uint64_t parallel) {
  gomp_parallel = (void (*)(void (*)(void *), void *, unsigned, unsigned))(uintptr_t)parallel;
}

typedef struct {
  const zs_signs_job *job;
  signs_function *function;
  _Atomic int64_t next; /* run that no thread has taken */
} team;

static void work(void *context) {
  team *t = context;
  const zs_signs_job *job = t->job;
  for (;;) {
    int64_t run = atomic_fetch_add_explicit(&t->next, 1, memory_order_relaxed);
    if (run >= job->num_runs) return;
    double square = 0;
    t->function(job, job->runs + run, &square);
    if (job->squares) job->squares[run] = square;
  }
}

void zs_signs_run(int phase, const zs_signs_job *job, int num_threads) {
  team t = {job, levels[zs_level()][phase], 0};
  if (gomp_parallel && num_threads > 1 && job->num_runs > 1)
    gomp_parallel(work, &t, (unsigned)num_threads, 0);
  else
    work(&t);
}
