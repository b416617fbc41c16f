/* Adam (Kingma and Ba 2015), AdamW (Loshchilov and Hutter 2019) with ZK_DECOUPLED, AMSGrad with ZK_AMSGRAD.
 *
 * States: mean, second moment, and with ZK_AMSGRAD the largest second moment. */
#define ZK_ADAM_LOOPS(X) X(adam, 2, 0) X(adam, 3, ZK_AMSGRAD)
#define ZK_ADAM_SQUARES 6

ZK_TABLE_FN void zk_adam_prepare(zk_coef *c, const zk_hyper *h, int flags, double lr, float step) {
  (void)step;
  if (!(flags & ZK_NO_CORRECTION)) zk_correct(c, h, flags, lr);
}

ZK_FN float zk_adam(float p, float g, float *m, float *v, float *largest, const zk_coef *c, int flags) {
  g = zk_gradient(g, p, c);
  *m = c->b1 * *m + c->a1 * g;
  float square = c->b2 * zk_square_of(*v, flags) + c->a2 * (g * g);
  float root = zk_sqrtf(square);
  *v = flags & ZK_ROOTS ? root : square;
  if (flags & ZK_AMSGRAD) {
    *largest = *largest > *v ? *largest : *v;
    root = flags & ZK_ROOTS ? *largest : zk_sqrtf(*largest);
  }
  return p * c->shrink - c->step_size * *m / (root * c->root_mul + c->eps);
}
