/* The kernels of one update: a launch updates a list of tensors.  C that NVRTC compiles as CUDA.
 *
 * A table of rows in device memory has the addresses of every stream of a row, its size and its step count.  A list of
 * items divides the rows into chunks; block i of a launch works on item i.  A step has two kernels (prepare and update;
 * LAMB has prepare, sums, rows and apply), and none synchronizes with the host: they read learning rate, gradient
 * scale, found_inf and step counts from device memory.  No atomics: the same call gives the same bits.
 *
 * A warp updates a group of 32 * ZK_EACH elements.  In a row whose streams are all aligned, a thread holds runs of four
 * adjacent elements (float32: 16 bytes per access; adjacent threads read adjacent memory in every format).  In other
 * rows, and in the last group of a row, it holds every 32nd element and checks bounds.
 *
 * Formats, rule and flags are compile-time constants: ZK_RULE with its ZK_UPDATE, ZK_LOOPS and ZK_SQUARES, ZK_FLAGS,
 * ZK_WEIGHT, ZK_GRAD, ZK_STATE, ZK_COPY and ZK_CHUNK.  Without ZK_RULE only the kernels that all rules share are
 * compiled.
 */
#include "zk_gpu.h"
#include "zk_math.h"
#include "zk_prepare.h"

#define ZK_THREADS 256
#define ZK_WARPS (ZK_THREADS / 32)
#define ZK_SPAN 16384 /* elements of one partial sum; SPAN_NUMEL in contract.py */
#define ZK_PATCH 480  /* addresses that fit into the arguments of a launch; PATCH_LENGTH in tables.py */

/* One row; columns_of in tables.py. */
typedef struct {
  uint64_t weight, grad, remainder, copy, state[3], scale[3], step; /* addresses; 0 where absent */
  int64_t numel, first_item;
} zk_row;

typedef struct {
  int32_t row, chunk;
} zk_item;

/* Arguments of the kernels of an update; 8 bytes each, so there is no padding. */
typedef struct {
  uint64_t rows, items, coefs;        /* tables, and scratch of prepare */
  uint64_t partials, sums;            /* LAMB: 2 doubles for each item, 2 for each row */
  uint64_t lr, grad_scale, found_inf; /* scalars on the device, or 0 */
  int64_t num_rows, rule, flags, lr_is_double;
  zk_hyper hyper;
} zk_step_args;

/* The sizes that job.py reserves and packs. */
typedef char zk_coef_takes_48_bytes[sizeof(zk_coef) == 48 ? 1 : -1];
typedef char zk_step_args_take_152_bytes[sizeof(zk_step_args) == 152 ? 1 : -1];

ZK_FN int is_skipped(uint64_t found_inf) { return found_inf && *(const float *)found_inf != 0.0f; }

ZK_FN double learning_rate(uint64_t address, int64_t is_double, double value) {
  if (!address) return value;
  return is_double ? *(const double *)address : (double)*(const float *)address;
}

/* Sum `lane` over all threads of the block into lane[0], for thread 0, by a fixed tree. */
ZK_FN void add_lanes(double *lane) {
  const int thread = (int)threadIdx.x;
  for (int half = ZK_THREADS / 2; half; half /= 2) {
    __syncthreads();
    if (thread < half) lane[thread] += lane[thread + half];
  }
}

#ifndef ZK_RULE

/* Addresses and coefficients ------------------------------------------------------------------------ */

typedef struct {
  uint64_t table; /* of 64-bit words */
  int64_t first, stride, count;
  uint64_t value[ZK_PATCH];
} zk_patch_args;

/* Write new addresses into a column of a table.  They are arguments, of which a CUDA graph keeps a copy. */
ZK_KERNEL(4, zk_patch, zk_patch_args) {
  for (int64_t i = threadIdx.x; i < a.count; i += ZK_THREADS)
    ((uint64_t *)a.table)[a.first + i * a.stride] = a.value[i];
}

ZK_FN float next_step(const zk_row *row) { return row->step ? *(const float *)row->step + 1.0f : 1.0f; }

