// Lion (Chen et al., 2023): the coefficients of one step, and one element's update.
#pragma once

#include "kernels/rules/running_mean.h"
#include "kernels/rules/second_moment.h"

namespace ballast::kernels {

struct Lion {
  static constexpr bool has_momentum = true;
  static constexpr bool has_variance = false;

  float lr;
  float decay;       // 1 - lr * weight_decay
  RunningMean mean;  // whose sign is the direction
  RunningMean kept_mean;

  template <class F>
  constexpr void operator()(F& p, F& m, SecondMoment<F>&, F g) const {
    const F direction = mean(m, g);
    const F zero(0.0f);
    const F sign = select(below(zero, direction), F(1.0f), select(below(direction, zero), F(-1.0f), zero));
    p = fma(F(-lr), sign, p * F(decay));
    m = kept_mean(m, g);
  }
};

}  // namespace ballast::kernels
