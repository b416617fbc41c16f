/* The loops of one instruction set.  Compiled once per level with other flags and another ZK_SUFFIX.
 *
 * A range of a row is updated in one of two ways, with the same bits:
 *
 * - fused: for Adam in the common formats, one loop decodes, updates and encodes an element, so the
 *   conversions hide behind the division and the root.  Not compiled with ZK_ONLY_PIECES.
 * - by pieces: for everything else.  A piece (ZK_PIECE elements: a few KB per stream, so it stays in the
 *   first-level cache) has three steps: decode streams that are not float32 into buffers on the stack; update
 *   float32 arrays by one loop per rule; encode the buffers.  float32 streams are updated in place.  So every
 *   rule supports every format without a loop per combination.
 */
#include "zk_api.h"

#define ZK_JOIN_(a, b) a##b
#define ZK_JOIN(a, b) ZK_JOIN_(a, b)
#define ZK_PIECE 1024 /* a multiple of ZK_BLOCK */

#if defined(__clang__)
#define ZK_LOOP _Pragma("clang loop vectorize(assume_safety)")
#else
#define ZK_LOOP _Pragma("GCC ivdep") /* streams never overlap: memory.py checks that */
#endif

typedef float *restrict out_f;
typedef const float *restrict in_f;

/* Formats ------------------------------------------------------------------------------------------- */

static void load_bf16(const uint16_t *restrict x, out_f y, int64_t n) {
  for (int64_t i = 0; i < n; i++) y[i] = zk_from_bf16(x[i]);
}
static void load_f16(const uint16_t *restrict x, out_f y, int64_t n) {
  for (int64_t i = 0; i < n; i++) y[i] = zk_from_f16(x[i]);
}
static void load_split(const uint16_t *restrict h, const int16_t *restrict l, out_f y, int64_t n) {
  for (int64_t i = 0; i < n; i++) y[i] = zk_join(h[i], l[i]);
}
static void store_bf16(in_f x, uint16_t *restrict y, int64_t n) {
  for (int64_t i = 0; i < n; i++) y[i] = zk_to_bf16_nearest(x[i]);
}
static void store_bf16_stochastic(in_f x, uint16_t *restrict y, int64_t n, uint32_t seed) {
  for (int64_t i = 0; i < n; i++) y[i] = zk_to_bf16_stochastic(x[i], seed);
}
static void store_f16(in_f x, uint16_t *restrict y, int64_t n) {
  for (int64_t i = 0; i < n; i++) y[i] = zk_to_f16_nearest(x[i]);
}
static void store_split(in_f x, uint16_t *restrict h, int16_t *restrict l, int64_t n) {
  for (int64_t i = 0; i < n; i++) {
    h[i] = zk_split_high(x[i]);
    l[i] = zk_split_low(x[i]);
  }
}

/* The largest magnitude, by comparing bit patterns, which order like magnitudes, because that vectorizes. */
static float largest(in_f x, int64_t n) {
  uint32_t most = 0;
  for (int64_t i = 0; i < n; i++) {
    uint32_t u = zk_bits(x[i]) & 0x7fffffffu;
    most = u > most ? u : most;
  }
  return zk_float(most);
}

static void load_q8(const uint8_t *restrict x, const float *restrict scale, out_f y, int64_t n, int is_square) {
  for (int64_t at = 0; at < n; at += ZK_BLOCK) {
    const int64_t end = n - at < ZK_BLOCK ? n : at + ZK_BLOCK;
    const float absmax = scale[at / ZK_BLOCK];
    if (is_square) {
      for (int64_t i = at; i < end; i++) y[i] = zk_from_q8_root(x[i], absmax);
    } else {
      for (int64_t i = at; i < end; i++) y[i] = zk_from_q8_signed(x[i], absmax);
    }
  }
}

/* The noise of `seed`, or half the range for rounding to nearest. */
ZK_FN uint32_t noise_of(float x, uint32_t seed, const int stochastic, uint32_t bits) {
  return stochastic ? zk_noise(x, seed) >> (32u - bits) : 1u << (bits - 1u);
}

