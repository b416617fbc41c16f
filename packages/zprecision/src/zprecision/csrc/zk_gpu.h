/* The prelude of zk_gpu.cu, before zk_math.h: integer types, and macros for the CUDA keywords in use.
 *
 * NVRTC has no standard headers, so the types are defined here.  The tests compile the same text with a C
 * compiler; tests/shim then replaces CUDA, and this header is empty.
 */
#ifndef ZK_GPU_H
#define ZK_GPU_H
#ifdef __CUDACC__

typedef signed char int8_t;
typedef short int16_t;
typedef int int32_t;
typedef long long int64_t;
typedef unsigned char uint8_t;
typedef unsigned short uint16_t;
typedef unsigned int uint32_t;
typedef unsigned long long uint64_t;

/* `blocks` fit on a multiprocessor at once: 4 leave a thread 64 registers, 3 leave it 80. */
#define ZK_KERNEL(blocks, name, type) \
  extern "C" __global__ void __launch_bounds__(256, blocks) name(const __grid_constant__ type a)
#define ZK_SHARED __shared__
#define ZK_UNROLL _Pragma("unroll")
#define ZK_UNROLL_16 _Pragma("unroll 16")
#define ZK_NO_UNROLL _Pragma("unroll 1")
#define ZK_FENCE asm volatile("" ::: "memory") /* reads after it are not moved before it */

/* One instruction each: the lower or upper halves of two words as one, the odd bytes of two words as one. */
#define zk_lower_halves(a, b) __byte_perm(a, b, 0x5410)
#define zk_upper_halves(a, b) __byte_perm(a, b, 0x7632)
#define zk_odd_bytes(a, b) __byte_perm(a, b, 0x7531)

/* Aligned accesses of 16, 8 and 4 bytes.  In assembly, because the compiler splits the stores. */
static __device__ __forceinline__ void zk_load16(uint64_t from, uint32_t *x) {
  asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "l"(from));
}
static __device__ __forceinline__ void zk_load8(uint64_t from, uint32_t *x) {
  asm volatile("ld.global.v2.u32 {%0, %1}, [%2];" : "=r"(x[0]), "=r"(x[1]) : "l"(from));
}
static __device__ __forceinline__ void zk_load4(uint64_t from, uint32_t *x) {
  asm volatile("ld.global.u32 %0, [%1];" : "=r"(x[0]) : "l"(from));
}
static __device__ __forceinline__ void zk_store16(uint64_t to, const uint32_t *x) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};"
               ::"l"(to), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}
static __device__ __forceinline__ void zk_store8(uint64_t to, const uint32_t *x) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(to), "r"(x[0]), "r"(x[1]) : "memory");
}
static __device__ __forceinline__ void zk_store4(uint64_t to, const uint32_t *x) {
  asm volatile("st.global.u32 [%0], %1;" ::"l"(to), "r"(x[0]) : "memory");
}

#endif
#endif
