/* Dispatch to instruction sets and threads.
 *
 * The threads are torch's: Python looks up GOMP_parallel in the process and passes its address, so
 * nothing links an OpenMP runtime and no second thread pool competes with torch's.  Without
 * GOMP_parallel the work runs on the calling thread.
 *
 * The elements of all rows, in order, are divided into equal parts at multiples of ZK_BLOCK (for sums
 * ZK_SPAN) inside a row.  Results do not depend on the parts: elements are independent, and sums are
 * added in the order of the rows.
 */
#include "zk_api.h"

extern const zk_kernels zk_kernels_base;
#if defined(ZK_HAS_X86)
extern const zk_kernels zk_kernels_v3, zk_kernels_v4;
static const zk_kernels *const levels[] = {&zk_kernels_base, &zk_kernels_v3, &zk_kernels_v4};
static const char *const names[] = {"sse2", "avx2", "avx512"};
#elif defined(__aarch64__)
static const zk_kernels *const levels[] = {&zk_kernels_base};
static const char *const names[] = {"neon"};
#else
static const zk_kernels *const levels[] = {&zk_kernels_base};
static const char *const names[] = {"portable"};
#endif

#define NUM_LEVELS ((int)(sizeof(levels) / sizeof(levels[0])))

static int active;
static void (*gomp_parallel)(void (*)(void *), void *, unsigned, unsigned);
static int (*omp_thread_num)(void);
static int (*omp_num_threads)(void);

int zk_levels(void) { return NUM_LEVELS; }
const char *zk_level_name(int level) { return level >= 0 && level < NUM_LEVELS ? names[level] : ""; }

