// The step that a rule computes its coefficients for. Rules own no memory and do no I/O.
#pragma once

#include <cstdint>
#include <string_view>

#include "kernels/update.h"

namespace ballast::optim {

// The names under which torch keeps a rule's state; empty where a rule has none.
struct StateNames {
  std::string_view momentum{};
  std::string_view variance{};
};

struct Step {
  std::uint64_t number = 1;      // of the parameter's update, counted from 1
  float gradient_factor = 1.0f;  // see decision.h
};

constexpr float gradient_factor(const Step& step, bool maximize) {
  return maximize ? -step.gradient_factor : step.gradient_factor;
}

}  // namespace ballast::optim
