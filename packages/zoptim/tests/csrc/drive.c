/* Runs every rule with every combination of formats and prints a hash of everything that each wrote.
 *
 * test_native_memory.py compiles this with the kernels under AddressSanitizer and UBSan: every stream is a heap
 * block that ends with its last element and begins one element off the allocator's alignment, so a kernel that
 * reads or writes one element too far, or assumes alignment, stops the program.  Levels and thread counts must agree
 * on every hash.  The printed lines are the same on every processor: compare two outputs to compare two machines.
 */
#include "zk_api.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MOST_ROWS 8

/* A replacement of GOMP_parallel that runs the parts of a team one after the other. */
static int team_place, team_size;
static int place_in_team(void) { return team_place; }
static int size_of_team(void) { return team_size; }
static void run_in_turn(void (*part)(void *), void *context, unsigned num_threads, unsigned flags) {
  (void)flags;
  team_size = (int)num_threads;
  for (team_place = 0; team_place < team_size; team_place++) part(context);
}

static uint32_t noise = 1;
static uint32_t next_bits(void) {
  noise ^= noise << 13;
  noise ^= noise >> 17;
  noise ^= noise << 5;
  return noise;
}

/* A value between -2 and 2 of any size down to 2**-30; now and then zero. */
static float next_value(void) {
  uint32_t bits = next_bits();
  float value = zk_float((bits & 0x807fffffu) | (97u + (bits >> 23) % 31u) << 23);
  return bits % 61u ? value : 0.0f;
}

static uint64_t hash;
static void add_to_hash(const void *bytes, size_t size) {
  for (size_t i = 0; i < size; i++) hash = (hash ^ ((const uint8_t *)bytes)[i]) * 0x100000001b3ull;
}

/* One stream: a heap block per row, ending with the row's last element. */
typedef struct {
  int32_t num_rows;
  size_t width, bytes[MOST_ROWS];
  char *block[MOST_ROWS];
  uint64_t address[MOST_ROWS];
} stream;

static size_t width_of(int format) {
  return format == ZK_NONE ? 0 : format == ZK_F32 ? 4 : format == ZK_Q8 ? 1 : 2;
}

static void make_stream(stream *s, int32_t num_rows, const int64_t *numel, size_t width) {
  s->num_rows = num_rows;
  s->width = width;
  for (int32_t row = 0; row < num_rows; row++) {
    s->bytes[row] = (size_t)numel[row] * width;
    s->block[row] = malloc(s->bytes[row] + width);
    memset(s->block[row], 0, s->bytes[row] + width);
    s->address[row] = (uint64_t)(uintptr_t)(s->block[row] + width);
  }
}

static void drop_stream(stream *s) {
  for (int32_t row = 0; row < s->num_rows; row++) {
    add_to_hash(s->block[row], s->bytes[row] + s->width);
    free(s->block[row]);
  }
}

static void fill(stream *s, stream *extra, const int64_t *numel, int format, int kind, float factor) {
  for (int32_t row = 0; row < s->num_rows; row++) {
    float *values = malloc((size_t)numel[row] * 4);
    for (int64_t i = 0; i < numel[row]; i++) {
      values[i] = next_value() * factor;
      if (kind == 2) values[i] = values[i] * values[i];
    }
    void *second = extra ? (void *)(uintptr_t)extra->address[row] : 0;
    zk_encode(format, kind, values, (void *)(uintptr_t)s->address[row], second, numel[row], 7, 0);
    free(values);
  }
}

typedef struct {
  int rule, flags, num_states, weight, grad, state, copy;
} combination;

