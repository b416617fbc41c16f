/* Products of panels with AVX2 and AVX-512, included by zq_kern.c once for each instruction set.
 *
 * Problem: one token must cost a read of the weights; a few tokens little more; hundreds must reach the peak of the
 * multipliers.
 *
 * Design: one kernel multiplies the 16 rows of a run of blocks by up to 8 tokens at a time (4 with 16 registers): every vector
 * of codes is loaded once and meets one broadcast of 4 activations of each token.  Its float sums live in registers
 * and wait in memory between runs.  A run, codes and activations, fits the first-level cache, so several tiles read a
 * panel from memory once; meanwhile memory is asked for the next panel, in equal shares, so reading hides behind
 * multiplying.  One tile asks for what is a few thousand bytes ahead in the same memory: processors foresee less.
 * Every pass over a run asks for an equal share, so that memory is never idle.
 *
 * With dpbusd, several tiles meet two panels at a time, 6 tokens each: a core loads as many vectors as it multiplies,
 * and an activation that meets two vectors of codes is loaded half as often.  Rejected for one tile: two panels that
 * come from memory are slower than one after the other.
 *
 * dpbusd (VNNI) multiplies unsigned codes by signed activations, so it sums code * x, and the sum begins at
 * -offset * sum(x).  Without it maddubs multiplies 4 bits of codes and sums in 16 bits: the 16 products of a lane stay
 * below 16 * 15 * 127 = 30480, and so does the sum that begins at -offset / 2 * sum(x) in both lanes of a row, as it may
 * wrap on its way.  8-bit codes are two such sums, of low and of high nibbles.  Rejected: maddubs of |code| and of the
 * activation with the sign of the code, whose pairs must be widened one by one: three operations of the multipliers
 * where nibbles take two.
 */
#ifndef ZQ_PANELS_H
#define ZQ_PANELS_H
#include <immintrin.h>

#include "zq_vec.h"

/* Vectors of integers: HALVES of them hold the 16 rows. */
#if defined(__AVX512BW__)
enum { HALVES = 1, MOST_COUNT = 8 };
typedef __m512i ints;
typedef __m512 floats;
#define OP(name) _mm512_##name
ZQ_FN ints load_ints(const void *at) { return _mm512_loadu_si512(at); }
ZQ_FN void store_ints(void *at, ints x) { _mm512_storeu_si512(at, x); }
ZQ_FN floats load_halves(const uint8_t *at) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(const void *)at)); }
ZQ_FN ints low_nibbles(ints w) { return _mm512_and_si512(w, _mm512_set1_epi8(15)); }
#else
enum { HALVES = 2, MOST_COUNT = 4 };
typedef __m256i ints;
typedef __m256 floats;
#define OP(name) _mm256_##name
ZQ_FN ints load_ints(const void *at) { return _mm256_loadu_si256(at); }
ZQ_FN void store_ints(void *at, ints x) { _mm256_storeu_si256(at, x); }
ZQ_FN floats load_halves(const uint8_t *at) { return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(const void *)at)); }
ZQ_FN ints low_nibbles(ints w) { return _mm256_and_si256(w, _mm256_set1_epi8(15)); }
#endif
#if defined(__AVX512VNNI__)
enum { HAS_DOTS = 1 };
#define DPBUSD(sum, w, x) _mm512_dpbusd_epi32(sum, w, x)
#else
enum { HAS_DOTS = 0 };
#define DPBUSD(sum, w, x) (sum)
#endif
enum { BYTES = 64 / HALVES, LANES = 16 / HALVES, HAS_PLANES = HALVES == 2 };

/* Codes of 4 or 8 bits as they are stored; and codes of 8 bits as 8 vectors of low nibbles and 8 of high ones. */
enum { NIBBLES, WHOLE, PLANES };

enum {
  MOST_RUN = 64,        /* blocks of a run */
  AHEAD_OF_ONE = 8192 /* bytes between what a token reads and what memory is asked for; ZQ_AHEAD for more tokens */
};

