/* Flags, hyperparameters and coefficients of the update rules in csrc/rules, for the SIMD and the CUDA build.
 *
 * zk_prepare computes the float32 coefficients of one tensor from hyperparameters (double) and a step count; the rule
 * functions update one element with them.  zoptim/rules has the same formulas in torch; tests compare the two.
 */
#ifndef ZK_RULES_H
#define ZK_RULES_H
#include "zk_math.h"

/* Flags of a job.  The numbers are part of the ABI with Python (contract.py). */
#define ZK_DECOUPLED 1       /* weight decay shrinks the weight; without it, decay is added to the gradient */
#define ZK_AMSGRAD 2         /* state 2 keeps the maximum of state 1 */
#define ZK_MAXIMIZE 4
#define ZK_NESTEROV 8
#define ZK_NO_CORRECTION 16  /* Adam, LAMB: no bias correction */
#define ZK_EPS_INSIDE 32     /* LAMB: eps under the root */
#define ZK_ROOTS 64          /* second moments are read and written as square roots (as ZK_Q8 stores them) */

typedef struct {
  double lr, beta1, beta2, eps, weight_decay; /* SGD: beta1 = momentum, beta2 = dampening; Adagrad: beta1 = lr_decay */
  double min_ratio, max_ratio;                /* LAMB: bounds of the trust ratio */
} zk_hyper;

typedef struct {
  float grad_mul;  /* the gradient is multiplied by it: 1 / grad_scale, negative to maximize */
  float l2;        /* weight decay that is added to the gradient */
  float shrink;    /* factor of the weight: 1 - lr * decoupled decay */
  float b1, a1;    /* first moment:  b1 * m + a1 * g */
  float b2, a2;    /* second moment: b2 * v + a2 * g * g */
  float eps;
  float step_size; /* factor of the direction: lr / first bias correction, if any */
  float root_mul;  /* factor of the root: 1 / sqrt(second bias correction) */
  float decay;     /* LAMB: weight decay inside the direction */
  uint32_t seed;   /* of stochastic rounding: the number of this update */
} zk_coef;

/* base ** exponent by squaring: the same bits with every compiler, unlike pow. */
ZK_TABLE_FN double zk_power(double base, uint32_t exponent) {
  double result = 1.0;
  for (; exponent; exponent >>= 1) {
    if (exponent & 1u) result = result * base;
    base = base * base;
  }
  return result;
}

/* Bias correction of Adam and LAMB: the step size `size / (1 - beta1^t)` and the factor of the root. */
ZK_TABLE_FN void zk_correct(zk_coef *c, const zk_hyper *h, int flags, double size) {
  double correction1 = 1.0 - zk_power(h->beta1, c->seed);
  double correction2 = 1.0 - zk_power(h->beta2, c->seed);
  c->step_size = (float)(size / correction1);
  c->root_mul = (float)(flags & ZK_EPS_INSIDE ? 1.0 / correction2 : 1.0 / zk_sqrt(correction2));
}

ZK_FN float zk_gradient(float g, float p, const zk_coef *c) {
  g = g * c->grad_mul;
  return c->l2 == 0.0f ? g : g + c->l2 * p;
}

/* The second moment of a state, which may be its root. */
ZK_FN float zk_square_of(float state, int flags) { return flags & ZK_ROOTS ? state * state : state; }

#endif
