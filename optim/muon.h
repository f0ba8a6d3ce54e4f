// Muon (Jordan et al., 2024): momentum whose matrices are orthogonalized, as torch.optim.Muon does. It is not among the rules of
// <ballast/optim.h> yet: a step needs whole matrices between its two updates of elements.
#pragma once

#include <ballast/optim.h>

#include <array>
#include <cstdint>

#include "kernels/orthogonalize.h"
#include "kernels/update.h"
#include "optim/step.h"

namespace ballast::optim {

// The learning rate of a matrix: times sqrt(max(1, rows / columns)), or times 0.2 sqrt(max(rows, columns)), which gives updates
// the size of AdamW's.
enum class AdjustLr : std::uint8_t { original, match_rms_adamw };

// How the singular values are brought to 1: by the same step each time, which leaves them between 0.7 and 1.2, or by the steps
// of Polar Express (Amsel et al., 2025), each the best for what the one before left.
enum class Orthogonalization : std::uint8_t { newton_schulz, polar_express };

// The names, defaults and meaning of torch.optim.Muon. Polar Express is not in torch.
struct Muon {
  double lr = 1e-3;
  double momentum = 0.95;
  bool nesterov = true;
  double weight_decay = 0.1;                                       // decoupled, and not adjusted to the shape
  std::array<double, 3> ns_coefficients{3.4445, -4.7750, 2.0315};  // not for Polar Express, which has its own
  int ns_steps = 5;
  double eps = 1e-7;  // a smaller norm of a matrix counts as this
  AdjustLr adjust_lr_fn = AdjustLr::original;
  Orthogonalization orthogonalization = Orthogonalization::newton_schulz;

  static constexpr StateNames state{.momentum = "momentum_buffer"};
  void check() const;
};

// A step in its order: the momentum makes a direction of each element, whole matrices of directions are orthogonalized, and they
// move the parameter.
kernels::GroupStep momentum_at(const Muon& rule, const Step& step);
kernels::NewtonSchulz orthogonalization_of(const Muon& rule);
kernels::GroupStep step_of(const Muon& rule, const kernels::MatrixShape& shape);

double adjusted_lr(const Muon& rule, const kernels::MatrixShape& shape);

}  // namespace ballast::optim
