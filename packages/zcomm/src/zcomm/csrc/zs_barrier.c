/* Barriers between ranks, and their failures.
 *
 * A rank arrives by raising its own counter; it waits for the others, spinning briefly (or yielding its core, if there
 * are more ranks than cores) and then sleeping on a futex in that rank's control segment.  No wait is endless: a
 * barrier ends when all have arrived, when a rank is dead (by its pidfd), has closed or aborted the group, or at the
 * time limit.  The first failure breaks the group permanently; ranks that continued after a failed collective would no
 * longer agree on their order.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
#include <sched.h>
#include <signal.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "zs_core.h"

#define NAP_S 0.05 /* the longest sleep between two checks of the peers */
#define YIELD_S 50e-6 /* with more ranks than cores; a core that goes idle takes as long to wake up */

#if defined(__x86_64__) || defined(__i386__)
#define PAUSE() __builtin_ia32_pause()
#elif defined(__aarch64__)
#define PAUSE() __asm__ volatile("yield")
#else
#define PAUSE() ((void)0)
#endif

double zs_now_s(void) {
  struct timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

struct timespec zs_timespec(double seconds) {
  return (struct timespec){(time_t)seconds, (long)((seconds - (double)(time_t)seconds) * 1e9)};
}

/* Not FUTEX_PRIVATE: the sleepers are other processes. */
static void sleep_on(_Atomic uint32_t *word, uint32_t value, double seconds) {
  struct timespec limit = zs_timespec(seconds);
  syscall(SYS_futex, word, FUTEX_WAIT, value, &limit, NULL, 0);
}

static void wake_all(_Atomic uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0); }

void zs_wake_peers(zs_group *g) {
  for (int p = 0; p < g->size; p++) wake_all(&g->control[p]->arrived);
}

void zs_break(zs_group *g, const zs_task *t, int kind, int culprit, int reporter, double seconds) {
  zs_control *own = g->control[g->rank];
  pthread_mutex_lock(&g->lock);
  if (!g->is_broken) {
    g->report.kind = kind;
    g->report.rank = culprit;
    g->report.reporter = reporter;
    g->report.seconds = seconds;
    if (t) {
      g->report.ticket = t->ticket;
      memcpy(g->report.label, t->call.label, sizeof g->report.label);
    }
    atomic_store(&g->is_broken, 1);
    if (atomic_load(&own->state) == ZS_FINE) {
      own->culprit = culprit;
      own->seconds = seconds;
      atomic_store(&own->state, kind);
    }
  }
  pthread_cond_broadcast(&g->news);
  pthread_cond_broadcast(&g->work);
  pthread_mutex_unlock(&g->lock);
  wake_all(&own->arrived);
}

static int is_dead(const zs_group *g, int p) {
  if (g->pidfd[p] < 0) return kill(g->pid[p], 0) != 0 && errno == ESRCH;
  struct pollfd state = {g->pidfd[p], POLLIN, 0};
  return poll(&state, 1, 0) == 1;
}

static int has_arrived(const zs_group *g, int p) {
  return (int32_t)(atomic_load_explicit(&g->control[p]->arrived, memory_order_acquire) - g->count) > 0;
}

/* True if rank p, for which this rank waits at a barrier, can never arrive; breaks the group then. */
static int cannot_arrive(zs_group *g, const zs_task *t, int p, int look_for_dead) {
  if (atomic_load(&g->is_closing)) {
    zs_break(g, t, ZS_CLOSED, g->rank, g->rank, 0.0);
    return 1;
  }
  for (int q = 0; q < g->size; q++) {
    int state = atomic_load(&g->control[q]->state);
    if (q == g->rank || state == ZS_FINE) continue;
    if (has_arrived(g, p)) return 0; /* the group was ended after this barrier */
    if (state == ZS_CLOSED && q != p) continue;
    zs_break(g, t, state, state == ZS_CLOSED ? q : g->control[q]->culprit, q, g->control[q]->seconds);
    return 1;
  }
  double waited = zs_now_s() - t->waits_since;
  for (int q = 0; look_for_dead && q < g->size; q++) {
    if (q == g->rank || has_arrived(g, q) || !is_dead(g, q) || has_arrived(g, q)) continue;
    zs_break(g, t, ZS_DIED, q, g->rank, waited);
    return 1;
  }
  if (waited < g->timeout_s) return 0;
  zs_break(g, t, ZS_TIMED_OUT, p, g->rank, waited);
  return 1;
}

void zs_arrive(zs_group *g) {
  zs_control *own = g->control[g->rank];
  atomic_store(&own->arrived, g->count + 1);
  if (atomic_load(&own->sleepers)) wake_all(&own->arrived);
}

int zs_await(zs_group *g, zs_task *t, double until, int spins) {
  for (int p = 0; p < g->size; p++) {
    int look_for_dead = 0;
    while (!has_arrived(g, p)) {
      if (spins > 0) {
        spins--;
        PAUSE();
        continue;
      }
      if (cannot_arrive(g, t, p, look_for_dead)) return -1;
      double time = zs_now_s();
      if (time >= until) return 0;
      if (spins == ZS_YIELD && time < t->waits_since + YIELD_S) {
        sched_yield();
        continue;
      }
      _Atomic uint32_t *word = &g->control[p]->arrived;
      atomic_fetch_add(&g->control[p]->sleepers, 1);
      uint32_t value = atomic_load(word);
      if ((int32_t)(value - g->count) <= 0) sleep_on(word, value, until - time < NAP_S ? until - time : NAP_S);
      atomic_fetch_sub(&g->control[p]->sleepers, 1);
      look_for_dead = zs_now_s() - time > NAP_S / 2;
    }
  }
  return 1;
}
