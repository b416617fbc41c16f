/* Dispatch to instruction sets and threads.
 *
 * The threads are torch's: Python looks up GOMP_parallel in the process and passes its address, so nothing links an
 * OpenMP runtime.  Threads share out panels (products), rows (quantization) or spans (squares); no sum crosses a
 * border, so results do not depend on their number.
 */
#include "zq_api.h"

#if defined(ZQ_HAS_X86)
#include <cpuid.h>
#endif
#include <math.h>
#include <stdlib.h>
#include <string.h>
#if defined(__linux__)
#include <sys/mman.h>
#endif

extern const zq_kernels zq_kernels_base;
#if defined(ZQ_HAS_X86)
extern const zq_kernels zq_kernels_v3, zq_kernels_v4, zq_kernels_vnni;
static const zq_kernels *const levels[] = {&zq_kernels_base, &zq_kernels_v3, &zq_kernels_v4, &zq_kernels_vnni};
static const char *const names[] = {"sse2", "avx2", "avx512", "avx512vnni"};
#elif defined(__aarch64__)
static const zq_kernels *const levels[] = {&zq_kernels_base};
static const char *const names[] = {"neon"};
#else
static const zq_kernels *const levels[] = {&zq_kernels_base};
static const char *const names[] = {"portable"};
#endif

#define NUM_LEVELS ((int)(sizeof(levels) / sizeof(levels[0])))

static int active;
static void (*gomp_parallel)(void (*)(void *), void *, unsigned, unsigned);
static int (*omp_thread_num)(void);
static int (*omp_num_threads)(void);

int zq_levels(void) { return NUM_LEVELS; }
const char *zq_level_name(int level) { return level >= 0 && level < NUM_LEVELS ? names[level] : ""; }

int zq_level_runs_here(int level) {
  if (level < 0 || level >= NUM_LEVELS) return 0;
#if defined(ZQ_HAS_X86)
  __builtin_cpu_init(); /* checks cpuid, and whether the system saves the registers */
#define HAS(name) __builtin_cpu_supports(name)
  unsigned a, b, features = 0, d;
  __get_cpuid(1, &a, &b, &features, &d); /* clang 14 does not know "f16c" */
  if (level >= 1 && !(HAS("avx2") && HAS("fma") && (features & bit_F16C))) return 0;
  if (level >= 2 && !(HAS("avx512f") && HAS("avx512bw") && HAS("avx512dq") && HAS("avx512vl"))) return 0;
  if (level >= 3 && !HAS("avx512vnni")) return 0;
#endif
  return 1;
}

int zq_best_level(void) {
  int best = 0;
  for (int level = 0; level < NUM_LEVELS; level++)
    if (zq_level_runs_here(level)) best = level;
  return best;
}

void zq_set_level(int level) {
  if (zq_level_runs_here(level)) active = level;
}
int zq_get_level(void) { return active; }
const char *zq_source_hash(void) { return ZQ_SOURCE_HASH; }

const zq_kernels *zq_active_kernels(void) { return levels[active]; }

void zq_set_omp(uint64_t parallel, uint64_t thread_num, uint64_t num_threads) {
  gomp_parallel = (void (*)(void (*)(void *), void *, unsigned, unsigned))(uintptr_t)parallel;
  omp_thread_num = (int (*)(void))(uintptr_t)thread_num;
  omp_num_threads = (int (*)(void))(uintptr_t)num_threads;
}

void zq_use_large_pages(void *at, int64_t bytes) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  const uintptr_t page = 2 << 20, from = ((uintptr_t)at + page - 1) / page * page, to = ((uintptr_t)at + (uintptr_t)bytes) / page * page;
  if (from < to) madvise((void *)from, to - from, MADV_HUGEPAGE); /* a failure changes the speed only */
#else
  (void)at, (void)bytes;
#endif
}

/* Threads ------------------------------------------------------------------------------------------------ */

typedef struct team {
  void (*part)(const struct team *, int64_t from, int64_t to);
  int64_t total; /* units of work, shared out in equal runs */
  const void *job;
} team;

