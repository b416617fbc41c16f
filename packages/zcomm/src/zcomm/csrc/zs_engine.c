/* The queue of a group, the threads that run it, and the group's lifetime.
 *
 * A group runs its collectives one after the other, in the order of issue, as Gloo does.  The thread that waits
 * for one runs it (no hand-over to another thread in the synchronous case); overlapped collectives are run by the
 * group's thread, which is started on first use.  `is_busy` is set while a thread runs a
 * task.  At a barrier that thread may return and resume later, because the state lies in the
 * task: so a caller returns to Python regularly, and Ctrl-C works.
 */
#define _GNU_SOURCE
#include <signal.h>
#include <stdlib.h>
#include <string.h>

#include "zs_core.h"

#define SPINS 600 /* turns of a waiting loop before it sleeps, some 10 microseconds */

/* Runs a task until `until`: 1 done, 0 not yet, -1 the group is broken. */
static int run_task(zs_group *g, zs_task *t, double until, int spins) {
  for (;;) {
    if (!t->is_at_barrier) {
      if (atomic_load(&g->is_closing)) {
        zs_break(g, t, ZS_CLOSED, g->rank, g->rank, 0.0);
        return -1;
      }
      int next = zs_step(g, t);
      if (next == ZS_DONE) return 1;
      if (next == ZS_MISMATCH) {
        zs_break(g, t, ZS_DISAGREE, g->report.rank, g->rank, 0.0);
        return -1;
      }
      t->is_at_barrier = 1;
      t->waits_since = zs_now_s();
      zs_arrive(g);
    }
    int all = zs_await(g, t, until, spins);
    if (all != 1) return all;
    t->is_at_barrier = 0;
    t->step++;
    g->count++;
  }
}

/* Runs the first task until `until`.  Requires the lock and no busy thread. */
static void work_on_first(zs_group *g, double until, int spins) {
  zs_task *t = g->first;
  g->is_busy = 1;
  pthread_mutex_unlock(&g->lock);
  int outcome = run_task(g, t, until, spins);
  pthread_mutex_lock(&g->lock);
  g->is_busy = 0;
  if (outcome == 1) {
    atomic_store(&g->completed, t->ticket);
    g->first = t->next;
    if (!g->first) g->last = NULL;
    free(t);
  }
  pthread_cond_broadcast(&g->news);
  if (g->first && g->wanted >= g->first->ticket) pthread_cond_signal(&g->work);
}

static void *run_thread(void *argument) {
  zs_group *g = argument;
  pthread_mutex_lock(&g->lock);
  while (!g->is_closing && !g->is_broken) {
    if (g->first && !g->is_busy && g->wanted >= g->first->ticket) {
      work_on_first(g, zs_now_s() + 3600.0, g->spins_in_thread);
    } else {
      pthread_cond_wait(&g->work, &g->lock);
    }
  }
  pthread_mutex_unlock(&g->lock);
  return NULL;
}

/* Requires the lock.  Signals stay with the threads of the program.  If the thread cannot be started, the threads
 * that wait do the work. */
static void start_thread(zs_group *g) {
  sigset_t all, before;
  sigfillset(&all);
  pthread_sigmask(SIG_BLOCK, &all, &before);
  g->has_thread = pthread_create(&g->thread, NULL, run_thread, g) == 0;
  pthread_sigmask(SIG_SETMASK, &before, NULL);
  if (g->has_thread) pthread_setname_np(g->thread, "zcomm");
}

int64_t zs_issue(zs_group *g, const zs_call *call) {
  zs_task *t = calloc(1, sizeof *t);
  if (!t) return 0;
  t->call = *call;
  pthread_mutex_lock(&g->lock);
  int64_t ticket = t->ticket = ++g->issued;
  if (g->last) g->last->next = t;
  g->last = t;
  if (!g->first) g->first = t;
  if (call->wake && !g->is_broken && !g->is_closing) {
    if (!g->has_thread) start_thread(g);
    g->wanted = ticket;
    pthread_cond_signal(&g->work);
  }
  pthread_mutex_unlock(&g->lock);
  return ticket;
}