/* Blocks of one panel and the activations of a tile. */
typedef struct {
  const uint8_t *codes, *scales, *lows;  /* of the first group; lows: its minima, or NULL */
  int64_t code_step, scale_step;         /* bytes from group to group, and of scales and minima */
  int64_t groups, each;                  /* blocks of a group */
  const int8_t *x;                       /* [block][stride][32] */
  const float *x_scales;                 /* [block][stride] */
  const int32_t *starts;                 /* [block][stride]: see `begin_sums` */
  const float *inputs;                   /* [group][stride]: what minima are multiplied by */
  int64_t stride;                        /* tokens of the tile */
  int is_row;                            /* the sums are those of blocks, which have one scale; not used for NULL */
  const uint8_t *ahead;                  /* prefetched: ahead_lines lines of 64 bytes for each block */
  int64_t ahead_lines, ahead_bytes;      /* bytes: of a pass over the run */
  const uint8_t *ahead_end;
  float (*sums)[ZQ_PANEL];               /* of tokens, added to */
  int64_t panel_bytes, sums_apart;       /* from a panel to the one that is multiplied with it, and floats of its sums */
} run_of_blocks;

ZQ_FN int32_t word_at(const void *at) {
  int32_t word;
  memcpy(&word, at, 4);
  return word;
}

/* Add the products of 4 codes and 4 activations in every lane. */
ZQ_FN ints dot(ints sum, ints w, ints all) {
  if (HAS_DOTS) return DPBUSD(sum, w, all);
  sum = OP(add_epi16)(sum, OP(maddubs_epi16)(w, all));
  __asm__("" : "+v"(sum)); /* else gcc moves all additions behind all products, which then leave the registers */
  return sum;
}

/* Integer sums of one block for `count` tokens and the rows of `width` vectors, which lie `apart` bytes apart. */
ZQ_FN void block_sums(const int codes, const int count, const int width, const uint8_t *w, int64_t apart,
                      const int8_t *x, const int32_t *starts, ints (*out)[MOST_COUNT]) {
  const int has_planes = !HAS_DOTS && codes != NIBBLES;
  const int sides = has_planes ? 2 : width, chunk = codes == NIBBLES ? 8 : 4;
  ints sum[2][MOST_COUNT];
  UNROLLED(2) for (int s = 0; s < sides; s++)
    UNROLLED(8) for (int t = 0; t < count; t++)
      sum[s][t] = has_planes && s == 0 ? OP(set1_epi32)(0) : OP(set1_epi32)(starts[t]);
  UNROLLED(8) for (int j = 0; j < 32 / chunk; j++) {
    ints v[2], high[2];
    UNROLLED(2) for (int s = 0; s < width; s++) v[s] = load_ints(w + 64 * j + apart * s);
    if (codes == PLANES) v[1] = load_ints(w + 512 + 64 * j);
    if (codes == NIBBLES || (codes == WHOLE && has_planes))
      UNROLLED(2) for (int s = 0; s < width; s++) high[s] = low_nibbles(OP(srli_epi16)(v[s], 4)), v[s] = low_nibbles(v[s]);
    if (codes == WHOLE && has_planes) v[1] = high[0];
    UNROLLED(8) for (int t = 0; t < count; t++) {
      ints all = OP(set1_epi32)(word_at(x + 32 * t + chunk * j));
      UNROLLED(2) for (int s = 0; s < sides; s++) sum[s][t] = dot(sum[s][t], v[s], all);
    }
    if (codes != NIBBLES) continue;
    UNROLLED(8) for (int t = 0; t < count; t++) {
      ints all = OP(set1_epi32)(word_at(x + 32 * t + chunk * j + 4));
      UNROLLED(2) for (int s = 0; s < sides; s++) sum[s][t] = dot(sum[s][t], high[s], all);
    }
  }
  UNROLLED(2) for (int s = 0; s < width; s++)
    UNROLLED(8) for (int t = 0; t < count; t++) {
      out[s][t] = HAS_DOTS ? sum[s][t] : OP(madd_epi16)(sum[s][t], OP(set1_epi16)(1));
      if (has_planes) out[s][t] = OP(add_epi32)(out[s][t], OP(madd_epi16)(sum[1][t], OP(set1_epi16)(16)));
    }
}

#define EACH_SUM                                     \
  UNROLLED(2) for (int h = 0; h < vectors; h++)      \
    UNROLLED(8) for (int t = 0; t < count; t++)

