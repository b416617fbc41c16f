/* The loops of one instruction set.  Compiled once per level with other flags and another ZK_SUFFIX.
 *
 * A piece of a row (ZK_PIECE elements: a few KB per stream, so it stays in the first-level cache) passes
 * three stations: streams that are not float32 are decoded into buffers on the stack; one loop per rule
 * updates float32 arrays; what was decoded is encoded back.  float32 streams are updated where they lie,
 * and when all of them are, the piece is the whole range.  So every rule takes every format, and there is
 * one loop per rule instead of one per combination.
 */
#include "zk_api.h"

#define ZK_JOIN_(a, b) a##b
#define ZK_JOIN(a, b) ZK_JOIN_(a, b)
#define ZK_PIECE 1024 /* a multiple of ZK_BLOCK */

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

/* The largest magnitude; on bit patterns, which order like magnitudes, because that vectorises. */
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
    int64_t end = n - at < ZK_BLOCK ? n : at + ZK_BLOCK;
    const float absmax = scale[at / ZK_BLOCK];
    if (is_square) {
      for (int64_t i = at; i < end; i++) {
        float root = zk_from_q8_root(x[i], absmax);
        y[i] = root * root;
      }
    } else {
      for (int64_t i = at; i < end; i++) y[i] = zk_from_q8_signed(x[i], absmax);
    }
  }
}

/* Noise of `seed`, or none: rounding to nearest. */
ZK_FN uint32_t noise_of(float x, uint32_t seed, int stochastic, uint32_t bits) {
  return stochastic ? zk_noise(x, seed) >> (32u - bits) : 1u << (bits - 1u);
}

ZK_FN void store_q8_as(in_f x, uint8_t *restrict y, float *restrict scale, int64_t n, int is_square, uint32_t seed,
                       const int stochastic) {
  float root[ZK_BLOCK];
  for (int64_t at = 0; at < n; at += ZK_BLOCK) {
    const int64_t m = n - at < ZK_BLOCK ? n - at : ZK_BLOCK;
    const float *restrict value = x + at;
    uint8_t *restrict code = y + at;
    if (is_square) {
      for (int64_t i = 0; i < m; i++) root[i] = zk_sqrtf(value[i]);
      value = root;
    }
    const float absmax = largest(value, m);
    const float factor = zk_q8_factor(absmax);
    scale[at / ZK_BLOCK] = absmax < ZK_TINY ? 0.0f : absmax;
    if (is_square) {
      for (int64_t i = 0; i < m; i++)
        code[i] = zk_to_q8_root(value[i], factor, noise_of(value[i], seed, stochastic, 19));
    } else {
      for (int64_t i = 0; i < m; i++)
        code[i] = zk_to_q8_signed(value[i], factor, noise_of(value[i], seed, stochastic, 20));
    }
  }
}
static void store_q8(in_f x, uint8_t *y, float *scale, int64_t n, int is_square, uint32_t seed) {
  store_q8_as(x, y, scale, n, is_square, seed, 1);
}
static void store_q8_nearest(in_f x, uint8_t *y, float *scale, int64_t n, int is_square) {
  store_q8_as(x, y, scale, n, is_square, 0, 0);
}

static int64_t width(int format) { return format == ZK_F32 ? 4 : format == ZK_Q8 ? 1 : format == ZK_NONE ? 0 : 2; }

/* Streams ------------------------------------------------------------------------------------------- */

/* A stream of one row, from element `at` on. */
static void *element(const uint64_t *rows, int64_t row, int64_t at, int64_t bytes) {
  return rows ? (char *)(uintptr_t)rows[row] + at * bytes : 0;
}

/* Whether state `k` of a rule is a second moment (no sign, wide range). */
static int is_square(int rule, int k) { return rule == ZK_ADAGRAD || ((rule == ZK_ADAM || rule == ZK_LAMB) && k > 0); }

static float *load(int format, void *from, const void *beside, float *buffer, int64_t n, int square) {
  switch (format) {
    case ZK_BF16: load_bf16(from, buffer, n); return buffer;
    case ZK_F16: load_f16(from, buffer, n); return buffer;
    case ZK_SPLIT: load_split(from, beside, buffer, n); return buffer;
    case ZK_Q8: load_q8(from, beside, buffer, n, square); return buffer;
    default: return from; /* float32 where it lies; NULL where it is absent */
  }
}

