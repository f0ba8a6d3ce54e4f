#include "optim/checks.h"

#include <ballast/error.h>

#include <fmt/format.h>

#include <cmath>

namespace ballast::optim {
namespace {

// The callers write their comparisons so that NaN fails as well.
void require_range(bool holds, Option option, std::string_view range) {
  require(holds, Code::bad_argument, [&] {
    return Problem{.what = fmt::format("cannot use {} with {} = {}", option.rule, option.name, option.value),
                   .needed = std::string(range),
                   .remedy = fmt::format("set {} to {}", option.name, range)};
  });
}

}  // namespace

void require_not_negative(Option option) {
  require_range(option.value >= 0.0 && std::isfinite(option.value), option, "a finite number of at least 0");
}

void require_below_one(Option option) {
  require_range(option.value >= 0.0 && option.value < 1.0, option, "at least 0 and less than 1");
}

void refuse_amsgrad(std::string_view rule, bool amsgrad) {
  require(!amsgrad, Code::unsupported, [&] {
    return Problem{.what = fmt::format("cannot use {} with amsgrad", rule),
                   .needed = "a third moment for every element, which no state format stores",
                   .remedy = "leave amsgrad off: its maximum grows the state by a third, and it rarely helps"};
  });
}

}  // namespace ballast::optim
