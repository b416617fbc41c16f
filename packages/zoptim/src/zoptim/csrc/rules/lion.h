/* Lion (Chen et al. 2023, algorithm 2).
 *
 * State: the mean of the gradients. */
#define ZK_LION_LOOPS(X) X(lion, 1, 0)
#define ZK_LION_SQUARES 0

ZK_TABLE_FN void zk_lion_prepare(zk_coef *c, const zk_hyper *h, int flags, double lr, float step) {
  (void)c, (void)h, (void)flags, (void)lr, (void)step;
}

ZK_FN float zk_lion(float p, float g, float *m, float *unused1, float *unused2, const zk_coef *c, int flags) {
  (void)unused1, (void)unused2, (void)flags;
  g = zk_gradient(g, p, c);
  float mixed = c->b1 * *m + c->a1 * g;
  float sign = (mixed > 0.0f ? 1.0f : 0.0f) - (mixed < 0.0f ? 1.0f : 0.0f);
  sign = mixed == mixed ? sign : mixed; /* NaN stays NaN */
  *m = c->b2 * *m + c->a2 * g;
  return p * c->shrink - c->step_size * sign;
}
