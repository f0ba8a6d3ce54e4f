// A running mean of gradients: the first moment of a rule.
#pragma once

#include "kernels/number_math.h"

namespace ballast::kernels {

// The difference of the two loses what is small beside the larger one. So it is multiplied by the smaller weight, and added to
// the value whose weight is larger, as in torch.lerp(): without decay the mean is the gradient, whatever it was before.
struct RunningMean {
  float decay;            // the weight of the former mean
  float one_minus_decay;  // the weight of the gradient

  static constexpr RunningMean of(double decay) {
    return {.decay = static_cast<float>(decay), .one_minus_decay = static_cast<float>(1.0 - decay)};
  }

  template <class F>
  constexpr F operator()(F mean, F g) const {
    return decay < 0.5f ? fma(F(decay), mean - g, g) : fma(F(one_minus_decay), g - mean, mean);
  }
};

}  // namespace ballast::kernels
