// Stochastic gradient descent, without and with momentum: the coefficients of one step, and one element's update.
#pragma once

#include "kernels/rules/second_moment.h"

namespace ballast::kernels {

struct Sgd {
  static constexpr bool has_momentum = false;
  static constexpr bool has_variance = false;

  float lr;
  float l2;

  template <class F>
  constexpr void operator()(F& p, F&, SecondMoment<F>&, F g) const {
    p = fma(F(-lr), fma(F(l2), p, g), p);
  }
};

struct SgdMomentum {
  static constexpr bool has_momentum = true;
  static constexpr bool has_variance = false;

  float lr;
  float l2;
  float momentum;
  float one_minus_dampening;  // 1 at a parameter's first step, as in torch
  float from_momentum;  // the step is from_momentum * m + from_gradient * g: (1, 0), or (momentum, 1) for Nesterov
  float from_gradient;

  template <class F>
  constexpr void operator()(F& p, F& m, SecondMoment<F>&, F g) const {
    g = fma(F(l2), p, g);
    m = fma(F(momentum), m, F(one_minus_dampening) * g);
    p = fma(F(-lr), fma(F(from_momentum), m, F(from_gradient) * g), p);
  }
};

}  // namespace ballast::kernels
