/* The kernels of one instruction set; compiled once for each with -DZQ_SUFFIX.
 *
 * The product of 16 rows and up to 8 tokens, block by block of 32: integer sums, one row a lane, times the scale of
 * the activation; the sums of a group times the scales of the rows; then the minima times the sums of the activation.
 * Products and sums are separate operations (-ffp-contract=off), in the order of the blocks, so every level gives the
 * same bits.
 *
 * dpbusd (VNNI) multiplies unsigned codes by signed activations, so it sums code * x, and the accumulator begins at
 * -offset * sum(x).  Without it maddubs sums pairs into 16 bits, which must not saturate: 4-bit codes stay below
 * 8 * 2 * 15 * 127 = 30480; 8-bit codes are made signed, and |code| <= 128 is multiplied by the activation with the
 * sign of the code, at most 2 * 128 * 127 = 32512.
 */
#if defined(__AVX2__)
#include <immintrin.h>
#endif
#include "zq_vec.h"

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)

/* Vectors of integers: HALVES of them hold the 16 rows. */
#if defined(__AVX512BW__)
enum { HALVES = 1 };
typedef __m512i ints;
typedef __m512 floats;
#define OP(name) _mm512_##name
ZQ_FN ints load_ints(const void *at) { return _mm512_loadu_si512(at); }
ZQ_FN floats load_scales(const uint8_t *at, int bytes, int half) {
  (void)half;
  return bytes == 2 ? _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)at)) : _mm512_loadu_ps(at);
}
ZQ_FN ints low_nibbles(ints w) { return _mm512_and_si512(w, _mm512_set1_epi8(15)); }
ZQ_FN ints with_sign(ints x, ints w) { return _mm512_mask_sub_epi8(x, _mm512_movepi8_mask(w), _mm512_setzero_si512(), x); }
ZQ_FN ints flip_top(ints w) { return _mm512_xor_si512(w, _mm512_set1_epi8((char)128)); }
#elif defined(__AVX2__)
enum { HALVES = 2 };
typedef __m256i ints;
typedef __m256 floats;
#define OP(name) _mm256_##name
ZQ_FN ints load_ints(const void *at) { return _mm256_loadu_si256(at); }
ZQ_FN floats load_scales(const uint8_t *at, int bytes, int half) {
  if (bytes == 2) return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(at + 16 * half)));
  return _mm256_loadu_ps((const float *)(at + 32 * half));
}
ZQ_FN ints low_nibbles(ints w) { return _mm256_and_si256(w, _mm256_set1_epi8(15)); }
ZQ_FN ints with_sign(ints x, ints w) { return _mm256_sign_epi8(x, w); }
ZQ_FN ints flip_top(ints w) { return _mm256_xor_si256(w, _mm256_set1_epi8((char)128)); }
#endif

#if defined(__AVX2__)
#if defined(__AVX512VNNI__)
#define HAS_DOTS 1
#else
#define HAS_DOTS 0
#endif
enum { BYTES = 64 / HALVES };

ZQ_FN int32_t four(const int8_t *at) {
  int32_t word;
  memcpy(&word, at, 4);
  return word;
}

/* Add the products of 4 codes and 4 activations in every lane; `sum` has 32 bits with dpbusd and for 8-bit codes, else
 * 16. */
ZQ_FN ints dot(const int bits, ints sum, ints w, const int8_t *x) {
  ints all = OP(set1_epi32)(four(x));
#if HAS_DOTS
  (void)bits;
  return _mm512_dpbusd_epi32(sum, w, all);
#else
  if (bits == 4) return OP(add_epi16)(sum, OP(maddubs_epi16)(w, all));
  ints centred = flip_top(w);
  ints pairs = OP(maddubs_epi16)(OP(abs_epi8)(centred), with_sign(all, centred));
  return OP(add_epi32)(sum, OP(madd_epi16)(pairs, OP(set1_epi16)(1)));
#endif
}

/* The code that `dot` takes for zero. */
ZQ_FN int native_offset(int bits) { return !HAS_DOTS && bits == 8 ? 128 : 0; }

