// Where initial parameters come from.
#pragma once

#include <functional>

#include "kernels/runtime/view.h"
#include "zero/plan/layout.h"

namespace ballast {

// Writes a range of a tensor's initial parameters, in its unit's format. Called for this rank's shard only, except where
// parameters are kept full.
using ParameterSource = std::function<void(std::size_t unit, std::size_t tensor, Range range, const View& to)>;

}  // namespace ballast
