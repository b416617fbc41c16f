/* One token of each of several sequences through the blocks of a decoder, in one parallel region.
 *
 * Problem: at one token a matrix is read in a tenth of a millisecond, and a dispatcher that is called a dozen times a
 * block costs as much as some of them.
 *
 * Design: a phase is a list of independent units.  Threads claim runs of them, large ones first, and go on when all are
 * done: nobody waits for a thread that the system has put aside, unless it holds a claim.
 *
 *   inputs     a token        norm, quantized for the projections
 *   project    16 rows        queries, keys, values
 *   attend     a token, a kv head, a run of positions      rotation, cache write, attention
 *   merge      a token        the runs of its heads, quantized
 *   output     16 rows        added to the residual stream, or kept if a norm follows
 *   mlp inputs a token        norms, quantized
 *   grow       32 rows        gate and up, activation, product, quantized: a block of the activation
 *   shrink     16 rows        as output
 *
 * An MLP of experts has other phases in the place of the last two:
 *
 *   route      16 rows        of the router
 *   choose     one            experts of all tokens; tokens of each expert
 *   gather     a choice       what the MLP reads, in the order of the experts, quantized in tiles of an expert's tokens
 *   grow       32 rows of an expert     for its tokens
 *   shrink     16 rows        of all chosen experts: a token's terms are added in the order of the experts
 *
 * A decoder whose weights are split over ranks runs up to where ranks exchange activations, and goes on when the caller
 * has done so; products by rows of a split projection have the bits of the whole one.
 *
 * A unit reads whole rows of weights for all tokens, so weights are read once for all.  No sum crosses a unit, and
 * every sum has one order: results depend neither on threads nor on the other tokens.
 *
 * Rejected: a region for each phase (its start and end cost more); barriers and equal shares (on a busy machine each of
 * 200 barriers waits until both threads were given a core); one unit a row group with the attention
 * within (kv heads and rows of the output do not divide alike).
 */
#include "zq_layers.h"

#include <sched.h>
#include <stdlib.h>
#include <string.h>

extern const zq_layer_kernels zq_layers_base;
#if defined(ZQ_HAS_X86)
extern const zq_layer_kernels zq_layers_v3, zq_layers_v4;
static const zq_layer_kernels *const layers[] = {&zq_layers_base, &zq_layers_v3, &zq_layers_v4, &zq_layers_v4};
#else
static const zq_layer_kernels *const layers[] = {&zq_layers_base};
#endif

enum { INPUT_RESIDUAL, INPUT_BLOCK, INPUT_SOURCE };
enum { SPLIT_COLUMNS = 1, SPLIT_ROWS };
enum { ACT_EXP = 7 }; /* of zq_activate */

/* Units of a phase that were claimed, and that are done. */
typedef struct {
  int64_t claimed, done, unused[6]; /* a cache line */
} progress;

static int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }

/* Activations of some tokens, as floats in rows that are padded with zeros to 64, and quantized in tiles; `rest` blocks
 * after them are the tiles of the second part, if there is one. */
typedef struct {
  float *floats;
  int64_t stride, blocks, tokens, rest;
  int8_t *codes;
  float *scales;
  int32_t *sums;
} activations;

/* The tokens of one expert: choices [first, first + count) in the order of the experts. */
typedef struct {
  int64_t expert, first, count; /* expert: its index among those held here */
} expert_group;

/* Choices of the experts held here, up to (tokens, top_k); in the order of the experts, and then of the tokens. */
typedef struct {
  int64_t num, num_groups, token[ZQ_MOST_CHOICES], group_of[ZQ_MOST_CHOICES];
  float weight[ZQ_MOST_CHOICES];
  expert_group groups[ZQ_MOST_CHOICES];
} choices;

typedef struct {
  const zq_decoder *decoder;
  const zq_step *given;
  const zq_kernels *products;
  const zq_layer_kernels *layers;
  const zq_block *block; /* that the thread is at */
  progress *phases, *phase; /* all of the step, and the next of the thread */
  int num_threads;
  activations source, attended, mlp_input, grown;
  activations chosen, chosen_grown; /* a row for each choice of an expert */
  choices *choice;
  float *routed; /* (tokens, routed_stride): what the router gave, and the gate of the shared expert */
  int64_t routed_stride;
  float *rows, *written; /* (tokens, row): queries, keys, values; (tokens, width): before a norm, or a sum over ranks */
  float *partials;
  int64_t row_stride, most_runs;
  float *scratch; /* of each thread */
  int64_t scratch_floats;
} step;

/* Memory -------------------------------------------------------------------------------------------------- */

typedef struct {
  char *base; /* NULL: only count */
  int64_t used;
} arena;

static void *reserve(arena *a, int64_t bytes) {
  void *at = a->base ? a->base + a->used : NULL;
  a->used += (bytes + 63) / 64 * 64;
  return at;
}

