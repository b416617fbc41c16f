/* What a decoder computes between its products, for one instruction set: norms, activations, attention.
 *
 * Every sum has one order, in lanes of 16 and without fused products, so all levels give the same bits.
 *
 * Attention of a run: keys and values are widened in tiles of 16 positions, each once for all query heads of the group.
 * Scores of the run, its maximum and its exponentials come before the values, so nothing is rescaled within a run;
 * runs are merged by their maxima (Dao et al. 2023, "flash decoding").
 */
#if defined(__AVX2__)
#include <immintrin.h>
#endif
#include "zq_layers.h"
#include "zq_math.h"

#if !defined(__AVX512VNNI__) /* that level has the functions of AVX-512: zq_decode.c */

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)

/* Loads and stores of up to 16 elements: the others are zero, or stay. */
ZQ_FN v16 load_part(const float *at, int64_t left) {
  float values[16] = {0};
  if (left >= 16) return load16(at);
  memcpy(values, at, (size_t)left * sizeof *at);
  return load16(values);
}
ZQ_FN void store16(float *at, v16 x) { memcpy(at, &x, sizeof x); }
ZQ_FN void store_part(float *at, v16 x, int64_t left) { memcpy(at, &x, left >= 16 ? sizeof x : (size_t)left * sizeof *at); }
ZQ_FN vec vec_part(const float *at, int64_t left) {
  float values[LANES] = {0};
  if (left >= LANES) return load_vec(at);
  memcpy(values, at, (size_t)left * sizeof *at);
  return load_vec(values);
}
ZQ_FN void put_part(float *at, vec x, int64_t left) {
  memcpy(at, &x, left >= LANES ? sizeof x : (size_t)left * sizeof *at);
}
ZQ_FN v16 load_wide(int dtype, const char *at, int64_t left) {
  const int width = dtype == 0 ? 4 : 2;
  char tail[64] __attribute__((aligned(64))) = {0};
  if (left < 16) at = memcpy(tail, at, (size_t)(left * width));
  return dtype == 0 ? load_as(0, at) : dtype == 1 ? load_as(1, at) : load_as(2, at);
}

/* Lanes: gcc shuffles vectors that are wider than the registers element by element, so narrower levels use quarters. */

typedef struct {
  v4 at[4];
} quarters;

/* Lanes l + l + 8, then + 4: the order of sum_lanes. */
ZQ_FN v4 quarter_sum(v16 x) {
  quarters q;
  memcpy(&q, &x, sizeof q);
  return (q.at[0] + q.at[2]) + (q.at[1] + q.at[3]);
}

ZQ_FN float lane_sum(v16 x) {
  v4 s = quarter_sum(x);
  return (s[0] + s[2]) + (s[1] + s[3]);
}

/* Products with rows of floats --------------------------------------------------------------------------- */

/* Element k goes to sum k mod 64; the sums are added by halves, as in zq_kern.c.
 *
 * One token: a row after the other.  More: a chunk of a few rows is widened once, in the order of memory, and then
 * multiplied by few tokens at a time, so that all sums of rows x tokens stay in registers. */
#if defined(__AVX512F__)
enum { TILE_ROWS = 4, TILE_TOKENS = 4 };
#else
enum { TILE_ROWS = 4, TILE_TOKENS = 2 };
#endif
enum { CHUNK = 256 };

ZQ_FN v16 quarter_of(const int dtype, const char *row, int64_t k, int64_t columns) {
  const int width = dtype == 0 ? 4 : 2;
  if (columns - k >= 16) return load_as(dtype, row + k * width);
  char tail[64] __attribute__((aligned(64))) = {0};
  if (columns > k) memcpy(tail, row + k * width, (size_t)((columns - k) * width));
  return load_as(dtype, tail);
}

/* Add the products of 64 elements to sums[quarter][part]. */
ZQ_FN void add_products(const int dtype, const char *row, const float *x, vec (*sums)[PARTS]) {
#pragma GCC unroll 4
  for (int q = 0; q < 4; q++)
#pragma GCC unroll 4
    for (int p = 0; p < PARTS; p++) {
      const int k = 16 * q + LANES * p;
      sums[q][p] += load_plain(dtype, row + k * (dtype == 0 ? 4 : 2)) * load_vec(x + k);
    }
}

