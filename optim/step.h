// A step of an optimizer: whether it is made, by which factor of all gradients, and the coefficients of a rule, ready for a
// backend.
#pragma once

#include <ballast/optim.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "kernels/matrix_shape.h"
#include "kernels/update.h"

namespace ballast::kernels {
struct NewtonSchulz;  // kernels/matrix_shape.h
}

namespace ballast::optim {

struct GradientFacts {
  double sum_of_squares = 0.0;  // squares of the gradients before unscaling, summed over ranks and micro-steps
  bool finite = true;
  double loss_scale = 1.0;   // the factor of the loss before the backward pass
  double averaged_over = 1;  // ranks x micro-steps whose gradients were summed
};

// Throws B1001 for a norm to which no gradients can be clipped.
void check_max_norm(double max_norm);

// The rule's name, and its options by name, as text: two rules with equal texts make equal updates.
std::vector<std::pair<std::string, std::string>> named_options(const Rule& rule);

// Decided before any parameter changes.
struct Decision {
  bool skip = false;
  double norm = 0.0;             // the norm of the true gradients: unscaled and averaged, before clipping
  float gradient_factor = 1.0f;  // unscales, averages and clips
};

// Clips as torch.nn.utils.clip_grad_norm_ does: by max_norm / (norm + 1e-6), never above 1.
Decision decide(const GradientFacts& facts, double max_norm = no_clipping);

struct Step {
  std::uint64_t number = 1;      // the number of the parameter's update, counted from 1
  float gradient_factor = 1.0f;  // see Decision
};

// Muon's are those of the first of its two updates.
kernels::GroupStep at(const Rule& rule, const Step& step);

// Muon needs whole matrices between its two updates of elements: at() makes a direction of each element from its momentum, whole
// matrices of directions are orthogonalized, and they move the parameter.
kernels::NewtonSchulz orthogonalization_of(const Muon& rule);
kernels::GroupStep step_of(const Muon& rule, const kernels::MatrixShape& shape);

double adjusted_lr(const Muon& rule, const kernels::MatrixShape& shape);

}  // namespace ballast::optim