static activations reserve_activations(arena *a, int64_t tokens, int64_t columns, int num_parts) {
  activations x = {.stride = (columns + 63) / 64 * 64 + 64, .blocks = zq_num_blocks(columns), .tokens = tokens};
  const int64_t blocks = num_parts * tokens * x.blocks;
  x.rest = num_parts > 1 ? tokens * x.blocks : 0;
  x.floats = reserve(a, tokens * x.stride * 4);
  x.codes = reserve(a, blocks * ZQ_BLOCK);
  x.scales = reserve(a, blocks * 4);
  x.sums = reserve(a, blocks * 4);
  return x;
}

static int64_t num_phases(const zq_decoder *d) { return 15 * d->num_blocks + 2; }

static int64_t most_runs(const zq_decoder *d) { return (d->capacity + ZQ_RUN - 1) / ZQ_RUN; }

static int64_t row_of(const zq_block *b) { return (b->num_heads + 2 * b->num_kv_heads) * b->head_size; }

/* Sizes of buffers of the MLPs. */
typedef struct {
  int64_t grown, routed, top_k, expert_grown;
} mlp_sizes;

/* What an MLP's last projection reads, of this rank. */
static int64_t own_grown(const zq_mlp *m) { return m->has_gate == 2 ? m->up.matrix.rows / 2 : m->up.matrix.rows; }

static mlp_sizes sizes_of(const zq_decoder *d) {
  mlp_sizes found = {0, 0, 0, 0};
  for (const zq_block *b = d->blocks; b < d->blocks + d->num_blocks; b++) {
    const zq_mixture *m = b->mixture;
    const zq_mlp *all = m ? m->experts + m->num_held : &b->mlp; /* for all tokens */
    if (!m || m->has_shared) found.grown = larger(found.grown, larger(all->down.columns, own_grown(all)));
    if (!m) continue;
    found.routed = larger(found.routed, m->num_experts + 1);
    found.top_k = larger(found.top_k, m->top_k);
    found.expert_grown = larger(found.expert_grown, m->experts->down.columns);
  }
  return found;
}

/* Place all buffers; each is large enough for every block. */
static int64_t place(step *s, const zq_decoder *d, int64_t tokens, int num_threads, void *memory) {
  int64_t row = 16, mixed = 0, partial = 0;
  const mlp_sizes sizes = sizes_of(d);
  arena a = {memory, 0};
  for (const zq_block *b = d->blocks; b < d->blocks + d->num_blocks; b++) {
    row = larger(row, row_of(b));
    mixed = larger(mixed, larger(b->out.columns, b->num_heads * b->head_size));
    partial = larger(partial, b->num_heads * ZQ_PARTIAL_FLOATS(b->head_size));
    s->scratch_floats = larger(s->scratch_floats,
                               ZQ_ATTENTION_FLOATS(b->head_size, b->num_heads / b->num_kv_heads));
  }
  s->phases = reserve(&a, num_phases(d) * (int64_t)sizeof *s->phases);
  s->row_stride = (row + 15) / 16 * 16 + 16;
  s->most_runs = most_runs(d);
  s->source = reserve_activations(&a, tokens, d->width, d->num_parts);
  s->attended = reserve_activations(&a, tokens, mixed, d->num_parts);
  s->mlp_input = reserve_activations(&a, tokens, d->width, d->num_parts);
  s->grown = reserve_activations(&a, tokens, sizes.grown, d->num_parts);
  if (sizes.top_k) {
    s->chosen = reserve_activations(&a, tokens * sizes.top_k, d->width, d->num_parts);
    s->chosen_grown = reserve_activations(&a, tokens * sizes.top_k, sizes.expert_grown, d->num_parts);
    s->choice = reserve(&a, sizeof *s->choice);
    s->routed_stride = (sizes.routed + 15) / 16 * 16 + 16;
    s->routed = reserve(&a, tokens * s->routed_stride * 4);
  }
  s->rows = reserve(&a, tokens * s->row_stride * 4);
  s->written = reserve(&a, tokens * d->width * 4);
  s->partials = reserve(&a, tokens * partial * s->most_runs * 4);
  s->scratch = reserve(&a, num_threads * s->scratch_floats * 4);
  return a.used;
}

/* Activations of another length in the same memory. */
static activations of_columns(activations x, int64_t columns) {
  x.blocks = zq_num_blocks(columns);
  x.rest = x.rest ? x.tokens * x.blocks : 0;
  return x;
}

int64_t zq_step_bytes(const zq_decoder *decoder, int64_t tokens, int num_threads) {
  step s = {0};
  return place(&s, decoder, tokens, num_threads, NULL) + 64;
}

/* Activations --------------------------------------------------------------------------------------------- */

/* Index of block 0 of a token in tiles, and the distance between its blocks. */
static int64_t tile_at(int64_t token, int64_t tokens, int64_t blocks, int *size) {
  int64_t first = 0;
  *size = zq_tile_tokens(0, tokens);
  while (first + *size <= token) first += *size, *size = zq_tile_tokens(first, tokens);
  return first * blocks + (token - first);
}

/* Quantize elements [first, first + count) of a token, whole blocks, and the padding after `columns`. */
static void quantize_blocks(const step *s, const activations *x, int64_t token, int64_t first, int64_t count,
                            int64_t columns) {
  int size;
  int64_t at = tile_at(token, x->tokens, x->blocks, &size) + first / ZQ_BLOCK * size;
  int64_t blocks = first + count >= columns ? x->blocks - first / ZQ_BLOCK : count / ZQ_BLOCK;
  s->products->activations(x->floats + token * x->stride + first, columns - first < count ? columns - first : count,
                           blocks, x->codes + at * ZQ_BLOCK, x->scales + at, x->sums + at, size, x->rest);
}