ZK_FN void prepare_row(zk_coef *c, const zk_step_args *a, float step) {
  double lr = learning_rate(a->lr, a->lr_is_double, a->hyper.lr);
  zk_prepare(c, &a->hyper, (int)a->rule, (int)a->flags, lr, step, a->grad_scale ? *(const float *)a->grad_scale : 1.0f);
}

/* Compute the coefficients of every row for update number count + 1, then advance the counts.  One block. */
ZK_KERNEL(4, zk_prepare_rows, zk_step_args) {
  ZK_SHARED zk_coef first; /* usually the coefficients of all rows, since steps rarely differ */
  ZK_SHARED float first_step;
  const zk_row *rows = (const zk_row *)a.rows;
  zk_coef *coefs = (zk_coef *)a.coefs;
  if (is_skipped(a.found_inf)) return;
  if (threadIdx.x == 0) {
    first_step = next_step(rows);
    prepare_row(&first, &a, first_step);
  }
  __syncthreads();
  for (int64_t row = threadIdx.x; row < a.num_rows; row += ZK_THREADS) {
    float step = next_step(rows + row);
    if (step == first_step)
      coefs[row] = first;
    else
      prepare_row(coefs + row, &a, step);
  }
  __syncthreads(); /* all counts are read before one advances */
  for (int64_t row = threadIdx.x; row < a.num_rows; row += ZK_THREADS) {
    uint64_t step = rows[row].step; /* rows of one tensor are adjacent and share its count */
    if (step && (row == 0 || step != rows[row - 1].step)) *(float *)step += 1.0f;
  }
}

/* Sum of squares ------------------------------------------------------------------------------------ */

typedef struct {
  uint64_t address;
  int64_t numel, format;
} zk_squares_row;

typedef struct {
  uint64_t rows, items, partials, norm, found_inf;
  int64_t num_items;
} zk_squares_args;

ZK_FN float element(const int format, uint64_t address, int64_t i) {
  if (format == ZK_F32) return ((const float *)address)[i];
  if (format == ZK_BF16) return zk_from_bf16(((const uint16_t *)address)[i]);
  return zk_from_f16(((const uint16_t *)address)[i]);
}

/* Sum the squares of a thread's elements of a span: every 256th. */
ZK_FN double squares(const int format, uint64_t address, int64_t from, int64_t to) {
  double sum = 0;
  ZK_UNROLL_16
  for (int k = 0; k < ZK_SPAN / ZK_THREADS; k++) {
    const int64_t i = from + k * ZK_THREADS;
    float x = i < to ? element(format, address, i) : 0.0f;
    sum += (double)x * (double)x;
  }
  return sum;
}

/* One partial sum for each item, in double, where no square of a float overflows or underflows. */
ZK_KERNEL(4, zk_squares, zk_squares_args) {
  ZK_SHARED double lane[ZK_THREADS];
  const zk_item item = ((const zk_item *)a.items)[blockIdx.x];
  const zk_squares_row row = ((const zk_squares_row *)a.rows)[item.row];
  const int thread = (int)threadIdx.x;
  const int64_t from = (int64_t)item.chunk * ZK_SPAN + thread;
  if (row.format == ZK_F32)
    lane[thread] = squares(ZK_F32, row.address, from, row.numel);
  else if (row.format == ZK_BF16)
    lane[thread] = squares(ZK_BF16, row.address, from, row.numel);
  else
    lane[thread] = squares(ZK_F16, row.address, from, row.numel);
  add_lanes(lane);
  if (thread == 0) ((double *)a.partials)[blockIdx.x] = lane[0];
}

/* The norm and its finiteness.  One block; a thread sums every 256th partial. */
ZK_KERNEL(4, zk_squares_final, zk_squares_args) {
  ZK_SHARED double lane[ZK_THREADS];
  const int thread = (int)threadIdx.x;
  double sum = 0;
  for (int64_t i = thread; i < a.num_items; i += ZK_THREADS) sum += ((const double *)a.partials)[i];
  lane[thread] = sum;
  add_lanes(lane);
  if (thread == 0) {
    *(double *)a.norm = zk_sqrt(lane[0]);
    *(float *)a.found_inf = lane[0] - lane[0] == 0.0 ? 0.0f : 1.0f;
  }
}

