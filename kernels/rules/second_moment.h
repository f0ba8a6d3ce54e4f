// A running mean or sum of squared gradients.
#pragma once

#include "kernels/number_math.h"

namespace ballast::kernels {

// The rules divide by the root, and some formats store it, so it is computed once. The value is at least the
// smallest normal number, so it never becomes subnormal and its root is never zero.
template <class F>
struct SecondMoment {
  F value;
  F root;

  constexpr void set(F new_value) {
    using U = BitsOf<F>;
    value = as_float(max(bits(new_value), U(0x00800000u)));
    root = sqrt(value);
  }
};

}  // namespace ballast::kernels
