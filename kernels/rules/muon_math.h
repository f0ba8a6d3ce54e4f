// Muon (Jordan et al., 2024): the coefficients of one step, and the two updates of an element: the first makes a direction,
// whose matrices are then orthogonalized (orthogonalize.h), and the second takes the step.
#pragma once

#include "kernels/rules/running_mean.h"
#include "kernels/rules/second_moment.h"

namespace ballast::kernels {

// The tile's parameter is the direction, in bf16, and it has no master.
struct MuonMomentum {
  static constexpr bool has_momentum = true;
  static constexpr bool has_variance = false;
  static constexpr bool makes_direction = true;

  RunningMean mean;
  float from_momentum;  // the direction is from_momentum * m + from_gradient * g: (1, 0), or (momentum, 1 - momentum)
  float from_gradient;  // for Nesterov

  template <class F>
  constexpr void operator()(F& direction, F& m, SecondMoment<F>&, F g) const {
    m = mean(m, g);
    direction = fma(F(from_momentum), m, F(from_gradient) * g);
  }
};

// The tile's gradient is the orthogonalized direction.
struct MuonStep {
  static constexpr bool has_momentum = false;
  static constexpr bool has_variance = false;

  float decay;      // 1 - lr * weight_decay
  float step_size;  // lr, adjusted to the shape of the matrix

  template <class F>
  constexpr void operator()(F& p, F&, SecondMoment<F>&, F direction) const {
    p = fma(F(-step_size), direction, p * F(decay));
  }
};

}  // namespace ballast::kernels