#else

/* Groups: 32 * ZK_EACH elements in the registers of a warp ------------------------------------------ */

#define ZK_ALL_FLAGS (ZK_FLAGS | (ZK_STATE == ZK_Q8 ? ZK_ROOTS : 0))

/* The number of states that the loop of these flags has. */
#define ZK_COUNT_STATES(name, states, flags) +((states) * ((states) > 0 && ZK_FLAGS == (flags)))
#define ZK_STATES (ZK_STATE == ZK_NONE ? 0 : 0 ZK_LOOPS(ZK_COUNT_STATES))

#if ZK_RULE == ZK_LAMB || ZK_STATE == ZK_Q8
#define ZK_RUNS 2 /* a whole ZK_BLOCK */
#define ZK_APART 1 /* one run after the other, which needs fewer registers */
#elif (ZK_STATE == ZK_BF16 || ZK_STATE == ZK_F16) && ZK_STATES < 3 && ZK_COPY == ZK_NONE
#define ZK_RUNS 2 /* short elements: two accesses of each stream in flight */
#define ZK_APART 0
#else
#define ZK_RUNS 1
#define ZK_APART 0
#endif

/* Barriers to the compiler: without them it loads more, earlier, than 64 registers hold. */
#if ZK_APART
#define ZK_NEXT_RUN ZK_FENCE
#else
#define ZK_NEXT_RUN
#endif
#if ZK_APART && (ZK_STATES == 3 || ZK_WEIGHT == ZK_SPLIT)
#define ZK_NEXT_ELEMENT ZK_FENCE
#else
#define ZK_NEXT_ELEMENT
#endif

#define ZK_EACH (4 * ZK_RUNS)
#define ZK_GROUP (32 * ZK_EACH)
#define ZK_FOUR(j) ZK_UNROLL for (int j = 0; j < 4; j++)
#define ZK_EVERY_RUN(r) ZK_UNROLL for (int r = 0; r < ZK_RUNS; r++)

/* The position of a thread: its warp has the `n` elements from `at` on, a whole group in the fast case. */
typedef struct {
  int64_t at;
  int n, lane;
} zk_place;

/* Element j of run r of a thread, counted from the start of its group. */
ZK_FN int offset(zk_place w, int r, int j, const int whole) {
  return whole ? r * 128 + w.lane * 4 + j : (r * 4 + j) * 32 + w.lane;
}

ZK_FN int is_mine(zk_place w, int r, int j, const int whole) { return whole || offset(w, r, j, whole) < w.n; }

#define ZK_WIDTH(format) ((format) == ZK_NONE ? 0 : (format) == ZK_F32 ? 4 : (format) == ZK_Q8 ? 1 : 2)

/* An address, read from shared memory at each use: ten of them would fill twenty registers. */
ZK_FN uint64_t stream(const uint64_t *address) { return *(const volatile uint64_t *)address; }

/* Load the bits of run r of a stream; elements beyond the end of the row are 0. */
ZK_FN void fetch(const int width, const uint64_t *address, zk_place w, int r, const int whole, uint32_t *raw) {
  const uint64_t from = stream(address) + (uint64_t)(w.at + offset(w, r, 0, whole)) * width;
  uint32_t x[4];
  if (whole && width == 4) {
    zk_load16(from, raw);
  } else if (whole && width == 2) {
    zk_load8(from, x);
    raw[0] = x[0] & 0xffffu, raw[1] = x[0] >> 16, raw[2] = x[1] & 0xffffu, raw[3] = x[1] >> 16;
  } else if (whole) {
    zk_load4(from, x);
    raw[0] = x[0] & 255u, raw[1] = x[0] >> 8 & 255u, raw[2] = x[0] >> 16 & 255u, raw[3] = x[0] >> 24;
  } else {
    ZK_FOUR(j) {
      raw[j] = 0;
      if (is_mine(w, r, j, 0))
        raw[j] = width == 4   ? ((const uint32_t *)from)[32 * j]
                 : width == 2 ? ((const uint16_t *)from)[32 * j]
                              : ((const uint8_t *)from)[32 * j];
    }
  }
}

