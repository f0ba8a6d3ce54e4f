// The purpose of a sum of integers. Ranks that add for different purposes make different calls, whatever the lengths.
#pragma once

#include <cstdint>

namespace ballast {

enum class Purpose : std::uint8_t {
  values,     // the caller's values
  agreement,  // the decision of a step
  off_plan,   // that all ranks take the same off-plan use
};

}  // namespace ballast
