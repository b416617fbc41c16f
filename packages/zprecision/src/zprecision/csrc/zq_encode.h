/* Quantization of weights, as encode.py does it; included by zq_kern.c once for each instruction set.
 *
 * The scale search sums 15 points a group.  Their sums of lanes are added up together, as a tree of 16 rows: one by one
 * they took as long as rounding.
 */
#ifndef ZQ_ENCODE_H
#define ZQ_ENCODE_H
#include "zq_vec.h"

enum { SEARCH, AMAX, MINMAX, GGML };

/* Vectors of the width of the registers: gcc keeps wider ones in memory. */
#if defined(__AVX512F__)
enum { WIDE = 16 };
typedef __m512 lanes;
#define LANES_OP(name) _mm512_##name
#define ROUND_LANES _mm512_roundscale_ps
#elif defined(__AVX2__)
enum { WIDE = 8 };
typedef __m256 lanes;
#define LANES_OP(name) _mm256_##name
#define ROUND_LANES _mm256_round_ps
#else
enum { WIDE = 4 };
typedef v4 lanes;
#endif
typedef int32_t lane_ints __attribute__((vector_size(4 * WIDE)));
enum { BLOCK_PARTS = ZQ_BLOCK / WIDE };

ZQ_FN lanes load_lanes(const float *at) {
  lanes x;
  memcpy(&x, at, sizeof x);
  return x;
}
ZQ_FN lanes in_all_lanes(float x) { return (lanes){0} + x; }
ZQ_FN lanes pick_lanes(lane_ints mask, lanes yes, lanes no) {
  return (lanes)((mask & (lane_ints)yes) | (~mask & (lane_ints)no));
}
ZQ_FN lane_ints whole_lanes(lanes x) { return __builtin_convertvector(x, lane_ints); } /* towards zero */

