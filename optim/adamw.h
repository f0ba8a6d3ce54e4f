// AdamW and Adam, with torch.optim's names, defaults and meaning.
#pragma once

#include "optim/step.h"

namespace ballast::optim {

struct AdamW {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 1e-2;  // decoupled: it shrinks the parameter, and the moments do not see it
  bool maximize = false;
  bool amsgrad = false;  // refused: see check()

  static constexpr StateNames state{.momentum = "exp_avg", .variance = "exp_avg_sq"};
  void check() const;
  kernels::GroupStep at(const Step& step) const;
};

struct Adam {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.0;  // L2: added to the gradient
  bool maximize = false;
  bool amsgrad = false;  // refused: see check()

  static constexpr StateNames state{.momentum = "exp_avg", .variance = "exp_avg_sq"};
  void check() const;
  kernels::GroupStep at(const Step& step) const;
};

}  // namespace ballast::optim
