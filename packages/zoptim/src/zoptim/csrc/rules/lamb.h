/* LAMB (You et al. 2020, algorithm 2): Adam with the step of each tensor scaled by its trust ratio.
 *
 * The ratio needs two norms of the whole tensor, so kern.c and zk_gpu.cu make two passes: moments and sums of
 * squares, then the weights.  States: mean and second moment. */
#define ZK_LAMB_LOOPS(X) X(lamb, 2, 0) X(lamb, 2, ZK_EPS_INSIDE)
#define ZK_LAMB_SQUARES 2

ZK_TABLE_FN void zk_lamb_prepare(zk_coef *c, const zk_hyper *h, int flags, double lr, float step) {
  (void)lr, (void)step;
  c->l2 = 0.0f; /* the decay is part of the direction */
  c->step_size = 1.0f;
  if (!(flags & ZK_NO_CORRECTION)) zk_correct(c, h, flags, 1.0);
}

ZK_FN void zk_lamb_moments(float g, float *m, float *v, const zk_coef *c, int flags) {
  g = g * c->grad_mul;
  *m = c->b1 * *m + c->a1 * g;
  float square = c->b2 * zk_square_of(*v, flags) + c->a2 * (g * g);
  *v = flags & ZK_ROOTS ? zk_sqrtf(square) : square;
}

/* The direction before the trust ratio, from the updated moments. */
ZK_FN float zk_lamb_direction(float p, float m, float v, const zk_coef *c, int flags) {
  float root;
  if (flags & ZK_EPS_INSIDE)
    root = zk_sqrtf(zk_square_of(v, flags) * c->root_mul + c->eps);
  else
    root = (flags & ZK_ROOTS ? v : zk_sqrtf(v)) * c->root_mul + c->eps;
  return c->step_size * m / root + c->decay * p;
}

/* lr times the bounded trust ratio ||weight|| / ||direction||, which is 1 if either norm is zero. */
ZK_TABLE_FN float zk_lamb_rate(double weight_squares, double direction_squares, const zk_hyper *h, double lr) {
  double weight = zk_sqrt(weight_squares), direction = zk_sqrt(direction_squares);
  double ratio = 1.0;
  if (weight > 0.0 && direction > 0.0) {
    ratio = weight / direction;
    ratio = ratio < h->min_ratio ? h->min_ratio : ratio;
    ratio = ratio > h->max_ratio ? h->max_ratio : ratio;
  }
  return (float)(lr * ratio);
}