static void pad_floats(const activations *x, int64_t token, int64_t columns) {
  const int64_t padded = (columns + 63) / 64 * 64;
  memset(x->floats + token * x->stride + columns, 0, (size_t)(padded - columns) * 4);
}

/* The whole row of a token, from its floats. */
static void finish_row(const step *s, const activations *x, int64_t token, int64_t columns, int is_quantized) {
  pad_floats(x, token, columns);
  if (is_quantized) quantize_blocks(s, x, token, 0, columns, columns);
}

/* Some of the rows, in tiles of their own. */
static activations part_of(activations x, int64_t first, int64_t count) {
  x.floats += first * x.stride;
  x.codes += first * x.blocks * ZQ_BLOCK, x.scales += first * x.blocks, x.sums += first * x.blocks;
  x.tokens = count;
  return x;
}

/* Products ------------------------------------------------------------------------------------------------ */

/* One panel of a projection for the tile that begins at `token`; returns its tokens. */
static int panel_tile(const step *s, const zq_matrix *m, const uint8_t *data, int64_t blocks, const activations *x,
                      int64_t token, float (*values)[ZQ_PANEL]) {
  const int tokens = zq_tile_tokens(token, x->tokens);
  const int64_t at = token * x->blocks, rest = at + x->rest;
  const zq_tile tiles[] = {{x->codes + at * ZQ_BLOCK, x->scales + at, x->sums + at, tokens},
                           {x->codes + rest * ZQ_BLOCK, x->scales + rest, x->sums + rest, tokens}};
  if (m->num_parts == 1) return s->products->panel(m, data, blocks, tiles, values), tokens;
  s->products->panel_tiles(m, data, blocks, tiles, 2, 1, data + ZQ_AHEAD, values);
  for (int k = 0; k < tokens; k++)
    for (int r = 0; r < ZQ_PANEL; r++) values[k][r] += values[tokens + k][r];
  return tokens;
}

static void panel_rows(const step *s, const zq_projection *p, const activations *x, int64_t first, int64_t count,
                       float (*out)[ZQ_WIDE]) {
  const int64_t tokens = x->tokens, bytes = zq_panel_bytes(&p->matrix, p->columns);
  const int64_t blocks = zq_matrix_blocks(&p->matrix, p->columns);
  float values[2 * ZQ_MOST_TOKENS][ZQ_PANEL];
  for (int64_t panel = first / ZQ_PANEL; panel * ZQ_PANEL < first + count; panel++) {
    const int64_t begin = larger(panel * ZQ_PANEL, first), row = begin - panel * ZQ_PANEL;
    int64_t length = ZQ_PANEL - row;
    if (begin + length > first + count) length = first + count - begin;
    for (int64_t token = 0; token < tokens;) {
      const int size = panel_tile(s, &p->matrix, p->matrix.data + panel * bytes, blocks, x, token, values);
      for (int k = 0; k < size; k++) memcpy(out[token + k] + (begin - first), values[k] + row, (size_t)length * 4);
      token += size;
    }
  }
}

static void plain_rows(const step *s, const zq_projection *p, const activations *x, int64_t first, int64_t count,
                       float (*out)[ZQ_WIDE]) {
  const int64_t width = p->dtype == 0 ? 4 : 2;
  const char *data = (const char *)p->matrix.data;
  if (p->is_transposed)
    s->layers->transposed(p->dtype, data + first * width, p->columns, p->matrix.rows, count, x->floats, x->stride,
                          x->tokens, out);
  else
    s->layers->plain(p->dtype, data + first * p->columns * width, p->columns, count, x->floats, x->stride, x->tokens,
                     out);
}

/* Rows [first, first + count) of a projection for all tokens of x, with its bias. */
static void product_rows(const step *s, const zq_projection *p, const activations *x, int64_t first, int64_t count,
                         float (*out)[ZQ_WIDE]) {
  (p->dtype < 0 ? panel_rows : plain_rows)(s, p, x, first, count, out);
  if (!p->bias) return;
  const char *bias = (const char *)p->bias + first * (p->bias_dtype == 0 ? 4 : 2);
  for (int64_t token = 0; token < x->tokens; token++) s->layers->bias(out[token], p->bias_dtype, bias, count);
}

static int64_t units_of(int64_t rows, int64_t each) { return (rows + each - 1) / each; }

/* Phases -------------------------------------------------------------------------------------------------- */

typedef void phase(step *s, int64_t from, int64_t to, int thread);

/* Whether what attention or MLP give is kept until all rows are there: for a norm, or a sum over ranks. */
static int is_kept(const zq_norm *norm, int split) { return norm->size || split; }

/* The end of attention or MLP. */
typedef struct {
  const zq_projection *last;
  const zq_norm *norm;
  int64_t rows; /* that this rank gives */
  float factor;
  int split;
} ending;

