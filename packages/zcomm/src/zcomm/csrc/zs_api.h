/* Interface of the shared-memory transport to Python.  hatch_build.py passes the part between the markers to cffi.
 *
 * Python makes the memory (segments), connects the peers and writes the error messages; C moves and reduces.
 */
#ifndef ZS_API_H
#define ZS_API_H
#include <stdint.h>

/* cdef begin */
typedef struct zs_group zs_group;

/* Arguments of one collective on this rank.  Operations, dtypes and reductions are numbered by names.py. */
typedef struct {
  int32_t op, dtype, reduction; /* reduction: -1 for none */
  int32_t source;               /* of a broadcast; of an all_to_all_v a checksum of its table; else 0 */
  int32_t item_bytes;
  int32_t wake;       /* 1: the group's thread runs it; 0: the caller waits at once and runs it */
  int64_t numel;      /* elements of the tensor (all_reduce, broadcast), of the most that one rank sends to another
                         (all_to_all_v), else of one rank's slice */
  int64_t stride;     /* elements from slice to slice of a reduce_scatter's input, an all_gather's output; >= numel */
  const void *input;  /* all_reduce, broadcast: the same as output */
  void *output;
  int64_t num_runs;          /* all_to_all_v: runs that a rank sends to each other rank, one after the other */
  const int64_t *sends;      /* [target][run]: offset in the input and length, elements */
  const int64_t *receives;   /* [source][run]: offset in the output and length, elements */
  char label[64];
} zs_call;

/* Arguments that a rank publishes to the others. */
typedef struct {
  int32_t op, dtype, reduction, source;
  int64_t numel, stride;
  int64_t segment; /* number of the shared segment that holds the payload, -1 for ordinary memory */
  int64_t offset;  /* of the payload in that segment, bytes */
  char label[64];
} zs_descriptor;

/* Failure of a group. */
typedef struct {
  int32_t kind;     /* numbered by failure.py; 0: none */
  int32_t rank;     /* group rank of the culprit; the reporter's own if the cause is outside of the group */
  int32_t reporter; /* group rank that found out */
  int32_t padding;
  int64_t ticket;   /* of the call during which this rank noticed */
  double seconds;   /* waited by the reporter */
  char label[64];   /* of that call */
  zs_descriptor first, second; /* the calls of rank 0 and of `rank`, if they disagree */
} zs_report;

const char *zs_source_hash(void); /* of the C files, hatch_build.py and [tool.zbuild] */
void *zs_map(int descriptor, int64_t bytes); /* shared, readable and writable; NULL and errno */
void zs_unmap(void *start, int64_t bytes);
const char *zs_level_name(void);
int64_t zs_control_bytes(void);
int zs_max_ranks(void);
int zs_num_reducible(void); /* dtypes below this code can be reduced */

/* A group over control segments that all ranks have mapped and filled with zeros.  Arrays have `size` entries and are
 * copied; pidfds may hold -1.  NULL without memory. */
zs_group *zs_open(int rank, int size, void *const *controls, const int *pids, const int *pidfds, double timeout_s,
                  int num_cores);
void zs_close(zs_group *group); /* ends the thread and all waits; the memory may be unmapped afterwards */
void zs_free(zs_group *group);  /* after zs_close */

/* Memory of all ranks at `bases`; `number` is the same on all ranks and never used twice.  0 without memory. */
int zs_add_segment(zs_group *group, int64_t number, int64_t bytes, void *const *bases);
void zs_drop_segment(zs_group *group, int64_t number);

int64_t zs_issue(zs_group *group, const zs_call *call); /* its ticket, counting from 1; 0 without memory */
int zs_wait(zs_group *group, int64_t ticket, int limit_ms); /* 1 done, 0 not yet, -1 failed */
int zs_is_done(zs_group *group, int64_t ticket);
void zs_abort(zs_group *group); /* fails the group on all ranks with ZS_ELSEWHERE */
int64_t zs_completed(zs_group *group);                  /* the last ticket that is done */
int zs_has_ended(zs_group *group, int64_t ticket);      /* done, or its group is broken and no thread runs it */
void zs_failure(zs_group *group, zs_report *report);

/* The arithmetic alone, for tests and for the floor of the bench: `num` sources into `num_outputs` outputs, which are
 * written past the caches if they are fresh (large, and not sources).  zs_stream is such a copy. */
void zs_reduce(int dtype, int reduction, int num, const void *const *sources, int num_outputs, void *const *outputs,
               int64_t numel, int is_fresh);
void zs_stream(void *to, const void *from, int64_t bytes);

/* Sign codes: a run is a part of one tensor, or of padding, that one thread encodes or decodes. */
typedef struct {
  int64_t buffer, begin; /* its elements [begin, begin + numel) of a buffer */
  int64_t piece;         /* index of its scale; negative for padding */
  int64_t at;            /* its first element in `coded` */
  int64_t code;          /* its first byte in `codes`, and in a message of `received` */
  int64_t numel;
} zs_signs;

/* Arguments of a phase; those that it does not use are NULL. */
typedef struct {
  int64_t num_runs;
  const zs_signs *runs;
  float *const *buffers;
  float *coded;             /* what was encoded last; errors are coded - scale * sign */
  const float *scales;      /* by piece: of what was encoded last (encode, average, settle) or of `codes` (decode) */
  uint8_t *codes;
  double *squares;          /* by run: sum of squares of what is encoded */
  const uint8_t *received;  /* average: messages of the sources, of source_bytes each */
  const float *source_scales; /* [source][num_scales], divided by the number of sources */
  int64_t num_sources, source_bytes, num_scales;
} zs_signs_job;

void zs_signs_run(int phase, const zs_signs_job *job, int num_threads); /* ZS_ENCODE, ... */
void zs_set_omp(uint64_t parallel); /* address of GOMP_parallel; 0 for none */
int zs_level(void);                 /* the level in use */
int zs_set_level(int level); /* 0 plain, 1 AVX2, 2 AVX-512, or the best of this processor; returns the level in use */
/* cdef end */

enum { ZS_ALL_REDUCE, ZS_REDUCE_SCATTER, ZS_ALL_GATHER, ZS_BROADCAST, ZS_ALL_TO_ALL, ZS_ALL_TO_ALL_V, ZS_BARRIER };
enum { ZS_FLOAT32, ZS_FLOAT64, ZS_BFLOAT16, ZS_FLOAT16, ZS_INT32, ZS_INT64, ZS_UINT8, ZS_INT8, ZS_BOOL, ZS_REDUCIBLE };
enum { ZS_SUM, ZS_MAX, ZS_MIN, ZS_REDUCTIONS };
enum { ZS_ENCODE, ZS_AVERAGE, ZS_DECODE, ZS_SETTLE };
enum { ZS_FINE, ZS_DIED, ZS_TIMED_OUT, ZS_CLOSED, ZS_DISAGREE, ZS_ELSEWHERE };

#endif
