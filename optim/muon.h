// The coefficients of Muon's step, which needs whole matrices between its two updates of elements.
#pragma once

#include <ballast/optim.h>

#include "kernels/orthogonalize.h"
#include "kernels/update.h"
#include "optim/step.h"

namespace ballast::optim {

// A step in its order: at() makes a direction of each element from its momentum, whole matrices of directions are orthogonalized,
// and they move the parameter.
kernels::NewtonSchulz orthogonalization_of(const Muon& rule);
kernels::GroupStep step_of(const Muon& rule, const kernels::MatrixShape& shape);

double adjusted_lr(const Muon& rule, const kernels::MatrixShape& shape);

}  // namespace ballast::optim
