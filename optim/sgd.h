// Stochastic gradient descent, with torch.optim.SGD's names, defaults and meaning.
#pragma once

#include "optim/step.h"

namespace ballast::optim {

// Without momentum there is no state at all.
struct Sgd {
  double lr = 1e-3;
  double weight_decay = 0.0;  // L2: added to the gradient
  bool maximize = false;

  static constexpr StateNames state{};
  void check() const;
  kernels::GroupStep at(const Step& step) const;
};

struct SgdMomentum {
  double lr = 1e-3;
  double momentum = 0.9;
  double dampening = 0.0;  // ignored at a parameter's first update, as in torch
  double weight_decay = 0.0;
  bool nesterov = false;  // needs a momentum and no dampening
  bool maximize = false;

  static constexpr StateNames state{.momentum = "momentum_buffer"};
  void check() const;
  kernels::GroupStep at(const Step& step) const;
};

}  // namespace ballast::optim