int zs_wait(zs_group *g, int64_t ticket, int limit_ms) {
  if (atomic_load(&g->completed) >= ticket) return 1;
  double until = zs_now_s() + limit_ms * 1e-3;
  struct timespec limit = zs_timespec(until);
  pthread_mutex_lock(&g->lock);
  g->num_inside++;
  while (g->completed < ticket && !g->is_broken && !g->is_closing && zs_now_s() < until) {
    if (!g->is_busy && g->first) {
      work_on_first(g, until, g->spins);
    } else {
      pthread_cond_timedwait(&g->news, &g->lock, &limit);
    }
  }
  int result = g->completed >= ticket ? 1 : g->is_broken || g->is_closing ? -1 : 0;
  g->num_inside--;
  pthread_cond_broadcast(&g->news);
  pthread_mutex_unlock(&g->lock);
  return result;
}

int zs_is_done(zs_group *g, int64_t ticket) { return atomic_load(&g->completed) >= ticket || atomic_load(&g->is_broken); }

int64_t zs_completed(zs_group *g) { return atomic_load(&g->completed); }

int zs_has_ended(zs_group *g, int64_t ticket) {
  pthread_mutex_lock(&g->lock);
  int ended = g->completed >= ticket || (!g->is_busy && (g->is_broken || g->is_closing));
  pthread_mutex_unlock(&g->lock);
  return ended;
}

void zs_abort(zs_group *g) { zs_break(g, NULL, ZS_ELSEWHERE, g->rank, g->rank, 0.0); }

void zs_failure(zs_group *g, zs_report *report) {
  pthread_mutex_lock(&g->lock);
  *report = g->report;
  pthread_mutex_unlock(&g->lock);
}

zs_group *zs_open(int rank, int size, void *const *controls, const int *pids, const int *pidfds, double timeout_s,
                  int num_cores) {
  zs_group *g = calloc(1, sizeof *g);
  if (!g) return NULL;
  zs_level_name();
  g->rank = rank;
  g->size = size;
  for (int p = 0; p < size; p++) {
    g->control[p] = controls[p];
    g->pid[p] = pids[p];
    g->pidfd[p] = pidfds[p];
  }
  g->timeout_s = timeout_s;
  /* one busy thread per rank; the program computes beside the thread */
  g->spins = num_cores >= size ? SPINS : ZS_YIELD;
  g->spins_in_thread = num_cores >= 2 * size ? SPINS : 0;
  pthread_condattr_t clock;
  pthread_condattr_init(&clock);
  pthread_condattr_setclock(&clock, CLOCK_MONOTONIC);
  pthread_mutex_init(&g->lock, NULL);
  pthread_cond_init(&g->work, &clock);
  pthread_cond_init(&g->news, &clock);
  pthread_condattr_destroy(&clock);
  return g;
}

void zs_close(zs_group *g) {
  pthread_mutex_lock(&g->lock);
  atomic_store(&g->is_closing, 1);
  pthread_cond_broadcast(&g->news);
  pthread_cond_broadcast(&g->work);
  pthread_mutex_unlock(&g->lock);
  zs_wake_peers(g); /* our own thread may sleep on one of their counters */
  if (g->has_thread) pthread_join(g->thread, NULL);
  pthread_mutex_lock(&g->lock);
  while (g->num_inside || g->is_busy) pthread_cond_wait(&g->news, &g->lock);
  g->has_thread = 0;
  pthread_mutex_unlock(&g->lock);
  if (!g->is_broken) zs_break(g, NULL, ZS_CLOSED, g->rank, g->rank, 0.0);
}

void zs_free(zs_group *g) {
  for (zs_task *t = g->first; t;) {
    zs_task *next = t->next;
    free(t);
    t = next;
  }
  for (zs_segment *s = g->segments; s;) {
    zs_segment *next = s->next;
    free(s);
    s = next;
  }
  free(g); /* nothing is destroyed first: a forked child would wait for a thread that was not copied */
}