static ending attention_end(const step *s) {
  const zq_block *b = s->block;
  const int64_t rows = b->out_split == SPLIT_ROWS ? b->out.matrix.rows : s->decoder->width;
  return (ending){&b->out, &b->out_norm, rows, b->attention_factor, b->out_split};
}

static ending mlp_end(const step *s) {
  const zq_block *b = s->block;
  const int64_t rows = b->down_split == SPLIT_ROWS ? b->mlp.down.matrix.rows : s->decoder->width;
  return (ending){&b->mlp.down, &b->mlp_out_norm, rows, b->mlp_factor, b->down_split};
}

/* Add elements [first, first + count) of all tokens to the residual stream, or keep them. */
static void emit(step *s, const ending *end, int64_t first, int64_t count, float (*values)[ZQ_WIDE]) {
  const int64_t width = s->decoder->width;
  for (int64_t token = 0; token < s->given->tokens; token++)
    if (end->split == SPLIT_ROWS)
      memcpy(s->given->part + token * end->rows + first, values[token], (size_t)count * 4);
    else if (is_kept(end->norm, end->split))
      memcpy(s->written + token * width + first, values[token], (size_t)count * 4);
    else
      s->layers->add(s->given->x + token * width + first, values[token], end->factor, count);
}

/* Add a product of all tokens to the residual stream. */
static void add_rows(step *s, const ending *end, const activations *x, int64_t from, int64_t to) {
  float values[16][ZQ_WIDE];
  for (int64_t unit = from; unit < to; unit++) {
    int64_t first = unit * ZQ_PANEL, count = end->rows - first < ZQ_PANEL ? end->rows - first : ZQ_PANEL;
    product_rows(s, end->last, x, first, count, values);
    emit(s, end, first, count, values);
  }
}

static void norm_and_add(step *s, const ending *end, int64_t token) {
  const int64_t width = s->decoder->width;
  float *row = s->written + token * width;
  if (!is_kept(end->norm, end->split)) return;
  if (end->norm->size) s->layers->norm(end->norm, row, row);
  s->layers->add(s->given->x + token * width, row, end->factor, width);
}

/* This rank's activations of a token for the caller. */
static void give_part(const step *s, const activations *x, int64_t token, int64_t columns) {
  memcpy(s->given->part + token * columns, x->floats + token * x->stride, (size_t)columns * 4);
}

/* Those of all ranks. */
static void take_whole(const step *s, const activations *x, int64_t token, const zq_projection *reader) {
  memcpy(x->floats + token * x->stride, s->given->whole + token * reader->columns, (size_t)reader->columns * 4);
  finish_row(s, x, token, reader->columns, reader->dtype < 0);
}

/* The row of a token in `into`: `from`, normalized if there is a norm. */
static void normalized(step *s, const zq_norm *norm, const float *from, const activations *into, int64_t token) {
  float *out = into->floats + token * into->stride;
  if (norm->size)
    s->layers->norm(norm, from, out);
  else
    memcpy(out, from, (size_t)s->decoder->width * 4);
}

static int some_are_panels(const zq_projection *p, int64_t count) {
  for (int64_t k = 0; k < count; k++)
    if (p[k].dtype < 0) return 1;
  return 0;
}

static int reads_panels(const zq_mlp *m) { return m->up.dtype < 0 || (m->has_gate && m->gate.dtype < 0); }

/* The MLP of all tokens: that of the block, or the shared one of a mixture; NULL if there is none. */
static const zq_mlp *common_mlp(const zq_block *b) {
  const zq_mixture *m = b->mixture;
  return !m ? &b->mlp : m->has_shared ? m->experts + m->num_held : NULL;
}

static void mlp_row(step *s, const float *from, int64_t token) {
  const zq_block *b = s->block;
  const zq_mlp *common = common_mlp(b);
  int is_quantized = common && reads_panels(common);
  if (b->mixture) is_quantized |= b->mixture->router.dtype < 0 || b->mixture->shared_gate.dtype < 0;
  normalized(s, &b->mlp_norm, from, &s->mlp_input, token);
  finish_row(s, &s->mlp_input, token, s->decoder->width, is_quantized);
}

static void inputs(step *s, int64_t from, int64_t to, int thread) {
  const zq_block *b = s->block;
  (void)thread;
  for (int64_t token = from; token < to; token++) {
    const float *x = s->given->x + token * s->decoder->width;
    normalized(s, &b->norm, x, &s->source, token);
    finish_row(s, &s->source, token, s->decoder->width, some_are_panels(b->qkv, b->num_qkv));
    if (b->mlp_input != INPUT_RESIDUAL)
      mlp_row(s, b->mlp_input == INPUT_BLOCK ? x : s->source.floats + token * s->source.stride, token);
  }
}

static int64_t project_units(const zq_block *b) {
  int64_t total = 0;
  for (int64_t k = 0; k < b->num_qkv; k++) total += units_of(b->qkv[k].matrix.rows, ZQ_PANEL);
  return total;
}