ZQ_FN float one_row(const int dtype, const char *row, int64_t columns, const float *x) {
  const int width = dtype == 0 ? 4 : 2;
  const int64_t whole = columns / 64 * 64;
  vec sums[4][PARTS] = {{{0}}};
  float lanes[16];
  v16 total;
  for (int64_t k = 0; k < whole; k += 64) add_products(dtype, row + k * width, x + k, sums);
  if (whole < columns) {
    char tail[256] __attribute__((aligned(64))) = {0};
    memcpy(tail, row + whole * width, (size_t)((columns - whole) * width));
    add_products(dtype, tail, x + whole, sums);
  }
#pragma GCC unroll 4
  for (int p = 0; p < PARTS; p++) store_vec(lanes + LANES * p, (sums[0][p] + sums[2][p]) + (sums[1][p] + sums[3][p]));
  memcpy(&total, lanes, sizeof total);
  return lane_sum(total);
}

ZQ_FN void one_token(const int dtype, const char *weights, int64_t columns, int64_t rows, const float *x, float *out) {
  for (int64_t r = 0; r < rows; r++)
    out[r] = one_row(dtype, weights + r * columns * (dtype == 0 ? 4 : 2), columns, x);
}

typedef float tile_sums[TILE_ROWS][4][16]; /* of one token: by row and quarter */

/* Add a chunk's products of all rows of a tile, `apart` floats from each other, and `tokens` tokens. */
ZQ_FN void add_chunk(const int tokens, const float *wide, int64_t apart, const float *x, int64_t stride, int64_t length,
                     tile_sums *sums) {
  for (int at = 0; at < 64; at += LANES) { /* a part of a quarter */
    vec all[TILE_TOKENS][TILE_ROWS];
#pragma GCC unroll 4
    for (int t = 0; t < tokens; t++)
#pragma GCC unroll 4
      for (int r = 0; r < TILE_ROWS; r++) all[t][r] = load_vec((const float *)sums[t][r] + at);
    for (int64_t k = at; k < length; k += 64) {
      vec w[TILE_ROWS];
#pragma GCC unroll 4
      for (int r = 0; r < TILE_ROWS; r++) w[r] = load_vec(wide + r * apart + k);
#pragma GCC unroll 4
      for (int t = 0; t < tokens; t++) {
        const vec value = load_vec(x + t * stride + k);
#pragma GCC unroll 4
        for (int r = 0; r < TILE_ROWS; r++) all[t][r] += w[r] * value;
      }
    }
#pragma GCC unroll 4
    for (int t = 0; t < tokens; t++)
#pragma GCC unroll 4
      for (int r = 0; r < TILE_ROWS; r++) store_vec((float *)sums[t][r] + at, all[t][r]);
  }
}

#define ADD_CHUNK(tokens)                                                                                  \
  static __attribute__((noinline)) void add_chunk_##tokens(const float *wide, int64_t apart, const float *x, \
                                                           int64_t stride, int64_t length, tile_sums *sums) { \
    add_chunk(tokens, wide, apart, x, stride, length, sums);                                               \
  }
#if defined(__AVX512F__)
ADD_CHUNK(4)
#endif
ADD_CHUNK(2)
ADD_CHUNK(1)

/* Add a tile of tokens: TILE_TOKENS, and for the rest 2, 1.  Returns their number. */
static int64_t add_tokens(const float *wide, int64_t apart, const float *x, int64_t stride, int64_t length,
                          int64_t tokens, tile_sums *sums) {
#if defined(__AVX512F__)
  if (tokens >= 4) return add_chunk_4(wide, apart, x, stride, length, sums), 4;
#endif
  if (tokens >= 2) return add_chunk_2(wide, apart, x, stride, length, sums), 2;
  return add_chunk_1(wide, apart, x, stride, length, sums), 1;
}

/* `length` elements of a row from `first` on, with zeros after its end. */
static void widen_chunk(int dtype, const char *row, int64_t first, int64_t columns, int64_t length, float *out) {
  if (dtype == 0)
    for (int64_t k = 0; k < length; k += 16) store16(out + k, quarter_of(0, row, first + k, columns));
  else if (dtype == 1)
    for (int64_t k = 0; k < length; k += 16) store16(out + k, quarter_of(1, row, first + k, columns));
  else
    for (int64_t k = 0; k < length; k += 16) store16(out + k, quarter_of(2, row, first + k, columns));
}