/* Vectors of rows are halves of a panel, or one of each of two panels. */
ZQ_FN void multiply_run(const run_of_blocks *r, const int codes, const int count, const int is_block,
                        const int panels) {
  const int block_bytes = codes == NIBBLES ? 256 : codes == PLANES ? 1024 : 512;
  const int vectors = HALVES * panels, width = !HAS_DOTS && codes != NIBBLES ? 1 : vectors;
  const int has_few_registers = HALVES == 2 && count > 1;
  const int64_t apart = HALVES == 2 ? BYTES : r->panel_bytes, scales_apart = HALVES == 2 ? 2 * LANES : r->panel_bytes;
  const int64_t sums_apart = HALVES == 2 ? LANES : r->sums_apart;
  const int64_t each = is_block ? 1 : r->each, stride = r->stride, lines = r->ahead_lines;
  const uint8_t *w = r->codes, *scales = r->scales, *lows = r->lows, *ahead = r->ahead;
  const int8_t *x = r->x;
  const float *x_scales = r->x_scales, *inputs = r->inputs;
  const int32_t *starts = r->starts;
  floats total[2][MOST_COUNT], part[2][MOST_COUNT];
  EACH_SUM total[h][t] = OP(loadu_ps)(*r->sums + ZQ_PANEL * t + sums_apart * h);
  for (int64_t g = 0; g < r->groups; g++) {
    if (!is_block) EACH_SUM part[h][t] = r->is_row ? total[h][t] : OP(setzero_ps)();
    for (int64_t b = 0; b < each; b++) {
      for (int64_t k = 0; k < lines; k++)
        UNROLLED(2) for (int p = 0; p < panels; p++)
          _mm_prefetch((const char *)ahead + 64 * k + r->panel_bytes * p, _MM_HINT_T0);
      ahead += 64 * lines;
      UNROLLED(2) for (int first = 0; first < vectors; first += width) {
        ints found[2][MOST_COUNT];
        const int8_t *own = x;
        if (has_few_registers) /* sums stay in memory, and the other half loads its activations again */
          __asm__("" : "+r"(own), "+m"(total), "+m"(part));
        block_sums(codes, count, width, w + block_bytes * b + apart * first, apart, own, starts, found);
        UNROLLED(2) for (int h = 0; h < width; h++) {
          floats steps = is_block ? load_halves(scales + scales_apart * (first + h)) : OP(setzero_ps)();
          UNROLLED(8) for (int t = 0; t < count; t++) {
            floats product = OP(mul_ps)(OP(cvtepi32_ps)(found[h][t]), OP(set1_ps)(x_scales[t]));
            if (is_block)
              total[first + h][t] = OP(add_ps)(total[first + h][t], OP(mul_ps)(product, steps));
            else
              part[first + h][t] = OP(add_ps)(part[first + h][t], product);
          }
        }
      }
      x += ZQ_BLOCK * stride, x_scales += stride, starts += stride;
    }
    w += r->code_step;
    if (!is_block && r->is_row) {
      EACH_SUM total[h][t] = part[h][t];
      continue;
    }
    if (!is_block)
      EACH_SUM total[h][t] = OP(add_ps)(total[h][t], OP(mul_ps)(part[h][t], load_halves(scales + scales_apart * h)));
    scales += r->scale_step;
    if (!lows) continue;
    EACH_SUM {
      floats product = OP(mul_ps)(OP(set1_ps)(inputs[t]), load_halves(lows + scales_apart * h));
      total[h][t] = OP(add_ps)(total[h][t], product);
    }
    lows += r->scale_step, inputs += stride;
  }
  EACH_SUM OP(storeu_ps)(*r->sums + ZQ_PANEL * t + sums_apart * h, total[h][t]);
}

#define RUN(codes, count, is_block, panels)                                                                     \
  static __attribute__((noinline)) void run_##codes##_##count##_##is_block##_##panels(const run_of_blocks *r) { \
    multiply_run(r, codes, count, is_block, panels);                                                            \
  }
#define RUNS(codes, count, panels) RUN(codes, count, 0, panels) RUN(codes, count, 1, panels)
#define ROW(codes, count, panels) {run_##codes##_##count##_0_##panels, run_##codes##_##count##_1_##panels}

