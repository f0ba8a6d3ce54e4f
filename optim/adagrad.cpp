#include "optim/checks.h"
#include "optim/step.h"

namespace ballast::optim {

void Adagrad::check() const {
  require_not_negative({"Adagrad", "lr", lr});
  require_not_negative({"Adagrad", "lr_decay", lr_decay});
  require_not_negative({"Adagrad", "weight_decay", weight_decay});
  require_not_negative({"Adagrad", "eps", eps});
}

kernels::GroupStep at(const Adagrad& rule, const Step& step) {
  const double decayed = rule.lr / (1.0 + static_cast<double>(step.number - 1) * rule.lr_decay);
  return {kernels::Adagrad{.step_size = static_cast<float>(decayed),
                           .l2 = static_cast<float>(rule.weight_decay),
                           .eps = static_cast<float>(rule.eps)},
          gradient_factor(step, rule.maximize)};
}

}  // namespace ballast::optim
