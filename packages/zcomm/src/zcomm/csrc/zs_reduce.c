/* Arithmetic: elementwise sum, maximum and minimum over the ranks, always in the order of the ranks.
 *
 * Compiled once per instruction set (ZS_LEVEL is its suffix); all give the same bits.  16-bit floats are summed in
 * float32 and rounded once, to nearest even.  Maximum and minimum keep a NaN, as torch does.  Sums of bool are "or".
 * A block of each source is reduced inside the first-level cache, so a source may be one of the outputs.
 * Large results that were not read before are written past the caches: otherwise the processor first fetches
 * the memory to be overwritten, a third of the traffic.
 */
#include <string.h>

#include "zs_api.h"

#if defined(__F16C__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

#define BLOCK 1024
#define JOIN2(a, b) a##b
#define JOIN(a, b) JOIN2(a, b)

#define SUM(a, b) ((a) + (b))
#define MAX(a, b) ((a) > (b) || (a) != (a) ? (a) : (b))
#define MIN(a, b) ((a) < (b) || (a) != (a) ? (a) : (b))
#define OR(a, b) ((a) | (b))
#define AND(a, b) ((a) & (b))

/* Elements at..at+n of the sources, into the n elements at `output`. */
typedef void reducer(int num, const void *const *sources, void *output, int64_t at, int64_t n);

#define SAME(NAME, T, OP)                                                                            \
  static void NAME(int num, const void *const *sources, void *output, int64_t at, int64_t n) {       \
    T scratch[BLOCK];                                                                                \
    const T *left = (const T *)sources[0] + at;                                                      \
    for (int r = 1; r < num; r++) {                                                                  \
      const T *right = (const T *)sources[r] + at;                                                   \
      T *out = r == num - 1 ? (T *)output : scratch;                                                 \
      _Pragma("GCC ivdep") for (int64_t i = 0; i < n; i++) {                                         \
        T a = left[i], b = right[i];                                                                 \
        out[i] = (T)OP(a, b);                                                                        \
      }                                                                                              \
      left = scratch;                                                                                \
    }                                                                                                \
  }

#define WIDE(NAME, WIDEN, NARROW, OP)                                                                \
  static void NAME(int num, const void *const *sources, void *output, int64_t at, int64_t n) {       \
    float sum[BLOCK], term[BLOCK];                                                                   \
    WIDEN(sum, (const uint16_t *)sources[0] + at, n);                                                \
    for (int r = 1; r < num; r++) {                                                                  \
      WIDEN(term, (const uint16_t *)sources[r] + at, n);                                             \
      for (int64_t i = 0; i < n; i++) {                                                              \
        float a = sum[i], b = term[i];                                                               \
        sum[i] = OP(a, b);                                                                           \
      }                                                                                              \
    }                                                                                                \
    NARROW((uint16_t *)output, sum, n);                                                              \
  }

static inline float as_float(uint32_t bits) {
  float value;
  memcpy(&value, &bits, 4);
  return value;
}

static inline uint32_t as_bits(float value) {
  uint32_t bits;
  memcpy(&bits, &value, 4);
  return bits;
}

static inline float bf16_up(uint16_t half) { return as_float((uint32_t)half << 16); }

static inline uint16_t bf16_down(float value) {
  uint32_t bits = as_bits(value), rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return (uint16_t)((bits & 0x7fffffffu) > 0x7f800000u ? 0x7fc0u : rounded);
}