static void run_part(const team *t, int thread, int count) {
  t->part(t, t->total * thread / count, t->total * (thread + 1) / count);
}
static void run_in_team(void *context) { run_part(context, omp_thread_num(), omp_num_threads()); }

static void run(const team *t, int num_threads) {
  if (gomp_parallel && num_threads > 1 && t->total > 1)
    gomp_parallel(run_in_team, (void *)(uintptr_t)t, (unsigned)num_threads, 0);
  else
    run_part(t, 0, 1);
}

/* One parallel region, whose threads share out work themselves. */
typedef struct {
  zq_region_work *work;
  void *context;
} region;

static void run_in_region(void *context) {
  const region *r = context;
  r->work(r->context, omp_thread_num(), omp_num_threads());
}

void zq_run_region(zq_region_work *work, void *context, int num_threads) {
  region r = {work, context};
  if (gomp_parallel && num_threads > 1)
    gomp_parallel(run_in_region, &r, (unsigned)num_threads, 0);
  else
    work(context, 0, 1);
}

/* Products ----------------------------------------------------------------------------------------------- */

#define ACTIVATION_BYTES (512 << 10) /* of the tokens that meet a panel while it is in the first-level cache */
#define PARALLEL_TOKENS 8 /* from here on, activations are quantized by all threads */

typedef struct {
  const float *x;
  int64_t tokens, columns, blocks;
  int num_parts; /* of the activation: the most of a matrix */
  const zq_matrix *matrices;
  int64_t num_matrices;
  int8_t *codes;
  float *scales;
  int32_t *sums;
  int dtype;
} products;

/* Blocks of activations: rows of weights are padded to whole groups, of up to 128 elements. */
static int64_t num_blocks(int64_t columns) { return (columns + 127) / 128 * 4; }
static int64_t blocks_of(const zq_matrix *m, int64_t columns) {
  return (columns + m->group - 1) / m->group * (m->group / ZQ_BLOCK);
}
static int64_t num_panels(const zq_matrix *m) { return (m->rows + ZQ_PANEL - 1) / ZQ_PANEL; }

int64_t zq_num_blocks(int64_t columns) { return num_blocks(columns); }
int64_t zq_matrix_blocks(const zq_matrix *m, int64_t columns) { return blocks_of(m, columns); }

int64_t zq_scratch_bytes(int64_t tokens, int64_t columns, int num_parts) {
  return num_parts * tokens * num_blocks(columns) * (ZQ_BLOCK + 8) + tokens * (columns + 64) * 4 + 256;
}

/* Tokens of the tile that begins at `first` of `count`: all, or as many as a tile holds. */
static int tile_tokens(int64_t first, int64_t count) {
  return (int)(count - first < ZQ_MOST_TOKENS ? count - first : ZQ_MOST_TOKENS);
}

int zq_tile_tokens(int64_t first, int64_t count) { return tile_tokens(first, count); }

static void activations_part(const team *t, int64_t from, int64_t to) {
  const products *p = t->job;
  for (int64_t token = from; token < to; token++) {
    const int64_t first = token / ZQ_MOST_TOKENS * ZQ_MOST_TOKENS, at = first * p->blocks + (token - first);
    const int size = tile_tokens(first, p->tokens);
    levels[active]->activations(p->x + token * p->columns, p->columns, p->blocks, p->codes + at * ZQ_BLOCK, p->scales + at,
                                p->sums + at, size, p->num_parts > 1 ? p->tokens * p->blocks : 0);
  }
}

static int64_t panel_bytes(const zq_matrix *m, int64_t blocks) {
  int64_t groups = blocks * ZQ_BLOCK / m->group;
  return ZQ_PANEL * (groups * m->scale_bytes * (m->has_mins ? 2 : 1) + blocks * ZQ_BLOCK * m->bits / 8);
}

int64_t zq_panel_bytes(const zq_matrix *m, int64_t columns) { return panel_bytes(m, blocks_of(m, columns)); }