static void project(step *s, int64_t from, int64_t to, int thread) {
  const zq_block *b = s->block;
  float values[16][ZQ_WIDE];
  int64_t base = 0, column = 0;
  (void)thread;
  for (const zq_projection *p = b->qkv; p < b->qkv + b->num_qkv; p++) {
    const int64_t rows = p->matrix.rows, units = units_of(rows, ZQ_PANEL);
    for (int64_t unit = from > base ? from - base : 0; unit < units && base + unit < to; unit++) {
      int64_t first = unit * ZQ_PANEL, count = rows - first < ZQ_PANEL ? rows - first : ZQ_PANEL;
      product_rows(s, p, &s->source, first, count, values);
      for (int64_t token = 0; token < s->given->tokens; token++)
        memcpy(s->rows + token * s->row_stride + column + first, values[token], (size_t)count * 4);
    }
    base += units;
    column += rows;
  }
}

/* The positions that a token attends to: runs of them, the first perhaps from within. */
typedef struct {
  int64_t first, end, first_run, num_runs;
} span;

static span span_of(const step *s, int64_t token) {
  const int64_t end = s->given->positions[token] + 1, window = s->block->window;
  span found = {window && end > window ? end - window : 0, end, 0, 0};
  found.first_run = found.first / ZQ_RUN;
  found.num_runs = (end + ZQ_RUN - 1) / ZQ_RUN - found.first_run;
  return found;
}

static int64_t attend_units(const step *s) {
  int64_t total = 0;
  for (int64_t token = 0; token < s->given->tokens; token++)
    total += span_of(s, token).num_runs * s->block->num_kv_heads;
  return total;
}

static float *partials_at(const step *s, int64_t token, int64_t head) {
  return s->partials + (token * s->block->num_heads + head) * s->most_runs * ZQ_PARTIAL_FLOATS(s->block->head_size);
}

static void attend(step *s, int64_t from, int64_t to, int thread) {
  const zq_block *b = s->block;
  const int64_t group = b->num_heads / b->num_kv_heads, each = ZQ_PARTIAL_FLOATS(b->head_size);
  int64_t base = 0;
  zq_attention a = {.block = b, .capacity = s->decoder->capacity, .partial_stride = s->most_runs * each,
                    .scratch = s->scratch + thread * s->scratch_floats};
  for (int64_t token = 0; token < s->given->tokens && base < to; token++) {
    const span found = span_of(s, token);
    const int64_t units = found.num_runs * b->num_kv_heads;
    a.row = s->rows + token * s->row_stride, a.slot = s->given->slots[token], a.position = s->given->positions[token];
    for (int64_t unit = from > base ? from - base : 0; unit < units && base + unit < to; unit++) {
      const int64_t run = unit % found.num_runs, begin = (found.first_run + run) * ZQ_RUN;
      a.kv_head = unit / found.num_runs;
      a.first = larger(begin, found.first);
      a.end = begin + ZQ_RUN < found.end ? begin + ZQ_RUN : found.end;
      a.partials = partials_at(s, token, a.kv_head * group) + run * each;
      s->layers->attend(&a);
    }
    base += units;
  }
}

static void merge(step *s, int64_t from, int64_t to, int thread) {
  const zq_block *b = s->block;
  (void)thread;
  for (int64_t token = from; token < to; token++) {
    const int64_t runs = span_of(s, token).num_runs;
    float *out = s->attended.floats + token * s->attended.stride;
    for (int64_t head = 0; head < b->num_heads; head++)
      s->layers->merge(partials_at(s, token, head), runs, b->head_size, out + head * b->head_size);
    if (b->out_split == SPLIT_ROWS)
      give_part(s, &s->attended, token, b->num_heads * b->head_size);
    else
      finish_row(s, &s->attended, token, b->out.columns, b->out.dtype < 0);
  }
}

static void take_attended(step *s, int64_t from, int64_t to, int thread) {
  (void)thread;
  for (int64_t token = from; token < to; token++) take_whole(s, &s->attended, token, &s->block->out);
}

static void output(step *s, int64_t from, int64_t to, int thread) {
  const ending end = attention_end(s);
  (void)thread;
  add_rows(s, &end, &s->attended, from, to);
}

static void mlp_inputs(step *s, int64_t from, int64_t to, int thread) {
  const zq_block *b = s->block;
  const ending end = attention_end(s);
  (void)thread;
  for (int64_t token = from; token < to; token++) {
    norm_and_add(s, &end, token);
    if (b->mlp_input == INPUT_RESIDUAL) mlp_row(s, s->given->x + token * s->decoder->width, token);
  }
}

/* 32 rows of gate and up of an MLP for all tokens of x. */
static void grow_rows(step *s, const zq_mlp *m, const activations *x, const activations *grown, int64_t unit) {
  const int64_t size = own_grown(m), up_at = m->has_gate == 2 ? size : 0;
  const int64_t first = unit * ZQ_WIDE, count = size - first < ZQ_WIDE ? size - first : ZQ_WIDE;
  float gate[16][ZQ_WIDE], up[16][ZQ_WIDE];
  if (m->has_gate) product_rows(s, &m->gate, x, first, count, gate);
  product_rows(s, &m->up, x, up_at + first, count, up);
  for (int64_t token = 0; token < x->tokens; token++) {
    float *out = grown->floats + token * grown->stride + first;
    s->layers->activate(m->act, m->has_gate ? gate[token] : up[token], m->has_gate ? up[token] : NULL, out, count);
    if (first + count == size) pad_floats(grown, token, size);
    if (m->down.dtype < 0 && size == m->down.columns) quantize_blocks(s, grown, token, first, ZQ_WIDE, size);
  }
}