ZK_FN void store_q8_as(in_f x, uint8_t *restrict y, float *restrict scale, int64_t n, const int is_square,
                       const uint32_t seed, const int stochastic) {
  for (int64_t at = 0; at < n; at += ZK_BLOCK) {
    const int64_t end = n - at < ZK_BLOCK ? n : at + ZK_BLOCK;
    const float absmax = largest(x + at, end - at);
    const float factor = zk_q8_factor(absmax);
    scale[at / ZK_BLOCK] = absmax < ZK_TINY ? 0.0f : absmax;
    for (int64_t i = at; i < end; i++)
      y[i] = (uint8_t)(is_square ? zk_to_q8_root(x[i], factor, noise_of(x[i], seed, stochastic, 19))
                                 : zk_to_q8_signed(x[i], factor, noise_of(x[i], seed, stochastic, 20)));
  }
}
static void store_q8(in_f x, uint8_t *y, float *scale, int64_t n, int is_square, uint32_t seed) {
  if (is_square)
    store_q8_as(x, y, scale, n, 1, seed, 1);
  else
    store_q8_as(x, y, scale, n, 0, seed, 1);
}
static void store_q8_nearest(in_f x, uint8_t *y, float *scale, int64_t n, int is_square) {
  if (is_square)
    store_q8_as(x, y, scale, n, 1, 0, 0);
  else
    store_q8_as(x, y, scale, n, 0, 0, 0);
}

static int64_t width(int format) { return format == ZK_F32 ? 4 : format == ZK_Q8 ? 1 : format == ZK_NONE ? 0 : 2; }

/* Streams ------------------------------------------------------------------------------------------- */

/* A stream of one row, from element `at` on. */
static void *element(const uint64_t *rows, int64_t row, int64_t at, int64_t bytes) {
  return rows ? (char *)(uintptr_t)rows[row] + at * bytes : 0;
}

/* Is state `k` of a rule a second moment: not negative, of a wide range? */
static int is_square(int rule, int k) {
#define ZK_SQUARES_OF(NAME, name) ZK_##NAME##_SQUARES,
  static const unsigned char squares[] = {ZK_RULES(ZK_SQUARES_OF)};
#undef ZK_SQUARES_OF
  return squares[rule] >> k & 1;
}

static float *load(int format, void *from, const void *extra, float *buffer, int64_t n, int square) {
  switch (format) {
    case ZK_BF16: load_bf16(from, buffer, n); return buffer;
    case ZK_F16: load_f16(from, buffer, n); return buffer;
    case ZK_SPLIT: load_split(from, extra, buffer, n); return buffer;
    case ZK_Q8: load_q8(from, extra, buffer, n, square); return buffer;
    default: return from; /* float32 in place; NULL if absent */
  }
}

static void store(int format, const float *from, void *to, void *extra, int64_t n, int square, uint32_t seed) {
  switch (format) {
    case ZK_BF16: store_bf16_stochastic(from, to, n, seed); break;
    case ZK_F16: store_f16(from, to, n); break;
    case ZK_SPLIT: store_split(from, to, extra, n); break;
    case ZK_Q8: store_q8(from, to, extra, n, square, seed); break;
    default: break; /* float32 was updated in place */
  }
}

/* Rules on float32 arrays --------------------------------------------------------------------------- */

typedef struct {
  float *p, *s0, *s1, *s2;
  const float *g;
} arrays;

/* The loops of a rule, with constant flags and number of states, and their dispatch. */
#define ZK_DEFINE_RULE(NAME, name)                                                                           \
  ZK_FN void name##_as(arrays a, int64_t n, const zk_coef c, const int flags, const int states) {            \
    out_f p = a.p, x = a.s0, y = a.s1, z = a.s2;                                                             \
    in_f g = a.g;                                                                                            \
    for (int64_t i = 0; i < n; i++)                                                                          \
      p[i] = zk_##name(p[i], g[i], states > 0 ? &x[i] : 0, states > 1 ? &y[i] : 0, states > 2 ? &z[i] : 0, &c, flags); \
  }                                                                                                          \
  static void apply_##name(const zk_job *job, arrays a, int64_t n, const zk_coef *c) {                       \
    enum { loop_flags = 0 ZK_##NAME##_LOOPS(ZK_OR_FLAGS), has_squares = ZK_##NAME##_SQUARES != 0 };          \
    ZK_##NAME##_LOOPS(ZK_TRY_LOOP)                                                                           \
  }
