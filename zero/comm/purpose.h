// What a sum of integers is for. Ranks that sum for different purposes do not make the same call, whatever the lengths.
#pragma once

#include <cstdint>

namespace ballast {

enum class Purpose : std::uint8_t {
  values,     // of the caller
  agreement,  // on the decision of a step
  off_plan,   // that all ranks leave the program's order in the same way
};

}  // namespace ballast
