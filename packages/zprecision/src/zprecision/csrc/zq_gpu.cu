/* Block quantization on CUDA devices: C that NVRTC compiles as CUDA.
 *
 * Kernels read codes and scales in the rows of QuantizedTensor, so a device keeps one copy of a weight.  Float
 * operations have the order of encode.py, decode.py and zq_kern.c, without fused products, so results have the bits of
 * the CPU.
 *
 * zq_products multiplies 16 rows and up to 8 tokens a block of threads.  A warp has two rows; a lane, one block of 32
 * codes of each at a time, 16 bytes of 4-bit codes: a warp reads 512 adjacent bytes of a row, and the next 512 are on
 * their way.  The activation of one token is quantized by every block of threads into its shared memory, because a launch
 * for it alone would take as long as a small product; several tokens are quantized by zq_activations.  The order of the sum is that of a CPU: lanes leave the terms of their
 * groups in shared memory, and one thread for each row and token adds them from first to last.  Rejected: adding lanes
 * by shuffles (0.2 us less at the end of a block of threads, and other bits than a CPU's); weights in a second order
 * with a row a lane (twice the memory); half precision as in other kernels (dot products of bytes multiply as fast, are
 * exact, and are what a CPU does).
 *
 * ZQ_TOKENS (1, 2, 4, 8), ZQ_BITS and ZQ_MINS are constants of a compilation; without them only the kernels of
 * quantization are compiled.
 */
#include "zk_gpu.h"
#include "zq_gpu.h"

#define ZQ_THREADS 256
#define ZQ_WARPS (ZQ_THREADS / 32)
#define ZQ_BLOCK 32

/* Activations ------------------------------------------------------------------------------------------ */

typedef struct {
  uint64_t x, scratch; /* (tokens, columns); codes, scales and sums of the blocks of all tokens, or 0 for one token */
  int64_t tokens, columns, blocks, dtype; /* blocks of 32 of a token, up to whole groups of any size */
} zq_input;

/* Load 8 elements from element `k` of a token on, 0 beyond the end. */
ZQ_FN void load_eight(const zq_input *a, int64_t token, int64_t k, float *x) {
  const uint64_t width = a->dtype == ZQ_F32 ? 4 : 2;
  const uint64_t row = a->x + (uint64_t)(token * a->columns) * width, from = row + (uint64_t)k * width;
  uint32_t words[8];
  if (token < a->tokens && k + 8 <= a->columns && from % 16 == 0) {
    zk_load16(from, words);
    if (a->dtype == ZQ_F32) zk_load16(from + 16, words + 4);
    ZK_UNROLL
    for (int j = 0; j < 8; j++)
      x[j] = a->dtype == ZQ_F32 ? zq_float(words[j]) : zq_widened(a->dtype, words[j / 2] >> 16 * (j & 1) & 0xffffu);
  } else {
    for (int j = 0; j < 8; j++)
      x[j] = token < a->tokens && k + j < a->columns ? zq_element(a->dtype, row, k + j) : 0.0f;
  }
}

/* Codes of 8 elements, and the scale and the sum of their block, which four lanes share. */
typedef struct {
  uint32_t words[2], sum;
  float scale;
} zq_eight;

ZQ_FN zq_eight quantize_eight(const float *x) {
  zq_eight found = {{0, 0}, 0, 0.0f};
  uint32_t peak = 0;
  ZK_UNROLL
  for (int j = 0; j < 8; j++) {
    const uint32_t bits = zq_bits(x[j]) & 0x7fffffffu;
    peak = bits > peak ? bits : peak;
  }
  ZK_UNROLL
  for (int distance = 1; distance < 4; distance *= 2) {
    const uint32_t other = zq_across(peak, distance);
    peak = other > peak ? other : peak;
  }
  const int is_finite = peak < ZQ_INFINITE, is_zero = peak < ZQ_TINY;
  const float inverse = is_zero ? 0.0f : 127.0f / zq_float(peak);
  found.scale = !is_finite ? zq_float(0x7fc00000u) : is_zero ? 0.0f : zq_float(peak) / 127.0f;
  ZK_UNROLL
  for (int half = 0; half < 2; half++) {
    ZK_UNROLL
    for (int j = 0; j < 4; j++) found.words[half] |= (zq_bits(x[4 * half + j] * inverse + ZQ_MAGIC) & 255u) << 8 * j;
    if (!is_finite) found.words[half] = 0;
    found.sum = zq_dot4(found.words[half], 0x01010101u, found.sum);
  }
  ZK_UNROLL
  for (int distance = 1; distance < 4; distance *= 2) found.sum += zq_across(found.sum, distance);
  return found;
}

