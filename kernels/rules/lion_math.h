// Lion (Chen et al., 2023): the coefficients of one step, and one element's update.
#pragma once

#include "kernels/rules/second_moment.h"

namespace ballast::kernels {

struct Lion {
  static constexpr bool has_momentum = true;
  static constexpr bool has_variance = false;

  float lr;
  float decay;  // 1 - lr * weight_decay
  float one_minus_beta1;
  float one_minus_beta2;

  template <class F>
  constexpr void operator()(F& p, F& m, SecondMoment<F>&, F g) const {
    const F direction = fma(F(one_minus_beta1), g - m, m);
    const F zero(0.0f);
    const F sign = select(below(zero, direction), F(1.0f), select(below(direction, zero), F(-1.0f), zero));
    p = fma(F(-lr), sign, p * F(decay));
    m = fma(F(one_minus_beta2), g - m, m);
  }
};

}  // namespace ballast::kernels
