#include "zero/placement.h"

#include <fmt/format.h>

#include "kernels/runtime/error.h"

namespace ballast {

Placement placement_of_stage(int stage, std::size_t ranks, Tier state) {
  require(stage >= 0 && stage <= 3, Code::bad_argument,
          [&] { return Problem{.what = fmt::format("stage {} was asked for", stage), .needed = "0, 1, 2 or 3"}; });
  return {.shards = stage == 0 ? 1 : ranks,
          .whole_parameters = stage < 3 || ranks == 1,
          .whole_gradients = stage < 2,
          .state = state};
}

}  // namespace ballast
