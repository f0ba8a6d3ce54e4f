// Faults of a process, as its machine would cause them: the kernel refuses calls, or a connection is cut.
#pragma once

#include <string_view>

namespace ballast::testing {

// `no ring` and `no shared maps` are no faults: drives are then used through system calls, and ranks through Gloo.
// Throws if the name is unknown, or the fault cannot be made here.
void plant(std::string_view fault);

}  // namespace ballast::testing
