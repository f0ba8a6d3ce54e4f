// The formulas of accumulate and begin_sum for one element.
#pragma once

#include "kernels/number_format.h"

namespace ballast::kernels {

// The sum is in fp32 and rounded once. If `into` is bf16 or fp16, storing the sum rounds a second time, as in torch.
template <class F>
constexpr F accumulated(F into, F from, F scale) {
  return one_nan(fma(scale, from, into));
}

// The result of accumulated() on 0.
template <class F>
constexpr F begun(F from) {
  return accumulated(F(0.0f), from, F(1.0f));
}

}  // namespace ballast::kernels