/* Integer sums of one block of 32 for 16 / HALVES rows and all tokens. */
ZQ_FN void block_sums(const int bits, const int tokens, const uint8_t *w, const int8_t *x, const int32_t *sums,
                      int32_t shift, ints *out) {
  const int is_narrow = !HAS_DOTS && bits == 4;
  for (int t = 0; t < tokens; t++) out[t] = OP(set1_epi32)(is_narrow ? 0 : shift * sums[t]);
#pragma GCC unroll 8
  for (int j = 0; j < bits; j++) {
    ints v = load_ints(w + 64 * j);
    if (bits == 8) {
      for (int t = 0; t < tokens; t++) out[t] = dot(8, out[t], v, x + 32 * t + 4 * j);
    } else {
      ints low = low_nibbles(v), high = low_nibbles(OP(srli_epi16)(v, 4));
      for (int t = 0; t < tokens; t++) {
        out[t] = dot(4, out[t], low, x + 32 * t + 8 * j);
        out[t] = dot(4, out[t], high, x + 32 * t + 8 * j + 4);
      }
    }
  }
  if (is_narrow)
    for (int t = 0; t < tokens; t++)
      out[t] = OP(add_epi32)(OP(madd_epi16)(out[t], OP(set1_epi16)(1)), OP(set1_epi32)(shift * sums[t]));
}

ZQ_FN void panel_as(const zq_matrix *m, const uint8_t *at, int64_t blocks, const zq_tile *tile,
                    float (*out)[ZQ_PANEL], const int bits, const int tokens, const int is_block, const int has_mins) {
  const int64_t each = is_block ? 1 : m->group / ZQ_BLOCK;
  const int64_t head = ZQ_PANEL * m->scale_bytes;
  const int8_t *x = tile->codes;
  const float *scales = tile->scales;
  const int32_t *sums = tile->sums;
  const int32_t shift = native_offset(bits) - m->offset;
  floats total[HALVES][ZQ_MOST_TOKENS];
  for (int h = 0; h < HALVES; h++)
    for (int t = 0; t < tokens; t++) total[h][t] = OP(setzero_ps)();
  for (int64_t g = 0; g < blocks; g += each) {
    floats part[HALVES][ZQ_MOST_TOKENS];
    float inputs[ZQ_MOST_TOKENS];
    const uint8_t *heads = at;
    at += head * (has_mins ? 2 : 1);
    for (int t = 0; t < tokens; t++) {
      inputs[t] = 0;
      for (int h = 0; h < HALVES; h++) part[h][t] = OP(setzero_ps)();
    }
    for (int64_t b = 0; b < each; b++) {
      for (int h = 0; h < HALVES; h++) {
        ints found[ZQ_MOST_TOKENS];
        block_sums(bits, tokens, at + BYTES * h, x, sums, shift, found);
        for (int t = 0; t < tokens; t++) {
          floats product = OP(mul_ps)(OP(cvtepi32_ps)(found[t]), OP(set1_ps)(scales[t]));
          part[h][t] = is_block ? product : OP(add_ps)(part[h][t], product);
        }
      }
      if (has_mins)
        for (int t = 0; t < tokens; t++) inputs[t] += (float)sums[t] * scales[t];
      at += 64 * bits;
      x += ZQ_BLOCK * tokens;
      scales += tokens;
      sums += tokens;
    }
    for (int h = 0; h < HALVES; h++) {
      floats steps = load_scales(heads, m->scale_bytes, h);
      for (int t = 0; t < tokens; t++) total[h][t] = OP(add_ps)(total[h][t], OP(mul_ps)(part[h][t], steps));
      if (!has_mins) continue;
      floats lows = load_scales(heads + head, m->scale_bytes, h);
      for (int t = 0; t < tokens; t++)
        total[h][t] = OP(add_ps)(total[h][t], OP(mul_ps)(OP(set1_ps)(inputs[t]), lows));
    }
  }
  for (int t = 0; t < tokens; t++)
    for (int h = 0; h < HALVES; h++) OP(storeu_ps)(out[t] + 16 / HALVES * h, total[h][t]);
}

#else /* portable */