static void grow(step *s, int64_t from, int64_t to, int thread) {
  const zq_block *b = s->block;
  (void)thread;
  for (int64_t unit = from; unit < to; unit++) grow_rows(s, &b->mlp, &s->mlp_input, &s->grown, unit);
}

static void give_grown(step *s, int64_t from, int64_t to, int thread) {
  (void)thread;
  for (int64_t token = from; token < to; token++) give_part(s, &s->grown, token, own_grown(&s->block->mlp));
}

static void take_grown(step *s, int64_t from, int64_t to, int thread) {
  (void)thread;
  for (int64_t token = from; token < to; token++) take_whole(s, &s->grown, token, &s->block->mlp.down);
}

static void shrink(step *s, int64_t from, int64_t to, int thread) {
  const ending end = mlp_end(s);
  (void)thread;
  add_rows(s, &end, &s->grown, from, to);
}

/* Mixtures of experts -------------------------------------------------------------------------------------- */

/* Rows of the router; the last unit is the gate of the shared expert. */
static void route(step *s, int64_t from, int64_t to, int thread) {
  const zq_mixture *m = s->block->mixture;
  float values[16][ZQ_WIDE];
  (void)thread;
  for (int64_t unit = from; unit < to; unit++) {
    const int is_gate = unit * ZQ_PANEL >= m->num_experts;
    const zq_projection *p = is_gate ? &m->shared_gate : &m->router;
    const int64_t first = is_gate ? 0 : unit * ZQ_PANEL, left = p->matrix.rows - first;
    const int64_t count = left < ZQ_PANEL ? left : ZQ_PANEL, at = is_gate ? m->num_experts : first;
    product_rows(s, p, &s->mlp_input, first, count, values);
    for (int64_t token = 0; token < s->given->tokens; token++)
      memcpy(s->routed + token * s->routed_stride + at, values[token], (size_t)count * 4);
  }
}

/* Softmax in place.  Sums go from the first to the last. */
static void soften(const step *s, float *x, int64_t numel) {
  float most = x[0], total = 0;
  for (int64_t k = 1; k < numel; k++) most = x[k] > most ? x[k] : most;
  for (int64_t k = 0; k < numel; k++) x[k] -= most;
  s->layers->activate(ACT_EXP, x, NULL, x, numel);
  for (int64_t k = 0; k < numel; k++) total += x[k];
  for (int64_t k = 0; k < numel; k++) x[k] /= total;
}

#define TAKEN (-1.0f) /* no probability */

/* Choose the experts of a token with the largest probabilities; of equal ones the first.  NaN: whatever is left. */
static void choose_experts(const step *s, float *x, int64_t *experts, float *weights) {
  const zq_mixture *m = s->block->mixture;
  float total = 0;
  soften(s, x, m->num_experts);
  for (int64_t k = 0; k < m->top_k; k++) {
    int64_t best = -1;
    for (int64_t e = 0; e < m->num_experts; e++)
      if (x[e] != TAKEN && (best < 0 || x[e] > x[best])) best = e;
    experts[k] = best, weights[k] = x[best], total += x[best];
    x[best] = TAKEN;
  }
  for (int64_t k = 0; k < m->top_k; k++) weights[k] = m->factor * (m->is_renormalized ? weights[k] / total : weights[k]);
}

/* The choices of all tokens, in the order of the experts. */
static void choose(step *s, int64_t from, int64_t to, int thread) {
  const zq_mixture *m = s->block->mixture;
  int64_t experts[ZQ_MOST_CHOICES], num = 0;
  float weights[ZQ_MOST_CHOICES], *gate;
  choices *c = s->choice;
  (void)from, (void)to, (void)thread;
  for (int64_t token = 0; token < s->given->tokens; token++) {
    choose_experts(s, s->routed + token * s->routed_stride, experts + token * m->top_k, weights + token * m->top_k);
    gate = s->routed + token * s->routed_stride + m->num_experts;
    if (m->shared_gate.matrix.rows) { /* the sigmoid, 1 / (1 + exp(-x)) */
      float x = -*gate;
      s->layers->activate(ACT_EXP, &x, NULL, &x, 1);
      *gate = 1.0f / (1.0f + x);
    } else {
      *gate = 1.0f;
    }
  }
  c->num_groups = 0;
  for (int64_t e = 0; e < m->num_held; e++) {
    expert_group *g = c->groups + c->num_groups;
    *g = (expert_group){e, num, 0};
    for (int64_t k = 0; k < s->given->tokens * m->top_k; k++) {
      if (experts[k] != m->first + e) continue;
      c->token[num] = k / m->top_k, c->weight[num] = weights[k], c->group_of[num] = c->num_groups;
      g->count++, num++;
    }
    if (g->count) c->num_groups++;
  }
  c->num = num;
}

