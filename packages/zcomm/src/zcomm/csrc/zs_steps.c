/* The steps of each collective, between two barriers.
 *
 * Zero copy: step 0 publishes where the payload lies, step 1 reads it (and, for all_reduce, writes the result) in the
 * memory of all ranks, each rank its own slice; a last barrier ends the reads.
 *
 * Staged: the payload passes in chunks through the control segments, in a pipeline of one barrier per chunk.  In
 * one step a rank stages chunk c, reduces its slice of chunk c - 1 and, for all_reduce, fetches the slices of
 * chunk c - 2 from the others.  If no rank has its payload in a shared segment, step 0 stages chunk 0 already.
 * An all_to_all_v is always staged: the runs of bytes for one rank are one part of a chunk, and are
 * copied out of it into the runs of the receiver, so no rank reorders or pads anything.
 * A payload of up to ZS_TINY bytes is always staged, and then costs a single barrier: even an all_reduce, which
 * every rank then computes in full.
 *
 * What a staged all_reduce of N bytes over W ranks moves, at least, on every rank: it reads and writes its tensor once,
 * 2 N through memory, as a copy of N bytes does.  Through the caches it writes N bytes into its buffers, (W - 1) / W N
 * for the others to reduce and N / W of results, and reads 2 (W - 1) / W N from those of others.  Within one chiplet the
 * caches are fast enough to hide most of that; between two it passes at the speed of memory, so at W = 2 the floor there
 * is two copies.  Each result is reduced into the tensor, and staged from the cache by string copies (zs_copy_lines).
 *
 * Both reduce each element in the order of the ranks, so they give the same bits.
 */
#include <string.h>

#include "zs_core.h"

static int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t divided_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
static int64_t part_bytes(const zs_group *g) { return ZS_CHUNK / g->size / 64 * 64; } /* of a chunk, for one rank */

/* Buffers in the control segment of rank p; see [Note: parity]. */
static char *staged(const zs_group *g, int p, uint32_t count) {
  return (char *)g->control[p] + ZS_HEADER + (int64_t)(count & 1) * ZS_CHUNK;
}
static char *reduced(const zs_group *g, int p, uint32_t count) {
  return (char *)g->control[p] + ZS_HEADER + 2 * ZS_CHUNK + (int64_t)(count & 1) * (ZS_CHUNK / 2);
}

/* Bytes of a whole tensor (all_reduce, broadcast), else of one slice. */
static int64_t call_bytes(const zs_call *c) { return c->numel * c->item_bytes; }

static int is_tiny(const zs_group *g, const zs_call *c) {
  return call_bytes(c) <= smaller(ZS_TINY, part_bytes(g));
}

/* Bytes of the longest slice. An all_reduce is cut at cache lines. */
static int64_t slice_bytes(const zs_group *g, const zs_call *c) {
  if (c->op != ZS_ALL_REDUCE) return call_bytes(c);
  return divided_up(divided_up(call_bytes(c), g->size), 64) * 64;
}

/* Bytes from the start of one slice to that of the next. */
static int64_t pitch(const zs_group *g, const zs_call *c) {
  return c->op == ZS_REDUCE_SCATTER || c->op == ZS_ALL_GATHER ? c->stride * c->item_bytes : slice_bytes(g, c);
}

/* Part of slice p in chunk number `chunk`: its offset in the payload, and its bytes, 0 if there is none. */
static int64_t part(const zs_group *g, const zs_call *c, int p, int64_t chunk, int64_t *bytes) {
  int64_t start = p * pitch(g, c), from = start + chunk * part_bytes(g), end = start + slice_bytes(g, c);
  if (c->op == ZS_ALL_REDUCE) end = smaller(end, call_bytes(c));
  int64_t left = smaller(part_bytes(g), end - from);
  *bytes = left > 0 ? left : 0;
  return from;
}

static int64_t count_chunks(const zs_group *g, const zs_call *c) {
  int in_parts = c->op == ZS_ALL_REDUCE || c->op == ZS_REDUCE_SCATTER || c->op == ZS_ALL_TO_ALL ||
                 c->op == ZS_ALL_TO_ALL_V;
  return in_parts ? divided_up(slice_bytes(g, c), part_bytes(g)) : divided_up(call_bytes(c), ZS_CHUNK);
}

static void copy(void *to, const void *from, int64_t bytes) {
  if (bytes > 0 && to != from) memcpy(to, from, (size_t)bytes);
}

/* Copies into a buffer of this rank's control segment. */
static void stage(void *to, const void *from, int64_t bytes) {
  if (bytes > 0) zs_copy_lines(to, from, bytes);
}