typedef void (*run_kernel)(const run_of_blocks *);
RUNS(NIBBLES, 1, 1) RUNS(NIBBLES, 2, 1) RUNS(NIBBLES, 4, 1) RUNS(WHOLE, 1, 1) RUNS(WHOLE, 2, 1) RUNS(WHOLE, 4, 1)
#if defined(__AVX512BW__)
RUNS(NIBBLES, 8, 1) RUNS(WHOLE, 8, 1)
/* [codes][log2 of count][is_block] */
static const run_kernel runs[2][4][2] = {
    {ROW(NIBBLES, 1, 1), ROW(NIBBLES, 2, 1), ROW(NIBBLES, 4, 1), ROW(NIBBLES, 8, 1)},
    {ROW(WHOLE, 1, 1), ROW(WHOLE, 2, 1), ROW(WHOLE, 4, 1), ROW(WHOLE, 8, 1)}};
#else
RUNS(PLANES, 4, 1)
static const run_kernel runs[3][3][2] = {{ROW(NIBBLES, 1, 1), ROW(NIBBLES, 2, 1), ROW(NIBBLES, 4, 1)},
                                         {ROW(WHOLE, 1, 1), ROW(WHOLE, 2, 1), ROW(WHOLE, 4, 1)},
                                         {{0}, {0}, ROW(PLANES, 4, 1)}};
#endif
/* Tokens that are multiplied at a time. */
static int count_of(int left, int num_panels) {
  if (num_panels == 2) return left >= 6 && left != 8 ? 6 : left >= 4 ? 4 : left >= 2 ? 2 : 1;
  const int most = left < MOST_COUNT ? left : MOST_COUNT;
  return most >= 8 ? 8 : most >= 4 ? 4 : most >= 2 ? 2 : 1;
}

static int passes_of(int tokens, int num_panels) {
  int passes = 0;
  for (; tokens; passes++) tokens -= count_of(tokens, num_panels);
  return passes;
}

/* Every pass over a run asks for an equal share of the memory ahead. */
static void next_share(run_of_blocks *r) {
  r->ahead += r->ahead_bytes;
  if (r->ahead >= r->ahead_end) r->ahead_lines = 0;
}

#if defined(__AVX512VNNI__)
RUNS(NIBBLES, 1, 2) RUNS(NIBBLES, 2, 2) RUNS(NIBBLES, 4, 2) RUNS(NIBBLES, 6, 2)
RUNS(WHOLE, 1, 2) RUNS(WHOLE, 2, 2) RUNS(WHOLE, 4, 2) RUNS(WHOLE, 6, 2)
/* [codes][half of count][is_block] */
static const run_kernel pairs[2][4][2] = {
    {ROW(NIBBLES, 1, 2), ROW(NIBBLES, 2, 2), ROW(NIBBLES, 4, 2), ROW(NIBBLES, 6, 2)},
    {ROW(WHOLE, 1, 2), ROW(WHOLE, 2, 2), ROW(WHOLE, 4, 2), ROW(WHOLE, 6, 2)}};

/* Multiply a run of two panels by all tokens of a tile. */
static void multiply_pair(run_of_blocks *r, int bits, int is_block, int tokens) {
  r->stride = tokens;
  for (int left = tokens; left;) {
    const int count = count_of(left, 2);
    pairs[bits == 8][count / 2][is_block](r);
    r->x += ZQ_BLOCK * count, r->x_scales += count, r->starts += count, r->inputs += count, r->sums += count;
    next_share(r), left -= count;
  }
}
#else
static void multiply_pair(run_of_blocks *r, int bits, int is_block, int tokens) {
  (void)r, (void)bits, (void)is_block, (void)tokens;
}
#endif

/* Multiply a run by all tokens of a tile, as many at a time as registers hold.  split: its nibbles, or NULL. */
static void multiply(run_of_blocks *r, const uint8_t *split, int bits, int is_block, int tokens) {
  const uint8_t *codes = r->codes;
  const int64_t code_step = r->code_step;
  r->stride = tokens;
  for (int left = tokens; left;) {
    const int count = count_of(left, 1), size = __builtin_ctz((unsigned)count), is_split = split && count == MOST_COUNT;
    r->codes = is_split ? split : codes;
    r->code_step = is_split ? r->each * 1024 : code_step;
    runs[is_split ? PLANES : bits == 8 ? WHOLE : NIBBLES][size][is_block](r);
    r->x += ZQ_BLOCK * count, r->x_scales += count, r->starts += count, r->inputs += count, r->sums += count;
    next_share(r), left -= count;
  }
}

