/* The update rules, once, for the SIMD and the CUDA build.
 *
 * zk_prepare turns hyperparameters (double) and a step count into the float32 coefficients of one
 * tensor; the rule functions update one element with them.  Both sides of every formula stand in
 * rules.py, in torch; the tests hold the two together.
 */
#ifndef ZK_RULES_H
#define ZK_RULES_H
#include "zk_math.h"

/* Rules.  The numbers are part of the ABI with Python (native.py). */
#define ZK_ADAM 0
#define ZK_SGD 1
#define ZK_ADAGRAD 2
#define ZK_LION 3
#define ZK_LAMB 4

/* Flags of a job. */
#define ZK_DECOUPLED 1       /* weight decay shrinks the weight; else it is added to the gradient */
#define ZK_AMSGRAD 2         /* state 2 keeps the maximum of state 1 */
#define ZK_MAXIMIZE 4
#define ZK_NESTEROV 8
#define ZK_NO_CORRECTION 16  /* Adam, LAMB: the moments as they are */
#define ZK_EPS_INSIDE 32     /* LAMB: eps under the root */
#define ZK_ROOTS 64          /* second moments arrive and leave as their square roots (ZK_Q8 keeps those) */

typedef struct {
  double lr, beta1, beta2, eps, weight_decay; /* SGD: beta1 = momentum, beta2 = dampening; Adagrad: beta1 = lr_decay */
  double min_ratio, max_ratio;                /* LAMB: bounds of the trust ratio */
} zk_hyper;

typedef struct {
  float grad_mul;  /* the gradient is multiplied by it: 1 / grad_scale, negative to maximize */
  float l2;        /* weight decay that joins the gradient */
  float shrink;    /* factor of the weight: 1 - lr * decoupled decay */
  float b1, a1;    /* first moment:  b1 * m + a1 * g */
  float b2, a2;    /* second moment: b2 * v + a2 * g * g */
  float eps;
  float step_size; /* factor of the direction: lr, over the first bias correction where there is one */
  float root_mul;  /* factor of the root: 1 / sqrt(second bias correction) */
  float decay;     /* LAMB: weight decay inside the direction */
  uint32_t seed;   /* of stochastic rounding: the number of this update */
} zk_coef;

/* base ** exponent by squaring: the same bits from every compiler, unlike pow. */
ZK_TABLE_FN double zk_power(double base, uint32_t exponent) {
  double result = 1.0;
  for (; exponent; exponent >>= 1) {
    if (exponent & 1u) result = result * base;
    base = base * base;
  }
  return result;
}

/* The coefficients of update number `step` (1 is the first). */
ZK_TABLE_FN void zk_prepare(zk_coef *c, const zk_hyper *h, int rule, int flags, double lr, float step, float grad_scale) {
  double decay = h->weight_decay;
  uint32_t count = step < 4294967040.0f ? (uint32_t)step : 0xffffffffu;
  double one = 1.0 / (double)grad_scale;
  c->grad_mul = (float)(flags & ZK_MAXIMIZE ? -one : one);
  c->l2 = (float)(flags & ZK_DECOUPLED || rule == ZK_LAMB ? 0.0 : decay);
  c->shrink = (float)(flags & ZK_DECOUPLED ? 1.0 - lr * decay : 1.0);
  c->b1 = (float)h->beta1;
  c->a1 = (float)(1.0 - h->beta1);
  c->b2 = (float)h->beta2;
  c->a2 = (float)(1.0 - h->beta2);
  c->eps = (float)h->eps;
  c->step_size = (float)lr;
  c->root_mul = 1.0f;
  c->decay = (float)decay;
  c->seed = count;
  if (rule == ZK_SGD) {
    c->a1 = (float)(1.0 - h->beta2);
    c->b2 = (float)h->beta1;
  } else if (rule == ZK_ADAGRAD) {
    c->step_size = (float)(lr / (1.0 + ((double)step - 1.0) * h->beta1));
  } else if ((rule == ZK_ADAM || rule == ZK_LAMB) && !(flags & ZK_NO_CORRECTION)) {
    double correction1 = 1.0 - zk_power(h->beta1, count);
    double correction2 = 1.0 - zk_power(h->beta2, count);
    c->step_size = (float)((rule == ZK_LAMB ? 1.0 : lr) / correction1);
    c->root_mul = (float)(flags & ZK_EPS_INSIDE ? 1.0 / correction2 : 1.0 / zk_sqrt(correction2));
  } else if (rule == ZK_LAMB) {
    c->step_size = 1.0f;
  }
}

ZK_FN float zk_gradient(float g, float p, const zk_coef *c) {
  g = g * c->grad_mul;
  return c->l2 == 0.0f ? g : g + c->l2 * p;
}

/* The second moment behind a state, and the state of a second moment. */
ZK_FN float zk_square_of(float state, int flags) { return flags & ZK_ROOTS ? state * state : state; }

/* Adam and AdamW; `largest` is read and written with AMSGrad only.  Returns the new weight. */
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

/* SGD without momentum: state 0 is absent. */
ZK_FN float zk_sgd(float p, float g, const zk_coef *c) { return p - c->step_size * zk_gradient(g, p, c); }

ZK_FN float zk_sgd_momentum(float p, float g, float *buffer, const zk_coef *c, int flags) {
  g = zk_gradient(g, p, c);
  *buffer = c->b1 * *buffer + c->a1 * g;
  float direction = flags & ZK_NESTEROV ? g + c->b2 * *buffer : *buffer;
  return p - c->step_size * direction;
}

ZK_FN float zk_adagrad(float p, float g, float *sum, const zk_coef *c, int flags) {
  g = zk_gradient(g, p, c);
  float square = zk_square_of(*sum, flags) + g * g;
  float root = zk_sqrtf(square);
  *sum = flags & ZK_ROOTS ? root : square;
  return p - c->step_size * g / (root + c->eps);
}

ZK_FN float zk_lion(float p, float g, float *m, const zk_coef *c) {
  g = zk_gradient(g, p, c);
  float mixed = c->b1 * *m + c->a1 * g;
  float sign = (mixed > 0.0f ? 1.0f : 0.0f) - (mixed < 0.0f ? 1.0f : 0.0f);
  sign = mixed == mixed ? sign : mixed; /* NaN stays visible */
  *m = c->b2 * *m + c->a2 * g;
  return p * c->shrink - c->step_size * sign;
}

/* The moments of LAMB. */
ZK_FN void zk_lamb_moments(float g, float *m, float *v, const zk_coef *c, int flags) {
  g = g * c->grad_mul;
  *m = c->b1 * *m + c->a1 * g;
  float square = c->b2 * zk_square_of(*v, flags) + c->a2 * (g * g);
  *v = flags & ZK_ROOTS ? zk_sqrtf(square) : square;
}

/* The direction of LAMB before its trust ratio, from moments that are up to date. */
ZK_FN float zk_lamb_direction(float p, float m, float v, const zk_coef *c, int flags) {
  float root;
  if (flags & ZK_EPS_INSIDE)
    root = zk_sqrtf(zk_square_of(v, flags) * c->root_mul + c->eps);
  else
    root = (flags & ZK_ROOTS ? v : zk_sqrtf(v)) * c->root_mul + c->eps;
  return c->step_size * m / root + c->decay * p;
}

/* lr times the trust ratio ||weight|| / ||direction||, bounded; 1 where either is zero. */
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

#endif
