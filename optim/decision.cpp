#include <ballast/error.h>

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "optim/step.h"

namespace ballast::optim {

Decision decide(const GradientFacts& facts, double max_norm) {
  require(max_norm > 0.0, Code::bad_argument, [&] {
    return Problem{.what = fmt::format("cannot clip gradients to a norm of {}", max_norm),
                   .needed = "a number above 0, or no clipping"};
  });
  require(facts.loss_scale > 0.0 && std::isfinite(facts.loss_scale) && facts.averaged_over >= 1.0, Code::bad_argument,
          [&] {
            return Problem{.what = fmt::format("cannot divide gradients by a loss scale of {} and average them over {}",
                                               facts.loss_scale, facts.averaged_over),
                           .needed = "a finite loss scale above 0, and at least one micro-step of one rank"};
          });
  const double divisor = facts.loss_scale * facts.averaged_over;
  const double norm = std::sqrt(facts.sum_of_squares) / divisor;
  if (!facts.finite || !std::isfinite(norm)) {
    return {.skip = true, .norm = norm, .gradient_factor = 0.0f};
  }
  const double clip = std::isfinite(max_norm) ? std::min(1.0, max_norm / (norm + 1e-6)) : 1.0;
  return {.skip = false, .norm = norm, .gradient_factor = static_cast<float>(clip / divisor)};
}

}  // namespace ballast::optim
