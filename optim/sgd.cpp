#include "optim/sgd.h"

#include "kernels/runtime/error.h"
#include "optim/checks.h"

namespace ballast::optim {

void Sgd::check() const {
  require_not_negative({"SGD", "lr", lr});
  require_not_negative({"SGD", "weight_decay", weight_decay});
}

kernels::GroupStep Sgd::at(const Step& step) const {
  return {kernels::Sgd{.lr = static_cast<float>(lr), .l2 = static_cast<float>(weight_decay)},
          gradient_factor(step, maximize)};
}

void SgdMomentum::check() const {
  require_not_negative({"SGD", "lr", lr});
  require_not_negative({"SGD", "momentum", momentum});
  require_not_negative({"SGD", "weight_decay", weight_decay});
  require(!nesterov || (momentum > 0.0 && dampening == 0.0), Code::bad_argument, [] {
    return Problem{.what = "cannot use SGD with Nesterov momentum: it has no momentum, or dampening",
                   .needed = "momentum above 0 and dampening 0"};
  });
}

kernels::GroupStep SgdMomentum::at(const Step& step) const {
  const double damped = step.number == 1 ? 0.0 : dampening;
  return {kernels::SgdMomentum{.lr = static_cast<float>(lr),
                               .l2 = static_cast<float>(weight_decay),
                               .momentum = static_cast<float>(momentum),
                               .one_minus_dampening = static_cast<float>(1.0 - damped),
                               .from_momentum = nesterov ? static_cast<float>(momentum) : 1.0f,
                               .from_gradient = nesterov ? 1.0f : 0.0f},
          gradient_factor(step, maximize)};
}

}  // namespace ballast::optim
