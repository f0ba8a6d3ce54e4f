#include "zero/comm/patience.h"

#include <fmt/format.h>

#include "kernels/runtime/error.h"

namespace ballast {

void Patience::give_up(std::string_view missing) const {
  const std::string what =
      fmt::format("{} did not come within {} s", missing, std::chrono::duration<double>(timeout_).count());
  error_.set(what);
  fail(Code::peer_late, {.what = what});
}

}  // namespace ballast
