/* Number formats of one element, in plain C for gcc, clang and NVRTC.
 *
 * Every operation is exact or rounded once (IEEE): the builds forbid FMA contraction (gcc -ffp-contract=off,
 * NVRTC --fmad=false), so every instruction set and the GPU give the same bits.  No _Float16 and no
 * intrinsics: gcc vectorizes these integer forms on every target.
 *
 * The noise of stochastic rounding is a hash of the rounded value's bits and the step count.  Rounding is
 * therefore a pure function: independent of shards, thread count, resumes and device, without a generator
 * state to save.
 */
#ifndef ZK_MATH_H
#define ZK_MATH_H

#ifdef __CUDACC__ /* zk_gpu.h has defined the fixed-width types */
#define ZK_FN static __device__ __forceinline__
#define ZK_TABLE_FN static __device__
#define zk_bits(x) __float_as_uint(x)
#define zk_float(u) __uint_as_float(u)
#define zk_sqrtf(x) sqrtf(x)
#define zk_sqrt(x) sqrt(x)
#define ZK_KEEP(u) asm("" : "+r"(u)) /* a sum with a shifted word is one instruction if it is not conditional */
#else
#include <stdint.h>
#define ZK_FN static inline __attribute__((always_inline, unused))
#define ZK_TABLE_FN static inline __attribute__((unused))
ZK_FN uint32_t zk_bits(float x) { uint32_t u; __builtin_memcpy(&u, &x, 4); return u; }
ZK_FN float zk_float(uint32_t u) { float x; __builtin_memcpy(&x, &u, 4); return x; }
#define zk_sqrtf(x) __builtin_sqrtf(x)
#define zk_sqrt(x) __builtin_sqrt(x)
#define ZK_KEEP(u)
#endif

/* Formats of a stream of elements.  The numbers are part of the ABI with Python (native.py). */
#define ZK_NONE 0
#define ZK_F32 1
#define ZK_BF16 2  /* gradients and copies: nearest even; weights and states: stochastic */
#define ZK_F16 3   /* nearest even */
#define ZK_SPLIT 4 /* weights: bf16 plus int16 remainder make one exact float32 */
#define ZK_Q8 5    /* states: 8-bit codes, one float32 scale per ZK_BLOCK elements */

#define ZK_BLOCK 256 /* elements that share a scale of ZK_Q8; work is divided at its multiples */

/* Noise --------------------------------------------------------------------------------------------- */

/* A hash of 32 bits.  Only the upper 20 bits are well mixed, and only they are used. */
ZK_FN uint32_t zk_mix(uint32_t x) {
  x *= 0x7feb352du;
  x ^= x >> 15;
  x *= 0x846ca68bu;
  return x;
}

/* The seed of stream `stream` (0: weight, 1..3: states) at update `step`. */
ZK_FN uint32_t zk_seed(uint32_t step, uint32_t stream) {
  uint32_t x = zk_mix(step * 0x9e3779b9u + stream * 0x85ebca6bu + 1u);
  return x ^ (x >> 16);
}

ZK_FN uint32_t zk_noise(float x, uint32_t seed) { return zk_mix(zk_bits(x) ^ seed); }

/* bfloat16 ------------------------------------------------------------------------------------------ */

ZK_FN float zk_from_bf16(uint16_t h) { return zk_float((uint32_t)h << 16); }

/* Adds `noise` (16 bits) below the kept bits; the bf16 is the upper half of the result.  Infinities and quiet NaN, the
 * only NaN that arithmetic produces, are preserved. */
ZK_FN uint32_t zk_bf16_top(float x, uint32_t noise) {
  uint32_t u = zk_bits(x), sum = u + noise;
  ZK_KEEP(sum);
  return x == x ? sum : u;
}

ZK_FN uint32_t zk_bf16_top_stochastic(float x, uint32_t seed) { return zk_bf16_top(x, zk_noise(x, seed) >> 16); }

ZK_FN uint16_t zk_to_bf16_stochastic(float x, uint32_t seed) {
  return (uint16_t)(zk_bf16_top_stochastic(x, seed) >> 16);
}

#if defined(__CUDACC__) && __CUDA_ARCH__ >= 800 /* the same value in one instruction; NaN is 0x7fff */
ZK_FN uint16_t zk_to_bf16_nearest(float x) {
  uint16_t h;
  asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(x));
  return h;
}
#else
ZK_FN uint16_t zk_to_bf16_nearest(float x) {
  return (uint16_t)(zk_bf16_top(x, 0x7fffu + ((zk_bits(x) >> 16) & 1u)) >> 16);
}
#endif

/* float16 ------------------------------------------------------------------------------------------- */

#ifdef __CUDACC__ /* the same values in one instruction each; NaN is 0x7fff */
ZK_FN float zk_from_f16(uint16_t h) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(h));
  return x;
}

ZK_FN uint16_t zk_to_f16_nearest(float x) {
  uint16_t h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
  return h;
}
#else
ZK_FN float zk_from_f16(uint16_t h) {
  uint32_t magnitude = ((uint32_t)h & 0x7fffu) << 13;
  uint32_t exponent = magnitude & 0x0f800000u;
  uint32_t u = magnitude + 0x38000000u; /* exponent bias 15 -> 127 */
  u += exponent == 0x0f800000u ? 0x38000000u : 0u; /* infinities and NaN */
  float subnormal = zk_float(u + 0x00800000u) - zk_float(0x38800000u);
  u = exponent == 0u ? zk_bits(subnormal) : u;
  return zk_float(u | ((uint32_t)h & 0x8000u) << 16);
}