/* Ask for the chunk after this one, or the first of the next tile: the processor follows one stream, not four. */
static void expect_chunk(const char *weights, int64_t row_bytes, int64_t rows, int64_t columns, int64_t first,
                         int64_t width) {
  const int64_t from = first < columns ? first * width : TILE_ROWS * row_bytes;
  const int64_t bytes = first < columns && columns - first < CHUNK ? (columns - first) * width : CHUNK * width;
  for (int64_t r = 0; r < rows; r++)
    for (int64_t k = 0; k < bytes; k += 64) __builtin_prefetch(weights + r * row_bytes + from + k, 0, 3);
}

static void multiply_tile(int dtype, const char *weights, int64_t columns, int64_t rows, const float *x, int64_t stride,
                          int64_t tokens, float (*out)[ZQ_WIDE]) {
  const int64_t row_bytes = columns * (dtype == 0 ? 4 : 2);
  float wide[TILE_ROWS * CHUNK] __attribute__((aligned(64)));
  tile_sums sums[16];
  memset(sums, 0, (size_t)tokens * sizeof *sums);
  for (int64_t first = 0; first < columns; first += CHUNK) {
    const int64_t left = columns - first, length = left < CHUNK ? (left + 63) / 64 * 64 : CHUNK;
    const int is_wide = dtype == 0 && rows == TILE_ROWS && length <= left;
    const float *from = is_wide ? (const float *)weights + first : wide;
    expect_chunk(weights, row_bytes, rows, columns, first + CHUNK, dtype == 0 ? 4 : 2);
    for (int64_t r = 0; r < TILE_ROWS && !is_wide; r++) /* a missing row counts for nothing */
      widen_chunk(dtype, weights + (r < rows ? r : 0) * row_bytes, first, columns, length, wide + r * CHUNK);
    for (int64_t t = 0; t < tokens;)
      t += add_tokens(from, is_wide ? columns : CHUNK, x + t * stride + first, stride, length, tokens - t, sums + t);
  }
  for (int64_t t = 0; t < tokens; t++)
    for (int64_t r = 0; r < rows; r++)
      out[t][r] = lane_sum((load16(sums[t][r][0]) + load16(sums[t][r][2])) +
                           (load16(sums[t][r][1]) + load16(sums[t][r][3])));
}

static void plain(int dtype, const char *weights, int64_t columns, int64_t rows, const float *x, int64_t stride,
                  int64_t tokens, float (*out)[ZQ_WIDE]) {
  if (tokens == 1 && dtype < 2) {
    if (dtype == 0)
      one_token(0, weights, columns, rows, x, out[0]);
    else
      one_token(1, weights, columns, rows, x, out[0]);
    return;
  }
  for (int64_t first = 0; first < rows; first += TILE_ROWS) {
    float values[16][ZQ_WIDE];
    const int64_t count = rows - first < TILE_ROWS ? rows - first : TILE_ROWS;
    multiply_tile(dtype, weights + first * columns * (dtype == 0 ? 4 : 2), columns, count, x, stride, tokens, values);
    for (int64_t t = 0; t < tokens; t++) memcpy(out[t] + first, values[t], (size_t)count * sizeof **out);
  }
}

/* Products with columns of floats: weights that lie as (columns, rows).
 *
 * The sum of row r is in lane r: element k goes to sum k mod 4, and the sums are added by halves.  A few tokens at a
 * time, so that their sums stay in registers; a column is widened once for them. */
enum { COLUMN_TOKENS = 4 };

ZQ_FN void add_columns(const int dtype, const int tokens, const char *weights, int64_t columns, int64_t stride_rows,
                       int64_t rows, const float *x, int64_t stride, float (*out)[ZQ_WIDE]) {
  const int64_t width = dtype == 0 ? 4 : 2;
  for (int64_t first = 0; first < rows; first += 16) {
    const int64_t left = rows - first;
    float sums[COLUMN_TOKENS][4][16] __attribute__((aligned(64))) = {{{0}}};
    for (int64_t k = 0; k < columns; k++) {
      const v16 w = load_wide(dtype, weights + (k * stride_rows + first) * width, left);
#pragma GCC unroll 4
      for (int t = 0; t < tokens; t++) store16(sums[t][k & 3], load16(sums[t][k & 3]) + w * x[t * stride + k]);
    }
    for (int t = 0; t < tokens; t++)
      store_part(out[t] + first, (load16(sums[t][0]) + load16(sums[t][2])) + (load16(sums[t][1]) + load16(sums[t][3])),
                 left);
  }
}