/* Addresses of a block in the scratch: 32 codes; scales follow all codes, and sums all scales. */
typedef struct {
  uint64_t codes, scale, sum;
} zq_place;

ZQ_FN zq_place place_of(const zq_input *a, int64_t token, int64_t block) {
  const uint64_t all = (uint64_t)(a->tokens * a->blocks), index = (uint64_t)(token * a->blocks + block);
  const zq_place at = {a->scratch + 32 * index, a->scratch + 32 * all + 4 * index, a->scratch + 36 * all + 4 * index};
  return at;
}

#ifndef ZQ_TOKENS

/* Quantize activations into the scratch, for products of several tokens: 8 elements a thread. */
ZK_KERNEL(4, zq_activations, zq_input) {
  const int64_t index = (int64_t)blockIdx.x * ZQ_THREADS + threadIdx.x, block = index / 4;
  const int64_t token = block / a.blocks, mine = block - token * a.blocks, quad = index % 4;
  float x[8];
  load_eight(&a, token, mine * ZQ_BLOCK + 8 * quad, x);
  const zq_eight found = quantize_eight(x);
  if (token >= a.tokens) return;
  const zq_place at = place_of(&a, token, mine);
  const uint32_t scale = zq_bits(found.scale);
  zk_store8(at.codes + 8 * (uint64_t)quad, found.words);
  if (quad) return;
  zk_store4(at.scale, &scale);
  zk_store4(at.sum, &found.sum);
}

/* Quantization: a group a warp ------------------------------------------------------------------------- */

enum { SEARCH, AMAX, MINMAX, GGML };
#define ZQ_POINTS 15

/* Arguments of 8 bytes each, so there is no padding. */
typedef struct {
  uint64_t values, codes, scales, mins, failed; /* failed: int32, set to 1 if a value or a scale is not finite */
  int64_t rows, columns, groups, chunks;        /* groups of a row; chunks of 32 elements of a group */
  int64_t dtype, rule, bits, scale_bytes;
} zq_quantize_args;

/* The group of a warp; lane l has every 32nd element from l on. */
typedef struct {
  uint64_t values; /* of the row */
  int64_t columns, first, chunks, dtype;
  int lane;
} zq_group;

ZQ_FN float value(const zq_group *g, int64_t chunk) {
  const int64_t k = g->first + chunk * ZQ_BLOCK + g->lane;
  return k < g->columns ? zq_element(g->dtype, g->values, k) : 0.0f;
}

ZQ_FN float clamped(float x, float low, float high) {
  x = x < low ? low : x;
  return x > high ? high : x;
}

ZQ_FN float halves_added(float x) { /* the order of `fold` */
  ZK_UNROLL
  for (int distance = 16; distance; distance /= 2) x += zq_across_float(x, distance);
  return x;
}

ZQ_FN uint32_t most_of_warp(uint32_t x) {
  ZK_UNROLL
  for (int distance = 16; distance; distance /= 2) {
    const uint32_t other = zq_across(x, distance);
    x = other > x ? other : x;
  }
  return x;
}

/* Bits of the largest magnitude; those of NaN are the largest. */
ZQ_FN uint32_t peak_bits(const zq_group *g) {
  uint32_t most = 0;
  for (int64_t c = 0; c < g->chunks; c++) {
    const uint32_t bits = zq_bits(value(g, c)) & 0x7fffffffu;
    most = bits > most ? bits : most;
  }
  return most_of_warp(most);
}

/* The first element of the largest magnitude: the complement of its place orders elements, last bit is the sign. */
ZQ_FN float signed_peak(const zq_group *g, uint32_t peak) {
  uint32_t found = 0;
  for (int64_t c = 0; c < g->chunks; c++) {
    const uint32_t bits = zq_bits(value(g, c));
    const uint32_t key = ~(uint32_t)(c * ZQ_BLOCK + g->lane) << 1 | bits >> 31;
    if ((bits & 0x7fffffffu) == peak && key > found) found = key;
  }
  return zq_float(peak | most_of_warp(found) << 31);
}

