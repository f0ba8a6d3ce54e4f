// AdamW and Adam: the coefficients of one step, and one element's update.
#pragma once

#include "kernels/rules/running_mean.h"
#include "kernels/rules/second_moment.h"

namespace ballast::kernels {

struct AdamW {
  static constexpr bool has_momentum = true;
  static constexpr bool has_variance = true;

  float decay;  // 1 - lr * weight_decay
  RunningMean mean;
  float beta2;
  float one_minus_beta2;
  float inverse_root_correction2;  // 1 / sqrt(1 - beta2^step)
  float eps;
  float step_size;  // lr / (1 - beta1^step)

  template <class F>
  constexpr void operator()(F& p, F& m, SecondMoment<F>& v, F g) const {
    m = mean(m, g);
    v.set(fma(F(one_minus_beta2) * g, g, F(beta2) * v.value));
    const F denominator = fma(v.root, F(inverse_root_correction2), F(eps));
    p = fma(F(-step_size), m / denominator, p * F(decay));
  }
};

// Weight decay as part of the gradient (L2), as in torch.optim.Adam.
struct Adam {
  static constexpr bool has_momentum = true;
  static constexpr bool has_variance = true;

  float l2;
  AdamW without_decay;  // its `decay` is 1

  template <class F>
  constexpr void operator()(F& p, F& m, SecondMoment<F>& v, F g) const {
    without_decay(p, m, v, fma(F(l2), p, g));
  }
};

}  // namespace ballast::kernels