#define ADD_COLUMNS(dtype)                                                                                           \
  static void add_columns_##dtype(int tokens, const char *weights, int64_t columns, int64_t stride_rows, int64_t rows, \
                                  const float *x, int64_t stride, float (*out)[ZQ_WIDE]) {                           \
    if (tokens == 1)                                                                                                 \
      add_columns(dtype, 1, weights, columns, stride_rows, rows, x, stride, out);                                    \
    else                                                                                                             \
      add_columns(dtype, tokens, weights, columns, stride_rows, rows, x, stride, out);                               \
  }
ADD_COLUMNS(0)
ADD_COLUMNS(1)
ADD_COLUMNS(2)

static void transposed(int dtype, const char *weights, int64_t columns, int64_t stride_rows, int64_t rows,
                       const float *x, int64_t stride, int64_t tokens, float (*out)[ZQ_WIDE]) {
  for (int64_t t = 0; t < tokens; t += COLUMN_TOKENS) {
    const int count = tokens - t < COLUMN_TOKENS ? (int)(tokens - t) : COLUMN_TOKENS;
    (dtype == 0 ? add_columns_0 : dtype == 1 ? add_columns_1 : add_columns_2)(count, weights, columns, stride_rows, rows,
                                                                              x + t * stride, stride, out + t);
  }
}

/* Norms --------------------------------------------------------------------------------------------------- */

/* Sum of (x - mean)^power, power 1 or 2: element k goes to sum k mod 32. */
ZQ_FN float sum_of(const float *x, int64_t size, const int power, float mean) {
  v16 even = splat(0), odd = splat(0);
  for (int64_t k = 0; k < size; k += 32) {
    v16 low = load_part(x + k, size - k), high = splat(0);
    if (size - k > 16) high = load_part(x + k + 16, size - k - 16);
    if (power == 2) {
      low -= mean, high -= mean;
      if (size - k < 32) { /* the padding is not x */
        float mask[32] = {0};
        for (int64_t l = 0; l < size - k; l++) mask[l] = 1;
        low *= load16(mask), high *= load16(mask + 16);
      }
      low *= low, high *= high;
    }
    even += low, odd += high;
  }
  return lane_sum(even + odd);
}

typedef struct {
  float mean, scale;
} moments;

static __attribute__((noinline)) moments moments_of(const zq_norm *norm, const float *x) {
  moments m = {0, 0};
  if (norm->is_centered) m.mean = sum_of(x, norm->size, 1, 0) / (float)norm->size;
  m.scale = 1.0f / __builtin_sqrtf(sum_of(x, norm->size, 2, m.mean) / (float)norm->size + norm->eps);
  return m;
}

/* Elements [first, first + size) of a normalized row; x and out are at `first`. */
static __attribute__((noinline)) void scale_by(const zq_norm *norm, moments m, const float *x, float *out,
                                               int64_t first, int64_t size) {
  const int64_t weight_width = norm->weight_dtype == 0 ? 4 : 2, bias_width = norm->bias_dtype == 0 ? 4 : 2;
  for (int64_t k = 0; k < size; k += 16) {
    v16 value = (load_part(x + k, size - k) - m.mean) * m.scale;
    if (norm->weight)
      value *= load_wide(norm->weight_dtype, (const char *)norm->weight + (first + k) * weight_width, size - k) + norm->offset;
    if (norm->bias) value += load_wide(norm->bias_dtype, (const char *)norm->bias + (first + k) * bias_width, size - k);
    store_part(out + k, value, size - k);
  }
}

static void norm(const zq_norm *n, const float *x, float *out) { scale_by(n, moments_of(n, x), x, out, 0, n->size); }

/* Elements ------------------------------------------------------------------------------------------------ */

static void add(float *x, const float *values, float factor, int64_t numel) {
  for (int64_t k = 0; k < numel; k += 16)
    store_part(x + k, load_part(x + k, numel - k) + factor * load_part(values + k, numel - k), numel - k);
}

