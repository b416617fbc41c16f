/* exp, tanh, erf of 16 lanes, by polynomials that a least-squares fit with equalized errors gave.
 *
 * Largest errors over all float32, in units in the last place: see tests/decoding/test_functions.py.  NaN gives NaN.
 */
#ifndef ZQ_MATH_H
#define ZQ_MATH_H
#include "zq_vec.h"

/* exp(n ln 2 + r) = 2^n exp(r), |r| <= ln(2) / 2.  Zero below 2^-126, infinity above the largest float32. */
ZQ_FN v16 exp16(v16 x) {
  v16 bounded = pick(x < -87.4f, splat(-87.4f), x); /* n >= -126 */
  bounded = pick(bounded > 89.0f, splat(89), bounded);
  v16 shifted = bounded * 1.44269502f + 12582912.0f, n = shifted - 12582912.0f; /* the last bits are those of n */
  v16 r = (bounded - n * 0.693359375f) + n * 2.12194442e-4f; /* the first product is exact */
  v16 series = ((1.39517174e-3f * r + 8.36959854e-3f) * r + 4.16661873e-2f) * r + 1.66665122e-1f;
  v16 power = ((series * r + 0.5f) * (r * r) + r) + 1.0f;
  i16 exponent = ((i16)shifted - 0x4b400000 + 126) << 23; /* of 2^(n - 1): 2^128 is no float32 */
  return power * (v16)exponent * 2.0f;
}

ZQ_FN v16 sigmoid16(v16 x) { return 1.0f / (1.0f + exp16(-x)); }

ZQ_FN v16 with_sign_of(v16 magnitude, v16 x) {
  return (v16)((u16)magnitude | ((u16)x & 0x80000000u));
}
ZQ_FN v16 magnitude_of(v16 x) { return (v16)((i16)x & 0x7fffffff); }

ZQ_FN v16 tanh16(v16 x) {
  v16 a = magnitude_of(x), z = a * a;
  v16 series = (((-5.71703678e-3f * z + 2.06505787e-2f) * z - 5.37434965e-2f) * z + 1.33314908e-1f) * z -
               3.33332837e-1f;
  v16 small = a + a * (z * series);
  v16 large = 1.0f - 2.0f / (exp16(a + a) + 1.0f);
  return with_sign_of(pick(a < 0.625f, small, large), x);
}

/* |x| < 1: x times a polynomial in x^2; else 1 - exp(-x^2) times one in 1 / (1 + x). */
ZQ_FN v16 erf16(v16 x) {
  v16 a = magnitude_of(x), z = a * a;
  v16 series = (((((7.88911930e-5f * z - 8.02084105e-4f) * z + 5.18953521e-3f) * z - 2.68544443e-2f) * z +
                 1.12836003e-1f) * z - 3.76126260e-1f) * z + 1.28379167e-1f;
  v16 small = a + a * series;
  v16 t = 1.0f / (1.0f + a);
  v16 rest = ((((4.39943582e-1f * t - 9.73544836e-1f) * t + 4.12172198e-1f) * t + 5.76477289e-1f) * t +
              5.56532860e-1f) * t + 7.74606597e-4f;
  v16 large = 1.0f - exp16(-z) * rest;
  large = pick(a > 4.0f, splat(1), large);
  return with_sign_of(pick(a < 1.0f, small, large), x);
}

enum { ACT_SILU, ACT_GELU, ACT_GELU_TANH, ACT_RELU, ACT_QUICK_GELU, ACT_SQUARED_RELU, ACT_TANH, ACT_EXP, ACT_ERF };

ZQ_FN v16 act16(const int act, v16 x) {
  switch (act) {
    case ACT_SILU: return x * sigmoid16(x);
    case ACT_GELU: return x * 0.5f * (1.0f + erf16(x * 0.707106781f));
    case ACT_GELU_TANH: return x * 0.5f * (1.0f + tanh16(0.797884561f * (x + 0.044715f * x * x * x)));
    case ACT_RELU: return pick(x < 0.0f, splat(0), x);
    case ACT_QUICK_GELU: return x * sigmoid16(1.702f * x);
    case ACT_SQUARED_RELU: return pick(x < 0.0f, splat(0), x * x);
    case ACT_TANH: return tanh16(x);
    case ACT_EXP: return exp16(x);
    default: return erf16(x);
  }
}

#endif
