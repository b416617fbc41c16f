/* The interface between Python and the kernels.  hatch_build.py passes the part between the markers to cffi.
 *
 * A job updates a list of rows.  A row is a run of elements that are contiguous in every stream: a whole
 * tensor, or one segment of a flat shard.  Streams are arrays of addresses, one per row; an absent stream
 * is NULL.  Python keeps the arrays and the tensors alive, and updates addresses that change.
 */
#ifndef ZK_API_H
#define ZK_API_H
#include "zk_prepare.h"

/* cdef begin */
typedef struct {
  int32_t rule, flags;
  int32_t weight, grad, state, copy; /* formats of the streams */
  int64_t num_rows;
  const int64_t *numel;          /* elements of each row */
  const uint64_t *weights;       /* read and written */
  const uint64_t *grads;         /* read */
  const uint64_t *remainders;    /* int16, with the split weight format */
  const uint64_t *copies;        /* written: the new weights, rounded to nearest */
  const uint64_t *states[3];     /* read and written, in the order of the rule */
  const uint64_t *scales[3];     /* float32 per ZK_BLOCK elements, with the 8-bit format */
  const uint64_t *steps;         /* () float32 counts, advanced once; several rows may share one */
  const float *grad_scale;       /* gradients are divided by it; NULL divides nothing */
  const float *found_inf;        /* non-zero: nothing is written; NULL: never skips */
  double lr, beta1, beta2, eps, weight_decay, min_ratio, max_ratio;
  void *coefs;                   /* scratch: num_rows * zk_coef_bytes() */
  double *sums;                  /* LAMB: 2 per row, squares of weights and of directions */
  double *partials;              /* LAMB, squares: 2 for each (partial) ZK_SPAN elements of a row */
} zk_job;

int zk_levels(void);                 /* instruction sets of this build, slowest first: 0 .. n-1 */
const char *zk_level_name(int level);
int zk_level_runs_here(int level);
int zk_best_level(void);
void zk_set_level(int level);
int zk_get_level(void);
void zk_set_omp(uint64_t parallel, uint64_t thread_num, uint64_t num_threads);
int64_t zk_coef_bytes(void);
int64_t zk_num_spans(int64_t numel); /* partials of one row */
int64_t zk_num_partials(int64_t num_rows, const int64_t *numel); /* of all rows */
const char *zk_source_hash(void); /* of the C files, hatch_build.py and [tool.zbuild] */

/* Update all rows.  Returns 1, or 0 if found_inf is set and nothing was written. */
int zk_step(zk_job *job, int num_threads);

/* LAMB on shards, in two halves; the caller reduces `sums` between them.  The second half ignores
 * found_inf, so the caller must not call it after a first half that returned 0. */
int zk_lamb_sums(zk_job *job, int num_threads);
int zk_lamb_apply(zk_job *job, int num_threads);

/* Sum of squares, in double, of rows of one format; not finite if and only if an element is not.
 * The same bits for any number of threads and any instruction set. */
double zk_squares(int format, int64_t num_rows, const uint64_t *rows, const int64_t *numel, double *partials,
                  int num_threads);

/* Index of the first of `num_read` ranges that overlaps a written range, or -1.  Ranges are
 * [start, start + bytes).  Written ranges must be sorted by start and disjoint. */
int64_t zk_find_overlap(int64_t num_written, const uint64_t *starts, const uint64_t *ends, int64_t num_read,
                        const uint64_t *read_starts, const int64_t *read_bytes);

/* Tensor objects, by their id().  tensors.c, which only the extension has. */

/* Use the table of DLPack's C exchange API for objects of class `type`.  Returns 0 for another version. */
int zk_use_exchange(uint64_t table, uint64_t type);
/* Record nested containers: the length of lists, the identity of tensors, of dicts and of their keys, and every
 * tensor's address, dtype, device, shape and strides.  Appends the objects to the list `held`.  Returns the number of
 * words; if it exceeds the capacity, the rest is not written; -1 if a tensor has no address for DLPack. */
