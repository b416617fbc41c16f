/* Adagrad (Duchi et al. 2011) as in torch; beta1 is lr_decay.
 *
 * State: the sum of squared gradients. */
#define ZK_ADAGRAD_LOOPS(X) X(adagrad, 1, 0)
#define ZK_ADAGRAD_SQUARES 1

ZK_TABLE_FN void zk_adagrad_prepare(zk_coef *c, const zk_hyper *h, int flags, double lr, float step) {
  (void)flags;
  c->step_size = (float)(lr / (1.0 + ((double)step - 1.0) * h->beta1));
}

ZK_FN float zk_adagrad(float p, float g, float *sum, float *unused1, float *unused2, const zk_coef *c, int flags) {
  (void)unused1, (void)unused2;
  g = zk_gradient(g, p, c);
  float square = zk_square_of(*sum, flags) + g * g;
  float root = zk_sqrtf(square);
  *sum = flags & ZK_ROOTS ? root : square;
  return p - c->step_size * g / (root + c->eps);
}