static void store(int format, const float *from, void *to, void *beside, int64_t n, int square, uint32_t seed) {
  switch (format) {
    case ZK_BF16: store_bf16_stochastic(from, to, n, seed); break;
    case ZK_F16: store_f16(from, to, n); break;
    case ZK_SPLIT: store_split(from, to, beside, n); break;
    case ZK_Q8: store_q8(from, to, beside, n, square, seed); break;
    default: break; /* float32 was updated where it lies */
  }
}

/* Rules on float32 arrays --------------------------------------------------------------------------- */

typedef struct {
  float *p, *s0, *s1, *s2;
  const float *g;
} arrays;

ZK_FN void adam_as(arrays a, int64_t n, const zk_coef c, const int flags) {
  out_f p = a.p, m = a.s0, v = a.s1, x = a.s2;
  in_f g = a.g;
  if (flags & ZK_AMSGRAD) {
    for (int64_t i = 0; i < n; i++) p[i] = zk_adam(p[i], g[i], &m[i], &v[i], &x[i], &c, flags);
  } else {
    for (int64_t i = 0; i < n; i++) p[i] = zk_adam(p[i], g[i], &m[i], &v[i], 0, &c, flags);
  }
}
static void adam(arrays a, int64_t n, const zk_coef *c) { adam_as(a, n, *c, 0); }
static void adam_largest(arrays a, int64_t n, const zk_coef *c) { adam_as(a, n, *c, ZK_AMSGRAD); }

static void sgd(arrays a, int64_t n, const zk_coef *k) {
  const zk_coef c = *k;
  out_f p = a.p;
  in_f g = a.g;
  for (int64_t i = 0; i < n; i++) p[i] = zk_sgd(p[i], g[i], &c);
}
ZK_FN void sgd_momentum_as(arrays a, int64_t n, const zk_coef c, const int flags) {
  out_f p = a.p, b = a.s0;
  in_f g = a.g;
  for (int64_t i = 0; i < n; i++) p[i] = zk_sgd_momentum(p[i], g[i], &b[i], &c, flags);
}
static void sgd_momentum(arrays a, int64_t n, const zk_coef *c) { sgd_momentum_as(a, n, *c, 0); }
static void sgd_nesterov(arrays a, int64_t n, const zk_coef *c) { sgd_momentum_as(a, n, *c, ZK_NESTEROV); }

static void adagrad(arrays a, int64_t n, const zk_coef *k) {
  const zk_coef c = *k;
  out_f p = a.p, s = a.s0;
  in_f g = a.g;
  for (int64_t i = 0; i < n; i++) p[i] = zk_adagrad(p[i], g[i], &s[i], &c);
}

static void lion(arrays a, int64_t n, const zk_coef *k) {
  const zk_coef c = *k;
  out_f p = a.p, m = a.s0;
  in_f g = a.g;
  for (int64_t i = 0; i < n; i++) p[i] = zk_lion(p[i], g[i], &m[i], &c);
}

static void apply_rule(const zk_job *job, arrays a, int64_t n, const zk_coef *c) {
  switch (job->rule) {
    case ZK_ADAM: (job->flags & ZK_AMSGRAD ? adam_largest : adam)(a, n, c); break;
    case ZK_SGD:
      (job->state == ZK_NONE ? sgd : job->flags & ZK_NESTEROV ? sgd_nesterov : sgd_momentum)(a, n, c);
      break;
    case ZK_ADAGRAD: adagrad(a, n, c); break;
    default: lion(a, n, c); break;
  }
}

/* One piece through the three stations; `visit` is what happens to the float32 arrays. */
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

static void update(const zk_job *job, int64_t row, int64_t from, int64_t to) {
  pieces(job, row, from, to, visit_rule, 0, 3);
}

/* LAMB: two readings, because the size of the step needs two norms of the whole tensor ---------------- */

#define ZK_LANES 16 /* sums run in as many lanes on every instruction set, so their bits agree */

static double add_lanes(const double *lane) {
  double sum = 0;
  for (int k = 0; k < ZK_LANES; k++) sum += lane[k];
  return sum;
}