#define ZK_OR_FLAGS(name, states, wanted) | (wanted)
#define ZK_TRY_LOOP(name, states, wanted)                                                                    \
  if ((job->flags & loop_flags) == (wanted) && (job->state == ZK_NONE) == (states == 0)) {                   \
    if (has_squares && job->state == ZK_Q8)                                                                  \
      name##_as(a, n, *c, (wanted) | ZK_ROOTS, states);                                                      \
    else                                                                                                     \
      name##_as(a, n, *c, wanted, states);                                                                   \
    return;                                                                                                  \
  }
ZK_ELEMENTWISE(ZK_DEFINE_RULE)

static void apply_rule(const zk_job *job, arrays a, int64_t n, const zk_coef *c) {
#define ZK_CASE(NAME, name) \
  case ZK_##NAME: apply_##name(job, a, n, c); break;
  switch (job->rule) { ZK_ELEMENTWISE(ZK_CASE) }
#undef ZK_CASE
}

/* Decode one piece, call `visit` on the float32 arrays, encode.  writes: bit 0 weights, bit 1 states. */
typedef void (*visitor)(const zk_job *, arrays, int64_t n, const zk_coef *, void *context);

static void piece(const zk_job *job, int64_t row, int64_t at, int64_t n, visitor visit, void *context, int writes) {
  float weight[ZK_PIECE], grad[ZK_PIECE], state[3][ZK_PIECE];
  const zk_coef *c = (const zk_coef *)job->coefs + row;
  void *p = element(job->weights, row, at, width(job->weight));
  void *r = element(job->remainders, row, at, 2);
  void *s[3], *q[3];
  float *x[3];
  for (int k = 0; k < 3; k++) {
    s[k] = element(job->states[k], row, at, width(job->state));
    q[k] = element(job->scales[k], row, at / ZK_BLOCK, 4);
    x[k] = s[k] ? load(job->state, s[k], q[k], state[k], n, is_square(job->rule, k)) : 0;
  }
  arrays a = {load(job->weight, p, r, weight, n, 0), x[0], x[1], x[2],
              load(job->grad, element(job->grads, row, at, width(job->grad)), 0, grad, n, 0)};
  visit(job, a, n, c, context);
  if (writes & 1) {
    store(job->weight, a.p, p, r, n, 0, zk_seed(c->seed, 0));
    void *copy = element(job->copies, row, at, 2);
    if (job->copy == ZK_BF16) store_bf16(a.p, copy, n);
    if (job->copy == ZK_F16) store_f16(a.p, copy, n);
  }
  if (writes & 2)
    for (int k = 0; k < 3; k++)
      if (s[k]) store(job->state, x[k], s[k], q[k], n, is_square(job->rule, k), zk_seed(c->seed, (uint32_t)k + 1u));
}

static void pieces(const zk_job *job, int64_t row, int64_t from, int64_t to, visitor visit, void *context, int writes) {
  const int in_place = job->weight == ZK_F32 && job->grad == ZK_F32 && (job->state == ZK_F32 || job->state == ZK_NONE) &&
                       job->copy == ZK_NONE;
  const int64_t most = in_place ? to - from : ZK_PIECE;
  for (int64_t at = from; at < to; at += most) piece(job, row, at, to - at < most ? to - at : most, visit, context, writes);
}

static void visit_rule(const zk_job *job, arrays a, int64_t n, const zk_coef *c, void *unused) {
  (void)unused;
  apply_rule(job, a, n, c);
}

#ifndef ZK_ONLY_PIECES
/* Adam in one loop ---------------------------------------------------------------------------------- */

