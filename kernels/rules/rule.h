// All update rules. To add a rule, add a file to this folder and its name here.
#pragma once

#include <variant>

#include "kernels/rules/adagrad_math.h"
#include "kernels/rules/adamw_math.h"
#include "kernels/rules/external_math.h"
#include "kernels/rules/lion_math.h"
#include "kernels/rules/sgd_math.h"

namespace ballast::kernels {

using Rule = std::variant<AdamW, Adam, Sgd, SgdMomentum, Lion, Adagrad, External>;

}  // namespace ballast::kernels