/* See [Note: scale search] in encode.py. */
ZQ_FN float search_scale(const zq_group *g, float peak, float top, float *inverse) {
  float best = -1.0f, scale = 0.0f;
  ZK_NO_UNROLL
  for (int point = 0; point < ZQ_POINTS; point++) {
    const float tried = -(float)((double)top - 0.7 + 0.15 * point) / peak;
    float dot = 0, square = 0;
    for (int64_t c = 0; c < g->chunks; c++) {
      const float x = value(g, c), code = clamped(zq_nearest(x * tried), -top, top - 1.0f);
      dot += code * x;
      square += code * code;
    }
    dot = halves_added(dot), square = halves_added(square);
    const float score = dot * dot / square;
    if (score > best) best = score, scale = dot / square, *inverse = tried;
  }
  return scale;
}

typedef struct {
  float scale, min, inverse;
} zq_affine;

ZQ_FN zq_affine choose(const zq_group *g, int rule, int bits, uint32_t peak) {
  const float top = bits == 8 ? 128.0f : 8.0f, largest = zq_float(peak);
  zq_affine a = {0, 0, 0};
  if (rule == SEARCH) {
    if (peak >= ZQ_TINY) a.scale = search_scale(g, signed_peak(g, peak), top, &a.inverse);
  } else if (rule == AMAX) {
    a.scale = largest / (top - 1.0f);
    a.inverse = peak >= ZQ_TINY ? (top - 1.0f) / largest : 0.0f;
  } else if (rule == MINMAX) {
    float low = value(g, 0), high = low;
    for (int64_t c = 1; c < g->chunks; c++) {
      const float x = value(g, c);
      low = x < low ? x : low, high = x > high ? x : high;
    }
    for (int distance = 16; distance; distance /= 2) {
      const float x = zq_across_float(low, distance), y = zq_across_float(high, distance);
      low = x < low ? x : low, high = y > high ? y : high;
    }
    a.min = low;
    a.scale = (high - low) / (2.0f * top - 1.0f);
    a.inverse = high - low >= zq_float(ZQ_TINY) ? (2.0f * top - 1.0f) / (high - low) : 0.0f;
  } else {
    a.scale = bits == 8 ? largest / 127.0f : signed_peak(g, peak) / -8.0f;
    a.inverse = a.scale == 0.0f ? 0.0f : 1.0f / a.scale;
  }
  return a;
}

/* The centred code of an element. */
ZQ_FN int code_of(const zq_affine *a, int rule, int bits, float x) {
  const float top = bits == 8 ? 128.0f : 8.0f, scaled = x * a->inverse;
  if (rule == MINMAX) return (int)clamped(zq_nearest((x - a->min) * a->inverse), 0.0f, 2.0f * top - 1.0f);
  if (rule == SEARCH) return (int)clamped(zq_nearest(scaled), -top, top - 1.0f);
  if (rule == AMAX) return (int)clamped(zq_nearest(scaled), 1.0f - top, top - 1.0f);
  if (bits == 8) { /* halves away from zero */
    const int whole = (int)scaled;
    const float rest = scaled - (float)whole;
    return whole + (rest >= 0.5f) - (rest <= -0.5f);
  }
  const int whole = (int)(scaled + 8.5f);
  return (whole > 15 ? 15 : whole) - 8;
}

/* Store a scale or a minimum; return whether it is finite. */
ZQ_FN int put_scale(uint64_t to, int64_t index, int64_t bytes, float x) {
  zq_put(bytes == 4 ? ZQ_F32 : ZQ_F16, to, index, x);
  return (zq_bits(x) & 0x7fffffffu) < (bytes == 4 ? ZQ_INFINITE : 0x477ff000u); /* 65520 rounds to infinity */
}

