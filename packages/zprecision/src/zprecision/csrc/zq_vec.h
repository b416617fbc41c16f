/* Vectors of 16 lanes in the notation of gcc and clang: the compiler makes them of whatever registers a level has. */
#ifndef ZQ_VEC_H
#define ZQ_VEC_H
#include "zq_api.h"

#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define ZQ_FN static inline __attribute__((always_inline))

#define PRAGMA(text) _Pragma(#text)
#if defined(__clang__) /* the loop that follows */
#define UNROLLED(count) PRAGMA(clang loop unroll(full))
#else
#define UNROLLED(count) PRAGMA(GCC unroll count)
#endif

typedef float v16 __attribute__((vector_size(64)));
typedef int32_t i16 __attribute__((vector_size(64)));
typedef uint32_t u16 __attribute__((vector_size(64)));
typedef uint16_t h16 __attribute__((vector_size(32)));
typedef float v4 __attribute__((vector_size(16)));
typedef int32_t i4 __attribute__((vector_size(16)));
typedef int8_t c16 __attribute__((vector_size(16)));

ZQ_FN v16 splat(float x) { return (v16){0} + x; }
ZQ_FN v16 load16(const float *at) {
  v16 x;
  memcpy(&x, at, sizeof x);
  return x;
}
ZQ_FN v16 pick(i16 mask, v16 yes, v16 no) { return (v16)((mask & (i16)yes) | (~mask & (i16)no)); }

/* Nearest integer, halves to even, of |x| < 2^22. */
ZQ_FN v16 nearest(v16 x) { return (x + 12582912.0f) - 12582912.0f; }

/* Lanes of one or two vectors; those of the second are counted from 4 or 16 on. */
#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE4(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#define SHUFFLE16(x, y, ...) __builtin_shufflevector(x, y, __VA_ARGS__)
#else
#define SHUFFLE4(x, y, ...) __builtin_shuffle(x, y, (i4){__VA_ARGS__})
#define SHUFFLE16(x, y, ...) __builtin_shuffle(x, y, (i16){__VA_ARGS__})
#endif

/* Sum of the lanes: lanes l and l + 8, then 4, 2, 1.  Vectors of 4, as gcc permutes 16 lanes one by one. */
ZQ_FN float sum_lanes(v16 x) {
  v4 part[4];
  memcpy(part, &x, sizeof x);
  v4 sum = (part[0] + part[2]) + (part[1] + part[3]);
  sum += SHUFFLE4(sum, sum, 2, 3, 0, 1);
  return sum[0] + sum[1];
}

/* float16 without instructions for it: exact, with subnormal numbers. */
ZQ_FN v16 widen_halves(h16 x) {
#if defined(__AVX512F__)
  typedef long long half_words __attribute__((vector_size(32)));
  return (v16)_mm512_cvtph_ps((__m256i)(half_words)x);
#else
  u16 bits = __builtin_convertvector(x, u16), sign = (bits & 0x8000u) << 16, rest = (bits & 0x7fffu) << 13;
  /* the exponent is moved by 112 with a product, which makes normal numbers of subnormal ones */
  v16 scaled = (v16)rest * 5192296858534827628530496329220096.0f; /* 2^112 */
  i16 is_special = (i16)(rest) >= 0x0f800000;                     /* infinity and NaN */
  u16 special = rest | 0x7f800000u;
  return (v16)(((u16)is_special & special) | (~(u16)is_special & (u16)scaled) | sign);
#endif
}

ZQ_FN float widen_half(uint16_t x) {
  h16 all = {x};
  return widen_halves(all)[0];
}

/* Round to float16, to nearest, halves to even. */
ZQ_FN uint16_t narrow_half(float x) {
  uint32_t bits, sign;
  memcpy(&bits, &x, 4);
  sign = bits >> 16 & 0x8000u;
  bits &= 0x7fffffffu;
  if (bits >= 0x47800000u) return (uint16_t)(sign | (bits > 0x7f800000u ? 0x7e00u : 0x7c00u)); /* 65536 and above */
  if (bits < 0x38800000u) { /* below 2^-14: a multiple of 2^-24 */
    float magnitude;
    memcpy(&magnitude, &bits, 4);
    magnitude += 0.5f; /* the last bit of floats near 0.5 is 2^-24 */
    memcpy(&bits, &magnitude, 4);
    return (uint16_t)(sign | (bits - 0x3f000000u));
  }
  bits += 0xfffu + (bits >> 13 & 1); /* may carry into the exponent, up to infinity */
  return (uint16_t)(sign | ((bits - 0x38000000u) >> 13));
}

/* 16 elements of dtype 0 float32, 1 bfloat16, 2 float16. */
ZQ_FN v16 load_as(const int dtype, const void *at) {
  h16 narrow;
  if (dtype == 0) return load16(at);
  memcpy(&narrow, at, sizeof narrow);
  return dtype == 1 ? (v16)(__builtin_convertvector(narrow, u16) << 16) : widen_halves(narrow);
}

#endif