int64_t zk_trace(uint64_t root, uint64_t held, uint64_t *words, int64_t capacity);
/* Compare nested containers with a record. */
int zk_is_traced(uint64_t root, uint64_t *words, int64_t length);
/* Record dtype, device, shape and strides of `.grad` of a list of parameters, where it is None of a list of weights
 * (which may be the same list), and the addresses.  Returns the number of words, or -1: too many, or a tensor has no
 * address. */
int64_t zk_record_grads(uint64_t params, uint64_t weights, uint64_t *kinds, int64_t capacity, uint64_t *addresses);
/* Compare gradients with recorded kinds and store their addresses.  Returns 1 if one moved, else 0; -1 if the kinds
 * differ. */
int zk_read_grads(uint64_t params, uint64_t weights, uint64_t *kinds, int64_t length, uint64_t *addresses);
/* Bytes from the beginning of an object to a word of it, found by probe.py. */
typedef struct {
  int64_t impl;          /* tensor object: its implementation */
  int64_t storage, meta; /* implementation: its storage, autograd's record, */
  int64_t kind;          /* and 14 words: dims, 5 sizes, 5 strides, offset, number of elements, dtype and device */
  int64_t data;          /* storage: its memory */
  int64_t grad;          /* autograd's record: the implementation of the gradient, */
  uint64_t no_grad;      /* and the value of that word without one */
  int64_t length, items; /* list: number of items, their array */
  int64_t version;       /* dict: a number that every change makes unique; 0 if there is none */
} zk_places;
void zk_use_places(const zk_places *found);
/* Record the words that change when a tensor in nested containers is replaced, moved or seen in another way.  Returns
 * their number (if it exceeds the capacity, the rest is not written), or 0: a tensor has more than 5 dims. */
int64_t zk_watch(uint64_t root, uint64_t *words, int64_t capacity);
int zk_is_unchanged(const uint64_t *words, int64_t length);
/* As zk_record_grads and zk_read_grads by words: 15 for each parameter.  The first returns 0 if they cannot tell; the
 * second does not store the addresses if the kinds differ. */
int zk_note_grads(uint64_t params, uint64_t weights, uint64_t *rows);
int zk_read_noted(uint64_t params, uint64_t weights, const uint64_t *rows, uint64_t *addresses);
/* Addresses and sizes of the tensors in a list, without None.  Returns their number and their format; -1 if they are
 * not contiguous CPU tensors of one format. */
int64_t zk_rows(uint64_t tensors, uint64_t *addresses, int64_t *numel, int *format);
/* The same for the gradients of parameters, by words; `*format` is that of earlier rows, or ZK_NONE. */
int64_t zk_grad_rows(uint64_t params, uint64_t weights, uint64_t *addresses, int64_t *numel, int *format);

/* Conversion of one row between a format and float32, as in the kernels: for export, import and tests.
 * kind: 0 weight, 1 signed state, 2 second moment, 3 gradient or copy. */
void zk_decode(int format, int kind, const void *from, const void *extra, float *to, int64_t numel);
void zk_encode(int format, int kind, const float *from, void *to, void *extra, int64_t numel, uint32_t seed,
               int stochastic);
/* cdef end */

#define ZK_SPAN 16384 /* elements of one partial sum; a multiple of ZK_BLOCK */

/* The functions of one instruction set; kern.c is compiled once for each. */
typedef struct {
  void (*update)(const zk_job *, int64_t row, int64_t from, int64_t to);
  void (*lamb_sums)(const zk_job *, int64_t row, int64_t from, int64_t to, double *squares);
  void (*lamb_apply)(const zk_job *, int64_t row, int64_t from, int64_t to);
  double (*squares)(int format, const void *row, int64_t from, int64_t to);
  void (*decode)(int, int, const void *, const void *, float *, int64_t);
  void (*encode)(int, int, const float *, void *, void *, int64_t, uint32_t, int);
} zk_kernels;

#endif