ZK_KERNEL(4, zq_quantize, zq_quantize_args) {
  const int64_t index = (int64_t)blockIdx.x * ZQ_WARPS + threadIdx.x / 32;
  if (index >= a.rows * a.groups) return;
  const int rule = (int)a.rule, bits = (int)a.bits, lane = (int)(threadIdx.x % 32);
  const int64_t row = index / a.groups, length = a.groups * a.chunks * ZQ_BLOCK;
  const uint64_t width = a.dtype == ZQ_F32 ? 4 : 2;
  const zq_group g = {a.values + (uint64_t)(row * a.columns) * width, a.columns,
                      (index - row * a.groups) * a.chunks * ZQ_BLOCK, a.chunks, a.dtype, lane};
  const uint32_t peak = peak_bits(&g), one = 1;
  if (peak >= ZQ_INFINITE) {
    if (lane == 0) zk_store4(a.failed, &one);
    return;
  }
  const zq_affine found = choose(&g, rule, bits, peak);
  if (lane == 0) {
    int is_finite = put_scale(a.scales, index, a.scale_bytes, found.scale);
    if (rule == MINMAX) is_finite &= put_scale(a.mins, index, a.scale_bytes, found.min);
    if (!is_finite) zk_store4(a.failed, &one);
  }
  const int offset = bits == 4 && rule != MINMAX ? 8 : 0;
  const uint64_t at = (uint64_t)(row * length + g.first);
  for (int64_t c = 0; c < a.chunks; c++) {
    const uint32_t code = (uint32_t)(code_of(&found, rule, bits, value(&g, c)) + offset), other = zq_across(code, 16);
    if (bits == 8)
      zq_store1(a.codes + at + (uint64_t)(c * ZQ_BLOCK + lane), code);
    else if (lane < 16)
      zq_store1(a.codes + at / 2 + (uint64_t)(c * 16 + lane), code | other << 4);
  }
}

/* Values: 8 elements a thread, a row the blocks of threads that it needs ----------------------------------- */

typedef struct {
  uint64_t codes, scales, mins, out;        /* mins: 0 without */
  int64_t columns, blocks, each;            /* blocks of 32 of a row, and of a group: 0 if a row is one */
  int64_t code_stride, scale_stride;        /* bytes; elements */
  int64_t parts, dtype, bits, offset, flip; /* code = (stored ^ flip) - offset */
} zq_dequantize_args;

ZQ_FN float scale_at(const int is_row, uint64_t scales, int64_t index) {
  return zq_element(is_row ? ZQ_F32 : ZQ_F16, scales, index);
}

/* Store four elements from `k` on of a row of `columns`. */
ZQ_FN void put_four(int64_t dtype, uint64_t row, int64_t k, int64_t columns, const float *x) {
  const int is_whole = columns % 4 == 0 && k < columns;
  uint32_t words[4];
  if (is_whole && dtype == ZQ_F32) {
    ZK_UNROLL
    for (int j = 0; j < 4; j++) words[j] = zq_bits(x[j]);
    zk_store16(row + 4 * (uint64_t)k, words);
  } else if (is_whole) {
    ZK_UNROLL
    for (int j = 0; j < 4; j++) words[j] = dtype == ZQ_BF16 ? zq_to_bf16(x[j]) : zq_to_f16(x[j]);
    const uint32_t pairs[2] = {words[0] | words[1] << 16, words[2] | words[3] << 16};
    zk_store8(row + 2 * (uint64_t)k, pairs);
  } else {
    for (int j = 0; j < 4 && k + j < columns; j++) zq_put(dtype, row, k + j, x[j]);
  }
}

ZK_KERNEL(4, zq_dequantize, zq_dequantize_args) {
  const uint32_t row = blockIdx.x / (uint32_t)a.parts, part = blockIdx.x - row * (uint32_t)a.parts;
  const int64_t index = (int64_t)part * ZQ_THREADS + threadIdx.x, block = index / 4;
  const uint32_t quad = (uint32_t)(index % 4);
  if (block >= a.blocks) return;
  const uint64_t codes = a.codes + (uint64_t)row * (uint64_t)a.code_stride;
  const int64_t group = (int64_t)row * a.scale_stride + (a.each ? block / a.each : 0);
  const float scale = scale_at(a.each == 0, a.scales, group);
  const float min = a.mins ? scale_at(a.each == 0, a.mins, group) : 0.0f;
  uint32_t words[2];
  if (a.bits == 4) {
    zk_load4(codes + (uint64_t)block * 16 + 4 * quad, words);
    words[1] = words[0] >> 4 & 0x0f0f0f0fu, words[0] &= 0x0f0f0f0fu;
  } else {
    zk_load4(codes + (uint64_t)block * 32 + 4 * quad, words);
    zk_load4(codes + (uint64_t)block * 32 + 16 + 4 * quad, words + 1);
  }
  const uint64_t out = a.out + (uint64_t)row * (uint64_t)a.columns * (a.dtype == ZQ_F32 ? 4 : 2);
  ZK_UNROLL
  for (int half = 0; half < 2; half++) {
    float x[4];
    ZK_UNROLL
    for (int j = 0; j < 4; j++) {
      const int code = (int)((words[half] ^ (uint32_t)a.flip) >> 8 * j & 255u) - (int)a.offset;
      x[j] = (float)code * scale;
      if (a.mins) x[j] += min;
    }
    put_four(a.dtype, out, block * ZQ_BLOCK + 16 * half + 4 * (int)quad, a.columns, x);
  }
}