ZK_FN void lamb_first_as(arrays a, int64_t n, const zk_coef c, double *squares, const int flags) {
  out_f m = a.s0, v = a.s1;
  in_f p = a.p, g = a.g;
  double pp[ZK_LANES] = {0}, uu[ZK_LANES] = {0};
  int64_t i = 0;
  for (; i + ZK_LANES <= n; i += ZK_LANES)
    for (int k = 0; k < ZK_LANES; k++) {
      zk_lamb_moments(g[i + k], &m[i + k], &v[i + k], &c);
      float u = zk_lamb_direction(p[i + k], m[i + k], v[i + k], &c, flags);
      pp[k] += (double)p[i + k] * (double)p[i + k];
      uu[k] += (double)u * (double)u;
    }
  for (int k = 0; i < n; i++, k++) {
    zk_lamb_moments(g[i], &m[i], &v[i], &c);
    float u = zk_lamb_direction(p[i], m[i], v[i], &c, flags);
    pp[k] += (double)p[i] * (double)p[i];
    uu[k] += (double)u * (double)u;
  }
  squares[0] += add_lanes(pp);
  squares[1] += add_lanes(uu);
}

static void visit_lamb_first(const zk_job *job, arrays a, int64_t n, const zk_coef *c, void *squares) {
  float weight[ZK_PIECE]; /* the gradient may be decayed weights too: maximize is a sign of grad_mul */
  (void)weight;
  if (job->flags & ZK_EPS_INSIDE)
    lamb_first_as(a, n, *c, squares, ZK_EPS_INSIDE);
  else
    lamb_first_as(a, n, *c, squares, 0);
}

ZK_FN void lamb_second_as(arrays a, int64_t n, const zk_coef c, float rate, const int flags) {
  out_f p = a.p;
  in_f m = a.s0, v = a.s1;
  for (int64_t i = 0; i < n; i++) p[i] = p[i] - rate * zk_lamb_direction(p[i], m[i], v[i], &c, flags);
}

static void visit_lamb_second(const zk_job *job, arrays a, int64_t n, const zk_coef *c, void *rate) {
  if (job->flags & ZK_EPS_INSIDE)
    lamb_second_as(a, n, *c, *(float *)rate, ZK_EPS_INSIDE);
  else
    lamb_second_as(a, n, *c, *(float *)rate, 0);
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
  float buffer[ZK_PIECE];
  double lane[ZK_LANES] = {0};
  for (int64_t at = from; at < to; at += ZK_PIECE) {
    int64_t n = to - at < ZK_PIECE ? to - at : ZK_PIECE, i = 0;
    in_f x = load(format, (char *)(uintptr_t)row + at * width(format), 0, buffer, n, 0);
    for (; i + ZK_LANES <= n; i += ZK_LANES)
      for (int k = 0; k < ZK_LANES; k++) lane[k] += (double)x[i + k] * (double)x[i + k];
    for (int k = 0; i < n; i++, k++) lane[k] += (double)x[i] * (double)x[i];
  }
  return add_lanes(lane);
}

/* Whole rows between formats ------------------------------------------------------------------------ */

static void decode(int format, int kind, const void *from, const void *beside, float *to, int64_t n) {
  const float *result = load(format, (void *)(uintptr_t)from, beside, to, n, kind == 2);
  if (result != to) __builtin_memcpy(to, result, (uint64_t)n * 4);
}

static void encode(int format, int kind, const float *from, void *to, void *beside, int64_t n, uint32_t seed, int stochastic) {
  if (format == ZK_F32)
    __builtin_memcpy(to, from, (uint64_t)n * 4);
  else if (format == ZK_BF16 && !(stochastic && kind != 3))
    store_bf16(from, to, n);
  else if (format == ZK_Q8 && !stochastic)
    store_q8_nearest(from, to, beside, n, kind == 2);
  else
    store(format, from, to, beside, n, kind == 2, seed);
}

extern const zk_kernels ZK_JOIN(zk_kernels, ZK_SUFFIX);
const zk_kernels ZK_JOIN(zk_kernels, ZK_SUFFIX) = {update, lamb_sums, lamb_apply, squares, decode, encode};
