#include <cmath>

#include "optim/checks.h"
#include "optim/step.h"

namespace ballast::optim {
namespace {

template <class Options>
void check_adam(std::string_view rule, const Options& options) {
  require_not_negative({rule, "lr", options.lr});
  require_below_one({rule, "beta1", options.beta1});
  require_below_one({rule, "beta2", options.beta2});
  require_not_negative({rule, "eps", options.eps});
  require_not_negative({rule, "weight_decay", options.weight_decay});
  refuse_amsgrad(rule, options.amsgrad);
}

// The bias corrections are computed in double, once a step.
template <class Options>
kernels::AdamW coefficients(const Options& options, std::uint64_t step, double decay) {
  const double t = static_cast<double>(step);
  const double correction1 = 1.0 - std::pow(options.beta1, t);
  const double correction2 = 1.0 - std::pow(options.beta2, t);
  return {.decay = static_cast<float>(decay),
          .mean = kernels::RunningMean::of(options.beta1),
          .beta2 = static_cast<float>(options.beta2),
          .one_minus_beta2 = static_cast<float>(1.0 - options.beta2),
          .inverse_root_correction2 = static_cast<float>(1.0 / std::sqrt(correction2)),
          .eps = static_cast<float>(options.eps),
          .step_size = static_cast<float>(options.lr / correction1)};
}

}  // namespace

void AdamW::check() const { check_adam("AdamW", *this); }

kernels::GroupStep at(const AdamW& rule, const Step& step) {
  return {coefficients(rule, step.number, 1.0 - rule.lr * rule.weight_decay), gradient_factor(step, rule.maximize)};
}

void Adam::check() const { check_adam("Adam", *this); }

kernels::GroupStep at(const Adam& rule, const Step& step) {
  return {
      kernels::Adam{.l2 = static_cast<float>(rule.weight_decay), .without_decay = coefficients(rule, step.number, 1.0)},
      gradient_factor(step, rule.maximize)};
}

}  // namespace ballast::optim
