/* exp, tanh, erf, by polynomials that a least-squares fit with equalized errors gave.
 *
 * Largest errors over all float32, in units in the last place: see tests/decoding/test_functions.py.  NaN gives NaN.
 */
#ifndef ZQ_MATH_H
#define ZQ_MATH_H
#include "zq_vec.h"

/* Vectors of the width of the registers: gcc keeps wider ones in memory.  Elementwise functions and sums that stay in
 * their lanes are the same on all of them. */
#if defined(__AVX512F__)
enum { LANES = 16 };
#elif defined(__AVX2__)
enum { LANES = 8 };
#else
enum { LANES = 4 };
#endif
enum { PARTS = 16 / LANES };
typedef float vec __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef uint32_t words __attribute__((vector_size(4 * LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

ZQ_FN vec all_of(float x) { return (vec){0} + x; }
ZQ_FN vec choose(ints mask, vec yes, vec no) { return (vec)((mask & (ints)yes) | (~mask & (ints)no)); }
ZQ_FN vec load_vec(const float *at) {
  vec x;
  memcpy(&x, at, sizeof x);
  return x;
}
ZQ_FN void store_vec(float *at, vec x) { memcpy(at, &x, sizeof x); }

/* float32 (dtype 0) or bfloat16 (1). */
ZQ_FN vec load_plain(const int dtype, const char *at) {
  vec x;
  halves narrow;
  if (dtype == 0) {
    memcpy(&x, at, sizeof x);
    return x;
  }
  memcpy(&narrow, at, sizeof narrow);
  return (vec)(__builtin_convertvector(narrow, words) << 16);
}

/* exp(n ln 2 + r) = 2^n exp(r), |r| <= ln(2) / 2.  Zero below 2^-126, infinity above the largest float32. */
ZQ_FN vec exp_of(vec x) {
  vec bounded = choose(x < -87.4f, all_of(-87.4f), x); /* n >= -126 */
  bounded = choose(bounded > 89.0f, all_of(89), bounded);
  vec shifted = bounded * 1.44269502f + 12582912.0f, n = shifted - 12582912.0f; /* the last bits are those of n */
  vec r = (bounded - n * 0.693359375f) + n * 2.12194442e-4f; /* the first product is exact */
  vec series = ((1.39517174e-3f * r + 8.36959854e-3f) * r + 4.16661873e-2f) * r + 1.66665122e-1f;
  vec power = ((series * r + 0.5f) * (r * r) + r) + 1.0f;
  ints exponent = ((ints)shifted - 0x4b400000 + 126) << 23; /* of 2^(n - 1): 2^128 is no float32 */
  return power * (vec)exponent * 2.0f;
}

ZQ_FN vec sigmoid_of(vec x) { return 1.0f / (1.0f + exp_of(-x)); }

ZQ_FN vec with_sign_of(vec magnitude, vec x) {
  return (vec)((words)magnitude | ((words)x & 0x80000000u));
}
ZQ_FN vec magnitude_of(vec x) { return (vec)((ints)x & 0x7fffffff); }

ZQ_FN vec tanh_of(vec x) {
  vec a = magnitude_of(x), z = a * a;
  vec series = (((-5.71703678e-3f * z + 2.06505787e-2f) * z - 5.37434965e-2f) * z + 1.33314908e-1f) * z -
               3.33332837e-1f;
  vec small = a + a * (z * series);
  vec large = 1.0f - 2.0f / (exp_of(a + a) + 1.0f);
  return with_sign_of(choose(a < 0.625f, small, large), x);
}

/* |x| < 1: x times a polynomial in x^2; else 1 - exp(-x^2) times one in 1 / (1 + x). */
ZQ_FN vec erf_of(vec x) {
  vec a = magnitude_of(x), z = a * a;
  vec series = (((((7.88911930e-5f * z - 8.02084105e-4f) * z + 5.18953521e-3f) * z - 2.68544443e-2f) * z +
                 1.12836003e-1f) * z - 3.76126260e-1f) * z + 1.28379167e-1f;
  vec small = a + a * series;
  vec t = 1.0f / (1.0f + a);
  vec rest = ((((4.39943582e-1f * t - 9.73544836e-1f) * t + 4.12172198e-1f) * t + 5.76477289e-1f) * t +
              5.56532860e-1f) * t + 7.74606597e-4f;
  vec large = 1.0f - exp_of(-z) * rest;
  large = choose(a > 4.0f, all_of(1), large);
  return with_sign_of(choose(a < 1.0f, small, large), x);
}

enum { ACT_SILU, ACT_GELU, ACT_GELU_TANH, ACT_RELU, ACT_QUICK_GELU, ACT_SQUARED_RELU, ACT_TANH, ACT_EXP, ACT_ERF };

ZQ_FN vec act_of(const int act, vec x) {
  switch (act) {
    case ACT_SILU: return x * sigmoid_of(x);
    case ACT_GELU: return x * 0.5f * (1.0f + erf_of(x * 0.707106781f));
    case ACT_GELU_TANH: return x * 0.5f * (1.0f + tanh_of(0.797884561f * (x + 0.044715f * x * x * x)));
    case ACT_RELU: return choose(x < 0.0f, all_of(0), x);
    case ACT_QUICK_GELU: return x * sigmoid_of(1.702f * x);
    case ACT_SQUARED_RELU: return choose(x < 0.0f, all_of(0), x * x);
    case ACT_TANH: return tanh_of(x);
    case ACT_EXP: return exp_of(x);
    default: return erf_of(x);
  }
}

#endif