/* The values that integer sums begin at, for sums of activations. */
static void begin_sums(const zq_matrix *m, const int32_t *sums, int64_t count, int32_t *out) {
  if (HAS_DOTS) {
    for (int64_t k = 0; k < count; k++) out[k] = -m->offset * sums[k];
  } else {
    const int32_t half = m->bits == 8 ? m->offset / 32 : m->offset / 2; /* for 8 bits, of the high nibbles */
    for (int64_t k = 0; k < count; k++) out[k] = (-half * sums[k] & 0xffff) | (int32_t)((uint32_t)(-half * sums[k]) << 16);
  }
}

/* Sums of the activations of groups, from `blocks` blocks; those of a row are carried on. */
static void sum_inputs(const zq_tile *tile, int64_t first, int64_t blocks, int64_t each, int is_row, float *out) {
  const int32_t *sums = tile->sums + first * tile->tokens;
  const float *scales = tile->scales + first * tile->tokens;
  for (int64_t b = 0; b < blocks; b++, sums += tile->tokens, scales += tile->tokens) {
    float *group = is_row ? out : out + b / each * tile->tokens;
    for (int t = 0; t < tile->tokens; t++)
      group[t] = (is_row ? first + b : b % each) ? group[t] + (float)sums[t] * scales[t] : 0 + (float)sums[t] * scales[t];
  }
}

typedef struct {
  int64_t group, head, group_bytes, block_bytes; /* blocks of a group; bytes of its heads, of it and of a block */
  int is_row, is_block;
} panel_form;

ZQ_FN panel_form form_of(const zq_matrix *m) {
  const int64_t group = m->group / ZQ_BLOCK, head = ZQ_PANEL * m->scale_bytes * (m->has_mins ? 2 : 1);
  const int is_row = m->scale_bytes == 4;
  return (panel_form){group, head, head + group * 64 * m->bits, 64 * m->bits + (is_row ? 0 : head / group),
                      is_row,  !is_row && group == 1};
}

/* Scale the sums of rows that have one scale. */
static void finish_row(const zq_matrix *m, const uint8_t *scales, const float *inputs, int tokens,
                       float (*sums)[ZQ_PANEL]) {
  const v16 steps = load16((const float *)(const void *)scales);
  for (int t = 0; t < tokens; t++) {
    v16 total = splat(0) + load16(sums[t]) * steps;
    if (m->has_mins) total += splat(inputs[t]) * load16((const float *)(const void *)scales + ZQ_PANEL);
    memcpy(sums[t], &total, sizeof total);
  }
}

/* Split the codes of a run into nibbles. */
static void split_run(const uint8_t *group, const panel_form *form, int64_t count, uint8_t *out) {
  const int64_t each = form->is_row ? count : form->group;
  for (int64_t g = 0; g < count / each; g++, group += form->group_bytes)
    for (int64_t b = 0; b < each; b++, out += 1024)
      for (int64_t k = 0; k < 512; k += BYTES) {
        ints v = load_ints(group + form->head + 512 * b + k);
        store_ints(out + k, low_nibbles(v));
        store_ints(out + 512 + k, low_nibbles(OP(srli_epi16)(v, 4)));
      }
}

ZQ_FN int64_t bytes_of(const panel_form *form, int64_t blocks, int64_t group_blocks) {
  return form->is_row ? form->head + blocks * form->block_bytes : blocks / group_blocks * form->group_bytes;
}