int zk_level_runs_here(int level) {
  if (level < 0 || level >= NUM_LEVELS) return 0;
#if defined(ZK_HAS_X86)
  __builtin_cpu_init(); /* checks cpuid, and whether the system saves the registers */
  if (level >= 1 && !(__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("bmi2")))
    return 0;
  if (level >= 2 && !(__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")))
    return 0;
#endif
  return 1;
}

int zk_best_level(void) {
  int best = 0;
  for (int level = 0; level < NUM_LEVELS; level++)
    if (zk_level_runs_here(level)) best = level;
  return best;
}

void zk_set_level(int level) {
  if (zk_level_runs_here(level)) active = level;
}
int zk_get_level(void) { return active; }

void zk_set_omp(uint64_t parallel, uint64_t thread_num, uint64_t num_threads) {
  gomp_parallel = (void (*)(void (*)(void *), void *, unsigned, unsigned))(uintptr_t)parallel;
  omp_thread_num = (int (*)(void))(uintptr_t)thread_num;
  omp_num_threads = (int (*)(void))(uintptr_t)num_threads;
}

int64_t zk_coef_bytes(void) { return (int64_t)sizeof(zk_coef); }
int64_t zk_num_spans(int64_t numel) { return (numel + ZK_SPAN - 1) / ZK_SPAN; }
int64_t zk_num_partials(int64_t num_rows, const int64_t *numel) {
  int64_t sum = 0;
  for (int64_t row = 0; row < num_rows; row++) sum += zk_num_spans(numel[row]);
  return sum;
}
const char *zk_source_hash(void) { return ZK_SOURCE_HASH; }

/* Threads ------------------------------------------------------------------------------------------- */

#define SERIAL_NUMEL 32768 /* up to this size, waking threads costs more than they save */

typedef struct work {
  void (*row_part)(const struct work *, int64_t row, int64_t first_span, int64_t from, int64_t to);
  const zk_job *job;
  const uint64_t *rows; /* of squares */
  const int64_t *numel;
  int64_t num_rows, total, align;
  int format;
  double *partials;
} work;

/* The first element of thread `t` of `n`, counted over all rows. */
static int64_t border(const work *w, int t, int n) { return (int64_t)((__int128)w->total * t / n); }

static void run_part(const work *w, int t, int n) {
  int64_t begin = border(w, t, n), end = border(w, t + 1, n), base = 0, first_span = 0;
  for (int64_t row = 0; row < w->num_rows && base < end; row++) {
    int64_t numel = w->numel[row];
    if (base + numel > begin) {
      int64_t from = begin > base ? (begin - base) / w->align * w->align : 0;
      int64_t to = end < base + numel ? (end - base) / w->align * w->align : numel;
      if (to > from) w->row_part(w, row, first_span, from, to);
    }
    base += numel;
    first_span += zk_num_spans(numel);
  }
}

static void run_in_team(void *context) { run_part(context, omp_thread_num(), omp_num_threads()); }

static void run(work *w, int num_threads) {
  w->total = 0;
  for (int64_t row = 0; row < w->num_rows; row++) w->total += w->numel[row];
  if (gomp_parallel && num_threads > 1 && w->total > SERIAL_NUMEL)
    gomp_parallel(run_in_team, w, (unsigned)num_threads, 0);
  else
    run_part(w, 0, 1);
}

static work rows_of(const zk_job *job, int64_t align) {
  work w = {.job = job, .numel = job->numel, .num_rows = job->num_rows, .align = align, .partials = job->partials};
  return w;
}

/* Updates ------------------------------------------------------------------------------------------- */

static float *step_of(const zk_job *job, int64_t row) { return job->steps ? (float *)(uintptr_t)job->steps[row] : 0; }

/* Compute the coefficients of every row for update number count + 1. */
static void prepare(zk_job *job) {
  zk_hyper h = {job->lr, job->beta1, job->beta2, job->eps, job->weight_decay, job->min_ratio, job->max_ratio};
  zk_coef *coefs = job->coefs;
  float last = -1.0f;
  for (int64_t row = 0; row < job->num_rows; row++) {
    float step = job->steps ? *step_of(job, row) + 1.0f : 1.0f;
    if (row && step == last)
      coefs[row] = coefs[row - 1];
    else
      zk_prepare(&coefs[row], &h, job->rule, job->flags, job->lr, step, job->grad_scale ? *job->grad_scale : 1.0f);
    last = step;
  }
}

static void count_step(zk_job *job) {
  float *previous = 0;
  for (int64_t row = 0; job->steps && row < job->num_rows; row++) {
    float *step = step_of(job, row);
    if (step != previous) *step += 1.0f;
    previous = step; /* rows of one tensor are adjacent and share its count */
  }
}

static void update_part(const work *w, int64_t row, int64_t first_span, int64_t from, int64_t to) {
  (void)first_span;
  levels[active]->update(w->job, row, from, to);
}

static void lamb_sums_part(const work *w, int64_t row, int64_t first_span, int64_t from, int64_t to) {
  for (int64_t at = from; at < to; at += ZK_SPAN) {
    double *squares = w->partials + 2 * (first_span + at / ZK_SPAN);
    squares[0] = squares[1] = 0;
    levels[active]->lamb_sums(w->job, row, at, to - at < ZK_SPAN ? to : at + ZK_SPAN, squares);
  }
}

static void lamb_apply_part(const work *w, int64_t row, int64_t first_span, int64_t from, int64_t to) {
  (void)first_span;
  levels[active]->lamb_apply(w->job, row, from, to);
}

static int is_skipped(const zk_job *job) { return job->found_inf && *job->found_inf != 0.0f; }

int zk_lamb_sums(zk_job *job, int num_threads) {
  if (is_skipped(job)) return 0;
  prepare(job);
  work w = rows_of(job, ZK_SPAN);
  w.row_part = lamb_sums_part;
  run(&w, num_threads);
  const double *partial = job->partials;
  for (int64_t row = 0; row < job->num_rows; row++) {
    double *sum = job->sums + 2 * row;
    sum[0] = sum[1] = 0;
    for (int64_t left = zk_num_spans(job->numel[row]); left > 0; left--, partial += 2) {
      sum[0] += partial[0];
      sum[1] += partial[1];
    }
  }
  return 1;
}

int zk_lamb_apply(zk_job *job, int num_threads) {
  work w = rows_of(job, ZK_BLOCK);
  w.row_part = lamb_apply_part;
  run(&w, num_threads);
  count_step(job);
  return 1;
}

int zk_step(zk_job *job, int num_threads) {
  if (job->rule == ZK_LAMB) return zk_lamb_sums(job, num_threads) && zk_lamb_apply(job, num_threads);
  if (is_skipped(job)) return 0;
  prepare(job);
  work w = rows_of(job, ZK_BLOCK);
  w.row_part = update_part;
  run(&w, num_threads);
  count_step(job);
  return 1;
}

/* Sums ---------------------------------------------------------------------------------------------- */

static void squares_part(const work *w, int64_t row, int64_t first_span, int64_t from, int64_t to) {
  for (int64_t at = from; at < to; at += ZK_SPAN)
    w->partials[first_span + at / ZK_SPAN] = levels[active]->squares(
        w->format, (const void *)(uintptr_t)w->rows[row], at, to - at < ZK_SPAN ? to : at + ZK_SPAN);
}

double zk_squares(int format, int64_t num_rows, const uint64_t *rows, const int64_t *numel, double *partials,
                  int num_threads) {
  work w = {.row_part = squares_part, .rows = rows, .numel = numel, .num_rows = num_rows, .align = ZK_SPAN,
            .format = format, .partials = partials};
  run(&w, num_threads);
  double sum = 0;
  for (int64_t row = 0; row < num_rows; row++)
    for (int64_t left = zk_num_spans(numel[row]); left > 0; left--) sum += *partials++;
  return sum;
}

/* Overlap ------------------------------------------------------------------------------------------- */

int64_t zk_find_overlap(int64_t num_written, const uint64_t *starts, const uint64_t *ends, int64_t num_read,
                        const uint64_t *read_starts, const int64_t *read_bytes) {
  for (int64_t i = 0; i < num_read; i++) {
    int64_t low = 0, high = num_written; /* first written range that ends after the start */
    while (low < high) {
      int64_t middle = (low + high) / 2;
      if (ends[middle] <= read_starts[i])
        low = middle + 1;
      else
        high = middle;
    }
    if (read_bytes[i] > 0 && low < num_written && starts[low] < read_starts[i] + (uint64_t)read_bytes[i]) return i;
  }
  return -1;
}

void zk_decode(int format, int kind, const void *from, const void *extra, float *to, int64_t numel) {
  levels[active]->decode(format, kind, from, extra, to, numel);
}

void zk_encode(int format, int kind, const float *from, void *to, void *extra, int64_t numel, uint32_t seed,
               int stochastic) {
  levels[active]->encode(format, kind, from, to, extra, numel, seed, stochastic);
}
