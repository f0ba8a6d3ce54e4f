#include <ballast/error.h>
#include <ballast/state_format.h>

#include <fmt/format.h>

#include "optim/step.h"

namespace ballast::optim {

void External::check() const {
  require(state.momentum.empty() && state.variance.empty(), Code::bad_argument,
          [] { return Problem{.what = "cannot keep moments for the rule External", .needed = "own values alone"}; });
  require(state.own_values <= max_own_values, Code::unsupported, [&] {
    return Problem{.what = fmt::format("cannot keep {} values of each element for the rule External", state.own_values),
                   .needed = fmt::format("at most {}", max_own_values)};
  });
}

kernels::GroupStep at(const External&, const Step& step) { return {kernels::External{}, step.gradient_factor}; }

kernels::GroupStep at(const Rule& rule, const Step& step) {
  return std::visit([&](const auto& r) { return at(r, step); }, rule);
}

}  // namespace ballast::optim