/* Three updates and a skipped one of new streams.  Returns the hash of everything that was written. */
static uint64_t run(const combination *c, int32_t num_rows, const int64_t *numel, int num_threads) {
  stream weights, grads, remainders, copies, states[3], scales[3], steps;
  int64_t ones[MOST_ROWS], blocks[MOST_ROWS], spans = 0;
  for (int32_t row = 0; row < num_rows; row++) {
    ones[row] = 1;
    blocks[row] = (numel[row] + ZK_BLOCK - 1) / ZK_BLOCK;
    spans += zk_num_spans(numel[row]);
  }
  noise = 12345;
  hash = 0xcbf29ce484222325ull;
  make_stream(&weights, num_rows, numel, width_of(c->weight));
  make_stream(&grads, num_rows, numel, width_of(c->grad));
  make_stream(&remainders, c->weight == ZK_SPLIT ? num_rows : 0, numel, 2);
  make_stream(&copies, c->copy ? num_rows : 0, numel, 2);
  make_stream(&steps, num_rows, ones, 4);
  fill(&weights, c->weight == ZK_SPLIT ? &remainders : 0, numel, c->weight, 0, 1.0f);
  for (int k = 0; k < c->num_states; k++) {
    make_stream(&states[k], num_rows, numel, width_of(c->state));
    make_stream(&scales[k], c->state == ZK_Q8 ? num_rows : 0, blocks, 4);
    int square = c->rule == ZK_ADAGRAD || ((c->rule == ZK_ADAM || c->rule == ZK_LAMB) && k);
    fill(&states[k], c->state == ZK_Q8 ? &scales[k] : 0, numel, c->state, square ? 2 : 1, 0.01f);
  }

  float grad_scale = 8.0f, found_inf = 0.0f;
  void *coefs = malloc((size_t)(num_rows * zk_coef_bytes()));
  double *sums = malloc((size_t)num_rows * 16), *partials = malloc((size_t)spans * 16);
  zk_job job = {.rule = c->rule, .flags = c->flags, .weight = c->weight, .grad = c->grad, .state = c->state,
                .copy = c->copy, .num_rows = num_rows, .numel = numel, .weights = weights.address,
                .grads = grads.address, .remainders = remainders.num_rows ? remainders.address : 0,
                .copies = copies.num_rows ? copies.address : 0, .steps = steps.address, .grad_scale = &grad_scale,
                .found_inf = &found_inf, .lr = 1e-2, .beta1 = 0.9, .beta2 = 0.99, .eps = 1e-4, .weight_decay = 0.1,
                .min_ratio = 0.01, .max_ratio = 10.0, .coefs = coefs, .sums = sums, .partials = partials};
  for (int k = 0; k < c->num_states; k++) {
    job.states[k] = states[k].address;
    job.scales[k] = scales[k].num_rows ? scales[k].address : 0;
  }
  int done = 0;
  for (int step = 0; step < 4; step++) {
    found_inf = step == 2 ? 1.0f : 0.0f;
    fill(&grads, 0, numel, c->grad, 3, 4.0f);
    done += zk_step(&job, num_threads);
  }
  add_to_hash(&done, sizeof done);

  stream *all[] = {&weights, &grads, &remainders, &copies, &steps};
  for (int k = 0; k < 5; k++) drop_stream(all[k]);
  for (int k = 0; k < c->num_states; k++) {
    drop_stream(&states[k]);
    drop_stream(&scales[k]);
  }
  free(coefs);
  free(sums);
  free(partials);
  return hash;
}

static const char *const format_names[] = {"none", "f32", "bf16", "f16", "split", "q8"};
static int num_wrong;

static uint64_t best_level_hash(const combination *c, int32_t num_rows, const int64_t *numel, int num_threads) {
  zk_set_level(zk_best_level());
  return run(c, num_rows, numel, num_threads);
}

static void check(const char *rule, const combination *c, int32_t num_rows, const int64_t *numel, int num_threads) {
  uint64_t expected = best_level_hash(c, num_rows, numel, 1);
  for (int level = 0; level < zk_levels(); level++) {
    if (!zk_level_runs_here(level)) continue;
    zk_set_level(level);
    uint64_t found = run(c, num_rows, numel, num_threads);
    if (found == expected) continue;
    num_wrong++;
    printf("DIFFERS on %s with %d threads: ", zk_level_name(level), num_threads);
  }
  printf("%s flags=%d weight=%s grad=%s state=%s copy=%s rows=%d %016llx\n", rule, c->flags, format_names[c->weight],
         format_names[c->grad], format_names[c->state], format_names[c->copy], num_rows, (unsigned long long)expected);
}