static void store(const zq_matrix *m, int64_t row, int64_t token, const float values[ZQ_PANEL]) {
  int64_t count = m->rows - row < ZQ_PANEL ? m->rows - row : ZQ_PANEL;
  float *out = m->out + token * m->rows + row;
  for (int64_t r = 0; r < count; r++) out[r] = m->bias ? values[r] + m->bias[row + r] : values[r];
}

/* The product of one or two panels with the tokens [first, end); memory is asked for those after them. */
static void product_panels(const products *p, const zq_matrix *m, int64_t panel, int num_panels, int64_t first,
                           int64_t end) {
  const int64_t blocks = blocks_of(m, p->columns), bytes = panel_bytes(m, blocks), tokens = end - first;
  const uint8_t *data = m->data + panel * bytes;
  const int64_t all = m->num_parts * tokens; /* rows of a panel's product: the tokens for each part */
  float values[2 * ZQ_MOST_TILES * ZQ_MOST_TOKENS][ZQ_PANEL];
  zq_tile tiles[ZQ_MOST_TILES];
  int64_t num_tiles = 0;
  for (int part = 0; part < m->num_parts; part++)
    for (int64_t token = first; token < end; token += tiles[num_tiles++].tokens) {
      const int64_t at = (part * p->tokens + token) * p->blocks;
      tiles[num_tiles] = (zq_tile){p->codes + at * ZQ_BLOCK, p->scales + at, p->sums + at, tile_tokens(token, p->tokens)};
    }
  if (num_tiles == 1)
    for (int k = 0; k < num_panels; k++)
      levels[active]->panel(m, data + k * bytes, blocks, tiles, values + k * all);
  else
    levels[active]->panel_tiles(m, data, blocks, tiles, num_tiles, num_panels, data + num_panels * bytes, values);
  for (int k = 0; k < num_panels; k++)
    for (int64_t t = 0; t < tokens; t++) {
      float *row = values[k * all + t], *rest = values[k * all + tokens + t];
      for (int r = 0; r < ZQ_PANEL && m->num_parts == 2; r++) row[r] += rest[r];
      store(m, (panel + k) * ZQ_PANEL, first + t, row);
    }
}

/* Tokens that a panel meets at once: as many as have their activations in the second-level cache. */
static int64_t token_block(const products *p) {
  const int64_t fitting = ACTIVATION_BYTES / (p->num_parts * p->blocks * (ZQ_BLOCK + 8)) / ZQ_MOST_TOKENS;
  const int64_t most = ZQ_MOST_TILES / p->num_parts;
  return ZQ_MOST_TOKENS * (fitting < 1 ? 1 : fitting > most ? most : fitting);
}

/* Panels [from, to), counted over all matrices. */
static void panels_part(const team *t, int64_t from, int64_t to) {
  const products *p = t->job;
  const int64_t step = token_block(p);
  for (int64_t first = 0; first < p->tokens; first += step) {
    int64_t end = first + step < p->tokens ? first + step : p->tokens, base = 0;
    for (const zq_matrix *m = p->matrices; m < p->matrices + p->num_matrices; m++) {
      int64_t count = num_panels(m);
      const int64_t last = count < to - base ? count : to - base;
      for (int64_t panel = from > base ? from - base : 0; panel < last; panel += 2)
        product_panels(p, m, panel, panel + 1 < last ? 2 : 1, first, end);
      base += count;
    }
  }
}

void zq_products(const float *x, int64_t tokens, int64_t columns, const zq_matrix *matrices, int64_t num_matrices,
                 void *scratch, int num_threads) {
  products p = {.x = x, .tokens = tokens, .columns = columns, .blocks = num_blocks(columns), .matrices = matrices,
                .num_matrices = num_matrices, .num_parts = 1};
  for (int64_t k = 0; k < num_matrices; k++)
    if (matrices[k].num_parts > p.num_parts) p.num_parts = matrices[k].num_parts;
  const int64_t all_blocks = p.num_parts * tokens * p.blocks;
  p.codes = (int8_t *)(((uintptr_t)scratch + 63) / 64 * 64);
  p.scales = (float *)(p.codes + all_blocks * ZQ_BLOCK);
  p.sums = (int32_t *)(p.scales + all_blocks);
  team quantizing = {activations_part, tokens, &p}, multiplying = {panels_part, 0, &p};
  run(&quantizing, tokens < PARALLEL_TOKENS ? 1 : num_threads);
  for (int64_t k = 0; k < num_matrices; k++) multiplying.total += num_panels(matrices + k);
  run(&multiplying, num_threads);
}