/* A bfloat16 needs no second pass: it is widened, reduced and narrowed in registers. */
#define BF16(NAME, OP)                                                                               \
  static void NAME(int num, const void *const *sources, void *output, int64_t at, int64_t n) {       \
    float sum[BLOCK];                                                                                \
    const uint16_t *first = (const uint16_t *)sources[0] + at, *last = (const uint16_t *)sources[num - 1] + at; \
    uint16_t *out = output;                                                                          \
    if (num == 2) {                                                                                  \
      _Pragma("GCC ivdep") for (int64_t i = 0; i < n; i++) {                                         \
        float a = bf16_up(first[i]), b = bf16_up(last[i]);                                           \
        out[i] = bf16_down(OP(a, b));                                                                \
      }                                                                                              \
      return;                                                                                        \
    }                                                                                                \
    for (int64_t i = 0; i < n; i++) sum[i] = bf16_up(first[i]);                                      \
    for (int r = 1; r < num - 1; r++) {                                                              \
      const uint16_t *term = (const uint16_t *)sources[r] + at;                                      \
      for (int64_t i = 0; i < n; i++) {                                                              \
        float a = sum[i], b = bf16_up(term[i]);                                                      \
        sum[i] = OP(a, b);                                                                           \
      }                                                                                              \
    }                                                                                                \
    _Pragma("GCC ivdep") for (int64_t i = 0; i < n; i++) {                                           \
      float a = sum[i], b = bf16_up(last[i]);                                                        \
      out[i] = bf16_down(OP(a, b));                                                                  \
    }                                                                                                \
  }

static inline float fp16_up(uint16_t half) {
  uint32_t sign = (uint32_t)(half & 0x8000u) << 16, rest = (uint32_t)(half & 0x7fffu) << 13;
  if (rest >= 0x0f800000u) return as_float(sign | 0x70000000u | rest | (rest > 0x0f800000u ? 0x400000u : 0u));
  float magnitude = as_float(rest) * as_float(0x77800000u); /* times 2^112: exact, subnormals too */
  return as_float(sign | as_bits(magnitude));
}

static inline uint16_t fp16_down(float value) {
  uint32_t bits = as_bits(value), sign = (bits >> 16) & 0x8000u, rest = bits & 0x7fffffffu;
  if (rest > 0x7f800000u) return (uint16_t)(sign | 0x7e00u | ((rest >> 13) & 0x3ffu));
  if (rest >= 0x477ff000u) return (uint16_t)(sign | 0x7c00u); /* rounds to 65536 or more */
  if (rest < 0x38800000u) { /* a subnormal half: adding 0.5 leaves its digits, rounded, at the end */
    return (uint16_t)(sign | (as_bits(as_float(rest) + 0.5f) - 0x3f000000u));
  }
  rest += 0xfffu + ((rest >> 13) & 1u);
  return (uint16_t)(sign | ((rest - 0x38000000u) >> 13));
}

static void fp16_widen(float *restrict to, const uint16_t *restrict from, int64_t n) {
  int64_t i = 0;
#if defined(__F16C__)
  for (; i + 8 <= n; i += 8) _mm256_storeu_ps(to + i, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + i))));
#endif
  for (; i < n; i++) to[i] = fp16_up(from[i]);
}

static void fp16_narrow(uint16_t *restrict to, const float *restrict from, int64_t n) {
  int64_t i = 0;
#if defined(__F16C__)
  for (; i + 8 <= n; i += 8) _mm_storeu_si128((__m128i *)(to + i), _mm256_cvtps_ph(_mm256_loadu_ps(from + i), 0));
#endif
  for (; i < n; i++) to[i] = fp16_down(from[i]);
}

