// All update rules. To add a rule, add a file to this folder and its name here.
#pragma once

#include <variant>

#include "kernels/rules/adagrad_math.h"
#include "kernels/rules/adamw_math.h"
#include "kernels/rules/external_math.h"
#include "kernels/rules/lion_math.h"
#include "kernels/rules/muon_math.h"
#include "kernels/rules/sgd_math.h"

namespace ballast::kernels {

using Rule = std::variant<AdamW, Adam, Sgd, SgdMomentum, Lion, Adagrad, External, MuonMomentum, MuonStep>;

// A rule that has no master: its first argument is a direction, which walks write to the tile's parameter, rounded to nearest,
// ties to even. It starts at zero.
template <class Rule>
concept MakesDirection = requires {
  requires Rule::makes_direction;
};

}  // namespace ballast::kernels