void zq_quantize_activations(const float *x, int64_t tokens, int64_t columns, int8_t *codes, float *scales) {
  int64_t blocks = (columns + ZQ_BLOCK - 1) / ZQ_BLOCK;
  int32_t *sums = malloc((size_t)(blocks + 1) * sizeof *sums);
  for (int64_t token = 0; sums && token < tokens; token++)
    levels[active]->activations(x + token * columns, columns, blocks, codes + token * blocks * ZQ_BLOCK,
                                scales + token * blocks, sums, 1, 0);
  free(sums);
}

/* Weights in rows of floats: x is copied into rows that are padded with zeros to 64 elements. */
static void dense_part(const team *t, int64_t from, int64_t to) {
  const products *p = t->job;
  const int64_t stride = (p->columns + 63) / 64 * 64, width = p->dtype == 0 ? 4 : 2;
  int64_t base = 0;
  float values[4];
  for (const zq_matrix *m = p->matrices; m < p->matrices + p->num_matrices; m++) {
    for (int64_t row = from > base ? from - base : 0; row < m->rows && base + row < to; row++)
      for (int64_t token = 0; token < p->tokens;) {
        int size = p->tokens - token >= 4 ? 4 : p->tokens - token >= 2 ? 2 : 1;
        levels[active]->dense(p->dtype, m->data + row * p->columns * width, p->scales + token * stride, p->columns,
                              stride, size, values);
        for (int k = 0; k < size; k++)
          m->out[(token + k) * m->rows + row] = m->bias ? values[k] + m->bias[row] : values[k];
        token += size;
      }
    base += m->rows;
  }
}

void zq_dense_products(const float *x, int64_t tokens, int64_t columns, const zq_matrix *matrices,
                       int64_t num_matrices, int dtype, void *scratch, int num_threads) {
  const int64_t stride = (columns + 63) / 64 * 64;
  products p = {.tokens = tokens, .columns = columns, .matrices = matrices, .num_matrices = num_matrices,
                .dtype = dtype};
  p.scales = (float *)(((uintptr_t)scratch + 63) / 64 * 64);
  for (int64_t token = 0; token < tokens; token++) {
    memcpy(p.scales + token * stride, x + token * columns, (size_t)columns * 4);
    memset(p.scales + token * stride + columns, 0, (size_t)(stride - columns) * 4);
  }
  team t = {dense_part, 0, &p};
  for (int64_t k = 0; k < num_matrices; k++) t.total += matrices[k].rows;
  run(&t, num_threads);
}

/* Quantization ------------------------------------------------------------------------------------------- */

typedef struct {
  const zq_quantization *job;
  int *failed;
} quantizing;

static void quantize_part(const team *t, int64_t from, int64_t to) {
  const quantizing *q = t->job;
  float *buffer = aligned_alloc(64, (size_t)((q->job->columns + q->job->group) * 4 + 127) / 64 * 64);
  for (int64_t row = from; row < to; row++)
    if (!buffer || !levels[active]->quantize(q->job, row, buffer)) __atomic_store_n(q->failed, 1, __ATOMIC_RELAXED);
  free(buffer);
}

int zq_quantize(const zq_quantization *job, int num_threads) {
  int failed = 0;
  quantizing q = {job, &failed};
  team t = {quantize_part, job->rows, &q};
  run(&t, num_threads);
  return !failed;
}

typedef struct {
  const uint8_t *codes, *scales, *mins;
  uint8_t *panels;
  const zq_matrix *form;
  int64_t blocks;
  int is_signed;
} packing;