#define ALL_SAME(NAME, T)      \
  SAME(NAME##_sum, T, SUM)     \
  SAME(NAME##_max, T, MAX)     \
  SAME(NAME##_min, T, MIN)
#define ALL_WIDE(NAME)                                 \
  WIDE(NAME##_sum, NAME##_widen, NAME##_narrow, SUM)   \
  WIDE(NAME##_max, NAME##_widen, NAME##_narrow, MAX)   \
  WIDE(NAME##_min, NAME##_widen, NAME##_narrow, MIN)

ALL_SAME(f32, float)
ALL_SAME(f64, double)
ALL_SAME(i32, int32_t)
ALL_SAME(i64, int64_t)
ALL_SAME(u8, uint8_t)
ALL_SAME(i8, int8_t)
BF16(bf16_sum, SUM)
BF16(bf16_max, MAX)
BF16(bf16_min, MIN)
ALL_WIDE(fp16)
SAME(bool_or, uint8_t, OR)
SAME(bool_and, uint8_t, AND)

static reducer *const REDUCERS[ZS_REDUCIBLE][ZS_REDUCTIONS] = {
    [ZS_FLOAT32] = {f32_sum, f32_max, f32_min},    [ZS_FLOAT64] = {f64_sum, f64_max, f64_min},
    [ZS_BFLOAT16] = {bf16_sum, bf16_max, bf16_min}, [ZS_FLOAT16] = {fp16_sum, fp16_max, fp16_min},
    [ZS_INT32] = {i32_sum, i32_max, i32_min},      [ZS_INT64] = {i64_sum, i64_max, i64_min},
    [ZS_UINT8] = {u8_sum, u8_max, u8_min},         [ZS_INT8] = {i8_sum, i8_max, i8_min},
    [ZS_BOOL] = {bool_or, bool_or, bool_and},
};
static const int ITEM_BYTES[ZS_REDUCIBLE] = {4, 8, 2, 2, 4, 8, 1, 1, 1};

void JOIN(zs_stream_, ZS_LEVEL)(void *to, const void *from, int64_t bytes);
void JOIN(zs_reduce_, ZS_LEVEL)(int dtype, int reduction, int num, const void *const *sources, int num_outputs,
                                void *const *outputs, int64_t numel, int is_fresh);

/* Copies past the caches where supported; store_fence() must follow before another rank is notified. */
static void stream(void *to, const void *from, int64_t bytes) {
#if defined(__SSE2__)
  char *out = to;
  const char *in = from;
  int64_t head = (int64_t)(-(uintptr_t)out & 63);
  if (bytes < 256 + head) {
    memcpy(out, in, (size_t)bytes);
    return;
  }
  memcpy(out, in, (size_t)head);
  int64_t i = head;
  for (; i + 64 <= bytes; i += 64) {
    __m128i a = _mm_loadu_si128((const __m128i *)(in + i)), b = _mm_loadu_si128((const __m128i *)(in + i + 16));
    __m128i c = _mm_loadu_si128((const __m128i *)(in + i + 32)), d = _mm_loadu_si128((const __m128i *)(in + i + 48));
    _mm_stream_si128((__m128i *)(out + i), a);
    _mm_stream_si128((__m128i *)(out + i + 16), b);
    _mm_stream_si128((__m128i *)(out + i + 32), c);
    _mm_stream_si128((__m128i *)(out + i + 48), d);
  }
  memcpy(out + i, in + i, (size_t)(bytes - i));
#else
  memcpy(to, from, (size_t)bytes);
#endif
}

static void store_fence(void) {
#if defined(__SSE2__)
  _mm_sfence();
#endif
}

void JOIN(zs_stream_, ZS_LEVEL)(void *to, const void *from, int64_t bytes) {
  stream(to, from, bytes);
  store_fence();
}

/* num >= 2.  The first output gets the result, the others copies of it while it is in the cache; fresh ones, which
 * are not sources, are written past the cache. */
void JOIN(zs_reduce_, ZS_LEVEL)(int dtype, int reduction, int num, const void *const *sources, int num_outputs,
                                void *const *outputs, int64_t numel, int is_fresh) {
  _Alignas(64) double scratch[BLOCK];
  reducer *reduce = REDUCERS[dtype][reduction];
  const int64_t item = ITEM_BYTES[dtype];
  for (int64_t at = 0; at < numel; at += BLOCK) {
    int64_t n = numel - at < BLOCK ? numel - at : BLOCK, bytes = n * item;
    char *result = is_fresh ? (char *)scratch : (char *)outputs[0] + at * item;
    reduce(num, sources, result, at, n);
    for (int i = is_fresh ? 0 : 1; i < num_outputs; i++) {
      char *place = (char *)outputs[i] + at * item;
      if (is_fresh) {
        stream(place, result, bytes);
      } else {
        memcpy(place, result, (size_t)bytes);
      }
    }
  }
  if (is_fresh) store_fence();
}
