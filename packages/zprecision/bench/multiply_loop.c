/* The operations that products of blocks of 32 need, on registers that are loaded once: what products with many tokens
 * are measured by.  Integer products of the rows of one vector and `count` tokens, then for each token the conversion,
 * two products and a sum of floats, which scales take.  Loads and the separation of nibbles are left out.
 */
#include <immintrin.h>
#include <stdint.h>

#define KEEP(x) __asm__ volatile("" : "+v"(x)) /* or the compiler would compute it once */
#define EACH(count) _Pragma("GCC unroll 8") for (int t = 0; t < count; t++)

/* planes: 1 for codes of 4 bits; 2 for codes of 8 bits, which are multiplied by 4 bits at a time without dpbusd */
#define LOOP(name, planes, features, ints, floats, op, count, body)                      \
  __attribute__((target(features))) void name(int64_t blocks) {                          \
    ints codes = op(set1_epi32)(0x01020304), x[count], sums[2][count];                   \
    floats totals[count], scale = op(set1_ps)(0.5f);                                     \
    EACH(count) {                                                                        \
      x[t] = op(set1_epi32)(t), totals[t] = op(setzero_ps)();                            \
      KEEP(x[t]);                                                                        \
    }                                                                                    \
    for (int64_t b = 0; b < blocks; b++) {                                               \
      EACH(count) sums[0][t] = sums[planes - 1][t] = x[t];                               \
      _Pragma("GCC unroll 8") for (int j = 0; j < 8; j++) {                              \
        KEEP(codes);                                                                     \
        EACH(count) for (int k = 0; k < planes; k++) { body }                            \
        if (planes == 2) KEEP(codes);                                                    \
      }                                                                                  \
      EACH(count) {                                                                      \
        floats product = op(mul_ps)(op(cvtepi32_ps)(sums[0][t]), scale);                 \
        totals[t] = op(add_ps)(totals[t], op(mul_ps)(product, scale));                   \
      }                                                                                  \
    }                                                                                    \
    EACH(count) KEEP(totals[t]);                                                         \
  }

#define OP512(name) _mm512_##name
#define OP256(name) _mm256_##name
#define DOTS sums[k][t] = _mm512_dpbusd_epi32(sums[k][t], codes, x[t]);
#define PAIRS(op)                                                                        \
  ints_##op pairs = k ? op(maddubs_epi16)(x[t], codes) : op(maddubs_epi16)(codes, x[t]); \
  sums[k][t] = op(add_epi16)(sums[k][t], pairs);                                         \
  KEEP(sums[k][t]); /* gcc would move all sums behind all products */                    \
  if (j == 7) sums[k][t] = op(madd_epi16)(sums[k][t], codes);                            \
  if (j == 7 && k == 1) sums[0][t] = op(add_epi32)(sums[0][t], sums[1][t]);
typedef __m512i ints_OP512;
typedef __m256i ints_OP256;

#define AVX512 "avx512f,avx512bw,avx512dq,avx512vl"
LOOP(int4_avx512vnni, 1, AVX512 ",avx512vnni", __m512i, __m512, OP512, 8, DOTS)
LOOP(int8_avx512vnni, 1, AVX512 ",avx512vnni", __m512i, __m512, OP512, 8, DOTS)
LOOP(int4_avx512, 1, AVX512, __m512i, __m512, OP512, 8, PAIRS(OP512))
LOOP(int8_avx512, 2, AVX512, __m512i, __m512, OP512, 4, PAIRS(OP512))
LOOP(int4_avx2, 1, "avx2", __m256i, __m256, OP256, 4, PAIRS(OP256))
LOOP(int8_avx2, 2, "avx2", __m256i, __m256, OP256, 2, PAIRS(OP256))