ZK_FN float get(const int format, const void *x, const void *extra, int64_t i) {
  switch (format) {
    case ZK_BF16: return zk_from_bf16(((const uint16_t *)x)[i]);
    case ZK_F16: return zk_from_f16(((const uint16_t *)x)[i]);
    case ZK_SPLIT: return zk_join(((const uint16_t *)x)[i], ((const int16_t *)extra)[i]);
    default: return ((const float *)x)[i];
  }
}

ZK_FN void put(const int format, void *x, void *extra, int64_t i, float y, uint32_t seed) {
  switch (format) {
    case ZK_BF16: ((uint16_t *)x)[i] = zk_to_bf16_stochastic(y, seed); break;
    case ZK_SPLIT:
      ((uint16_t *)x)[i] = zk_split_high(y);
      ((int16_t *)extra)[i] = zk_split_low(y);
      break;
    default: ((float *)x)[i] = y; break;
  }
}

ZK_FN void fused_adam(const zk_job *job, int64_t row, int64_t from, int64_t to, const int W, const int G, const int S,
                      const int C) {
  const zk_coef c = ((const zk_coef *)job->coefs)[row];
  const uint32_t seed_p = zk_seed(c.seed, 0), seed_m = zk_seed(c.seed, 1), seed_v = zk_seed(c.seed, 2);
  void *p = (void *)(uintptr_t)job->weights[row], *r = W == ZK_SPLIT ? (void *)(uintptr_t)job->remainders[row] : 0;
  void *m = (void *)(uintptr_t)job->states[0][row], *v = (void *)(uintptr_t)job->states[1][row];
  const void *g = (const void *)(uintptr_t)job->grads[row];
  uint16_t *copy = C == ZK_NONE ? 0 : (uint16_t *)(uintptr_t)job->copies[row];
  ZK_LOOP
  for (int64_t i = from; i < to; i++) {
    float mean = get(S, m, 0, i), square = get(S, v, 0, i);
    float weight = zk_adam(get(W, p, r, i), get(G, g, 0, i), &mean, &square, 0, &c, 0);
    put(S, m, 0, i, mean, seed_m);
    put(S, v, 0, i, square, seed_v);
    put(W, p, r, i, weight, seed_p);
    if (C == ZK_BF16) copy[i] = zk_to_bf16_nearest(weight);
    if (C == ZK_F16) copy[i] = zk_to_f16_nearest(weight);
  }
}

/* weight, gradient, state, copy */
#define ZK_FUSED(X)                                                                                          \
  X(F32, F32, F32, NONE) X(F32, BF16, F32, NONE) X(F32, F16, F32, NONE) /* float32 masters */                \
  X(F32, F32, F32, BF16) X(F32, BF16, F32, BF16) X(F32, F16, F32, F16)  /* with a copy: offload */           \
  X(F32, F32, BF16, NONE) X(F32, BF16, BF16, NONE) X(F32, BF16, BF16, BF16)                                  \
  X(SPLIT, BF16, F32, NONE) X(SPLIT, BF16, BF16, NONE)                                                       \
  X(BF16, BF16, F32, NONE) X(BF16, BF16, BF16, NONE)

#define ZK_DEFINE(W, G, S, C)                                                                                \
  static void fused_##W##_##G##_##S##_##C(const zk_job *job, int64_t row, int64_t from, int64_t to) {        \
    fused_adam(job, row, from, to, ZK_##W, ZK_##G, ZK_##S, ZK_##C);                                          \
  }
ZK_FUSED(ZK_DEFINE)