ZK_FN void put(const int width, const uint64_t *address, zk_place w, int r, const int whole, const uint32_t *raw) {
  const uint64_t to = stream(address) + (uint64_t)(w.at + offset(w, r, 0, whole)) * width;
  if (whole && width == 4) {
    zk_store16(to, raw);
  } else if (whole && width == 2) {
    const uint32_t x[2] = {raw[0] | raw[1] << 16, raw[2] | raw[3] << 16};
    zk_store8(to, x);
  } else if (whole) {
    const uint32_t x = raw[0] | raw[1] << 8 | raw[2] << 16 | raw[3] << 24;
    zk_store4(to, &x);
  } else {
    ZK_FOUR(j) if (is_mine(w, r, j, 0)) {
      if (width == 4)
        ((uint32_t *)to)[32 * j] = raw[j];
      else if (width == 2)
        ((uint16_t *)to)[32 * j] = (uint16_t)raw[j];
      else
        ((uint8_t *)to)[32 * j] = (uint8_t)raw[j];
    }
  }
}

/* Runs as float32 ----------------------------------------------------------------------------------- */

ZK_FN void load(const int format, const uint64_t *address, zk_place w, int r, const int whole, float *x) {
  uint32_t raw[4];
  fetch(ZK_WIDTH(format), address, w, r, whole, raw);
  ZK_FOUR(j) x[j] = format == ZK_BF16  ? zk_from_bf16((uint16_t)raw[j])
                    : format == ZK_F16 ? zk_from_f16((uint16_t)raw[j])
                                       : zk_float(raw[j]);
}

ZK_FN void load_weight(const zk_row *row, zk_place w, int r, const int whole, float *x) {
  if (ZK_WEIGHT != ZK_SPLIT) {
    load(ZK_WEIGHT, &row->weight, w, r, whole, x);
  } else {
    uint32_t high[4], low[4];
    fetch(2, &row->weight, w, r, whole, high);
    fetch(2, &row->remainder, w, r, whole, low);
    ZK_FOUR(j) x[j] = zk_join((uint16_t)high[j], (int16_t)(uint16_t)low[j]);
  }
}

ZK_FN void store_weight(const zk_row *row, const zk_coef *c, zk_place w, int r, const int whole, const float *x) {
  uint32_t raw[4];
  const uint32_t seed = zk_seed(c->seed, 0);
  ZK_FOUR(j) raw[j] = ZK_WEIGHT == ZK_BF16    ? zk_to_bf16_stochastic(x[j], seed)
                      : ZK_WEIGHT == ZK_F16   ? zk_to_f16_nearest(x[j])
                      : ZK_WEIGHT == ZK_SPLIT ? zk_split_high(x[j])
                                              : zk_bits(x[j]);
  put(ZK_WIDTH(ZK_WEIGHT), &row->weight, w, r, whole, raw);
  if (ZK_WEIGHT == ZK_SPLIT) {
    ZK_FOUR(j) raw[j] = (uint16_t)zk_split_low(x[j]);
    put(2, &row->remainder, w, r, whole, raw);
  }
  if (ZK_COPY != ZK_NONE) {
    ZK_FOUR(j) raw[j] = ZK_COPY == ZK_BF16 ? zk_to_bf16_nearest(x[j]) : zk_to_f16_nearest(x[j]);
    put(2, &row->copy, w, r, whole, raw);
  }
}

/* Whether state `k` is a second moment: not negative, and stored as its root in 8 bits. */
ZK_FN int is_square(const int k) { return ZK_SQUARES >> k & 1; }

