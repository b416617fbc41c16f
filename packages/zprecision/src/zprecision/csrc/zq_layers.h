/* What zq_decode.c needs of the kernels in zq_layers.c. */
#ifndef ZQ_LAYERS_H
#define ZQ_LAYERS_H
#include "zq_api.h"

#define ZQ_WIDE 32 /* rows of a product, at most */
#define ZQ_MOST_CHOICES 256 /* of experts, by all tokens of a step: 16 for each of 16 */
#define ZQ_RUN 128 /* positions of a run of attention; runs begin at its multiples, whatever the length */

/* Attention of the query heads of one kv head of one token to the positions [first, end) of its sequence. */
typedef struct {
  const zq_block *block;
  const float *row; /* queries, keys and values of the token */
  int64_t slot, position, capacity, kv_head, first, end;
  float *partials;       /* by query head of the group: zq_partial_size(head size) floats */
  int64_t partial_stride; /* between query heads */
  float *scratch;        /* zq_attention_floats */
} zq_attention;

/* Floats of a partial result: the values, padded, and 16 more of which the first are maximum and sum. */
#define ZQ_PADDED(size) (((size) + 15) / 16 * 16)
#define ZQ_PARTIAL_FLOATS(size) (ZQ_PADDED(size) + 16)
#define ZQ_ATTENTION_FLOATS(size, group) ((18 + (group)) * ZQ_PADDED(size) + (group) * ZQ_RUN)

/* The functions of one instruction set. */
typedef struct {
  /* Up to ZQ_WIDE rows of float32, bfloat16 or float16 for all tokens, up to 16; the bits of zq_dense_products. */
  void (*plain)(int dtype, const char *weights, int64_t columns, int64_t rows, const float *x, int64_t stride,
                int64_t tokens, float (*out)[ZQ_WIDE]);
  /* The same of weights that lie as (columns, rows): `stride_rows` elements between columns. */
  void (*transposed)(int dtype, const char *weights, int64_t columns, int64_t stride_rows, int64_t rows, const float *x,
                     int64_t stride, int64_t tokens, float (*out)[ZQ_WIDE]);
  void (*norm)(const zq_norm *, const float *x, float *out);
  void (*add)(float *x, const float *values, float factor, int64_t numel); /* x += factor * values */
  void (*bias)(float *x, int dtype, const void *bias, int64_t numel);      /* x += bias */
  void (*activate)(int act, const float *x, const float *factors, float *out, int64_t numel);
  void (*cap)(float *x, float factor, float softcap, int64_t numel); /* x = c tanh(factor x / c) */
  void (*attend)(const zq_attention *);
  void (*merge)(const float *partials, int64_t num_runs, int64_t size, float *out);
} zq_layer_kernels;

#endif
