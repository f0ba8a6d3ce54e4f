// The formulas of accumulate and accumulate_stochastic for one element.
#pragma once

#include "kernels/number_format.h"
#include "kernels/state_math.h"

namespace ballast::kernels {

// The sum is in fp32 and rounded once. If `into` is bf16 or fp16, storing the sum rounds a second time, as in torch.
template <class F>
constexpr F accumulated(F into, F from, F scale) {
  return one_nan(fma(scale, from, into));
}

// The bf16 pattern of the sum, rounded up or down by 16 of the random bits. A sum that bf16 can represent stays as it is.
template <class F>
constexpr BitsOf<F> accumulated_stochastic(F into, F from, BitsOf<F> random) {
  using U = BitsOf<F>;
  return shift_right<16>(to_bf16_stochastic(accumulated(into, from, F(1.0f)), random & U(0xffffu)));
}

}  // namespace ballast::kernels