static const struct {
  const char *name;
  int rule, flags, num_states;
} rules[] = {
    {"adam", ZK_ADAM, 0, 2},
    {"adam", ZK_ADAM, ZK_DECOUPLED, 2},
    {"adam", ZK_ADAM, ZK_DECOUPLED | ZK_AMSGRAD | ZK_MAXIMIZE | ZK_NO_CORRECTION, 3},
    {"sgd", ZK_SGD, 0, 0},
    {"sgd", ZK_SGD, 0, 1},
    {"sgd", ZK_SGD, ZK_NESTEROV, 1},
    {"sgd", ZK_SGD, ZK_MAXIMIZE, 1},
    {"adagrad", ZK_ADAGRAD, 0, 1},
    {"lion", ZK_LION, ZK_DECOUPLED, 1},
    {"lamb", ZK_LAMB, 0, 2},
    {"lamb", ZK_LAMB, ZK_EPS_INSIDE | ZK_NO_CORRECTION, 2},
};
static const int weight_formats[] = {ZK_F32, ZK_BF16, ZK_F16, ZK_SPLIT};
static const int grad_formats[] = {ZK_F32, ZK_BF16, ZK_F16};
static const int state_formats[] = {ZK_F32, ZK_BF16, ZK_F16, ZK_Q8};
static const int copy_formats[] = {ZK_NONE, ZK_BF16, ZK_F16};
#define COUNT(list) (int)(sizeof(list) / sizeof((list)[0]))

static void check_rules(int32_t num_rows, const int64_t *numel, int num_threads, int is_thorough) {
  for (int r = 0; r < COUNT(rules); r++)
    for (int w = 0; w < COUNT(weight_formats); w++)
      for (int g = 0; g < COUNT(grad_formats); g++)
        for (int s = 0; s < COUNT(state_formats); s++)
          for (int y = 0; y < COUNT(copy_formats); y++) {
            if (!is_thorough && (g != w % 3 || y != s % 3)) continue; /* every format still occurs */
            int state = rules[r].num_states ? state_formats[s] : ZK_NONE;
            if (!rules[r].num_states && s) continue;
            combination c = {rules[r].rule, rules[r].flags, rules[r].num_states, weight_formats[w], grad_formats[g],
                             state, copy_formats[y]};
            check(rules[r].name, &c, num_rows, numel, num_threads);
          }
}

static void check_squares(int32_t num_rows, const int64_t *numel) {
  int64_t spans = 0;
  for (int32_t row = 0; row < num_rows; row++) spans += zk_num_spans(numel[row]);
  for (int g = 0; g < COUNT(grad_formats); g++) {
    stream rows;
    double *partials = malloc((size_t)spans * 8), first = 0;
    make_stream(&rows, num_rows, numel, width_of(grad_formats[g]));
    fill(&rows, 0, numel, grad_formats[g], 3, 1.0f);
    for (int level = 0; level < zk_levels(); level++)
      for (int num_threads = 1; num_threads < 4 && zk_level_runs_here(level); num_threads++) {
        zk_set_level(level);
        double sum = zk_squares(grad_formats[g], num_rows, rows.address, numel, partials, num_threads);
        if (level == 0 && num_threads == 1) first = sum;
        num_wrong += memcmp(&sum, &first, sizeof sum) != 0;
      }
    printf("squares %s %a\n", format_names[grad_formats[g]], first);
    drop_stream(&rows);
    free(partials);
  }
}

int main(void) {
  const int64_t small[] = {1, 255, 257, 0, 1025}, large[] = {16385, 3, 20011};
  zk_set_omp((uint64_t)(uintptr_t)run_in_turn, (uint64_t)(uintptr_t)place_in_team, (uint64_t)(uintptr_t)size_of_team);
  check_rules(COUNT(small), small, 1, 1);
  check_rules(COUNT(large), large, 3, 0); /* enough elements for a team */
  check_squares(COUNT(large), large);
  return num_wrong != 0;
}
