// Decides a step before any parameter changes: skip it, or update with one factor on all gradients.
#pragma once

#include <ballast/optim.h>

namespace ballast::optim {

struct GradientFacts {
  double sum_of_squares = 0.0;  // of the gradients before unscaling: summed over ranks and micro-steps
  bool finite = true;
  double loss_scale = 1.0;   // the factor of the loss before the backward pass
  double averaged_over = 1;  // ranks x micro-steps whose gradients were summed
};

struct Decision {
  bool skip = false;
  double norm = 0.0;             // of the true gradients: unscaled and averaged, before clipping
  float gradient_factor = 1.0f;  // unscales, averages and clips
};

// Clips as torch.nn.utils.clip_grad_norm_ does: by max_norm / (norm + 1e-6), never above 1.
Decision decide(const GradientFacts& facts, double max_norm = no_clipping);

}  // namespace ballast::optim