static void gather(step *s, int64_t from, int64_t to, int thread) {
  const zq_mixture *m = s->block->mixture;
  const int is_quantized = reads_panels(m->experts);
  (void)thread;
  for (int64_t k = from; k < to && k < s->choice->num; k++) {
    const expert_group g = s->choice->groups[s->choice->group_of[k]];
    const activations x = part_of(s->chosen, g.first, g.count);
    memcpy(x.floats + (k - g.first) * x.stride, s->mlp_input.floats + s->choice->token[k] * s->mlp_input.stride,
           (size_t)s->decoder->width * 4);
    finish_row(s, &x, k - g.first, s->decoder->width, is_quantized);
  }
}

/* Experts that tokens can choose, at most.  Their number is no total of units: a late thread may read a later one. */
static int64_t most_groups(const step *s) {
  const zq_mixture *m = s->block->mixture;
  const int64_t most = s->given->tokens * m->top_k;
  return most < m->num_held ? most : m->num_held;
}

static int64_t shared_units(const zq_mixture *m) {
  return m->has_shared ? units_of(m->experts[m->num_held].down.columns, ZQ_WIDE) : 0;
}

/* Units of the shared expert, and then of the others by turns: those without tokens are spread over all threads. */
static void grow_experts(step *s, int64_t from, int64_t to, int thread) {
  const zq_mixture *m = s->block->mixture;
  const int64_t shared = shared_units(m), most = most_groups(s);
  (void)thread;
  for (int64_t unit = from; unit < to; unit++) {
    const int64_t at = (unit - shared) % most;
    if (unit < shared) {
      grow_rows(s, m->experts + m->num_held, &s->mlp_input, &s->grown, unit);
    } else if (at < s->choice->num_groups) {
      const expert_group g = s->choice->groups[at];
      const activations x = part_of(s->chosen, g.first, g.count), out = part_of(s->chosen_grown, g.first, g.count);
      grow_rows(s, m->experts + g.expert, &x, &out, (unit - shared) / most);
    }
  }
}

static int64_t grow_units(const step *s) {
  const zq_mixture *m = s->block->mixture;
  return shared_units(m) + units_of(m->experts->down.columns, ZQ_WIDE) * most_groups(s);
}

static void shrink_experts(step *s, int64_t from, int64_t to, int thread) {
  const zq_mixture *m = s->block->mixture;
  const ending end = mlp_end(s);
  const int64_t width = s->decoder->width;
  float values[16][ZQ_WIDE], sums[16][ZQ_WIDE];
  (void)thread;
  for (int64_t unit = from; unit < to; unit++) {
    const int64_t first = unit * ZQ_PANEL, count = width - first < ZQ_PANEL ? width - first : ZQ_PANEL;
    memset(sums, 0, sizeof sums);
    for (const expert_group *g = s->choice->groups; g < s->choice->groups + s->choice->num_groups; g++) {
      const activations x = part_of(s->chosen_grown, g->first, g->count);
      product_rows(s, &m->experts[g->expert].down, &x, first, count, values);
      for (int64_t k = 0; k < g->count; k++)
        s->layers->add(sums[s->choice->token[g->first + k]], values[k], s->choice->weight[g->first + k], count);
    }
    if (m->has_shared) {
      product_rows(s, &m->experts[m->num_held].down, &s->grown, first, count, values);
      for (int64_t token = 0; token < s->given->tokens; token++)
        s->layers->add(sums[token], values[token], s->routed[token * s->routed_stride + m->num_experts], count);
    }
    emit(s, &end, first, count, sums);
  }
}

static void mlp_norms(step *s, int64_t from, int64_t to, int thread) {
  const ending end = mlp_end(s);
  (void)thread;
  for (int64_t token = from; token < to; token++) norm_and_add(s, &end, token);
}

static void last_norm(step *s, int64_t from, int64_t to, int thread) {
  const int64_t width = s->decoder->width;
  (void)thread;
  for (int64_t token = from; token < to; token++) {
    normalized(s, &s->decoder->norm, s->given->x + token * width, &s->source, token);
    finish_row(s, &s->source, token, width, s->decoder->head.dtype < 0);
  }
}

static void head(step *s, int64_t from, int64_t to, int thread) {
  const zq_projection *p = &s->decoder->head;
  const int64_t rows = p->matrix.rows;
  float values[16][ZQ_WIDE];
  (void)thread;
  for (int64_t unit = from; unit < to; unit++) {
    int64_t first = unit * ZQ_PANEL, count = rows - first < ZQ_PANEL ? rows - first : ZQ_PANEL;
    product_rows(s, p, &s->source, first, count, values);
    for (int64_t token = 0; token < s->given->tokens; token++) {
      s->layers->cap(values[token], s->decoder->head_factor, s->decoder->head_softcap, count);
      memcpy(s->given->logits + token * rows + first, values[token], (size_t)count * 4);
    }
  }
}

/* The step ------------------------------------------------------------------------------------------------ */

#define SPINS 4000 /* about 0.1 ms, longer than a thread waits on an idle machine */

static void pause_thread(int spins) {
  if (spins >= SPINS)
    sched_yield();
#if defined(ZQ_HAS_X86)
  else
    __builtin_ia32_pause();
#endif
}

