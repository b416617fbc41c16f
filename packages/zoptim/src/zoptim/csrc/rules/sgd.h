/* SGD with momentum as in torch; beta1 is the momentum, beta2 the dampening.
 *
 * State: the momentum buffer, absent without momentum. */
#define ZK_SGD_LOOPS(X) X(sgd, 0, 0) X(sgd, 1, 0) X(sgd, 1, ZK_NESTEROV)
#define ZK_SGD_SQUARES 0

ZK_TABLE_FN void zk_sgd_prepare(zk_coef *c, const zk_hyper *h, int flags, double lr, float step) {
  (void)flags, (void)lr, (void)step;
  c->a1 = (float)(1.0 - h->beta2);
  c->b2 = (float)h->beta1;
}

ZK_FN float zk_sgd(float p, float g, float *buffer, float *unused1, float *unused2, const zk_coef *c, int flags) {
  (void)unused1, (void)unused2;
  g = zk_gradient(g, p, c);
  if (!buffer) return p - c->step_size * g;
  *buffer = c->b1 * *buffer + c->a1 * g;
  float direction = flags & ZK_NESTEROV ? g + c->b2 * *buffer : *buffer;
  return p - c->step_size * direction;
}
