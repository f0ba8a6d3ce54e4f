// The CPU walk that divides bf16 values by a norm, for any width of lanes S.
#pragma once

#include "kernels/normalize_math.h"
#include "kernels/number_walk.h"

namespace ballast::kernels {

template <class S>
void divide_walk(const std::uint16_t* from, float divisor, std::uint16_t* to, std::size_t count) {
  const typename S::F by(divisor);
  const std::size_t rest = count % S::width;
  for (std::size_t i = 0; i < count - rest; i += S::width) {
    S::store(to + i, divided(S::load(from + i), by));
  }
  if (rest > 0) {
    Padded<S, std::uint16_t> last(from + (count - rest), rest);
    S::store(last.at, divided(S::load(last.at), by));
    std::memcpy(to + (count - rest), last.at, rest * sizeof *to);
  }
}

}  // namespace ballast::kernels