ZK_FN void load_state(const zk_row *row, const int k, zk_place w, int r, const int whole, float *x) {
  if (ZK_STATE != ZK_Q8) {
    load(ZK_STATE, &row->state[k], w, r, whole, x);
  } else {
    uint32_t raw[4];
    const float absmax = ((const float *)stream(&row->scale[k]))[w.at / ZK_BLOCK];
    fetch(1, &row->state[k], w, r, whole, raw);
    ZK_FOUR(j) {
      const uint8_t code = (uint8_t)raw[j];
      x[j] = is_square(k) ? zk_from_q8_root(code, absmax) : zk_from_q8_signed(code, absmax);
    }
  }
}

/* The largest magnitude of a group, in every thread of its warp, by bit patterns, which order alike. */
ZK_FN float largest(zk_place w, const int whole, const float *x) {
  uint32_t most = 0;
  ZK_EVERY_RUN(r) ZK_FOUR(j) {
    uint32_t u = is_mine(w, r, j, whole) ? zk_bits(x[4 * r + j]) & 0x7fffffffu : 0u;
    most = u > most ? u : most;
  }
  ZK_UNROLL
  for (int distance = 16; distance; distance /= 2) {
    uint32_t u = __shfl_xor_sync(0xffffffffu, most, distance);
    most = u > most ? u : most;
  }
  return zk_float(most);
}

ZK_FN void store_q8(const zk_row *row, const int k, zk_place w, const int whole, const float *x, uint32_t seed) {
  const float absmax = largest(w, whole, x);
  const float factor = zk_q8_factor(absmax);
  ZK_EVERY_RUN(r) {
    uint32_t raw[4];
    ZK_FOUR(j) {
      const float y = x[4 * r + j];
      const uint32_t noise = zk_noise(y, seed);
      raw[j] = is_square(k) ? zk_to_q8_root(y, factor, noise >> 13) : zk_to_q8_signed(y, factor, noise >> 12);
    }
    put(1, &row->state[k], w, r, whole, raw);
  }
  if (w.lane == 0) ((float *)stream(&row->scale[k]))[w.at / ZK_BLOCK] = absmax < ZK_TINY ? 0.0f : absmax;
}

ZK_FN void store_state(const zk_row *row, const zk_coef *c, const int k, zk_place w, const int whole, const float *x) {
  const uint32_t seed = zk_seed(c->seed, (uint32_t)k + 1u);
  if (ZK_STATE == ZK_Q8) {
    store_q8(row, k, w, whole, x, seed);
  } else {
    ZK_EVERY_RUN(r) {
      uint32_t raw[4];
      ZK_FOUR(j) raw[j] = ZK_STATE == ZK_BF16  ? zk_to_bf16_stochastic(x[4 * r + j], seed)
                          : ZK_STATE == ZK_F16 ? zk_to_f16_nearest(x[4 * r + j])
                                               : zk_bits(x[4 * r + j]);
      put(ZK_WIDTH(ZK_STATE), &row->state[k], w, r, whole, raw);
    }
  }
}

#define ZK_MISALIGNED(address, format) ((address) & (ZK_WIDTH(format) ? 4u * ZK_WIDTH(format) - 1u : 0u))

/* Whether runs of four elements of every stream are aligned to their size. */
ZK_FN int is_aligned(const zk_row *row) {
  uint64_t misaligned = ZK_MISALIGNED(row->weight, ZK_WEIGHT) | ZK_MISALIGNED(row->grad, ZK_GRAD);
  misaligned |= ZK_MISALIGNED(row->copy, ZK_COPY);
  if (ZK_WEIGHT == ZK_SPLIT) misaligned |= ZK_MISALIGNED(row->remainder, ZK_SPLIT);
  ZK_UNROLL
  for (int k = 0; k < ZK_STATES; k++) misaligned |= ZK_MISALIGNED(row->state[k], ZK_STATE);
  return misaligned == 0;
}