ZQ_FN i16 block_sums(const int bits, const uint8_t *w, const int8_t *x, int32_t start) {
  int32_t sum[ZQ_PANEL];
  i16 all;
  for (int r = 0; r < ZQ_PANEL; r++) sum[r] = start;
  for (int j = 0; j < bits; j++)
    for (int r = 0; r < ZQ_PANEL; r++)
      for (int k = 0; k < 4; k++) {
        int code = w[64 * j + 4 * r + k];
        if (bits == 8)
          sum[r] += code * x[4 * j + k];
        else
          sum[r] += (code & 15) * x[8 * j + k] + (code >> 4) * x[8 * j + 4 + k];
      }
  memcpy(&all, sum, sizeof all);
  return all;
}

ZQ_FN v16 load_scales(const uint8_t *at, int bytes) {
  h16 narrow;
  if (bytes == 4) return load16((const float *)(const void *)at);
  memcpy(&narrow, at, sizeof narrow);
  return widen_halves(narrow);
}

ZQ_FN void panel_as(const zq_matrix *m, const uint8_t *at, int64_t blocks, const zq_tile *tile,
                    float (*out)[ZQ_PANEL], const int bits, const int tokens, const int is_block, const int has_mins) {
  const int64_t each = m->group / ZQ_BLOCK, head = ZQ_PANEL * m->scale_bytes;
  (void)is_block;
  for (int t = 0; t < tokens; t++) {
    const uint8_t *w = at;
    v16 total = splat(0);
    for (int64_t g = 0; g < blocks; g += each) {
      const uint8_t *heads = w;
      v16 part = splat(0);
      float inputs = 0;
      w += head * (has_mins ? 2 : 1);
      for (int64_t b = g; b < g + each; b++) {
        int64_t k = b * tokens + t;
        i16 sums = block_sums(bits, w, tile->codes + k * ZQ_BLOCK, -m->offset * tile->sums[k]);
        part += __builtin_convertvector(sums, v16) * tile->scales[k];
        inputs += (float)tile->sums[k] * tile->scales[k];
        w += 64 * bits;
      }
      total += part * load_scales(heads, m->scale_bytes);
      if (has_mins) total += splat(inputs) * load_scales(heads + head, m->scale_bytes);
    }
    memcpy(out[t], &total, sizeof total);
  }
}
#endif

#if defined(__AVX2__)
#define PANEL(bits, tokens, is_block, has_mins)                                                        \
  static __attribute__((noinline)) void panel_##bits##_##tokens##_##is_block##_##has_mins(             \
      const zq_matrix *m, const uint8_t *at, int64_t blocks, const zq_tile *tile, float(*out)[ZQ_PANEL]) { \
    panel_as(m, at, blocks, tile, out, bits, tokens, is_block, has_mins);                              \
  }
#define PANELS(tokens) \
  PANEL(4, tokens, 0, 0) PANEL(4, tokens, 0, 1) PANEL(4, tokens, 1, 0) PANEL(4, tokens, 1, 1) \
  PANEL(8, tokens, 0, 0) PANEL(8, tokens, 0, 1) PANEL(8, tokens, 1, 0) PANEL(8, tokens, 1, 1)
PANELS(1) PANELS(2) PANELS(4) PANELS(8)

