// The real addresses of emulated device memory.
#pragma once

#include <ballast/view.h>

namespace ballast::testing {

// Returns the address at which the bytes of device memory can be read and written. A host address is returned as it is.
void* reachable(const void* address);

inline View reachable(const View& view) {
  return {static_cast<std::byte*>(reachable(view.data())), view.count(), view.dtype()};
}
inline ConstView reachable(const ConstView& view) {
  return {static_cast<const std::byte*>(reachable(view.data())), view.count(), view.dtype()};
}

}  // namespace ballast::testing
