/* Mappings, the table of shared segments, and the choice of the instruction set. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#ifdef ZS_HAS_X86
#include <cpuid.h>
#endif

#include "zs_core.h"

#define ZS_BEST_LEVEL 2
typedef void reduce_function(int, int, int, const void *const *, int, void *const *, int64_t, int);
#define DECLARE(level)               \
  reduce_function zs_reduce_##level; \
  void zs_stream_##level(void *, const void *, int64_t)
DECLARE(base);
#ifdef ZS_HAS_X86
DECLARE(v3);
DECLARE(v4);
static int has_fast_strings;
#endif
static const char *const LEVEL_NAMES[] = {"base", "avx2", "avx512"};
static int level = -1;

int zs_set_level(int wanted) {
#ifdef ZS_HAS_X86
  __builtin_cpu_init();
  int best = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("f16c");
  if (best && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
      __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
    best = 2;
  }
  unsigned a, b, c, d;
  has_fast_strings = __get_cpuid_count(7, 0, &a, &b, &c, &d) && (b >> 9 & 1); /* "erms" */
#else
  int best = 0;
#endif
  level = wanted < best ? wanted : best;
  return level;
}

int zs_level(void) {
  if (level < 0) zs_set_level(ZS_BEST_LEVEL);
  return level;
}

const char *zs_level_name(void) { return LEVEL_NAMES[zs_level()]; }

const char *zs_source_hash(void) { return ZS_SOURCE_HASH; }

void zs_reduce(int dtype, int reduction, int num, const void *const *sources, int num_outputs, void *const *outputs,
               int64_t numel, int is_fresh) {
#ifdef ZS_HAS_X86
  static reduce_function *const levels[] = {zs_reduce_base, zs_reduce_v3, zs_reduce_v4};
  if (level < 0) zs_set_level(ZS_BEST_LEVEL);
  /* 512 bits help where the arithmetic is the limit; where memory is, they cost 2% */
  int best = level == 2 && dtype != ZS_BFLOAT16 ? 1 : level;
  levels[best](dtype, reduction, num, sources, num_outputs, outputs, numel, is_fresh);
#else
  zs_reduce_base(dtype, reduction, num, sources, num_outputs, outputs, numel, is_fresh);
#endif
}

/* An ordinary store into a line that another core has read waits until that core has given the line up: one by one,
 * 7 GB/s between two chiplets of an EPYC and 41 within one.  A string copy asks for whole lines ahead: 43 and 88. */
void zs_copy_lines(void *to, const void *from, int64_t bytes) {
#ifdef ZS_HAS_X86
  if (level < 0) zs_set_level(ZS_BEST_LEVEL);
  if (has_fast_strings && bytes >= 4096) {
    __asm__ volatile("rep movsb" : "+D"(to), "+S"(from), "+c"(bytes)::"memory");
    return;
  }
#endif
  memcpy(to, from, (size_t)bytes);
}

void zs_stream(void *to, const void *from, int64_t bytes) { zs_stream_base(to, from, bytes); }

int64_t zs_control_bytes(void) { return ZS_HEADER + 3 * ZS_CHUNK; }
int zs_max_ranks(void) { return ZS_MAX_RANKS; }
int zs_num_reducible(void) { return ZS_REDUCIBLE; }

/* Huge pages where available; populated at once, so that no collective stops for page faults. */
void *zs_map(int descriptor, int64_t bytes) {
  void *start = mmap(NULL, (size_t)bytes, PROT_READ | PROT_WRITE, MAP_SHARED, descriptor, 0);
  if (start == MAP_FAILED) return NULL;
  madvise(start, (size_t)bytes, MADV_HUGEPAGE);
#ifdef MADV_POPULATE_WRITE
  madvise(start, (size_t)bytes, MADV_POPULATE_WRITE);
#endif
  return start;
}

void zs_unmap(void *start, int64_t bytes) { munmap(start, (size_t)bytes); }

int zs_add_segment(zs_group *g, int64_t number, int64_t bytes, void *const *bases) {
  zs_segment *s = calloc(1, sizeof *s);
  if (!s) return 0;
  s->number = number;
  s->bytes = bytes;
  for (int p = 0; p < g->size; p++) s->base[p] = bases[p];
  pthread_mutex_lock(&g->lock);
  s->next = g->segments;
  g->segments = s;
  pthread_mutex_unlock(&g->lock);
  return 1;
}

void zs_drop_segment(zs_group *g, int64_t number) {
  pthread_mutex_lock(&g->lock);
  zs_segment **link = &g->segments;
  while (*link && (*link)->number != number) link = &(*link)->next;
  zs_segment *found = *link;
  if (found) *link = found->next;
  pthread_mutex_unlock(&g->lock);
  free(found);
}
