#include "optim/adagrad.h"

#include "optim/checks.h"

namespace ballast::optim {

void Adagrad::check() const {
  require_not_negative({"Adagrad", "lr", lr});
  require_not_negative({"Adagrad", "lr_decay", lr_decay});
  require_not_negative({"Adagrad", "weight_decay", weight_decay});
  require_not_negative({"Adagrad", "eps", eps});
}

kernels::GroupStep Adagrad::at(const Step& step) const {
  const double decayed = lr / (1.0 + static_cast<double>(step.number - 1) * lr_decay);
  return {kernels::Adagrad{.step_size = static_cast<float>(decayed),
                           .l2 = static_cast<float>(weight_decay),
                           .eps = static_cast<float>(eps)},
          gradient_factor(step, maximize)};
}

}  // namespace ballast::optim
