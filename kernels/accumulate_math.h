// What accumulate does to one element.
#pragma once

#include "kernels/number_format.h"

namespace ballast::kernels {

// In fp32, rounded once; where `into` is bf16 or fp16, storing it there rounds a second time, as torch's sums do.
template <class F>
constexpr F accumulated(F into, F from, F scale) {
  return one_nan(fma(scale, from, into));
}

}  // namespace ballast::kernels