/* Return the item of this block; copy its row and coefficients to shared memory. */
ZK_FN zk_item begin(const zk_step_args *a, zk_row *row, zk_coef *c) {
  const zk_item item = ((const zk_item *)a->items)[blockIdx.x];
  const int word = (int)threadIdx.x - 32;
  if (word == -32) *c = ((const zk_coef *)a->coefs)[item.row];
  if (word >= 0 && word < (int)(sizeof(zk_row) / 8))
    ((uint64_t *)row)[word] = ((const uint64_t *)((const zk_row *)a->rows + item.row))[word];
  __syncthreads();
  return item;
}

/* Loop over the groups of a chunk, warp by warp; DO(whole) processes the one at `w`. */
#define ZK_EVERY_GROUP(row, chunk, DO)                                                              \
  do {                                                                                              \
    const int aligned = is_aligned(&(row));                                                         \
    ZK_NO_UNROLL                                                                                    \
    for (int from = (int)(threadIdx.x / 32) * ZK_GROUP; from < ZK_CHUNK; from += ZK_WARPS * ZK_GROUP) { \
      const int64_t at = (int64_t)(chunk) * ZK_CHUNK + from;                                        \
      const int64_t left = (int64_t)stream((const uint64_t *)&(row).numel) - at;                    \
      if (left <= 0) break;                                                                         \
      const zk_place w = {at, left < ZK_GROUP ? (int)left : ZK_GROUP, (int)(threadIdx.x % 32)};     \
      if (aligned && w.n == ZK_GROUP) {                                                             \
        DO(1);                                                                                      \
      } else {                                                                                      \
        DO(0);                                                                                      \
      }                                                                                             \
    }                                                                                               \
  } while (0)

/* Updates ------------------------------------------------------------------------------------------- */

#if ZK_RULE != ZK_LAMB

ZK_FN void update_group(const zk_row *row, const zk_coef *c, zk_place w, const int whole) {
  float p[ZK_EACH], x[3][ZK_EACH];
  ZK_EVERY_RUN(r) {
    float g[4];
    if (r) { ZK_NEXT_RUN; }
    load_weight(row, w, r, whole, p + 4 * r);
    load(ZK_GRAD, &row->grad, w, r, whole, g);
    ZK_UNROLL
    for (int k = 0; k < ZK_STATES; k++) load_state(row, k, w, r, whole, x[k] + 4 * r);
    ZK_FOUR(j) {
      const int i = 4 * r + j;
      ZK_NEXT_ELEMENT;
      p[i] = ZK_UPDATE(p[i], g[j], ZK_STATES > 0 ? &x[0][i] : 0, ZK_STATES > 1 ? &x[1][i] : 0,
                       ZK_STATES > 2 ? &x[2][i] : 0, c, ZK_ALL_FLAGS);
    }
    if (ZK_APART) store_weight(row, c, w, r, whole, p + 4 * r);
  }
  ZK_EVERY_RUN(r) if (!ZK_APART) store_weight(row, c, w, r, whole, p + 4 * r);
  ZK_UNROLL
  for (int k = 0; k < ZK_STATES; k++) store_state(row, c, k, w, whole, x[k]);
}

ZK_KERNEL(4, zk_update, zk_step_args) {
  ZK_SHARED zk_row row;
  ZK_SHARED zk_coef c;
  if (is_skipped(a.found_inf)) return;
  const zk_item item = begin(&a, &row, &c);
#define ZK_DO(WHOLE) update_group(&row, &c, w, WHOLE)
  ZK_EVERY_GROUP(row, item.chunk, ZK_DO);
#undef ZK_DO
}

#else /* LAMB: two passes, because the step size needs two norms of the whole tensor */

/* Update the moments of a group and add the squares of its weights and directions to `sums`, in double, where no square
 * of a float overflows.  The order depends on the row's alignment, which almost never changes the float32 result. */