#define ZK_SHARED_LOOP static __attribute__((noinline)) void /* one copy serves all formats: the wheel is smaller */
ZK_SHARED_LOOP decode_block(const uint8_t *restrict m, const uint8_t *restrict v, float old_m, float old_v, out_f mean, out_f root) {
  for (int i = 0; i < ZK_BLOCK; i++) mean[i] = zk_from_q8_signed(m[i], old_m);
  for (int i = 0; i < ZK_BLOCK; i++) root[i] = zk_from_q8_root(v[i], old_v);
}
ZK_SHARED_LOOP encode_means(in_f mean, uint8_t *restrict m, float factor, uint32_t seed) {
  for (int i = 0; i < ZK_BLOCK; i++) m[i] = (uint8_t)zk_to_q8_signed(mean[i], factor, zk_noise(mean[i], seed) >> 12);
}
ZK_SHARED_LOOP encode_roots(in_f root, uint8_t *restrict v, float factor, uint32_t seed) {
  for (int i = 0; i < ZK_BLOCK; i++) v[i] = (uint8_t)zk_to_q8_root(root[i], factor, zk_noise(root[i], seed) >> 13);
}

/* Adam with 8-bit states: a block at a time, in loops over buffers that stay in the first-level cache.  One loop
 * would hold 64 elements of everything in registers, since bytes are narrow, and spill. */
ZK_FN void fused_adam_q8(const zk_job *job, int64_t row, int64_t from, int64_t to, const int W, const int G, const int C) {
  const zk_coef c = ((const zk_coef *)job->coefs)[row];
  const uint32_t seed_p = zk_seed(c.seed, 0), seed_m = zk_seed(c.seed, 1), seed_v = zk_seed(c.seed, 2);
  void *p = (void *)(uintptr_t)job->weights[row], *r = W == ZK_SPLIT ? (void *)(uintptr_t)job->remainders[row] : 0;
  const void *g = (const void *)(uintptr_t)job->grads[row];
  uint16_t *copy = C == ZK_NONE ? 0 : (uint16_t *)(uintptr_t)job->copies[row];
  float mean[ZK_BLOCK], root[ZK_BLOCK];
  const int64_t whole = from + (to - from) / ZK_BLOCK * ZK_BLOCK;
  for (int64_t at = from; at < whole; at += ZK_BLOCK) {
    uint8_t *restrict m = (uint8_t *)(uintptr_t)job->states[0][row] + at;
    uint8_t *restrict v = (uint8_t *)(uintptr_t)job->states[1][row] + at;
    float *scale_m = (float *)(uintptr_t)job->scales[0][row] + at / ZK_BLOCK;
    float *scale_v = (float *)(uintptr_t)job->scales[1][row] + at / ZK_BLOCK;
    const float old_m = *scale_m, old_v = *scale_v;
    decode_block(m, v, old_m, old_v, mean, root);
    uint32_t most_m = 0, most_v = 0;
    ZK_LOOP
    for (int i = 0; i < ZK_BLOCK; i++) {
      float x = mean[i], y = root[i];
      float weight = zk_adam(get(W, p, r, at + i), get(G, g, 0, at + i), &x, &y, 0, &c, ZK_ROOTS);
      put(W, p, r, at + i, weight, seed_p);
      if (C == ZK_BF16) copy[at + i] = zk_to_bf16_nearest(weight);
      mean[i] = x;
      root[i] = y;
      uint32_t bits_m = zk_bits(x) & 0x7fffffffu, bits_v = zk_bits(y) & 0x7fffffffu;
      most_m = bits_m > most_m ? bits_m : most_m;
      most_v = bits_v > most_v ? bits_v : most_v;
    }
    const float new_m = zk_float(most_m), new_v = zk_float(most_v);
    const float factor_m = zk_q8_factor(new_m), factor_v = zk_q8_factor(new_v);
    *scale_m = new_m < ZK_TINY ? 0.0f : new_m;
    *scale_v = new_v < ZK_TINY ? 0.0f : new_v;
    encode_means(mean, m, factor_m, seed_m);
    encode_roots(root, v, factor_v, seed_v);
  }
  if (whole < to) pieces(job, row, whole, to, visit_rule, 0, 3);
}

/* weight, gradient, copy */
#define ZK_FUSED_Q8(X) X(F32, F32, NONE) X(F32, BF16, NONE) X(F32, BF16, BF16) X(SPLIT, BF16, NONE)

