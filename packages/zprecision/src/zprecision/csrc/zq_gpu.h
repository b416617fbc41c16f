/* What zq_gpu.cu needs besides zk_gpu.h: short accesses, number formats, dot products of bytes.
 *
 * zk_gpu.h is the prelude of all CUDA texts, the same file as zoptim's.  The tests compile the text with a C compiler
 * behind tests/shim, and take the other side of each #ifdef, which gives the same values.
 */
#ifndef ZQ_GPU_H
#define ZQ_GPU_H

#ifdef __CUDACC__
#define ZQ_FN static __device__ __forceinline__
#define ZQ_UNROLL_2 _Pragma("unroll 2")
#define zq_bits(x) __float_as_uint(x)
#define zq_float(u) __uint_as_float(u)

ZQ_FN uint32_t zq_load2(uint64_t from) {
  uint16_t x;
  asm volatile("ld.global.u16 %0, [%1];" : "=h"(x) : "l"(from));
  return x;
}
ZQ_FN void zq_store1(uint64_t to, uint32_t x) { asm volatile("st.global.u8 [%0], %1;" ::"l"(to), "r"(x) : "memory"); }
ZQ_FN void zq_store2(uint64_t to, uint16_t x) { asm volatile("st.global.u16 [%0], %1;" ::"l"(to), "h"(x) : "memory"); }

ZQ_FN float zq_from_f16(uint32_t h) {
  float x;
  asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"((uint16_t)h));
  return x;
}
ZQ_FN uint16_t zq_to_f16(float x) {
  uint16_t h;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(x));
  return h;
}

/* sum + the products of four signed bytes */
ZQ_FN uint32_t zq_dot4(uint32_t a, uint32_t b, uint32_t sum) {
  uint32_t result;
  asm("dp4a.s32.s32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(sum));
  return result;
}

#else
#include <string.h>
#define ZQ_FN static inline __attribute__((always_inline, unused))
#define ZQ_UNROLL_2

ZQ_FN uint32_t zq_bits(float x) {
  uint32_t u;
  memcpy(&u, &x, 4);
  return u;
}
ZQ_FN float zq_float(uint32_t u) {
  float x;
  memcpy(&x, &u, 4);
  return x;
}

ZQ_FN uint32_t zq_load2(uint64_t from) {
  shim_tell(from, 2, 0);
  return *(const uint16_t *)from;
}
ZQ_FN void zq_store1(uint64_t to, uint32_t x) {
  shim_tell(to, 1, 1);
  *(uint8_t *)to = (uint8_t)x;
}
ZQ_FN void zq_store2(uint64_t to, uint16_t x) {
  shim_tell(to, 2, 1);
  *(uint16_t *)to = x;
}

ZQ_FN float zq_from_f16(uint32_t h) {
  uint32_t magnitude = (h & 0x7fffu) << 13;
  /* a product moves the exponent by 112 and makes normal numbers of subnormal ones */
  float x = magnitude < 0x0f800000u ? zq_float(magnitude) * 5192296858534827628530496329220096.0f
                                    : zq_float(magnitude | 0x7f800000u);
  return zq_float(zq_bits(x) | (h & 0x8000u) << 16);
}
ZQ_FN uint16_t zq_to_f16(float x) {
  uint32_t bits = zq_bits(x), sign = bits >> 16 & 0x8000u;
  bits &= 0x7fffffffu;
  if (bits >= 0x47800000u) return (uint16_t)(bits > 0x7f800000u ? 0x7fffu : sign | 0x7c00u); /* NaN as on a GPU */
  if (bits < 0x38800000u) return (uint16_t)(sign | (zq_bits(zq_float(bits) + 0.5f) - 0x3f000000u));
  bits += 0xfffu + (bits >> 13 & 1u);
  return (uint16_t)(sign | (bits - 0x38000000u) >> 13);
}

ZQ_FN uint32_t zq_dot4(uint32_t a, uint32_t b, uint32_t sum) {
  for (int k = 0; k < 32; k += 8) sum += (uint32_t)((int8_t)(a >> k) * (int8_t)(b >> k));
  return sum;
}
#endif

/* Elements of activations and weights: the numbers of zq_api.h. */
#define ZQ_F32 0
#define ZQ_BF16 1
#define ZQ_F16 2

#define ZQ_MAGIC 12582912.0f       /* 1.5 * 2^23: the last bit of the floats near it is 1 */
#define ZQ_MAGIC_BITS 0x4b400000u  /* so its bits plus n, |n| < 2^22, are those of the float MAGIC + n */
#define ZQ_TINY 0x0d800000u        /* 2^-100 */
#define ZQ_INFINITE 0x7f800000u
#define ZQ_ALIGNED __attribute__((aligned(16)))

ZQ_FN float zq_nearest(float x) { return (x + ZQ_MAGIC) - ZQ_MAGIC; } /* halves to even; |x| < 2^22 */

ZQ_FN float zq_widened(int64_t dtype, uint32_t bits) { /* of 16 bits */
  return dtype == ZQ_BF16 ? zq_float(bits << 16) : zq_from_f16(bits);
}
ZQ_FN uint32_t zq_to_bf16(float x) { /* nearest even; NaN as torch writes it on CPUs and GPUs */
  uint32_t bits = zq_bits(x);
  return x == x ? (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16 : 0x7fc0u;
}
ZQ_FN float zq_element(int64_t dtype, uint64_t from, int64_t index) {
  uint32_t word;
  if (dtype != ZQ_F32) return zq_widened(dtype, zq_load2(from + 2 * (uint64_t)index));
  zk_load4(from + 4 * (uint64_t)index, &word);
  return zq_float(word);
}
ZQ_FN void zq_put(int64_t dtype, uint64_t to, int64_t index, float x) {
  const uint32_t word = zq_bits(x);
  if (dtype == ZQ_F32)
    zk_store4(to + 4 * (uint64_t)index, &word);
  else
    zq_store2(to + 2 * (uint64_t)index, dtype == ZQ_BF16 ? (uint16_t)zq_to_bf16(x) : zq_to_f16(x));
}

ZQ_FN uint32_t zq_across(uint32_t value, int distance) { return __shfl_xor_sync(0xffffffffu, value, distance); }
ZQ_FN float zq_across_float(float value, int distance) { return zq_float(zq_across(zq_bits(value), distance)); }

#endif
