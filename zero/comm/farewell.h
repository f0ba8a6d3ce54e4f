// What a rank says when it leaves.
#pragma once

#include <string>

namespace ballast {

struct Farewell {
  std::string words = "it closed its group";
  bool has_failed = false;  // then all ranks fail with it; else those that wait for this one, or need it later
};

}  // namespace ballast
