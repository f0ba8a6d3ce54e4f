// The CPU walk that divides bf16 values by a norm, for any width of lanes S.
#pragma once

#include "kernels/number_walk.h"

namespace ballast::kernels {

template <class S>
void divide_walk(const std::uint16_t* from, float divisor, std::uint16_t* to, std::size_t count) {
  const typename S::F by(divisor);
  const auto divide = [by](const std::uint16_t* source, std::uint16_t* target) {
    store_number<S, Bf16Format>(target, load_number<S, Bf16Format>(source) / by);
  };
  const std::size_t rest = count % S::width;
  for (std::size_t i = 0; i < count - rest; i += S::width) {
    divide(from + i, to + i);
  }
  if (rest > 0) {
    Padded<S, std::uint16_t> last(from + (count - rest), rest);
    divide(last.at, last.at);
    std::memcpy(to + (count - rest), last.at, rest * sizeof *to);
  }
}

}  // namespace ballast::kernels
