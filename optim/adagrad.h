// Adagrad, with torch.optim.Adagrad's names, defaults and meaning.
#pragma once

#include "optim/step.h"

namespace ballast::optim {

struct Adagrad {
  double lr = 1e-2;
  double lr_decay = 0.0;
  double weight_decay = 0.0;  // L2: added to the gradient
  double eps = 1e-10;
  bool maximize = false;

  static constexpr StateNames state{.variance = "sum"};
  void check() const;
  kernels::GroupStep at(const Step& step) const;
};

}  // namespace ballast::optim
