#include "optim/checks.h"
#include "optim/step.h"

namespace ballast::optim {

void Lion::check() const {
  require_not_negative({"Lion", "lr", lr});
  require_below_one({"Lion", "beta1", beta1});
  require_below_one({"Lion", "beta2", beta2});
  require_not_negative({"Lion", "weight_decay", weight_decay});
}

kernels::GroupStep at(const Lion& rule, const Step& step) {
  return {kernels::Lion{.lr = static_cast<float>(rule.lr),
                        .decay = static_cast<float>(1.0 - rule.lr * rule.weight_decay),
                        .mean = kernels::RunningMean::of(rule.beta1),
                        .kept_mean = kernels::RunningMean::of(rule.beta2)},
          gradient_factor(step, rule.maximize)};
}

}  // namespace ballast::optim