static void bias(float *x, int dtype, const void *values, int64_t numel) {
  const int64_t width = dtype == 0 ? 4 : 2;
  for (int64_t k = 0; k < numel; k += 16)
    store_part(x + k, load_part(x + k, numel - k) + load_wide(dtype, (const char *)values + k * width, numel - k), numel - k);
}

static void activate(int act, const float *x, const float *factors, float *out, int64_t numel) {
  for (int64_t k = 0; k < numel; k += LANES) {
    vec value = act_of(act, vec_part(x + k, numel - k));
    if (factors) value *= vec_part(factors + k, numel - k);
    put_part(out + k, value, numel - k);
  }
}

static void cap(float *x, float factor, float softcap, int64_t numel) {
  for (int64_t k = 0; k < numel; k += LANES) {
    vec value = vec_part(x + k, numel - k) * factor;
    if (softcap != 0) value = tanh_of(value / softcap) * softcap;
    put_part(x + k, value, numel - k);
  }
}

/* Heads --------------------------------------------------------------------------------------------------- */

/* Rotate the first features of a head in place. */
static void rotate(const zq_block *b, int64_t position, float *x) {
  const int64_t half = b->rotary_size / 2, step = b->is_neighbours ? 2 : 1, apart = b->is_neighbours ? 1 : half;
  const float *cos = b->cos + position * half, *sin = b->sin + position * half;
  for (int64_t k = 0; k < half; k++) {
    float one = x[step * k], two = x[step * k + apart];
    x[step * k] = one * cos[k] - two * sin[k];
    x[step * k + apart] = two * cos[k] + one * sin[k];
  }
}

/* Copy head `index` of queries or keys, `from` being its first element, normalized and rotated; `m` is of the whole row
 * if the norm is over all heads. */
static void take_head(const zq_block *b, const zq_norm *n, const moments *whole, const float *from, int64_t index,
                      int64_t position, float *out) {
  const int64_t size = b->head_size, padded = ZQ_PADDED(size);
  memset(out + size, 0, (size_t)(padded - size) * sizeof *out);
  if (!n->size)
    memcpy(out, from, (size_t)size * sizeof *out);
  else if (n->size == size)
    scale_by(n, moments_of(n, from), from, out, 0, size);
  else
    scale_by(n, *whole, from, out, index * size, size);
  if (b->rotary_size) rotate(b, position, out);
}

/* Round to bfloat16, to nearest, halves to even. */
ZQ_FN uint16_t narrow_bfloat(float x) {
  uint32_t bits;
  memcpy(&bits, &x, 4);
  if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40u);
  return (uint16_t)((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

/* Codes of 8 bits with one scale, as activations.py rounds a block. */
static float narrow_codes(const float *x, int64_t size, int8_t *out) {
  uint32_t peak = 0, bits;
  float largest;
  for (int64_t k = 0; k < size; k++) {
    memcpy(&bits, x + k, 4);
    bits &= 0x7fffffffu;
    peak = bits > peak ? bits : peak;
  }
  memcpy(&largest, &peak, 4);
  const int is_finite = peak < 0x7f800000u, is_tiny = peak < 0x0d800000u;
  const float inverse = is_finite && !is_tiny ? 127.0f / largest : 0;
  for (int64_t k = 0; k < size; k++) {
    float code = is_finite ? (x[k] * inverse + 12582912.0f) - 12582912.0f : 0;
    out[k] = (int8_t)code;
  }
  return !is_finite ? __builtin_nanf("") : is_tiny ? 0 : largest / 127.0f;
}

/* Write a head into the cache; `at` counts positions of all heads and slots. */
static void write_head(const zq_block *b, void *cache, float *scales, int64_t at, const float *x) {
  const int64_t size = b->head_size;
  if (b->cache_dtype == 0)
    memcpy((float *)cache + at * size, x, (size_t)size * sizeof *x);
  else if (b->cache_dtype == 3)
    scales[at] = narrow_codes(x, size, (int8_t *)cache + at * size);
  else
    for (int64_t k = 0; k < size; k++)
      ((uint16_t *)cache)[at * size + k] = b->cache_dtype == 1 ? narrow_bfloat(x[k]) : narrow_half(x[k]);
}

/* Attention ----------------------------------------------------------------------------------------------- */

/* Rows of a tile as float32: 16 positions, those beyond `count` zero. */
typedef struct {
  const float *rows;
  int64_t stride;
} tile;

/* gcc converts vectors of bytes element by element. */
ZQ_FN v16 widen_codes(c16 codes) {
#if defined(__AVX512F__)
  return (v16)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)codes));
