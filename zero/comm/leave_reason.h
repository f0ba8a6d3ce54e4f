// The reason that a rank gives when it leaves its job.
#pragma once

#include <string>

namespace ballast {

struct LeaveReason {
  std::string words = "it closed its group";
  bool has_failed = false;  // true: all ranks fail; false: only ranks that need this one fail
};

}  // namespace ballast