#define ZK_DEFINE_Q8(W, G, C)                                                                                \
  static void fused_##W##_##G##_Q8_##C(const zk_job *job, int64_t row, int64_t from, int64_t to) {           \
    fused_adam_q8(job, row, from, to, ZK_##W, ZK_##G, ZK_##C);                                               \
  }
ZK_FUSED_Q8(ZK_DEFINE_Q8)

#define ZK_KEY(W, G, S, C) ((W) << 12 | (G) << 8 | (S) << 4 | (C))
#define ZK_FUSED_CASE(W, G, S, C) \
  case ZK_KEY(ZK_##W, ZK_##G, ZK_##S, ZK_##C): fused_##W##_##G##_##S##_##C(job, row, from, to); return;

#define ZK_FUSED_CASE_Q8(W, G, C) \
  case ZK_KEY(ZK_##W, ZK_##G, ZK_Q8, ZK_##C): fused_##W##_##G##_Q8_##C(job, row, from, to); return;
#endif

static void update(const zk_job *job, int64_t row, int64_t from, int64_t to) {
#ifndef ZK_ONLY_PIECES /* SSE2 has no fused loops: the wheel is a third smaller */
  if (job->rule == ZK_ADAM && !(job->flags & ZK_AMSGRAD)) {
    switch (ZK_KEY(job->weight, job->grad, job->state, job->copy)) { ZK_FUSED(ZK_FUSED_CASE) ZK_FUSED_Q8(ZK_FUSED_CASE_Q8) }
  }
#endif
  pieces(job, row, from, to, visit_rule, 0, 3);
}

/* LAMB: two passes, because the step size needs two norms of the whole tensor ------------------------- */

/* Squares are summed in double, where those of float32 are exact, in 32 lanes on every instruction set (element i of a
 * piece in lane i % 32).  So nothing overflows or underflows, and another order, as for tensors packed differently,
 * changes the sum by 1e-16, which rounding to float32 removes.  A product is exact, so fusing it with the sum changes
 * no bit.  bf16 is read in pairs: an operation for each half of a word instead of a widening load and a shift. */
#define ZK_LANES 32
#if defined(__AVX512F__)
#include <immintrin.h>
#define ZK_WIDE 8                      /* doubles in a register */
#define ZK_WIDEN(x) _mm512_cvtps_pd(x) /* gcc 12 makes four instructions of __builtin_convertvector */
#define ZK_ADD_SQUARE(sum, y) _mm512_fmadd_pd(y, y, sum)
#elif defined(__AVX2__)
#include <immintrin.h>
#define ZK_WIDE 4
#define ZK_WIDEN(x) _mm256_cvtps_pd(x)
#define ZK_ADD_SQUARE(sum, y) _mm256_fmadd_pd(y, y, sum)
#else
#define ZK_WIDE 2
#define ZK_WIDEN(x) __builtin_convertvector(x, wides)
#define ZK_ADD_SQUARE(sum, y) ((sum) + (y) * (y))
#endif
#define ZK_SUMS (ZK_LANES / ZK_WIDE) /* registers of sums */
typedef double wides __attribute__((vector_size(8 * ZK_WIDE)));
typedef float narrows __attribute__((vector_size(4 * ZK_WIDE)));
typedef uint32_t words __attribute__((vector_size(4 * ZK_WIDE)));
typedef float narrows_at __attribute__((vector_size(4 * ZK_WIDE), aligned(4), may_alias));
typedef uint32_t words_at __attribute__((vector_size(4 * ZK_WIDE), aligned(2), may_alias));

typedef union {
  wides sums[ZK_SUMS];
  double lane[ZK_LANES]; /* of bf16 in another order, see lane_of */
} lanes;

#define ZK_AHEAD 8192 /* bytes; processors prefetch too little for loops this short */

/* Squares of `n` elements, a multiple of ZK_LANES. */
ZK_FN void add_squares(const int format, const void *x, int64_t n, lanes *all) {
  enum { bytes = 4 * ZK_WIDE };
  wides s[ZK_SUMS] = {{0}};
  const char *at = x;
  for (int64_t i = 0; i < n; i += ZK_LANES) {
    for (int line = 0; line < ZK_LANES * (format == ZK_BF16 ? 2 : 4); line += 64) __builtin_prefetch(at + ZK_AHEAD + line);
    for (int k = 0; k < ZK_SUMS; k += 2) {
      narrows a, b;
      if (format == ZK_BF16) {
        words pairs = *(const words_at *)at;
        a = (narrows)(pairs << 16);
        b = (narrows)(pairs & 0xffff0000u);
        at += bytes;
      } else {
        a = (narrows) * (const narrows_at *)at;
        b = (narrows) * (const narrows_at *)(at + bytes);
        at += 2 * bytes;
      }
      wides low = ZK_WIDEN(a), high = ZK_WIDEN(b);
      s[k] = ZK_ADD_SQUARE(s[k], low);
      s[k + 1] = ZK_ADD_SQUARE(s[k + 1], high);
    }
  }
  for (int k = 0; k < ZK_SUMS; k++) all->sums[k] = s[k];
}

/* The place of lane k < ZK_LANES / 2: even elements of a register of pairs come before odd ones. */
ZK_FN int lane_of(int format, int k) {
  return format == ZK_BF16 ? k / (2 * ZK_WIDE) * (2 * ZK_WIDE) + k % 2 * ZK_WIDE + k % (2 * ZK_WIDE) / 2 : k;
}

ZK_FN void fold(const int format, const lanes *all, double *sums, int count) {
  for (int k = 0; k < ZK_LANES / 2; k++) {
    const int at = lane_of(format, k);
    for (int p = 0; p < count; p++) sums[p] += all[p].lane[at] + all[p].lane[at + ZK_LANES / 2];
  }
}

/* Squares of up to ZK_PIECE elements. */
ZK_FN double sum_squares_as(const int format, const void *x, int64_t n) {
  const int64_t bulk = n / ZK_LANES * ZK_LANES;
  lanes all;
  float rest[ZK_LANES];
  const float *tail = load(format, (char *)(uintptr_t)x + bulk * width(format), 0, rest, n - bulk, 0);
  double sum = 0;
  for (int64_t k = 0; k < n - bulk; k++) sum += (double)tail[k] * (double)tail[k];
  add_squares(format, x, bulk, &all);
  fold(format, &all, &sum, 1);
  return sum;
}

static double sum_squares(const float *x, int64_t n) { return sum_squares_as(ZK_F32, x, n); }

/* Squares of up to ZK_SPAN elements: the sums of all pieces are folded together, so that none waits for another. */
ZK_FN double span_squares(const int format, const void *x, int64_t n) {
  enum { most = ZK_SPAN / ZK_PIECE };
  const int count = (int)(n / ZK_PIECE);
  lanes all[most];
  double sums[most] = {0}, sum = 0;
  for (int p = 0; p < count; p++) add_squares(format, (const char *)x + p * ZK_PIECE * width(format), ZK_PIECE, all + p);
  fold(format, all, sums, count);
  for (int p = 0; p < count; p++) sum += sums[p];
  if (count * ZK_PIECE < n)
    sum += sum_squares_as(format, (const char *)x + (int64_t)count * ZK_PIECE * width(format), n - count * ZK_PIECE);
  return sum;
}

/* Moments of up to ZK_PIECE elements, and the squares of their weights and directions. */
ZK_FN void lamb_first_as(arrays a, int64_t n, const zk_coef c, double *squares, const int flags) {
  out_f m = a.s0, v = a.s1;
  in_f p = a.p, g = a.g;
  float direction[ZK_PIECE];
  ZK_LOOP
  for (int64_t i = 0; i < n; i++) {
    float mean = m[i], square = v[i];
    zk_lamb_moments(g[i], &mean, &square, &c, flags);
    direction[i] = zk_lamb_direction(p[i], mean, square, &c, flags);
    m[i] = mean;
    v[i] = square;
  }
  squares[0] += sum_squares(p, n);
  squares[1] += sum_squares(direction, n);
}

/* The loops of LAMB for constant flags. */
#define ZK_LAMB_FLAGS(CALL)                                                   \
  switch ((job->flags & ZK_EPS_INSIDE) | (job->state == ZK_Q8 ? ZK_ROOTS : 0)) { \
    case 0: CALL(0); break;                                                   \
    case ZK_EPS_INSIDE: CALL(ZK_EPS_INSIDE); break;                           \
    case ZK_ROOTS: CALL(ZK_ROOTS); break;                                     \
    default: CALL(ZK_EPS_INSIDE | ZK_ROOTS); break;                           \
  }

static void visit_lamb_first(const zk_job *job, arrays a, int64_t n, const zk_coef *c, void *squares) {
#define ZK_CALL(F) lamb_first_as(a, n, *c, squares, F)
  ZK_LAMB_FLAGS(ZK_CALL)
#undef ZK_CALL
}

ZK_FN void lamb_second_as(arrays a, int64_t n, const zk_coef c, float rate, const int flags) {
  out_f p = a.p;
  in_f m = a.s0, v = a.s1;
  for (int64_t i = 0; i < n; i++) p[i] = p[i] - rate * zk_lamb_direction(p[i], m[i], v[i], &c, flags);
}

static void visit_lamb_second(const zk_job *job, arrays a, int64_t n, const zk_coef *c, void *rate) {
#define ZK_CALL(F) lamb_second_as(a, n, *c, *(float *)rate, F)
  ZK_LAMB_FLAGS(ZK_CALL)
#undef ZK_CALL
}

static void lamb_sums(const zk_job *job, int64_t row, int64_t from, int64_t to, double *squares) {
  for (int64_t at = from; at < to; at += ZK_PIECE) {
    int64_t n = to - at < ZK_PIECE ? to - at : ZK_PIECE;
    piece(job, row, at, n, visit_lamb_first, squares, 2);
  }
}

static void lamb_apply(const zk_job *job, int64_t row, int64_t from, int64_t to) {
  zk_hyper h = {.min_ratio = job->min_ratio, .max_ratio = job->max_ratio};
  float rate = zk_lamb_rate(job->sums[2 * row], job->sums[2 * row + 1], &h, job->lr);
  pieces(job, row, from, to, visit_lamb_second, &rate, 1);
}

/* Sums ---------------------------------------------------------------------------------------------- */

static double squares(int format, const void *row, int64_t from, int64_t to) {
  const void *x = (const char *)row + from * width(format);
  if (format == ZK_BF16) return span_squares(ZK_BF16, x, to - from);
  if (format == ZK_F32) return span_squares(ZK_F32, x, to - from);
  float buffer[ZK_PIECE];
  double sum = 0;
  for (int64_t at = from; at < to; at += ZK_PIECE) {
    int64_t n = to - at < ZK_PIECE ? to - at : ZK_PIECE;
    sum += sum_squares(load(format, (char *)(uintptr_t)row + at * width(format), 0, buffer, n, 0), n);
  }
  return sum;
}

/* Conversion of whole rows -------------------------------------------------------------------------- */

static void decode(int format, int kind, const void *from, const void *extra, float *to, int64_t n) {
  const float *result = load(format, (void *)(uintptr_t)from, extra, to, n, kind == 2);
  if (result != to) __builtin_memmove(to, result, (uint64_t)n * 4);
}

static void encode(int format, int kind, const float *from, void *to, void *extra, int64_t n, uint32_t seed, int stochastic) {
  if (format == ZK_F32)
    __builtin_memmove(to, from, (uint64_t)n * 4);
  else if (format == ZK_BF16 && !(stochastic && kind != 3))
    store_bf16(from, to, n);
  else if (format == ZK_Q8 && !stochastic)
    store_q8_nearest(from, to, extra, n, kind == 2);
  else
    store(format, from, to, extra, n, kind == 2, seed);
}

extern const zk_kernels ZK_JOIN(zk_kernels, ZK_SUFFIX);
const zk_kernels ZK_JOIN(zk_kernels, ZK_SUFFIX) = {update, lamb_sums, lamb_apply, squares, decode, encode};
