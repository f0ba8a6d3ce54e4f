#include <ballast/error.h>

#include "optim/checks.h"
#include "optim/step.h"

namespace ballast::optim {

void Sgd::check() const {
  require_not_negative({"SGD", "lr", lr});
  require_not_negative({"SGD", "weight_decay", weight_decay});
}

kernels::GroupStep at(const Sgd& rule, const Step& step) {
  return {kernels::Sgd{.lr = static_cast<float>(rule.lr), .l2 = static_cast<float>(rule.weight_decay)},
          gradient_factor(step, rule.maximize)};
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

// Without momentum torch uses the gradient itself, undamped, and leaves the buffer alone: it is needed again if a momentum
// comes back.
kernels::GroupStep at(const SgdMomentum& rule, const Step& step) {
  if (rule.momentum == 0.0) {
    return at(Sgd{.lr = rule.lr, .weight_decay = rule.weight_decay, .maximize = rule.maximize}, step);
  }
  const double damped = step.number == 1 ? 0.0 : rule.dampening;
  return {kernels::SgdMomentum{.lr = static_cast<float>(rule.lr),
                               .l2 = static_cast<float>(rule.weight_decay),
                               .momentum = static_cast<float>(rule.momentum),
                               .one_minus_dampening = static_cast<float>(1.0 - damped),
                               .from_momentum = rule.nesterov ? static_cast<float>(rule.momentum) : 1.0f,
                               .from_gradient = rule.nesterov ? 1.0f : 0.0f},
          gradient_factor(step, rule.maximize)};
}

}  // namespace ballast::optim
