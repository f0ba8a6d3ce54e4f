// Lion (Chen et al., 2023): the sign of an interpolated momentum, with decoupled weight decay.
#pragma once

#include "optim/step.h"

namespace ballast::optim {

struct Lion {
  double lr = 1e-4;
  double beta1 = 0.9;
  double beta2 = 0.99;
  double weight_decay = 0.0;
  bool maximize = false;

  static constexpr StateNames state{.momentum = "exp_avg"};
  void check() const;
  kernels::GroupStep at(const Step& step) const;
};

}  // namespace ballast::optim
