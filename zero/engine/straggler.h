// Which rank the others wait for.
#pragma once

#include <cstddef>
#include <string>

#include "zero/engine/mesh.h"

namespace ballast {

struct Straggler {
  std::size_t slowest = 0;  // a rank
  double seconds = 0.0;     // that its trainer took, without its waits
  double median = 0.0;      // of all ranks
  double least = 0.0;

  bool operator==(const Straggler&) const = default;
};

Straggler find_straggler(Mesh& mesh, double own_seconds);  // all ranks call together and get the same

std::string to_text(const Straggler& straggler);

}  // namespace ballast
