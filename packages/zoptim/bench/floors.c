/* Floors: loops that move the bytes of an optimizer step, with negligible arithmetic.
 *
 * Every loop reads and writes the streams of one case, in one pass (LAMB and the whole boundary: two), and combines
 * them by xor with `x & mask`.  The mask is 0, which the compiler cannot know: all bytes move, no value changes, so
 * floors and optimizers can share their memory.  Threads are torch's, as in zoptim's rt.c: the address of
 * GOMP_parallel is an argument, and no second thread pool competes with torch's.
 */
#include <stdint.h>

typedef struct {
  int64_t num_rows;
  const int64_t *numel;      /* elements of each row */
  void *const *const *streams; /* streams[k][row], in the order of the case */
  uint32_t mask;             /* 0 */
} floor_job;

typedef uint32_t u32;
typedef uint16_t u16;
typedef uint8_t u8;
typedef void (*loop)(void *const *s, int64_t from, int64_t to, u32 mask);

#define LOOP(NAME) static void NAME(void *const *s, int64_t from, int64_t to, u32 mask)
#define AT(TYPE, NAME, K) TYPE *restrict NAME = (TYPE *)s[K]
#define EACH for (int64_t i = from; i < to; i++)

/* weight, grad, two states: AdamW in float32 */
LOOP(adam) {
  AT(u32, p, 0); AT(u32, g, 1); AT(u32, m, 2); AT(u32, v, 3);
  EACH { u32 x = g[i] & mask; p[i] ^= x; m[i] ^= x; v[i] ^= x; }
}

/* weight, grad, one state: Lion, Adagrad, SGD with momentum */
LOOP(one_state) {
  AT(u32, p, 0); AT(u32, g, 1); AT(u32, m, 2);
  EACH { u32 x = g[i] & mask; p[i] ^= x; m[i] ^= x; }
}

/* master, 16-bit grad, two states, 16-bit weight that is written only */
LOOP(offload) {
  AT(u32, p, 0); AT(u16, g, 1); AT(u32, m, 2); AT(u32, v, 3); AT(u16, w, 4);
  EACH { u32 x = (u32)g[i] << 16 & mask; u32 y = p[i] ^ x; p[i] = y; m[i] ^= x; v[i] ^= x; w[i] = (u16)(y >> 16); }
}

/* The norm's pass over a 16-bit gradient: the sum is stored, so that the compiler cannot drop it. */
u32 seen[64 * 16];
LOOP(read_grad) {
  AT(u16, g, 1);
  u32 any = 0;
  EACH any |= g[i];
  seen[(from >> 12) % 64 * 16] = any & mask;
}

/* 16-bit weight and remainder, 16-bit grad, two states */
LOOP(split) {
  AT(u16, h, 0); AT(u16, g, 1); AT(u32, m, 2); AT(u32, v, 3); AT(u16, r, 4);
  EACH { u16 x = (u16)(g[i] & mask); h[i] ^= x; r[i] ^= x; m[i] ^= x; v[i] ^= x; }
}

/* weight, grad, two 16-bit states */
LOOP(states_16) {
  AT(u32, p, 0); AT(u32, g, 1); AT(u16, m, 2); AT(u16, v, 3);
  EACH { u32 x = g[i] & mask; p[i] ^= x; m[i] ^= (u16)x; v[i] ^= (u16)x; }
}

/* weight, grad, two 8-bit states; without their scales (1/64 of the codes) */
LOOP(states_8) {
  AT(u32, p, 0); AT(u32, g, 1); AT(u8, m, 2); AT(u8, v, 3);
  EACH { u32 x = g[i] & mask; p[i] ^= x; m[i] ^= (u8)x; v[i] ^= (u8)x; }
}

/* LAMB's first pass: weight and grad are read, the states move.  Its second: the states are read, the weight moves. */
LOOP(lamb_first) {
  AT(u32, p, 0); AT(u32, g, 1); AT(u32, m, 2); AT(u32, v, 3);
  EACH { u32 x = (p[i] ^ g[i]) & mask; m[i] ^= x; v[i] ^= x; }
}
LOOP(lamb_second) {
  AT(u32, p, 0); AT(u32, m, 2); AT(u32, v, 3);
  EACH p[i] ^= (m[i] ^ v[i]) & mask;
}

/* The norm's pass: a 32-bit gradient before the update, and a 16-bit one alone. */
LOOP(read_wide) {
  AT(u32, g, 1);
  u32 any = 0;
  EACH any |= g[i];
  seen[(from >> 12) % 64 * 16] = any & mask;
}
LOOP(read_only) {
  AT(u16, g, 0);
  u32 any = 0;
  EACH any |= g[i];
  seen[(from >> 12) % 64 * 16] = any & mask;
}

static const struct { loop first, second; } loops[] = {
  {adam, 0}, {one_state, 0}, {offload, 0}, {read_grad, offload}, {split, 0}, {states_16, 0}, {states_8, 0},
  {lamb_first, lamb_second}, {read_wide, adam}, {read_only, 0},
};

/* Threads ------------------------------------------------------------------------------------------- */

#define MOST_STREAMS 8
#define ALIGN 256 /* elements; threads never share a cache line inside a row */

static void (*gomp_parallel)(void (*)(void *), void *, unsigned, unsigned);
static int (*omp_thread_num)(void), (*omp_num_threads)(void);

void floor_set_omp(uint64_t parallel, uint64_t thread_num, uint64_t num_threads) {
  gomp_parallel = (void (*)(void (*)(void *), void *, unsigned, unsigned))(uintptr_t)parallel;
  omp_thread_num = (int (*)(void))(uintptr_t)thread_num;
  omp_num_threads = (int (*)(void))(uintptr_t)num_threads;
}

typedef struct { const floor_job *job; loop run; int num_streams; int64_t total; } work;

static void run_part(const work *w, int t, int n) {
  const floor_job *job = w->job;
  int64_t begin = w->total * t / n, end = w->total * (t + 1) / n, base = 0;
  for (int64_t row = 0; row < job->num_rows && base < end; row++) {
    int64_t numel = job->numel[row];
    if (base + numel > begin) {
      int64_t from = begin > base ? (begin - base) / ALIGN * ALIGN : 0;
      int64_t to = end < base + numel ? (end - base) / ALIGN * ALIGN : numel;
      void *s[MOST_STREAMS];
      for (int k = 0; k < w->num_streams; k++) s[k] = job->streams[k][row];
      if (to > from) w->run(s, from, to, job->mask);
    }
    base += numel;
  }
}

static void run_in_team(void *context) { run_part(context, omp_thread_num(), omp_num_threads()); }

static void run(work *w, int num_threads) {
  if (gomp_parallel && num_threads > 1 && w->total > 32768)
    gomp_parallel(run_in_team, w, (unsigned)num_threads, 0);
  else
    run_part(w, 0, 1);
}

/* Move the bytes of one step.  `which` is the index of the loop above. */
void floor_step(const floor_job *job, int which, int num_streams, int num_threads) {
  work w = {job, loops[which].first, num_streams, 0};
  for (int64_t row = 0; row < job->num_rows; row++) w.total += job->numel[row];
  run(&w, num_threads);
  w.run = loops[which].second;
  if (w.run) run(&w, num_threads);
}