#elif defined(__AVX2__)
  v16 wide;
  __m256 low = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32((__m128i)codes));
  __m256 high = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_srli_si128((__m128i)codes, 8)));
  memcpy(&wide, &low, 32), memcpy((char *)&wide + 32, &high, 32);
  return wide;
#else
  return __builtin_convertvector(codes, v16);
#endif
}

ZQ_FN void widen_row(const int dtype, const char *from, float scale, int64_t size, float *out) {
  for (int64_t k = 0; k < size; k += 16) {
    v16 wide;
    if (dtype == 3) {
      c16 codes = {0};
      if (size - k >= 16)
        memcpy(&codes, from + k, sizeof codes);
      else
        memcpy(&codes, from + k, (size_t)(size - k));
      wide = widen_codes(codes) * scale;
    } else {
      wide = load_wide(dtype, from + k * (dtype == 0 ? 4 : 2), size - k);
    }
    store16(out + k, wide);
  }
}

ZQ_FN tile widen_as(const int dtype, const char *cache, const float *scales, int64_t at, int64_t count, int64_t size, float *out) {
  const int64_t padded = ZQ_PADDED(size), width = dtype == 0 ? 4 : dtype == 3 ? 1 : 2;
  for (int64_t p = 0; p < count; p++)
    widen_row(dtype, cache + (at + p) * size * width, dtype == 3 ? scales[at + p] : 1, size, out + p * padded);
  memset(out + count * padded, 0, (size_t)((16 - count) * padded) * sizeof *out);
  return (tile){out, padded};
}

static tile widen(const zq_block *b, const void *cache, const float *scales, int64_t at, int64_t count, float *out) {
  const int64_t size = b->head_size;
  if (b->cache_dtype == 0 && size % 16 == 0 && count == 16) return (tile){(const float *)cache + at * size, size};
  switch (b->cache_dtype) {
    case 0: return widen_as(0, cache, scales, at, count, size, out);
    case 1: return widen_as(1, cache, scales, at, count, size, out);
    case 2: return widen_as(2, cache, scales, at, count, size, out);
    default: return widen_as(3, cache, scales, at, count, size, out);
  }
}

#if defined(__AVX512F__)
/* Sums of lanes of two vectors at once: lanes of `one` and of `two` by turns of `width`. */
#define FOLD8(a, b)                                                               \
  (SHUFFLE16(a, b, 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23) +      \
   SHUFFLE16(a, b, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31))
#define FOLD4(a, b)                                                               \
  (SHUFFLE16(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27) +    \
   SHUFFLE16(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31))
#define FOLD2(a, b)                                                               \
  (SHUFFLE16(a, b, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29) +    \
   SHUFFLE16(a, b, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31))
#define FOLD1(a, b)                                                               \
  (SHUFFLE16(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30) +   \
   SHUFFLE16(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31))

/* The sums of all lanes of four vectors; lanes l, l + 4, l + 8 and l + 12 are together in lane l of each quarter. */
ZQ_FN v16 sums4(const float (*rows)[16]) {
  v16 a = load16(rows[0]), b = load16(rows[1]), c = load16(rows[2]), d = load16(rows[3]);
  v16 ab = FOLD8(a, b), cd = FOLD8(c, d);
  return FOLD4(ab, cd);
}
ZQ_FN v16 sums16(const v16 parts[4]) {
  v16 ab = FOLD2(parts[0], parts[1]), cd = FOLD2(parts[2], parts[3]);
  return FOLD1(ab, cd);
}
#else
ZQ_FN v16 sums4(const float (*rows)[16]) {
  quarters q, out;
  v16 all;
  for (int r = 0; r < 4; r++) {
    memcpy(&q, rows[r], sizeof q);
    out.at[r] = (q.at[0] + q.at[2]) + (q.at[1] + q.at[3]);
  }
  memcpy(&all, &out, sizeof all);
  return all;
}
ZQ_FN v16 sums16(const v16 parts[4]) {
  quarters out;
  v16 all;
  for (int k = 0; k < 4; k++) {
    quarters q;
    memcpy(&q, parts + k, sizeof q);
    v4 ab = SHUFFLE4(q.at[0], q.at[1], 0, 1, 4, 5) + SHUFFLE4(q.at[0], q.at[1], 2, 3, 6, 7);
    v4 cd = SHUFFLE4(q.at[2], q.at[3], 0, 1, 4, 5) + SHUFFLE4(q.at[2], q.at[3], 2, 3, 6, 7);
    out.at[k] = SHUFFLE4(ab, cd, 0, 2, 4, 6) + SHUFFLE4(ab, cd, 1, 3, 5, 7);
  }
  memcpy(&all, &out, sizeof all);
  return all;
}
#endif

