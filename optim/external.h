// Updates that the trainer makes itself in every step. The trainer keeps the state of its rule.
#pragma once

#include "optim/step.h"

namespace ballast::optim {

struct External {
  static constexpr StateNames state{};
  void check() const {}
  kernels::GroupStep at(const Step& step) const { return {kernels::External{}, step.gradient_factor}; }
};

}  // namespace ballast::optim
