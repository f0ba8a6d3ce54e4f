#include "optim/lion.h"

#include "optim/checks.h"

namespace ballast::optim {

void Lion::check() const {
  require_not_negative({"Lion", "lr", lr});
  require_below_one({"Lion", "beta1", beta1});
  require_below_one({"Lion", "beta2", beta2});
  require_not_negative({"Lion", "weight_decay", weight_decay});
}

kernels::GroupStep Lion::at(const Step& step) const {
  return {kernels::Lion{.lr = static_cast<float>(lr),
                        .decay = static_cast<float>(1.0 - lr * weight_decay),
                        .one_minus_beta1 = static_cast<float>(1.0 - beta1),
                        .one_minus_beta2 = static_cast<float>(1.0 - beta2)},
          gradient_factor(step, maximize)};
}

}  // namespace ballast::optim
