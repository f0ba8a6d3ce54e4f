// The division of a matrix by its norm, before it is orthogonalized.
#pragma once

#include "kernels/exact_sum_math.h"
#include "kernels/number_math.h"

namespace ballast::kernels {

struct NormBound {
  float factor = 1.0f;  // of the norm
  float least = 0.0f;   // what a smaller norm counts as
};

// The norm is rounded to fp32 once. That of a matrix with a NaN is NaN.
constexpr float divisor(const ExactSum& squares, const NormBound& bound) {
  const float norm = static_cast<float>(::sqrt(value(squares))) * bound.factor;
  return norm < bound.least ? bound.least : norm;
}

}  // namespace ballast::kernels