/* Nearest integers, halves to even, of |x| < 2^22, from `low` to `high`. */
ZQ_FN lanes nearest_within(lanes x, float low, float high) {
#if defined(__AVX2__)
  x = ROUND_LANES(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  return LANES_OP(min_ps)(LANES_OP(max_ps)(x, LANES_OP(set1_ps)(low)), LANES_OP(set1_ps)(high));
#else
  x = (x + 12582912.0f) - 12582912.0f;
  x = pick_lanes(x < low, in_all_lanes(low), x);
  return pick_lanes(x > high, in_all_lanes(high), x);
#endif
}

ZQ_FN int some_lane(lane_ints mask) {
#if defined(__AVX512F__)
  return _mm512_test_epi32_mask((__m512i)mask, (__m512i)mask) != 0;
#elif defined(__AVX2__)
  return !_mm256_testz_si256((__m256i)mask, (__m256i)mask);
#else
  return (mask[0] | mask[1] | mask[2] | mask[3]) != 0;
#endif
}

/* The first element of the largest magnitude. */
ZQ_FN float signed_peak(const float *x, int64_t count, int32_t peak) {
  const float most = as_float(peak);
  lane_ints above = {0}, below = {0};
  for (int64_t k = 0; k < count; k += WIDE) {
    lanes value = load_lanes(x + k);
    above |= value == most, below |= value == -most;
  }
  if (!some_lane(below)) return most;
  if (!some_lane(above)) return -most;
  for (int64_t k = 0; k < count; k++)
    if (x[k] == most || x[k] == -most) return x[k];
  return 0;
}

#define POINTS 15
#define STEPS(top)                                                                                         \
  {STEP(top, 0), STEP(top, 1), STEP(top, 2), STEP(top, 3), STEP(top, 4), STEP(top, 5), STEP(top, 6),       \
   STEP(top, 7), STEP(top, 8), STEP(top, 9), STEP(top, 10), STEP(top, 11), STEP(top, 12), STEP(top, 13),   \
   STEP(top, 14), 1}
#define STEP(top, point) (float)(top##.0 - 0.7 + 0.15 * (point))

/* Sums of code * x and of code * code, in lanes; the squares are integers, so a fused sum of them has the same bits. */
ZQ_FN void sum_point(const float *x, const int64_t count, float inverse, const float top, lanes *dot, lanes *square) {
  lanes dots[BLOCK_PARTS], squares[BLOCK_PARTS];
  UNROLLED(8) for (int q = 0; q < BLOCK_PARTS; q++) dots[q] = squares[q] = in_all_lanes(0);
  for (int64_t l = 0; l < count; l += ZQ_BLOCK)
    UNROLLED(8) for (int q = 0; q < BLOCK_PARTS; q++) {
      lanes value = load_lanes(x + l + WIDE * q), code = nearest_within(value * inverse, -top, top - 1);
      dots[q] += code * value;
#if defined(__AVX2__)
      squares[q] = LANES_OP(fmadd_ps)(code, code, squares[q]);
#else
      squares[q] += code * code;
#endif
    }
  UNROLLED(3) for (int half = BLOCK_PARTS / 2; half; half /= 2)
    UNROLLED(4) for (int q = 0; q < half; q++) dots[q] += dots[q + half], squares[q] += squares[q + half];
  *dot = dots[0], *square = squares[0];
}

/* Sums of the lanes of 16 rows, each in the order of `sum_lanes`: a tree, in which rows share vectors more and more. */
#if defined(__AVX512F__)
#define SHUFFLE_SUM(shuffle, a, b, low, high) (shuffle(a, b, low) + shuffle(a, b, high))
ZQ_FN void point_totals(const lanes *rows, float *out) {
  lanes halves[8], quarters[4], pairs[2];
  UNROLLED(8) for (int k = 0; k < 8; k++) {
    const lanes *at = rows + k / 4 * 8 + k % 4; /* rows k and k + 4, then k + 8 and k + 12 */
    halves[k] = SHUFFLE_SUM(_mm512_shuffle_f32x4, at[0], at[4], 0x44, 0xee);
  }
  UNROLLED(4) for (int k = 0; k < 4; k++)
    quarters[k] = SHUFFLE_SUM(_mm512_shuffle_f32x4, halves[k], halves[k + 4], 0x88, 0xdd);
  UNROLLED(2) for (int k = 0; k < 2; k++)
    pairs[k] = SHUFFLE_SUM(_mm512_shuffle_ps, quarters[2 * k], quarters[2 * k + 1], 0x44, 0xee);
  _mm512_storeu_ps(out, SHUFFLE_SUM(_mm512_shuffle_ps, pairs[0], pairs[1], 0x88, 0xdd));
}
#elif defined(__AVX2__)
#define SHUFFLE_SUM(shuffle, a, b, low, high) (shuffle(a, b, low) + shuffle(a, b, high))
ZQ_FN void point_totals(const lanes *rows, float *out) {
  for (int first = 0; first < 16; first += 8) {
    lanes quarters[4], pairs[2];
    UNROLLED(4) for (int k = 0; k < 4; k++)
      quarters[k] = SHUFFLE_SUM(_mm256_permute2f128_ps, rows[first + k], rows[first + k + 4], 0x20, 0x31);
    UNROLLED(2) for (int k = 0; k < 2; k++)
      pairs[k] = SHUFFLE_SUM(_mm256_shuffle_ps, quarters[2 * k], quarters[2 * k + 1], 0x44, 0xee);
    _mm256_storeu_ps(out + first, SHUFFLE_SUM(_mm256_shuffle_ps, pairs[0], pairs[1], 0x88, 0xdd));
  }
}
#else
ZQ_FN void point_totals(const lanes *rows, float *out) {
  for (int k = 0; k < 16; k++) out[k] = (rows[k][0] + rows[k][2]) + (rows[k][1] + rows[k][3]);
}
#endif

/* The first point of the highest score; those of 0 / 0 are NaN.  Returns -1 if all are. */
ZQ_FN int best_point(const float *scores) {
#if defined(__AVX512F__)
  const __m512 all = _mm512_loadu_ps(scores);
  const __mmask16 judged = _mm512_mask_cmp_ps_mask((1 << POINTS) - 1, all, all, _CMP_ORD_Q);
  const __m512 most = _mm512_set1_ps(_mm512_mask_reduce_max_ps(judged, all));
  return judged ? __builtin_ctz(_mm512_mask_cmp_ps_mask(judged, all, most, _CMP_EQ_OQ)) : -1;
#elif defined(__AVX2__)
  const __m256 none = _mm256_set1_ps(-1);
  __m256 low = _mm256_max_ps(_mm256_loadu_ps(scores), none); /* the second, if one is NaN */
  __m256 high = _mm256_blend_ps(_mm256_max_ps(_mm256_loadu_ps(scores + 8), none), none, 1 << (POINTS - 8));
  __m256 most = _mm256_max_ps(low, high);
  most = _mm256_max_ps(most, _mm256_permute2f128_ps(most, most, 1));
  most = _mm256_max_ps(most, _mm256_shuffle_ps(most, most, 0x4e));
  most = _mm256_max_ps(most, _mm256_shuffle_ps(most, most, 0xb1));
  const int equal = _mm256_movemask_ps(_mm256_cmp_ps(low, most, _CMP_EQ_OQ)) |
                    _mm256_movemask_ps(_mm256_cmp_ps(high, most, _CMP_EQ_OQ)) << 8;
  return _mm256_cvtss_f32(most) >= 0 ? __builtin_ctz((unsigned)equal) : -1;
#else
  float best = -1;
  int found = -1;
  for (int point = 0; point < POINTS; point++) {
    int is_better = scores[point] > best;
    best = is_better ? scores[point] : best;
    found = is_better ? point : found;
  }
  return found;
#endif
}

/* See [Note: scale search] in encode.py: sums in the order of its `fold`, of all points before any is judged. */
ZQ_FN float search_as(const float *x, const int64_t count, float peak, const float top, float *inverse) {
  static const float steps[2][16] = {STEPS(8), STEPS(128)};
  float tried[16], dots[16], squares[16], scores[16];
  lanes dot_rows[16], square_rows[16];
  for (int k = 0; k < 16; k += WIDE) {
    lanes inverses = -load_lanes(steps[top == 128] + k) / peak;
    memcpy(tried + k, &inverses, sizeof inverses);
  }
  UNROLLED(2) for (int point = 0; point < 16; point++) /* the last is not judged */
    sum_point(x, count, tried[point], top, dot_rows + point, square_rows + point);
  point_totals(dot_rows, dots), point_totals(square_rows, squares);
  for (int k = 0; k < 16; k += WIDE) {
    lanes dot = load_lanes(dots + k), score = dot * dot / load_lanes(squares + k);
    memcpy(scores + k, &score, sizeof score);
  }
  const int found = best_point(scores);
  if (found < 0) return 0;
  *inverse = tried[found];
  return dots[found] / squares[found];
}

static float search_scale(const float *x, int64_t count, float peak, float top, float *inverse) {
  if (count == 32) return top == 8 ? search_as(x, 32, peak, 8, inverse) : search_as(x, 32, peak, 128, inverse);
  return top == 8 ? search_as(x, count, peak, 8, inverse) : search_as(x, count, peak, 128, inverse);
}

typedef struct {
  float scale, min;    /* as stored */
  float inverse, shift; /* code = x * inverse, after subtracting `min` or before adding `shift` */
} affine;

static affine choose(const zq_quantization *job, const float *x, const int32_t bits) {
  const float top = job->bits == 8 ? 128 : 8;
  affine a = {0, 0, 0, 0};
  int is_zero = bits < TINY_BITS;
  if (job->rule == SEARCH) {
    if (!is_zero) a.scale = search_scale(x, job->group, signed_peak(x, job->group, bits), top, &a.inverse);
  } else if (job->rule == AMAX) {
    a.scale = as_float(bits) / (top - 1);
    a.inverse = is_zero ? 0 : (top - 1) / as_float(bits);
  } else if (job->rule == MINMAX) {
    lanes low = load_lanes(x), high = low;
    float most = x[0];
    for (int64_t k = WIDE; k < job->group; k += WIDE) {
      lanes v = load_lanes(x + k);
      low = pick_lanes(v < low, v, low);
      high = pick_lanes(v > high, v, high);
    }
    a.min = low[0], most = high[0];
    for (int l = 1; l < WIDE; l++) a.min = low[l] < a.min ? low[l] : a.min, most = high[l] > most ? high[l] : most;
    a.scale = (most - a.min) / (2 * top - 1);
    a.inverse = most - a.min < as_float(TINY_BITS) ? 0 : (2 * top - 1) / (most - a.min);
  } else {
    a.scale = job->bits == 8 ? as_float(bits) / 127 : signed_peak(x, job->group, bits) / -8;
    a.inverse = a.scale == 0 ? 0 : 1 / a.scale;
  }
  return a;
}

/* Centred codes of as many elements as a vector has. */
ZQ_FN lane_ints codes_of(const zq_quantization *job, const affine *a, const float *x) {
  const float top = job->bits == 8 ? 128 : 8;
  const lanes values = load_lanes(x), scaled = values * a->inverse;
  if (job->rule == MINMAX) return whole_lanes(nearest_within((values - a->min) * a->inverse, 0, 2 * top - 1));
  if (job->rule == SEARCH) return whole_lanes(nearest_within(scaled, -top, top - 1));
  if (job->rule == AMAX) return whole_lanes(nearest_within(scaled, 1 - top, top - 1));
  if (job->bits == 8) { /* halves away from zero */
    lane_ints whole = whole_lanes(scaled);
    lanes rest = scaled - __builtin_convertvector(whole, lanes);
    return whole - (lane_ints)(rest >= 0.5f) + (lane_ints)(rest <= -0.5f);
  }
  lane_ints whole = whole_lanes(scaled + 8.5f), is_above = whole > 15;
  return ((is_above & 15) | (~is_above & whole)) - 8;
}

ZQ_FN int put_scale(void *scales, int64_t index, int bytes, float value) {
  if (bytes == 4) {
    ((float *)scales)[index] = value;
    return value - value == 0;
  }
  uint16_t half = ((uint16_t *)scales)[index] = narrow_half(value);
  return (half & 0x7c00u) != 0x7c00u;
}

static void put_codes(const zq_quantization *job, const affine *a, const float *x, uint8_t *out) {
  const int32_t offset = job->bits == 4 && job->rule != MINMAX ? 8 : 0;
  for (int64_t k = 0; k < job->group; k += ZQ_BLOCK) {
    int32_t codes[ZQ_BLOCK];
    UNROLLED(8) for (int q = 0; q < BLOCK_PARTS; q++) {
      lane_ints part = codes_of(job, a, x + k + WIDE * q) + offset;
      memcpy(codes + WIDE * q, &part, sizeof part);
    }
    if (job->bits == 4)
      for (int l = 0; l < 16; l++) out[k / 2 + l] = (uint8_t)(codes[l] | codes[l + 16] << 4);
    else
      for (int l = 0; l < ZQ_BLOCK; l++) out[k + l] = (uint8_t)codes[l];
  }
}

static int quantize(const zq_quantization *job, int64_t row, float *buffer) {
  const int64_t groups = (job->columns + job->group - 1) / job->group, length = groups * job->group;
  const int width = job->dtype == 0 ? 4 : 2;
  const char *from = (const char *)job->values + row * job->columns * width;
  const float *x = buffer;
  uint8_t *codes = job->codes + row * length * job->bits / 8;
  int is_good = 1;
  if (job->dtype == 0 && length == job->columns) {
    x = (const float *)(const void *)from;
  } else {
    char tail[64] __attribute__((aligned(64))) = {0};
    for (int64_t k = 0; k < length; k += 16) {
      const char *at = from + k * width;
      if (job->columns - k < 16) {
        memset(tail, 0, sizeof tail);
        if (job->columns > k) memcpy(tail, at, (size_t)((job->columns - k) * width));
        at = tail;
      }
      v16 wide = job->dtype == 0 ? load_as(0, at) : job->dtype == 1 ? load_as(1, at) : load_as(2, at);
      memcpy(buffer + k, &wide, sizeof wide);
    }
  }
  for (int64_t g = 0; g < groups; g++) {
    const float *group = x + g * job->group;
    int32_t peak = peak_bits(group, job->group);
    if (peak >= 0x7f800000) return 0;
    affine a = choose(job, group, peak);
    is_good &= put_scale(job->scales, row * groups + g, job->scale_bytes, a.scale);
    if (job->rule == MINMAX) is_good &= put_scale(job->mins, row * groups + g, job->scale_bytes, a.min);
    put_codes(job, &a, group, codes + g * job->group * job->bits / 8);
  }
  return is_good;
}

#endif
