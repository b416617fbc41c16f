/* The kernels of one instruction set; compiled once for each with -DZQ_SUFFIX.
 *
 * The product of 16 rows and up to 16 tokens, block by block of 32: integer sums, one row a lane, times the scale of
 * the activation; the sums of a group times the scales of the rows; then the minima times the sums of the activation.
 * Products and sums are separate operations (-ffp-contract=off), in the order of the blocks, so every level gives the
 * same bits.
 *
 * dpbusd (VNNI) multiplies unsigned codes by signed activations, so it sums code * x, and the accumulator begins at
 * -offset * sum(x).  Without it maddubs sums pairs into 16 bits, which must not saturate: 4-bit codes stay below
 * 8 * 2 * 15 * 127 = 30480; 8-bit codes are made signed, and |code| <= 128 is multiplied by the activation with the
 * sign of the code, at most 2 * 128 * 127 = 32512.
 */
#include "zq_vec.h"

#define JOIN_(a, b) a##b
#define JOIN(a, b) JOIN_(a, b)

#if defined(__AVX2__)
#include "zq_panels.h"
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

ZQ_FN void panel_as(const int bits, const zq_matrix *m, const uint8_t *at, int64_t blocks, const zq_tile *tile,
                    float (*out)[ZQ_PANEL]) {
  const int64_t each = m->group / ZQ_BLOCK, head = ZQ_PANEL * m->scale_bytes;
  const int tokens = tile->tokens, has_mins = m->has_mins;
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

static void panel(const zq_matrix *m, const uint8_t *at, int64_t blocks, const zq_tile *tile,
                  float (*out)[ZQ_PANEL]) {
  if (m->bits == 4)
    panel_as(4, m, at, blocks, tile, out);
  else
    panel_as(8, m, at, blocks, tile, out);
}

static void panel_tiles(const zq_matrix *m, const uint8_t *at, int64_t blocks, const zq_tile *tiles, int64_t num_tiles,
                        int num_panels, const uint8_t *next, float (*out)[ZQ_PANEL]) {
  const int64_t groups = blocks * ZQ_BLOCK / m->group, heads = groups * m->scale_bytes * (m->has_mins ? 2 : 1);
  (void)next;
  for (int p = 0; p < num_panels; p++, at += ZQ_PANEL * (heads + blocks * ZQ_BLOCK * m->bits / 8))
    for (int64_t k = 0; k < num_tiles; out += tiles[k++].tokens) panel(m, at, blocks, tiles + k, out);
}
#endif

/* Weights in rows of floats: element k goes to sum k mod 64, the sums are added by halves. */

#if defined(__AVX2__) && !defined(__AVX512F__)
/* One token at a time: the 64 sums of two would not stay in registers, and the row stays in the cache. */
ZQ_FN __m256 load8(const int dtype, const char *at) {
  if (dtype == 0) return _mm256_loadu_ps((const float *)(const void *)at);
  __m256i wide = _mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)(const void *)at));
  return _mm256_castsi256_ps(_mm256_slli_epi32(wide, 16));
}

ZQ_FN float dense_row(const int dtype, const char *w, const float *x, int64_t columns) {
  const int width = dtype == 0 ? 4 : 2;
  const int64_t whole = columns / 64 * 64;
  char tail[256] __attribute__((aligned(64))) = {0};
  __m256 sums[8];
  v16 all;
  memcpy(tail, w + whole * width, (size_t)((columns - whole) * width));
  UNROLLED(8) for (int q = 0; q < 8; q++) sums[q] = _mm256_setzero_ps();
  for (int64_t k = 0; k < columns; k += 64) {
    const char *at = k < whole ? w + k * width : tail;
    UNROLLED(8) for (int q = 0; q < 8; q++)
      sums[q] = _mm256_add_ps(sums[q], _mm256_mul_ps(load8(dtype, at + 8 * q * width), _mm256_loadu_ps(x + k + 8 * q)));
  }
  for (int half = 0; half < 2; half++) {
    __m256 sum = _mm256_add_ps(_mm256_add_ps(sums[half], sums[half + 4]), _mm256_add_ps(sums[half + 2], sums[half + 6]));
    memcpy((char *)&all + 32 * half, &sum, 32);
  }
  return sum_lanes(all);
}

static void dense(int dtype, const void *row, const float *x, int64_t columns, int64_t stride, int tokens,
                  float *out) {
  for (int t = 0; t < tokens; t++)
    out[t] = dtype == 0 ? dense_row(0, row, x + t * stride, columns) : dense_row(1, row, x + t * stride, columns);
}
#else
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
#endif

/* Activations --------------------------------------------------------------------------------------------- */

#define TINY_BITS 0x0d800000 /* 2^-100 */

