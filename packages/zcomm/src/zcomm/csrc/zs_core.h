/* Internals of the transport: the layout of shared memory, the group, and the functions between the files.
 *
 *   zs_engine.c   queue, thread, waits, lifetime of a group
 *   zs_barrier.c  barriers between ranks, failures
 *   zs_steps.c    the steps of each collective
 *   zs_memory.c   mappings and segments
 *   zs_reduce.c   arithmetic; compiled once per instruction set
 *   zs_signs.c    sign codes, of no group; compiled once per instruction set
 *   zs_team.c     threads of sign codes
 *
 * A collective is a sequence of steps with a barrier of the group between two of them.  Steps are numbered over
 * the lifetime of the group by `count`, equal on all ranks.  [Note: parity]  What a rank writes into its control
 * segment in step k, others read in step k + 1, and it is written again in step k + 2 at the earliest: slot k % 2.
 * A rank starts step k + 2 only when all have ended step k + 1, so no data is overwritten while it is read, also
 * between two collectives.  Hence a collective whose last step only reads the control segments of
 * others needs no barrier at its end.
 */
#ifndef ZS_CORE_H
#define ZS_CORE_H
#include <pthread.h>
#include <stdatomic.h>
#include <time.h>

#include "zs_api.h"

#define ZS_MAX_RANKS 64
#define ZS_CHUNK (512 * 1024) /* bytes that a rank stages in one step; two such buffers stay in a second-level cache */
#define ZS_PIECE (16 * 1024) /* bytes that are reduced, then copied while they are in a first-level cache */
#define ZS_TINY (16 * 1024)   /* bytes up to which a barrier costs more than a copy */
#define ZS_LARGE (4 * 1024 * 1024) /* bytes from which an output is written past the caches */
#define ZS_HEADER 4096
#define ZS_YIELD (-1) /* in place of turns: yields the core to other ranks for a while */

/* The first page of a control segment.  Only its own rank writes it, except `sleepers`. */
typedef struct {
  char token[64];                         /* Python's, until all have mapped the segment */
  _Alignas(64) _Atomic uint32_t arrived;  /* steps ended by this rank; peers sleep on it */
  _Alignas(64) _Atomic uint32_t sleepers; /* sleeping ranks; too high after one was killed, at the cost of a call */
  _Alignas(64) _Atomic int32_t state;     /* a failure kind: ZS_CLOSED, or why this rank aborted the group */
  int32_t culprit;                        /* group rank; written before `state` */
  double seconds;                         /* waited by this rank; written before `state` */
  _Alignas(64) zs_descriptor descriptor[2];
} zs_control;
_Static_assert(sizeof(zs_control) <= ZS_HEADER, "the header must fit");

/* Memory of equal size that every rank has mapped. */
typedef struct zs_segment {
  int64_t number, bytes;
  char *base[ZS_MAX_RANKS];
  struct zs_segment *next;
} zs_segment;

/* A collective that is queued or in flight. */
typedef struct zs_task {
  zs_call call;
  int64_t ticket;
  int64_t step;       /* of this collective, from 0 */
  int is_at_barrier;  /* the step's work is done and `arrived` is raised */
  int is_zero_copy;   /* known after step 0, like the three below */
  int is_late;        /* staging begins in step 1, because not all ranks could begin in step 0 */
  int64_t num_chunks;
  zs_segment *segment;
  double waits_since; /* seconds of the monotonic clock */
  struct zs_task *next;
} zs_task;

struct zs_group {
  int rank, size;
  zs_control *control[ZS_MAX_RANKS];
  int pid[ZS_MAX_RANKS], pidfd[ZS_MAX_RANKS];
  double timeout_s;
  int spins, spins_in_thread; /* turns of a waiting loop before it sleeps; ZS_YIELD */
  uint32_t count;             /* steps ended; the executor's */

  pthread_mutex_t lock;       /* guards all below */
  pthread_cond_t work, news;  /* the thread waits for `work`, callers for `news` */
  zs_task *first, *last;
  int64_t issued;
  _Atomic int64_t completed;
  int64_t wanted;             /* the thread runs tickets up to this one */
  int is_busy;                /* a thread runs `first` */
  int num_inside;             /* callers in zs_wait */
  int has_thread;
  _Atomic int is_closing;
  _Atomic int is_broken;
  zs_report report;
  zs_segment *segments;
  pthread_t thread;
};

enum { ZS_MORE, ZS_DONE, ZS_MISMATCH };

/* The work of task->step.  ZS_MORE: a barrier and another step follow; ZS_DONE: the collective is complete;
 * ZS_MISMATCH: the ranks disagree, see group->report. */
int zs_step(zs_group *group, zs_task *task);

/* Copies into memory that other ranks have read. */
void zs_copy_lines(void *to, const void *from, int64_t bytes);

double zs_now_s(void); /* of the monotonic clock */
struct timespec zs_timespec(double seconds);

/* Breaks the group on all ranks.  `task` may be NULL. */
void zs_break(zs_group *group, const zs_task *task, int kind, int culprit, int reporter, double seconds);
void zs_arrive(zs_group *group);
void zs_wake_peers(zs_group *group); /* wakes the ranks that sleep at a barrier */
/* Waits for all ranks to end step `count`: 1 done, 0 not by `until`, -1 the group is broken. */
int zs_await(zs_group *group, zs_task *task, double until, int spins);

#endif