/* True if the output is large and not read before it is written. */
static int is_fresh(const zs_group *g, const zs_call *c) {
  int64_t bytes = call_bytes(c) * (c->op == ZS_ALL_GATHER || c->op == ZS_ALL_TO_ALL ? g->size : 1);
  const char *input = c->input, *output = c->output;
  if (bytes < ZS_LARGE || c->op == ZS_ALL_REDUCE) return 0;
  return c->op != ZS_REDUCE_SCATTER || output < input || output >= input + pitch(g, c) * (g->size - 1) + bytes;
}

/* Writes an output. */
static void put(const zs_group *g, const zs_call *c, void *to, const void *from, int64_t bytes) {
  if (is_fresh(g, c) && bytes > 0 && to != from) {
    zs_stream(to, from, bytes);
  } else {
    copy(to, from, bytes);
  }
}

/* Reduces `bytes` bytes: this rank's at `own`, those of the others in their staging buffers. */
static void reduce_staged(const zs_group *g, const zs_call *c, const char *own, int64_t at_bytes, int num_outputs,
                          void *const *outputs, int64_t bytes) {
  const void *sources[ZS_MAX_RANKS];
  for (int p = 0; p < g->size; p++) sources[p] = p == g->rank ? own : staged(g, p, g->count - 1) + at_bytes;
  zs_reduce(c->dtype, c->reduction, g->size, sources, num_outputs, outputs, bytes / c->item_bytes, is_fresh(g, c));
}

/* Copies chunk number `chunk` of the bytes that two ranks exchange: between their runs in a tensor of this
 * rank and one part of a staging buffer. */
static void copy_runs(const zs_group *g, const zs_call *c, const int64_t *runs, char *tensor, int to_tensor, char *part,
                      int64_t chunk) {
  int64_t from = chunk * part_bytes(g), until = from + part_bytes(g), start = 0; /* in the bytes of all runs */
  for (int64_t i = 0; i < c->num_runs && start < until; i++) {
    int64_t place = runs[2 * i] * c->item_bytes, end = start + runs[2 * i + 1] * c->item_bytes;
    int64_t first = start > from ? start : from, last = smaller(end, until);
    if (last > first) {
      char *own = tensor + place + (first - start), *other = part + (first - from);
      if (to_tensor) {
        copy(own, other, last - first);
      } else {
        stage(other, own, last - first);
      }
    }
    start = end;
  }
}

static const int64_t *runs_of(const zs_call *c, const int64_t *table, int p) { return table + 2 * c->num_runs * p; }

/* Copies the runs of an all_to_all_v that this rank keeps. */
static void keep_runs(const zs_group *g, const zs_call *c) {
  const int64_t *from = runs_of(c, c->sends, g->rank), *to = runs_of(c, c->receives, g->rank);
  for (int64_t i = 0; i < c->num_runs; i++) {
    const char *source = (const char *)c->input + from[2 * i] * c->item_bytes;
    copy((char *)c->output + to[2 * i] * c->item_bytes, source, from[2 * i + 1] * c->item_bytes);
  }
}

/* First phase of a chunk: copies the part of this rank's payload that others need into its staging buffer. */
static void stage_in(const zs_group *g, const zs_call *c, int64_t chunk) {
  char *to = staged(g, g->rank, g->count);
  const char *from = c->input;
  int64_t at = chunk * ZS_CHUNK, bytes = smaller(ZS_CHUNK, call_bytes(c) - at);
  if (c->op == ZS_ALL_GATHER || (c->op == ZS_BROADCAST && c->source == g->rank)) stage(to, from + at, bytes);
  if (c->op == ZS_ALL_GATHER || c->op == ZS_BROADCAST) return;
  if (c->op == ZS_ALL_REDUCE && is_tiny(g, c)) {
    stage(to, from, call_bytes(c));
    return;
  }
  for (int p = 0; p < g->size; p++) {
    if (p == g->rank) continue;
    if (c->op == ZS_ALL_TO_ALL_V) {
      copy_runs(g, c, runs_of(c, c->sends, p), (char *)c->input, 0, to + p * part_bytes(g), chunk);
      continue;
    }
    at = part(g, c, p, chunk, &bytes);
    stage(to + p * part_bytes(g), from + at, bytes);
  }
}

/* Middle phase of an all_reduce: reduces this rank's slice of the chunk into the tensor, and stages the result, piece by
 * piece from the first-level cache. */
