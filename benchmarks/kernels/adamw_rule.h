#pragma once

#include <cmath>
#include <cstddef>

#include "kernels/rules/rule.h"

namespace ballast::benchmarks {

struct AdamWSetting {
  double lr = 1e-3;
  double beta1 = 0.9;
  double beta2 = 0.999;
  double eps = 1e-8;
  double weight_decay = 0.01;
};

// The coefficients of step 1, 2, ...
inline kernels::AdamW adamw_rule(std::size_t step, const AdamWSetting& setting = {}) {
  const auto t = static_cast<double>(step);
  return {.decay = static_cast<float>(1 - setting.lr * setting.weight_decay),
          .one_minus_beta1 = static_cast<float>(1 - setting.beta1),
          .beta2 = static_cast<float>(setting.beta2),
          .one_minus_beta2 = static_cast<float>(1 - setting.beta2),
          .inverse_root_correction2 = static_cast<float>(1 / std::sqrt(1 - std::pow(setting.beta2, t))),
          .eps = static_cast<float>(setting.eps),
          .step_size = static_cast<float>(setting.lr / (1 - std::pow(setting.beta1, t)))};
}

}  // namespace ballast::benchmarks