typedef void (*panel_kernel)(const zq_matrix *, const uint8_t *, int64_t, const zq_tile *, float (*)[ZQ_PANEL]);
#define ROW(bits, tokens)                                                                             \
  {panel_##bits##_##tokens##_0_0, panel_##bits##_##tokens##_0_1, panel_##bits##_##tokens##_1_0,       \
   panel_##bits##_##tokens##_1_1}
static const panel_kernel kernels[2][4][4] = {{ROW(4, 1), ROW(4, 2), ROW(4, 4), ROW(4, 8)},
                                              {ROW(8, 1), ROW(8, 2), ROW(8, 4), ROW(8, 8)}};

ZQ_FN void choose_panel(const zq_matrix *m, const uint8_t *at, int64_t blocks, const zq_tile *tile,
                  float (*out)[ZQ_PANEL]) {
  int size = tile->tokens == 8 ? 3 : tile->tokens / 2;
  kernels[m->bits == 8][size][2 * (m->group == ZQ_BLOCK) + (m->has_mins != 0)](m, at, blocks, tile, out);
}
#else
static __attribute__((noinline)) void panel_4(const zq_matrix *m, const uint8_t *at, int64_t blocks,
                                              const zq_tile *tile, float (*out)[ZQ_PANEL]) {
  panel_as(m, at, blocks, tile, out, 4, tile->tokens, 0, m->has_mins);
}
static __attribute__((noinline)) void panel_8(const zq_matrix *m, const uint8_t *at, int64_t blocks,
                                              const zq_tile *tile, float (*out)[ZQ_PANEL]) {
  panel_as(m, at, blocks, tile, out, 8, tile->tokens, 0, m->has_mins);
}
ZQ_FN void choose_panel(const zq_matrix *m, const uint8_t *at, int64_t blocks, const zq_tile *tile,
                        float (*out)[ZQ_PANEL]) {
  (m->bits == 4 ? panel_4 : panel_8)(m, at, blocks, tile, out);
}
#endif

static void panel(const zq_matrix *m, const uint8_t *at, int64_t blocks, const zq_tile *tile,
                  float (*out)[ZQ_PANEL]) {
  choose_panel(m, at, blocks, tile, out);
}

/* Weights in rows of floats: element k goes to sum k mod 64, the sums are added by halves. */

#define SUMS(t) v16 s##t##0 = splat(0), s##t##1 = splat(0), s##t##2 = splat(0), s##t##3 = splat(0);
#define ADD(t, q) s##t##q += wide * load16(x + t * stride + k + 16 * q);
#define TOTAL(t) out[t] = sum_lanes((s##t##0 + s##t##2) + (s##t##1 + s##t##3));
#define QUARTER(q, adds)                                \
  {                                                     \
    v16 wide = load_as(dtype, at + 16 * q * width);     \
    adds                                                \
  }
/* Named sums: arrays of them would not stay in registers. */
#define DENSE(tokens, sums, adds, totals)                                                                   \
  ZQ_FN void dense_##tokens(const int dtype, const char *w, const float *x, int64_t columns, int64_t stride, \
                            float *out) {                                                                   \
    const int width = dtype == 0 ? 4 : 2;                                                                   \
    const int64_t whole = columns / 64 * 64;                                                                \
    char tail[256] __attribute__((aligned(64))) = {0};                                                      \
    (void)stride;                                                                                           \
    memcpy(tail, w + whole * width, (size_t)((columns - whole) * width));                                   \
    sums for (int64_t k = 0; k < columns; k += 64) {                                                        \
      const char *at = k < whole ? w + k * width : tail;                                                    \
      QUARTER(0, adds(0)) QUARTER(1, adds(1)) QUARTER(2, adds(2)) QUARTER(3, adds(3))                       \
    }                                                                                                       \
    totals                                                                                                  \
  }
#define ADD1(q) ADD(0, q)
#define ADD2(q) ADD1(q) ADD(1, q)
#define ADD4(q) ADD2(q) ADD(2, q) ADD(3, q)
DENSE(1, SUMS(0), ADD1, TOTAL(0))
DENSE(2, SUMS(0) SUMS(1), ADD2, TOTAL(0) TOTAL(1))
DENSE(4, SUMS(0) SUMS(1) SUMS(2) SUMS(3), ADD4, TOTAL(0) TOTAL(1) TOTAL(2) TOTAL(3))

#define DENSE_OF(tokens)                                                            \
  if (dtype == 0)                                                                   \
    dense_##tokens(0, row, x, columns, stride, out);                                \
  else                                                                              \
    dense_##tokens(1, row, x, columns, stride, out);

static void dense(int dtype, const void *row, const float *x, int64_t columns, int64_t stride, int tokens,
                  float *out) {
  if (tokens == 4) {
    DENSE_OF(4)
  } else if (tokens == 2) {
    DENSE_OF(2)
  } else {
    DENSE_OF(1)
  }
}

/* Activations --------------------------------------------------------------------------------------------- */

#define TINY_BITS 0x0d800000 /* 2^-100 */

/* Bits of the largest magnitude of 32n elements; those of NaN are the largest. */
ZQ_FN int32_t peak_bits(const float *x, int64_t count) {
  i16 most = {0};
  for (int64_t k = 0; k < count; k += 16) {
    i16 bits = (i16)load16(x + k) & 0x7fffffff, more = bits > most;
    most = (more & bits) | (~more & most);
  }
#define LARGER(...)                                            \
  {                                                            \
    i16 other = __builtin_shuffle(most, (i16){__VA_ARGS__});   \
    i16 more = other > most;                                   \
    most = (more & other) | (~more & most);                    \
  }
  LARGER(8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7)
  LARGER(4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3)
  LARGER(2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1)
  return most[0] > most[1] ? most[0] : most[1];
}