#else

/* Products --------------------------------------------------------------------------------------------- */

#define ZQ_ROWS 16                                   /* of a block of threads: two a warp */
#define ZQ_CHUNK (ZQ_TOKENS < 2 ? 128 : 256 / ZQ_TOKENS) /* blocks of 32 between two barriers */
#define ZQ_RESIDENT (ZQ_BITS == 4 ? 4 : 3)           /* blocks of threads on a multiprocessor */
#define ZQ_MATRICES 16                               /* of a launch; MOST_MATRICES in gpu.py */
#define ZQ_PIECES (ZQ_BITS / 4)                      /* loads of 16 bytes for a block of 32 */

typedef struct {
  uint64_t codes, scales, mins, bias, out; /* out: (tokens, rows); mins, bias: 0 without */
  int64_t rows, blocks, each;              /* blocks of 32 of a row, and of a group: 1, 2, 4, or 0 if a row is one */
  int64_t code_stride, scale_stride;       /* bytes; elements */
  int64_t first;                           /* its first panel of 16 rows, counted over all matrices */
  int64_t bias_dtype, offset, flip;        /* signed code = (stored ^ flip) - offset */
} zq_matrix;

typedef struct {
  zq_input input;
  int64_t num_matrices, tiles;
  zq_matrix matrices[ZQ_MATRICES];
} zq_products_args;

/* Four words that are read and written at once. */
typedef struct {
  uint32_t x[4];
} ZQ_ALIGNED zq_four;

/* A chunk of the activations, and the terms of its groups. */
typedef struct {
  zq_four codes[ZQ_TOKENS][2][ZQ_CHUNK]; /* elements 0-15 and 16-31 of a block */
  float scale[ZQ_TOKENS][ZQ_CHUNK];
  uint32_t start[ZQ_TOKENS][ZQ_CHUNK];   /* MAGIC_BITS - offset * sum of codes */
  float input[ZQ_MINS ? ZQ_TOKENS : 1][ZQ_CHUNK]; /* sum of codes * scale */
  /* one more than a chunk, so that rows are in different banks */
  float terms[1 + ZQ_MINS][ZQ_ROWS * ZQ_TOKENS][ZQ_CHUNK + 1];
} zq_stage;

/* What a lane holds of its warp's rows: one block of 32 codes each, as stored. */
typedef struct {
  uint32_t words[2][4 * ZQ_PIECES];
  uint32_t step[2], low[2]; /* float16 */
} zq_held;

/* Load block `block` of a row and the next one; of the last row, itself again instead of what follows. */
ZQ_FN void fetch(const zq_matrix *m, uint32_t row, uint32_t block, zq_held *held) {
  const uint32_t last = (uint32_t)m->rows - 1, end = (uint32_t)m->blocks - 1;
  if (block > end) block = end;
  ZK_UNROLL
  for (uint32_t r = 0; r < 2; r++) {
    const uint32_t mine = row + r < last ? row + r : last;
    const uint64_t from = m->codes + (uint64_t)mine * (uint32_t)m->code_stride + block * (16 * ZQ_PIECES);
    ZK_UNROLL
    for (int piece = 0; piece < ZQ_PIECES; piece++) zk_load16(from + 16 * piece, held->words[r] + 4 * piece);
    if (m->each) {
      const uint64_t at = 2 * ((uint64_t)mine * (uint32_t)m->scale_stride + (block >> (uint32_t)m->each / 2));
      held->step[r] = zq_load2(m->scales + at);
      if (ZQ_MINS) held->low[r] = zq_load2(m->mins + at);
    }
  }
}

