// The checks that the rules share. Each names the rule, the option and its value; B1001, for amsgrad B1005.
#pragma once

#include <string_view>

namespace ballast::optim {

struct Option {
  std::string_view rule;
  std::string_view name;
  double value;
};

void require_not_negative(Option option);  // and finite
void require_below_one(Option option);     // in [0, 1)
void refuse_amsgrad(std::string_view rule, bool amsgrad);

}  // namespace ballast::optim