/* The products of a query with 4 rows, as `sums4` gives them. */
ZQ_FN v16 dots4(const float *query, const float *rows, int64_t stride, int64_t padded) {
  float lanes[4][16];
  for (int p = 0; p < 16; p += LANES) {
    vec a = all_of(0), b = a, c = a, d = a;
    for (int64_t k = p; k < padded; k += 16) {
      const vec q = load_vec(query + k);
      a += q * load_vec(rows + k);
      b += q * load_vec(rows + stride + k);
      c += q * load_vec(rows + 2 * stride + k);
      d += q * load_vec(rows + 3 * stride + k);
    }
    store_vec(lanes[0] + p, a), store_vec(lanes[1] + p, b), store_vec(lanes[2] + p, c), store_vec(lanes[3] + p, d);
  }
  return sums4(lanes);
}

/* Scores of a query and 16 rows. */
static void dots16(const float *query, tile t, int64_t padded, float *out) {
  v16 parts[4];
  for (int k = 0; k < 4; k++) parts[k] = dots4(query, t.rows + 4 * k * t.stride, t.stride, padded);
  store16(out, sums16(parts));
}

/* out += weights . rows, for one or four vectors of features in registers. */
ZQ_FN void mix_as(const int vectors, const float *weights, const float *rows, int64_t stride, float *out) {
  vec sums[4];
#pragma GCC unroll 4
  for (int v = 0; v < vectors; v++) sums[v] = load_vec(out + LANES * v);
  for (int64_t p = 0; p < 16; p++) {
    const float *row = rows + p * stride;
#pragma GCC unroll 4
    for (int v = 0; v < vectors; v++) sums[v] += weights[p] * load_vec(row + LANES * v);
  }
#pragma GCC unroll 4
  for (int v = 0; v < vectors; v++) store_vec(out + LANES * v, sums[v]);
}

static void mix(const float *weights, tile t, int64_t padded, float *out) {
  int64_t k = 0;
  for (; k + 4 * LANES <= padded; k += 4 * LANES) mix_as(4, weights, t.rows + k, t.stride, out + k);
  for (; k < padded; k += LANES) mix_as(1, weights, t.rows + k, t.stride, out + k);
}

ZQ_FN float max_lanes(v16 x) {
  float most = x[0];
  for (int l = 1; l < 16; l++) most = x[l] > most ? x[l] : most;
  return most;
}

/* Turn the scores of a run, `count` vectors, into exponentials; return their maximum and sum. */
static void exponentials(float *scores, int64_t count, float *maximum, float *total) {
  v16 most = load16(scores), sum = splat(0);
  for (int64_t k = 1; k < count; k++) {
    v16 s = load16(scores + 16 * k);
    most = pick(s > most, s, most);
  }
  *maximum = max_lanes(most);
  for (int64_t k = 0; k < 16 * count; k += LANES) store_vec(scores + k, exp_of(load_vec(scores + k) - *maximum));
  for (int64_t k = 0; k < count; k++) sum += load16(scores + 16 * k);
  *total = lane_sum(sum);
}

/* Ask for the memory of a tile: a run is too short for the processor to find out that it is read in order. */
static void expect(const zq_block *b, const void *cache, int64_t at, int64_t end) {
  const int64_t row = b->head_size * (b->cache_dtype == 0 ? 4 : b->cache_dtype == 3 ? 1 : 2);
  const char *stop = (const char *)cache + (at + 16 < end ? at + 16 : end) * row;
  for (const char *line = (const char *)cache + at * row; line < stop; line += 64) __builtin_prefetch(line, 0, 2);
}

