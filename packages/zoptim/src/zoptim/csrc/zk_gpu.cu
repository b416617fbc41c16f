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

/* Sum the squares of a thread's elements of a span: every 256th.  A whole span needs no bounds, so its loads are in
 * flight together. */
ZK_FN double squares(const int format, const int whole, uint64_t address, int left) {
  double sum = 0;
  ZK_UNROLL_16
  for (int k = 0; k < ZK_SPAN / ZK_THREADS; k++) {
    const int i = k * ZK_THREADS;
    float x = whole || i < left ? element(format, address, i) : 0.0f;
    sum += (double)x * (double)x;
  }
  return sum;
}

ZK_FN double squares_of(const int format, const int width, uint64_t address, int64_t from, int64_t numel) {
  const int64_t left = numel - from;
  address += (uint64_t)from * width;
  if (left > ZK_SPAN - ZK_THREADS) return squares(format, 1, address, 0);
  return squares(format, 0, address, (int)left);
}

/* One partial sum for each item, in double, where no square of a float overflows or underflows. */
ZK_KERNEL(4, zk_squares, zk_squares_args) {
  ZK_SHARED double lane[ZK_THREADS];
  const zk_item item = ((const zk_item *)a.items)[blockIdx.x];
  const zk_squares_row row = ((const zk_squares_row *)a.rows)[item.row];
  const int thread = (int)threadIdx.x;
  const int64_t from = (int64_t)item.chunk * ZK_SPAN + thread;
  if (row.format == ZK_F32)
    lane[thread] = squares_of(ZK_F32, 4, row.address, from, row.numel);
  else if (row.format == ZK_BF16)
    lane[thread] = squares_of(ZK_BF16, 2, row.address, from, row.numel);
  else
    lane[thread] = squares_of(ZK_F16, 2, row.address, from, row.numel);
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
#define ZK_APART 1 /* the weights of a run are stored before the next run is computed, which needs fewer registers */
#elif (ZK_STATE == ZK_BF16 || ZK_STATE == ZK_F16) && ZK_STATES < 3 && ZK_COPY == ZK_NONE
#define ZK_RUNS 2 /* short elements: two accesses of each stream in flight */
#define ZK_APART 0
#else
#define ZK_RUNS 1
#define ZK_APART 0
#endif

/* Where 64 registers do not hold the loads of all runs, those of a run wait until the run before is computed; and where
 * they do not hold the coefficients either, each element reads these again.  From 10.0 on ptxas needs more registers;
 * three blocks leave 80. */
#if ZK_RULE == ZK_LAMB || (ZK_STATE == ZK_Q8 && (ZK_STATES == 3 || ZK_WEIGHT == ZK_SPLIT)) || \
    (__CUDA_ARCH__ >= 1000 && (ZK_STATE == ZK_Q8 || ZK_WEIGHT == ZK_SPLIT))
#define ZK_ONE_AHEAD 1
#else
#define ZK_ONE_AHEAD 0
#endif
#if ZK_STATE == ZK_Q8 && ZK_STATES == 3 && ZK_WEIGHT == ZK_SPLIT
#define ZK_NEXT_ELEMENT ZK_FENCE
#else
#define ZK_NEXT_ELEMENT
#endif
#if ZK_STATE == ZK_Q8 && ZK_STATES == 3 && __CUDA_ARCH__ >= 1000
#define ZK_BLOCKS 3
#else
#define ZK_BLOCKS 4
#endif

#define ZK_EACH (4 * ZK_RUNS)
#define ZK_GROUP (32 * ZK_EACH)
#define ZK_FOUR(j) ZK_UNROLL for (int j = 0; j < 4; j++)
#define ZK_EVERY_RUN(r) ZK_UNROLL for (int r = 0; r < ZK_RUNS; r++)

/* What a block works on, in shared memory: one chunk of a row. */
typedef struct {
  zk_row row; /* addresses and numel are those of the chunk, which need 32-bit offsets */
  zk_coef coef;
  uint32_t seed[4]; /* of stochastic rounding: of the weight and the states */
} zk_block;

/* The position of a thread: its warp has the `n` elements of the chunk from `at` on, a whole group in the fast case. */
typedef struct {
  int at, n, lane;
} zk_place;

/* Element j of run r of a thread, counted from the start of its group. */
ZK_FN int offset(zk_place w, int r, int j, const int whole) {
  return whole ? r * 128 + w.lane * 4 + j : (r * 4 + j) * 32 + w.lane;
}

ZK_FN int is_mine(zk_place w, int r, int j, const int whole) { return whole || offset(w, r, j, whole) < w.n; }

#define ZK_WIDTH(format) ((format) == ZK_NONE ? 0 : (format) == ZK_F32 ? 4 : (format) == ZK_Q8 ? 1 : 2)

/* An address, read from shared memory at each use: ten of them would fill twenty registers. */
ZK_FN uint64_t stream(const uint64_t *address) { return *(const volatile uint64_t *)address; }

/* The address of a thread's first element of a group; its run r follows 128 * r elements later. */
ZK_FN uint64_t first(const int width, const uint64_t *address, zk_place w, const int whole) {
  return stream(address) + (uint64_t)(uint32_t)(w.at + offset(w, 0, 0, whole)) * width;
}

/* Load a run from `from`: `width` words that hold it, of a whole group; else an element a word, 0 beyond the end. */
ZK_FN void fetch(const int width, uint64_t from, zk_place w, int r, const int whole, uint32_t *words) {
  from += (uint64_t)(uint32_t)(128 * r * width);
  if (whole && width == 4) {
    zk_load16(from, words);
  } else if (whole && width == 2) {
    zk_load8(from, words);
  } else if (whole) {
    zk_load4(from, words);
  } else {
    ZK_FOUR(j) {
      words[j] = 0;
      if (is_mine(w, r, j, 0))
        words[j] = width == 4   ? ((const uint32_t *)from)[32 * j]
                   : width == 2 ? ((const uint16_t *)from)[32 * j]
                                : ((const uint8_t *)from)[32 * j];
    }
  }
}

/* Element j of the words of a run. */
ZK_FN uint32_t element_of(const int width, const int whole, const uint32_t *words, int j) {
  if (!whole || width == 4) return words[j];
  if (width == 2) return j & 1 ? words[j / 2] >> 16 : words[j / 2] & 0xffffu;
  return words[0] >> 8 * j & 255u;
}

/* Store a run of elements of 4 or 2 bytes; of 2: the upper halves of `raw` if `upper`, else the lower ones. */
ZK_FN void put(const int width, const int upper, uint64_t to, zk_place w, int r, const int whole, const uint32_t *raw) {
  to += (uint64_t)(uint32_t)(128 * r * width);
  if (whole && width == 4) {
    zk_store16(to, raw);
  } else if (whole) {
    const uint32_t x[2] = {upper ? zk_upper_halves(raw[0], raw[1]) : zk_lower_halves(raw[0], raw[1]),
                           upper ? zk_upper_halves(raw[2], raw[3]) : zk_lower_halves(raw[2], raw[3])};
    zk_store8(to, x);
  } else {
    ZK_FOUR(j) if (is_mine(w, r, j, 0)) {
      if (width == 4)
        ((uint32_t *)to)[32 * j] = raw[j];
      else
        ((uint16_t *)to)[32 * j] = (uint16_t)(upper ? raw[j] >> 16 : raw[j]);
    }
  }
}

/* Store a run of 8-bit codes, which end at bit 26 of `raw`; of signed ones, the sign is that of x. */
ZK_FN void put_codes(const int is_signed, uint64_t to, zk_place w, int r, const int whole, const uint32_t *raw,
                     const float *x) {
  const int shift = is_signed ? 4 : 5; /* to the upper byte; of two codes at once */
  uint32_t codes = zk_odd_bytes(zk_upper_halves(raw[0], raw[1]) << shift, zk_upper_halves(raw[2], raw[3]) << shift);
  if (is_signed) {
    const uint32_t low = zk_upper_halves(zk_bits(x[0]), zk_bits(x[1]));
    codes = (codes & 0x7f7f7f7fu) | (zk_odd_bytes(low, zk_upper_halves(zk_bits(x[2]), zk_bits(x[3]))) & 0x80808080u);
  }
  to += (uint64_t)(uint32_t)(128 * r);
  if (whole)
    zk_store4(to, &codes);
  else
    ZK_FOUR(j) if (is_mine(w, r, j, 0)) ((uint8_t *)to)[32 * j] = (uint8_t)(codes >> 8 * j);
}

/* Runs as float32 ----------------------------------------------------------------------------------- */

/* What a thread reads of a group, as loaded: every run's loads are in flight before the first is used. */
typedef struct {
  uint32_t weight[ZK_RUNS][4], low[ZK_RUNS][4], grad[ZK_RUNS][4], state[3][ZK_RUNS][4];
  float absmax[3]; /* of states in 8 bits */
} zk_loaded;

/* Load the runs of a stream from `r` on: all, or one if ZK_ONE_AHEAD. */
ZK_FN void load_runs(const int width, const uint64_t *address, zk_place w, const int r, const int whole,
                     uint32_t (*words)[4]) {
  const uint64_t from = first(width, address, w, whole);
  ZK_UNROLL
  for (int k = r; k < (ZK_ONE_AHEAD ? r + 1 : ZK_RUNS); k++) fetch(width, from, w, k, whole, words[k]);
}

/* Load what run r needs and is not loaded yet. */
ZK_FN void load_ahead(const zk_block *b, zk_place w, const int r, const int whole, const int with_grad, zk_loaded *l) {
  if (r && !ZK_ONE_AHEAD) return;
  if (r) { ZK_FENCE; }
  ZK_UNROLL
  for (int k = 0; k < ZK_STATES; k++)
    if (ZK_STATE == ZK_Q8 && !r) l->absmax[k] = ((const float *)stream(&b->row.scale[k]))[w.at / ZK_BLOCK];
  load_runs(ZK_WIDTH(ZK_WEIGHT), &b->row.weight, w, r, whole, l->weight);
  if (ZK_WEIGHT == ZK_SPLIT) load_runs(2, &b->row.remainder, w, r, whole, l->low);
  if (with_grad) load_runs(ZK_WIDTH(ZK_GRAD), &b->row.grad, w, r, whole, l->grad);
  ZK_UNROLL
  for (int k = 0; k < ZK_STATES; k++) load_runs(ZK_WIDTH(ZK_STATE), &b->row.state[k], w, r, whole, l->state[k]);
}

ZK_FN float decoded(const int format, const int whole, const uint32_t *words, int j) {
  const uint32_t raw = element_of(ZK_WIDTH(format), whole, words, j);
  return format == ZK_BF16  ? zk_from_bf16((uint16_t)raw)
         : format == ZK_F16 ? zk_from_f16((uint16_t)raw)
                            : zk_float(raw);
}

ZK_FN float weight_of(const zk_loaded *l, int r, int j, const int whole) {
  if (ZK_WEIGHT != ZK_SPLIT) return decoded(ZK_WEIGHT, whole, l->weight[r], j);
  return zk_join((uint16_t)element_of(2, whole, l->weight[r], j), (int16_t)(uint16_t)element_of(2, whole, l->low[r], j));
}

/* Whether state `k` is a second moment: not negative, and stored as its root in 8 bits. */
ZK_FN int is_square(const int k) { return ZK_SQUARES >> k & 1; }

ZK_FN float state_of(const zk_loaded *l, const int k, int r, int j, const int whole) {
  if (ZK_STATE != ZK_Q8) return decoded(ZK_STATE, whole, l->state[k][r], j);
  const uint32_t code = element_of(1, whole, l->state[k][r], j);
  return is_square(k) ? zk_from_q8_root(code, l->absmax[k]) : zk_from_q8_signed(code, l->absmax[k]);
}

ZK_FN void store_weight(const zk_block *b, zk_place w, int r, const int whole, const float *x) {
  uint32_t raw[4];
  ZK_FOUR(j) raw[j] = ZK_WEIGHT == ZK_BF16    ? zk_bf16_top_stochastic(x[j], b->seed[0])
                      : ZK_WEIGHT == ZK_F16   ? zk_to_f16_nearest(x[j])
                      : ZK_WEIGHT == ZK_SPLIT ? zk_split_top(x[j])
                                              : zk_bits(x[j]);
  const int width = ZK_WIDTH(ZK_WEIGHT);
  put(width, ZK_WEIGHT != ZK_F16, first(width, &b->row.weight, w, whole), w, r, whole, raw);
  if (ZK_WEIGHT == ZK_SPLIT) {
    ZK_FOUR(j) raw[j] = (uint16_t)zk_split_low(x[j]);
    put(2, 0, first(2, &b->row.remainder, w, whole), w, r, whole, raw);
  }
  if (ZK_COPY != ZK_NONE) {
    ZK_FOUR(j) raw[j] = ZK_COPY == ZK_BF16 ? zk_to_bf16_nearest(x[j]) : zk_to_f16_nearest(x[j]);
    put(2, 0, first(2, &b->row.copy, w, whole), w, r, whole, raw);
  }
}

/* The largest magnitude of a group, in every thread of its warp, by bit patterns, which order alike.  Only a NaN among
 * the roots of second moments can have a sign. */
ZK_FN float largest(zk_place w, const int k, const int whole, const float *x) {
  uint32_t most = 0;
  ZK_EVERY_RUN(r) ZK_FOUR(j) {
    uint32_t u = is_mine(w, r, j, whole) ? zk_bits(x[4 * r + j]) & (is_square(k) ? 0xffffffffu : 0x7fffffffu) : 0u;
    most = u > most ? u : most;
  }
  ZK_UNROLL
  for (int distance = 16; distance; distance /= 2) {
    uint32_t u = __shfl_xor_sync(0xffffffffu, most, distance);
    most = u > most ? u : most;
  }
  return zk_float(most & 0x7fffffffu);
}

ZK_FN void store_q8(const zk_block *b, const int k, zk_place w, const int whole, const float *x) {
  const float absmax = largest(w, k, whole, x);
  const float factor = zk_q8_factor(absmax);
  const uint64_t to = first(1, &b->row.state[k], w, whole);
  ZK_EVERY_RUN(r) {
    uint32_t raw[4];
    ZK_FOUR(j) {
      const float y = x[4 * r + j];
      const uint32_t noise = zk_noise(y, b->seed[k + 1]);
      raw[j] = is_square(k) ? zk_q8_root(y, factor, noise >> 13) : zk_q8_magnitude(y, factor, noise >> 12);
    }
    put_codes(!is_square(k), to, w, r, whole, raw, x + 4 * r);
  }
  if (w.lane == 0) ((float *)stream(&b->row.scale[k]))[w.at / ZK_BLOCK] = absmax < ZK_TINY ? 0.0f : absmax;
}

ZK_FN void store_state(const zk_block *b, const int k, zk_place w, const int whole, const float *x) {
  if (ZK_STATE == ZK_Q8) {
    store_q8(b, k, w, whole, x);
  } else {
    const uint64_t to = first(ZK_WIDTH(ZK_STATE), &b->row.state[k], w, whole);
    ZK_EVERY_RUN(r) {
      uint32_t raw[4];
      ZK_FOUR(j) raw[j] = ZK_STATE == ZK_BF16  ? zk_bf16_top_stochastic(x[4 * r + j], b->seed[k + 1])
                          : ZK_STATE == ZK_F16 ? zk_to_f16_nearest(x[4 * r + j])
                                               : zk_bits(x[4 * r + j]);
      put(ZK_WIDTH(ZK_STATE), ZK_STATE != ZK_F16, to, w, r, whole, raw);
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

/* Word `word` of a row, for its chunk `chunk`: an address is moved on by what the chunks before it take.  Words are
 * weight, grad, two of 16 bits, three states, their scales, step, numel and first_item. */
ZK_FN uint64_t word_of_chunk(const zk_row *row, int word, int64_t chunk) {
  const uint64_t value = ((const uint64_t *)row)[word];
  const int width = word == 0   ? ZK_WIDTH(ZK_WEIGHT)
                    : word == 1 ? ZK_WIDTH(ZK_GRAD)
                    : word < 4  ? 2
                                : ZK_WIDTH(ZK_STATE);
  if (word < 7) return value + (uint64_t)(chunk * ZK_CHUNK) * width;
  if (word < 10) return value + (uint64_t)(chunk * (ZK_CHUNK / ZK_BLOCK)) * 4;
  if (word != 11) return value;
  const int64_t left = (int64_t)value - chunk * ZK_CHUNK;
  return left < ZK_CHUNK ? left : ZK_CHUNK;
}

/* Return the item of this block; copy its chunk and coefficients to shared memory. */
ZK_FN zk_item begin(const zk_step_args *a, zk_block *b) {
  const zk_item item = ((const zk_item *)a->items)[blockIdx.x];
  const zk_coef *coef = (const zk_coef *)a->coefs + item.row;
  const int thread = (int)threadIdx.x; /* each of three warps copies a part */
  if (thread < (int)(sizeof(zk_coef) / 4)) ((uint32_t *)&b->coef)[thread] = ((const uint32_t *)coef)[thread];
  if (thread >= 32 && thread < 32 + (int)(sizeof(zk_row) / 8))
    ((uint64_t *)&b->row)[thread - 32] = word_of_chunk((const zk_row *)a->rows + item.row, thread - 32, item.chunk);
  if (thread >= 64 && thread < 68) b->seed[thread - 64] = zk_seed(coef->seed, (uint32_t)thread - 64u);
  __syncthreads();
  return item;
}

/* Loop over the groups of a block's chunk, warp by warp; DO(whole) processes the one at `w`. */
#define ZK_EVERY_GROUP(block, DO)                                                                       \
  do {                                                                                                  \
    const int aligned = is_aligned(&(block).row), numel = (int)(block).row.numel;                       \
    ZK_NO_UNROLL                                                                                        \
    for (int from = (int)(threadIdx.x / 32) * ZK_GROUP; from < numel; from += ZK_WARPS * ZK_GROUP) {    \
      const int left = numel - from;                                                                    \
      const zk_place w = {from, left < ZK_GROUP ? left : ZK_GROUP, (int)(threadIdx.x % 32)};            \
      if (aligned && w.n == ZK_GROUP) {                                                                 \
        DO(1);                                                                                          \
      } else {                                                                                          \
        DO(0);                                                                                          \
      }                                                                                                 \
    }                                                                                                   \
  } while (0)

/* Updates ------------------------------------------------------------------------------------------- */

#if ZK_RULE != ZK_LAMB

ZK_FN void update_group(const zk_block *b, zk_place w, const int whole) {
  float p[ZK_EACH], x[3][ZK_EACH];
  zk_loaded l;
  ZK_EVERY_RUN(r) {
    load_ahead(b, w, r, whole, 1, &l);
    ZK_FOUR(j) {
      const int i = 4 * r + j;
      ZK_NEXT_ELEMENT;
      ZK_UNROLL
      for (int k = 0; k < ZK_STATES; k++) x[k][i] = state_of(&l, k, r, j, whole);
      p[i] = ZK_UPDATE(weight_of(&l, r, j, whole), decoded(ZK_GRAD, whole, l.grad[r], j),
                       ZK_STATES > 0 ? &x[0][i] : 0, ZK_STATES > 1 ? &x[1][i] : 0, ZK_STATES > 2 ? &x[2][i] : 0,
                       &b->coef, ZK_ALL_FLAGS);
    }
    if (ZK_APART) store_weight(b, w, r, whole, p + 4 * r);
  }
  ZK_EVERY_RUN(r) if (!ZK_APART) store_weight(b, w, r, whole, p + 4 * r);
  ZK_UNROLL
  for (int k = 0; k < ZK_STATES; k++) store_state(b, k, w, whole, x[k]);
}

ZK_KERNEL(ZK_BLOCKS, zk_update, zk_step_args) {
  ZK_SHARED zk_block block;
  if (is_skipped(a.found_inf)) return;
  begin(&a, &block);
#define ZK_DO(WHOLE) update_group(&block, w, WHOLE)
  ZK_EVERY_GROUP(block, ZK_DO);
#undef ZK_DO
}

#else /* LAMB: two passes, because the step size needs two norms of the whole tensor */

/* Update the moments of a group and add the squares of its weights and directions to `sums`, in double, where no square
 * of a float overflows.  The order depends on the row's alignment, which almost never changes the float32 result. */
ZK_FN void sum_group(const zk_block *b, zk_place w, const int whole, double *sums) {
  float x[2][ZK_EACH];
  zk_loaded l;
  ZK_EVERY_RUN(r) {
    load_ahead(b, w, r, whole, 1, &l);
    ZK_FOUR(j) {
      float *m = &x[0][4 * r + j], *v = &x[1][4 * r + j];
      const float p = weight_of(&l, r, j, whole);
      *m = state_of(&l, 0, r, j, whole), *v = state_of(&l, 1, r, j, whole);
      zk_lamb_moments(decoded(ZK_GRAD, whole, l.grad[r], j), m, v, &b->coef, ZK_ALL_FLAGS);
      const float direction = zk_lamb_direction(p, *m, *v, &b->coef, ZK_ALL_FLAGS);
      if (is_mine(w, r, j, whole)) {
        sums[0] += (double)p * (double)p;
        sums[1] += (double)direction * (double)direction;
      }
    }
  }
  store_state(b, 0, w, whole, x[0]);
  store_state(b, 1, w, whole, x[1]);
}

ZK_KERNEL(3, zk_lamb_sums, zk_step_args) {
  ZK_SHARED zk_block block;
  ZK_SHARED double lane[2][ZK_THREADS];
  double sums[2] = {0, 0};
  if (is_skipped(a.found_inf)) return;
  begin(&a, &block);
#define ZK_DO(WHOLE) sum_group(&block, w, WHOLE, sums)
  ZK_EVERY_GROUP(block, ZK_DO);
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

ZK_FN void apply_group(const zk_block *b, float rate, zk_place w, const int whole) {
  zk_loaded l;
  ZK_EVERY_RUN(r) {
    float x[4];
    load_ahead(b, w, r, whole, 0, &l);
    ZK_FOUR(j) {
      const float p = weight_of(&l, r, j, whole), m = state_of(&l, 0, r, j, whole), v = state_of(&l, 1, r, j, whole);
      x[j] = p - rate * zk_lamb_direction(p, m, v, &b->coef, ZK_ALL_FLAGS);
    }
    store_weight(b, w, r, whole, x);
  }
}

ZK_KERNEL(4, zk_lamb_apply, zk_step_args) {
  ZK_SHARED float rate;
  ZK_SHARED zk_block block;
  if (is_skipped(a.found_inf)) return;
  const zk_item item = begin(&a, &block);
  const double *sums = (const double *)a.sums + 2 * (int64_t)item.row;
  if (threadIdx.x == 0)
    rate = zk_lamb_rate(sums[0], sums[1], &a.hyper, learning_rate(a.lr, a.lr_is_double, a.hyper.lr));
  __syncthreads();
#define ZK_DO(WHOLE) apply_group(&block, rate, w, WHOLE)
  ZK_EVERY_GROUP(block, ZK_DO);
#undef ZK_DO
}

#endif
#endif