static void stage_reduce(const zs_group *g, const zs_call *c, int64_t chunk) {
  int64_t bytes, at = part(g, c, g->rank, chunk, &bytes);
  for (int64_t done = 0; done < bytes; done += ZS_PIECE) {
    int64_t piece = smaller(ZS_PIECE, bytes - done);
    void *outputs[1] = {(char *)c->output + at + done};
    reduce_staged(g, c, (const char *)c->input + at + done, g->rank * part_bytes(g) + done, 1, outputs, piece);
    stage(reduced(g, g->rank, g->count) + done, outputs[0], piece);
  }
}

/* Last phase of an all_reduce: copies the others' slices. */
static void fetch_reduced(const zs_group *g, const zs_call *c, int64_t chunk) {
  for (int p = 0; p < g->size; p++) {
    if (p == g->rank) continue;
    int64_t bytes, at = part(g, c, p, chunk, &bytes);
    copy((char *)c->output + at, reduced(g, p, g->count - 1), bytes);
  }
}

/* Last phase of the other operations: from the staging buffers into the output. */
static void stage_out(const zs_group *g, const zs_call *c, int64_t chunk) {
  const char *own = c->input;
  char *to = c->output;
  int64_t at = chunk * ZS_CHUNK, bytes = smaller(ZS_CHUNK, call_bytes(c) - at);
  switch (c->op) {
    case ZS_ALL_REDUCE: { /* a tiny one */
      void *outputs[1] = {to};
      reduce_staged(g, c, own, 0, 1, outputs, call_bytes(c));
      break;
    }
    case ZS_REDUCE_SCATTER: {
      int64_t from = part(g, c, g->rank, chunk, &bytes);
      void *outputs[1] = {to + chunk * part_bytes(g)};
      reduce_staged(g, c, own + from, g->rank * part_bytes(g), 1, outputs, bytes);
      break;
    }
    case ZS_ALL_GATHER:
      for (int p = 0; p < g->size; p++) {
        put(g, c, to + p * pitch(g, c) + at, p == g->rank ? own + at : staged(g, p, g->count - 1), bytes);
      }
      break;
    case ZS_BROADCAST:
      if (c->source != g->rank) put(g, c, to + at, staged(g, c->source, g->count - 1), bytes);
      break;
    case ZS_ALL_TO_ALL:
      for (int p = 0; p < g->size; p++) {
        int64_t from = part(g, c, g->rank, chunk, &bytes);
        const char *theirs = staged(g, p, g->count - 1) + g->rank * part_bytes(g);
        put(g, c, to + p * call_bytes(c) + chunk * part_bytes(g), p == g->rank ? own + from : theirs, bytes);
      }
      break;
    case ZS_ALL_TO_ALL_V:
      for (int p = 0; p < g->size; p++) {
        char *theirs = staged(g, p, g->count - 1) + g->rank * part_bytes(g);
        if (p != g->rank) copy_runs(g, c, runs_of(c, c->receives, p), to, 1, theirs, chunk);
      }
      if (chunk == 0) keep_runs(g, c);
      break;
    default:
      break;
  }
}

/* One step of the pipeline. */
static int staged_step(zs_group *g, zs_task *t) {
  const zs_call *c = &t->call;
  int64_t chunk = t->step - t->is_late, n = t->num_chunks;
  int has_middle = c->op == ZS_ALL_REDUCE && !is_tiny(g, c);
  if (chunk < n) stage_in(g, c, chunk);
  if (chunk >= 1 && chunk - 1 < n && has_middle) stage_reduce(g, c, chunk - 1);
  if (chunk >= 1 && chunk - 1 < n && !has_middle) stage_out(g, c, chunk - 1);
  if (chunk >= 2 && has_middle) fetch_reduced(g, c, chunk - 2);
  return chunk == n + has_middle ? ZS_DONE : ZS_MORE;
}

static char *payload(const zs_group *g, const zs_task *t, int p) {
  return t->segment->base[p] + g->control[p]->descriptor[(g->count - 1) & 1].offset;
}

