// Adagrad: the coefficients of one step, and one element's update. The variance stores the sum of squares.
#pragma once

#include "kernels/rules/second_moment.h"

namespace ballast::kernels {

struct Adagrad {
  static constexpr bool has_momentum = false;
  static constexpr bool has_variance = true;

  float step_size;  // lr / (1 + (step - 1) * lr_decay)
  float l2;
  float eps;

  template <class F>
  constexpr void operator()(F& p, F&, SecondMoment<F>& v, F g) const {
    g = fma(F(l2), p, g);
    v.set(fma(g, g, v.value));
    p = fma(F(-step_size), g / (v.root + F(eps)), p);
  }
};

}  // namespace ballast::kernels