ZK_FN void sum_group(const zk_row *row, const zk_coef *c, zk_place w, const int whole, double *sums) {
  float x[2][ZK_EACH];
  ZK_EVERY_RUN(r) {
    float p[4], g[4];
    if (r) { ZK_NEXT_RUN; }
    load_weight(row, w, r, whole, p);
    load(ZK_GRAD, &row->grad, w, r, whole, g);
    load_state(row, 0, w, r, whole, x[0] + 4 * r);
    load_state(row, 1, w, r, whole, x[1] + 4 * r);
    ZK_FOUR(j) {
      float *m = &x[0][4 * r + j], *v = &x[1][4 * r + j];
      zk_lamb_moments(g[j], m, v, c, ZK_ALL_FLAGS);
      const float direction = zk_lamb_direction(p[j], *m, *v, c, ZK_ALL_FLAGS);
      if (is_mine(w, r, j, whole)) {
        sums[0] += (double)p[j] * (double)p[j];
        sums[1] += (double)direction * (double)direction;
      }
    }
  }
  store_state(row, c, 0, w, whole, x[0]);
  store_state(row, c, 1, w, whole, x[1]);
}

ZK_KERNEL(3, zk_lamb_sums, zk_step_args) {
  ZK_SHARED zk_row row;
  ZK_SHARED zk_coef c;
  ZK_SHARED double lane[2][ZK_THREADS];
  double sums[2] = {0, 0};
  if (is_skipped(a.found_inf)) return;
  const zk_item item = begin(&a, &row, &c);
#define ZK_DO(WHOLE) sum_group(&row, &c, w, WHOLE, sums)
  ZK_EVERY_GROUP(row, item.chunk, ZK_DO);
#undef ZK_DO
  for (int k = 0; k < 2; k++) {
    lane[k][threadIdx.x] = sums[k];
    add_lanes(lane[k]);
    if (threadIdx.x == 0) ((double *)a.partials)[2 * (int64_t)blockIdx.x + k] = lane[k][0];
  }
}

/* Sum the items of each row.  One block per row; a thread sums every 256th item. */
ZK_KERNEL(4, zk_lamb_rows, zk_step_args) {
  ZK_SHARED double lane[2][ZK_THREADS];
  if (is_skipped(a.found_inf)) return;
  const zk_row *row = (const zk_row *)a.rows + blockIdx.x;
  const int64_t num_items = (row->numel + ZK_CHUNK - 1) / ZK_CHUNK;
  const double *partials = (const double *)a.partials + 2 * row->first_item;
  for (int k = 0; k < 2; k++) {
    double sum = 0;
    for (int64_t i = threadIdx.x; i < num_items; i += ZK_THREADS) sum += partials[2 * i + k];
    lane[k][threadIdx.x] = sum;
    add_lanes(lane[k]);
    if (threadIdx.x == 0) ((double *)a.sums)[2 * (int64_t)blockIdx.x + k] = lane[k][0];
  }
}

ZK_FN void apply_group(const zk_row *row, const zk_coef *c, float rate, zk_place w, const int whole) {
  ZK_EVERY_RUN(r) {
    float p[4], m[4], v[4];
    load_weight(row, w, r, whole, p);
    load_state(row, 0, w, r, whole, m);
    load_state(row, 1, w, r, whole, v);
    ZK_FOUR(j) p[j] = p[j] - rate * zk_lamb_direction(p[j], m[j], v[j], c, ZK_ALL_FLAGS);
    store_weight(row, c, w, r, whole, p);
  }
}

ZK_KERNEL(4, zk_lamb_apply, zk_step_args) {
  ZK_SHARED float rate;
  ZK_SHARED zk_row row;
  ZK_SHARED zk_coef c;
  if (is_skipped(a.found_inf)) return;
  const zk_item item = begin(&a, &row, &c);
  const double *sums = (const double *)a.sums + 2 * (int64_t)item.row;
  if (threadIdx.x == 0)
    rate = zk_lamb_rate(sums[0], sums[1], &a.hyper, learning_rate(a.lr, a.lr_is_double, a.hyper.lr));
  __syncthreads();
#define ZK_DO(WHOLE) apply_group(&row, &c, rate, w, WHOLE)
  ZK_EVERY_GROUP(row, item.chunk, ZK_DO);
#undef ZK_DO
}

#endif
#endif