/* Word k of 8: codes 4k .. 4k+3 of a block, as signed bytes. */
ZQ_FN uint32_t signed_word(const uint32_t *words, int k, uint32_t flip) {
  if (ZQ_BITS == 8) return words[k] ^ flip;
  return (k < 4 ? words[k & 3] : words[k & 3] >> 4) & 0x0f0f0f0fu;
}

#if ZQ_TOKENS == 1

/* Quantize a chunk of the activation, from block `first` on. */
ZQ_FN void take_chunk(const zq_products_args *a, const zq_matrix *m, zq_stage *s, int64_t token, int first) {
  ZK_NO_UNROLL
  for (int k = 0; k < ZQ_CHUNK * 4; k += ZQ_THREADS) {
    const int index = k + (int)threadIdx.x, quad = index % 4, block = index / 4;
    float x[8];
    load_eight(&a->input, token, (first + block) * ZQ_BLOCK + 8 * quad, x);
    const zq_eight found = quantize_eight(x);
    s->codes[0][quad / 2][block].x[2 * (quad % 2)] = found.words[0];
    s->codes[0][quad / 2][block].x[2 * (quad % 2) + 1] = found.words[1];
    if (quad) continue;
    s->scale[0][block] = found.scale;
    s->start[0][block] = ZQ_MAGIC_BITS - (uint32_t)m->offset * found.sum;
    if (ZQ_MINS) s->input[0][block] = (float)(int32_t)found.sum * found.scale;
  }
}

#else

/* Copy a chunk of the activations that zq_activations has quantized, from block `first` on. */
ZQ_FN void take_chunk(const zq_products_args *a, const zq_matrix *m, zq_stage *s, int64_t token, int first) {
  const int index = (int)threadIdx.x, mine = index / ZQ_CHUNK, block = index % ZQ_CHUNK;
  if (token + mine >= a->input.tokens || first + block >= (int)a->input.blocks) return;
  const zq_place at = place_of(&a->input, token + mine, first + block);
  uint32_t scale, sum;
  zk_load16(at.codes, s->codes[mine][0][block].x);
  zk_load16(at.codes + 16, s->codes[mine][1][block].x);
  zk_load4(at.scale, &scale);
  zk_load4(at.sum, &sum);
  s->scale[mine][block] = zq_float(scale);
  s->start[mine][block] = ZQ_MAGIC_BITS - (uint32_t)m->offset * sum;
  if (ZQ_MINS) s->input[mine][block] = (float)(int32_t)sum * zq_float(scale);
}

#endif

/* Sum of a group of 2 or 4 blocks, in their order, right in the lane of the first. */
ZQ_FN float in_order(float x, uint32_t each) {
  if (each <= 1) return x;
  float sum = x + zq_across_float(x, 1);
  if (each == 4) {
    const float third = zq_across_float(x, 2), fourth = zq_across_float(x, 3);
    sum = (sum + third) + fourth;
  }
  return sum;
}

/* Multiply two rows by this lane's block of the chunk. */
ZQ_FN void multiply(const zq_matrix *m, zq_stage *s, const zq_held *held, uint32_t pair, uint32_t block) {
  const uint32_t each = (uint32_t)m->each, place = block >> each / 2;
  const int is_first = each <= 1 || (block & (each - 1)) == 0;
  uint32_t w[2][8];
  ZK_UNROLL
  for (int r = 0; r < 2; r++) {
    ZK_UNROLL
    for (int k = 0; k < 8; k++) w[r][k] = signed_word(held->words[r], k, (uint32_t)m->flip);
  }
  ZK_UNROLL
  for (int t = 0; t < ZQ_TOKENS; t++) {
    const zq_four low = s->codes[t][0][block], high = s->codes[t][1][block];
    const float scale = s->scale[t][block], input = ZQ_MINS && each ? in_order(s->input[t][block], each) : 0.0f;
    ZK_UNROLL
    for (int r = 0; r < 2; r++) {
      uint32_t sum = s->start[t][block];
      ZK_UNROLL
      for (int k = 0; k < 4; k++) sum = zq_dot4(w[r][k], low.x[k], sum);
      ZK_UNROLL
      for (int k = 0; k < 4; k++) sum = zq_dot4(w[r][k + 4], high.x[k], sum);
      float term = in_order((zq_float(sum) - ZQ_MAGIC) * scale, each);
      if (each) term *= zq_from_f16(held->step[r]);
      const uint32_t line = (2 * pair + r) * ZQ_TOKENS + t;
      if (is_first) s->terms[0][line][place] = term;
      if (ZQ_MINS && each && is_first) s->terms[ZQ_MINS][line][place] = input * zq_from_f16(held->low[r]);
    }
  }
}