ZQ_FN float as_float(int32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

static void activations(const float *x, int64_t columns, int64_t blocks, int8_t *codes, float *scales, int32_t *sums,
                        int64_t stride) {
  for (int64_t b = 0; b < blocks; b++) {
    const int64_t k = b * ZQ_BLOCK;
    float rest[ZQ_BLOCK] = {0};
    const float *at = k < columns ? x + k : rest;
    int8_t *out = codes + b * stride * ZQ_BLOCK;
    if (columns > k && columns - k < ZQ_BLOCK) at = memcpy(rest, at, (size_t)(columns - k) * 4);
    int32_t peak = peak_bits(at, ZQ_BLOCK), sum = 0;
    float inverse = peak >= TINY_BITS && peak < 0x7f800000 ? 127.0f / as_float(peak) : 0.0f;
    scales[b * stride] = peak >= 0x7f800000 ? __builtin_nanf("") : peak >= TINY_BITS ? as_float(peak) / 127.0f : 0.0f;
    if (peak >= 0x7f800000) at = memset(rest, 0, sizeof rest);
    i16 all = {0};
    for (int h = 0; h < ZQ_BLOCK; h += 16) {
      i16 code = __builtin_convertvector(nearest(load16(at + h) * inverse), i16);
      c16 narrow = __builtin_convertvector(code, c16);
      memcpy(out + h, &narrow, sizeof narrow);
      all += code;
    }
    for (int l = 0; l < 16; l++) sum += all[l];
    sums[b * stride] = sum;
  }
}

/* Quantization of weights --------------------------------------------------------------------------------- */

enum { SEARCH, AMAX, MINMAX, GGML };

ZQ_FN v16 clamp(v16 x, float low, float high) {
#if defined(__AVX512F__)
  return (v16)_mm512_min_ps(_mm512_max_ps((__m512)x, _mm512_set1_ps(low)), _mm512_set1_ps(high));
#elif defined(__AVX2__)
  __m256 first, second;
  memcpy(&first, &x, 32), memcpy(&second, (char *)&x + 32, 32);
  first = _mm256_min_ps(_mm256_max_ps(first, _mm256_set1_ps(low)), _mm256_set1_ps(high));
  second = _mm256_min_ps(_mm256_max_ps(second, _mm256_set1_ps(low)), _mm256_set1_ps(high));
  memcpy(&x, &first, 32), memcpy((char *)&x + 32, &second, 32);
  return x;
#else
  x = pick(x < low, splat(low), x);
  return pick(x > high, splat(high), x);
#endif
}

/* The first element of the largest magnitude. */
ZQ_FN float signed_peak(const float *x, int64_t count, int32_t peak) {
  i16 signs = {0};
  for (int64_t k = 0; k < count; k += 16) {
    v16 value = load16(x + k);
    signs |= ((value == as_float(peak)) & 1) | ((value == -as_float(peak)) & 2);
  }
  signs |= __builtin_shuffle(signs, (i16){8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7});
  signs |= __builtin_shuffle(signs, (i16){4, 5, 6, 7, 0, 1, 2, 3, 4, 5, 6, 7, 0, 1, 2, 3});
  signs |= __builtin_shuffle(signs, (i16){2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1, 2, 3, 0, 1});
  int found = signs[0] | signs[1];
  if (found != 3) return found == 2 ? -as_float(peak) : as_float(peak);
  for (int64_t k = 0; k < count; k++)
    if (x[k] == as_float(peak) || x[k] == -as_float(peak)) return x[k];
  return 0;
}

#define POINTS 15
#define STEPS(top)                                                                                         \
  {STEP(top, 0), STEP(top, 1), STEP(top, 2), STEP(top, 3), STEP(top, 4), STEP(top, 5), STEP(top, 6),       \
   STEP(top, 7), STEP(top, 8), STEP(top, 9), STEP(top, 10), STEP(top, 11), STEP(top, 12), STEP(top, 13),   \
   STEP(top, 14), 0}
#define STEP(top, point) (float)(top##.0 - 0.7 + 0.15 * (point))

/* See [Note: scale search] in encode.py: sums in the order of its `fold`, of all points before any is judged. */
ZQ_FN float search_as(const float *x, const int64_t count, float peak, const float top, float *inverse) {
  static const float steps[2][16] = {STEPS(8), STEPS(128)};
  float tried[16], dots[16] = {0}, squares[16] = {0}, scale = 0, best = -1;
  v16 inverses = -load16(steps[top == 128]) / peak;
  memcpy(tried, &inverses, sizeof tried);
  for (int point = 0; point < POINTS; point++) {
    v16 dot0 = splat(0), dot1 = dot0, square0 = dot0, square1 = dot0;
    for (int64_t l = 0; l < count; l += 32) {
      v16 low = load16(x + l), high = load16(x + l + 16);
      v16 code0 = clamp(nearest(low * tried[point]), -top, top - 1);
      v16 code1 = clamp(nearest(high * tried[point]), -top, top - 1);
      dot0 += code0 * low, dot1 += code1 * high;
      square0 += code0 * code0, square1 += code1 * code1;
    }
    v16 a = dot0 + dot1, b = square0 + square1;
    v16 both = __builtin_shuffle(a, b, (i16){0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23}) +
               __builtin_shuffle(a, b, (i16){8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31});
    both += __builtin_shuffle(both, (i16){4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11});
    both += __builtin_shuffle(both, (i16){2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13});
    both += __builtin_shuffle(both, (i16){1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14});
    dots[point] = both[0];
    squares[point] = both[8];
  }
  v16 all = load16(dots);
  float scores[16];
  all = all * all / load16(squares);
  memcpy(scores, &all, sizeof scores);
  int found = 0;
  for (int point = 0; point < POINTS; point++) { /* 0 / 0 is NaN, and not larger */
    int is_better = scores[point] > best;
    best = is_better ? scores[point] : best;
    found = is_better ? point : found;
  }
  if (best >= 0) scale = dots[found] / squares[found], *inverse = tried[found];
  return scale;
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
    v16 low = load16(x), high = low;
    float most = x[0];
    for (int64_t k = 16; k < job->group; k += 16) {
      v16 v = load16(x + k);
      low = pick(v < low, v, low);
      high = pick(v > high, v, high);
    }
    a.min = low[0], most = high[0];
    for (int l = 1; l < 16; l++) a.min = low[l] < a.min ? low[l] : a.min, most = high[l] > most ? high[l] : most;
    a.scale = (most - a.min) / (2 * top - 1);
    a.inverse = most - a.min < as_float(TINY_BITS) ? 0 : (2 * top - 1) / (most - a.min);
  } else {
    a.scale = job->bits == 8 ? as_float(bits) / 127 : signed_peak(x, job->group, bits) / -8;
    a.inverse = a.scale == 0 ? 0 : 1 / a.scale;
  }
  return a;
}