/* Claim units: a part of what is left, so that threads end together.  Returns the first; *end is after the last. */
static int64_t claim(progress *p, int64_t total, int num_threads, int64_t *end) {
  int64_t from = __atomic_load_n(&p->claimed, __ATOMIC_RELAXED);
  do {
    if (from >= total) return total;
    *end = from + larger((total - from) / (2 * num_threads), 1);
    if (num_threads == 1) *end = total;
  } while (!__atomic_compare_exchange_n(&p->claimed, &from, *end, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED));
  return from;
}

static void share(step *s, phase *work, int64_t total, int thread) {
  progress *p = s->phase++;
  for (int64_t from, to; (from = claim(p, total, s->num_threads, &to)) < total;) {
    work(s, from, to, thread);
    __atomic_fetch_add(&p->done, to - from, __ATOMIC_RELEASE);
  }
  for (int spins = 0; __atomic_load_n(&p->done, __ATOMIC_ACQUIRE) < total; spins += spins < SPINS) pause_thread(spins);
}

static void head_stage(step *s, int thread) {
  const zq_block *b = s->block;
  const int64_t tokens = s->given->tokens;
  s->attended = of_columns(s->attended, b->out.columns);
  share(s, inputs, tokens, thread);
  share(s, project, project_units(b), thread);
  share(s, attend, attend_units(s), thread);
  share(s, merge, tokens, thread);
}

static void output_stage(step *s, int thread) {
  s->attended = of_columns(s->attended, s->block->out.columns);
  if (s->block->out_split == SPLIT_ROWS) share(s, take_attended, s->given->tokens, thread);
  share(s, output, units_of(attention_end(s).rows, ZQ_PANEL), thread);
}

static void grow_stage(step *s, int thread) {
  const zq_block *b = s->block;
  const zq_mlp *common = common_mlp(b);
  const int64_t tokens = s->given->tokens;
  if (common) s->grown = of_columns(s->grown, common->down.columns);
  if (is_kept(&b->out_norm, b->out_split) || b->mlp_input == INPUT_RESIDUAL) share(s, mlp_inputs, tokens, thread);
  if (!b->mixture) {
    share(s, grow, units_of(own_grown(&b->mlp), ZQ_WIDE), thread);
    if (b->down_split == SPLIT_ROWS) share(s, give_grown, tokens, thread);
    return;
  }
  s->chosen_grown = of_columns(s->chosen_grown, b->mixture->experts->down.columns);
  share(s, route, units_of(b->mixture->num_experts, ZQ_PANEL) + (b->mixture->shared_gate.matrix.rows > 0), thread);
  share(s, choose, 1, thread);
  share(s, gather, tokens * b->mixture->top_k, thread);
  share(s, grow_experts, grow_units(s), thread);
}

static void shrink_stage(step *s, int thread) {
  const zq_block *b = s->block;
  const zq_mlp *common = common_mlp(b);
  if (common) s->grown = of_columns(s->grown, common->down.columns);
  if (b->mixture) {
    s->chosen_grown = of_columns(s->chosen_grown, b->mixture->experts->down.columns);
    share(s, shrink_experts, units_of(s->decoder->width, ZQ_PANEL), thread);
    return;
  }
  if (b->down_split == SPLIT_ROWS) share(s, take_grown, s->given->tokens, thread);
  share(s, shrink, units_of(mlp_end(s).rows, ZQ_PANEL), thread);
}

static void sum_stage(step *s, int thread) {
  if (is_kept(&s->block->mlp_out_norm, s->block->down_split)) share(s, mlp_norms, s->given->tokens, thread);
}

typedef void stage_work(step *s, int thread);

static stage_work *const stages[] = {head_stage, output_stage, grow_stage, shrink_stage, sum_stage};

/* Each thread has its own copy of `step`: one that comes late finds the phases done, and catches up. */
static void run_step(void *context, int thread, int num_threads) {
  step s = *(const step *)context;
  const zq_decoder *d = s.decoder;
  const int64_t tokens = s.given->tokens;
  s.phase = s.phases, s.num_threads = num_threads;
  for (int64_t stage = s.given->first_stage; stage < s.given->end_stage; stage++) {
    s.block = d->blocks + stage / 5;
    stages[stage % 5](&s, thread);
  }
  if (!s.given->logits) return;
  share(&s, last_norm, tokens, thread);
  share(&s, head, units_of(d->head.matrix.rows, ZQ_PANEL), thread);
}

void zq_run_step(const zq_decoder *decoder, const zq_step *given, int num_threads) {
  step s = {.decoder = decoder, .given = given, .products = zq_active_kernels(), .layers = layers[zq_get_level()]};
  place(&s, decoder, given->tokens, num_threads, (void *)(((uintptr_t)given->scratch + 63) / 64 * 64));
  if (given->written) s.written = given->written;
  memset(s.phases, 0, (size_t)num_phases(decoder) * sizeof *s.phases);
  zq_run_region(run_step, &s, num_threads);
}

void zq_activate(int act, const float *x, const float *factors, float *out, int64_t numel) {
  layers[zq_get_level()]->activate(act, x, factors, out, numel);
}