/* Sums of one row and token; of the second, only if the row is one group. */
typedef struct {
  float total, inputs;
} zq_sums;

ZQ_FN void add_chunk(const zq_matrix *m, const zq_stage *s, int blocks, zq_sums *sums) {
  const int line = (int)threadIdx.x, count = blocks >> (uint32_t)m->each / 2;
  ZK_UNROLL_16
  for (int k = 0; k < count; k++) {
    sums->total += s->terms[0][line][k];
    if (ZQ_MINS && m->each) sums->total += s->terms[ZQ_MINS][line][k];
    if (ZQ_MINS && !m->each) sums->inputs += s->input[line % ZQ_TOKENS][k];
  }
}

ZQ_FN void finish(const zq_products_args *a, const zq_matrix *m, int64_t row, int64_t token, const zq_sums *sums) {
  float y = sums->total;
  if (row >= m->rows || token >= a->input.tokens) return;
  if (!m->each) {
    y = 0.0f + y * zq_element(ZQ_F32, m->scales, row * m->scale_stride);
    if (ZQ_MINS) y += sums->inputs * zq_element(ZQ_F32, m->mins, row * m->scale_stride);
  }
  if (m->bias) y += zq_element(m->bias_dtype, m->bias, row);
  zq_put(a->input.dtype, m->out, token * m->rows + row, y);
}

/* Copy the matrix of this block's panel to shared memory, from where its words are read when they are needed. */
ZQ_FN void begin(const zq_products_args *a, int64_t panel, zq_matrix *m) {
  int index = 0;
  while (index + 1 < (int)a->num_matrices && panel >= a->matrices[index + 1].first) index++;
  const uint64_t *words = (const uint64_t *)(a->matrices + index);
  if (threadIdx.x < sizeof(zq_matrix) / 8) ((uint64_t *)m)[threadIdx.x] = words[threadIdx.x];
  __syncthreads();
}

ZK_KERNEL(ZQ_RESIDENT, zq_products, zq_products_args) {
  ZK_SHARED zq_stage stage;
  ZK_SHARED zq_matrix matrix;
  const int64_t panel = blockIdx.x / (uint32_t)a.tiles, token = (blockIdx.x % (uint32_t)a.tiles) * ZQ_TOKENS;
  const uint32_t pair = threadIdx.x / 32, lane = threadIdx.x % 32;
  const zq_matrix *m = &matrix;
  begin(&a, panel, &matrix);
  const uint32_t first_row = (uint32_t)(panel - m->first) * ZQ_ROWS;
  const int blocks = (int)m->blocks, is_adding = threadIdx.x < ZQ_ROWS * ZQ_TOKENS;
  zq_held now, next;
  zq_sums sums = {0, 0};
  fetch(m, first_row + 2 * pair, lane, &next);
  ZK_NO_UNROLL
  for (int from = 0; from < blocks; from += ZQ_CHUNK) {
    take_chunk(&a, m, &stage, token, from);
    __syncthreads();
    ZK_NO_UNROLL
    for (int run = 0; run < ZQ_CHUNK && from + run < blocks; run += 32) {
      now = next;
      fetch(m, first_row + 2 * pair, (uint32_t)(from + run + 32) + lane, &next);
      multiply(m, &stage, &now, pair, (uint32_t)run + lane);
    }
    __syncthreads();
    if (is_adding) add_chunk(m, &stage, blocks - from < ZQ_CHUNK ? blocks - from : ZQ_CHUNK, &sums);
    __syncthreads();
  }
  if (is_adding) finish(&a, m, first_row + threadIdx.x / ZQ_TOKENS, token + threadIdx.x % ZQ_TOKENS, &sums);
}

#endif
