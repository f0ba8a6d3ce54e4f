// A running mean or sum of squared gradients.
#pragma once

#include "kernels/number_math.h"

namespace ballast::kernels {

// The rules divide by the root, and format compact stores it: it is taken once.
template <class F>
struct SecondMoment {
  F value;
  F root;

  constexpr void set(F new_value) {
    value = new_value;
    root = sqrt(new_value);
  }
};

}  // namespace ballast::kernels
