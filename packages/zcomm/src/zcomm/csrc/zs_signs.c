/* Sign codes of the compressed all-reduce (collectives/compressed.py): one bit an element, with error feedback.
 *
 * Compiled once per instruction set (ZS_LEVEL is its suffix); all give the same bits, because sums have eight lanes at
 * every level.  The memory of errors holds what was encoded, b, and the scale that the code had: the error is
 * b - s sign(b), which the next encoding computes as it reads b.  So one pass encodes: it reads the input and b, and
 * writes b and the bits.  A row of eight elements is a byte of the code; bits beyond a tensor's end are 1, as those
 * of zeros are.
 */
#include <string.h>

#include "zs_api.h"

#if defined(__AVX__)
#include <immintrin.h>
#elif defined(__SSE2__)
#include <emmintrin.h>
#endif

#define ROW 8
#define JOIN2(a, b) a##b
#define JOIN(a, b) JOIN2(a, b)

typedef float floats __attribute__((vector_size(32)));
typedef int32_t ints __attribute__((vector_size(32)));
typedef double doubles __attribute__((vector_size(64)));

static const ints SIGN = {INT32_MIN, INT32_MIN, INT32_MIN, INT32_MIN, INT32_MIN, INT32_MIN, INT32_MIN, INT32_MIN};
static const ints BITS = {1, 2, 4, 8, 16, 32, 64, 128};

static inline floats load(const float *from) {
  floats values;
  memcpy(&values, from, sizeof values);
  return values;
}
static inline void store(float *to, floats values) { memcpy(to, &values, sizeof values); }
static inline floats load_some(const float *from, int64_t n) {
  floats values = {0};
  memcpy(&values, from, (size_t)n * sizeof(float));
  return values;
}
static inline floats all_of(float value) { return (floats){value, value, value, value, value, value, value, value}; }

/* Scale s with the signs of a mask: -s where it is 0. */
static inline floats signed_by(ints is_positive, float scale) { return (floats)((ints)all_of(scale) ^ (~is_positive & SIGN)); }

static inline floats error_of(floats coded, float scale) { return coded - signed_by(coded >= 0, scale); }

static inline floats decoded(uint8_t code, float scale) {
  ints bits = (ints){code, code, code, code, code, code, code, code} & BITS;
  return signed_by(bits != 0, scale);
}

/* Bit i is 1 where element i is >= 0, so that a NaN has the sign -1, as a comparison in torch gives it. */
static inline uint8_t encoded(floats values) {
  ints is_positive = values >= 0;
#if defined(__AVX__)
  __m256 mask;
  memcpy(&mask, &is_positive, sizeof mask);
  return (uint8_t)_mm256_movemask_ps(mask);
#elif defined(__SSE2__)
  __m128 mask[2];
  memcpy(mask, &is_positive, sizeof mask);
  return (uint8_t)(_mm_movemask_ps(mask[0]) | _mm_movemask_ps(mask[1]) << 4);
#else
  ints bits = is_positive & BITS;
  return (uint8_t)(bits[0] | bits[1] | bits[2] | bits[3] | bits[4] | bits[5] | bits[6] | bits[7]);
#endif
}

static inline doubles squares_of(floats values) {
  doubles wide = __builtin_convertvector(values, doubles);
  return wide * wide;
}

static double total_of(doubles sums) {
  return ((sums[0] + sums[1]) + (sums[2] + sums[3])) + ((sums[4] + sums[5]) + (sums[6] + sums[7]));
}

/* Adds `input` to the errors, and encodes.  Returns the sum of squares of what is encoded. */
static double encode(float *coded, const float *input, float scale, uint8_t *codes, int64_t n) {
  doubles sums = {0};
  int64_t i = 0;
  for (; i + ROW <= n; i += ROW) {
    floats both = error_of(load(coded + i), scale) + load(input + i);
    store(coded + i, both);
    *codes++ = encoded(both);
    sums += squares_of(both);
  }
  if (i < n) {
    floats both = error_of(load_some(coded + i, n - i), scale) + load_some(input + i, n - i);
    memcpy(coded + i, &both, (size_t)(n - i) * sizeof(float));
    both = load_some(coded + i, n - i);
    *codes = encoded(both);
    sums += squares_of(both);
  }
  return total_of(sums);
}

void JOIN(zs_signs_encode_, ZS_LEVEL)(const zs_signs_job *job, const zs_signs *run, double *square) {
  *square = encode(job->coded + run->at, job->buffers[run->buffer] + run->begin, job->scales[run->piece],
                   job->codes + run->code, run->numel);
}

/* The mean of what arrived takes the place of the input. */
#define MEANS 1024
void JOIN(zs_signs_average_, ZS_LEVEL)(const zs_signs_job *job, const zs_signs *run, double *square) {
  float mean[MEANS];
  double total = 0;
  for (int64_t from = 0; from < run->numel; from += MEANS) {
    int64_t n = run->numel - from < MEANS ? run->numel - from : MEANS, rows = (n + ROW - 1) / ROW;
    for (int64_t source = 0; source < job->num_sources; source++) {
      const uint8_t *codes = job->received + source * job->source_bytes + run->code + from / ROW;
      float scale = job->source_scales[source * job->num_scales + run->piece];
      for (int64_t row = 0; row < rows; row++) {
        floats part = decoded(codes[row], scale);
        store(mean + ROW * row, source ? load(mean + ROW * row) + part : part);
      }
    }
    total += encode(job->coded + run->at + from, mean, job->scales[run->piece], job->codes + run->code + from / ROW, n);
  }
  *square = total;
}

/* Writes values into the buffers; `piece` is negative for padding, which becomes 0. */
void JOIN(zs_signs_decode_, ZS_LEVEL)(const zs_signs_job *job, const zs_signs *run, double *square) {
  (void)square;
  float *output = job->buffers[run->buffer] + run->begin;
  if (run->piece < 0) {
    memset(output, 0, (size_t)run->numel * sizeof(float));
    return;
  }
  const uint8_t *codes = job->codes + run->code;
  float scale = job->scales[run->piece];
  int64_t i = 0;
  for (; i + ROW <= run->numel; i += ROW) store(output + i, decoded(codes[i / ROW], scale));
  if (i < run->numel) {
    floats last = decoded(codes[i / ROW], scale);
    memcpy(output + i, &last, (size_t)(run->numel - i) * sizeof(float));
  }
}

/* Replaces what was encoded by its errors. */
void JOIN(zs_signs_settle_, ZS_LEVEL)(const zs_signs_job *job, const zs_signs *run, double *square) {
  (void)square;
  float *coded = job->coded + run->at, scale = job->scales[run->piece];
  int64_t i = 0;
  for (; i + ROW <= run->numel; i += ROW) store(coded + i, error_of(load(coded + i), scale));
  if (i < run->numel) {
    floats last = error_of(load_some(coded + i, run->numel - i), scale);
    memcpy(coded + i, &last, (size_t)(run->numel - i) * sizeof(float));
  }
}
