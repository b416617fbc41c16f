/* The interface between Python and the kernels.  hatch_build.py passes the part between the markers to cffi.
 *
 * Weights are panels of 16 rows; quant/panels.py documents their bytes.  Every function gives the same bits on every
 * instruction set and with any number of threads: integer sums are exact, and float operations have one fixed order.
 */
#ifndef ZQ_API_H
#define ZQ_API_H
#include <stdint.h>

/* cdef begin */
typedef struct {
  const uint8_t *data;  /* panels; or rows of floats, see `kind` */
  const float *bias;    /* (rows,), or NULL */
  float *out;           /* (tokens, rows) */
  int64_t rows;
  int64_t group;        /* elements that share a scale, a multiple of 32 */
  int32_t bits;         /* 4 or 8 */
  int32_t offset;       /* the code of zero */
  int32_t scale_bytes;  /* 2: float16; 4: float32, if the group is the row */
  int32_t has_mins;
  int32_t num_parts;    /* of the activation, 8 bits each: 1, or 2 */
} zq_matrix;

int zq_levels(void); /* instruction sets of this build, slowest first: 0 .. n-1 */
const char *zq_level_name(int level);
int zq_level_runs_here(int level);
int zq_best_level(void);
void zq_set_level(int level);
int zq_get_level(void);
void zq_set_omp(uint64_t parallel, uint64_t thread_num, uint64_t num_threads);
const char *zq_source_hash(void); /* of the C files, hatch_build.py and [tool.zbuild] */

/* Ask the system for large pages, of 2 MiB, for memory that is not written yet: reading it in order is faster. */
void zq_use_large_pages(void *at, int64_t bytes);

/* Bytes of scratch that the products of `tokens` rows of `columns` elements need; num_parts: the most of a matrix. */
int64_t zq_scratch_bytes(int64_t tokens, int64_t columns, int num_parts);
/* out = x . weights + bias for every matrix; x: (tokens, columns) float32, which is quantized into `scratch`. */
void zq_products(const float *x, int64_t tokens, int64_t columns, const zq_matrix *matrices, int64_t num_matrices,
                 void *scratch, int num_threads);
/* The same for weights in rows of float32 (dtype 0) or bfloat16 (1), up to 16 tokens. */
void zq_dense_products(const float *x, int64_t tokens, int64_t columns, const zq_matrix *matrices,
                       int64_t num_matrices, int dtype, void *scratch, int num_threads);
/* Codes (tokens, B, 32) and scales (tokens, B) of activations, for tests and for callers that keep them. */
void zq_quantize_activations(const float *x, int64_t tokens, int64_t columns, int8_t *codes, float *scales);

/* Quantize rows of float32 (dtype 0), bfloat16 (1) or float16 (2), as encode.py does.  rule: 0 search, 1 amax,
 * 2 minmax, 3 ggml.  group: a multiple of 32; the last group of a row is padded with zeros.  scales and mins are
 * float16, or float32 if scale_bytes is 4.  Returns 0 if a value or a scale is not finite. */
typedef struct {
  const void *values;
  uint8_t *codes;
  void *scales, *mins;
  int64_t rows, columns, group;
  int32_t dtype, rule, bits, scale_bytes;
} zq_quantization;
int zq_quantize(const zq_quantization *job, int num_threads);
/* Panels of a matrix of (rows, blocks * 32) codes in the order of layout.py. */
void zq_pack(const uint8_t *codes, const uint8_t *scales, const uint8_t *mins, uint8_t *panels, const zq_matrix *form,
             int64_t blocks, int is_signed, int num_threads);

/* Sum of squares, in double, of rows of one dtype (numbers as above). */
double zq_squares(int dtype, int64_t num_rows, const uint64_t *rows, const int64_t *numel, double *partials,
                  int num_threads);
int64_t zq_num_partials(int64_t num_rows, const int64_t *numel);

/* Decoding: one token of each of several sequences through the blocks of a decoder.  Numbers of dtypes: 0 float32,
 * 1 bfloat16, 2 float16, 3 int8 (of a cache only).  Pointers are read at every call, so weights may change. */
typedef struct {
  zq_matrix matrix;   /* its bias and out are not used */
  const void *bias;   /* (rows,) of `bias_dtype`, or NULL */
  int64_t columns;
  int32_t dtype;         /* of the rows: 0, 1 or 2; -1: panels */
  int32_t bias_dtype;
  int32_t is_transposed; /* plain weights lie as (columns, rows) */
} zq_projection;

typedef struct {
  const void *weight, *bias; /* (size,), or NULL */
  int64_t size;              /* 0: there is no norm */
  float eps, offset;         /* `offset` is added to the weight */
  int32_t is_centered, weight_dtype, bias_dtype;
} zq_norm;

/* down(act(up(x))), or down(act(gate(x)) * up(x)). */
typedef struct {
  zq_projection gate, up, down;
  int32_t has_gate; /* 0: no; 1: yes; 2: its rows are before those of `up` in one matrix, which `gate` and `up` are */
  int32_t act;      /* 0 SiLU, 1 GELU, 2 GELU by tanh, 3 ReLU, 4 x sigmoid(1.702 x), 5 ReLU squared, 6 tanh */
} zq_mlp;

/* A mixture: a router chooses `top_k` of the experts for each token, with weights; perhaps one is for all tokens. */
typedef struct {
  const zq_mlp *experts;     /* those held here, of one size; the shared one, of any size, is after them */
  zq_projection router;      /* one row for each expert */
  zq_projection shared_gate; /* one row: its sigmoid is the weight of the shared expert; no rows: the weight is 1 */
  int64_t num_experts, top_k;
  int64_t first, num_held;   /* experts [first, first + num_held) are held here; other ranks compute the others */
  float factor;              /* of the chosen weights */
  int32_t is_renormalized;   /* the chosen weights sum to `factor` */
  int32_t has_shared;
} zq_mixture;