ZK_FN uint16_t zk_to_f16_nearest(float x) {
  uint32_t u = zk_bits(x);
  uint32_t sign = u & 0x80000000u;
  u ^= sign;
  uint32_t normal = (u + 0xc8000fffu + ((u >> 13) & 1u)) >> 13; /* bias 127 -> 15, round to even */
  uint32_t subnormal = zk_bits(zk_float(u) + 0.5f) - 0x3f000000u;
  uint32_t special = u > 0x7f800000u ? 0x7e00u : 0x7c00u;
  uint32_t h = u < 0x38800000u ? subnormal : normal;
  h = u >= 0x47800000u ? special : h;
  return (uint16_t)(h | sign >> 16);
}
#endif

/* Split master -------------------------------------------------------------------------------------- */

/* float32 bits = (bf16 << 16) + remainder; the bf16, which is the weight, is the float32 rounded half up.  NaN is
 * truncated instead: 0x7fffffff, the NaN of GPUs, would become the bf16 -0. */
ZK_FN float zk_join(uint16_t high, int16_t low) {
  return zk_float(((uint32_t)high << 16) + (uint32_t)(int32_t)low);
}

ZK_FN uint32_t zk_split_top(float x) { return zk_bf16_top(x, 0x8000u); }

ZK_FN uint16_t zk_split_high(float x) { return (uint16_t)(zk_split_top(x) >> 16); }

ZK_FN int16_t zk_split_low(float x) { return (int16_t)(uint16_t)(zk_bits(x) & 0xffffu); }

/* 8-bit codes ---------------------------------------------------------------------------------------
 *
 * A magnitude over the largest of its block, y in [0, 1], becomes the upper bits of the float32
 * t = y * (1 - c) + c with c = 2**-15: MANTISSA bits per binade where y is well above c, evenly spaced
 * near 0.  The top code is exactly 1, so the largest element of a block is exact, and
 * code -> float32 -> code is the identity.
 *
 *   signed (first moments): sign, 3 mantissa bits, magnitudes 0..120
 *   root (second moments):  4 mantissa bits, 0..240, of the square root: twice the range in decades, and the
 *                           update divides by the root
 */
#define ZK_TINY 1e-37f /* a block whose largest magnitude is smaller has scale 0 */
#define ZK_C 3.0517578125e-05f /* c = 2**-15 */
#define ZK_C_BITS 112u         /* its exponent field */

/* The factor that maps the largest magnitude to 1 or slightly above; the code clips at 1. */
ZK_FN float zk_q8_factor(float absmax) {
  return absmax < ZK_TINY ? 0.0f : (1.0f / absmax) * 1.0000002384185791f; /* 1 + 2**-22 */
}

/* y >= 0; noise holds (23 - mantissa) random bits, or half of their range to round to nearest.  The code is in the
 * result's bits from 23 - mantissa on, below the exponent of c, whose bits there are 0: no subtraction is needed.  At
 * t = 1 the noise is below the lowest kept mantissa bit, so a code never exceeds the top. */
ZK_FN uint32_t zk_q8_bits(float y, uint32_t noise) {
  y = y < 1.0f ? y : 1.0f; /* NaN becomes 1; the scale of its block is NaN */
  return zk_bits(y * (1.0f - ZK_C) + ZK_C) + noise;
}

/* The value of a code over the largest of its block, to be multiplied by zk_q8_unit(absmax). */
ZK_FN float zk_q8_value(uint32_t code, uint32_t mantissa) {
  return zk_float(code << (23u - mantissa) | ZK_C_BITS << 23) - ZK_C;
}

/* 1 + 2**-15 inverts 1 - 2**-15 in float32, so the top code gives absmax exactly. */
ZK_FN float zk_q8_unit(float y, float absmax) { return y * 1.000030517578125f * absmax; }

/* The magnitude's code, in bits 20 to 26 of the result. */
ZK_FN uint32_t zk_q8_magnitude(float x, float factor, uint32_t noise20) {
  return zk_q8_bits(zk_float(zk_bits(x) & 0x7fffffffu) * factor, noise20);
}

ZK_FN uint32_t zk_to_q8_signed(float x, float factor, uint32_t noise20) {
  return (zk_q8_magnitude(x, factor, noise20) >> 20 & 127u) | (zk_bits(x) >> 24 & 128u);
}

ZK_FN float zk_from_q8_signed(uint32_t code, float absmax) {
  float y = zk_q8_unit(zk_q8_value(code & 127u, 3u), absmax);
  return zk_float(zk_bits(y) | (code << 24 & 0x80000000u));
}

/* The root of a second moment.  A positive one never becomes 0: the update would divide by eps alone. */
ZK_FN uint32_t zk_q8_root(float root, float factor, uint32_t noise19) {
  uint32_t u = zk_q8_bits(root * factor, noise19), least = root > 0.0f ? ((ZK_C_BITS << 4) + 1u) << 19 : 0u;
  return u > least ? u : least; /* the code is in bits 19 to 26 */
}

ZK_FN uint32_t zk_to_q8_root(float root, float factor, uint32_t noise19) {
  return zk_q8_root(root, factor, noise19) >> 19 & 255u;
}

ZK_FN float zk_from_q8_root(uint32_t code, float absmax) { return zk_q8_unit(zk_q8_value(code, 4u), absmax); }

#endif