/* Copy (rows, groups) scales or minima of a panel to the heads of its groups. */
static void pack_heads(const packing *p, const uint8_t *from, uint8_t *to, int64_t first, int64_t count,
                       int64_t group_bytes) {
  const int width = p->form->scale_bytes;
  int64_t groups = p->blocks * ZQ_BLOCK / p->form->group;
  for (int64_t r = 0; r < ZQ_PANEL; r++)
    for (int64_t g = 0; g < groups; g++) {
      uint8_t *at = to + g * group_bytes + r * width;
      if (r < count)
        memcpy(at, from + ((first + r) * groups + g) * width, (size_t)width);
      else
        memset(at, 0, (size_t)width);
    }
}

static void pack_part(const team *t, int64_t from, int64_t to) {
  const packing *p = t->job;
  const zq_matrix *m = p->form;
  const int64_t row_bytes = p->blocks * ZQ_BLOCK * m->bits / 8, whole = panel_bytes(m, p->blocks);
  const int64_t group_blocks = m->group / ZQ_BLOCK, groups = p->blocks / group_blocks, group_bytes = whole / groups;
  const int64_t head = ZQ_PANEL * m->scale_bytes;
  for (int64_t panel = from; panel < to; panel++) {
    int64_t first = panel * ZQ_PANEL, count = m->rows - first < ZQ_PANEL ? m->rows - first : ZQ_PANEL;
    uint8_t *out = p->panels + panel * whole;
    pack_heads(p, p->scales, out, first, count, group_bytes);
    if (m->has_mins) pack_heads(p, p->mins, out + head, first, count, group_bytes);
    for (int64_t g = 0; g < groups; g++)
      levels[active]->pack(p->codes + first * row_bytes + g * group_blocks * ZQ_BLOCK * m->bits / 8,
                           out + g * group_bytes + head * (m->has_mins ? 2 : 1), row_bytes, count, group_blocks,
                           ZQ_PANEL * ZQ_BLOCK * m->bits / 8, m->bits, p->is_signed);
  }
}

void zq_pack(const uint8_t *codes, const uint8_t *scales, const uint8_t *mins, uint8_t *panels, const zq_matrix *form,
             int64_t blocks, int is_signed, int num_threads) {
  packing p = {codes, scales, mins, panels, form, blocks, is_signed};
  team t = {pack_part, num_panels(form), &p};
  run(&t, num_threads);
}

/* Sums of squares ---------------------------------------------------------------------------------------- */

typedef struct {
  int dtype;
  int64_t num_rows;
  const uint64_t *rows;
  const int64_t *numel;
  double *partials;
} squares_job;

static int64_t num_spans(int64_t numel) { return (numel + ZQ_SPAN - 1) / ZQ_SPAN; }

int64_t zq_num_partials(int64_t num_rows, const int64_t *numel) {
  int64_t sum = 0;
  for (int64_t row = 0; row < num_rows; row++) sum += num_spans(numel[row]);
  return sum;
}

static void squares_part(const team *t, int64_t from, int64_t to) {
  const squares_job *s = t->job;
  int64_t base = 0;
  for (int64_t row = 0; row < s->num_rows && base < to; row++) {
    int64_t count = num_spans(s->numel[row]);
    for (int64_t span = from > base ? from - base : 0; span < count && base + span < to; span++) {
      int64_t at = span * ZQ_SPAN, left = s->numel[row] - at;
      const char *data = (const char *)(uintptr_t)s->rows[row] + at * (s->dtype == 0 ? 4 : 2);
      s->partials[base + span] = levels[active]->squares(s->dtype, data, left < ZQ_SPAN ? left : ZQ_SPAN);
    }
    base += count;
  }
}

double zq_squares(int dtype, int64_t num_rows, const uint64_t *rows, const int64_t *numel, double *partials,
                  int num_threads) {
  squares_job s = {dtype, num_rows, rows, numel, partials};
  team t = {squares_part, zq_num_partials(num_rows, numel), &s};
  run(&t, t.total > 2 ? num_threads : 1);
  double sum = 0;
  for (int64_t k = 0; k < t.total; k++) sum += partials[k];
  return sum;
}