/* Bits of the largest magnitude of 32n elements; those of NaN are the largest. */
ZQ_FN int32_t peak_bits(const float *x, int64_t count) {
#if defined(__AVX2__)
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  __m256i most = _mm256_setzero_si256(), other = most;
  for (int64_t k = 0; k < count; k += 16) {
    const __m256i *at = (const __m256i *)(const void *)(x + k);
    most = _mm256_max_epi32(most, _mm256_and_si256(_mm256_loadu_si256(at), magnitude));
    other = _mm256_max_epi32(other, _mm256_and_si256(_mm256_loadu_si256(at + 1), magnitude));
  }
  most = _mm256_max_epi32(most, other);
  __m128i all = _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
  all = _mm_max_epi32(all, _mm_shuffle_epi32(all, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(all, _mm_shuffle_epi32(all, 0xb1)));
#else
  i4 most = {0};
  for (int64_t k = 0; k < count; k += 4) {
    i4 bits;
    memcpy(&bits, x + k, sizeof bits);
    bits &= 0x7fffffff;
    i4 more = bits > most;
    most = (more & bits) | (~more & most);
  }
  int32_t first = most[0] > most[1] ? most[0] : most[1], second = most[2] > most[3] ? most[2] : most[3];
  return first > second ? first : second;
#endif
}

ZQ_FN float as_float(int32_t bits) {
  float x;
  memcpy(&x, &bits, 4);
  return x;
}

/* Quantize the 32 elements of a block; return the sum of the codes.  |x * inverse| < 128. */
ZQ_FN int32_t round_block(const float *x, float inverse, int8_t *out) {
#if defined(__AVX2__)
  const __m256 all = _mm256_set1_ps(inverse);
  __m256i codes[4];
  for (int k = 0; k < 4; k++) codes[k] = _mm256_cvtps_epi32(_mm256_mul_ps(_mm256_loadu_ps(x + 8 * k), all));
  __m256i bytes = _mm256_packs_epi16(_mm256_packs_epi32(codes[0], codes[1]), _mm256_packs_epi32(codes[2], codes[3]));
  bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
  _mm256_storeu_si256((__m256i *)(void *)out, bytes);
  __m256i sums = _mm256_sad_epu8(_mm256_xor_si256(bytes, _mm256_set1_epi8((char)128)), _mm256_setzero_si256());
  __m128i both = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
  return _mm_cvtsi128_si32(both) + _mm_extract_epi32(both, 2) - 128 * ZQ_BLOCK;
#else
  i16 all = {0};
  int32_t sum = 0;
  for (int h = 0; h < ZQ_BLOCK; h += 16) {
    i16 code = __builtin_convertvector(nearest(load16(x + h) * inverse), i16);
    c16 narrow = __builtin_convertvector(code, c16);
    memcpy(out + h, &narrow, sizeof narrow);
    all += code;
  }
  for (int l = 0; l < 16; l++) sum += all[l];
  return sum;
#endif
}

/* Quantize a block; the sum of its codes, and its scale, which is NaN if an element is infinite or NaN. */
ZQ_FN int32_t quantize_block(const float *x, int8_t *codes, float *scale) {
  static const float zeros[ZQ_BLOCK];
  int32_t peak = peak_bits(x, ZQ_BLOCK);
  float inverse = peak >= TINY_BITS && peak < 0x7f800000 ? 127.0f / as_float(peak) : 0.0f;
  *scale = peak >= 0x7f800000 ? __builtin_nanf("") : peak >= TINY_BITS ? as_float(peak) / 127.0f : 0.0f;
  return round_block(peak >= 0x7f800000 ? zeros : x, inverse, codes);
}

static void activations(const float *x, int64_t columns, int64_t blocks, int8_t *codes, float *scales, int32_t *sums,
                        int64_t stride, int64_t rest) {
  for (int64_t b = 0; b < blocks; b++) {
    const int64_t k = b * ZQ_BLOCK, to = b * stride;
    float part[ZQ_BLOCK];
    const float *at = x + k;
    if (columns - k < ZQ_BLOCK) {
      memset(part, 0, sizeof part);
      if (columns > k) memcpy(part, at, (size_t)(columns - k) * 4);
      at = part;
    }
    sums[to] = quantize_block(at, codes + to * ZQ_BLOCK, scales + to);
    if (!rest) continue;
    for (int l = 0; l < ZQ_BLOCK; l++) part[l] = at[l] - (float)codes[to * ZQ_BLOCK + l] * scales[to];
    sums[to + rest] = quantize_block(part, codes + (to + rest) * ZQ_BLOCK, scales + to + rest);
  }
}

#include "zq_encode.h" /* quantize */

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

/* Squares: those of float32 and narrower values are exact in double, so a fused product gives the same bits.
 *
 * Widening by conversion would take longer than reading.  The 15 bits of a narrow magnitude, moved to the exponent and
 * the upper mantissa of a double, are its value times a power of two, subnormal numbers included; so one vector of
 * 64-bit lanes gives four of doubles with a shift, a mask and a product each.  Infinity and NaN become finite this way:
 * the largest pattern tells.
 */

/* Doubles in the registers of a level: PARTS vectors hold 8. */
#if defined(__AVX512F__)
#define WIDTH 64
#define FUSED(x, sum) (doubles) _mm512_fmadd_pd((__m512d)(x), (__m512d)(x), (__m512d)(sum))
#elif defined(__AVX2__)
#define WIDTH 32
#define FUSED(x, sum) (doubles) _mm256_fmadd_pd((__m256d)(x), (__m256d)(x), (__m256d)(sum))
#else
#define WIDTH 16
#define FUSED(x, sum) ((sum) + (x) * (x))
#endif
enum { PARTS = 64 / WIDTH };
typedef double doubles __attribute__((vector_size(WIDTH)));
typedef float half_floats __attribute__((vector_size(WIDTH / 2)));
typedef uint64_t words __attribute__((vector_size(WIDTH)));
typedef int16_t patterns __attribute__((vector_size(WIDTH)));

ZQ_FN double sum_doubles(doubles (*sums)[PARTS]) {
  double lanes[4][8], all[8];
  memcpy(lanes, sums, sizeof lanes);
  for (int l = 0; l < 8; l++) all[l] = (lanes[0][l] + lanes[2][l]) + (lanes[1][l] + lanes[3][l]);
  return ((all[0] + all[4]) + (all[2] + all[6])) + ((all[1] + all[5]) + (all[3] + all[7]));
}

/* Element k goes to lane k mod 8 of sum k / 8 mod 4. */
ZQ_FN double wide_squares(const int dtype, const char *at, int64_t numel) {
  const int width = dtype == 0 ? 4 : 2;
  doubles sums[4][PARTS] = {{{0}}};
  char tail[128] __attribute__((aligned(64))) = {0};
  for (int64_t k = 0; k < numel; k += 32, at += 32 * width) {
    float values[32];
    if (numel - k < 32) at = memcpy(tail, at, (size_t)((numel - k) * width));
    const char *from = at;
    if (dtype != 0) {
      v16 low = load_as(dtype, at), high = load_as(dtype, at + 32);
      memcpy(values, &low, 64), memcpy(values + 16, &high, 64), from = (const char *)values;
    }
    UNROLLED(4) for (int q = 0; q < 4; q++)
      UNROLLED(4) for (int part = 0; part < PARTS; part++) {
        half_floats x;
        memcpy(&x, from + 32 * q + WIDTH / 2 * part, sizeof x);
        doubles wide = __builtin_convertvector(x, doubles);
        sums[q][part] = FUSED(wide, sums[q][part]);
      }
  }
  return sum_doubles(sums);
}

ZQ_FN doubles add_pattern(doubles sum, words moved, const int shift, const double scale) {
  doubles x = (doubles)(moved & ((uint64_t)0x7fff << shift)) * scale;
  return FUSED(x, sum);
}

ZQ_FN patterns larger_patterns(patterns x, patterns y) {
#if defined(__AVX512F__)
  return (patterns)_mm512_max_epi16((__m512i)x, (__m512i)y);
#elif defined(__AVX2__)
  return (patterns)_mm256_max_epi16((__m256i)x, (__m256i)y);
#else
  patterns more = x > y;
  return (more & x) | (~more & y);
#endif
}

#define AHEAD_OF_SQUARES 8192 /* bytes; processors foresee less */

/* Of bfloat16 (1) and float16 (2): element k goes to lane k / 4 mod 8 of sum k mod 4. */
ZQ_FN double narrow_squares(const int dtype, const char *at, int64_t numel) {
  const int shift = dtype == 1 ? 45 : 42;
  const double scale = dtype == 1 ? 0x1p896 : 0x1p1008;
  const char *first = at;
  doubles sums[4][PARTS] = {{{0}}};
  patterns most = {0};
  char tail[64] __attribute__((aligned(64))) = {0};
  for (int64_t k = 0; k < numel; k += 32, at += 64) {
    __builtin_prefetch(at + AHEAD_OF_SQUARES);
    if (numel - k < 32) at = memcpy(tail, at, (size_t)((numel - k) * 2));
    UNROLLED(4) for (int part = 0; part < PARTS; part++) {
      words w;
      memcpy(&w, at + WIDTH * part, sizeof w);
      most = larger_patterns(most, (patterns)w & 0x7fff);
      sums[0][part] = add_pattern(sums[0][part], w << shift, shift, scale);
      sums[1][part] = add_pattern(sums[1][part], w << (shift - 16), shift, scale);
      sums[2][part] = add_pattern(sums[2][part], w << (shift - 32), shift, scale);
      sums[3][part] = add_pattern(sums[3][part], w >> (48 - shift), shift, scale);
    }
  }
  int largest = 0;
  for (int l = 0; l < WIDTH / 2; l++) largest = most[l] > largest ? most[l] : largest;
  return largest >= (dtype == 1 ? 0x7f80 : 0x7c00) ? wide_squares(dtype, first, numel) : sum_doubles(sums);
}

static double squares(int dtype, const void *row, int64_t numel) {
  if (dtype == 0) return wide_squares(0, row, numel);
  return dtype == 1 ? narrow_squares(1, row, numel) : narrow_squares(2, row, numel);
}

const zq_kernels JOIN(zq_kernels, ZQ_SUFFIX) = {panel, dense, activations, quantize,
                                                      pack,  squares, panel_tiles};