static void attend(const zq_attention *a) {
  static const float numbers[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
  const zq_block *b = a->block;
  const int64_t group = b->num_heads / b->num_kv_heads, size = b->head_size, padded = ZQ_PADDED(size);
  const int64_t base = (a->slot * b->num_kv_heads + a->kv_head) * a->capacity, count = (a->end - a->first + 15) / 16;
  float *queries = a->scratch, *head = queries + group * padded, *rows = head + padded, *scores = rows + 16 * padded;
  moments whole = {0, 0};
  expect(b, b->keys, base + a->first, base + a->end);
  expect(b, b->keys, base + a->first + 16, base + a->end);
  if (b->query_norm.size > size) whole = moments_of(&b->query_norm, a->row);
  for (int64_t h = 0; h < group; h++)
    take_head(b, &b->query_norm, &whole, a->row + a->kv_head * b->query_stride + h * size, a->kv_head * group + h,
              a->position, queries + h * padded);
  if (a->end == a->position + 1) { /* the run of the new token writes it */
    const int64_t from = a->kv_head * b->kv_stride;
    if (b->key_norm.size > size) whole = moments_of(&b->key_norm, a->row + b->key_at);
    take_head(b, &b->key_norm, &whole, a->row + b->key_at + from, a->kv_head, a->position, head);
    write_head(b, b->keys, b->key_scales, base + a->position, head);
    write_head(b, b->values, b->value_scales, base + a->position, a->row + b->value_at + from);
  }
  for (int64_t k = 0; k < count; k++) {
    const int64_t left = a->end - a->first - 16 * k, at = base + a->first + 16 * k;
    expect(b, b->keys, at + 32, base + a->end);
    expect(b, b->values, at, base + a->end);
    tile t = widen(b, b->keys, b->key_scales, at, left < 16 ? left : 16, rows);
    for (int64_t h = 0; h < group; h++) {
      float *out = scores + h * ZQ_RUN + 16 * k;
      dots16(queries + h * padded, t, padded, out);
      v16 score = load16(out) * b->scale;
      if (b->softcap != 0) {
        store16(out, score);
        cap(out, 1, b->softcap, 16);
        score = load16(out);
      }
      if (left < 16) score = pick(load16(numbers) < (float)left, score, splat(-__builtin_inff()));
      store16(out, score);
    }
  }
  for (int64_t h = 0; h < group; h++) {
    float *out = a->partials + h * a->partial_stride;
    exponentials(scores + h * ZQ_RUN, count, out + padded, out + padded + 1);
    memset(out, 0, (size_t)padded * sizeof *out);
  }
  for (int64_t k = 0; k < count; k++) {
    const int64_t left = a->end - a->first - 16 * k;
    tile t = widen(b, b->values, b->value_scales, base + a->first + 16 * k, left < 16 ? left : 16, rows);
    for (int64_t h = 0; h < group; h++)
      mix(scores + h * ZQ_RUN + 16 * k, t, padded, a->partials + h * a->partial_stride);
  }
}

/* out, (size,), from the partial results of a head's runs. */
static void merge(const float *partials, int64_t num_runs, int64_t size, float *out) {
  const int64_t padded = ZQ_PADDED(size), stride = ZQ_PARTIAL_FLOATS(size);
  float most = partials[padded], total = 0;
  for (int64_t r = 1; r < num_runs; r++) {
    float maximum = partials[r * stride + padded];
    most = maximum > most ? maximum : most;
  }
  for (int64_t r = 0; r < num_runs; r++)
    total += exp_of(all_of(partials[r * stride + padded] - most))[0] * partials[r * stride + padded + 1];
  for (int64_t k = 0; k < size; k += LANES) {
    vec sum = all_of(0);
    for (int64_t r = 0; r < num_runs; r++)
      sum += exp_of(all_of(partials[r * stride + padded] - most)) * load_vec(partials + r * stride + k);
    put_part(out + k, sum / total, size - k);
  }
}

const zq_layer_kernels JOIN(zq_layers, ZQ_SUFFIX) = {plain, transposed, norm, add, bias, activate, cap, attend, merge};
#endif