/* Centred codes of 16 elements, as floats. */
ZQ_FN v16 codes_of(const zq_quantization *job, const affine *a, const float *x) {
  const float top = job->bits == 8 ? 128 : 8;
  v16 scaled = (load16(x) - a->min) * a->inverse;
  if (job->rule == MINMAX) return clamp(nearest(scaled), 0, 2 * top - 1);
  scaled = load16(x) * a->inverse;
  if (job->rule == SEARCH) return clamp(nearest(scaled), -top, top - 1);
  if (job->rule == AMAX) return clamp(nearest(scaled), 1 - top, top - 1);
  if (job->bits == 8) { /* halves away from zero */
    v16 whole = __builtin_convertvector(__builtin_convertvector(scaled, i16), v16), rest = scaled - whole;
    return whole + pick(rest >= 0.5f, splat(1), splat(0)) - pick(rest <= -0.5f, splat(1), splat(0));
  }
  v16 whole = __builtin_convertvector(__builtin_convertvector(scaled + 8.5f, i16), v16);
  return pick(whole > 15.0f, splat(15), whole) - 8.0f;
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
  typedef uint8_t b16 __attribute__((vector_size(16)));
  for (int64_t k = 0; k < job->group; k += ZQ_BLOCK) {
    i16 low = __builtin_convertvector(codes_of(job, a, x + k), i16) + offset;
    i16 high = __builtin_convertvector(codes_of(job, a, x + k + 16), i16) + offset;
    if (job->bits == 4) {
      b16 both = __builtin_convertvector(low | high << 4, b16);
      memcpy(out + k / 2, &both, sizeof both);
    } else {
      b16 first = __builtin_convertvector(low, b16), second = __builtin_convertvector(high, b16);
      memcpy(out + k, &first, sizeof first);
      memcpy(out + k + 16, &second, sizeof second);
    }
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

/* Interleave the codes of up to 16 rows: see quant/panels.py. */
static void pack(const uint8_t *codes, uint8_t *vectors, int64_t row_bytes, int64_t rows, int64_t blocks,
                 int64_t block_stride, int bits, int is_signed) {
  for (int64_t b = 0; b < blocks; b++, vectors += block_stride)
    for (int64_t r = 0; r < ZQ_PANEL; r++) {
      uint8_t lanes[ZQ_BLOCK] = {0}, nibbles[ZQ_BLOCK];
      if (r < rows && bits == 8) {
        const uint8_t *at = codes + r * row_bytes + b * ZQ_BLOCK;
        for (int k = 0; k < ZQ_BLOCK; k++) lanes[k] = at[k] ^ (is_signed ? 128 : 0);
      } else if (r < rows) {
        const uint8_t *at = codes + r * row_bytes + b * ZQ_BLOCK / 2;
        for (int k = 0; k < 16; k++) nibbles[k] = at[k] & 15, nibbles[k + 16] = at[k] >> 4;
        for (int j = 0; j < 4; j++)
          for (int k = 0; k < 4; k++) lanes[4 * j + k] = nibbles[8 * j + k] | nibbles[8 * j + 4 + k] << 4;
      }
      for (int j = 0; j < bits; j++) memcpy(vectors + 64 * j + 4 * r, lanes + 4 * j, 4);
    }
}

/* Squares: those of float32 and narrower values are exact in double, so a fused product gives the same bits. */

ZQ_FN d8 add_square(d8 sum, v8 x) {
  d8 wide = __builtin_convertvector(x, d8);
#if defined(__AVX512F__)
  return (d8)_mm512_fmadd_pd((__m512d)wide, (__m512d)wide, (__m512d)sum);
#elif defined(__AVX2__)
  typedef double d4 __attribute__((vector_size(32)));
  d4 low, high, add_low, add_high;
  memcpy(&low, &wide, 32), memcpy(&high, (char *)&wide + 32, 32);
  memcpy(&add_low, &sum, 32), memcpy(&add_high, (char *)&sum + 32, 32);
  add_low = (d4)_mm256_fmadd_pd((__m256d)low, (__m256d)low, (__m256d)add_low);
  add_high = (d4)_mm256_fmadd_pd((__m256d)high, (__m256d)high, (__m256d)add_high);
  memcpy(&sum, &add_low, 32), memcpy((char *)&sum + 32, &add_high, 32);
  return sum;
#else
  return sum + wide * wide;
#endif
}

ZQ_FN double squares_as(const int dtype, const char *at, int64_t numel) {
  d8 sums[4] = {{0}};
  const int width = dtype == 0 ? 4 : 2;
  char tail[128] __attribute__((aligned(64))) = {0};
  for (int64_t k = 0; k < numel; k += 32, at += 32 * width) {
    if (numel - k < 32) at = memcpy(tail, at, (size_t)((numel - k) * width));
    for (int q = 0; q < 2; q++) {
      v16 x = load_as(dtype, at + 16 * q * width);
      v8 low, high;
      memcpy(&low, &x, 32), memcpy(&high, (char *)&x + 32, 32);
      sums[2 * q] = add_square(sums[2 * q], low);
      sums[2 * q + 1] = add_square(sums[2 * q + 1], high);
    }
  }
  d8 all = (sums[0] + sums[2]) + (sums[1] + sums[3]);
  return ((all[0] + all[4]) + (all[2] + all[6])) + ((all[1] + all[5]) + (all[3] + all[7]));
}

static double squares(int dtype, const void *row, int64_t numel) {
  if (dtype == 0) return squares_as(0, row, numel);
  return dtype == 1 ? squares_as(1, row, numel) : squares_as(2, row, numel);
}

const zq_kernels JOIN(zq_kernels, ZQ_SUFFIX) = {panel, dense, activations, quantize, pack, squares};
