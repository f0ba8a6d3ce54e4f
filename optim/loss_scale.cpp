#include "optim/loss_scale.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "kernels/runtime/error.h"

namespace ballast::optim {
namespace {

// The largest fp32 power of two that losses can still be multiplied by without care.
constexpr double largest_scale = 0x1p100;

void require_scale(double scale, double smallest) {
  require(smallest > 0.0 && scale >= smallest && scale <= largest_scale, Code::bad_argument, [&] {
    return Problem{.what = fmt::format("a loss scale of {} was given, with {} as the smallest", scale, smallest),
                   .needed = fmt::format("a smallest one above 0, and one between it and {}", largest_scale)};
  });
}

}  // namespace

LossScale::LossScale(const LossScaleOptions& options) : options_(options), scale_(options.initial) {
  require_scale(options.initial, options.smallest);
  require(options.growth >= 1.0 && options.backoff > 0.0 && options.backoff <= 1.0 && options.growth_interval > 0,
          Code::bad_argument, [&] {
            return Problem{.what = fmt::format("loss scaling was given growth = {}, backoff = {}, growth_interval = {}",
                                               options.growth, options.backoff, options.growth_interval),
                           .needed = "growth of at least 1, backoff above 0 and at most 1, an interval of at least 1"};
          });
}

void LossScale::after_step(bool finite) {
  if (!finite) {
    scale_ = std::max(scale_ * options_.backoff, options_.smallest);
    finite_steps_ = 0;
  } else if (++finite_steps_ >= options_.growth_interval) {
    scale_ = std::min(scale_ * options_.growth, largest_scale);
    finite_steps_ = 0;
  }
}

void LossScale::restore(double scale, std::uint64_t finite_steps) {
  require_scale(scale, options_.smallest);
  scale_ = scale;
  finite_steps_ = finite_steps;
}

}  // namespace ballast::optim