typedef struct {
  zq_norm norm, query_norm, key_norm, out_norm, mlp_norm, mlp_out_norm;
  zq_projection qkv[3], out;
  zq_mlp mlp;
  const zq_mixture *mixture;        /* in the place of `mlp`; or NULL */
  void *keys, *values;              /* (slots, kv heads, capacity, head size) of `cache_dtype` */
  float *key_scales, *value_scales; /* (slots, kv heads, capacity), of an int8 cache */
  const float *cos, *sin;           /* (capacity, rotary_size / 2) */
  int64_t num_qkv;                  /* projections: 1 or 3; their rows, one after the other, are a token's row */
  int64_t num_heads, num_kv_heads, head_size;
  int64_t query_stride;             /* in a row: elements between the queries of two kv heads */
  int64_t key_at, value_at, kv_stride;
  int64_t rotary_size, window;      /* 0: none */
  float scale, softcap, attention_factor, mlp_factor;
  int32_t cache_dtype, is_neighbours;
  int32_t mlp_input; /* 0: residual, 1: the block's input, 2: what the attention reads */
  int32_t out_split, down_split; /* of the last projections over ranks: 0 no; 1 by columns; 2 by rows */
} zq_block;

typedef struct {
  const zq_block *blocks;
  int64_t num_blocks, width, capacity;
  zq_norm norm;        /* after the last block */
  zq_projection head;
  float head_factor, head_softcap;
  int32_t num_parts; /* of activations: the most of a matrix */
} zq_decoder;

/* A block is five stages: heads; their projection; what the MLP's last projection reads; that projection; the addition
 * of what it gives.  Between stages the caller exchanges with other ranks what is split.
 *
 * By columns: `written` has terms of a sum over ranks after the projection, and the sum before the next stage.
 * By rows: `part`, (tokens, own columns), has this rank's activations before the projection, `whole` has those of all
 * ranks when it begins; then `part`, (tokens, own rows), has what it gives, and `written` that of all ranks. */
typedef struct {
  int64_t first_stage, end_stage, tokens; /* stages of all blocks are counted through */
  const int64_t *slots, *positions; /* (tokens,): different slots; a position is the length of the sequence before */
  float *x;                         /* (tokens, width): input of the first block, output of the last */
  float *logits;                    /* (tokens, rows of the head), or NULL */
  float *written;                   /* (tokens, width); NULL: nothing is split */
  float *part;
  const float *whole;
  void *scratch;                    /* zq_step_bytes; kept from call to call */
} zq_step;

int64_t zq_step_bytes(const zq_decoder *decoder, int64_t tokens, int num_threads);
void zq_run_step(const zq_decoder *decoder, const zq_step *step, int num_threads);
/* out = act(x) * factors; act as in zq_block, and 7 exp, 8 erf; `factors` may be NULL. */
void zq_activate(int act, const float *x, const float *factors, float *out, int64_t numel);
/* cdef end */

#define ZQ_BLOCK 32
#define ZQ_PANEL 16
#define ZQ_MOST_TOKENS 16 /* of a tile */
#define ZQ_MOST_TILES 16  /* of a panel at a time */
#define ZQ_SPAN 16384    /* elements of one partial sum of squares */

#define ZQ_AHEAD 12288    /* bytes between what a product of few tokens reads and what memory is asked for */

/* Activations of a tile of up to 16 tokens: [block][token][32] codes, [block][token] scales and sums of codes.  A second
 * part, of what rounding the first left, has tiles of its own, whose product is added. */
typedef struct {
  const int8_t *codes;
  const float *scales;
  const int32_t *sums;
  int tokens;
} zq_tile;

/* The functions of one instruction set; zq_kern.c is compiled once for each. */
typedef struct {
  void (*panel)(const zq_matrix *, const uint8_t *panel, int64_t blocks, const zq_tile *, float (*out)[ZQ_PANEL]);
  void (*dense)(int dtype, const void *row, const float *x, int64_t columns, int64_t stride, int tokens, float *out);
  /* `rest`: blocks from the first part to the second; 0: there is none. */
  void (*activations)(const float *x, int64_t columns, int64_t blocks, int8_t *codes, float *scales, int32_t *sums,
                      int64_t stride, int64_t rest);
  int (*quantize)(const zq_quantization *, int64_t row, float *buffer);
  void (*pack)(const uint8_t *codes, uint8_t *vectors, int64_t row_bytes, int64_t rows, int64_t blocks,
               int64_t block_stride, int bits, int is_signed);
  double (*squares)(int dtype, const void *row, int64_t numel);
  /* The product of one or two panels, one after the other, with up to ZQ_MOST_TILES tiles, (panels, tokens);
   * memory is asked for the panels at `next` meanwhile, if any. */
  void (*panel_tiles)(const zq_matrix *, const uint8_t *panels, int64_t blocks, const zq_tile *tiles, int64_t num_tiles,
                      int num_panels, const uint8_t *next, float (*out)[ZQ_PANEL]);
} zq_kernels;

/* Of zq_rt.c, for zq_decode.c. */
const zq_kernels *zq_active_kernels(void);
int64_t zq_num_blocks(int64_t columns);                             /* of a row of activations */
int64_t zq_panel_bytes(const zq_matrix *matrix, int64_t columns);
int64_t zq_matrix_blocks(const zq_matrix *matrix, int64_t columns); /* of a row of the matrix */
int zq_tile_tokens(int64_t first, int64_t count);
typedef void zq_region_work(void *context, int thread, int num_threads);
void zq_run_region(zq_region_work *work, void *context, int num_threads);

#endif