/* Multiply one panel, or two together; memory is asked for as many at `next`. */
ZQ_FN void multiply_tiles(const zq_matrix *m, const uint8_t *at, int64_t blocks, const zq_tile *tiles,
                          int64_t num_tiles, const int num_panels, const uint8_t *next, float (*out)[ZQ_PANEL]) {
  const panel_form form = form_of(m);
  const int is_split = HAS_PLANES && m->bits == 8 && (num_tiles > 1 || tiles->tokens >= 3 * MOST_COUNT);
  const int64_t most = num_tiles == 1 && tiles->tokens < 8 ? MOST_RUN : m->bits == 8 ? MOST_RUN / 4 : MOST_RUN / 2;
  const int64_t bytes = bytes_of(&form, blocks, form.group);
  const int64_t passes = passes_of(tiles->tokens, num_panels), shares = 64 * num_tiles * passes;
  const int64_t lines = next ? (form.block_bytes + shares - 1) / shares : 0;
  uint8_t split[HAS_PLANES ? MOST_RUN / 4 * 1024 : 64] __attribute__((aligned(64)));
  int32_t starts[MOST_RUN * ZQ_MOST_TOKENS];
  float inputs[MOST_RUN * ZQ_MOST_TOKENS], of_rows[ZQ_MOST_TILES][ZQ_MOST_TOKENS];
  int64_t tokens_of_all = 0;
  for (int64_t k = 0; k < num_tiles; k++) tokens_of_all += tiles[k].tokens;
  for (int64_t first = 0; first < blocks; first += most) {
    const int64_t count = blocks - first < most ? blocks - first : most;
    const uint8_t *group = at + (form.is_row ? first * form.block_bytes : first / form.group * form.group_bytes);
    float(*sums)[ZQ_PANEL] = out;
    if (is_split) split_run(group, &form, count, split);
    for (int64_t k = 0; k < num_tiles; k++) {
      const zq_tile *tile = tiles + k;
      const int64_t tokens = tile->tokens, share = k * passes * count * lines * 64;
      run_of_blocks r = {.codes = group + form.head, .scales = group, .code_step = form.group_bytes,
                         .scale_step = form.group_bytes, .is_row = form.is_row, .sums = sums,
                         .x = tile->codes + first * tokens * ZQ_BLOCK, .x_scales = tile->scales + first * tokens,
                         .starts = starts, .inputs = form.is_row ? of_rows[k] : inputs,
                         .panel_bytes = bytes, .sums_apart = ZQ_PANEL * tokens_of_all};
      r.lows = m->has_mins && !form.is_row ? group + form.head / 2 : NULL;
      r.groups = form.is_row ? 1 : count / form.group;
      r.each = form.is_row ? count : form.group;
      r.ahead = (next ? next : at) + first * form.block_bytes;
      r.ahead_end = r.ahead + count * form.block_bytes, r.ahead += share;
      r.ahead_bytes = count * lines * 64, r.ahead_lines = r.ahead < r.ahead_end ? lines : 0;
      for (int p = 0; p < num_panels && !first; p++) memset(sums + p * tokens_of_all, 0, sizeof *sums * (size_t)tokens);
      begin_sums(m, tile->sums + first * tokens, count * tokens, starts);
      if (m->has_mins) sum_inputs(tile, first, count, form.group, form.is_row, (float *)(uintptr_t)r.inputs);
      if (num_panels == 2)
        multiply_pair(&r, m->bits, form.is_block, tile->tokens);
      else
        multiply(&r, is_split ? split : NULL, m->bits, form.is_block, tile->tokens);
      sums += tokens;
    }
  }
  for (int p = 0; p < num_panels && form.is_row; p++, at += bytes)
    for (int64_t k = 0; k < num_tiles; out += tiles[k++].tokens) finish_row(m, at, of_rows[k], tiles[k].tokens, out);
}

static void panel_tiles(const zq_matrix *m, const uint8_t *at, int64_t blocks, const zq_tile *tiles, int64_t num_tiles,
                        int num_panels, const uint8_t *next, float (*out)[ZQ_PANEL]) {
  const panel_form form = form_of(m);
  const int64_t bytes = bytes_of(&form, blocks, form.group);
  if (HAS_DOTS && num_panels == 2) return multiply_tiles(m, at, blocks, tiles, num_tiles, 2, next, out);
  for (int p = 0; p < num_panels; p++, at += bytes) {
    multiply_tiles(m, at, blocks, tiles, num_tiles, 1, p + 1 < num_panels ? at + bytes : next, out);
    for (int64_t k = 0; k < num_tiles; k++) out += tiles[k].tokens;
  }
}

static void panel(const zq_matrix *m, const uint8_t *at, int64_t blocks, const zq_tile *tile,
                  float (*out)[ZQ_PANEL]) {
  multiply_tiles(m, at, blocks, tile, 1, 1, at + (tile->tokens > 1 ? ZQ_AHEAD : AHEAD_OF_ONE), out);
}

#endif