/* The whole collective, in the memory of the ranks. */
static void zero_copy_step(zs_group *g, zs_task *t) {
  const zs_call *c = &t->call;
  const void *sources[ZS_MAX_RANKS];
  void *outputs[ZS_MAX_RANKS];
  int64_t bytes = call_bytes(c), own = g->rank * pitch(g, c);
  char *to = c->output;
  if (c->op == ZS_ALL_REDUCE) {
    bytes = smaller(slice_bytes(g, c), bytes - own);
    for (int i = 0; i < g->size; i++) outputs[i] = payload(g, t, (g->rank + i) % g->size) + own; /* own output first */
  }
  for (int p = 0; p < g->size; p++) sources[p] = payload(g, t, p) + own;
  switch (c->op) {
    case ZS_ALL_REDUCE:
      if (bytes > 0) zs_reduce(c->dtype, c->reduction, g->size, sources, g->size, outputs, bytes / c->item_bytes, 0);
      break;
    case ZS_REDUCE_SCATTER:
      outputs[0] = to;
      zs_reduce(c->dtype, c->reduction, g->size, sources, 1, outputs, c->numel, is_fresh(g, c));
      break;
    case ZS_ALL_GATHER:
      for (int i = 0; i < g->size; i++) {
        int p = (g->rank + i) % g->size; /* a shared output has the own slice already: see publish */
        char *place = to + p * pitch(g, c);
        if (payload(g, t, p) != place) put(g, c, place, payload(g, t, p), bytes);
      }
      break;
    case ZS_BROADCAST:
      if (c->source != g->rank) put(g, c, to, payload(g, t, c->source), bytes);
      break;
    case ZS_ALL_TO_ALL:
      for (int p = 0; p < g->size; p++) put(g, c, to + p * bytes, sources[p], bytes);
      break;
    default:
      break;
  }
}

/* The segment of this rank that holds all of [start, start + bytes), or NULL. */
static zs_segment *segment_of(zs_group *g, const char *start, int64_t bytes) {
  zs_segment *found = NULL;
  pthread_mutex_lock(&g->lock);
  for (zs_segment *s = g->segments; s && !found; s = s->next) {
    const char *base = s->base[g->rank];
    if (start >= base && start + bytes <= base + s->bytes) found = s;
  }
  pthread_mutex_unlock(&g->lock);
  return found;
}

/* Step 0: publishes this rank's arguments and payload, and stages the first chunk if that is likely to help. */
static void publish(zs_group *g, zs_task *t) {
  const zs_call *c = &t->call;
  zs_descriptor *d = &g->control[g->rank]->descriptor[g->count & 1];
  *d = (zs_descriptor){c->op, c->dtype, c->reduction, c->source, c->numel, c->stride, -1, 0, {0}};
  memcpy(d->label, c->label, sizeof d->label);
  t->num_chunks = count_chunks(g, c);
  if (c->op == ZS_BARRIER || c->numel == 0) return;
  const char *place = c->input;
  int in_slices = c->op == ZS_REDUCE_SCATTER || c->op == ZS_ALL_TO_ALL;
  int64_t bytes = call_bytes(c) + (in_slices ? pitch(g, c) * (g->size - 1) : 0);
  t->segment = is_tiny(g, c) || c->op == ZS_ALL_TO_ALL_V ? NULL : segment_of(g, place, bytes);
  if (c->op == ZS_ALL_GATHER && !is_tiny(g, c)) {
    char *own_slice = (char *)c->output + g->rank * pitch(g, c);
    zs_segment *outer = segment_of(g, own_slice, bytes);
    if (outer) {
      copy(own_slice, place, bytes);
      place = own_slice;
      t->segment = outer;
    }
  }
  if (t->segment) {
    d->segment = t->segment->number;
    d->offset = place - t->segment->base[g->rank];
  } else {
    stage_in(g, c, 0);
  }
}

static int agree(const zs_descriptor *a, const zs_descriptor *b) {
  return a->op == b->op && a->dtype == b->dtype && a->reduction == b->reduction && a->source == b->source &&
         a->numel == b->numel && a->stride == b->stride && !strncmp(a->label, b->label, sizeof a->label);
}

/* After step 0: compares the arguments and chooses the path.  Every rank reads the same, so all decide the same. */
static int decide(zs_group *g, zs_task *t) {
  int num_shared = 0, is_one_segment = 1;
  const zs_descriptor *first = &g->control[0]->descriptor[(g->count - 1) & 1];
  for (int p = 0; p < g->size; p++) {
    const zs_descriptor *d = &g->control[p]->descriptor[(g->count - 1) & 1];
    if (!agree(first, d)) {
      g->report.first = *first;
      g->report.second = *d;
      g->report.rank = p;
      return ZS_MISMATCH;
    }
    num_shared += d->segment >= 0;
    is_one_segment &= d->segment == first->segment;
  }
  t->is_zero_copy = num_shared == g->size && is_one_segment;
  t->is_late = num_shared > 0;
  return ZS_MORE;
}

int zs_step(zs_group *g, zs_task *t) {
  if (t->step == 0) {
    publish(g, t);
    return ZS_MORE;
  }
  if (t->step == 1 && decide(g, t) == ZS_MISMATCH) return ZS_MISMATCH;
  if (t->num_chunks == 0) return ZS_DONE;
  if (!t->is_zero_copy) return staged_step(g, t);
  if (t->step == 2) return ZS_DONE;
  zero_copy_step(g, t);
  return ZS_MORE;
}
